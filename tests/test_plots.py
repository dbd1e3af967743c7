import jax.random as jr
import matplotlib.pyplot as plt
import numpy as np
import pytest

from gpssm import baselines, plots
from gpssm.commands.kink_start import start
from gpssm.data import Dataset
from gpssm.datasets import kink
from gpssm.evaluate import rolling_origin
from gpssm.fit import FitSettings, fit
from gpssm.forecasts import Forecast
from gpssm.initialise import StartSettings


@pytest.fixture(autouse=True)
def _close():
    yield
    plt.close("all")


@pytest.fixture(scope="module")
def simulation():
    return kink(40, observation_variance=0.1, seed=1)


@pytest.fixture(scope="module")
def result(simulation):
    train = simulation.dataset.rows(0, 30)
    model, posterior = start(train, StartSettings(state_dim=1, free_run=0, num_inducing=6), key=jr.key(0))
    settings = FitSettings(num_steps=4, num_samples=2, block_steps=2)
    return fit(train, model, posterior, key=jr.key(1), settings=settings)


@pytest.fixture(scope="module")
def evaluation(simulation):
    data = simulation.dataset
    rivals = {"constant": baselines.Constant.fit(data.rows(0, 30)), "last": baselines.LastValue.fit(data.rows(0, 30))}
    scaling = rivals["constant"].scaling
    return rolling_origin(rivals, data, horizon=4, start=30, scaling=scaling, key=jr.key(0))


def drawn(figure):
    figure.canvas.draw()
    return [axes for axes in figure.axes if axes.get_visible()]


def test_a_fan_has_bands_a_mean_and_what_happened():
    rng = np.random.default_rng(0)
    forecast = Forecast.gaussian(rng.normal(size=(8, 2)), np.tile(np.eye(2), (8, 1, 1)), first_step=20, output_names=("a", "b"))
    data = Dataset.from_arrays(rng.normal(size=(28, 2)), output_names=("a", "b"))
    panels = drawn(plots.fan(forecast, data.rows(20), history=data.rows(0, 20)))
    assert [panel.get_ylabel() for panel in panels] == ["a", "b"]
    assert all(len(panel.collections) == 2 for panel in panels)
    past, _, seen = (line.get_xdata() for line in panels[0].lines[1:])
    assert max(past) < 20.5
    assert list(seen) == list(range(20, 28))


def test_figures_of_a_fit(result, simulation):
    assert len(drawn(plots.states(result, key=jr.key(0)))) == 1
    assert len(drawn(plots.bound(result))) == 2
    assert len(drawn(plots.learned_function(result, key=jr.key(0), truth=simulation.transition))) == 1
    panels = drawn(plots.kink_triptych({"one": result, "two": result, "three": result}, key=jr.key(0)))
    assert [panel.get_title(loc="left") for panel in panels] == ["one", "two", "three"]


def test_figures_of_scores(evaluation):
    assert len(drawn(plots.horizon(evaluation, "crps"))) == 1
    left, right = drawn(plots.calibration(evaluation, "last"))
    assert right.get_title(loc="left") == "PIT of last"
    assert len(left.lines) == 3


def test_figures_are_drawn_into_given_axes(result):
    figure, axes = plt.subplots(1, 2)
    assert plots.bound(result, axes=axes) is figure
    with pytest.raises(ValueError, match="2 panels"):
        plots.bound(result, axes=axes[:1])
