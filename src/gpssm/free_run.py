"""A start that knows the dynamics: f learnt over stretches of the data that it must bridge alone.

A posterior whose every step may lean on the outputs finds it easy to leave f linear and call the rest process noise: its bound
rewards the next row, and a forecast is asked for many. So f is first fitted to short stretches that overlap, with the prior's
own transitions (`PriorSteps`): within a stretch the outputs reach the states through q(x_1) and f alone. This is a lower bound
too, of the stretches taken as sequences of their own; it only chooses where the real fit starts.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from gpssm._precision import exact
from gpssm.data import Dataset, Window
from gpssm.emissions import LinearGaussian
from gpssm.gp import InducingPosterior, marginal_moments
from gpssm.initialise import FAMILIES, PRIOR_ONLY, Start, StartSettings
from gpssm.model import GPSSM
from gpssm.params import Positive, unwrap
from gpssm.posteriors import (
    VCDT,
    AbstractPosterior,
    FactorisedNonlinear,
    FilteringSteps,
    FreeSteps,
    Noise,
    PriorSteps,
    free_steps_from,
)
from gpssm.posteriors.chain import chain

SMALL = 1e-6
FIRST_NOISE = 0.05  # in standard units


def has_free_run(start: Start, settings: StartSettings) -> bool:
    """Whether f is to run free first: it is asked for, and the emission has the closed form that the steps after it need."""
    return settings.free_run > 0 and isinstance(start.model.emission, LinearGaussian)


def stretches(data: Dataset, start: Start, num_rows: int) -> tuple[Dataset, GPSSM, VCDT]:
    """The data cut into stretches that overlap by a quarter, and model and posterior that bridge each from its first state.

    Alone, f is far off at first: the observation noise starts where its misses do not drown everything else.
    """
    outputs, controls, means, chols = [], [], [], []
    identity = np.eye(start.model.num_states)
    for y, c, states, covariances in zip(data.outputs, data.controls, start.states, start.state_covariances, strict=True):
        last = max(0, len(y) - num_rows)
        for first in np.linspace(0, last, 1 + -(-last // max(1, 3 * num_rows // 4))).round().astype(int):
            piece = slice(first, first + num_rows)
            if np.isnan(y[piece]).all():
                continue
            outputs.append(y[piece])
            controls.append(c[piece])
            means.append(states[first])
            chols.append(np.linalg.cholesky(covariances[first] + SMALL * identity))
    cut = Dataset.from_arrays(
        outputs, controls if data.num_controls else None, output_names=data.output_names, control_names=data.control_names
    )
    model, is_node = start.model, lambda leaf: isinstance(leaf, Positive)
    if is_node(noise := model.emission.chol_noise):  # type: ignore[attr-defined]
        model = eqx.tree_at(
            lambda m: m.emission.chol_noise, model, Positive(jnp.maximum(noise.value(), FIRST_NOISE)), is_leaf=is_node
        )
    return cut, model, VCDT(start.posterior.inducing, PriorSteps(np.stack(means), np.stack(chols)))


@exact
def posterior_after(
    start: Start, settings: StartSettings, model: GPSSM, inducing: InducingPosterior, windows: Window
) -> AbstractPosterior:
    """The family that was asked for, where the free run has ended: with the steps of the filter for the f that was found."""
    steps = free_steps_from(FilteringSteps(), model, windows, is_full=settings.local != "free-diagonal")
    family = FAMILIES[settings.posterior]
    if settings.local == "filtering":
        return family(inducing, FilteringSteps())
    if settings.local == "amortised":  # the network is still to learn its steps
        return eqx.tree_at(lambda p: p.inducing, start.posterior, inducing)
    if settings.local == "prior" or settings.posterior in PRIOR_ONLY:
        return family(inducing, PriorSteps(steps.initial_mean, steps.initial_chol))
    if settings.posterior == "factorised-linear":
        steps = linearised(steps, model, inducing, mean_path(steps, model, inducing, windows), windows.controls)
    if settings.cut_every is not None:
        tables = (steps.initial_mean, steps.initial_chol, steps.gain, steps.offset, steps.chol)
        steps = FreeSteps(*tables, cut_every=settings.cut_every)
    return family(inducing, steps)


def mean_path(
    steps: FreeSteps, model: GPSSM, inducing: InducingPosterior, windows: Window
) -> Float[Array, "sequence time state"]:
    """The states that the steps lead to through the mean of f, without any noise."""
    posterior = FactorisedNonlinear(inducing, steps)
    plain, posterior = unwrap((model, posterior))
    num_steps, num_states = windows.outputs.shape[1], plain.num_states
    zeros = jnp.zeros((num_steps, num_states), windows.outputs.dtype)
    noise = Noise(jnp.zeros((num_states, plain.transition.num_inducing), zeros.dtype), zeros, zeros, jax.random.key(0))
    return jax.vmap(lambda window: posterior.rollout(plain, window, noise, chain).states)(windows)


def linearised(
    steps: FreeSteps,
    model: GPSSM,
    inducing: InducingPosterior,
    states: Float[Array, "sequence time state"],
    controls: Float[Array, "sequence time control"],
) -> FreeSteps:
    """Steps linear in the state that agree to first order with steps through the mean of f, at the states given.

    A m(x) + b becomes (A J) x + [b + A (m(x_t) - J x_t)], with J the Jacobian of the mean of f at x_t; S + A diag(v) Aᵀ with
    the variance v of f there stays what it is.
    """
    plain: Any = unwrap(model)
    q: Any = unwrap(inducing)
    basis, num_states = plain.transition.basis(), plain.num_states

    def mean_of_f(state: Array, control: Array) -> tuple[Array, Array]:
        point = jnp.concatenate([state, control])
        return marginal_moments(basis.project(point), plain.transition.mean(point), q)

    def one(gain: Array, offset: Array, chol: Array, state: Array, control: Array) -> tuple[Array, Array, Array]:
        gain = jnp.diag(gain) if gain.ndim == 1 else gain
        chol = jnp.diag(chol) if chol.ndim == 1 else chol
        mean, variance = mean_of_f(state, control)
        slope = jax.jacfwd(lambda x: mean_of_f(x, control)[0])(state)
        spread = chol @ chol.T + (gain * variance[None]) @ gain.T
        return gain @ slope, offset + gain @ (mean - slope @ state), jnp.linalg.cholesky(spread)

    gains, offsets, chols = unwrap((steps.gain, steps.offset, steps.chol))
    rows = offsets.shape[1]
    gain, offset, chol = jax.vmap(jax.vmap(one))(gains, offsets, chols, states[:, :rows], controls[:, :rows])
    if num_states == 1:  # the same, with less to compute
        gain, chol = gain[..., 0], chol[..., 0]
    return FreeSteps(steps.initial_mean, steps.initial_chol, gain, offset, chol, num_states > 1)
