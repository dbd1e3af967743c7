"""Many fits as one program: starts, data draws, datasets or seeds side by side on one device.

On an accelerator a step of a chain costs the same for one model as for many, so fits whose arrays agree in kind run under one
`vmap`. Sequences are padded to the longest, and so are the tables of free steps; the padding is taken off again at the end.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Bool

from gpssm._precision import jit
from gpssm._types import PRNGKey
from gpssm.agreement import check_fits_together
from gpssm.atomic import present_folder
from gpssm.data import Dataset, Scaling, Window
from gpssm.devices import everywhere, here, over_problems
from gpssm.elbo import Elbo
from gpssm.fit import (
    INITIALISATION,
    FitSettings,
    TrainingState,
    _Blocks,
    _fingerprint,
    _num_observed,
    _process_scale,
    _start,
    _status,
    _training_windows,
    _with_constrained_inducing,
    _with_plain_inducing,
    free_run,
    with_process_factor,
)
from gpssm.initialise import StartSettings, initialise
from gpssm.model import GPSSM
from gpssm.params import Positive, trainable
from gpssm.posteriors import AbstractPosterior, FreeSteps
from gpssm.result import FitResult, History, Status
from gpssm.save import load, save

ReportMany = Callable[[list[int], list[History]], None]


@dataclass(frozen=True)
class Problem:
    """One fit to be made: data, where it starts, and its randomness."""

    data: Dataset
    model: GPSSM
    posterior: AbstractPosterior
    key: PRNGKey
    scaling: Scaling

    @classmethod
    def standardised(cls, data: Dataset, *, key: PRNGKey, start: StartSettings | None = None) -> "Problem":
        """The fit that `gpssm.fit(data, key=key, start=start)` makes."""
        scaling = Scaling.of(data)
        built = initialise(data, key=jr.fold_in(key, INITIALISATION), scaling=scaling, settings=start)
        return cls(data, *free_run(data, built, start, key=key, scaling=scaling), key, scaling)

    def perturbed(self, spread: float, *, key: PRNGKey) -> "Problem":
        """Another start: every positive number of the model (noise, lengthscales, variances) times exp(spread N(0, 1)).

        How the noise is split between process and observation decides which optimum is found more than anything else.
        """
        nodes = [n for n in jax.tree.leaves(self.model, is_leaf=_is_positive) if _is_positive(n)]
        keys = iter(jr.split(key, max(1, len(nodes))))

        def moved(node: Any) -> Any:
            if not _is_positive(node):
                return node
            value = node.value()
            return Positive(value * jnp.exp(spread * jr.normal(next(keys), value.shape, value.dtype)))

        model = jax.tree.map(moved, self.model, is_leaf=_is_positive)
        return Problem(self.data, model, self.posterior, self.key, self.scaling)


def fit_starts(
    data: Dataset,
    num_starts: int,
    *,
    key: PRNGKey,
    settings: FitSettings | None = None,
    start: StartSettings | None = None,
    spread: float = 0.5,
    progress: ReportMany | None = None,
) -> list[FitResult]:
    """Fits from `num_starts` starts as one program: that of `gpssm.fit` first, then others around it.

    `max(results, key=lambda r: r.bound)` keeps the best by the bound; `gpssm.select` chooses by validation.
    """
    if num_starts < 1:
        raise ValueError(f"`num_starts` must be at least 1, but got {num_starts}.")
    return fit_many(
        starts_around(Problem.standardised(data, key=key, start=start), num_starts, spread), settings, progress=progress
    )


def starts_around(problem: Problem, num_starts: int, spread: float = 0.5) -> list[Problem]:
    """The problem itself, and `num_starts - 1` perturbed ones."""
    keys = [jr.fold_in(jr.fold_in(problem.key, INITIALISATION), i) for i in range(1, num_starts)]
    return [problem, *(problem.perturbed(spread, key=key) for key in keys)]


def fit_many(
    problems: Sequence[Problem],
    settings: FitSettings | None = None,
    *,
    checkpoint: str | Path | None = None,
    progress: ReportMany | None = None,
) -> list[FitResult]:
    """One result a problem. Problems of one shape run vectorised, until each of them would stop.

    With `checkpoint` every group of one shape keeps its state in that folder between blocks, and a call with the same problems
    goes on from there. `progress(members, histories)` is called after every block of steps.
    """
    settings = settings or FitSettings()
    for problem in problems:
        check_fits_together(problem.data, problem.scaling, problem.model, problem.posterior)
    longest = max((problem.data.max_length for problem in problems), default=0)
    prepared = [_prepared(problem, longest, settings) for problem in problems]
    results: dict[int, FitResult] = {}
    for number, members in enumerate(_groups(prepared)):
        place = None if checkpoint is None else Path(checkpoint) / f"group-{number}"
        chosen = [problems[i] for i in members]
        state, histories, statuses = _fit_group([prepared[i] for i in members], chosen, members, settings, place, progress)
        for j, (i, problem) in enumerate(zip(members, chosen, strict=True)):
            own = _member(state, j)
            model, posterior = eqx.combine(own.good, prepared[i].blocks.static)
            model = with_process_factor(model, settings.process_factor)
            posterior = _unpadded(_with_constrained_inducing(posterior), problem.posterior)
            results[i] = FitResult(
                model, posterior, problem.scaling, problem.data, histories[j], statuses[j], asdict(settings), int(own.num_skipped)
            )
    return [results[i] for i in range(len(problems))]


class _Prepared(NamedTuple):
    blocks: _Blocks
    state: TrainingState


class _Checkpoint(NamedTuple):
    state: TrainingState
    histories: list[History]
    fingerprints: list[dict]


def _prepared(problem: Problem, longest: int, settings: FitSettings) -> _Prepared:
    windows, posterior = _padded_windows(problem.data.windows(problem.scaling), longest), _padded(problem.posterior, longest - 1)
    windows = _training_windows(windows, posterior, settings)
    if settings.natural_gradient is not None:
        posterior = _with_plain_inducing(posterior)
    tree = (problem.model, posterior)
    params, static = eqx.partition(tree, trainable(tree))
    return _Prepared(_Blocks(static, windows, settings, problem.key, _num_observed(windows)), _start(params, settings))


def _groups(prepared: Sequence[_Prepared]) -> list[list[int]]:
    """The indices of what can be stacked: equal structure, shapes and types, and all else the same."""
    groups: list[tuple[Any, Any, list[int]]] = []
    for i, one in enumerate(prepared):
        arrays, rest = eqx.partition(one, eqx.is_array)
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), arrays)
        for known_shapes, known_rest, members in groups:
            if eqx.tree_equal(known_shapes, shapes) is True and eqx.tree_equal(known_rest, rest) is True:
                members.append(i)
                break
        else:
            groups.append((shapes, rest, [i]))
    return [members for _, _, members in groups]


def _fit_group(
    prepared: Sequence[_Prepared],
    problems: Sequence[Problem],
    members: list[int],
    settings: FitSettings,
    place: Path | None,
    progress: ReportMany | None,
) -> tuple[TrainingState, list[History], list[Status]]:
    """The stacked end state of one group, and each member's history and status."""
    parts = [eqx.partition(one.blocks, eqx.is_array) for one in prepared]
    arrays, rest = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(arrays for arrays, _ in parts)), parts[0][1]
    state = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(one.state for one in prepared))
    histories = [History.empty(problem.model.num_states) for problem in problems]
    prints = [_fingerprint(problem.data, settings, problem.key) for problem in problems]
    if place is not None and present_folder(place).is_dir():
        saved = load(place, dtype="saved")
        if not isinstance(saved, _Checkpoint) or saved.fingerprints != prints:
            raise ValueError(f"The checkpoint {place} belongs to other fits: their data, settings or keys differ. Remove it.")
        state, histories = saved.state, list(saved.histories)
    arrays, state = everywhere((arrays, state))
    counts = [one.blocks.num_observed for one in prepared]
    statuses = _statuses([None] * len(problems), state, histories, settings, counts)
    while None in statuses:
        began, step = time.perf_counter(), int(state.step[0])
        try:
            done = _run_together(arrays, rest, state, min(settings.block_steps, settings.num_steps - step))
            state, (terms, is_finite) = jax.block_until_ready(done)
        except KeyboardInterrupt:
            statuses = [status or Status.INTERRUPTED for status in statuses]
            break
        seconds = (time.perf_counter() - began) / len(problems)
        for j, one in enumerate(prepared):
            means = _mean_terms(_member(terms, j), np.asarray(is_finite[j]))
            scale = _process_scale(_member(state.good, j), one.blocks.static)
            histories[j] = histories[j].with_block(int(state.step[j]), means, scale, seconds)
        statuses = _statuses(statuses, state, histories, settings, counts)
        if place is not None:
            save(place, _Checkpoint(state, histories, prints))
        if progress is not None:
            progress(members, histories)
    return here(state), histories, [status for status in statuses if status is not None]


