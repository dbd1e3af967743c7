"""Follow a fitted model through new data: filter, smooth, and forecast from any row on.

The prior of f is the fitted q(f). It rests on the training data already, so where a sequence begins with the rows of a training
sequence, these rows move the state but teach nothing about f; every row after them does both. `particles` holds the algorithm.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Float

from gpssm._types import PRNGKey
from gpssm.data import Dataset
from gpssm.forecasts import Forecast
from gpssm.params import unwrap
from gpssm.particles import Particles, Rows, function_draws, run_and_forecast, run_filter, sample_paths, start_filter
from gpssm.predict import to_forecast
from gpssm.result import FitResult

ROW_BLOCK = 64  # rows are padded to a multiple of it, so that sequences of nearly one length share a program
ORIGINS_AT_ONCE = 16
PATHS_AT_ONCE = 10


@dataclass(frozen=True)
class FilteredSequence:
    """What the rows of one sequence say up to each of them. States are in the model's units, outputs in the user's."""

    means: Float[np.ndarray, "time state"]
    covariances: Float[np.ndarray, "time state state"]
    samples: Float[np.ndarray, "time particle state"]
    weights: Float[np.ndarray, "time particle"]
    predicted_means: Float[np.ndarray, "time output"]  # one step ahead
    predicted_covariances: Float[np.ndarray, "time output output"]
    log_densities: Float[np.ndarray, " time"]  # of the observed outputs given all rows before
    effective_sizes: Float[np.ndarray, " time"]  # of the particles, before they are resampled
    particles: Particles  # after the last row
    last_control: Float[np.ndarray, " control"]  # in standard units
    num_rows: int  # since the start of the sequence, those of an earlier call included
    repeats: tuple[int, ...]  # training sequences that all rows so far are the beginning of

    @property
    def log_evidence(self) -> float:
        """log p(outputs | q(f)) of these rows (and given those of an earlier call), in the user's units."""
        return float(np.sum(self.log_densities))


@dataclass(frozen=True)
class Filtered:
    """The posterior over states and f after each row, sequence by sequence."""

    result: FitResult
    sequences: tuple[FilteredSequence, ...]

    @property
    def log_evidence(self) -> float:
        """Of all sequences, each starting from q(f) afresh."""
        return sum(sequence.log_evidence for sequence in self.sequences)

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, which: int) -> FilteredSequence:
        return self.sequences[which]

    def inducing_draws(
        self, num_samples: int, *, key: PRNGKey, sequence: int = 0
    ) -> tuple[Float[np.ndarray, "sample state"], Float[np.ndarray, "sample state inducing"]]:
        """Joint samples of the state after the last row and of v, the whitened inducing outputs of f."""
        result, particles = self.result, self.sequences[sequence].particles
        states, values = function_draws(result.model, result.posterior.inducing, particles, num_samples, key)
        return np.asarray(states), np.asarray(values)

    def transition_moments(
        self, points: Float[np.ndarray, "point input"], sequence: int = 0
    ) -> tuple[Float[np.ndarray, "point state"], Float[np.ndarray, "point state"]]:
        """Mean and variance of f after the last row, at inputs (state, then control) in the model's units."""
        model, q = unwrap((self.result.model, self.result.posterior.inducing))
        particles, basis = self.sequences[sequence].particles, model.transition.basis()
        weights = jnp.exp(particles.log_weights)

        def moments(point: jax.Array) -> tuple[jax.Array, jax.Array]:
            projection = basis.project(point)
            direction = jnp.einsum("dmk,dm->dk", q.chol, jnp.broadcast_to(projection.weights, q.mean.shape))
            shifts = jnp.einsum("dk,ndk->nd", direction, particles.learnt)
            shift = weights @ shifts
            inside = jnp.sum(direction * jax.vmap(jnp.linalg.solve)(particles.precision, direction), axis=-1)
            mean = model.transition.mean(point) + jnp.sum(projection.weights * q.mean, axis=-1) + shift
            return mean, projection.residual_variance + inside + weights @ (shifts - shift[None]) ** 2

        mean, variance = jax.vmap(moments)(jnp.asarray(points))
        return np.asarray(mean), np.asarray(variance)


@dataclass(frozen=True)
class Smoothed:
    """Joint samples of the past of one sequence given all its rows; states in the model's units, outputs in the user's."""

    states: Float[np.ndarray, "sample time state"]
    outputs: Float[np.ndarray, "sample time output"]  # as observed where they are, drawn where they are missing
    inducing: Float[np.ndarray, "sample state inducing"]  # the v that each path goes with

    @property
    def means(self) -> Float[np.ndarray, "time state"]:
        return self.states.mean(axis=0)

    @property
    def covariances(self) -> Float[np.ndarray, "time state state"]:
        spread = self.states - self.means
        return np.einsum("sti,stj->tij", spread, spread) / len(self.states)


