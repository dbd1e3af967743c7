"""What a chart is: titles, and series of numbers that `chart.js` draws.

A colour is the place of a series in the palette, "ink" for what was measured, "muted" for a reference. Series of one `group`
share an entry of the legend, and are hidden together; charts of one `link` are zoomed together; `view` is the zoom to begin with.
"""

from collections.abc import Iterable
from typing import Any, TypeAlias

import numpy as np

MOST_POINTS = 3000  # of one line
NORMAL_90 = 1.6448536269514722
NUM_COLOURS = 6
INK, MUTED, CONTROL = "ink", "muted", 6
DASHES = ("", "7 3", "2 3")  # tell apart what shares a colour

Chart: TypeAlias = dict[str, Any]


def chart(title: str, x: str, y: str, series: Iterable[Chart], *, note: str = "", **more: Any) -> Chart:
    return {"title": title, "x": x, "y": y, "note": note, "series": list(series), **more}


def line(name: str, x: Any, y: Any, colour: Any = 0, **more: Any) -> Chart:
    return {"kind": "line", "name": name, "colour": colour, **thinned(x=x, y=y), **more}


def points(name: str, x: Any, y: Any, colour: Any = INK, **more: Any) -> Chart:
    return {"kind": "points", "name": name, "colour": colour, **thinned(x=x, y=y), **more}


def band(name: str, x: Any, low: Any, high: Any, colour: Any = 0, **more: Any) -> Chart:
    return {"kind": "band", "name": name, "colour": colour, **thinned(x=x, low=low, high=high), **more}


def bars(name: str, x: Any, y: Any, width: float, colour: Any = 0) -> Chart:
    return {"kind": "bars", "name": name, "colour": colour, "width": width, **thinned(x=x, y=y)}


def ticks(name: str, x: Any, colour: Any = 1) -> Chart:
    """Marks on the axis."""
    return {"kind": "ticks", "name": name, "colour": colour, **thinned(x=x)}


def model_line(name: str, i: int, x: Any, y: Any) -> Chart:
    """The line of the i-th model compared; the first is drawn boldest."""
    dash = DASHES[i // NUM_COLOURS % len(DASHES)]
    return line(name, x, y, i % NUM_COLOURS, width=2.6 if i == 0 else 1.5, dash=dash, markers=True)


def section(name: str, title: str, text: str, charts: Iterable[Chart], *, columns: int = 1) -> dict[str, Any]:
    return {"id": name, "title": title, "text": text, "charts": list(charts), "columns": columns}


def thinned(**arrays: Any) -> dict[str, list[float | None]]:
    """Lists of numbers of five digits, null for what is not finite, every n-th where there are too many."""
    every = max(1, -(-len(next(iter(arrays.values()))) // MOST_POINTS))
    return {name: [number(v) for v in np.asarray(values, float)[::every]] for name, values in arrays.items()}


def number(value: float) -> float | None:
    return float(f"{value:.5g}") if np.isfinite(value) else None
