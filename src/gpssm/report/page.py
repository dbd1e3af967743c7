"""The page as a whole: which sections there are, the tables, and how the numbers get into it.

Python decides what is shown and puts the numbers in; `chart.js` draws charts, and `page.js` lays them out.
"""

import html
import json
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path

import jax.random as jr
import numpy as np

from gpssm import config as configuration
from gpssm.atomic import write_atomically
from gpssm.evaluate import Evaluation
from gpssm.findings import Findings, find
from gpssm.params import unwrap
from gpssm.report.insides import Truth, bound_section, function_section, inducing_section, state_section
from gpssm.report.outcomes import calibration_section, data_section, forecast_section, named, own_name, score_section
from gpssm.result import FitResult
from gpssm.run import Run

METRICS = {"rmse": "RMSE", "nlpd": "NLPD", "crps": "CRPS"}


def write_report(
    run: Run,
    path: Path,
    *,
    evaluation: Evaluation | None = None,
    truth: Truth | None = None,
    families: Mapping[str, FitResult] | None = None,
) -> Path:
    """Write the report of a run to `path`.

    `evaluation` goes in place of the run's own, `truth` is the true f if it is known, and `families` are fits of the same data by
    name, whose learned functions are shown side by side where they have one state and no control.
    """
    write_atomically(path, render(run, evaluation=evaluation, truth=truth, families=families).encode())
    return path


def render(
    run: Run,
    *,
    evaluation: Evaluation | None = None,
    truth: Truth | None = None,
    families: Mapping[str, FitResult] | None = None,
) -> str:
    """The report as HTML text."""
    result, key, evaluation = run.fitted(), jr.key(run.config.seed), evaluation or run.evaluation
    findings = find(result, evaluation, key=key)
    sections = [
        data_section(run),
        forecast_section(run, key),
        *([score_section(evaluation), calibration_section(evaluation)] if evaluation is not None else []),
        function_section(result, key, truth, families),
        inducing_section(result, key),
        state_section(result, key),
        bound_section(result),
    ]
    name = Path(run.config.data.source).name or "data"
    content = {"sections": [section for section in sections if section["charts"]]}
    folder = files("gpssm").joinpath("report")
    fill = {
        "TITLE": html.escape(f"GPSSM report: {name}"),
        "HEADING": html.escape(name),
        "SUBTITLE": html.escape(_subtitle(run)),
        "TILES": _tiles(run, evaluation),
        "WORDS": "".join(f"<li>{html.escape(line)}</li>" for line in run.metrics.get("words") or findings.sentences()),
        "NOISE": _noise_table(findings),
        "SCORES": _score_table(evaluation) if evaluation is not None else "",
        "FITTED": _fitted_tables(run),
        "SETTINGS": _settings(run, evaluation),
        "STYLE": folder.joinpath("page.css").read_text(encoding="utf-8"),
        "SCRIPT": "\n".join(folder.joinpath(f).read_text(encoding="utf-8") for f in ("chart.js", "page.js")),
        "CONTENT": json.dumps(content, allow_nan=False, separators=(",", ":")).replace("</", "<\\/"),
    }
    pieces = folder.joinpath("page.html").read_text(encoding="utf-8").split("@@")  # TITLE and the others stand between two marks
    return "".join(fill[piece] if i % 2 else piece for i, piece in enumerate(pieces))


def _subtitle(run: Run) -> str:
    result, data = run.fitted(), run.data
    controls = f" driven by {', '.join(data.control_names)}" if data.num_controls else ""
    sequences = f"{data.num_sequences} sequences" if data.num_sequences > 1 else "1 sequence"
    return (
        f"{', '.join(data.output_names)}{controls}. {type(result.posterior).__name__} posterior, fitted to "
        f"{result.data.num_rows} of {data.num_rows} rows in {sequences}."
    )


def _tiles(run: Run, evaluation: Evaluation | None) -> str:
    result = run.fitted()
    tiles = [
        ("state" if result.model.num_states == 1 else "states", str(result.model.num_states)),
        ("inducing points", str(result.model.transition.num_inducing)),
        ("seconds of fitting", f"{_fit_seconds(run):.0f}"),
    ]
    if evaluation is not None:
        score = evaluation.score(own_name(evaluation))
        held_out = [("held-out RMSE", f"{score.rmse:.3f}"), ("90 % bands cover", f"{100 * score.coverage90:.0f} %")]
        tiles = [*held_out, ("windows × rows", f"{evaluation.num_windows} × {evaluation.horizon}"), *tiles]
    return "".join(
        f"<div class=tile><b>{html.escape(value)}</b><span>{html.escape(label)}</span></div>" for label, value in tiles
    )


