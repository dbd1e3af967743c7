"""Everything that `docs/bad-input.md` says people hand over by mistake, and that each gets the message that stands there.

The page is the table: a row is what is wrong, what was called, and the message, in which `…` stands for anything. Nothing may be
fitted before the message comes, and no file may change.
"""

import importlib
import os
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.random as jr
import numpy as np
import pandas as pd
import pytest
import scipy.io

import gpssm
from gpssm import cli, config, run, selection
from gpssm.config import Config
from gpssm.result import FitResult, History, Status

PAGE = Path(__file__).parents[1] / "docs" / "bad-input.md"
ROW = re.compile(r"^\| (?P<what>[^|]+) \| `(?P<call>[^`]+)` \| (?P<message>[^|]+) \|$")
SETTINGS = {
    "data": {"source": "driven.csv", "outputs": ["y"], "controls": ["u"], "time": "t", "train_fraction": 1},
    "start": {"state_dim": 1, "num_inducing": 5, "free_run": 0},
    "fit": {"num_steps": 4},
}
WORK = [  # what takes long: none of it may begin
    *("gpssm.fit:_run_steps", "gpssm.starts:_fit_group", "gpssm.baselines:fit_all", "gpssm.run:rolling_origin"),
    *("gpssm.commands.asking:rolling_origin", "gpssm.commands.asking:follow", "gpssm.commands.asking:write_report"),
    *("gpssm.filter:run_filter", "gpssm.predict:_trajectories", "gpssm.datasets:_download"),
]


def rows() -> list[Any]:
    """The rows of the page; a call that begins with `gpssm ` is one of the command line, any other Python."""
    found = [ROW.match(line) for line in PAGE.read_text(encoding="utf-8").splitlines()]
    return [pytest.param(m["call"], m["message"], id=m["call"]) for m in found if m is not None]


def frame() -> pd.DataFrame:
    """A table that is well: an output with two gaps, a control, times."""
    rng = np.random.default_rng(0)
    u, y = rng.normal(size=60), np.zeros(60)
    for t in range(59):
        y[t + 1] = 0.8 * y[t] + np.tanh(u[t])
    table = pd.DataFrame({"t": 0.5 * np.arange(60), "y": y.round(3), "u": u.round(3)})
    table.loc[[20, 21], "y"] = np.nan
    return table


def write_tables(folder: Path) -> None:
    """Tables, good and bad."""
    good = frame()
    changed = {
        "driven.csv": good,
        "flat.csv": good.assign(y=1.0),
        "flat_control.csv": good.assign(u=2.0),
        "flat_beginning.csv": good.assign(y=np.where(np.arange(60) < 45, 1.0, np.arange(60))),
        "nothing.csv": good.assign(y=np.nan),
        "nothing_at_first.csv": good.assign(y=good.y.where(good.index >= 45)),
        "gap_in_control.csv": good.assign(u=good.u.where(good.index != 7)),
        "infinite.csv": good.assign(y=good.y.where(good.index != 3, np.inf)),
        "infinite_control.csv": good.assign(u=good.u.where(good.index != 3, -np.inf)),
        "huge.csv": good.assign(y=1e200 * good.y),
        "uneven.csv": pd.concat([good[:5], good[5:].assign(t=lambda f: f.t * 1.3)]),
        "backwards.csv": good[::-1],
        "time_twice.csv": good.assign(t=good.t.where(good.index != 5, good.t[4])),
        "no_time.csv": good.assign(t=good.t.where(good.index != 5)),
        "rows_left_out.csv": good.drop(index=[5, 6]),
        "short.csv": good[:6],
        "one_row.csv": good[:1],
        "lonely.csv": good.assign(batch=["a"] * 59 + ["b"]),
        "no_batch.csv": good.assign(batch=["a"] * 30 + [None] + ["b"] * 29),
        "plan.csv": good[["u"]][:9],
        "short_plan.csv": good[["u"]][:2],
        "gap_in_plan.csv": good[["u"]][:9].assign(u=good.u.where(good.index != 3)),
        "other_plan.csv": good[["u"]].rename(columns={"u": "v"}),
        "outputs_only.csv": good[["t", "y"]],
        "slower.csv": good.assign(t=2 * good.t),
    }
    for name, table in changed.items():
        table.to_csv(folder / name, index=False)
    good.to_parquet(folder / "driven.parquet")
    scipy.io.savemat(folder / "driven.mat", {"y": good.y, "u": good.u, "short": good.u[:7], "name": "plant"})
    good.to_csv(folder / "utf16.csv", index=False, encoding="utf-16")
    good.to_csv(folder / "semicolons.csv", index=False, sep=";")
    good.to_csv(folder / "no_header.csv", index=False, header=False)


