"""Scores against closed forms, protocols against what they promise, standard errors against Monte Carlo."""

import json

import numpy as np
import pytest
from scipy.stats import kstest, norm

from gpssm.data import Dataset, Scaling
from gpssm.evaluate import METRICS, crps, free_run, measure, paper_window, pooled_mean, rolling_origin
from gpssm.forecasts import Forecast


class Oracle:
    """Knows the law of its data, y[t] ~ N(mean, covariance), and remembers what it was asked."""

    def __init__(self, mean, covariance):
        self.mean, self.covariance, self.asked = np.asarray(mean, float), np.asarray(covariance, float), []

    def forecast(self, history, steps, controls=None, *, key):
        return self.forecasts(history, [history.lengths[0]], steps, key=key)[0]

    def forecasts(self, data, origins, steps, *, key):
        self.asked.append((data.sequence_names, list(origins), steps))
        mean, covariance = np.tile(self.mean, (steps, 1)), np.tile(self.covariance, (steps, 1, 1))
        return [Forecast.gaussian(mean, covariance, first_step=o) for o in origins]


def white(rng, num_rows=400, scale=(2.0,), num_sequences=1):
    return Dataset.from_arrays([rng.standard_normal((num_rows, len(scale))) * scale for _ in range(num_sequences)])


def gaussian_crps(z):
    return z * (2 * norm.cdf(z) - 1) + 2 * norm.pdf(z) - 1 / np.sqrt(np.pi)


def test_crps_of_stratified_samples_is_the_gaussian_closed_form():
    outputs = np.linspace(-4, 4, 9)[:, None]
    forecast = Forecast.gaussian(np.zeros((9, 1)), np.ones((9, 1, 1)))
    got = crps(forecast.samples, outputs, forecast.is_stratified)
    np.testing.assert_allclose(got, gaussian_crps(outputs), atol=2e-3)


def test_crps_of_independent_samples_is_unbiased_and_equals_the_double_sum(rng):
    samples, outputs = rng.standard_normal((12, 5)), rng.standard_normal(5)
    pairs = np.abs(samples[:, None] - samples[None]).sum((0, 1)) / (12 * 11)
    np.testing.assert_allclose(crps(samples, outputs), np.abs(samples - outputs).mean(0) - pairs / 2)
    many = crps(rng.standard_normal((8, 40_000)), np.full(40_000, 0.7))
    z = (many.mean() - gaussian_crps(0.7)) / (many.std() / 200)
    assert abs(z) < 4, f"z = {z:.2f}"


def test_a_calibrated_forecaster_covers_what_it_says_and_its_pit_is_uniform(rng):
    data = white(rng, 1500)
    result = rolling_origin({"oracle": Oracle([0], [[4.0]])}, data, horizon=1, start=1, scaling=Scaling.of(data), key=0)
    got = result.score("oracle")
    for level in (0.5, 0.8, 0.9, 0.95):
        error = np.sqrt(level * (1 - level) / got.num_values)
        assert abs(got.values[f"coverage{100 * level:g}"] - level) < 4 * error
        assert got.standard_errors[f"coverage{100 * level:g}"] == pytest.approx(error, rel=0.25)
    assert kstest(result.pit("oracle"), "uniform").pvalue > 1e-3


def test_scores_of_a_gaussian_forecast_are_the_closed_forms(rng):
    outputs = rng.standard_normal((50, 2)) * [1.0, 5.0]
    data, oracle = Dataset.from_arrays([outputs]), Oracle([0.5, 1.0], np.diag([4.0, 9.0]))
    raw = paper_window({"oracle": oracle}, data, horizon=30, start=20, scaling=Scaling.identity(2, 0), key=0).score("oracle")
    target = outputs[20:]
    assert raw.rmse == pytest.approx(np.sqrt(np.mean((target - [0.5, 1.0]) ** 2)))
    want = -(norm(0.5, 2).logpdf(target[:, 0]) + norm(1.0, 3).logpdf(target[:, 1])).mean()
    assert raw.nlpd == pytest.approx(want)
    assert raw.nlpd_gaussian == pytest.approx(want)
    assert raw.crps == pytest.approx(np.mean(gaussian_crps((target - [0.5, 1]) / [2, 3]) * [2, 3]), abs=5e-3)
    assert raw.sharpness == pytest.approx(2 * 1.6449 * 2.5, rel=2e-3)


def test_standard_units_take_the_log_scale_off_nlpd_and_the_scale_off_the_rest(rng):
    data = white(rng, scale=(3.0, 0.2))
    scaling = Scaling.of(data)
    result = rolling_origin({"o": Oracle([0, 0], np.diag([9, 0.04]))}, data, horizon=5, start=300, scaling=scaling, key=0)
    raw, standard = result.score("o", "raw"), result.score("o")
    log_scale = np.log(scaling.output_scale).sum()
    assert standard.nlpd == pytest.approx(raw.nlpd - log_scale)
    assert standard.nlpd_gaussian == pytest.approx(raw.nlpd_gaussian - log_scale)
    assert standard.coverage90 == raw.coverage90
    for output, scale in enumerate(scaling.output_scale):
        one = [result.score("o", units, output=output) for units in ("standard", "raw")]
        for metric in ("rmse", "crps", "sharpness"):
            assert one[0].values[metric] * scale == pytest.approx(one[1].values[metric])
        assert np.isnan(one[0].nlpd)


