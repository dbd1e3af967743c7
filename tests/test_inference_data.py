"""What ArviZ gets: the groups and axes it expects, samples that belong together, in the units that are promised."""

import importlib.metadata

import jax.random as jr
import numpy as np
import pytest
import xarray

import gpssm
from gpssm import Dataset, FitSettings, StartSettings, fit, forecast, posterior_states, to_inference_data, transition_moments
from gpssm.inference_data import groups_of
from gpssm.initialise import FAMILIES

NUM_SAMPLES = 400


@pytest.fixture(scope="module")
def data() -> Dataset:
    rng = np.random.default_rng(0)
    controls, outputs, state = rng.normal(size=(40, 1)), np.zeros((40, 1)), 0.0
    for t in range(40):
        outputs[t] = 20 + 5 * state + 0.3 * rng.normal()
        state = 0.8 * np.tanh(state) + 0.5 * controls[t, 0]
    outputs[7] = np.nan
    return Dataset.from_arrays(
        [outputs, outputs[:25]], [controls, controls[:25]], output_names=["level"], control_names=["valve"], sampling_time=0.5
    )


def fitted(data: Dataset, posterior: str, **more) -> gpssm.FitResult:
    start = StartSettings(state_dim=1, free_run=0, num_inducing=5, posterior=posterior, **more)
    settings = FitSettings(num_steps=4, num_samples=2, block_steps=4, tolerance=None)
    return fit(data, key=jr.key(0), settings=settings, start=start)


@pytest.fixture(scope="module")
def result(data) -> gpssm.FitResult:
    return fitted(data, "vcdt")


@pytest.fixture(scope="module")
def groups(result):
    ahead = forecast(result, 3, controls=np.zeros((3, 1)), key=jr.key(1), num_samples=50, sequence=1)
    return groups_of(result, key=jr.key(2), num_samples=NUM_SAMPLES, sequence=1, forecast=ahead)


def test_every_group_has_the_axes_that_it_promises(groups, data):
    sizes = {name: {variable: dict(a.sizes) for variable, a in group.items()} for name, group in groups.items()}
    sample = {"chain": 1, "draw": NUM_SAMPLES}
    assert sizes == {
        "posterior": {"states": {**sample, "time": 25, "state": 1}, "f": {**sample, "inducing": 5, "state": 1}},
        "posterior_predictive": {"outputs": {**sample, "time": 25, "output": 1}},
        "observed_data": {"outputs": {"time": 25, "output": 1}},
        "constant_data": {
            "controls": {"time": 25, "control": 1},
            "process_scale": {"state": 1},
            "inducing_inputs": {"inducing": 5, "input": 2},
            "observation_scale": {"output": 1},
        },
        "predictions": {"outputs": {"chain": 1, "draw": 50, "step": 3, "output": 1}},
    }
    assert list(groups["observed_data"].output.values) == ["level"]
    assert list(groups["constant_data"].input.values) == ["x1", "valve"]
    assert groups["observed_data"].time.values[-1] == 12.0
    assert list(groups["predictions"].step.values) == [25, 26, 27]
    assert np.array_equal(groups["observed_data"].outputs.values, data.outputs[1], equal_nan=True)


def test_samples_are_those_of_the_posterior(groups, result):
    states = groups["posterior"].states.values[0]
    others = posterior_states(result, key=jr.key(5), num_samples=NUM_SAMPLES, sequence=1)
    error = np.sqrt((states.var(0) + others.var(0)) / NUM_SAMPLES)
    assert np.abs((states.mean(0) - others.mean(0)) / error).max() < 4.5
    values = groups["posterior"].f.values[0]
    mean, variance = transition_moments(result, groups["constant_data"].inducing_inputs.values)
    assert np.abs((values.mean(0) - mean) / np.sqrt(variance / NUM_SAMPLES)).max() < 4.5
    assert np.abs(values.var(0) / variance - 1).max() < 4.5 * np.sqrt(2 / NUM_SAMPLES)


def test_outputs_and_noise_come_in_the_users_units(groups, result):
    replicates = groups["posterior_predictive"].outputs.values[0]
    seen = groups["observed_data"].outputs.values
    assert 10 < replicates.mean() < 30
    inside = np.abs(replicates.mean(0) - seen) < 4 * replicates.std(0)
    assert inside[np.isfinite(seen)].all()
    noise = gpssm.unwrap(result.model.emission).chol_noise * result.scaling.output_scale
    assert groups["constant_data"].observation_scale.values == pytest.approx(np.asarray(noise))


@pytest.mark.slow
@pytest.mark.parametrize("posterior", sorted(FAMILIES))
def test_the_f_that_each_family_goes_on_with_has_the_law_of_its_posterior(data, posterior):
    found = fitted(data, posterior)
    values = groups_of(found, key=jr.key(2), num_samples=NUM_SAMPLES, sequence=0)["posterior"].f.values[0]
    inputs = np.asarray(gpssm.unwrap(found.model).transition.inducing_inputs).reshape(-1, 2)
    mean, variance = transition_moments(found, inputs)
    assert np.abs((values.mean(0) - mean) / np.sqrt(variance / NUM_SAMPLES)).max() < 4.5


def test_the_container_is_what_the_installed_arviz_takes(result, groups):
    made = to_inference_data(result, key=jr.key(2), num_samples=20)
    assert type(made).__name__ == ("DataTree" if importlib.metadata.version("arviz") >= "1" else "InferenceData")
    assert made["posterior"]["states"].sizes["draw"] == 20
    arviz = pytest.importorskip("arviz")
    summary = arviz.summary(made, var_names=["f"])
    assert len(summary) == 5
    tree = xarray.DataTree.from_dict(groups)
    assert set(tree.children) == set(groups)


def test_later_releases_of_arviz_get_a_tree(result, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.3.0")
    made = to_inference_data(result, key=jr.key(2), num_samples=20)
    assert isinstance(made, xarray.DataTree)
    assert made["posterior/states"].dims == ("chain", "draw", "time", "state")


def test_without_arviz_it_is_said_how_to_get_it(result, monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(ImportError, match=r"pip install 'gpssm\[arviz\]'"):
        to_inference_data(result, key=jr.key(0))


def test_what_is_not_there_is_told(result):
    with pytest.raises(ValueError, match="There are 2 training sequences"):
        to_inference_data(result, key=jr.key(0), sequence=2)
    with pytest.raises(ValueError, match="num_samples"):
        to_inference_data(result, key=jr.key(0), num_samples=0)
