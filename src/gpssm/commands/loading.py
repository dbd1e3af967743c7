"""From what stands on the command line to a dataset: a table's columns, or a benchmark by its name."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from gpssm import config as configuration
from gpssm import datasets
from gpssm.config import Config, DataSettings
from gpssm.data import Dataset, Scaling, read_table
from gpssm.readers import TEXT_SEPARATORS
from gpssm.run import Run, training_part
from gpssm.tables import UNEVEN_TOLERANCE, nearest

Data = Annotated[str, typer.Argument(metavar="DATA", help="A CSV, TSV, Parquet or MATLAB file, or the name of a benchmark.")]
MaybeData = Annotated[
    str | None,
    typer.Argument(
        metavar="DATA", help="A CSV, TSV, Parquet or MATLAB file, or the name of a benchmark. Not needed with --resume."
    ),
]
Outputs = Annotated[str | None, typer.Option("--outputs", metavar="Y1,Y2", help="Columns to model.")]
Controls = Annotated[str | None, typer.Option("--controls", metavar="U1,U2", help="Columns that act on them.")]
Sequence = Annotated[str | None, typer.Option("--sequence", metavar="COLUMN", help="Column that tells sequences apart.")]
Time = Annotated[str | None, typer.Option("--time", metavar="COLUMN", help="Column of times, evenly spaced.")]


def load_data(settings: DataSettings) -> Dataset:
    """The dataset that `settings` describe."""
    source = settings.source
    if not source:
        raise ValueError("No data are named: give a file, or a benchmark's name, as the first argument.")
    if source in datasets.names() and not Path(source).exists():
        if settings.sequence or settings.time:
            raise ValueError(f"The benchmark {source} has one sequence and no column of times: leave out --sequence and --time.")
        _check_columns(datasets.benchmark(source), settings)  # before anything is downloaded
        return _picked(datasets.load(source), settings)
    if Path(source).is_dir():
        raise ValueError(f"{source}: expected a file, came a folder. Name one file in it.")
    if not Path(source).exists() and not Path(source).suffix:
        raise FileNotFoundError(
            f"There is neither a file nor a benchmark '{source}'{nearest(source, datasets.names())}. "
            f"Benchmarks: {', '.join(datasets.names())}."
        )
    if not settings.outputs:
        raise ValueError(f"Which columns of {source} are to be modelled? Say it by --outputs, as in --outputs y1,y2.")
    is_text = Path(source).suffix.lower() in TEXT_SEPARATORS
    text = {"separator": settings.separator, "encoding": settings.encoding} if is_text else {}
    return read_table(
        source,
        list(settings.outputs),
        list(settings.controls),
        settings.sequence,
        settings.time,
        output_units=settings.output_units or None,
        control_units=settings.control_units or None,
        sampling_time=settings.sampling_time,
        time_unit=settings.time_unit,
        decimal=settings.decimal,
        **text,
    )


def like_run(run: Run, source: str) -> Dataset:
    """The dataset at `source` with the columns that a run was made with."""
    settings = run.config.data
    if source in datasets.names() and not Path(source).exists():
        settings = replace(settings, sequence=None, time=None)
    if not settings.outputs:  # the run was made of a benchmark, whole
        names = (run.data.output_names, run.data.control_names)
        settings = replace(settings, outputs=names[0], controls=names[1])
    data = load_data(replace(settings, source=source))
    ours, theirs = run.data.sampling_time, data.sampling_time
    if ours is not None and theirs is not None and abs(theirs / ours - 1) > UNEVEN_TOLERANCE:
        raise ValueError(
            f"{source} has a row every {theirs:.6g}, but the model was fitted to rows every {ours:.6g}: a step of it is one row. "
            "Resample the data, or fit a run of their own."
        )
    return data


def data_changes(
    source: str | None,
    outputs: str | None,
    controls: str | None,
    sequence: str | None,
    time: str | None,
    fraction: float | None,
) -> dict[str, object]:
    """What the command line says about data, as changes to the table [data] of a configuration."""
    from gpssm.commands.console import comma_list

    changes: dict[str, object] = {"source": source, "sequence": sequence, "time": time, "train_fraction": fraction}
    changes["outputs"] = list(comma_list(outputs)) if outputs is not None else None
    changes["controls"] = list(comma_list(controls)) if controls is not None else None
    return {name: value for name, value in changes.items() if value is not None}


def _check_columns(benchmark: datasets.Benchmark, settings: DataSettings) -> None:
    """A benchmark has the columns it has: others are refused by their nearest name."""
    for kind, wanted, known in (
        ("output", settings.outputs, benchmark.output_name),
        ("control", settings.controls, benchmark.control_name),
    ):
        for name in wanted:
            if name != known:
                raise ValueError(
                    f"the benchmark {settings.source} has no {kind} '{name}'{nearest(name, [known])}. There is: {known}."
                )


def _picked(data: Dataset, settings: DataSettings) -> Dataset:
    if settings.outputs and not settings.controls and data.num_controls:
        return replace(data, controls=tuple(values[:, :0] for values in data.controls), control_names=(), control_units=())
    return data


def check_learnable(config: Config, data: Dataset) -> None:
    """Raise where there is too little for anything to be learnt, before any work is done."""
    fewest = 20
    if max(data.lengths) < fewest:
        raise ValueError(f"The longest sequence has {max(data.lengths)} rows; expected at least {fewest}. Give more data.")
    configuration.check_own_parts(config, data.num_outputs, data.num_controls)
    train, has_held_out = training_part(config, data)
    try:
        Scaling.of(train)
    except ValueError as error:
        part = f"in the part that trains, the first {100 * config.data.train_fraction:g} %, " if has_held_out else ""
        raise ValueError(f"{part}{error}") from None
