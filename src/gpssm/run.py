"""A run: a folder that holds all that a fit was made of and all that came of it, whole at whatever moment the process dies.

    RUN/data/         the whole data, held-out part included       RUN/model/       the fitted model, posterior and scaling
    RUN/config.toml   every setting                                RUN/history.csv  the bound and its terms over the steps
    RUN/versions.json what it was computed with                    RUN/evaluation/  every error on the held-out part
    RUN/checkpoint/   from which an interrupted fit goes on        RUN/metrics.json scores and findings
    RUN/saturation/   fits by which the inducing points are chosen RUN/selection/   candidates that were compared before
    RUN/status.json   how far it has come; a folder without this file is no run yet

One process at a time may write: it holds a lock that the system takes back if the process is killed.
"""

import contextlib
import fcntl
import importlib.metadata
import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.random as jr
import numpy as np
import pandas as pd

from gpssm import baselines
from gpssm import config as configuration
from gpssm._types import PRNGKey
from gpssm.atomic import present_folder, write_atomically
from gpssm.config import Config
from gpssm.data import Dataset
from gpssm.evaluate import Evaluation, Forecaster, rolling_origin
from gpssm.filter import FittedForecaster
from gpssm.findings import find, held_out_starts
from gpssm.fit import fit
from gpssm.progress import Report
from gpssm.result import FitResult, Status
from gpssm.save import load, save
from gpssm.select import Build, saturation, saturation_checkpoint

Say = Callable[[str], None]
SELECTION = "selection"
STATES = ("fitting", "interrupted", "fitted", "finished", "failed")
OURS = ("data", "config.toml", "versions.json", "checkpoint", "status.json", "model", "history.csv", "evaluation", "metrics.json")
AT_TIMES = (SELECTION, "saturation", ".lock")
PACKAGES = ("gpssm", "jax", "jaxlib", "equinox", "optax", "numpy", "scipy", "pandas")
NUM_WINDOWS = 40  # of the rolling origin, when no stride is asked for
KEY_FIT, KEY_EVALUATE, KEY_FIND = range(3)  # folded into the seed


@dataclass(frozen=True)
class Run:
    """What a run folder holds; `result` and `evaluation` are None where it has not come so far."""

    folder: Path
    config: Config
    data: Dataset  # held-out part included
    result: FitResult | None
    evaluation: Evaluation | None
    metrics: dict[str, Any]
    status: dict[str, Any]
    versions: dict[str, Any]

    def fitted(self) -> FitResult:
        """The fit, or an error that says how to get it."""
        if self.result is None:
            raise ValueError(
                f"The run in {self.folder} has no fitted model yet (it is '{self.status['state']}'). Finish it: "
                f"gpssm fit --resume --out {self.folder}"
            )
        return self.result


@contextlib.contextmanager
def claimed(folder: str | os.PathLike[str]) -> Iterator[Path]:
    """Hold the folder for this process alone; made if it is not there."""
    path = Path(folder)
    check_folder(path)
    path.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"Another run is writing into {path} at this moment. Wait for it, or choose another --out."
            ) from None
        yield path
    finally:
        os.close(descriptor)


def begin(folder: Path, config: Config, data: Dataset, *, resume: bool) -> tuple[Config, Dataset]:
    """Lay down what is to be done, or take up what was laid down; the settings and data that count."""
    status = read_status(folder)
    if status is None:
        _check_ours_alone(folder)
        save(folder / "data", data)
        write_atomically(folder / "config.toml", configuration.to_toml(config).encode())
        _write_json(folder / "versions.json", _versions())
        _set_status(folder, "fitting", began=time.strftime("%Y-%m-%d %H:%M:%S"))
        return config, data
    if not resume:
        raise ValueError(_occupied(folder, status))
    kept = configuration.read(folder / "config.toml")
    check_agrees(folder, kept, config)
    kept_data = load(folder / "data")
    if kept_data != data:
        raise ValueError(f"{folder} holds a run on other data: {kept_data!r}. Resume it with its own, or choose another --out.")
    return kept, kept_data


def agreed(folder: Path, kept: Config, file: Path | None, changes: Mapping[str, Any], verb: str = "fit") -> Config:
    """The settings `kept` in a folder, of which a file and `changes` may repeat some, but contradict none."""
    said = kept if file is None else configuration.read(file, kept)
    check_agrees(folder, kept, configuration.override(said, changes), verb)
    return kept


