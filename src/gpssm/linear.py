"""Linear-Gaussian state-space models and exact inference in them: filter, smoother, forecast.

    x[1] ~ N(m, P),    x[t+1] = A x[t] + B c[t] + b + N(0, Q),    y[t] = C x[t] + d + N(0, R)

Row t of the controls acts between rows t and t+1 and there is no direct feedthrough: the form of a GPSSM. NumPy in float64
only; a NaN output is missing. Means and smoothed covariances are affine recursions, run as logarithmic scans over all
sequences at once; only the filter's covariance is a loop over time, and it stops as soon as it has converged.
"""

import itertools
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float

Outputs = Float[np.ndarray, "time output"]
Controls = Float[np.ndarray, "time control"]


@dataclass(frozen=True)
class Gaussians:
    """State means and covariances at every time, and the log evidence of the outputs that they rest on."""

    mean: Float[np.ndarray, "time state"]
    covariance: Float[np.ndarray, "time state state"]
    log_evidence: float


@dataclass(frozen=True)
class LinearStateSpace:
    """x[t+1] = A x[t] + B c[t] + b + N(0, Q), y[t] = C x[t] + d + N(0, R), x[1] ~ N(m, P)."""

    transition: Float[np.ndarray, "state state"]
    control: Float[np.ndarray, "state control"]
    offset: Float[np.ndarray, " state"]
    emission: Float[np.ndarray, "output state"]
    emission_offset: Float[np.ndarray, " output"]
    process_covariance: Float[np.ndarray, "state state"]
    observation_covariance: Float[np.ndarray, "output output"]
    initial_mean: Float[np.ndarray, " state"]
    initial_covariance: Float[np.ndarray, "state state"]

    @property
    def state_dim(self) -> int:
        return self.transition.shape[0]

    def kalman_filter(self, outputs: Outputs, controls: Controls | None = None) -> Gaussians:
        """p(x[t] | y[1..t]) at every t, and log p(y[1..T]); a NaN output is missing."""
        passed = run_filter(self, batch_of([outputs], _as_controls([outputs], controls)))
        return Gaussians(passed.mean[0], passed.covariance[0], float(passed.log_evidence[0]))

    def smoother(self, outputs: Outputs, controls: Controls | None = None) -> Gaussians:
        """p(x[t] | y[1..T]) at every t (Rauch-Tung-Striebel)."""
        batch = batch_of([outputs], _as_controls([outputs], controls))
        passed = run_filter(self, batch)
        mean, covariance, _ = run_smoother(self, batch, passed)
        return Gaussians(mean[0], covariance[0], float(passed.log_evidence[0]))

    def forecast_moments(
        self,
        mean: Float[np.ndarray, " state"],
        covariance: Float[np.ndarray, "state state"],
        controls: Float[np.ndarray, "_ control"] | None,
        steps: int,
    ) -> tuple[Float[np.ndarray, "time output"], Float[np.ndarray, "time output output"]]:
        """Means and covariances of the next `steps` outputs, observation noise included.

        `mean` and `covariance` are of the state now; row 0 of `controls` acts between now and the first step.
        """
        num_controls = self.control.shape[1]
        pushes = np.zeros((steps, 0)) if controls is None else controls
        if pushes.shape[0] < steps or pushes.shape[1] != num_controls:
            raise ValueError(
                f"a forecast of {steps} steps needs controls of shape [{steps}, {num_controls}] (row 0 acts between "
                f"the given state and the first step), got {list(pushes.shape)}"
            )
        means, covariances = np.empty((steps, len(self.emission_offset))), []
        for step in range(steps):
            mean = self.transition @ mean + self.control @ pushes[step] + self.offset
            covariance = self.transition @ covariance @ self.transition.T + self.process_covariance
            means[step] = self.emission @ mean + self.emission_offset
            covariances.append(self.emission @ covariance @ self.emission.T + self.observation_covariance)
        return means, np.reshape(covariances, (steps, *self.observation_covariance.shape))

    def change_basis(self, basis: Float[np.ndarray, "state state"]) -> "LinearStateSpace":
        """The same model of the outputs with states `basis @ x`."""
        back = np.linalg.inv(basis)
        return replace(
            self,
            transition=basis @ self.transition @ back,
            control=basis @ self.control,
            offset=basis @ self.offset,
            emission=self.emission @ back,
            process_covariance=symmetric(basis @ self.process_covariance @ basis.T),
            initial_mean=basis @ self.initial_mean,
            initial_covariance=symmetric(basis @ self.initial_covariance @ basis.T),
        )


