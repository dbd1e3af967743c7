"""Constrained and fixed parameters as nodes of the tree.

A field of a model holds a plain array or ONE of these nodes. `unwrap` replaces every node by the array it stands for; each
public verb calls it once, at the top. What the optimiser may move is decided by `trainable`: floating-point arrays outside
`Frozen` nodes.
"""

from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float

from gpssm._types import Values

SMALLEST_POSITIVE = 1e-6


def softplus_inverse(value: Float[Array, "..."]) -> Float[Array, "..."]:
    """The number whose softplus is `value`, without overflow for large values."""
    return value + jnp.log(-jnp.expm1(-value))


class AbstractParameter(eqx.Module):
    """A node that stands for one array."""

    @abstractmethod
    def value(self) -> Float[Array, "..."]:
        """The array that the rest of the library sees."""


class Positive(AbstractParameter):
    """A positive array: softplus of the raw one, kept above 1e-6."""

    raw: Float[Array, "..."]

    def __init__(self, value: Values):
        value = as_floating(value)
        _refuse_negative(value, "A positive parameter must be made of numbers above 0")
        self.raw = softplus_inverse(jnp.maximum(value, 2 * SMALLEST_POSITIVE) - SMALLEST_POSITIVE)

    def value(self) -> Float[Array, "..."]:
        return jax.nn.softplus(self.raw) + SMALLEST_POSITIVE


class LowerTriangular(AbstractParameter):
    """A lower Cholesky factor: free below the diagonal, softplus on it, zero above."""

    raw: Float[Array, "... n n"]

    def __init__(self, value: Values):
        value = as_floating(value)
        if value.ndim < 2 or value.shape[-1] != value.shape[-2]:
            raise ValueError(f"A lower Cholesky factor must be a square matrix, but got the shape {value.shape}.")
        diagonal = jnp.diagonal(value, axis1=-2, axis2=-1)
        _refuse_negative(diagonal, "The diagonal of a Cholesky factor must be made of numbers above 0")
        diagonal = jnp.maximum(diagonal, 2 * SMALLEST_POSITIVE)
        self.raw = jnp.tril(value, -1) + _diagonal_matrix(softplus_inverse(diagonal - SMALLEST_POSITIVE))

    def value(self) -> Float[Array, "... n n"]:
        diagonal = jax.nn.softplus(jnp.diagonal(self.raw, axis1=-2, axis2=-1)) + SMALLEST_POSITIVE
        return jnp.tril(self.raw, -1) + _diagonal_matrix(diagonal)


class Frozen(AbstractParameter):
    """An array that no optimiser moves: it is left out of the optimised partition, not merely stopped."""

    array: Array

    def __init__(self, array: Values):
        self.array = array if isinstance(array, Array) else as_floating(array)

    def value(self) -> Array:
        return self.array


if TYPE_CHECKING:  # a node before `unwrap`, an array after it, which no type checker can follow
    Parameter: TypeAlias = Any
else:
    Parameter = AbstractParameter | Float[Array, "..."]


def unwrap(tree: Any) -> Any:
    """The same tree with every parameter node replaced by its array."""
    return jax.tree.map(lambda x: x.value() if _is_node(x) else x, tree, is_leaf=_is_node)


def freeze(tree: Any) -> Any:
    """The same tree with every parameter fixed at its present value."""

    def freeze_leaf(leaf: Any) -> Any:
        if _is_node(leaf):
            return leaf if isinstance(leaf, Frozen) else Frozen(leaf.value())
        return Frozen(leaf) if eqx.is_inexact_array(leaf) else leaf

    return jax.tree.map(freeze_leaf, tree, is_leaf=_is_node)


def fix(tree: Any, where: Callable[[Any], Any]) -> Any:
    """Fix the part of `tree` that `where` picks, for example `fix(model, lambda m: m.emission)`."""
    return eqx.tree_at(where, tree, freeze(where(tree)), is_leaf=_is_node)


def trainable(tree: Any) -> Any:
    """A tree of booleans: True where an optimiser may move the leaf."""

    def spec(leaf: Any) -> Any:
        if isinstance(leaf, Frozen):
            return jax.tree.map(lambda _: False, leaf)
        return eqx.is_inexact_array(leaf)

    return jax.tree.map(spec, tree, is_leaf=lambda x: isinstance(x, Frozen))


def as_parameter(value: Values | AbstractParameter) -> Parameter:
    """A free parameter from an array, or the node that was given."""
    return value if isinstance(value, AbstractParameter) else as_floating(value)


def as_positive(value: Values | AbstractParameter) -> AbstractParameter:
    """A positive parameter from an array, or the node that was given."""
    return value if isinstance(value, AbstractParameter) else Positive(value)


def _refuse_negative(array: Array, what: str) -> None:
    """Raise for the first number that is negative or NaN; inside a compiled program there are no numbers to look at."""
    if isinstance(array, Tracer):
        return
    bad = np.asarray(array)[~(np.asarray(array) >= 0)]
    if bad.size:
        raise ValueError(f"{what}, but got {bad.flat[0]:.6g}.")


def _is_node(leaf: Any) -> bool:
    return isinstance(leaf, AbstractParameter)


def as_floating(value: Values) -> Array:
    """`value` as an array of its own floating type, or of JAX's default one where it has none.

    Never of a weak type, which a first update or a reload would lose, and every compiled program with it.
    """
    array = jnp.asarray(value)
    return array.astype(array.dtype if jnp.issubdtype(array.dtype, jnp.floating) else jnp.result_type(float))


def _diagonal_matrix(diagonal: Float[Array, "... n"]) -> Float[Array, "... n n"]:
    return jnp.einsum("...i,ij->...ij", diagonal, jnp.eye(diagonal.shape[-1], dtype=diagonal.dtype))
