"""The one chain that every family runs along, and the ways to propose the next state.

A family chooses a draw of f and a proposal. A proposal sees the state, what the draw knows of f there, and the step's parameters;
it answers with the mean and scale of x_{t+1} and with the expected divergence from the model's transition,

    E_f KL(q(x_{t+1} | .) || N(f, Q)) = 1/2 [ sum_d ((g - mu)² + P_dd + v_d) / Q_d - D + log|Q| - log|P| ]

where g and P are the proposal's mean and covariance, mu the mean of f, and v what f's variance adds.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from gpssm._types import PRNGKey
from gpssm.data import Window
from gpssm.draws import AbstractDraw, Moments
from gpssm.linalg import add, congruence, covariance, diagonal, gaussian_kl, log_determinant, matvec, square_root
from gpssm.model import GPSSM
from gpssm.posteriors.local import LocalSteps, Step


class Noise(NamedTuple):
    """The randomness of one trajectory: standard normals for v, the states and f, and a key for what is not normal."""

    inducing: Float[Array, "state inducing"]
    states: Float[Array, "time state"]
    function: Float[Array, "call state"]
    key: PRNGKey


class Rollout(eqx.Module):
    """One sample of a trajectory, its two divergences, and the draw of f that goes on after it."""

    states: Float[Array, "time state"]
    kl_transition: Float[Array, ""]
    kl_initial: Float[Array, ""]
    draw: AbstractDraw
    memory: Any


class Proposal(NamedTuple):
    """Where x_{t+1} is proposed, and what that costs."""

    mean: Float[Array, " state"]
    chol: Float[Array, "..."]
    kl: Float[Array, ""]


Propose: TypeAlias = Callable[[Float[Array, " state"], Moments, Step, Float[Array, " state"]], Proposal]
# walks one trajectory through a window as `chain` does, to which it agrees but for rounding
Chain: TypeAlias = Callable[[AbstractDraw, Propose, LocalSteps, GPSSM, Window, Noise], Rollout]


def through_state(state: Float[Array, " state"], moments: Moments, step: Step, process_scale: Float[Array, " state"]) -> Proposal:
    """A x + b: linear in the state, blind to f."""
    mean = matvec(step.gain, state) + step.offset
    return Proposal(mean, step.chol, expected_kl(mean, step.chol, moments.mean, moments.variance, process_scale))


def through_mean(state: Float[Array, " state"], moments: Moments, step: Step, process_scale: Float[Array, " state"]) -> Proposal:
    """A E[f] + b, with f's variance passed on: P = S + A diag(var) Aᵀ; f itself is integrated out."""
    mean = matvec(step.gain, moments.mean) + step.offset
    chol = _spread(step, moments.variance)
    return Proposal(mean, chol, expected_kl(mean, chol, moments.mean, moments.variance, process_scale))


def through_value(state: Float[Array, " state"], moments: Moments, step: Step, process_scale: Float[Array, " state"]) -> Proposal:
    """A f + b for the value that was drawn; the divergence is averaged over that value's own distribution."""
    mean = matvec(step.gain, moments.value) + step.offset
    return Proposal(mean, step.chol, _kl_given_value(moments, step, process_scale))


def through_fresh_value(
    state: Float[Array, " state"], moments: Moments, step: Step, process_scale: Float[Array, " state"]
) -> Proposal:
    """As `through_value` with a value drawn afresh at every step: in law, f's variance joins that of the proposal."""
    mean = matvec(step.gain, moments.mean) + step.offset
    return Proposal(mean, _spread(step, moments.variance), _kl_given_value(moments, step, process_scale))


def expected_kl(
    mean: Float[Array, " state"],
    chol: Float[Array, "..."],
    function_mean: Float[Array, " state"],
    function_variance: Float[Array, " state"],
    process_scale: Float[Array, " state"],
) -> Float[Array, ""]:
    """The formula at the head of this file."""
    total = (mean - function_mean) ** 2 + diagonal(covariance(chol)) + function_variance
    ratio = jnp.sum(total / process_scale**2) - len(mean)
    return 0.5 * (ratio + 2 * jnp.sum(jnp.log(process_scale)) - log_determinant(chol))


def chain(draw: AbstractDraw, propose: Propose, steps: LocalSteps, model: GPSSM, window: Window, noise: Noise) -> Rollout:
    """Walk one trajectory through a window: sample the states and add up the divergences of the transitions.

    In the padding nothing moves and nothing is counted.
    """
    first = steps.initial_mean + steps.initial_chol @ noise.states[0]
    num_steps = len(window.outputs) - 1

    def advance(carry: tuple, inputs: tuple) -> tuple:
        state, memory, kl = carry
        slices, control, is_real, noise_state, noise_function = inputs
        moments, new_memory = draw.ask(memory, jnp.concatenate([state, control]), noise_function)
        proposal = propose(state, moments, steps.resolve(slices), model.process_scale)
        new_state = proposal.mean + matvec(proposal.chol, noise_state)
        kept = jax.tree.map(lambda new, old: jnp.where(is_real, new, old), (new_state, new_memory), (state, memory))
        return (*kept, kl + jnp.where(is_real, proposal.kl, 0.0)), kept[0]

    inputs = (
        steps.scanned,
        window.controls[:-1],
        window.is_real[1:],
        noise.states[1:],
        noise.function[:num_steps],
    )
    start = (first, draw.memory(), jnp.zeros((), first.dtype))
    (_, memory, kl), later = jax.lax.scan(advance, start, inputs)
    return Rollout(jnp.concatenate([first[None], later]), kl, initial_kl(steps, model, window), draw, memory)


def initial_kl(steps: LocalSteps, model: GPSSM, window: Window) -> Float[Array, ""]:
    """KL(q(x_1) || p(x_1)); a window that starts later has paid for its first state in the window before."""
    divergence = gaussian_kl(steps.initial_mean, steps.initial_chol, model.initial_mean, model.initial_chol)
    return jnp.where(window.start == 0, divergence, 0.0)


def emission_term(model: GPSSM, states: Float[Array, "time state"], window: Window) -> Float[Array, ""]:
    """Sum over time of log p(y_t | x_t), of what was observed."""
    return jnp.sum(jax.vmap(model.emission.log_density)(states, window.outputs, window.is_observed))


def _spread(step: Step, variance: Float[Array, " state"]) -> Float[Array, "..."]:
    return square_root(add(covariance(step.chol), congruence(step.gain, variance)))


def _kl_given_value(moments: Moments, step: Step, process_scale: Float[Array, " state"]) -> Float[Array, ""]:
    """E over f ~ N(mean, variance) of KL(N(A f + b, S) || N(f, Q))."""
    rest = step.gain - (1.0 if step.gain.ndim == 1 else jnp.eye(len(moments.mean), dtype=step.gain.dtype))
    difference = matvec(rest, moments.mean) + step.offset
    spread = diagonal(congruence(rest, moments.variance))
    return expected_kl(moments.mean + difference, step.chol, moments.mean, spread, process_scale)
