"""What a fit found, in words and in the user's units: noise levels, how non-linear f is, and whether it beats a linear model."""

from dataclasses import asdict, dataclass
from typing import Any

import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Float

from gpssm._types import PRNGKey
from gpssm.data import Dataset
from gpssm.emissions import LinearGaussian
from gpssm.evaluate import Evaluation
from gpssm.linalg import covariance
from gpssm.params import unwrap
from gpssm.predict import posterior_states, transition_moments
from gpssm.result import FitResult

SIGNIFICANT = 2.0  # standard errors
LINEAR, MILD, CLEAR = 0.01, 0.05, 0.2  # shares of a state's movement that a linear map leaves
CLAIMED, TOLERATED = 0.9, 0.05  # what the bands say that they hold, and how far they may be off


@dataclass(frozen=True)
class Noise:
    """Standard deviations of one output, in its units; None where the emission does not tell."""

    output: str
    unit: str
    observation: float | None
    process: float | None  # what one step of process noise does to the output
    total: float  # of the output itself


@dataclass(frozen=True)
class Findings:
    """What a person wants to know of a fitted model."""

    num_states: int
    noise: tuple[Noise, ...]
    nonlinear_share: float  # the largest of the next
    nonlinear_shares: tuple[float, ...]  # of each state's movement f(x, c) - x, what f's best linear map leaves of its variance
    function_uncertainty: float  # standard deviation of f as a share of that movement, over all visited states
    verdict: str  # "better", "worse", "level" or "unknown": against the linear model on held-out data
    verdict_numbers: dict[str, float]
    coverage90: float | None  # what the 90 % bands held of the held-out data, and its standard error
    coverage90_error: float | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def sentences(self) -> list[str]:
        """The findings in plain words."""
        told = [*map(_noise_sentence, self.noise), self._dynamics_sentence(), _verdict_sentence(self)]
        return told if self.coverage90 is None else [*told, _coverage_sentence(self.coverage90, self.coverage90_error or 0.0)]

    def _dynamics_sentence(self) -> str:
        share = self.nonlinear_share
        degree = (
            "practically linear"
            if share < LINEAR
            else "mildly non-linear"
            if share < MILD
            else "clearly non-linear"
            if share < CLEAR
            else "strongly non-linear"
        )
        states = "1 state" if self.num_states == 1 else f"{self.num_states} states"
        which = int(np.argmax(self.nonlinear_shares))
        whose = "the state moves" if self.num_states == 1 else f"state {which + 1} moves"
        return (
            f"The dynamics ({states}) are {degree}: a straight line misses {100 * share:.2g} % of how {whose} from row to row, "
            f"and f is known to about {100 * self.function_uncertainty:.2g} % of the movement."
        )


def find(result: FitResult, evaluation: Evaluation | None = None, *, key: PRNGKey, name: str = "gpssm") -> Findings:
    """What there is to say of a fit, and of its scores on held-out data if there are any."""
    points = visited_inputs(result, key=key)
    mean, variance = transition_moments(result, points)
    residual = mean - _linear_part(points, mean)
    movement = (mean - points[:, : result.model.num_states]).var(axis=0)
    floor = np.maximum(movement, 1e-6 * mean.var(axis=0) + 1e-12)  # a state that never moves is not curved
    shares = tuple(float(share) for share in residual.var(axis=0) / floor)
    verdict, numbers = _verdict(evaluation, name)
    score = evaluation.score(name) if evaluation is not None and name in evaluation.errors else None
    return Findings(
        num_states=result.model.num_states,
        noise=_noise(result),
        nonlinear_share=max(shares),
        nonlinear_shares=shares,
        function_uncertainty=float(np.sqrt(variance.mean(axis=0).sum() / floor.sum())),
        verdict=verdict,
        verdict_numbers=numbers,
        coverage90=None if score is None else score.values["coverage90"],
        coverage90_error=None if score is None else _finite(score.standard_errors["coverage90"]),
    )


def visited_inputs(result: FitResult, *, key: PRNGKey, num_samples: int = 50) -> Float[np.ndarray, "point input"]:
    """Posterior mean state and control of every training row that has a successor, in the model's units."""
    rows = []
    for i in range(result.data.num_sequences):
        states = posterior_states(result, key=jr.fold_in(key, i), num_samples=num_samples, sequence=i).mean(axis=0)
        controls = np.asarray(result.scaling.controls(result.data.controls[i]))
        rows.append(np.hstack([states, controls])[:-1])
    return np.concatenate(rows)


