"""The one table of small cases: every kernel, mean, emission and posterior family, by name, and bounds that combine them.

Two states, one control, two outputs, two sequences of six and four steps with missing outputs, four inducing inputs.
"""

from collections.abc import Callable
from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from gpssm.data import Dataset, Scaling, Window
from gpssm.emissions import (
    AbstractEmission,
    FunctionEmission,
    LinearGaussian,
    NonlinearGaussian,
    Poisson,
    SparseGPEmission,
    StochasticVolatility,
    StudentT,
)
from gpssm.gp import InducingPosterior, SparseGP
from gpssm.kernels import (
    AbstractKernel,
    ActiveDimensions,
    ConstantKernel,
    LinearKernel,
    Matern,
    Periodic,
    RationalQuadratic,
    SquaredExponential,
)
from gpssm.means import AbstractMean, FunctionMean, IdentityMean, LinearMean, ZeroMean
from gpssm.model import GPSSM
from gpssm.params import Frozen
from gpssm.posteriors import (
    PRSSM,
    VCDT,
    AbstractLocal,
    AbstractPosterior,
    AmortisedSteps,
    FactorisedDense,
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

NUM_STATES, NUM_CONTROLS, NUM_OUTPUTS, NUM_STEPS, NUM_INDUCING = 2, 1, 2, 6, 4
NUM_INPUTS = NUM_STATES + NUM_CONTROLS
LENGTHS = (6, 4)
ARD = jnp.array([1.0, 0.7, 1.6])


def normals(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).normal(size=shape)


def chols(*shape: int, scale: float = 0.4, seed: int = 0) -> np.ndarray:
    """Lower Cholesky factors [*shape, n, n], n the last number given."""
    size = shape[-1]
    return scale * (np.eye(size) + 0.2 * np.tril(normals(*shape, size, seed=seed)))


# Functions of a user's own, at the top of a module so that a model that holds them can be saved


def physics(point: jax.Array) -> jax.Array:
    return jnp.stack([jnp.sin(point[0]), point[1] + 0.1 * point[2]])


class TrainedPhysics(eqx.Module):
    stiffness: jax.Array

    def __call__(self, point: jax.Array) -> jax.Array:
        return jnp.stack([point[0] + 0.1 * point[1], point[1] - 0.1 * self.stiffness * jnp.sin(point[0])])


def bent(state: jax.Array) -> jax.Array:
    return jnp.stack([jnp.tanh(state[0]), state[0] * state[1]])


def laplace_densities(scale: jax.Array, state: jax.Array, output: jax.Array) -> jax.Array:
    return -jnp.abs(output - state) / scale - jnp.log(2 * scale)


def laplace_mean(scale: jax.Array, state: jax.Array) -> jax.Array:
    return state


def laplace_sample(scale: jax.Array, key: jax.Array, state: jax.Array) -> jax.Array:
    return state + scale * jax.random.laplace(key, state.shape, state.dtype)


KERNELS: dict[str, Callable[[], AbstractKernel]] = {
    "squared exponential": lambda: SquaredExponential(ARD, 0.6),
    "matern 1/2": lambda: Matern(ARD, 0.6, smoothness=0.5),
    "matern 3/2": lambda: Matern(1.2, 0.6, smoothness=1.5),
    "matern 5/2": lambda: Matern(ARD, 0.6, smoothness=2.5),
    "rational quadratic": lambda: RationalQuadratic(ARD, 0.6, 1.3),
    "periodic": lambda: Periodic(ARD, 0.6, 2.5),
    "linear": lambda: LinearKernel(ARD / 2),
    "constant": lambda: ConstantKernel(0.3),
    "sum": lambda: SquaredExponential(ARD, 0.4) + LinearKernel(0.2 * ARD),
    "product of waves": lambda: SquaredExponential(2 * ARD, 0.8) * Periodic(ARD, 0.9, 3.0),
    "product": lambda: Matern(2 * ARD, 0.8, smoothness=2.5) * (LinearKernel(0.2 * ARD) + ConstantKernel(0.3)),
    "active dimensions": lambda: ActiveDimensions(Matern(ARD[:2], 0.6), (0, 2)),
    "active linear": lambda: ActiveDimensions(LinearKernel(ARD[:2] / 2), (1, 2)),
}
MEANS: dict[str, Callable[[], AbstractMean]] = {
    "zero": lambda: ZeroMean(NUM_STATES),
    "identity": lambda: IdentityMean(NUM_STATES),
    "linear": lambda: LinearMean(0.4 * normals(NUM_STATES, NUM_INPUTS), jnp.array([0.1, -0.2])),
    "function": lambda: FunctionMean(physics),
    "trained function": lambda: FunctionMean(TrainedPhysics(jnp.asarray(0.8, float))),
    "sum": lambda: IdentityMean(NUM_STATES) + LinearMean(0.1 * normals(NUM_STATES, NUM_INPUTS, seed=1), jnp.zeros(NUM_STATES)),
}
_C, _d = normals(NUM_OUTPUTS, NUM_STATES, seed=2), np.array([0.1, -0.3])
EMISSIONS: dict[str, Callable[[], AbstractEmission]] = {
    "linear, own noise": lambda: LinearGaussian(_C, _d, jnp.array([0.5, 0.8])),
    "linear, joint noise": lambda: LinearGaussian(_C, _d, chols(NUM_OUTPUTS, scale=0.6)),
    "nonlinear": lambda: NonlinearGaussian(bent, jnp.array([0.5, 0.8])),
    "nonlinear, joint noise": lambda: NonlinearGaussian(bent, chols(NUM_OUTPUTS, scale=0.6)),
    "student t": lambda: StudentT(_C, _d, jnp.array([0.5, 0.8]), 4.0),
    "poisson": lambda: Poisson(0.4 * _C, _d + 0.5),
    "stochastic volatility": lambda: StochasticVolatility(0.4 * _C, jnp.array([-1.0, -0.5]), _d),
    "sparse gp": lambda: SparseGPEmission(
        SparseGP(
            SquaredExponential(jnp.array([1.0, 1.5]), 0.8), ZeroMean(NUM_OUTPUTS), normals(3, NUM_STATES, seed=3), NUM_OUTPUTS
        ),
        InducingPosterior(normals(NUM_OUTPUTS, 3, seed=4), chols(NUM_OUTPUTS, 3)),
        jnp.array([0.5, 0.8]),
    ),
    "user's own": lambda: FunctionEmission(jnp.array([0.6, 0.9]), laplace_densities, laplace_mean, laplace_sample),
}
_first = normals(2, NUM_STATES, seed=5), chols(2, NUM_STATES, seed=6)
_gain = 0.6 + 0.1 * normals(2, NUM_STEPS - 1, NUM_STATES, seed=7)
_full_gain = 0.6 * np.eye(NUM_STATES) + 0.1 * normals(2, NUM_STEPS - 1, NUM_STATES, NUM_STATES, seed=8)
_offset = 0.3 * normals(2, NUM_STEPS - 1, NUM_STATES, seed=9)
_scale = 0.3 + 0.1 * np.abs(normals(2, NUM_STEPS - 1, NUM_STATES, seed=10))
_full_scale = chols(2, NUM_STEPS - 1, NUM_STATES, scale=0.3, seed=11)
LOCALS: dict[str, Callable[[], AbstractLocal]] = {
    "free": lambda: FreeSteps(*_first, _gain, _offset, _scale),
    "free, full": lambda: FreeSteps(*_first, _full_gain, _offset, _full_scale, is_full=True),
    "cut": lambda: FreeSteps(*_first, _gain, _offset, _scale, cut_every=2),
    "prior": lambda: PriorSteps(*_first),
    "filtering": FilteringSteps,
    "amortised": lambda: AmortisedSteps(NUM_STATES, NUM_OUTPUTS, NUM_CONTROLS, num_hidden=3, key=jax.random.key(12)),
}
FAMILIES: dict[str, Callable[[InducingPosterior, AbstractLocal], AbstractPosterior]] = {
    "factorised linear": FactorisedLinear,
    "factorised dense": lambda inducing, local: FactorisedDense(
        inducing,
        normals(2, NUM_STEPS, NUM_STATES, seed=13),
        chols(2, NUM_STEPS * NUM_STATES, seed=14),
    ),
    "factorised nonlinear": FactorisedNonlinear,
    "vcdt": VCDT,
    "function-dependent": FunctionDependent,
    "pathwise": lambda inducing, local: FunctionDependentPathwise(inducing, local, num_frequencies=8),
    "parametric": Parametric,
    "pr-ssm": PRSSM,
    "pr-ssm corrected": PRSSMCorrected,
}
PRIOR_ONLY = ("pr-ssm", "pr-ssm corrected")
SHARING = ("all shared", "own kernels", "own inducing inputs", "nothing shared", "kernels of two kinds")


def transition(kernel: str = "squared exponential", mean: str = "identity", sharing: str = "all shared") -> SparseGP:
    make, inputs = KERNELS[kernel], normals(NUM_STATES, NUM_INDUCING, NUM_INPUTS, seed=15)
    if sharing in ("all shared", "own inducing inputs"):
        kernels = make()
    elif sharing == "kernels of two kinds":
        kernels = [make(), ConstantKernel(0.5)]
    else:
        kernels = [make(), jax.tree.map(lambda leaf: 1.1 * leaf if eqx.is_inexact_array(leaf) else leaf, make())]
    has_own_inputs = sharing in ("own inducing inputs", "nothing shared")
    return SparseGP(kernels, MEANS[mean](), inputs if has_own_inputs else inputs[0], NUM_STATES, jitter=1e-4)


def inducing() -> InducingPosterior:
    return InducingPosterior(0.5 * normals(NUM_STATES, NUM_INDUCING, seed=16), chols(NUM_STATES, NUM_INDUCING, seed=17))


def dataset(emission: str = "linear, own noise") -> Dataset:
    """Outputs that the emission can give, some of them missing."""
    rng = np.random.default_rng(18)
    outputs = [rng.normal(size=(length, NUM_OUTPUTS)) for length in LENGTHS]
    if emission == "poisson":
        outputs = [np.floor(np.abs(2 * values)) for values in outputs]
    outputs[0][2], outputs[0][4, 1], outputs[1][0, 0] = np.nan, np.nan, np.nan
    return Dataset.from_arrays(outputs, [rng.normal(size=(length, NUM_CONTROLS)) for length in LENGTHS])


def windows(emission: str = "linear, own noise") -> Window:
    return dataset(emission).windows(Scaling.identity(NUM_OUTPUTS, NUM_CONTROLS))


@dataclass(frozen=True)
class Case:
    """One bound: a model, a posterior and data, by name."""

    family: str
    local: str
    kernel: str = "squared exponential"
    mean: str = "identity"
    emission: str = "linear, own noise"
    sharing: str = "all shared"

    def __str__(self) -> str:
        return f"{self.family} - {self.local}"

    def build(self) -> tuple[GPSSM, AbstractPosterior, Window]:
        model = GPSSM(
            transition(self.kernel, self.mean, self.sharing),
            EMISSIONS[self.emission](),
            jnp.array([0.3, 0.4]),
            jnp.array([0.2, -0.1]),
            Frozen(jnp.asarray(chols(NUM_STATES, scale=0.9))),
        )
        return model, FAMILIES[self.family](inducing(), LOCALS[self.local]()), windows(self.emission)


QUICK = [  # every name of the tables above at least once
    Case("factorised linear", "free", "squared exponential", "zero", "linear, own noise", "all shared"),
    Case("factorised dense", "free", "rational quadratic", "linear", "student t", "own kernels"),
    Case("factorised nonlinear", "filtering", "matern 1/2", "function", "linear, joint noise", "own inducing inputs"),
    Case("vcdt", "free", "matern 3/2", "identity", "linear, own noise", "all shared"),
    Case("vcdt", "free, full", "product of waves", "trained function", "sparse gp", "nothing shared"),
    Case("vcdt", "amortised", "periodic", "sum", "poisson", "all shared"),
    Case("function-dependent", "cut", "matern 5/2", "zero", "nonlinear", "own kernels"),
    Case("function-dependent", "free, full", "active dimensions", "linear", "stochastic volatility", "kernels of two kinds"),
    Case("pathwise", "prior", "linear", "identity", "linear, joint noise", "nothing shared"),
    Case("pathwise", "free", "sum", "function", "user's own", "kernels of two kinds"),
    Case("parametric", "free", "product", "sum", "nonlinear, joint noise", "own inducing inputs"),
    Case("pr-ssm", "prior", "active linear", "identity", "student t", "all shared"),
    Case("pr-ssm corrected", "prior", "constant", "trained function", "linear, own noise", "own kernels"),
]


def locals_of(family: str) -> list[str]:
    """The sources of per-step parameters that a family takes."""
    return ["prior"] if family in PRIOR_ONLY else ["free"] if family == "factorised dense" else list(LOCALS)


OTHERS = [  # every family with every local source, where not above
    Case(family, local, "matern 3/2", "identity", "linear, joint noise", SHARING[(i + j) % len(SHARING)])
    for i, family in enumerate(FAMILIES)
    for j, local in enumerate(locals_of(family))
    if not any((case.family, case.local) == (family, local) for case in QUICK)
]
