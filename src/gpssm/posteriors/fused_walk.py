"""The kernel of the fused chain, in Pallas: its data, its tiles and its loop over time.

A program holds the state as scalars and everything that has an inducing input or a feature in it as tiles. At each step it makes
k(Z, x), multiplies it with the tiles of the whitener's lower triangle, which stay in registers where they fit, and sums up what
the step must know of f; the rest is scalar arithmetic, made of the plain chain's own functions (`unrolled.py`).

A product needs its vector in another order of threads than the one that made it. The vector passes through a little memory of the
program's own (`Boards`): left to itself, Triton has every warp compute all of it instead, which takes four times as long.
"""

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


class Tiling(NamedTuple):
    """How a program divides its work; measured on an H200 (docs/performance-gpu.md)."""

    num_warps: int
    is_resident: bool  # the whitener stays in registers, and is not read again at every step
    width: int = 64  # outputs of a tile
    height: int = 4  # inputs of a tile, times its folds; at least


TILINGS = (Tiling(4, True), Tiling(8, True), Tiling(4, False))  # the first that a problem fits into
HELD_BYTES = 22_528  # a warp's, 176 registers of each thread: as many as a step does not need for itself
WARP_BYTES = 512  # that a warp reads at a time
MOST_TILES = 16  # in a row of them: each is written out in the program, which takes time to compile


def walk_on_chip(entrywise: Any, sizes: Sizes, arrays: Arrays) -> tuple[Float[Array, "step state"], Float[Array, " step"]]:
    """The states after each step, and the divergences; `vmap` makes a program of every trajectory."""
    layout = _layout(sizes)
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
            jax.ShapeDtypeStruct((layout.groups, layout.inducing), sizes.dtype),
            jax.ShapeDtypeStruct((layout.groups, layout.inducing), sizes.dtype),
            jax.ShapeDtypeStruct((4, max(layout.groups, layout.states)), sizes.dtype),
        ),
        interpret=layout.is_interpreted,
        compiler_params=triton.CompilerParams(num_warps=layout.tiling.num_warps, num_stages=1),
        name="fused_chain",
    )(*(padded[index] for index in present))
    return out[:, :-1], out[:, -1]


class Tiles(NamedTuple):
    """How a matrix [input, group, output] is cut: a tile has `folds` times `height` inputs beside one another.

    Outputs and folds together are what a warp reads at once.
    """

    width: int
    height: int
    folds: int
    counts: tuple[int, ...]  # of tiles, for each row of them: what is left is padding, or zero


class Boards(NamedTuple):
    """The program's own memory."""

    covariances: Any  # [group, inducing]
    projections: Any
    sums: Any  # [fact, group or state]


