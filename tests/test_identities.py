"""What mathematics says is equal, or ordered.

Linear-Gaussian models with next to nothing for a GP to add have an evidence that a Kalman filter knows. Their bound is then an
average of quadratic functions of the noise, which the 2n points +-sqrt(n) e_i give exactly: no Monte Carlo error at all.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import cases
import oracles
from cases import Case
from gpssm.data import Window
from gpssm.elbo import Elbo, elbo, pieces, terms_of_samples
from gpssm.emissions import LinearGaussian
from gpssm.gp import InducingPosterior, SparseGP
from gpssm.kernels import LinearKernel, SquaredExponential
from gpssm.means import LinearMean, ZeroMean
from gpssm.model import GPSSM
from gpssm.noise import standard_normals
from gpssm.params import Frozen, unwrap
from gpssm.posteriors import (
    VCDT,
    AbstractPosterior,
    FactorisedLinear,
    FactorisedNonlinear,
    FilteringSteps,
    FreeSteps,
    FunctionDependent,
    FunctionDependentPathwise,
    Noise,
    draw_noise,
)
from gpssm.posteriors.chain import chain

BOUNDS = {
    "factorised linear": FactorisedLinear,
    "factorised nonlinear": FactorisedNonlinear,
    "vcdt": VCDT,
    "function-dependent": FunctionDependent,
    "pathwise": lambda inducing, local: FunctionDependentPathwise(inducing, local, num_frequencies=4),
}


@eqx.filter_jit
def total_of_samples(model: GPSSM, posterior: AbstractPosterior, window: Window, noise: Noise) -> jax.Array:
    """The bound of every sampled trajectory of one window, without KL(q(u) || p(u))."""
    model, posterior = unwrap((model, posterior))
    emission, transition, initial = terms_of_samples(model, posterior, window, noise)
    return emission - transition - initial


def noise_of(model: GPSSM, posterior: AbstractPosterior, num_samples: int, num_steps: int = cases.NUM_STEPS, seed: int = 40):
    model, posterior = unwrap((model, posterior))
    return draw_noise(posterior, model, num_steps, key=jax.random.key(seed), scheme="plain", num_samples=num_samples)


def one(windows: Window, index: int) -> Window:
    return jax.tree.map(lambda leaf: leaf[index], windows)


def assert_close_in_mean(left: np.ndarray, right: np.ndarray | float, what: str = "", sides: int = 2):
    """The means of two sets of independent estimates agree (or the left one is not above the right): |z| < 4."""
    left, right = np.asarray(left), np.atleast_1d(np.asarray(right))
    errors = [np.std(values) / np.sqrt(len(values)) for values in (left, right)]
    error = np.hypot(*errors) + 1e-12
    z = (np.mean(left) - np.mean(right)) / error
    assert (abs(z) if sides == 2 else z) < 4, f"{what}: {np.mean(left)} against {np.mean(right)}, standard error {error}"


# The linear-Gaussian model

A = np.array([[0.9, 0.3, 0.4], [-0.2, 0.8, -0.5]])  # states, then the control
b = np.array([0.1, -0.2])
Q, R, P = np.array([0.1, 0.2]), np.array([[0.3, 0.1], [0.1, 0.4]]), np.array([[0.8, 0.2], [0.2, 0.5]])
C, d, mu = np.array([[1.0, 0.4], [-0.3, 0.8]]), np.array([0.2, -0.1]), np.array([0.3, -0.4])
ORACLE = oracles.LinearGaussian(A[:, :2], np.diag(Q), C, R, mu, P, d)
NOTHING = Frozen(jnp.asarray(1e-16))  # the variance of what the GP adds


def linear_gaussian() -> GPSSM:
    inputs = cases.normals(cases.NUM_INDUCING, cases.NUM_INPUTS, seed=41)
    transition = SparseGP(SquaredExponential(jnp.ones(3), NOTHING), LinearMean(A, b), inputs, 2)
    emission = LinearGaussian(C, d, Frozen(jnp.asarray(np.linalg.cholesky(R))))
    chol = Frozen(jnp.asarray(np.linalg.cholesky(P)))
    return GPSSM(transition, emission, Frozen(jnp.asarray(np.sqrt(Q))), mu, chol)


def sequence() -> tuple[np.ndarray, np.ndarray, Window]:
    """The first sequence of the table: outputs with NaN, offsets of the transition, and the window."""
    data = cases.dataset()
    return data.outputs[0], data.controls[0] @ A[:, 2:].T + b, one(cases.windows(), 0)


def log_evidence() -> float:
    outputs, offsets, _ = sequence()
    return oracles.kalman_filter(ORACLE, outputs, offsets).log_evidence


def information_from_the_future(outputs: np.ndarray, offsets: np.ndarray) -> tuple[list, list]:
    """Precision and information vector of x_t from y_t ... y_T, by the backward recursion."""
    precisions, vectors = [], []
    precision, vector = np.zeros((2, 2)), np.zeros(2)
    for t in reversed(range(len(outputs))):
        if t < len(outputs) - 1:  # through the transition
            shrink = np.linalg.inv(np.eye(2) + precision @ np.diag(Q))
            vector = A[:, :2].T @ shrink @ (vector - precision @ offsets[t])
            precision = A[:, :2].T @ shrink @ precision @ A[:, :2]
        seen = ~np.isnan(outputs[t])
        informed = C[seen].T @ np.linalg.inv(R[np.ix_(seen, seen)])
        precision = precision + informed @ C[seen]
        vector = vector + informed @ (outputs[t] - d)[seen]
        precisions.insert(0, precision)
        vectors.insert(0, vector)
    return precisions, vectors


def optimal_steps(is_through_state: bool) -> FreeSteps:
    """p(x_{t+1} | f_t, Y) as A_t f_t + b_t, or with f_t = A x_t + offset written out."""
    outputs, offsets, _ = sequence()
    precisions, vectors = information_from_the_future(outputs, offsets)
    first = np.linalg.inv(np.linalg.inv(P) + precisions[0])
    mean = first @ (np.linalg.solve(P, mu) + vectors[0])
    rows = []
    for t in range(len(outputs) - 1):
        covariance = np.linalg.inv(np.diag(1 / Q) + precisions[t + 1])
        gain, offset = covariance @ np.diag(1 / Q), covariance @ vectors[t + 1]
        if is_through_state:
            gain, offset = gain @ A[:, :2], offset + gain @ offsets[t]
        rows.append((gain, offset, np.linalg.cholesky(covariance)))
    gains, steps, scales = (np.array(column)[None] for column in zip(*rows, strict=True))
    return FreeSteps(mean[None], np.linalg.cholesky(first)[None], gains, steps, scales, is_full=True)


def exact_noise(model: GPSSM, posterior: AbstractPosterior) -> Noise:
    """Points at which the mean of a quadratic function of the states' noise is its expectation; f's noise is left at zero."""
    size = cases.NUM_STEPS * 2
    points = np.sqrt(size) * np.concatenate([np.eye(size), -np.eye(size)]).reshape(-1, cases.NUM_STEPS, 2)
    silent = jax.tree.map(jnp.zeros_like, noise_of(model, posterior, len(points))[:3])
    return Noise(silent[0], jnp.asarray(points), silent[2], key=jax.random.key(42))


@pytest.mark.parametrize("family", BOUNDS)
def test_bound_reaches_the_kalman_evidence_at_the_exact_posterior_and_nowhere_exceeds_it(family: str):
    model, (*_, window) = linear_gaussian(), sequence()
    prior = InducingPosterior.prior(2, cases.NUM_INDUCING)
    best = BOUNDS[family](prior, optimal_steps(family == "factorised linear"))
    noise = exact_noise(model, best)
    reached = jnp.mean(total_of_samples(model, best, window, noise))
    np.testing.assert_allclose(reached, log_evidence(), rtol=1e-9, atol=1e-9)
    rng, gaps = np.random.default_rng(43), []
    for scale in (1e-3, 1e-2, 0.1, 1.0):
        other = jax.tree.map(lambda leaf: leaf + scale * rng.normal(size=leaf.shape), best.local)  # noqa: B023
        other = eqx.tree_at(lambda p: p.local, best, other)
        gaps.append(log_evidence() - float(jnp.mean(total_of_samples(model, other, window, noise))))
    assert np.all(np.diff([0.0, *gaps]) > 0), gaps


@pytest.mark.parametrize("family", ["factorised linear", "vcdt"])
def test_states_at_the_exact_posterior_are_those_of_the_kalman_smoother(family: str):
    model, (outputs, offsets, window) = linear_gaussian(), sequence()
    best = BOUNDS[family](InducingPosterior.prior(2, cases.NUM_INDUCING), optimal_steps(family == "factorised linear"))
    noise = exact_noise(model, best)

    @eqx.filter_jit
    def paths(model: GPSSM, posterior: AbstractPosterior) -> jax.Array:
        model, posterior = unwrap((model, posterior))
        return jax.vmap(lambda *arrays: posterior.rollout(model, window, Noise(*arrays, noise.key), chain).states)(*noise[:3])

    states = np.asarray(paths(model, best))
    smoothed = oracles.rts_smoother(ORACLE, oracles.kalman_filter(ORACLE, outputs, offsets))
    np.testing.assert_allclose(states.mean(axis=0), smoothed.means, rtol=1e-8, atol=1e-8)
    centred = states - states.mean(axis=0)
    covariances = np.einsum("nti,ntj->tij", centred, centred) / len(states)
    np.testing.assert_allclose(covariances, smoothed.covariances, rtol=1e-7, atol=1e-8)


def test_filtering_step_is_the_kalman_update_of_one_state():
    """Of x_{t+1} ~ N(f, Q) by y_{t+1}, whatever of it was seen."""
    model, (outputs, _, window) = unwrap(linear_gaussian()), sequence()
    steps, f = FilteringSteps().steps(model, window), np.array([0.7, -1.1])
    at_one_state = oracles.LinearGaussian(np.eye(2), np.zeros((2, 2)), C, R, f, np.diag(Q), d)
    for t in range(1, len(outputs)):
        filtered = oracles.kalman_filter(at_one_state, outputs[t : t + 1])
        step = steps.resolve(jax.tree.map(lambda leaf: leaf[t - 1], steps.scanned))  # noqa: B023
        np.testing.assert_allclose(step.gain @ f + step.offset, filtered.means[0], rtol=1e-10)
        np.testing.assert_allclose(step.chol @ step.chol.T, filtered.covariances[0], rtol=1e-10, atol=1e-12)


def test_filtering_steps_are_the_paper_s_closed_form_without_the_rows_of_missing_channels():
    model, (outputs, _, window) = unwrap(linear_gaussian()), sequence()
    steps = FilteringSteps().steps(model, window)
    for t in range(len(outputs)):
        seen = ~np.isnan(outputs[t])
        informed = C[seen].T @ np.linalg.inv(R[np.ix_(seen, seen)])
        precision = np.linalg.inv(P) if t == 0 else np.diag(1 / Q)
        S = np.linalg.inv(precision + informed @ C[seen])
        shift = S @ informed @ (outputs[t] - d)[seen]
        if t == 0:
            np.testing.assert_allclose(steps.initial_mean, S @ precision @ mu + shift, rtol=1e-10)
            np.testing.assert_allclose(steps.initial_chol @ steps.initial_chol.T, S, rtol=1e-10)
            continue
        step = steps.resolve(jax.tree.map(lambda leaf: leaf[t - 1], steps.scanned))  # noqa: B023
        np.testing.assert_allclose(step.gain, S @ precision, rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(step.offset, shift, rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(step.chol @ step.chol.T, S, rtol=1e-10, atol=1e-12)


# Uncertain dynamics: x_{t+1} = w x_t + noise with w ~ N(0, 0.8), so that p(Y) is an integral over one number

OUTPUTS = np.array([[1.3], [0.9], [np.nan], [0.8], [0.2]])
W_VARIANCE, q, r = 0.8, 0.05, 0.1


def evidence_of_uncertain_dynamics() -> tuple[float, float, float]:
    """log p(Y), and the mean and variance of w given Y, on a fine grid."""
    grid = np.linspace(-5, 5, 2001)
    logs = []
    for w in grid:
        model = oracles.LinearGaussian(*(np.array([[v]]) for v in (w, q, 1.0, r)), np.zeros(1), np.eye(1))
        logs.append(oracles.kalman_filter(model, OUTPUTS).log_evidence)
    logs = np.array(logs) - 0.5 * grid**2 / W_VARIANCE - 0.5 * np.log(2 * np.pi * W_VARIANCE) + np.log(grid[1] - grid[0])
    weights = np.exp(logs - logs.max())
    mean = weights @ grid / weights.sum()
    return float(np.log(weights.sum()) + logs.max()), mean, weights @ (grid - mean) ** 2 / weights.sum()


@pytest.fixture(scope="module")
def uncertain() -> tuple[GPSSM, Window, float, float, float]:
    kernel = LinearKernel(Frozen(jnp.array([W_VARIANCE])))
    transition = SparseGP(kernel, ZeroMean(1), Frozen(jnp.ones((1, 1))), 1, jitter=1e-14)
    emission = LinearGaussian(jnp.eye(1), jnp.zeros(1), Frozen(jnp.full(1, np.sqrt(r))))
    model = GPSSM(transition, emission, Frozen(jnp.full(1, np.sqrt(q))))
    seen = jnp.asarray(~np.isnan(OUTPUTS))
    nothing, index = jnp.zeros((len(OUTPUTS), 0)), jnp.array(0)
    window = Window(jnp.nan_to_num(jnp.asarray(OUTPUTS)), seen, nothing, jnp.ones(len(OUTPUTS), bool), index, index)
    return model, window, *evidence_of_uncertain_dynamics()


@pytest.mark.parametrize("family", BOUNDS)
def test_bound_never_exceeds_the_evidence_of_uncertain_dynamics(family: str, uncertain):
    """At q(u) near the posterior of w and steps near the smoother's at its mean, and with all of it disturbed."""
    model, window, evidence, mean, variance = uncertain
    steps = len(OUTPUTS) - 1
    precision, vector, rows = np.zeros(len(OUTPUTS) + 1), np.zeros(len(OUTPUTS) + 1), []
    for t in reversed(range(len(OUTPUTS))):
        shrunk = 1 / (1 + q * precision[t + 1])
        precision[t], vector[t] = mean**2 * shrunk * precision[t + 1], mean * shrunk * vector[t + 1]
        if not np.isnan(OUTPUTS[t, 0]):
            precision[t], vector[t] = precision[t] + 1 / r, vector[t] + OUTPUTS[t, 0] / r
    for t in range(steps):
        s = 1 / (1 / q + precision[t + 1])
        rows.append((s / q * (mean if family == "factorised linear" else 1.0), s * vector[t + 1], np.sqrt(s)))
    gain, offset, scale = (np.array(column).reshape(1, steps, 1) for column in zip(*rows, strict=True))
    first = 1 / (1 + precision[0])
    local = FreeSteps(np.array([[first * vector[0]]]), np.array([[[np.sqrt(first)]]]), gain, offset, scale)
    whitened = InducingPosterior(np.array([[mean]]) / np.sqrt(W_VARIANCE), np.sqrt(np.array([[[variance / W_VARIANCE]]])))
    best = BOUNDS[family](whitened, local)
    assert best.is_lower_bound
    noise, rng = noise_of(model, best, 4000, len(OUTPUTS)), np.random.default_rng(44)
    for scale in (0.0, 0.02, 0.1, 0.5):
        other = jax.tree.map(lambda leaf: leaf + scale * rng.normal(size=leaf.shape), best)  # noqa: B023
        values = total_of_samples(model, other, window, noise) - unwrap(other).inducing.kl()
        assert_close_in_mean(values, evidence, f"{family}, disturbed by {scale}", sides=1)
        if scale == 0:
            assert np.mean(values) > evidence - 1.5, f"{np.mean(values)} should be close to {evidence}"


