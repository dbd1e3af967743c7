"""Fitting: it climbs, stops, reports, resumes and repeats, and says what is wrong before it starts."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import cases
from cases import Case
from gpssm import FitSettings, Frozen, InducingPosterior, Positive, Scaling, StartSettings, Status, fit, fix, unwrap
from gpssm.data import Dataset
from gpssm.emissions import LinearGaussian
from gpssm.fit import _run_steps, learning_rate, natural_step
from gpssm.gp import SparseGP
from gpssm.kernels import SquaredExponential
from gpssm.means import ZeroMean
from gpssm.model import GPSSM
from gpssm.posteriors import VCDT, FilteringSteps, FreeSteps, free_steps_from
from gpssm.simulators import kink

QUICK = FitSettings(num_steps=40, num_samples=4, block_steps=20, tolerance=None)


@pytest.fixture(scope="module")
def data() -> Dataset:
    return kink(num_steps=20, process_scale=0.05, observation_variance=0.04, seed=1).dataset


@pytest.fixture(scope="module")
def start(data: Dataset) -> tuple[GPSSM, VCDT]:
    inputs = data.outputs[0][::3]
    transition = SparseGP(SquaredExponential([1.0]), ZeroMean(1), inputs, 1)
    model = GPSSM(transition, LinearGaussian([[1.0]], [0.0], [0.2]), [0.5])
    steps = free_steps_from(FilteringSteps(), model, data.windows(Scaling.identity(1, 0)))
    return model, VCDT(InducingPosterior.prior(1, len(inputs)), steps)


def run(data: Dataset, start: tuple, **changes):
    options = {"key": jr.key(0), "scaling": Scaling.identity(1, 0), "settings": QUICK} | changes
    return fit(data, *start, **options)


def same(left, right) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True))


def test_bound_rises_and_the_same_seed_gives_the_same_result(data, start):
    first, second = run(data, start), run(data, start)
    assert first.history.bound[-1] > first.history.bound[0] + 1
    assert same(first.model, second.model)
    assert same(first.posterior, second.posterior)
    assert not same(first.model, run(data, start, key=jr.key(1)).model)


def test_one_program_serves_all_blocks_and_a_last_one_that_is_shorter(data, start):
    before = _run_steps._cached._cache_size()
    result = run(data, start, settings=dataclasses.replace(QUICK, num_steps=50, num_samples=3))
    assert _run_steps._cached._cache_size() == before + 1
    assert result.history.steps.tolist() == [20, 40, 50]
    assert np.all(np.isfinite(result.history.bound))


def test_resumed_fit_continues_bit_for_bit(data, start, tmp_path):
    class Stop(Exception):
        pass

    def interrupt(history):
        if history.steps[-1] == 20:
            raise Stop

    settings = dataclasses.replace(QUICK, num_steps=60)
    whole = run(data, start, settings=settings)
    with pytest.raises(Stop):
        run(data, start, settings=settings, checkpoint=tmp_path / "state", progress=interrupt)
    resumed = run(data, start, settings=settings, checkpoint=tmp_path / "state", resume=True)
    assert same(whole.model, resumed.model)
    assert same(whole.posterior, resumed.posterior)
    np.testing.assert_array_equal(whole.history.bound, resumed.history.bound)


def test_resuming_another_fit_is_refused(data, start, tmp_path):
    run(data, start, checkpoint=tmp_path / "state")
    with pytest.raises(ValueError, match="belongs to another fit"):
        run(data, start, checkpoint=tmp_path / "state", resume=True, key=jr.key(5))
    with pytest.raises(ValueError, match="give the folder of a checkpoint"):
        run(data, start, checkpoint=tmp_path / "nothing", resume=True)


def test_keyboard_interrupt_keeps_the_last_good_parameters(data, start, monkeypatch):
    calls = []

    def interrupted(self, state):
        if calls:
            raise KeyboardInterrupt
        calls.append(1)
        return original(self, state)

    import importlib

    module = importlib.import_module("gpssm.fit")
    original = module._Blocks.block
    monkeypatch.setattr(module._Blocks, "block", interrupted)
    result = run(data, start)
    assert result.status is Status.INTERRUPTED
    assert len(result.history.bound) == 1


def test_stops_when_the_smoothed_bound_no_longer_improves(data, start):
    settings = dataclasses.replace(QUICK, num_steps=4000, block_steps=10, tolerance=10.0, patience=2)
    result = run(data, start, settings=settings)
    assert result.status is Status.CONVERGED
    assert result.history.steps[-1] == 40


def test_numerical_failure_is_a_status_and_keeps_good_parameters(data, start):
    model, posterior = start
    broken = eqx.tree_at(lambda m: m.transition.jitter, model, Frozen(jnp.array(-2.0)))
    broken = eqx.tree_at(lambda m: m.transition.inducing_inputs, broken, jnp.full((7, 1), jnp.inf))
    result = run(data, (broken, posterior))
    assert result.status is Status.NONFINITE
    assert result.num_skipped >= 20
    assert same(unwrap(result.posterior.inducing), unwrap(posterior.inducing))


def test_frozen_parameters_do_not_move(data, start):
    model, posterior = start
    result = run(data, (fix(model, lambda m: m.emission), posterior))
    assert same(unwrap(result.model.emission), unwrap(model.emission))
    assert not same(unwrap(result.model.process_scale), unwrap(model.process_scale))


def test_natural_gradients_climb_faster_than_adam_from_the_prior(data, start):
    settings = dataclasses.replace(QUICK, num_samples=16, num_steps=60)
    adam = run(data, start, settings=settings)
    natural = run(data, start, settings=dataclasses.replace(settings, natural_gradient=0.2))
    assert natural.history.bound[0] > adam.history.bound[0]
    assert np.isfinite(natural.bound)


def test_natural_gradients_leave_the_divergence_of_a_gp_in_the_emission_to_adam():
    """Next to nothing is seen, so that the divergence alone decides where q(h) goes: to its prior."""
    model, posterior, _ = Case("vcdt", "prior", emission="sparse gp").build()
    model = eqx.tree_at(lambda m: m.emission.scale, model, Frozen(jnp.full(2, 1e3)), is_leaf=lambda x: isinstance(x, Positive))
    settings = FitSettings(num_steps=60, num_samples=2, learning_rate=0.1, natural_gradient=0.5, tolerance=None)
    result = fit(cases.dataset(), model, posterior, key=jr.key(0), scaling=Scaling.identity(2, 1), settings=settings)
    assert unwrap(result.model.emission).kl() < 0.2 * unwrap(model.emission).kl()
    assert unwrap(result.posterior.inducing).kl() < 0.2 * unwrap(posterior.inducing).kl()


def test_batches_of_a_fit_estimate_the_bound_of_all_sequences_without_bias():
    """Sequences of six and four steps, one at a time, at parameters that stay where they are."""
    model, posterior, _ = Case("vcdt", "free").build()
    still = FitSettings(num_steps=1000, num_samples=1, scheme="plain", learning_rate=1e-12, block_steps=20, tolerance=None)
    bounds = []
    for batch_size in (None, 1):
        settings = dataclasses.replace(still, batch_size=batch_size)
        result = fit(cases.dataset(), model, posterior, key=jr.key(3), scaling=Scaling.identity(2, 1), settings=settings)
        bounds.append(result.history.bound)
    error = np.hypot(*(np.std(b) / np.sqrt(len(b)) for b in bounds))
    z = (np.mean(bounds[1]) - np.mean(bounds[0])) / error
    assert abs(z) < 4, f"{np.mean(bounds[1])} from batches, {np.mean(bounds[0])} from all, standard error {error}"
    assert np.std(bounds[1]) > np.std(bounds[0])


def test_a_full_natural_step_solves_a_conjugate_problem():
    """With a quadratic expected log density the posterior's precision is reached at rate 1, up to the retraction's rest."""
    rng = np.random.default_rng(0)
    half = rng.normal(size=(4, 4))
    information, linear = jnp.asarray(half @ half.T / 4), jnp.asarray(rng.normal(size=4))

    def negative(q: InducingPosterior) -> jax.Array:
        covariance = q.chol[0] @ q.chol[0].T
        quadratic = jnp.trace(information @ covariance) + q.mean[0] @ information @ q.mean[0]
        return 0.5 * quadratic - linear @ q.mean[0]

    q = unwrap(InducingPosterior.prior(1, 4))
    for _ in range(60):
        q = natural_step(q, jax.grad(negative)(q), jnp.array(0.5), 1)
    precision = np.eye(4) + information
    np.testing.assert_allclose(q.chol[0] @ q.chol[0].T, np.linalg.inv(precision), rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(q.mean[0], np.linalg.solve(precision, linear), rtol=1e-6)


def test_pieces_and_mini_batches_train_a_cut_posterior(data, start):
    model, posterior = start
    local = posterior.local
    cut = FreeSteps(local.initial_mean, local.initial_chol, local.gain, local.offset, local.chol, cut_every=5)
    settings = dataclasses.replace(QUICK, by_pieces=True, batch_size=2)
    result = run(data, (model, VCDT(posterior.inducing, cut)), settings=settings)
    assert result.history.bound[-1] > result.history.bound[0]
    with pytest.raises(ValueError, match="cut_every"):
        run(data, start, settings=settings)


def test_learning_rate_warms_up_and_decays():
    settings = FitSettings(num_steps=100, warmup_steps=10, learning_rate=0.1)
    rates = [float(learning_rate(settings, jnp.array(step))) for step in (0, 9, 50, 99)]
    np.testing.assert_allclose(rates[:3], [0.01, 0.1, 0.1])
    assert rates[3] == pytest.approx(0.01, rel=0.2)


def test_fit_from_data_alone_starts_from_the_linear_model():
    rng = np.random.default_rng(0)
    controls, outputs, state = rng.normal(size=(60, 1)), np.zeros((60, 1)), 0.0
    for t in range(60):
        outputs[t] = state + 0.05 * rng.normal()
        state = 0.8 * state + 0.5 * controls[t, 0]
    outputs[20:23] = np.nan
    data = Dataset.from_arrays(outputs, controls)
    result = fit(data, key=jr.key(0), settings=QUICK, start=StartSettings(state_dim=1, free_run=0, num_inducing=8))
    assert np.isfinite(result.bound)
    np.testing.assert_allclose(unwrap(result.model.transition.mean.matrix)[0, 0], 0.8, atol=0.1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_steps": 0}, "num_steps"),
        ({"learning_rate": -1.0}, "learning_rate"),
        ({"natural_gradient": 2.0}, "natural_gradient"),
        ({"batch_size": 0}, "batch_size"),
        ({"warmup_steps": -1}, "warmup_steps"),
        ({"final_fraction": 0.0}, "final_fraction"),
        ({"tolerance": -1.0}, "tolerance"),
    ],
)
def test_impossible_settings_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        FitSettings(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"posterior": "vdct"}, "posterior"),
        ({"posterior": "pr-ssm", "local": "filtering"}, "moves as the prior"),
        ({"posterior": "factorised-linear", "local": "prior"}, "linear in the state"),
        ({"cut_every": 5, "local": "amortised"}, "cut_every"),
        ({"state_dim": 0}, "state_dim"),
        ({"num_inducing": 0}, "num_inducing"),
    ],
)
def test_contradictory_starts_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        StartSettings(**changes)


def test_shapes_that_contradict_each_other_are_refused_before_any_work(data, start):
    model, posterior = start
    with pytest.raises(ValueError, match="controls"):
        run(Dataset.from_arrays(data.outputs[0], np.arange(20.0)[:, None] % 3), start, scaling=Scaling.identity(1, 1))
    with pytest.raises(ValueError, match="q\\(u\\) must have a mean"):
        run(data, (model, eqx.tree_at(lambda p: p.inducing, posterior, InducingPosterior.prior(1, 3))))
    longer = Dataset.from_arrays(np.concatenate([data.outputs[0]] * 2))
    with pytest.raises(ValueError, match="FreeSteps must hold"):
        run(longer, start)
    with pytest.raises(ValueError, match="both a model and a posterior"):
        fit(data, model, key=jr.key(0))
    with pytest.raises(ValueError, match="2 outputs, but the emission"):
        run(Dataset.from_arrays(np.hstack([data.outputs[0]] * 2)), start, scaling=Scaling.identity(2, 0))
