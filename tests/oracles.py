"""Slow textbook answers in plain NumPy float64, to check ours against; imports nothing of ours.

The linear-Gaussian model is x_1 ~ N(mu, P), x_{t+1} = A x_t + offset_t + N(0, Q), y_t = C x_t + d + N(0, R).
Controls enter as offsets: offset_t = B c_t + b.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Kernel = Callable[[np.ndarray, np.ndarray], float]


# Gaussians


def gaussian_log_density(point: np.ndarray, mean: np.ndarray, covariance: np.ndarray) -> float:
    """log N(point; mean, covariance)."""
    gap = np.asarray(point, float) - mean
    _, log_determinant = np.linalg.slogdet(covariance)
    distance = gap @ np.linalg.solve(covariance, gap)
    return float(-0.5 * (distance + log_determinant + len(gap) * np.log(2 * np.pi)))


def gaussian_kl(mean: np.ndarray, covariance: np.ndarray, to_mean: np.ndarray, to_covariance: np.ndarray) -> float:
    """KL(N(mean, covariance) || N(to_mean, to_covariance))."""
    gap = np.asarray(to_mean, float) - mean
    trace = np.trace(np.linalg.solve(to_covariance, covariance))
    distance = gap @ np.linalg.solve(to_covariance, gap)
    log_ratio = np.linalg.slogdet(to_covariance)[1] - np.linalg.slogdet(covariance)[1]
    return float(0.5 * (trace + distance - len(gap) + log_ratio))


# Linear-Gaussian state space


@dataclass(frozen=True)
class LinearGaussian:
    transition_matrix: np.ndarray  # A
    transition_covariance: np.ndarray  # Q
    emission_matrix: np.ndarray  # C
    emission_covariance: np.ndarray  # R
    initial_mean: np.ndarray  # mu
    initial_covariance: np.ndarray  # P
    emission_offset: np.ndarray | float = 0.0  # d


@dataclass(frozen=True)
class Filtered:
    predicted_means: np.ndarray  # [time, state], of x_t given y_1 ... y_{t-1}
    predicted_covariances: np.ndarray  # [time, state, state]
    means: np.ndarray  # of x_t given y_1 ... y_t
    covariances: np.ndarray
    log_densities: np.ndarray  # [time], log p(y_t | y_1 ... y_{t-1})

    @property
    def log_evidence(self) -> float:
        return float(np.sum(self.log_densities))


@dataclass(frozen=True)
class Smoothed:
    means: np.ndarray  # [time, state], of x_t given all outputs
    covariances: np.ndarray
    lag_one_covariances: np.ndarray  # [time - 1, state, state], Cov(x_{t+1}, x_t)


def kalman_filter(model: LinearGaussian, outputs: np.ndarray, offsets: np.ndarray | float = 0.0) -> Filtered:
    """Filter `outputs` [time, output], NaN where missing; `offsets` [time - 1, state] or one number."""
    num_steps, num_states = len(outputs), len(model.initial_mean)
    offsets = _every_step(offsets, num_steps, num_states)
    A, C = model.transition_matrix, model.emission_matrix
    mean, covariance = np.asarray(model.initial_mean, float), np.asarray(model.initial_covariance, float)
    rows = []
    for t in range(num_steps):
        if t > 0:
            mean = A @ mean + offsets[t - 1]
            covariance = A @ covariance @ A.T + model.transition_covariance
        predicted = mean, covariance
        seen = ~np.isnan(outputs[t])
        log_density = 0.0
        if np.any(seen):
            C_seen, R_seen = C[seen], model.emission_covariance[np.ix_(seen, seen)]
            offset = np.broadcast_to(model.emission_offset, len(seen))[seen]
            output_mean = C_seen @ mean + offset
            output_covariance = C_seen @ covariance @ C_seen.T + R_seen
            log_density = gaussian_log_density(outputs[t][seen], output_mean, output_covariance)
            gain = np.linalg.solve(output_covariance, C_seen @ covariance).T
            mean = mean + gain @ (outputs[t][seen] - output_mean)
            kept = np.eye(num_states) - gain @ C_seen
            covariance = kept @ covariance @ kept.T + gain @ R_seen @ gain.T
        rows.append((*predicted, mean, covariance, log_density))
    return Filtered(*(np.array(column) for column in zip(*rows, strict=True)))


def rts_smoother(model: LinearGaussian, filtered: Filtered) -> Smoothed:
    """Rauch, Tung and Striebel (1965), with the covariance of neighbouring states."""
    means, covariances = filtered.means.copy(), filtered.covariances.copy()
    lag_one = np.zeros((len(means) - 1, *covariances.shape[1:]))
    for t in reversed(range(len(means) - 1)):
        predicted = filtered.predicted_covariances[t + 1]
        gain = np.linalg.solve(predicted, model.transition_matrix @ filtered.covariances[t]).T
        means[t] = filtered.means[t] + gain @ (means[t + 1] - filtered.predicted_means[t + 1])
        covariances[t] = filtered.covariances[t] + gain @ (covariances[t + 1] - predicted) @ gain.T
        lag_one[t] = covariances[t + 1] @ gain.T
    return Smoothed(means, covariances, lag_one)


def simulate_linear_gaussian(
    rng: np.random.Generator, model: LinearGaussian, num_steps: int, offsets: np.ndarray | float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """States [time, state] and outputs [time, output]."""
    offsets = _every_step(offsets, num_steps, len(model.initial_mean))
    states = [rng.multivariate_normal(model.initial_mean, model.initial_covariance)]
    for t in range(num_steps - 1):
        mean = model.transition_matrix @ states[-1] + offsets[t]
        states.append(rng.multivariate_normal(mean, model.transition_covariance))
    noise = rng.multivariate_normal(np.zeros(len(model.emission_matrix)), model.emission_covariance, num_steps)
    return np.array(states), np.array(states) @ model.emission_matrix.T + model.emission_offset + noise


def _every_step(offsets: np.ndarray | float, num_steps: int, num_states: int) -> np.ndarray:
    offsets = np.asarray(offsets, float)
    return np.broadcast_to(offsets, (num_steps, num_states)) if offsets.ndim < 2 else offsets


# Gaussian processes


@dataclass(frozen=True)
class Regression:
    mean: np.ndarray  # [point], of f at the new inputs
    covariance: np.ndarray  # [point, point]
    log_evidence: float


def gram(kernel: Kernel, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """The kernel between every row of `left` and every row of `right`."""
    return np.array([[kernel(x, y) for y in right] for x in left]).reshape(len(left), len(right))


def gp_regression(
    kernel: Kernel,
    inputs: np.ndarray,
    targets: np.ndarray,
    noise_variance: float | np.ndarray,
    new_inputs: np.ndarray,
    mean: Callable[[np.ndarray], float] = lambda x: 0.0,
) -> Regression:
    """Exact regression, one noise variance or one a target (Rasmussen and Williams 2006, section 2.2)."""
    means, new_means = np.array([mean(x) for x in inputs]), np.array([mean(x) for x in new_inputs])
    covariance = gram(kernel, inputs, inputs) + noise_variance * np.eye(len(inputs))
    cross = gram(kernel, new_inputs, inputs)
    return Regression(
        mean=new_means + cross @ np.linalg.solve(covariance, targets - means),
        covariance=gram(kernel, new_inputs, new_inputs) - cross @ np.linalg.solve(covariance, cross.T),
        log_evidence=gaussian_log_density(targets, means, covariance),
    )


# Kernels of two points; lengthscales, variances and periods are numbers or one for each dimension


def squared_exponential(x, y, lengthscales=1.0, variance=1.0):
    return variance * np.exp(-0.5 * np.sum(((x - y) / lengthscales) ** 2))


def matern12(x, y, lengthscales=1.0, variance=1.0):
    return variance * np.exp(-_distance(x, y, lengthscales))


def matern32(x, y, lengthscales=1.0, variance=1.0):
    r = np.sqrt(3) * _distance(x, y, lengthscales)
    return variance * (1 + r) * np.exp(-r)


def matern52(x, y, lengthscales=1.0, variance=1.0):
    r = np.sqrt(5) * _distance(x, y, lengthscales)
    return variance * (1 + r + r**2 / 3) * np.exp(-r)


def rational_quadratic(x, y, lengthscales=1.0, variance=1.0, mixture=1.0):
    return variance * (1 + _distance(x, y, lengthscales) ** 2 / (2 * mixture)) ** (-mixture)


def periodic(x, y, lengthscales=1.0, variance=1.0, period=1.0):
    """MacKay's: a squared exponential on circles."""
    return variance * np.exp(-2 * np.sum((np.sin(np.pi * (x - y) / period) / lengthscales) ** 2))


def linear(x, y, variances=1.0):
    return np.sum(variances * x * y)


def constant(x, y, variance=1.0):
    return variance


def _distance(x, y, lengthscales):
    return np.sqrt(np.sum(((x - y) / lengthscales) ** 2))
