"""How a long fit shows that it is alive: a bar in the terminal, or a call after every block."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from gpssm.result import History

Report: TypeAlias = Callable[[History], None]


@contextlib.contextmanager
def reporter(progress: bool | Report, num_steps: int, description: str = "fitting") -> Iterator[Report]:
    """A function to call with the history after every block: silent, the user's own, or a bar on standard error."""
    if not isinstance(progress, bool):
        yield progress
        return
    if not progress:
        yield lambda history: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TextColumn("{task.fields[levels]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(file=sys.stderr), refresh_per_second=4) as bar:
        task = bar.add_task(description, total=num_steps, levels="compiling")

        def show(history: History) -> None:
            bar.update(task, completed=int(history.steps[-1]), levels=describe_block(history))

        yield show


def describe_block(history: History) -> str:
    """The last block in words: bound, process noise, speed."""
    done = np.diff(history.steps, prepend=0)
    speed = done[-1] / max(history.seconds[-1], 1e-9)
    noise = ", ".join(f"{scale:.3g}" for scale in history.process_scale[-1][:4])
    more = ", …" if history.process_scale.shape[1] > 4 else ""
    return f"bound {history.bound[-1]:.1f}  process noise sd {noise}{more}  {speed:.0f} steps/s"
