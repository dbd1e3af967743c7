"""Every setting of a run in one TOML file: what the tables and keys are, what may stand in them, and what is said otherwise.

The tables are dataclasses, so that a default stands in one place. TOML has no null: an optional setting is switched off by
"none". A kernel, mean or emission of one's own is named as `module:name`.
"""

import dataclasses
import importlib
import importlib.util
import json
import os
import sys
import tomllib
import types
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import equinox as eqx
import jax.random as jr
import numpy as np

from gpssm._types import PRNGKey
from gpssm.data import Dataset, Scaling
from gpssm.emissions import AbstractEmission
from gpssm.fit import INITIALISATION, FitSettings, free_run
from gpssm.initialise import StartSettings, initialise
from gpssm.kernels import AbstractKernel
from gpssm.means import AbstractMean
from gpssm.model import GPSSM
from gpssm.params import unwrap
from gpssm.posteriors import AbstractPosterior
from gpssm.select import SelectSettings
from gpssm.tables import nearest

OWN_PARTS = ("kernel", "mean", "emission", "builder")  # of [start], that may be `module:name`
ONLY_OWN = ("emission", "builder")  # which have no short names; `builder` makes model and posterior altogether


@dataclass(frozen=True)
class DataSettings:
    """Which columns of which table, and which part of it trains."""

    source: str = ""  # a file, or the name of a benchmark
    outputs: tuple[str, ...] = ()
    controls: tuple[str, ...] = ()
    sequence: str | None = None
    time: str | None = None
    output_units: tuple[str, ...] = ()
    control_units: tuple[str, ...] = ()
    sampling_time: float | None = None
    time_unit: str = ""
    separator: str | None = None  # of the cells of a text file; by itself a comma, in .tsv a tab
    decimal: str = "."
    encoding: str = "utf-8-sig"
    train_fraction: float = 0.75

    def __post_init__(self) -> None:
        if not 0 < self.train_fraction <= 1:
            raise ValueError(
                f"`train_fraction` must lie above 0 and be at most 1 (0.75: the last quarter is held out), "
                f"but got {self.train_fraction}."
            )


@dataclass(frozen=True)
class ForecastSettings:
    """How the model is asked and scored."""

    horizon: int = 30  # cut to what the held-out part has room for
    stride: int | None = None  # rows between origins; by itself, about 40 windows
    num_samples: int = 200
    quantiles: tuple[float, ...] = (0.05, 0.5, 0.95)

    def __post_init__(self) -> None:
        for name in ("horizon", "num_samples"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, but got {getattr(self, name)}.")
        if self.stride is not None and self.stride < 1:
            raise ValueError(f"`stride` must be at least 1, but got {self.stride}.")
        check_quantiles(self.quantiles)


@dataclass(frozen=True)
class SaturationSettings:
    """How many inducing points are enough, where they are not numbered: as many as the bound gains from."""

    counts: tuple[int, ...] = ()  # tried in turn, as in [10, 20, 40, 80]; none: `num_inducing` of [start] as it is
    tolerance: float = 2e-3  # nats an observation that the next count must gain

    def __post_init__(self) -> None:
        if list(self.counts) != sorted(set(self.counts)) or min(self.counts, default=1) < 1:
            raise ValueError(f"`counts` must be whole numbers from 1 that rise, as in [10, 20, 40], but got {list(self.counts)}.")
        if not self.tolerance >= 0:
            raise ValueError(f"`tolerance` must not be negative, but got {self.tolerance}.")


@dataclass(frozen=True)
class SelectionSettings:
    """What `gpssm select` tries, and what it goes by: every combination of the lists, the rest as in [start].

    Without any list it tries the state dimension that subspace identification finds and one more, with a linear mean and without.
    Forecasts to be scored are as in [forecast].
    """

    by: Literal["nlpd", "rmse", "crps", "bound"] = "nlpd"
    validation_fraction: float = 0.25  # of every training sequence that a block holds out
    num_blocks: int = 2  # held out one after the other, from the end backwards
    state_dim: tuple[int, ...] = ()
    posterior: tuple[str, ...] = ()
    num_inducing: tuple[int, ...] = ()
    kernel: tuple[str, ...] = ()
    mean: tuple[str, ...] = ()
    nonlinear_scale: tuple[float, ...] = ()
    relative_lengthscale: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        SelectSettings(by=self.by, validation_fraction=self.validation_fraction, num_blocks=self.num_blocks)
        for name, values in self.choices().items():
            if len(set(values)) < len(values):
                raise ValueError(f"`{name}` names a choice twice: {list(values)}. Give each once.")
            for value in values:
                StartSettings(**{name: value})

    def choices(self) -> dict[str, tuple[Any, ...]]:
        """The lists that hold anything."""
        names = [f.name for f in fields(self)][3:]
        return {name: getattr(self, name) for name in names if getattr(self, name)}


@dataclass(frozen=True)
class Config:
    """All that a run needs besides the numbers in its data."""

    seed: int = 0
    data: DataSettings = field(default_factory=DataSettings)
    start: StartSettings = field(default_factory=StartSettings)
    fit: FitSettings = field(default_factory=FitSettings)
    forecast: ForecastSettings = field(default_factory=ForecastSettings)
    saturation: SaturationSettings = field(default_factory=SaturationSettings)
    select: SelectionSettings = field(default_factory=SelectionSettings)
    own_parts: Mapping[str, str] = field(default_factory=dict)  # kernel, mean, emission of [start] by `module:name`

    def __post_init__(self) -> None:
        if self.fit.by_pieces and self.start.cut_every is None and "builder" not in self.own_parts:
            raise ValueError("`by_pieces` of [fit] trains on pieces: say how long they are by `cut_every` of [start].")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"`seed` must be a whole number from 0 to {2**32 - 1}, but got {self.seed}.")


