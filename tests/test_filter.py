"""Filtering, smoothing and forecasts from any row: the Kalman filter where it is exact, gaps, continuing, and no look ahead."""

from functools import cache

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import oracles
from gpssm.data import Dataset, Scaling
from gpssm.emissions import LinearGaussian, StudentT
from gpssm.evaluate import Forecaster
from gpssm.filter import FittedForecaster, filter, smooth
from gpssm.gp import InducingPosterior, SparseGP
from gpssm.kernels import SquaredExponential
from gpssm.means import LinearMean, ZeroMean
from gpssm.model import GPSSM
from gpssm.params import unwrap
from gpssm.posteriors import VCDT, FilteringSteps
from gpssm.result import FitResult, History, Status

A = np.array([[0.8, 0.3], [-0.2, 0.7]])
B = np.array([[0.5], [0.2]])
OFFSET = np.array([0.1, -0.05])
PROCESS, CHOL = np.array([0.3, 0.2]), np.array([[0.3, 0.0], [0.1, 0.25]])
EMISSION, SHIFT = np.array([[1.0, 0.4], [0.0, 1.0]]), np.array([0.2, -0.1])
SCALING = Scaling(np.array([1.0, -2.0]), np.array([2.0, 0.5]), np.array([0.3]), np.array([1.5]))
TRUTH = oracles.LinearGaussian(A, np.diag(PROCESS**2), EMISSION, CHOL @ CHOL.T, np.zeros(2), np.eye(2), SHIFT)
KEY = jr.key(7)


def fitted(model, inducing, train):
    return FitResult(
        model, VCDT(inducing, FilteringSteps()), SCALING, train, History.empty(model.num_states), Status.MAX_STEPS, {}, 0
    )


@cache
def series(num_rows=40, seed=0):
    """Standard outputs with gaps and standard controls, and both as a dataset in the user's units."""
    rng = np.random.default_rng([2019, seed])
    controls = rng.standard_normal((num_rows, 1))
    _, outputs = oracles.simulate_linear_gaussian(rng, TRUTH, num_rows, pushes(controls))
    outputs[5:9] = np.nan
    outputs[12, 0] = outputs[20, 1] = np.nan
    outputs[0, 1] = np.nan
    return outputs, controls, Dataset.from_arrays(SCALING.outputs_back(outputs), controls * 1.5 + 0.3)


def pushes(controls):
    return (controls @ B.T + OFFSET)[:-1]


@cache
def linear_result(emission="gaussian"):
    """A GPSSM whose GP hardly moves: the linear-Gaussian model of the oracle."""
    inputs = np.random.default_rng(1).standard_normal((3, 3))
    transition = SparseGP(SquaredExponential(np.ones(3), 1e-10), LinearMean(np.hstack([A, B]), OFFSET), inputs, 2)
    emissions = {"gaussian": LinearGaussian(EMISSION, SHIFT, CHOL), "student": StudentT(EMISSION, SHIFT, np.diag(CHOL))}
    model = GPSSM(transition, emissions[emission], PROCESS)
    return fitted(model, InducingPosterior.prior(2, 3), series(seed=99)[2])


@cache
def kalman():
    outputs, controls, _ = series()
    return oracles.kalman_filter(TRUTH, outputs, pushes(controls)), np.sum(~np.isnan(outputs) @ SCALING.log_jacobian)


@cache
def filtered(seed=0, num_particles=1000):
    return filter(linear_result(), series()[2], key=jr.key(seed), num_particles=num_particles)


def test_log_evidence_is_kalmans_within_monte_carlo_error():
    exact, jacobian = kalman()
    estimates = np.array([filtered(seed).log_evidence for seed in range(8)])
    error = estimates.std(ddof=1) / np.sqrt(len(estimates))
    bias = 0.5 * estimates.var(ddof=1)  # of a log
    z = (estimates.mean() + bias - exact.log_evidence - jacobian) / error
    print(f"z = {z:.2f}, standard deviation of one estimate {estimates.std(ddof=1):.3f}")
    assert abs(z) < 4
    assert estimates.std(ddof=1) < 0.5


