"""The paper's kink experiment in one page: fit four posteriors to 120 noisy steps and draw the triptych.

Run `python examples/kink.py --out kink.png`. The emission is fixed to the truth, as in the paper, so that the learnt dynamics can
be compared with the function that made the data. How the noise is split between process and observation decides which optimum
a fit finds: every method starts from several levels of process noise, and the fit with the highest bound is kept. So little and
so noisy data leave f vague: a fit that starts at the true states ends at the same bound, with as much process noise.
"""

import argparse
import time

import jax
import jax.random as jr
import matplotlib.pyplot as plt
import numpy as np

import gpssm
from gpssm.emissions import LinearGaussian
from gpssm.initialise import inducing_given_states
from gpssm.kernels import SquaredExponential
from gpssm.means import ZeroMean
from gpssm.plots import COLOURS, GREY, INK, STYLE
from gpssm.posteriors import (
    PRSSM,
    VCDT,
    AbstractPosterior,
    FactorisedLinear,
    FactorisedNonlinear,
    FilteringSteps,
    FreeSteps,
    PriorSteps,
    free_steps_from,
)
from gpssm.simulators import Simulation, kink

METHODS = ("factorised-linear", "factorised-nonlinear", "vcdt", "pr-ssm")
STARTS = (0.3, 0.6)  # standard deviations of the process noise
OBSERVATION_VARIANCE = 0.8
RANGE = (-3.15, 1.15)  # where the kink's trajectories live
SHOWN = {"xlim": (-4.5, 2.5), "ylim": (-5.5, 3.5)}
COLOUR_OF = {"factorised-linear": COLOURS[1], "vcdt": COLOURS[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="kink.png")
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)

    simulation = kink(num_steps=120, process_scale=0.05, observation_variance=OBSERVATION_VARIANCE, seed=options.seed)
    settings = gpssm.FitSettings(num_steps=options.steps, num_samples=32, learning_rate=0.02, tolerance=None)
    print(f"{'method':22} {'bound':>8} {'process sd':>10} {'log density of f':>16} {'seconds':>8}")
    results = {}
    for name in METHODS:
        began = time.perf_counter()
        results[name] = result = best_of_starts(name, simulation.dataset, settings)
        noise, density = result.history.process_scale[-1, 0], log_density_of_truth(result, simulation)
        print(f"{name:22} {result.bound:8.1f} {noise:10.3f} {density:16.2f} {time.perf_counter() - began:8.1f}", flush=True)
    triptych(simulation, results["factorised-linear"], results["vcdt"]).savefig(options.out, dpi=150)
    print(f"wrote {options.out}")


def best_of_starts(name: str, data: gpssm.Dataset, settings: gpssm.FitSettings) -> gpssm.FitResult:
    """The fit with the highest bound, of one from each level of process noise."""
    scaling = gpssm.Scaling.identity(1, 0)
    fits = [gpssm.fit(data, *start(name, data, scale), key=jr.key(1), scaling=scaling, settings=settings) for scale in STARTS]
    return max(fits, key=lambda fit: fit.bound)


def start(name: str, data: gpssm.Dataset, process_scale: float) -> tuple[gpssm.GPSSM, AbstractPosterior]:
    """One state seen directly with known noise, a smooth GP over the range of the data, and steps that filter."""
    inputs = np.linspace(RANGE[0] - 0.5, RANGE[1] + 0.5, 20)[:, None]
    transition = gpssm.SparseGP(SquaredExponential([1.0], 2.0), ZeroMean(1), inputs, num_states=1)
    emission = LinearGaussian([[1.0]], [0.0], [np.sqrt(OBSERVATION_VARIANCE)])
    model = gpssm.fix(gpssm.GPSSM(transition, emission, process_scale=[process_scale]), lambda m: m.emission)

    q = inducing_given_states(model, list(data.outputs), list(data.controls))  # as if the outputs were the states
    steps = free_steps_from(FilteringSteps(), model, data.windows(gpssm.Scaling.identity(1, 0)))
    if name == "pr-ssm":
        return model, PRSSM(q, PriorSteps(steps.initial_mean, steps.initial_chol))
    if name == "factorised-linear":  # linear in the state itself: around the outputs, not through f
        around = np.stack([outputs[1:] for outputs in data.outputs])
        steps = FreeSteps(steps.initial_mean, steps.initial_chol, 0 * steps.gain, around, steps.chol)
        return model, FactorisedLinear(q, steps)
    return model, (VCDT if name == "vcdt" else FactorisedNonlinear)(q, steps)


