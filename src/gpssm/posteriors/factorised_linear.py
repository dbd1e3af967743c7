"""q(X) q(f) with a Gaussian q(X): the factorised approximation of McHutchon (paper, Table 1, row 1)."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from gpssm._types import PRNGKey, Values
from gpssm.data import Window
from gpssm.draws import AbstractDraw, MarginalDraw
from gpssm.gp import InducingPosterior, marginal_moments
from gpssm.linalg import LOG_TWO_PI, gaussian_kl
from gpssm.model import GPSSM
from gpssm.params import AbstractParameter, LowerTriangular, Parameter, as_parameter
from gpssm.posteriors.base import AbstractPosterior, fresh_function
from gpssm.posteriors.chain import Chain, Noise, Rollout, through_state
from gpssm.posteriors.local import AbstractLocal


class FactorisedLinear(AbstractPosterior):
    """States that follow a linear-Gaussian Markov chain, independent of f.

    A lower bound: q(X) q(f) is a distribution that is sampled exactly, and every term of the bound is averaged under it without
    bias. A trajectory's chain is of length T; its memory is O(T D²), where the dense joint Gaussian needs O(T² D²).
    """

    inducing: InducingPosterior
    local: AbstractLocal
    is_lower_bound: ClassVar[bool] = True

    def rollout(self, model: GPSSM, window: Window, noise: Noise, chain: Chain) -> Rollout:
        draw = MarginalDraw(model.transition.basis(), model.transition.mean, self.inducing)
        return chain(draw, through_state, self.local.steps(model, window), model, window, noise)

    def num_function_noises(self, model: GPSSM, num_steps: int) -> int:
        return num_steps

    def onward(
        self, model: GPSSM, rollout: Rollout, num_steps: int, num_frequencies: int | None, *, key: PRNGKey
    ) -> tuple[AbstractDraw, Any]:
        return fresh_function(model, self.inducing, num_steps, num_frequencies, key=key)


class FactorisedDense(AbstractPosterior):
    """States under one joint Gaussian over all time steps, independent of f: for short sequences.

    A lower bound for the same reason as `FactorisedLinear`, of which it is the closure: every q(X) that is Gaussian is here.
    """

    inducing: InducingPosterior
    mean: Parameter
    chol: Parameter
    is_lower_bound: ClassVar[bool] = True

    def __init__(
        self,
        inducing: InducingPosterior,
        mean: Values | AbstractParameter,
        chol: Values | AbstractParameter,
    ):
        """`mean` is [sequence, time, state] and `chol` the Cholesky factor [sequence, time * state, time * state]."""
        self.inducing, self.mean = inducing, as_parameter(mean)
        self.chol = chol if isinstance(chol, AbstractParameter) else LowerTriangular(chol)

    def rollout(self, model: GPSSM, window: Window, noise: Noise, chain: Chain) -> Rollout:
        mean, chol = self.mean[window.sequence], self.chol[window.sequence]
        states = mean.shape[1]
        is_real = jnp.repeat(window.is_real, states)
        path = mean + jnp.reshape(chol @ noise.states.reshape(-1), mean.shape)
        basis, scale = model.transition.basis(), model.process_scale

        def log_transition(state: jax.Array, control: jax.Array, following: jax.Array) -> jax.Array:
            point = jnp.concatenate([state, control])
            expected, variance = marginal_moments(basis.project(point), model.transition.mean(point), self.inducing)
            quadratic = jnp.sum(((following - expected) ** 2 + variance) / scale**2)
            return -0.5 * quadratic - jnp.sum(jnp.log(scale)) - 0.5 * states * LOG_TWO_PI

        transitions = jax.vmap(log_transition)(path[:-1], window.controls[:-1], path[1:])
        # the entropy of the steps after the first: log |chol| is cut to the real steps, which come first
        logs = jnp.log(jnp.abs(jnp.diagonal(chol)))[states:]
        entropy = jnp.sum(jnp.where(is_real[states:], logs + 0.5 * (1 + LOG_TWO_PI), 0.0))
        kl_transition = -jnp.sum(jnp.where(window.is_real[1:], transitions, 0.0)) - entropy
        kl_initial = gaussian_kl(mean[0], chol[:states, :states], model.initial_mean, model.initial_chol)
        return Rollout(path, kl_transition, kl_initial, MarginalDraw(basis, model.transition.mean, self.inducing), None)

    def num_function_noises(self, model: GPSSM, num_steps: int) -> int:
        return 0

    def onward(
        self, model: GPSSM, rollout: Rollout, num_steps: int, num_frequencies: int | None, *, key: PRNGKey
    ) -> tuple[AbstractDraw, Any]:
        return fresh_function(model, self.inducing, num_steps, num_frequencies, key=key)
