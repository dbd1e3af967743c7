"""Products that keep all the digits of their type: an accelerator's default rounds float32 to ten bits."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import jax

F = TypeVar("F", bound=Callable[..., Any])


def exact(function: F) -> F:
    """`function`, whose matrix products are made and traced in full precision, and so are their gradients."""

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        with jax.default_matmul_precision("highest"):
            return function(*args, **kwargs)

    return called  # type: ignore[return-value]


def jit(function: F) -> F:
    """`equinox.filter_jit` of the exact function."""
    return eqx.filter_jit(exact(function))  # type: ignore[return-value]
