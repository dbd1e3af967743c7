"""What a fit believes, in ArviZ's words: which group holds which samples, and the names of their axes.

ArviZ is not needed for anything else, so it is looked for only when it is asked for: `pip install 'gpssm[arviz]'`. Its releases
before 1.0 hold an `InferenceData`, later ones an xarray `DataTree`; the groups, variables and axes are the same in both.
"""

import importlib.metadata
import warnings
from typing import Any

import jax
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float

from gpssm._precision import jit
from gpssm._types import PRNGKey
from gpssm.data import Window
from gpssm.emissions import LinearGaussian, realise
from gpssm.forecasts import Forecast
from gpssm.linalg import covariance, diagonal
from gpssm.model import GPSSM
from gpssm.params import unwrap
from gpssm.posteriors.base import AbstractPosterior, draw_noise
from gpssm.posteriors.chain import Noise, chain
from gpssm.result import FitResult

SAMPLE = ("chain", "draw")  # one chain: variational samples are independent of each other


def to_inference_data(
    result: FitResult,
    *,
    key: PRNGKey,
    num_samples: int = 500,
    sequence: int = 0,
    forecast: Forecast | None = None,
) -> Any:
    """Samples of one training sequence's posterior for ArviZ: an `InferenceData`, from ArviZ 1.0 on a `DataTree`.

    `posterior` holds the states [time, state] and the values of f at the inducing inputs [inducing, state], drawn together;
    `posterior_predictive` replicates of the outputs, `observed_data` the outputs (NaN where missing), `constant_data` the
    controls, the inducing inputs and the noise levels, which a fit estimates as points. With `forecast`, its draws are the
    group `predictions`. States and f are in the model's units, outputs, controls and noise levels in the user's.
    """
    _check_installed()
    if num_samples < 1:
        raise ValueError(f"`num_samples` must be at least 1, but got {num_samples}.")
    if not 0 <= sequence < result.data.num_sequences:
        raise ValueError(f"There are {result.data.num_sequences} training sequences, from 0; got sequence={sequence}.")
    return _container(groups_of(result, key=key, num_samples=num_samples, sequence=sequence, forecast=forecast))


def groups_of(
    result: FitResult, *, key: PRNGKey, num_samples: int, sequence: int, forecast: Forecast | None = None
) -> dict[str, Any]:
    """An xarray `Dataset` for each group, by its name."""
    data, scaling = result.data, result.scaling
    length = data.lengths[sequence]
    window = jax.tree.map(lambda leaf: leaf[sequence, :length] if leaf.ndim > 1 else leaf[sequence], data.windows(scaling))
    states, values, outputs = _draws(result.model, result.posterior, window, num_samples, key)
    controls = {"controls": (("time", "control"), data.controls[sequence])} if data.num_controls else {}
    groups = {
        "posterior": {
            "states": ((*SAMPLE, "time", "state"), np.asarray(states)[None]),
            "f": ((*SAMPLE, "inducing", "state"), np.asarray(values)[None]),
        },
        "posterior_predictive": {
            "outputs": ((*SAMPLE, "time", "output"), np.asarray(scaling.outputs_back(np.asarray(outputs)))[None])
        },
        "observed_data": {"outputs": (("time", "output"), data.outputs[sequence])},
        "constant_data": {**controls, **_point_estimates(result)},
    }
    if forecast is not None:
        groups["predictions"] = {"outputs": ((*SAMPLE, "step", "output"), forecast.samples[None])}
    coordinates = _coordinates(result, length, num_samples) | ({} if forecast is None else {"step": forecast.steps})
    return {name: _dataset(variables, coordinates, name) for name, variables in groups.items()}


def _check_installed() -> None:
    try:
        importlib.metadata.version("arviz")
    except importlib.metadata.PackageNotFoundError:
        raise ImportError("to_inference_data needs ArviZ, which is not installed here: pip install 'gpssm[arviz]'") from None


def _container(groups: dict[str, Any]) -> Any:
    if int(importlib.metadata.version("arviz").split(".")[0]) >= 1:
        import xarray

        return xarray.DataTree.from_dict(groups)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # ArviZ 0.23 announces 1.0 whenever it is imported
        import arviz
    return arviz.InferenceData(**groups)