def check_agrees(folder: Path, kept: Config, said: Config, verb: str = "fit") -> None:
    """Raise where settings contradict those that a folder was begun with."""
    if different := configuration.differences(kept, said):
        more = f"; and {len(different) - 3} more" if len(different) > 3 else ""
        raise ValueError(
            f"{folder} holds a run with other settings ({'; '.join(different[:3])}{more}). "
            f"Go on with its own: gpssm {verb} --resume --out {folder}; or choose another --out."
        )


def check_not_part(file: Path) -> None:
    """Raise where a file would take the place of a part of a run."""
    place = file.resolve()
    for folder in place.parents:
        is_run = (folder / "status.json").is_file() and (folder / "config.toml").is_file()
        if is_run and place.relative_to(folder).parts[0] in (*OURS, *AT_TIMES):
            raise ValueError(f"{file} is a part of the run in {folder.name}. Name another file.")


def check_folder(folder: str | os.PathLike[str]) -> None:
    """Raise where there cannot be a folder, for a file is in the way."""
    for path in (Path(folder), *Path(folder).parents):
        if path.exists():
            if not path.is_dir():
                below = "" if path == Path(folder) else f", so that there can be no folder {folder}"
                raise ValueError(f"{path} is a file{below}; expected a folder. Choose another --out.")
            return


def check_new(folder: str | os.PathLike[str]) -> None:
    """Raise unless a new run may go into the folder."""
    path = Path(folder)
    check_folder(path)
    status = read_status(path)
    if status is not None:
        raise ValueError(_occupied(path, status))
    if (path / SELECTION).is_dir():
        raise ValueError(_selecting(path))
    _check_ours_alone(path)


def withdraw(path: Path) -> None:
    """Take back a run that came to nothing, so that the same command can be given again, mended."""
    for name in ("status.json", "config.toml", "versions.json", ".lock"):
        (path / name).unlink(missing_ok=True)
    if not (path / SELECTION).is_dir():  # to which the data belong too
        shutil.rmtree(path / "data", ignore_errors=True)
    with contextlib.suppress(OSError):  # other things are in it
        path.rmdir()


def _check_ours_alone(path: Path) -> None:
    others = [entry.name for entry in path.iterdir() if not _is_ours(entry.name)] if path.is_dir() else []
    if others:
        raise ValueError(
            f"{path} holds other things ({', '.join(sorted(others)[:3])}). Choose an empty or a new folder for --out."
        )


def _selecting(path: Path) -> str:
    return f"{path} holds an unfinished selection. Go on with it: gpssm select --resume --out {path}; or choose another --out."


def carry_out(
    folder: str | os.PathLike[str],
    config: Config,
    data: Dataset,
    *,
    resume: bool = False,
    progress: bool | Report = False,
    say: Say = lambda line: None,
    rivals: dict[str, Forecaster] | None = None,
) -> Run:
    """Fit to the first part of `data`, score on the rest beside the baselines, and keep everything in `folder`.

    `rivals` are scored instead of the baselines. A fit that was interrupted is kept, and its run goes on with `resume`.
    """
    with claimed(folder) as path:
        is_new = read_status(path) is None
        config, data = begin(path, config, data, resume=resume)
        train, has_held_out = training_part(config, data)
        if (read_status(path) or {})["state"] not in ("fitted", "finished"):
            try:
                _fit(path, config, train, progress, say)
            except ValueError:  # settings that do not suit the data, as it turns out
                if is_new and not any(present_folder(path / name).is_dir() for name in ("checkpoint", "saturation")):
                    withdraw(path)
                raise
        run = load_run(path)
        if run.status["state"] == "fitted":
            evaluation = None
            if has_held_out:
                began = time.perf_counter()
                evaluation = score_held_out(run.fitted(), config, data, say=say, rivals=rivals)
                save(path / "evaluation", evaluation)
                say(f"scored {evaluation.num_windows} windows in {time.perf_counter() - began:.1f} s")
            metrics = _metrics(run.fitted(), evaluation, config)
            if "saturation" in run.status:
                metrics["saturation"] = run.status["saturation"]
            _write_json(path / "metrics.json", metrics)
            _set_status(path, "finished", ended=time.strftime("%Y-%m-%d %H:%M:%S"))
            run = load_run(path)
        return run


