"""The sections that look into the model: the learned function, inducing points, states, and how the fit went."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from jaxtyping import Float

from gpssm._types import PRNGKey
from gpssm.emissions import LinearGaussian
from gpssm.findings import visited_inputs
from gpssm.params import unwrap
from gpssm.plots import partial_dependence
from gpssm.predict import posterior_states, transition_moments
from gpssm.report.charts import INK, MUTED, NORMAL_90, NUM_COLOURS, Chart, band, chart, line, points, section
from gpssm.report.outcomes import MOST_SEQUENCES, named, time_axis
from gpssm.result import FitResult

MOST_STATES = 4
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


def function_section(
    result: FitResult, key: PRNGKey, truth: Truth | None, families: Mapping[str, FitResult] | None = None
) -> dict[str, Any]:
    """What f has become; `families` are fits of the same data by name, shown side by side where f has one input."""
    visited = visited_inputs(result, key=key)
    if visited.shape[1] == 1:
        charts = _functions_of_one(result, visited[:, 0], key, truth, families or {})
        text = (
            "Where the state goes next, given where it is. The band is what the model does not know of f; dots are the states it "
            "believes the data went through, each with its successor."
        )
        return section("function", "The learned function", text, charts, columns=2 if len(charts) > 1 else 1)
    charts = _partial_dependence(result, visited)
    text = (
        "How each next state depends on one input. Solid: averaged over where the other inputs were in the data, with the band "
        "of what the model does not know. Dashed: a slice, the other inputs at their medians. Where the two part, inputs act "
        "together. States are in units of their own spread."
    )
    if result.model.num_states > MOST_STATES:
        text += f" The first {MOST_STATES} of {result.model.num_states} states are shown."
    return section("function", "The learned function", text, charts, columns=2)


def function_units(result: FitResult) -> Units:
    """Axes of a learned function of one state: the output's units if the state is an output in disguise."""
    emission = unwrap(result.model.emission)
    if isinstance(emission, LinearGaussian) and result.data.num_outputs == 1:
        slope = float(np.asarray(emission.matrix)[0, 0] * result.scaling.output_scale[0])
        if abs(slope) > 1e-6:
            offset = float(result.scaling.outputs_back(np.asarray(emission.offset))[0])
            return Units(slope, offset, named(result.data.output_names[0], result.data.output_units[0]))
    return Units(1.0, 0.0, "state")


def _functions_of_one(
    result: FitResult, visited: Float[np.ndarray, " point"], key: PRNGKey, truth: Truth | None, families: Mapping[str, FitResult]
) -> list[Chart]:
    """A chart for each fit, all on the same axes, which show at first where the states of `result` mostly were."""
    seen = function_units(result).there(visited)
    low, high = np.quantile(seen, [0.01, 0.99])
    view = np.array([low, high]) + 0.15 * (high - low) * np.array([-1, 1])
    span = min(view[0], seen.min()), max(view[1], seen.max())
    shown = families if len(families) > 1 else {"": result}
    charts = []
    for title, one in shown.items():
        states = visited if one is result else visited_inputs(one, key=key)[:, 0]
        charts.append({**_function_of_one(one, states, span, truth, title), "view": [float(edge) for edge in view]})
    inside = [y for each in charts for one in each["series"] for y in _within(one, view)]
    room = 0.04 * (max(inside) - min(inside))
    return [{**each, "viewHeight": [min(inside) - room, max(inside) + room]} for each in charts]


def _within(series: Chart, view: Float[np.ndarray, "2"]) -> list[float]:
    """The heights of a series in a range of x; those of lines that go on beyond what is known are left out."""
    heights = zip(series["x"], series.get("y", []), strict=False) if series["colour"] in (0, INK) else ()
    return [y for x, y in heights if x is not None and y is not None and view[0] <= x <= view[1]]


def _function_of_one(
    result: FitResult, visited: Float[np.ndarray, " point"], span: tuple[float, float], truth: Truth | None, title: str
) -> Chart:
    """f of one state over `span`, in the units of the output if the state is one in disguise."""
    units = function_units(result)
    x = np.linspace(*span, 240)
    mean, variance = transition_moments(result, units.back(x)[:, None])
    mean, half = units.there(mean[:, 0]), NORMAL_90 * abs(units.slope) * np.sqrt(variance[:, 0])
    inducing = np.asarray(unwrap(result.model.transition.inducing_inputs)).ravel()
    at_inducing = transition_moments(result, inducing[:, None])[0][:, 0]
    series = [
        band("90 % band of f", x, mean - half, mean + half),
        line("f", x, mean, width=2.6),
        line("stays the same", x, x, MUTED, dash="4 4", width=1.2),
        points("states", *_pairs(result, units.there(visited)), INK, size=2.2),
        points("inducing points", units.there(inducing), units.there(at_inducing), 1, size=4, hollow=True),
    ]
    if truth is not None:
        series.append(line("the true f", x, truth(x[:, None], np.zeros((len(x), 0)))[:, 0], 2, dash="7 4", width=2.2))
    return chart(title, f"{units.label}, now", f"{units.label}, next", series, height=320 if title else 440)