def check_quantiles(quantiles: tuple[float, ...]) -> None:
    """Raise unless these are numbers between 0 and 1, each larger than the one before."""
    if not quantiles or any(not 0 < q < 1 for q in quantiles) or list(quantiles) != sorted(set(quantiles)):
        listed = ", ".join(f"{q:g}" for q in quantiles)
        raise ValueError(f"Quantiles must lie between 0 and 1 and rise, as in 0.05,0.5,0.95, but got {listed or 'none'}.")


def read(path: str | os.PathLike[str], base: Config | None = None) -> Config:
    """The configuration in a TOML file; what it leaves out is as in `base`, or else has its default."""
    file = Path(path)
    if file.is_dir():
        raise ValueError(f"{path}: expected a TOML file, came a folder. Name one file in it.")
    if not file.is_file():
        siblings = sorted(entry.name for entry in file.parent.iterdir()) if file.parent.is_dir() else []
        raise FileNotFoundError(f"There is no file '{path}'{nearest(file.name, [s for s in siblings if s.endswith('.toml')])}.")
    try:
        return parse(file.read_text(encoding="utf-8"), base)
    except UnicodeDecodeError:
        raise ValueError(f"{path}: the text is not UTF-8, as TOML has to be. Save it as UTF-8.") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def parse(text: str, base: Config | None = None) -> Config:
    """The configuration in a TOML text, over `base`."""
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f'this is not TOML: {error}. Text stands in quotes, as in posterior = "vcdt".') from None
    return override(base or Config(), tables)


def override(config: Config, changes: Mapping[str, Any]) -> Config:
    """`config` with the settings of nested tables such as {"seed": 1, "fit": {"num_steps": 100}} in place of its own."""
    own_parts = dict(config.own_parts)
    values: dict[str, Any] = {}
    known = [f.name for f in fields(Config) if f.name != "own_parts"]
    for name, value in changes.items():
        if name not in known:
            tables = [f"{table}.{f.name}" for table in known[1:] for f in fields(getattr(config, table)) if f.name == name]
            hint = f"; '{name}' belongs into the table [{tables[0].split('.')[0]}]" if tables else nearest(name, known)
            raise ValueError(f"there is no setting '{name}'{hint}. The tables are [{'], ['.join(known[1:])}], besides seed.")
        if name == "seed":
            values[name] = _checked("seed", value, int)
        elif not isinstance(value, Mapping):
            raise ValueError(f"'{name}' must be a table, as in [{name}], but got {_shown(value)}.")
        else:
            entries = dict(value)
            for part in OWN_PARTS if name == "start" else ():
                if isinstance(entries.get(part), str) and (":" in entries[part] or part in ONLY_OWN):
                    own_parts[part] = _checked_reference(part, entries.pop(part))
                elif part in entries:
                    own_parts.pop(part, None)
            values[name] = _table(name, getattr(config, name), entries)
    return replace(config, **values, own_parts=own_parts)


