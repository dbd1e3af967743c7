"""What every kernel, mean, emission and posterior of the table in `cases.py` must do."""

import functools
import inspect
import math
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import oracles
from cases import EMISSIONS, FAMILIES, KERNELS, MEANS, OTHERS, QUICK, Case
from gpssm import emissions, kernels, means, posteriors
from gpssm.data import Dataset, Scaling
from gpssm.elbo import elbo, terms_of_samples
from gpssm.gp import InducingPosterior, SparseGP, marginal_moments
from gpssm.model import GPSSM
from gpssm.params import unwrap
from gpssm.posteriors import Noise, draw_noise
from gpssm.save import load, save

POINTS = jnp.asarray(cases.normals(5, cases.NUM_INPUTS, seed=30))


# The table itself


def test_every_final_class_is_in_the_table():
    found = {type(leaf) for leaf in parts([make() for table in (KERNELS, MEANS, EMISSIONS) for make in table.values()])}
    found |= {type(leaf) for case in QUICK for leaf in parts(case.build())}
    for module, abstract in (
        (kernels, kernels.AbstractKernel),
        (means, means.AbstractMean),
        (emissions, emissions.AbstractEmission),
        (posteriors, posteriors.AbstractPosterior),
        (posteriors, posteriors.AbstractLocal),
    ):
        final = {cls for _, cls in inspect.getmembers(module, inspect.isclass) if issubclass(cls, abstract)} - {abstract}
        assert final <= found, f"give these a line in tests/cases.py: {final - found}"


def parts(tree: object) -> list:
    """Every module in a tree of modules and containers."""
    if isinstance(tree, list | tuple):
        return [part for item in tree for part in parts(item)]
    return [tree, *parts([*vars(tree).values()])] if isinstance(tree, eqx.Module) else []


def test_every_name_of_the_table_is_in_a_quick_case():
    for field, table in (
        ("family", FAMILIES),
        ("local", cases.LOCALS),
        ("kernel", KERNELS),
        ("mean", MEANS),
        ("emission", EMISSIONS),
        ("sharing", cases.SHARING),
    ):
        assert {getattr(case, field) for case in QUICK} == set(table), field


# Kernels and means

TEXTBOOK = {
    "squared exponential": lambda x, y: oracles.squared_exponential(x, y, cases.ARD, 0.6),
    "matern 1/2": lambda x, y: oracles.matern12(x, y, cases.ARD, 0.6),
    "matern 3/2": lambda x, y: oracles.matern32(x, y, 1.2, 0.6),
    "matern 5/2": lambda x, y: oracles.matern52(x, y, cases.ARD, 0.6),
    "rational quadratic": lambda x, y: oracles.rational_quadratic(x, y, cases.ARD, 0.6, 1.3),
    "periodic": lambda x, y: oracles.periodic(x, y, cases.ARD, 0.6, 2.5),
    "linear": lambda x, y: oracles.linear(x, y, cases.ARD / 2),
    "constant": lambda x, y: 0.3,
    "sum": lambda x, y: oracles.squared_exponential(x, y, cases.ARD, 0.4) + oracles.linear(x, y, 0.2 * cases.ARD),
    "product of waves": lambda x, y: (
        oracles.squared_exponential(x, y, 2 * cases.ARD, 0.8) * oracles.periodic(x, y, cases.ARD, 0.9, 3.0)
    ),
    "product": lambda x, y: (
        oracles.matern52(x, y, 2 * cases.ARD, 0.8) * (oracles.linear(x, y, 0.2 * cases.ARD) + oracles.constant(x, y, 0.3))
    ),
    "active dimensions": lambda x, y: oracles.matern32(x[[0, 2]], y[[0, 2]], cases.ARD[:2], 0.6),
    "active linear": lambda x, y: oracles.linear(x[1:], y[1:], cases.ARD[:2] / 2),
}


