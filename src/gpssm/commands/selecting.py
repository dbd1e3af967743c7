"""`select`: model choice on the training part, and the run of the winner."""

from pathlib import Path
from typing import Annotated, Any

import typer

from gpssm import run as runs
from gpssm import selection as selections
from gpssm.commands import console, loading
from gpssm.commands.console import Json, say, show
from gpssm.commands.fitting import NAMES, ConfigFile, Fraction, Seed, changes_of, families_of, present, settings_of
from gpssm.initialise import KERNELS, MEANS
from gpssm.select import SCORES
from gpssm.tables import nearest

BY = (*SCORES, "bound")


def select(
    data: loading.MaybeData = None,
    outputs: loading.Outputs = None,
    controls: loading.Controls = None,
    sequence: loading.Sequence = None,
    time: loading.Time = None,
    state_dim: Annotated[str | None, typer.Option("--state-dim", metavar="1,2,..", help="Numbers of states to try.")] = None,
    posterior: Annotated[str | None, typer.Option("--posterior", metavar="A,B,..", help=f"To try, out of {NAMES}.")] = None,
    inducing: Annotated[str | None, typer.Option("--inducing", metavar="20,40,..", help="Inducing points to try.")] = None,
    kernel: Annotated[
        str | None, typer.Option("--kernel", metavar="A,B,..", help=f"To try, out of {', '.join(KERNELS)}.")
    ] = None,
    mean: Annotated[str | None, typer.Option("--mean", metavar="A,B,..", help=f"To try, out of {', '.join(MEANS)}.")] = None,
    by: Annotated[str | None, typer.Option("--by", metavar="SCORE", help=f"One of {', '.join(BY)}; nlpd if not said.")] = None,
    train_fraction: Fraction = None,
    config: ConfigFile = None,
    seed: Seed = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the selection in DIR; nothing else is needed.")] = False,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="The run folder of the winner.")] = Path("selection"),
    json: Json = None,
) -> None:
    """Choose a model on the training part alone, then fit the winner and score it on the rest.

    Two blocks of the training part validate. Options are lists of what to try, in every combination; without any, four
    candidates are tried, from f that starts at the linear model to f that first learns long stretches alone.
    """
    console.check_writable(json, read=(data, config))
    is_begun = resume and selections.is_begun(out)
    if not is_begun:
        runs.check_new(out)
    if data is None and not is_begun:
        raise ValueError(
            f"There is no selection in {out} to go on with." if resume else "Missing argument 'DATA'. See gpssm select --help"
        )
    tried = {
        "state_dim": _numbers(state_dim, "--state-dim"),
        "posterior": None if posterior is None else list(families_of(posterior, "--posterior")),
        "num_inducing": _numbers(inducing, "--inducing"),
        "kernel": _names(kernel, KERNELS, "--kernel"),
        "mean": _names(mean, MEANS, "--mean"),
        "by": None if by is None else _names(by, BY, "--by")[0],
    }
    changes = changes_of(loading.data_changes(data, outputs, controls, sequence, time, train_fraction), {}, seed)
    changes["select"] = {name: value for name, value in tried.items() if value is not None}
    if is_begun:
        kept, dataset = selections.asked(out)
        settings = runs.agreed(out, kept, config, changes, verb="select")
    else:
        settings, dataset = settings_of(config, changes), None
    if dataset is None or data is not None:
        dataset = loading.load_data(settings.data)
    loading.check_learnable(settings, dataset)
    selections.candidates(settings, runs.training_part(settings, dataset)[0])  # contradictions are told before any work
    with console.timed("select"):
        show(dataset.describe())
        run, ranking = selections.carry_out_selection(out, settings, dataset, progress=console.progress(), say=say)
        show(console.candidate_table(ranking))
        show(
            "By the "
            + (
                "bound, higher is better."
                if ranking.evaluation is None
                else "held-out blocks of the training part, standard units."
            )
        )
        present(run)
        console.write_json(json, {**run.metrics, "selection": selections.to_dict(ranking)})


def _numbers(text: str | None, option: str) -> list[int] | None:
    """The whole numbers in `1,2,4`."""
    if text is None:
        return None
    parts = console.comma_list(text)
    if not parts or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(f"{option} takes whole numbers from 1, as in 1,2,4, but got '{text}'.")
    return [int(part) for part in parts]


def _names(text: str | None, known: tuple[str, ...], option: str) -> Any:
    """The names in `a,b`, each of them known."""
    if text is None:
        return None
    parts = console.comma_list(text)
    for name in parts:
        if name not in known:
            raise ValueError(f"{option}: there is no '{name}'{nearest(name, list(known))}. There are: {', '.join(known)}.")
    if not parts:
        raise ValueError(f"{option} takes names out of {', '.join(known)}, but got '{text}'.")
    return list(parts)
