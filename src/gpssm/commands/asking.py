"""`forecast`, `filter`, `evaluate` and `report`: verbs that ask a run."""

from pathlib import Path
from typing import Annotated, Any

import jax.random as jr
import numpy as np
import pandas as pd
import typer
from jaxtyping import Float

from gpssm import baselines, readers
from gpssm import run as runs
from gpssm.atomic import write_atomically
from gpssm.commands import console, loading
from gpssm.commands.console import Json, say, show
from gpssm.config import DataSettings
from gpssm.data import Dataset
from gpssm.evaluate import rolling_origin
from gpssm.filter import filter as follow
from gpssm.report import write_report
from gpssm.run import Run
from gpssm.tables import as_number, unknown

NORMAL_90 = 1.6448536269514722
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")]
OutTable = Annotated[Path | None, typer.Option("--out", metavar="FILE.csv", help="Write the table there; otherwise it is shown.")]


def forecast(
    run: RunFolder,
    steps: Annotated[int, typer.Option("--steps", metavar="N", help="Rows to forecast.")],
    data: Annotated[
        str | None, typer.Option("--data", metavar="DATA", help="Go on from its end; by default, the run's own.")
    ] = None,
    controls: Annotated[
        Path | None, typer.Option("--controls", metavar="FUTURE", help="Table with the controls' columns, a row for each step.")
    ] = None,
    quantiles: Annotated[
        str | None,
        typer.Option("--quantiles", metavar="Q,..", help="Columns of the table; 0.05,0.5,0.95 if the run says no other."),
    ] = None,
    out: OutTable = None,
    json: Json = None,
) -> None:
    """Forecast the rows that follow the data, with quantiles."""
    console.check_writable(out, json, read=(data, controls))
    console.at_least(steps, 1, "--steps")
    asked = None if quantiles is None else console.quantile_list(quantiles)
    opened = runs.load_run(run)
    chosen = asked or opened.config.forecast.quantiles
    result = opened.fitted()
    history = loading.like_run(opened, data) if data is not None else opened.data
    future = future_controls(controls, history, steps, opened.config.data)
    with console.timed("forecast"):
        key = jr.key(opened.config.seed)
        forecaster = runs.forecaster(result, opened.config.forecast.num_samples)
        tables = []
        for i, name in enumerate(history.sequence_names):
            made = forecaster.forecast(history[i], steps, future, key=jr.fold_in(key, i))
            table = made.to_dataframe(chosen)
            tables.append(table if history.num_sequences == 1 else table.assign(sequence=name))
        _deliver(pd.concat(tables, ignore_index=True), out, json)


def filter(run: RunFolder, data: loading.Data, out: OutTable = None, json: Json = None) -> None:
    """States and one-step predictions along the data, with bands; gaps are filled."""
    console.check_writable(out, json, read=[data])
    opened = runs.load_run(run)
    opened.fitted()
    dataset = loading.like_run(opened, data)
    with console.timed("filter"):
        _deliver(filtered_table(opened, dataset), out, json)


def evaluate(
    run: RunFolder,
    data: loading.Data,
    horizon: Annotated[int, typer.Option("--horizon", metavar="N", help="Rows of each forecast.")] = 30,
    stride: Annotated[int, typer.Option("--stride", metavar="N", help="Rows between forecasts.")] = 1,
    start: Annotated[int | None, typer.Option("--start", metavar="ROW", help="First row to forecast.")] = None,
    json: Json = None,
) -> None:
    """Rolling-origin scores of the model on data, every baseline beside it."""
    console.check_writable(json, read=[data])
    for value, smallest, option in ((horizon, 1, "--horizon"), (stride, 1, "--stride"), (start, 1, "--start")):
        console.at_least(value, smallest, option)
    opened = runs.load_run(run)
    result = opened.fitted()
    dataset = loading.like_run(opened, data)
    first = start if start is not None else first_origin(opened, dataset)
    if all(int(n) - horizon < s for n, s in zip(dataset.lengths, np.broadcast_to(first, len(dataset)), strict=True)):
        raise ValueError(
            f"No window of {horizon} rows fits after row {first} of sequences of {list(dataset.lengths)[:5]} rows. "
            "Choose a smaller --horizon or an earlier --start."
        )
    with console.timed("evaluate"):
        say("fitting the baselines to the run's training data")
        rivals: dict[str, Any] = dict(baselines.fit_all(result.data, seed=opened.config.seed))
        evaluation = rolling_origin(
            {"gpssm": runs.forecaster(result, opened.config.forecast.num_samples), **rivals},
            dataset,
            horizon=horizon,
            stride=stride,
            start=first,
            scaling=result.scaling,
            key=jr.key(opened.config.seed),
            report=say,
        )
        show(f"Forecasts begin at row {first} (the first is 0), every {stride} rows.")
        console.show_scores(evaluation)
        console.write_json(json, evaluation.to_dict())


