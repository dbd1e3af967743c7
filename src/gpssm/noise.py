"""Standard normal numbers for Monte Carlo: plain, antithetic or randomised quasi-random.

Every scheme gives exactly standard normal marginals, so every estimate stays unbiased; they differ in how the samples of one
estimate are spread.
"""

from typing import Literal, get_args

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float
from scipy.stats import qmc

from gpssm._types import PRNGKey

Scheme = Literal["plain", "antithetic", "quasi"]
SOBOL_BLOCK = 64  # dimensions that share one set of Sobol points
SOBOL_BITS = 30


def check_scheme(scheme: str) -> None:
    """Raise for a scheme that there is not."""
    if scheme not in get_args(Scheme):
        raise ValueError(f"The noise scheme must be one of {', '.join(get_args(Scheme))}, but got {scheme!r}.")


def standard_normals(key: PRNGKey, scheme: Scheme, num_samples: int, num_dimensions: int) -> Float[Array, "sample dimension"]:
    """`num_samples` standard normal vectors, spread as `scheme` says."""
    check_scheme(scheme)
    if scheme == "plain":
        return jr.normal(key, (num_samples, num_dimensions))
    if scheme == "antithetic":
        half = jr.normal(key, ((num_samples + 1) // 2, num_dimensions))
        return jnp.concatenate([half, -half])[:num_samples]
    return _latin_supercube(key, num_samples, num_dimensions)


def _latin_supercube(key: PRNGKey, num_samples: int, num_dimensions: int) -> Float[Array, "sample dimension"]:
    """Owen's Latin supercube: blocks of Sobol points, each shifted digitally and run in an order of its own.

    The digital shift makes every point uniform; the orders make the blocks independent of each other, which lets a set of 64
    good dimensions serve a trajectory of any length.
    """
    num_blocks = -(-num_dimensions // SOBOL_BLOCK)
    exponent = max(1, (num_samples - 1).bit_length())
    points = qmc.Sobol(SOBOL_BLOCK, scramble=False, bits=SOBOL_BITS).random_base2(exponent)
    digits = jnp.asarray((points * 2**SOBOL_BITS).astype(np.uint32))

    def block(key: PRNGKey) -> Float[Array, "sample dimension"]:
        key_shift, key_order, key_offset = jr.split(key, 3)
        shift = jr.bits(key_shift, (1, SOBOL_BLOCK), jnp.uint32) >> (32 - SOBOL_BITS)
        shifted = jr.permutation(key_order, digits)[:num_samples] ^ shift
        within = jr.uniform(key_offset, shifted.shape, minval=1e-3, maxval=1.0 - 1e-3)
        return (shifted + within) / 2**SOBOL_BITS

    uniforms = jax.vmap(block)(jr.split(key, num_blocks))
    uniforms = jnp.swapaxes(uniforms, 0, 1).reshape(num_samples, -1)[:, :num_dimensions]
    edge = jnp.finfo(uniforms.dtype).eps
    return jax.scipy.special.ndtri(jnp.clip(uniforms, edge, 1 - edge))
