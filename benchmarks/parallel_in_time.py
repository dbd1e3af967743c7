"""`python -m benchmarks.parallel_in_time`: all steps of a chain at once, by Newton's method, against one after the other.

Where f is drawn as a function and the noise is stored, a trajectory is the solution of x_{t+1} = g_t(x_t). Newton's method solves
for all t at once: it linearises every step at the states that it has, and runs the linear recurrence that results as an
associative scan. After n iterations the first n states are exact, whatever the rest; what it needs on top of that depends on g
and on where it starts, so both a blind start and the states before an optimiser's step are tried.
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float

from benchmarks.datasets import Case
from gpssm.data import Scaling
from gpssm.draws import pathwise_draw, pathwise_features
from gpssm.params import unwrap
from gpssm.posteriors import FunctionDependentPathwise
from gpssm.posteriors.adjoint import Laws, StepInputs, _known, _moved, _slopes, inputs_of
from gpssm.posteriors.base import draw_noise
from gpssm.posteriors.chain import Noise, chain, through_value

MOST_ITERATIONS = 60
TOLERANCE = 1e-4  # largest error of a state, in units of the standardised data


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    with jax.default_matmul_precision("highest"):
        measure(options)


def measure(options: argparse.Namespace) -> None:
    """Time an iteration, and iterate from either start until the states are those of the chain."""
    case = Case("f-dependent-pathwise", steps=options.steps, samples=options.samples, inducing=options.inducing)
    laws, first, inputs, exact = _trajectories(case, scale=1.0)
    *_, before = _trajectories(case, scale=1.0 + options.change)
    step = jax.jit(jax.vmap(_newton))
    seconds = _median_seconds(lambda: step(laws, first, inputs, exact))
    starts = {"blind": jnp.zeros_like(exact), "before an optimiser's step": before}
    for name, states in starts.items():
        errors = []
        while len(errors) < MOST_ITERATIONS and not (errors and errors[-1] < TOLERANCE):
            states = step(laws, first, inputs, states)
            errors.append(float(jnp.max(jnp.abs(states - exact))))
        row = {"start": name, "seconds_an_iteration": seconds, "iterations": len(errors), "errors": errors}
        print(json.dumps({**row, "steps": case.steps, "device": jax.devices()[0].device_kind}), flush=True)


def _newton(laws: Laws, first: Array, inputs: StepInputs, states: Float[Array, "step state"]) -> Float[Array, "step state"]:
    """One iteration, forwards alone: a gradient would come on top."""
    earlier = jnp.concatenate([first[None], states[:-1]])
    known = _known(laws, earlier, inputs)
    move = lambda *each: _moved(through_value, laws.process_scale, *each)[0]  # noqa: E731
    values = jax.vmap(move)(inputs, earlier, known.moments)
    slopes, _ = _slopes(through_value, laws, known, earlier, inputs)
    offsets = values - jnp.einsum("tij,tj->ti", slopes, earlier)
    offsets = offsets.at[0].add(slopes[0] @ first)
    slopes = slopes.at[0].set(0.0)

    def then(one: tuple, two: tuple) -> tuple:
        product = jnp.sum(two[0][..., :, :, None] * one[0][..., None, :, :], axis=-2)
        return product, two[1] + jnp.sum(two[0] * one[1][..., None, :], axis=-1)

    return jax.lax.associative_scan(then, (slopes, offsets))[1]


def _trajectories(case: Case, scale: float) -> tuple[Laws, Array, StepInputs, Array]:
    """What every sample's steps are made of [sample, ...], and the states that they lead to; q(v)'s mean is scaled."""
    data, model, posterior = case.build(0)
    model, posterior = unwrap((model, posterior))
    assert isinstance(posterior, FunctionDependentPathwise)
    window = jax.tree.map(lambda leaf: leaf[0], data.windows(Scaling.identity(case.outputs, case.controls)))
    noise = draw_noise(posterior, model, case.steps, key=jr.key(0), scheme="plain", num_samples=case.samples)
    basis, steps = model.transition.basis(), posterior.local.steps(model, window)
    features = pathwise_features(noise.key, basis, posterior.num_frequencies)

    def one(*leaves: Array) -> tuple[Laws, Array, StepInputs, Array]:
        own = Noise(*leaves, key=noise.key)
        values = scale * posterior.inducing.mean + 0.1 * own.inducing
        draw = pathwise_draw(basis, model.transition.mean, features, values, own.function.T)
        quiet = own._replace(function=0 * own.states)
        walked = chain(draw, through_value, steps, model, window, quiet).states
        return Laws(draw, model.process_scale), walked[0], inputs_of(steps, window, quiet), walked[1:]

    result: Any = jax.jit(jax.vmap(one))(*noise[:-1])
    return result


def _median_seconds(function: Any, repeats: int = 5) -> float:
    jax.block_until_ready(function())
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(function())
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parallel_in_time", description=__doc__)
    parser.add_argument("--steps", type=int, default=Case().steps)
    parser.add_argument("--samples", type=int, default=Case().samples)
    parser.add_argument("--inducing", type=int, default=Case().inducing)
    parser.add_argument("--change", type=float, default=0.01, help="of the mean of q(v), by the optimiser's step")
    return parser


if __name__ == "__main__":
    main()