@pytest.mark.parametrize("name", KERNELS)
def test_kernel_is_the_textbook_one_and_positive_definite(name: str):
    gram = np.asarray(unwrap(KERNELS[name]()).cross(POINTS, POINTS))
    assert gram.shape == (5, 5)
    assert gram.dtype == np.float64
    np.testing.assert_allclose(gram, oracles.gram(TEXTBOOK[name], np.asarray(POINTS), np.asarray(POINTS)), rtol=1e-12)
    np.testing.assert_allclose(gram, gram.T, rtol=1e-12)
    assert np.linalg.eigvalsh(gram).min() > -1e-12


@pytest.mark.parametrize("name", KERNELS)
def test_features_average_to_the_kernel_and_their_gradients_to_its_gradient(name: str):
    """The gradient too, since fits differentiate through the draw of the frequencies."""
    kernel = KERNELS[name]()
    direction = jax.tree.map(lambda leaf: jnp.ones_like(leaf), eqx.filter(kernel, eqx.is_inexact_array))
    dynamic, static = eqx.partition(kernel, eqx.is_inexact_array)
    left, right = POINTS[:1], POINTS[:3]

    def gram(dynamic) -> jax.Array:
        return unwrap(eqx.combine(dynamic, static)).cross(left, right)

    def estimate(dynamic, key) -> jax.Array:
        features = unwrap(eqx.combine(dynamic, static)).features(key, 8, cases.NUM_INPUTS)
        return jax.vmap(features)(left) @ jax.vmap(features)(right).T

    @jax.jit
    def both(keys) -> tuple:
        one = jax.vmap(lambda key: jax.jvp(lambda d: estimate(d, key), (dynamic,), (direction,)))
        return jax.jvp(gram, (dynamic,), (direction,)), one(keys)

    exact, estimates = both(jax.random.split(jax.random.key(31), 4000))
    for what, truth, values in zip(("kernel", "gradient"), exact, estimates, strict=True):
        error = np.std(values, axis=0) / np.sqrt(len(values))
        z = (np.mean(values, axis=0) - truth) / (error + 1e-12)
        if name in ("linear", "constant", "active linear"):
            np.testing.assert_allclose(values, np.broadcast_to(truth, values.shape), rtol=1e-12, atol=1e-14)
        assert np.all(np.abs(z) < 4.5), f"{what}: {np.mean(values, axis=0)} against {truth}, standard error {error}"


@pytest.mark.parametrize("name", MEANS)
def test_mean_gives_one_number_a_state(name: str):
    value = unwrap(MEANS[name]())(POINTS[0])
    assert value.shape == (cases.NUM_STATES,)
    assert value.dtype == jnp.float64


def test_shared_kernel_and_inputs_are_factorised_once():
    groups = {sharing: unwrap(cases.transition(sharing=sharing)) for sharing in cases.SHARING}
    for sharing, gp in groups.items():
        expected = 1 if sharing == "all shared" else cases.NUM_STATES
        assert gp.num_groups == expected, sharing
        basis = gp.basis()
        assert basis.chol.shape[0] == expected, sharing
        assert basis.project(POINTS[0]).weights.shape == (expected, cases.NUM_INDUCING)


def test_shared_kernel_and_inputs_cost_less():
    """Operations of a bound and its gradient, counted by the compiler: four states, twenty inducing inputs."""

    def operations(is_shared: bool) -> float:
        inputs, kernel = cases.normals(20, 4, seed=36), kernels.SquaredExponential(jnp.ones(4))
        gp = SparseGP(kernel if is_shared else [kernel] * 4, means.IdentityMean(4), inputs, 4)
        model = GPSSM(gp, emissions.LinearGaussian(jnp.eye(2, 4), jnp.zeros(2), jnp.ones(2)), jnp.ones(4))
        first = jnp.zeros((2, 4)), jnp.stack([jnp.eye(4)] * 2)
        posterior = posteriors.VCDT(InducingPosterior.prior(4, 20), posteriors.PriorSteps(*first))
        data = cases.dataset()
        windows = Dataset.from_arrays(data.outputs).windows(Scaling.identity(2, 0))
        bound = eqx.filter_grad(lambda both: elbo(*both, windows, key=jax.random.key(0), num_samples=3, chain="plain").total)
        return eqx.filter_jit(bound).lower((model, posterior)).lowered.cost_analysis()["flops"]

    shared, apart = operations(True), operations(False)
    assert shared < 0.5 * apart, f"{shared} against {apart}"


