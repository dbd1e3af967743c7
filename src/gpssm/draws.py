"""The ways to draw f from q(f) along a trajectory.

A draw answers one question, again and again: what is known of f at this input, given all that this draw has already said? It
answers with the mean and variance of f there and, where the draw commits itself, a value. Its memory travels with the chain.

- `MarginalDraw` forgets everything: q(f(x)) afresh at each call.
- `DrawGivenInducing` has drawn v once; what v leaves open stays open.
- `FreshDraw` commits one of these two to a value, a new one at every call.
- `PathwiseDraw` is a function: prior features plus Matheron's correction, the same function at every call.
- `ExactDraw` draws f(x) given every value that it has drawn before, from the exact joint of q(f) (cubic in the calls).
"""

from abc import abstractmethod
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, Float, Int

from gpssm._types import PRNGKey
from gpssm.gp import InducingBasis, InducingPosterior, SparseGP, marginal_moments, over_groups
from gpssm.means import AbstractMean


class Moments(NamedTuple):
    """What is known of f at one input, and the value that the draw gave it (the mean where it gives none)."""

    mean: Float[Array, " state"]
    variance: Float[Array, " state"]
    value: Float[Array, " state"]


class AbstractDraw(eqx.Module):
    """One draw of f, asked along a trajectory."""

    @abstractmethod
    def memory(self) -> Any:
        """The memory before the first question."""

    @abstractmethod
    def ask(self, memory: Any, point: Float[Array, " input"], noise: Float[Array, " state"]) -> tuple[Moments, Any]:
        """What f is at `point`; `noise` is standard normal, for draws that commit themselves to a value."""


class AbstractForgetfulDraw(AbstractDraw):
    """A draw without memory or noise, made of the projections of groups that know nothing of each other."""

    basis: eqx.AbstractVar[InducingBasis]
    mean: eqx.AbstractVar[AbstractMean]

    def memory(self) -> None:
        return None

    def ask(self, memory: None, point: Float[Array, " input"], noise: Float[Array, " state"]) -> tuple[Moments, None]:
        points = jnp.broadcast_to(point, (len(self.basis.kernels), len(point)))
        return self.at(self.mean(point), points), None

    @abstractmethod
    def at(self, prior_mean: Float[Array, " state"], points: Float[Array, "group input"]) -> Moments:
        """What f is, where the prior mean is this and each group is asked at a point of its own."""


class MarginalDraw(AbstractForgetfulDraw):
    """q(f(x)), independent from call to call: a sequence of these does not come from one function."""

    basis: InducingBasis
    mean: AbstractMean
    inducing: InducingPosterior

    def at(self, prior_mean: Float[Array, " state"], points: Float[Array, "group input"]) -> Moments:
        mean, variance = marginal_moments(self.basis.project(points), prior_mean, self.inducing)
        return Moments(mean, variance, mean)


class DrawGivenInducing(AbstractForgetfulDraw):
    """p(f(x) | v) for one v: consistent along the trajectory as far as v determines f."""

    basis: InducingBasis
    mean: AbstractMean
    values: Float[Array, "state inducing"]

    def at(self, prior_mean: Float[Array, " state"], points: Float[Array, "group input"]) -> Moments:
        projection = self.basis.project(points)
        mean = prior_mean + jnp.sum(projection.weights * self.values, axis=-1)
        variance = jnp.broadcast_to(projection.residual_variance, mean.shape)
        return Moments(mean, variance, mean)


class FreshDraw(AbstractDraw):
    """Another draw that commits itself to an independent value at every call: dynamics that are noisy, not uncertain."""

    draw: MarginalDraw | DrawGivenInducing

    def memory(self) -> None:
        return None

    def ask(self, memory: None, point: Float[Array, " input"], noise: Float[Array, " state"]) -> tuple[Moments, None]:
        moments, _ = self.draw.ask(None, point, noise)
        return moments._replace(value=moments.mean + jnp.sqrt(moments.variance) * noise), None


