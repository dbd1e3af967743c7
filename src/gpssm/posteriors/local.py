"""Where the per-step parameters A_t, b_t, S_t and q(x_1) come from.

Every source turns a window of data into `LocalSteps`. `FreeSteps` is a table with a row a time step; `PriorSteps` is A = I,
b = 0, S = Q; `FilteringSteps` is the closed form of the paper's section 'A natural choice'; `AmortisedSteps` is a recurrent
network that reads the window in both directions.
"""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float

from gpssm._types import PRNGKey, Values
from gpssm.data import Window
from gpssm.emissions import LinearGaussian
from gpssm.linalg import covariance
from gpssm.model import GPSSM
from gpssm.params import AbstractParameter, LowerTriangular, Parameter, as_parameter, as_positive, unwrap


class Step(NamedTuple):
    """x_{t+1} is proposed at gain r + offset with the scale chol; gain and chol are diagonal (1-d) or full (2-d)."""

    gain: Float[Array, "..."]
    offset: Float[Array, " state"]
    chol: Float[Array, "..."]


class LocalSteps(NamedTuple):
    """q(x_1), and a function that makes step t from the t-th slice of some arrays."""

    initial_mean: Float[Array, " state"]
    initial_chol: Float[Array, "state state"]
    scanned: Any
    resolve: Callable[[Any], Step]


class AbstractLocal(eqx.Module):
    """A source of per-step parameters."""

    @abstractmethod
    def steps(self, model: GPSSM, window: Window) -> LocalSteps:
        """The parameters for one window; model and self are unwrapped."""


class FreeSteps(AbstractLocal):
    """A row of free parameters for every step of every sequence.

    With `cut_every` the trajectory is cut into independent pieces of that length (paper, section 'Direct dependence on f'): at
    a cut the gain is zero, so the state is proposed from its own marginal.
    """

    initial_mean: Parameter
    initial_chol: Parameter
    gain: Parameter
    offset: Parameter
    chol: Parameter
    cut_every: int | None = eqx.field(static=True)

    def __init__(
        self,
        initial_mean: Values | AbstractParameter,
        initial_chol: Values | AbstractParameter,
        gain: Values | AbstractParameter,
        offset: Values | AbstractParameter,
        chol: Values | AbstractParameter,
        is_full: bool = False,
        cut_every: int | None = None,
    ):
        """Arrays carry [sequence] and, for the steps, [sequence, time - 1] in front; `is_full` says that gain and chol are
        matrices."""
        self.initial_mean = as_parameter(initial_mean)
        self.initial_chol = initial_chol if isinstance(initial_chol, AbstractParameter) else LowerTriangular(initial_chol)
        self.gain, self.offset = as_parameter(gain), as_parameter(offset)
        if isinstance(chol, AbstractParameter):
            self.chol = chol
            is_full = unwrap(self.gain).ndim == 4
        else:
            self.chol = LowerTriangular(chol) if is_full else as_positive(chol)
        _check_tables(self.gain, self.offset, self.chol, is_full)
        if cut_every is not None and cut_every < 1:
            raise ValueError(f"`cut_every` must be at least 1, but got {cut_every}.")
        self.cut_every = cut_every

    def steps(self, model: GPSSM, window: Window) -> LocalSteps:
        num_steps = len(window.outputs) - 1
        row = window.sequence

        def rows(table: Array) -> Array:
            within = jnp.clip(window.start + jnp.arange(num_steps), 0, table.shape[1] - 1)  # beyond it is padding
            return table[row, within]

        gain, offset, chol = rows(self.gain), rows(self.offset), rows(self.chol)
        initial_mean, initial_chol = self.initial_mean[row], self.initial_chol[row]
        if self.cut_every is not None:
            is_cut = (window.start + jnp.arange(1, num_steps + 1)) % self.cut_every == 0
            gain = jnp.where(is_cut.reshape(-1, *[1] * (gain.ndim - 1)), 0.0, gain)
            before = jnp.maximum(window.start - 1, 0)
            chol_before = self.chol[row, before]
            chol_before = jnp.diag(chol_before) if chol_before.ndim == 1 else chol_before
            is_first = window.start == 0
            initial_mean = jnp.where(is_first, initial_mean, self.offset[row, before])
            initial_chol = jnp.where(is_first, initial_chol, chol_before)
        return LocalSteps(initial_mean, initial_chol, (gain, offset, chol), lambda slices: Step(*slices))


