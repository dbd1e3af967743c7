"""The kernel of the fused chain, in Pallas: its data, its tiles and its loop over time.

A program holds the state as scalars and everything that has an inducing input or a feature in it as tiles. At each step it makes
k(Z, x), multiplies it with the tiles of the whitener's lower triangle, which stay in the cache of its multiprocessor, and sums up
what the step must know of f; the rest is scalar arithmetic, made of the plain chain's own functions (`unrolled.py`).

A product needs its vector in another order of threads than the one that made it. The vector passes through a little memory of the
program's own (`Board`): left to itself, Triton has every warp compute all of it instead, which takes four times as long.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float

from gpssm.unrolled import Entries, entries


class Arrays(NamedTuple):
    """What the kernel reads; None where the kind of draw has none."""

    scalars: Float[Array, " scalar"]
    inducing_inputs: Float[Array, "group input inducing"]
    whitener: Float[Array, "group inducing inducing"]  # transposed: [group, column, row]
    values: Float[Array, "state inducing"]
    explaining: Float[Array, "state inducing inducing"] | None
    frequencies: Float[Array, "group input frequency"] | None
    amplitudes: Float[Array, "group frequency"] | None
    at_inducing: Float[Array, "2 group inducing frequency"] | None
    weights: Float[Array, "2 state frequency"] | None
    first: Float[Array, " state"]
    given: Float[Array, "step column"]
    noise: Float[Array, "step state"]


class Sizes(NamedTuple):
    """What is known when the kernel is made."""

    kind: str  # of draw: given, marginal or pathwise
    steps: int
    states: int
    groups: int
    inducing: int
    inputs: int
    frequencies: int
    step_shapes: tuple[tuple[int, ...], ...]
    dtype: Any


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How a program divides its work; measured on an H200 (docs/performance-gpu.md)."""

    outputs: int = 64  # rows of the whitener in a tile
    inputs: int = 32  # columns
    num_warps: int = 4


TILING = Tiling()


def walk_on_chip(entrywise: Any, sizes: Sizes, arrays: Arrays) -> tuple[Float[Array, "step state"], Float[Array, " step"]]:
    """The states after each step, and the divergences; `vmap` makes a program of every trajectory."""
    layout = _layout(TILING, sizes)
    padded = _padded(arrays, layout)
    present = [index for index, array in enumerate(padded) if array is not None]

    def kernel(*references: Any) -> None:
        *ins, out, board = references
        named: list[Any] = [None] * len(padded)
        for index, reference in zip(present, ins, strict=True):
            named[index] = reference
        _walk(entrywise, layout, Arrays(*named), out, board)

    out, _ = pl.pallas_call(
        kernel,
        out_shape=(
            jax.ShapeDtypeStruct((sizes.steps, sizes.states + 1), sizes.dtype),
            jax.ShapeDtypeStruct((2, layout.groups, layout.inducing), sizes.dtype),
        ),
        interpret=layout.is_interpreted,
        compiler_params=triton.CompilerParams(num_warps=TILING.num_warps, num_stages=1),
        name="fused_chain",
    )(*(padded[index] for index in present))
    return out[:, :-1], out[:, -1]


class Layout(NamedTuple):
    """Sizes in whole tiles; Triton's are powers of two."""

    sizes: Sizes
    tile_outputs: int
    tile_inputs: int
    groups: int
    states: int
    inducing: int
    frequencies: int
    is_interpreted: bool


def _layout(tiling: Tiling, sizes: Sizes) -> Layout:
    inducing = max(16, pl.next_power_of_2(sizes.inducing))
    return Layout(
        sizes,
        min(tiling.outputs, inducing),
        min(tiling.inputs, inducing),
        pl.next_power_of_2(sizes.groups),
        pl.next_power_of_2(sizes.states),
        inducing,
        max(16, pl.next_power_of_2(max(1, sizes.frequencies))),
        jax.default_backend() == "cpu",
    )


def _padded(arrays: Arrays, layout: Layout) -> Arrays:
    """Zeros up to whole tiles: they add nothing to any sum."""
    groups, states, inducing, frequencies = layout.groups, layout.states, layout.inducing, layout.frequencies

    def pad(array: Array | None, *shape: int) -> Array | None:
        return None if array is None else jnp.pad(array, [(0, new - old) for new, old in zip(shape, array.shape, strict=True)])

    return arrays._replace(
        inducing_inputs=pad(arrays.inducing_inputs, layout.sizes.groups, layout.sizes.inputs, inducing),
        whitener=pad(arrays.whitener, groups, inducing, inducing),
        values=pad(arrays.values, states, inducing),
        explaining=pad(arrays.explaining, states, inducing, inducing),
        frequencies=pad(arrays.frequencies, groups, layout.sizes.inputs, frequencies),
        amplitudes=pad(arrays.amplitudes, groups, frequencies),
        at_inducing=pad(arrays.at_inducing, 2, groups, inducing, frequencies),
        weights=pad(arrays.weights, 2, states, frequencies),
    )