def training_part(config: Config, data: Dataset) -> tuple[Dataset, bool]:
    """The part that trains, and whether anything is held out."""
    if config.data.train_fraction == 1:
        return data, False
    return data.split(config.data.train_fraction)[0], True


def check_builds(config: Config, data: Dataset) -> None:
    """Raise where the settings do not suit the data, as a start shows; it takes seconds, and the fit repeats it."""
    configuration.build(config, training_part(config, data)[0], key=jr.key(config.seed))


def _fit(path: Path, config: Config, train: Dataset, progress: bool | Report, say: Say) -> None:
    key = jr.fold_in(jr.key(config.seed), KEY_FIT)
    checkpoint = path / "checkpoint"
    is_resumed = present_folder(checkpoint).is_dir()
    _set_status(path, "fitting")
    say("resuming from the checkpoint" if is_resumed else "finding where to start")
    began = time.perf_counter()
    if config.saturation.counts:
        config, checkpoint = _saturated(path, config, train, key, progress, say)
        is_resumed = True
    model, posterior = configuration.build(config, train, key=key)
    states = "1 state" if model.num_states == 1 else f"{model.num_states} states"
    say(f"{states}, {model.transition.num_inducing} inducing points; compiling and fitting")
    result = fit(
        train,
        model,
        posterior,
        key=key,
        settings=config.fit,
        checkpoint=checkpoint,
        resume=is_resumed,
        progress=progress,
    )
    save(path / "model", result)
    write_atomically(path / "history.csv", history_table(result).to_csv(index=False).encode())
    seconds = round(time.perf_counter() - began, 2)
    state = {Status.INTERRUPTED: "interrupted", Status.NONFINITE: "fitted"}.get(result.status, "fitted")
    _set_status(path, state, fit=result.status.name.lower(), fit_seconds=seconds, chain=result.chain)
    say(f"{result.status.value} ({int(result.history.steps[-1]) if len(result.history.steps) else 0} steps, {seconds:.1f} s)")
    if result.status is Status.INTERRUPTED:
        raise KeyboardInterrupt


def _saturated(
    path: Path, config: Config, train: Dataset, key: PRNGKey, progress: bool | Report, say: Say
) -> tuple[Config, Path]:
    """The settings with the number of inducing points that is enough, and the checkpoint of the fit that has it."""
    say(f"trying {', '.join(map(str, config.saturation.counts))} inducing points until the bound gains no more")
    found = saturation(
        train,
        config.saturation.counts,
        key=key,
        fit_settings=config.fit,
        start=config.start,
        tolerance=config.saturation.tolerance,
        checkpoint=path / "saturation",
        progress=progress,
        say=say,
        build=candidate_builder(config),
    )
    _set_status(path, "fitting", saturation={"bounds": found.bounds, "chosen": found.chosen})
    chosen = replace(config, start=replace(config.start, num_inducing=found.chosen))
    return chosen, saturation_checkpoint(path / "saturation", found.chosen)


def candidate_builder(config: Config) -> Build:
    """How a start is built under the other settings of `config`, the user's own parts among them."""
    return lambda data, start, *, key: configuration.build(replace(config, start=start), data, key=key)


def score_held_out(
    result: FitResult,
    config: Config,
    data: Dataset,
    *,
    say: Say = lambda line: None,
    rivals: dict[str, Forecaster] | None = None,
) -> Evaluation:
    """Rolling-origin scores on what follows the training data, beside the baselines."""
    train = result.data
    starts = held_out_starts(train)
    room = min(n - s for n, s in zip(data.lengths, starts, strict=True))
    horizon = min(config.forecast.horizon, room)
    if rivals is None:
        say("fitting the baselines")
        rivals = dict(baselines.fit_all(train, seed=config.seed))
    return rolling_origin(
        {"gpssm": forecaster(result, config.forecast.num_samples), **rivals},
        data,
        horizon=horizon,
        stride=config.forecast.stride or default_stride(data, starts, horizon),
        start=starts,
        scaling=result.scaling,
        key=jr.fold_in(jr.key(config.seed), KEY_EVALUATE),
        report=say,
    )


