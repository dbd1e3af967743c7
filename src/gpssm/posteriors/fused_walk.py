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
    whitener: Float[Array, "inducing group inducing"]  # transposed: [column, group, row]
    values: Float[Array, "state inducing"]
    explaining: Float[Array, "inducing state inducing"] | None
    frequencies: Float[Array, "group input feature"] | None
    amplitudes: Float[Array, "2 group feature"] | None  # of a cosine and of a sine, one of which is zero
    at_inducing: Float[Array, "inducing group feature"] | None
    weights: Float[Array, "state feature"] | None
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
    features: int
    step_shapes: tuple[tuple[int, ...], ...]
    dtype: Any


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How a program divides its work; measured on an H200 (docs/performance-gpu.md)."""

    width: int = 128  # rows of the whitener in a tile
    height: int = 16  # columns
    num_warps: int = 4


TILING = Tiling()
WARP_BYTES = 512  # that a warp reads at a time


def walk_on_chip(entrywise: Any, sizes: Sizes, arrays: Arrays) -> tuple[Float[Array, "step state"], Float[Array, " step"]]:
    """The states after each step, and the divergences; `vmap` makes a program of every trajectory."""
    layout = _layout(TILING, sizes)
    padded = _padded(arrays, layout)
    present = [index for index, array in enumerate(padded) if array is not None]

    def kernel(*references: Any) -> None:
        *ins, out, covariances, projections, sums = references
        named: list[Any] = [None] * len(padded)
        for index, reference in zip(present, ins, strict=True):
            named[index] = reference
        _walk(entrywise, layout, Arrays(*named), out, Boards(covariances, projections, sums))

    out, *_ = pl.pallas_call(
        kernel,
        out_shape=(
            jax.ShapeDtypeStruct((sizes.steps, sizes.states + 1), sizes.dtype),
            jax.ShapeDtypeStruct(layout.board(layout.width), sizes.dtype),
            jax.ShapeDtypeStruct(layout.board(layout.features), sizes.dtype),
            jax.ShapeDtypeStruct((4, max(layout.groups, layout.states)), sizes.dtype),
        ),
        interpret=layout.is_interpreted,
        compiler_params=triton.CompilerParams(num_warps=TILING.num_warps, num_stages=1),
        name="fused_chain",
    )(*(padded[index] for index in present))
    return out[:, :-1], out[:, -1]


class Boards(NamedTuple):
    """The program's own memory."""

    covariances: Any  # [group, fold, inducing input]
    projections: Any
    sums: Any  # [fact, group or state]


