"""How good forecasts are: scores of any forecaster on data it has not seen.

Three protocols: every window of the test part (`rolling_origin`), the paper's single window
(`paper_window`) and one forecast of all that is left (`free_run`). Each measures every forecaster on the
same windows and returns an `Evaluation`, from which scores are read pooled, by step of the horizon, by
sequence or by output, in standardised units (the training scaling) or raw ones. Missing targets are
skipped.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float, Int

from gpssm.data import Dataset, Scaling
from gpssm.forecasts import Forecast

LEVELS = (0.5, 0.8, 0.9, 0.95)
METRICS = (
    "rmse",
    "nlpd",
    "nlpd_gaussian",
    "crps",
    "coverage50",
    "coverage80",
    "coverage90",
    "coverage95",
    "sharpness",
)
Units = Literal["standard", "raw"]


@runtime_checkable
class Forecaster(Protocol):
    """What can be evaluated.

    `forecasts` gives one forecast an origin: at origin o it conditions on rows [0, o) of the one sequence
    in `data`, may use the controls of rows o-1 ... o+steps-1, and predicts the outputs of rows o ...
    o+steps-1.
    """

    def forecast(self, history: Dataset, steps: int, controls: Any = None, *, key: Any) -> Forecast: ...

    def forecasts(self, data: Dataset, origins: Sequence[int], steps: int, *, key: Any) -> list[Forecast]: ...


def crps(
    samples: Float[np.ndarray, "sample *batch"],
    outputs: Float[np.ndarray, "*batch"],
    is_stratified: bool = False,
) -> Float[np.ndarray, "*batch"]:
    """Continuous ranked probability score E|Y - y| - E|Y - Y'| / 2, by sorting: O(S log S).

    For independent samples the second term averages over the S (S - 1) distinct pairs, which makes the
    score unbiased (Zamo and Naveau, 2018); stratified samples are a discretised distribution, whose own
    term averages over S^2.
    """
    num = len(samples)
    weights = (2 * np.arange(1, num + 1) - num - 1).reshape(-1, *[1] * outputs.ndim)
    pairs = num**2 if is_stratified or num == 1 else num * (num - 1)
    half_spread = (weights * np.sort(samples, axis=0)).sum(0) / pairs
    return np.abs(samples - outputs).mean(0) - half_spread


def pit(samples: Float[np.ndarray, "sample *batch"], outputs: Float[np.ndarray, "*batch"]) -> Float[np.ndarray, "*batch"]:
    """Probability integral transform: the predictive distribution function at the outcome (NaN = missing)."""
    below = (samples < outputs).sum(0) + 0.5 * (samples == outputs).sum(0)
    return np.where(np.isnan(outputs), np.nan, (below + 0.5) / (len(samples) + 1))


@dataclass(frozen=True)
class Errors:
    """What one forecaster did in every window, in the user's units; NaN where there is no target."""

    error: Float[np.ndarray, "window time output"]
    crps: Float[np.ndarray, "window time output"]
    pit: Float[np.ndarray, "window time output"]
    width: Float[np.ndarray, "window time output"]  # of the 90 % interval
    covered: Float[np.ndarray, "window time output level"]
    log_density: Float[np.ndarray, "window time"]
    log_density_gaussian: Float[np.ndarray, "window time"]

    def select(self, windows: Any = slice(None), steps: Any = slice(None)) -> "Errors":
        return Errors(*(getattr(self, name)[windows][:, steps] for name in self.__dataclass_fields__))

    def channel(self, output: int) -> "Errors":
        """One output alone; its log densities, which are joint, are blank."""
        one = slice(output, output + 1)
        blank = np.full_like(self.log_density, np.nan)
        return Errors(
            self.error[:, :, one],
            self.crps[:, :, one],
            self.pit[:, :, one],
            self.width[:, :, one],
            self.covered[:, :, one],
            blank,
            blank,
        )


