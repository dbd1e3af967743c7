"""The one jittered Cholesky, Gaussian densities and divergences, and products that accept a diagonal or a full matrix.

A square matrix of the chain is stored either as its diagonal, a vector, or in full; which one is known when the program is
traced. `matvec`, `congruence` and `log_determinant` serve both.
"""

import jax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, Bool, Float

LOG_TWO_PI = 1.8378770664093453
SMALL_INVERSE = 32


def jittered_cholesky(
    matrix: Float[Array, "n n"], jitter: Float[Array, ""]
) -> tuple[Float[Array, "n n"], Float[Array, "n n"], Float[Array, ""]]:
    """Cholesky factor of `matrix + added * I`, its inverse, and what was added: `jitter` times the mean of the diagonal.

    The jitter is never smaller than the precision of the numbers can use, so that a model saved in float64 still factorises
    in float32. A matrix that is not positive definite even so gives NaN, which `fit` reports as a status.
    """
    smallest = 50 * jnp.finfo(matrix.dtype).eps
    added = jnp.maximum(jitter, smallest) * jnp.mean(jnp.diagonal(matrix))
    return *cholesky_and_inverse(matrix + added * jnp.eye(len(matrix), dtype=matrix.dtype)), added


@jax.custom_jvp
def cholesky_and_inverse(matrix: Float[Array, "n n"]) -> tuple[Float[Array, "n n"], Float[Array, "n n"]]:
    """L of L Lᵀ = `matrix`, and its inverse W.

    Their derivatives are products, with phi(W dK Wᵀ) the lower triangle that halves the diagonal: dL = L phi and dW = -phi W.
    Triangular solves of this size run in threads that wait for each other longer than they compute.
    """
    chol = jnp.linalg.cholesky(matrix)
    return chol, lower_inverse(chol)


@cholesky_and_inverse.defjvp
def _cholesky_and_inverse_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple:
    chol, inverse = cholesky_and_inverse(*primals)
    whitened = inverse @ (0.5 * (tangents[0] + tangents[0].T)) @ inverse.T
    half = jnp.tril(whitened) - 0.5 * jnp.diag(jnp.diagonal(whitened))
    return (chol, inverse), (chol @ half, -half @ inverse)


def lower_inverse(chol: Float[Array, "n n"]) -> Float[Array, "n n"]:
    """The inverse of a lower Cholesky factor, by halves until they are small."""
    size = len(chol)
    if size <= SMALL_INVERSE:
        return solve_triangular(chol, jnp.eye(size, dtype=chol.dtype), lower=True)
    half = size // 2
    first, last = lower_inverse(chol[:half, :half]), lower_inverse(chol[half:, half:])
    below = -last @ (chol[half:, :half] @ first)
    return jnp.block([[first, jnp.zeros((half, size - half), chol.dtype)], [below, last]])


def matvec(matrix: Float[Array, "..."], vector: Float[Array, " n"]) -> Float[Array, " m"]:
    """`matrix @ vector` for a diagonal (1-d) or a full (2-d) matrix."""
    return matrix * vector if matrix.ndim == 1 else matrix @ vector


def covariance(chol: Float[Array, "..."]) -> Float[Array, "..."]:
    """The covariance of a scale: squares of a vector of standard deviations, or L Lᵀ of a Cholesky factor."""
    return chol**2 if chol.ndim == 1 else chol @ chol.T


def diagonal(matrix: Float[Array, "..."]) -> Float[Array, " n"]:
    """The diagonal of a diagonal (1-d) or full (2-d) matrix."""
    return matrix if matrix.ndim == 1 else jnp.diagonal(matrix)


def congruence(matrix: Float[Array, "..."], variance: Float[Array, " n"]) -> Float[Array, "..."]:
    """A diag(v) Aᵀ, diagonal when A is."""
    return matrix**2 * variance if matrix.ndim == 1 else (matrix * variance[None]) @ matrix.T


def add(left: Float[Array, "..."], right: Float[Array, "..."]) -> Float[Array, "..."]:
    """The sum of two matrices, either of which may be stored as its diagonal."""
    if left.ndim == right.ndim:
        return left + right
    return jnp.diag(left) + right if left.ndim == 1 else left + jnp.diag(right)


def square_root(matrix: Float[Array, "..."]) -> Float[Array, "..."]:
    """Standard deviations of a diagonal covariance, or the Cholesky factor of a full one."""
    return jnp.sqrt(matrix) if matrix.ndim == 1 else jnp.linalg.cholesky(matrix)


def log_determinant(chol: Float[Array, "..."]) -> Float[Array, ""]:
    """log |L Lᵀ| of a scale."""
    return 2 * jnp.sum(jnp.log(jnp.abs(diagonal(chol))))


def gaussian_log_density(
    value: Float[Array, " n"], mean: Float[Array, " n"], chol: Float[Array, "..."], is_observed: Bool[Array, " n"]
) -> Float[Array, ""]:
    """log N(value; mean, L Lᵀ) of the observed entries alone.

    The others are integrated out exactly: their rows and columns of the covariance are replaced by those of the identity and
    their residuals by zero, which leaves the density of the rest.
    """
    residual = jnp.where(is_observed, value - mean, 0.0)
    if chol.ndim == 1:
        scale = jnp.where(is_observed, chol, 1.0)
        whitened, log_scale = residual / scale, jnp.log(scale)
    else:
        both = is_observed[:, None] & is_observed[None, :]
        masked = jnp.where(both, chol @ chol.T, jnp.eye(len(chol), dtype=chol.dtype))
        factor = jnp.linalg.cholesky(masked)
        whitened, log_scale = solve_triangular(factor, residual, lower=True), jnp.log(jnp.diagonal(factor))
    return -0.5 * jnp.sum(whitened**2) - jnp.sum(log_scale) - 0.5 * LOG_TWO_PI * jnp.sum(is_observed)


def gaussian_kl(
    mean_q: Float[Array, " n"], chol_q: Float[Array, "n n"], mean_p: Float[Array, " n"], chol_p: Float[Array, "n n"]
) -> Float[Array, ""]:
    """KL(N(mean_q, Lq Lqᵀ) || N(mean_p, Lp Lpᵀ))."""
    ratio = solve_triangular(chol_p, chol_q, lower=True)
    whitened = solve_triangular(chol_p, mean_q - mean_p, lower=True)
    logs = log_determinant(chol_p) - log_determinant(chol_q)
    return 0.5 * (jnp.sum(ratio**2) + jnp.sum(whitened**2) - len(mean_q) + logs)


def standard_normal_kl(mean: Float[Array, " n"], chol: Float[Array, "n n"]) -> Float[Array, ""]:
    """KL(N(mean, L Lᵀ) || N(0, I))."""
    return 0.5 * (jnp.sum(chol**2) + jnp.sum(mean**2) - len(mean) - log_determinant(chol))
