"""ARX: linear regression on lagged outputs and controls, its order by BIC, and what GP-NARX shares with it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from gpssm.baselines.base import (
    VARIANCE_FLOOR,
    AbstractBaseline,
    gaussian,
    linear_forecasts,
    standard_controls,
    standard_outputs,
    standardised,
)
from gpssm.data import Dataset, Scaling
from gpssm.forecasts import Forecast


def lagged(
    outputs: Float[np.ndarray, "time output"],
    controls: Float[np.ndarray, "time control"],
    num_output_lags: int,
    control_lags: Sequence[int],
) -> Float[np.ndarray, "time regressor"]:
    """Row t: y[t-1], ..., y[t-na], then u[t-lag] for each control lag, then 1; NaN before the start."""
    lags = [(outputs, lag) for lag in range(1, num_output_lags + 1)] + [(controls, lag) for lag in control_lags]
    columns = [np.concatenate([np.full_like(a[:lag], np.nan), a[: max(len(a) - lag, 0)]]) for a, lag in lags]
    return np.concatenate([*columns, np.ones((len(outputs), 1))], axis=1)


def regression_rows(
    train: Dataset, scaling: Scaling, num_output_lags: int, control_lags: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Complete rows of (regressors, targets) from all sequences, standardised."""
    outputs, controls = standard_outputs(scaling, train), standard_controls(scaling, train)
    regressors = [lagged(y, u, num_output_lags, control_lags) for y, u in zip(outputs, controls, strict=True)]
    inputs, targets = np.concatenate(regressors), np.concatenate(outputs)
    complete = ~(np.isnan(inputs).any(1) | np.isnan(targets).any(1))
    return inputs[complete], targets[complete]


@dataclass(frozen=True)
class LagOrder:
    """Which lags a regression sees: outputs 1 ... `outputs`, controls `delay` ... `delay` + `controls` - 1."""

    outputs: int
    controls: int
    delay: int

    @property
    def control_lags(self) -> range:
        return range(self.delay, self.delay + self.controls)


