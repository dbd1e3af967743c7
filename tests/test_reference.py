"""The reference numbers: values, gradients and Monte Carlo means of every method at fixed parameters.

`GPSSM_REFERENCE` names another file of the same layout; every configuration in it is checked. Without it configurations of four
states join those of the stored file, from the same definitions written plainly (`plain_bound.py`, itself held to that file).
"""

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import plain_bound
from gpssm.data import Window
from gpssm.draws import MarginalDraw
from gpssm.elbo import Elbo, terms_of_samples
from gpssm.emissions import LinearGaussian
from gpssm.gp import InducingPosterior, SparseGP
from gpssm.kernels import Matern, SquaredExponential
from gpssm.means import IdentityMean, ZeroMean
from gpssm.model import GPSSM
from gpssm.params import Frozen, unwrap
from gpssm.posteriors import (
    PRSSM,
    VCDT,
    FactorisedDense,
    FactorisedLinear,
    FactorisedNonlinear,
    FreeSteps,
    FunctionDependent,
    Noise,
    Parametric,
    PriorSteps,
    PRSSMCorrected,
)

STORED = Path(__file__).parent / "reference" / "elbo.npz"
FILE = Path(os.environ.get("GPSSM_REFERENCE", STORED))
FAMILIES = {
    "VCDT": VCDT,
    "FactorizedNonLinear": FactorisedNonlinear,
    "Parametric": Parametric,
    "Cubic": FunctionDependent,
    "PRSSM": PRSSM,
    "PPT": PRSSMCorrected,
    "VPT": VCDT,
    "CPT": FunctionDependent,
}
PRIOR_TRANSITION = ("PRSSM", "PPT", "VPT", "CPT")


FOUR_STATES = [  # kernel, mean, method, and whether A and S are full
    *(("matern32", "identity", method, True) for method in plain_bound.WITH_FULL_STEPS),
    *(("matern32", "identity", method, False) for method in plain_bound.METHODS),
    *(("rbf", "zero", method, False) for method in ("VCDT", "Cubic", "FactorizedLinear", "VPT")),
]
QUICK = (("four_states_matern32_identity_fullAS", "VCDT"), ("four_states_matern32_identity_fullAS", "Cubic"))


@cache
def numbers() -> dict[str, np.ndarray]:
    with np.load(FILE) as file:
        stored = {name: file[name] for name in file.files}
    return stored if "GPSSM_REFERENCE" in os.environ else stored | four_states()


def four_states() -> dict[str, np.ndarray]:
    """Four states, two controls, three outputs, five steps and inducing inputs; gradients of what has few numbers."""
    case = plain_bound.random_case(np.random.default_rng(90), 4, 2, 3, 5, 5, samples=2)
    contents = plain_bound.reference(case, "four_states", FOUR_STATES)
    for method, gradients in (("VCDT", ("Q_sqrt", "S_chols")), ("Cubic", ("Q_sqrt", "kern_variance_0"))):
        contents |= plain_bound.reference(case, "four_states", [("matern32", "identity", method, True)], gradients)
    return contents


def configurations(kind: str) -> list[tuple[str, str]]:
    """Every (name, method) that the file has `det`, `grad` or `mc` entries of."""
    keys = [key.split("/") for key in numbers() if key.startswith("cfg/")]
    return sorted({(key[1], key[2]) for key in keys if len(key) > 4 and key[3] == kind})


def each_configuration(kind: str) -> pytest.MarkDecorator:
    """A test for every configuration; most of those that are not from a file only when there is time."""
    slow = [one for one in configurations(kind) if one[0].startswith("four_states") and one not in QUICK]
    is_slow = "GPSSM_REFERENCE" not in os.environ
    return pytest.mark.parametrize(
        ("name", "method"),
        [pytest.param(*one, marks=pytest.mark.slow) if is_slow and one in slow else one for one in configurations(kind)],
    )


def entries(name: str, method: str, kind: str) -> dict[str, np.ndarray]:
    prefix = f"cfg/{name}/{method}/{kind}/"
    return {key.removeprefix(prefix): value for key, value in numbers().items() if key.startswith(prefix)}


def described(name: str) -> tuple[str, str, str, bool]:
    """Case, kernel, mean, and whether A and S are full; a case's own name may hold underscores."""
    case, kernel, mean = name.removesuffix("_fullAS").rsplit("_", 2)
    return case, kernel, mean, name.endswith("_fullAS")