def _walk(entrywise: Any, layout: Layout, arrays: Arrays, out: Any, board: Any) -> None:
    """The loop over time; the inputs of a step are read one step ahead, so that nobody waits for them."""
    sizes, zero = layout.sizes, jnp.zeros((), layout.sizes.dtype)
    scalars = iter([arrays.scalars[index] for index in range(arrays.scalars.shape[0])])
    parameters = [[_taken(scalars, shape) for shape in shapes] for shapes in entrywise.num_parameters]
    process_scale = _taken(scalars, (sizes.states,))
    board[...] = jnp.zeros(board.shape, sizes.dtype)

    def read(index: Any) -> tuple:
        given = [arrays.given[index, column] for column in range(arrays.given.shape[1])]
        return *given, *(arrays.noise[index, state] for state in range(sizes.states))

    def body(index: Any, carry: tuple) -> tuple:
        state, ahead = entries(carry[0], (sizes.states,)), iter(carry[1])
        later = read(jnp.minimum(index + 1, sizes.steps - 1))
        step = [_taken(ahead, shape) for shape in sizes.step_shapes]
        control = _taken(ahead, (sizes.inputs - sizes.states,))
        is_real, noise = next(ahead) > 0, _taken(ahead, (sizes.states,))
        facts = _facts(entrywise, layout, arrays, board, parameters, np.concatenate([state, control]))
        moved, divergence = entrywise.finish(*facts, state, *step, process_scale, noise)
        kept = [jnp.where(is_real, new, old) for new, old in zip(moved, state, strict=True)]
        for column, value in enumerate([*kept, jnp.where(is_real, divergence[()], zero)]):
            out[index, column] = value
        _wait(layout)
        return tuple(kept), later

    first = tuple(arrays.first[state] for state in range(sizes.states))
    jax.lax.fori_loop(0, sizes.steps, body, (first, read(0)))


def _taken(scalars: Any, shape: tuple[int, ...]) -> Entries:
    return entries([next(scalars) for _ in range(int(np.prod(shape, dtype=int)))], shape)


def _facts(
    entrywise: Any, layout: Layout, arrays: Any, board: Any, parameters: list[list[Entries]], point: Entries
) -> list[Entries]:
    """What `finish` must know of f at `point`, in the order of its arguments."""
    sizes, variances = layout.sizes, []
    [prior_mean] = entrywise.mean(*parameters[-1], point)
    for group, covariance in enumerate(entrywise.covariances):
        [variance] = covariance(*parameters[group], point, point)
        variances.append(variance[()])
        inducing = [arrays.inducing_inputs[group, axis, :] for axis in range(sizes.inputs)]
        [tile] = covariance(*parameters[group], entries(inducing, (sizes.inputs,)), point)
        board[0, group, :] = jnp.broadcast_to(tile[()], (layout.inducing,))
    _wait(layout)
    projected = _multiplied(arrays.whitener, board, 0, layout, is_triangular=True)
    values = [arrays.values[:, _slice(index, layout.tile_outputs)] for index in range(len(projected))]
    facts = [prior_mean, entries(variances, (sizes.groups,))]
    facts.append(_totals([tile * value for tile, value in zip(projected, values, strict=True)], sizes.states))
    facts.append(_totals([tile * tile for tile in projected], sizes.groups))
    nothing = entries([], (0,))
    if sizes.kind == "given":
        return [*facts, nothing, nothing]
    if sizes.kind == "marginal":
        explained = _multiplied(arrays.explaining, board, 0, layout, is_triangular=False)
        return [*facts, _totals([tile * tile for tile in explained], sizes.states), nothing]
    for index, tile in enumerate(projected):
        board[1, :, _slice(index, layout.tile_outputs)] = tile
    _wait(layout)
    waves = _residual_waves(layout, arrays, board, point)
    facts.append(_totals([wave * wave for wave in waves], sizes.groups))
    return [*facts, _totals([wave * arrays.weights[half] for half, wave in enumerate(waves)], sizes.states)]


def _multiplied(matrix: Any, board: Any, slot: int, layout: Layout, is_triangular: bool) -> list[Array]:
    """Tiles [.., output] of the products of matrices [.., input, output] with what is on the board.

    Of a lower triangle, only what is not zero is read.
    """
    outputs, inputs, tiles = layout.tile_outputs, layout.tile_inputs, []
    for row in range(matrix.shape[2] // outputs):
        total = jnp.zeros((matrix.shape[0], inputs, outputs), layout.sizes.dtype)
        for column in range(-(-layout.sizes.inducing // inputs)):
            if is_triangular and column * inputs >= (row + 1) * outputs:
                break
            vector = board[slot, :, _slice(column, inputs)]
            total += matrix[:, _slice(column, inputs), _slice(row, outputs)] * vector[:, :, None]
        tiles.append(jnp.sum(total, axis=1))
    return tiles


def _residual_waves(layout: Layout, arrays: Any, board: Any, point: Entries) -> list[Array]:
    """Cosines and sines [group, frequency], less what the inducing inputs explain of them."""
    angles = functools.reduce(jnp.add, [arrays.frequencies[:, axis, :] * x for axis, x in enumerate(point)])
    amplitudes = arrays.amplitudes[...]
    explained = []
    for half in range(2):
        total = jnp.zeros((layout.groups, layout.tile_inputs, layout.frequencies), layout.sizes.dtype)
        for row in range(-(-layout.sizes.inducing // layout.tile_inputs)):
            rows = _slice(row, layout.tile_inputs)
            total += arrays.at_inducing[half, :, rows, :] * board[1, :, rows][:, :, None]
        explained.append(jnp.sum(total, axis=1))
    return [amplitudes * jnp.cos(angles) - explained[0], amplitudes * jnp.sin(angles) - explained[1]]


def _slice(index: int, size: int) -> Any:
    return pl.ds(index * size, size)


def _totals(tiles: list[Array], count: int) -> Entries:
    """The sums of the rows of all tiles together, as scalars."""
    sums = jnp.sum(functools.reduce(jnp.add, tiles), axis=1)
    numbers = jax.lax.iota(jnp.int32, len(sums))
    return entries([jnp.sum(jnp.where(numbers == index, sums, 0)) for index in range(count)], (count,))


def _wait(layout: Layout) -> None:
    """Until every thread of the program is here, and what it has written can be read."""
    if not layout.is_interpreted:
        triton.debug_barrier()
