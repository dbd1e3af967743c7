"""`fit`, `compare` and `demo`: verbs that fit."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from gpssm import baselines, datasets
from gpssm import config as configuration
from gpssm import run as runs
from gpssm import selection as selections
from gpssm.commands import console, loading
from gpssm.commands.console import Json, say, show
from gpssm.config import Config
from gpssm.data import Dataset
from gpssm.evaluate import Evaluation
from gpssm.initialise import FAMILIES
from gpssm.report import write_report
from gpssm.run import Run
from gpssm.tables import nearest

DEMO_FAMILIES = ("vcdt", "factorised-linear", "factorised-nonlinear", "pr-ssm")
NAMES = ", ".join(FAMILIES)
LEAST_TO_TUNE = 80  # rows of the shortest training sequence
COUNTS = (10, 20, 40, 80)  # of inducing points, that `--inducing auto` tries

StateDim = Annotated[
    str | None,
    typer.Option("--state-dim", metavar="N|auto", help="Number of states; auto (the default) asks subspace identification."),
]
Inducing = Annotated[
    str | None,
    typer.Option("--inducing", metavar="N|auto", help="Number of inducing points; auto adds them until the bound gains no more."),
]
Fraction = Annotated[
    float | None, typer.Option("--train-fraction", metavar="F", help="Share of each sequence that trains; 0.75 if not said.")
]
ConfigFile = Annotated[Path | None, typer.Option("--config", metavar="FILE.toml", help="Settings; options go before them.")]
Seed = Annotated[int | None, typer.Option("--seed", metavar="N", help="Of all randomness.")]


def fit(
    out: Annotated[Path, typer.Option("--out", metavar="RUN", help="The run folder to make.")],
    data: loading.MaybeData = None,
    outputs: loading.Outputs = None,
    controls: loading.Controls = None,
    sequence: loading.Sequence = None,
    time: loading.Time = None,
    state_dim: StateDim = None,
    posterior: Annotated[str | None, typer.Option("--posterior", metavar="NAME", help=f"One of {NAMES}.")] = None,
    inducing: Inducing = None,
    train_fraction: Fraction = None,
    config: ConfigFile = None,
    seed: Seed = None,
    tune: Annotated[
        bool | None,
        typer.Option(
            "--tune/--no-tune",
            help="Compare candidates on two blocks of the training part first; by itself, where nothing is said of the model.",
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in RUN; nothing else needs to be said again.")
    ] = False,
    json: Json = None,
) -> None:
    """Fit a GPSSM to the first part of the data, and say how good it is on the rest."""
    console.check_writable(json, read=(data, config))
    is_begun = resume and runs.read_status(out) is not None
    is_tuning = resume and not is_begun and selections.is_begun(out)
    if not is_begun and not is_tuning:
        runs.check_new(out)
    if data is None and not is_begun and not is_tuning:
        raise ValueError(
            f"There is no run in {out} to go on with." if resume else "Missing argument 'DATA'. See gpssm fit --help"
        )
    changes = changes_of(
        loading.data_changes(data, outputs, controls, sequence, time, train_fraction),
        _start_changes(state_dim, posterior, inducing),
        seed,
    )
    if is_begun:
        settings = runs.agreed(out, configuration.read(out / "config.toml"), config, changes)
    elif is_tuning:
        settings = runs.agreed(out, selections.asked(out)[0], config, changes)
    else:
        settings = settings_of(config, changes)
    if data is not None:
        dataset = loading.load_data(settings.data)
    else:
        dataset = selections.asked(out)[1] if is_tuning else runs.load_run(out).data
    loading.check_learnable(settings, dataset)
    is_plain = not changes["start"] and config is None and enough_to_tune(settings, dataset)
    is_tuned = is_tuning or (not is_begun and (is_plain if tune is None else tune))
    with console.timed("fit"):
        show(dataset.describe())
        try:
            if is_tuned:
                run, ranking = selections.carry_out_selection(out, settings, dataset, progress=console.progress(), say=say)
                show(console.candidate_table(ranking))
            else:
                run = runs.carry_out(out, settings, dataset, resume=resume, progress=console.progress(), say=say)
        except KeyboardInterrupt:
            say(f"Interrupted; what there is stands in {out}. Go on with it: gpssm fit --resume --out {out}")
            raise
        present(run)
        console.write_json(json, run.metrics)


def compare(
    data: loading.Data,
    outputs: loading.Outputs = None,
    controls: loading.Controls = None,
    sequence: loading.Sequence = None,
    time: loading.Time = None,
    posteriors: Annotated[str, typer.Option("--posteriors", metavar="A,B,C", help=f"Any of {NAMES}.")] = ",".join(DEMO_FAMILIES),
    state_dim: StateDim = None,
    inducing: Inducing = None,
    train_fraction: Fraction = None,
    config: ConfigFile = None,
    seed: Seed = None,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where the runs and the report go.")] = Path("comparison"),
    json: Json = None,
) -> None:
    """Fit several posterior families to the same data; one table, one report, every baseline beside them."""
    console.check_writable(json, read=(data, config))
    families = families_of(posteriors)
    for family in families:
        runs.check_new(out / family)
    changes = loading.data_changes(data, outputs, controls, sequence, time, train_fraction)
    settings = settings_of(config, changes_of(changes, _start_changes(state_dim, None, inducing), seed))
    dataset = loading.load_data(settings.data)
    loading.check_learnable(settings, dataset)
    if settings.data.train_fraction == 1:
        raise ValueError("A comparison needs held-out data: choose a --train-fraction below 1.")
    with console.timed("compare"):
        show(dataset.describe())
        runs.check_builds(settings, dataset)
        runs_of, evaluation = fit_families(out, settings, dataset, families)
        console.show_scores(evaluation)
        run, fits = runs_of[families[0]], {name: run.fitted() for name, run in runs_of.items()}
        say(f"wrote {write_report(run, out / 'report.html', evaluation=evaluation, families=fits)}")
        console.write_json(json, evaluation.to_dict())


def demo(
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where the runs and the report go.")] = Path("gpssm-demo"),
    json: Json = None,
) -> None:
    """Learn the kink function from noisy data by VCDT and its rivals; about two minutes, nothing to download."""
    console.check_writable(json)
    runs.check_folder(out)
    is_there = [runs.read_status(out / family) is not None for family in DEMO_FAMILIES]
    if any(is_there):
        say(f"{out} holds runs of the demo: they are {'shown' if all(is_there) else 'gone on with'}. Remove it to start afresh.")
    simulation = datasets.kink(num_steps=160, observation_variance=0.1, seed=3)
    settings = configuration.override(Config(), DEMO_SETTINGS)
    with console.timed("demo"):
        show("The kink function of Ialongo et al. (2019): one hidden state, 120 noisy rows to learn from, 40 held out.")
        runs_of, evaluation = fit_families(out, settings, simulation.dataset, DEMO_FAMILIES, resume=True)
        console.show_scores(evaluation)
        run, fits = runs_of[DEMO_FAMILIES[0]], {name: run.fitted() for name, run in runs_of.items()}
        console.sentences(run.metrics["words"])
        truth = simulation.transition
        path = write_report(run, out / "report.html", evaluation=evaluation, truth=truth, families=fits)
        show(f"Report: {path}")
        show(f"Next: gpssm forecast {out / 'vcdt'} --steps 10")
        console.write_json(json, evaluation.to_dict())


DEMO_SETTINGS: dict[str, Any] = {
    "data": {"source": "kink"},
    "start": {"state_dim": 1, "num_inducing": 20, "builder": "gpssm.commands.kink_start:start"},
    "fit": {"num_steps": 600, "num_samples": 8, "learning_rate": 0.02, "block_steps": 50},
    "forecast": {"horizon": 10},
}


def fit_families(
    out: Path, settings: Config, data: Dataset, families: tuple[str, ...], *, resume: bool = False
) -> tuple[dict[str, Run], Evaluation]:
    """A run for each family, in a folder of its name, and all families and baselines scored together."""
    train, _ = runs.training_part(settings, data)
    say("fitting the baselines")
    rivals: dict[str, Any] = dict(baselines.fit_all(train, seed=settings.seed))
    runs_of, errors, seconds = {}, {}, {}
    for i, family in enumerate(families):
        say(f"[{i + 1}/{len(families)}] {family}")
        chosen = configuration.override(settings, {"start": {"posterior": family}})
        done = runs.carry_out(out / family, chosen, data, resume=resume, progress=console.progress(), say=say, rivals=rivals)
        assert done.evaluation is not None
        errors[family], seconds[family] = done.evaluation.errors["gpssm"], done.evaluation.seconds["gpssm"]
        runs_of[family] = done
    first = runs_of[families[0]].evaluation
    assert first is not None
    errors |= {name: first.errors[name] for name in rivals}
    seconds |= {name: first.seconds[name] for name in rivals}
    fields = {name: getattr(first, name) for name in first.__dataclass_fields__}
    return runs_of, Evaluation(**{**fields, "errors": errors, "seconds": seconds})


def enough_to_tune(settings: Config, data: Dataset) -> bool:
    """Whether the end of every training sequence can be spared to compare candidates on."""
    return min(runs.training_part(settings, data)[0].lengths) >= LEAST_TO_TUNE


def present(run: Run) -> None:
    """What came of a run, and what may be done with it."""
    if run.evaluation is not None:
        console.show_scores(run.evaluation)
    console.sentences(run.metrics["words"])
    plan = f" --controls FUTURE.csv (with {', '.join(run.data.control_names)})" if run.data.num_controls else ""
    show(f"Run folder: {run.folder}. Next: gpssm report {run.folder}; gpssm forecast {run.folder} --steps 30{plan}")


def settings_of(file: Path | None, changes: Mapping[str, Any]) -> Config:
    """The settings in a file, or the default ones, under what was said besides."""
    return configuration.override(configuration.read(file) if file is not None else Config(), changes)


def changes_of(data: Mapping[str, Any], start: Mapping[str, Any], seed: int | None) -> dict[str, Any]:
    """What was said on the command line, as changes to a configuration."""
    changes: dict[str, Any] = {"data": data, **start}
    return changes if seed is None else {**changes, "seed": seed}


def _start_changes(state_dim: str | None, posterior: str | None, inducing: str | None) -> dict[str, Any]:
    """What is said of [start]; `--inducing auto` is a search, which has a table of its own."""
    number = console.number_or_auto(inducing, "--inducing")
    start = {
        "state_dim": console.number_or_auto(state_dim, "--state-dim"),
        "posterior": None if posterior is None else _one_family(posterior),
        "num_inducing": None if number == "auto" else number,
    }
    changes: dict[str, Any] = {"start": {name: value for name, value in start.items() if value is not None}}
    if number is not None:
        changes["saturation"] = {"counts": list(COUNTS) if number == "auto" else []}
    return changes


def _one_family(text: str) -> str:
    first, *others = families_of(text, "--posterior")
    if others:
        raise ValueError(f"--posterior takes one name, but got '{text}'. To fit several, see gpssm compare --help.")
    return first


def families_of(text: str, option: str = "--posteriors") -> tuple[str, ...]:
    """The posterior families in `a,b`, each of them known."""
    chosen = console.comma_list(text)
    for name in chosen:
        if name not in FAMILIES:
            raise ValueError(f"{option}: there is no posterior '{name}'{nearest(name, list(FAMILIES))}. There are: {NAMES}.")
    if not chosen or len(set(chosen)) < len(chosen):
        raise ValueError(f"{option} takes names, each once, out of {NAMES}, but got '{text}'.")
    return chosen
