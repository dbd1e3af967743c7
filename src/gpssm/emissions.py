"""Emissions p(y | x): how the hidden state shows in the outputs.

Each class gives the log density of the observed channels of one output, its mean, and a draw. An emission may contain sparse GPs;
every `InducingPosterior` inside it pays its divergence in the bound, and is reduced to one draw a forecast by `realise`.
"""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jax.scipy import stats
from jaxtyping import Array, Bool, Float

from gpssm._types import PRNGKey, Values
from gpssm.gp import InducingPosterior, SparseGP, marginal_moments
from gpssm.linalg import gaussian_log_density, matvec
from gpssm.params import AbstractParameter, LowerTriangular, Parameter, as_floating, as_parameter, as_positive, unwrap


class AbstractEmission(eqx.Module):
    """p(y | x) for one state and one output."""

    @abstractmethod
    def log_density(
        self, state: Float[Array, " state"], output: Float[Array, " output"], is_observed: Bool[Array, " output"]
    ) -> Float[Array, ""]:
        """log p of the observed channels; entries of `output` that are not observed hold any finite number."""

    @abstractmethod
    def mean(self, state: Float[Array, " state"]) -> Float[Array, " output"]:
        """E[y | x]."""

    @abstractmethod
    def sample(self, key: PRNGKey, state: Float[Array, " state"]) -> Float[Array, " output"]:
        """A draw from p(y | x)."""

    def kl(self) -> Float[Array, ""]:
        """The divergence of every q(u) inside the emission from its prior: zero for most emissions."""
        return sum((node.kl() for node in _inducing_nodes(self)), start=jnp.zeros(()))


class LinearGaussian(AbstractEmission):
    """y = matrix x + offset + noise; the noise has a standard deviation a channel or a full covariance."""

    matrix: Parameter
    offset: Parameter
    chol_noise: Parameter

    def __init__(
        self,
        matrix: Values | AbstractParameter,
        offset: Values | AbstractParameter,
        chol_noise: Values | AbstractParameter,
    ):
        """`chol_noise` is [output], standard deviations, or [output, output], the lower Cholesky factor of R."""
        self.matrix, self.offset = as_parameter(matrix), as_parameter(offset)
        self.chol_noise = _noise_scale(chol_noise)
        _check_channels(self.matrix, offset=self.offset, chol_noise=self.chol_noise)

    def log_density(
        self, state: Float[Array, " state"], output: Float[Array, " output"], is_observed: Bool[Array, " output"]
    ) -> Float[Array, ""]:
        return gaussian_log_density(output, self.mean(state), self.chol_noise, is_observed)

    def mean(self, state: Float[Array, " state"]) -> Float[Array, " output"]:
        return self.matrix @ state + self.offset

    def sample(self, key: PRNGKey, state: Float[Array, " state"]) -> Float[Array, " output"]:
        return _gaussian_sample(key, self.mean(state), self.chol_noise)


class NonlinearGaussian(AbstractEmission):
    """y = function(x) + Gaussian noise. A function that is an `equinox.Module` is trained with the rest."""

    function: Callable
    chol_noise: Parameter

    def __init__(self, function: Callable, chol_noise: Values | AbstractParameter):
        self.function, self.chol_noise = function, _noise_scale(chol_noise)

    def log_density(
        self, state: Float[Array, " state"], output: Float[Array, " output"], is_observed: Bool[Array, " output"]
    ) -> Float[Array, ""]:
        return gaussian_log_density(output, self.mean(state), self.chol_noise, is_observed)

    def mean(self, state: Float[Array, " state"]) -> Float[Array, " output"]:
        return self.function(state)

    def sample(self, key: PRNGKey, state: Float[Array, " state"]) -> Float[Array, " output"]:
        return _gaussian_sample(key, self.mean(state), self.chol_noise)