# Terms that vanish


@pytest.mark.parametrize("family", ["function-dependent", "pathwise", "parametric", "pr-ssm", "pr-ssm corrected"])
def test_prior_steps_that_see_a_value_of_f_have_no_transition_divergence(family: str):
    model, posterior, windows = Case(family, "prior").build()
    terms = bound(model, posterior, windows, key=jax.random.key(45), num_samples=3)
    assert abs(terms.kl_transition) < 1e-10
    assert terms.kl_initial > 0.1


def test_inducing_divergence_of_the_prior_is_zero():
    prior = unwrap(InducingPosterior.prior(cases.NUM_STATES, cases.NUM_INDUCING))
    np.testing.assert_allclose(prior.kl(), 0.0, atol=1e-10)
    assert unwrap(cases.inducing()).kl() > 0.1


# Windows


@eqx.filter_jit
def bound(model, posterior, windows, *, key, num_samples, scheme="plain", weight=1.0) -> Elbo:
    return elbo(model, posterior, windows, key=key, num_samples=num_samples, scheme=scheme, weight=weight)


def with_outputs(window: Window, values: np.ndarray, is_observed: np.ndarray) -> Window:
    return eqx.tree_at(lambda w: (w.outputs, w.is_observed), window, (jnp.asarray(values), jnp.asarray(is_observed)))