def _member(stacked: Any, which: int) -> Any:
    return jax.tree.map(lambda leaf: leaf[which], stacked)


def _mean_terms(terms: Elbo, is_finite: Bool[np.ndarray, " step"]) -> Elbo:
    """Over the steps of a block that were finite."""
    return jax.tree.map(lambda leaf: jnp.asarray(np.mean(np.asarray(leaf)[is_finite]) if is_finite.any() else np.nan), terms)


@jit
def _run_together(arrays: Any, rest: Any, state: TrainingState, num_steps: int) -> tuple[TrainingState, tuple]:
    def one(arrays: Any, state: TrainingState) -> tuple[TrainingState, tuple]:
        blocks = eqx.combine(arrays, rest)
        return jax.lax.scan(lambda carry, _: blocks.step(carry), state, None, length=num_steps)

    return over_problems(one, len(state.step))(arrays, state)


def _statuses(
    before: Sequence[Status | None], state: TrainingState, histories: Sequence[History], settings: FitSettings, counts: Sequence
) -> list[Status | None]:
    """The first reason to stop that each member met; it may have gone on with the others since."""

    def status(j: int) -> Status | None:
        if before[j] is not None or not len(histories[j].bound):
            return before[j]
        return _status(_member(state, j), histories[j], settings, counts[j])

    return [status(j) for j in range(len(before))]


