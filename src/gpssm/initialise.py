"""Where a fit starts: a linear state-space model's states, and everything else in closed form given them.

Subspace identification gives states, their dimension and a linear model. In a basis in which the states have unit covariance
and the process noise is diagonal, that model is the GP's linear mean, inducing inputs are spread over the visited states, q(u) is
the exact posterior given those states, and A_t, b_t, S_t are those of the linear smoother. Before any step is taken the GPSSM is
thus already about as good as the linear model.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Float
from scipy.linalg import eigh

from gpssm._precision import exact
from gpssm._types import PRNGKey
from gpssm.data import Dataset, Scaling
from gpssm.emissions import LinearGaussian
from gpssm.gp import InducingPosterior, SparseGP
from gpssm.kernels import AbstractKernel, Matern, RationalQuadratic, SquaredExponential
from gpssm.linear import LinearStateSpace
from gpssm.means import AbstractMean, IdentityMean, LinearMean, ZeroMean
from gpssm.model import GPSSM
from gpssm.params import fix, unwrap
from gpssm.posteriors import (
    PRSSM,
    VCDT,
    AbstractLocal,
    AbstractPosterior,
    AmortisedSteps,
    FactorisedLinear,
    FactorisedNonlinear,
    FilteringSteps,
    FreeSteps,
    FunctionDependent,
    FunctionDependentPathwise,
    Parametric,
    PriorSteps,
    PRSSMCorrected,
)
from gpssm.subspace import Identification, identify

FAMILIES: dict[str, Callable[..., AbstractPosterior]] = {
    "vcdt": VCDT,
    "factorised-linear": FactorisedLinear,
    "factorised-nonlinear": FactorisedNonlinear,
    "f-dependent": FunctionDependent,
    "f-dependent-pathwise": FunctionDependentPathwise,
    "parametric": Parametric,
    "pr-ssm": PRSSM,
    "pr-ssm-corrected": PRSSMCorrected,
}
KERNELS = ("se", "matern12", "matern32", "matern52", "rq")
MEANS = ("linear", "identity", "zero")
LOCALS = ("auto", "free", "free-diagonal", "filtering", "amortised", "prior")
PRIOR_ONLY = ("pr-ssm", "pr-ssm-corrected")  # families that have no steps of their own
SMALLEST_SCALE = 0.01  # of the noise a fit starts with, in standard units


@dataclass(frozen=True)
class StartSettings:
    """What to build; the defaults are what `gpssm.fit` uses."""

    state_dim: int | Literal["auto"] = "auto"
    posterior: str = "vcdt"
    num_inducing: int = 40
    kernel: str = "se"
    mean: str = "linear"
    local: str = "auto"  # prior steps where the family has no others, else free ones
    is_inducing_shared: bool = False
    cut_every: int | None = None
    nonlinear_scale: float = 0.05  # prior standard deviation of f around its linear mean, in units of the states
    relative_lengthscale: float = 2.0  # in units of the spread of the inputs
    is_mean_fixed: bool = True  # the linear mean stays the stable one that identification found, and f bends around it
    free_run: int = 24  # rows that f learns to bridge alone before the fit (`gpssm.fit.free_run`); 0: none
    free_run_steps: int = 800

    def __post_init__(self) -> None:
        for name, choices in (
            ("posterior", tuple(FAMILIES)),
            ("kernel", KERNELS),
            ("mean", MEANS),
            ("local", LOCALS),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"`{name}` must be one of {', '.join(choices)}, but got {getattr(self, name)!r}.")
        if self.state_dim != "auto" and (isinstance(self.state_dim, str) or self.state_dim < 1):
            raise ValueError(f"`state_dim` must be 'auto' or a whole number from 1, but got {self.state_dim!r}.")
        if self.posterior in PRIOR_ONLY and self.local not in ("auto", "prior"):
            raise ValueError(
                f"`{self.posterior}` moves as the prior does: expected `local` 'auto' or 'prior', got {self.local!r}."
            )
        if self.posterior == "factorised-linear" and self.local in ("filtering", "prior"):
            raise ValueError(
                f"`factorised-linear` is linear in the state, but `local` {self.local!r} gives steps for values of f: expected "
                "'auto', 'free', 'free-diagonal' or 'amortised'."
            )
        if self.cut_every is not None and (self.posterior in PRIOR_ONLY or self.local not in ("auto", "free", "free-diagonal")):
            raise ValueError("`cut_every` cuts free steps: expected `local` 'auto', 'free' or 'free-diagonal' with it.")
        for name in ("num_inducing", "free_run_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, but got {getattr(self, name)}.")
        if self.free_run != 0 and self.free_run < 2:
            raise ValueError(f"`free_run` must be 0 or at least 2 rows, but got {self.free_run}.")


@dataclass(frozen=True)
class Start:
    """A model and a posterior to fit, and the linear model that they come from."""

    model: GPSSM
    posterior: AbstractPosterior
    identification: Identification
    states: tuple[Float[np.ndarray, "_ state"], ...]  # of the linear model, smoothed, in the basis of the GPSSM
    state_covariances: tuple[Float[np.ndarray, "_ state state"], ...]


@exact
def initialise(data: Dataset, *, key: PRNGKey, scaling: Scaling | None = None, settings: StartSettings | None = None) -> Start:
    """A model and posterior that start where the best linear state-space model of `data` stands."""
    settings, scaling = settings or StartSettings(), scaling or Scaling.of(data)
    outputs = [np.asarray(scaling.outputs(a)) for a in data.outputs]
    controls = [np.asarray(scaling.controls(a)) for a in data.controls]
    found = identify(outputs, controls, settings.state_dim)
    linear, states, covariances = _diagonalised(found)
    key_inducing, key_local = jr.split(key)
    model = _model(linear, states, controls, settings, key_inducing)
    inducing = inducing_given_states(model, states, controls)
    local = _local(linear, model, inducing, states, covariances, controls, [~np.isnan(a) for a in outputs], settings, key_local)
    return Start(model, FAMILIES[settings.posterior](inducing, local), found, tuple(states), tuple(covariances))


def greedy_inducing(
    points: Float[np.ndarray, "point input"], lengthscales: Float[np.ndarray, " input"], num_inducing: int
) -> Float[np.ndarray, "inducing input"]:
    """The points that, one after another, have the largest variance given those chosen before (a pivoted Cholesky)."""
    num_inducing = min(num_inducing, len(points))
    scaled = points / lengthscales
    variance, chosen = np.ones(len(points)), []
    factor = np.zeros((num_inducing, len(points)))
    for i in range(num_inducing):
        pivot = int(np.argmax(variance))
        chosen.append(pivot)
        row = np.exp(-0.5 * np.sum((scaled - scaled[pivot]) ** 2, axis=1)) - factor[:i, pivot] @ factor[:i]
        factor[i] = row / np.sqrt(max(variance[pivot], 1e-12))
        variance = np.maximum(variance - factor[i] ** 2, 0.0)
        variance[pivot] = -1.0
    return points[chosen]


def inducing_given_states(
    model: GPSSM, states: list[Float[np.ndarray, "_ state"]], controls: list[Float[np.ndarray, "_ control"]]
) -> InducingPosterior:
    """The exact q(v) if the states were known: Bayesian regression of x_{t+1} - m(x_t, c_t) on a(x_t, c_t) with noise Q."""
    plain = unwrap(model)
    points = jnp.concatenate([jnp.asarray(np.hstack([x, c])[:-1]) for x, c in zip(states, controls, strict=True)])
    targets = jnp.concatenate([jnp.asarray(x[1:]) for x in states])
    basis = plain.transition.basis()
    weights = jax.vmap(lambda point: basis.project(point).weights)(points)
    residuals = targets - jax.vmap(plain.transition.mean)(points)
    num_states, num_inducing = plain.num_states, plain.transition.num_inducing
    weights = jnp.broadcast_to(weights, (len(points), num_states, num_inducing))

    def one_state(a: jax.Array, residual: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
        precision = jnp.eye(num_inducing) + a.T @ a / scale**2
        covariance = jnp.linalg.inv(precision)
        covariance = 0.5 * (covariance + covariance.T)
        return covariance @ (a.T @ residual) / scale**2, jnp.linalg.cholesky(covariance)

    mean, chol = jax.vmap(one_state, in_axes=(1, 1, 0))(weights, residuals, plain.process_scale)
    return InducingPosterior(mean, chol)


def _diagonalised(
    found: Identification,
) -> tuple[LinearStateSpace, list[Float[np.ndarray, "_ state"]], list[Float[np.ndarray, "_ state state"]]]:
    """The linear model in the basis that makes the states' covariance the identity and Q diagonal."""
    states = np.concatenate(found.states)
    spread = np.atleast_2d(np.cov(states.T)) + 1e-9 * np.eye(states.shape[1])
    _, vectors = eigh(found.model.process_covariance, spread)  # vectors.T spread vectors = I, and Q becomes diagonal
    basis = vectors.T
    moved = [x @ basis.T for x in found.states]
    covariances = [basis @ p @ basis.T for p in found.state_covariances]
    return found.model.change_basis(basis), moved, covariances


