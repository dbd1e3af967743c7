"""Ask a fitted model: forecasts from the end of the training data, from a given state, and what it believes of f.

A forecast is made of trajectories. Each takes a sample of the states and of f from the posterior, and goes on with the SAME f to
the end of the horizon, so that uncertainty about the dynamics compounds as it should.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pandas as pd
from jaxtyping import Array, Bool, Float

from gpssm._precision import jit
from gpssm._types import PRNGKey
from gpssm.data import Scaling, Window
from gpssm.emissions import AbstractEmission, LinearGaussian, realise
from gpssm.forecasts import Forecast
from gpssm.gp import marginal_moments
from gpssm.linalg import covariance
from gpssm.model import GPSSM, walk
from gpssm.params import unwrap
from gpssm.posteriors.base import AbstractPosterior, draw_noise, fresh_function
from gpssm.posteriors.chain import Noise, chain
from gpssm.result import FitResult

LONGEST_EXACT_HORIZON = 64  # steps; beyond them f's residual is drawn from random features
NUM_FREQUENCIES = 256
REACH = 3.0


@dataclass(frozen=True)
class MixtureOfEmissions:
    """The predictive density as a mixture over sampled states, for any emission; outputs in the user's units."""

    emission: AbstractEmission  # with a sample axis where it holds GPs, each reduced to a draw
    states: Float[Array, "sample time state"]
    scaling: Scaling

    def log_density(
        self, outputs: Float[np.ndarray, "time output"], is_observed: Bool[np.ndarray, "time output"]
    ) -> Float[np.ndarray, " time"]:
        standard = jnp.asarray(np.where(is_observed, self.scaling.outputs(outputs), 0.0))
        observed = jnp.asarray(is_observed)
        over_time = jax.vmap(lambda state, y, seen: self.emission.log_density(state, y, seen))
        densities = jax.vmap(lambda states: over_time(states, standard, observed))(self.states)
        mixture = jax.nn.logsumexp(densities, axis=0) - jnp.log(len(self.states))
        return np.asarray(mixture) + is_observed @ self.scaling.log_jacobian


def forecast(
    result: FitResult,
    steps: int,
    *,
    key: PRNGKey,
    controls: Float[np.ndarray, "time control"] | Sequence | pd.DataFrame | None = None,
    sequence: int = 0,
    initial_state: Float[np.ndarray, " state"] | None = None,
    num_samples: int = 500,
    num_frequencies: int | None = None,
) -> Forecast:
    """The next `steps` outputs after the end of a training sequence, or after `initial_state` (in the model's units).

    `controls`, in the user's units, are the rows that follow the training data; the last of them acts after the horizon and may
    be left out. After a given state they start with the row that acts on it. A table is read by its column names. f beyond what
    the posterior has settled is drawn exactly up to 64 steps, and from `num_frequencies` random features (256 unless said
    otherwise) for longer horizons.
    """
    for what, name, count in (
        ("step", "steps", steps),
        ("sample", "num_samples", num_samples),
        ("frequency", "num_frequencies", num_frequencies),
    ):
        if count is not None and (not isinstance(count, int | np.integer) or count < 1):
            raise ValueError(f"A forecast needs at least one {what}, but got {name}={count!r}.")
    if not 0 <= sequence < result.data.num_sequences:
        raise ValueError(f"There are {result.data.num_sequences} training sequences, from 0; got sequence={sequence}.")
    start = None if initial_state is None else jnp.asarray(initial_state)
    if start is not None and start.shape != (result.model.num_states,):
        raise ValueError(f"The initial state must have the shape ({result.model.num_states},), but has {start.shape}.")
    if start is not None and not np.isfinite(start).all():
        raise ValueError(f"The initial state must be finite, but is {np.asarray(start)}.")
    future = checked_controls(result, steps, controls, None if initial_state is not None else sequence)
    if num_frequencies is None and steps > LONGEST_EXACT_HORIZON:
        num_frequencies = NUM_FREQUENCIES
    windows = result.data.windows(result.scaling)
    window = jax.tree.map(lambda leaf: leaf[sequence], windows)
    window = _trimmed(window, result.data.lengths[sequence])
    states, outputs, emissions = _trajectories(
        result.model, result.posterior, window, jnp.asarray(future), start, num_samples, num_frequencies, key
    )
    return to_forecast(states, outputs, emissions, result, first_step=0 if start is not None else result.data.lengths[sequence])