def _padded_windows(windows: Window, longest: int) -> Window:
    short = longest - windows.outputs.shape[1]

    def pad(array: jax.Array) -> jax.Array:
        return jnp.pad(array, ((0, 0), (0, short), *[(0, 0)] * (array.ndim - 2)))

    outputs, is_observed, controls = pad(windows.outputs), pad(windows.is_observed), pad(windows.controls)
    return Window(outputs, is_observed, controls, pad(windows.is_real), windows.sequence, windows.start)


def _tables(posterior: Any) -> tuple:
    return posterior.local.gain, posterior.local.offset, posterior.local.chol


def _padded(posterior: AbstractPosterior, num_steps: int) -> AbstractPosterior:
    """The posterior with tables of free steps that are long enough; the rows added are never counted."""
    if not isinstance(getattr(posterior, "local", None), FreeSteps):
        return posterior

    def pad(leaf: jax.Array) -> jax.Array:
        widths = ((0, 0), (0, max(0, num_steps - leaf.shape[1])), *[(0, 0)] * (leaf.ndim - 2))
        return jnp.pad(leaf, widths, mode="edge")

    return eqx.tree_at(_tables, posterior, jax.tree.map(pad, _tables(posterior)))


def _unpadded(posterior: AbstractPosterior, before: AbstractPosterior) -> AbstractPosterior:
    if not isinstance(getattr(posterior, "local", None), FreeSteps):
        return posterior
    cut = jax.tree.map(lambda new, old: new[:, : old.shape[1]], _tables(posterior), _tables(before))
    return eqx.tree_at(_tables, posterior, cut)


def _is_positive(node: Any) -> bool:
    return isinstance(node, Positive)
