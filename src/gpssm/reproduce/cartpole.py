"""The paper's cart and pole: 20-step sequences through heavy noise, no process noise, 300 inducing points.

Each method forecasts 20 steps of new sequences of which it sees the first row. The states are the outputs without their noise:
the emission is the identity, its noise is learned, so that the process noise of different methods can be compared. What the
paper leaves open is said in `CartPoleSettings`.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from gpssm.data import Scaling
from gpssm.emissions import LinearGaussian
from gpssm.evaluate import paper_window
from gpssm.filter import FittedForecaster
from gpssm.fit import FitSettings
from gpssm.gp import SparseGP
from gpssm.initialise import SMALLEST_SCALE, greedy_inducing, make_kernel
from gpssm.means import IdentityMean
from gpssm.model import GPSSM
from gpssm.params import fix, unwrap
from gpssm.posteriors import FilteringSteps, free_steps_from
from gpssm.reproduce import figures
from gpssm.reproduce.fits import Best, fit_best, posterior_for, process_scale, with_residual_noise
from gpssm.reproduce.results import FITS, Report, Row, Say, check_question, clock, markdown, mean_and_error, of
from gpssm.simulators import Simulation, cart_pole
from gpssm.starts import Problem
from gpssm.subspace import identify

PAPER = {  # NLPP and RMSE (Table 3)
    "factorised-linear": {"nlpp": 2.268, "rmse": 3.548},
    "factorised-nonlinear": {"nlpp": 1.847, "rmse": 2.974},
    "vcdt": {"nlpp": 0.694, "rmse": 2.139},
    "pr-ssm": {"nlpp": -0.049, "rmse": 1.613},
    "pr-ssm-corrected": {"nlpp": -0.053, "rmse": 1.628},
}
NOISE = np.array([0.03, 0.1047, 0.4, 1.3963])
FLOOR = {  # what the outputs' noise alone costs: the joint log density a step, and the root of the expected squared distance
    "nlpp": float(np.sum(0.5 * np.log(2 * np.pi * np.e * NOISE**2))),
    "rmse": float(np.sqrt(np.sum(NOISE**2))),
}
TEST_SEED = 1000  # test sequences are drawn with seeds from here on


@dataclass(frozen=True)
class CartPoleSettings:
    """The paper's sizes; the number of training sequences, their forces and starts, kernel, mean and steps are ours."""

    num_draws: int = 3
    num_sequences: int = 30
    num_test_sequences: int = 30
    num_steps: int = 20
    num_inducing: int = 300
    methods: tuple[str, ...] = tuple(PAPER)
    kernel: str = "se"
    relative_lengthscale: float = 1.0  # of the start, in units of the inputs' spread
    fit: FitSettings = field(
        default_factory=lambda: FitSettings(num_steps=1200, num_samples=100, block_steps=300, tolerance=None)
    )
    num_forecasts: int = 500  # trajectories of a forecast
    seed: int = 0
    is_quick: bool = False

    @classmethod
    def quick(cls) -> "CartPoleSettings":
        """One draw, 10 sequences, 40 inducing points, few steps and samples."""
        base = cls()
        fit = replace(base.fit, num_steps=200, num_samples=4, block_steps=50)
        sizes = {"num_draws": 1, "num_sequences": 15, "num_test_sequences": 5, "num_inducing": 40, "num_forecasts": 100}
        return replace(base, **sizes, fit=fit, is_quick=True)


def reproduce_cart_pole(out: str | Path, settings: CartPoleSettings | None = None, *, say: Say = lambda line: None) -> Report:
    """Fit every method to every draw, and write rows, table and figures to `out`; the same call goes on after a kill."""
    settings, out, seconds = settings or CartPoleSettings(), Path(out), clock()
    check_question(out, settings)
    seeds = [settings.seed + i for i in range(settings.num_draws)]
    trains = [cart_pole(settings.num_sequences, settings.num_steps, seed=seed) for seed in seeds]
    tests = [cart_pole(settings.num_test_sequences, settings.num_steps + 1, seed=TEST_SEED + seed) for seed in seeds]
    report = Report("cartpole", settings.is_quick, asdict(settings), (), "")
    rows: list[Row] = []
    for method in settings.methods:
        starts = [
            [cart_pole_problem(method, train, settings, key=jr.key(seed))] for train, seed in zip(trains, seeds, strict=True)
        ]
        fits = fit_best(out / FITS, method, starts, settings.fit, say)
        for i, (seed, best) in enumerate(zip(seeds, fits, strict=True)):
            rows.append(cart_pole_row(method, seed, best, tests[i], settings))
            say(f"{method}, draw {i}: NLPP {rows[-1].metrics['nlpp']:.3f}, RMSE {rows[-1].metrics['rmse']:.3f}")
        is_last = method == settings.methods[-1]
        report = replace(report, rows=tuple(rows), text=cart_pole_table(rows), is_complete=is_last, seconds=seconds())
        report.write(out)
    drawn = figures.written(out, {"cartpole-process-noise.png": figures.process_noise_by_state(rows)})
    report = replace(report, figures=drawn, seconds=seconds())
    report.write(out)
    return report


