"""The oracles against one dense joint Gaussian, integrals and definitions: two ways to each number."""

import numpy as np
import pytest
from scipy import integrate, special, stats

import oracles

NUM_STEPS = 6


@pytest.fixture
def model(rng) -> oracles.LinearGaussian:
    def covariance(size):
        root = rng.normal(size=(size, size))
        return root @ root.T + 0.1 * np.eye(size)

    return oracles.LinearGaussian(
        transition_matrix=0.5 * rng.normal(size=(3, 3)),
        transition_covariance=covariance(3),
        emission_matrix=rng.normal(size=(2, 3)),
        emission_covariance=covariance(2),
        initial_mean=rng.normal(size=3),
        initial_covariance=covariance(3),
        emission_offset=rng.normal(size=2),
    )


@pytest.fixture
def offsets(rng) -> np.ndarray:
    return rng.normal(size=(NUM_STEPS, 3))


@pytest.fixture
def outputs(rng, model, offsets) -> np.ndarray:
    outputs = oracles.simulate_linear_gaussian(rng, model, NUM_STEPS, offsets)[1]
    outputs[1, 0] = outputs[2, 1] = outputs[4] = np.nan
    return outputs


def joint(model, offsets, num_steps=NUM_STEPS):
    """Mean and covariance of all states then all outputs, as one linear map of independent noises."""
    size = len(model.initial_mean)
    response = np.eye(num_steps * size)  # of the states to the inputs of every step
    for t in range(1, num_steps):
        now, before = slice(t * size, (t + 1) * size), slice((t - 1) * size, t * size)
        response[now] += model.transition_matrix @ response[before]
    noise = np.kron(np.eye(num_steps), model.transition_covariance)
    noise[:size, :size] = model.initial_covariance
    drive = np.concatenate([model.initial_mean, offsets[: num_steps - 1].ravel()])
    emission = np.kron(np.eye(num_steps), model.emission_matrix)
    both = np.vstack([response, emission @ response])
    mean, covariance = both @ drive, both @ noise @ both.T
    mean[num_steps * size :] += np.tile(model.emission_offset, num_steps)
    covariance[num_steps * size :, num_steps * size :] += np.kron(np.eye(num_steps), model.emission_covariance)
    return mean, covariance


def states_given(model, offsets, outputs):
    """Mean and covariance of all states given the outputs seen."""
    mean, covariance = joint(model, offsets)
    num = NUM_STEPS * 3
    seen = num + np.flatnonzero(~np.isnan(outputs.ravel()))
    gain = covariance[:num, seen] @ np.linalg.inv(covariance[np.ix_(seen, seen)])
    given_mean = mean[:num] + gain @ (outputs.ravel()[seen - num] - mean[seen])
    return given_mean.reshape(NUM_STEPS, 3), covariance[:num, :num] - gain @ covariance[seen, :num]


def block(covariance, row, column):
    return covariance[3 * row : 3 * row + 3, 3 * column : 3 * column + 3]


def test_filter_evidence_is_the_density_of_the_outputs_seen(model, offsets, outputs):
    mean, covariance = joint(model, offsets)
    seen = np.flatnonzero(~np.isnan(outputs.ravel()))
    at = NUM_STEPS * 3 + seen
    expected = stats.multivariate_normal(mean[at], covariance[np.ix_(at, at)]).logpdf(outputs.ravel()[seen])
    assert oracles.kalman_filter(model, outputs, offsets).log_evidence == pytest.approx(expected, rel=1e-11)


@pytest.mark.parametrize("step", range(NUM_STEPS))
def test_filter_moments_are_the_joint_conditioned_on_the_past(model, offsets, outputs, step):
    filtered = oracles.kalman_filter(model, outputs, offsets)
    for known, means, covariances in [
        (step, filtered.predicted_means, filtered.predicted_covariances),
        (step + 1, filtered.means, filtered.covariances),
    ]:
        past = np.where(np.arange(NUM_STEPS)[:, None] < known, outputs, np.nan)
        mean, covariance = states_given(model, offsets, past)
        np.testing.assert_allclose(means[step], mean[step], rtol=1e-10)
        np.testing.assert_allclose(covariances[step], block(covariance, step, step), rtol=1e-9, atol=1e-12)


def test_smoother_moments_are_the_joint_conditioned_on_everything(model, offsets, outputs):
    smoothed = oracles.rts_smoother(model, oracles.kalman_filter(model, outputs, offsets))
    mean, covariance = states_given(model, offsets, outputs)
    np.testing.assert_allclose(smoothed.means, mean, rtol=1e-9)
    for t in range(NUM_STEPS):
        np.testing.assert_allclose(smoothed.covariances[t], block(covariance, t, t), rtol=1e-8, atol=1e-11)
    for t in range(NUM_STEPS - 1):
        expected = block(covariance, t + 1, t)
        np.testing.assert_allclose(smoothed.lag_one_covariances[t], expected, rtol=1e-8, atol=1e-11)


def test_one_number_as_offset_is_that_offset_at_every_step(model, outputs):
    one = oracles.kalman_filter(model, outputs, 0.5).log_evidence
    assert one == oracles.kalman_filter(model, outputs, np.full((NUM_STEPS - 1, 3), 0.5)).log_evidence


