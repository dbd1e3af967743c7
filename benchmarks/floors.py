"""The time that no version can avoid, measured in the same run: on a processor through NumPy, on a GPU by what the device can do.

A trajectory's step needs, for each group of states, one product of a row of length M with an M x M matrix on the way there and
two on the way back. Two of the three come in pieces of S rows, a time step each; the gradient of the matrix is one large product.
Where v is integrated out, the factor of q(v) needs three more for each state; where f is a function, the features' residual needs
three with an M x F matrix. Then there are one exponential for each inducing input and F sines and cosines.
"""

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.datasets import Case

MARGINAL = ("factorised-nonlinear", "factorised-linear", "pr-ssm")
MOST_STEPS = 500  # that are measured; more are as many times as much
REPEATS = 3  # of a rate, whose best counts


class Product(NamedTuple):
    """Products with matrices [M, columns]: so many in pieces of S rows, and so many of all rows together."""

    matrices: int
    columns: int
    in_pieces: int
    whole: int


class Arithmetic(NamedTuple):
    """What a step of a case must compute."""

    products: tuple[Product, ...]
    exponentials: int  # for each time and sample
    waves: int

    @classmethod
    def of(cls, case: Case) -> "Arithmetic":
        is_linear = case.family == "factorised-linear"  # the states are known before f is asked
        pieces, whole = (0, 3) if is_linear else (2, 1)
        products = [Product(case.groups, case.inducing, pieces, whole)]
        if case.family in MARGINAL:
            products.append(Product(case.states, case.inducing, pieces, whole))
        features = case.num_features
        if features:
            products.append(Product(case.groups, features, pieces, whole))
        return cls(tuple(products), case.groups * case.inducing, case.groups * features)

    def operations(self, case: Case) -> int:
        """Of all products, a multiplication and an addition each."""
        rows = case.steps * case.samples * case.sequences * case.models
        return sum(2 * rows * case.inducing * p.columns * p.matrices * (p.in_pieces + p.whole) for p in self.products)


def floor_of(case: Case) -> Callable[[], dict[str, float]]:
    """A function that measures the floor, each time it is called; `seconds` is the floor."""
    return _on_processor(case) if jax.default_backend() == "cpu" else _on_device(case)


def _on_processor(case: Case) -> Callable[[], dict[str, float]]:
    """The products through BLAS in its own threads, the exponentials in as many."""
    arithmetic, dtype = Arithmetic.of(case), np.dtype(jnp.result_type(float))
    steps = min(case.steps, MOST_STEPS)
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(steps, case.samples, case.inducing)).astype(dtype)
    right = {p.columns: rng.normal(size=(case.inducing, p.columns)).astype(dtype) for p in arithmetic.products}
    others = {columns: rng.normal(size=(steps, case.samples, columns)).astype(dtype) for columns in right}
    answers = {columns: np.empty((case.samples, columns), dtype) for columns in right}
    threads = len(os.sched_getaffinity(0))
    pool = ThreadPoolExecutor(threads)
    entries = np.array_split(-np.abs(rows), threads)
    scale = case.sequences * case.models * case.steps / steps

    def products() -> None:
        for product in arithmetic.products:
            matrix, answer, other = right[product.columns], answers[product.columns], others[product.columns]
            for _ in range(product.matrices):
                for _ in range(product.in_pieces):
                    for step in rows:
                        np.matmul(step, matrix, out=answer)
                for _ in range(product.whole):
                    rows.reshape(-1, case.inducing).T @ other.reshape(-1, product.columns)

    def elementwise(function: Any, count: float) -> float:
        """So many numbers for each time and sample: `rows` has one for each inducing input."""
        return count / case.inducing * _timed(lambda: list(pool.map(function, entries)))

    def measure() -> dict[str, float]:
        parts = {"products": _timed(products), "exponentials": elementwise(np.exp, arithmetic.exponentials), "waves": 0.0}
        if arithmetic.waves:
            parts["waves"] = elementwise(np.cos, arithmetic.waves / 2) + elementwise(np.sin, arithmetic.waves / 2)
        parts = {name: scale * seconds for name, seconds in parts.items()}
        return {**parts, "seconds": sum(parts.values())}

    return measure


def _on_device(case: Case) -> Callable[[], dict[str, float]]:
    """The slowest of three: operations at the rate of large products, bytes at that of copies, and T steps that depend on each
    other. The bytes are those of k(Z, x), written once and read once."""
    arithmetic, dtype = Arithmetic.of(case), jnp.result_type(float)
    operations = arithmetic.operations(case)
    numbers = case.steps * case.samples * case.sequences * case.models * arithmetic.exponentials
    rates = product_rate(dtype), copy_rate(dtype), step_latency()
    parts = {
        "products": operations / rates[0],
        "bytes": 2 * numbers * dtype.itemsize / rates[1],
        "dependent_steps": (case.steps - 1) * rates[2],
    }
    answer = {**parts, "product_rate": rates[0], "copy_rate": rates[1], "step_latency": rates[2], "seconds": max(parts.values())}
    return lambda: answer


def product_rate(dtype: Any, size: int = 4096) -> float:
    """Operations a second of a large product that keeps all digits."""
    matrix = jnp.ones((size, size), dtype)
    multiply = jax.jit(lambda a, b: jnp.matmul(a, b, precision="highest"))
    return 2 * size**3 / _best(lambda: multiply(matrix, matrix))


def copy_rate(dtype: Any, size: int = 2**28) -> float:
    """Bytes a second that are read or written."""
    numbers = jnp.ones(size // dtype.itemsize, dtype)
    copy = jax.jit(lambda a: -a)
    return 2 * size / _best(lambda: copy(numbers))


def step_latency(num_steps: int = 20_000) -> float:
    """Seconds that one dependent step takes on chip: numbers go to memory, come back, and are summed up into the next state."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    def kernel(start: Any, out: Any, board: Any) -> None:
        def body(_: Any, state: Any) -> Any:
            board[...] = jnp.full((128,), state, jnp.float32)
            triton.debug_barrier()
            total = jnp.sum(board[...])
            triton.debug_barrier()
            return total * (1 / 128)

        out[0] = jax.lax.fori_loop(0, num_steps, body, start[0])

    shapes = (jax.ShapeDtypeStruct((1,), jnp.float32), jax.ShapeDtypeStruct((128,), jnp.float32))
    walk = jax.jit(pl.pallas_call(kernel, out_shape=shapes, compiler_params=triton.CompilerParams(num_warps=4)))
    start = jnp.ones(1, jnp.float32)
    return _best(lambda: walk(start)) / num_steps


def _best(function: Callable[[], Any]) -> float:
    jax.block_until_ready(function())
    return min(_timed(lambda: jax.block_until_ready(function())) for _ in range(REPEATS))


def _timed(function: Callable[[], Any]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began