class StudentT(AbstractEmission):
    """y = matrix x + offset + scale * Student-t noise, independent channels: outliers cost little."""

    matrix: Parameter
    offset: Parameter
    scale: Parameter
    degrees_of_freedom: Parameter

    def __init__(
        self,
        matrix: Values | AbstractParameter,
        offset: Values | AbstractParameter,
        scale: Values | AbstractParameter,
        degrees_of_freedom: Values | AbstractParameter = 4.0,
    ):
        self.matrix, self.offset = as_parameter(matrix), as_parameter(offset)
        self.scale, self.degrees_of_freedom = as_positive(scale), as_positive(degrees_of_freedom)
        _check_channels(self.matrix, offset=self.offset, scale=self.scale)

    def log_density(
        self, state: Float[Array, " state"], output: Float[Array, " output"], is_observed: Bool[Array, " output"]
    ) -> Float[Array, ""]:
        densities = stats.t.logpdf(output, self.degrees_of_freedom, self.mean(state), self.scale)
        return jnp.sum(jnp.where(is_observed, densities, 0.0))

    def mean(self, state: Float[Array, " state"]) -> Float[Array, " output"]:
        return self.matrix @ state + self.offset

    def sample(self, key: PRNGKey, state: Float[Array, " state"]) -> Float[Array, " output"]:
        mean = self.mean(state)
        return mean + self.scale * jr.t(key, self.degrees_of_freedom, mean.shape, mean.dtype)


class Poisson(AbstractEmission):
    """Counts y ~ Poisson(exp(matrix x + offset)). Fit it without scaling the outputs."""

    matrix: Parameter
    offset: Parameter

    def __init__(self, matrix: Values | AbstractParameter, offset: Values | AbstractParameter):
        self.matrix, self.offset = as_parameter(matrix), as_parameter(offset)
        _check_channels(self.matrix, offset=self.offset)

    def log_density(
        self, state: Float[Array, " state"], output: Float[Array, " output"], is_observed: Bool[Array, " output"]
    ) -> Float[Array, ""]:
        log_rate = self.matrix @ state + self.offset
        densities = output * log_rate - jnp.exp(log_rate) - jax.scipy.special.gammaln(output + 1)
        return jnp.sum(jnp.where(is_observed, densities, 0.0))

    def mean(self, state: Float[Array, " state"]) -> Float[Array, " output"]:
        return jnp.exp(self.matrix @ state + self.offset)

    def sample(self, key: PRNGKey, state: Float[Array, " state"]) -> Float[Array, " output"]:
        mean = self.mean(state)
        return jr.poisson(key, mean).astype(mean.dtype)


class StochasticVolatility(AbstractEmission):
    """y ~ N(offset, exp(matrix x + log_variance)): the state drives the spread, as in financial returns."""

    matrix: Parameter
    log_variance: Parameter
    offset: Parameter

    def __init__(
        self,
        matrix: Values | AbstractParameter,
        log_variance: Values | AbstractParameter,
        offset: Values | AbstractParameter,
    ):
        self.matrix, self.log_variance = as_parameter(matrix), as_parameter(log_variance)
        self.offset = as_parameter(offset)
        _check_channels(self.matrix, offset=self.offset, log_variance=self.log_variance)

    def log_density(
        self, state: Float[Array, " state"], output: Float[Array, " output"], is_observed: Bool[Array, " output"]
    ) -> Float[Array, ""]:
        return gaussian_log_density(output, self.offset, self._scale(state), is_observed)

    def mean(self, state: Float[Array, " state"]) -> Float[Array, " output"]:
        return self.offset

    def sample(self, key: PRNGKey, state: Float[Array, " state"]) -> Float[Array, " output"]:
        return _gaussian_sample(key, self.offset, self._scale(state))

    def _scale(self, state: Float[Array, " state"]) -> Float[Array, " output"]:
        return jnp.exp(0.5 * (self.matrix @ state + self.log_variance))


