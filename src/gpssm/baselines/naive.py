"""Rivals without dynamics: the training mean, and the last value."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from gpssm.baselines.base import VARIANCE_FLOOR, AbstractBaseline, gaussian, second_moment, standard_outputs, standardised
from gpssm.data import Dataset, Scaling
from gpssm.forecasts import Forecast


@dataclass(frozen=True)
class Constant(AbstractBaseline):
    """The training mean, with the training covariance at every step."""

    scaling: Scaling
    covariance: Float[np.ndarray, "output output"]

    @classmethod
    def fit(cls, train: Dataset, *, seed: int = 0) -> "Constant":
        scaling = Scaling.of(train)
        return cls(scaling, second_moment(np.concatenate(standard_outputs(scaling, train))))

    def forecasts(self, data: Dataset, origins: Sequence[int], steps: int, *, key: Any) -> list[Forecast]:
        standardised(self.scaling, data, origins, steps)
        mean, covariance = np.zeros((steps, data.num_outputs)), np.tile(self.covariance, (steps, 1, 1))
        return [gaussian(self.scaling, data, o, mean, covariance) for o in origins]


@dataclass(frozen=True)
class LastValue(AbstractBaseline):
    """The last observed value of each output, with the mean square change that training shows over so many rows.

    Beyond the longest lag that training has pairs for, the variance stays as it is there.
    """

    scaling: Scaling
    variance: Float[np.ndarray, "lag output"]  # of y[t + lag] - y[t]; row 0 is lag 0
    correlation: Float[np.ndarray, "output output"]  # of one-row changes

    @classmethod
    def fit(cls, train: Dataset, *, seed: int = 0) -> "LastValue":
        scaling = Scaling.of(train)
        outputs = standard_outputs(scaling, train)
        variance = [np.full(train.num_outputs, VARIANCE_FLOOR)]
        for lag in range(1, max(2, 2 * max(train.lengths) // 3)):
            changes = np.concatenate([y[lag:] - y[:-lag] for y in outputs])
            counts = (~np.isnan(changes)).sum(0)
            square = np.nansum(changes**2, axis=0) / np.maximum(counts, 1)
            variance.append(np.where(counts >= 5, np.maximum(square, VARIANCE_FLOOR), variance[-1]))
        if len(variance) > 1 and (variance[1] <= VARIANCE_FLOOR).all():  # too few rows to tell
            variance[1:] = [np.ones(train.num_outputs)] * (len(variance) - 1)
        covariance = second_moment(np.concatenate([np.diff(y, axis=0) for y in outputs]))
        deviation = np.sqrt(np.diag(covariance))
        return cls(scaling, np.stack(variance), covariance / np.outer(deviation, deviation))

    def forecasts(self, data: Dataset, origins: Sequence[int], steps: int, *, key: Any) -> list[Forecast]:
        outputs, _ = standardised(self.scaling, data, origins, steps)
        return [gaussian(self.scaling, data, o, *self._moments(outputs[:o], steps)) for o in origins]

    def _moments(self, past: Float[np.ndarray, "past output"], steps: int) -> tuple[np.ndarray, np.ndarray]:
        mean, deviation = np.zeros((steps, past.shape[1])), np.ones((steps, past.shape[1]))
        for channel, values in enumerate(past.T):
            seen = np.flatnonzero(~np.isnan(values))
            if len(seen):  # else the training mean and variance: 0 and 1
                lags = np.arange(steps) + len(past) - seen[-1]
                mean[:, channel] = values[seen[-1]]
                deviation[:, channel] = np.sqrt(self.variance[np.minimum(lags, len(self.variance) - 1), channel])
        return mean, self.correlation * deviation[:, :, None] * deviation[:, None, :]