def filter(
    result: FitResult,
    data: Dataset,
    *,
    key: PRNGKey,
    num_particles: int = 500,
    start: Filtered | None = None,
    is_learning: bool = True,
) -> Filtered:
    """The posterior over the state and f after every row of `data`, in the user's units, with gaps (NaN) as they are.

    Each sequence is filtered by itself, from q(f). `start` is the result of an earlier call: the rows of `data` then follow those
    of that call, sequence by sequence, and with the same key the outcome is that of one call. Without `is_learning` f stays q(f),
    and only the state is followed.
    """
    check_columns(result, data)
    _check_positive(num_particles=num_particles)
    if start is not None and len(start) != data.num_sequences:
        raise ValueError(
            f"`start` followed {len(start)} sequences, but the data hold {data.num_sequences}: give the next rows of each."
        )
    befores = [None] * data.num_sequences if start is None else start.sequences
    longest = _padded_length(data.max_length)
    done = [_filter_one(result, data, i, longest, befores[i], num_particles, is_learning, key) for i in range(data.num_sequences)]
    return Filtered(result, tuple(done))


def smooth(
    result: FitResult,
    data: Dataset,
    *,
    key: PRNGKey,
    num_samples: int = 100,
    num_particles: int = 500,
    particles_per_sample: int = 32,
    is_learning: bool = True,
) -> tuple[Smoothed, ...]:
    """Joint samples of all states, one record a sequence, given all its rows, and its outputs with the gaps filled.

    A draw of f is taken after the last row of a filter with `num_particles`; given it the states are Markov, and a filter of
    `particles_per_sample` and one backward simulation give a path of them.
    """
    filtered = filter(result, data, key=key, num_particles=num_particles, is_learning=is_learning)
    _check_positive(num_samples=num_samples, particles_per_sample=particles_per_sample)
    longest = _padded_length(data.max_length)
    smoothed = []
    for i, length in enumerate(data.lengths):
        key_values, key_paths = jr.split(jr.fold_in(key, i))
        values = filtered.inducing_draws(num_samples, key=key_values, sequence=i)[1]
        rows, _ = _rows(result, data, i, longest, None, is_learning)
        states, outputs = sample_paths(
            result.model, jnp.asarray(values), rows, particles_per_sample, min(PATHS_AT_ONCE, num_samples), key_paths
        )
        outputs = result.scaling.outputs_back(np.asarray(outputs)[:, :length])
        seen = ~np.isnan(data.outputs[i])
        smoothed.append(Smoothed(np.asarray(states)[:, :length], np.where(seen[None], data.outputs[i], outputs), values))
    return tuple(smoothed)