def cart_pole_problem(method: str, simulation: Simulation, settings: CartPoleSettings, *, key: jax.Array) -> Problem:
    """A start where a linear model's smoothed outputs are the states."""
    data = simulation.dataset
    scaling = Scaling.of(data)
    outputs = [np.asarray(scaling.outputs(y)) for y in data.outputs]
    controls = [np.asarray(scaling.controls(c)) for c in data.controls]
    found = identify(outputs, controls, data.num_outputs)
    emission, offset = found.model.emission, found.model.emission_offset
    states = [x @ emission.T + offset for x in found.states]
    noise = np.maximum(np.sqrt(np.diag(found.model.observation_covariance)), SMALLEST_SCALE)
    process = np.maximum(np.sqrt(np.diag(emission @ found.model.process_covariance @ emission.T)), SMALLEST_SCALE)
    model, inducing = with_residual_noise(_model(states, controls, noise, process, settings), states, controls)
    windows = data.windows(scaling)
    steps = free_steps_from(FilteringSteps(), model, windows)
    table = jnp.asarray(np.stack(states), windows.outputs.dtype)  # all sequences are of one length
    return Problem(data, model, posterior_for(method, model, inducing, steps, table, windows.controls), key, scaling)


def _model(
    states: Sequence[np.ndarray],
    controls: Sequence[np.ndarray],
    noise: np.ndarray,
    process: np.ndarray,
    settings: CartPoleSettings,
) -> GPSSM:
    """An identity mean, and inducing inputs among the inputs visited."""
    points = np.concatenate([np.hstack([x, c]) for x, c in zip(states, controls, strict=True)])
    num_states = states[0].shape[1]
    lengthscales = settings.relative_lengthscale * points.std(axis=0) * np.sqrt(points.shape[1])
    inducing = greedy_inducing(points, lengthscales, settings.num_inducing)
    inducing = np.array(np.broadcast_to(inducing, (num_states, *inducing.shape)))
    kernels = [make_kernel(settings.kernel, lengthscales, 1.0) for _ in range(num_states)]
    transition = SparseGP(kernels, IdentityMean(num_states), inducing, num_states)
    emission = LinearGaussian(np.eye(num_states), np.zeros(num_states), noise)
    first = np.stack([x[0] for x in states])
    chol = np.diag(np.maximum(first.std(axis=0), 0.1))
    model = GPSSM(transition, emission, process, first.mean(axis=0), chol)
    return fix(model, lambda m: (m.emission.matrix, m.emission.offset))


def cart_pole_row(method: str, seed: int, best: Best, test: Simulation, settings: CartPoleSettings) -> Row:
    """Scores in raw units: NLPP joint over the four outputs, RMSE of their Euclidean distance, as the paper's numbers must be."""
    result, data = best.result, test.dataset
    forecaster = FittedForecaster(result, num_samples=settings.num_forecasts, is_learning=False)
    named = {method: forecaster}
    evaluation = paper_window(named, data, horizon=settings.num_steps, start=1, scaling=result.scaling, key=jr.key(seed))
    told = evaluation.score(method, "raw")
    distance = float(np.sqrt(data.num_outputs))
    scale = process_scale(result) * np.asarray(result.scaling.output_scale, float)
    noise = unwrap(result.model.emission).chol_noise
    metrics = {
        "nlpp": told.nlpd,
        "rmse": told.rmse * distance,
        "coverage90": told.coverage90,
        "process_scale": float(np.exp(np.mean(np.log(process_scale(result))))),
        "bound": best.bound,
    }
    details = {
        "nlpp_standard_error": told.standard_errors["nlpd"],
        "nlpp_by_sequence": evaluation.by_sequence("nlpd", "raw")[method].to_list(),
        "process_scale_raw": scale,
        "observation_scale_raw": np.asarray(noise, float) * np.asarray(result.scaling.output_scale, float),
        "status": result.status.name.lower(),
    }
    return Row("cartpole", f"draw {seed}", method, seed, metrics, best.seconds, PAPER.get(method, {}), details)


def cart_pole_table(rows: Sequence[Row]) -> str:
    """Ours beside the paper's, and whether corrected PR-SSM differs from PR-SSM."""
    head = (
        "method",
        "NLPP",
        "in the paper",
        "RMSE",
        "in the paper",
        "process sd (standard units)",
        "coverage of 90 %",
        "seconds",
    )
    body = []
    for method in dict.fromkeys(row.method for row in rows):
        paper = PAPER.get(method, {"nlpp": np.nan, "rmse": np.nan})
        ours = {name: mean_and_error(of(rows, name, method=method)) for name in ("nlpp", "rmse", "process_scale", "coverage90")}
        seconds = sum(row.seconds for row in rows if row.method == method)
        body.append(
            (
                method,
                ours["nlpp"],
                f"{paper['nlpp']:.3f}",
                ours["rmse"],
                f"{paper['rmse']:.3f}",
                ours["process_scale"],
                ours["coverage90"],
                f"{seconds:.0f}",
            )
        )
    body.append(("*the noise alone*", f"{FLOOR['nlpp']:.3f}", "", f"{FLOOR['rmse']:.3f}", "", "0", "0.900", ""))
    draws = len({row.seed for row in rows})
    text = (
        f"Cart and pole, {draws} draws of training and test sequences, mean and its standard error: forecasts of 20 steps after "
        "the first row of new sequences, in raw units; NLPP is joint over the four outputs, RMSE that of their Euclidean "
        "distance. The process noise is the geometric mean over the states.\n\n" + markdown(head, body)
    )
    return text + _corrected(rows)


def _corrected(rows: Sequence[Row]) -> str:
    """PR-SSM with corrected sampling minus PR-SSM, paired by test sequence."""
    parts = {}
    for method in ("pr-ssm", "pr-ssm-corrected"):
        parts[method] = [n for row in rows if row.method == method for n in row.details["nlpp_by_sequence"]]
    if not parts["pr-ssm"] or len(parts["pr-ssm"]) != len(parts["pr-ssm-corrected"]):
        return ""
    difference = np.array(parts["pr-ssm-corrected"]) - np.array(parts["pr-ssm"])
    return f"\nCorrected PR-SSM minus PR-SSM, NLPP, paired by test sequence: {mean_and_error(difference.tolist())}.\n"