class Batch(NamedTuple):
    outputs: Float[np.ndarray, "sequence time output"]  # 0 where missing or padded
    is_observed: Bool[np.ndarray, "sequence time output"]  # of padded rows: True, so that they share gains
    controls: Float[np.ndarray, "sequence time control"]
    is_real: Bool[np.ndarray, "sequence time"]


def _as_controls(outputs, controls):
    return [np.zeros((len(outputs[0]), 0)) if controls is None else np.asarray(controls, float)]


def batch_of(outputs, controls) -> Batch:
    longest = max(map(len, outputs))

    def padded(array):
        return np.pad(np.asarray(array, float), ((0, longest - len(array)), (0, 0)))

    values = np.stack([padded(y) for y in outputs])
    is_real = np.arange(longest) < np.array([len(y) for y in outputs])[:, None]
    is_observed = ~np.isnan(values)
    return Batch(np.where(is_observed, values, 0.0), is_observed, np.stack([padded(c) for c in controls]), is_real)


class Filtered(NamedTuple):
    mean: np.ndarray  # filtered, [sequence, time, state]
    covariance: np.ndarray
    predicted_mean: np.ndarray
    predicted_covariance: np.ndarray
    log_evidence: np.ndarray  # [sequence]


def symmetric(a):
    return (a + np.swapaxes(a, -1, -2)) / 2