def test_moments_of_states_and_of_the_next_output_are_kalmans():
    exact, _ = kalman()
    passes = [filtered(seed)[0] for seed in range(8)]
    for name, wanted in (("means", exact.means), ("covariances", exact.covariances)):
        values = np.array([getattr(one, name) for one in passes])
        error = values.std(axis=0, ddof=1) / np.sqrt(len(values)) + 2e-3
        assert np.abs((values.mean(axis=0) - wanted) / error).max() < 5, name
    predicted = SCALING.outputs_back(exact.predicted_means @ EMISSION.T + SHIFT)
    spread = EMISSION @ exact.predicted_covariances @ EMISSION.T + CHOL @ CHOL.T
    spread = spread * np.outer(SCALING.output_scale, SCALING.output_scale)
    deviation = np.sqrt(np.diagonal(spread, axis1=1, axis2=2))
    means = np.mean([one.predicted_means for one in passes], axis=0)
    assert np.abs((means - predicted) / deviation).max() < 0.05
    covariances = np.mean([one.predicted_covariances for one in passes], axis=0)
    np.testing.assert_allclose(covariances, spread, rtol=0.1, atol=0.02)


def test_particles_that_lose_the_state_find_it_again():
    """An output that shows the slow state through a faster one, with a zero outside the unit circle: each step of the particles
    looks likely, and their error grows with the zero."""
    slow = oracles.LinearGaussian(
        np.array([[0.9, 1.0], [0.0, 0.5]]),
        np.diag([1e-6, 0.25]),
        np.array([[1.0, -2.0]]),
        np.array([[1e-6]]),
        np.zeros(2),
        np.diag([1e-6, 0.25]),
        np.zeros(1),
    )
    _, outputs = oracles.simulate_linear_gaussian(np.random.default_rng(4), slow, 60)
    exact = oracles.kalman_filter(slow, outputs)
    transition = SparseGP(
        SquaredExponential(np.ones(2), 1e-12), LinearMean(slow.transition_matrix, np.zeros(2)), np.eye(2)[:1], 2
    )
    emission = LinearGaussian(slow.emission_matrix, np.zeros(1), np.array([1e-3]))
    model = GPSSM(transition, emission, np.array([1e-3, 0.5]), initial_chol=np.diag([1e-3, 0.5]))
    data = Dataset.from_arrays(outputs)
    result = FitResult(
        model,
        VCDT(InducingPosterior.prior(2, 1), FilteringSteps()),
        Scaling.identity(1, 0),
        Dataset.from_arrays(outputs[::-1].copy()),
        History.empty(2),
        Status.MAX_STEPS,
        {},
        0,
    )
    one = filter(result, data, key=jr.key(0), num_particles=200)[0]
    error = np.abs(one.means - exact.means).max(axis=1)
    assert np.median(error) < 0.5
    assert error.max() < 10  # left to themselves, they end more than a thousand away


def test_rows_without_outputs_have_no_evidence_and_every_row_is_weighted_to_one():
    one = filtered()[0]
    np.testing.assert_allclose(one.log_densities[5:9], 0.0, atol=1e-12)
    np.testing.assert_allclose(one.weights.sum(axis=1), 1.0)
    assert one.samples.shape == (40, 1000, 2)
    assert (one.effective_sizes <= 1000 + 1e-6).all()


def test_evidence_of_many_sequences_is_the_sum_and_no_sequence_changes_another():
    first, second = series()[2], series(25, seed=3)[2]
    both = Dataset.from_arrays([*first.outputs, *second.outputs], [*first.controls, *second.controls])
    together = filter(linear_result(), both, key=KEY, num_particles=1000)
    alone = filter(linear_result(), first, key=KEY, num_particles=1000)
    np.testing.assert_allclose(together[0].log_densities, alone[0].log_densities, rtol=1e-9)
    assert together.log_evidence == pytest.approx(together[0].log_evidence + together[1].log_evidence)
    assert len(together[1].means) == 25


