"""The chain in C++: all trajectories of a window advance together in vector registers, with a gradient written by hand.

It agrees with the plain chain but for rounding, and keeps nothing for the gradient but the states. What f's variance does not
touch, the determinant of S among it, is left to JAX, and so is everything that makes the arrays the kernel is handed; JAX then
differentiates up to there.

`chain` is handed one trajectory and is mapped over samples and sequences. A primitive of our own sees the maps: those over
samples and over sequences become axes of the kernel, which sums its gradient over them inside; any other is one over problems.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array

from gpssm.data import Window
from gpssm.draws import AbstractDraw, DrawGivenInducing, MarginalDraw, PathwiseDraw
from gpssm.kernels import FourierFeatures, Matern, RationalQuadratic, SquaredExponential
from gpssm.linalg import covariance, diagonal, log_determinant
from gpssm.means import IdentityMean, LinearMean, SumMean, ZeroMean
from gpssm.model import GPSSM
from gpssm.native.library import is_available
from gpssm.posteriors.chain import (
    Noise,
    Propose,
    Rollout,
    initial_kl,
    through_fresh_value,
    through_mean,
    through_state,
    through_value,
)
from gpssm.posteriors.local import LocalSteps, Step

PROPOSALS = (through_state, through_mean, through_value, through_fresh_value)  # numbered as in problem.h
SPREAD = (through_mean, through_fresh_value)  # those whose covariance f's variance joins
MATERNS = {0.5: 1, 1.5: 2, 2.5: 3}
LARGEST_STATE = 32
NOT_SERVED = -1


class Model(NamedTuple):
    """What all sequences and samples share, in the order of problem.h."""

    whitener: Array
    inducing: Array
    inverse_scales: Array
    variance: Array
    mixture: Array
    mean_matrix: Array
    mean_offset: Array
    precision: Array
    chol_inducing: Array
    frequencies: Array
    amplitudes: Array
    at_inducing: Array


class Steps(NamedTuple):
    """What the samples of a sequence share."""

    controls: Array
    gain: Array
    offset: Array
    scale: Array
    weight: Array


class Path(NamedTuple):
    """What belongs to one trajectory."""

    first: Array
    noise: Array
    values: Array
    feature_weights: Array


class Settings(NamedTuple):
    """What the kernel is told beside the arrays: the numbers of the proposal and of each group's kernel."""

    proposal: int
    kernels: tuple[int, ...]


NUM_MODEL, NUM_STEPS, NUM_PATH = len(Model._fields), len(Steps._fields), len(Path._fields)
NUM_FLOATING = NUM_MODEL + NUM_STEPS + NUM_PATH
NOISE = NUM_MODEL + NUM_STEPS + Path._fields.index("noise")


def compiled_applies(draw: AbstractDraw, propose: Propose, steps: LocalSteps, model: GPSSM, window: Window) -> bool:
    """Whether the kernel serves this draw, proposal, kernel and mean, on this machine."""
    return (
        isinstance(draw, DrawGivenInducing | MarginalDraw | PathwiseDraw)
        and _is_served(draw, propose)
        and all(_number(kernel) != NOT_SERVED for kernel in draw.basis.kernels)
        and _is_affine(draw.mean)
        and model.num_states <= LARGEST_STATE
        and len(window.outputs) > 1
        and draw.basis.whitener.dtype in (np.float32, np.float64)
        and jax.default_backend() == "cpu"
        and is_available()
    )


def compiled_chain(
    draw: AbstractDraw, propose: Propose, steps: LocalSteps, model: GPSSM, window: Window, noise: Noise
) -> Rollout:
    """`chain`, walked by the kernel."""
    assert isinstance(draw, DrawGivenInducing | MarginalDraw | PathwiseDraw)
    basis, num_steps = draw.basis, len(window.outputs) - 1
    table = jax.vmap(steps.resolve, axis_size=num_steps)(steps.scanned)
    if table.gain.ndim != table.chol.ndim:
        table = Step(_full(table.gain), table.offset, _full(table.chol))
    first = steps.initial_mean + steps.initial_chol @ noise.states[0]
    precision = 1 / model.process_scale**2
    is_spread = propose in SPREAD
    scale = jax.vmap(covariance)(table.chol) if is_spread else table.chol
    weight = jax.vmap(lambda gain: _weight(propose, gain, precision))(table.gain)
    is_marginal = isinstance(draw, MarginalDraw)
    values = draw.inducing.mean if is_marginal else draw.values
    chol = draw.inducing.chol if is_marginal else jnp.zeros((0, *values.shape[1:], values.shape[-1]), values.dtype)
    *features, feature_weights = _features(draw, values)
    matrix, offset = _affine(draw.mean, basis.inducing_inputs.shape[-1], basis.whitener.dtype)
    arrays = (
        *Model(basis.whitener, *_kernels(basis), matrix, offset, precision, chol, *features),
        *(leaf[None] for leaf in Steps(window.controls[:-1], table.gain, table.offset, scale, weight)),
        *(leaf[None, None] for leaf in Path(first, noise.states[1:], values, feature_weights)),
    )
    dtype = jnp.result_type(*arrays)
    settings = Settings(PROPOSALS.index(propose), tuple(_number(kernel) for kernel in basis.kernels))
    states, divergence = walk_p.bind(
        *(array.astype(dtype) for array in arrays), window.is_real[None, 1:], settings=settings, absorbed=()
    )
    constant = jax.vmap(lambda step: _constant(propose, step, precision, model.process_scale))(table)
    kl = divergence[0, 0] + jnp.sum(jnp.where(window.is_real[1:], constant, 0.0))
    return Rollout(states[0, 0], kl, initial_kl(steps, model, window), draw, draw.memory())


