"""Forecast records: exact densities, marginalised gaps, samples whose quantiles can be trusted."""

import numpy as np
import pytest
from scipy.special import logsumexp
from scipy.stats import multivariate_normal, norm

from gpssm.forecasts import TAIL_WEIGHT, Density, Forecast, GaussianDensity, GaussianMixtureDensity, smoothed_components


def covariances(rng, *shape):
    root = rng.standard_normal((*shape, shape[-1])) if shape else None
    return root @ np.swapaxes(root, -1, -2) + 0.3 * np.eye(shape[-1])


def test_gaussian_log_density_is_scipys_with_missing_channels_marginalised(rng):
    mean, covariance = rng.standard_normal((5, 3)), covariances(rng, 5, 3)
    outputs = rng.standard_normal((5, 3))
    outputs[1, 0], outputs[2, [0, 2]], outputs[3] = np.nan, np.nan, np.nan
    got = Forecast.gaussian(mean, covariance).log_density(outputs)
    for t in (0, 1, 2, 4):
        seen = ~np.isnan(outputs[t])
        want = multivariate_normal(mean[t, seen], covariance[t][np.ix_(seen, seen)]).logpdf(outputs[t, seen])
        assert got[t] == pytest.approx(want, rel=1e-10)
    assert got[3] == 0.0


@pytest.mark.parametrize("is_shared", [True, False])
def test_mixture_log_density_is_scipys_logsumexp(rng, is_shared):
    means, outputs = 30 * rng.standard_normal((40, 6, 2)), rng.standard_normal((6, 2))
    covariance = covariances(rng, 2) if is_shared else covariances(rng, 40, 6, 2)
    outputs[4, 1] = np.nan
    got = Forecast.mixture(means, covariance, seed=0).log_density(outputs)
    full = np.broadcast_to(covariance, (40, 6, 2, 2))
    for t in range(6):
        seen = ~np.isnan(outputs[t])
        block = full[:, t][:, seen][:, :, seen]
        terms = [multivariate_normal(m[t, seen], c).logpdf(outputs[t, seen]) for m, c in zip(means, block, strict=True)]
        assert got[t] == pytest.approx(logsumexp(terms) - np.log(40), rel=1e-10)


def test_mixture_density_is_finite_where_every_component_underflows():
    density = GaussianMixtureDensity(np.zeros((3, 1, 1)), np.eye(1) * 1e-4)
    value = density.log_density(np.full((1, 1), 10.0), np.ones((1, 1), bool))
    assert value[0] == pytest.approx(norm(0, 0.01).logpdf(10.0))


def test_smoothing_a_mixture_keeps_its_mean_and_covariance_and_approaches_the_limit(rng):
    means = rng.standard_normal((200, 1, 2)) * [1.0, 3.0]
    smooth, wide = smoothed_components(means, 1e-4 * np.eye(2))
    np.testing.assert_allclose(smooth.mean(0), means.mean(0), atol=1e-12)
    spread = np.cov(smooth[:, 0].T, bias=True) + wide[0, 0]
    np.testing.assert_allclose(spread, np.cov(means[:, 0].T, bias=True) + 1e-4 * np.eye(2), atol=1e-12)
    truth, outcomes = norm(0, 1), rng.standard_normal(300)  # the limit of many narrow components
    means = rng.standard_normal((100, 300, 1))
    scores = [
        Forecast.mixture(means, 1e-4 * np.eye(1), is_smoothed=flag, seed=0).log_density(outcomes[:, None]).mean()
        for flag in (False, True)
    ]
    assert abs(scores[1] - truth.logpdf(outcomes).mean()) < 0.05
    assert scores[0] < scores[1] - 0.5


def test_beyond_its_trajectories_a_smoothed_mixture_has_the_tails_of_the_gaussian_with_its_moments(rng):
    means = rng.normal(size=(50, 1, 1))
    forecast = Forecast.mixture(means, np.array([[1e-4]]), is_smoothed=True, seed=0)
    outputs = np.array([[20.0]])
    gaussian = forecast.gaussian_log_density(outputs)
    np.testing.assert_allclose(forecast.log_density(outputs), gaussian + np.log(TAIL_WEIGHT), rtol=1e-6)
    grid = np.linspace(-30, 30, 60_001)
    density = np.array([np.exp(forecast.log_density(np.full((1, 1), y)))[0] for y in grid[::20]])
    assert np.trapezoid(density, grid[::20]) == pytest.approx(1, abs=1e-3)


