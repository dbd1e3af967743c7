"""Covariance functions, written for ONE pair of points; the base class maps them over many.

Every kernel can also give random features, functions phi with E[phi(x) . phi(x')] = k(x, x'), which is what drawing f as a
function needs. Stationary kernels give sines and cosines of frequencies drawn from their spectral density; linear and constant
ones give exact features.
"""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float

from gpssm._types import PRNGKey, Values
from gpssm.noise import standard_normals
from gpssm.params import AbstractParameter, Parameter, as_positive

SMALLEST_SQUARED_DISTANCE = 1e-36  # keeps the gradient of a distance finite where two points coincide


class FourierFeatures(eqx.Module):
    """phi(x) = amplitude * [cos(w x), sin(w x)] / sqrt(number of frequencies)."""

    frequencies: Float[Array, "frequency input"]
    amplitudes: Float[Array, " frequency"]

    def __call__(self, point: Float[Array, " input"]) -> Float[Array, " feature"]:
        angles = self.frequencies @ point
        waves = jnp.stack([self.amplitudes * jnp.cos(angles), self.amplitudes * jnp.sin(angles)])
        return waves.reshape(-1) / jnp.sqrt(len(self.frequencies)).astype(point.dtype)


class FunctionFeatures(eqx.Module):
    """Features computed by a function of the point and some arrays."""

    function: Callable = eqx.field(static=True)
    arrays: tuple

    def __call__(self, point: Float[Array, " input"]) -> Float[Array, " feature"]:
        return self.function(point, *self.arrays)


class AbstractKernel(eqx.Module):
    """k(x, x'), positive definite."""

    @abstractmethod
    def __call__(self, left: Float[Array, " input"], right: Float[Array, " input"]) -> Float[Array, ""]:
        """The covariance of f at two points."""

    @abstractmethod
    def features(self, key: PRNGKey, num_frequencies: int, num_inputs: int) -> FourierFeatures | FunctionFeatures:
        """Random features of the kernel on inputs of `num_inputs` dimensions."""

    def cross(self, left: Float[Array, "left input"], right: Float[Array, "right input"]) -> Float[Array, "left right"]:
        """The covariances between two sets of points."""
        return jax.vmap(lambda x: jax.vmap(lambda y: self(x, y))(right))(left)

    def __add__(self, other: "AbstractKernel") -> "SumKernel":
        return SumKernel((self, other))

    def __mul__(self, other: "AbstractKernel") -> "ProductKernel":
        return ProductKernel((self, other))


class SquaredExponential(AbstractKernel):
    """variance * exp(-r² / 2), r the distance in units of the lengthscales: smooth functions."""

    lengthscales: Parameter
    variance: Parameter

    def __init__(self, lengthscales: Values | AbstractParameter, variance: Values | AbstractParameter = 1.0):
        self.lengthscales, self.variance = as_positive(lengthscales), as_positive(variance)

    def __call__(self, left: Float[Array, " input"], right: Float[Array, " input"]) -> Float[Array, ""]:
        return self.variance * jnp.exp(-0.5 * jnp.sum(((left - right) / self.lengthscales) ** 2))

    def features(self, key: PRNGKey, num_frequencies: int, num_inputs: int) -> FourierFeatures:
        normals = _normals(key, num_frequencies, num_inputs, jnp.result_type(self.variance))
        return _fourier(normals, self.lengthscales, self.variance)


class Matern(AbstractKernel):
    """The Matern kernel of smoothness 1/2, 3/2 or 5/2: functions that are continuous, once or twice differentiable."""

    lengthscales: Parameter
    variance: Parameter
    smoothness: float = eqx.field(static=True)

    def __init__(
        self,
        lengthscales: Values | AbstractParameter,
        variance: Values | AbstractParameter = 1.0,
        smoothness: float = 1.5,
    ):
        if smoothness not in (0.5, 1.5, 2.5):
            raise ValueError(f"Matern needs a smoothness of 0.5, 1.5 or 2.5, but got {smoothness}.")
        self.lengthscales, self.variance = as_positive(lengthscales), as_positive(variance)
        self.smoothness = smoothness

    def __call__(self, left: Float[Array, " input"], right: Float[Array, " input"]) -> Float[Array, ""]:
        squared = jnp.sum(((left - right) / self.lengthscales) ** 2)
        scaled = jnp.sqrt(2 * self.smoothness) * jnp.sqrt(jnp.maximum(squared, SMALLEST_SQUARED_DISTANCE))
        polynomial = {0.5: 1.0, 1.5: 1.0 + scaled, 2.5: 1.0 + scaled + scaled**2 / 3}[self.smoothness]
        return self.variance * polynomial * jnp.exp(-scaled)

    def features(self, key: PRNGKey, num_frequencies: int, num_inputs: int) -> FourierFeatures:
        """Frequencies of a multivariate t with 2 * smoothness degrees of freedom."""
        key_normal, key_mixing = jr.split(key)
        dtype = jnp.result_type(self.variance)
        normals = _normals(key_normal, num_frequencies, num_inputs, dtype)
        mixing = jr.gamma(key_mixing, self.smoothness, (num_frequencies, 1), dtype) / self.smoothness
        return _fourier(normals / jnp.sqrt(mixing), self.lengthscales, self.variance)