def _fit_seconds(run: Run) -> float:
    return float(run.status.get("fit_seconds", np.sum(run.fitted().history.seconds)))


def _table(rows: Iterable[Sequence[str]], head: Sequence[str] = (), caption: str = "") -> str:
    """A table of escaped text, its first column a heading."""
    top = f"<caption>{html.escape(caption)}</caption>" if caption else ""
    if head:
        top += f"<thead><tr>{''.join(f'<th scope=col>{html.escape(cell)}</th>' for cell in head)}</tr></thead>"
    body = "".join(
        f"<tr><th scope=row>{html.escape(first)}</th>{''.join(f'<td>{html.escape(cell)}</td>' for cell in rest)}</tr>"
        for first, *rest in rows
    )
    return f"<div class=scroll><table>{top}<tbody>{body}</tbody></table></div>"


def _fitted_tables(run: Run) -> str:
    result, data = run.fitted(), run.data
    values = [cell for outputs in data.outputs for cell in outputs.ravel()]
    missing = int(np.isnan(values).sum())
    step = "not known" if data.sampling_time is None else f"{data.sampling_time:g} {data.time_unit}".rstrip()
    about_data = [
        ("source", run.config.data.source or "an array"),
        ("outputs", ", ".join(map(named, data.output_names, data.output_units))),
        ("controls", ", ".join(map(named, data.control_names, data.control_units)) or "none"),
        ("sequences", str(data.num_sequences)),
        ("rows", f"{data.num_rows}, of which {data.num_rows - result.data.num_rows} held out"),
        ("missing outputs", f"{missing} of {len(values)} ({missing / max(len(values), 1):.1%})"),
        ("time between rows", step),
    ]
    model, transition = unwrap(result.model), unwrap(result.model.transition)
    kernels = ", ".join(dict.fromkeys(type(kernel).__name__ for kernel in transition.kernels))
    about_model = [
        ("states", str(model.num_states)),
        ("kernel of f", kernels),
        ("mean of f", type(transition.mean).__name__),
        ("inducing points", str(transition.num_inducing)),
        ("emission", type(model.emission).__name__),
        ("posterior", type(result.posterior).__name__),
        ("bound", f"{result.bound:.1f} nats"),
    ]
    return f"<div class=pair>{_table(about_data, caption='Data')}{_table(about_model, caption='Model')}</div>"


def _noise_table(findings: Findings) -> str:
    def cell(value: float | None) -> str:
        return "–" if value is None else f"{value:.3g}"

    rows = [(named(n.output, n.unit), cell(n.observation), cell(n.process), cell(n.total)) for n in findings.noise]
    head = ("standard deviations", "sensor noise", "process noise, a row", "the signal")
    return _table(rows, head, "Noise, in the units of the data")


def _score_table(evaluation: Evaluation) -> str:
    scores = evaluation.scores()
    best = {metric: min(scores, key=lambda n: scores[n].values[metric]) for metric in METRICS}
    rows = []
    for name in sorted(scores, key=lambda n: scores[n].nlpd):
        score, cells = scores[name], []
        for metric in METRICS:
            error = score.standard_errors[metric]
            spread = f"<small> ± {error:.2g}</small>" if np.isfinite(error) else ""
            cells.append(f"<td{' class=best' if best[metric] == name else ''}>{_signed(score.values[metric])}{spread}</td>")
        own = " class=own" if name == own_name(evaluation) else ""
        rows.append(
            f"<tr{own}><th scope=row>{html.escape(name)}</th>{''.join(cells)}<td>{100 * score.coverage90:.0f} %</td></tr>"
        )
    heads = "".join(f"<th scope=col>{head}</th>" for head in ("model", *METRICS.values(), "90 % covers"))
    caption = (
        f"<caption>Scores of {evaluation.num_windows} forecasts of {evaluation.horizon} held-out rows, in standard units; "
        "± one standard error; lower is better, but for coverage</caption>"
    )
    return f"<div class=scroll><table>{caption}<thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"


def _signed(value: float) -> str:
    return f"{value:.3f}".replace("-", "−")


def _settings(run: Run, evaluation: Evaluation | None) -> str:
    seconds = [("fitting", f"{_fit_seconds(run):.1f}")]
    if evaluation is not None:
        seconds += [(f"scoring {name}", f"{value:.1f}") for name, value in evaluation.seconds.items()]
    versions = [(name, str(version)) for name, version in run.versions.get("packages", {}).items()]
    versions += [(name, str(run.versions[name])) for name in ("python", "platform", "device", "float64") if name in run.versions]
    toml = html.escape(configuration.to_toml(run.config))
    tables = _table(seconds, caption="Seconds") + _table(versions, caption="Versions")
    return f'<div class=pair><pre tabindex="0">{toml}</pre><div>{tables}</div></div>'
