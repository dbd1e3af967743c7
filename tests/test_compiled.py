"""The chains that are faster agree with the plain one: values, and the gradient of everything that is trained."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases import chols, normals
from gpssm.data import Dataset, Scaling, Window
from gpssm.elbo import terms_of_samples
from gpssm.emissions import LinearGaussian
from gpssm.gp import InducingPosterior, SparseGP
from gpssm.kernels import Matern, RationalQuadratic, SquaredExponential
from gpssm.means import IdentityMean, LinearMean, ZeroMean
from gpssm.model import GPSSM
from gpssm.native.library import is_available
from gpssm.params import unwrap
from gpssm.posteriors import (
    PRSSM,
    VCDT,
    FactorisedLinear,
    FactorisedNonlinear,
    FilteringSteps,
    FreeSteps,
    FunctionDependentPathwise,
    Parametric,
    PriorSteps,
    PRSSMCorrected,
    adjoint,
)
from gpssm.posteriors.base import draw_noise
from gpssm.posteriors.chain import Noise
from gpssm.posteriors.chains import chain_named

compiled = pytest.mark.skipif(not is_available(), reason="there is no C++ compiler")
NUM_OUTPUTS = 2


@dataclass(frozen=True)
class Problem:
    """A bound of arbitrary size; `lengths` are those of its sequences, of which the shorter ones are padded."""

    family: Callable[..., Any] = VCDT
    kernel: Callable[..., Any] = SquaredExponential
    num_states: int = 2
    num_controls: int = 1
    num_inducing: int = 5
    num_samples: int = 3
    lengths: tuple[int, ...] = (6, 4)
    is_full: bool = False
    is_shared: bool = True
    local: str = "free"
    mean: str = "identity"

    def __str__(self) -> str:
        shared = "shared" if self.is_shared else "separate"
        return f"{self.family.__name__} {self.kernel.__name__} {shared} {self.local}{' full' * self.is_full}"

    def model(self, seed: int = 0) -> GPSSM:
        states, inputs = self.num_states, self.num_states + self.num_controls
        scales = 1.0 + 0.2 * np.abs(normals(states, inputs, seed=seed))
        means = {
            "identity": IdentityMean(states),
            "zero": ZeroMean(states),
            "linear": LinearMean(0.3 * normals(states, inputs, seed=seed), 0.1 * normals(states, seed=seed))
            + IdentityMean(states),
        }
        groups = 1 if self.is_shared else states
        where = normals(groups, self.num_inducing, inputs, seed=seed)
        kernels = [self.kernel(scales[g], 0.5 + 0.1 * g) for g in range(groups)]
        transition = SparseGP(kernels, means[self.mean], where, states, jitter=1e-3)
        emission = LinearGaussian(normals(NUM_OUTPUTS, states, seed=seed), np.zeros(NUM_OUTPUTS), np.array([0.5, 0.8]))
        return GPSSM(transition, emission, 0.3 + 0.1 * np.arange(states), np.zeros(states), 0.9 * np.eye(states))

    def posterior(self, seed: int = 0) -> Any:
        states, rows, steps = self.num_states, len(self.lengths), max(self.lengths) - 1
        first = normals(rows, states, seed=seed + 1), chols(rows, states, seed=seed + 2)
        square = (states, states) if self.is_full else (states,)
        gain = 0.2 * normals(rows, steps, *square, seed=seed + 3) + 0.6 * (np.eye(states) if self.is_full else 1.0)
        scale = chols(rows, steps, states) if self.is_full else 0.3 + 0.1 * np.abs(normals(rows, steps, states, seed=seed))
        offset = 0.3 * normals(rows, steps, states, seed=seed + 4)
        local = {
            "free": lambda: FreeSteps(*first, gain, offset, scale, is_full=self.is_full),
            "prior": lambda: PriorSteps(*first),
            "filtering": FilteringSteps,
        }[self.local]()
        mean = 0.5 * normals(states, self.num_inducing, seed=seed + 5)
        return self.family(InducingPosterior(mean, chols(states, self.num_inducing, seed=seed + 6)), local)

    def windows(self) -> Window:
        """With outputs missing."""
        outputs = [normals(length, NUM_OUTPUTS, seed=i) for i, length in enumerate(self.lengths)]
        outputs[0][1, 0], outputs[-1][0] = np.nan, np.nan
        controls = [normals(length, self.num_controls, seed=i) for i, length in enumerate(self.lengths)]
        return Dataset.from_arrays(outputs, controls).windows(Scaling.identity(NUM_OUTPUTS, self.num_controls))

    def noise(self) -> Noise:
        """[sequence, sample, ...]"""
        model, posterior = unwrap((self.model(), self.posterior()))

        def one(key: jax.Array) -> Noise:
            return draw_noise(posterior, model, max(self.lengths), key=key, scheme="plain", num_samples=self.num_samples)

        return jax.vmap(one)(jax.random.split(jax.random.key(3), len(self.lengths)))


def bound_and_gradient(problem: Problem, chain: str, dtype: Any = jnp.float64) -> tuple[Any, Any]:
    """All terms of all trajectories, and the gradient of a sum in which each counts differently."""
    function = jax.jit(jax.value_and_grad(lambda *given: weighted(problem, chain, *given), has_aux=True))
    given = cast((problem.model(), problem.posterior()), dtype)
    (_, terms), gradient = function(given, cast((problem.windows(), problem.noise()), dtype))
    return terms, gradient


def weighted(problem: Problem, chain: str, fitted: Any, rest: Any) -> tuple[jax.Array, Any]:
    model, posterior = unwrap(fitted)
    windows, noise = rest
    terms = jax.vmap(lambda window, noise: terms_of_samples(model, posterior, window, noise, chain_named(chain)))(windows, noise)
    shares = normals(3, len(problem.lengths), problem.num_samples, seed=9)
    total = jnp.asarray(sum(jnp.sum(jnp.asarray(share, term.dtype) * term) for share, term in zip(shares, terms, strict=True)))
    return total, terms


def cast(tree: Any, dtype: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.astype(dtype) if eqx.is_inexact_array(leaf) else leaf, tree)


def assert_agree(answers: tuple[Any, Any], reference: tuple[Any, Any], of_value: float, of_gradient: float) -> None:
    """Relative to the largest entry of each array."""
    for tolerance, got, expected in zip((of_value, of_gradient), answers, reference, strict=True):
        for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(expected), strict=True):
            a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
            error = np.max(np.abs(a - b), initial=0.0) / max(np.max(np.abs(b), initial=0.0), 1e-3)
            assert error < tolerance, f"{jax.tree_util.keystr(path)}: {error:.1e}"


def pathwise(*parts: Any) -> FunctionDependentPathwise:
    return FunctionDependentPathwise(*parts, num_frequencies=3)


def in_float32(problem: Problem, reference: Any) -> Any:
    """The answer in float64 or, where other frequencies would be drawn, that of the plain chain in float32."""
    return bound_and_gradient(problem, "plain", jnp.float32) if problem.family is pathwise else reference


def matern(smoothness: float) -> Callable[..., Matern]:
    return lambda *at: Matern(*at, smoothness=smoothness)


def slow(problem: Problem) -> Any:
    return pytest.param(problem, marks=pytest.mark.slow)


SERVED = [  # every family, kernel, mean, source of steps and way to share that the C++ serves, odd sizes among them
    Problem(VCDT, SquaredExponential, 3, 2, 11, 9, (7, 5, 2), is_shared=False),
    slow(Problem(VCDT, Matern, 2, 0, 9, 5, (5,), is_full=True, mean="zero")),
    Problem(FactorisedNonlinear, RationalQuadratic, 2, 1, 5, 3, (4, 6), is_full=True, is_shared=False, mean="linear"),
    Problem(FactorisedLinear, matern(0.5), 1, 1, 8, 17, (6,), mean="linear"),
    slow(Problem(Parametric, matern(2.5), 2, 1, 3, 2, (5, 6), local="filtering")),
    slow(Problem(PRSSM, SquaredExponential, 2, 1, 4, 3, (4, 3), is_shared=False, local="prior")),
    Problem(PRSSMCorrected, Matern, 1, 0, 1, 1, (3,), local="prior", mean="zero"),
    Problem(pathwise, SquaredExponential, 2, 1, 9, 9, (6, 3), is_full=True, is_shared=False),
    slow(Problem(pathwise, matern(2.5), 2, 0, 5, 3, (4, 5))),
]


@compiled
@pytest.mark.parametrize("problem", SERVED, ids=str)
def test_compiled_chain_agrees_with_the_plain_one(problem):
    reference = bound_and_gradient(problem, "plain")
    assert_agree(bound_and_gradient(problem, "compiled"), reference, 1e-10, 1e-8)
    assert_agree(bound_and_gradient(problem, "compiled", jnp.float32), in_float32(problem, reference), 1e-5, 1e-4)


@compiled
def test_compiled_chain_maps_over_problems():
    """As `fit_many` maps it: over models and data together, or over models alone."""
    problem, seeds = Problem(VCDT, num_controls=0, num_inducing=4, num_samples=2, lengths=(4, 3)), (0, 7)
    fitted = [(problem.model(seed), problem.posterior(seed)) for seed in seeds]
    rest = (problem.windows(), problem.noise())
    others = (rest[0], jax.tree.map(lambda leaf: -leaf if eqx.is_inexact_array(leaf) else leaf, rest[1]))

    def gradient(fitted: Any, rest: Any) -> Any:
        return jax.value_and_grad(lambda fitted: weighted(problem, "compiled", fitted, rest), has_aux=True)(fitted)

    stack = lambda *parts: jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts)  # noqa: E731
    one, apart = jax.jit(gradient), jax.jit(jax.vmap(gradient, in_axes=(0, None)))
    together = jax.jit(jax.vmap(gradient))
    of_others = together(stack(*fitted), stack(rest, others)), (rest, others)
    of_one = apart(stack(*fitted), rest), (rest, rest)
    for answers, given in (of_others, of_one):
        for i, (single, data) in enumerate(zip(fitted, given, strict=True)):
            mapped = jax.tree.map(lambda leaf: leaf[i], answers)  # noqa: B023
            assert_agree(mapped, one(single, data), 1e-12, 1e-12)


@pytest.mark.parametrize(
    "problem",
    [
        Problem(VCDT, Matern, 2, 1, 5, 2, (4, 3), is_full=True, is_shared=False),
        slow(Problem(FactorisedNonlinear, RationalQuadratic, 1, 0, 3, 2, (4, 3))),
        Problem(FactorisedNonlinear, SquaredExponential, 3, 0, 3, 1, (3,)),
        Problem(VCDT, SquaredExponential, 2, 1, 130, 1, (3,), is_shared=False),
        slow(Problem(pathwise, SquaredExponential, 2, 1, 130, 1, (3,), is_shared=False)),
        Problem(pathwise, SquaredExponential, 2, 1, 3, 2, (4, 3)),
    ],
    ids=str,
)
def test_fused_chain_agrees_with_the_plain_one(problem):
    """Through the interpreter of its kernel, which is slow: tiny shapes."""
    reference = bound_and_gradient(problem, "plain")
    assert_agree(bound_and_gradient(problem, "fused"), reference, 1e-10, 1e-8)
    if problem.family is pathwise and problem.num_inducing < 100:  # beyond, float32 costs the plain chain as many digits
        assert_agree(bound_and_gradient(problem, "fused", jnp.float32), in_float32(problem, reference), 1e-5, 1e-4)


def test_gradient_of_the_fused_chain_in_pieces_of_time(monkeypatch):
    """Of four steps, the last of which is not full."""
    problem = Problem(VCDT, SquaredExponential, 2, 1, 3, 1, (7, 4), is_shared=False)
    monkeypatch.setattr(adjoint, "PIECE", 4)
    assert_agree(bound_and_gradient(problem, "fused"), bound_and_gradient(problem, "plain"), 1e-10, 1e-8)
