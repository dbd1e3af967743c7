"""`datasets`: the named benchmark data."""

from typing import Annotated

import typer
from rich.table import Table

from gpssm import datasets
from gpssm.commands import console
from gpssm.commands.console import Json, show
from gpssm.tables import nearest

Name = Annotated[str, typer.Argument(metavar="NAME", help="Of a benchmark; `gpssm datasets list` tells them.")]


def list_benchmarks(json: Json = None) -> None:
    """Every benchmark by name."""
    console.check_writable(json)
    table = Table(box=None, header_style="bold", pad_edge=False)
    for head in ("name", "title", "what it is"):
        table.add_column(head)
    for benchmark in datasets.BENCHMARKS.values():
        table.add_row(benchmark.name, benchmark.title, benchmark.description)
    show(table)
    console.write_json(json, {name: benchmark.title for name, benchmark in datasets.BENCHMARKS.items()})


def fetch(name: Name) -> None:
    """Get a benchmark's file, if it is not here yet, and check it."""
    data = _known(name).load()
    show(f"{name}: {data.num_rows} rows are here, and are the right ones.")


def describe(name: Name, json: Json = None) -> None:
    """Where a benchmark comes from, and what is in it."""
    console.check_writable(json)
    benchmark = _known(name)
    data = benchmark.load()
    show(f"{benchmark.title}: {benchmark.description}")
    show(f"Source: {benchmark.source}. The literature trains on the first {100 * benchmark.train_fraction:.0f} %.")
    show(data.describe())
    content = {"name": name, "title": benchmark.title, "rows": data.num_rows, "source": benchmark.source}
    console.write_json(json, content | {"outputs": list(data.output_names), "controls": list(data.control_names)})


def _known(name: str) -> datasets.Benchmark:
    if name not in datasets.names():
        raise ValueError(
            f"There is no benchmark '{name}'{nearest(name, datasets.names())}. There are: {', '.join(datasets.names())}."
        )
    return datasets.benchmark(name)
