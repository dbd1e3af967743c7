import dataclasses
import json
import os
import shutil

import jax
import numpy as np
import pytest

from gpssm import config, run
from gpssm.config import Config
from gpssm.datasets import kink
from gpssm.run import carry_out, load_run
from gpssm.selection import carry_out_selection, to_dict

TINY = config.override(
    Config(),
    {
        "start": {"num_inducing": 5, "state_dim": 1, "builder": "gpssm.commands.kink_start:start"},
        "fit": {"num_steps": 6, "num_samples": 2, "block_steps": 2},
        "forecast": {"horizon": 3, "num_samples": 20, "stride": 4},
    },
)


class Steady:
    """A stand-in that saves the tests the baselines."""

    def __init__(self, data):
        from gpssm.baselines import Constant

        self.inner = Constant.fit(data, seed=0)

    def forecasts(self, data, origins, steps, *, key):
        return self.inner.forecasts(data, origins, steps, key=key)

    def forecast(self, history, steps, controls=None, *, key):
        return self.inner.forecast(history, steps, controls, key=key)


@pytest.fixture(scope="module")
def data():
    return kink(40, observation_variance=0.1, seed=1).dataset


@pytest.fixture(scope="module")
def rivals(data):
    return {"constant": Steady(data.split(0.75)[0])}


@pytest.fixture(scope="module")
def finished(tmp_path_factory, data, rivals):
    return carry_out(tmp_path_factory.mktemp("runs") / "whole", TINY, data, rivals=rivals)


def same(first, second):
    leaves = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    return all(np.array_equal(a, b) for a, b in leaves)


def test_a_run_folder_is_enough_to_repeat_the_run_to_the_last_bit(finished, tmp_path, rivals):
    read = load_run(finished.folder)
    again = carry_out(tmp_path / "again", read.config, read.data, rivals=rivals)
    assert same(again.fitted().model, finished.fitted().model)
    assert same(again.fitted().posterior, finished.fitted().posterior)
    assert again.metrics["models"] == finished.metrics["models"]


def test_a_finished_run_holds_what_its_docstring_says(finished):
    names = {entry.name for entry in finished.folder.iterdir()} - {".lock"}
    assert names == set(run.OURS)
    assert finished.status["state"] == "finished"
    table = (finished.folder / "history.csv").read_text().splitlines()
    assert table[0].startswith("steps,bound,emission,kl_transition,kl_inducing,kl_initial")
    assert len(table) == 4
    metrics = json.loads((finished.folder / "metrics.json").read_text())
    assert {"rmse", "nlpd", "crps", "coverage90"} <= set(metrics["models"]["gpssm"])
    assert len(metrics["words"]) == 4


def test_two_runs_into_one_folder_are_an_error(finished, data):
    with pytest.raises(ValueError, match="holds a finished run"):
        carry_out(finished.folder, TINY, data)
    with run.claimed(finished.folder), pytest.raises(ValueError, match="Another run is writing"):
        carry_out(finished.folder, TINY, data)


def test_a_folder_with_other_things_is_left_alone(tmp_path, data):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match=r"holds other things \(thesis.tex\)"):
        carry_out(tmp_path, TINY, data)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_an_interrupted_run_goes_on_to_the_same_numbers(finished, tmp_path, data, rivals):
    folder = tmp_path / "cut"

    def stop(history):
        if history.steps[-1] == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        carry_out(folder, TINY, data, progress=stop, rivals=rivals)
    unfinished = load_run(folder)
    with pytest.raises(ValueError, match=r"no fitted model yet.*--resume"):
        unfinished.fitted()
    with pytest.raises(ValueError, match="Add --resume"):
        carry_out(folder, TINY, data)
    with pytest.raises(ValueError, match=r"other settings \(seed: 0, 1\)"):
        carry_out(folder, config.override(TINY, {"seed": 1}), data, resume=True)
    with pytest.raises(ValueError, match="other data"):
        carry_out(folder, TINY, data.rows(1), resume=True)
    resumed = carry_out(folder, TINY, data, resume=True, rivals=rivals)
    assert same(resumed.fitted().model, finished.fitted().model)
    assert resumed.metrics["models"] == finished.metrics["models"]


@pytest.mark.parametrize("kept", [(), ("data",), ("data", "config.toml"), ("data", "config.toml", "versions.json")])
def test_what_a_kill_leaves_of_a_beginning_is_begun_anew(finished, tmp_path, data, kept):
    for name in kept:
        source = finished.folder / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, tmp_path / name)
    (tmp_path / f".data.writing-{os.getpid()}").mkdir()
    run.begin(tmp_path, TINY, data, resume=True)
    assert run.read_status(tmp_path)["state"] == "fitting"


