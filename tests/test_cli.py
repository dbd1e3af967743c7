"""The command line: every verb once on one tiny run. What people hand over by mistake is in `test_bad_input.py`."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import scipy.io

from gpssm import cli, run
from gpssm.config import to_toml
from gpssm.run import load_run

SETTINGS = """
[start]
state_dim = 1
free_run = 0
num_inducing = 5
[fit]
num_steps = 4
num_samples = 2
block_steps = 2
[forecast]
horizon = 3
num_samples = 20
stride = 5
"""


@pytest.fixture(autouse=True)
def _no_cache(monkeypatch):
    monkeypatch.setenv("GPSSM_JAX_CACHE", "off")
    monkeypatch.setattr("warnings.showwarning", None)


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """A table of a driven system, a plan, and one finished run, `run`."""
    folder = tmp_path_factory.mktemp("cli")
    rng = np.random.default_rng(0)
    u = rng.normal(size=60)
    y = np.zeros(60)
    for t in range(59):
        y[t + 1] = 0.8 * y[t] + np.tanh(u[t])
    y = y + 0.1 * rng.normal(size=60)
    frame = pd.DataFrame({"t": 0.5 * np.arange(60), "y": y, "u": u})
    frame.loc[[20, 21], "y"] = np.nan
    frame.to_csv(folder / "driven.csv", index=False)
    frame[["u"]][:9].to_csv(folder / "plan.csv", index=False)
    (folder / "tiny.toml").write_text(SETTINGS)
    (folder / "full").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("GPSSM_JAX_CACHE", "off")
        columns = "--outputs y --controls u --time t"
        assert cli.run(f"fit driven.csv {columns} --config tiny.toml --out run --json fit.json".split()) == 0
    return folder


@pytest.fixture
def call(folder, monkeypatch, capsys):
    """Run a command in that folder: its exit code and what it said."""
    monkeypatch.chdir(folder)

    def run_command(line: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = cli.run(line.split())
        said = capsys.readouterr()
        return code, said.out, said.err

    return run_command


def test_debug_shows_the_traceback(call):
    assert "Traceback" in call("forecast full --steps 3 --debug")[2]


def test_failed_work_ends_with_one(call, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("the disk is on fire")

    monkeypatch.setattr("gpssm.datasets.load", fail)
    code, _, err = call("fit dryer --out newer")
    assert (code, err) == (1, "error: RuntimeError: the disk is on fire (--debug shows where)\n")


@pytest.mark.parametrize("name", list(cli.EXAMPLES))
def test_every_verb_has_help_with_an_example(call, name):
    code, out, _ = call(f"{name} --help")
    assert code == 0
    assert "Example: gpssm" in out


def test_fit_says_what_it_found_and_writes_json(folder):
    numbers = json.loads((folder / "fit.json").read_text())
    assert {"gpssm", "arx", "linear", "constant"} <= set(numbers["models"])
    assert {"rmse", "nlpd", "crps", "coverage90"} <= set(numbers["models"]["gpssm"])
    assert set(numbers["raw"]["models"]) == set(numbers["models"])
    assert "sensor adds noise" in numbers["words"][0]
    assert "straight line" in numbers["words"][1]
    assert "linear model" in numbers["words"][2]


@pytest.mark.parametrize("said", ["driven.csv --outputs y --controls u --time t --config tiny.toml", "driven.csv --seed 0", ""])
def test_a_run_goes_on_with_the_same_command_a_part_of_it_or_nothing(call, said):
    code, out, err = call(f"fit {said} --resume --out run")
    assert code == 0, err
    assert "Run folder: run" in out


def test_forecast_writes_a_table_with_the_quantiles_asked_for(call, folder):
    code, _, err = call("forecast run --steps 4 --controls plan.csv --quantiles 0.1,0.9 --out f.csv --json f.json")
    assert code == 0, err
    table = pd.read_csv(folder / "f.csv")
    assert list(table.columns) == ["step", "time", "output", "mean", "standard_deviation", "q0.1", "q0.9"]
    assert list(table.step) == [60, 61, 62, 63]
    assert (table["q0.1"] < table["q0.9"]).all()
    assert len(json.loads((folder / "f.json").read_text())) == 4
    assert "forecast took" in err


def test_filter_fills_gaps_and_bands_hold_predictions(call, folder):
    assert call("filter run driven.csv --out states.csv")[0] == 0
    table = pd.read_csv(folder / "states.csv")
    assert len(table) == 60
    assert table.y.isna().sum() == 2
    assert table.y_filled.notna().all()
    assert (table.y_lower < table.y_predicted).all()
    assert {"state1", "state1_sd", "time"} <= set(table.columns)


def test_evaluate_begins_where_training_ended_and_writes_json(call, folder):
    code, out, err = call("evaluate run driven.csv --horizon 3 --stride 5 --json e.json")
    assert code == 0, err
    assert "row [45]" in out
    numbers = json.loads((folder / "e.json").read_text())
    fitted = json.loads((folder / "fit.json").read_text())
    assert (numbers["horizon"], numbers["windows"]) == (3, 3)
    assert numbers["models"]["arx"] == fitted["models"]["arx"]
    check_scores(numbers, {"gpssm"})


def check_scores(numbers, models):
    """What `--json` of evaluate, compare and select holds, whoever reads it: the scores of all models, and the same raw."""
    for units in (numbers, numbers["raw"]):
        assert isinstance(units["horizon"], int)
        assert isinstance(units["windows"], int)
        assert set(units["models"]) >= models | {"arx", "linear", "constant"}
        for scores in units["models"].values():
            assert {"rmse", "nlpd", "crps", "coverage90"} <= set(scores)
            assert all(isinstance(scores[name], float) for name in ("rmse", "nlpd", "crps", "coverage90"))
    standard, raw = numbers["models"]["arx"], numbers["raw"]["models"]["arx"]
    assert raw["coverage90"] == standard["coverage90"]
    assert raw["rmse"] != standard["rmse"]


@pytest.mark.slow
def test_compare_and_select_write_the_scores_that_evaluate_writes(call, folder):
    columns = "driven.csv --outputs y --controls u --time t --config tiny.toml"
    code, _, err = call(f"compare {columns} --posteriors vcdt,factorised-linear --out compared --json c.json")
    assert code == 0, err
    assert "compare took" in err
    compared = json.loads((folder / "c.json").read_text())
    check_scores(compared, {"vcdt", "factorised-linear"})
    code, _, err = call(f"select {columns} --mean linear,zero --out selected --json s.json")
    assert code == 0, err
    assert "select took" in err
    selected = json.loads((folder / "s.json").read_text())
    check_scores(selected, {"gpssm"})
    assert set(selected["selection"]["models"]) == {"mean=linear", "mean=zero"}
    assert compared["models"]["arx"] == selected["models"]["arx"]
    assert load_run(folder / "selected").config.start.mean == selected["selection"]["best"].removeprefix("mean=")


FILES = ["same.csv", "same.tsv", "same.parquet", "same.mat", "german.csv --config german.toml"]


@pytest.mark.parametrize("file", FILES)
def test_every_kind_of_file_gives_the_same_data(call, folder, file, monkeypatch):
    frame = pd.read_csv(folder / "driven.csv")
    frame.to_csv(folder / "same.csv", index=False)
    frame.to_csv(folder / "same.tsv", index=False, sep="\t")
    frame.to_parquet(folder / "same.parquet")
    scipy.io.savemat(folder / "same.mat", {name: frame[name].to_numpy() for name in frame})
    frame.to_csv(folder / "german.csv", index=False, sep=";", decimal=",", encoding="utf-16")
    (folder / "german.toml").write_text('[data]\nseparator = ";"\ndecimal = ","\nencoding = "utf-16"\n')
    fitted = []

    def remember(out, config, data, **_):
        fitted.append(data)
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "carry_out", remember)
    assert call(f"fit {file} --outputs y --controls u --time t --out never")[0] == 1
    assert fitted == [load_run(folder / "run").data]
    assert not (folder / "never").exists()


def test_datasets_are_listed(call):
    code, out, _ = call("datasets list")
    assert code == 0
    assert "gas_furnace" in out


def test_the_effective_configuration_is_in_the_run_folder(folder):
    kept = load_run(folder / "run").config
    assert kept.fit.num_steps == 4
    assert kept.data.controls == ("u",)
    assert (folder / "run" / "config.toml").read_text() == to_toml(kept)


@pytest.mark.slow
def test_python_dash_m_runs_the_command_line():
    done = subprocess.run([sys.executable, "-m", "gpssm", "datasets", "list"], capture_output=True, text=True, check=True)
    assert "dryer" in done.stdout
