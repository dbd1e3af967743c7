"""The paper's system-identification benchmarks: its four methods by its protocol, and the library at its best by three protocols.

The paper: the first half trains, standardised; four states, 100 inducing points, 100 samples; all methods start where the
factorised-nonlinear one ended; the 30 rows after the end of training are predicted. What it leaves open (kernel, mean, shape of
A_t and S_t) is as in the code that its authors published: Matern 3/2, an identity mean, diagonal steps.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float

from gpssm import baselines, datasets
from gpssm._precision import jit
from gpssm.atomic import present_folder
from gpssm.data import Dataset, Scaling
from gpssm.evaluate import Forecaster, free_run, measure, paper_window, rolling_origin, score
from gpssm.filter import FittedForecaster
from gpssm.fit import FitSettings
from gpssm.forecasts import Forecast
from gpssm.initialise import StartSettings, _diagonalised, initialise
from gpssm.params import unwrap
from gpssm.predict import _trajectories, to_forecast
from gpssm.reproduce.fits import Best, continued, fit_best, process_scale, with_residual_noise
from gpssm.reproduce.results import FITS, Report, Row, Say, check_question, clock, markdown
from gpssm.result import FitResult
from gpssm.save import load, save
from gpssm.select import SelectSettings, select
from gpssm.starts import Problem, _padded, _padded_windows

NAMES = ("actuator", "ballbeam", "drive", "dryer", "gas_furnace")
FIRST = "factorised-nonlinear"
METHODS = (FIRST, "factorised-linear", "vcdt", "pr-ssm")
PAPER = {  # NLPP and RMSE, in the order of NAMES (Table 2)
    "factorised-linear": ((-0.364, 0.154), (-0.486, 0.075), (0.770, 0.439), (-0.709, 0.098), (-0.296, 0.170)),
    "factorised-nonlinear": ((-0.641, 0.142), (-1.379, 0.073), (0.283, 0.246), (-1.310, 0.049), (0.264, 0.168)),
    "vcdt": ((-0.644, 0.141), (-1.395, 0.072), (0.238, 0.285), (-1.282, 0.050), (0.377, 0.169)),
    "pr-ssm": ((3.653, 1.976), (24.765, 1.118), (-0.649, 0.139), (-1.265, 0.053), (0.144, 0.162)),
}
BEST = ((-0.644, 0.141), (-1.395, 0.072), (-0.649, 0.139), (-1.310, 0.049), (-0.296, 0.162))  # of each column
FREE_RUN_RMSE = (0.657, 0.046, 0.647, 0.103, 1.202)  # best published, GPSSMs and ARX together, raw units
CHUNK = 2000  # trajectories of a forecast at once

# what is fitted by the library itself: training data, seed and a folder to keep work in give something that forecasts
Builder: TypeAlias = Callable[[Dataset, int, Path, Say], Forecaster]


@dataclass(frozen=True)
class SysidSettings:
    """The paper's protocol; steps and the learning rate are ours."""

    names: tuple[str, ...] = NAMES
    methods: tuple[str, ...] = METHODS
    start: StartSettings = field(
        default_factory=lambda: StartSettings(
            state_dim=4, posterior=FIRST, num_inducing=100, kernel="matern32", mean="identity", local="free-diagonal"
        )
    )
    first_fit: FitSettings = field(
        default_factory=lambda: FitSettings(num_steps=1600, num_samples=100, block_steps=200, tolerance=None)
    )
    fit: FitSettings = field(
        default_factory=lambda: FitSettings(num_steps=800, num_samples=100, learning_rate=0.005, block_steps=200, tolerance=None)
    )
    num_forecasts: int = 100_000  # trajectories, as in the paper
    horizon: int = 30
    stride: int = 1  # of the rolling origin
    seed: int = 0
    is_quick: bool = False

    @classmethod
    def quick(cls) -> "SysidSettings":
        """Two short datasets, 20 inducing points, few steps and samples."""
        base = cls()
        fit = FitSettings(num_steps=60, num_samples=4, block_steps=20, tolerance=None)
        start = replace(base.start, num_inducing=20)
        names = ("drive", "gas_furnace")
        return replace(base, names=names, start=start, first_fit=fit, fit=fit, num_forecasts=500, stride=10, is_quick=True)