def test_sharing_by_repetition_changes_nothing():
    shared = unwrap(cases.transition())
    basis = shared.basis().project(POINTS[0])
    inputs = jnp.broadcast_to(shared.inducing_inputs, (2, *shared.inducing_inputs.shape))
    apart = eqx.tree_at(lambda gp: (gp.kernels, gp.inducing_inputs), shared, (shared.kernels * 2, inputs))
    projection = apart.basis().project(POINTS[0])
    np.testing.assert_allclose(projection.weights, np.repeat(basis.weights, 2, axis=0), rtol=1e-12)
    np.testing.assert_allclose(projection.residual_variance, np.repeat(basis.residual_variance, 2), rtol=1e-12)


# Emissions

STATE = jnp.array([0.4, -0.7])
BOTH = jnp.ones(2, bool)


def quadrature(name: str) -> tuple[jax.Array, jax.Array]:
    """Values of one channel and their weights: counts, or a sinh grid that reaches far into the tails."""
    if name == "poisson":
        return jnp.arange(60.0), jnp.ones(60)
    z, step = jnp.linspace(-6, 6, 301, retstep=True)
    return jnp.sinh(z), step * jnp.cosh(z)


@functools.cache
def densities(name: str) -> tuple[np.ndarray, np.ndarray]:
    """p(y1, y2) on the grid, and p(y1) with the second channel missing."""
    emission, (grid, _) = unwrap(EMISSIONS[name]()), quadrature(name)

    @jax.jit
    def evaluate() -> tuple[jax.Array, jax.Array]:
        def joint(y1: jax.Array) -> jax.Array:
            return jax.vmap(lambda y2: emission.log_density(STATE, jnp.stack([y1, y2]), BOTH))(grid)

        def first(y1: jax.Array) -> jax.Array:
            return emission.log_density(STATE, jnp.stack([y1, jnp.asarray(7.0)]), jnp.array([True, False]))

        return jnp.exp(jax.vmap(joint)(grid)), jnp.exp(jax.vmap(first)(grid))

    joint, first = evaluate()
    return np.asarray(joint), np.asarray(first)


def expected_mass(name: str) -> np.ndarray:
    """1 a channel; the sparse GP's is a bound on a density, lower by what h's variance costs."""
    if name != "sparse gp":
        return np.ones(2)
    emission = unwrap(EMISSIONS[name]())
    _, variance = marginal_moments(emission.function.basis().project(STATE), jnp.zeros(2), emission.inducing)
    return np.exp(-0.5 * variance / emission.scale**2)


@pytest.mark.parametrize("name", EMISSIONS)
def test_density_of_outputs_integrates_to_one(name: str):
    weights = np.asarray(quadrature(name)[1])
    total = weights @ densities(name)[0] @ weights
    np.testing.assert_allclose(total, np.prod(expected_mass(name)), rtol=2e-3)


@pytest.mark.parametrize("name", EMISSIONS)
def test_missing_channel_is_integrated_out(name: str):
    weights = np.asarray(quadrature(name)[1])
    joint, first = densities(name)
    np.testing.assert_allclose(joint @ weights / expected_mass(name)[1], first, rtol=2e-3, atol=1e-9)


@pytest.mark.parametrize("name", EMISSIONS)
def test_nothing_observed_has_density_one(name: str):
    assert unwrap(EMISSIONS[name]()).log_density(STATE, jnp.array([3.0, -2.0]), ~BOTH) == 0