@dataclass(frozen=True)
class FittedForecaster:
    """A fitted model as `evaluate` wants it: forecasts from any row, each given the rows before it and nothing after.

    One pass of the filter serves all origins. Each sample takes a state and an f from the particles there and keeps that f.
    """

    result: FitResult
    num_particles: int = 500
    num_samples: int = 200
    num_frequencies: int = 32  # random features of what v leaves open of f
    is_learning: bool = True  # of f from rows that are not training data

    def forecast(self, history: Dataset, steps: int, controls: Any = None, *, key: PRNGKey) -> Forecast:
        """The next `steps` rows after `history` (one sequence), under the controls of those rows; steps - 1 rows will do."""
        check_columns(self.result, history)
        _check_one_sequence(history)
        _check_positive(steps=steps)
        blank = np.full((steps, history.num_outputs), np.nan)
        longer = replace(
            history,
            outputs=(np.concatenate([history.outputs[0], blank]),),
            controls=(np.concatenate([history.controls[0], _planned(history, steps, controls)]),),
        )
        return self.forecasts(longer, [history.lengths[0]], steps, key=key)[0]

    def forecasts(self, data: Dataset, origins: Sequence[int], steps: int, *, key: PRNGKey) -> list[Forecast]:
        """One forecast an origin o: given rows [0, o) of the one sequence in `data`, of rows o ... o+steps-1."""
        check_columns(self.result, data)
        _check_one_sequence(data)
        _check_positive(steps=steps, num_particles=self.num_particles, num_samples=self.num_samples)
        wanted = sorted({int(origin) for origin in origins})
        if not wanted:
            return []
        if wanted[0] < 1:
            raise ValueError(f"A forecast needs at least one row of history, but got the origin {wanted[0]}.")
        needed = wanted[-1] + (steps - 1 if data.num_controls else 0)
        if needed > data.lengths[0]:
            raise ValueError(
                f"A forecast of {steps} steps from row {wanted[-1]} needs {needed} rows of history and controls, but the data "
                f"have {data.lengths[0]}. Ask for fewer steps or earlier origins."
            )
        made = dict(zip(wanted, self._forecasts(data, wanted, steps, key), strict=True))
        return [made[int(origin)] for origin in origins]

    def _forecasts(self, data: Dataset, origins: list[int], steps: int, key: PRNGKey) -> list[Forecast]:
        """In order: the rows before the first origin, then chunks of origins, every chunk by the same program."""
        result, first = self.result, origins[0]
        model, inducing = result.model, result.posterior.inducing
        table, _ = _rows(result, data, 0, data.lengths[0], None, self.is_learning)
        particles = start_filter(model, inducing, self.num_particles, key)
        particles, _ = run_filter(model, inducing, particles, _cut(table, [0], [first], _padded_length(first))[0], key)
        acting = np.asarray(result.scaling.controls(data.controls[0]))
        acting = np.concatenate([acting, np.zeros((steps, data.num_controls))])  # for models without controls
        longest = max(np.diff(origins), default=1)
        forecasts = []
        for i in range(0, len(origins), ORIGINS_AT_ONCE):
            chunk = origins[i : i + ORIGINS_AT_ONCE]
            ends = np.array(chunk + [chunk[-1]] * (min(ORIGINS_AT_ONCE, len(origins)) - len(chunk)))
            starts = np.concatenate([[origins[max(i - 1, 0)]], ends[:-1]])
            plans = jnp.asarray(acting[ends[:, None] - 1 + np.arange(steps)])
            segments = _stacked(_cut(table, starts, ends, int(longest)))
            particles, states, outputs, emission = run_and_forecast(
                model, inducing, particles, segments, jnp.asarray(ends), plans, self.num_samples, self.num_frequencies, key
            )
            forecasts += [to_forecast(states[j], outputs[j], emission, result, origin) for j, origin in enumerate(chunk)]
        return forecasts


def check_columns(result: FitResult, data: Dataset) -> None:
    """Raise where `data` have other columns than the model was fitted to."""
    for kind, ours, theirs in (
        ("outputs", result.data.output_names, data.output_names),
        ("controls", result.data.control_names, data.control_names),
    ):
        if len(ours) != len(theirs) or (set(ours) == set(theirs) and ours != theirs):
            raise ValueError(
                f"The model was fitted to the {kind} {', '.join(ours) or '(none)'}, but the data have "
                f"{', '.join(theirs) or '(none)'}: give the same columns in the same order."
            )


def _filter_one(
    result: FitResult,
    data: Dataset,
    which: int,
    longest: int,
    before: FilteredSequence | None,
    num_particles: int,
    is_learning: bool,
    key: PRNGKey,
) -> FilteredSequence:
    model, inducing, length = result.model, result.posterior.inducing, data.lengths[which]
    key = jr.fold_in(key, which) if which else key
    rows, repeats = _rows(result, data, which, longest, before, is_learning)
    start = start_filter(model, inducing, num_particles, key) if before is None else before.particles
    particles, passed = run_filter(model, inducing, start, rows, key)
    told = {name: np.asarray(leaf)[:length] for name, leaf in passed._asdict().items()}
    scaling = result.scaling
    is_observed = ~np.isnan(data.outputs[which])
    return FilteredSequence(
        means=told["mean"],
        covariances=told["covariance"],
        samples=told["states"],
        weights=np.exp(told["log_weights"]),
        predicted_means=np.asarray(scaling.outputs_back(told["predicted_mean"])),
        predicted_covariances=told["predicted_covariance"] * np.outer(scaling.output_scale, scaling.output_scale),
        log_densities=told["log_density"] + is_observed @ scaling.log_jacobian,
        effective_sizes=told["effective_size"],
        particles=particles,
        last_control=np.asarray(scaling.controls(data.controls[which][-1])),
        num_rows=length + (0 if before is None else before.num_rows),
        repeats=repeats,
    )


