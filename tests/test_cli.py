"""The command line: every verb once on one tiny run, and a table of what people hand over by mistake."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from gpssm import cli, run
from gpssm.config import to_toml
from gpssm.datasets import kink
from gpssm.run import load_run

SETTINGS = """
[start]
state_dim = 1
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
ONE = "one.csv --outputs y --out new"  # a table that is well


@pytest.fixture(autouse=True)
def _no_cache(monkeypatch):
    monkeypatch.setenv("GPSSM_JAX_CACHE", "off")
    monkeypatch.setattr("warnings.showwarning", None)


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """A folder of files, good and bad, and one finished run, `run`, of a driven system."""
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
    frame[["u"]][:2].to_csv(folder / "short_plan.csv", index=False)
    (folder / "bad_plan.csv").write_text("u\n1\nx\n2\n3\n4\n")
    frame.rename(columns={"u": "v"}).to_csv(folder / "other_plan.csv", index=False)
    one = kink(40, seed=0).dataset.to_dataframe().rename(columns={"y1": "y"})
    one.to_csv(folder / "one.csv", index=False)
    one[:6].to_csv(folder / "short.csv", index=False)
    one.assign(y=1.0).to_csv(folder / "flat.csv", index=False)
    one.assign(y=np.nan).to_csv(folder / "nothing.csv", index=False)
    pd.concat([frame[:5], frame[5:].assign(t=lambda f: f.t * 1.3)]).to_csv(folder / "uneven.csv", index=False)
    frame.assign(u=frame.u.where(frame.index != 7)).to_csv(folder / "gap_in_control.csv", index=False)
    texts = {
        "empty.csv": "",
        "header.csv": "y,u\n",
        "words.csv": "y,u\n1,2\nhigh,3\n" + "1,2\n" * 30,
        "ragged.csv": "y,u\n1,2\n1,2,3\n",
        "semicolons.csv": "y;u\n1;2\n3;4\n",
        "numbers.csv": "1,2\n3,4\n",
        "twice.csv": "y,y\n1,2\n3,4\n",
        "table.xlsx": "PK",
        "broken.mat": "not matlab",
        "broken.parquet": "not parquet",
        "broken.toml": "[fit\n",
        "unknown.toml": "[fit]\nlearning_rat = 0.1\n",
        "no_module.toml": "[start]\nkernel = 'no_such_module:Kernel'\n",
        "tiny.toml": SETTINGS,
        "other.toml": "[fit]\nnum_steps = 5",
        "a_file": "x",
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    (folder / "latin.csv").write_bytes("y,größe\n1,2\n".encode("latin-1"))
    (folder / "full").mkdir()
    (folder / "full" / "thesis.tex").write_text("years of work")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("GPSSM_JAX_CACHE", "off")
        columns = "--outputs y --controls u --time t"
        assert cli.run(f"fit driven.csv {columns} --config tiny.toml --out run --json fit.json".split()) == 0
    run.claimed(folder / "unfinished").__enter__()
    begun = load_run(folder / "run")
    run.begin(folder / "unfinished", begun.config, begun.data, resume=False)
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


BAD = [
    ("fit one.csv", "Missing option '--out'"),
    ("fit --out new", "Missing argument 'DATA'"),
    ("fit --resume --out new", "There is no run in new to go on with"),
    ("fit one.csv --outputs y", "Missing option '--out'"),
    ("fitt one.csv", "No such command 'fitt'"),
    (f"fit {ONE} --sped 3", "No such option"),
    (f"fit {ONE} --seed x", "Invalid value for '--seed'"),
    (f"fit {ONE} --seed -1", "`seed` must be a whole number from 0"),
    ("fit one.csv --out new", "Say it by --outputs"),
    ("fit onee.csv --outputs y --out new", "the nearest name is 'one.csv'"),
    ("fit dryerr --out new", "the nearest name is 'dryer'"),
    ("fit full --outputs y --out new", "came a folder"),
    ("fit one.csv --outputs Y1 --out new", "no column 'Y1'.*the nearest name is 'y'"),
    ("fit driven.csv --outputs y --controls uu --out new", "no column 'uu'.*the nearest name is 'u'"),
    ("fit driven.csv --outputs y --controls y --out new", "named twice"),
    ("fit one.csv --outputs y --sequence seq --out new", "no column 'seq'.*'sequence'"),
    ("fit one.csv --outputs y --time tme --out new", "no column 'tme'"),
    ("fit dryer --outputs temperature --out new", "no output 'temperature'.*'air_temperature'"),
    ("fit dryer --time t --out new", "leave out --sequence and --time"),
    ("fit empty.csv --outputs y --out new", "the file is empty"),
    ("fit header.csv --outputs y --out new", "no rows below"),
    ("fit words.csv --outputs y --out new", "line 3.*expected a number, came 'high'"),
    ("fit ragged.csv --outputs y --out new", "line 3 has 3 cells"),
    ("fit semicolons.csv --outputs y --out new", "separator"),
    ("fit numbers.csv --outputs y --out new", "must name the columns"),
    ("fit twice.csv --outputs y --out new", "2 columns are called 'y'"),
    ("fit latin.csv --outputs y --out new", "not utf-8"),
    ("fit table.xlsx --outputs y --out new", "expected the ending"),
    ("fit broken.mat --outputs y --out new", "cannot be read as a MATLAB file"),
    ("fit broken.parquet --outputs y --out new", "cannot be read as Parquet"),
    ("fit short.csv --outputs y --out new", "has 6 rows; expected at least 20"),
    ("fit flat.csv --outputs y --out new", "is always 1"),
    ("fit nothing.csv --outputs y --out new", "missing"),
    ("fit uneven.csv --outputs y --time t --out new", "evenly spaced"),
    ("fit gap_in_control.csv --outputs y --controls u --out new", "'u'"),
    (f"fit {ONE} --state-dim 0", "--state-dim must be a whole number from 1, or auto"),
    (f"fit {ONE} --state-dim many", "--state-dim must be a whole number"),
    (f"fit {ONE} --inducing -3", "--inducing must be a whole number"),
    (f"fit {ONE} --posterior vcd", "the nearest name is 'vcdt'"),
    (f"fit {ONE} --train-fraction 1.5", "train_fraction"),
    (f"fit {ONE} --train-fraction 0.01", "at least 2 on each side"),
    (f"fit {ONE} --config none.toml", "There is no file 'none.toml'"),
    (f"fit {ONE} --config broken.toml", "not TOML"),
    (f"fit {ONE} --config unknown.toml", "the nearest name is 'learning_rate'"),
    (f"fit {ONE} --config no_module.toml", "no module 'no_such_module'"),
    (f"fit {ONE} --json full", "full is a folder"),
    (f"fit {ONE} --json a_file/x.json", "a_file is a file"),
    ("fit one.csv --outputs y --out run", "holds a finished run"),
    ("fit one.csv --outputs y --out unfinished", "Add --resume"),
    ("fit one.csv --outputs y --out full", r"holds other things \(thesis.tex\)"),
    ("fit one.csv --outputs y --out a_file", "a_file is a file"),
    ("fit one.csv --outputs y --resume --out run", "other settings"),
    ("fit --seed 7 --resume --out run", "other settings.*seed: 0, 7"),
    ("fit --config other.toml --resume --out run", "other settings.*fit.num_steps: 4, 5"),
    ("forecast run", "Missing option '--steps'"),
    ("forecast full --steps 3", "is not a run: no status.json"),
    ("forecast nowhere --steps 3", "there is no such folder"),
    ("forecast unfinished --steps 3", "no fitted model yet"),
    ("forecast run --steps 0", "--steps must be at least 1"),
    ("forecast run --steps 5", "give their next 4 rows"),
    ("forecast run --steps 5 --controls short_plan.csv", "2 rows of controls for 5 steps"),
    ("forecast run --steps 5 --controls bad_plan.csv", "expected a number, came 'x'"),
    ("forecast run --steps 5 --controls other_plan.csv", "no column 'u'"),
    ("forecast run --steps 5 --controls none.csv", "There is no file"),
    ("forecast run --steps 5 --quantiles 0.9,0.1", "rise"),
    ("forecast run --steps 5 --quantiles low", "numbers between 0 and 1"),
    ("forecast run --steps 5 --data one.csv", "no column"),
    ("filter run one.csv", "no column"),
    ("filter run driven.csv --out full", "full is a folder"),
    ("evaluate run driven.csv --horizon 0", "--horizon must be at least 1"),
    ("evaluate run driven.csv --horizon 500", "No window of 500 rows fits"),
    ("evaluate run driven.csv --start 59", "No window of 30 rows fits"),
    ("evaluate run driven.csv --stride 0", "--stride must be at least 1"),
    ("compare one.csv --outputs y --posteriors vcdt,xyz", "no posterior 'xyz'"),
    ("compare one.csv --outputs y --posteriors vcdt,vcdt", "each once"),
    ("compare one.csv --outputs y --train-fraction 1", "needs held-out data"),
    ("select --out new", "Missing argument 'DATA'"),
    ("select --resume --out new", "There is no selection in new to go on with"),
    ("select one.csv --outputs y --out run", "holds a finished run"),
    (f"select {ONE} --state-dim 1,zwei", "--state-dim takes whole numbers from 1"),
    (f"select {ONE} --state-dim 2,2", "names a choice twice"),
    (f"select {ONE} --inducing auto", "--inducing takes whole numbers"),
    (f"select {ONE} --mean linaer", "--mean: there is no 'linaer'; the nearest name is 'linear'"),
    (f"select {ONE} --kernel ,", "--kernel takes names out of se"),
    (f"select {ONE} --posterior vdct", "the nearest name is 'vcdt'"),
    (f"select {ONE} --by aic", "--by: there is no 'aic'"),
    ("report full", "is not a run"),
    ("report unfinished", "no fitted model yet"),
    ("datasets show dryr", "the nearest name is 'dryer'"),
    ("datasets fetch xyz", "There is no benchmark 'xyz'"),
]


@pytest.mark.parametrize(("line", "message"), BAD, ids=[line for line, _ in BAD])
def test_bad_input_is_told_in_a_line_at_once_and_changes_nothing(call, folder, line, message):
    before = {path for path in folder.rglob("*") if path.name != ".lock"}
    began = time.perf_counter()
    code, _, err = call(line)
    assert time.perf_counter() - began < 10
    assert code == 2, err
    assert re.search(message, err), err
    assert "Traceback" not in err
    told = [text for text in err.splitlines() if text.startswith("error: ")]
    assert len(told) == 1
    assert {path for path in folder.rglob("*") if path.name != ".lock"} - {folder / "new"} == before


def test_there_are_at_least_forty_kinds_of_bad_input():
    assert len(BAD) >= 40


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