def log_density_of_truth(result: gpssm.FitResult, simulation: Simulation) -> float:
    """The mean log density of the true f under q(f), over the range that the states visit."""
    grid = np.linspace(*RANGE, 100)[:, None]
    mean, variance = gpssm.transition_moments(result, grid)
    truth = simulation.transition(grid, grid[:, :0])
    return float(np.mean(-0.5 * (truth - mean) ** 2 / variance - 0.5 * np.log(2 * np.pi * variance)))


def triptych(simulation: Simulation, factorised: gpssm.FitResult, coupled: gpssm.FitResult):
    """The factorised fit, VCDT's, and both: learnt f with three standard deviations, the truth, and pairs x_t, x_{t+1}."""
    fits = {"factorised-linear": factorised, "vcdt": coupled}
    with plt.rc_context(STYLE):
        figure, panels = plt.subplots(1, 3, figsize=(11.5, 4.1), sharex=True, sharey=True, layout="constrained")
        for panel, names in zip(panels, (("factorised-linear",), ("vcdt",), tuple(fits)), strict=True):
            for name in names:
                function(panel, fits[name], name, COLOUR_OF[name])
            grid = np.linspace(*SHOWN["xlim"], 300)[:, None]
            truth = simulation.transition(grid, grid[:, :0])[:, 0]
            panel.plot(grid[:, 0], truth, color=INK, lw=1.2, ls=(0, (4, 2)), label="truth")
            if len(names) == 1:
                pairs(panel, simulation, fits[names[0]], COLOUR_OF[names[0]])
                noise = fits[names[0]].history.process_scale[-1, 0]
                panel.set_title(f"{names[0]}: process noise {noise:.2f}")
            panel.set(xlabel="$x_t$", **SHOWN)
            panel.legend(loc="upper left", ncols=2)
        panels[0].set_ylabel("$x_{t+1}$")
        panels[2].set_title("both")
    return figure


def function(panel, result: gpssm.FitResult, name: str, colour: str) -> None:
    """The learnt f and a band of three standard deviations."""
    grid = np.linspace(*SHOWN["xlim"], 300)[:, None]
    mean, variance = (moment[:, 0] for moment in gpssm.transition_moments(result, grid))
    spread = 3 * np.sqrt(variance)
    panel.fill_between(grid[:, 0], mean - spread, mean + spread, color=colour, alpha=0.18, lw=0)
    panel.plot(grid[:, 0], mean, color=colour, label=name)


def pairs(panel, simulation: Simulation, result: gpssm.FitResult, colour: str) -> None:
    """True and observed pairs, and at every tenth step the mean and two standard deviations of q(x_t, x_{t+1})."""
    outputs, states = simulation.dataset.outputs[0][:, 0], simulation.states[0][:, 0]
    panel.plot(outputs[:-1], outputs[1:], "^", ms=3, color=GREY, alpha=0.35, mew=0, label="outputs", zorder=0)
    panel.plot(states[:-1], states[1:], "s", ms=2.6, color=INK, mew=0, label="states")
    paths = gpssm.posterior_states(result, key=jr.key(0), num_samples=400)[:, :, 0]
    angles = np.linspace(0, 2 * np.pi, 60)
    circle = np.stack([np.cos(angles), np.sin(angles)])
    for t in range(5, paths.shape[1] - 1, 10):
        pair = paths[:, t : t + 2]
        centre, chol = pair.mean(axis=0), np.linalg.cholesky(np.cov(pair.T) + 1e-9 * np.eye(2))
        panel.plot(*(centre[:, None] + 2 * chol @ circle), color=colour, lw=0.8, alpha=0.9)
        panel.plot(*centre, "o", ms=3.5, color=colour, mew=0)


if __name__ == "__main__":
    main()
