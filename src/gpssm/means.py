"""Mean functions of the transition GP: from an input (state, then control) to the mean of every state at once.

One function gives all states, so a physics prior is written as it stands in a textbook.
"""

import functools
from abc import abstractmethod
from collections.abc import Callable

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from gpssm._types import Values
from gpssm.params import Parameter, as_parameter, unwrap


class AbstractMean(eqx.Module):
    """m(x, c): what f is believed to be before any data; the GP models the rest."""

    @abstractmethod
    def __call__(self, point: Float[Array, " input"]) -> Float[Array, " state"]:
        """The mean of every state at one input."""

    def __add__(self, other: "AbstractMean") -> "SumMean":
        return SumMean((self, other))


class ZeroMean(AbstractMean):
    """m = 0: away from the data the state falls back to the origin."""

    num_states: int = eqx.field(static=True)

    def __call__(self, point: Float[Array, " input"]) -> Float[Array, " state"]:
        return jnp.zeros(self.num_states, point.dtype)


class IdentityMean(AbstractMean):
    """m(x, c) = x: away from the data the state stays where it is; f(x) = x + g(x)."""

    num_states: int = eqx.field(static=True)

    def __call__(self, point: Float[Array, " input"]) -> Float[Array, " state"]:
        return point[: self.num_states]


class LinearMean(AbstractMean):
    """m(x, c) = matrix [x, c] + offset, trainable: a linear state-space model that the GP corrects."""

    matrix: Parameter
    offset: Parameter

    def __init__(self, matrix: Values | Parameter, offset: Values | Parameter):
        self.matrix = as_parameter(matrix)
        self.offset = as_parameter(offset)
        shapes = unwrap(self.matrix).shape, unwrap(self.offset).shape
        if len(shapes[0]) != 2 or shapes[1] != shapes[0][:1]:
            raise ValueError(
                f"A linear mean needs a matrix [state, input] and an offset [state], but got the shapes {shapes[0]} and "
                f"{shapes[1]}."
            )

    def __call__(self, point: Float[Array, " input"]) -> Float[Array, " state"]:
        return self.matrix @ point + self.offset


class FunctionMean(AbstractMean):
    """Any function from an input to the states: a physics prior.

    A plain function is fixed; an `equinox.Module` with a `__call__` is trained with the rest, except where it is frozen.
    """

    function: Callable

    def __call__(self, point: Float[Array, " input"]) -> Float[Array, " state"]:
        return self.function(point)


class SumMean(AbstractMean):
    """The sum of several means."""

    means: tuple[AbstractMean, ...]

    def __call__(self, point: Float[Array, " input"]) -> Float[Array, " state"]:
        return functools.reduce(jnp.add, [mean(point) for mean in self.means])
