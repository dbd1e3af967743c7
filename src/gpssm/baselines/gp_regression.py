"""Exact Gaussian process regression for the GP-NARX rival: a few hundred rows, NumPy, nothing of the GPSSM's own code.

The kernel is linear plus squared exponential with a lengthscale for each input, so that a linear rule costs
it nothing and lags that do not matter fade out.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from scipy.linalg import cho_factor, cho_solve
from scipy.optimize import minimize

LOG_PRIOR_MEAN = {
    "lengthscale": np.log(3.0),
    "signal": np.log(0.3),
    "linear": np.log(0.7),
    "noise": np.log(0.1),
}
LOG_PRIOR_SCALE = 1.5
LOG_NOISE_FLOOR = np.log(1e-3)


@dataclass(frozen=True)
class Hyperparameters:
    """Logarithms: lengthscales, and standard deviations of the nonlinear part, linear weights and noise."""

    lengthscales: Float[np.ndarray, " feature"]
    signal: float
    linear: float
    noise: float

    @classmethod
    def of(cls, vector: Float[np.ndarray, " parameter"]) -> "Hyperparameters":
        return cls(vector[:-3], *map(float, vector[-3:]))


def squared_exponential(
    left: Float[np.ndarray, "row feature"], right: Float[np.ndarray, "column feature"], hyper: Hyperparameters
) -> Float[np.ndarray, "row column"]:
    left, right = left / np.exp(hyper.lengthscales), right / np.exp(hyper.lengthscales)
    distance = (left**2).sum(1)[:, None] + (right**2).sum(1) - 2 * left @ right.T
    return np.exp(2 * hyper.signal - 0.5 * np.maximum(distance, 0.0))


def linear_kernel(
    left: Float[np.ndarray, "row feature"], right: Float[np.ndarray, "column feature"], hyper: Hyperparameters
) -> Float[np.ndarray, "row column"]:
    return np.exp(2 * hyper.linear) * (1 + left @ right.T)


def negative_log_posterior(
    vector: Float[np.ndarray, " parameter"],
    inputs: Float[np.ndarray, "row feature"],
    targets: Float[np.ndarray, " row"],
) -> tuple[float, Float[np.ndarray, " parameter"]]:
    """Minus log evidence minus the log prior (normal in the logarithms), and its gradient tr(W dK) / 2."""
    hyper = Hyperparameters.of(vector)
    smooth, linear = squared_exponential(inputs, inputs, hyper), linear_kernel(inputs, inputs, hyper)
    noise = np.exp(2 * hyper.noise)
    try:
        chol = cho_factor(smooth + linear + noise * np.eye(len(inputs)), lower=True)
    except np.linalg.LinAlgError:
        return 1e12, np.zeros_like(vector)
    alpha = cho_solve(chol, targets)
    weight = cho_solve(chol, np.eye(len(inputs))) - np.outer(alpha, alpha)
    value = 0.5 * targets @ alpha + np.log(np.diag(chol[0])).sum() + 0.5 * len(inputs) * np.log(2 * np.pi)
    local = weight * smooth
    scaled = inputs / np.exp(hyper.lengthscales)
    lengthscales = local.sum(1) @ scaled**2 - np.einsum("nd,nd->d", scaled, local @ scaled)
    gradient = np.r_[lengthscales, local.sum(), (weight * linear).sum(), noise * np.trace(weight)]
    centred = (vector - prior_mean(inputs.shape[1])) / LOG_PRIOR_SCALE
    return float(value + 0.5 * centred @ centred), gradient + centred / LOG_PRIOR_SCALE


def prior_mean(num_features: int) -> Float[np.ndarray, " parameter"]:
    mean = LOG_PRIOR_MEAN
    return np.r_[np.full(num_features, mean["lengthscale"]), mean["signal"], mean["linear"], mean["noise"]]


@dataclass(frozen=True)
class GPRegression:
    """A fitted regression: its rows, hyperparameters, and the log evidence that chose them (prior included)."""

    inputs: Float[np.ndarray, "row feature"]
    targets: Float[np.ndarray, " row"]
    hyper: Hyperparameters
    log_evidence: float

    @property
    def noise_variance(self) -> float:
        return float(np.exp(2 * self.hyper.noise))

    def draws(self, generator: np.random.Generator, num_samples: int, num_features: int = 256) -> "FunctionDraws":
        """Draws of the whole function given the rows (Wilson et al., 2020, Matheron's rule).

        A draw of the prior, in random Fourier features, is corrected by the kernel through the residuals
        that it leaves at the rows. Each draw is one function: it answers alike wherever a trajectory
        returns to.
        """
        num_inputs = self.inputs.shape[1]
        frequency = generator.standard_normal((num_features, num_inputs)) / np.exp(self.hyper.lengthscales)
        phase = generator.uniform(0, 2 * np.pi, num_features)
        waves = generator.standard_normal((num_samples, num_features))
        waves *= np.exp(self.hyper.signal) * np.sqrt(2 / num_features)
        slopes = np.exp(self.hyper.linear) * generator.standard_normal((num_samples, num_inputs + 1))
        prior = np.cos(self.inputs @ frequency.T + phase) @ waves.T
        prior += self.inputs @ slopes[:, :-1].T + slopes[:, -1]
        noise = np.exp(self.hyper.noise) * generator.standard_normal(prior.shape)
        covariance = squared_exponential(self.inputs, self.inputs, self.hyper)
        covariance += linear_kernel(self.inputs, self.inputs, self.hyper)
        covariance[np.diag_indices(len(covariance))] += self.noise_variance
        weights = cho_solve(cho_factor(covariance, lower=True), self.targets[:, None] - prior - noise).T
        pull = np.exp(2 * self.hyper.linear) * np.c_[weights @ self.inputs, weights.sum(1)]
        return FunctionDraws(self, frequency, phase, waves, slopes + pull, weights)


@dataclass(frozen=True)
class FunctionDraws:
    """Functions drawn from the posterior; call with one set of inputs a draw."""

    regression: GPRegression
    frequency: Float[np.ndarray, "wave feature"]
    phase: Float[np.ndarray, " wave"]
    waves: Float[np.ndarray, "sample wave"]
    slopes: Float[np.ndarray, "sample slope"]  # of the linear part, its correction by the rows included
    weights: Float[np.ndarray, "sample row"]

    def __call__(self, inputs: Float[np.ndarray, "sample point feature"]) -> Float[np.ndarray, "sample point"]:
        hyper = self.regression.hyper
        rows, points = (x / np.exp(hyper.lengthscales) for x in (self.regression.inputs, inputs))
        # the exponent -|x - x'|^2 / 2 + 2 log sd as one product of extended vectors
        rows = np.c_[rows, np.ones(len(rows)), 2 * hyper.signal - 0.5 * (rows**2).sum(1)].T
        points = np.concatenate([points, -0.5 * (points**2).sum(2, keepdims=True), np.ones((*points.shape[:2], 1))], 2)
        frequency, phase = self.frequency.T.astype(np.float32), self.phase.astype(np.float32)
        values = np.einsum("spf,sf->sp", inputs, self.slopes[:, :-1]) + self.slopes[:, -1:]
        for i in range(len(inputs)):  # one draw at a time stays within the processor's cache
            kernel = points[i] @ rows
            values[i] += np.exp(kernel, out=kernel) @ self.weights[i]
            values[i] += np.cos(inputs[i].astype(np.float32) @ frequency + phase) @ self.waves[i]
        return values


def fit_gp(
    inputs: Float[np.ndarray, "row feature"],
    targets: Float[np.ndarray, " row"],
    *,
    start: Hyperparameters | None = None,
    max_iterations: int = 100,
) -> GPRegression:
    """Hyperparameters of greatest posterior density, by L-BFGS from `start` (or the prior's centre)."""
    first = prior_mean(inputs.shape[1])
    if start is not None:
        first = np.r_[start.lengthscales, start.signal, start.linear, start.noise]
    bounds = [(-3.0, 7.0)] * inputs.shape[1] + [(-6.0, 3.0), (-4.0, 3.0), (LOG_NOISE_FLOOR, 2.0)]
    options = {"maxiter": max_iterations}
    found = minimize(negative_log_posterior, first, (inputs, targets), "L-BFGS-B", jac=True, bounds=bounds, options=options)
    return GPRegression(inputs, targets, Hyperparameters.of(found.x), -float(found.fun))