def to_forecast(
    states: Float[Array, "sample time state"],
    outputs: Float[Array, "sample time output"],
    emission: AbstractEmission,
    result: FitResult,
    first_step: int,
) -> Forecast:
    """Sampled states and outputs as a `Forecast` in the user's units.

    For a linear-Gaussian emission the density is the mixture of its Gaussians, smoothed as `Forecast.mixture` says; for others it
    is the mixture of the emission's own densities.
    """
    scaling, data = result.scaling, result.data
    if isinstance(emission, LinearGaussian):
        plain = unwrap(emission)
        standard = jnp.einsum("oi,sti->sto", plain.matrix, states) + plain.offset[None, None]
        means = np.asarray(scaling.outputs_back(within_reach(np.asarray(standard), result)))
        noise = np.asarray(covariance(plain.chol_noise))
        noise = np.diag(noise) if noise.ndim == 1 else noise
        noise = noise * np.outer(scaling.output_scale, scaling.output_scale)
        return Forecast.mixture(
            means,
            noise,
            output_names=data.output_names,
            first_step=first_step,
            sampling_time=data.sampling_time,
            is_smoothed=True,
            seed=0,
        )
    samples = np.asarray(scaling.outputs_back(np.asarray(outputs)))
    density = MixtureOfEmissions(unwrap(emission), states, scaling)
    return Forecast(samples.mean(axis=0), samples, density, data.output_names, first_step, data.sampling_time)


def within_reach(outputs: Float[np.ndarray, "*batch output"], result: FitResult) -> Float[np.ndarray, "*batch output"]:
    """Outputs in standard units, held inside `REACH` times the largest distance from their mean that the training data show.

    f has seen nothing beyond; a trajectory that leaves for good would give a forecast no moments at all.
    """
    seen = np.concatenate([np.asarray(result.scaling.outputs(a)) for a in result.data.outputs])
    centre = np.nanmean(seen, axis=0)
    farthest = REACH * np.nanmax(np.abs(seen - centre), axis=0)
    return np.clip(outputs, centre - farthest, centre + farthest)


def checked_controls(
    result: FitResult,
    steps: int,
    controls: Float[np.ndarray, "time control"] | Sequence | pd.DataFrame | None,
    sequence: int | None,
) -> Float[np.ndarray, "time control"]:
    """The controls that act between a start and the end of the horizon, in standard units.

    After the end of a training sequence its last row acts first; after a state that was given (None) the first of `controls`.
    """
    data = result.data
    if data.num_controls == 0:
        if controls is not None and np.size(controls):
            raise ValueError("The model was fitted without controls, but a forecast was asked with some: leave them out.")
        return np.zeros((steps, 0))
    rows, names = steps if sequence is None else steps - 1, ", ".join(data.control_names)
    if isinstance(controls, pd.DataFrame):
        if not set(data.control_names) <= set(controls.columns):
            raise ValueError(
                f"The controls' table must have the columns {names}, but has {', '.join(map(str, controls.columns))}."
            )
        controls = controls[list(data.control_names)].to_numpy(float)
    if isinstance(controls, tuple | list) and len(controls) == 1 and np.ndim(controls[0]) == 2:
        controls = controls[0]
    if controls is None and rows > 0:
        raise ValueError(
            f"The model has the controls {names}, so a forecast of {steps} steps needs their next {rows} rows: expected controls "
            f"of the shape ({rows}, {data.num_controls}) or longer, but got none."
        )
    given = np.zeros((0, data.num_controls)) if controls is None else np.asarray(controls, float)
    given = given[:, None] if given.ndim == 1 and data.num_controls == 1 else given
    if given.ndim != 2 or given.shape[1] != data.num_controls or len(given) < rows:
        raise ValueError(
            f"A forecast of {steps} steps needs the next {rows} rows of {data.num_controls} controls ({names}), but got the "
            f"shape {given.shape}. Give a longer plan, or ask for fewer steps."
        )
    if not np.isfinite(given[:rows]).all():
        row, column = np.argwhere(~np.isfinite(given[:rows]))[0]
        raise ValueError(
            f"The future controls must be finite, but row {row} of {data.control_names[column]} is {given[row, column]}."
        )
    before = np.zeros((0, data.num_controls)) if sequence is None else data.controls[sequence][-1:]
    return np.asarray(result.scaling.controls(np.concatenate([before, given[:rows]])))


