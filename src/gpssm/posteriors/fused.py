"""A chain in one launch: a program on the device owns a trajectory and walks it from end to end.

Step by step, a trajectory is thousands of launches of kernels that have little to do, and a GPU waits for the next launch. Here
the loop over time is inside the kernel (`fused_walk.py`), the state never leaves the chip, and every trajectory is a program of
its own; the gradient is that of `adjoint.py`. It serves draws without memory that are made of a kernel's covariances, the factor
of K(Z, Z) and, where f is drawn as a function, sines and cosines.
"""

import math
from typing import Any, NamedTuple, TypeAlias, cast

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from gpssm._precision import exact
from gpssm.data import Window
from gpssm.draws import AbstractDraw, DrawGivenInducing, MarginalDraw, Moments, PathwiseDraw
from gpssm.gp import InducingBasis
from gpssm.kernels import FourierFeatures
from gpssm.linalg import matvec
from gpssm.model import GPSSM
from gpssm.posteriors.adjoint import Laws, StepInputs, chain_of_walk
from gpssm.posteriors.chain import Propose
from gpssm.posteriors.fused_walk import Arrays, Sizes, walk_on_chip
from gpssm.posteriors.local import LocalSteps, Step
from gpssm.unrolled import can_unroll, unroll

FusedDraw: TypeAlias = DrawGivenInducing | MarginalDraw | PathwiseDraw
MOST_INDUCING = 256  # beyond it, the loop over the factor's tiles would be too long a program
MOST_SCALARS = 512  # hyperparameters and the like, which every thread holds


def fused(propose: Propose, laws: Laws, first: Float[Array, " state"], inputs: StepInputs) -> tuple[Array, Array]:
    """The states of a trajectory and the divergences of its steps, from one kernel."""
    arrays = _arrays(laws, first, inputs)
    entrywise = _entrywise(propose, laws, first, inputs)
    return walk_on_chip(entrywise, _sizes(laws, first, inputs), arrays)


fused_chain = chain_of_walk(fused)


def fused_applies(draw: AbstractDraw, propose: Propose, steps: LocalSteps, model: GPSSM, window: Window) -> bool:
    """Whether the draw is one that `fused` knows, and everything else can be taken apart into scalars."""
    if not isinstance(draw, FusedDraw):
        return False
    if isinstance(draw, PathwiseDraw) and not all(isinstance(part, FourierFeatures) for part in draw.features):
        return False
    num_inducing, num_inputs = draw.basis.inducing_inputs.shape[1:]
    if num_inducing > MOST_INDUCING or len(window.outputs) < 2 or _num_scalars(draw) > MOST_SCALARS:
        return False
    step = jax.eval_shape(lambda: steps.resolve(jax.tree.map(lambda leaf: leaf[0], steps.scanned)))
    dtype = model.process_scale.dtype
    state, point, step = jnp.zeros(model.num_states, dtype), jnp.zeros(num_inputs, dtype), _zeros(step)
    kernels: Any = ((_covariance, kernel, point, point) for kernel in draw.basis.kernels)
    rest: Any = ((_mean, draw.mean, point), (_finish(propose, draw), *_facts(draw, state), state, step, state, state))
    return all(can_unroll(*call) for call in (*kernels, *rest))


class Entrywise(NamedTuple):
    """The functions of a step, of entries in place of arrays."""

    covariances: tuple  # one a group: of the kernel's parameters, two points
    mean: Any  # of the mean's parameters, a point
    finish: Any  # of what is known of f, the state, the step, the process scale and noise: the next state and the divergence
    num_parameters: tuple[tuple[tuple[int, ...], ...], ...]  # shapes, of every leaf, for each kernel and the mean


class Facts(NamedTuple):
    """What a step must know of f, as sums over the inducing inputs or the features."""

    prior_mean: Float[Array, " state"]
    prior_variance: Float[Array, " group"]
    product: Float[Array, " state"]  # a . v
    power: Float[Array, " group"]  # |a|²
    other_power: Float[Array, "..."]  # of the features' residual [group], or of a times the factor of q(v) [state]
    other_product: Float[Array, "..."]  # of the features' residual and their weights [state]


def _covariance(kernel: Any, left: Array, right: Array) -> Array:
    return kernel(left, right)


def _mean(mean: Any, point: Array) -> Array:
    return mean(point)


def _moments(draw: AbstractDraw, facts: Facts) -> Moments:
    """The answer that `draw.ask` gives, from the sums it is made of."""
    smallest = jnp.finfo(facts.power.dtype).eps * facts.prior_variance
    residual = jnp.maximum(facts.prior_variance - facts.power, smallest)
    mean = facts.prior_mean + facts.product
    if isinstance(draw, PathwiseDraw):
        scale = jnp.sqrt(residual / jnp.maximum(facts.other_power, residual * 1e-6))
        value = mean + scale * facts.other_product
        return Moments(value, jnp.zeros_like(value), value)
    variance = jnp.broadcast_to(residual, mean.shape)
    if isinstance(draw, MarginalDraw):
        variance = variance + facts.other_power
    return Moments(mean, variance, mean)


