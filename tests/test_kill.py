"""What a kill leaves: whatever the moment, the folder loads or goes on, and ends in the numbers of a run that nobody killed."""

import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from gpssm.run import load_run

pytestmark = pytest.mark.slow
NUM_KILLS = 20
SETTINGS = """
[start]
state_dim = 1
free_run = 8
free_run_steps = 20
num_inducing = 8
[fit]
num_steps = {steps}
num_samples = 4
block_steps = 20
tolerance = "none"
[forecast]
horizon = 5
num_samples = 50
"""
FIT = "fit driven.csv --outputs y --controls u --config settings.toml"
SELECT = "select driven.csv --outputs y --controls u --config settings.toml --mean linear,zero"
REPRODUCE = "reproduce kink --quick --methods vcdt,pr-ssm --steps 20 --draws 1"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A table, settings, and a cache of compiled programs that all runs share."""
    folder = tmp_path_factory.mktemp("killed")
    rng = np.random.default_rng(0)
    u, y = rng.normal(size=80), np.zeros(80)
    for t in range(79):
        y[t + 1] = 0.8 * y[t] + np.tanh(u[t])
    pd.DataFrame({"y": y + 0.1 * rng.normal(size=80), "u": u}).to_csv(folder / "driven.csv", index=False)
    (folder / "settings.toml").write_text(SETTINGS.format(steps=600))
    return folder


def start(folder: Path, line: str) -> subprocess.Popen:
    """The command line in a process of its own, in that folder."""
    environment = os.environ | {"GPSSM_JAX_CACHE": str(folder / "programs"), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", "gpssm", *line.split()]
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(folder: Path, line: str, code: int = 0) -> str:
    """Run a command to its end; what it said."""
    process = start(folder, line)
    out, err = process.communicate(timeout=600)
    assert process.returncode == code, err
    return out + err


def kill(folder: Path, line: str, seconds: float) -> bool:
    """SIGKILL a command after so many seconds; whether it was still at work."""
    process = start(folder, line)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
    process.communicate()
    return process.returncode == -signal.SIGKILL


def numbers(run: Path) -> dict[str, object]:
    """All that came of a run, to the last bit, but for the seconds."""
    found: dict[str, object] = {}
    for file in sorted(run.rglob("*")):
        name = str(file.relative_to(run))
        if file.name == "arrays.npz":
            with zipfile.ZipFile(file) as archive:
                found |= {f"{name}:{n}": archive.read(n) for n in archive.namelist() if "seconds" not in n}
        elif file.name == "history.csv":
            found[name] = pd.read_csv(file).drop(columns="seconds").to_csv()
        elif file.name == "metrics.json":
            found[name] = without_seconds(json.loads(file.read_text()))
    assert any(name.startswith("model") for name in found)
    return found


def without_seconds(value: Any) -> Any:
    """Parsed JSON, but for what the clock says, and texts that repeat it."""
    if isinstance(value, dict):
        return {name: without_seconds(part) for name, part in value.items() if name not in ("seconds", "text")}
    return [without_seconds(part) for part in value] if isinstance(value, list) else value


def stage(run: Path) -> str:
    """How far a run had come."""
    status = run / "status.json"
    if not status.is_file():
        return "begun" if run.is_dir() and any(run.iterdir()) else "nothing"
    state = json.loads(status.read_text())["state"]
    return f"{state}, checkpoint" if state == "fitting" and (run / "checkpoint").is_dir() else state


@pytest.fixture(scope="module")
def whole(folder) -> tuple[Path, float]:
    """The run that nobody killed, and its seconds once programs are compiled."""
    finish(folder, f"{FIT} --out first")
    began = time.perf_counter()
    finish(folder, f"{FIT} --out whole")
    seconds = time.perf_counter() - began
    assert numbers(folder / "first") == numbers(folder / "whole")
    return folder / "whole", seconds


def test_a_fit_killed_at_twenty_random_moments_ends_in_the_same_numbers(folder, whole):
    expected, seconds = numbers(whole[0]), whole[1]
    moments = np.sort(np.random.default_rng(1).uniform(0.5, seconds, NUM_KILLS))
    stages = []
    for i, moment in enumerate(moments):
        run = f"killed-{i}"
        was_killed = kill(folder, f"{FIT} --out {run}", moment)
        stages.append(stage(folder / run) if was_killed else "done")
        if (folder / run / "status.json").is_file():
            load_run(folder / run)
        if stages[-1] not in ("done", "finished"):
            finish(folder, f"{FIT} --resume --out {run}")
        assert numbers(folder / run) == expected, f"killed after {moment:.2f} s: {stages[-1]}"
        print(f"killed after {moment:5.2f} of {seconds:.2f} s: {stages[-1]}")
    assert len({name for name in stages if name != "done"}) >= 3, stages


def test_a_fit_killed_thrice_ends_in_the_same_numbers(folder, whole):
    expected, seconds = numbers(whole[0]), whole[1]
    for share in (0.9, 0.8, 0.9):
        kill(folder, f"{FIT} --resume --out thrice", share * seconds)
    if stage(folder / "thrice") != "finished":
        finish(folder, f"{FIT} --resume --out thrice")
    assert numbers(folder / "thrice") == expected


def test_ctrl_c_is_told_and_the_run_goes_on(folder, whole):
    process = start(folder, f"{FIT} --out stopped")
    while not (folder / "stopped" / "checkpoint").is_dir():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1, err
    assert "Interrupted; what there is stands in stopped" in err
    assert err.rstrip().endswith("error: interrupted")
    assert "Traceback" not in err
    finish(folder, "fit --resume --out stopped")
    assert numbers(folder / "stopped") == numbers(whole[0])


def test_two_processes_into_one_folder_are_an_error(folder, whole):
    first = start(folder, f"{FIT} --out shared")
    while not (folder / "shared" / "status.json").is_file():
        assert first.poll() is None
        time.sleep(0.01)
    told = [finish(folder, f"{FIT} {more} --out shared", 2) for more in ("", "--resume")]
    assert "holds an unfinished run" in told[0]
    assert "Another run is writing into shared at this moment" in told[1]
    _, err = first.communicate(timeout=600)
    assert first.returncode == 0, err
    assert numbers(folder / "shared") == numbers(whole[0])


@pytest.mark.parametrize(("line", "verb"), [(SELECT, "select"), (f"{FIT} --tune", "fit")], ids=["select", "fit that is tuned"])
def test_a_selection_that_was_killed_twice_goes_on_to_the_same_winner(folder, whole, line, verb):
    """While its candidates are fitted, and when the first of them has been scored."""
    chosen, cut = folder / f"chosen-{verb}", folder / f"cut-{verb}"
    finish(folder, f"{line} --out {chosen.name}")
    for mark, resumed in (("ranking", line), ("ranking/score-0", f"{verb} --resume")):
        process = start(folder, f"{resumed} --out {cut.name}")
        while not (cut / "selection" / mark).is_dir():
            assert process.poll() is None
            time.sleep(0.01)
        process.kill()
        process.communicate()
        assert "unfinished selection" in finish(folder, f"report {cut.name}", 2)
    finish(folder, f"{verb} --resume --out {cut.name}")
    expected, got = numbers(chosen), numbers(cut)
    assert got["metrics.json"] == expected["metrics.json"]
    assert {name: bits for name, bits in got.items() if name.startswith("model")} == {
        name: bits for name, bits in expected.items() if name.startswith("model")
    }


def test_an_experiment_that_was_killed_goes_on_to_the_same_results(folder):
    finish(folder, f"{REPRODUCE} --out kink")
    process = start(folder, f"{REPRODUCE} --out kink-cut")
    while not list((folder / "kink-cut").rglob("arrays.npz")):
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.communicate()
    finish(folder, f"{REPRODUCE} --out kink-cut")
    results = [without_seconds(json.loads((folder / name / "results.json").read_text())) for name in ("kink", "kink-cut")]
    assert results[0] == results[1]