def write_other_files(folder: Path) -> None:
    """Texts, bytes, settings and folders, most of them bad."""
    lines = frame().to_csv(index=False).splitlines()
    texts = {
        "empty.csv": "",
        "blank.csv": "\n\n  \n",
        "header.csv": "t,y,u\n",
        "words.csv": "\n".join([*lines[:2], "0.5,high,1", *lines[3:]]),
        "ragged.csv": "\n".join([*lines[:2], lines[2] + ",9", *lines[3:]]),
        "cut_off.csv": "\n".join(lines)[:-8],
        "quotes.csv": "\n".join([*lines[:2], '0.5,"1,2', *lines[3:]]),
        "commas.csv": "\n".join([*lines[:2], '0.5,"1,5",1', *lines[3:]]),
        "twice.csv": "\n".join(["t,y,y", *lines[1:]]),
        "dates.csv": "\n".join(["t,y,u", *(f"{i + 1}.3.2024,1,2" for i in range(30))]),
        "table.xlsx": "PK",
        "text.mat": "not MATLAB",
        "text.parquet": "not Parquet",
        "a_file": "x",
        "parts.py": "def wrong(*sizes):\n    return 3\ndef failing(*sizes):\n    return 1 / 0\nnumber = 4\n",
        "unclosed.toml": "[fit\n",
        "twice.toml": "seed = 1\nseed = 2\n",
        "unknown_key.toml": "[fit]\nlearning_rat = 0.1\n",
        "unknown_table.toml": "[fitt]\nnum_steps = 3\n",
        "outside.toml": "num_steps = 3\n",
        "kind.toml": '[fit]\nnum_steps = "many"\n',
        "fraction.toml": "[fit]\nnum_steps = 2.5\n",
        "truth.toml": "[fit]\nby_pieces = 1\n",
        "value.toml": "[fit]\nlearning_rate = -0.1\n",
        "nan.toml": "[fit]\nlearning_rate = nan\n",
        "choice.toml": '[start]\nkernel = "rbf"\n',
        "contradiction.toml": '[start]\nposterior = "pr-ssm"\nlocal = "free"\n',
        "quantiles.toml": "[forecast]\nquantiles = [0.9, 0.1]\n",
        "no_module.toml": '[start]\nkernel = "no_such_module:Kernel"\n',
        "no_name.toml": '[start]\nkernel = "parts:rong"\n',
        "wrong_part.toml": '[start]\nkernel = "parts:wrong"\n',
        "failing_part.toml": '[start]\nmean = "parts:failing"\n',
        "not_a_function.toml": '[start]\nmean = "parts:number"\n',
        "pieces.toml": "[fit]\nby_pieces = true\n",
        "other.toml": "[fit]\nnum_steps = 5\n",
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    (folder / "latin.csv").write_bytes("y,größe\n1,2\n".encode("latin-1"))
    (folder / "picture.csv").write_bytes(b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR" + bytes(range(256)))
    (folder / "zeros.csv").write_bytes(bytes(400))
    (folder / "latin.toml").write_bytes("# größe\nseed = 1\n".encode("latin-1"))
    (folder / "new.mat").write_bytes(b"MATLAB 7.3 MAT-file, Platform: GLNXA64".ljust(124) + b"\x00\x02IM" + bytes(512))
    (folder / "full").mkdir()
    (folder / "full" / "thesis.tex").write_text("years of work")
    (folder / "benchmarks").mkdir()
    (folder / "benchmarks" / "dryer.dat").write_text("1 2\n3 4\n")


def write_runs(folder: Path) -> None:
    """A finished run that no step was spent on, ones that are not finished, and damaged copies."""
    settings = config.override(Config(), SETTINGS)
    data = gpssm.read_csv(folder / "driven.csv", ["y"], ["u"], time="t")

    def unfitted(data: Any, model: Any, posterior: Any, **_: Any) -> FitResult:
        scaling = gpssm.Scaling.of(data)
        return FitResult(model, posterior, scaling, data, History.empty(1), Status.MAX_STEPS, {}, 0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "fit", unfitted)
        run.carry_out(folder / "run", settings, data)
    run.begin(folder / "unfinished", settings, data, resume=False)
    selecting = config.override(settings, {"select": {"mean": ["linear", "zero"]}})
    (folder / "selecting").mkdir()
    selection._begin(folder / "selecting", selecting, data)
    damages: dict[str, Callable[[Path], Any]] = {
        "cut_arrays": lambda copy: os.truncate(copy / "model" / "arrays.npz", 900),
        "no_arrays": lambda copy: (copy / "model" / "arrays.npz").unlink(),
        "no_model": lambda copy: shutil.rmtree(copy / "model"),
        "no_data": lambda copy: shutil.rmtree(copy / "data"),
        "no_settings": lambda copy: (copy / "config.toml").unlink(),
        "edited_settings": lambda copy: replace_text(copy / "config.toml", "num_steps = 4", "num_steps = four"),
        "misspelt_settings": lambda copy: replace_text(copy / "config.toml", "num_steps", "num_step"),
        "newer": lambda copy: replace_text(copy / "model" / "config.json", '"format": 1', '"format": 9'),
        "cut_config": lambda copy: os.truncate(copy / "model" / "config.json", 300),
        "gone_class": lambda copy: replace_text(copy / "model" / "config.json", "gpssm.posteriors.vcdt:VCDT", "gpssm.gone:VCDT"),
        "cut_status": lambda copy: os.truncate(copy / "status.json", 20),
        "odd_status": lambda copy: replace_text(copy / "status.json", "finished", "resting"),
        "cut_metrics": lambda copy: os.truncate(copy / "metrics.json", 100),
    }
    for name, damage in damages.items():
        shutil.copytree(folder / "run", folder / name)
        damage(folder / name)


def replace_text(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("bad")
    write_tables(folder)
    write_other_files(folder)
    write_runs(folder)
    return folder


@pytest.fixture
def workplace(folder, monkeypatch):
    """That folder, in which nothing that takes long may begin, and another process holds the run `unfinished`."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("GPSSM_JAX_CACHE", "off")
    monkeypatch.setenv("GPSSM_DATA", str(folder / "benchmarks"))
    monkeypatch.setenv("GPSSM_CACHE", str(folder / "benchmarks"))
    monkeypatch.setattr("warnings.showwarning", None)

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("work began before the input was looked at")

    for place in WORK:
        module, _, name = place.partition(":")
        monkeypatch.setattr(importlib.import_module(module), name, refuse)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else b"" for p in folder.rglob("*") if p.name != ".lock"}


def agrees(message: str, expected: str) -> bool:
    pattern = ".*".join(re.escape(part) for part in expected.strip().split("…"))
    return re.fullmatch(pattern, message) is not None


@pytest.mark.parametrize(("call", "message"), rows())
def test_bad_input_gets_the_message_of_the_page_at_once_and_changes_nothing(workplace, capsys, call, message):
    before = contents(workplace)
    if call.startswith("gpssm "):
        with run.claimed(workplace / "unfinished"):
            code = cli.run(shlex.split(call)[1:])
        said = capsys.readouterr().err.splitlines()
        assert code == 2, said
        assert len(said) <= 2  # it may have said that it looks for a start
        told = said[-1].removeprefix("error: ")
    else:
        result = gpssm.load("run/model")
        names = {"gpssm": gpssm, "np": np, "pd": pd, "frame": frame(), "data": result.data, "result": result, "key": jr.key(0)}
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            eval(call, names)
        told = " ".join(str(caught.value).split())
    assert agrees(told, message), told
    assert contents(workplace) == before


def test_the_page_holds_more_than_forty_kinds_for_the_command_line_and_for_python():
    calls = [row.values[0] for row in rows()]
    assert len(set(calls)) == len(calls)
    assert sum(call.startswith("gpssm ") for call in calls) > 40
    assert sum(not call.startswith("gpssm ") for call in calls) > 20