def by_defaults(train: Dataset, seed: int, place: Path, say: Say) -> Forecaster:
    """`gpssm.fit` as it comes."""
    problem = Problem.standardised(train, key=jr.key(seed))
    return FittedForecaster(fit_best(place, "defaults", [[problem]], FitSettings(), say)[0].result)


def by_select(train: Dataset, seed: int, place: Path, say: Say) -> Forecaster:
    """What `gpssm.select` chooses inside the training half: the ensemble of the best few."""
    return select(
        train, key=jr.key(seed), settings=SelectSettings(ensemble_size=3), checkpoint=place / "select", say=say
    ).ensemble


BUILDERS: dict[str, Builder] = {"defaults": by_defaults, "select": by_select}


def reproduce_sysid(
    out: str | Path,
    settings: SysidSettings | None = None,
    *,
    ours: dict[str, Builder] | None = None,
    say: Say = lambda line: None,
) -> Report:
    """The paper's methods, then `ours` with every baseline; rows and tables in `out`, and the same call goes on after a kill.

    `ours` maps the name of a row to what builds its forecaster; by itself there is one row `gpssm`, the library's defaults.
    """
    settings, out, seconds = settings or SysidSettings(), Path(out), clock()
    check_question(out, settings)
    ours = {"gpssm": by_defaults} if ours is None else ours
    wholes = [datasets.load(name) for name in settings.names]
    trains = [whole.split(datasets.benchmark(name).train_fraction)[0] for name, whole in zip(settings.names, wholes, strict=True)]
    report = Report("sysid", settings.is_quick, asdict(settings), (), "")
    rows: list[Row] = []

    def written(is_complete: bool) -> Report:
        made = replace(report, rows=tuple(rows), text=sysid_tables(rows), is_complete=is_complete, seconds=seconds())
        made.write(out)
        return made

    earlier: list[Best] = []
    for method in settings.methods:
        fits = fit_paper_method(out, method, trains, earlier, settings, say)
        earlier = earlier or fits
        rows += paper_rows(method, fits, wholes, settings, say)
        written(False)
    for name, whole, train in zip(settings.names, wholes, trains, strict=True):
        rows += library_rows(out, name, whole, train, ours, settings, say)
        written(False)
    return written(True)


def fit_paper_method(
    out: Path, method: str, trains: Sequence[Dataset], earlier: Sequence[Best], settings: SysidSettings, say: Say
) -> list[Best]:
    """One of the paper's methods on all datasets, as one program; after the first, from where the first ended."""
    key = jr.key(settings.seed)
    keys = [jr.fold_in(key, i) for i in range(len(trains))]
    if not earlier:
        problems = [first_problem(train, settings.start, key=k) for train, k in zip(trains, keys, strict=True)]
    else:
        problems = [continued(method, best.result, key=k) for best, k in zip(earlier, keys, strict=True)]
    chosen = settings.fit if earlier else settings.first_fit
    return fit_best(out / FITS, method, [[problem] for problem in problems], chosen, say)


def first_problem(train: Dataset, start: StartSettings, *, key: jax.Array) -> Problem:
    """The library's start, with as much process noise as a mean that is not the linear model leaves at first."""
    scaling = Scaling.of(train)
    built = initialise(train, key=key, scaling=scaling, settings=start)
    states = _diagonalised(built.identification)[1]
    controls = [np.asarray(scaling.controls(c)) for c in train.controls]
    model, inducing = with_residual_noise(built.model, states, controls)
    posterior = eqx.tree_at(lambda p: p.inducing, built.posterior, inducing)
    return Problem(train, model, posterior, key, scaling)


