"""What an experiment writes: one row a fit in `results.json`, and a Markdown table beside the numbers of the paper.

Everything is written again whenever a method is done, so that a run that is cut short leaves what it has.
"""

import json
import math
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import equinox
import jax
import numpy as np

from gpssm.atomic import present_folder, write_atomically
from gpssm.save import load, save

Say = Callable[[str], None]
RESULTS, TABLE, FITS = "results.json", "table.md", "fits"


@dataclass(frozen=True)
class Row:
    """One method on one dataset with one seed: what was measured, and under the same names what was published."""

    experiment: str
    dataset: str
    method: str
    seed: int
    metrics: dict[str, float]
    seconds: float  # this fit's share of the time of the program that it ran in
    published: dict[str, float] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """All of an experiment so far."""

    experiment: str
    is_quick: bool
    settings: dict[str, Any]
    rows: tuple[Row, ...]
    text: str  # Markdown
    figures: tuple[str, ...] = ()
    is_complete: bool = False
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON: a number that is not finite becomes null."""
        return _plain(asdict(self) | {"device": device(), "versions": versions()})

    def write(self, out: Path) -> None:
        """`results.json` and `table.md` in the folder `out`."""
        told = "" if self.is_complete else "**Unfinished**: the same command goes on.\n\n"
        quick = (
            "**Quick**: small sizes and few steps, to see that it runs; not the numbers to quote.\n\n" if self.is_quick else ""
        )
        write_atomically(out / RESULTS, (json.dumps(self.to_dict(), indent=1) + "\n").encode())
        write_atomically(out / TABLE, (told + quick + self.text + "\n" + footer(self)).encode())


def footer(report: Report) -> str:
    """Where and how long."""
    return f"\nMade on {device()} with JAX {jax.__version__}; {report.seconds:.0f} seconds in this call.\n"


def device() -> str:
    """The machine that the fits run on, and the precision."""
    kind = jax.devices()[0].device_kind
    name = platform.processor() or platform.machine() if jax.default_backend() == "cpu" else kind
    return f"{name} ({jax.default_backend()}, {jax.numpy.result_type(float)})"


def versions() -> dict[str, str]:
    """Of what the numbers depend on."""
    return {"python": platform.python_version(), "jax": jax.__version__, "equinox": equinox.__version__, "numpy": np.__version__}


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; the first column is text, the others numbers."""
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows]) + "\n"


def mean_and_error(values: Sequence[float], digits: int = 3) -> str:
    """`mean ± standard error` of one number a seed."""
    array = np.asarray(values, float)
    if not len(array) or not np.isfinite(array).all():
        return "–" if not len(array) else "not finite"
    told = f"{array.mean():.{digits}f}"
    return told if len(array) == 1 else f"{told} ± {array.std(ddof=1) / math.sqrt(len(array)):.{digits}f}"


def of(rows: Sequence[Row], metric: str, **chosen: Any) -> list[float]:
    """One metric of the rows with these fields, in the order of the rows."""
    matching = [row for row in rows if all(getattr(row, name) == value for name, value in chosen.items())]
    return [row.metrics[metric] for row in matching if metric in row.metrics]


def check_question(out: Path, settings: Any) -> None:
    """Raise where `out` holds the fits of another experiment; lay this one's settings down where there are none."""
    folder = out / FITS / "question"
    asked = {"settings": asdict(settings), "precision": str(jax.numpy.result_type(float))}
    if not present_folder(folder).is_dir():
        save(folder, asked)
        return
    kept = load(folder)
    if kept != asked:
        old, new = kept["settings"], asked["settings"]
        names = [name for name in new if old.get(name) != new[name]] or ["precision"]
        raise ValueError(
            f"{out} holds this experiment with other settings ({', '.join(names)}): expected the same ones, to go on with it. "
            "Choose another folder with --out, or remove that one."
        )


def clock() -> Callable[[], float]:
    """A function that gives the seconds since now."""
    began = time.perf_counter()
    return lambda: time.perf_counter() - began


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [_plain(part) for part in value]
    if isinstance(value, float | np.floating):
        return float(value) if math.isfinite(value) else None
    return int(value) if isinstance(value, np.integer) else value