class PathwiseDraw(AbstractForgetfulDraw):
    """A whole function from q(f), by Matheron's rule with the variance put right.

        f(x) = m(x) + a(x) . v + s(x) psi(x) . w,      psi(x) = phi(x) - a(x) L^{-1} phi(Z),      w ~ N(0, I)

    The part that v determines is exact. psi(x) . w is a draw of the residual made of random features phi, and s(x) scales it to
    the variance k(x, x) - |a(x)|² that the residual has: the law of f at every single input is exact, whatever the number of
    features. Approximate is the correlation of the residual between inputs, with an error that falls as one over the square root
    of the number of frequencies and is absent for linear and constant kernels. Without s, an error in phi . phi would be
    multiplied by the inverse of K(Z, Z), and swamp the small residual between well-placed inducing inputs.
    """

    basis: InducingBasis
    mean: AbstractMean
    features: tuple  # one set of features a group
    at_inducing: Float[Array, "group inducing feature"]  # L^{-1} phi(Z)
    values: Float[Array, "state inducing"]
    weights: Float[Array, "state feature"]

    def at(self, prior_mean: Float[Array, " state"], points: Float[Array, "group input"]) -> Moments:
        projection = self.basis.project(points)
        waves = over_groups(lambda feature, point: _padded(feature(point), self.weights.shape[1]), self.features, points)
        residual_waves = waves - jnp.einsum("gm,gmf->gf", projection.weights, self.at_inducing)
        power = jnp.sum(residual_waves**2, axis=-1)
        scale = jnp.sqrt(projection.residual_variance / jnp.maximum(power, projection.residual_variance * 1e-6))
        value = prior_mean + jnp.sum(projection.weights * self.values, axis=-1)
        value = value + jnp.sum(scale[:, None] * residual_waves * self.weights, axis=-1)
        return Moments(value, jnp.zeros_like(value), value)


class ExactMemory(NamedTuple):
    """Everything an exact draw has said: where, with which projections, and the factor of the joint covariance."""

    count: Int[Array, ""]
    points: Float[Array, "slot input"]
    projections: Float[Array, "slot group inducing"]
    explained: Float[Array, "slot state inducing"]
    chol: Float[Array, "state slot slot"]
    noise: Float[Array, "state slot"]


class ExactDraw(AbstractDraw):
    """f(x) given all values drawn before, exactly: O(t²) at call t.

    After `num_slots` calls the memory is cleared, which is how a trajectory that is cut into sub-sequences forgets.
    """

    basis: InducingBasis
    mean: AbstractMean
    inducing: InducingPosterior
    num_slots: int = eqx.field(static=True)

    def memory(self) -> ExactMemory:
        groups, inducing, inputs = self.basis.inducing_inputs.shape
        states, slots, dtype = len(self.inducing.mean), self.num_slots, self.inducing.mean.dtype
        return ExactMemory(
            jnp.zeros((), jnp.int32),
            jnp.zeros((slots, inputs), dtype),
            jnp.zeros((slots, groups, inducing), dtype),
            jnp.zeros((slots, states, inducing), dtype),
            jnp.broadcast_to(jnp.eye(slots, dtype=dtype), (states, slots, slots)),
            jnp.zeros((states, slots), dtype),
        )

    def ask(
        self, memory: ExactMemory, point: Float[Array, " input"], noise: Float[Array, " state"]
    ) -> tuple[Moments, ExactMemory]:
        is_full = memory.count == self.num_slots
        memory = jax.tree.map(lambda new, old: jnp.where(is_full, new, old), self.memory(), memory)
        projection = self.basis.project(point)
        mean, variance = marginal_moments(projection, self.mean(point), self.inducing)
        weights = jnp.broadcast_to(projection.weights, self.inducing.mean.shape)
        explained = jnp.einsum("dmn,dm->dn", self.inducing.chol, weights)

        is_past = jnp.arange(self.num_slots) < memory.count
        covariances = self.basis.prior_covariances(memory.points, point)
        covariances = covariances - jnp.einsum("sgm,gm->gs", memory.projections, projection.weights)
        covariances = covariances + jnp.einsum("sdm,dm->ds", memory.explained, explained)
        covariances = jnp.where(is_past[None], covariances, 0.0)
        solved = jax.vmap(lambda chol, c: solve_triangular(chol, c, lower=True))(memory.chol, covariances)

        floor = jnp.finfo(mean.dtype).eps * variance
        conditional_mean = mean + jnp.sum(solved * memory.noise, axis=-1)
        conditional_variance = jnp.maximum(variance - jnp.sum(solved**2, axis=-1), floor)
        value = conditional_mean + jnp.sqrt(conditional_variance) * noise

        now = jnp.arange(self.num_slots) == memory.count
        pivot = jnp.sqrt(conditional_variance + self.basis.jitter)  # the jitter of K(Z, Z), scaled as it is
        row = solved + now[None] * pivot[:, None]
        updated = ExactMemory(
            memory.count + 1,
            jnp.where(now[:, None], point[None], memory.points),
            jnp.where(now[:, None, None], projection.weights[None], memory.projections),
            jnp.where(now[:, None, None], explained[None], memory.explained),
            jnp.where(now[None, :, None], row[:, None, :], memory.chol),
            jnp.where(now[None], noise[:, None], memory.noise),
        )
        return Moments(conditional_mean, conditional_variance, value), updated