def test_a_kill_between_any_two_writes_leaves_a_run_that_loads_or_goes_on(finished, tmp_path, data, rivals, monkeypatch):
    """What lies on the disk before each renaming is what a kill at that moment would leave."""
    folder, left, replace = tmp_path / "run", [], os.replace

    def look(source, target):
        left.append(shutil.copytree(folder, tmp_path / f"left-{len(left)}"))
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", look)
        carry_out(folder, TINY, data, rivals=rivals)
    assert len(left) > 12
    for copy in left:
        if run.read_status(copy) is not None:
            load_run(copy)
    for copy in left:
        resumed = carry_out(copy, TINY, data, resume=True, rivals=rivals)
        assert same(resumed.fitted().model, finished.fitted().model)
        assert resumed.metrics["models"] == finished.metrics["models"]


def test_settings_that_turn_out_not_to_suit_the_data_leave_no_folder(tmp_path, data):
    with pytest.raises(ValueError, match="ask for fewer states"):
        carry_out(tmp_path / "run", config.override(Config(), {"start": {"state_dim": 30}}), data)
    assert list(tmp_path.iterdir()) == []


def test_a_kill_after_the_fit_leaves_a_model_that_loads_and_a_run_that_goes_on(finished, tmp_path, data, rivals):
    folder = tmp_path / "run"
    shutil.copytree(finished.folder, folder)
    for name in ("metrics.json", "evaluation"):
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    run._set_status(folder, "fitted")
    assert load_run(folder).fitted().bound == finished.fitted().bound
    resumed = carry_out(folder, TINY, data, resume=True, rivals=rivals)
    assert resumed.metrics["models"] == finished.metrics["models"]


def test_inducing_points_are_added_until_the_bound_gains_no_more_and_that_fit_is_kept(finished, tmp_path, data, rivals):
    searching = config.override(TINY, {"saturation": {"counts": [5]}})
    searched = carry_out(tmp_path / "run", searching, data, rivals=rivals)
    assert searched.metrics["saturation"]["chosen"] == 5
    assert searched.metrics["fit"]["num_inducing"] == 5
    assert same(searched.fitted().model, finished.fitted().model)  # the same fit, made once
    assert not (tmp_path / "run" / "checkpoint").exists()


@pytest.fixture(scope="module")
def selecting():
    return config.override(TINY, {"select": {"nonlinear_scale": [0.05, 0.5]}})


@pytest.fixture(scope="module")
def selected(tmp_path_factory, selecting, data):
    return carry_out_selection(tmp_path_factory.mktemp("selections") / "whole", selecting, data)


def test_a_selection_ends_in_a_run_of_the_winner_that_repeats_it(selected, data):
    chosen, ranking = selected
    assert load_run(chosen.folder).status["state"] == "finished"
    assert chosen.config.start == ranking.candidates[ranking.best]
    assert set(to_dict(ranking)["models"]) == {"nonlinear_scale=0.05", "nonlinear_scale=0.5"}
    assert chosen.metrics["windows"] > 0
    assert {"gpssm", "arx", "linear", "constant"} <= set(chosen.metrics["models"])
    assert json.loads(json.dumps(to_dict(ranking), allow_nan=False))["best"] == ranking.best


def test_the_held_out_part_never_reaches_a_selection(selected, selecting, data, tmp_path, monkeypatch, rivals):
    monkeypatch.setattr("gpssm.baselines.fit_all", lambda data, seed: rivals)
    changed = dataclasses.replace(data, outputs=(np.concatenate([data.outputs[0][:30], data.outputs[0][:29:-1] + 1]),))
    again, ranking = carry_out_selection(tmp_path / "again", selecting, changed)
    assert to_dict(ranking)["models"] == to_dict(selected[1])["models"]
    assert same(again.fitted().model, selected[0].fitted().model)
    assert again.metrics["models"]["gpssm"] != selected[0].metrics["models"]["gpssm"]


def test_an_interrupted_selection_is_told_and_goes_on(selected, selecting, data, tmp_path, monkeypatch, rivals):
    monkeypatch.setattr("gpssm.baselines.fit_all", lambda data, seed: rivals)

    def stop(line):
        if line.startswith("nonlinear_scale=0.5:"):
            raise KeyboardInterrupt

    folder = tmp_path / "cut"
    with pytest.raises(KeyboardInterrupt):
        carry_out_selection(folder, selecting, data, say=stop)
    for refused in (lambda: load_run(folder), lambda: run.check_new(folder)):
        with pytest.raises(ValueError, match=r"unfinished selection. Go on with it: gpssm select --resume --out"):
            refused()
    with pytest.raises(ValueError, match="other settings"):
        carry_out_selection(folder, config.override(selecting, {"seed": 1}), data)
    with pytest.raises(ValueError, match="a selection for other data"):
        carry_out_selection(folder, selecting, data.rows(1))
    resumed, _ = carry_out_selection(folder, selecting, data)
    assert same(resumed.fitted().model, selected[0].fitted().model)


def test_what_is_not_a_run_is_told(tmp_path):
    with pytest.raises(ValueError, match="there is no such folder"):
        load_run(tmp_path / "nothing")
    with pytest.raises(ValueError, match=r"no status.json is in it"):
        load_run(tmp_path)