class PriorSteps(AbstractLocal):
    """A = I, b = 0, S = Q: the state moves as the model says, and only q(x_1) and q(u) learn from the data."""

    initial_mean: Parameter
    initial_chol: Parameter

    def __init__(self, initial_mean: Values | AbstractParameter, initial_chol: Values | AbstractParameter):
        self.initial_mean = as_parameter(initial_mean)
        self.initial_chol = initial_chol if isinstance(initial_chol, AbstractParameter) else LowerTriangular(initial_chol)

    def steps(self, model: GPSSM, window: Window) -> LocalSteps:
        scale = model.process_scale
        step = Step(jnp.ones_like(scale), jnp.zeros_like(scale), scale)
        return LocalSteps(self.initial_mean[window.sequence], self.initial_chol[window.sequence], None, lambda _: step)


class FilteringSteps(AbstractLocal):
    """The closed form of the paper's section 'A natural choice', for linear-Gaussian emissions.

        S = (Q^{-1} + Cᵀ R^{-1} C)^{-1},    A = S Q^{-1},    b_t = S Cᵀ R^{-1} (y_{t+1} - d)

    R^{-1} is that of the observed channels, so a missing output leaves the prior transition. There is nothing to store: each
    step is made when the chain reaches it. q(x_1) is p(x_1 | y_1) in closed form.
    """

    def steps(self, model: GPSSM, window: Window) -> LocalSteps:
        emission = model.emission
        if not isinstance(emission, LinearGaussian):
            raise ValueError(
                "FilteringSteps needs a LinearGaussian emission, whose filtering factors have a closed form, but the model "
                f"has {type(emission).__name__}. Use FreeSteps or AmortisedSteps."
            )
        noise = covariance(emission.chol_noise)
        noise = jnp.diag(noise) if noise.ndim == 1 else noise

        def update(precision: Array, output: Array, is_observed: Array) -> tuple[Array, Array]:
            """Covariance and information vector after one output, from a prior precision."""
            both = is_observed[:, None] & is_observed[None, :]
            masked = jnp.where(both, noise, jnp.eye(len(noise), dtype=noise.dtype))
            rows = jnp.where(is_observed[:, None], emission.matrix, 0.0)
            residual = jnp.where(is_observed, output - emission.offset, 0.0)
            informed = jnp.linalg.solve(masked, jnp.concatenate([rows, residual[:, None]], axis=1))
            posterior = jnp.linalg.inv(precision + rows.T @ informed[:, :-1])
            return 0.5 * (posterior + posterior.T), rows.T @ informed[:, -1]

        def resolve(slices: tuple) -> Step:
            precision = 1 / model.process_scale**2
            posterior, information = update(jnp.diag(precision), *slices)
            return Step(posterior * precision[None], posterior @ information, jnp.linalg.cholesky(posterior))

        prior_precision = jnp.linalg.inv(covariance(model.initial_chol))
        first, information = update(prior_precision, window.outputs[0], window.is_observed[0])
        mean = first @ (prior_precision @ model.initial_mean + information)
        scanned = (window.outputs[1:], window.is_observed[1:])
        return LocalSteps(mean, jnp.linalg.cholesky(first), scanned, resolve)