class SparseGPEmission(AbstractEmission):
    """y = h(x) + Gaussian noise, with a sparse GP on h: one GP an output, inducing outputs of its own.

    The density is the bound's: log N(y; mean of h, R) - variance of h / (2 R), the expectation of log p(y | h(x)) under q(h).
    """

    function: SparseGP  # its `num_states` is the number of outputs
    inducing: InducingPosterior
    scale: Parameter

    def __init__(self, function: SparseGP, inducing: InducingPosterior, scale: Values | AbstractParameter):
        self.function, self.inducing, self.scale = function, inducing, as_positive(scale)

    def log_density(
        self, state: Float[Array, " state"], output: Float[Array, " output"], is_observed: Bool[Array, " output"]
    ) -> Float[Array, ""]:
        mean, variance = self._moments(state)
        spread = jnp.sum(jnp.where(is_observed, variance / self.scale**2, 0.0))
        return gaussian_log_density(output, mean, self.scale, is_observed) - 0.5 * spread

    def mean(self, state: Float[Array, " state"]) -> Float[Array, " output"]:
        return self._moments(state)[0]

    def sample(self, key: PRNGKey, state: Float[Array, " state"]) -> Float[Array, " output"]:
        mean, variance = self._moments(state)
        return _gaussian_sample(key, mean, jnp.sqrt(variance + self.scale**2))

    def _moments(self, state: Float[Array, " state"]) -> tuple[Float[Array, " output"], Float[Array, " output"]]:
        return marginal_moments(self.function.basis().project(state), self.function.mean(state), self.inducing)


class FunctionEmission(AbstractEmission):
    """A user's own density, from functions of the parameters, the state and the output.

    `log_densities(parameters, state, output)` gives one number a channel, so that missing channels can be left out;
    `mean_function(parameters, state)` and `sampler(parameters, key, state)` serve forecasts.
    """

    parameters: Any
    log_densities: Callable
    mean_function: Callable
    sampler: Callable

    def log_density(
        self, state: Float[Array, " state"], output: Float[Array, " output"], is_observed: Bool[Array, " output"]
    ) -> Float[Array, ""]:
        return jnp.sum(jnp.where(is_observed, self.log_densities(self.parameters, state, output), 0.0))

    def mean(self, state: Float[Array, " state"]) -> Float[Array, " output"]:
        return self.mean_function(self.parameters, state)

    def sample(self, key: PRNGKey, state: Float[Array, " state"]) -> Float[Array, " output"]:
        return self.sampler(self.parameters, key, state)


def realise(emission: AbstractEmission, key: PRNGKey) -> AbstractEmission:
    """The emission with every GP inside it reduced to one draw of its inducing outputs, to be kept through a forecast."""
    nodes = _inducing_nodes(emission)

    def draw(node: InducingPosterior, key: PRNGKey) -> InducingPosterior:
        values = node.sample(jr.normal(key, node.mean.shape, node.mean.dtype))
        return eqx.tree_at(lambda n: (n.mean, n.chol), node, (values, jnp.zeros_like(node.chol)))

    drawn = [draw(node, jr.fold_in(key, i)) for i, node in enumerate(nodes)]
    return eqx.tree_at(_inducing_nodes, emission, drawn) if nodes else emission


def _inducing_nodes(tree: Any) -> list[InducingPosterior]:
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, InducingPosterior))
    return [leaf for leaf in leaves if isinstance(leaf, InducingPosterior)]


def _noise_scale(chol_noise: Values | AbstractParameter) -> AbstractParameter:
    if isinstance(chol_noise, AbstractParameter):
        return chol_noise
    array = as_floating(chol_noise)
    return as_positive(array) if array.ndim == 1 else LowerTriangular(array)


def _check_channels(matrix: Parameter, **others: Parameter) -> None:
    """Raise unless the matrix is [output, state] and each of the others [output]; only a Cholesky factor is [output, output]."""
    shape = unwrap(matrix).shape
    for name, parameter in others.items():
        got, channels = unwrap(parameter).shape, shape[:1]
        if len(shape) != 2 or (got != channels and (got != 2 * channels or name != "chol_noise")):
            raise ValueError(
                f"An emission's matrix is [output, state] and its {name} has a number for each output: got the shapes {shape} "
                f"and {got}."
            )


def _gaussian_sample(key: PRNGKey, mean: Float[Array, " output"], chol: Float[Array, "..."]) -> Float[Array, " output"]:
    return mean + matvec(chol, jr.normal(key, mean.shape, mean.dtype))