@pytest.mark.parametrize("local", ["free", "filtering", "amortised"])
def test_what_stands_in_a_missing_entry_does_not_matter(local: str):
    model, posterior, windows = Case("vcdt", local, emission="linear, joint noise").build()
    window = one(windows, 0)
    assert not np.all(window.is_observed)
    noise = noise_of(model, posterior, 2)
    filled = with_outputs(window, np.where(window.is_observed, window.outputs, 1e3), window.is_observed)
    np.testing.assert_array_equal(
        total_of_samples(model, posterior, filled, noise), total_of_samples(model, posterior, window, noise)
    )


@pytest.mark.parametrize("local", ["free", "filtering"])
def test_channel_that_is_always_missing_equals_a_model_without_it(local: str):
    model, posterior, windows = Case("vcdt", local, emission="linear, joint noise").build()
    window, noise = one(windows, 0), noise_of(model, posterior, 2)
    hidden = with_outputs(window, window.outputs, np.asarray(window.is_observed) & np.array([[True, False]]))
    full = unwrap(model).emission
    narrow = LinearGaussian(full.matrix[:1], full.offset[:1], Frozen(full.chol_noise[0, :1]))
    without = with_outputs(window, window.outputs[:, :1], window.is_observed[:, :1])
    np.testing.assert_allclose(
        total_of_samples(model, posterior, hidden, noise),
        total_of_samples(eqx.tree_at(lambda m: m.emission, model, narrow), posterior, without, noise),
        rtol=1e-12,
    )