class AmortisedSteps(AbstractLocal):
    """A bidirectional recurrent network reads outputs, gaps and controls, and proposes every step.

    The number of parameters does not depend on the data, and new sequences need no training of their own.
    """

    forward: eqx.nn.GRUCell
    backward: eqx.nn.GRUCell
    head_initial: eqx.nn.Linear
    head_steps: eqx.nn.Linear
    num_states: int = eqx.field(static=True)

    def __init__(self, num_states: int, num_outputs: int, num_controls: int, num_hidden: int = 32, *, key: PRNGKey):
        key_forward, key_backward, key_initial, key_steps = jr.split(key, 4)
        num_features = 2 * num_outputs + num_controls
        self.forward = eqx.nn.GRUCell(num_features, num_hidden, key=key_forward)
        self.backward = eqx.nn.GRUCell(num_features, num_hidden, key=key_backward)
        self.head_initial = eqx.nn.Linear(num_hidden, 2 * num_states, key=key_initial)
        self.head_steps = eqx.nn.Linear(2 * num_hidden, 3 * num_states, key=key_steps)
        self.num_states = num_states

    def steps(self, model: GPSSM, window: Window) -> LocalSteps:
        is_seen = (window.is_observed & window.is_real[:, None]).astype(window.outputs.dtype)
        features = jnp.concatenate([window.outputs * is_seen, is_seen, window.controls], axis=1)
        start = jnp.zeros(self.forward.hidden_size, features.dtype)

        def read(cell: eqx.nn.GRUCell, reverse: bool) -> Array:
            def step(hidden: Array, inputs: tuple) -> tuple[Array, Array]:
                feature, is_real = inputs
                hidden = jnp.where(is_real, cell(feature, hidden), hidden)
                return hidden, hidden

            return jax.lax.scan(step, start, (features, window.is_real), reverse=reverse)[1]

        past, future = read(self.forward, False), read(self.backward, True)
        mean, raw_scale = jnp.split(self.head_initial(future[0]), 2)
        both = jnp.concatenate([past[:-1], future[1:]], axis=1)
        raw_gain, offset, raw_chol = jnp.split(jax.vmap(self.head_steps)(both), 3, axis=1)
        gain = jax.nn.sigmoid(raw_gain)
        chol = jax.nn.softplus(raw_chol) + 1e-6
        initial_chol = jnp.diag(jax.nn.softplus(raw_scale) + 1e-6)
        return LocalSteps(mean, initial_chol, (gain, offset, chol), lambda slices: Step(*slices))


def _check_tables(gain: Parameter, offset: Parameter, chol: Parameter, is_full: bool) -> None:
    """Raise unless the tables are [sequence, time - 1, state], gain and chol with one more axis where they are matrices."""
    vector = unwrap(offset).shape
    expected = (*vector, *vector[2:]) if is_full else vector
    shapes = unwrap(gain).shape, unwrap(chol).shape
    if len(vector) != 3 or shapes != (expected, expected):
        axes = "[sequence, time - 1, state" + (", state]" if is_full else "]")
        raise ValueError(
            f"Free steps with is_full={is_full} need gain and chol {axes} and an offset [sequence, time - 1, state], but got the "
            f"shapes {shapes[0]}, {shapes[1]} and {vector}. Matrices need is_full=True."
        )


def free_steps_from(local: AbstractLocal, model: GPSSM, windows: Window, is_full: bool = False) -> FreeSteps:
    """A table of free steps that starts where another source stands, for example at the filtering factors.

    Without `is_full` only the diagonals of A_t and S_t are kept.
    """
    model, local = unwrap((model, local))

    def rows(window: Window) -> tuple[Array, ...]:
        steps = local.steps(model, window)
        count = len(window.outputs) - 1
        step = jax.vmap(lambda index: steps.resolve(jax.tree.map(lambda leaf: leaf[index], steps.scanned)))(jnp.arange(count))
        return steps.initial_mean, steps.initial_chol, *step

    initial_mean, initial_chol, gain, offset, chol = jax.vmap(rows)(windows)
    if is_full and gain.ndim == 3:
        gain, chol = jax.vmap(jax.vmap(jnp.diag))(gain), jax.vmap(jax.vmap(jnp.diag))(chol)
    if not is_full and gain.ndim == 4:
        gain, chol = jnp.diagonal(gain, axis1=2, axis2=3), jnp.diagonal(chol, axis1=2, axis2=3)
    return FreeSteps(initial_mean, initial_chol, gain, offset, chol, is_full)