def _model(
    linear: LinearStateSpace,
    states: list[Float[np.ndarray, "_ state"]],
    controls: list[Float[np.ndarray, "_ control"]],
    settings: StartSettings,
    key: PRNGKey,
) -> GPSSM:
    num_states = linear.state_dim
    points = np.concatenate([np.hstack([x, c]) for x, c in zip(states, controls, strict=True)])
    lengthscales = settings.relative_lengthscale * np.maximum(points.std(axis=0), 1e-3) * np.sqrt(points.shape[1])
    inducing = greedy_inducing(points, lengthscales, settings.num_inducing)
    if not settings.is_inducing_shared:
        inducing = np.broadcast_to(inducing, (num_states, *inducing.shape))
    matrix = np.hstack([linear.transition, linear.control])
    means: dict[str, AbstractMean] = {
        "linear": LinearMean(matrix, linear.offset),
        "identity": IdentityMean(num_states),
        "zero": ZeroMean(num_states),
    }
    scale = settings.nonlinear_scale if settings.mean == "linear" else 1.0
    kernels = [make_kernel(settings.kernel, lengthscales, scale**2) for _ in range(num_states)]
    transition = SparseGP(kernels, means[settings.mean], np.array(inducing), num_states)
    noise = np.sqrt(np.diag(linear.observation_covariance))
    emission = LinearGaussian(linear.emission, linear.emission_offset, np.maximum(noise, SMALLEST_SCALE))
    if settings.is_mean_fixed:
        transition = fix(transition, lambda t: t.mean)
    process = np.sqrt(np.diag(linear.process_covariance))
    initial_chol = np.linalg.cholesky(linear.initial_covariance + 1e-4 * np.eye(num_states))
    return GPSSM(transition, emission, np.maximum(process, SMALLEST_SCALE), linear.initial_mean, initial_chol)