def test_nlpd_takes_off_the_log_scale_of_the_observed_channels_only(rng):
    outputs = rng.standard_normal((40, 2)) * [3.0, 0.2]
    outputs[30::2, 1] = np.nan
    data, scaling = Dataset.from_arrays([outputs]), Scaling(np.zeros(2), np.array([3.0, 0.2]), np.zeros(0), np.ones(0))
    result = paper_window({"o": Oracle([0, 0], np.diag([9, 0.04]))}, data, horizon=10, start=30, scaling=scaling, key=0)
    want = -np.nansum(norm.logpdf(outputs[30:] / [3.0, 0.2]), axis=1).mean()
    assert result.score("o").nlpd == pytest.approx(want)


def test_missing_targets_are_skipped_and_failed_forecasts_are_not(rng):
    outputs = rng.standard_normal((60, 1))
    outputs[40:45] = np.nan
    data = Dataset.from_arrays([outputs])
    result = rolling_origin({"o": Oracle([0], [[1]])}, data, horizon=10, start=30, scaling=Scaling.identity(1, 0), key=0)
    windows = np.stack([outputs[o : o + 10] for o in range(30, 51)])
    assert result.score("o").num_values == (~np.isnan(windows)).sum()
    assert result.score("o").rmse == pytest.approx(np.sqrt(np.nanmean(windows**2)))
    nothing, noise = np.full((9, 2, 1), np.nan), np.ones((2, 1, 1))
    broken = measure(Forecast(nothing[0], nothing, _NaN(), ("y",), covariance=noise), np.zeros((2, 1)))
    assert np.isinf(broken.error).all()
    assert (broken.log_density == -np.inf).all()
    assert (broken.covered == 0).all()


class _NaN:
    def log_density(self, outputs, is_observed):
        return np.full(len(outputs), np.nan)


def test_protocols_ask_for_the_windows_they_promise(rng):
    data, oracle = white(rng, 50, num_sequences=2), Oracle([0], [[1]])
    settings = {"scaling": Scaling.of(data), "key": 0}
    assert rolling_origin({"o": oracle}, data, horizon=10, stride=7, start=[20, 45], **settings).num_windows == 3
    assert oracle.asked == [(("0",), [20, 27, 34], 10)]
    oracle.asked.clear()
    paper_window({"o": oracle}, data, horizon=30, start=20, **settings)
    assert oracle.asked == [(("0",), [20], 30), (("1",), [20], 30)]
    oracle.asked.clear()
    assert free_run({"o": oracle}, data, start=[20, 40], **settings).score("o").num_values == 40
    assert oracle.asked == [(("0",), [20], 30), (("1",), [40], 10)]
    with pytest.raises(ValueError, match="no window of 60 steps fits"):
        rolling_origin({"o": oracle}, data, horizon=60, start=0, **settings)


def test_standard_errors_respect_overlapping_windows(rng):
    """Window means of white squares over 10 rows, every row an origin: the spread over replications is the truth."""
    means, errors, naive = [], [], []
    for _ in range(300):
        square = rng.standard_normal(300) ** 2
        values = np.stack([square[o : o + 10] for o in range(291)])
        mean, error = pooled_mean(values, np.zeros(291, int), 10)
        means.append(mean)
        errors.append(error)
        naive.append(values.mean(1).std() / np.sqrt(291))
    assert np.mean(errors) == pytest.approx(np.std(means), rel=0.2)
    assert np.mean(naive) < 0.5 * np.std(means)


def test_standard_error_without_overlap_is_the_textbook_one(rng):
    values = rng.standard_normal((40, 1))
    mean, error = pooled_mean(values, np.arange(40), 1)
    assert mean == pytest.approx(values.mean())
    assert error == pytest.approx(values.std(ddof=1) / np.sqrt(40), rel=1e-3)
    assert np.isnan(pooled_mean(values[:1], np.zeros(1, int), 1)[1])


def test_json_layout_and_tables(rng):
    data = white(rng, 60, num_sequences=2)
    forecasters = {"gpssm": Oracle([0], [[4]]), "constant": Oracle([1], [[4]])}
    result = rolling_origin(forecasters, data, horizon=5, start=40, scaling=Scaling.of(data), key=0)
    tree = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert tree["horizon"] == 5
    assert tree["windows"] == 32
    for part in (tree, tree["raw"]):
        assert set(part["models"]) == {"gpssm", "constant"}
        assert {"rmse", "nlpd", "crps", "coverage90"} <= set(part["models"]["gpssm"])
        assert set(part["models"]["gpssm"]["standard_error"]) == set(METRICS)
    assert list(result.to_dataframe().index) == ["gpssm", "constant"]
    assert result.by_horizon("crps").shape == (5, 2)
    assert list(result.by_sequence().index) == ["0", "1"]
    pooled = np.sqrt((result.by_window()["gpssm"] ** 2).mean())
    assert pooled == pytest.approx(result.score("gpssm").rmse)
    assert "gpssm" in result.table("raw")
    difference, error = result.difference("gpssm", "constant", "nlpd")
    assert difference == pytest.approx(result.score("gpssm").nlpd - result.score("constant").nlpd)
    assert error > 0
