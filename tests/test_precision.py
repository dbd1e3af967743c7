"""On an accelerator float32 products would lose digits that the Cholesky factors cannot spare."""

from pathlib import Path

import jax
import jax.numpy as jnp
from jax.extend import core

import gpssm
from gpssm._precision import exact

SOURCES = Path(gpssm.__file__).parent
HIGHEST = (jax.lax.Precision.HIGHEST, jax.lax.Precision.HIGHEST)


def products(jaxpr: core.Jaxpr) -> set:
    """The precisions of the matrix products in it."""
    return {equation.params["precision"] for equation in jaxpr.eqns if equation.primitive.name == "dot_general"}


def test_exact_products_and_their_gradients_keep_all_digits():
    def loss(matrix: jax.Array) -> jax.Array:
        return jnp.sum(matrix.T @ matrix)

    gradient = jax.grad(loss)
    assert products(jax.make_jaxpr(exact(gradient))(jnp.eye(3)).jaxpr) == {HIGHEST}
    assert products(jax.make_jaxpr(gradient)(jnp.eye(3)).jaxpr) == {None}


def test_nothing_is_compiled_but_exactly():
    """The C++ chain's call alone is compiled for itself: it has no products."""
    mine = {"_precision.py", "compiled.py"}
    others = {path.name for path in SOURCES.rglob("*.py") if "filter_jit" in path.read_text() or "jax.jit" in path.read_text()}
    assert others <= mine