def measure(forecast: Forecast, outputs: Float[np.ndarray, "time output"]) -> Errors:
    """The errors of one forecast against what happened (NaN = missing)."""
    is_missing = np.asarray(np.isnan(outputs))
    edges = [forecast.interval(level) for level in LEVELS]
    lower, upper = edges[LEVELS.index(0.9)]
    covered = np.stack([(low <= outputs) & (outputs <= high) for low, high in edges], -1).astype(float)
    empty = np.asarray(is_missing.all(1))
    values = (
        _settle(forecast.mean - outputs, is_missing, np.inf),
        _settle(crps(forecast.samples, outputs, forecast.is_stratified), is_missing, np.inf),
        pit(forecast.samples, outputs),
        _settle(upper - lower, is_missing, np.inf),
        np.where(is_missing[..., None], np.nan, covered),
        _settle(forecast.log_density(outputs), empty, -np.inf),
        _settle(forecast.gaussian_log_density(outputs), empty, -np.inf),
    )
    return Errors(*(value[None] for value in values))


def _settle(values: np.ndarray, is_missing: np.ndarray, worst: float) -> np.ndarray:
    """NaN where there is no target; elsewhere one that is not a number scores worst."""
    return np.where(is_missing, np.nan, np.where(np.isnan(values), worst, values))


def _stack(parts: Sequence[Errors], horizon: int) -> Errors:
    def joined(name: str) -> np.ndarray:
        arrays = [getattr(part, name) for part in parts]
        pads = [((0, 0), (0, horizon - a.shape[1]), *[(0, 0)] * (a.ndim - 2)) for a in arrays]
        return np.concatenate([np.pad(a, p, constant_values=np.nan) for a, p in zip(arrays, pads, strict=True)])

    return Errors(*(joined(name) for name in Errors.__dataclass_fields__))


@dataclass(frozen=True)
class Score:
    """Averages over windows, steps and outputs, with their standard errors.

    `nlpd` is the negative log of the forecast's own density, `nlpd_gaussian` that of the Gaussian with its
    mean and covariance; both are averages over time steps, joint over the observed channels of a step.
    `sharpness` is the mean width of the 90 % interval.
    """

    values: dict[str, float]
    standard_errors: dict[str, float]
    num_windows: int
    num_values: int

    def __getattr__(self, name: str) -> float:
        if name in METRICS:
            return self.values[name]
        raise AttributeError(name)

    def to_dict(self) -> dict[str, Any]:
        """The metrics by name, and under `standard_error` the same names again; None stands for not known."""
        errors = {name: _or_none(value) for name, value in self.standard_errors.items()}
        return {name: _or_none(value) for name, value in self.values.items()} | {"standard_error": errors}