def test_gaussian_samples_have_exact_marginal_quantiles_for_any_seed(rng):
    mean, covariance = rng.standard_normal((4, 2)), covariances(rng, 4, 2)
    forecast = Forecast.gaussian(mean, covariance, num_samples=400, seed=7)
    deviation = np.sqrt(np.diagonal(covariance, axis1=1, axis2=2))
    for q in (0.05, 0.25, 0.5, 0.9, 0.95):
        np.testing.assert_allclose(forecast.quantile(q), mean + deviation * norm.ppf(q), atol=0.003 * deviation.max())
    lower, upper = forecast.interval(0.9)
    np.testing.assert_allclose(upper - lower, 2 * 1.6448536 * deviation, rtol=2e-3)
    np.testing.assert_allclose(forecast.standard_deviation, deviation)


def test_gaussian_samples_are_correlated_over_outputs_and_over_time(rng):
    root = rng.standard_normal((6, 6))
    joint = root @ root.T + np.eye(6)
    covariance = np.stack([joint[2 * t : 2 * t + 2, 2 * t : 2 * t + 2] for t in range(3)])
    forecast = Forecast.gaussian(np.zeros((3, 2)), covariance, joint_covariance=joint, num_samples=4000)
    got = np.corrcoef(forecast.samples.reshape(4000, 6).T)
    want = joint / np.sqrt(np.outer(np.diag(joint), np.diag(joint)))
    np.testing.assert_allclose(got, want, atol=0.06)


def test_moments_of_a_mixture_are_exact_and_those_of_bare_samples_are_theirs(rng):
    means = rng.standard_normal((50, 2, 1))
    forecast = Forecast.mixture(means, np.eye(1) * 0.25, seed=1)
    np.testing.assert_allclose(forecast.standard_deviation**2, means.var(0) + 0.25)
    bare = Forecast(forecast.samples.mean(0), forecast.samples, forecast.density, ("y",))
    np.testing.assert_allclose(bare.standard_deviation, forecast.samples.std(0, ddof=1))


def test_samples_that_are_all_one_value_have_no_gaussian(rng):
    samples = rng.normal(size=(50, 3, 1))
    samples[:, 1] = 60.0  # a sensor at its limit
    density = GaussianDensity(np.zeros((3, 1)), np.ones((3, 1, 1)))
    forecast = Forecast(samples.mean(0), samples, density, ("y",))
    found = forecast.gaussian_log_density(np.array([[0.0], [60.0], [np.nan]]))
    assert np.isfinite(found[0])
    assert found[1] == -np.inf
    assert found[2] == 0


def test_any_object_with_a_log_density_is_a_density():
    class Laplace:
        def log_density(self, outputs, is_observed):
            return np.where(is_observed, -np.abs(outputs) - np.log(2), 0).sum(1)

    assert isinstance(Laplace(), Density)
    assert isinstance(GaussianDensity(np.zeros((1, 1)), np.ones((1, 1, 1))), Density)
    forecast = Forecast(np.zeros((2, 1)), np.zeros((5, 2, 1)), Laplace(), ("y",))
    np.testing.assert_allclose(forecast.log_density(np.array([[1.0], [np.nan]])), [-1 - np.log(2), 0.0])


def test_dataframe_has_a_row_a_step_and_output():
    forecast = Forecast.gaussian(
        np.arange(4.0).reshape(2, 2), np.tile(np.eye(2), (2, 1, 1)), output_names=("a", "b"), first_step=10, sampling_time=0.5
    )
    frame = forecast.to_dataframe(quantiles=(0.1, 0.9))
    assert list(frame.columns) == ["step", "time", "output", "mean", "standard_deviation", "q0.1", "q0.9"]
    assert list(frame["step"]) == [10, 10, 11, 11]
    assert list(frame["time"]) == [5.0, 5.0, 5.5, 5.5]
    assert list(frame["output"]) == ["a", "b", "a", "b"]
    assert list(frame["mean"]) == [0.0, 1.0, 2.0, 3.0]
    np.testing.assert_allclose(frame["q0.9"] - frame["mean"], 1.2816, atol=5e-3)
