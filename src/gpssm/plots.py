"""Figures of data, fits, forecasts and scores, as Matplotlib objects to be saved, shown or drawn further upon.

Each function takes the axes to draw in, or makes a figure, and returns the figure. One palette throughout: blue is the model, ink
is what was measured, grey is a reference.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import matplotlib.pyplot as plt
import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gpssm._types import PRNGKey
from gpssm.data import Dataset
from gpssm.evaluate import LEVELS, Evaluation
from gpssm.findings import visited_inputs
from gpssm.forecasts import Forecast
from gpssm.params import unwrap
from gpssm.predict import posterior_states, transition_moments
from gpssm.result import FitResult

INK, GREY, FAINT = "#1d2430", "#6b7686", "#e6e4df"
COLOURS = ("#1f5fbf", "#d1661c", "#15866f", "#8a4fbf", "#c43c6e", "#6b7686", "#7f8a1a", "#8a5a3a", "#2a9fc4", "#b0872a")
NORMAL_90 = 1.6448536269514722
AnyAxes: TypeAlias = Axes | Sequence[Axes] | np.ndarray
Function: TypeAlias = Callable[[np.ndarray, np.ndarray | None], np.ndarray]
STYLE: Any = {
    "font.size": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.labelcolor": GREY,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.titlecolor": INK,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.8,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.8,
    "figure.dpi": 110,
}


def fan(
    forecast: Forecast,
    test: Dataset | None = None,
    *,
    history: Dataset | None = None,
    levels: Sequence[float] = (0.5, 0.9),
    axes: AnyAxes | None = None,
) -> Figure:
    """A forecast with its bands, one panel an output; `test` begins at the first row forecast."""
    with plt.rc_context(STYLE):
        figure, panels = _panels(axes, forecast.num_outputs, height=2.6)
        step = forecast.sampling_time or 1.0
        time = forecast.steps * step
        for j, panel in enumerate(panels):
            for level in sorted(levels, reverse=True):
                low, high = forecast.interval(level)
                panel.fill_between(time, low[:, j], high[:, j], color=COLOURS[0], alpha=0.16, lw=0, label=f"{level:.0%} band")
            panel.plot(time, forecast.mean[:, j], color=COLOURS[0], label="mean")
            if history is not None:
                past = history.outputs[0][-3 * forecast.num_steps :, j]
                rows = forecast.first_step - len(past) + np.arange(len(past))
                panel.plot(rows * step, past, ".", ms=4, color=INK)
                panel.axvline(time[0] - 0.5 * step, color=GREY, lw=0.9, ls=(0, (3, 3)))
            if test is not None:
                seen = test.outputs[0][: forecast.num_steps, j]
                panel.plot(time[: len(seen)], seen, ".", ms=4, color=INK, label="observed")
            panel.set(ylabel=forecast.output_names[j], xlabel="row" if forecast.sampling_time is None else "time")
        legend = panels[0].legend(ncols=4, loc="lower left", bbox_to_anchor=(0, 1.0), borderaxespad=0)
        for i, handle in enumerate(legend.legend_handles[: len(levels)]):  # bands lie over each other, the inner ones darker
            if handle is not None:
                handle.set_alpha(1 - (1 - 0.16) ** (i + 1))
    return figure


def states(result: FitResult, *, key: PRNGKey, sequence: int = 0, axes: AnyAxes | None = None) -> Figure:
    """Median and 90 % band of every state along a training sequence, in units of the states' own spread."""
    samples = posterior_states(result, key=key, sequence=sequence)
    low, middle, high = np.quantile(samples, [0.05, 0.5, 0.95], axis=0)
    rows = np.arange(len(middle))
    with plt.rc_context(STYLE):
        figure, panels = _panels(axes, result.model.num_states, height=1.7)
        for i, panel in enumerate(panels):
            panel.fill_between(rows, low[:, i], high[:, i], color=COLOURS[0], alpha=0.2, lw=0)
            panel.plot(rows, middle[:, i], color=COLOURS[0], lw=1.3)
            panel.set(ylabel=f"state {i + 1}")
        panels[-1].set_xlabel("row")
    return figure


