"""Several forecasters as one: the mixture of what they predict, with weights learnt on rows that none of them was fitted to."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float
from scipy.special import logsumexp

from gpssm.data import Dataset
from gpssm.evaluate import Forecaster
from gpssm.forecasts import Density, Forecast


@dataclass(frozen=True)
class MixtureDensity:
    """A weighted mixture of densities, step by step."""

    parts: tuple[Density, ...]
    weights: Float[np.ndarray, " part"]

    def log_density(
        self, outputs: Float[np.ndarray, "time output"], is_observed: Bool[np.ndarray, "time output"]
    ) -> Float[np.ndarray, " time"]:
        parts = np.stack([part.log_density(outputs, is_observed) for part in self.parts])
        return np.asarray(logsumexp(parts, axis=0, b=self.weights[:, None]))


@dataclass(frozen=True)
class Ensemble:
    """Forecasters that speak with one voice: the mixture of their predictive distributions.

    It forecasts as each of them does (see `evaluate.Forecaster`). Members without weight are never asked.
    """

    members: tuple[Forecaster, ...]
    weights: Float[np.ndarray, " member"]

    def __post_init__(self) -> None:
        weights = np.asarray(self.weights, float)
        if weights.shape != (len(self.members),) or not (weights >= 0).all() or not np.isclose(weights.sum(), 1):
            raise ValueError(
                f"An ensemble of {len(self.members)} members needs as many weights, none negative, that add up to 1, "
                f"but got {weights}."
            )

    def forecast(self, history: Dataset, steps: int, controls: Any = None, *, key: Any) -> Forecast:
        """The next `steps` rows after `history` (one sequence), under the controls of those rows."""
        return self._mixed(lambda member: [member.forecast(history, steps, controls, key=key)])[0]

    def forecasts(self, data: Dataset, origins: Sequence[int], steps: int, *, key: Any) -> list[Forecast]:
        """One forecast an origin o: given rows [0, o) of the one sequence in `data`, of rows o ... o+steps-1."""
        return self._mixed(lambda member: member.forecasts(data, origins, steps, key=key))

    def _mixed(self, ask: Callable[[Forecaster], list[Forecast]]) -> list[Forecast]:
        chosen = [(member, weight) for member, weight in zip(self.members, self.weights, strict=True) if weight > 0]
        weights = np.array([weight for _, weight in chosen])
        answers = [ask(member) for member, _ in chosen]
        return [mixture(parts, weights) for parts in zip(*answers, strict=True)]


def mixture(forecasts: Sequence[Forecast], weights: Float[np.ndarray, " member"]) -> Forecast:
    """The weighted mixture of forecasts of the same rows: exact mean, covariance and density, and each one's share of draws."""
    first = forecasts[0]
    moments = [forecast.moments() for forecast in forecasts]
    means, covariances = (np.stack(part) for part in zip(*moments, strict=True))
    mean = np.tensordot(weights, means, 1)
    spread = means - mean
    covariance = np.tensordot(weights, covariances + spread[..., :, None] * spread[..., None, :], 1)
    counts = _shares(weights, min(len(forecast.samples) for forecast in forecasts))
    samples = np.concatenate([_some(forecast.samples, count) for forecast, count in zip(forecasts, counts, strict=True)])
    density = MixtureDensity(tuple(forecast.density for forecast in forecasts), weights)
    return Forecast(mean, samples, density, first.output_names, first.first_step, first.sampling_time, covariance)


def stacking_weights(
    log_densities: Float[np.ndarray, "member value"], num_iterations: int = 10_000
) -> Float[np.ndarray, " member"]:
    """The weights whose mixture gives the outcomes the highest average log density (stacking: Yao et al., 2018).

    `log_densities` are each member's of outcomes that it was not fitted to; NaN is an outcome that is missing for all, and
    counts as impossible where others have a value. The objective is concave; expectation-maximisation climbs it from equal
    weights until no weight moves any more, and weights below a thousandth become zero.
    """
    values = np.where(np.isnan(log_densities), -np.inf, log_densities)
    values = values[:, np.isfinite(values).any(axis=0)]
    weights = np.full(len(values), 1 / len(values))
    if values.shape[1] == 0:
        return weights
    densities = np.exp(values - values.max(axis=0))
    for _ in range(num_iterations):
        shares = weights[:, None] * densities
        before, weights = weights, (shares / shares.sum(axis=0)).mean(axis=1)
        if np.abs(weights - before).max() < 1e-9:
            break
    weights = np.where(weights < 1e-3, 0.0, weights)
    return weights / weights.sum()


def _shares(weights: Float[np.ndarray, " member"], total: int) -> list[int]:
    """Whole numbers that add up to `total`, nearest to its shares by `weights` (largest remainders)."""
    exact = total * weights
    counts = np.floor(exact).astype(int)
    for i in np.argsort(counts - exact)[: total - counts.sum()]:
        counts[i] += 1
    return [int(count) for count in counts]


def _some(samples: Float[np.ndarray, "sample time output"], count: int) -> Float[np.ndarray, "_ time output"]:
    """`count` of the samples, evenly spread over them."""
    return samples[np.linspace(0, len(samples), count, endpoint=False).astype(int)]