def _affine_scan(gain, drive, first):
    """x[0] = first and x[t+1] = gain[t] x[t] + drive[t], all t at once in log2(T) passes (Kogge and Stone)."""
    value = np.concatenate([first[:, None], drive], axis=1)
    factor = np.concatenate([np.zeros_like(gain[:, :1]), gain], axis=1)
    shift = 1
    while shift < value.shape[1]:
        value[:, shift:] += (factor[:, shift:] @ value[:, :-shift, :, None])[..., 0]
        shift *= 2
        if shift < value.shape[1]:
            factor[:, shift // 2 :] = factor[:, shift // 2 :] @ factor[:, : -shift // 2]
    return value


def _congruence_scan(gain, drive):
    """V[T] = drive[T] and V[t] = gain[t] V[t+1] gain[t]' + drive[t], all t at once."""
    value, factor, shift = drive.copy(), gain.copy(), 1
    while shift < value.shape[1]:
        value[:, :-shift] += factor[:, :-shift] @ value[:, shift:] @ np.swapaxes(factor[:, :-shift], -1, -2)
        factor[:, :-shift] = factor[:, :-shift] @ factor[:, shift:]
        factor[:, -shift:] = 0.0
        shift *= 2
    return value


def _covariances(model: LinearStateSpace, is_observed):
    """The part of the filter that the data do not enter, for one pattern of missing outputs."""
    num_steps, n, p = len(is_observed), model.state_dim, is_observed.shape[1]
    predicted, filtered = np.empty((2, num_steps, n, n))
    gain, precision, log_det = np.zeros((num_steps, n, p)), np.zeros((num_steps, p, p)), np.empty(num_steps)
    is_new = np.append(True, (is_observed[1:] != is_observed[:-1]).any(1))
    changes = np.append(np.flatnonzero(is_new), num_steps)
    covariance, eye = model.initial_covariance, np.eye(n)
    for start, end in itertools.pairwise(changes):  # within, the same outputs are observed
        seen = np.flatnonzero(is_observed[start])
        square = np.ix_(seen, seen)
        emission, noise = model.emission[seen], model.observation_covariance[square]
        for t in range(start, end):
            predicted[t] = covariance
            if t > start and np.abs(covariance - predicted[t - 1]).max() <= 1e-12 * np.abs(covariance).max():
                for array in (predicted, filtered, gain, precision, log_det):
                    array[t:end] = array[t - 1]
                covariance = model.transition @ filtered[t - 1] @ model.transition.T + model.process_covariance
                break
            across = covariance @ emission.T
            total = emission @ across + noise
            if len(seen) == 1:
                inverse, log_det[t] = 1 / total, np.log(total[0, 0]) if total[0, 0] > 0 else np.nan  # rounding may get there
            else:
                inverse = np.linalg.inv(total)
                log_det[t] = -np.linalg.slogdet(inverse)[1]
            g = across @ inverse
            gain[t][:, seen], precision[t][square] = g, inverse
            rest = eye - g @ emission
            filtered[t] = rest @ covariance @ rest.T + g @ noise @ g.T
            covariance = symmetric(model.transition @ filtered[t] @ model.transition.T + model.process_covariance)
    filtered = symmetric(filtered)
    return predicted, filtered, gain, precision, log_det


def run_filter(model: LinearStateSpace, batch: Batch) -> Filtered:
    num_sequences, num_steps, num_outputs = batch.outputs.shape
    patterns, which = np.unique(batch.is_observed.reshape(num_sequences, -1), axis=0, return_inverse=True)
    parts = [_covariances(model, pattern.reshape(num_steps, num_outputs)) for pattern in patterns]
    predicted, filtered, gain, precision, log_det = (np.stack(part)[which.ravel()] for part in zip(*parts, strict=True))
    centred = batch.outputs - model.emission_offset
    drive = batch.controls @ model.control.T + model.offset
    drive += (gain @ centred[..., None])[..., 0] @ model.transition.T
    closed = model.transition @ (np.eye(model.state_dim) - gain @ model.emission)
    first = np.broadcast_to(model.initial_mean, (num_sequences, model.state_dim))
    predicted_mean = _affine_scan(closed[:, :-1], drive[:, :-1], first)
    innovation = np.where(batch.is_observed, centred - predicted_mean @ model.emission.T, 0.0)
    mean = predicted_mean + (gain @ innovation[..., None])[..., 0]
    terms = batch.is_observed.sum(2) * np.log(2 * np.pi) + log_det
    terms = terms + np.einsum("sti,stij,stj->st", innovation, precision, innovation)
    log_evidence = -0.5 * np.where(batch.is_real, terms, 0.0).sum(1)
    return Filtered(mean, filtered, predicted_mean, predicted, log_evidence)


def run_smoother(model: LinearStateSpace, batch: Batch, passed: Filtered):
    """Smoothed means, covariances and Cov(x[t+1], x[t]), [sequence, time (- 1), ...]."""
    forward = model.transition @ passed.covariance[:, :-1]
    back = np.swapaxes(np.linalg.solve(passed.predicted_covariance[:, 1:], forward), -1, -2)
    back = np.where(batch.is_real[:, 1:, None, None], back, 0.0)  # nothing flows back out of the padding
    last = np.zeros_like(back[:, :1])
    drive = passed.mean[:, :-1] - (back @ passed.predicted_mean[:, 1:, :, None])[..., 0]
    mean = _affine_scan(back[:, ::-1], drive[:, ::-1], passed.mean[:, -1])[:, ::-1]
    spread = passed.covariance[:, :-1] - back @ passed.predicted_covariance[:, 1:] @ np.swapaxes(back, -1, -2)
    gain = np.concatenate([back, last], axis=1)
    covariance = symmetric(_congruence_scan(gain, np.concatenate([spread, passed.covariance[:, -1:]], axis=1)))
    return mean, covariance, covariance[:, 1:] @ np.swapaxes(back, -1, -2)