@pytest.mark.parametrize("name", EMISSIONS)
def test_samples_of_outputs_have_the_emission_s_mean_and_density(name: str):
    emission = unwrap(EMISSIONS[name]())
    samples = np.asarray(jax.jit(jax.vmap(lambda key: emission.sample(key, STATE)))(jax.random.split(jax.random.key(32), 20_000)))
    assert samples.shape == (20_000, 2)
    error = samples.std(axis=0) / math.sqrt(len(samples))
    z = (samples.mean(axis=0) - emission.mean(STATE)) / error
    assert np.all(np.abs(z) < 4), f"mean {samples.mean(axis=0)} against {emission.mean(STATE)}, standard error {error}"
    if name == "sparse gp":  # its samples are wider than its bound on the density
        return
    grid, weights = map(np.asarray, quadrature(name))
    probability = weights @ (densities(name)[0] * (np.abs(grid[:, None] - grid[None]) < 1)) @ weights
    inside = np.mean(np.abs(samples[:, 0] - samples[:, 1]) < 1)
    deviation = math.sqrt(probability * (1 - probability) / len(samples))
    # the edge of the region cuts cells of the grid: allow for that
    assert abs(inside - probability) < 4 * deviation + 0.02, f"{inside} against {probability}, standard error {deviation}"


# Bounds


def some(cases: list[Case]) -> list:
    """These now, all others when there is time."""
    return [*cases, *(pytest.param(case, marks=pytest.mark.slow) for case in [*QUICK, *OTHERS] if case not in cases)]


class Program:
    """One case and its one compiled program: value and gradient of the bound; `traces` counts how often it was traced."""

    def __init__(self, case: Case):
        self.case = case
        self.model, self.posterior, self.windows = case.build()
        self.traces = 0

        def bound(both: tuple, windows, key: jax.Array) -> jax.Array:
            self.traces += 1
            return elbo(*both, windows, key=key, num_samples=3).total

        self.value_and_gradient: Callable = eqx.filter_jit(eqx.filter_value_and_grad(bound))
        self.both = (self.model, self.posterior)
        self.key = jax.random.key(33)

    @functools.cached_property
    def answer(self) -> tuple:
        return self.value_and_gradient(self.both, self.windows, self.key)


@pytest.fixture(
    scope="module",
    params=some(QUICK),
    ids=str,
)
def program(request: pytest.FixtureRequest) -> Program:
    return Program(request.param)


def test_bound_and_gradient_are_finite_and_of_the_parameters_shape(program: Program):
    value, gradient = program.answer
    assert value.shape == ()
    assert value.dtype == jnp.float64
    assert np.isfinite(value)
    parameters = eqx.filter(program.both, eqx.is_inexact_array)
    assert jax.tree.structure(gradient) == jax.tree.structure(parameters)
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradient):
        assert np.all(np.isfinite(leaf)), jax.tree_util.keystr(path)


def test_gradient_is_the_finite_difference(program: Program):
    """Along a random direction over all parameters, fixed ones too, in which no leaf moves by more than its own size."""
    parameters, static = eqx.partition(program.both, eqx.is_inexact_array)
    leaves, structure = jax.tree.flatten(parameters)
    rng = np.random.default_rng(34)

    def size(leaf: jax.Array) -> float:
        return min(1.0, float(jnp.max(jnp.abs(leaf)))) or 1.0

    direction = jax.tree.unflatten(structure, [jnp.asarray(size(leaf) * rng.normal(size=leaf.shape)) for leaf in leaves])

    def along(step: float) -> float:
        moved = jax.tree.map(lambda leaf, d: leaf + step * d, parameters, direction)
        return float(program.value_and_gradient(eqx.combine(moved, static), program.windows, program.key)[0])

    step = 1e-5
    difference = (along(step) - along(-step)) / (2 * step)
    pairs = zip(jax.tree.leaves(program.answer[1]), jax.tree.leaves(direction), strict=True)
    derivative = sum(float(jnp.sum(g * d)) for g, d in pairs)
    np.testing.assert_allclose(derivative, difference, rtol=1e-6, atol=1e-5)