def _or_none(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def pooled_mean(
    values: Float[np.ndarray, "window ..."], sequence: Int[np.ndarray, " window"], num_overlapping: int
) -> tuple[float, float]:
    """The mean over all that is not NaN, and its standard error when neighbouring windows overlap.

    The estimate is a ratio (sum over count), so a window contributes d = its sum - mean * its count.
    Windows of one sequence that share rows are correlated, and errors of one long forecast are too, so the
    variance of sum d is Newey and West's (1987): autocovariances within each sequence, Bartlett weights,
    bandwidth L = twice the number of windows that overlap (at most half of the windows there are). Centring
    costs a fraction b = L / windows of the variance, 1 - b + b^2 / 3 is left (Bartlett's fixed-b
    expectation), and is divided out; without overlap this is the classical n - 1 to within b^2. NaN when
    there is only one window. Different sequences count as independent.
    """
    flat = values.reshape(len(values), -1)
    counts = np.isfinite(flat).sum(1) + np.isinf(flat).sum(1)
    total = counts.sum()
    if total == 0:
        return np.nan, np.nan
    sums = np.nansum(flat, axis=1)
    mean = sums.sum() / total
    num_windows = int((counts > 0).sum())
    if num_windows < 2 or not np.isfinite(mean):
        return float(mean), np.nan
    lags = 1 if num_overlapping <= 1 else max(1, min(2 * num_overlapping, num_windows // 2))
    deviation = (sums - mean * counts) / total
    variance = 0.0
    for i in np.unique(sequence):
        d = deviation[sequence == i]
        for lag in range(min(lags, len(d))):
            variance += (1 if lag == 0 else 2) * (1 - lag / lags) * (d[lag:] @ d[: len(d) - lag])
    b = lags / num_windows
    return float(mean), float(np.sqrt(max(variance, 0.0) / (1 - b + b**2 / 3)))


def _components(errors: Errors, scale: Float[np.ndarray, " output"]) -> dict[str, np.ndarray]:
    """The per-window arrays whose pooled means are the metrics (for `rmse` its square), over `scale`."""
    log_scale = np.where(np.isnan(errors.error), 0.0, np.log(scale)).sum(-1)
    with np.errstate(over="ignore"):  # an unstable forecast may square to infinity: that is its score
        square = (errors.error / scale) ** 2
    parts = {
        "rmse": square,
        "nlpd": -errors.log_density - log_scale,
        "nlpd_gaussian": -errors.log_density_gaussian - log_scale,
        "crps": errors.crps / scale,
    }
    parts |= {f"coverage{100 * level:g}": errors.covered[..., i] for i, level in enumerate(LEVELS)}
    return parts | {"sharpness": errors.width / scale}


def score(
    errors: Errors,
    scale: Float[np.ndarray, " output"],
    sequence: Int[np.ndarray, " window"],
    num_overlapping: int = 1,
) -> Score:
    """Pooled scores of the windows in units of `scale` (ones: raw)."""
    values, standard_errors = {}, {}
    for name, part in _components(errors, scale).items():
        mean, error = pooled_mean(part, sequence, num_overlapping)
        if name == "rmse":  # the delta method: d sqrt(m) = dm / (2 sqrt(m))
            mean = float(np.sqrt(mean))
            error = error / (2 * mean) if mean > 0 else error
        values[name], standard_errors[name] = mean, error
    present = ~np.isnan(errors.error)
    return Score(values, standard_errors, int(present.any((1, 2)).sum()), int(present.sum()))


@dataclass(frozen=True)
class Evaluation:
    """Every forecaster's errors on the same windows."""

    errors: dict[str, Errors]
    sequence: Int[np.ndarray, " window"]
    origin: Int[np.ndarray, " window"]
    horizon: int
    stride: int
    scaling: Scaling
    output_names: tuple[str, ...]
    sequence_names: tuple[str, ...]
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def num_windows(self) -> int:
        return len(self.origin)

    @property
    def num_overlapping(self) -> int:
        """How many windows share rows with a given one, on one side, itself included."""
        return -(-self.horizon // self.stride)

    def score(
        self,
        name: str,
        units: Units = "standard",
        *,
        windows: Bool[np.ndarray, " window"] | None = None,
        step: int | None = None,
        output: int | None = None,
    ) -> Score:
        """One forecaster's pooled score; on request of some windows, one step (0 = first) or one output.

        Log scores are joint over the channels, so a score of one output has none.
        """
        scale = np.asarray(self.scaling.output_scale, float)
        scale = scale if units == "standard" else np.ones_like(scale)
        chosen = np.ones(self.num_windows, bool) if windows is None else windows
        errors = self.errors[name].select(chosen, slice(None) if step is None else slice(step, step + 1))
        if output is not None:
            errors, scale = errors.channel(output), scale[[output]]
        return score(errors, scale, self.sequence[chosen], self.num_overlapping)

    def scores(self, units: Units = "standard") -> dict[str, Score]:
        return {name: self.score(name, units) for name in self.errors}

    def difference(self, first: str, second: str, metric: str = "nlpd", units: Units = "standard") -> tuple[float, float]:
        """First minus second, paired window by window, with its standard error (`rmse`: of mean squares)."""
        scale = np.asarray(self.scaling.output_scale, float)
        scale = scale if units == "standard" else np.ones_like(scale)
        parts = [_components(self.errors[name], scale)[metric] for name in (first, second)]
        return pooled_mean(parts[0] - parts[1], self.sequence, self.num_overlapping)

    def by_horizon(self, metric: str = "rmse", units: Units = "standard") -> pd.DataFrame:
        """One row a step of the horizon (from 1), one column a forecaster."""
        rows = {name: [self.score(name, units, step=step).values[metric] for step in range(self.horizon)] for name in self.errors}
        return pd.DataFrame(rows, index=pd.RangeIndex(1, self.horizon + 1, name="step"))

    def by_sequence(self, metric: str = "rmse", units: Units = "standard") -> pd.DataFrame:
        """One row a sequence that has windows, one column a forecaster."""
        present = np.unique(self.sequence)
        rows = {
            name: [self.score(name, units, windows=self.sequence == i).values[metric] for i in present] for name in self.errors
        }
        return pd.DataFrame(rows, index=pd.Index([self.sequence_names[i] for i in present], name="sequence"))

    def by_window(self, metric: str = "rmse", units: Units = "standard") -> pd.DataFrame:
        """One row a window with its sequence and origin, one column a forecaster."""
        rows: dict[str, Any] = {
            "sequence": [self.sequence_names[i] for i in self.sequence],
            "origin": self.origin,
        }
        scale = np.asarray(self.scaling.output_scale, float)
        scale = scale if units == "standard" else np.ones_like(scale)
        for name, errors in self.errors.items():
            part = _components(errors, scale)[metric].reshape(self.num_windows, -1)
            means = np.nansum(part, 1) / np.maximum((~np.isnan(part)).sum(1), 1)
            rows[name] = np.sqrt(means) if metric == "rmse" else means
        return pd.DataFrame(rows)

    def pit(self, name: str) -> Float[np.ndarray, " value"]:
        """All PIT values of one forecaster: uniform on [0, 1] when it is calibrated."""
        values = self.errors[name].pit
        return values[~np.isnan(values)]

    def to_dict(self) -> dict[str, Any]:
        """Horizon, windows and models in standardised units, and the same under `raw`; ready for JSON.

        None stands for a number that is not known (the error of a single window) or not finite.
        """

        def part(units: Units) -> dict[str, Any]:
            models = {name: value.to_dict() for name, value in self.scores(units).items()}
            return {"horizon": self.horizon, "windows": self.num_windows, "models": models}

        return part("standard") | {"raw": part("raw"), "seconds": dict(self.seconds)}

    def to_dataframe(self, units: Units = "standard") -> pd.DataFrame:
        """One row a forecaster, one column a metric, `<metric>_se` beside it."""
        rows = {}
        for name, value in self.scores(units).items():
            rows[name] = {
                key: number
                for metric in METRICS
                for key, number in (
                    (metric, value.values[metric]),
                    (f"{metric}_se", value.standard_errors[metric]),
                )
            }
        return pd.DataFrame.from_dict(rows, orient="index").rename_axis("model")

    def table(self, units: Units = "standard") -> str:
        """The scores as text, the best RMSE first."""
        head = ("model", "rmse", "(se)", "nlpd", "(se)", "crps", "cover90", "width90")
        lines = [f"{head[0]:<12}" + "".join(f"{title:>10}" for title in head[1:])]
        for name, s in sorted(self.scores(units).items(), key=lambda item: item[1].values["rmse"]):
            error = s.standard_errors
            cells = (s.rmse, error["rmse"], s.nlpd, error["nlpd"], s.crps, s.coverage90, s.sharpness)
            lines.append(f"{name:<12}" + "".join(f"{'-' if np.isnan(c) else f'{c:.4f}':>10}" for c in cells))
        title = f"{self.num_windows} windows of {self.horizon} steps, {units} units"
        return "\n".join([title, *lines])


def rolling_origin(
    forecasters: Mapping[str, Forecaster],
    data: Dataset,
    *,
    horizon: int = 30,
    stride: int = 1,
    start: int | Sequence[int],
    scaling: Scaling,
    key: Any,
    report: Callable[[str], None] | None = None,
) -> Evaluation:
    """Every window of `horizon` steps whose origin is at row `start` or later, every `stride` rows.

    `data` holds the past too: a forecast from origin o conditions on all rows before o. `start` is one row
    for all sequences or one each.
    """
    starts = _starts(start, data)
    origins = [list(range(s, n - horizon + 1, stride)) for s, n in zip(starts, data.lengths, strict=True)]
    if not any(origins):
        raise ValueError(
            f"no window of {horizon} steps fits: sequences have {[int(n) for n in data.lengths]} rows and "
            f"the first origins are {starts}; use a shorter horizon or an earlier start"
        )
    return _evaluate(forecasters, data, origins, [horizon] * len(origins), stride, scaling, key, report)


def paper_window(
    forecasters: Mapping[str, Forecaster],
    data: Dataset,
    *,
    horizon: int = 30,
    start: int | Sequence[int],
    scaling: Scaling,
    key: Any,
) -> Evaluation:
    """The one window that starts at row `start` (the end of training): the protocol of the paper's tables."""
    starts = _starts(start, data)
    origins = [[s] if s + horizon <= n else [] for s, n in zip(starts, data.lengths, strict=True)]
    if not any(origins):
        raise ValueError(f"{horizon} steps from row {starts} go past the end of every sequence; shorten the horizon")
    return _evaluate(forecasters, data, origins, [horizon] * len(origins), horizon, scaling, key, None)


def free_run(
    forecasters: Mapping[str, Forecaster],
    data: Dataset,
    *,
    start: int | Sequence[int],
    scaling: Scaling,
    key: Any,
) -> Evaluation:
    """One forecast from row `start` to the end of each sequence."""
    starts = _starts(start, data)
    origins = [[s] if s < n else [] for s, n in zip(starts, data.lengths, strict=True)]
    horizons = [int(n) - s for s, n in zip(starts, data.lengths, strict=True)]
    if not any(origins):
        raise ValueError(f"start {starts} leaves nothing to forecast in sequences of {list(data.lengths)} rows")
    return _evaluate(forecasters, data, origins, horizons, max(horizons), scaling, key, None)


def _starts(start: int | Sequence[int], data: Dataset) -> list[int]:
    starts = [int(s) for s in np.ravel(start)]
    starts = starts * data.num_sequences if np.ndim(start) == 0 else starts
    if len(starts) != data.num_sequences:
        raise ValueError(f"{len(starts)} starts for {data.num_sequences} sequences; give one, or one each")
    if min(starts) < 0:
        raise ValueError(f"start counts rows from 0; got {starts}")
    return starts


def _evaluate(
    forecasters: Mapping[str, Forecaster],
    data: Dataset,
    origins: Sequence[Sequence[int]],
    horizons: Sequence[int],
    stride: int,
    scaling: Scaling,
    key: Any,
    report: Callable[[str], None] | None,
) -> Evaluation:
    used = [i for i, rows in enumerate(origins) if len(rows)]
    horizon = max(horizons[i] for i in used)
    errors, seconds = {}, {}
    for name, forecaster in forecasters.items():
        begin = time.perf_counter()
        parts = []
        for i in used:
            forecasts = forecaster.forecasts(data[i], list(origins[i]), horizons[i], key=key)
            targets = [data.outputs[i][o : o + horizons[i]] for o in origins[i]]
            parts += [measure(f, y) for f, y in zip(forecasts, targets, strict=True)]
        errors[name] = _stack(parts, horizon)
        seconds[name] = time.perf_counter() - begin
        if report is not None:
            report(f"{name}: {len(parts)} windows in {seconds[name]:.1f} s")
    sequence = np.concatenate([np.full(len(origins[i]), i) for i in used])
    origin = np.concatenate([np.asarray(origins[i], int) for i in used])
    names = (data.output_names, data.sequence_names)
    return Evaluation(errors, sequence, origin, horizon, stride, scaling, *names, seconds)