def _weight(propose: Propose, gain: Array, precision: Array) -> Array:
    """What a unit of f's variance adds to twice the divergence: by A var Aᵀ and var itself, or by (A - I) var (A - I)ᵀ."""
    if propose is through_state:
        return precision
    rest = gain if propose is through_mean else gain - (1.0 if gain.ndim == 1 else jnp.eye(len(gain), dtype=gain.dtype))
    through = rest**2 * precision if gain.ndim == 1 else precision @ rest**2
    return through + precision if propose is through_mean else through


def _constant(propose: Propose, step: Step, precision: Array, process_scale: Array) -> Array:
    """The part of the divergence that does not depend on the trajectory."""
    total = jnp.sum(diagonal(covariance(step.chol)) * precision) - len(precision) + 2 * jnp.sum(jnp.log(process_scale))
    return 0.5 * (total if propose is through_mean else total - log_determinant(step.chol))


def _full(matrices: Array) -> Array:
    return matrices if matrices.ndim == 3 else jax.vmap(jnp.diag)(matrices)


def _number(kernel: Any) -> int:
    """The kernel's number in problem.h."""
    if isinstance(kernel, SquaredExponential):
        return 0
    if isinstance(kernel, Matern):
        return MATERNS[kernel.smoothness]
    return 4 if isinstance(kernel, RationalQuadratic) else NOT_SERVED


def _kernels(basis: Any) -> tuple[Array, Array, Array, Array]:
    """Inducing inputs in units of the lengthscales, the inverse lengthscales, the variances and the mixtures, a row a group."""
    num_inputs = basis.inducing_inputs.shape[-1]
    inverse = jnp.stack([jnp.broadcast_to(1 / kernel.lengthscales, (num_inputs,)) for kernel in basis.kernels])
    variance = jnp.stack([kernel.variance for kernel in basis.kernels])
    mixture = [
        kernel.mixture if isinstance(kernel, RationalQuadratic) else jnp.ones_like(kernel.variance) for kernel in basis.kernels
    ]
    return basis.inducing_inputs * inverse[:, None], inverse, variance, jnp.stack(mixture)


def _is_served(draw: DrawGivenInducing | MarginalDraw | PathwiseDraw, propose: Propose) -> bool:
    """A function that is drawn once leaves no variance, so for it there is but one proposal."""
    if isinstance(draw, PathwiseDraw):
        return propose is through_value and all(isinstance(part, FourierFeatures) for part in draw.features)
    return propose in PROPOSALS


def _features(draw: DrawGivenInducing | MarginalDraw | PathwiseDraw, values: Array) -> tuple[Array, Array, Array, Array]:
    """Frequencies, amplitudes, features of the inducing inputs and weights; without entries for a draw that has none."""
    if isinstance(draw, PathwiseDraw):
        frequencies = jnp.stack([part.frequencies for part in draw.features])
        amplitudes = jnp.stack([part.amplitudes for part in draw.features]) / np.sqrt(frequencies.shape[1])
        return frequencies, amplitudes, draw.at_inducing, draw.weights
    groups, inducing, inputs = draw.basis.inducing_inputs.shape

    def nothing(*shape: int) -> Array:
        return jnp.zeros(shape, values.dtype)

    return nothing(groups, 0, inputs), nothing(groups, 0), nothing(groups, inducing, 0), nothing(len(values), 0)


def _is_affine(mean: Any) -> bool:
    if isinstance(mean, SumMean):
        return all(_is_affine(part) for part in mean.means)
    return isinstance(mean, ZeroMean | IdentityMean | LinearMean)


def _affine(mean: Any, num_inputs: int, dtype: Any) -> tuple[Array, Array]:
    """Matrix and offset of an affine mean."""
    origin = jnp.zeros(num_inputs, dtype)
    offset = mean(origin)
    columns = jax.vmap(mean)(jnp.eye(num_inputs, dtype=dtype))
    return (columns - offset[None]).T, offset