def make_kernel(name: str, lengthscales: Float[np.ndarray, " input"], variance: float) -> AbstractKernel:
    """The kernel of that short name."""
    smoothness = {"matern12": 0.5, "matern32": 1.5, "matern52": 2.5}
    if name in smoothness:
        return Matern(lengthscales, variance, smoothness[name])
    return RationalQuadratic(lengthscales, variance) if name == "rq" else SquaredExponential(lengthscales, variance)


def _local(
    linear: LinearStateSpace,
    model: GPSSM,
    inducing: InducingPosterior,
    states: list[Float[np.ndarray, "_ state"]],
    covariances: list[Float[np.ndarray, "_ state state"]],
    controls: list[Float[np.ndarray, "_ control"]],
    is_observed: list[np.ndarray],
    settings: StartSettings,
    key: PRNGKey,
) -> AbstractLocal:
    """The source of per-step parameters, free ones from the linear smoother."""
    if settings.local == "filtering":
        return FilteringSteps()
    if settings.local == "amortised":
        return AmortisedSteps(linear.state_dim, len(linear.emission), linear.control.shape[1], key=key)
    small = 1e-6 * np.eye(linear.state_dim)
    initial_mean = np.stack([x[0] for x in states])
    initial_chol = np.stack([np.linalg.cholesky(p[0] + small) for p in covariances])
    if settings.local == "prior" or settings.posterior in PRIOR_ONLY:
        return PriorSteps(initial_mean, initial_chol)
    is_full = settings.local != "free-diagonal"
    is_linear = settings.posterior == "factorised-linear"
    longest = max(len(x) for x in states) - 1
    tables = [
        _smoother_steps(linear, model, inducing, x, c, seen, longest, is_full, is_linear)
        for x, c, seen in zip(states, controls, is_observed, strict=True)
    ]
    gain, offset, chol = (np.stack(table) for table in zip(*tables, strict=True))
    return FreeSteps(initial_mean, initial_chol, gain, offset, chol, is_full, settings.cut_every)


