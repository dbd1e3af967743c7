"""Forecasts continue the same draw of f, come in the user's units, and refuse plans that are too short."""

import dataclasses

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pandas as pd
import pytest

from gpssm import (
    FitResult,
    FitSettings,
    InducingPosterior,
    Scaling,
    StartSettings,
    fit,
    forecast,
    load,
    posterior_states,
    save,
    transition_moments,
    unwrap,
)
from gpssm.data import Dataset
from gpssm.draws import FreshDraw, MarginalDraw
from gpssm.emissions import LinearGaussian
from gpssm.gp import SparseGP
from gpssm.initialise import FAMILIES
from gpssm.kernels import LinearKernel, SquaredExponential
from gpssm.means import LinearMean, ZeroMean
from gpssm.model import GPSSM, simulate, walk
from gpssm.posteriors.base import fresh_function


@pytest.fixture(scope="module")
def data() -> Dataset:
    rng = np.random.default_rng(0)
    controls, outputs = rng.normal(size=(2, 40, 1)), np.zeros((2, 40, 1))
    for sequence in range(2):
        state = 0.0
        for t in range(40):
            outputs[sequence, t] = 20 + 5 * state + 0.3 * rng.normal()
            state = 0.8 * np.tanh(state) + 0.5 * controls[sequence, t, 0]
    return Dataset.from_arrays(
        [outputs[0], outputs[1, :30]], [controls[0], controls[1, :30]], output_names=["temperature"], control_names=["valve"]
    )


def fitted(data: Dataset, posterior: str = "vcdt", **changes) -> FitResult:
    settings = FitSettings(num_steps=20, num_samples=4, block_steps=20, tolerance=None)
    start = StartSettings(state_dim=1, free_run=0, num_inducing=8, posterior=posterior, **changes)
    return fit(data, key=jr.key(0), settings=settings, start=start)


@pytest.fixture(scope="module")
def result(data: Dataset) -> FitResult:
    return fitted(data)


@pytest.mark.parametrize("posterior", sorted(FAMILIES))
def test_every_family_forecasts_in_the_users_units(data, posterior):
    ahead = forecast(fitted(data, posterior), 5, controls=np.zeros((5, 1)), key=jr.key(1), num_samples=64, sequence=1)
    assert ahead.samples.shape == (64, 5, 1)
    assert ahead.first_step == 30
    assert ahead.output_names == ("temperature",)
    assert 5 < ahead.mean.mean() < 35
    assert np.isfinite(ahead.log_density(np.full((5, 1), 20.0))).all()
    assert list(ahead.to_dataframe().columns[:2]) == ["step", "output"]


def test_forecast_is_repeatable_and_key_dependent(result):
    options = {"controls": np.zeros((3, 1)), "num_samples": 32}
    first, second = (forecast(result, 3, key=jr.key(1), **options) for _ in range(2))
    np.testing.assert_array_equal(first.samples, second.samples)
    assert not np.array_equal(first.samples, forecast(result, 3, key=jr.key(2), **options).samples)


def test_uncertainty_about_f_compounds_when_the_draw_is_kept():
    """f(x) = w x with w ~ N(0.9, 0.2²): kept, x_t = w^t x_1; drawn afresh at every step the spread is far smaller."""
    gp = SparseGP(LinearKernel([0.04]), LinearMean([[0.9]], [0.0]), np.array([[1.0]]), 1)
    model = unwrap(GPSSM(gp, LinearGaussian([[1.0]], [0.0], [0.1]), [1e-4]))
    q, controls, first = unwrap(InducingPosterior.prior(1, 1)), jnp.zeros((8, 0)), jnp.ones(1)

    def path(key: jax.Array, is_kept: bool) -> jax.Array:
        key_draw, key_walk = jr.split(key)
        if is_kept:
            draw, memory = fresh_function(model, q, 8, None, key=key_draw)
        else:
            draw, memory = FreshDraw(MarginalDraw(model.transition.basis(), model.transition.mean, q)), None
        return walk(draw, memory, first, controls, model.process_scale, key=key_walk)[:, 0]

    keys = jr.split(jr.key(0), 4000)
    kept, fresh = (np.asarray(jax.vmap(lambda key, k=k: path(key, k))(keys)) for k in (True, False))
    slopes = 0.9 + 0.2 * np.random.default_rng(0).normal(size=200_000)
    np.testing.assert_allclose(kept[:, -1].mean(), np.mean(slopes**8), rtol=0.15)
    np.testing.assert_allclose(np.quantile(kept[:, -1], [0.1, 0.5, 0.9]), np.quantile(slopes**8, [0.1, 0.5, 0.9]), rtol=0.12)
    assert kept[:, -1].std() > 1.5 * fresh[:, -1].std()


def test_long_and_short_horizons_agree_where_they_overlap(result):
    """Exact continuation of f against the one made of random features."""
    controls = np.random.default_rng(5).normal(size=(10, 1))
    options = {"controls": controls, "key": jr.key(4), "num_samples": 4000}
    exact, pathwise = forecast(result, 10, **options), forecast(result, 10, num_frequencies=512, **options)
    error = np.hypot(exact.samples.std(axis=0), pathwise.samples.std(axis=0)) / np.sqrt(4000)
    z = (exact.samples.mean(axis=0) - pathwise.samples.mean(axis=0)) / error
    assert np.max(np.abs(z)) < 4.5, z
    ratio = exact.samples.std(axis=0) / pathwise.samples.std(axis=0)
    np.testing.assert_allclose(ratio, 1, atol=0.1)


