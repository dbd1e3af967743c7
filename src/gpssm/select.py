"""Which model: candidates fitted side by side to most of the training data, and scored on the rest of it.

The score is the rolling-origin log score (or another) on blocks of the training data that are held out (`validation.py`), or the
bound. The best candidate is fitted again to all of it; so are, for an ensemble, those next to it, weighted by stacking. The test
data are never asked for.
"""

import dataclasses
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax.random as jr
import numpy as np
import pandas as pd
from jaxtyping import Bool, Float

from gpssm._types import PRNGKey
from gpssm.atomic import present_folder
from gpssm.data import Dataset, Scaling
from gpssm.ensemble import Ensemble, stacking_weights
from gpssm.evaluate import Evaluation
from gpssm.filter import FittedForecaster
from gpssm.fit import INITIALISATION, FitSettings, fit, free_run
from gpssm.initialise import StartSettings, initialise
from gpssm.model import GPSSM
from gpssm.posteriors import AbstractPosterior
from gpssm.progress import Report
from gpssm.result import FitResult, History, Status
from gpssm.save import load, save
from gpssm.starts import Problem, fit_many, starts_around
from gpssm.subspace import identify
from gpssm.validation import Block, Validation, blocks, validated, with_factor

Say = Callable[[str], None]
Build = Callable[..., tuple[GPSSM, AbstractPosterior]]  # (data, start, *, key)
SCORES = ("nlpd", "rmse", "crps")
LEFT_BEHIND = 1.0  # nats an observation