def bound(result: FitResult, *, axes: AnyAxes | None = None) -> Figure:
    """The bound over the steps, and its four terms."""
    history = result.history
    terms = {
        "expected log likelihood": history.emission,
        "− KL transitions": -history.kl_transition,
        "− KL inducing": -history.kl_inducing,
        "− KL first state": -history.kl_initial,
    }
    with plt.rc_context(STYLE):
        figure, (left, right) = _panels(axes, 2, height=2.8, columns=2)
        left.plot(history.steps, history.bound, color=COLOURS[0])
        left.set(title="bound", xlabel="step", ylabel="nats")
        for colour, (name, values) in zip(COLOURS, terms.items(), strict=False):
            right.plot(history.steps, values, color=colour, label=name, lw=1.5)
        right.set(title="its four terms", xlabel="step")
        right.legend()
    return figure


def learned_function(result: FitResult, *, key: PRNGKey, truth: Function | None = None, axes: AnyAxes | None = None) -> Figure:
    """What f has become: for one state the function with its band and pairs, for more the partial dependence on every input.

    `truth` is the true f, in the model's units, for one state.
    """
    points = visited_inputs(result, key=key)
    with plt.rc_context(STYLE):
        if points.shape[1] == 1:
            figure, panels = _panels(axes, 1, height=4.2, width=5.2)
            _line_of_f(panels[0], result, points[:, 0], truth)
            panels[0].legend(loc="best")
            return figure
        names = [f"state {i + 1}" for i in range(result.model.num_states)] + list(result.data.control_names)
        figure, panels = _panels(axes, len(names), height=2.6, columns=min(3, len(names)))
        for j, (name, panel) in enumerate(zip(names, panels, strict=False)):
            x, mean, scale = partial_dependence(result, points, j)
            for i in range(result.model.num_states):
                colour = COLOURS[i % len(COLOURS)]
                edges = mean[:, i] - NORMAL_90 * scale[:, i], mean[:, i] + NORMAL_90 * scale[:, i]
                panel.fill_between(x, *edges, color=colour, alpha=0.13, lw=0)
                panel.plot(x, mean[:, i], color=colour, label=f"next state {i + 1}")
            panel.set(xlabel=name)
        panels[0].legend()
    return figure


def horizon(evaluation: Evaluation, metric: str = "rmse", *, axes: AnyAxes | None = None) -> Figure:
    """A score by the row ahead, one line a model; the first is drawn boldest."""
    table = evaluation.by_horizon(metric)
    with plt.rc_context(STYLE):
        figure, panels = _panels(axes, 1, height=3.2)
        for i, name in enumerate(table.columns):
            panels[0].plot(table.index, table[name], color=COLOURS[i % len(COLOURS)], lw=2.4 if i == 0 else 1.3, label=name)
        panels[0].set(xlabel="rows ahead", ylabel=f"{metric} (standard units)")
        panels[0].legend(ncols=2)
    return figure


def calibration(evaluation: Evaluation, name: str | None = None, *, axes: AnyAxes | None = None) -> Figure:
    """Coverage of the bands of every model, and the PIT histogram of one (the first unless it is named)."""
    chosen = name or next(iter(evaluation.errors))
    with plt.rc_context(STYLE):
        figure, (left, right) = _panels(axes, 2, height=3.0, columns=2)
        left.plot([0, 1], [0, 1], color=GREY, lw=1, ls=(0, (4, 3)))
        for i, (model, score) in enumerate(evaluation.scores().items()):
            held = [score.values[f"coverage{100 * level:g}"] for level in LEVELS]
            left.plot(
                LEVELS, held, "o-", ms=3.5, color=COLOURS[i % len(COLOURS)], lw=2.2 if model == chosen else 1.2, label=model
            )
        left.set(title="coverage", xlabel="the band claims", ylabel="it holds", xlim=(0.4, 1.02), ylim=(0, 1.03))
        left.legend()
        right.hist(evaluation.pit(chosen), bins=10, range=(0, 1), density=True, color=COLOURS[0], alpha=0.6, rwidth=0.92)
        right.axhline(1, color=GREY, lw=1, ls=(0, (4, 3)))
        right.set(title=f"PIT of {chosen}", xlabel="where in its forecast the outcome fell", xlim=(0, 1))
        right.grid(axis="x", visible=False)
    return figure


