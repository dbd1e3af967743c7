"""The paper's figures from our fits: kink data, triptych, the PR-SSM failure, learned process noise, cart-pole forecasts."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.random as jr
import matplotlib.pyplot as plt
import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gpssm.plots import COLOURS, GREY, INK, STYLE
from gpssm.predict import posterior_states, transition_moments
from gpssm.reproduce.results import Row, of
from gpssm.result import FitResult
from gpssm.simulators import Simulation

SEEN = (-4.5, 2.5)  # of the kink's state space
EVERY = 10  # steps between the pairs whose posterior is drawn
COLOUR_OF = {
    "factorised-linear": COLOURS[1],
    "factorised-nonlinear": COLOURS[9],
    "vcdt": COLOURS[0],
    "f-dependent-pathwise": COLOURS[2],
    "pr-ssm": COLOURS[4],
    "pr-ssm-corrected": COLOURS[3],
}


def kink_figures(out: Path, simulation: Simulation, results: dict[str, FitResult], rows: Sequence[Row]) -> tuple[str, ...]:
    """Data, triptych, PR-SSM and process noise, of one draw, as PNG files in `out`; their names."""
    drawn = {"kink-data.png": kink_data(simulation)}
    if {"factorised-linear", "vcdt"} <= set(results):
        drawn["kink-triptych.png"] = kink_triptych(simulation, results["factorised-linear"], results["vcdt"])
    if "pr-ssm" in results:
        drawn["kink-pr-ssm.png"] = kink_single(simulation, "pr-ssm", results["pr-ssm"])
    drawn["kink-process-noise.png"] = process_noise(rows, truth=0.05)
    return written(out, drawn)


def written(out: Path, drawn: dict[str, Figure]) -> tuple[str, ...]:
    """The names of the figures, now files in `out`."""
    for name, figure in drawn.items():
        figure.savefig(out / name, dpi=150)
        plt.close(figure)
    return tuple(drawn)


def kink_data(simulation: Simulation) -> Figure:
    """The true f, the states that visit it, and the outputs, in pairs of one step and the next."""
    with plt.rc_context(STYLE):
        figure, panel = plt.subplots(figsize=(4.6, 4.2), layout="constrained")
        states, outputs = simulation.states[0][:, 0], simulation.dataset.outputs[0][:, 0]
        panel.plot(outputs[:-1], outputs[1:], "-", color=GREY, lw=0.4, alpha=0.5)
        panel.plot(outputs[:-1], outputs[1:], "^", ms=3, color=GREY, alpha=0.7, label="outputs")
        panel.plot(states[:-1], states[1:], "-", color=INK, lw=0.4, alpha=0.6)
        panel.plot(states[:-1], states[1:], "s", ms=3, color=INK, label="states")
        grid = np.linspace(*SEEN, 300)[:, None]
        panel.plot(grid, simulation.transition(grid, grid[:, :0]), color="#c0392b", lw=1.6, label="f", zorder=3)
        panel.set(xlim=SEEN, ylim=(-5.5, 3.5), xlabel="$x_t$", ylabel="$x_{t+1}$")
        panel.legend(loc="lower left")
    return figure


def kink_triptych(simulation: Simulation, factorised: FitResult, coupled: FitResult) -> Figure:
    """The factorised fit, VCDT's, and both, with three standard deviations and the pairwise posteriors."""
    with plt.rc_context(STYLE):
        figure, panels = plt.subplots(1, 3, figsize=(11.5, 4.0), sharex=True, sharey=True, layout="constrained")
        _learned(panels[0], simulation, "factorised-linear", factorised)
        _learned(panels[1], simulation, "vcdt", coupled)
        for name, result in (("factorised-linear", factorised), ("vcdt", coupled)):
            _band(panels[2], name, result)
        _truth(panels[2], simulation)
        panels[2].legend(loc="lower left")
        for panel, title in zip(panels, ("factorised: q(X) q(f)", "VCDT: q(X | u) q(f)", "both"), strict=True):
            panel.set(title=title, xlabel="$x_t$", xlim=SEEN, ylim=(-5.5, 3.5))
        panels[0].set_ylabel("$x_{t+1}$")
    return figure


def kink_single(simulation: Simulation, name: str, result: FitResult) -> Figure:
    """One fit, with the elements of the triptych."""
    with plt.rc_context(STYLE):
        figure, panel = plt.subplots(figsize=(4.6, 4.2), layout="constrained")
        _learned(panel, simulation, name, result)
        panel.set(title=name, xlabel="$x_t$", ylabel="$x_{t+1}$", xlim=SEEN, ylim=(-5.5, 3.5))
    return figure


