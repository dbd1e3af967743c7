import jax.random as jr
import numpy as np
import pytest
from scipy.optimize import minimize

from gpssm.baselines import Constant, LastValue
from gpssm.datasets import kink
from gpssm.ensemble import Ensemble, mixture, stacking_weights
from gpssm.evaluate import Forecaster


def objective(weights, log_densities):
    return np.mean(np.log(np.exp(log_densities).T @ weights))


def grid_of_weights(parts):
    steps = np.arange(parts + 1)
    return [np.array([i, j, parts - i - j]) / parts for i in steps for j in steps if i + j <= parts]


def test_stacking_finds_the_weights_that_brute_force_finds(rng):
    log_densities = rng.normal(size=(3, 60)) + np.array([0.0, 0.3, -1.5])[:, None]
    weights = stacking_weights(log_densities)
    tried = {tuple(w): objective(w, log_densities) for w in grid_of_weights(100)}
    best = max(tried, key=lambda w: tried[w])
    assert objective(weights, log_densities) >= tried[best] - 1e-6
    np.testing.assert_allclose(weights, best, atol=0.02)


def test_stacking_agrees_with_a_constrained_optimiser(rng):
    log_densities = 2 * rng.normal(size=(5, 40))
    weights = stacking_weights(log_densities)
    found = minimize(
        lambda w: -objective(w, log_densities),
        np.full(5, 0.2),
        bounds=[(0, 1)] * 5,
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1},
        tol=1e-12,
    )
    assert objective(weights, log_densities) == pytest.approx(-found.fun, abs=2e-3)


def test_stacking_of_one_model_or_of_none_that_is_better_is_plain(rng):
    one = rng.normal(size=(1, 20))
    np.testing.assert_array_equal(stacking_weights(one), [1.0])
    np.testing.assert_allclose(stacking_weights(np.repeat(one, 2, axis=0)), [0.5, 0.5])
    np.testing.assert_allclose(stacking_weights(np.full((2, 5), np.nan)), [0.5, 0.5])


def test_a_model_that_calls_the_outcomes_impossible_gets_no_weight(rng):
    log_densities = rng.normal(size=(2, 20))
    log_densities[1] = -np.inf
    np.testing.assert_array_equal(stacking_weights(log_densities), [1.0, 0.0])


def test_missing_outcomes_do_not_move_the_weights(rng):
    log_densities = rng.normal(size=(3, 30))
    with_gaps = np.insert(log_densities, [3, 17], np.nan, axis=1)
    np.testing.assert_array_equal(stacking_weights(with_gaps), stacking_weights(log_densities))


def test_an_outlier_so_unlikely_that_its_density_underflows_still_counts(rng):
    log_densities = rng.normal(size=(2, 10))
    log_densities[:, 0] = [-2000.0, -1900.0]
    weights = stacking_weights(log_densities)
    assert np.isfinite(weights).all()
    assert weights[1] > 0


@pytest.fixture(scope="module")
def data():
    return kink(40, seed=2).dataset


@pytest.fixture(scope="module")
def members(data):
    train, _ = data.split(0.75)
    return Constant.fit(train, seed=0), LastValue.fit(train, seed=0)


def test_an_ensemble_forecasts_the_mixture_of_its_members(data, members):
    ensemble = Ensemble(members, np.array([0.3, 0.7]))
    assert isinstance(ensemble, Forecaster)
    history = data.rows(0, 30)
    made = ensemble.forecast(history, 4, key=jr.key(0))
    first, second = (member.forecast(history, 4, key=jr.key(0)) for member in members)
    np.testing.assert_allclose(made.mean, 0.3 * first.mean + 0.7 * second.mean)
    outcomes = data.outputs[0][30:34]
    densities = [np.exp(f.log_density(outcomes)) for f in (first, second)]
    np.testing.assert_allclose(made.log_density(outcomes), np.log(0.3 * densities[0] + 0.7 * densities[1]))
    share = len([s for s in made.samples if any(np.array_equal(s, other) for other in second.samples)]) / len(made.samples)
    assert share == pytest.approx(0.7, abs=0.01)


def test_the_mixtures_covariance_is_that_of_many_draws(data, members):
    history = data.rows(0, 30)
    parts = [member.forecast(history, 3, key=jr.key(0)) for member in members]
    mixed = mixture(parts, np.array([0.5, 0.5]))
    variances = mixed.moments()[1][:, 0, 0]
    drawn = mixed.samples[:, :, 0].var(axis=0)
    np.testing.assert_allclose(variances, drawn, rtol=0.1)


def test_a_member_without_weight_is_never_asked(data, members):
    class Refuses:
        def forecast(self, history, steps, controls=None, *, key):
            raise AssertionError("asked")

        def forecasts(self, data, origins, steps, *, key):
            raise AssertionError("asked")

    ensemble = Ensemble((members[0], Refuses()), np.array([1.0, 0.0]))
    alone = members[0].forecast(data, 2, key=jr.key(0))
    np.testing.assert_array_equal(ensemble.forecast(data, 2, key=jr.key(0)).mean, alone.mean)


@pytest.mark.parametrize("weights", [[0.5], [0.5, 0.6], [-0.5, 1.5], [np.nan, 1.0]])
def test_weights_that_are_none_are_refused(members, weights):
    with pytest.raises(ValueError, match="as many weights, none negative, that add up to 1"):
        Ensemble(members, np.array(weights))