def to_toml(config: Config) -> str:
    """The effective configuration, every setting written out, to be read back by `parse`."""
    lines = ["# every setting of this run, defaults included", f"seed = {config.seed}"]
    for name in [f.name for f in fields(Config)][1:-1]:
        table = getattr(config, name)
        lines += ["", f"[{name}]"]
        for entry in fields(table):
            value = getattr(table, entry.name)
            if name == "start" and entry.name in config.own_parts:
                value = config.own_parts[entry.name]
            lines.append(f"{entry.name} = {_to_toml_value(value)}")
        for part in ONLY_OWN if name == "start" else ():
            if part in config.own_parts:
                lines.append(f"{part} = {_to_toml_value(config.own_parts[part])}")
    return "\n".join(lines) + "\n"


def differences(first: Config, second: Config) -> list[str]:
    """The settings in which two configurations differ, as `table.key: one, other`."""
    ours, theirs = (_flat(tomllib.loads(to_toml(config))) for config in (first, second))
    return [f"{k}: {ours.get(k)!r}, {theirs.get(k)!r}" for k in sorted({*ours, *theirs}) if ours.get(k) != theirs.get(k)]


def build(config: Config, data: Dataset, *, key: PRNGKey) -> tuple[GPSSM, AbstractPosterior]:
    """The model and posterior that `config` asks for, the user's own parts put in."""
    scaling, key_start = Scaling.of(data), jr.fold_in(key, INITIALISATION)
    if "builder" in config.own_parts:
        made = resolve(config.own_parts["builder"], "start.builder")(data, config.start, key=key_start)
        if not (
            isinstance(made, tuple) and [isinstance(made[0], GPSSM), isinstance(made[-1], AbstractPosterior)] == [True, True]
        ):
            raise ValueError("`start.builder` must give a model and a posterior: (GPSSM, posterior).")
        return made
    start = initialise(data, key=key_start, scaling=scaling, settings=config.start)
    makers = {part: resolve(reference, f"start.{part}") for part, reference in config.own_parts.items()}
    model, posterior = start.model, start.posterior
    if "kernel" in makers:
        lengthscales = [np.asarray(unwrap(kernel).lengthscales) for kernel in model.transition.kernels]
        kernels = tuple(
            _made(makers["kernel"], "kernel", AbstractKernel, scale, config.start.nonlinear_scale**2) for scale in lengthscales
        )
        model = eqx.tree_at(lambda m: m.transition.kernels, model, kernels)
    if "mean" in makers:
        mean = _made(makers["mean"], "mean", AbstractMean, model.num_states, model.num_controls)
        model = eqx.tree_at(lambda m: m.transition.mean, model, mean)
        # what q(u) knew was the rest of another mean
        posterior = eqx.tree_at(lambda p: p.inducing.mean, posterior, 0 * unwrap(posterior.inducing.mean))
    if "emission" in makers:
        emission = _made(makers["emission"], "emission", AbstractEmission, model.num_states, data.num_outputs)
        model = eqx.tree_at(lambda m: m.emission, model, emission)
    start = dataclasses.replace(start, model=model, posterior=posterior)
    return free_run(data, start, config.start, key=key, scaling=scaling)


def check_own_parts(config: Config, num_outputs: int, num_controls: int) -> None:
    """Raise where a part of the user's own is not there, or makes something else; its sizes may still be other ones."""
    makers = {part: resolve(reference, f"start.{part}") for part, reference in config.own_parts.items()}
    for part, maker in makers.items():
        if not callable(maker):
            raise ValueError(f"`start.{part}` must name a class or function, but {config.own_parts[part]} is {maker!r}.")
    states = 1 if isinstance(config.start.state_dim, str) else config.start.state_dim
    for part, kind, sizes in (
        ("kernel", AbstractKernel, (np.ones(states + num_controls), config.start.nonlinear_scale**2)),
        ("mean", AbstractMean, (states, num_controls)),
        ("emission", AbstractEmission, (states, num_outputs)),
    ):
        if part in makers:
            _made(makers[part], part, kind, *sizes)


