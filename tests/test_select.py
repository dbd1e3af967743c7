"""Model choice on tiny models of one shape, so that one compiled program serves every candidate."""

import dataclasses
from importlib import import_module

import jax
import jax.random as jr
import numpy as np
import pytest

import gpssm
from gpssm import subspace
from gpssm.fit import FitSettings
from gpssm.initialise import StartSettings
from gpssm.result import History
from gpssm.select import SelectSettings, _is_left_behind, built_in, converged_bound, rank, saturation, select, start_grid

FIT = FitSettings(num_steps=6, num_samples=2, block_steps=3)
SETTINGS = SelectSettings(horizon=3, stride=3, ensemble_size=2, num_samples=20)
BASE = StartSettings(state_dim=1, free_run=0, num_inducing=4)
CANDIDATES = start_grid(BASE, nonlinear_scale=[0.05, 1.5])
KEY = jr.key(3)


def same(first, second):
    leaves = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    return all(np.array_equal(a, b) for a, b in leaves)


@pytest.fixture(scope="module", autouse=True)
def _identified_once():
    """Subspace identification of the same numbers is done once: it takes longer than these fits."""
    known = {}

    def identify(outputs, controls, state_dim):
        question = (*(a.tobytes() for a in outputs), state_dim)
        if question not in known:
            known[question] = subspace.identify(outputs, controls, state_dim)
        return known[question]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(import_module("gpssm.initialise"), "identify", identify)
        yield


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(5)
    y = np.zeros(48)
    for t in range(47):
        y[t + 1] = 0.9 * y[t] + 0.3 * rng.normal()
    return gpssm.Dataset.from_arrays(y + 0.1 * rng.normal(size=48))


@pytest.fixture(scope="module")
def selection(data):
    return select(data, CANDIDATES, key=KEY, settings=SETTINGS, fit_settings=FIT)


def test_the_best_candidate_by_the_score_comes_first_and_is_fitted_to_all_data(selection, data):
    assert list(selection.table["nlpd"]) == sorted(selection.table["nlpd"])
    assert selection.best == selection.table.loc[0, "candidate"]
    assert selection.start == CANDIDATES[selection.best]
    assert selection.result.data == data
    assert {"rmse", "crps", "coverage90", "bound", "status", "seconds"} <= set(selection.table.columns)
    assert selection.table["weight"].sum() == pytest.approx(1)
    assert len(selection.ensemble.members) == 2


def test_a_selection_that_is_killed_anywhere_goes_on_to_the_same_numbers(selection, data, tmp_path):
    class Killed(Exception):
        pass

    def killer(word):
        def say(line):
            if word in line:
                raise Killed

        return say

    arguments = {"key": KEY, "settings": SETTINGS, "fit_settings": FIT, "checkpoint": tmp_path / "kept"}
    for word in ("step 3", "in 8 windows", "again", "step 6"):
        with pytest.raises(Killed):
            select(data, CANDIDATES, say=killer(word), **arguments)
    said = []
    resumed = select(data, CANDIDATES, say=said.append, **arguments)
    assert not any("step 3" in line for line in said)
    assert same(resumed.result.model, selection.result.model)
    assert same(resumed.result.posterior, selection.result.posterior)
    columns = ["candidate", "nlpd", "rmse", "bound", "weight"]
    assert resumed.table[columns].equals(selection.table[columns])
    with pytest.raises(ValueError, match="holds a selection with other key"):
        select(data, CANDIDATES, **{**arguments, "key": jr.key(4)})
    with pytest.raises(ValueError, match="other data"):
        select(data.rows(1), CANDIDATES, **arguments)


def test_what_follows_the_data_and_what_validates_never_reach_the_fits(selection, data):
    first, validation = data.split(0.75)
    changed = dataclasses.replace(data, outputs=(np.concatenate([first.outputs[0], validation.outputs[0][::-1] + 0.5]),))
    ranking = rank(changed, CANDIDATES, key=KEY, settings=SETTINGS, fit_settings=FIT)
    before = selection.table.set_index("candidate")
    after = ranking.table.set_index("candidate").loc[before.index]
    assert (after["bound"] == before["bound"]).all()
    assert (after["nlpd"] != before["nlpd"]).all()
    assert all(result.data == first for result in ranking.fits)