def paper_rows(method: str, fits: Sequence[Best], wholes: Sequence[Dataset], settings: SysidSettings, say: Say) -> list[Row]:
    """NLPP and RMSE of the rows that follow the training half, for every dataset."""
    seconds = clock()
    made = continuations([best.result for best in fits], wholes, settings, key=jr.fold_in(jr.key(settings.seed), 1))
    say(f"{method}: forecasts took {seconds():.1f} s")
    rows = []
    for name, whole, best, forecast in zip(settings.names, wholes, fits, made, strict=True):
        targets = whole.outputs[0][forecast.first_step :][: settings.horizon]
        scaling = best.result.scaling
        told = score(measure(forecast, targets), np.asarray(scaling.output_scale, float), np.zeros(1, int))
        metrics = {"nlpp": told.nlpd, "rmse": told.rmse, "coverage90": told.coverage90, "bound": best.bound}
        emission = unwrap(best.result.model.emission)
        details = {
            "process_scale": process_scale(best.result),
            "observation_scale": np.asarray(emission.chol_noise, float).ravel(),
            "status": best.result.status.name.lower(),
        }
        published = _named(PAPER[method][NAMES.index(name)]) if method in PAPER else {}
        say(f"{name}, {method}: NLPP {told.nlpd:.3f}, RMSE {told.rmse:.3f}")
        rows.append(Row("sysid", name, method, settings.seed, metrics, best.seconds, published, details))
    return rows