def case_of(name: str) -> dict[str, np.ndarray]:
    prefix = f"case/{described(name)[0]}/"
    return {key.removeprefix(prefix): value for key, value in numbers().items() if key.startswith(prefix)}


def parameters(name: str, case: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    """The constrained parameters, under the names that the reference gives their gradients."""
    return {key: jnp.asarray(value) for key, value in plain_bound.parameters(case, described(name)[3]).items()}


def build(name: str, method: str, case: dict[str, np.ndarray], values: dict[str, jax.Array]):
    """Model, posterior and window of one configuration; gradients flow to `values`."""
    states, (_, kernel, mean, _) = int(case["dim_D"]), described(name)
    make = {"rbf": SquaredExponential, "matern32": Matern}[kernel]
    kernels, variances = [], []
    for d in range(states):
        lengthscales, variance = Frozen(values[f"kern_lengthscales_{d}"]), Frozen(values[f"kern_variance_{d}"])
        kernels.append(make(lengthscales, variance))
        variances.append(values[f"kern_variance_{d}"])
    means = {"zero": ZeroMean, "identity": IdentityMean}
    inputs = jnp.stack([values[f"Z_{d}"] for d in range(states)])
    # the reference adds 1e-6 itself to the diagonal, not a share of it
    transition = SparseGP(kernels, means[mean](states), inputs, states, jitter=1e-6 / jnp.stack(variances))
    emission = LinearGaussian(values["C"], values["bias"], Frozen(values["Rchol"]))
    initial_chol = Frozen(jnp.linalg.cholesky(jnp.asarray(case["px1_cov"])))
    model = GPSSM(transition, emission, Frozen(values["Q_sqrt"]), jnp.asarray(case["px1_mu"]), initial_chol)

    inducing = InducingPosterior(values["Umu"], Frozen(values["Ucov_chol"]))
    first = values["qx1_mu"][None], Frozen(values["qx1_cov_chol"][None])
    if method == "FactorizedLinear":
        posterior = FactorisedDense(inducing, values["Xmu"][None], Frozen(values["Xchol"][None]))
    elif method in PRIOR_TRANSITION:
        posterior = FAMILIES[method](inducing, PriorSteps(*first))
    else:
        steps = values["As"][None], values["bs"][None], Frozen(values["S_chols"][None])
        posterior = FAMILIES[method](inducing, FreeSteps(*first, *steps))
    return model, posterior, window_of(case)


def window_of(case: dict[str, np.ndarray]) -> Window:
    outputs = jnp.asarray(case["Y"])
    controls = jnp.asarray(case["inputs"]) if int(case["dim_du"]) else jnp.zeros((len(outputs) - 1, 0))
    controls = jnp.concatenate([controls, jnp.zeros((1, controls.shape[1]))])
    everything = jnp.ones(outputs.shape, bool)
    return Window(outputs, everything, controls, everything[:, 0], jnp.array(0), jnp.array(0))


def stored_noise(case: dict[str, np.ndarray], method: str) -> Noise:
    function = np.swapaxes(case["eps_F"], 0, 1)
    if method == "FactorizedLinear":
        states = case["eps_XFL"].reshape(len(case["eps_XFL"]), -1, int(case["dim_D"]))
    else:
        states = np.swapaxes(case["eps_X"], 0, 1)
    inducing = np.moveaxis(case["eps_U"], -1, 0)
    return Noise(jnp.asarray(inducing), jnp.asarray(states), jnp.asarray(function), jax.random.key(0))


@cache
def evaluated(name: str, method: str) -> Callable:
    """One compiled program a configuration: terms of each sample, and the gradient of their sum at the samples' weights."""

    @jax.jit
    def evaluate(values: dict[str, jax.Array], noise: Noise, weights: jax.Array) -> tuple[Elbo, dict[str, jax.Array]]:
        def terms(values: dict[str, jax.Array]) -> tuple[jax.Array, Elbo]:
            model, posterior, window = unwrap(build(name, method, case_of(name), values))
            emission, transition, initial = terms_of_samples(model, posterior, window, noise)
            kl = jnp.broadcast_to(posterior.inducing.kl(), emission.shape)
            each = Elbo(emission, transition, kl, initial)
            return weights @ each.total, each

        gradient, each = jax.grad(terms, has_aux=True)(values)
        return each, gradient

    return evaluate


def num_samples(name: str, method: str) -> int:
    stored = case_of(name)["eps_X"].shape[1]
    return max(stored, 200 if method in ("Cubic", "CPT") else 1000)


@cache
def at_stored_noise(name: str, method: str) -> tuple[Elbo, dict[str, jax.Array]]:
    """The six stored samples, and others that weigh nothing, so that the Monte Carlo means need no second program."""
    case = case_of(name)
    stored = stored_noise(case, method)
    count, stored_count = num_samples(name, method), len(stored.inducing)
    noise = Noise(*(jnp.pad(a, ((0, count - stored_count), (0, 0), (0, 0))) for a in stored[:3]), key=stored.key)
    weights = jnp.where(jnp.arange(count) < stored_count, 1 / stored_count, 0.0)
    each, gradient = evaluated(name, method)(parameters(name, case), noise, weights)
    return jax.tree.map(lambda term: jnp.mean(term[:stored_count]), each), gradient


def in_reference_terms(terms: Elbo, name: str, method: str) -> dict[str, jax.Array]:
    """Our four terms under the reference's names; for the factorised-linear method, in its own decomposition."""
    if method != "FactorizedLinear":
        return {
            "elbo": terms.total,
            "emission": terms.emission,
            "KL_X": terms.kl_transition,
            "KL_U": terms.kl_inducing,
            "KL_x1": terms.kl_initial,
        }
    case = case_of(name)
    chol = case["Xchol"]
    states, constant = int(case["dim_D"]), 0.5 * (1 + np.log(2 * np.pi))
    entropy = len(chol) * constant + np.sum(np.log(np.abs(np.diag(chol))))
    first_entropy = states * constant + np.sum(np.log(np.abs(np.diag(chol)[:states])))
    return {
        "elbo": terms.total,
        "emission": terms.emission,
        "KL_U": terms.kl_inducing,
        "transition_plus_KLU": -terms.kl_transition - (entropy - first_entropy),
        "entropy": entropy,
        "x1_cross_entropy": terms.kl_initial + first_entropy,
    }


@pytest.mark.parametrize("name", ["D1_matern32_identity", "D2_rbf_identity_fullAS"])
def test_the_plain_bound_is_that_of_the_stored_file(name: str):
    """The oracle of other sizes, at the sizes for which there are numbers of another origin."""
    with np.load(STORED) as stored:
        prefix = f"case/{described(name)[0]}/"
        case = {key.removeprefix(prefix): stored[key] for key in stored.files if key.startswith(prefix)}
        _, kernel, mean, is_full = described(name)
        methods = {key.split("/")[2] for key in stored.files if key.startswith(f"cfg/{name}/") and "/det/" in key}
        assert methods
        for method in methods:
            found = plain_bound.terms(case, kernel, mean, method, plain_bound.parameters(case, is_full))
            for term, value in found.items():
                np.testing.assert_allclose(value, stored[f"cfg/{name}/{method}/det/{term}"], rtol=1e-8, atol=1e-10)


def test_every_configuration_of_the_file_is_checked():
    keys = [key.split("/") for key in numbers() if key.startswith("cfg/")]
    methods = {(key[1], key[2]) for key in keys if not key[2].startswith("predict_f")}
    assert methods
    kinds = {key[3] for key in keys if len(key) > 3}
    assert kinds <= {"det", "grad", "mc"}, f"no test reads {kinds - {'det', 'grad', 'mc'}}"
    assert {described(name)[1:3] for name, _ in methods} <= {(k, m) for k in ("rbf", "matern32") for m in ("zero", "identity")}
    assert methods == set(configurations("det")) | set(configurations("grad")) | set(configurations("mc"))
    assert {method for _, method in methods} <= {*FAMILIES, "FactorizedLinear"}


@each_configuration("det")
def test_bound_and_terms_at_stored_noise(name: str, method: str):
    ours = in_reference_terms(at_stored_noise(name, method)[0], name, method)
    theirs = entries(name, method, "det")
    assert theirs.keys() <= ours.keys()
    for term, value in theirs.items():
        np.testing.assert_allclose(ours[term], value, rtol=1e-8, atol=1e-10, err_msg=f"{name} {method} {term}")


@each_configuration("grad")
def test_gradients_at_stored_noise(name: str, method: str):
    gradients = at_stored_noise(name, method)[1]
    for parameter, value in entries(name, method, "grad").items():
        ours = np.asarray(gradients[parameter])
        is_factor = parameter in ("Ucov_chol", "Rchol", "qx1_cov_chol", "Xchol") or (
            parameter == "S_chols" and described(name)[3]
        )
        if is_factor:
            ours, value = np.tril(ours), np.tril(value)
        scale = np.max(np.abs(value))
        np.testing.assert_allclose(ours, value, rtol=1e-6, atol=1e-6 * scale + 1e-10, err_msg=f"{name} {method} {parameter}")


@each_configuration("mc")
def test_monte_carlo_means(name: str, method: str):
    case = case_of(name)
    count, num_batches = num_samples(name, method), 20
    shapes = [array.shape[1:] for array in stored_noise(case, method)[:3]]
    batches = []
    for key in jax.random.split(jax.random.key(7), num_batches):
        keys = jax.random.split(key, 3)
        arrays = [jax.random.normal(k, (count, *shape)) for k, shape in zip(keys, shapes, strict=True)]
        weights = jnp.full(count, 1 / count)
        each, _ = evaluated(name, method)(parameters(name, case), Noise(*arrays, key=key), weights)
        batches.append(in_reference_terms(each, name, method))
    theirs = entries(name, method, "mc")
    means = {key.removesuffix("_mean"): value for key, value in theirs.items() if key.endswith("_mean")}
    assert means
    for term, mean in means.items():
        values = np.concatenate([np.broadcast_to(batch[term], (count,)) for batch in batches])
        their_error, our_error = theirs[f"{term}_se"], np.std(values) / np.sqrt(len(values))
        z = (np.mean(values) - mean) / (np.hypot(our_error, their_error) + 1e-9 * (1 + abs(mean)))
        assert abs(z) < 4, f"{name} {method} {term}: {np.mean(values)} against {mean}, z = {z:.1f}"


@pytest.mark.parametrize("name", sorted({key.split("/")[1] for key in numbers() if key.endswith("predict_f_mean")}))
def test_marginal_moments_of_f(name: str):
    case = case_of(name)
    model, posterior, _ = unwrap(build(name, "VCDT", case, parameters(name, case)))
    draw = MarginalDraw(model.transition.basis(), model.transition.mean, posterior.inducing)
    moments, _ = jax.vmap(lambda x: draw.ask(None, x, jnp.zeros(model.num_states)))(jnp.asarray(case["Xstar"]))
    np.testing.assert_allclose(moments.mean, numbers()[f"cfg/{name}/predict_f_mean"], rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(moments.variance, numbers()[f"cfg/{name}/predict_f_var"], rtol=1e-8, atol=1e-10)


def test_markov_and_dense_factorised_linear_agree():
    """The Markov chain is a special case of the dense Gaussian: with its joint, the expected terms are equal."""
    name = min(key.split("/")[1] for key in numbers() if key.startswith("cfg/")).removesuffix("_fullAS")
    case = case_of(name)
    values = parameters(name, case)
    model, dense, window = build(name, "FactorizedLinear", case, values)
    gain, offset, scale = case["As"], case["bs"], np.sqrt(case["Ss"])
    steps, states = len(case["Y"]), int(case["dim_D"])
    mean = np.zeros((steps, states))
    mean[0] = case["qx1_mu"]
    chol = np.zeros((steps, states, steps, states))
    chol[0, :, 0, :] = np.linalg.cholesky(case["qx1_cov"])
    for t in range(steps - 1):
        mean[t + 1] = gain[t] * mean[t] + offset[t]
        chol[t + 1] = gain[t][:, None, None] * chol[t]
        chol[t + 1, :, t + 1, :] = np.diag(scale[t])
    size = steps * states
    dense = FactorisedDense(dense.inducing, mean[None], Frozen(jnp.asarray(chol.reshape(1, size, size))))
    first = values["qx1_mu"][None], Frozen(values["qx1_cov_chol"][None])
    markov = FactorisedLinear(dense.inducing, FreeSteps(*first, gain[None], offset[None], Frozen(jnp.asarray(scale[None]))))
    keys = jax.random.split(jax.random.key(3), 3)
    shapes = [array.shape[1:] for array in stored_noise(case, "VCDT")[:3]]
    noise = Noise(*(jax.random.normal(k, (20_000, *shape)) for k, shape in zip(keys, shapes, strict=True)), key=keys[0])
    left, right = (eqx.filter_jit(terms_of_samples)(*unwrap((model, posterior)), window, noise) for posterior in (dense, markov))
    np.testing.assert_allclose(left[0], right[0], rtol=1e-9)  # the same noise, the same paths
    gap = np.asarray(left[1] - right[1])
    assert abs(np.mean(gap)) < 4 * np.std(gap) / np.sqrt(len(gap)), f"{np.mean(gap)} of {np.mean(right[1])}"
    np.testing.assert_allclose(np.mean(left[2]), np.mean(right[2]), rtol=1e-9)
