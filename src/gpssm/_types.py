"""Axis words and array aliases, the same in every signature.

Axes: `time state control input output inducing sample window sequence feature group`. An `input` is what the transition GP
sees: the state, then the control. A `group` is a set of state dimensions that share one kernel and one set of inducing inputs:
there is either one group (everything shared) or one per state.
"""

from typing import Any, TypeAlias

from jaxtyping import Array, ArrayLike, Bool, Float, Int, Key

Scalar: TypeAlias = Float[Array, ""]
Values: TypeAlias = ArrayLike | list  # what a user may give for an array of numbers
PRNGKey: TypeAlias = Key[Array, ""] | Any  # typed keys, and the raw uint32 keys of older code

__all__ = ["Array", "Bool", "Float", "Int", "Key", "PRNGKey", "Scalar", "Values"]