def test_one_trace_serves_many_calls(program: Program):
    assert np.isfinite(program.answer[0])
    other = jax.tree.map(lambda leaf: 1.01 * leaf if eqx.is_inexact_array(leaf) else leaf, program.both)
    shuffled = eqx.tree_at(lambda w: w.is_observed, program.windows, ~program.windows.is_observed)
    values = [program.answer[0]]
    for both, windows, seed in ((other, program.windows, 33), (program.both, shuffled, 33), (program.both, program.windows, 1)):
        values.append(program.value_and_gradient(both, windows, jax.random.key(seed))[0])
    assert program.traces == 1
    assert len(np.unique(values)) == 4, "every argument counts"


def test_saved_and_loaded_gives_the_same_bits(program: Program, tmp_path):
    save(tmp_path / "saved", program.both)
    loaded = load(tmp_path / "saved", dtype="saved")
    assert eqx.tree_equal(loaded, program.both) is not False
    for ours, theirs in zip(jax.tree.leaves(loaded), jax.tree.leaves(program.both), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    value, _ = program.value_and_gradient(loaded, program.windows, program.key)
    assert value == program.answer[0]
    assert program.traces == 1


@pytest.mark.parametrize("case", some([QUICK[6]]), ids=str)
def test_compiled_is_uncompiled(case: Case):
    model, posterior, windows = case.build()

    def bound() -> jax.Array:
        return elbo(model, posterior, windows, key=jax.random.key(33), num_samples=3).total

    np.testing.assert_allclose(eqx.filter_jit(bound)(), bound(), rtol=1e-11)


@pytest.mark.parametrize("case", some([QUICK[2], QUICK[3], QUICK[6], QUICK[8]]), ids=str)
def test_single_precision_is_close_to_double(case: Case):
    """At the same noise; the pathwise family has kernels whose features are not random."""
    double = case.build()
    model, posterior, windows = double
    window = jax.tree.map(lambda leaf: leaf[0], windows)
    noise = draw_noise(unwrap(posterior), unwrap(model), cases.NUM_STEPS, key=jax.random.key(35), scheme="plain", num_samples=3)

    def bound(both: tuple, window, arrays: tuple, key_data: jax.Array) -> jax.Array:
        model, posterior = unwrap(both)
        noise = Noise(*arrays, key=jax.random.wrap_key_data(key_data))
        emission, transition, initial = terms_of_samples(model, posterior, window, noise)
        return jnp.mean(emission - transition - initial) - posterior.inducing.kl()

    arguments = (double[:2], window, tuple(noise[:3]), jax.random.key_data(noise.key))
    value, gradient = eqx.filter_jit(eqx.filter_value_and_grad(bound))(*arguments)
    with jax.enable_x64(False):
        halved = jax.tree.map(lambda leaf: leaf.astype(np.float32) if is_double(leaf) else leaf, arguments)
        single, single_gradient = eqx.filter_jit(eqx.filter_value_and_grad(bound))(*halved)
    assert single.dtype == jnp.float32
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(single_gradient))
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(single_gradient))
    if case.family == "pathwise" and case.kernel != "linear":  # other frequencies are drawn in single precision
        return
    np.testing.assert_allclose(single, value, rtol=1e-3)
    pairs = list(zip(jax.tree.leaves(single_gradient), jax.tree.leaves(gradient), strict=True))
    gap = math.sqrt(sum(float(np.sum((np.asarray(a, float) - np.asarray(b)) ** 2)) for a, b in pairs))
    assert gap < 2e-2 * math.sqrt(sum(float(np.sum(np.asarray(b) ** 2)) for _, b in pairs))


def is_double(leaf: object) -> bool:
    return eqx.is_array(leaf) and leaf.dtype == jnp.float64