def test_step_with_nothing_observed_equals_its_emission_term_left_out():
    model, posterior, windows = Case("function-dependent", "free").build()
    window, noise = one(windows, 0), noise_of(model, posterior, 1)
    hidden = with_outputs(window, window.outputs, np.asarray(window.is_observed) & (np.arange(6) != 3)[:, None])
    plain_model, plain_posterior = unwrap((model, posterior))
    rollout = plain_posterior.rollout(plain_model, window, first(noise), chain)
    left_out = plain_model.emission.log_density(rollout.states[3], window.outputs[3], window.is_observed[3])
    whole = total_of_samples(model, posterior, window, noise)
    np.testing.assert_allclose(total_of_samples(model, posterior, hidden, noise), whole - left_out, rtol=1e-12)


def first(noise: Noise) -> Noise:
    return Noise(noise.inducing[0], noise.states[0], noise.function[0], noise.key)


@pytest.mark.parametrize("local", ["prior", "filtering"])
def test_missing_end_costs_nothing_where_steps_without_outputs_are_prior_steps(local: str):
    model, posterior, windows = Case("function-dependent", local).build()
    window, noise = one(windows, 0), noise_of(model, posterior, 2)
    hidden = with_outputs(window, window.outputs, np.asarray(window.is_observed) & (np.arange(6) < 4)[:, None])
    short = jax.tree.map(lambda leaf: leaf[:4] if leaf.ndim else leaf, window)
    shorter = Noise(noise.inducing, noise.states[:, :4], noise.function[:, :4], noise.key)
    np.testing.assert_allclose(
        total_of_samples(model, posterior, hidden, noise), total_of_samples(model, posterior, short, shorter), rtol=1e-10
    )