def test_simulated_sequences_have_the_joint_s_moments(rng, model, offsets):
    draws = [oracles.simulate_linear_gaussian(rng, model, 3, offsets) for _ in range(4000)]
    flat = np.array([np.concatenate([states.ravel(), outputs.ravel()]) for states, outputs in draws])
    mean, covariance = joint(model, offsets, 3)
    scores = (flat.mean(0) - mean) / np.sqrt(np.diag(covariance) / len(flat))
    assert np.max(np.abs(scores)) < 4
    spread = np.sqrt((np.outer(np.diag(covariance), np.diag(covariance)) + covariance**2) / len(flat))
    assert np.max(np.abs(np.cov(flat.T) - covariance) / spread) < 4.5


def test_kl_is_the_expected_log_ratio(rng):
    mean, to_mean = rng.normal(size=2), rng.normal(size=2)
    covariance, to_covariance = np.array([[0.7, 0.2], [0.2, 0.4]]), np.array([[1.0, -0.3], [-0.3, 0.8]])
    one, other = (
        stats.multivariate_normal(mean, covariance),
        stats.multivariate_normal(to_mean, to_covariance),
    )
    nodes, weights = special.roots_hermitenorm(5)  # exact: the log ratio is quadratic
    grid = np.stack(np.meshgrid(nodes, nodes, indexing="ij"), -1).reshape(-1, 2)
    points = mean + grid @ np.linalg.cholesky(covariance).T
    expected = np.outer(weights, weights).ravel() @ (one.logpdf(points) - other.logpdf(points)) / (2 * np.pi)
    assert oracles.gaussian_kl(mean, covariance, to_mean, to_covariance) == pytest.approx(expected, rel=1e-11)
    assert oracles.gaussian_kl(mean, covariance, mean, covariance) == pytest.approx(0, abs=1e-14)
    point = rng.normal(size=2)
    assert oracles.gaussian_log_density(point, mean, covariance) == pytest.approx(one.logpdf(point), rel=1e-12)


def test_regression_is_the_joint_of_targets_and_function_conditioned(rng):
    inputs, targets, new_inputs = rng.normal(size=(5, 2)), rng.normal(size=5), rng.normal(size=(3, 2))
    noise = rng.uniform(0.1, 0.5, size=5)

    def kernel(x, y):
        return oracles.matern32(x, y, np.array([0.7, 1.3]), 1.4) + oracles.linear(x, y, 0.3)

    result = oracles.gp_regression(kernel, inputs, targets, noise, new_inputs, mean=np.sum)
    every = np.vstack([new_inputs, inputs])
    covariance = oracles.gram(kernel, every, every) + np.diag(np.concatenate([np.zeros(3), noise]))
    precision = np.linalg.inv(covariance)  # condition through the precision: another route than ours
    given = np.linalg.inv(precision[:3, :3])
    mean = np.sum(new_inputs, 1) - given @ precision[:3, 3:] @ (targets - np.sum(inputs, 1))
    np.testing.assert_allclose(result.covariance, given, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(result.mean, mean, rtol=1e-9)
    evidence = stats.multivariate_normal(np.sum(inputs, 1), covariance[3:, 3:]).logpdf(targets)
    assert result.log_evidence == pytest.approx(evidence, rel=1e-11)


@pytest.mark.parametrize(("kernel", "order"), [(oracles.matern12, 0.5), (oracles.matern32, 1.5), (oracles.matern52, 2.5)])
def test_matern_kernels_are_the_bessel_form(rng, kernel, order):
    x, y, lengthscales = rng.normal(size=3), rng.normal(size=3), np.array([0.5, 1.0, 2.0])
    r = np.sqrt(2 * order) * np.linalg.norm((x - y) / lengthscales)
    expected = 1.7 * 2 ** (1 - order) / special.gamma(order) * r**order * special.kv(order, r)
    assert kernel(x, y, lengthscales, 1.7) == pytest.approx(expected, rel=1e-12)


def test_rational_quadratic_is_a_gamma_mixture_of_squared_exponentials(rng):
    x, y, mixture = rng.normal(size=2), rng.normal(size=2), 1.6
    precision = stats.gamma(mixture, scale=1 / mixture)

    def integrand(p):
        return precision.pdf(p) * oracles.squared_exponential(x, y, 0.8 / np.sqrt(p), 1.2)

    expected = integrate.quad(integrand, 0, np.inf, epsabs=1e-12)[0]
    assert oracles.rational_quadratic(x, y, 0.8, 1.2, mixture) == pytest.approx(expected, rel=1e-8)


def test_periodic_is_a_squared_exponential_on_the_circle():
    def circle(x):
        return np.array([np.cos(2 * np.pi * x / 1.3), np.sin(2 * np.pi * x / 1.3)]).ravel()

    x, y = np.array([0.2]), np.array([0.9])
    expected = oracles.squared_exponential(circle(x), circle(y), 0.7, 1.1)
    assert oracles.periodic(x, y, 0.7, 1.1, 1.3) == pytest.approx(expected, rel=1e-12)
    assert oracles.periodic(x, x + 1.3, 0.7, 1.1, 1.3) == pytest.approx(1.1, rel=1e-12)


def test_linear_and_constant_kernels_are_covariances_of_random_lines(rng):
    x, y, variances = rng.normal(size=2), rng.normal(size=2), np.array([0.5, 2.0])
    assert oracles.linear(x, y, variances) == pytest.approx(x @ np.diag(variances) @ y)
    assert oracles.constant(x, y, 0.3) == 0.3