def process_noise(rows: Sequence[Row], truth: float | None = None, metric: str = "process_scale") -> Figure:
    """The learned process noise of every fit, one column a method, on a logarithmic scale."""
    methods = list(dict.fromkeys(row.method for row in rows if metric in row.metrics))
    with plt.rc_context(STYLE):
        figure, panel = plt.subplots(figsize=(6.4, 3.0), layout="constrained")
        for i, method in enumerate(methods):
            values = of(rows, metric, method=method)
            aside = i + np.linspace(-0.15, 0.15, len(values))
            panel.plot(aside, values, "o", ms=4, color=COLOUR_OF.get(method, GREY), alpha=0.7)
            panel.plot([i - 0.3, i + 0.3], [np.mean(values)] * 2, color=COLOUR_OF.get(method, GREY))
        if truth is not None:
            panel.axhline(truth, color=INK, lw=1, ls=(0, (4, 3)), label="truth")
            panel.legend()
        panel.set(yscale="log", ylabel="learned process noise sd", xticks=range(len(methods)))
        panel.set_xticklabels(methods, rotation=15, ha="right")
    return figure


def process_noise_by_state(rows: Sequence[Row]) -> Figure:
    """The learned process noise of every state in raw units, one panel a state, one column a method."""
    methods = list(dict.fromkeys(row.method for row in rows))
    table = {method: np.array([row.details["process_scale_raw"] for row in rows if row.method == method]) for method in methods}
    num_states = next(iter(table.values())).shape[1]
    with plt.rc_context(STYLE):
        figure, panels = plt.subplots(1, num_states, figsize=(2.6 * num_states, 3.2), squeeze=False, layout="constrained")
        for j, panel in enumerate(panels[0]):
            for i, method in enumerate(methods):
                values, colour = table[method][:, j], COLOUR_OF.get(method, GREY)
                panel.plot(np.full(len(values), i), values, "o", ms=4, color=colour, alpha=0.7)
                panel.plot([i - 0.3, i + 0.3], [values.mean()] * 2, color=colour)
            panel.set(title=f"state {j + 1}", yscale="log", xticks=range(len(methods)))
            panel.set_xticklabels(methods, rotation=60, ha="right")
        panels[0, 0].set_ylabel("learned process noise sd, raw units")
    return figure


def functions(fits: dict[str, FitResult], simulation: Simulation) -> Figure:
    """The learned functions of one-state fits side by side, with three standard deviations and the truth."""
    with plt.rc_context(STYLE):
        figure, panels = plt.subplots(
            1, len(fits), figsize=(3.8 * len(fits), 3.6), sharey=True, squeeze=False, layout="constrained"
        )
        for panel, (name, result) in zip(panels[0], fits.items(), strict=True):
            _band(panel, "vcdt", result)
            _truth(panel, simulation)
            panel.set(title=name, xlabel="$x_t$", xlim=(-3.65, 1.65), ylim=(-5, 3))
        panels[0, 0].set_ylabel("$x_{t+1}$")
    return figure


def _learned(panel: Axes, simulation: Simulation, name: str, result: FitResult) -> None:
    """f with its band, and true pairs, observed pairs and posterior pairs of the states."""
    colour, states = COLOUR_OF[name], simulation.states[0][:, 0]
    outputs = simulation.dataset.outputs[0][:, 0]
    _band(panel, name, result)
    _truth(panel, simulation)
    paths = posterior_states(result, key=jr.key(0))[:, :, 0]
    shown = np.arange(EVERY // 2, len(states) - 1, EVERY)
    for t in shown:
        panel.plot(*_ellipse(paths[:, t : t + 2]), color=colour, lw=0.7, alpha=0.8)
    means = paths.mean(axis=0)
    for values, marker, tint in ((states, "s", INK), (outputs, "^", GREY), (means, "o", colour)):
        panel.plot(values[shown], values[shown + 1], marker, ms=4, color=tint)
    panel.legend(loc="lower left")


def _band(panel: Axes, name: str, result: FitResult) -> None:
    grid = np.linspace(*SEEN, 300)[:, None]
    mean, variance = (moment[:, 0] for moment in transition_moments(result, grid))
    spread = 3 * np.sqrt(variance)
    panel.fill_between(grid[:, 0], mean - spread, mean + spread, color=COLOUR_OF[name], alpha=0.2, lw=0)
    panel.plot(grid[:, 0], mean, color=COLOUR_OF[name], lw=1.7, label=name)


def _truth(panel: Axes, simulation: Simulation) -> None:
    grid = np.linspace(*SEEN, 300)[:, None]
    panel.plot(grid[:, 0], simulation.transition(grid, grid[:, :0])[:, 0], color=INK, lw=1, ls=(0, (4, 2)), label="truth")


def _ellipse(pairs: Float[np.ndarray, "sample 2"], scale: float = 2.0) -> Any:
    """The outline of `scale` standard deviations of the joint distribution of a pair."""
    angles = np.linspace(0, 2 * np.pi, 60)
    chol = np.linalg.cholesky(np.cov(pairs.T) + 1e-9 * np.eye(2))
    return pairs.mean(axis=0)[:, None] + scale * chol @ np.stack([np.cos(angles), np.sin(angles)])