def transition_moments(
    result: FitResult, points: Float[np.ndarray, "point input"]
) -> tuple[Float[np.ndarray, "point state"], Float[np.ndarray, "point state"]]:
    """Mean and variance of f under q(f) at inputs (state, then control) in the model's units; process noise not included."""
    model, posterior = unwrap((result.model, result.posterior))
    basis = model.transition.basis()
    moments = jax.vmap(lambda x: marginal_moments(basis.project(x), model.transition.mean(x), posterior.inducing))
    mean, variance = moments(jnp.asarray(points))
    return np.asarray(mean), np.asarray(variance)


def posterior_states(
    result: FitResult, *, key: PRNGKey, num_samples: int = 200, sequence: int = 0
) -> Float[np.ndarray, "sample time state"]:
    """Samples of the state trajectory of a training sequence, from the fitted posterior."""
    window = jax.tree.map(lambda leaf: leaf[sequence], result.data.windows(result.scaling))
    return np.asarray(_posterior_states(result.model, result.posterior, window, num_samples, key))[
        :, : result.data.lengths[sequence]
    ]


@jit
def _posterior_states(
    model: GPSSM, posterior: AbstractPosterior, window: Window, num_samples: int, key: PRNGKey
) -> Float[Array, "sample time state"]:
    model, posterior = unwrap((model, posterior))
    noise = draw_noise(posterior, model, len(window.outputs), key=key, scheme="plain", num_samples=num_samples)
    return jax.vmap(lambda *arrays: posterior.rollout(model, window, Noise(*arrays, key=noise.key), chain).states)(
        noise.inducing, noise.states, noise.function
    )


@jit
def _trajectories(
    model: GPSSM,
    posterior: AbstractPosterior,
    window: Window,
    controls: Float[Array, "steps control"],
    start: Float[Array, " state"] | None,
    num_samples: int,
    num_frequencies: int | None,
    key: PRNGKey,
) -> tuple[Float[Array, "sample steps state"], Float[Array, "sample steps output"], AbstractEmission]:
    """States and outputs of the horizon, each sample with its own f."""
    model, posterior = unwrap((model, posterior))
    steps = len(controls)
    key_noise, key_samples, key_emission = jr.split(key, 3)
    noise = draw_noise(posterior, model, len(window.outputs), key=key_noise, scheme="plain", num_samples=num_samples)
    emission = realise(model.emission, key_emission)

    def one_sample(key: PRNGKey, *arrays: Array) -> tuple[Array, Array]:
        key_draw, key_walk, key_outputs = jr.split(key, 3)
        if start is None:
            rollout = posterior.rollout(model, window, Noise(*arrays, key=noise.key), chain)
            first = rollout.states[-1]
            draw, memory = posterior.onward(model, rollout, steps, num_frequencies, key=key_draw)
        else:
            first = start
            draw, memory = fresh_function(model, posterior.inducing, steps, num_frequencies, key=key_draw)
        states = walk(draw, memory, first, controls, model.process_scale, key=key_walk)[1:]
        return states, jax.vmap(emission.sample)(jr.split(key_outputs, steps), states)

    states, outputs = jax.vmap(one_sample)(jr.split(key_samples, num_samples), noise.inducing, noise.states, noise.function)
    return states, outputs, emission


def _trimmed(window: Window, length: int) -> Window:
    """The window without its padding."""
    return Window(
        window.outputs[:length],
        window.is_observed[:length],
        window.controls[:length],
        window.is_real[:length],
        window.sequence,
        window.start,
    )
