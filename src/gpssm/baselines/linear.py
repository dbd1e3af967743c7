"""The linear state-space model as a rival."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpssm import subspace
from gpssm.baselines.base import AbstractBaseline, gaussian, linear_forecasts, standard_controls, standard_outputs, standardised
from gpssm.data import Dataset, Scaling
from gpssm.forecasts import Forecast
from gpssm.linear import LinearStateSpace


@dataclass(frozen=True)
class LinearStateSpaceBaseline(AbstractBaseline):
    """A linear state-space model from subspace identification and maximum likelihood, with its Kalman filter."""

    scaling: Scaling
    model: LinearStateSpace

    @classmethod
    def fit(cls, train: Dataset, *, seed: int = 0) -> "LinearStateSpaceBaseline":
        scaling = Scaling.of(train)
        controls = standard_controls(scaling, train) if train.num_controls else None
        return cls(scaling, subspace.identify(standard_outputs(scaling, train), controls).model)

    def forecasts(self, data: Dataset, origins: Sequence[int], steps: int, *, key: Any) -> list[Forecast]:
        outputs, controls = standardised(self.scaling, data, origins, steps)
        controls = np.pad(controls, ((0, max(0, max(origins) + steps - len(controls))), (0, 0)))
        model, num_rows, rows = self.model, max(origins), np.asarray(origins)
        passed = model.kalman_filter(outputs[:num_rows], controls[:num_rows])
        push = controls[rows[:, None] - 1 + np.arange(steps)] @ model.control.T + model.offset
        matrices = (model.transition, model.emission, model.process_covariance, model.observation_covariance)
        moments = linear_forecasts(*matrices, passed.mean[rows - 1], passed.covariance[rows - 1], push)
        return [
            gaussian(self.scaling, data, o, mean + model.emission_offset, marginal, joint)
            for o, (mean, marginal, joint) in zip(origins, moments, strict=True)
        ]