def choose_order(train: Dataset, scaling: Scaling, max_output_lag: int = 12, max_control_lag: int = 16) -> LagOrder:
    """The ARX order of least BIC, n log det(residual covariance) + k log n, all candidates on the same rows.

    One QR factorisation of the longest regression makes every candidate a small least-squares problem. Few
    rows (short or gappy sequences) shorten the longest lags until there are five rows a regressor.
    """
    has_controls = train.num_controls > 0
    while True:
        lags = range(1, max_control_lag + 1) if has_controls else range(0)
        inputs, targets = regression_rows(train, scaling, max_output_lag, lags)
        if len(inputs) >= 5 * inputs.shape[1] or max_output_lag == 1:
            break
        max_output_lag, max_control_lag = max(1, 3 * max_output_lag // 4), max(1, 3 * max_control_lag // 4)
    if len(inputs) <= inputs.shape[1]:
        return LagOrder(1, int(has_controls), 1)
    num_rows, num_outputs = targets.shape
    factor = np.asarray(np.linalg.qr(np.concatenate([inputs, targets], axis=1), mode="r"))
    sides, first_control = factor[:, inputs.shape[1] :], max_output_lag * num_outputs
    best, order = np.inf, LagOrder(1, 0, 1)
    for candidate in _candidates(max_output_lag, max_control_lag if has_controls else 0):
        begin = first_control + (candidate.delay - 1) * train.num_controls
        columns = np.r_[
            0 : candidate.outputs * num_outputs,
            begin : begin + candidate.controls * train.num_controls,
            inputs.shape[1] - 1,
        ]
        weights = np.linalg.lstsq(factor[:, columns], sides, rcond=None)[0]
        rest = sides - factor[:, columns] @ weights
        covariance = rest.T @ rest / num_rows + VARIANCE_FLOOR * np.eye(num_outputs)
        bic = num_rows * np.linalg.slogdet(covariance)[1] + weights.size * np.log(num_rows)
        if bic < best:
            best, order = bic, candidate
    return order


def _candidates(max_output_lag: int, max_control_lag: int) -> list[LagOrder]:
    orders = [LagOrder(na, 0, 1) for na in range(1, max_output_lag + 1)]
    for na in range(1, max_output_lag + 1):
        for delay in range(1, min(max_control_lag, 8) + 1):
            orders += [LagOrder(na, nb, delay) for nb in range(1, min(10, max_control_lag - delay + 1) + 1)]
    return orders


@dataclass(frozen=True)
class ARX(AbstractBaseline):
    """y[t] = c + sum A[i] y[t-i] + sum B[j] u[t-delay-j] + N(0, S), by least squares, its order by BIC.

    Forecasts propagate mean and covariance exactly through the companion form, whose state y[t], ...,
    y[t-na+1] a Kalman filter knows exactly when the last na rows are complete and estimates when they are
    not.
    """

    scaling: Scaling
    order: LagOrder
    output_weights: Float[np.ndarray, "lag output output"]
    control_weights: Float[np.ndarray, "lag2 output control"]
    offset: Float[np.ndarray, " output"]
    noise_covariance: Float[np.ndarray, "output output"]

    @classmethod
    def fit(cls, train: Dataset, *, order: LagOrder | None = None, seed: int = 0) -> "ARX":
        scaling = Scaling.of(train)
        order = choose_order(train, scaling) if order is None else order
        inputs, targets = regression_rows(train, scaling, order.outputs, order.control_lags)
        if len(inputs) == 0:
            raise ValueError("no row of the training data has its lagged outputs observed: an ARX model cannot be fitted")
        p, m = train.num_outputs, train.num_controls
        weights = np.linalg.lstsq(inputs, targets, rcond=None)[0]
        rest = targets - inputs @ weights
        freedom = max(len(targets) - len(weights), 1)
        noise = rest.T @ rest / freedom + VARIANCE_FLOOR * np.eye(p)
        past = weights[: order.outputs * p].reshape(order.outputs, p, p).transpose(0, 2, 1)
        drive = weights[order.outputs * p : -1].reshape(order.controls, m, p).transpose(0, 2, 1)
        return cls(scaling, order, past, drive, weights[-1], noise)

    @property
    def companion(self) -> Float[np.ndarray, "state state"]:
        """The transition of the state y[t], ..., y[t-na+1]."""
        lags, p, _ = self.output_weights.shape
        matrix = np.eye(lags * p, k=-p)
        matrix[:p] = self.output_weights.transpose(1, 0, 2).reshape(p, lags * p)
        return matrix

    def drive(self, controls: Float[np.ndarray, "time control"]) -> Float[np.ndarray, "time output"]:
        """What the controls and the offset add to each row; before the start, the first control is held."""
        rows = np.arange(len(controls))
        total = np.tile(self.offset, (len(controls), 1))
        for lag, weight in zip(self.order.control_lags, self.control_weights, strict=True):
            total += controls[np.maximum(rows - lag, 0)] @ weight.T
        return total

    def filtered(
        self, outputs: Float[np.ndarray, "time output"], drive: Float[np.ndarray, "time2 output"]
    ) -> tuple[Float[np.ndarray, "origin state"], Float[np.ndarray, "origin state state"]]:
        """Mean and covariance of the state given the rows before each origin 0, 1, ...; there is no output noise.

        Before the first row the outputs have the training mean and variance (standardised: 0 and 1).
        """
        p, companion = len(self.offset), self.companion
        mean, covariance = np.zeros(len(companion)), np.eye(len(companion))
        means, covariances = [mean], [covariance]
        for row, push in zip(outputs, drive, strict=False):
            mean, covariance = companion @ mean, companion @ covariance @ companion.T
            mean[:p] += push
            covariance[:p, :p] += self.noise_covariance
            seen = np.flatnonzero(~np.isnan(row))
            if len(seen):
                gain = np.linalg.solve(covariance[np.ix_(seen, seen)], covariance[seen]).T
                mean = mean + gain @ (row[seen] - mean[seen])
                covariance = covariance - gain @ covariance[seen]
                mean[seen], covariance[seen], covariance[:, seen] = row[seen], 0.0, 0.0
            means.append(mean)
            covariances.append(covariance)
        return np.stack(means), np.stack(covariances)

    def forecasts(self, data: Dataset, origins: Sequence[int], steps: int, *, key: Any) -> list[Forecast]:
        outputs, controls = standardised(self.scaling, data, origins, steps)
        controls = np.pad(controls, ((0, max(0, max(origins) + steps - len(controls))), (0, 0)))
        drive, p = self.drive(controls), data.num_outputs
        means, covariances = self.filtered(outputs[: max(origins)], drive)
        companion = self.companion
        push = np.zeros((len(origins), steps, len(companion)))
        push[:, :, :p] = drive[np.asarray(origins)[:, None] + np.arange(steps)]
        noise = np.zeros_like(companion)
        noise[:p, :p] = self.noise_covariance
        emission, silent = np.eye(p, len(companion)), np.zeros((p, p))
        chosen = means[list(origins)], covariances[list(origins)]
        moments = linear_forecasts(companion, emission, noise, silent, *chosen, push)
        return [gaussian(self.scaling, data, o, *m) for o, m in zip(origins, moments, strict=True)]
