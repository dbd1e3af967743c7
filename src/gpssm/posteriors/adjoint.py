"""The gradient of a chain, of all its steps at once.

A chain has to be walked one step after the other; its gradient has not. Where the states are known, so are the Jacobians J_t of
all the steps, and the derivatives lambda_t of the bound with respect to the states obey a linear recurrence,

    lambda_t = (what x_t itself is worth) + J_tᵀ lambda_{t+1},

which is cheap. With lambda in hand, every step's share in the gradient of the parameters is independent of the others', so what
is large (products with the factors of K(Z, Z)) becomes a few products of large matrices in place of thousands with a vector.
This needs a draw of f without a memory (`AbstractForgetfulDraw`), and a way to walk that gives the states.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from gpssm._precision import exact
from gpssm.data import Window
from gpssm.draws import AbstractDraw, AbstractForgetfulDraw, Moments
from gpssm.linalg import matvec
from gpssm.model import GPSSM
from gpssm.posteriors.chain import Chain, Noise, Propose, Rollout, initial_kl
from gpssm.posteriors.local import LocalSteps, Step

PIECE = 1024  # steps whose gradients are computed together: enough to fill a device, without filling its memory


class StepInputs(NamedTuple):
    """What a step is handed beside the state; [time - 1] in front for all of them."""

    step: Step
    control: Float[Array, "..."]
    is_real: Bool[Array, "..."]
    noise_state: Float[Array, "..."]
    noise_function: Float[Array, "..."]


class Laws(NamedTuple):
    """What all the steps of a trajectory share."""

    draw: AbstractForgetfulDraw
    process_scale: Float[Array, " state"]


# the states after each step, and the divergence of each
Walk: TypeAlias = Callable[
    [Propose, Laws, Float[Array, " state"], StepInputs], tuple[Float[Array, "step state"], Float[Array, " step"]]
]


def chain_of_walk(walk: Walk) -> Chain:
    """The chain that walks as `walk` does, which need not be differentiable."""

    def chain(draw: AbstractDraw, propose: Propose, steps: LocalSteps, model: GPSSM, window: Window, noise: Noise) -> Rollout:
        assert isinstance(draw, AbstractForgetfulDraw)
        first = steps.initial_mean + steps.initial_chol @ noise.states[0]
        inputs = inputs_of(steps, window, noise)
        later, divergences = _with_gradient(walk, propose, Laws(draw, model.process_scale), first, inputs)
        states = jnp.concatenate([first[None], later])
        return Rollout(states, jnp.sum(divergences), initial_kl(steps, model, window), draw, draw.memory())

    return chain


def inputs_of(steps: LocalSteps, window: Window, noise: Noise) -> StepInputs:
    """The inputs of every step, the local parameters resolved."""
    num_steps = len(window.outputs) - 1
    if steps.scanned is None:
        step = steps.resolve(None)
        resolved = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (num_steps, *leaf.shape)), step)
    else:
        resolved = jax.vmap(steps.resolve)(steps.scanned)
    return StepInputs(resolved, window.controls[:-1], window.is_real[1:], noise.states[1:], noise.function[:num_steps])


def _with_gradient(
    walk: Walk, propose: Propose, laws: Laws, first: Float[Array, " state"], inputs: StepInputs
) -> tuple[Float[Array, "step state"], Float[Array, " step"]]:
    """`walk`, with the gradient of this file."""
    everything = (laws, first, inputs)
    moving, rest = eqx.partition(everything, eqx.is_inexact_array)
    arrays, static = eqx.partition(rest, eqx.is_array)

    @jax.custom_vjp
    def walked(moving: Any, arrays: Any) -> tuple[Array, Array]:
        laws, first, inputs = eqx.combine(moving, arrays, static)
        return walk(propose, laws, first, inputs)

    def forward(moving: Any, arrays: Any) -> tuple[tuple[Array, Array], Any]:
        states, divergences = walked(moving, arrays)
        return (states, divergences), (moving, arrays, states)

    def backward(kept: Any, cotangents: tuple[Array, Array]) -> tuple[Any, None]:
        moving, arrays, states = kept
        laws, first, inputs = eqx.combine(moving, arrays, static)
        gradients = _gradients(propose, laws, jnp.concatenate([first[None], states]), inputs, *cotangents)
        return eqx.filter(gradients, eqx.is_inexact_array), None

    walked.defvjp(forward, backward)
    return walked(moving, arrays)


@exact
def _gradients(
    propose: Propose,
    laws: Laws,
    states: Float[Array, "time state"],
    inputs: StepInputs,
    state_cotangents: Float[Array, "step state"],
    divergence_cotangents: Float[Array, " step"],
) -> tuple[Laws, Float[Array, " state"], StepInputs]:
    """The derivatives with respect to what the steps share, the first state and the inputs of the steps."""
    num_steps, num_states = state_cotangents.shape
    pieces = states[:-1], inputs
    if num_steps <= PIECE:  # what is known of f is worked out once
        known = _known(laws, *pieces)
        slopes, shares = lambda _: _slopes(propose, laws, known, *pieces), lambda *given: _shares(propose, laws, known, *given)
    else:
        slopes = lambda piece: _slopes(propose, laws, _known(laws, *piece), *piece)  # noqa: E731
        shares = lambda piece, *given: _shares(propose, laws, _known(laws, *piece), piece, *given)  # noqa: E731

    jacobians, divergence_slopes = _mapped(slopes, pieces, num_steps)
    own = jnp.concatenate([jnp.zeros((1, num_states), states.dtype), state_cotangents])
    own = own.at[:-1].add(divergence_cotangents[:, None] * divergence_slopes)
    adjoints = _solve_backwards(jacobians, own)
    shared, own_inputs = _summed(shares, pieces, (adjoints[1:], divergence_cotangents), num_steps)
    return shared, adjoints[0], own_inputs


class Known(NamedTuple):
    """What f is at all the states of a piece of time, and how to take derivatives of that."""

    moments: Moments
    pull: Callable[[Moments], tuple[Any, Array, Array]]  # to the draw, the prior mean and the points [step, group, input]
    pull_prior: Callable[[Array], tuple[Any, Array]]  # of the prior mean, to the draw and the controls


def _known(laws: Laws, states: Float[Array, "step state"], inputs: StepInputs) -> Known:
    moving, rest = eqx.partition(laws.draw, eqx.is_inexact_array)
    groups = len(laws.draw.basis.kernels)

    def priors(moving: Any, controls: Array) -> Array:
        return jax.vmap(eqx.combine(moving, rest).mean)(jnp.concatenate([states, controls], axis=1))

    def asked(moving: Any, priors: Array, points: Array) -> Moments:
        return jax.vmap(eqx.combine(moving, rest).at)(priors, points)

    prior, pull_prior = jax.vjp(priors, moving, inputs.control)
    points = jnp.repeat(jnp.concatenate([states, inputs.control], axis=1)[:, None], groups, axis=1)
    return Known(*jax.vjp(asked, moving, prior, points), pull_prior)


def _moved(
    propose: Propose, process_scale: Array, inputs: StepInputs, state: Float[Array, " state"], moments: Moments
) -> tuple[Float[Array, " state"], Float[Array, ""]]:
    """One step, when it is known what f is: the next state and the divergence; nothing moves in the padding."""
    proposal = propose(state, moments, inputs.step, process_scale)
    moved = proposal.mean + matvec(proposal.chol, inputs.noise_state)
    return jnp.where(inputs.is_real, moved, state), jnp.where(inputs.is_real, proposal.kl, 0.0)


def _slopes(
    propose: Propose, laws: Laws, known: Known, states: Float[Array, "step state"], inputs: StepInputs
) -> tuple[Float[Array, "step state state"], Float[Array, "step state"]]:
    """How the next states and the divergences change with the states: [step, into, from] and [step, from]."""
    changes, directions = _moment_slopes(laws.draw, known, states, inputs), jnp.eye(states.shape[1], dtype=states.dtype)

    def of_step(state: Array, inputs: StepInputs, moments: Moments, changes: Moments) -> tuple[Array, Array]:
        def along(direction: Array, change: Moments) -> tuple[Array, Array]:
            moving = lambda state, moments: _moved(propose, laws.process_scale, inputs, state, moments)  # noqa: E731
            return jax.jvp(moving, (state, moments), (direction, change))[1]

        return jax.vmap(along, in_axes=(0, 1), out_axes=(1, 0))(directions, changes)

    return jax.vmap(of_step)(states, inputs, known.moments, changes)


def _moment_slopes(draw: AbstractForgetfulDraw, known: Known, states: Float[Array, "step state"], inputs: StepInputs) -> Moments:
    """How the moments of f change with the state: [step, of, with].

    Where every state has a group of its own, its moments change with the point of that group alone, and one sweep backwards
    answers for all of them.
    """
    num_states = states.shape[1]
    of_prior = jax.vmap(jax.jacfwd(lambda state, control: draw.mean(jnp.concatenate([state, control]))))(states, inputs.control)
    nothing = jnp.zeros_like(states)

    def swept(name: str, cotangents: Array) -> Array:
        *_, points = known.pull(Moments(**{field: cotangents if field == name else nothing for field in Moments._fields}))
        return points[..., :num_states]

    def of(name: str) -> Array:
        if len(draw.basis.kernels) == num_states:
            return swept(name, jnp.ones_like(states))
        units = jnp.eye(num_states, dtype=states.dtype)
        return jnp.stack([swept(name, jnp.broadcast_to(unit, states.shape))[:, 0] for unit in units], axis=1)

    return Moments(of_prior + of("mean"), of("variance"), of_prior + of("value"))


def _shares(
    propose: Propose, laws: Laws, known: Known, piece: tuple[Array, StepInputs], cotangents: tuple[Array, Array]
) -> tuple[Laws, StepInputs]:
    """The derivatives with respect to what the steps of a piece share, and to the inputs of each."""
    states, inputs = piece

    def moved(process_scale: Array, step: Step, noise: Array, moments: Moments) -> tuple[Array, Array]:
        given = inputs._replace(step=step, noise_state=noise)
        return jax.vmap(lambda *each: _moved(propose, process_scale, *each))(given, states, moments)

    _, pull_moved = jax.vjp(moved, laws.process_scale, inputs.step, inputs.noise_state, known.moments)
    process_scale, step, noise, moments = pull_moved(cotangents)
    draw, prior, points = known.pull(moments)
    of_mean, controls = known.pull_prior(prior)
    controls = controls + jnp.sum(points[..., states.shape[1] :], axis=1)
    own = StepInputs(step, controls, None, noise, jnp.zeros_like(inputs.noise_function))  # type: ignore[arg-type]
    return Laws(jax.tree.map(jnp.add, draw, of_mean), process_scale), own


def _solve_backwards(jacobians: Float[Array, "step state state"], own: Float[Array, "time state"]) -> Float[Array, "time state"]:
    """lambda_t = own_t + J_tᵀ lambda_{t+1}."""
    if jax.default_backend() == "cpu":

        def back(adjoint: Array, slices: tuple) -> tuple[Array, Array]:
            jacobian, own = slices
            adjoint = own + adjoint @ jacobian
            return adjoint, adjoint

        _, earlier = jax.lax.scan(back, own[-1], (jacobians, own[:-1]), reverse=True)
        return jnp.concatenate([earlier, own[-1:]])

    def after(later: tuple, earlier: tuple) -> tuple:  # products of tiny matrices: sums that fuse beat calls that do not
        (later_matrix, later_own), (matrix, own) = later, earlier
        product = jnp.sum(later_matrix[..., :, :, None] * matrix[..., None, :, :], axis=-2)
        return product, own + jnp.sum(later_own[..., :, None] * matrix, axis=-2)

    nothing = jnp.zeros((1, *jacobians.shape[1:]), jacobians.dtype)
    return jax.lax.associative_scan(after, (jnp.concatenate([jacobians, nothing]), own), reverse=True)[1]


def _mapped(function: Callable, arrays: Any, num_steps: int) -> Any:
    """`function` of pieces of time of `arrays`, one after the other; its answers joined again."""
    if num_steps <= PIECE:
        return function(arrays)
    answers = jax.lax.map(function, _cut(arrays, num_steps))
    return jax.tree.map(lambda leaf: _joined(leaf, num_steps), answers)


def _summed(function: Callable, arrays: Any, cotangents: Any, num_steps: int) -> tuple[Any, Any]:
    """`function` of pieces of time of `arrays` and `cotangents`: the sum of its first answers, and the others joined again."""
    if num_steps <= PIECE:
        return function(arrays, cotangents)
    pieces = _cut(arrays, num_steps), _cut(cotangents, num_steps, 0.0)
    like = jax.eval_shape(function, *jax.tree.map(lambda leaf: leaf[0], pieces))[0]

    def add(total: Any, piece: tuple) -> tuple[Any, Any]:
        part, own = function(*piece)
        return jax.tree.map(jnp.add, total, part), own

    total, answers = jax.lax.scan(add, jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like), pieces)
    return total, jax.tree.map(lambda leaf: _joined(leaf, num_steps), answers)


def _cut(arrays: Any, num_steps: int, padding: float | None = None) -> Any:
    """Pieces of `PIECE` steps; the last one is filled up by repeating its last step, or with `padding`.

    A step that is repeated for no cotangent adds nothing, and its derivatives are finite.
    """
    missing = -num_steps % PIECE

    def one(leaf: Array) -> Array:
        filling = leaf[-1:] if padding is None else jnp.full_like(leaf[-1:], padding)
        filled = jnp.concatenate([leaf, jnp.broadcast_to(filling, (missing, *leaf.shape[1:]))])
        return filled.reshape(-1, PIECE, *leaf.shape[1:])

    return jax.tree.map(one, arrays)


def _joined(leaf: Array, num_steps: int) -> Array:
    return leaf.reshape(-1, *leaf.shape[2:])[:num_steps]