def test_a_ranking_holds_every_candidates_scores_on_the_validation_rows(selection, data):
    ranking = rank(data, CANDIDATES, key=KEY, settings=SETTINGS, fit_settings=FIT)
    assert ranking.table["nlpd"].equals(selection.table["nlpd"])
    assert set(ranking.evaluation.errors) == set(CANDIDATES)
    assert min(ranking.evaluation.origin) == 24
    assert ranking.evaluation.score(ranking.best).nlpd == ranking.table.loc[0, "nlpd"]


def test_a_block_that_leaves_too_little_is_not_held_out(data):
    def build(part, start, *, key):
        if part.num_sequences > 1:
            raise ValueError("need more data")
        return built_in(part, start, key=key)

    said = []
    ranking = rank(data, CANDIDATES, key=KEY, settings=SETTINGS, fit_settings=FIT, say=said.append, build=build)
    assert min(ranking.evaluation.origin) == 36
    assert "This block is not held out, for what it leaves is too little: need more data" in said
    with pytest.raises(ValueError, match="need more data"):
        rank(
            dataclasses.replace(data, outputs=data.outputs * 2, controls=data.controls * 2, sequence_names=("a", "b")),
            CANDIDATES,
            key=KEY,
            settings=SETTINGS,
            fit_settings=FIT,
            build=build,
        )


def test_by_the_bound_nothing_is_held_out(data):
    selection = select(data, CANDIDATES, key=KEY, settings=dataclasses.replace(SETTINGS, by="bound"), fit_settings=FIT)
    assert list(selection.table["bound"]) == sorted(selection.table["bound"], reverse=True)
    assert "nlpd" not in selection.table
    assert selection.result.data == data
    assert converged_bound(selection.result.history) == selection.table.loc[0, "bound"]
    odds = np.exp(selection.table["bound"] - selection.table["bound"].max())
    np.testing.assert_allclose(selection.ensemble.weights, odds / odds.sum())


def test_saturation_stops_where_more_points_do_not_pay(selection, data, monkeypatch):
    tried = []

    def fit(data, model, posterior, **_):
        tried.append(model.transition.num_inducing)
        bound = {5: -50.0, 10: -20.0, 20: -19.99, 40: 0.0}[model.transition.num_inducing]
        terms = np.array([bound])
        history = History(np.array([1]), *[terms] * 5, process_scale=np.ones((1, 1)), seconds=terms)
        return dataclasses.replace(selection.result, history=history)

    monkeypatch.setattr(import_module("gpssm.select"), "fit", fit)
    found = saturation(data, (5, 10, 20, 40), key=KEY)
    assert (found.chosen, tried) == (10, [5, 10, 20])
    assert found.bounds == {5: -50.0, 10: -20.0, 20: -19.99}
    assert saturation(data, (5, 10), key=KEY).chosen == 10


@pytest.mark.parametrize("counts", [(), (10, 5), (0, 5), (5, 5)])
def test_counts_that_do_not_rise_are_refused(data, counts):
    with pytest.raises(ValueError, match="whole numbers from 1 that rise"):
        saturation(data, counts, key=KEY)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"validation_fraction": 1.0}, "between 0 and 1"),
        ({"horizon": 0}, "`horizon` must be at least 1"),
        ({"stride": 0}, "`stride` must be at least 1"),
        ({"ensemble_size": 0}, "`ensemble_size` must be at least 1"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        SelectSettings(**settings)


def test_candidates_must_be_some_and_different(data):
    with pytest.raises(ValueError, match="nothing to select from"):
        rank(data, [], key=KEY)
    with pytest.raises(ValueError, match="Two of the candidates are the same"):
        rank(data, [BASE, BASE], key=KEY)
    with pytest.raises(ValueError, match="`states` is no setting of a start"):
        start_grid(states=[1])


def test_a_grid_names_what_differs():
    grid = start_grid(BASE, mean=["linear", "zero"], state_dim=[1, 2], kernel=["se"])
    assert list(grid)[:2] == ["mean=linear, state_dim=1", "mean=linear, state_dim=2"]
    assert grid["mean=zero, state_dim=2"].num_inducing == 4


def test_a_fit_whose_bound_lies_far_below_is_left_behind(selection):
    def lowered(nats_an_observation: float):
        result = selection.result
        bound = result.history.bound - 48 * nats_an_observation
        return dataclasses.replace(result, history=dataclasses.replace(result.history, bound=bound))

    assert list(_is_left_behind([lowered(2.0), lowered(0.0), lowered(0.5), lowered(np.nan)])) == [True, False, False, True]
