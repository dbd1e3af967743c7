"""The examples run as they stand, and make what the repository holds of them."""

import runpy
import sys
from pathlib import Path

import pandas as pd
import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name: str, *arguments: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def test_plant_makes_the_stored_file_again(tmp_path, monkeypatch):
    run("plant.py", "--out", str(tmp_path / "plant.csv"), monkeypatch=monkeypatch)
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "plant.csv"), pd.read_csv(EXAMPLES / "plant.csv"))


@pytest.mark.slow
def test_kink_tells_of_four_methods_and_draws_the_triptych(tmp_path, monkeypatch, capsys):
    run("kink.py", "--steps", "60", "--out", str(tmp_path / "kink.png"), monkeypatch=monkeypatch)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:5]] == ["factorised-linear", "factorised-nonlinear", "vcdt", "pr-ssm"]
    assert (tmp_path / "kink.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_small_demo_is_tightest_with_the_function_itself(monkeypatch, capsys):
    """Bounds in the order that the paper's families have, the linear-time f-dependent one not below VCDT."""
    run("small_demo.py", "--seeds", "1", monkeypatch=monkeypatch)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    bound = {row[1]: float(row[2]) for row in rows}
    error = {row[1]: float(row[3]) for row in rows}
    assert bound["factorised-linear"] < bound["vcdt"]
    allowed = 3 * (error["vcdt"] + error["f-dependent-pathwise"])
    assert bound["f-dependent-pathwise"] > bound["vcdt"] - allowed
    assert bound["pr-ssm"] < bound["vcdt"] - 100