class RationalQuadratic(AbstractKernel):
    """variance * (1 + r² / (2 mixture))^(-mixture): a scale mixture of squared exponentials."""

    lengthscales: Parameter
    variance: Parameter
    mixture: Parameter

    def __init__(
        self,
        lengthscales: Values | AbstractParameter,
        variance: Values | AbstractParameter = 1.0,
        mixture: Values | AbstractParameter = 1.0,
    ):
        self.lengthscales, self.variance = as_positive(lengthscales), as_positive(variance)
        self.mixture = as_positive(mixture)

    def __call__(self, left: Float[Array, " input"], right: Float[Array, " input"]) -> Float[Array, ""]:
        squared = jnp.sum(((left - right) / self.lengthscales) ** 2)
        return self.variance * (1 + squared / (2 * self.mixture)) ** (-self.mixture)

    def features(self, key: PRNGKey, num_frequencies: int, num_inputs: int) -> FourierFeatures:
        """Frequencies of squared exponentials whose precision is gamma distributed."""
        key_normal, key_mixing = jr.split(key)
        dtype = jnp.result_type(self.variance)
        normals = _normals(key_normal, num_frequencies, num_inputs, dtype)
        precision = jr.gamma(key_mixing, self.mixture, (num_frequencies, 1), dtype) / self.mixture
        return _fourier(normals * jnp.sqrt(precision), self.lengthscales, self.variance)


class Periodic(AbstractKernel):
    """variance * exp(-2 sum_i sin²(pi (x_i - x'_i) / period_i) / lengthscale_i²)."""

    lengthscales: Parameter
    variance: Parameter
    period: Parameter
    num_harmonics: int = eqx.field(static=True)  # kept by the random features

    def __init__(
        self,
        lengthscales: Values | AbstractParameter,
        variance: Values | AbstractParameter = 1.0,
        period: Values | AbstractParameter = 1.0,
        num_harmonics: int = 32,
    ):
        self.lengthscales, self.variance = as_positive(lengthscales), as_positive(variance)
        self.period, self.num_harmonics = as_positive(period), num_harmonics

    def __call__(self, left: Float[Array, " input"], right: Float[Array, " input"]) -> Float[Array, ""]:
        sines = jnp.sin(jnp.pi * (left - right) / self.period) / self.lengthscales
        return self.variance * jnp.exp(-2 * jnp.sum(sines**2))

    def features(self, key: PRNGKey, num_frequencies: int, num_inputs: int) -> FourierFeatures:
        """Harmonics of the Fourier series, drawn by their weight; the ratio of weights keeps the draw differentiable."""
        lengthscales = jnp.broadcast_to(self.lengthscales, (num_inputs,))
        phases = 2 * jnp.pi * jnp.arange(4 * self.num_harmonics) / (4 * self.num_harmonics)

        def harmonics(key: PRNGKey, lengthscale: Float[Array, ""]) -> tuple[Array, Array]:
            one_period = jnp.exp(-2 * jnp.sin(phases / 2) ** 2 / lengthscale**2)
            spectrum = jnp.abs(jnp.fft.fft(one_period)) / len(phases)
            numbers = jnp.fft.fftfreq(len(phases), 1 / len(phases)).astype(spectrum.dtype)
            drawn = jr.categorical(key, jax.lax.stop_gradient(jnp.log(spectrum)), shape=(num_frequencies,))
            weight = spectrum[drawn] / jax.lax.stop_gradient(spectrum[drawn] / jnp.sum(spectrum))
            return numbers[drawn], weight

        numbers, weights = jax.vmap(harmonics, out_axes=1)(jr.split(key, num_inputs), lengthscales)
        period = jnp.broadcast_to(self.period, (1, num_inputs))
        amplitudes = jnp.sqrt(self.variance * jnp.prod(weights, axis=1))
        return FourierFeatures(2 * jnp.pi * numbers / period, amplitudes)


class LinearKernel(AbstractKernel):
    """sum_i variances_i x_i x'_i: random linear functions through the origin."""

    variances: Parameter

    def __init__(self, variances: Values | AbstractParameter):
        self.variances = as_positive(variances)

    def __call__(self, left: Float[Array, " input"], right: Float[Array, " input"]) -> Float[Array, ""]:
        return jnp.sum(self.variances * left * right)

    def features(self, key: PRNGKey, num_frequencies: int, num_inputs: int) -> FunctionFeatures:
        return FunctionFeatures(_scaled_point, (jnp.sqrt(self.variances),))


class ConstantKernel(AbstractKernel):
    """variance: random constants."""

    variance: Parameter

    def __init__(self, variance: Values | AbstractParameter = 1.0):
        self.variance = as_positive(variance)

    def __call__(self, left: Float[Array, " input"], right: Float[Array, " input"]) -> Float[Array, ""]:
        return jnp.asarray(self.variance)

    def features(self, key: PRNGKey, num_frequencies: int, num_inputs: int) -> FunctionFeatures:
        return FunctionFeatures(_constant, (jnp.sqrt(self.variance),))


