"""The paper's small demo: twenty noisy steps of the kink, and the bound that each posterior reaches.

Run `python examples/small_demo.py`. Emission known, zero mean, Matern 3/2, inducing inputs at the observations. The authors' code
reached -26.5 (VCDT), -27.2 (factorised-linear) and -231.6 (PR-SSM) on its own draw of the data, after up to 30,000 steps.
"""

import argparse
import time

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

import gpssm
from gpssm.emissions import LinearGaussian
from gpssm.kernels import Matern
from gpssm.means import ZeroMean
from gpssm.posteriors import (
    PRSSM,
    VCDT,
    FactorisedLinear,
    FilteringSteps,
    FreeSteps,
    FunctionDependentPathwise,
    PriorSteps,
    free_steps_from,
)
from gpssm.simulators import kink


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1500)
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    print(f"{'seed':>4} {'method':22} {'bound':>9} {'s.e.':>6} {'process sd':>10} {'seconds':>8}")
    for seed in range(options.seeds):
        compare(seed, options.steps)


def compare(seed: int, num_steps: int) -> None:
    """Fit the four methods to one draw of the data and print the bound of each, from 20,000 samples."""
    data = kink(num_steps=20, process_scale=0.05, observation_variance=0.04, initial_state=0.5, seed=seed).dataset
    scaling = gpssm.Scaling.identity(1, 0)
    windows = data.windows(scaling)
    transition = gpssm.SparseGP(Matern([1.0], 1.0, smoothness=1.5), ZeroMean(1), data.outputs[0], num_states=1)
    emission = gpssm.freeze(LinearGaussian([[1.0]], [0.0], [0.2]))
    start = gpssm.GPSSM(transition, emission, process_scale=[0.5], initial_mean=[0.5])
    q, steps = gpssm.InducingPosterior.prior(1, 20), free_steps_from(FilteringSteps(), start, windows)
    from_outputs = FreeSteps(
        steps.initial_mean, steps.initial_chol, 0 * steps.gain, windows.outputs[:, 1:], gpssm.unwrap(steps.chol)
    )
    settings = gpssm.FitSettings(num_steps=num_steps, num_samples=32, learning_rate=0.02, tolerance=None)

    def run(name: str, model: gpssm.GPSSM, posterior) -> gpssm.FitResult:
        began = time.perf_counter()
        result = gpssm.fit(data, model, posterior, key=jr.key(1), scaling=scaling, settings=settings)
        seconds = time.perf_counter() - began
        bounds = [
            gpssm.elbo(result.model, result.posterior, windows, key=key, num_samples=1000).total
            for key in jr.split(jr.key(2), 20)
        ]
        error = np.std(bounds) / np.sqrt(len(bounds))
        noise = result.history.process_scale[-1, 0]
        print(f"{seed:4} {name:22} {np.mean(bounds):9.2f} {error:6.2f} {noise:10.4f} {seconds:8.1f}", flush=True)
        return result

    run("factorised-linear", start, FactorisedLinear(q, from_outputs))
    coupled = run("vcdt", start, VCDT(q, steps))
    # q(X | f) contains what q(X | u) can say once u determines f: continue from there with the values of f themselves
    run("f-dependent-pathwise", coupled.model, FunctionDependentPathwise(coupled.posterior.inducing, coupled.posterior.local, 64))
    quiet = gpssm.GPSSM(transition, emission, process_scale=[0.1], initial_mean=[0.5])
    run("pr-ssm", quiet, PRSSM(q, PriorSteps(steps.initial_mean, jnp.full((1, 1, 1), 0.2))))


if __name__ == "__main__":
    main()
