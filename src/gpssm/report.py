"""One HTML file that tells a fit to a person: it holds its own script, style and numbers, and asks the network for nothing.

Python decides what is shown and puts the numbers in; `templates/report.js` only draws charts described by `_chart`.
"""

import html
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import jax.random as jr
import numpy as np
from jaxtyping import Float

from gpssm import config as configuration
from gpssm.atomic import write_atomically
from gpssm.emissions import LinearGaussian
from gpssm.evaluate import LEVELS, Evaluation
from gpssm.filter import filter as run_filter
from gpssm.findings import find, visited_inputs
from gpssm.params import unwrap
from gpssm.predict import forecast, posterior_states, transition_moments
from gpssm.result import FitResult
from gpssm.run import Run

MOST_POINTS = 3000  # of one line
MOST_SEQUENCES, MOST_STATES, MOST_AHEAD = 3, 4, 200
NORMAL_90 = 1.6448536269514722
BLOCK = "ink"
Chart = dict[str, Any]
Truth = Callable[..., np.ndarray]  # of states and controls


@dataclass(frozen=True)
class Units:
    """An affine map from the state of a model with one state and one output to that output, in the user's units."""

    slope: float
    offset: float
    label: str

    def there(self, states: np.ndarray) -> np.ndarray:
        return self.slope * states + self.offset

    def back(self, values: np.ndarray) -> np.ndarray:
        return (values - self.offset) / self.slope


def write_report(run: Run, path: Path, *, evaluation: Evaluation | None = None, truth: Truth | None = None) -> Path:
    """Write the report of a run to `path`; `evaluation` goes in place of the run's own, `truth` is the true f if it is known."""
    write_atomically(path, render(run, evaluation=evaluation, truth=truth).encode())
    return path


def render(run: Run, *, evaluation: Evaluation | None = None, truth: Truth | None = None) -> str:
    """The report as HTML text."""
    result, key, evaluation = run.fitted(), jr.key(run.config.seed), evaluation or run.evaluation
    words = run.metrics.get("words") or find(result, evaluation, key=key).sentences()
    sections = [
        _data_section(run),
        _forecast_section(run, key),
        *([_score_section(evaluation), _calibration_section(evaluation)] if evaluation is not None else []),
        _function_section(result, key, truth),
        _state_section(result, key),
        _bound_section(result),
    ]
    name = Path(run.config.data.source).name or "data"
    content = {"sections": [section for section in sections if section["charts"]]}
    page = files("gpssm").joinpath("templates")
    fill = {
        "TITLE": html.escape(f"GPSSM report: {name}"),
        "HEADING": html.escape(name),
        "SUBTITLE": html.escape(_subtitle(run)),
        "TILES": _tiles(run, evaluation),
        "WORDS": "".join(f"<li>{html.escape(sentence)}</li>" for sentence in words),
        "SCORES": _score_html(evaluation) if evaluation is not None else "",
        "SETTINGS": _settings_html(run),
        "STYLE": page.joinpath("report.css").read_text(encoding="utf-8"),
        "SCRIPT": page.joinpath("report.js").read_text(encoding="utf-8"),
        "CONTENT": json.dumps(content, allow_nan=False, separators=(",", ":")).replace("</", "<\\/"),
    }
    text = page.joinpath("report.html").read_text(encoding="utf-8")
    pieces = text.split("@@")  # TITLE and the others stand between two of these marks
    return "".join(fill[piece] if i % 2 else piece for i, piece in enumerate(pieces))


def _chart(title: str, x: str, y: str, series: Iterable[Chart], *, note: str = "", **more: Any) -> Chart:
    return {"title": title, "x": x, "y": y, "note": note, "series": list(series), **more}


def _line(name: str, x: Any, y: Any, colour: Any = 0, **more: Any) -> Chart:
    return {"kind": "line", "name": name, "colour": colour, **_thinned(x=x, y=y), **more}


def _points(name: str, x: Any, y: Any, colour: Any = BLOCK, **more: Any) -> Chart:
    return {"kind": "points", "name": name, "colour": colour, **_thinned(x=x, y=y), **more}


def _band(name: str, x: Any, low: Any, high: Any, colour: Any = 0) -> Chart:
    return {"kind": "band", "name": name, "colour": colour, **_thinned(x=x, low=low, high=high)}