def _pairs(result: FitResult, first: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Neighbours in the trajectories of posterior means, sequence by sequence."""
    cuts = np.cumsum([n - 1 for n in result.data.lengths])[:-1]
    pieces = np.split(first, cuts)
    return np.concatenate([p[:-1] for p in pieces]), np.concatenate([p[1:] for p in pieces])


def _inputs(result: FitResult) -> list[tuple[int, str]]:
    """The inputs of f that are shown, with their names: states, then controls."""
    data, num_states = result.data, result.model.num_states
    states = [(i, f"state {i + 1}") for i in range(min(num_states, MOST_STATES))]
    controls = zip(data.control_names, data.control_units, strict=True)
    return states + [(num_states + k, named(*both)) for k, both in enumerate(controls)]


def _in_units(result: FitResult, j: int, values: np.ndarray) -> np.ndarray:
    """Values of the j-th input as a person knows them: controls in their units, states as they are."""
    k = j - result.model.num_states
    return values if k < 0 else values * result.scaling.control_scale[k] + result.scaling.control_offset[k]


def _partial_dependence(result: FitResult, visited: Float[np.ndarray, "point input"]) -> list[Chart]:
    median, charts = np.median(visited, axis=0), []
    for j, name in _inputs(result):
        values, mean, scale = partial_dependence(result, visited, j, 30)
        sliced = np.repeat(median[None], len(values), axis=0)
        sliced[:, j] = values
        slice_mean = transition_moments(result, sliced)[0]
        x, series = _in_units(result, j, values), []
        for i in range(min(result.model.num_states, MOST_STATES)):
            low, high = mean[:, i] - NORMAL_90 * scale[:, i], mean[:, i] + NORMAL_90 * scale[:, i]
            whose = f"state {i + 1}"
            series.append(band(f"{whose}, band", x, low, high, i, group=whose))
            series.append(line(whose, x, mean[:, i], i, width=2.2, group=whose))
        for i in range(min(result.model.num_states, MOST_STATES)):
            series.append(line(f"state {i + 1}, slice", x, slice_mean[:, i], i, dash="5 4", width=1.3, group="slices"))
        charts.append(chart(f"Next state against {name}", name, "next state", series, height=270))
    return charts


def inducing_section(result: FitResult, key: PRNGKey) -> dict[str, Any]:
    """Inducing inputs over the inputs that were visited, two inputs a chart; none where f has but one."""
    visited = visited_inputs(result, key=key)
    inducing = np.asarray(unwrap(result.model.transition.inducing_inputs)).reshape(-1, visited.shape[1])
    charts, inputs = [], _inputs(result)
    for (i, left), (j, right) in pairwise(inputs):
        series = [
            points("visited", _in_units(result, i, visited[:, i]), _in_units(result, j, visited[:, j]), INK, size=1.8),
            points(
                "inducing", _in_units(result, i, inducing[:, i]), _in_units(result, j, inducing[:, j]), 1, size=4, hollow=True
            ),
        ]
        charts.append(chart(f"{right} against {left}", left, right, series, height=260))
    text = (
        "Inducing points are where the model keeps what it has learnt of f. They should lie where the data went: beyond them f "
        "falls back to its prior mean, and forecasts that go there are wide."
    )
    return section("inducing", "Inducing points over the visited states", text, charts, columns=2)


def state_section(result: FitResult, key: PRNGKey) -> dict[str, Any]:
    """Median and band of the states along the training data."""
    data, charts = result.data, []
    for sequence in range(min(data.num_sequences, MOST_SEQUENCES)):
        samples = posterior_states(result, key=key, sequence=sequence)
        low, middle, high = np.quantile(samples, [0.05, 0.5, 0.95], axis=0)
        time, label = time_axis(data, samples.shape[1])
        where = f" · {data.sequence_names[sequence]}" if data.num_sequences > 1 else ""
        for i in range(min(result.model.num_states, MOST_STATES)):
            series = [band("90 % band", time, low[:, i], high[:, i]), line("median", time, middle[:, i], width=1.4)]
            charts.append(chart(f"state {i + 1}{where}", label, "state", series, height=200, link=f"states {sequence}"))
    text = "The hidden states along the training data, in units of their own spread."
    if data.num_sequences > MOST_SEQUENCES:
        text += f" The first {MOST_SEQUENCES} of {data.num_sequences} sequences are shown."
    if result.model.num_states > MOST_STATES:
        text += f" The first {MOST_STATES} of {result.model.num_states} states are shown."
    return section("states", "State posterior", text, charts, columns=2 if len(charts) > 1 else 1)


def bound_section(result: FitResult) -> dict[str, Any]:
    """The bound, its terms and the process noise over the steps of the fit."""
    history = result.history
    if len(history.steps) < 2:
        return section("bound", "", "", [])
    terms = (
        ("expected log likelihood", history.emission),
        ("− KL of the transitions", -history.kl_transition),
        ("− KL of the inducing points", -history.kl_inducing),
        ("− KL of the first state", -history.kl_initial),
    )
    parts = [line(name, history.steps, values, i) for i, (name, values) in enumerate(terms)]
    noise = [
        line(f"state {i + 1}", history.steps, v, i % NUM_COLOURS) for i, v in enumerate(history.process_scale.T[:NUM_COLOURS])
    ]
    charts = [
        chart("The bound", "step", "nats", [line("bound", history.steps, history.bound)], height=260, robust="low"),
        chart("Its four terms, which add up to it", "step", "nats", parts, height=260, robust="low"),
        chart("Process noise of the states", "step", "standard deviation", noise, height=240, zero=True),
        chart(
            "Time spent", "step", "seconds", [line("seconds", history.steps, np.cumsum(history.seconds))], height=240, zero=True
        ),
    ]
    text = f"The evidence lower bound is what was maximised; the fit ended because {result.status.value}."
    if result.num_skipped:
        text += f" {result.num_skipped} steps were skipped, since their gradient was not finite."
    return section("bound", "How the fit went", text, charts, columns=2)