@pytest.mark.parametrize(
    "case", [Case("vcdt", "free"), Case("function-dependent", "cut"), Case("pathwise", "amortised")], ids=str
)
def test_many_sequences_equal_the_sum_of_single_ones_at_the_same_noise(case: Case):
    model, posterior, windows = case.build()
    key = jax.random.key(46)
    together = bound(model, posterior, windows, key=key, num_samples=2)
    singles = []
    for i, seed in enumerate(jax.random.split(key, 2)):
        noise = draw_noise(unwrap(posterior), unwrap(model), cases.NUM_STEPS, key=seed, scheme="plain", num_samples=2)
        singles.append(jnp.mean(total_of_samples(model, posterior, one(windows, i), noise)))
    np.testing.assert_allclose(together.total, sum(singles) - unwrap(posterior).inducing.kl(), rtol=1e-12)


@pytest.mark.parametrize("family", ["factorised linear", "vcdt", "function-dependent", "pathwise"])
@pytest.mark.parametrize("local", ["free", "amortised"])
def test_padded_equals_unpadded(family: str, local: str):
    model, posterior, windows = Case(family, local).build()
    window, noise = one(windows, 1), noise_of(model, posterior, 2)
    short = jax.tree.map(lambda leaf: leaf[:4] if leaf.ndim else leaf, window)
    assert not np.any(window.is_real[4:])
    function = noise.function if family == "pathwise" else noise.function[:, :4]
    shorter = Noise(noise.inducing, noise.states[:, :4], function, noise.key)
    np.testing.assert_allclose(
        total_of_samples(model, posterior, window, noise), total_of_samples(model, posterior, short, shorter), rtol=1e-12
    )