def kink_triptych(results: dict[str, FitResult], truth: Function | None = None, *, key: PRNGKey) -> Figure:
    """The learned functions of one-state fits side by side, on shared axes: what each posterior makes of the same data."""
    with plt.rc_context(STYLE):
        figure, panels = _panels(None, len(results), height=3.1, columns=len(results), is_shared=True)
        for (name, result), panel in zip(results.items(), panels, strict=True):
            _line_of_f(panel, result, visited_inputs(result, key=key)[:, 0], truth)
            panel.set_title(name)
            panel.label_outer()
        panels[0].legend(loc="best")
    return figure


def partial_dependence(
    result: FitResult, points: Float[np.ndarray, "point input"], which: int, num_values: int = 40
) -> tuple[Float[np.ndarray, " value"], Float[np.ndarray, "value state"], Float[np.ndarray, "value state"]]:
    """Values of one input, and f's mean and standard deviation there, averaged over where the other inputs have been."""
    some = points[:: max(1, len(points) // 60)]
    low, high = np.quantile(points[:, which], [0.02, 0.98])
    values = np.linspace(low, high, num_values)
    asked = np.repeat(some[None], num_values, axis=0)
    asked[:, :, which] = values[:, None]
    mean, variance = transition_moments(result, asked.reshape(-1, points.shape[1]))
    shape = (num_values, len(some), -1)
    return values, mean.reshape(shape).mean(axis=1), np.sqrt(variance.reshape(shape).mean(axis=1))


def _line_of_f(panel: Axes, result: FitResult, visited: Float[np.ndarray, " point"], truth: Function | None) -> None:
    margin = 0.15 * np.ptp(visited)
    grid = np.linspace(visited.min() - margin, visited.max() + margin, 200)
    mean, variance = transition_moments(result, grid[:, None])
    mean, half = mean[:, 0], NORMAL_90 * np.sqrt(variance[:, 0])
    inducing = np.asarray(unwrap(result.model.transition.inducing_inputs)).reshape(-1, 1)
    at_inducing, _ = transition_moments(result, inducing)
    panel.plot(grid, grid, color=GREY, lw=0.9, ls=(0, (4, 3)))
    panel.fill_between(grid, mean - half, mean + half, color=COLOURS[0], alpha=0.18, lw=0, label="90 % band")
    panel.plot(grid, mean, color=COLOURS[0], lw=2.1, label="f")
    panel.plot(visited[:-1], visited[1:], ".", ms=3.5, color=INK, alpha=0.6, label="states")
    panel.plot(inducing[:, 0], at_inducing[:, 0], "o", ms=4.5, mfc="none", color=COLOURS[1], label="inducing")
    if truth is not None:
        panel.plot(grid, np.ravel(truth(grid[:, None], None)), color=COLOURS[2], lw=1.6, ls=(0, (6, 3)), label="truth")
    panel.set(xlabel="state now", ylabel="state next")


def _panels(
    axes: Any, count: int, *, height: float, columns: int = 1, width: float = 7.6, is_shared: bool = False
) -> tuple[Figure, list[Axes]]:
    """The user's axes, or those of a new figure, and that figure."""
    if axes is not None:
        given = list(np.ravel(np.asarray(axes, dtype=object)))
        if len(given) < count:
            raise ValueError(f"This figure has {count} panels: expected as many axes, but got {len(given)}.")
        return given[0].figure, given
    rows = -(-count // columns)
    figure, made = plt.subplots(
        rows, columns, figsize=(width, height * rows), squeeze=False, layout="constrained", sharex=is_shared, sharey=is_shared
    )
    for spare in made.ravel()[count:]:
        spare.set_visible(False)
    return figure, list(made.ravel()[:count])
