"""The wheel carries everything: installed into an empty environment, it works from another folder."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy, as pip builds it; that takes a package index."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run([sys.executable, "-m", "pip", "wheel", "--no-deps", "-q", "-w", "dist", "."], cwd=folder, check=True)
    return next((folder / "dist").glob("*.whl"))


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_the_package(wheel):
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("gpssm/")}
    files = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src").rglob("*.*") if "__pycache__" not in path.parts}
    assert packed == {name for name in files if (ROOT / "src" / name).is_file()}


@pytest.mark.slow
def test_an_empty_environment_with_the_wheel_fits_reports_and_forecasts_from_another_folder(wheel, tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "empty"], cwd=tmp_path, check=True)
    subprocess.run(["empty/bin/python", "-m", "pip", "install", "-q", wheel], cwd=tmp_path, check=True)
    shutil.copy(ROOT / "examples" / "plant.csv", tmp_path)
    (tmp_path / "small.toml").write_text(
        "[start]\nstate_dim = 1\nfree_run = 0\nnum_inducing = 5\n[fit]\nnum_steps = 4\nnum_samples = 2\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "XLA"))}
    for line in (
        "fit plant.csv --outputs temperature --controls valve --time time --config small.toml --out run",
        "report run",
        "forecast run --steps 5 --controls plant.csv --out forecast.csv",
    ):
        subprocess.run(["empty/bin/gpssm", *line.split()], cwd=tmp_path, check=True, env=environment)
    assert "<svg" in (tmp_path / "run" / "report.html").read_text() or "chart" in (tmp_path / "run" / "report.html").read_text()
    assert len((tmp_path / "forecast.csv").read_text().splitlines()) == 6