def _attributes(settings: Settings) -> dict[str, Any]:
    return {"proposal": np.int64(settings.proposal), "kernels": np.array(settings.kernels, np.int64)}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _walk(settings: Settings, *arrays: Array) -> tuple[Array, Array]:
    """States [sequence, sample, time, state] and divergences [sequence, sample]."""
    noise = arrays[NOISE]
    sequences, samples, steps, states = noise.shape
    results = (
        jax.ShapeDtypeStruct((sequences, samples, steps + 1, states), noise.dtype),
        jax.ShapeDtypeStruct((sequences, samples), noise.dtype),
    )
    call = jax.ffi.ffi_call("gpssm_walk", results, vmap_method="broadcast_all")
    answers: Any = call(*arrays, **_attributes(settings))
    return answers[0], answers[1]


def _walk_forward(settings: Settings, *arrays: Array) -> tuple[tuple[Array, Array], tuple]:
    answers: Any = _walk(settings, *arrays)
    return (answers[0], answers[1]), (arrays, answers[0])


def _walk_backward(settings: Settings, kept: tuple, cotangents: tuple[Array, Array]) -> tuple:
    arrays, states = kept
    results = tuple(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays[:NUM_FLOATING])
    call = jax.ffi.ffi_call("gpssm_walk_back", results, vmap_method="broadcast_all")
    answers: Any = call(*arrays, states, *cotangents, **_attributes(settings))
    return *answers, None


_walk.defvjp(_walk_forward, _walk_backward)


# `walk_p` is `_walk`, until a map comes: its axes [sequence, sample] have the length one until they take up the axis of a map

walk_p = Primitive("gpssm_walk")
walk_p.multiple_results = True


def _bound(*arrays: Array, settings: Settings, absorbed: tuple[str, ...]) -> tuple[Array, Array]:
    return _walk(settings, *arrays)


def _abstract(*arrays: Any, settings: Settings, absorbed: tuple[str, ...]) -> list:
    noise = arrays[NOISE]
    sequences, samples, steps, states = noise.shape
    return [noise.update(shape=(sequences, samples, steps + 1, states)), noise.update(shape=(sequences, samples))]


def _jvp(primals: Sequence, tangents: Sequence, *, settings: Settings, absorbed: tuple[str, ...]) -> tuple:
    """No map is left to come inside of this derivative."""
    is_real = primals[-1]
    floating = tuple(ad.instantiate_zeros(tangent) for tangent in tangents[:-1])
    return jax.jvp(lambda *arrays: _walk(settings, *arrays, is_real), tuple(primals[:-1]), floating)


def _batched(operands: Sequence, axes: Sequence, *, settings: Settings, absorbed: tuple[str, ...]) -> tuple:
    """A map over trajectories alone becomes the axis `sample`, one that leaves the model alone the axis `sequence`."""
    size = next(operand.shape[axis] for operand, axis in zip(operands, axes, strict=True) if axis is not None)
    is_mapped = [axis is not None for axis in axes]
    of_path = [NUM_MODEL + NUM_STEPS <= i < NUM_FLOATING for i in range(len(axes))]
    if any(is_mapped[:NUM_MODEL]):
        name = None
    elif any(mapped and not of for mapped, of in zip(is_mapped, of_path, strict=True)):
        name = "sequence"
    else:
        name = "sample"
    if name is None or name in absorbed:
        answers = jax.vmap(lambda *arrays: _walk(settings, *arrays), in_axes=axes, axis_size=size)(*operands)
        return answers, (0, 0)
    position = ("sequence", "sample").index(name)

    def absorb(operand: Array, axis: int | None, of: bool) -> Array:
        if axis is not None:
            return jnp.moveaxis(operand.squeeze(position + (axis <= position)), axis - (axis > position), position)
        return jnp.broadcast_to(operand, (*operand.shape[:position], size, *operand.shape[position + 1 :]))

    moved = [
        absorb(operand, axis, of) if (of or (name == "sequence" and i >= NUM_MODEL)) else operand
        for i, (operand, axis, of) in enumerate(zip(operands, axes, of_path, strict=True))
    ]
    states, divergence = walk_p.bind(*moved, settings=settings, absorbed=(*absorbed, name))
    return (jnp.expand_dims(states, position + 1), jnp.expand_dims(divergence, position + 1)), (position, position)


walk_p.def_impl(jax.jit(_bound, static_argnames=("settings", "absorbed")))
walk_p.def_abstract_eval(_abstract)
ad.primitive_jvps[walk_p] = _jvp
batching.primitive_batchers[walk_p] = _batched
mlir.register_lowering(walk_p, mlir.lower_fun(_bound, multiple_results=True), platform="cpu")