def test_padded_equals_unpadded_for_the_dense_posterior():
    model, posterior, windows = Case("factorised dense", "free").build()
    window, noise = one(windows, 1), noise_of(model, posterior, 2)
    short = jax.tree.map(lambda leaf: leaf[:4] if leaf.ndim else leaf, window)
    parts = posterior.mean[:, :4], posterior.chol.raw[:, :8, :8]
    smaller = eqx.tree_at(lambda p: (p.mean, p.chol.raw), posterior, parts)
    shorter = Noise(noise.inducing, noise.states[:, :4], noise.function, noise.key)
    np.testing.assert_allclose(
        total_of_samples(model, posterior, window, noise), total_of_samples(model, smaller, short, shorter), rtol=1e-12
    )


# Expectations


@eqx.filter_jit
def bounds(model, posterior, windows, keys, num_samples, scheme="plain", weight=1.0) -> jax.Array:
    """One estimate a key."""
    return jax.vmap(
        lambda key: elbo(model, posterior, windows, key=key, num_samples=num_samples, scheme=scheme, weight=weight).total
    )(keys)


@pytest.mark.parametrize("family", ["vcdt", "function-dependent"])
def test_pieces_add_up_to_the_bound_of_the_whole(family: str):
    model, posterior, windows = Case(family, "cut").build()
    cut = pieces(windows, 2)
    assert cut.outputs.shape == (5, 3, 2)  # three pieces of the first sequence, two of the second
    assert cut.is_observed.sum() == windows.is_observed.sum(), "every output belongs to one piece"
    keys = jax.random.split(jax.random.key(47), (2, 1500))
    whole = bounds(model, posterior, windows, keys[0], 1)
    assert_close_in_mean(bounds(model, posterior, cut, keys[1], 1), whole, family)