def report(
    run: RunFolder,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE.html", help="By default RUN/report.html.")] = None,
) -> None:
    """One self-contained HTML file that tells what was fitted, how good it is, and what f looks like."""
    console.check_writable(out)
    opened = runs.load_run(run)
    opened.fitted()
    with console.timed("report"):
        show(f"Report: {write_report(opened, out or run / 'report.html')}")


def first_origin(run: Run, data: Dataset) -> int | list[int]:
    """Where held-out data begin: after the training rows if these are the run's own data, else after a quarter."""
    if data == run.data:
        return list(run.fitted().data.lengths)
    return max(1, min(data.lengths) // 4)


def future_controls(
    path: Path | None, history: Dataset, steps: int, settings: DataSettings
) -> Float[np.ndarray, "time control"] | None:
    """The rows to come of the controls, read from a table with columns of their names."""
    if path is None:
        if history.num_controls and steps > 1:
            raise ValueError(
                f"The model has the controls {', '.join(history.control_names)}: give their next {steps - 1} rows, as a table "
                "with these columns, by --controls FUTURE.csv."
            )
        return np.zeros((0, history.num_controls)) if history.num_controls else None
    if history.num_controls == 0:
        raise ValueError("The model was fitted without controls: leave out --controls.")
    with readers.naming_file(path):
        ending = path.suffix.lower()
        if ending not in (".parquet", ".pq", *readers.TEXT_SEPARATORS):
            raise ValueError(f"expected the ending .csv, .tsv, .tab, .parquet or .pq, came '{ending}'. Save it as one of these.")
        if ending in readers.TEXT_SEPARATORS:
            frame = readers.load_text(path, settings.separator, settings.encoding, history.control_names)
        else:
            frame = readers.load_parquet(path)
        columns = []
        for name in history.control_names:
            if name not in frame.columns:
                raise ValueError(unknown("column", name, [str(column) for column in frame.columns]))
            numbers = [as_number(cell, settings.decimal) for cell in frame[name].iloc[: max(steps - 1, 1)]]
            for row, number in enumerate(numbers):
                if number is None or not np.isfinite(number):
                    raise ValueError(
                        f"column '{name}', row {row + 1} below the header: expected a number, came {frame[name].iloc[row]!r}."
                    )
            columns.append(np.array(numbers, float))
        if len(frame) < steps - 1:
            raise ValueError(
                f"{len(frame)} rows of controls for {steps} steps; expected {steps - 1}. Give more rows, or ask for fewer steps."
            )
        return np.stack(columns, axis=1)


def filtered_table(run: Run, data: Dataset) -> pd.DataFrame:
    """One row a time step and sequence: outputs, one-step predictions with 90 % bands, states with theirs, gaps filled."""
    tables = []
    done = follow(run.fitted(), data, key=jr.key(run.config.seed))
    for i, (name, sequence) in enumerate(zip(data.sequence_names, done.sequences, strict=True)):
        columns: dict[str, Any] = {"sequence": name, "row": np.arange(data.lengths[i])}
        if data.sampling_time is not None:
            columns["time"] = columns["row"] * data.sampling_time
        scales = np.sqrt(np.diagonal(sequence.predicted_covariances, axis1=1, axis2=2))
        for j, output in enumerate(data.output_names):
            seen, mean, half = data.outputs[i][:, j], sequence.predicted_means[:, j], NORMAL_90 * scales[:, j]
            columns |= {output: seen, f"{output}_filled": np.where(np.isnan(seen), mean, seen), f"{output}_predicted": mean}
            columns |= {f"{output}_lower": mean - half, f"{output}_upper": mean + half}
        deviations = np.sqrt(np.diagonal(sequence.covariances, axis1=1, axis2=2))
        for k in range(sequence.means.shape[1]):
            columns |= {f"state{k + 1}": sequence.means[:, k], f"state{k + 1}_sd": deviations[:, k]}
        tables.append(pd.DataFrame(columns))
    return pd.concat(tables, ignore_index=True)


def _deliver(table: pd.DataFrame, out: Path | None, json: Path | None) -> None:
    if out is not None:
        write_atomically(out, table.to_csv(index=False).encode())
        say(f"wrote {len(table)} rows to {out}")
    else:
        formats: Any = {"time": lambda value: f"{value:.10g}"}
        show(table.to_string(index=False, float_format=lambda value: f"{value:.5g}", formatters=formats, max_rows=60))
    console.write_json(json, table.astype(object).where(table.notna(), None).to_dict(orient="records") if json else None)
