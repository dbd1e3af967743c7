"""The sections that set the model beside what happened: the data, forecasts, scores and calibration."""

from typing import Any

import numpy as np

from gpssm._types import PRNGKey
from gpssm.data import Dataset
from gpssm.evaluate import LEVELS, Evaluation
from gpssm.filter import FilteredSequence
from gpssm.filter import filter as run_filter
from gpssm.forecasts import Forecast
from gpssm.predict import forecast
from gpssm.report.charts import (
    CONTROL,
    INK,
    MUTED,
    NORMAL_90,
    Chart,
    band,
    bars,
    chart,
    line,
    model_line,
    number,
    points,
    section,
    ticks,
)
from gpssm.run import Run

MOST_SEQUENCES, MOST_CHANNELS, MOST_AHEAD, ROWS_BEFORE = 3, 6, 200, 60


def data_section(run: Run) -> dict[str, Any]:
    """Every channel over time, with its gaps, and where the held-out part begins."""
    data, charts = run.data, []
    for i in range(min(data.num_sequences, MOST_SEQUENCES)):
        charts += [_channel(run, i, j, False) for j in range(min(data.num_outputs, MOST_CHANNELS))]
        charts += [_channel(run, i, j, True) for j in range(min(data.num_controls, MOST_CHANNELS))]
    text = "The outputs that were modelled, and what acts on them."
    if max(run.fitted().data.lengths) < max(data.lengths):
        text += " What lies to the right of the mark was held out of the fit."
    if data.num_sequences > MOST_SEQUENCES:
        text += f" The first {MOST_SEQUENCES} of {data.num_sequences} sequences are shown."
    if max(data.num_outputs, data.num_controls) > MOST_CHANNELS:
        text += f" Of {data.num_outputs} outputs and {data.num_controls} controls, at most {MOST_CHANNELS} each are shown."
    return section("data", "The data", text, charts)


def _channel(run: Run, i: int, j: int, is_control: bool) -> Chart:
    data = run.data
    names, units = (data.control_names, data.control_units) if is_control else (data.output_names, data.output_units)
    values = (data.controls if is_control else data.outputs)[i][:, j]
    rows, label = time_axis(data, data.lengths[i])
    train_length = run.fitted().data.lengths[i]
    marks = [{"x": number(rows[train_length]), "label": "held out →"}] if train_length < data.lengths[i] else []
    is_missing = np.isnan(values)
    series = [line(names[j], rows, values, CONTROL if is_control else INK, width=1.4, step=is_control)]
    note = ""
    if is_missing.any():
        series.append(ticks("missing", rows[is_missing]))
        note = f"{is_missing.sum()} of {len(values)} values are missing."
    where = f" · {data.sequence_names[i]}" if data.num_sequences > 1 else ""
    title = f"{named(names[j], units[j])}{where}{' (control)' if is_control else ''}"
    return chart(title, label, "", series, note=note, marks=marks, height=170, link=f"sequence {i}")


def named(name: str, unit: str) -> str:
    return f"{name} ({unit})" if unit else name


def time_axis(data: Dataset, length: int, first: int = 0) -> tuple[np.ndarray, str]:
    """Rows, or times where the sampling time is known, and what to call them."""
    rows = np.arange(first, first + length)
    if data.sampling_time is None:
        return rows, "row"
    return rows * data.sampling_time, f"time {f'({data.time_unit})' if data.time_unit else ''}".strip()


def forecast_section(run: Run, key: PRNGKey) -> dict[str, Any]:
    """A fan from the last training row on, and each row forecast from those before it."""
    result, data = run.fitted(), run.data
    done = run_filter(result, data[0], key=key)[0]
    first, num_rows = result.data.lengths[0], data.lengths[0]
    ahead, charts = min(num_rows - first, MOST_AHEAD), []
    future = data.controls[0][first:] if data.num_controls else None
    made = forecast(result, ahead, key=key, controls=future, num_samples=400) if ahead else None
    for j in range(min(data.num_outputs, MOST_CHANNELS)):
        if made is not None:
            charts.append(_fan(data, made, j))
        charts.append(_one_step(data, done, j, max(0, first - ROWS_BEFORE) if first < num_rows else max(0, num_rows - 200)))
    text = "Bands that should hold 90 % (the inner ones 50 %) of what happens."
    if first < num_rows:
        text += " The model was fitted without the held-out rows" + (
            ", and was told their controls." if data.num_controls else "."
        )
    if data.num_sequences > 1:
        text += f" Shown is the first of {data.num_sequences} sequences."
    return section("forecasts", "Forecasts", text, charts)