def default_stride(data: Dataset, starts: list[int], horizon: int) -> int:
    """The stride that gives about `NUM_WINDOWS` windows in all."""
    origins = sum(max(0, n - s - horizon + 1) for n, s in zip(data.lengths, starts, strict=True))
    return max(1, origins // NUM_WINDOWS)


def forecaster(result: FitResult, num_samples: int) -> Forecaster:
    """The fitted model as `evaluate` wants it."""
    return FittedForecaster(result, num_samples=num_samples)


def load_run(folder: str | os.PathLike[str]) -> Run:
    """Read a run folder, however far it has come."""
    path = Path(folder)
    status = read_status(path)
    if status is None:
        if (path / SELECTION).is_dir():
            raise ValueError(_selecting(path))
        kind = "there is no such folder" if not path.exists() else "no status.json is in it"
        raise ValueError(f"{path} is not a run: {kind}. Make one: gpssm fit DATA --outputs y --out {path}")
    model, evaluation = present_folder(path / "model"), present_folder(path / "evaluation")
    is_fitted = status["state"] in ("interrupted", "fitted", "finished")
    if is_fitted and not model.is_dir():
        raise ValueError(
            f"The run in {path} is damaged: it is '{status['state']}', but holds no model. Copy the whole folder again."
        )
    try:
        return Run(
            folder=path,
            config=configuration.read(path / "config.toml"),
            data=load(path / "data"),
            result=load(model) if is_fitted else None,
            evaluation=load(evaluation) if evaluation.is_dir() else None,
            metrics=_read_json(path / "metrics.json"),
            status=status,
            versions=_read_json(path / "versions.json"),
        )
    except (OSError, ValueError) as error:
        raise ValueError(f"The run in {path} is damaged: {error}") from None


def read_status(folder: Path) -> dict[str, Any] | None:
    """How far the run in a folder has come; None where there is none."""
    status = _read_json(folder / "status.json")
    if status and status.get("state") not in STATES:
        raise ValueError(f"{folder / 'status.json'} is not one of ours: its state is {status.get('state')!r}.")
    return status or None


def history_table(result: FitResult) -> pd.DataFrame:
    """The history of a fit, one row a block of steps."""
    history = result.history
    names = ("steps", "bound", "emission", "kl_transition", "kl_inducing", "kl_initial", "seconds")
    columns = {name: getattr(history, name) for name in names}
    columns |= {f"process_scale_{i + 1}": history.process_scale[:, i] for i in range(history.process_scale.shape[1])}
    return pd.DataFrame(columns)


def _metrics(result: FitResult, evaluation: Evaluation | None, config: Config) -> dict[str, Any]:
    findings = find(result, evaluation, key=jr.fold_in(jr.key(config.seed), KEY_FIND))
    fitted = {
        "status": result.status.name.lower(),
        "bound": result.bound,
        "num_states": findings.num_states,
        "num_inducing": result.model.transition.num_inducing,
        "steps": int(result.history.steps[-1]) if len(result.history.steps) else 0,
        "seconds": float(np.sum(result.history.seconds)),
    }
    scores = evaluation.to_dict() if evaluation is not None else {}
    return {**scores, "fit": fitted, "findings": findings.to_dict(), "words": findings.sentences()}


def _occupied(folder: Path, status: dict[str, Any]) -> str:
    if status["state"] == "finished":
        return f"{folder} holds a finished run. Choose another --out, or remove that folder."
    return f"{folder} holds an unfinished run ({status['state']}). Add --resume to go on with it, or choose another --out."


def _is_ours(name: str) -> bool:
    is_leftover = name.startswith(".") and (".writing-" in name or name.endswith(".previous"))
    return name in (*OURS, *AT_TIMES) or is_leftover


def _set_status(folder: Path, state: str, **more: Any) -> None:
    before = read_status(folder) or {}
    _write_json(folder / "status.json", {**before, **more, "state": state})


def _write_json(path: Path, content: dict[str, Any]) -> None:
    write_atomically(path, (json.dumps(_finite(content), indent=1, ensure_ascii=False) + "\n").encode())


def _finite(value: Any) -> Any:
    """JSON knows no NaN: null stands for it."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        raise ValueError(f"{path} is damaged: it is not JSON.") from None
    return content if isinstance(content, dict) else {}


def _versions() -> dict[str, Any]:
    packages = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            packages[name] = importlib.metadata.version(name)
    device = jax.devices()[0]
    return {
        "packages": packages,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "device": f"{device.platform}: {device.device_kind}",
        "float64": bool(jax.config.read("jax_enable_x64")),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "command": sys.argv,
    }
