"""Many fits as one program give what each would give alone, from starts that differ, and go on where they were killed."""

import dataclasses

import jax
import jax.random as jr
import numpy as np
import pytest

from gpssm import FitSettings, StartSettings, Status, fit, fit_many, fit_starts, unwrap
from gpssm.data import Dataset
from gpssm.starts import Problem, starts_around

SETTINGS = FitSettings(num_steps=6, num_samples=2, block_steps=3, tolerance=None)
START = StartSettings(state_dim=1, free_run=0, num_inducing=5)


def driven(length: int, seed: int = 0) -> Dataset:
    rng = np.random.default_rng(seed)
    u, y = rng.normal(size=(length, 1)), np.zeros((length, 1))
    for t in range(length - 1):
        y[t + 1] = 0.8 * y[t] + np.tanh(u[t])
    return Dataset.from_arrays(y + 0.1 * rng.normal(size=y.shape), u)


@pytest.fixture(scope="module")
def problem() -> Problem:
    return Problem.standardised(driven(24), key=jr.key(0), start=START)


def test_fits_side_by_side_are_those_made_one_by_one(problem):
    other = Problem.standardised(driven(24, seed=1), key=jr.key(1), start=START)
    together = fit_many([problem, other], SETTINGS)
    for one, result in zip((problem, other), together, strict=True):
        alone = fit(one.data, one.model, one.posterior, key=one.key, scaling=one.scaling, settings=SETTINGS)
        np.testing.assert_allclose(result.history.bound, alone.history.bound, rtol=1e-8)
        for a, b in zip(jax.tree.leaves(result.posterior), jax.tree.leaves(alone.posterior), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-8)
        assert result.status is Status.MAX_STEPS


def test_sequences_of_other_lengths_and_models_of_other_shapes_come_back_as_they_were(problem):
    short = Problem.standardised(driven(17, seed=2), key=jr.key(2), start=START)
    other = Problem.standardised(driven(24), key=jr.key(0), start=dataclasses.replace(START, kernel="matern32"))
    blocks = []
    results = fit_many([problem, other, short], SETTINGS, progress=lambda members, histories: blocks.append(members))
    assert blocks == [[0, 2], [0, 2], [1], [1]]  # two groups of one shape each, two blocks a group
    for one, result in zip((problem, other, short), results, strict=True):
        assert jax.tree.structure(result.posterior) == jax.tree.structure(one.posterior)
        for a, b in zip(jax.tree.leaves(result.posterior), jax.tree.leaves(one.posterior), strict=True):
            assert a.shape == b.shape
        assert np.isfinite(result.bound)
    # the padding counts for nothing: in expectation the bound of a padded fit is that of the fit itself
    more = dataclasses.replace(SETTINGS, num_steps=1, num_samples=400)
    padded = fit_many([problem, short], more)[1].history.bound[0]
    alone = fit_many([short], more)[0].history.bound[0]
    assert padded == pytest.approx(alone, abs=1.0)


def test_starts_differ_and_the_first_is_that_of_fit(problem):
    results = fit_starts(driven(24), 3, key=jr.key(0), settings=SETTINGS, start=START)
    alone = fit(driven(24), key=jr.key(0), settings=SETTINGS, start=START)
    np.testing.assert_allclose(results[0].history.bound, alone.history.bound, rtol=1e-8)
    first = [float(unwrap(one.model.process_scale)[0]) for one in starts_around(problem, 3)]
    assert len(set(first)) == 3
    assert len({result.bound for result in results}) == 3
    with pytest.raises(ValueError, match="num_starts"):
        fit_starts(driven(24), 0, key=jr.key(0))


def test_killed_fits_go_on_and_end_in_the_same_numbers(problem, tmp_path):
    class Stop(Exception):
        pass

    def stop(members, histories):
        raise Stop

    problems = starts_around(problem, 2)
    whole = fit_many(problems, SETTINGS)
    with pytest.raises(Stop):
        fit_many(problems, SETTINGS, checkpoint=tmp_path, progress=stop)
    resumed = fit_many(problems, SETTINGS, checkpoint=tmp_path)
    for a, b in zip(jax.tree.leaves([r.model for r in whole]), jax.tree.leaves([r.model for r in resumed]), strict=True):
        np.testing.assert_array_equal(a, b)
    again = [dataclasses.replace(one, key=jr.key(7)) for one in problems]
    with pytest.raises(ValueError, match="belongs to other fits"):
        fit_many(again, SETTINGS, checkpoint=tmp_path)
