"""The Gaussian process state-space model.

    x_1 ~ N(mu, Sigma),    x_{t+1} = f(x_t, c_t) + N(0, Q),    y_t ~ p(y | x_t),    f ~ GP

with Q diagonal, and one GP a state dimension (paper, section 3).
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float

from gpssm._types import PRNGKey, Values
from gpssm.draws import AbstractDraw, ExactDraw, num_features, pathwise_draw, pathwise_features
from gpssm.emissions import AbstractEmission, realise
from gpssm.gp import InducingPosterior, SparseGP
from gpssm.params import AbstractParameter, LowerTriangular, Parameter, as_parameter, as_positive, unwrap


class GPSSM(eqx.Module):
    """Initial state, transition GP, process noise and emission."""

    initial_mean: Parameter
    initial_chol: Parameter
    transition: SparseGP
    process_scale: Parameter
    emission: AbstractEmission

    def __init__(
        self,
        transition: SparseGP,
        emission: AbstractEmission,
        process_scale: Values | AbstractParameter,
        initial_mean: Values | AbstractParameter | None = None,
        initial_chol: Values | AbstractParameter | None = None,
    ):
        """`process_scale` [state] holds standard deviations; x_1 is standard normal unless said otherwise."""
        states = transition.num_states
        if transition.num_inputs < states:
            raise ValueError(
                f"An inducing input holds the state, then the control: expected at least {states} numbers, but got "
                f"{transition.num_inputs}."
            )
        self.transition, self.emission = transition, emission
        self.process_scale = as_positive(process_scale)
        self.initial_mean = as_parameter(jnp.zeros(states) if initial_mean is None else initial_mean)
        chol = jnp.eye(states) if initial_chol is None else initial_chol
        self.initial_chol = chol if isinstance(chol, AbstractParameter) else LowerTriangular(chol)
        for what, parameter, expected in (
            ("process noise needs one standard deviation a state", self.process_scale, (states,)),
            ("mean of x_1 needs one number a state", self.initial_mean, (states,)),
            ("covariance of x_1 needs a lower Cholesky factor", self.initial_chol, (states, states)),
        ):
            shape = unwrap(parameter).shape
            if shape != expected:
                raise ValueError(f"The {what}: expected the shape {expected}, got {shape}.")

    @property
    def num_states(self) -> int:
        return self.transition.num_states

    @property
    def num_controls(self) -> int:
        return self.transition.num_inputs - self.transition.num_states


class Trajectory(eqx.Module):
    """States, outputs and the function values between them, of one simulation."""

    states: Float[Array, "time state"]
    outputs: Float[Array, "time output"]
    draw: AbstractDraw


def simulate(
    model: GPSSM,
    num_steps: int,
    *,
    key: PRNGKey,
    controls: Float[Array, "time control"] | None = None,
    initial_state: Float[Array, " state"] | None = None,
    inducing: InducingPosterior | None = None,
    num_frequencies: int | None = None,
) -> Trajectory:
    """One trajectory of the model: f from its prior, or from q(f) when `inducing` is given.

    f is drawn exactly, conditioning on every earlier value (cubic in the steps), or as a function made of `num_frequencies`
    random features (linear).
    """
    model, inducing = unwrap((model, inducing))
    if num_steps < 1:
        raise ValueError(f"A simulation needs at least one step, but got num_steps={num_steps}.")
    if initial_state is not None and jnp.shape(initial_state) != (model.num_states,):
        raise ValueError(f"The initial state must have the shape ({model.num_states},), but has {jnp.shape(initial_state)}.")
    controls = _checked_controls(model, num_steps, controls)
    key_function, key_states, key_outputs, key_initial, key_emission = jr.split(key, 5)
    draw = draw_function(model.transition, inducing, num_steps, num_frequencies, key=key_function)
    normals = jr.normal(key_initial, (model.num_states,))
    first = model.initial_mean + model.initial_chol @ normals if initial_state is None else jnp.asarray(initial_state)
    states = walk(draw, draw.memory(), first, controls[: num_steps - 1], model.process_scale, key=key_states)
    emission = realise(model.emission, key_emission)
    outputs = jax.vmap(emission.sample)(jr.split(key_outputs, num_steps), states)
    return Trajectory(states, outputs, draw)


def draw_function(
    transition: SparseGP,
    inducing: InducingPosterior | None,
    num_calls: int,
    num_frequencies: int | None,
    *,
    key: PRNGKey,
) -> AbstractDraw:
    """One f from q(f), or from the prior: exact for `num_calls` evaluations, or of random features."""
    basis = transition.basis()
    shape = (transition.num_states, transition.num_inducing)
    q = unwrap(InducingPosterior.prior(*shape)) if inducing is None else inducing
    if num_frequencies is None:
        return ExactDraw(basis, transition.mean, q, num_calls)
    key_basis, key_values, key_weights = jr.split(key, 3)
    features = pathwise_features(key_basis, basis, num_frequencies)
    weights = jr.normal(key_weights, (shape[0], num_features(transition, num_frequencies)))
    values = q.sample(jr.normal(key_values, shape))
    return pathwise_draw(basis, transition.mean, features, values, weights)


def walk(
    draw: AbstractDraw,
    memory: object,
    first: Float[Array, " state"],
    controls: Float[Array, "steps control"],
    process_scale: Float[Array, " state"],
    *,
    key: PRNGKey,
) -> Float[Array, "time state"]:
    """States from `first` on under one draw of f, one step a row of controls, with process noise."""
    noise = jr.normal(key, (len(controls), 2, len(first)))

    def step(carry: tuple, inputs: tuple) -> tuple:
        state, memory = carry
        control, (noise_function, noise_state) = inputs
        moments, memory = draw.ask(memory, jnp.concatenate([state, control]), noise_function)
        state = moments.value + process_scale * noise_state
        return (state, memory), state

    _, states = jax.lax.scan(step, (first, memory), (controls, (noise[:, 0], noise[:, 1])))
    return jnp.concatenate([first[None], states])


def _checked_controls(
    model: GPSSM, num_steps: int, controls: Float[Array, "time control"] | None
) -> Float[Array, "time control"]:
    expected = model.num_controls
    if controls is None and expected == 0:
        return jnp.zeros((num_steps, 0))
    if controls is None or controls.ndim != 2 or controls.shape[1] != expected or len(controls) < num_steps - 1:
        came = "none" if controls is None else f"the shape {tuple(controls.shape)}"
        raise ValueError(
            f"The model has {expected} controls, so {num_steps} steps need controls of the shape "
            f"({num_steps - 1}, {expected}) or longer, but got {came}."
        )
    return jnp.asarray(controls)
