"""The reference numbers: values, gradients and Monte Carlo means of every method at fixed parameters.

`GPSSM_REFERENCE` names another file of the same layout; every configuration in it is checked.
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

FILE = Path(os.environ.get("GPSSM_REFERENCE", Path(__file__).parent / "reference" / "elbo.npz"))
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


@cache
def numbers() -> dict[str, np.ndarray]:
    with np.load(FILE) as file:
        return {name: file[name] for name in file.files}


def configurations() -> list[tuple[str, str]]:
    names = {tuple(key.split("/")[1:3]) for key in numbers() if key.startswith("cfg/")}
    return sorted((name, method) for name, method in names if not method.startswith("predict_f"))


def case_of(name: str) -> dict[str, np.ndarray]:
    prefix = f"case/{name.split('_')[0]}/"
    return {key.removeprefix(prefix): value for key, value in numbers().items() if key.startswith(prefix)}


def parameters(name: str, case: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    """The constrained parameters, under the names that the reference gives their gradients."""
    is_full = name.endswith("_fullAS")
    chosen = {
        "Umu": case["Umu"],
        "Ucov_chol": case["Ucov_chol"],
        "Q_sqrt": np.sqrt(case["Q_diag"]),
        "C": case["C"],
        "Rchol": np.linalg.cholesky(case["R"]),
        "bias": case["bias"],
        "qx1_mu": case["qx1_mu"],
        "qx1_cov_chol": np.linalg.cholesky(case["qx1_cov"]),
        "As": case["As_full"] if is_full else case["As"],
        "bs": case["bs"],
        "S_chols": np.linalg.cholesky(case["Ss_full"]) if is_full else np.sqrt(case["Ss"]),
        "Xmu": case["Xmu"],
        "Xchol": case["Xchol"],
    }
    for d in range(int(case["dim_D"])):
        chosen[f"Z_{d}"] = case["Z"][d]
        chosen[f"kern_variance_{d}"] = case["kern_variance"][d]
        chosen[f"kern_lengthscales_{d}"] = case["kern_lengthscales"][d]
    return {key: jnp.asarray(value) for key, value in chosen.items()}


def build(name: str, method: str, case: dict[str, np.ndarray], values: dict[str, jax.Array]):
    """Model, posterior and window of one configuration; gradients flow to `values`."""
    states = int(case["dim_D"])
    kernels, variances = [], []
    for d in range(states):
        lengthscales, variance = Frozen(values[f"kern_lengthscales_{d}"]), Frozen(values[f"kern_variance_{d}"])
        if "matern32" in name:
            kernels.append(Matern(lengthscales, variance, smoothness=1.5))
        else:
            kernels.append(SquaredExponential(lengthscales, variance))
        variances.append(values[f"kern_variance_{d}"])
    mean = IdentityMean(states) if "identity" in name else ZeroMean(states)
    inputs = jnp.stack([values[f"Z_{d}"] for d in range(states)])
    # the reference adds 1e-6 itself to the diagonal, not a share of it
    transition = SparseGP(kernels, mean, inputs, states, jitter=1e-6 / jnp.stack(variances))
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
    """One compiled program a configuration: terms averaged with the weights of the samples, and the gradient of their sum."""

    @jax.jit
    def evaluate(values: dict[str, jax.Array], noise: Noise, weights: jax.Array) -> tuple[Elbo, dict[str, jax.Array]]:
        def terms(values: dict[str, jax.Array]) -> tuple[jax.Array, Elbo]:
            model, posterior, window = unwrap(build(name, method, case_of(name), values))
            emission, transition, initial = terms_of_samples(model, posterior, window, noise)
            kl = posterior.inducing.kl()
            averaged = Elbo(weights @ emission, weights @ transition, kl, weights @ initial)
            return averaged.total, averaged

        gradient, averaged = jax.grad(terms, has_aux=True)(values)
        return averaged, gradient

    return evaluate


def num_samples(method: str) -> int:
    return 200 if method in ("Cubic", "CPT") else 1000


@cache
def at_stored_noise(name: str, method: str) -> tuple[Elbo, dict[str, jax.Array]]:
    """The six stored samples, and others that weigh nothing, so that the Monte Carlo means need no second program."""
    case = case_of(name)
    stored = stored_noise(case, method)
    room = num_samples(method) - len(stored.inducing)
    noise = Noise(*(jnp.pad(a, ((0, room), (0, 0), (0, 0))) for a in stored[:3]), key=stored.key)
    weights = jnp.where(jnp.arange(num_samples(method)) < len(stored.inducing), 1 / len(stored.inducing), 0.0)
    return evaluated(name, method)(parameters(name, case), noise, weights)


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


@pytest.mark.parametrize(("name", "method"), configurations())
def test_bound_and_terms_at_stored_noise(name: str, method: str):
    ours = in_reference_terms(at_stored_noise(name, method)[0], name, method)
    prefix = f"cfg/{name}/{method}/det/"
    theirs = {key.removeprefix(prefix): value for key, value in numbers().items() if key.startswith(prefix)}
    assert theirs.keys() <= ours.keys()
    for term, value in theirs.items():
        np.testing.assert_allclose(ours[term], value, rtol=1e-8, atol=1e-10, err_msg=f"{name} {method} {term}")


@pytest.mark.parametrize(("name", "method"), configurations())
def test_gradients_at_stored_noise(name: str, method: str):
    gradients = at_stored_noise(name, method)[1]
    prefix = f"cfg/{name}/{method}/grad/"
    theirs = {key.removeprefix(prefix): value for key, value in numbers().items() if key.startswith(prefix)}
    assert theirs
    for parameter, value in theirs.items():
        ours = np.asarray(gradients[parameter])
        is_factor = parameter in ("Ucov_chol", "Rchol", "qx1_cov_chol", "Xchol") or (
            parameter == "S_chols" and name.endswith("_fullAS")
        )
        if is_factor:
            ours, value = np.tril(ours), np.tril(value)
        scale = np.max(np.abs(value))
        np.testing.assert_allclose(ours, value, rtol=1e-6, atol=1e-6 * scale + 1e-10, err_msg=f"{name} {method} {parameter}")


@pytest.mark.parametrize(("name", "method"), configurations())
def test_monte_carlo_means(name: str, method: str):
    case = case_of(name)
    count, num_batches = num_samples(method), 20
    shapes = [array.shape[1:] for array in stored_noise(case, method)[:3]]
    batches = []
    for key in jax.random.split(jax.random.key(7), num_batches):
        keys = jax.random.split(key, 3)
        arrays = [jax.random.normal(k, (count, *shape)) for k, shape in zip(keys, shapes, strict=True)]
        weights = jnp.full(count, 1 / count)
        terms, _ = evaluated(name, method)(parameters(name, case), Noise(*arrays, key=key), weights)
        batches.append({term: float(value) for term, value in in_reference_terms(terms, name, method).items()})
    estimates = {term: np.array([batch[term] for batch in batches]) for term in batches[0]}
    prefix = f"cfg/{name}/{method}/mc/"
    for term, values in estimates.items():
        theirs, their_error = numbers()[f"{prefix}{term}_mean"], numbers()[f"{prefix}{term}_se"]
        our_error = np.std(values) / np.sqrt(len(values))
        z = (np.mean(values) - theirs) / (np.hypot(our_error, their_error) + 1e-9 * (1 + abs(theirs)))
        assert abs(z) < 4, f"{name} {method} {term}: {np.mean(values)} against {theirs}, z = {z:.1f}"


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
    name = "D2_rbf_zero"
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
    estimates = [
        [np.mean(term) for term in eqx.filter_jit(terms_of_samples)(*unwrap((model, posterior)), window, noise)]
        for posterior in (dense, markov)
    ]
    np.testing.assert_allclose(estimates[0][0], estimates[1][0], rtol=1e-9)  # the same noise, the same paths
    np.testing.assert_allclose(estimates[0][1], estimates[1][1], rtol=5e-3)
    np.testing.assert_allclose(estimates[0][2], estimates[1][2], rtol=1e-9)