@dataclass(frozen=True)
class SelectSettings:
    """How candidates are compared."""

    by: Literal["nlpd", "rmse", "crps", "bound"] = "nlpd"
    validation_fraction: float = 0.25  # of every training sequence that a block holds out
    num_blocks: int = 2  # held out one after the other, from the end backwards
    horizon: int = 30  # cut to what the validation part has room for
    stride: int | None = None  # rows between origins; by itself, about 40 windows a block
    num_starts: int = 1  # of each candidate; those after the first are perturbed
    spread: float = 0.5  # of the perturbation, in log units
    ensemble_size: int = 1  # how many of the best are fitted again, and mixed
    num_samples: int = 200
    process_factors: tuple[float, ...] = (1.0, 1.5, 2.5, 4.0)  # of the learnt process noise, to be tried by validation

    def __post_init__(self) -> None:
        if self.by not in (*SCORES, "bound"):
            raise ValueError(f"`by` must be one of {', '.join(SCORES)} or bound, but got {self.by!r}.")
        if not 0 < self.validation_fraction < 1:
            raise ValueError(f"`validation_fraction` must lie between 0 and 1, but got {self.validation_fraction}.")
        for name in ("horizon", "num_blocks", "num_starts", "ensemble_size", "num_samples"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, but got {getattr(self, name)}.")
        if (
            not self.process_factors
            or min(self.process_factors) <= 0
            or list(self.process_factors) != sorted(self.process_factors)
        ):
            raise ValueError(f"`process_factors` must be positive numbers that rise, but got {self.process_factors}.")
        if self.stride is not None and self.stride < 1:
            raise ValueError(f"`stride` must be at least 1, but got {self.stride}.")


@dataclass(frozen=True)
class Ranking:
    """Every candidate's scores, and how the best are to be weighted against each other."""

    table: pd.DataFrame  # one row a fit, the best first: candidate, start, scores, bound, weight in the ensemble, status, seconds
    candidates: dict[str, StartSettings]
    evaluation: Evaluation | None  # every fit on the validation rows, named as in the table; None by the bound
    fits: tuple[FitResult, ...]  # in the order of the table, made of everything but the last block
    weights: Float[np.ndarray, " member"]  # of the first `ensemble_size` of them

    @property
    def best(self) -> str:
        """The name of the candidate that comes first."""
        return str(self.table.iloc[0]["candidate"])

    @property
    def process_factor(self) -> float:
        """What the process noise that the best has learnt is to be multiplied with, by validation."""
        return float(self.table.iloc[0]["process_factor"])


@dataclass(frozen=True)
class Selection:
    """What was chosen, and from what."""

    table: pd.DataFrame  # one row a fit, the best first: candidate, start, scores, bound, weight in the ensemble, status, seconds
    candidates: dict[str, StartSettings]
    best: str  # the name of the candidate
    result: FitResult  # the best, fitted to all of the data
    ensemble: Ensemble  # the best few, fitted to all of the data
    seconds: float

    @property
    def start(self) -> StartSettings:
        """The settings that were chosen."""
        return self.candidates[self.best]


@dataclass(frozen=True)
class Saturation:
    """The bound over the number of inducing points, and where it stops improving."""

    bounds: dict[int, float]
    chosen: int


def start_grid(base: StartSettings | None = None, **choices: Sequence[Any]) -> dict[str, StartSettings]:
    """Every combination of the choices, by a name that tells them apart: start_grid(state_dim=[2, 4], ...)."""
    base = base or StartSettings()
    known = [field.name for field in dataclasses.fields(StartSettings)]
    for name in choices:
        if name not in known:
            raise ValueError(f"`{name}` is no setting of a start: expected some of {', '.join(known)}.")
    many = [name for name, values in choices.items() if len(values) > 1]
    candidates = {}
    for values in itertools.product(*choices.values()):
        chosen = dict(zip(choices, values, strict=True))
        name = ", ".join(f"{name}={chosen[name]}" for name in many) or "default"
        candidates[name] = dataclasses.replace(base, **chosen)
    return candidates


def built_in(data: Dataset, start: StartSettings, *, key: PRNGKey) -> tuple[GPSSM, AbstractPosterior]:
    """Model and posterior as `gpssm.fit(data, key=key, start=start)` builds them."""
    scaling = Scaling.of(data)
    made = initialise(data, key=jr.fold_in(key, INITIALISATION), scaling=scaling, settings=start)
    return free_run(data, made, start, key=key, scaling=scaling)


def default_candidates(data: Dataset, base: StartSettings | None = None) -> dict[str, StartSettings]:
    """From cautious to bold: f that starts at the linear model, and f that first learns to run free, in few states or more.

    Few are as many as subspace identification finds.
    """
    base = base or StartSettings()
    scaling = Scaling.of(data)
    outputs = [np.asarray(scaling.outputs(a)) for a in data.outputs]
    controls = [np.asarray(scaling.controls(a)) for a in data.controls] if data.num_controls else None
    few = identify(outputs, controls, "auto").model.state_dim
    more = max(4, few + 1)
    short, long = (min(rows, min(data.lengths)) for rows in (24, 48))
    return {
        "linear start": dataclasses.replace(base, state_dim=few, free_run=0),
        "free run": dataclasses.replace(base, state_dim=few, free_run=short),
        "long free run, more states": dataclasses.replace(base, state_dim=more, free_run=long),
        "free run, more states, free mean": dataclasses.replace(base, state_dim=more, free_run=short, is_mean_fixed=False),
    }


def select(
    data: Dataset,
    candidates: Mapping[str, StartSettings] | Sequence[StartSettings] | None = None,
    *,
    key: PRNGKey,
    settings: SelectSettings | None = None,
    fit_settings: FitSettings | None = None,
    checkpoint: str | Path | None = None,
    say: Say = lambda line: None,
) -> Selection:
    """The best of the candidates for `data` (training data alone), fitted to all of it.

    Fits of one shape run as one program. With `checkpoint` everything done is kept in that folder, and the same call goes on
    from there. By the bound there is nothing to hold out: the fits to all of the data are compared, and the best is the result.
    """
    began = time.perf_counter()
    settings, fit_settings = settings or SelectSettings(), fit_settings or FitSettings()
    place = None if checkpoint is None else Path(checkpoint)
    ranking = rank(
        data, candidates, key=key, settings=settings, fit_settings=fit_settings, checkpoint=place and place / "ranking", say=say
    )
    refits: Sequence[FitResult] = ranking.fits[: len(ranking.weights)]
    if settings.by != "bound":
        count = len(ranking.weights)
        say(f"fitting the best {'one' if count == 1 else count} again, to all {data.num_rows} rows")
        labels = list(zip(ranking.table["candidate"], ranking.table["start"], strict=True))[:count]
        again = _problems(data, ranking.candidates, labels, settings, key, say)
        refits = _fit_all(again, labels, fit_settings, place and place / "refits", say)
        refits = [with_factor(result, factor) for result, factor in zip(refits, ranking.table["process_factor"], strict=False)]
    members = tuple(FittedForecaster(result, num_samples=settings.num_samples) for result in refits)
    ensemble, seconds = Ensemble(members, ranking.weights), time.perf_counter() - began
    return Selection(ranking.table, ranking.candidates, ranking.best, refits[0], ensemble, seconds)


def rank(
    data: Dataset,
    candidates: Mapping[str, StartSettings] | Sequence[StartSettings] | None = None,
    *,
    key: PRNGKey,
    settings: SelectSettings | None = None,
    fit_settings: FitSettings | None = None,
    checkpoint: str | Path | None = None,
    say: Say = lambda line: None,
    build: Build = built_in,
) -> Ranking:
    """The candidates in order of merit: what `select` does before it fits the best again.

    `build(data, start, key=key)` makes a candidate's model and posterior, where they are not to be the built-in ones.
    """
    settings, fit_settings = settings or SelectSettings(), fit_settings or FitSettings()
    named = _named(candidates if candidates is not None else default_candidates(data))
    place = None if checkpoint is None else Path(checkpoint)
    if place is not None:
        _check_question(place, _question(data, named, settings, fit_settings, key))
    is_by_bound = settings.by == "bound"
    held_out = [] if is_by_bound else blocks(data, settings.validation_fraction, settings.num_blocks)
    labels = [(name, number) for name in named for number in range(settings.num_starts)]
    problems: list[list[Problem]] = []
    for part in [block.rest for block in held_out] or [data]:
        say(f"fitting {len(labels)} model{'s' * (len(labels) > 1)} to {part.num_rows} of {data.num_rows} rows")
        try:
            problems.append(_problems(part, named, labels, settings, key, say, build))
        except ValueError as error:
            if not problems:
                raise
            say(f"This block is not held out, for what it leaves is too little: {error}")
            held_out = held_out[: len(problems)]
            break
    kept = [place and place / ("fits" if number == 0 else f"fits-{number}") for number in range(len(problems))]
    fits = [_fit_all(own, labels, fit_settings, folder, say) for own, folder in zip(problems, kept, strict=True)]
    results, evaluation, factors = fits[0], None, [1.0] * len(labels)
    if not is_by_bound:
        evaluation, factors = _scored(data, held_out, fits, labels, settings, key, place, say)
        results = [with_factor(result, factor) for result, factor in zip(results, factors, strict=True)]
    table = _table(labels, results, factors, evaluation, settings)
    order = [int(i) for i in table.index]
    best = order[: settings.ensemble_size]
    if evaluation is None:
        weights = _bound_weights(table, best)
    else:
        densities = np.stack([errors.log_density.ravel() for errors in evaluation.errors.values()])
        weights = stacking_weights(densities[best])
    table["weight"] = 0.0
    table.loc[best, "weight"] = weights
    return Ranking(table.reset_index(drop=True), named, evaluation, tuple(results[i] for i in order), weights)


def saturation(
    data: Dataset,
    counts: Sequence[int] = (10, 20, 40, 80),
    *,
    key: PRNGKey,
    fit_settings: FitSettings | None = None,
    start: StartSettings | None = None,
    tolerance: float = 2e-3,
    checkpoint: str | Path | None = None,
    progress: bool | Report = False,
    say: Say = lambda line: None,
    build: Build = built_in,
) -> Saturation:
    """The number of inducing points beyond which the converged bound gains less than `tolerance` nats an observation.

    More of them bring q closer to the posterior, so the bound says when there are enough (paper, VCDT and u-dependence).
    """
    if not counts or list(counts) != sorted(set(counts)) or counts[0] < 1:
        raise ValueError(f"`counts` must be whole numbers from 1 that rise, as in (10, 20, 40), but got {tuple(counts)}.")
    num_observed = sum(int((~np.isnan(a)).sum()) for a in data.outputs)
    bounds: dict[int, float] = {}
    for before, count in zip((None, *counts), counts, strict=False):
        model, posterior = build(data, dataclasses.replace(start or StartSettings(), num_inducing=count), key=key)
        place = None if checkpoint is None else saturation_checkpoint(checkpoint, count)
        is_begun = place is not None and present_folder(place).is_dir()
        result = fit(data, model, posterior, key=key, settings=fit_settings, checkpoint=place, resume=is_begun, progress=progress)
        bounds[count] = converged_bound(_uninterrupted([result])[0].history)
        say(f"{count} inducing points: bound {bounds[count]:.1f}")
        if before is not None and not bounds[count] > bounds[before] + tolerance * num_observed:
            return Saturation(bounds, before)
    return Saturation(bounds, counts[-1])


def saturation_checkpoint(checkpoint: str | Path, count: int) -> Path:
    """Where `saturation` keeps its fit with `count` inducing points, so that it need not be made again."""
    return Path(checkpoint) / f"inducing-{count}"


def converged_bound(history: History, num_blocks: int = 4) -> float:
    """The bound over the last blocks of steps; its last value alone is noisy."""
    return float(np.mean(history.bound[-num_blocks:])) if len(history.bound) else float("nan")


def _named(candidates: Mapping[str, StartSettings] | Sequence[StartSettings]) -> dict[str, StartSettings]:
    if not candidates:
        raise ValueError(
            "There is nothing to select from: give at least one candidate, as in gpssm.start_grid(state_dim=[2, 4])."
        )
    if isinstance(candidates, Mapping):
        return dict(candidates)
    names = [field.name for field in dataclasses.fields(StartSettings)]
    differing = [name for name in names if len({getattr(c, name) for c in candidates}) > 1]
    named = {", ".join(f"{name}={getattr(c, name)}" for name in differing) or "default": c for c in candidates}
    if len(named) < len(candidates):
        raise ValueError("Two of the candidates are the same: give each once.")
    return named


def _problems(
    data: Dataset,
    named: Mapping[str, StartSettings],
    labels: Sequence[tuple[str, int]],
    settings: SelectSettings,
    key: PRNGKey,
    say: Say,
    build: Build = built_in,
) -> list[Problem]:
    """Where the fit of every label starts.

    The most states come first: where there are too many for the data, that is told before any work is done for the others.
    """

    def problem(name: str) -> Problem:
        start = named[name]
        made = Problem(data, *build(data, start, key=key), key=key, scaling=Scaling.of(data))
        bridging = f" and a free run over stretches of {start.free_run} rows" if start.free_run else ""
        say(f"{name}: starts from subspace identification{bridging}")
        return made

    def num_states(name: str) -> int:
        return 0 if named[name].state_dim == "auto" else int(named[name].state_dim)

    names = sorted(dict.fromkeys(name for name, _ in labels), key=num_states, reverse=True)
    around = {name: starts_around(problem(name), settings.num_starts, settings.spread) for name in names}
    return [around[name][number] for name, number in labels]


def _fit_all(
    problems: Sequence[Problem], labels: Sequence[tuple[str, int]], fit_settings: FitSettings, place: Path | None, say: Say
) -> list[FitResult]:
    def tell(members: list[int], histories: list[History]) -> None:
        bounds = ", ".join(f"{history.bound[-1]:.1f}" for history in histories[:6])
        more = ", …" if len(histories) > 6 else ""
        first = labels[members[0]][0]
        told = first if len(members) == 1 else f"{first} and {len(members) - 1} more"
        say(f"{told}: step {int(histories[0].steps[-1])} of {fit_settings.num_steps}, bound {bounds}{more}")

    return _uninterrupted(fit_many(problems, fit_settings, checkpoint=place, progress=tell))


def _uninterrupted(results: list[FitResult]) -> list[FitResult]:
    if any(result.status is Status.INTERRUPTED for result in results):
        raise KeyboardInterrupt
    return results


def _scored(
    data: Dataset,
    held_out: Sequence[Block],
    fits: Sequence[Sequence[FitResult]],
    labels: Sequence[tuple[str, int]],
    settings: SelectSettings,
    key: PRNGKey,
    place: Path | None,
    say: Say,
) -> tuple[Evaluation, list[float]]:
    """Every label's fits on the blocks that they were not made of, and the factors of the process noise that serve best."""
    asked = Validation(settings.horizon, settings.stride, settings.num_samples, settings.process_factors)
    done, factors = [], []
    for i, label in enumerate(labels):
        name, folder = _told(label, settings), place and place / f"score-{i}"
        own = [results[i] for results in fits]
        evaluation, factor = validated(name, own, held_out, asked, Scaling.of(data), key=key, folder=folder)
        done.append(evaluation)
        factors.append(factor)
        score = evaluation.score(name)
        noise = "" if factor == 1 else f", with {factor:.2g} times the process noise"
        windows = f"{evaluation.num_windows} windows of {evaluation.horizon} rows"
        say(f"{name}: nlpd {score.nlpd:.3f}, rmse {score.rmse:.3f} in {windows}{noise}")
    errors = {name: errors for one in done for name, errors in one.errors.items()}
    seconds = {name: taken for one in done for name, taken in one.seconds.items()}
    return dataclasses.replace(done[0], errors=errors, seconds=seconds), factors


def _told(label: tuple[str, int], settings: SelectSettings) -> str:
    name, number = label
    return name if settings.num_starts == 1 else f"{name}, start {number}"


def _table(
    labels: Sequence[tuple[str, int]],
    results: Sequence[FitResult],
    factors: Sequence[float],
    evaluation: Evaluation | None,
    settings: SelectSettings,
) -> pd.DataFrame:
    """One row a fit, numbered as in `labels`, the best first; what is not a number comes last."""
    scores = [] if evaluation is None else [evaluation.score(_told(label, settings)) for label in labels]
    metrics = () if evaluation is None else (*SCORES, "coverage90")
    table = pd.DataFrame(
        {
            "candidate": [name for name, _ in labels],
            "start": [number for _, number in labels],
            **{metric: [score.values[metric] for score in scores] for metric in metrics},
            "process_factor": list(factors),
            "bound": [converged_bound(result.history) for result in results],
            "status": [result.status.name.lower() for result in results],
            "seconds": [float(np.sum(result.history.seconds)) for result in results],
        }
    )
    in_order = table.sort_values(settings.by, ascending=settings.by != "bound", kind="stable")
    is_left = _is_left_behind(results)
    return in_order.loc[sorted(in_order.index, key=lambda i: bool(is_left[i]))]


def _is_left_behind(results: Sequence[FitResult]) -> Bool[np.ndarray, " fit"]:
    """Which fits have not come anywhere: their bound lies more than `LEFT_BEHIND` nats an observation below the best.

    Their forecasts may do well on a few rows by accident, and nothing they have learnt is to be had when they are made again.
    """
    bounds = np.array([converged_bound(result.history) for result in results])
    is_bound = np.array([result.posterior.is_lower_bound for result in results])
    counts = np.array([sum(int((~np.isnan(a)).sum()) for a in result.data.outputs) for result in results])
    if not np.isfinite(bounds[is_bound]).any():
        return np.zeros(len(results), bool)
    return is_bound & ~(bounds > np.nanmax(bounds[is_bound]) - LEFT_BEHIND * counts)


def _bound_weights(table: pd.DataFrame, order: Sequence[int]) -> np.ndarray:
    """Posterior odds with the bound in the place of the log evidence."""
    bounds = np.nan_to_num(table.loc[list(order), "bound"].to_numpy(float), nan=-np.inf)
    odds = np.exp(bounds - bounds.max()) if np.isfinite(bounds).any() else np.ones(len(bounds))
    return odds / odds.sum()


def _question(
    data: Dataset, named: Mapping[str, StartSettings], settings: SelectSettings, fit_settings: FitSettings, key: PRNGKey
) -> dict[str, Any]:
    return {
        "data": data,
        "candidates": {name: dataclasses.asdict(candidate) for name, candidate in named.items()},
        "settings": dataclasses.asdict(settings),
        "fit": dataclasses.asdict(fit_settings),
        "key": np.asarray(jr.key_data(key)).tolist(),
    }


def _check_question(place: Path, question: dict[str, Any]) -> None:
    """Raise where the folder holds another selection than the one asked for; lay the question down where it holds none."""
    folder = place / "question"
    if not present_folder(folder).is_dir():
        save(folder, question)
        return
    kept = load(folder)
    different = [name for name in question if kept.get(name) != question[name]]
    if different:
        raise ValueError(
            f"{place} holds a selection with other {' and '.join(different)}. Repeat it exactly to go on with it, or choose "
            "another folder."
        )
