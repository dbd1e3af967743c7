"""The law of every draw of f, and of simulations, against closed form.

A draw at given inputs is linear in its noise, so that its Jacobian J gives the covariance J Jᵀ without Monte Carlo error; only
the random frequencies of the pathwise draw, and simulations, leave something to average.
"""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import oracles
from cases import Case
from gpssm.draws import (
    DrawGivenInducing,
    ExactDraw,
    FreshDraw,
    MarginalDraw,
    extend,
    num_features,
    pathwise_draw,
    pathwise_features,
)
from gpssm.emissions import LinearGaussian
from gpssm.gp import InducingPosterior, SparseGP
from gpssm.kernels import ActiveDimensions, Matern, SquaredExponential
from gpssm.means import ZeroMean
from gpssm.model import GPSSM, simulate
from gpssm.params import Frozen, unwrap
from gpssm.posteriors import FunctionDependentPathwise, Noise, draw_noise
from gpssm.posteriors.chain import chain, emission_term

POINTS = jnp.asarray(cases.normals(6, cases.NUM_INPUTS, seed=60))
STATES, INDUCING = cases.NUM_STATES, cases.NUM_INDUCING
KERNELS = {
    "squared exponential": lambda x, y: oracles.squared_exponential(x, y, np.asarray(cases.ARD), 0.6),
    "matern 3/2": lambda x, y: oracles.matern32(x, y, 1.2, 0.6),
}
SHARINGS = {"squared exponential": "all shared", "matern 3/2": "own inducing inputs"}


def process(kernel: str) -> SparseGP:
    return unwrap(cases.transition(kernel, "linear", SHARINGS[kernel]))


def law_of_f(kernel: str, q: InducingPosterior, points: jax.Array) -> tuple[np.ndarray, np.ndarray]:
    """Mean [state, point] and covariance [state, point, point] of q(f), dense, from the definition."""
    gp, means, covariances = process(kernel), [], []
    inputs = np.broadcast_to(gp.inducing_inputs, (STATES, INDUCING, cases.NUM_INPUTS))
    prior_means = np.asarray(jax.vmap(gp.mean)(points)).T
    for d in range(STATES):
        gram = oracles.gram(KERNELS[kernel], inputs[d], inputs[d])
        gram = gram + 1e-4 * np.mean(np.diag(gram)) * np.eye(INDUCING)
        cross = oracles.gram(KERNELS[kernel], np.asarray(points), inputs[d])
        solved = np.linalg.solve(gram, cross.T).T
        chol = np.linalg.cholesky(gram)
        spread = chol @ np.asarray(q.chol[d])
        means.append(prior_means[d] + solved @ chol @ np.asarray(q.mean[d]))
        rest = oracles.gram(KERNELS[kernel], np.asarray(points), np.asarray(points)) - solved @ cross.T
        covariances.append(rest + solved @ spread @ spread.T @ solved.T)
    return np.array(means), np.array(covariances)


def mean_and_covariance(values_of: Callable, *shapes: tuple) -> tuple[np.ndarray, np.ndarray]:
    """Of values [point, state] that are linear in standard normal arrays of these shapes: [state, point] and so on."""
    zeros = tuple(jnp.zeros(shape) for shape in shapes)
    mean, jacobians = jax.jit(lambda: (values_of(*zeros), jax.jacfwd(values_of, tuple(range(len(shapes))))(*zeros)))()
    flat = np.concatenate([np.asarray(j).reshape(*mean.shape, -1) for j in jacobians], axis=-1)
    return np.asarray(mean).T, np.einsum("sdn,tdn->dst", flat, flat)


def ask_all(draw, memory, points: jax.Array, noise: jax.Array) -> tuple:
    def ask(memory, inputs: tuple) -> tuple:
        moments, memory = draw.ask(memory, *inputs)
        return memory, moments

    return jax.lax.scan(ask, memory, (points, noise))


# Draws of f


@pytest.mark.parametrize("kernel", KERNELS)
def test_exact_draw_has_the_joint_law_of_f(kernel: str):
    gp, q = process(kernel), unwrap(cases.inducing())
    draw = ExactDraw(gp.basis(), gp.mean, q, len(POINTS))
    mean, covariance = mean_and_covariance(
        lambda noise: ask_all(draw, draw.memory(), POINTS, noise)[1].value, (len(POINTS), STATES)
    )
    expected_mean, expected_covariance = law_of_f(kernel, q, POINTS)
    np.testing.assert_allclose(mean, expected_mean, rtol=1e-8)
    np.testing.assert_allclose(covariance, expected_covariance, atol=1e-4)  # the jitter of the conditioning


