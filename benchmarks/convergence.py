"""How long a fit takes to get somewhere: the bound over time for ways to optimise that start at the same place.

Compilation is timed apart, and so is looking at the bound: it is estimated from many samples with noise that all methods share.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.random as jr
import numpy as np

import gpssm
from benchmarks.methods import fitting
from gpssm import datasets
from gpssm.baselines import LinearStateSpaceBaseline
from gpssm.data import Dataset, Scaling
from gpssm.elbo import elbo
from gpssm.emissions import LinearGaussian
from gpssm.evaluate import rolling_origin
from gpssm.filter import FittedForecaster
from gpssm.fit import FitSettings, _run_steps, _with_constrained_inducing
from gpssm.initialise import initialise
from gpssm.kernels import Matern
from gpssm.means import ZeroMean
from gpssm.posteriors import VCDT, FilteringSteps, free_steps_from
from gpssm.result import FitResult, History, Status
from gpssm.simulators import kink

NUM_SAMPLES = 1000  # that the bound is estimated from
NATS_SHORT = 0.01  # an observation, of the best bound in the run: this near counts as there
SYSID = ("actuator", "ballbeam", "drive", "dryer", "gas_furnace")

PLAIN = FitSettings(num_steps=20_000, num_samples=100, scheme="plain", tolerance=None, warmup_steps=1, final_fraction=1.0)
SHORT = FitSettings(num_steps=800, tolerance=None)  # the default, but that it never stops early
LONG = replace(SHORT, num_steps=4000)
METHODS: dict[str, FitSettings] = {
    "adam-100": PLAIN,  # what one would write first, at a constant rate
    "adam-100-plain-chain": replace(PLAIN, chain="plain"),
    "default": SHORT,
    "long": LONG,
    "quasi": replace(SHORT, scheme="quasi"),
    "quasi-long": replace(LONG, scheme="quasi"),
    "4-samples": replace(SHORT, num_samples=4),
    "deep": replace(SHORT, final_fraction=0.01),
    "fast": replace(SHORT, learning_rate=0.02, final_fraction=0.02),
    "natural": replace(SHORT, natural_gradient=0.05),
    "natural-long": replace(LONG, natural_gradient=0.05),
    "natural-quasi": replace(SHORT, natural_gradient=0.05, scheme="quasi"),
    "natural-bold-long": replace(LONG, num_samples=32, learning_rate=0.03, natural_gradient=0.2),
}


class Problem(NamedTuple):
    """Data, and where every method starts."""

    data: Dataset
    scaling: Scaling
    model: Any
    posterior: Any


def problem(name: str, seed: int) -> Problem:
    """`kink-N`, the paper's demo with N steps, or the training half of a system-identification benchmark."""
    if name.startswith("kink-"):
        return _kink(int(name.removeprefix("kink-")), seed)
    data, _ = datasets.load(name).split(0.5)
    scaling = Scaling.of(data)
    start = initialise(data, key=jr.key(seed), scaling=scaling)
    return Problem(data, scaling, start.model, start.posterior)


def _kink(num_steps: int, seed: int) -> Problem:
    """As in examples/small_demo.py: known emission, zero mean, Matern 3/2, inducing inputs at (at most 20) outputs."""
    data = kink(num_steps=num_steps, process_scale=0.05, observation_variance=0.04, initial_state=0.5, seed=seed).dataset
    scaling = Scaling.identity(1, 0)
    inducing = np.quantile(data.outputs[0], np.linspace(0, 1, 20), axis=0) if num_steps > 20 else data.outputs[0]
    transition = gpssm.SparseGP(Matern([1.0], 1.0, smoothness=1.5), ZeroMean(1), inducing, num_states=1)
    emission = gpssm.freeze(LinearGaussian([[1.0]], [0.0], [0.2]))
    model = gpssm.GPSSM(transition, emission, process_scale=[0.5], initial_mean=[0.5])
    steps = free_steps_from(FilteringSteps(), model, data.windows(scaling))
    return Problem(data, scaling, model, VCDT(gpssm.InducingPosterior.prior(1, len(inducing)), steps))