def test_forecast_from_the_end_starts_where_the_posterior_ends(data, result):
    """The mean of the first step is that of C f(x_T, c_T) + d over the posterior of x_T, in the user's units."""
    states = posterior_states(result, key=jr.key(7), num_samples=4000)[:, -1]
    control = result.scaling.controls(data.controls[0][-1:])
    mean, _ = transition_moments(result, np.hstack([states, np.broadcast_to(control, (len(states), 1))]))
    emission = unwrap(result.model.emission)
    expected = result.scaling.outputs_back(mean @ np.asarray(emission.matrix).T + np.asarray(emission.offset)).mean(axis=0)
    ahead = forecast(result, 1, key=jr.key(8), num_samples=4000)
    error = ahead.samples.std(axis=0)[0] / np.sqrt(2000)
    assert abs(ahead.mean[0] - expected) < 4.5 * error


def test_controls_matter_and_the_last_row_does_not(result):
    low, high = np.zeros((4, 1)), np.zeros((4, 1))
    high[0] = 3.0
    late = low.copy()
    late[-1] = 3.0
    base, moved, same = (forecast(result, 4, controls=c, key=jr.key(1), num_samples=64) for c in (low, high, late))
    np.testing.assert_array_equal(base.samples, same.samples)
    np.testing.assert_array_equal(base.samples[:, 0], moved.samples[:, 0])  # row 0 follows the data: it acts after step 1
    assert moved.mean[1] > base.mean[1] + 1


def test_forecast_from_a_given_state_starts_with_the_control_that_acts_on_it(result):
    """The mean of the first step is that of C f(x, c) + d at this state and this control."""
    state, control = np.array([0.4]), np.array([[1.5]])
    mean, _ = transition_moments(result, np.hstack([state[None], result.scaling.controls(control)]))
    emission = unwrap(result.model.emission)
    expected = result.scaling.outputs_back(mean[0] @ np.asarray(emission.matrix).T + np.asarray(emission.offset))
    options = {"key": jr.key(8), "num_samples": 4000, "initial_state": state}
    ahead = forecast(result, 1, controls=control, **options)
    assert abs(ahead.mean[0] - expected) < 4.5 * ahead.samples.std(axis=0)[0] / np.sqrt(4000)
    table = pd.DataFrame({"other": [9.0], "valve": control[:, 0]})
    np.testing.assert_array_equal(forecast(result, 1, controls=table, **options).samples, ahead.samples)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "at least one step"),
        ({"steps": 5}, "but got none"),
        ({"steps": 5, "controls": np.zeros((3, 1))}, "next 4 rows"),
        ({"steps": 5, "controls": np.zeros((5, 2))}, "1 controls"),
        ({"steps": 3, "controls": np.array([[0.0], [np.nan], [0.0]])}, "must be finite"),
        ({"steps": 1, "sequence": 7}, "sequence=7"),
        ({"steps": 1, "initial_state": np.zeros(3)}, "initial state"),
        ({"steps": 1, "initial_state": np.array([np.nan]), "controls": np.zeros((1, 1))}, "initial state must be finite"),
        ({"steps": 2, "initial_state": np.zeros(1), "controls": np.zeros((1, 1))}, "next 2 rows"),
        ({"steps": 1, "num_samples": 0}, "num_samples=0"),
        ({"steps": 1, "num_frequencies": 0}, "num_frequencies=0"),
        ({"steps": 2, "controls": pd.DataFrame({"tap": [0.0, 0.0]})}, "must have the columns valve"),
    ],
)
def test_impossible_forecasts_are_refused(result, options, message):
    with pytest.raises(ValueError, match=message):
        forecast(result, key=jr.key(0), **options)


def test_saved_result_forecasts_the_same(result, tmp_path):
    save(tmp_path / "run", result)
    again = load(tmp_path / "run")
    options = {"controls": np.zeros((3, 1)), "key": jr.key(1), "num_samples": 16}
    np.testing.assert_array_equal(forecast(again, 3, **options).samples, forecast(result, 3, **options).samples)
    assert again.status is result.status
    assert again.data == result.data


def test_prior_simulation_has_the_priors_spread():
    """x_2 = f(x_1) + noise with a zero-mean GP: variance k + Q at a fixed x_1, drawn exactly and from features."""
    gp = SparseGP(SquaredExponential([1.0], 2.0), ZeroMean(1), np.linspace(-1, 1, 3)[:, None], 1)
    model = GPSSM(gp, LinearGaussian([[1.0]], [0.0], [0.1]), [0.5])
    for num_frequencies in (None, 32):
        paths = jax.vmap(
            lambda key, n=num_frequencies: simulate(model, 2, key=key, initial_state=jnp.zeros(1), num_frequencies=n).states
        )(jr.split(jr.key(0), 4000))
        assert np.var(paths[:, 1]) == pytest.approx(2.25, rel=0.1)


def test_simulate_checks_its_controls(result):
    with pytest.raises(ValueError, match="1 controls"):
        simulate(result.model, 5, key=jr.key(0))


def test_scaling_identity_keeps_the_models_units(data):
    settings = FitSettings(num_steps=5, num_samples=2, block_steps=5, tolerance=None)
    result = fit(
        data,
        key=jr.key(0),
        settings=settings,
        scaling=Scaling.identity(1, 1),
        start=StartSettings(state_dim=1, free_run=0, num_inducing=4),
    )
    assert 5 < forecast(result, 1, key=jr.key(0), num_samples=16).mean[0, 0] < 35
    assert dataclasses.asdict(settings) == result.settings
