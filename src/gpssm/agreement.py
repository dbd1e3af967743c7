"""What data, model and posterior must agree on before any work, or the error that names the part that does not.

Shapes are read off abstractly: nothing is computed here but a look at the outputs of a count model.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gpssm.data import Dataset, Scaling
from gpssm.emissions import AbstractEmission, Poisson
from gpssm.gp import SparseGP
from gpssm.model import GPSSM
from gpssm.params import trainable, unwrap
from gpssm.posteriors import (
    PRSSM,
    AbstractLocal,
    AbstractPosterior,
    FactorisedDense,
    FreeSteps,
    PriorSteps,
    PRSSMCorrected,
)

REFUSALS = (TypeError, ValueError, IndexError)  # what JAX raises where shapes do not fit


def check_is_dataset(data: Any) -> None:
    """Raise for arrays and tables that are no Dataset yet."""
    if not isinstance(data, Dataset):
        raise ValueError(
            f"Expected a gpssm.Dataset, but got {type(data).__name__}: make one by Dataset.from_arrays, Dataset.from_dataframe "
            "or gpssm.read_csv."
        )


def check_something_moves(model: GPSSM, posterior: AbstractPosterior) -> None:
    """Raise where every parameter is frozen."""
    if not any(jax.tree.leaves(trainable((model, posterior)))):
        raise ValueError("Every parameter of model and posterior is frozen, so there is nothing to fit: free some of them.")


def check_fits_together(data: Dataset, scaling: Scaling, model: GPSSM, posterior: AbstractPosterior) -> None:
    """Raise where the shapes of data, model and posterior contradict each other, or the outputs the emission."""
    if data.num_controls != model.num_controls:
        raise ValueError(
            f"The data have {data.num_controls} controls, but the model's inducing inputs leave room for {model.num_controls}: "
            f"they have {model.transition.num_inputs} columns, of which {model.num_states} are states. Give every inducing "
            "input one number a state and one a control."
        )
    plain_model, plain_posterior = unwrap((model, posterior))
    check_model(plain_model, data.num_outputs)
    _check_posterior(plain_model, plain_posterior, data, scaling)
    _check_outputs(plain_model.emission, data, scaling)


def check_model(model: GPSSM, num_outputs: int) -> None:
    """Raise where the parts of an unwrapped model do not fit each other, or `num_outputs`."""
    inputs = f"{model.num_states} states and {model.num_controls} controls"
    check_process(model.transition, f"inputs of {model.transition.num_inputs} numbers ({inputs})")
    for part in jax.tree.leaves(model.emission, is_leaf=_is_process):
        if _is_process(part):
            check_process(part, f"states of {part.num_inputs} numbers")
    emission, states = model.emission, f"states of {model.num_states} numbers"
    state, output = jnp.zeros(model.num_states), jnp.zeros(num_outputs)
    name = type(emission).__name__
    shape = _shape(lambda: emission.mean(state), f"The emission {name} cannot take {states}")
    if shape != (num_outputs,):
        raise ValueError(f"The data have {num_outputs} outputs, but the emission {name} gives a mean of the shape {shape}.")
    shape = _shape(
        lambda: emission.log_density(state, output, jnp.ones(num_outputs, bool)),
        f"The density of the emission {name} cannot take {states} and {num_outputs} outputs",
    )
    if shape != ():
        raise ValueError(f"The emission {name} must give one log density an output vector, but gives the shape {shape}.")


def check_process(gp: SparseGP, inputs: str) -> None:
    """Raise where a kernel or the mean of an unwrapped GP does not take its inputs, described by `inputs`."""
    point = jnp.zeros(gp.num_inputs)
    for kernel in gp.kernels:
        name = type(kernel).__name__
        advice = "Give one lengthscale for all of them, or one for each."
        shape = _shape(lambda: kernel(point, point), f"The kernel {name} cannot take {inputs}", advice)  # noqa: B023
        if shape != ():
            raise ValueError(
                f"The kernel {name} must give one number for two {inputs}, but gives the shape {shape}: expected a single "
                "variance, and one lengthscale for all or one for each."
            )
    name = type(gp.mean).__name__
    shape = _shape(lambda: gp.mean(point), f"The mean {name} cannot take {inputs}")
    if shape != (gp.num_states,):
        raise ValueError(f"The mean {name} must give {gp.num_states} numbers, one for each GP, but gives the shape {shape}.")


def _check_posterior(model: GPSSM, posterior: AbstractPosterior, data: Dataset, scaling: Scaling) -> None:
    states, inducing = model.num_states, model.transition.num_inducing
    for name, got, expected in (
        ("a mean", posterior.inducing.mean.shape, (states, inducing)),
        ("a Cholesky factor", posterior.inducing.chol.shape, (states, inducing, inducing)),
    ):
        if got != expected:
            raise ValueError(
                f"q(u) must have {name} of the shape {expected}, for {states} states and {inducing} inducing inputs, but has "
                f"{got}."
            )
    local = getattr(posterior, "local", None)
    if isinstance(posterior, PRSSM | PRSSMCorrected) and not isinstance(local, PriorSteps):
        raise ValueError(
            f"{type(posterior).__name__} moves as the prior does: expected PriorSteps, got {type(local).__name__}. For other "
            "steps take FactorisedNonlinear or VCDT."
        )
    if isinstance(posterior, FactorisedDense):
        size = data.max_length * states
        _check_shape("the mean of FactorisedDense", posterior.mean, (data.num_sequences, data.max_length, states))
        _check_shape("the factor of FactorisedDense", posterior.chol, (data.num_sequences, size, size))
    if isinstance(local, AbstractLocal):
        _check_steps(model, local, data, scaling)


def _check_steps(model: GPSSM, local: AbstractLocal, data: Dataset, scaling: Scaling) -> None:
    states, name = model.num_states, type(local).__name__
    if isinstance(local, FreeSteps):
        rows, steps = local.offset.shape[:2]
        if rows != data.num_sequences or steps < data.max_length - 1:
            raise ValueError(
                f"FreeSteps must hold a row for each of {data.num_sequences} sequences and {data.max_length - 1} steps, "
                f"but holds {rows} and {steps}."
            )
    if isinstance(local, FreeSteps | PriorSteps):
        _check_shape(f"the initial mean of {name}", local.initial_mean, (data.num_sequences, states))
        _check_shape(f"the initial factor of {name}", local.initial_chol, (data.num_sequences, states, states))
    window = jax.tree.map(lambda leaf: leaf[0], data[0].windows(scaling))

    def one_step() -> tuple:
        steps = local.steps(model, window)
        step = steps.resolve(jax.tree.map(lambda leaf: leaf[0], steps.scanned))
        return steps.initial_mean, step.offset, step.gain @ steps.initial_mean if step.gain.ndim == 2 else step.gain

    try:
        shapes = [part.shape for part in jax.eval_shape(one_step)]
    except TypeError as error:
        raise ValueError(f"{name} {_made_for(model, data)}, but it does not fit: {_first_line(error)}.") from error
    if shapes != [(states,)] * 3:
        raise ValueError(f"{name} {_made_for(model, data)}, but q(x_1), b_t and A_t have the shapes {shapes}.")


def _made_for(model: GPSSM, data: Dataset) -> str:
    return f"must be made for {model.num_states} states, {data.num_outputs} outputs and {data.num_controls} controls"


def _check_outputs(emission: AbstractEmission, data: Dataset, scaling: Scaling) -> None:
    """Counts must reach a Poisson emission as they are."""
    if not isinstance(emission, Poisson):
        return
    for name, values in zip(data.sequence_names, data.outputs, strict=True):
        seen = scaling.outputs(values)
        bad = ~np.isnan(seen) & ((seen < 0) | (seen != np.rint(seen)))
        if bad.any():
            row, column = np.argwhere(bad)[0]
            raise ValueError(
                f"A Poisson emission counts: expected whole numbers from 0, but sequence '{name}' has {seen[row, column]:.6g} in "
                f"row {row} of '{data.output_names[column]}' in the units of the fit. Leave counts unscaled: "
                f"fit(..., scaling=Scaling.identity({data.num_outputs}, {data.num_controls})), or take another emission."
            )


def _check_shape(what: str, array: Any, expected: tuple[int, ...]) -> None:
    if array.shape != expected:
        raise ValueError(f"Expected {what} to have the shape {expected}, but it has {array.shape}.")


def _shape(function: Callable[[], Any], complaint: str, advice: str = "") -> tuple[int, ...]:
    """The shape of what `function` would give; JAX's own words follow the complaint where it cannot."""
    try:
        return jax.eval_shape(function).shape
    except REFUSALS as error:
        raise ValueError(f"{complaint}: {_first_line(error)}. {advice}".rstrip()) from error


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__


def _is_process(part: Any) -> bool:
    return isinstance(part, SparseGP)
