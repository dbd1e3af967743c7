"""Sparse Gaussian processes: kernels, mean and inducing inputs, and the distribution q(u) of the inducing outputs.

Everything is whitened: u_d = m_d(Z) + L_d v_d with L_d the Cholesky factor of K(Z, Z), and the variational distribution is over
v, whose prior is N(0, I). At an input x the process is described by

    a_g(x) = L_g^{-1} k_g(Z_g, x)          the whitened projection, one a group,
    f_d(x) | v = m_d(x) + a(x) . v_d  +  residual with variance k(x, x) - |a(x)|².

State dimensions that share a kernel and inducing inputs form one group, and the projection is then computed once for all of them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from gpssm._types import Values
from gpssm.kernels import AbstractKernel
from gpssm.linalg import jittered_cholesky, standard_normal_kl
from gpssm.means import AbstractMean
from gpssm.params import AbstractParameter, Frozen, LowerTriangular, Parameter, as_floating, as_parameter

DEFAULT_JITTER = 1e-6


class InducingPosterior(eqx.Module):
    """q(v) = product over states of N(mean_d, chol_d chol_dᵀ), in whitened coordinates."""

    mean: Parameter
    chol: Parameter

    def __init__(self, mean: Values | AbstractParameter, chol: Values | AbstractParameter):
        self.mean = as_parameter(mean)
        self.chol = chol if isinstance(chol, AbstractParameter) else LowerTriangular(chol)

    @classmethod
    def prior(cls, num_states: int, num_inducing: int) -> "InducingPosterior":
        """q(v) = p(v)."""
        identity = jnp.broadcast_to(jnp.eye(num_inducing), (num_states, num_inducing, num_inducing))
        return cls(jnp.zeros((num_states, num_inducing)), identity)

    def kl(self) -> Float[Array, ""]:
        """KL(q(u) || p(u)), the same in whitened coordinates."""
        return jnp.sum(jax.vmap(standard_normal_kl)(self.mean, self.chol))

    def sample(self, noise: Float[Array, "state inducing"]) -> Float[Array, "state inducing"]:
        """The draw of v that standard normal `noise` gives."""
        return self.mean + jnp.einsum("dmn,dn->dm", self.chol, noise)


class Projection(eqx.Module):
    """What a group knows at one input: a(x), and the variance of f(x) that v leaves."""

    weights: Float[Array, "group inducing"]
    residual_variance: Float[Array, " group"]


class InducingBasis(eqx.Module):
    """A sparse GP prepared for many evaluations: its Cholesky factors, inverted once."""

    kernels: tuple[AbstractKernel, ...]
    inducing_inputs: Float[Array, "group inducing input"]
    chol: Float[Array, "group inducing inducing"]
    whitener: Float[Array, "group inducing inducing"]  # the inverse of chol
    jitter: Float[Array, " group"]  # what was added to the diagonal of K(Z, Z)

    def project(self, point: Float[Array, "*group input"]) -> Projection:
        """a(x) = L^{-1} k(Z, x) and k(x, x) - |a(x)|², which rounding may not push below zero.

        `point` is one for all groups, or one for each.
        """

        def covariances(kernel: AbstractKernel, inputs: Array, point: Array) -> tuple[Array, Array]:
            return jax.vmap(lambda z: kernel(z, point))(inputs), kernel(point, point)

        points = jnp.broadcast_to(point, (len(self.kernels), point.shape[-1]))
        cross, prior_variance = over_groups(covariances, self.kernels, self.inducing_inputs, points)
        weights = jnp.einsum("gmn,gn->gm", self.whitener, cross)
        smallest = jnp.finfo(point.dtype).eps * prior_variance
        return Projection(weights, jnp.maximum(prior_variance - jnp.sum(weights**2, axis=-1), smallest))

    def prior_covariances(
        self, points: Float[Array, "points input"], point: Float[Array, " input"]
    ) -> Float[Array, "group points"]:
        """k(x_s, x) for stored points x_s."""
        return over_groups(lambda kernel: jax.vmap(lambda other: kernel(other, point))(points), self.kernels)


class SparseGP(eqx.Module):
    """A GP prior on f: R^input -> R^state with inducing inputs.

    `kernels` and `inducing_inputs` have one entry, shared by all states, or one a state. When both are shared, so is all the
    work; when one of them is not, neither is the factorisation.
    """

    kernels: tuple[AbstractKernel, ...]
    mean: AbstractMean
    inducing_inputs: Parameter
    jitter: Parameter
    num_states: int = eqx.field(static=True)

    def __init__(
        self,
        kernels: AbstractKernel | Sequence[AbstractKernel],
        mean: AbstractMean,
        inducing_inputs: Values | AbstractParameter,
        num_states: int,
        jitter: Values = DEFAULT_JITTER,
    ):
        """`inducing_inputs` is [inducing, input] to share it, or [state, inducing, input]; `jitter` is added to the diagonal of
        K(Z, Z), as a share of its mean."""
        self.kernels = (kernels,) if isinstance(kernels, AbstractKernel) else tuple(kernels)
        self.mean, self.num_states = mean, num_states
        self.inducing_inputs = as_parameter(inducing_inputs)
        self.jitter = Frozen(as_floating(jitter))
        shape = self._inputs().shape
        if len(self.kernels) not in (1, num_states):
            raise ValueError(
                f"Give one kernel to share among the states, or one a state: expected 1 or {num_states}, "
                f"but got {len(self.kernels)}."
            )
        if len(shape) not in (2, 3) or (len(shape) == 3 and shape[0] not in (1, num_states)):
            raise ValueError(
                f"Inducing inputs must be [inducing, input] to be shared, or [{num_states}, inducing, input], "
                f"but have the shape {shape}."
            )

    @property
    def num_inputs(self) -> int:
        """Dimension of the state and the control together."""
        return self._inputs().shape[-1]

    @property
    def num_inducing(self) -> int:
        return self._inputs().shape[-2]

    @property
    def num_groups(self) -> int:
        """1 when kernel and inducing inputs are shared, else the number of states."""
        inputs = self._inputs()
        is_shared = len(self.kernels) == 1 and (inputs.ndim == 2 or inputs.shape[0] == 1)
        return 1 if is_shared else self.num_states

    def basis(self) -> InducingBasis:
        """Factorise K(Z, Z); call it on an unwrapped GP."""
        groups = self.num_groups
        kernels = self.kernels * (groups if len(self.kernels) == 1 else 1)
        inputs = self._inputs()
        inputs = inputs[None] if inputs.ndim == 2 else inputs
        inputs = jnp.broadcast_to(inputs, (groups, *inputs.shape[1:]))
        jitter = jnp.broadcast_to(self.jitter, (groups,))
        gram = over_groups(lambda kernel, z: kernel.cross(z, z), kernels, inputs)
        chol, whitener, added = jax.vmap(jittered_cholesky)(gram, jitter)
        return InducingBasis(kernels, inputs, chol, whitener, added)

    def _inputs(self) -> Array:
        return self.inducing_inputs.value() if isinstance(self.inducing_inputs, AbstractParameter) else self.inducing_inputs


def marginal_moments(
    projection: Projection, prior_mean: Float[Array, " state"], q: InducingPosterior
) -> tuple[Float[Array, " state"], Float[Array, " state"]]:
    """Mean and variance of f(x) under q(f), v integrated out."""
    mean = prior_mean + jnp.sum(projection.weights * q.mean, axis=-1)
    weights = jnp.broadcast_to(projection.weights, q.mean.shape)
    explained = jnp.sum(jnp.einsum("dmn,dm->dn", q.chol, weights) ** 2, axis=-1)
    return mean, projection.residual_variance + explained


def over_groups(function: Callable[..., Any], kernels: tuple, *arrays: Array) -> Any:
    """`function(kernel, *arrays)` for every group, stacked: one vectorised call where the kernels are of one kind."""
    if len(kernels) == 1:
        return jax.tree.map(lambda leaf: leaf[None], function(kernels[0], *(array[0] for array in arrays)))
    structures = {jax.tree.structure(kernel) for kernel in kernels}
    shapes = {tuple(jnp.shape(leaf) for leaf in jax.tree.leaves(kernel)) for kernel in kernels}
    if len(structures) == 1 and len(shapes) == 1:
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *kernels)
        return jax.vmap(function)(stacked, *arrays)
    results = [function(kernel, *(array[i] for array in arrays)) for i, kernel in enumerate(kernels)]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *results)