def _thinned(**arrays: Any) -> dict[str, list[float | None]]:
    """Lists of numbers of five digits, null for what is not finite, every n-th where there are too many."""
    every = -(-len(next(iter(arrays.values()))) // MOST_POINTS)
    return {name: [_number(v) for v in np.asarray(values, float)[::every]] for name, values in arrays.items()}


def _number(value: float) -> float | None:
    return float(f"{value:.5g}") if np.isfinite(value) else None


def _section(name: str, title: str, text: str, charts: Iterable[Chart], *, columns: int = 1) -> dict[str, Any]:
    return {"id": name, "title": title, "text": text, "charts": list(charts), "columns": columns}


def _subtitle(run: Run) -> str:
    result, data = run.fitted(), run.data
    outputs = ", ".join(data.output_names)
    controls = f" driven by {', '.join(data.control_names)}" if data.num_controls else ""
    sequences = f"{data.num_sequences} sequences" if data.num_sequences > 1 else "1 sequence"
    return (
        f"{outputs}{controls}. {type(result.posterior).__name__} posterior, fitted to {result.data.num_rows} of {data.num_rows} "
        f"rows in {sequences}."
    )


def _tiles(run: Run, evaluation: Evaluation | None) -> str:
    result = run.fitted()
    tiles = [
        ("state" if result.model.num_states == 1 else "states", str(result.model.num_states)),
        ("inducing points", str(result.model.transition.num_inducing)),
    ]
    if evaluation is not None:
        name = _own_name(evaluation)
        score = evaluation.score(name)
        tiles = [
            ("held-out RMSE", f"{score.rmse:.3f}"),
            ("90 % bands cover", f"{100 * score.coverage90:.0f} %"),
            ("windows scored", f"{evaluation.num_windows} × {evaluation.horizon}"),
            *tiles,
        ]
    tiles.append(("seconds of fitting", f"{run.status.get('fit_seconds', float(np.sum(result.history.seconds))):.0f}"))
    cells = (f"<div class=tile><b>{html.escape(value)}</b><span>{html.escape(label)}</span></div>" for label, value in tiles)
    return "".join(cells)


def _own_name(evaluation: Evaluation) -> str:
    return "gpssm" if "gpssm" in evaluation.errors else next(iter(evaluation.errors))


def _data_section(run: Run) -> dict[str, Any]:
    data, charts = run.data, []
    for i in range(min(data.num_sequences, MOST_SEQUENCES)):
        time, label = _time(run, data.lengths[i])
        edge = time[min(run.fitted().data.lengths[i], data.lengths[i] - 1)]
        marks = [{"x": _number(edge), "label": "held out →"}] if run.fitted().data.lengths[i] < data.lengths[i] else []
        where = f" · {data.sequence_names[i]}" if data.num_sequences > 1 else ""
        for names, units, arrays, colour in (
            (data.output_names, data.output_units, data.outputs, BLOCK),
            (data.control_names, data.control_units, data.controls, 5),
        ):
            for j, (name, unit) in enumerate(zip(names, units, strict=True)):
                values = arrays[i][:, j]
                missing = int(np.isnan(values).sum())
                note = f"{missing} of {len(values)} values are missing: the line has gaps there." if missing else ""
                is_control = arrays is data.controls
                line = _line(name, time, values, colour, width=1.2, step=is_control)
                charts.append(_chart(name + where, label, unit or name, [line], note=note, marks=marks, height=170))
    text = "The outputs that were modelled, and what acts on them. What lies to the right of the mark was held out."
    if data.num_sequences > MOST_SEQUENCES:
        text += f" The first {MOST_SEQUENCES} of {data.num_sequences} sequences are shown."
    return _section("data", "The data", text, charts, columns=2 if len(charts) > 1 else 1)


def _time(run: Run, length: int, first: int = 0) -> tuple[np.ndarray, str]:
    rows = np.arange(first, first + length)
    if run.data.sampling_time is None:
        return rows, "row"
    return rows * run.data.sampling_time, f"time {f'({run.data.time_unit})' if run.data.time_unit else ''}".strip()


def _forecast_section(run: Run, key: Any) -> dict[str, Any]:
    result, data, charts = run.fitted(), run.data, []
    filtered = run_filter(result, data[0], key=key)[0]
    first = result.data.lengths[0]
    ahead = min(data.lengths[0] - first, MOST_AHEAD)
    begin = max(0, first - 60) if ahead else max(0, data.lengths[0] - 200)
    for j, (name, unit) in enumerate(zip(data.output_names, data.output_units, strict=True)):
        if ahead:
            future = data.controls[0][first:] if data.num_controls else None
            made = forecast(result, ahead, key=key, controls=future, num_samples=400)
            time, label = _time(run, ahead, first)
            low, high = made.interval(0.9)
            inner_low, inner_high = made.interval(0.5)
            past = slice(begin, first + ahead)
            series = [
                _band("90 % band", time, low[:, j], high[:, j]),
                _band("50 % band", time, inner_low[:, j], inner_high[:, j]),
                _line("mean", time, made.mean[:, j]),
                _points("observed", _time(run, first + ahead)[0][past], data.outputs[0][past, j], size=2.2),
            ]
            mark = [{"x": _number(time[0]), "label": "forecast from here →"}]
            title = f"{name}: {ahead} rows ahead, from the last training row"
            charts.append(_chart(title, label, unit or name, series, marks=mark, height=300))
        mean = filtered.predicted_means[begin:, j]
        scale = np.sqrt(filtered.predicted_covariances[begin:, j, j])
        time, label = _time(run, data.lengths[0] - begin, begin)
        series = [
            _band("90 % band", time, mean - NORMAL_90 * scale, mean + NORMAL_90 * scale),
            _line("one step ahead", time, mean),
            _points("observed", time, data.outputs[0][begin:, j], size=2.2),
        ]
        charts.append(_chart(f"{name}: each row forecast from those before it", label, unit or name, series, height=240))
    text = "Bands that should hold 90 % (and 50 %) of what happens. The model was fitted without the held-out rows."
    return _section("forecasts", "Forecasts", text, charts)


def _score_section(evaluation: Evaluation) -> dict[str, Any]:
    steps = np.arange(1, evaluation.horizon + 1)
    titles = (("rmse", "Error by horizon (RMSE)"), ("nlpd", "Surprise by horizon (negative log density)"))
    charts = []
    for metric, title in titles:
        table = evaluation.by_horizon(metric)
        series = [
            _line(name, steps, table[name], i, width=2.4 if i == 0 else 1.4, markers=True) for i, name in enumerate(table.columns)
        ]
        charts.append(_chart(title, "rows ahead", f"{metric} (standard units)", series, height=280, robust=True))
    text = (
        f"{evaluation.num_windows} forecasts of {evaluation.horizon} rows each, from different rows of the held-out part. "
        "Standard units: 1 is the standard deviation of the output over the training data."
    )
    return _section("scores", "How good it is, beside simpler models", text, charts, columns=2)


def _calibration_section(evaluation: Evaluation) -> dict[str, Any]:
    levels = [100 * level for level in LEVELS]
    series = [_line("perfect", [0, 100], [0, 100], "muted", dash="4 4")]
    for i, (name, score) in enumerate(evaluation.scores().items()):
        shares = [100 * score.values[f"coverage{level:g}"] for level in levels]
        series.append(_line(name, levels, shares, i, width=2.4 if i == 0 else 1.4, markers=True))
    coverage = _chart("Coverage", "the band claims (%)", "it holds (%)", series, height=280)
    own = _own_name(evaluation)
    counts, edges = np.histogram(evaluation.pit(own), bins=10, range=(0, 1))
    density = counts / max(counts.sum(), 1) * len(counts)
    bars = {"kind": "bars", "name": own, "colour": 0, **_thinned(x=edges[:-1], y=density), "width": 0.1}
    even = _line("perfect", [0, 1], [1, 1], "muted", dash="4 4")
    pit = _chart("PIT histogram", "where in its forecast the outcome fell", "density", [bars, even], height=280, zero=True)
    text = (
        "Can the bands be believed? On the left, points on the diagonal: bands hold what they claim; above it they are too wide, "
        "below too narrow. On the right, flat is right; a U says overconfident, a hump says too cautious."
    )
    return _section("calibration", "Calibration", text, [coverage, pit], columns=2)


def _function_section(result: FitResult, key: Any, truth: Truth | None) -> dict[str, Any]:
    points = visited_inputs(result, key=key)
    if points.shape[1] == 1:
        chart = _one_dimensional(result, points[:, 0], truth)
        text = "What the model has learnt: where the state goes next, given where it is. The band is what it does not know of f."
        return _section("function", "The learned function", text, [chart])
    charts = _partial_dependence(result, points)
    inducing = np.asarray(unwrap(result.model.transition.inducing_inputs)).reshape(-1, points.shape[1])
    names = _input_names(result)
    series = [
        _points("visited", points[:, 0], points[:, 1], BLOCK, size=1.8),
        _points("inducing", inducing[:, 0], inducing[:, 1], 1),
    ]
    charts.append(_chart("Inducing points over the visited states", names[0], names[1], series, height=260))
    text = (
        "How each next state depends on one input, all others as they were in the data (solid: averaged over them; dashed: with "
        "the others at their medians). Bands: what the model does not know. States are in units of their own spread."
    )
    if result.model.num_states > MOST_STATES:
        text += f" The first {MOST_STATES} of {result.model.num_states} states are shown."
    return _section("function", "The learned function", text, charts, columns=2)


def function_units(result: FitResult) -> Units:
    """Axes of a learned function of one state: the output's units if the state is an output in disguise."""
    emission = unwrap(result.model.emission)
    if isinstance(emission, LinearGaussian) and result.data.num_outputs == 1:
        slope = float(np.asarray(emission.matrix)[0, 0] * result.scaling.output_scale[0])
        if abs(slope) > 1e-6:
            offset = float(result.scaling.outputs_back(np.asarray(emission.offset))[0])
            unit = result.data.output_units[0]
            return Units(slope, offset, f"{result.data.output_names[0]}{f' ({unit})' if unit else ''}")
    return Units(1.0, 0.0, "state")


def learned_line(result: FitResult, visited: Float[np.ndarray, " point"], num_points: int = 160) -> tuple[np.ndarray, ...]:
    """Inputs over the visited range and a little beyond, the mean of f there, its standard deviation; in the model's units."""
    margin = 0.15 * np.ptp(visited)
    grid = np.linspace(visited.min() - margin, visited.max() + margin, num_points)
    mean, variance = transition_moments(result, grid[:, None])
    return grid, mean[:, 0], np.sqrt(variance[:, 0])


def _one_dimensional(result: FitResult, visited: Float[np.ndarray, " point"], truth: Truth | None) -> Chart:
    units = function_units(result)
    grid, mean, scale = learned_line(result, visited)
    inducing = np.asarray(unwrap(result.model.transition.inducing_inputs)).ravel()
    at_inducing = transition_moments(result, inducing[:, None])[0][:, 0]
    x = units.there(grid)
    edges = np.sort([units.there(mean - NORMAL_90 * scale), units.there(mean + NORMAL_90 * scale)], axis=0)
    pairs_from = units.there(visited)
    series = [
        _band("90 % band of f", x, *edges),
        _line("f", x, units.there(mean), width=2.4),
        _line("stays the same", x, x, "muted", dash="4 4"),
        _points("states, one and the next", *_pairs(result, pairs_from), BLOCK, size=2.4),
        _points("inducing points", units.there(inducing), units.there(at_inducing), 1, size=4, hollow=True),
    ]
    if truth is not None:
        series.append(_line("the true f", x, truth(x[:, None], np.zeros((len(x), 0)))[:, 0], 2, dash="7 4"))
    order = np.argsort(x)
    for one in series:  # a negative slope turns the axis round
        if one["kind"] in ("band", "line") and len(one["x"]) == len(order):
            for name in ("x", "y", "low", "high"):
                if name in one:
                    one[name] = [one[name][i] for i in order]
    return _chart("", f"now: {units.label}", f"next: {units.label}", series, height=420)


def _pairs(result: FitResult, first: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Neighbours in the trajectories of posterior means, sequence by sequence."""
    cuts = np.cumsum([n - 1 for n in result.data.lengths])[:-1]
    pieces = np.split(first, cuts)
    return np.concatenate([p[:-1] for p in pieces]), np.concatenate([p[1:] for p in pieces])


def _input_names(result: FitResult) -> list[str]:
    return [f"state {i + 1}" for i in range(result.model.num_states)] + list(result.data.control_names)


def _partial_dependence(result: FitResult, points: Float[np.ndarray, "point input"], num_values: int = 30) -> list[Chart]:
    names, some = _input_names(result), points[:: max(1, len(points) // 60)]
    median, num_states = np.median(points, axis=0), min(result.model.num_states, MOST_STATES)
    charts: list[Chart] = []
    columns = [j for j in range(points.shape[1]) if j < num_states or j >= result.model.num_states]
    for j in columns:
        low, high = np.quantile(points[:, j], [0.02, 0.98])
        values = np.linspace(low, high, num_values)
        asked = np.repeat(some[None], num_values, axis=0)
        asked[:, :, j] = values[:, None]
        mean, variance = transition_moments(result, asked.reshape(-1, points.shape[1]))
        mean = mean.reshape(num_values, len(some), -1).mean(axis=1)
        scale = np.sqrt(variance.reshape(num_values, len(some), -1).mean(axis=1))
        sliced = np.repeat(median[None], num_values, axis=0)
        sliced[:, j] = values
        slice_mean = transition_moments(result, sliced)[0]
        x = values
        if j >= result.model.num_states:
            k = j - result.model.num_states
            x = values * result.scaling.control_scale[k] + result.scaling.control_offset[k]
        series = []
        for i in range(num_states):
            band = (mean[:, i] - NORMAL_90 * scale[:, i], mean[:, i] + NORMAL_90 * scale[:, i])
            series.append(_band(f"state {i + 1}, band", x, *band, i))
            series.append(_line(f"state {i + 1}", x, mean[:, i], i))
            series.append(_line(f"state {i + 1}, slice", x, slice_mean[:, i], i, dash="5 4", width=1.2))
        charts.append(_chart(f"Next state against {names[j]}", names[j], "next state", series, height=260))
    return charts


def _state_section(result: FitResult, key: Any) -> dict[str, Any]:
    samples = posterior_states(result, key=key)
    low, middle, high = np.quantile(samples, [0.05, 0.5, 0.95], axis=0)
    rows, charts = np.arange(samples.shape[1]), []
    for i in range(min(result.model.num_states, MOST_STATES)):
        series = [_band("90 % band", rows, low[:, i], high[:, i]), _line("median", rows, middle[:, i], width=1.4)]
        charts.append(_chart(f"state {i + 1}", "row", "state", series, height=190))
    text = "The hidden states along the training data (of the first sequence), in units of their own spread."
    return _section("states", "State posterior", text, charts, columns=2 if len(charts) > 1 else 1)


def _bound_section(result: FitResult) -> dict[str, Any]:
    history = result.history
    if len(history.steps) < 2:
        return _section("bound", "", "", [])
    bound = _chart("The bound", "step", "nats", [_line("bound", history.steps, history.bound)], height=260)
    terms = (
        ("expected log likelihood", history.emission),
        ("− KL of the transitions", -history.kl_transition),
        ("− KL of the inducing points", -history.kl_inducing),
        ("− KL of the first state", -history.kl_initial),
    )
    parts = [_line(name, history.steps, values, i) for i, (name, values) in enumerate(terms)]
    noise = [_line(f"state {i + 1}", history.steps, values, i) for i, values in enumerate(history.process_scale.T)]
    charts = [
        bound,
        _chart("Its four terms", "step", "nats", parts, height=260),
        _chart("Process noise", "step", "standard deviation", noise, height=220, zero=True),
    ]
    text = f"What was maximised, and how it went: {result.status.value}. {result.num_skipped} steps were skipped."
    return _section("bound", "How the fit went", text, charts, columns=2)


def _score_html(evaluation: Evaluation) -> str:
    scores = evaluation.scores()
    best = {m: min(scores, key=lambda n: scores[n].values[m]) for m in ("rmse", "nlpd", "crps")}
    rows = []
    for name in sorted(scores, key=lambda n: scores[n].nlpd):
        score = scores[name]
        cells = [
            f"<td{' class=best' if best[m] == name else ''}>{score.values[m]:.3f}"
            f"<small>{f' ± {score.standard_errors[m]:.2g}' if np.isfinite(score.standard_errors[m]) else ''}</small></td>"
            for m in ("rmse", "nlpd", "crps")
        ]
        rows.append(f"<tr><th>{html.escape(name)}</th>{''.join(cells)}<td>{100 * score.coverage90:.0f} %</td></tr>")
    head = "<tr><th>model</th><th>RMSE</th><th>NLPD</th><th>CRPS</th><th>90 % covers</th></tr>"
    return f"<div class=scroll><table><thead>{head}</thead><tbody>{''.join(rows)}</tbody></table></div>"


def _settings_html(run: Run) -> str:
    packages = run.versions.get("packages", {})
    rows = {
        **packages,
        **{name: str(run.versions.get(name, "")) for name in ("python", "platform", "device", "float64")},
        "fitted in": f"{run.status.get('fit_seconds', 0):.1f} s",
    }
    cells = "".join(f"<tr><th>{html.escape(k)}</th><td>{html.escape(v)}</td></tr>" for k, v in rows.items())
    toml = html.escape(configuration.to_toml(run.config))
    return f"<div class=pair><pre>{toml}</pre><div class=scroll><table>{cells}</table></div></div>"
