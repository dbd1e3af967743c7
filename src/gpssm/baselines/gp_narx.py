"""GP-NARX: Gaussian process regression on lagged outputs and controls, forecast by simulation."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from gpssm.baselines.arx import ARX, LagOrder, choose_order, regression_rows
from gpssm.baselines.base import AbstractBaseline, generator_of, standardised
from gpssm.baselines.gp_regression import GPRegression, fit_gp
from gpssm.data import Dataset, Scaling
from gpssm.forecasts import Forecast


@dataclass(frozen=True)
class GPNARX(AbstractBaseline):
    """y[t] = f(lagged outputs and controls) + noise, f from a Gaussian process a output; forecasts by simulation.

    Every sample draws one f and keeps it over the horizon, and its own noise at each step; the density is
    the mixture over samples. Outputs that are missing before the origin are drawn from an ARX model's
    Kalman filter.
    """

    scaling: Scaling
    order: LagOrder
    regressions: tuple[GPRegression, ...]
    filler: ARX
    limit: Float[np.ndarray, " output"]  # no trajectory leaves [-limit, limit]: unstable draws would have no moments
    num_samples: int = 128

    @classmethod
    def fit(cls, train: Dataset, *, max_rows: int = 500, num_samples: int = 128, seed: int = 0) -> "GPNARX":
        """Lags by evidence, hyperparameters by marginal likelihood, on at most `max_rows` evenly chosen rows."""
        scaling = Scaling.of(train)
        order = _order_by_evidence(train, scaling, choose_order(train, scaling))
        inputs, targets = regression_rows(train, scaling, order.outputs, order.control_lags)
        few, rows = _evenly(len(inputs), 200), _evenly(len(inputs), max_rows)
        regressions = []
        for target in targets.T:
            rough = fit_gp(inputs[few, :-1], target[few])
            regressions.append(fit_gp(inputs[rows, :-1], target[rows], start=rough.hyper, max_iterations=40))
        return cls(scaling, order, tuple(regressions), ARX.fit(train, order=order), 3 * np.abs(targets).max(0), num_samples)

    def forecasts(self, data: Dataset, origins: Sequence[int], steps: int, *, key: Any) -> list[Forecast]:
        outputs, controls = standardised(self.scaling, data, origins, steps)
        controls = np.pad(controls, ((0, max(0, max(origins) + steps - len(controls))), (0, 0)))
        generator, rows = generator_of(key), np.asarray(origins)
        recent = self._recent(outputs[: max(origins)], controls, rows, generator)
        draws = [regression.draws(generator, self.num_samples) for regression in self.regressions]
        deviation = np.sqrt([regression.noise_variance for regression in self.regressions])
        means = np.empty((self.num_samples, len(rows), steps, data.num_outputs))
        for step in range(steps):
            lagged = [controls[np.maximum(rows + step - lag, 0)] for lag in self.order.control_lags]
            driven = np.concatenate([np.zeros((len(rows), 0)), *lagged], axis=1)
            inputs = np.concatenate([recent, np.broadcast_to(driven, (self.num_samples, *driven.shape))], axis=2)
            following = np.stack([draw(inputs) for draw in draws], axis=-1)
            means[:, :, step] = np.clip(following, -self.limit, self.limit)
            drawn = means[:, :, step] + deviation * generator.standard_normal(means.shape[:2] + deviation.shape)
            recent = np.concatenate([drawn, recent], axis=2)[:, :, : recent.shape[2]]
        return [
            Forecast.mixture(
                np.asarray(self.scaling.outputs_back(means[:, window])),
                np.diag((deviation * self.scaling.output_scale) ** 2),
                output_names=data.output_names,
                first_step=int(origin),
                sampling_time=data.sampling_time,
                is_smoothed=True,
                seed=generator,
            )
            for window, origin in enumerate(origins)
        ]

    def _recent(self, past, controls, origins, generator) -> Float[np.ndarray, "sample window lag"]:
        """The outputs before each origin, newest first; what is missing is drawn."""
        means, covariances = self.filler.filtered(past, self.filler.drive(controls))
        values, vectors = np.linalg.eigh(covariances[origins])
        factor = vectors * np.sqrt(np.maximum(values, 0.0))[:, None, :]
        normal = generator.standard_normal((self.num_samples, *means[origins].shape))
        return means[origins] + np.einsum("wij,swj->swi", factor, normal)


def _evenly(num_rows: int, most: int) -> np.ndarray:
    return np.unique(np.linspace(0, num_rows - 1, min(num_rows, most)).round().astype(int))


def _order_by_evidence(train: Dataset, scaling: Scaling, linear: LagOrder) -> LagOrder:
    """The lags of greatest GP evidence among the ARX order and n lags of outputs and controls each, n = 1 ... 12.

    The evidence is at the best hyperparameters, of which long lags have many, so each costs log(rows) / 2 as in BIC.
    """
    has_controls = int(train.num_controls > 0)
    candidates = [linear] + [LagOrder(n, n * has_controls, 1) for n in (1, 2, 3, 4, 6, 8, 10, 12)]
    longest = max(max(order.outputs, order.delay + order.controls - 1) for order in candidates)
    inputs, targets = regression_rows(train, scaling, longest, range(1, longest + 1))
    if len(inputs) < 20:
        return linear
    few, best = _evenly(len(inputs), 250), (-np.inf, linear)
    p, m = train.num_outputs, train.num_controls
    for order in candidates:
        lags = [np.arange((lag - 1) * m, lag * m) + longest * p for lag in order.control_lags]
        columns = np.concatenate([np.arange(order.outputs * p), *lags]).astype(int)
        fits = [fit_gp(inputs[np.ix_(few, columns)], target[few], max_iterations=40) for target in targets.T]
        evidence = sum(fit.log_evidence for fit in fits) - 0.5 * p * (len(columns) + 3) * np.log(len(few))
        best = max(best, (evidence, order), key=lambda pair: pair[0])
    return best[1]
