"""What does not fit together is refused before any work, with what was expected, what came and what to do."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
from cases import Case
from gpssm import FitSettings, Scaling, fit, freeze
from gpssm.agreement import check_fits_together, check_is_dataset
from gpssm.data import Dataset
from gpssm.elbo import elbo, pieces
from gpssm.emissions import LinearGaussian, NonlinearGaussian, Poisson, StochasticVolatility, StudentT
from gpssm.gp import InducingPosterior, SparseGP
from gpssm.kernels import ActiveDimensions, LinearKernel, SquaredExponential
from gpssm.means import FunctionMean, IdentityMean, LinearMean, ZeroMean
from gpssm.model import GPSSM, simulate
from gpssm.noise import check_scheme
from gpssm.params import LowerTriangular, Positive
from gpssm.posteriors import (
    PRSSM,
    VCDT,
    AmortisedSteps,
    FactorisedDense,
    FilteringSteps,
    FreeSteps,
    FunctionDependentPathwise,
    PriorSteps,
)

KEY, AS_IT_IS = jax.random.key(0), Scaling.identity(cases.NUM_OUTPUTS, cases.NUM_CONTROLS)
MODEL, POSTERIOR, WINDOWS = Case("vcdt", "free").build()
Q, DATA = cases.inducing(), cases.dataset()
TABLE = jnp.zeros((2, cases.NUM_STEPS - 1, 2))


def with_transition(kernel=None, mean=None) -> GPSSM:
    kernel, mean = kernel or SquaredExponential(cases.ARD), mean or IdentityMean(2)
    return eqx.tree_at(lambda m: m.transition, MODEL, SparseGP(kernel, mean, cases.normals(4, 3, seed=15), 2))


def with_emission(emission) -> GPSSM:
    return eqx.tree_at(lambda m: m.emission, MODEL, emission)


@pytest.mark.parametrize("case", cases.QUICK, ids=str)
def test_every_case_of_the_table_fits_together(case: Case):
    model, posterior, _ = case.build()
    check_fits_together(cases.dataset(case.emission), AS_IT_IS, model, posterior)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (with_transition(SquaredExponential(jnp.ones(2))), "kernel SquaredExponential cannot take inputs of 3 numbers"),
        (with_transition(LinearKernel(jnp.ones(2))), "kernel LinearKernel cannot take"),
        (with_transition(SquaredExponential(1.0) + SquaredExponential(jnp.ones(2))), "kernel SumKernel cannot take"),
        (with_transition(ActiveDimensions(SquaredExponential(1.0), (3,))), r"active dimensions \(3,\) must lie below"),
        (with_transition(mean=ZeroMean(1)), "mean ZeroMean must give 2 numbers"),
        (with_transition(mean=LinearMean(jnp.eye(2), jnp.zeros(2))), "mean LinearMean cannot take inputs of 3 numbers"),
        (with_transition(mean=FunctionMean(lambda point: point)), "mean FunctionMean must give 2 numbers"),
        (with_emission(LinearGaussian(jnp.eye(2, 3), jnp.zeros(2), jnp.ones(2))), "LinearGaussian cannot take states of 2"),
        (with_emission(LinearGaussian(jnp.eye(3, 2), jnp.zeros(3), jnp.ones(3))), r"2 outputs, but the emission .* shape \(3,\)"),
        (with_emission(NonlinearGaussian(lambda state: state, jnp.ones(3))), "density of the emission NonlinearGaussian"),
    ],
)
def test_parts_of_a_model_that_do_not_fit_are_named(model: GPSSM, message: str):
    with pytest.raises(ValueError, match=message):
        check_fits_together(DATA, AS_IT_IS, model, POSTERIOR)


@pytest.mark.parametrize(
    ("posterior", "message"),
    [
        (VCDT(InducingPosterior.prior(2, 3), POSTERIOR.local), r"q\(u\) must have a mean of the shape \(2, 4\)"),
        (VCDT(InducingPosterior(Q.mean, cases.chols(2, 3)), POSTERIOR.local), r"q\(u\) must have a Cholesky factor"),
        (
            eqx.tree_at(lambda p: p.local, PRSSM(Q, PriorSteps(*cases._first)), POSTERIOR.local),
            "expected PriorSteps, got FreeSteps",
        ),
        (VCDT(Q, PriorSteps(jnp.zeros((1, 2)), jnp.eye(2)[None])), r"initial mean of PriorSteps to have the shape \(2, 2\)"),
        (VCDT(Q, FreeSteps(jnp.zeros((2, 1)), jnp.ones((2, 1, 1)), TABLE, TABLE, TABLE)), "initial mean of FreeSteps"),
        (VCDT(Q, FreeSteps(*cases._first, *[jnp.zeros((2, 3, 2))] * 3)), "5 steps, but holds 2 and 3"),
        (VCDT(Q, FreeSteps(*cases._first, *[jnp.zeros((2, 5, 3))] * 3)), "must be made for 2 states"),
        (VCDT(Q, AmortisedSteps(2, 3, 1, 4, key=KEY)), "AmortisedSteps must be made for 2 states, 2 outputs and 1 controls"),
        (VCDT(Q, AmortisedSteps(3, 2, 1, 4, key=KEY)), "AmortisedSteps must be made for 2 states"),
        (FactorisedDense(Q, jnp.zeros((2, 5, 2)), cases.chols(2, 10)), "mean of FactorisedDense"),
    ],
)
def test_parts_of_a_posterior_that_do_not_fit_are_named(posterior, message: str):
    with pytest.raises(ValueError, match=message):
        check_fits_together(DATA, AS_IT_IS, MODEL, posterior)


def test_filtering_steps_say_which_emissions_they_serve():
    model = with_emission(StudentT(jnp.eye(2), jnp.zeros(2), jnp.ones(2)))
    with pytest.raises(ValueError, match=r"^FilteringSteps needs a LinearGaussian emission"):
        check_fits_together(DATA, AS_IT_IS, model, VCDT(Q, FilteringSteps()))


@pytest.mark.parametrize(("outputs", "message"), [(-1.0, "has -1 in row 2 of 'y2'"), (0.5, "has 0.5 in row 2 of 'y2'")])
def test_counts_must_be_counts(outputs: float, message: str):
    model, counts = with_emission(Poisson(jnp.eye(2), jnp.zeros(2))), np.ones((6, 2))
    counts[2, 1] = outputs
    with pytest.raises(ValueError, match=message):
        check_fits_together(
            Dataset.from_arrays([counts, counts[:4]], [np.ones((6, 1)), np.ones((4, 1))]), AS_IT_IS, model, POSTERIOR
        )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GPSSM(MODEL.transition, MODEL.emission, jnp.ones(3)), "process noise"),
        (lambda: GPSSM(MODEL.transition, MODEL.emission, jnp.ones(2), jnp.zeros(1)), "mean of x_1"),
        (lambda: GPSSM(MODEL.transition, MODEL.emission, jnp.ones(2), jnp.zeros(2), jnp.eye(1)), "covariance of x_1"),
        (lambda: GPSSM(MODEL.transition, MODEL.emission, jnp.array([0.1, -0.1])), "above 0, but got -0.1"),
        (lambda: LinearMean(jnp.eye(2), jnp.zeros(1)), r"shapes \(2, 2\) and \(1,\)"),
        (lambda: LinearGaussian(jnp.eye(2), jnp.zeros(1), jnp.ones(2)), "its offset has a number for each output"),
        (lambda: LinearGaussian(jnp.eye(2), jnp.zeros(2), jnp.ones(1)), "its chol_noise has"),
        (lambda: LinearGaussian(jnp.eye(2), jnp.zeros(2), -jnp.eye(2)), "above 0, but got -1"),
        (lambda: StudentT(jnp.eye(2), jnp.zeros(2), jnp.ones((2, 2))), "its scale has"),
        (lambda: StochasticVolatility(jnp.eye(2), jnp.zeros(1), jnp.zeros(2)), "its log_variance has"),
        (lambda: ActiveDimensions(SquaredExponential(1.0), (0, 0)), "different whole numbers"),
        (lambda: ActiveDimensions(SquaredExponential(1.0), (-1,)), "different whole numbers"),
        (lambda: SquaredExponential([1.0, float("nan")]), "above 0, but got nan"),
        (lambda: Positive([-2.0]), "above 0, but got -2"),
        (lambda: LowerTriangular(jnp.ones(3)), "square matrix"),
        (lambda: FreeSteps(*cases._first, TABLE[:, :, :1], TABLE, TABLE), "Free steps with is_full=False need"),
        (lambda: FreeSteps(*cases._first, cases._full_gain, TABLE, TABLE), "Matrices need is_full=True"),
        (lambda: FreeSteps(*cases._first, TABLE, TABLE, cases._full_scale, is_full=True), "Free steps with is_full=True need"),
        (lambda: FunctionDependentPathwise(Q, POSTERIOR.local, 0), "num_frequencies"),
        (lambda: elbo(MODEL, POSTERIOR, WINDOWS, key=KEY, num_samples=0), "at least one sample"),
        (lambda: check_scheme("sobol"), "plain, antithetic, quasi"),
        (
            lambda: elbo(MODEL, POSTERIOR, jax.tree.map(lambda a: a[0], WINDOWS), key=KEY, num_samples=1),
            r"\[sequence, time, output",
        ),
        (lambda: pieces(WINDOWS, 0), "at least one step"),
        (lambda: simulate(MODEL, 0, key=KEY, controls=jnp.zeros((3, 1))), "at least one step"),
        (lambda: simulate(MODEL, 3, key=KEY, controls=jnp.zeros((3, 1)), initial_state=jnp.zeros(3)), "initial state"),
        (lambda: check_is_dataset(DATA.outputs[0]), "Expected a gpssm.Dataset, but got ndarray"),
        (lambda: fit(DATA, freeze(MODEL), freeze(POSTERIOR), key=KEY, scaling=AS_IT_IS), "nothing to fit"),
        (
            lambda: fit(DATA, MODEL, freeze(POSTERIOR), key=KEY, settings=FitSettings(natural_gradient=0.1)),
            r"moves q\(u\), but q\(u\) is frozen",
        ),
        (lambda: fit(DATA, MODEL, POSTERIOR, key=KEY, settings=FitSettings(batch_size=3)), "there are 2 sequences"),
    ],
)
def test_what_cannot_be_made_is_refused(make, message: str):
    with pytest.raises(ValueError, match=message):
        make()


def test_constraints_are_not_asked_for_numbers_inside_a_compiled_program():
    assert jax.jit(lambda value: Positive(value).value())(jnp.asarray(0.5)) == pytest.approx(0.5)