def extend(draw: ExactDraw, memory: ExactMemory, num_more: int) -> tuple[ExactDraw, ExactMemory]:
    """The same draw with room for `num_more` further values, so that it can go on beyond its trajectory."""
    old, slots = draw.num_slots, draw.num_slots + num_more
    chol = jnp.broadcast_to(jnp.eye(slots, dtype=memory.chol.dtype), (len(memory.chol), slots, slots))
    return ExactDraw(draw.basis, draw.mean, draw.inducing, slots), ExactMemory(
        memory.count,
        jnp.pad(memory.points, ((0, num_more), (0, 0))),
        jnp.pad(memory.projections, ((0, num_more), (0, 0), (0, 0))),
        jnp.pad(memory.explained, ((0, num_more), (0, 0), (0, 0))),
        chol.at[:, :old, :old].set(memory.chol),
        jnp.pad(memory.noise, ((0, 0), (0, num_more))),
    )


def pathwise_features(key: PRNGKey, basis: InducingBasis, num_frequencies: int) -> tuple:
    """Random features of every group's kernel, which many draws may share."""
    num_inputs = basis.inducing_inputs.shape[-1]
    keys = jr.split(key, len(basis.kernels))
    return tuple(k.features(s, num_frequencies, num_inputs) for k, s in zip(basis.kernels, keys, strict=True))


def num_features(gp: SparseGP, num_frequencies: int) -> int:
    """How many features the widest kernel of an unwrapped `gp` has."""

    def widths() -> list[Array]:
        features = pathwise_features(jr.key(0), gp.basis(), num_frequencies)
        return [feature(jnp.zeros(gp.num_inputs, gp.inducing_inputs.dtype)) for feature in features]

    return max(len(shape) for shape in jax.eval_shape(widths))


def pathwise_draw(
    basis: InducingBasis,
    mean: AbstractMean,
    features: tuple,
    values: Float[Array, "state inducing"],
    weights: Float[Array, "state feature"],
) -> PathwiseDraw:
    """The function that v and the weights of the features determine together."""
    waves = over_groups(
        lambda feature, inputs: jax.vmap(lambda z: _padded(feature(z), weights.shape[1]))(inputs),
        features,
        basis.inducing_inputs,
    )
    at_inducing = jnp.einsum("gmn,gnf->gmf", basis.whitener, waves)
    return PathwiseDraw(basis, mean, features, at_inducing, values, weights)


def _padded(values: Float[Array, " narrow"], width: int) -> Float[Array, " wide"]:
    return jnp.pad(values, (0, width - len(values)))
