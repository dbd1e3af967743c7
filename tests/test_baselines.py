"""The rivals: known values, recovered coefficients, exact multi-step moments, and no look past the origin."""

import jax
import numpy as np
import pytest

from gpssm.baselines import ARX, GPNARX, KINDS, Constant, LagOrder, LastValue
from gpssm.baselines.gp_regression import GPRegression, Hyperparameters, fit_gp, negative_log_posterior, prior_mean
from gpssm.data import Dataset

A = [np.array([[0.9, 0.2], [-0.1, 0.6]]), np.array([[-0.3, 0.0], [0.1, -0.2]])]
B = np.array([[0.5], [-0.4]])
CHOL = np.array([[0.1, 0.0], [0.05, 0.1]])


def simulate(rng, num_rows, num_sequences=1):
    """y[t] = 1 + A1 y[t-1] + A2 y[t-2] + B u[t-2] + noise, two outputs, in units far from standard ones."""
    outputs, controls = [], []
    for _ in range(num_sequences):
        u, y = rng.standard_normal((num_rows, 1)), np.zeros((num_rows, 2))
        for t in range(2, num_rows):
            y[t] = 1 + A[0] @ y[t - 1] + A[1] @ y[t - 2] + B @ u[t - 2] + CHOL @ rng.standard_normal(2)
        outputs.append(100 + 10 * y[2:])
        controls.append(u[2:])
    return Dataset.from_arrays(outputs, controls, sampling_time=0.1)


def small(rng, num_rows=120):
    """One output, one control, a short series: enough for every rival to fit in seconds."""
    u, y = rng.standard_normal((num_rows, 1)), np.zeros((num_rows, 1))
    for t in range(1, num_rows):
        y[t] = 0.8 * y[t - 1] + 0.5 * np.sin(u[t - 1]) + 0.1 * rng.standard_normal()
    return Dataset.from_arrays([5 + 3 * y], [u])


def with_rows(data, outputs=None, controls=None):
    return Dataset.from_arrays(
        [data.outputs[0] if outputs is None else outputs], [data.controls[0] if controls is None else controls]
    )


def test_constant_forecasts_the_training_mean_and_variance():
    data = Dataset.from_arrays([np.array([1.0, 3.0, np.nan, 5.0])], sampling_time=2.0)
    forecast = Constant.fit(data, seed=0).forecast(data, 3, key=0)
    np.testing.assert_allclose(forecast.mean, 3.0)
    np.testing.assert_allclose(forecast.standard_deviation**2, 8 / 3)
    assert forecast.first_step == 4
    assert forecast.sampling_time == 2.0


def test_last_value_of_a_random_walk_has_variance_proportional_to_the_lag(rng):
    data = Dataset.from_arrays([np.cumsum(rng.standard_normal(5000))])
    history = Dataset.from_arrays([np.r_[0.0, 1.0, 7.0, np.nan, np.nan]])
    forecast = LastValue.fit(data, seed=0).forecast(history, 20, key=0)
    np.testing.assert_allclose(forecast.mean, 7.0)
    np.testing.assert_allclose(forecast.standard_deviation[:, 0] ** 2, np.arange(3, 23), rtol=0.15)


def test_arx_recovers_order_delay_and_coefficients(rng):
    fitted = ARX.fit(simulate(rng, 1500, num_sequences=2), seed=0)
    assert (fitted.order.outputs, fitted.order.controls, fitted.order.delay) == (2, 1, 2)
    scale = fitted.scaling.output_scale
    for got, want in zip(fitted.output_weights, A, strict=True):
        np.testing.assert_allclose(got * np.outer(scale, 1 / scale), want, atol=0.06)
    np.testing.assert_allclose(fitted.control_weights[0] * scale[:, None] / fitted.scaling.control_scale / 10, B, atol=0.01)
    np.testing.assert_allclose(fitted.noise_covariance * np.outer(scale, scale) / 100, CHOL @ CHOL.T, rtol=0.1)


def test_arx_drops_missing_rows_and_stays_consistent(rng):
    data = simulate(rng, 3000)
    outputs = data.outputs[0].copy()
    outputs[rng.random(outputs.shape) < 0.1] = np.nan
    fitted = ARX.fit(with_rows(data, outputs), order=LagOrder(2, 1, 2), seed=0)
    scale = fitted.scaling.output_scale
    np.testing.assert_allclose(fitted.output_weights[0] * np.outer(scale, 1 / scale), A[0], atol=0.08)


