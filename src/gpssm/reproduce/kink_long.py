"""Kink with many short sequences: how well f is learned at three levels of observation noise, against the best published numbers.

30 sequences of 20 steps, process noise 0.05, 15 inducing points, emission known, f scored at 100 points on [-3.15, 1.15]. Starts,
families and kernels compete by the bound alone.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import jax.random as jr
import numpy as np

from gpssm.fit import FitSettings
from gpssm.reproduce import figures
from gpssm.reproduce.fits import Best, continued, fit_best, process_scale
from gpssm.reproduce.kink import RANGE, kink_model, kink_problem, log_density_of_truth
from gpssm.reproduce.results import FITS, Report, Row, Say, check_question, clock, markdown, mean_and_error, of
from gpssm.simulators import Simulation
from gpssm.simulators import kink as simulate_kink
from gpssm.starts import Problem, starts_around

PUBLISHED = {  # the best of all methods, by observation variance
    0.008: {"nmse_of_f": 0.0035, "mnll_of_f": -1.28},
    0.08: {"nmse_of_f": 0.033, "mnll_of_f": 0.06},
    0.8: {"nmse_of_f": 0.22, "mnll_of_f": 1.18},
}
CHOSEN = "best bound"


@dataclass(frozen=True)
class KinkLongSettings:
    """The published sizes; draws, starts and steps are ours."""

    num_draws: int = 5
    num_sequences: int = 30
    num_steps: int = 20
    process_scale: float = 0.05
    observation_variances: tuple[float, ...] = (0.008, 0.08, 0.8)
    num_inducing: int = 15
    methods: tuple[str, ...] = ("factorised-nonlinear", "factorised-linear", "vcdt", "f-dependent-pathwise")
    kernels: tuple[str, ...] = ("se", "matern52")
    starting_scales: tuple[float, ...] = (0.1, 0.5)  # of the process noise
    num_perturbed: int = 1
    fit: FitSettings = field(
        default_factory=lambda: FitSettings(num_steps=3000, num_samples=16, learning_rate=0.02, block_steps=500, tolerance=None)
    )
    seed: int = 0
    is_quick: bool = False

    @classmethod
    def quick(cls) -> "KinkLongSettings":
        """One draw, one start, few steps."""
        base = cls()
        fit = replace(base.fit, num_steps=600, num_samples=4, block_steps=100)
        methods = ("factorised-nonlinear", "vcdt")
        return replace(
            base, num_draws=1, methods=methods, kernels=("se",), starting_scales=(0.3,), num_perturbed=0, fit=fit, is_quick=True
        )


def reproduce_kink_long(out: str | Path, settings: KinkLongSettings | None = None, *, say: Say = lambda line: None) -> Report:
    """Fit every method to every draw and noise level, and write rows, table and a figure to `out`; resumes after a kill."""
    settings, out, seconds = settings or KinkLongSettings(), Path(out), clock()
    check_question(out, settings)
    cases = [(variance, draw) for draw in range(settings.num_draws) for variance in settings.observation_variances]
    simulations = [draw_kink_long(settings, variance, settings.seed + draw) for variance, draw in cases]
    report = Report("kink-long", settings.is_quick, asdict(settings), (), "")
    kept: dict[str, list[Best]] = {}
    asked = [(kernel, method) for kernel in settings.kernels for method in settings.methods]
    for kernel, method in asked:
        starts = [
            _starts(method, kernel, simulation, settings, variance, draw, kept, i)
            for i, ((variance, draw), simulation) in enumerate(zip(cases, simulations, strict=True))
        ]
        kept[_label(method, kernel)] = fit_best(out / FITS, _label(method, kernel), starts, settings.fit, say)
        rows = _rows(kept, cases, simulations)
        is_last = (kernel, method) == asked[-1]
        report = replace(report, rows=tuple(rows), text=kink_long_table(rows), is_complete=is_last, seconds=seconds())
        report.write(out)
    shown = {
        f"observation variance {variance:g}": _chosen(kept, i)[1].result for i, (variance, draw) in enumerate(cases) if not draw
    }
    drawn = figures.written(out, {"kink-long.png": figures.functions(shown, simulations[0])})
    report = replace(report, figures=drawn, seconds=seconds())
    report.write(out)
    return report


def draw_kink_long(settings: KinkLongSettings, variance: float, seed: int) -> Simulation:
    """The data of one seed and noise level; the states are the same at all levels."""
    return simulate_kink(
        settings.num_steps,
        settings.num_sequences,
        process_scale=settings.process_scale,
        observation_variance=variance,
        seed=seed,
    )


def _label(method: str, kernel: str) -> str:
    """What a method is called with a kernel that is not the first choice."""
    return method if kernel == "se" else f"{method}-{kernel}"


def _starts(
    method: str,
    kernel: str,
    simulation: Simulation,
    settings: KinkLongSettings,
    variance: float,
    draw: int,
    earlier: dict[str, list[Best]],
    case: int,
) -> list[Problem]:
    """Blind starts, and one where the factorised-nonlinear method ended, for the methods after it."""
    key = jr.fold_in(jr.key(settings.seed), draw)
    starts = []
    for i, scale in enumerate(settings.starting_scales):
        model = kink_model(variance, settings.num_inducing, scale, kernel)
        problem = kink_problem(method, simulation.dataset, model, key=jr.fold_in(key, i))
        starts += starts_around(problem, 1 + settings.num_perturbed)
    if (first := _label("factorised-nonlinear", kernel)) in earlier:
        starts.append(continued(method, earlier[first][case].result, key=key))
    return starts


def _rows(kept: dict[str, list[Best]], cases: Sequence[tuple[float, int]], simulations: Sequence[Simulation]) -> list[Row]:
    rows = []
    for i, ((variance, draw), simulation) in enumerate(zip(cases, simulations, strict=True)):
        mine = [_row(method, variance, draw, fits[i], simulation) for method, fits in kept.items()]
        chosen, best = _chosen(kept, i)
        own = _row(CHOSEN, variance, draw, best, simulation)
        seconds = sum(fits[i].seconds for fits in kept.values())
        rows += [*mine, replace(own, seconds=seconds, details=own.details | {"method": chosen})]
    return rows


def _chosen(kept: dict[str, list[Best]], case: int) -> tuple[str, Best]:
    """The method with the highest bound, of those whose objective is one."""
    bounded = {name: fits[case] for name, fits in kept.items() if fits[case].result.posterior.is_lower_bound}
    name = max(bounded, key=lambda name: bounded[name].bound)
    return name, bounded[name]


def _row(method: str, variance: float, draw: int, best: Best, simulation: Simulation) -> Row:
    grid = np.linspace(*RANGE, 100)[:, None]
    density, nmse = log_density_of_truth(best.result, simulation.transition(grid, grid[:, :0])[:, 0], grid)
    scale = float(process_scale(best.result)[0])
    metrics = {"nmse_of_f": nmse, "mnll_of_f": -density, "process_scale": scale, "bound": best.bound}
    details = {"start": best.start, "bounds_of_starts": best.bounds}
    dataset = f"observation variance {variance:g}"
    return Row("kink-long", dataset, method, draw, metrics, best.seconds, PUBLISHED.get(variance, {}), details)


def kink_long_table(rows: Sequence[Row]) -> str:
    """Errors of f by method and noise level, the best published numbers above."""
    head = (
        "observation variance",
        "method",
        "nMSE of f",
        "mean negative log density",
        "process sd (truth 0.05)",
        "bound",
        "seconds",
    )
    body = []
    for dataset in dict.fromkeys(row.dataset for row in rows):
        mine = [row for row in rows if row.dataset == dataset]
        variance, best = dataset.rsplit(" ", 1)[1], mine[0].published
        if best:
            body.append(
                (variance, "*best published*", f"{best['nmse_of_f']:.4f}", f"{best['mnll_of_f']:.2f}", "", "", "3 to 290")
            )
        for method in dict.fromkeys(row.method for row in mine):
            numbers = [
                mean_and_error(of(mine, metric, method=method), digits)
                for metric, digits in (("nmse_of_f", 4), ("mnll_of_f", 2), ("process_scale", 3), ("bound", 1))
            ]
            seconds = sum(row.seconds for row in mine if row.method == method)
            body.append((variance, f"**{method}**" if method == CHOSEN else method, *numbers, f"{seconds:.0f}"))
    draws = len({row.seed for row in rows})
    return (
        f"Kink, 30 sequences of 20 steps: {draws} draws, mean and its standard error. f is scored at 100 points on "
        f"[{RANGE[0]}, {RANGE[1]}]; nMSE is the mean squared error over the variance of the true f there. `{CHOSEN}` takes the "
        "method and kernel with the highest bound, draw by draw; seconds are those of all starts and draws together.\n\n"
        f"{markdown(head, body)}"
    )
