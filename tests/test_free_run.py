"""f learns to bridge stretches of the data alone, and the fit goes on from there in the family that was asked for."""

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from gpssm.data import Dataset, Scaling
from gpssm.elbo import elbo
from gpssm.fit import free_run
from gpssm.free_run import posterior_after, stretches
from gpssm.initialise import FAMILIES, StartSettings, initialise
from gpssm.params import unwrap
from gpssm.posteriors import FilteringSteps, FreeSteps, PriorSteps

START = StartSettings(state_dim=1, num_inducing=6, free_run=8, free_run_steps=150)


@pytest.fixture(scope="module")
def data() -> Dataset:
    """x' = tanh(2 x + u) + noise, seen through noise, in two sequences with a gap."""
    rng, outputs, controls = np.random.default_rng(0), [], []
    for length in (60, 21):
        u, x = rng.uniform(-1, 1, length), np.zeros(length)
        for t in range(length - 1):
            x[t + 1] = np.tanh(2 * x[t] + u[t]) + 0.02 * rng.standard_normal()
        outputs.append(x + 0.05 * rng.standard_normal(length))
        controls.append(u)
    outputs[0][20:24] = np.nan
    return Dataset.from_arrays(outputs, controls)


@pytest.fixture(scope="module")
def started(data):
    return initialise(data, key=jr.key(0), scaling=Scaling.of(data), settings=START)


def test_stretches_overlap_and_cover_every_row(data, started):
    cut, _, posterior = stretches(data, started, 8)
    assert set(cut.lengths) == {8}
    for y in data.outputs:
        rows = {value for piece in cut.outputs for value in piece[:, 0] if np.isfinite(value)}
        assert set(y[np.isfinite(y[:, 0]), 0]) <= rows
    assert unwrap(posterior.local.initial_mean).shape == (cut.num_sequences, 1)


def test_a_stretch_longer_than_a_sequence_is_the_sequence(data, started):
    cut, _, _ = stretches(data, started, 30)
    assert sorted(set(cut.lengths)) == [21, 30]


def test_free_run_bends_f_towards_the_truth(data, started):
    scaling = Scaling.of(data)
    model, posterior = free_run(data, started, START, key=jr.key(1), scaling=scaling)
    cut, before, bridging = stretches(data, started, 8)
    windows = cut.windows(scaling)

    def bound(model, inducing) -> float:
        told = elbo(model, type(bridging)(inducing, bridging.local), windows, key=jr.key(2), num_samples=16)
        return float(told.total)

    assert bound(model, posterior.inducing) > bound(before, started.posterior.inducing) + 50


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_goes_on_from_a_free_run(data, started, family):
    settings = StartSettings(state_dim=1, num_inducing=6, posterior=family)
    posterior = posterior_after(started, settings, started.model, started.posterior.inducing, data.windows(Scaling.of(data)))
    assert type(posterior) is FAMILIES[family]
    kind = PriorSteps if family.startswith("pr-ssm") else FreeSteps
    assert isinstance(posterior.local, kind)
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in (unwrap(posterior.local.initial_mean), unwrap(posterior.inducing.mean)))


def test_the_steps_asked_for_follow_a_free_run(data, started):
    windows = data.windows(Scaling.of(data))

    def local(**changes):
        settings = StartSettings(state_dim=1, num_inducing=6, **changes)
        return posterior_after(started, settings, started.model, started.posterior.inducing, windows).local

    assert isinstance(local(local="filtering"), FilteringSteps)
    assert isinstance(local(local="prior"), PriorSteps)
    assert local(cut_every=5, posterior="f-dependent").cut_every == 5
    assert unwrap(local(local="free-diagonal").gain).ndim == 3


def test_no_free_run_leaves_the_start(data, started):
    settings = StartSettings(state_dim=1, num_inducing=6, free_run=0)
    model, posterior = free_run(data, started, settings, key=jr.key(1), scaling=Scaling.of(data))
    assert model is started.model
    assert posterior is started.posterior


@pytest.mark.parametrize("changes", [{"free_run": 1}, {"free_run": -3}, {"free_run_steps": 0}])
def test_bad_settings_of_a_free_run_are_told(changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        StartSettings(**changes)