@pytest.mark.parametrize("family", ["vcdt", "function-dependent"])
def test_mini_batches_are_unbiased(family: str):
    """Over whole sequences of unequal lengths, one a batch, and over pieces, two a batch."""
    model, posterior, windows = Case(family, "cut").build()
    keys = jax.random.split(jax.random.key(48), (3, 1500))
    whole = bounds(model, posterior, windows, keys[0], 1)
    rng = np.random.default_rng(49)

    def batches(windows: Window, size: int, keys: jax.Array) -> jax.Array:
        count = len(windows.sequence)
        rows = jnp.asarray([rng.choice(count, size, replace=False) for _ in keys])
        one_batch = eqx.filter_jit(
            jax.vmap(
                lambda rows, key: (
                    elbo(
                        model,
                        posterior,
                        jax.tree.map(lambda leaf: leaf[rows], windows),
                        key=key,
                        num_samples=1,
                        weight=count / size,
                    ).total
                )
            )
        )
        return one_batch(rows, keys)

    assert_close_in_mean(batches(windows, 1, keys[1]), whole, "sequences")
    assert_close_in_mean(batches(pieces(windows, 2), 2, keys[2]), whole, "pieces")


# Noise


@pytest.mark.parametrize("scheme", ["plain", "antithetic", "quasi"])
def test_every_scheme_has_standard_normal_marginals(scheme: str):
    """In both blocks of dimensions, and for the first and the last sample of an odd number."""
    keys = jax.random.split(jax.random.key(50), 3000)
    draws = np.asarray(jax.jit(jax.vmap(lambda key: standard_normals(key, scheme, 5, 70)))(keys))
    assert draws.shape == (3000, 5, 70)
    for sample, dimension in ((0, 0), (4, 3), (2, 63), (0, 64), (4, 69)):
        p_value = stats.kstest(draws[:, sample, dimension], "norm").pvalue
        assert p_value > 1e-4, f"sample {sample}, dimension {dimension}: p = {p_value}"
    products = draws[:, 0, [0, 0, 63, 5]] * draws[:, 0, [1, 64, 64, 69]]  # uncorrelated within and between blocks
    assert np.all(np.abs(products.mean(axis=0) / products.std(axis=0)) * np.sqrt(3000) < 4)


def test_linear_functionals_vary_less_with_antithetic_and_quasi_random_noise():
    weights = jnp.asarray(cases.normals(70, seed=51))
    keys = jax.random.split(jax.random.key(52), 1000)
    variances = {}
    for scheme in ("plain", "antithetic", "quasi"):
        one_estimate = jax.vmap(lambda key: jnp.mean(standard_normals(key, scheme, 16, 70) @ weights))  # noqa: B023
        estimates = np.asarray(jax.jit(one_estimate)(keys))
        if scheme != "antithetic":
            assert_close_in_mean(estimates, 0.0, scheme)
        variances[scheme] = float(np.var(estimates))
    assert variances["antithetic"] < 1e-25
    assert variances["quasi"] < 0.5 * variances["plain"], variances


@pytest.mark.parametrize("scheme", ["antithetic", "quasi"])
def test_bound_has_the_same_expectation_under_every_scheme(scheme: str):
    model, posterior, windows = Case("vcdt", "free").build()
    keys = jax.random.split(jax.random.key(53), (2, 1000))
    plain = bounds(model, posterior, windows, keys[0], 8)
    other = bounds(model, posterior, windows, keys[1], 8, scheme)
    assert_close_in_mean(other, plain, scheme)
    assert np.var(other) < 1.2 * np.var(plain)