def continuations(
    results: Sequence[FitResult], wholes: Sequence[Dataset], settings: SysidSettings, *, key: jax.Array
) -> list[Forecast]:
    """A forecast from the end of each fit's training data, with its own states and draws of f, as `gpssm.forecast` makes it.

    All fits are of one shape but for the length of their data; they are padded and sampled as one program, in chunks.
    """
    longest = max(result.data.max_length for result in results)
    parts = [_padded_parts(result, whole, longest, settings.horizon) for result, whole in zip(results, wholes, strict=True)]
    arrays, rest = zip(*(eqx.partition(part, eqx.is_array) for part in parts), strict=True)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *arrays)
    chunk = min(CHUNK, settings.num_forecasts)
    pieces = [
        np.asarray(_sampled(stacked, rest[0], chunk, jr.split(jr.fold_in(key, i), len(results))))
        for i in range(-(-settings.num_forecasts // chunk))
    ]
    states = np.concatenate(pieces, axis=1)
    return [
        to_forecast(jnp.asarray(states[i]), jnp.zeros((1, 1, 1)), result.model.emission, result, result.data.lengths[0])
        for i, result in enumerate(results)
    ]


def _padded_parts(result: FitResult, whole: Dataset, longest: int, horizon: int) -> tuple:
    """Model, posterior, training window and the controls ahead, all of one length."""
    end = result.data.lengths[0]
    window = jax.tree.map(lambda leaf: leaf[0], _padded_windows(result.data.windows(result.scaling), longest))
    acting = jnp.asarray(result.scaling.controls(whole.controls[0][end - 1 : end - 1 + horizon]), window.controls.dtype)
    return result.model, _padded(result.posterior, longest - 1), window, acting


@jit
def _sampled(arrays: Any, rest: Any, num_samples: int, keys: jax.Array) -> Float[Array, "fit sample time state"]:
    def one(arrays: Any, key: jax.Array) -> Array:
        model, posterior, window, acting = eqx.combine(arrays, rest)
        # in the padding the state stands still, so the last one is that of the last row
        return _trajectories(model, posterior, window, acting, None, num_samples, None, key)[0]

    return jax.vmap(one)(arrays, keys)


def library_rows(
    out: Path, name: str, whole: Dataset, train: Dataset, ours: dict[str, Builder], settings: SysidSettings, say: Say
) -> list[Row]:
    """The library's own models and every baseline on one dataset: paper window, rolling origin and free run."""
    if not ours:
        return []
    place = out / FITS / f"library-{name}"
    rows = []
    for label, build in (*ours.items(), *((kind, None) for kind in baselines.KINDS)):
        seconds = clock()
        done = place / f"{label}-scores"
        if present_folder(done).is_dir():
            told = load(done)
            say(f"{name}, {label}: done before")
        else:
            fitted = (
                build(train, settings.seed, place / label, say)
                if build
                else baselines.KINDS[label].fit(train, seed=settings.seed)
            )
            fitting = seconds()
            told = {"metrics": protocol_scores(fitted, whole, train, settings), "seconds": fitting}
            save(done, told)
        metrics = told["metrics"]
        say(f"{name}, {label}: rolling RMSE {metrics['rolling_rmse']:.3f}, NLPD {metrics['rolling_nlpd']:.3f}")
        published = _named(BEST[NAMES.index(name)]) | {"free_run_rmse_raw": FREE_RUN_RMSE[NAMES.index(name)]}
        details = {"kind": "model" if build else "baseline"}
        rows.append(Row("sysid", name, label, settings.seed, metrics, told["seconds"], published, details))
    return rows


def protocol_scores(forecaster: Forecaster, whole: Dataset, train: Dataset, settings: SysidSettings) -> dict[str, float]:
    """Paper window and rolling origin in standard units, free run of the test half in raw ones."""
    scaling, start, key, named = Scaling.of(train), train.lengths[0], jr.key(settings.seed), {"it": forecaster}
    horizon = settings.horizon
    paper = paper_window(named, whole, horizon=horizon, start=start, scaling=scaling, key=key).score("it")
    rolling = rolling_origin(named, whole, horizon=horizon, stride=settings.stride, start=start, scaling=scaling, key=key).score(
        "it"
    )
    free = free_run(named, whole, start=start, scaling=scaling, key=key).score("it", "raw")
    return {
        "nlpp": paper.nlpd,
        "rmse": paper.rmse,
        "rolling_nlpd": rolling.nlpd,
        "rolling_nlpd_se": rolling.standard_errors["nlpd"],
        "rolling_rmse": rolling.rmse,
        "rolling_rmse_se": rolling.standard_errors["rmse"],
        "rolling_crps": rolling.crps,
        "rolling_coverage90": rolling.coverage90,
        "free_run_rmse_raw": free.rmse,
    }


def sysid_tables(rows: Sequence[Row]) -> str:
    """The paper's table with ours in it, and the library's own models by three protocols."""
    names = list(dict.fromkeys(row.dataset for row in rows))
    mine = [row for row in rows if row.method in PAPER]
    body = []
    for method in dict.fromkeys(row.method for row in mine):
        cells = {row.dataset: row for row in mine if row.method == method}
        body.append((method, *(_pair(cells[name].metrics) for name in names)))
        body.append(("*in the paper*", *(_pair(cells[name].published) for name in names)))
    text = (
        "System identification, the paper's protocol: NLPP; RMSE of the 30 rows after the end of training, standard units.\n\n"
        + markdown(("method", *names), body)
    )
    library = [row for row in rows if "rolling_rmse" in row.metrics]
    if not library:
        return text
    text += "\nThe library's own models and the baselines, with the best of each column in the paper:\n\n"
    body = [("*best in the paper*", *(_pair(_named(BEST[NAMES.index(n)])) for n in names))]
    body += _by_dataset(library, names, _pair)
    text += markdown(("30 rows, NLPP; RMSE", *names), body)
    text += "\n" + markdown(("rolling origin, NLPD; RMSE", *names), _by_dataset(library, names, _rolling))
    cover = _by_dataset(library, names, lambda metrics: f"{metrics['rolling_coverage90']:.2f}", is_averaged=True)
    text += "\n" + markdown(("coverage of 90 % bands, rolling origin", *names, "average"), cover)
    body = [("*best published*", *(f"{FREE_RUN_RMSE[NAMES.index(name)]:.3f}" for name in names))]
    body += _by_dataset(library, names, lambda metrics: f"{metrics['free_run_rmse_raw']:.3f}")
    return text + "\n" + markdown(("free run, RMSE in raw units", *names), body)


def _by_dataset(
    rows: Sequence[Row], names: Sequence[str], told: Callable[[dict[str, float]], str], is_averaged: bool = False
) -> list[tuple[str, ...]]:
    """One line a method; a dataset that is not there yet is blank."""
    body = []
    for method in dict.fromkeys(row.method for row in rows):
        cells = {row.dataset: row.metrics for row in rows if row.method == method}
        line = [told(cells[name]) if name in cells else "" for name in names]
        if is_averaged:
            line.append(f"{np.mean([metrics['rolling_coverage90'] for metrics in cells.values()]):.2f}")
        body.append((method, *line))
    return body


def _pair(metrics: dict[str, float]) -> str:
    return f"{metrics['nlpp']:.3f}; {metrics['rmse']:.3f}"


def _rolling(metrics: dict[str, float]) -> str:
    return f"{metrics['rolling_nlpd']:.3f}; {metrics['rolling_rmse']:.3f}"


def _named(pair: tuple[float, float]) -> dict[str, float]:
    return {"nlpp": pair[0], "rmse": pair[1]}
