"""What a forecast is: one record in the user's units, shared by the models and by their rivals.

A forecast of one horizon carries its predictive mean, predictive draws (observation noise included) and a
density. The draws serve quantiles and CRPS; the density serves the log score, exactly and not through the
draws. Anything with a method `log_density(outputs, is_observed) -> [time]` is a density, so a model with
another emission brings its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float
from scipy.special import logsumexp, ndtri

LOG_TWO_PI = float(np.log(2 * np.pi))
TAIL_WEIGHT = 0.1  # what a few hundred trajectories cannot say about how far the next one may go
SMALLEST_SPREAD = 1e-10  # of samples about their mean, as a share of it: less is rounding


@runtime_checkable
class Density(Protocol):
    """The log density of the outputs at each step: joint over the observed channels."""

    def log_density(
        self, outputs: Float[np.ndarray, "time output"], is_observed: Bool[np.ndarray, "time output"]
    ) -> Float[np.ndarray, " time"]: ...


def gaussian_log_density(
    residual: Float[np.ndarray, "*batch output"],
    covariance: Float[np.ndarray, "*#batch output output"],
    is_observed: Bool[np.ndarray, "*#batch output"],
) -> Float[np.ndarray, "*batch"]:
    """log N(residual; 0, covariance) over the observed channels.

    A missing channel gets residual zero, unit variance and no correlation, and is not counted: that adds
    nothing to the quadratic form or to the determinant, so what remains is the exact marginal of the
    others.
    """
    keep = is_observed.astype(float)
    masked = covariance * keep[..., :, None] * keep[..., None, :]
    masked = masked + (1 - keep)[..., :, None] * np.eye(keep.shape[-1])
    chol = np.linalg.cholesky(masked)
    centred = np.where(is_observed, residual, 0.0)
    is_scalar = keep.shape[-1] == 1
    white = centred / chol[..., 0] if is_scalar else np.linalg.solve(chol, centred[..., None])[..., 0]
    log_determinant = 2 * np.log(np.diagonal(chol, axis1=-2, axis2=-1)).sum(-1)
    return -0.5 * ((white**2).sum(-1) + log_determinant + LOG_TWO_PI * keep.sum(-1))


@dataclass(frozen=True)
class GaussianDensity:
    """A Gaussian at each step."""

    mean: Float[np.ndarray, "time output"]
    covariance: Float[np.ndarray, "time output output"]

    def log_density(
        self, outputs: Float[np.ndarray, "time output"], is_observed: Bool[np.ndarray, "time output"]
    ) -> Float[np.ndarray, " time"]:
        return gaussian_log_density(outputs - self.mean, self.covariance, is_observed)


@dataclass(frozen=True)
class GaussianMixtureDensity:
    """An equally weighted mixture of Gaussians at each step, one component a sample, summed in log space.

    `covariance` is shared by all components ([output, output]) or is each one's own ([sample, time, output, output];
    with a first axis of 1, each step's own).
    """

    means: Float[np.ndarray, "sample time output"]
    covariance: Float[np.ndarray, "output output"] | Float[np.ndarray, "#sample time output output"]
    tails: GaussianDensity | None = None  # one more component, with the weight `TAIL_WEIGHT`

    def log_density(
        self, outputs: Float[np.ndarray, "time output"], is_observed: Bool[np.ndarray, "time output"]
    ) -> Float[np.ndarray, " time"]:
        covariance = self.covariance if self.covariance.ndim == 4 else self.covariance[None, None]
        terms = gaussian_log_density(outputs[None] - self.means, covariance, is_observed[None])
        inner = logsumexp(terms, axis=0) - np.log(len(self.means))
        if self.tails is None:
            return inner
        outer = self.tails.log_density(outputs, is_observed)
        return np.logaddexp(inner + np.log(1 - TAIL_WEIGHT), outer + np.log(TAIL_WEIGHT))


def stratified_samples(
    mean: Float[np.ndarray, "time output"],
    covariance: Float[np.ndarray, "time output output"],
    joint_covariance: Float[np.ndarray, "row row"] | None,
    num_samples: int,
    seed: int,
) -> Float[np.ndarray, "sample time output"]:
    """Gaussian trajectories whose every marginal holds `num_samples` evenly spaced quantiles of its normal.

    Correlated draws through the Cholesky factor give the order of the samples in each marginal, and the
    quantiles (i + 1/2) / num_samples are handed out in that order (Iman and Conover, 1982): quantiles of
    the samples are then exact to the grid, whatever the seed, and the correlation is that of the draws.
    Without `joint_covariance` (rows ordered by time, then output) the steps are independent of each other.
    """
    num_steps, num_outputs = mean.shape
    normal = np.random.default_rng(seed).standard_normal((num_samples, num_steps, num_outputs))
    if joint_covariance is None:
        draws = np.einsum("tij,stj->sti", _chol_correlation(covariance), normal)
    else:
        flat = normal.reshape(num_samples, -1) @ _chol_correlation(joint_covariance).T
        draws = flat.reshape(normal.shape)
    rank = draws.argsort(axis=0).argsort(axis=0)
    quantiles = ndtri((np.arange(num_samples) + 0.5) / num_samples)
    return mean + np.sqrt(np.diagonal(covariance, axis1=-2, axis2=-1)) * quantiles[rank]


def _chol_correlation(covariance: Float[np.ndarray, "*batch row row"]) -> Float[np.ndarray, "*batch row row"]:
    """Cholesky factor of the correlation; only ranks come of it, so its jitter never reaches a variance."""
    scale = np.sqrt(np.diagonal(covariance, axis1=-2, axis2=-1))
    scale = np.where(scale > 0, scale, 1.0)
    correlation = covariance / (scale[..., :, None] * scale[..., None, :])
    return np.linalg.cholesky(correlation + 1e-8 * np.eye(scale.shape[-1]))


def smoothed_components(
    means: Float[np.ndarray, "sample time output"],
    covariance: Float[np.ndarray, "output output"] | Float[np.ndarray, "#sample time output output"],
) -> tuple[Float[np.ndarray, "sample time output"], Float[np.ndarray, "#sample time output output"]]:
    """Mixture components widened by a kernel of Silverman's bandwidth and drawn to their mean to make up for it.

    With V the covariance of the means and h^2 = (4 / (S (p + 2)))^(2 / (p + 4)), the component means become
    m + sqrt(1 - h^2) (means - m) and h^2 V is added to each covariance: mean and covariance of the mixture stay as
    they are (Liu and West, 2001).
    """
    num_samples, _, num_outputs = means.shape
    square = min((4 / (num_samples * (num_outputs + 2))) ** (2 / (num_outputs + 4)), 1.0)
    centre = means.mean(0)
    spread = means - centre
    between = np.einsum("sti,stj->tij", spread, spread) / num_samples
    wide = (covariance if covariance.ndim == 4 else covariance[None, None]) + square * between
    return centre + np.sqrt(1 - square) * spread, wide


@dataclass(frozen=True)
class Forecast:
    """The predictive distribution of the outputs from row `first_step` on, in the user's units."""

    mean: Float[np.ndarray, "time output"]
    samples: Float[np.ndarray, "sample time output"]
    density: Density
    output_names: tuple[str, ...]
    first_step: int = 0
    sampling_time: float | None = None
    covariance: Float[np.ndarray, "time output output"] | None = None  # None: taken from the samples
    is_stratified: bool = False  # the samples are evenly spaced quantiles, not independent draws

    @classmethod
    def gaussian(
        cls,
        mean: Float[np.ndarray, "time output"],
        covariance: Float[np.ndarray, "time output output"],
        *,
        output_names: Sequence[str] | None = None,
        first_step: int = 0,
        sampling_time: float | None = None,
        num_samples: int = 400,
        joint_covariance: Float[np.ndarray, "row row"] | None = None,
        seed: int = 0,
    ) -> "Forecast":
        """A Gaussian forecast; its samples are stratified (see `stratified_samples`), its density exact."""
        samples = stratified_samples(mean, covariance, joint_covariance, num_samples, seed)
        names = _names(output_names, mean.shape[1])
        density = GaussianDensity(mean, covariance)
        return cls(mean, samples, density, names, int(first_step), sampling_time, covariance, True)

    @classmethod
    def mixture(
        cls,
        means: Float[np.ndarray, "sample time output"],
        covariance: Float[np.ndarray, "output output"] | Float[np.ndarray, "#sample time output output"],
        *,
        output_names: Sequence[str] | None = None,
        first_step: int = 0,
        sampling_time: float | None = None,
        is_smoothed: bool = False,
        seed: int | Sequence[int] | np.random.Generator,
    ) -> "Forecast":
        """The mixture over sampled trajectories `means` with noise `covariance`; one draw a component.

        When the noise is much narrower than the spread of the trajectories, a finite mixture is a row of spikes and
        its log score is far too low on average. `is_smoothed` then stands for the limit of many trajectories: see
        `smoothed_components`; and beyond the outermost of them the density has the tails of the Gaussian with its
        moments. It changes neither the mean nor the covariance of the forecast.
        """
        mean = means.mean(0)
        spread = means - mean
        within = np.broadcast_to(covariance, (*means.shape, means.shape[-1]))
        total = np.einsum("sti,stj->tij", spread, spread) / len(means) + within.mean(0)
        noise = np.random.default_rng(seed).standard_normal(means.shape)
        samples = means + (np.linalg.cholesky(covariance) @ noise[..., None])[..., 0]
        if is_smoothed:
            density = GaussianMixtureDensity(*smoothed_components(means, covariance), GaussianDensity(mean, total))
        else:
            density = GaussianMixtureDensity(means, covariance)
        names = _names(output_names, means.shape[-1])
        return cls(mean, samples, density, names, int(first_step), sampling_time, total)

    @property
    def num_steps(self) -> int:
        return self.mean.shape[0]

    @property
    def num_outputs(self) -> int:
        return self.mean.shape[1]

    @property
    def steps(self) -> np.ndarray:
        """The rows forecast, counted from the start of the sequence."""
        return self.first_step + np.arange(self.num_steps)

    def moments(self) -> tuple[Float[np.ndarray, "time output"], Float[np.ndarray, "time output output"]]:
        """Mean and covariance at each step."""
        if self.covariance is not None:
            return self.mean, self.covariance
        spread = self.samples - self.samples.mean(0)
        return self.mean, np.einsum("sti,stj->tij", spread, spread) / (len(self.samples) - 1)

    @property
    def standard_deviation(self) -> Float[np.ndarray, "time output"]:
        return np.sqrt(np.diagonal(self.moments()[1], axis1=-2, axis2=-1))

    def quantile(self, q: float | Sequence[float]) -> Float[np.ndarray, "..."]:
        """The `q` quantile of each output at each step ([time, output]; a leading axis when `q` is a list).

        The plotting position is the one that makes the expected coverage right: (i - 1/2) / n for
        stratified samples, i / (n + 1) for independent draws.
        """
        return np.quantile(self.samples, q, axis=0, method="hazen" if self.is_stratified else "weibull")

    def interval(self, level: float) -> tuple[Float[np.ndarray, "time output"], Float[np.ndarray, "time output"]]:
        """The central band that should hold a fraction `level` of the outcomes: its lower and upper edge."""
        lower, upper = self.quantile([(1 - level) / 2, (1 + level) / 2])
        return lower, upper

    def log_density(self, outputs: Float[np.ndarray, "time output"]) -> Float[np.ndarray, " time"]:
        """Log density of what happened, joint over the channels that are not NaN (0 where all are)."""
        is_observed = ~np.isnan(outputs)
        return self.density.log_density(np.where(is_observed, outputs, 0.0), is_observed)

    def gaussian_log_density(self, outputs: Float[np.ndarray, "time output"]) -> Float[np.ndarray, " time"]:
        """The same under the Gaussian with this forecast's mean and covariance; -inf where all samples are one value.

        Those of a sensor at its limit are, and no Gaussian has that spread.
        """
        is_observed = ~np.isnan(outputs)
        mean, covariance = self.moments()
        is_flat = np.any(np.diagonal(covariance, axis1=-2, axis2=-1) <= (SMALLEST_SPREAD * mean) ** 2, axis=-1)
        proper = np.where(is_flat[:, None, None], np.eye(self.num_outputs), covariance)
        densities = GaussianDensity(mean, proper).log_density(np.where(is_observed, outputs, 0.0), is_observed)
        return np.where(is_flat & is_observed.any(axis=-1), -np.inf, densities)

    def to_dataframe(self, quantiles: Sequence[float] = (0.05, 0.5, 0.95)) -> pd.DataFrame:
        """One row a step and output: step, (time,) output, mean, standard_deviation, q0.05, q0.5, q0.95."""
        index = np.repeat(self.steps, self.num_outputs)
        columns: dict[str, object] = {"step": index}
        if self.sampling_time is not None:
            columns["time"] = index * self.sampling_time
        columns["output"] = list(self.output_names) * self.num_steps
        columns["mean"] = self.mean.ravel()
        columns["standard_deviation"] = self.standard_deviation.ravel()
        for q, values in zip(quantiles, self.quantile(list(quantiles)), strict=True):
            columns[f"q{q:g}"] = values.ravel()
        return pd.DataFrame(columns)


def _names(names: Sequence[str] | None, num_outputs: int) -> tuple[str, ...]:
    return tuple(names) if names is not None else tuple(f"y{i + 1}" for i in range(num_outputs))