def _rows(
    result: FitResult, data: Dataset, which: int, padded: int, before: FilteredSequence | None, is_learning: bool
) -> tuple[Rows, tuple[int, ...]]:
    """One sequence for the filter, padded, and the training sequences that it is the beginning of."""
    one = data[which]
    window = jax.tree.map(lambda leaf: np.asarray(leaf[0]), one.windows(result.scaling))
    length, first = one.lengths[0], 0 if before is None else before.num_rows
    earlier = np.zeros(one.num_controls) if before is None else before.last_control
    controls = np.concatenate([earlier[None].astype(window.controls.dtype), window.controls[:-1]])
    is_new, repeats = _new_rows(result, one, before)
    if not is_learning:
        is_new = np.zeros_like(is_new)
    leaves = (window.outputs, window.is_observed, controls, window.is_real, is_new, np.arange(first, first + length))
    table = Rows(*(jnp.asarray(leaf) for leaf in leaves))
    return _cut(table, [0], [length], padded)[0], repeats


def _new_rows(result: FitResult, one: Dataset, before: FilteredSequence | None) -> tuple[np.ndarray, tuple[int, ...]]:
    """Which rows are not a training sequence's from its beginning, and the training sequences that agree to the last row."""
    train, length = result.data, one.lengths[0]
    first = 0 if before is None else before.num_rows
    candidates = range(train.num_sequences) if before is None else before.repeats
    is_known, repeats = np.zeros(length, bool), []
    for j in candidates:
        outputs, controls = train.outputs[j][first : first + length], train.controls[j][first : first + length]
        count = len(outputs)
        same = np.all((outputs == one.outputs[0][:count]) | (np.isnan(outputs) & np.isnan(one.outputs[0][:count])), axis=1)
        # the control of a row acts after it: the row itself is the training data's if the one before was, control and all
        same_control = np.all(controls == one.controls[0][:count], axis=1)
        run = np.cumprod(same & np.concatenate([[True], same_control[:-1]])[:count]).astype(bool)
        is_known[:count] |= run
        if count == length and run.all() and (count == 0 or same_control[-1]):
            repeats.append(j)
    return ~is_known, tuple(repeats)


def _cut(table: Rows, starts: Any, ends: Any, padded: int) -> list[Rows]:
    """Pieces [start, end) of a table, each padded to the same length."""
    pieces = []
    for start, end in zip(starts, ends, strict=True):
        piece = [np.asarray(leaf)[start:end] for leaf in table]
        pads = [[(0, padded - len(leaf)), *[(0, 0)] * (leaf.ndim - 1)] for leaf in piece]
        pieces.append(Rows(*(jnp.asarray(np.pad(leaf, pad)) for leaf, pad in zip(piece, pads, strict=True))))
    return pieces


def _stacked(pieces: list[Rows]) -> Rows:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *pieces)


def _padded_length(length: int) -> int:
    return -(-length // ROW_BLOCK) * ROW_BLOCK


def _planned(history: Dataset, steps: int, controls: Any) -> Float[np.ndarray, "time control"]:
    """The controls of the rows to be forecast; that of the last acts on nothing."""
    names = history.control_names
    if not names:
        if controls is not None and np.size(controls):
            raise ValueError("The model has no controls, but a forecast was asked with some: leave them out.")
        return np.zeros((steps, 0))
    if controls is None and steps > 1:
        raise ValueError(
            f"The model has the controls {', '.join(names)}: a forecast of {steps} steps needs their next {steps - 1} rows."
        )
    given = np.zeros((0, len(names))) if controls is None else np.asarray(controls, float)
    given = given[:, None] if given.ndim == 1 and len(names) == 1 else given
    if given.ndim != 2 or given.shape[1] != len(names) or len(given) < steps - 1:
        raise ValueError(
            f"A forecast of {steps} steps needs the next {steps - 1} rows of {len(names)} controls ({', '.join(names)}), "
            f"but got the shape {given.shape}."
        )
    ahead = given[: steps - 1]
    if not np.isfinite(ahead).all():
        row, column = np.argwhere(~np.isfinite(ahead))[0]
        raise ValueError(f"The future controls must be finite, but row {row} of {names[column]} is {ahead[row, column]}.")
    return np.concatenate([ahead, ahead[-1:] if len(ahead) else history.controls[0][-1:]])


def _check_one_sequence(data: Dataset) -> None:
    if data.num_sequences != 1:
        raise ValueError(
            f"Forecasts are made for one sequence at a time: expected data[i], but got {data.num_sequences} sequences."
        )


def _check_positive(**numbers: int) -> None:
    for name, value in numbers.items():
        if value < 1:
            raise ValueError(f"`{name}` must be at least 1, but got {value}.")