class Layout(NamedTuple):
    """Sizes in whole tiles; Triton's are powers of two."""

    sizes: Sizes
    groups: int
    states: int
    inducing: int
    features: int
    width: int  # rows of the whitener in a tile
    height: int  # columns
    is_interpreted: bool

    def folds(self, width: int) -> int:
        """Into how many parts the inputs of a product are cut, so that its outputs times the parts occupy a warp."""
        return min(max(1, WARP_BYTES // (width * self.sizes.dtype.itemsize)), self.inducing)

    def board(self, width: int) -> tuple[int, int, int]:
        """The shape of what is handed to a product."""
        folds = self.folds(width)
        return self.groups, folds, self.inducing // folds


def _layout(tiling: Tiling, sizes: Sizes) -> Layout:
    inducing = max(16, pl.next_power_of_2(sizes.inducing))
    return Layout(
        sizes,
        pl.next_power_of_2(sizes.groups),
        pl.next_power_of_2(sizes.states),
        inducing,
        max(16, pl.next_power_of_2(max(1, sizes.features))),
        min(tiling.width, inducing),
        tiling.height,
        jax.default_backend() == "cpu",
    )


def _padded(arrays: Arrays, layout: Layout) -> Arrays:
    """Zeros up to whole tiles, which add nothing to any sum, and matrices folded as their products want them."""
    groups, states, inducing, features = layout.groups, layout.states, layout.inducing, layout.features

    def pad(array: Array | None, *shape: int) -> Array | None:
        return None if array is None else jnp.pad(array, [(0, new - old) for new, old in zip(shape, array.shape, strict=True)])

    def folded(matrix: Array | None, rows: int, columns: int) -> Array | None:
        if matrix is None:
            return None
        folds, matrix = layout.folds(min(layout.width, columns)), jnp.pad(
            matrix, [(0, inducing - len(matrix)), (0, rows - matrix.shape[1]), (0, columns - matrix.shape[2])]
        )
        parts = matrix.reshape(folds, inducing // folds, rows, columns)
        return parts.transpose(1, 2, 0, 3).reshape(inducing // folds, rows * folds, columns)

    return arrays._replace(
        inducing_inputs=pad(arrays.inducing_inputs, layout.sizes.groups, layout.sizes.inputs, inducing),
        whitener=folded(arrays.whitener, groups, inducing),
        values=pad(arrays.values, states, inducing),
        explaining=folded(arrays.explaining, states, inducing),
        frequencies=pad(arrays.frequencies, groups, layout.sizes.inputs, features),
        amplitudes=pad(arrays.amplitudes, 2, groups, features),
        at_inducing=folded(arrays.at_inducing, groups, features),
        weights=pad(arrays.weights, states, features),
    )


def _walk(entrywise: Any, layout: Layout, arrays: Arrays, out: Any, boards: Boards) -> None:
    """The loop over time; the inputs of a step are read one step ahead, so that nobody waits for them."""
    sizes, zero = layout.sizes, jnp.zeros((), layout.sizes.dtype)
    scalars = iter([arrays.scalars[index] for index in range(arrays.scalars.shape[0])])
    parameters = [[_taken(scalars, shape) for shape in shapes] for shapes in entrywise.num_parameters]
    process_scale = _taken(scalars, (sizes.states,))
    for board in (boards.covariances, boards.projections):
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
        facts = _facts(entrywise, layout, arrays, boards, parameters, np.concatenate([state, control]))
        moved, divergence = entrywise.finish(*facts, state, *step, process_scale, noise)
        kept = [jnp.where(is_real, new, old) for new, old in zip(moved, state, strict=True)]
        for column, value in enumerate([*kept, jnp.where(is_real, divergence[()], zero)]):
            out[index, column] = value
        return tuple(kept), later

    first = tuple(arrays.first[state] for state in range(sizes.states))
    jax.lax.fori_loop(0, sizes.steps, body, (first, read(0)))


def _taken(scalars: Any, shape: tuple[int, ...]) -> Entries:
    return entries([next(scalars) for _ in range(int(np.prod(shape, dtype=int)))], shape)


def _facts(
    entrywise: Any, layout: Layout, arrays: Any, boards: Boards, parameters: list[list[Entries]], point: Entries
) -> list[Entries]:
    """What `finish` must know of f at `point`, in the order of its arguments."""
    sizes, variances = layout.sizes, []
    [prior_mean] = entrywise.mean(*parameters[-1], point)
    for group, covariance in enumerate(entrywise.covariances):
        [variance] = covariance(*parameters[group], point, point)
        variances.append(variance[()])
        inducing = [arrays.inducing_inputs[group, axis, :] for axis in range(sizes.inputs)]
        [tile] = covariance(*parameters[group], entries(inducing, (sizes.inputs,)), point)
        boards.covariances[group, :, :] = jnp.broadcast_to(tile[()], (layout.inducing,)).reshape(boards.covariances.shape[1:])
    _wait(layout)
    projected = _multiplied(layout, arrays.whitener, boards.covariances, is_triangular=True)
    values = [arrays.values[:, _slice(row, layout.width)] for row in range(len(projected))]
    totals = [
        (sum(tile * value for tile, value in zip(projected, values, strict=True)), sizes.states),
        (sum(tile * tile for tile in projected), sizes.groups),
    ]
    if sizes.kind == "marginal":
        explained = _multiplied(layout, arrays.explaining, boards.covariances)
        totals.append((sum(tile * tile for tile in explained), sizes.states))
    if sizes.kind == "pathwise":
        _write(boards.projections, projected)
        _wait(layout)
        waves = _residual_waves(layout, arrays, boards, point)
        totals += [(waves * waves, sizes.groups), (waves * arrays.weights[...], sizes.states)]
    for index, (tile, _) in enumerate(totals):
        total = jnp.sum(tile, axis=1)
        boards.sums[index, : len(total)] = total
    _wait(layout)
    told = [entries([boards.sums[index, i] for i in range(count)], (count,)) for index, (_, count) in enumerate(totals)]
    nothing = entries([], (0,))
    return [prior_mean, entries(variances, (sizes.groups,)), *told, *[nothing] * (4 - len(told))]


def _multiplied(layout: Layout, matrix: Any, board: Any, is_triangular: bool = False) -> list[Array]:
    """Tiles [group, output] of the products of matrices [input, group and fold, output] with what is on the board.

    Outputs and folds lie across the lanes of a warp and groups across the warps, so the sum over inputs stays within a thread. Of
    a lower triangle, only what is not zero is read.
    """
    products, columns = [], matrix.shape[2]
    width, (_, folds, length) = min(layout.width, columns), board.shape
    groups, height = matrix.shape[1] // folds, min(layout.height, length)
    for row in range(columns // width):
        end = min(length, (row + 1) * width if is_triangular and folds == 1 else length, layout.sizes.inducing)
        parts = []
        for column in range(-(-end // height)):
            vector = jnp.broadcast_to(board[:, :, _slice(column, height)], (groups, folds, height))
            vector = vector.reshape(groups * folds, height).T
            parts.append(jnp.sum(matrix[_slice(column, height), :, _slice(row, width)] * vector[:, :, None], axis=0))
        total = functools.reduce(jnp.add, parts)
        products.append(total if folds == 1 else jnp.sum(total.reshape(groups, folds, width), axis=1))
    return products


def _write(board: Any, tiles: list[Array]) -> None:
    """Put tiles [group, output] on a board."""
    groups, _, length = board.shape
    for row, tile in enumerate(tiles):
        if (width := tile.shape[1]) >= length:
            board[:, _slice(row, width // length), :] = tile.reshape(groups, width // length, length)
        else:
            fold, place = divmod(row * width, length)
            board[:, fold, pl.ds(place, width)] = tile


def _residual_waves(layout: Layout, arrays: Any, boards: Boards, point: Entries) -> Array:
    """Cosines and sines [group, feature], less what the inducing inputs explain of them."""
    angles = functools.reduce(jnp.add, [arrays.frequencies[:, axis, :] * x for axis, x in enumerate(point)])
    waves = arrays.amplitudes[0] * jnp.cos(angles) + arrays.amplitudes[1] * jnp.sin(angles)
    return waves - jnp.concatenate(_multiplied(layout, arrays.at_inducing, boards.projections), axis=1)


def _slice(index: int, size: int) -> Any:
    return pl.ds(index * size, size)


def _wait(layout: Layout) -> None:
    """Until every thread of the program is here, and what it has written can be read."""
    if not layout.is_interpreted:
        triton.debug_barrier()