class SumKernel(AbstractKernel):
    """The covariance of a sum of independent functions."""

    kernels: tuple[AbstractKernel, ...]

    def __call__(self, left: Float[Array, " input"], right: Float[Array, " input"]) -> Float[Array, ""]:
        return sum((kernel(left, right) for kernel in self.kernels), start=jnp.zeros((), left.dtype))

    def features(self, key: PRNGKey, num_frequencies: int, num_inputs: int) -> FunctionFeatures:
        keys = jr.split(key, len(self.kernels))
        parts = tuple(k.features(s, num_frequencies, num_inputs) for k, s in zip(self.kernels, keys, strict=True))
        return FunctionFeatures(_concatenated, parts)


class ProductKernel(AbstractKernel):
    """The product of several kernels: similar only where all of them are."""

    kernels: tuple[AbstractKernel, ...]

    def __call__(self, left: Float[Array, " input"], right: Float[Array, " input"]) -> Float[Array, ""]:
        product = jnp.ones((), left.dtype)
        for kernel in self.kernels:
            product = product * kernel(left, right)
        return product

    def features(self, key: PRNGKey, num_frequencies: int, num_inputs: int) -> FourierFeatures | FunctionFeatures:
        """Frequencies add where both factors have them; otherwise every pair of features is multiplied."""
        keys = jr.split(key, len(self.kernels))
        parts = [k.features(s, num_frequencies, num_inputs) for k, s in zip(self.kernels, keys, strict=True)]
        product = parts[0]
        for part in parts[1:]:
            if isinstance(product, FourierFeatures) and isinstance(part, FourierFeatures):
                frequencies = product.frequencies + part.frequencies
                product = FourierFeatures(frequencies, product.amplitudes * part.amplitudes)
            else:
                product = FunctionFeatures(_multiplied, (product, part))
        return product


class ActiveDimensions(AbstractKernel):
    """A kernel that sees only some dimensions of the input."""

    kernel: AbstractKernel
    dimensions: tuple[int, ...] = eqx.field(static=True)

    def __init__(self, kernel: AbstractKernel, dimensions: tuple[int, ...] | list[int]):
        self.kernel, self.dimensions = kernel, tuple(dimensions)
        if len(set(self.dimensions)) < len(self.dimensions) or not self.dimensions or min(self.dimensions) < 0:
            raise ValueError(f"The active dimensions must be different whole numbers from 0, but got {self.dimensions}.")

    def __call__(self, left: Float[Array, " input"], right: Float[Array, " input"]) -> Float[Array, ""]:
        if max(self.dimensions) >= len(left):  # an index out of bounds would be clipped without a word
            raise ValueError(f"The active dimensions {self.dimensions} must lie below the number of inputs, {len(left)}.")
        chosen = jnp.array(self.dimensions)
        return self.kernel(left[chosen], right[chosen])

    def features(self, key: PRNGKey, num_frequencies: int, num_inputs: int) -> FourierFeatures | FunctionFeatures:
        inner = self.kernel.features(key, num_frequencies, len(self.dimensions))
        if isinstance(inner, FourierFeatures):  # stays a set of frequencies, so that products can add them
            chosen = jnp.array(self.dimensions)
            frequencies = jnp.zeros((len(inner.frequencies), num_inputs), inner.frequencies.dtype)
            return FourierFeatures(frequencies.at[:, chosen].set(inner.frequencies), inner.amplitudes)
        return FunctionFeatures(_restricted, (inner, jnp.array(self.dimensions)))


def _normals(key: PRNGKey, num_frequencies: int, num_inputs: int, dtype: Any) -> Float[Array, "frequency input"]:
    """Quasi-random: as unbiased as independent numbers, and up to five inputs half as many of them do as well."""
    return standard_normals(key, "quasi", num_frequencies, num_inputs).astype(dtype)


def _fourier(
    spectrum: Float[Array, "frequency input"], lengthscales: Float[Array, "..."], variance: Float[Array, ""]
) -> FourierFeatures:
    frequencies = spectrum / jnp.broadcast_to(lengthscales, (1, spectrum.shape[1]))
    return FourierFeatures(frequencies, jnp.broadcast_to(jnp.sqrt(variance), frequencies.shape[:1]))


def _scaled_point(point: Array, scale: Array) -> Array:
    return scale * point


def _constant(point: Array, scale: Array) -> Array:
    return jnp.reshape(scale, (1,))


def _concatenated(point: Array, *parts: Callable) -> Array:
    return jnp.concatenate([part(point) for part in parts])


def _multiplied(point: Array, left: Callable, right: Callable) -> Array:
    return jnp.outer(left(point), right(point)).reshape(-1)


def _restricted(point: Array, inner: Callable, dimensions: Array) -> Array:
    return inner(point[dimensions])
