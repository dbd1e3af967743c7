"""How the command line speaks: results to standard output, what is going on to standard error, and JSON to a file."""

import contextlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gpssm import run as runs
from gpssm.atomic import write_atomically
from gpssm.config import check_quantiles
from gpssm.evaluate import Evaluation
from gpssm.progress import Report, describe_block
from gpssm.result import History
from gpssm.select import Ranking

SECONDS_BETWEEN_LINES = 5
Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the numbers to FILE too, for machines.")]


def show(text: Any) -> None:
    """A result, to standard output."""
    Console(highlight=False, soft_wrap=True).print(escape(text) if isinstance(text, str) else text)


def say(line: str) -> None:
    """What is going on, to standard error."""
    Console(stderr=True, highlight=False, soft_wrap=True).print(f"[dim]{escape(line)}[/dim]")


def progress() -> bool | Report:
    """A bar where there is a terminal, and a line every few seconds where there is none."""
    if sys.stderr.isatty():
        return True
    last = [time.monotonic()]

    def tell(history: History) -> None:
        if time.monotonic() - last[0] > SECONDS_BETWEEN_LINES:
            last[0] = time.monotonic()
            say(f"step {history.steps[-1]}: {describe_block(history)}")

    return tell


@contextlib.contextmanager
def timed(verb: str) -> Iterator[None]:
    """Say how long a verb took when it is done."""
    began = time.perf_counter()
    yield
    say(f"{verb} took {time.perf_counter() - began:.1f} s")


def comma_list(text: str | None) -> tuple[str, ...]:
    """The parts of `a,b,c`, blanks around them dropped."""
    return tuple(part.strip() for part in (text or "").split(",") if part.strip())


def number_or_auto(text: str | None, option: str) -> int | str | None:
    """A whole number from 1, or `auto`."""
    if text is None or text == "auto":
        return text
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{option} must be a whole number from 1, or auto, but got '{text}'.")
    return int(text)


def quantile_list(text: str) -> tuple[float, ...]:
    """The quantiles in `0.05,0.5,0.95`."""
    try:
        numbers = tuple(float(part) for part in comma_list(text))
    except ValueError:
        raise ValueError(f"--quantiles takes numbers between 0 and 1, as in 0.05,0.5,0.95, but got '{text}'.") from None
    check_quantiles(numbers)
    return numbers


def at_least(value: int | None, smallest: int, option: str) -> None:
    """Raise unless an option is large enough."""
    if value is not None and value < smallest:
        raise ValueError(f"{option} must be at least {smallest}, but got {value}.")


def check_writable(*paths: Path | None, read: Sequence[Path | str | None] = ()) -> None:
    """Raise before any work is done if a file cannot be written at the end of it, or if that would lose what is `read`."""
    taken = {Path(path).resolve() for path in read if path is not None}
    for path in paths:
        if path is None:
            continue
        if path.resolve() in taken:
            raise ValueError(f"{path} is named twice: what is written there would replace the other. Name another file.")
        taken.add(path.resolve())
        runs.check_not_part(path)
        if path.is_dir():
            raise ValueError(f"{path} is a folder; name a file to write.")
        parent = path.parent
        while not parent.exists():
            parent = parent.parent
        if not parent.is_dir():
            raise ValueError(f"{path} cannot be written: {parent} is a file, not a folder.")


def write_json(path: Path | None, content: Any) -> None:
    """Write numbers for machines, if a file is named."""
    if path is not None:
        write_atomically(path, (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode())
        say(f"wrote {path}")


def score_table(evaluation: Evaluation, title: str = "") -> Table:
    """Scores in standard units, the best log score first."""
    table = Table(title=title or None, title_justify="left", title_style="bold", header_style="bold", box=None, pad_edge=False)
    table.add_column("model")
    for head in ("rmse", "± se", "nlpd", "± se", "crps", "cover 90 %"):
        table.add_column(head, justify="right")
    scores = evaluation.scores()
    best = min(scores, key=lambda name: scores[name].nlpd)
    for name in sorted(scores, key=lambda name: scores[name].nlpd):
        score = scores[name]
        error = score.standard_errors
        cells = (score.rmse, error["rmse"], score.nlpd, error["nlpd"], score.crps)
        shown = [f"{cell:.3f}" if np.isfinite(cell) else "–" for cell in cells]
        table.add_row(name, *shown, f"{100 * score.coverage90:.0f} %", style="green" if name == best else None)
    return table


def show_scores(evaluation: Evaluation) -> None:
    """The table of an evaluation, and what its numbers are."""
    show(score_table(evaluation, f"{evaluation.num_windows} windows of {evaluation.horizon} steps"))
    show("Standard units: 1 is the standard deviation of an output over the training data. Lower is better, but for coverage.")


def sentences(lines: Sequence[str]) -> None:
    """Sentences, one a line."""
    for line in lines:
        show(f"· {line}")


def candidate_table(ranking: Ranking) -> Table:
    """Every fit, the best first."""
    evaluation = ranking.evaluation
    title = "" if evaluation is None else f": {evaluation.num_windows} windows of {evaluation.horizon} steps"
    table = Table(
        title=f"Candidates{title}", title_justify="left", title_style="bold", header_style="bold", box=None, pad_edge=False
    )
    table.add_column("candidate")
    columns = [name for name in ("rmse", "nlpd", "crps", "coverage90", "bound") if name in ranking.table]
    for name in (*columns, "seconds"):
        table.add_column(name.replace("coverage90", "cover 90 %"), justify="right")
    for place, row in enumerate(ranking.table.to_dict(orient="records")):
        cells = [_shown(name, float(row[name])) for name in columns]
        table.add_row(str(row["candidate"]), *cells, f"{row['seconds']:.1f}", style="green" if place == 0 else None)
    return table


def _shown(name: str, value: float) -> str:
    if not np.isfinite(value):
        return "–"
    return {"coverage90": f"{100 * value:.0f} %", "bound": f"{value:.1f}"}.get(name, f"{value:.3f}")