@pytest.mark.parametrize("has_gaps", [False, True])
def test_arx_moments_equal_brute_force_simulation(rng, has_gaps):
    """With gaps, the simulated joint law of the last rows is conditioned on what was seen of them."""
    data = simulate(rng, 400)
    fitted = ARX.fit(data, order=LagOrder(2, 1, 2), seed=0)
    history, steps, num_draws = data.rows(0, 60), 6, 200_000
    outputs = history.outputs[0].copy()
    if has_gaps:
        outputs[58, 0], outputs[59, 1] = np.nan, np.nan
    history = with_rows(history, outputs)
    future = data.controls[0][60 : 60 + steps]
    forecast = fitted.forecast(history, steps, future, key=0)

    drive = fitted.drive(fitted.scaling.controls(data.controls[0]))
    z = fitted.scaling.outputs(data.outputs[0])
    chol, draws = np.linalg.cholesky(fitted.noise_covariance), [np.tile(z[t], (num_draws, 1)) for t in (56, 57)]
    for t in range(58, 60 + steps):
        mean = draws[-1] @ fitted.output_weights[0].T + draws[-2] @ fitted.output_weights[1].T + drive[t]
        noise = rng.standard_normal((num_draws, 2)) @ chol.T
        draws.append(mean + noise if t >= 60 or has_gaps else np.tile(z[t], (num_draws, 1)))
    sample = np.concatenate(draws[2:], axis=1)  # rows 58 ... of both outputs
    mean, covariance = sample.mean(0), np.cov(sample.T)
    if has_gaps:  # condition on y[58, 1] and y[59, 0]: columns 1 and 2
        gain = np.linalg.solve(covariance[1:3, 1:3], covariance[1:3]).T
        mean = mean + gain @ (np.r_[z[58, 1], z[59, 0]] - mean[1:3])
        covariance = covariance - gain @ covariance[1:3]
    mean, covariance = mean[4:].reshape(steps, 2), covariance[4:, 4:]
    deviation = np.sqrt(np.diag(covariance)).reshape(steps, 2)
    np.testing.assert_allclose(fitted.scaling.outputs(forecast.mean), mean, atol=4 * deviation.max() / np.sqrt(num_draws))
    np.testing.assert_allclose(forecast.standard_deviation / fitted.scaling.output_scale, deviation, rtol=0.01)


def test_arx_trajectories_have_the_joint_law_of_the_model(rng):
    fitted = ARX.fit(simulate(rng, 400), order=LagOrder(2, 1, 2), seed=0)
    data = simulate(rng, 60)
    forecast = fitted.forecast(data, 3, np.zeros((3, 1)), key=0)
    spread = (forecast.samples - forecast.mean) / fitted.scaling.output_scale
    cross = np.einsum("si,sj->ij", spread[:, 1], spread[:, 0]) / len(spread)
    np.testing.assert_allclose(cross, fitted.output_weights[0] @ fitted.noise_covariance, atol=0.3 * cross.max())


@pytest.fixture(scope="module", params=list(KINDS))
def rival(request):
    train = small(np.random.default_rng(3))
    options = {"num_samples": 40} if request.param == "gp_narx" else {}
    return KINDS[request.param].fit(train, seed=0, **options)


def test_a_forecast_does_not_change_when_what_comes_after_changes(rng, rival):
    data, origins, steps = small(rng, 100), [40, 60], 10
    outputs, controls = data.outputs[0].copy(), data.controls[0].copy()
    outputs[60:], controls[69:] = 1e3, -50.0  # the control of the last row forecast acts on nothing in it
    before = rival.forecasts(data, origins, steps, key=1)
    after = rival.forecasts(with_rows(data, outputs, controls), origins, steps, key=1)
    for a, b in zip(before, after, strict=True):
        np.testing.assert_allclose(a.mean, b.mean, rtol=1e-9)
        np.testing.assert_allclose(a.samples, b.samples, rtol=1e-9)
        np.testing.assert_allclose(a.log_density(data.outputs[0][:steps]), b.log_density(data.outputs[0][:steps]), rtol=1e-7)
    earlier = with_rows(data, np.where(np.arange(100)[:, None] >= 40, np.nan, data.outputs[0]))
    np.testing.assert_allclose(rival.forecasts(earlier, origins, steps, key=1)[0].mean, before[0].mean, rtol=1e-6)


def test_forecast_from_a_history_is_the_forecast_from_its_end(rng, rival):
    data = small(rng, 100)
    inside = rival.forecasts(data, [60], 10, key=jax.random.key(5))[0]
    for num_rows in (10, 9):
        from_end = rival.forecast(data.rows(0, 60), 10, data.controls[0][60 : 60 + num_rows], key=jax.random.key(5))
        np.testing.assert_allclose(from_end.mean, inside.mean, rtol=1e-9)
        assert from_end.first_step == 60