class Layout(NamedTuple):
    """Sizes in whole tiles; Triton's are powers of two."""

    sizes: Sizes
    groups: int
    states: int
    inducing: int
    features: int
    tiling: Tiling
    is_interpreted: bool

    @property
    def triangle(self) -> Tiles:
        """How the whitener is cut."""
        return self.tiles(self.inducing, is_triangular=True)

    def fits(self) -> bool:
        """Whether the registers have room for what is to stay in them; the residual of features leaves none."""
        triangle = self.triangle
        numbers = sum(triangle.counts) * triangle.height * triangle.folds * triangle.width * self.groups
        is_small = numbers * self.sizes.dtype.itemsize <= HELD_BYTES * self.tiling.num_warps
        return not self.tiling.is_resident or (is_small and self.sizes.kind != "pathwise")

    def tiles(self, num_outputs: int, is_triangular: bool = False) -> Tiles:
        """How a matrix is cut whose inputs are the inducing ones; of a lower triangle, what is zero is left out."""
        width = min(self.tiling.width, num_outputs)
        reach = WARP_BYTES * max(1, self.tiling.num_warps // self.groups)
        folds = min(max(1, reach // (width * self.sizes.dtype.itemsize)), self.inducing)
        height = min(max(self.tiling.height, self.inducing // (MOST_TILES * folds)), self.inducing // folds)
        ends = [(row + 1) * width if is_triangular else self.inducing for row in range(num_outputs // width)]
        return Tiles(width, height, folds, tuple(-(-min(end, self.sizes.inducing) // (folds * height)) for end in ends))


def _layout(sizes: Sizes) -> Layout:
    groups, states = pl.next_power_of_2(sizes.groups), pl.next_power_of_2(sizes.states)
    inducing, features = (max(16, pl.next_power_of_2(max(1, count))) for count in (sizes.inducing, sizes.features))
    is_interpreted = jax.default_backend() == "cpu"
    layouts = (Layout(sizes, groups, states, inducing, features, tiling, is_interpreted) for tiling in TILINGS)
    return next(layout for layout in layouts if layout.fits())


def _padded(arrays: Arrays, layout: Layout) -> Arrays:
    """Zeros up to whole tiles, which add nothing to any sum, and matrices [tile, input, group and fold, output]."""
    groups, states, inducing, features = layout.groups, layout.states, layout.inducing, layout.features

    def pad(array: Array | None, *shape: int) -> Array | None:
        return None if array is None else jnp.pad(array, [(0, new - old) for new, old in zip(shape, array.shape, strict=True)])

    def cut(matrix: Array | None, rows: int, tiles: Tiles) -> Array | None:
        if matrix is None:
            return None
        widths = (inducing, rows, tiles.width * len(tiles.counts))
        matrix = jnp.pad(matrix, [(0, new - old) for new, old in zip(widths, matrix.shape, strict=True)])
        parts = matrix.reshape(-1, tiles.folds, tiles.height, rows, len(tiles.counts), tiles.width)
        parts = parts.transpose(4, 0, 2, 3, 1, 5).reshape(*parts.shape[4:5], -1, tiles.height, rows * tiles.folds, tiles.width)
        return jnp.concatenate([row[:count] for row, count in zip(parts, tiles.counts, strict=True)])

    return arrays._replace(
        inducing_inputs=pad(arrays.inducing_inputs, layout.sizes.groups, layout.sizes.inputs, inducing),
        whitener=cut(arrays.whitener, groups, layout.triangle),
        values=pad(arrays.values, states, inducing),
        explaining=cut(arrays.explaining, states, layout.tiles(inducing)),
        frequencies=pad(arrays.frequencies, groups, layout.sizes.inputs, features),
        amplitudes=pad(arrays.amplitudes, 2, groups, features),
        at_inducing=cut(arrays.at_inducing, groups, layout.tiles(features)),
        weights=pad(arrays.weights, states, features),
    )


def _walk(entrywise: Any, layout: Layout, arrays: Arrays, out: Any, boards: Boards) -> None:
    """The loop over time; the inputs of a step are read one step ahead, so that nobody waits for them."""
    sizes, zero = layout.sizes, jnp.zeros((), layout.sizes.dtype)
    scalars = iter([arrays.scalars[index] for index in range(arrays.scalars.shape[0])])
    parameters = [[_taken(scalars, shape) for shape in shapes] for shapes in entrywise.num_parameters]
    process_scale = _taken(scalars, (sizes.states,))
    boards.covariances[...] = jnp.zeros(boards.covariances.shape, sizes.dtype)  # of groups that are padding it stays so
    _wait(layout)
    num_tiles = sum(layout.triangle.counts)
    held = [arrays.whitener[index] for index in range(num_tiles)] if layout.tiling.is_resident else arrays.whitener

    def read(index: Any) -> tuple:
        given = [arrays.given[index, column] for column in range(arrays.given.shape[1])]
        return *given, *(arrays.noise[index, state] for state in range(sizes.states))

    def body(index: Any, carry: tuple) -> tuple:
        state, ahead = entries(carry[0], (sizes.states,)), iter(carry[1])
        later = read(jnp.minimum(index + 1, sizes.steps - 1))
        step = [_taken(ahead, shape) for shape in sizes.step_shapes]
        control = _taken(ahead, (sizes.inputs - sizes.states,))
        is_real, noise = next(ahead) > 0, _taken(ahead, (sizes.states,))
        facts = _facts(entrywise, layout, arrays, held, boards, parameters, np.concatenate([state, control]))
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
    entrywise: Any, layout: Layout, arrays: Any, whitener: Any, boards: Boards, parameters: list[list[Entries]], point: Entries
) -> list[Entries]:
    """What `finish` must know of f at `point`, in the order of its arguments."""
    sizes, variances = layout.sizes, []
    [prior_mean] = entrywise.mean(*parameters[-1], point)
    for group, covariance in enumerate(entrywise.covariances):
        [variance] = covariance(*parameters[group], point, point)
        variances.append(variance[()])
        inducing = [arrays.inducing_inputs[group, axis, :] for axis in range(sizes.inputs)]
        [tile] = covariance(*parameters[group], entries(inducing, (sizes.inputs,)), point)
        boards.covariances[group, :] = jnp.broadcast_to(tile[()], (layout.inducing,))
    _wait(layout)
    projected = _multiplied(whitener, boards.covariances, layout.triangle)
    values = [arrays.values[:, _slice(row, layout.triangle.width)] for row in range(len(projected))]
    totals = [
        (sum(tile * value for tile, value in zip(projected, values, strict=True)), sizes.states),
        (sum(tile * tile for tile in projected), sizes.groups),
    ]
    if sizes.kind == "marginal":
        explained = _multiplied(arrays.explaining, boards.covariances, layout.tiles(layout.inducing))
        totals.append((sum(tile * tile for tile in explained), sizes.states))
    if sizes.kind == "pathwise":
        for row, tile in enumerate(projected):
            boards.projections[:, _slice(row, layout.triangle.width)] = tile
        _wait(layout)
        tiles = layout.tiles(layout.features)
        waves = _residual_waves(arrays, boards, tiles, point)
        weights = [arrays.weights[:, _slice(row, tiles.width)] for row in range(len(waves))]
        totals.append((sum(wave * wave for wave in waves), sizes.groups))
        totals.append((sum(wave * weight for wave, weight in zip(waves, weights, strict=True)), sizes.states))
    for index, (tile, _) in enumerate(totals):
        total = jnp.sum(tile, axis=1)
        boards.sums[index, : len(total)] = total
    _wait(layout)
    told = [entries([boards.sums[index, i] for i in range(count)], (count,)) for index, (_, count) in enumerate(totals)]
    nothing = entries([], (0,))
    return [prior_mean, entries(variances, (sizes.groups,)), *told, *[nothing] * (4 - len(told))]


def _multiplied(matrix: Any, board: Any, tiles: Tiles) -> list[Array]:
    """Rows of tiles [group, output] of the products of matrices with what is on the board.

    Outputs and folds lie across the lanes of a warp and groups across the warps, so the sum over inputs stays within a thread.
    """
    products, place, inputs = [], 0, tiles.folds * tiles.height
    groups = matrix[0].shape[1] // tiles.folds
    for count in tiles.counts:
        parts = []
        for column in range(count):
            vector = jnp.broadcast_to(board[:, _slice(column, inputs)], (groups, inputs))
            vector = vector.reshape(groups * tiles.folds, tiles.height).T
            parts.append(jnp.sum(matrix[place + column] * vector[:, :, None], axis=0))
        total, place = functools.reduce(jnp.add, parts), place + count
        products.append(total if tiles.folds == 1 else jnp.sum(total.reshape(groups, tiles.folds, tiles.width), axis=1))
    return products


def _residual_waves(arrays: Any, boards: Boards, tiles: Tiles, point: Entries) -> list[Array]:
    """Cosines and sines [group, feature], less what the inducing inputs explain of them, by row of tiles."""
    waves = []
    for row, explained in enumerate(_multiplied(arrays.at_inducing, boards.projections, tiles)):
        mine = _slice(row, tiles.width)
        angles = functools.reduce(jnp.add, [arrays.frequencies[:, axis, mine] * x for axis, x in enumerate(point)])
        cosines, sines = (arrays.amplitudes[half, :, mine] for half in range(2))
        waves.append(cosines * jnp.cos(angles) + sines * jnp.sin(angles) - explained)
    return waves


def _slice(index: int, size: int) -> Any:
    return pl.ds(index * size, size)


def _wait(layout: Layout) -> None:
    """Until every thread of the program is here, and what it has written can be read."""
    if not layout.is_interpreted:
        triton.debug_barrier()