def _finish(propose: Propose, draw: AbstractDraw) -> Any:
    def finish(*arguments: Any) -> tuple[Array, Array]:
        *facts, state, step, process_scale, noise = arguments
        proposal = propose(state, _moments(draw, Facts(*facts)), step, process_scale)
        return proposal.mean + matvec(proposal.chol, noise), proposal.kl

    return finish


def _facts(draw: FusedDraw, state: Float[Array, " state"]) -> Facts:
    """Facts of the right shapes, to trace with."""
    groups = jnp.zeros(len(draw.basis.kernels), state.dtype)
    none = jnp.zeros(0, state.dtype)
    if isinstance(draw, PathwiseDraw):
        return Facts(state, groups, state, groups, groups, state)
    return Facts(state, groups, state, groups, state if isinstance(draw, MarginalDraw) else none, none)


def _entrywise(propose: Propose, laws: Laws, first: Float[Array, " state"], inputs: StepInputs) -> Entrywise:
    draw, step = cast(FusedDraw, laws.draw), _zeros(jax.tree.map(lambda leaf: leaf[0], inputs.step))
    state = jnp.zeros(first.shape, first.dtype)
    point = jnp.zeros(draw.basis.inducing_inputs.shape[-1], first.dtype)
    covariances = tuple(unroll(_covariance, kernel, point, point) for kernel in draw.basis.kernels)
    finish = unroll(_finish(propose, draw), *_facts(draw, state), state, step, state, state)
    shapes = tuple(tuple(leaf.shape for leaf in _leaves(part)) for part in (*draw.basis.kernels, draw.mean))
    return Entrywise(covariances, unroll(_mean, draw.mean, point), finish, shapes)


def _sizes(laws: Laws, first: Float[Array, " state"], inputs: StepInputs) -> Sizes:
    draw = cast(FusedDraw, laws.draw)
    groups, inducing, num_inputs = draw.basis.inducing_inputs.shape
    kind = {DrawGivenInducing: "given", MarginalDraw: "marginal", PathwiseDraw: "pathwise"}[type(draw)]
    features = draw.weights.shape[-1] if isinstance(draw, PathwiseDraw) else 0
    step_shapes = tuple(leaf.shape[1:] for leaf in inputs.step)
    steps = len(inputs.is_real)
    return Sizes(kind, steps, len(first), groups, inducing, num_inputs, features, step_shapes, first.dtype)


def _arrays(laws: Laws, first: Float[Array, " state"], inputs: StepInputs) -> Arrays:
    """What the kernel reads, unpadded."""
    draw = cast(FusedDraw, laws.draw)
    basis = draw.basis
    scalars = [*(leaf for part in (*basis.kernels, draw.mean) for leaf in _leaves(part)), laws.process_scale]
    num_steps = len(inputs.is_real)
    columns = [*inputs.step, inputs.control, inputs.is_real[:, None].astype(first.dtype)]
    given = jnp.concatenate([column.reshape(num_steps, -1).astype(first.dtype) for column in columns], axis=1)
    values = draw.inducing.mean if isinstance(draw, MarginalDraw) else draw.values
    return Arrays(
        jnp.concatenate([jnp.ravel(leaf).astype(first.dtype) for leaf in scalars]),
        basis.inducing_inputs.transpose(0, 2, 1),
        basis.whitener.transpose(2, 0, 1),
        values,
        _explaining(draw, basis) if isinstance(draw, MarginalDraw) else None,
        *(_waves(draw) if isinstance(draw, PathwiseDraw) else (None, None, None, None)),
        first,
        given,
        inputs.noise_state,
    )


@exact
def _explaining(draw: MarginalDraw, basis: InducingBasis) -> Float[Array, "inducing state inducing"]:
    """(chol_dᵀ L^{-1})ᵀ, with which k(Z, x) gives what q(v) adds to the variance."""
    whitener = jnp.broadcast_to(basis.whitener, draw.inducing.chol.shape)
    return jnp.einsum("dmn,dmk->ndk", whitener, draw.inducing.chol)


def _waves(draw: PathwiseDraw) -> tuple[Array, Array, Array, Array]:
    """Frequencies [group, input, feature], amplitudes of cosines and sines, L^{-1} phi(Z) [inducing, group, feature], weights."""
    frequencies = jnp.stack([part.frequencies.T for part in draw.features])
    amplitudes = jnp.stack([part.amplitudes for part in draw.features]) / math.sqrt(frequencies.shape[-1])
    both, nothing = jnp.concatenate([frequencies, frequencies], axis=-1), jnp.zeros_like(amplitudes)
    amplitudes = jnp.stack([jnp.concatenate(pair, axis=-1) for pair in ((amplitudes, nothing), (nothing, amplitudes))])
    return both, amplitudes, draw.at_inducing.transpose(1, 0, 2), draw.weights


def _leaves(part: Any) -> list[Array]:
    return [leaf for leaf in jax.tree.leaves(part) if eqx.is_array(leaf)]


def _num_scalars(draw: FusedDraw) -> int:
    return sum(leaf.size for part in (*draw.basis.kernels, draw.mean) for leaf in _leaves(part))


def _zeros(step: Any) -> Step:
    return Step(*(jnp.zeros(leaf.shape, leaf.dtype) for leaf in step))