def _dataset(variables: dict[str, tuple], coordinates: dict[str, Any], group: str) -> Any:
    import xarray

    used = {axis for axes, _ in variables.values() for axis in axes}
    sizes = {axis: size for axes, values in variables.values() for axis, size in zip(axes, np.shape(values), strict=True)}
    of_group = {"draw": np.arange(sizes.get("draw", 0)), **{k: v for k, v in coordinates.items() if k != "draw"}}
    chosen = {axis: values for axis, values in of_group.items() if axis in used}
    attributes = {"inference_library": "gpssm", "inference_library_version": importlib.metadata.version("gpssm")}
    return xarray.Dataset(variables, chosen, attributes | {"group": group})


def _coordinates(result: FitResult, length: int, num_samples: int) -> dict[str, Any]:
    data = result.data
    states = [f"x{i + 1}" for i in range(result.model.num_states)]
    return {
        "chain": [0],
        "draw": np.arange(num_samples),
        "time": np.arange(length) * (1 if data.sampling_time is None else data.sampling_time),
        "state": states,
        "inducing": np.arange(result.model.transition.num_inducing),
        "input": [*states, *data.control_names],
        "output": list(data.output_names),
        "control": list(data.control_names),
    }


def _point_estimates(result: FitResult) -> dict[str, tuple]:
    """What a fit maximises over: the noise levels and where the inducing inputs lie."""
    model = unwrap(result.model)
    inputs = np.asarray(model.transition.inducing_inputs)
    inputs = inputs[0] if inputs.ndim == 3 and len(inputs) == 1 else inputs
    found: dict[str, tuple] = {
        "process_scale": (("state",), np.asarray(model.process_scale)),
        "inducing_inputs": (("state", "inducing", "input")[-inputs.ndim :], inputs),
    }
    if isinstance(model.emission, LinearGaussian):
        scale = np.sqrt(np.asarray(diagonal(covariance(model.emission.chol_noise))))
        found["observation_scale"] = (("output",), np.asarray(result.scaling.scale_back(scale)))
    return found


@jit
def _draws(
    model: GPSSM, posterior: AbstractPosterior, window: Window, num_samples: int, key: PRNGKey
) -> tuple[Float[Array, "sample time state"], Float[Array, "sample inducing state"], Float[Array, "sample time output"]]:
    """Trajectories, each with the values that its own f takes at the inducing inputs, and replicates of the outputs."""
    model, posterior = unwrap((model, posterior))
    key_noise, key_samples, key_emission = jr.split(key, 3)
    noise = draw_noise(posterior, model, len(window.outputs), key=key_noise, scheme="plain", num_samples=num_samples)
    emission = realise(model.emission, key_emission)

    def one_sample(key: PRNGKey, *arrays: Array) -> tuple[Array, Array, Array]:
        key_function, key_values, key_outputs = jr.split(key, 3)
        rollout = posterior.rollout(model, window, Noise(*arrays, key=noise.key), chain)
        values = _at_inducing_inputs(model, posterior, rollout, key_function, key_values)
        return rollout.states, values, jax.vmap(emission.sample)(jr.split(key_outputs, len(rollout.states)), rollout.states)

    return jax.vmap(one_sample)(jr.split(key_samples, num_samples), noise.inducing, noise.states, noise.function)


def _at_inducing_inputs(
    model: GPSSM, posterior: AbstractPosterior, rollout: Any, key_function: PRNGKey, key_values: PRNGKey
) -> Float[Array, "inducing state"]:
    """The f that a trajectory has followed, asked at the inducing inputs of every group in turn."""
    inputs = model.transition.basis().inducing_inputs
    groups, count, size = inputs.shape
    draw, memory = posterior.onward(model, rollout, groups * count, None, key=key_function)

    def ask(memory: Any, asked: tuple[Array, Array]) -> tuple[Any, Array]:
        moments, memory = draw.ask(memory, *asked)
        return memory, moments.value

    noise = jr.normal(key_values, (groups * count, model.num_states), inputs.dtype)
    _, values = jax.lax.scan(ask, memory, (inputs.reshape(-1, size), noise))
    values = values.reshape(groups, count, model.num_states)
    if groups == 1:
        return values[0]
    return jax.vmap(lambda which: values[which, :, which], out_axes=1)(np.arange(groups))