def resolve(reference: str, setting: str) -> Any:
    """The class or function that `module:name` names; modules are looked for in the present folder too."""
    module_name, _, name = reference.partition(":")
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name != module_name.split(".")[0] and error.name != module_name:
            raise ValueError(f"`{setting}`: the module '{module_name}' needs '{error.name}', which is not installed.") from None
        raise ValueError(
            f"`{setting}`: there is no module '{module_name}' on the path or in {os.getcwd()}. Start in the folder that "
            f"holds {module_name}.py, or install it."
        ) from None
    except Exception as error:
        raise ValueError(f"`{setting}`: the module '{module_name}' cannot be imported: {type(error).__name__}: {error}") from None
    if name not in vars(module):
        public = [n for n in vars(module) if not n.startswith("_")]
        raise ValueError(f"`{setting}`: the module '{module_name}' has no '{name}'{nearest(name, public)}.")
    return vars(module)[name]


def _made(maker: Any, part: str, kind: type, *arguments: Any) -> Any:
    wanted = {
        "kernel": "(lengthscales, variance)",
        "mean": "(num_states, num_controls)",
        "emission": "(num_states, num_outputs)",
    }[part]
    try:
        made = maker(*arguments)
    except Exception as error:
        raise ValueError(f"`start.{part}`: {_name(maker)}{wanted} failed: {type(error).__name__}: {error}") from error
    if not isinstance(made, kind):
        raise ValueError(f"`start.{part}`: {_name(maker)}{wanted} must give an {kind.__name__}, but gave {made!r}.")
    return made


def _name(maker: Any) -> str:
    return getattr(maker, "__name__", str(maker))


def _table(name: str, default: Any, entries: Mapping[str, Any]) -> Any:
    hints, known = get_type_hints(type(default)), [f.name for f in fields(default)]
    for key in entries:
        if key not in known:
            listed = ", ".join([*known, *(ONLY_OWN if name == "start" else [])])
            raise ValueError(f"there is no setting '{key}' in [{name}]{nearest(key, known)}. There are: {listed}.")
    values = {key: _checked(f"{name}.{key}", value, hints[key]) for key, value in entries.items()}
    try:
        return dataclasses.replace(default, **values)
    except ValueError as error:
        raise ValueError(f"in [{name}]: {error}") from None


def _checked(setting: str, value: Any, kind: Any) -> Any:
    """`value` as the annotated kind, or an error that says what was expected."""
    if isinstance(value, list):
        value = tuple(value)
    if value == "none" and type(None) in _options(kind):
        return None
    for option in _options(kind):
        if get_origin(option) is Literal and value in get_args(option) and isinstance(value, str):
            return value
        if option in (str, bool, int) and type(value) is option:
            return value
        if option is float and type(value) in (int, float):
            return float(value)
        if get_origin(option) is tuple and isinstance(value, tuple):
            return tuple(_checked(setting, item, get_args(option)[0]) for item in value)
    raise ValueError(f"`{setting}` must be {_expected(kind)}, but got {_shown(value)}.")


def _options(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def _expected(kind: Any) -> str:
    names = {
        str: "text in quotes",
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        type(None): '"none"',
    }
    said = []
    for option in _options(kind):
        if get_origin(option) is Literal:
            said.append(" or ".join(f'"{choice}"' for choice in get_args(option)))
        elif get_origin(option) is tuple:
            said.append(f"a list, in brackets, of which each is {_expected(get_args(option)[0])}")
        else:
            said.append(names[option])
    return " or ".join(said)


def _shown(value: Any) -> str:
    try:
        return json.dumps(value)
    except TypeError:
        return repr(value)


def _checked_reference(part: str, reference: str) -> str:
    module, _, name = reference.partition(":")
    if not name.isidentifier() or not all(piece.isidentifier() for piece in module.split(".")):
        raise ValueError(f"`start.{part}` must name a class or function as module:name, but got {reference!r}.")
    return reference


def _to_toml_value(value: Any) -> str:
    if value is None:
        return '"none"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return "[" + ", ".join(_to_toml_value(item) for item in value) + "]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def _flat(tables: Mapping[str, Any]) -> dict[str, Any]:
    return {
        f"{name}.{key}" if isinstance(value, dict) else name: item
        for name, value in tables.items()
        for key, item in (value.items() if isinstance(value, dict) else [("", value)])
    }