def test_continuing_is_one_pass():
    result, data = bent_result(), bent_series()
    whole = filter(result, data, key=KEY, num_particles=1000)
    begun = filter(result, data.rows(0, 33), key=KEY, num_particles=1000)
    rest = filter(result, data.rows(33), key=KEY, num_particles=100, start=begun)
    np.testing.assert_allclose(np.r_[begun[0].log_densities, rest[0].log_densities], whole[0].log_densities, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(rest[0].means, whole[0].means[33:], rtol=1e-5, atol=1e-8)
    assert rest[0].num_rows == data.lengths[0]


def test_smoothing_is_rauch_tung_striebels():
    outputs, _, data = series()
    exact = oracles.rts_smoother(TRUTH, kalman()[0])
    (smoothed,) = smooth(linear_result(), data, key=KEY, num_samples=400, num_particles=1000)
    deviation = np.sqrt(np.diagonal(exact.covariances, axis1=1, axis2=2))
    z = (smoothed.means - exact.means) / deviation * np.sqrt(400)
    assert np.abs(z).max() < 5
    assert np.sqrt(np.mean(z**2)) < 1.6
    ratio = np.diagonal(smoothed.covariances, axis1=1, axis2=2) / deviation**2
    assert abs(ratio.mean() - 1) < 0.1
    seen = ~np.isnan(outputs)
    np.testing.assert_array_equal(smoothed.outputs[0][seen], data.outputs[0][seen])
    assert np.isfinite(smoothed.outputs).all()
    assert smoothed.outputs[:, ~seen].std(axis=0).min() > 0.05
    # a channel that is missing alone is drawn given the other, whose noise is correlated with it
    cross = (CHOL @ CHOL.T)[0, 1] / (CHOL @ CHOL.T)[1, 1]
    rest = EMISSION[0] - cross * EMISSION[1]
    wanted = rest @ exact.means[12] + SHIFT[0] + cross * (outputs[12, 1] - SHIFT[1])
    drawn = SCALING.outputs(smoothed.outputs)[:, 12, 0]
    assert abs(drawn.mean() - wanted) < 5 * drawn.std() / np.sqrt(400)


def test_one_step_forecast_is_the_filters_prediction():
    exact, _ = kalman()
    forecaster = FittedForecaster(linear_result(), num_particles=1000, num_samples=2000)
    assert isinstance(forecaster, Forecaster)
    forecasts = forecaster.forecasts(series()[2], [30, 10], 1, key=KEY)
    for forecast, origin in zip(forecasts, (30, 10), strict=True):
        mean, covariance = forecast.moments()
        spread = EMISSION @ exact.predicted_covariances[origin] @ EMISSION.T + CHOL @ CHOL.T
        spread = spread * np.outer(SCALING.output_scale, SCALING.output_scale)
        wanted = SCALING.outputs_back(EMISSION @ exact.predicted_means[origin] + SHIFT)
        assert np.abs((mean[0] - wanted) / np.sqrt(np.diag(spread))).max() < 0.1
        np.testing.assert_allclose(covariance[0], spread, rtol=0.15, atol=0.03)
        assert forecast.first_step == origin


@cache
def bent_result():
    """One state that a GP of five inducing inputs moves: f(x, c) near tanh(2 x) / 1.2 + c / 2, uncertain."""
    inputs = np.array([[-2.0, 0.0], [-1.0, 0.4], [0.0, -0.4], [1.0, 0.4], [2.0, 0.0]])
    transition = SparseGP(SquaredExponential(np.array([1.0, 2.0]), 0.8), ZeroMean(1), inputs, 1)
    basis = unwrap(transition).basis()
    values = np.tanh(2 * inputs[:, 0]) / 1.2 + inputs[:, 1] / 2
    mean = np.linalg.solve(np.asarray(basis.chol[0]), values)
    inducing = InducingPosterior(mean[None], 0.3 * np.eye(5)[None])
    matrix = np.array([[1.0], [0.5]])
    model = GPSSM(transition, LinearGaussian(matrix, np.zeros(2), np.array([0.1, 0.2])), np.array([0.1]))
    return fitted(model, inducing, series(seed=99)[2])


@cache
def bent_series(num_rows=60):
    rng = np.random.default_rng(5)
    controls, x, states = rng.standard_normal((num_rows, 1)), 0.2, []
    for control in controls[:, 0]:
        states.append(x)
        x = np.tanh(1.5 * x) / 1.1 + control / 2 + 0.1 * rng.standard_normal()
    outputs = np.array(states)[:, None] * np.array([1.0, 0.5]) + np.array([0.1, 0.2]) * rng.standard_normal((num_rows, 2))
    outputs[7:10] = np.nan
    return Dataset.from_arrays(SCALING.outputs_back(outputs), controls * 1.5 + 0.3)


def slow_filter(result, data, num_particles, seed=0):
    """Every particle with its own Gaussian of v, covariance included; one state. Log evidence, and moments of v at the end."""
    rng = np.random.default_rng(seed)
    model, q = unwrap((result.model, result.posterior.inducing))
    kernel = model.transition.basis()
    inputs, whitener = np.asarray(kernel.inducing_inputs[0]), np.asarray(kernel.whitener[0])
    matrix, noise = np.asarray(model.emission.matrix), np.diag(np.asarray(model.emission.chol_noise) ** 2)
    outputs, controls = SCALING.outputs(data.outputs[0]), SCALING.controls(data.controls[0])
    means = np.repeat(np.asarray(q.mean), num_particles, axis=0)
    covariances = np.repeat(np.asarray(q.chol @ q.chol.transpose(0, 2, 1)), num_particles, axis=0)
    mean, variance, evidence = np.zeros(num_particles), np.ones(num_particles), 0.0
    for t, y in enumerate(outputs):
        if t:
            points = np.column_stack([x, np.repeat(controls[t - 1], num_particles)])
            scaled = (points[:, None] - inputs[None]) / np.array([1.0, 2.0])
            a = 0.8 * np.exp(-0.5 * np.sum(scaled**2, axis=2)) @ whitener.T
            own = 0.8 - np.sum(a**2, axis=1) + 0.1**2
            pa = np.einsum("nkl,nl->nk", covariances, a)
            mean, variance = np.sum(a * means, axis=1), own + np.sum(a * pa, axis=1)
        if np.isnan(y).any():
            x = mean + np.sqrt(variance) * rng.standard_normal(num_particles)
            chosen = np.arange(num_particles)
        else:
            precision = 1 / variance + (matrix.T @ np.linalg.solve(noise, matrix))[0, 0]
            total = variance[:, None, None] * (matrix @ matrix.T)[None] + noise[None]
            gap = y[None] - mean[:, None] * matrix[:, 0][None]
            weights = (
                -0.5 * np.einsum("ni,nij,nj->n", gap, np.linalg.inv(total), gap) - 0.5 * np.linalg.slogdet(2 * np.pi * total)[1]
            )
            evidence += np.log(np.mean(np.exp(weights)))
            weights = np.exp(weights - weights.max())
            chosen = rng.choice(num_particles, num_particles, p=weights / weights.sum())
            centre = (mean / variance + (matrix.T @ np.linalg.solve(noise, y))[0]) / precision
            x = (centre + rng.standard_normal(num_particles) / np.sqrt(precision))[chosen]
        if t:
            mean, variance, pa = mean[chosen], variance[chosen], pa[chosen]
            means = means[chosen] + pa * ((x - mean) / variance)[:, None]
            covariances = covariances[chosen] - pa[:, :, None] * pa[:, None, :] / variance[:, None, None]
    evidence += np.sum(~np.isnan(outputs) @ SCALING.log_jacobian)
    return evidence, means.mean(axis=0), covariances.mean(axis=0) + np.cov(means.T)


def test_f_is_learnt_as_by_particles_that_keep_covariances_of_their_own():
    result, data = bent_result(), bent_series()
    slow = [slow_filter(result, data, 2000, seed) for seed in range(3)]
    ours = [filter(result, data, key=jr.key(seed), num_particles=1000) for seed in range(3)]
    evidence = np.array([one.log_evidence for one in ours])
    assert abs(evidence.mean() - np.mean([s[0] for s in slow])) < 1.0
    values = [one.inducing_draws(4000, key=KEY)[1][:, 0] for one in ours]
    mean, covariance = np.mean([s[1] for s in slow], axis=0), np.mean([s[2] for s in slow], axis=0)
    scale = np.sqrt(np.diag(covariance))
    print("evidence", evidence, [s[0] for s in slow])
    print("means", np.mean(values, axis=(0, 1)), mean, "scales", np.mean(values, axis=0).std(axis=0), scale)
    assert np.abs((np.mean(values, axis=(0, 1)) - mean) / scale).max() < 0.25
    ours_scale = np.sqrt(np.mean([v.var(axis=0) for v in values], axis=0))
    np.testing.assert_allclose(ours_scale, scale, rtol=0.15)
    assert (scale < 0.29).any()  # something was learnt


def test_moments_of_f_after_the_filter_are_those_of_its_draws():
    done = filter(bent_result(), bent_series(), key=KEY, num_particles=1000)
    values = done.inducing_draws(4000, key=KEY)[1][:, 0]
    basis = unwrap(bent_result().model.transition).basis()
    points = np.array([[0.5, 0.1], [-1.2, 0.3]])
    mean, variance = done.transition_moments(points)
    for i, point in enumerate(points):
        projection = basis.project(jnp.asarray(point))
        drawn = values @ np.asarray(projection.weights[0])
        assert mean[i, 0] == pytest.approx(drawn.mean(), abs=5 * drawn.std() / np.sqrt(4000))
        assert variance[i, 0] == pytest.approx(drawn.var() + float(projection.residual_variance[0]), rel=0.12)


def test_rows_of_the_training_data_teach_nothing_twice():
    data = bent_series()
    result = bent_result()
    trained = FitResult(**{**vars(result), "data": data.rows(0, 40)})
    known = filter(trained, data.rows(0, 40), key=KEY, num_particles=1000)
    np.testing.assert_allclose(known[0].particles.precision[0], np.eye(5))
    begun = filter(trained, data.rows(0, 30), key=KEY, num_particles=1000)
    np.testing.assert_allclose(
        filter(trained, data.rows(30, 40), key=KEY, num_particles=1000, start=begun)[0].particles.precision[0], np.eye(5)
    )
    after = filter(trained, data, key=KEY, num_particles=1000)
    assert np.trace(after[0].particles.precision[0]) > 5.5
    still = filter(trained, data, key=KEY, num_particles=100, is_learning=False)
    np.testing.assert_allclose(still[0].particles.precision[0], np.eye(5))


def test_nothing_after_the_origin_changes_a_forecast():
    result, data, origins = bent_result(), bent_series(), [25, 31, 40]
    forecaster = FittedForecaster(result, num_particles=1000, num_samples=50)
    forecasts = forecaster.forecasts(data, origins, 5, key=KEY)
    outputs, controls = data.outputs[0].copy(), data.controls[0].copy()
    outputs[31:], controls[36:] = 99.0, -50.0
    changed = forecaster.forecasts(Dataset.from_arrays([outputs], [controls]), origins, 5, key=KEY)
    for i in (0, 1):
        np.testing.assert_array_equal(forecasts[i].mean, changed[i].mean)
    assert not np.allclose(forecasts[2].mean, changed[2].mean)
    (alone,) = forecaster.forecasts(data, [31], 5, key=KEY)
    np.testing.assert_allclose(alone.mean, forecasts[1].mean, rtol=1e-6)
    once = forecaster.forecast(data.rows(0, 31), 5, data.controls[0][31:35], key=KEY)
    np.testing.assert_allclose(once.mean, forecasts[1].mean, rtol=1e-6)
    assert once.first_step == 31


def test_heavy_tailed_emissions_are_filtered_by_the_bootstrap():
    data = series()[2]
    outputs = data.outputs[0].copy()
    outputs[15] += 60.0
    struck = Dataset.from_arrays([outputs], [data.controls[0]])
    result = linear_result("student")
    one = filter(result, struck, key=KEY, num_particles=1000)[0]
    assert np.isfinite(one.log_densities).all()
    exact, _ = kalman()
    error = np.abs(one.means - exact.means)
    assert error[[14, 18, 19]].max() < 0.6  # one outlier is forgotten
    (smoothed,) = smooth(result, struck, key=KEY, num_samples=20, num_particles=100)
    assert np.isfinite(smoothed.states).all()
    (forecast,) = FittedForecaster(result, 1000, 100).forecasts(struck, [30], 5, key=KEY)
    assert np.isfinite(forecast.log_density(struck.outputs[0][30:35])).all()


def test_what_does_not_fit_is_refused():
    result, data = linear_result(), series()[2]
    with pytest.raises(ValueError, match="outputs y1, y2, but the data have y1"):
        filter(result, Dataset.from_arrays(data.outputs[0][:, :1], data.controls[0]), key=KEY)
    with pytest.raises(ValueError, match=r"controls u1, but the data have \(none\)"):
        filter(result, Dataset.from_arrays(data.outputs[0]), key=KEY)
    swapped = Dataset.from_arrays(data.outputs[0][:, ::-1], data.controls[0], output_names=["y2", "y1"])
    with pytest.raises(ValueError, match="same order"):
        smooth(result, swapped, key=KEY)
    with pytest.raises(ValueError, match="num_particles"):
        filter(result, data, key=KEY, num_particles=0)
    with pytest.raises(ValueError, match="`start` followed 1 sequences"):
        filter(result, Dataset.from_arrays([*data.outputs] * 2, [*data.controls] * 2), key=KEY, start=filtered())
    forecaster = FittedForecaster(result, 100, 50)
    with pytest.raises(ValueError, match="at least one row of history"):
        forecaster.forecasts(data, [0], 3, key=KEY)
    with pytest.raises(ValueError, match="Ask for fewer steps"):
        forecaster.forecasts(data, [38], 5, key=KEY)
    with pytest.raises(ValueError, match="row 1 of u1 is nan"):
        forecaster.forecast(data, 4, np.array([[0.1], [np.nan], [0.2]]), key=KEY)
    with pytest.raises(ValueError, match="next 3 rows"):
        forecaster.forecast(data, 4, key=KEY)
    with pytest.raises(ValueError, match="one sequence at a time"):
        forecaster.forecasts(Dataset.from_arrays([*data.outputs] * 2, [*data.controls] * 2), [5], 2, key=KEY)
