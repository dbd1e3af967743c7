"""`python -m benchmarks.table ROWS.jsonl ... [--plot FILE.png]`: the rows as a Markdown table, and growth as a picture."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.datasets import Case

COLUMNS: dict[str, tuple[tuple[str, str], ...]] = {
    "step": (
        ("family", ""), ("chain", ""), ("precision", ""), ("seconds", ".4f"), ("floor_seconds", ".4f"), ("ratio", ".2f"),
        ("compile_seconds", ".1f"), ("memory_bytes", "bytes"),
    ),
    "growth": (("variable", ""), ("value", ""), ("family", ""), ("chain", ""), ("seconds", ".4f"), ("ratio", ".2f")),
    "memory": (("steps", ""), ("samples", ""), ("chain", ""), ("precision", ""), ("seconds", ".2f"), ("peak_bytes", "bytes")),
    "accuracy": (("problem", ""), ("method", ""), ("seconds", ".2f"), ("nlpd", ".3f"), ("rmse", ".3f")),
    "convergence": (
        ("problem", ""), ("seed", ""), ("method", ""), ("final_bound", ".2f"), ("target", ".2f"), ("steps_to_target", ""),
        ("seconds_to_target", ".2f"), ("compile_seconds", ".1f"),
    ),
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.table", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--plot", type=Path, help="of growth")
    options = parser.parse_args(arguments)
    rows = [json.loads(line) for file in options.files for line in file.read_text().splitlines()]
    for kind in dict.fromkeys(row["benchmark"] for row in rows):
        print(table(kind, [row for row in rows if row["benchmark"] == kind]), end="\n\n")
    if options.plot is not None:
        plot([row for row in rows if row["benchmark"] == "growth"], options.plot)


def table(kind: str, rows: list[dict[str, Any]]) -> str:
    """Markdown, a line a row; a row that has only an error says so."""
    columns = COLUMNS[kind]
    lines = ["| " + " | ".join(name.replace("_", " ") for name, _ in columns) + " |", "|---" * len(columns) + "|"]
    for row in rows:
        row = {**row, "value": row.get(row.get("variable"))}
        lines.append("| " + " | ".join(_entry(row.get(name), how) for name, how in columns) + " |")
    return "\n".join(lines)


def _entry(value: Any, how: str) -> str:
    if value is None:
        return "-"
    if how == "bytes":
        return f"{value / 2**20:.0f} MiB"
    return format(value, how)


def plot(rows: list[dict[str, Any]], file: Path) -> None:
    """A panel a variable: seconds a step along each chain and the floor; axes are logarithmic, the paper's scale is marked."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in rows if "seconds" in row]
    variables = list(dict.fromkeys(row["variable"] for row in rows))
    figure, axes = plt.subplots(1, len(variables), figsize=(3.2 * len(variables), 3.4), sharey=True, layout="constrained")
    for axis, variable in zip([axes] if len(variables) == 1 else axes, variables, strict=True):
        of_variable = [row for row in rows if row["variable"] == variable]
        for key in dict.fromkeys((row["family"], row["chain"]) for row in of_variable):
            chosen = [row for row in of_variable if (row["family"], row["chain"]) == key]
            axis.loglog([row[variable] for row in chosen], [row["seconds"] for row in chosen], "o-", label=" ".join(key))
            if key == (of_variable[0]["family"], of_variable[0]["chain"]):
                floors = [row["floor_seconds"] for row in chosen]
                axis.loglog([row[variable] for row in chosen], floors, "--", color="0.5", label="floor", zorder=0)
        axis.axvline(getattr(Case(), variable), color="0.85", zorder=-1)
        values = sorted({row[variable] for row in of_variable})
        axis.set_xticks(values, [f"{value:,}" for value in values])
        axis.set_xticks([], minor=True)
        axis.set_xlabel(variable)
    figure.get_axes()[0].set_ylabel("seconds a step")
    figure.get_axes()[0].legend(fontsize="small", frameon=False)
    figure.savefig(file, dpi=150)


if __name__ == "__main__":
    main(sys.argv[1:])