def test_gaps_before_the_origin_widen_a_forecast_and_break_nothing(rng, rival):
    data = small(rng, 100)
    outputs = data.outputs[0].copy()
    outputs[50:60] = np.nan
    whole = rival.forecasts(data, [60], 5, key=1)[0]
    gappy = rival.forecasts(with_rows(data, outputs), [60], 5, key=1)[0]
    assert np.isfinite(gappy.mean).all()
    assert (gappy.standard_deviation >= whole.standard_deviation * (1 - 1e-9)).all()


def test_future_controls_are_asked_for(rng, rival):
    data = small(rng, 50)
    with pytest.raises(ValueError, match="future rows"):
        rival.forecast(data, 5, key=0)
    with pytest.raises(ValueError, match="3 rows of future controls for 5 steps"):
        rival.forecast(data, 5, np.zeros((3, 1)), key=0)
    with pytest.raises(ValueError, match="needs controls for rows that are not in the data"):
        rival.forecasts(data, [48], 5, key=0)


@pytest.mark.parametrize("name", list(KINDS))
def test_every_rival_serves_outputs_without_controls(rng, name):
    data = Dataset.from_arrays([np.sin(np.arange(80) / 3)[:, None] + 0.1 * rng.standard_normal((80, 2))])
    forecast = KINDS[name].fit(data, seed=0).forecast(data, 4, key=0)
    assert forecast.mean.shape == (4, 2)
    assert np.isfinite(forecast.log_density(np.zeros((4, 2)))).all()


def test_gp_evidence_has_the_gradient_it_says(rng):
    inputs = rng.standard_normal((30, 2))
    targets, vector = np.sin(inputs[:, 0]), prior_mean(2) + 0.2 * rng.standard_normal(5)
    gradient = negative_log_posterior(vector, inputs, targets)[1]
    for i, step in enumerate(1e-5 * np.eye(5)):
        ends = [negative_log_posterior(vector + sign * step, inputs, targets)[0] for sign in (1, -1)]
        assert gradient[i] == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-5)


def test_gp_function_draws_have_the_posterior_mean_and_variance(rng):
    inputs = rng.uniform(-2, 2, (15, 1))
    targets = np.sin(2 * inputs[:, 0]) + 0.1 * rng.standard_normal(15)
    gp = GPRegression(inputs, targets, Hyperparameters(np.log([0.8]), np.log(0.9), np.log(0.3), np.log(0.1)), 0.0)
    points = np.linspace(-3, 3, 7)[:, None]

    def kernel(a, b):
        return 0.81 * np.exp(-0.5 * ((a - b.T) / 0.8) ** 2) + 0.09 * (1 + a * b.T)

    gain = np.linalg.solve(kernel(inputs, inputs) + 0.01 * np.eye(15), kernel(inputs, points)).T
    mean, variance = gain @ targets, np.diag(kernel(points, points) - gain @ kernel(inputs, points))
    draws = gp.draws(rng, 4000, num_features=4000)(np.broadcast_to(points, (4000, 7, 1)))
    z = (draws.mean(0) - mean) / np.sqrt(variance / 4000)
    assert np.abs(z).max() < 4.5, z
    np.testing.assert_allclose(draws.var(0), variance, rtol=0.12)


def test_gp_narx_sees_a_nonlinearity_that_arx_cannot(rng):
    u, y = rng.uniform(-2, 2, (400, 1)), np.zeros((400, 1))
    for t in range(1, 400):
        y[t] = 0.5 * y[t - 1] + u[t - 1] ** 2 + 0.05 * rng.standard_normal()
    data = Dataset.from_arrays([y], [u])
    train, origins = data.rows(0, 250), list(range(260, 380, 10))
    errors = {}
    for name, fitted in {"gp_narx": GPNARX.fit(train, num_samples=40, seed=0), "arx": ARX.fit(train, seed=0)}.items():
        forecasts = fitted.forecasts(data, origins, 10, key=0)
        errors[name] = np.sqrt(np.mean([(f.mean - y[o : o + 10]) ** 2 for f, o in zip(forecasts, origins, strict=True)]))
    assert errors["gp_narx"] < 0.1 < 0.8 < errors["arx"]


def test_fit_gp_finds_the_noise(rng):
    inputs = rng.uniform(-3, 3, (150, 2))
    targets = np.sin(inputs[:, 0]) + 0.1 * rng.standard_normal(150)
    gp = fit_gp(inputs, targets)
    assert np.sqrt(gp.noise_variance) == pytest.approx(0.1, rel=0.25)
    assert gp.hyper.lengthscales[1] > gp.hyper.lengthscales[0] + 1