def test_exact_draw_goes_on_beyond_its_trajectory_with_the_same_f():
    gp, q = process("squared exponential"), unwrap(cases.inducing())
    draw = ExactDraw(gp.basis(), gp.mean, q, 4)

    def values(noise: jax.Array) -> jax.Array:
        memory, first = ask_all(draw, draw.memory(), POINTS[:4], noise[:4])
        longer, memory = extend(draw, memory, 2)
        return jnp.concatenate([first.value, ask_all(longer, memory, POINTS[4:], noise[4:])[1].value])

    _, covariance = mean_and_covariance(values, (len(POINTS), STATES))
    np.testing.assert_allclose(covariance, law_of_f("squared exponential", q, POINTS)[1], atol=1e-4)


def test_exact_draw_forgets_when_its_slots_are_full():
    gp, q = process("squared exponential"), unwrap(cases.inducing())
    draw = ExactDraw(gp.basis(), gp.mean, q, 3)
    _, covariance = mean_and_covariance(lambda noise: ask_all(draw, draw.memory(), POINTS, noise)[1].value, (len(POINTS), STATES))
    expected = law_of_f("squared exponential", q, POINTS)[1] * np.kron(np.eye(2), np.ones((3, 3)))
    np.testing.assert_allclose(covariance, expected, atol=1e-4)


def test_exact_draw_at_the_same_input_gives_the_same_value():
    gp, q = process("squared exponential"), unwrap(cases.inducing())
    draw, points = ExactDraw(gp.basis(), gp.mean, q, 4), POINTS[jnp.array([0, 1, 0, 1])]
    values = ask_all(draw, draw.memory(), points, jnp.asarray(cases.normals(4, STATES, seed=61)))[1].value
    np.testing.assert_allclose(values[2:], values[:2], atol=3e-2)


