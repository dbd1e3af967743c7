"""How the experiments fit: many data sets and starts of one method as one program, kept on disk when done.

A method starts from the same model, q(u) and steps as the others; what differs is the family.
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from gpssm._types import PRNGKey
from gpssm.atomic import present_folder
from gpssm.fit import FitSettings
from gpssm.free_run import linearised
from gpssm.gp import InducingPosterior, marginal_moments
from gpssm.initialise import FAMILIES, PRIOR_ONLY, inducing_given_states
from gpssm.model import GPSSM
from gpssm.params import Positive, unwrap
from gpssm.posteriors import AbstractPosterior, FreeSteps, PriorSteps
from gpssm.predict import posterior_states
from gpssm.reproduce.results import Say
from gpssm.result import FitResult, History, Status
from gpssm.save import load, save
from gpssm.select import converged_bound
from gpssm.starts import Problem, fit_many


@dataclass(frozen=True)
class Best:
    """The start with the highest bound, of several for the same data."""

    result: FitResult
    start: int
    bound: float
    bounds: tuple[float, ...]  # of every start
    seconds: float  # of all starts


def fit_best(place: Path, name: str, starts: Sequence[Sequence[Problem]], settings: FitSettings, say: Say) -> list[Best]:
    """For each data set the best of its starts by the bound; all of them run as one program.

    What is finished lies in the folder `place`, and is read rather than fitted when it is there; what is not goes on.
    """
    done, unfinished = place / name, place / f"{name}-unfinished"
    if present_folder(done).is_dir():
        say(f"{name}: done before")
        return list(load(done, dtype="saved"))
    problems = [problem for group in starts for problem in group]

    def tell(members: list[int], histories: list[History]) -> None:
        best = ", ".join(f"{history.bound[-1]:.1f}" for history in histories[:6])
        more = ", …" if len(histories) > 6 else ""
        speed = np.diff(histories[0].steps, prepend=0)[-1] / (histories[0].seconds[-1] * len(members))
        say(f"{name}: step {histories[0].steps[-1]} of {settings.num_steps}, {speed:.1f} a second, bounds {best}{more}")

    say(f"{name}: {len(problems)} fits")
    results = fit_many(problems, settings, checkpoint=unfinished, progress=tell)
    if any(result.status is Status.INTERRUPTED for result in results):
        raise KeyboardInterrupt
    best, first = [], 0
    for group in starts:
        best.append(_best(results[first : first + len(group)]))
        first += len(group)
    save(done, best)
    shutil.rmtree(unfinished, ignore_errors=True)
    return best


def _best(results: Sequence[FitResult]) -> Best:
    bounds = np.array([converged_bound(result.history) for result in results])
    chosen = int(np.argmax(np.nan_to_num(bounds, nan=-np.inf)))
    seconds = float(sum(result.history.seconds.sum() for result in results))
    return Best(results[chosen], chosen, float(bounds[chosen]), tuple(float(b) for b in bounds), seconds)


def posterior_for(
    method: str,
    model: GPSSM,
    inducing: InducingPosterior,
    steps: FreeSteps,
    states: Float[Array, "sequence time state"],
    controls: Float[Array, "sequence time control"],
) -> AbstractPosterior:
    """The family of that name at the place where q(u) and steps through f stand.

    Families that move as the prior keep q(u) and q(x_1); the one that is linear in the state gets f replaced by its tangent at
    `states`.
    """
    family: Any = FAMILIES[method]
    if method in PRIOR_ONLY:
        return family(inducing, PriorSteps(steps.initial_mean, steps.initial_chol))
    local = linearised(steps, model, inducing, states, controls) if method == "factorised-linear" else steps
    return family(inducing, local)


def with_residual_noise(
    model: GPSSM,
    states: Sequence[Float[np.ndarray, "_ state"]],
    controls: Sequence[Float[np.ndarray, "_ control"]],
) -> tuple[GPSSM, InducingPosterior]:
    """The model with as much process noise, at least, as its best f leaves unexplained of these states, and q(u) given both."""
    inducing, plain = inducing_given_states(model, list(states), list(controls)), cast(Any, unwrap(model))
    points = jnp.asarray(np.concatenate([np.hstack([x, c])[:-1] for x, c in zip(states, controls, strict=True)]))
    basis, q = plain.transition.basis(), unwrap(inducing)
    mean, _ = jax.vmap(lambda x: marginal_moments(basis.project(x), plain.transition.mean(x), q))(points)
    left = np.sqrt(np.mean((np.concatenate([x[1:] for x in states]) - np.asarray(mean)) ** 2, axis=0))
    scale = Positive(np.maximum(left, np.asarray(plain.process_scale)))
    changed = eqx.tree_at(lambda m: m.process_scale, model, scale, is_leaf=lambda leaf: isinstance(leaf, Positive))
    return changed, inducing_given_states(changed, list(states), list(controls))


def process_scale(result: FitResult) -> np.ndarray:
    """The learned standard deviation of the process noise, one number a state."""
    return np.asarray(unwrap(result.model.process_scale), float)


def smoothed_states(result: FitResult, *, key: PRNGKey, num_samples: int = 100) -> Float[np.ndarray, "sequence time state"]:
    """The posterior means of the states of every training sequence; zero in the padding."""
    table = np.zeros((result.data.num_sequences, result.data.max_length, result.model.num_states))
    for i, length in enumerate(result.data.lengths):
        table[i, :length] = posterior_states(result, key=key, num_samples=num_samples, sequence=i).mean(axis=0)
    return table


def continued(method: str, result: FitResult, *, key: PRNGKey) -> Problem:
    """The start of one method where another, with steps through f, ended."""
    windows, posterior = result.data.windows(result.scaling), cast(Any, result.posterior)
    states = jnp.asarray(smoothed_states(result, key=key), windows.outputs.dtype)
    changed = posterior_for(method, result.model, posterior.inducing, posterior.local, states, windows.controls)
    return Problem(result.data, result.model, changed, key, result.scaling)