def convergence(names: list[str], methods: list[str], seeds: int, seconds: float) -> Iterator[dict[str, Any]]:
    """A row a method, problem and seed, with the bound over time and the time to within a little of the best."""
    for name in names:
        for seed in range(seeds):
            given = problem(name, seed)
            rows = [{"problem": name, "seed": seed, "method": m, **_run(given, METHODS[m], seconds, seed)} for m in methods]
            best = max(row["final_bound"] for row in rows)
            target = best - max(0.5, NATS_SHORT * int(np.sum([np.isfinite(y).sum() for y in given.data.outputs])))
            for row in rows:
                del row["fitted"]
                yield {**row, "target": target, **_reached(row["history"], target)}


def accuracy(names: list[str], methods: list[str], seconds: float) -> Iterator[dict[str, Any]]:
    """A row a method or rival: seconds of fitting, and how good 30-step forecasts of the other half are then."""
    from benchmarks.rivals import GRU

    for name in names:
        given, whole = problem(name, 0), datasets.load(name)
        began, fitted, spent = time.perf_counter(), {}, {}
        fitted["linear"] = LinearStateSpaceBaseline.fit(given.data)
        spent["linear"] = time.perf_counter() - began
        fitted["gru"], spent["gru"] = GRU.fit(given.data, seed=0, seconds=seconds), seconds
        for method in methods:
            end = _run(given, METHODS[method], seconds, 0)
            model, posterior = end.pop("fitted")
            status, chain = Status.MAX_STEPS, end["chain"]
            history = History.empty(model.num_states)
            result = FitResult(model, posterior, given.scaling, given.data, history, status, {}, 0, chain)
            fitted[method], spent[method] = FittedForecaster(result), end["seconds"]
        start = given.data.max_length
        scores = rolling_origin(fitted, whole, horizon=30, stride=5, start=start, scaling=given.scaling, key=jr.key(1)).scores()
        for method, score in scores.items():
            yield {"problem": name, "method": method, "seconds": spent[method], "nlpd": score.nlpd, "rmse": score.rmse}


def _run(given: Problem, settings: FitSettings, seconds: float, seed: int) -> dict[str, Any]:
    """Blocks of steps until there are no more, or no more time."""
    began = time.perf_counter()
    blocks, state, chain = fitting(given.data, given.scaling, given.model, given.posterior, settings, jr.key(seed))
    jax.block_until_ready(_run_steps(blocks, state, settings.block_steps))  # compiles; what it did is dropped
    compile_seconds, spent, history = time.perf_counter() - began, 0.0, []
    look = _bound(given, blocks.static)
    history.append((0, 0.0, look(state.good)))
    while int(state.step) < settings.num_steps and spent < seconds:
        began = time.perf_counter()
        state, _ = jax.block_until_ready(_run_steps(blocks, state, settings.block_steps))
        spent += time.perf_counter() - began
        history.append((int(state.step), spent, look(state.good)))
    return {
        "settings": {k: v for k, v in asdict(settings).items() if v != getattr(FitSettings(), k)},
        "chain": chain,
        "compile_seconds": compile_seconds,
        "seconds": spent,
        "steps": int(state.step),
        "final_bound": history[-1][2],
        "history": history,
        "fitted": _fitted(eqx.combine(state.good, blocks.static)),
    }


def _fitted(pair: tuple[Any, Any]) -> tuple[Any, Any]:
    return pair[0], _with_constrained_inducing(pair[1])


def _bound(given: Problem, static: Any) -> Callable[[Any], float]:
    windows = given.data.windows(given.scaling)

    @jax.jit
    def look(params: Any) -> jax.Array:
        return elbo(*eqx.combine(params, static), windows, key=jr.key(10), num_samples=NUM_SAMPLES, scheme="antithetic").total

    return lambda params: float(look(params))


def _reached(history: list[tuple[int, float, float]], target: float) -> dict[str, Any]:
    """The first look at which the bound was there."""
    there = next(((step, spent) for step, spent, bound in history if bound >= target), (None, None))
    return {"steps_to_target": there[0], "seconds_to_target": there[1]}