def _fan(data: Dataset, made: Forecast, j: int) -> Chart:
    first, ahead = made.first_step, made.num_steps
    time, label = time_axis(data, ahead, first)
    low, high = made.interval(0.9)
    inner_low, inner_high = made.interval(0.5)
    past = slice(max(0, first - ROWS_BEFORE), first + ahead)
    series = [
        band("90 % band", time, low[:, j], high[:, j]),
        band("50 % band", time, inner_low[:, j], inner_high[:, j]),
        line("mean", time, made.mean[:, j]),
        points("observed", time_axis(data, first + ahead)[0][past], data.outputs[0][past, j], size=2.2),
    ]
    marks = [{"x": number(time[0]), "label": "forecast from here →"}]
    name, unit = data.output_names[j], data.output_units[j]
    title = f"{name}: {ahead} row{'s' if ahead > 1 else ''} ahead, from the end of the training data"
    return chart(title, label, named(name, unit), series, marks=marks, height=320)


def _one_step(data: Dataset, done: FilteredSequence, j: int, begin: int) -> Chart:
    mean = done.predicted_means[begin:, j]
    half = NORMAL_90 * np.sqrt(done.predicted_covariances[begin:, j, j])
    time, label = time_axis(data, data.lengths[0] - begin, begin)
    series = [
        band("90 % band", time, mean - half, mean + half),
        line("one row ahead", time, mean),
        points("observed", time, data.outputs[0][begin:, j], size=2.2),
    ]
    name, unit = data.output_names[j], data.output_units[j]
    return chart(f"{name}: each row forecast from those before it", label, named(name, unit), series, height=240)


def score_section(evaluation: Evaluation) -> dict[str, Any]:
    """Scores by the row ahead, every model beside the first."""
    steps = np.arange(1, evaluation.horizon + 1)
    titles = (
        ("rmse", "Error by horizon", "RMSE"),
        ("nlpd", "Surprise by horizon", "negative log density, nats"),
        ("crps", "Error and bands together, by horizon", "CRPS"),
        ("sharpness", "Width of the 90 % band, by horizon", "width"),
    )
    charts = []
    for metric, title, label in titles:
        table = evaluation.by_horizon(metric)
        series = [model_line(name, i, steps, table[name]) for i, name in enumerate(table.columns)]
        charts.append(chart(title, "rows ahead", label, series, height=280, robust="high"))
    text = (
        f"{evaluation.num_windows} forecasts of {evaluation.horizon} rows each, from different rows of the held-out part. In "
        "standard units: 1 is the standard deviation of the output over the training data. Lower is better; a narrow band is "
        "good only if it holds what it claims."
    )
    return section("scores", "Beside simpler models", text, charts, columns=2)


def calibration_section(evaluation: Evaluation) -> dict[str, Any]:
    """What bands claim and what they hold, and where in its forecast the outcome fell."""
    levels = [100 * level for level in LEVELS]
    series = [line("perfect", [45, 100], [45, 100], MUTED, dash="4 4", width=1.4)]
    for i, (name, score) in enumerate(evaluation.scores().items()):
        series.append(model_line(name, i, levels, [100 * score.values[f"coverage{level:g}"] for level in levels]))
    coverage = chart("Coverage", "the band claims (%)", "it holds (%)", series, height=300)
    own = own_name(evaluation)
    counts, edges = np.histogram(evaluation.pit(own), bins=10, range=(0, 1))
    density = counts / max(counts.sum(), 1) * len(counts)
    even = line("perfect", [0, 1], [1, 1], MUTED, dash="4 4", width=1.4)
    pit = chart(
        "PIT histogram",
        "share of the forecast that lay below the outcome",
        "density",
        [bars(own, edges[:-1], density, 0.1), even],
        height=300,
        zero=True,
    )
    text = (
        "Can the bands be believed? Coverage: on the diagonal, bands hold what they claim; above it they are too wide, below too "
        "narrow. PIT: flat is right; a U says overconfident, a hump too cautious, a slope biased."
    )
    return section("calibration", "Calibration", text, [coverage, pit], columns=2)


def own_name(evaluation: Evaluation) -> str:
    """The model that the report is about."""
    return "gpssm" if "gpssm" in evaluation.errors else next(iter(evaluation.errors))
