"""What the rivals share: the way from a dataset to standard units and back, and exact linear-Gaussian forecasts."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jaxtyping import Float

from gpssm.data import Dataset, Scaling
from gpssm.forecasts import Forecast

VARIANCE_FLOOR = 1e-8  # of a standardised output


class AbstractBaseline(ABC):
    """A fitted rival. `forecasts` is its one verb; `forecast` is the same from the end of a history."""

    scaling: Scaling

    @abstractmethod
    def forecasts(self, data: Dataset, origins: Sequence[int], steps: int, *, key: Any) -> list[Forecast]:
        """One forecast an origin o: given rows [0, o) of the one sequence in `data`, of rows o ... o+steps-1."""

    def forecast(self, history: Dataset, steps: int, controls: Any = None, *, key: Any) -> Forecast:
        """The next `steps` rows after `history` (one sequence), under the controls of those rows.

        The control of the last row acts on nothing in the forecast: steps-1 rows will do.
        """
        num_rows = history.lengths[0]
        ahead = future_controls(history, steps, controls)
        blank = np.full((steps, history.num_outputs), np.nan)
        longer = replace(
            history,
            outputs=(np.concatenate([history.outputs[0], blank]),),
            controls=(np.concatenate([history.controls[0], ahead]),),
        )
        return self.forecasts(longer, [num_rows], steps, key=key)[0]


def future_controls(history: Dataset, steps: int, controls: Any) -> Float[np.ndarray, "time control"]:
    if history.num_controls == 0:
        return np.zeros((steps, 0))
    if controls is None:
        raise ValueError(
            f"the model has controls {list(history.control_names)}: a forecast of {steps} steps needs their "
            f"future rows, {steps} of them (or {steps - 1})"
        )
    ahead = np.asarray(controls, float).reshape(-1, history.num_controls)[:steps]
    if len(ahead) < steps - 1:
        raise ValueError(f"{len(ahead)} rows of future controls for {steps} steps; give {steps} (or {steps - 1})")
    last = ahead[-1:] if len(ahead) else history.controls[0][-1:]
    return np.concatenate([ahead, last])[:steps]


def standard_outputs(scaling: Scaling, data: Dataset) -> list[np.ndarray]:
    return [np.asarray(scaling.outputs(y)) for y in data.outputs]


def standard_controls(scaling: Scaling, data: Dataset) -> list[np.ndarray]:
    return [np.asarray(scaling.controls(u)) for u in data.controls]


def standardised(scaling: Scaling, data: Dataset, origins: Sequence[int], steps: int) -> tuple[np.ndarray, np.ndarray]:
    if data.num_sequences != 1:
        raise ValueError(f"forecasts are made for one sequence at a time; got {data.num_sequences}")
    if min(origins) < 1:
        raise ValueError(f"a forecast needs at least one row of history; got origin {min(origins)}")
    if max(origins) + steps > data.lengths[0] + (data.num_controls == 0) * steps:
        raise ValueError(
            f"a forecast of {steps} steps from row {max(origins)} needs controls for rows that are not in the data "
            f"({data.lengths[0]} rows)"
        )
    return standard_outputs(scaling, data)[0], standard_controls(scaling, data)[0]


def gaussian(
    scaling: Scaling,
    data: Dataset,
    origin: int,
    mean: Float[np.ndarray, "time output"],
    covariance: Float[np.ndarray, "time output output"],
    joint: Float[np.ndarray, "row row"] | None = None,
) -> Forecast:
    """A standardised Gaussian forecast, in the user's units."""
    scale = scaling.output_scale
    long_scale = np.tile(scale, len(mean))
    return Forecast.gaussian(
        np.asarray(scaling.outputs_back(mean)),
        covariance * np.outer(scale, scale),
        output_names=data.output_names,
        first_step=origin,
        sampling_time=data.sampling_time,
        joint_covariance=None if joint is None else joint * np.outer(long_scale, long_scale),
    )


def generator_of(key: Any) -> np.random.Generator:
    """A NumPy generator from an integer or a JAX key."""
    if isinstance(key, jax.Array):
        is_typed = jax.numpy.issubdtype(key.dtype, jax.dtypes.prng_key)
        key = [int(word) for word in np.asarray(jax.random.key_data(key) if is_typed else key).ravel()]
    return np.random.default_rng(key)


def second_moment(rows: Float[np.ndarray, "time output"]) -> Float[np.ndarray, "output output"]:
    """Second moment of rows with gaps: each channel's own, the correlations from the complete rows."""
    variance = np.maximum(np.nan_to_num(np.nanmean(rows**2, axis=0)), VARIANCE_FLOOR)
    complete = rows[~np.isnan(rows).any(1)]
    correlation = np.eye(rows.shape[1])
    if len(complete) > rows.shape[1]:
        moment = complete.T @ complete / len(complete) + VARIANCE_FLOOR * np.eye(rows.shape[1])
        correlation = moment / np.sqrt(np.outer(np.diag(moment), np.diag(moment)))
    return correlation * np.sqrt(np.outer(variance, variance))


def linear_forecasts(
    transition: Float[np.ndarray, "state state"],
    emission: Float[np.ndarray, "output state"],
    process_covariance: Float[np.ndarray, "state state"],
    observation_covariance: Float[np.ndarray, "output output"],
    mean: Float[np.ndarray, "window state"],
    covariance: Float[np.ndarray, "window state state"],
    drive: Float[np.ndarray, "window time state"],
) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Mean, covariance and joint covariance over the horizon of y = C x + v, x' = A x + drive + w, for each window.

    Cov(y[h], y[g]) = C A^(h-g) S[g] C' for h > g, with S[g] the covariance of the state: exact.
    """
    steps, num_outputs = drive.shape[1], len(emission)
    means, powers = np.empty((*drive.shape[:2], num_outputs)), [emission]
    for step in range(steps):
        mean = mean @ transition.T + drive[:, step]
        means[:, step] = mean @ emission.T
        powers.append(powers[-1] @ transition)
    observe = np.stack(powers[:-1])
    known: dict[bytes, tuple[np.ndarray, np.ndarray]] = {}
    results = []
    for window_mean, state in zip(means, covariance, strict=True):
        name = np.round(state, 12).tobytes()
        if name not in known:
            joint = np.zeros((steps, num_outputs, steps, num_outputs))
            for g in range(steps):
                state = transition @ state @ transition.T + process_covariance
                block = observe[: steps - g] @ state @ emission.T
                joint[g:, :, g, :] = block
                joint[g, :, g:, :] = block.transpose(2, 0, 1)
                joint[g, :, g, :] = (block[0] + block[0].T) / 2 + observation_covariance
            marginal = np.stack([joint[g, :, g] for g in range(steps)])
            known[name] = marginal, joint.reshape(steps * num_outputs, -1)
        results.append((window_mean, *known[name]))
    return results