def _linear_part(points: Float[np.ndarray, "point input"], values: Float[np.ndarray, "point state"]) -> np.ndarray:
    design = np.hstack([points, np.ones((len(points), 1))])
    return design @ np.linalg.lstsq(design, values, rcond=None)[0]


def _noise(result: FitResult) -> tuple[Noise, ...]:
    data, scale = result.data, result.scaling.output_scale
    emission, process_scale = unwrap((result.model.emission, result.model.process_scale))
    observation = process = [None] * data.num_outputs
    if isinstance(emission, LinearGaussian):
        cov = np.asarray(covariance(jnp.asarray(emission.chol_noise)))
        observation = list(np.sqrt(cov if cov.ndim == 1 else np.diag(cov)) * scale)
        process = list(np.linalg.norm(np.asarray(emission.matrix) * np.asarray(process_scale), axis=1) * scale)
    return tuple(
        Noise(name, unit, _float(seen), _float(moved), float(total))
        for name, unit, seen, moved, total in zip(data.output_names, data.output_units, observation, process, scale, strict=True)
    )


def _float(value: Any) -> float | None:
    return None if value is None else float(value)


def _noise_sentence(noise: Noise) -> str:
    unit = f" {noise.unit}" if noise.unit else ""
    if noise.observation is None or noise.process is None:
        return f"{noise.output} has a standard deviation of {noise.total:.3g}{unit}."
    return (
        f"{noise.output}: the sensor adds noise of sd {noise.observation:.3g}{unit}, the process {noise.process:.3g}{unit} "
        f"a step (the signal itself has sd {noise.total:.3g}{unit})."
    )


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def _verdict(evaluation: Evaluation | None, name: str) -> tuple[str, dict[str, float]]:
    if evaluation is None or not {name, "linear"} <= set(evaluation.errors):
        return "unknown", {}
    ours, theirs = evaluation.score(name), evaluation.score("linear")
    nlpd, nlpd_error = evaluation.difference(name, "linear", "nlpd")
    crps, crps_error = evaluation.difference(name, "linear", "crps")
    numbers = {
        "rmse": ours.rmse,
        "rmse_linear": theirs.rmse,
        "nlpd_difference": nlpd,
        "nlpd_difference_se": nlpd_error,
        "crps_difference": crps,
        "crps_difference_se": crps_error,
    }
    votes = [
        -np.sign(d) if np.isfinite(d) and np.isfinite(e) and abs(d) > SIGNIFICANT * e else 0.0
        for d, e in ((nlpd, nlpd_error), (crps, crps_error))
    ]
    verdict = "better" if max(votes) > 0 and min(votes) >= 0 else "worse" if min(votes) < 0 and max(votes) <= 0 else "level"
    return verdict, {key: float(value) for key, value in numbers.items()}


def _verdict_sentence(findings: Findings) -> str:
    numbers = findings.verdict_numbers
    if findings.verdict == "unknown":
        return "Nothing was held out to compare with a linear model, so whether the GPSSM earns its keep is not known."
    scores = (
        f"RMSE {numbers['rmse']:.3g} against {numbers['rmse_linear']:.3g} standard units; log score "
        f"{_better(-numbers['nlpd_difference'])} (se {numbers['nlpd_difference_se']:.2g}) and CRPS "
        f"{_better(-numbers['crps_difference'])} (se {numbers['crps_difference_se']:.2g})"
    )
    if findings.verdict == "better":
        return f"The GPSSM earns its keep: on held-out data it beats the linear model ({scores})."
    if findings.verdict == "worse":
        return f"The GPSSM does not earn its keep: the linear model forecasts the held-out data better ({scores}). Use that one."
    return f"The GPSSM and the linear model are level on held-out data ({scores}): the simpler one will do."


def _coverage_sentence(held: float, error: float) -> str:
    """Whether the bands can be believed; what the windows are too few to tell apart from 90 % counts as 90 %."""
    told = f"Of what happened, {100 * held:.0f} % fell into the 90 % bands"
    room = max(TOLERATED, SIGNIFICANT * error)
    if held < CLAIMED - room:
        return f"{told}: they are too narrow, so expect more surprises than they claim."
    if held > CLAIMED + room:
        return f"{told}: they are wider than they need be."
    return f"{told}: they can be believed."


def _better(gain: float) -> str:
    return f"{'better' if gain >= 0 else 'worse'} by {abs(gain):.3g}"


def held_out_starts(train: Dataset) -> list[int]:
    """Where the held-out part of each sequence begins."""
    return [int(n) for n in train.lengths]