def _smoother_steps(
    linear: LinearStateSpace,
    model: GPSSM,
    inducing: InducingPosterior,
    states: Float[np.ndarray, "time state"],
    controls: Float[np.ndarray, "time control"],
    is_observed: np.ndarray,
    longest: int,
    is_full: bool,
    is_linear: bool,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A_t, b_t and a scale of S_t of p(x_{t+1} | f(x_t), y_{t+1..T}) in the linear model.

    A backward information filter gives the precision Lambda of x_{t+1} from the outputs that follow; then
    S = (Q^{-1} + Lambda)^{-1}, A = S Q^{-1}, and b makes the smoothed states the means. For a chain that is linear in the state,
    A is multiplied by the linear transition.
    """
    process = np.asarray(unwrap(model.process_scale)) ** 2
    noise = np.maximum(np.diag(linear.observation_covariance), SMALLEST_SCALE**2)
    size, dim = len(states), linear.state_dim
    precision, chols, gains = np.zeros((dim, dim)), [], []
    for t in range(size - 1, 0, -1):
        rows = linear.emission[is_observed[t]]
        precision = precision + rows.T @ (rows / noise[is_observed[t], None])
        shape = np.linalg.inv(np.diag(1 / process) + precision)
        if not is_full:
            shape = np.diag(1 / (1 / process + np.diag(precision)))
        shape = 0.5 * (shape + shape.T)
        gains.append(shape / process)
        chols.append(np.linalg.cholesky(shape))
        precision = (
            linear.transition.T @ (precision - precision @ shape @ precision) @ linear.transition
            if is_full
            else (linear.transition.T @ np.diag(np.diag(precision) / (1 + process * np.diag(precision))) @ linear.transition)
        )
    gain, chol = np.array(gains[::-1]), np.array(chols[::-1])
    plain, q = unwrap(model), unwrap(inducing)
    basis = plain.transition.basis()

    def mean_of_f(point: jax.Array) -> jax.Array:
        return plain.transition.mean(point) + jnp.sum(basis.project(point).weights * q.mean, axis=-1)

    expected = np.asarray(jax.vmap(mean_of_f)(jnp.asarray(np.hstack([states, controls])[:-1])))
    if is_linear:
        gain, expected = gain @ linear.transition, states[:-1]
    if not is_full:
        gain, chol = np.diagonal(gain, axis1=1, axis2=2), np.diagonal(chol, axis1=1, axis2=2)
        offset = states[1:] - gain * expected
    else:
        offset = states[1:] - np.einsum("tij,tj->ti", gain, expected)

    # rows beyond the sequence are never counted; they only have to be well behaved
    def padded(table: np.ndarray, filler: np.ndarray) -> np.ndarray:
        return np.concatenate([table, np.broadcast_to(filler, (longest - len(table), *filler.shape))])

    return padded(gain, 0 * gain[0]), padded(offset, 0 * offset[0]), padded(chol, chol[0])
