"""What is said of a fit: how curved its dynamics are, and whether its bands can be believed."""

import dataclasses

import jax.random as jr
import numpy as np
import pytest

from gpssm import findings
from gpssm.data import Dataset, Scaling
from gpssm.fit import INITIALISATION
from gpssm.initialise import StartSettings, initialise
from gpssm.result import FitResult, History, Status


@pytest.fixture(scope="module")
def result():
    """A model of one state as it stands before any step."""
    rng = np.random.default_rng(0)
    y = np.zeros(60)
    for t in range(59):
        y[t + 1] = 0.9 * y[t] + 0.3 * rng.normal()
    data = Dataset.from_arrays(y + 0.1 * rng.normal(size=60))
    start = initialise(data, key=jr.key(INITIALISATION), settings=StartSettings(state_dim=1, num_inducing=5))
    history = History.empty(1)
    return FitResult(start.model, start.posterior, Scaling.of(data), data, history, Status.MAX_STEPS, {}, 0)


def found_with(result, monkeypatch, function):
    """The findings if f were that function, over states from -2 to 2."""
    points = np.linspace(-2, 2, 201)[:, None]
    monkeypatch.setattr(findings, "visited_inputs", lambda *_, **__: points)
    monkeypatch.setattr(findings, "transition_moments", lambda _, x: (function(x), np.full_like(x, 1e-4)))
    return findings.find(result, key=jr.key(0))


def test_a_plant_that_moves_slowly_is_as_curved_as_one_that_moves_fast(result, monkeypatch):
    slow, fast = (found_with(result, monkeypatch, lambda x, r=rate: x + r * (np.cos(x) - x)) for rate in (0.01, 0.5))
    assert np.isclose(slow.nonlinear_share, fast.nonlinear_share)
    assert 0.05 < slow.nonlinear_share < 0.5
    assert "clearly non-linear" in slow.sentences()[1] or "strongly non-linear" in slow.sentences()[1]


@pytest.mark.parametrize("slope", [1.0, 0.98, -0.7])
def test_linear_dynamics_are_told_to_be_linear(result, monkeypatch, slope):
    found = found_with(result, monkeypatch, lambda x: slope * x)
    assert found.nonlinear_share < 1e-9
    assert "practically linear" in found.sentences()[1]


@pytest.mark.parametrize(
    ("held", "error", "said"),
    [
        (0.53, 0.15, "too narrow"),
        (0.97, 0.01, "wider than they need be"),
        (0.87, 0.001, "can be believed"),
        (0.78, 0.08, "can be believed"),  # so few windows do not tell it from 90 %
        (0.78, None, "too narrow"),
    ],
)
def test_bands_are_judged_by_what_they_held(result, monkeypatch, held, error, said):
    found = found_with(result, monkeypatch, lambda x: 0.9 * x)
    assert len(found.sentences()) == 3  # nothing was held out
    told = dataclasses.replace(found, coverage90=held, coverage90_error=error).sentences()[-1]
    assert said in told
    assert f"{100 * held:.0f} %" in told