@pytest.mark.parametrize("kernel", KERNELS)
def test_draw_given_inducing_outputs_is_regression_on_them(kernel: str):
    gp, v = process(kernel), jnp.asarray(cases.normals(STATES, INDUCING, seed=62))
    basis = gp.basis()
    draw = DrawGivenInducing(basis, gp.mean, v)
    moments = ask_all(draw, None, POINTS, jnp.zeros((len(POINTS), STATES)))[1]
    prior_mean = np.asarray(jax.vmap(gp.mean)(POINTS))
    for d in range(STATES):
        group = min(d, gp.num_groups - 1)
        inputs, u = np.asarray(basis.inducing_inputs[group]), np.asarray(basis.chol[group] @ v[d])
        regression = oracles.gp_regression(KERNELS[kernel], inputs, u, float(basis.jitter[group]), np.asarray(POINTS))
        np.testing.assert_allclose(moments.mean[:, d], prior_mean[:, d] + regression.mean, rtol=1e-8)
        np.testing.assert_allclose(moments.variance[:, d], np.diag(regression.covariance), rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("kernel", KERNELS)
def test_marginal_draw_has_the_marginals_of_f_and_a_fresh_one_nothing_else(kernel: str):
    gp, q = process(kernel), unwrap(cases.inducing())
    draw = MarginalDraw(gp.basis(), gp.mean, q)
    moments = ask_all(draw, None, POINTS, jnp.zeros((len(POINTS), STATES)))[1]
    mean, covariance = law_of_f(kernel, q, POINTS)
    np.testing.assert_allclose(moments.mean.T, mean, rtol=1e-8)
    np.testing.assert_allclose(moments.variance.T, np.diagonal(covariance, axis1=1, axis2=2), rtol=1e-7)
    fresh = FreshDraw(draw)
    _, of_fresh = mean_and_covariance(lambda noise: ask_all(fresh, None, POINTS, noise)[1].value, (len(POINTS), STATES))
    np.testing.assert_allclose(of_fresh, covariance * np.eye(len(POINTS)), rtol=1e-7, atol=1e-12)


def pathwise_laws(kernel: str, num_frequencies: int, num_draws: int) -> tuple[np.ndarray, np.ndarray]:
    """Means [draw, state, point] and covariances of pathwise draws, for many independent sets of frequencies."""
    gp, q = process(kernel), unwrap(cases.inducing())
    basis = gp.basis()
    width = num_features(gp, num_frequencies)

    def values(key: jax.Array, noise: jax.Array, weights: jax.Array) -> jax.Array:
        features = pathwise_features(key, basis, num_frequencies)
        draw = pathwise_draw(basis, gp.mean, features, q.sample(noise), weights)
        return jax.vmap(lambda point: draw.ask(None, point, jnp.zeros(STATES))[0].value)(POINTS)

    def law(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        zeros = jnp.zeros((STATES, INDUCING)), jnp.zeros((STATES, width))
        jacobians = jax.jacrev(lambda *noise: values(key, *noise), (0, 1))(*zeros)
        flat = jnp.concatenate([j.reshape(len(POINTS), STATES, -1) for j in jacobians], axis=-1)
        return values(key, *zeros).T, jnp.einsum("sdn,tdn->dst", flat, flat)

    keys = jax.random.split(jax.random.key(63), num_draws)
    return tuple(np.asarray(array) for array in jax.jit(lambda: jax.lax.map(law, keys, batch_size=50))())


@pytest.mark.parametrize("kernel", KERNELS)
def test_pathwise_draw_has_the_law_of_f_at_each_point_and_jointly_up_to_an_error_that_shrinks(kernel: str):
    mean, covariance = law_of_f(kernel, unwrap(cases.inducing()), POINTS)
    errors = {}
    for num_frequencies in (16, 256):
        means, covariances = pathwise_laws(kernel, num_frequencies, 400)
        np.testing.assert_allclose(means, np.broadcast_to(mean, means.shape), rtol=1e-8)  # exact for any frequencies
        variances = np.diagonal(covariances, axis1=-2, axis2=-1)
        exact = np.diagonal(covariance, axis1=-2, axis2=-1)
        np.testing.assert_allclose(variances, np.broadcast_to(exact, variances.shape), rtol=1e-4)
        errors[num_frequencies] = np.sqrt(np.mean((covariances - covariance) ** 2))
    ratio = errors[16] / errors[256]
    assert ratio > 3, f"sixteen times the frequencies should divide the error by four at least: {errors}"
    assert errors[256] < 0.05 * covariance.max()


def test_one_pathwise_draw_is_one_function():
    gp, q = process("matern 3/2"), unwrap(cases.inducing())
    basis, width = gp.basis(), num_features(gp, 8)
    features = pathwise_features(jax.random.key(64), basis, 8)
    v = q.sample(jnp.asarray(cases.normals(STATES, INDUCING, seed=65)))
    draw = pathwise_draw(basis, gp.mean, features, v, jnp.ones((STATES, width)))
    twice = ask_all(draw, None, POINTS[jnp.array([0, 1, 0])], jnp.asarray(cases.normals(3, STATES, seed=66)))[1]
    np.testing.assert_array_equal(twice.value[2], twice.value[0])
    # and it passes where v says, up to the jitter
    at_inducing = jax.vmap(lambda z: draw.ask(None, z, jnp.zeros(STATES))[0].value[0])(basis.inducing_inputs[0])
    means = jax.vmap(lambda z: gp.mean(z)[0])(basis.inducing_inputs[0])
    np.testing.assert_allclose(at_inducing, means + basis.chol[0] @ v[0], atol=2e-2)


# Bounds


def test_exact_and_pathwise_function_dependent_agree_in_law():
    """Bounds, and the first two moments of trajectories, on a nonlinear case with f far from determined by u."""
    model, posterior, windows = Case("function-dependent", "free", "matern 3/2", "function", "nonlinear").build()
    pathwise = FunctionDependentPathwise(posterior.inducing, posterior.local, num_frequencies=512)

    window = jax.tree.map(lambda leaf: leaf[0], windows)

    @eqx.filter_jit
    def rollouts(posterior, keys: jax.Array):
        plain, family = unwrap((model, posterior))

        def one(key: jax.Array) -> dict[str, jax.Array]:
            noise = draw_noise(family, plain, cases.NUM_STEPS, key=key, scheme="plain", num_samples=1)
            rollout = family.rollout(plain, window, Noise(*(a[0] for a in noise[:3]), noise.key), chain)
            emission, path = emission_term(plain, rollout.states, window), rollout.states.reshape(-1)
            total = emission - rollout.kl_transition - rollout.kl_initial
            products = {"states": path, "products of states": jnp.outer(path, path)}
            return {"emission": emission, "transition": rollout.kl_transition, "total": total, **products}

        return jax.lax.map(one, keys, batch_size=100)

    keys = jax.random.split(jax.random.key(67), (2, 1500))
    exact, random = (rollouts(p, k) for p, k in zip((posterior, pathwise), keys, strict=True))
    for name in exact:
        left, right = np.asarray(exact[name]), np.asarray(random[name])
        error = np.hypot(left.std(axis=0), right.std(axis=0)) / np.sqrt(len(left))
        z = (left.mean(axis=0) - right.mean(axis=0)) / error
        assert np.abs(z).max() < 4.5, f"{name}: {left.mean(axis=0)} exact, {right.mean(axis=0)} pathwise, z {z}"


# Simulations

STEPS = 5
CONTROLS = jnp.linspace(-1.0, 1.0, STEPS)[:, None]


def driven_by_controls(kernel) -> GPSSM:
    """f depends on the control alone, so that a trajectory asks f at known inputs."""
    inputs = jnp.asarray(cases.normals(3, 2, seed=68))
    transition = SparseGP(ActiveDimensions(kernel, (1,)), ZeroMean(1), inputs, 1)
    emission = LinearGaussian(2 * jnp.eye(1), jnp.ones(1), Frozen(jnp.full(1, 0.3)))
    return GPSSM(transition, emission, Frozen(jnp.full(1, 0.2)), jnp.ones(1), Frozen(0.5 * jnp.eye(1)))


@pytest.mark.parametrize("num_frequencies", [None, 32])
@pytest.mark.parametrize("name", KERNELS)
def test_simulations_have_the_joint_law_of_the_prior(name: str, num_frequencies: int | None):
    kernel = SquaredExponential(0.8, 0.9) if name == "squared exponential" else Matern(0.8, 0.9)
    oracle = oracles.squared_exponential if name == "squared exponential" else oracles.matern32
    model = driven_by_controls(kernel)

    def run(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        trajectory = simulate(model, STEPS, key=key, controls=CONTROLS, num_frequencies=num_frequencies)
        return trajectory.states[:, 0], trajectory.outputs[:, 0]

    states, outputs = jax.jit(jax.vmap(run))(jax.random.split(jax.random.key(69), 6000))
    covariance = np.zeros((STEPS, STEPS))
    covariance[0, 0] = 0.5**2
    controls = np.asarray(CONTROLS[:-1])
    covariance[1:, 1:] = oracles.gram(lambda x, y: oracle(x, y, 0.8, 0.9), controls, controls) + 0.2**2 * np.eye(STEPS - 1)
    mean = np.array([1.0, 0, 0, 0, 0])
    assert_law(np.asarray(states), mean, covariance)
    assert_law(np.asarray(outputs), 2 * mean + 1, 4 * covariance + 0.3**2 * np.eye(STEPS))


@pytest.mark.parametrize("num_frequencies", [None, 32])
def test_simulations_under_q_have_its_joint_law(num_frequencies: int | None):
    model = driven_by_controls(SquaredExponential(0.8, 0.9))
    q = InducingPosterior(cases.normals(1, 3, seed=70), cases.chols(1, 3, seed=71))

    def run(key: jax.Array) -> jax.Array:
        start = jnp.array([0.4])
        options = {"initial_state": start, "inducing": q, "num_frequencies": num_frequencies}
        return simulate(model, STEPS, key=key, controls=CONTROLS, **options).states[1:, 0]

    states = jax.jit(jax.vmap(run))(jax.random.split(jax.random.key(72), 6000))
    gp, plain = unwrap(model.transition), unwrap(q)
    draw = ExactDraw(gp.basis(), gp.mean, plain, STEPS - 1)
    points = jnp.concatenate([jnp.zeros((STEPS - 1, 1)), CONTROLS[:-1]], axis=1)
    # the law of the exact draw is held above, against closed form
    mean, covariance = mean_and_covariance(lambda e: ask_all(draw, draw.memory(), points, e)[1].value, (STEPS - 1, 1))
    assert_law(np.asarray(states), mean[0], covariance[0] + 0.2**2 * np.eye(STEPS - 1))


def assert_law(samples: np.ndarray, mean: np.ndarray, covariance: np.ndarray):
    """Mean and every entry of the covariance within four and a half standard errors."""
    centred = samples - mean
    for what, values, truth in (
        ("mean", centred, np.zeros_like(mean)),
        ("covariance", np.einsum("ns,nt->nst", centred, centred), covariance),
    ):
        error = values.std(axis=0) / np.sqrt(len(values))
        z = (values.mean(axis=0) - truth) / error
        assert np.abs(z).max() < 4.5, f"{what}: z {np.round(z, 1).tolist()}, standard error {np.round(error, 4).tolist()}"
