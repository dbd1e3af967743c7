"""`reproduce`: the paper's experiments, from the command line."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import jax
import typer

from gpssm import reproduce
from gpssm import run as runs
from gpssm.commands import console
from gpssm.commands.console import Json, say, show
from gpssm.reproduce.results import TABLE, Report
from gpssm.tables import nearest

PRECISIONS = ("float64", "float32")
KERNELS = ("se", "matern12", "matern32", "matern52", "rq")
Out = Annotated[Path | None, typer.Option("--out", metavar="DIR", help="For fits, results.json, table.md and figures.")]
Quick = Annotated[bool, typer.Option("--quick", help="Small sizes: about two minutes on two cores; not the numbers to quote.")]
Methods = Annotated[str | None, typer.Option("--methods", metavar="A,B", help="Only these methods; 'none' for none of them.")]
Draws = Annotated[int | None, typer.Option("--draws", metavar="N", help="Draws of the data.")]
Steps = Annotated[int | None, typer.Option("--steps", metavar="N", help="Steps of optimisation a method.")]
Precision = Annotated[str, typer.Option("--precision", metavar="TYPE", help="float64 or float32.")]
Seed = Annotated[int, typer.Option("--seed", metavar="N", help="Of the first draw of the data, and of the fits.")]


def kink(
    out: Out = None,
    quick: Quick = False,
    long: Annotated[bool, typer.Option("--long", help="30 sequences of 20 steps at three levels of noise, instead.")] = False,
    methods: Methods = None,
    kernels: Annotated[str | None, typer.Option("--kernels", metavar="A,B", help="With --long: only these kernels.")] = None,
    draws: Draws = None,
    steps: Steps = None,
    precision: Precision = PRECISIONS[0],
    seed: Seed = 0,
    json: Json = None,
) -> None:
    """The kink function: learned f and process noise by method."""
    kind: Any = reproduce.KinkLongSettings if long else reproduce.KinkSettings
    carry_out: Any = reproduce.reproduce_kink_long if long else reproduce.reproduce_kink
    settings = _chosen(kind, quick, methods, seed, num_draws=draws, num_steps=steps)
    if kernels is not None:
        if not long:
            raise ValueError("--kernels is for --long: expected `gpssm reproduce kink --long --kernels se,matern52`.")
        settings = replace(settings, kernels=_known(kernels, KERNELS, "--kernels"))
    _run("kink-long" if long else "kink", carry_out, settings, out, precision, json)


def sysid(
    out: Out = None,
    quick: Quick = False,
    methods: Methods = None,
    ours: Annotated[
        str, typer.Option("--ours", metavar="KIND,..", help="The library's own rows: defaults, select, or none.")
    ] = "defaults",
    data: Annotated[str | None, typer.Option("--datasets", metavar="A,B", help="Only these.")] = None,
    mean: Annotated[
        str | None, typer.Option("--mean", metavar="NAME", help="Of the paper's methods: identity, linear, zero.")
    ] = None,
    kernel: Annotated[
        str | None, typer.Option("--kernel", metavar="NAME", help="Of the paper's methods: matern32, se, ...")
    ] = None,
    steps: Steps = None,
    precision: Precision = PRECISIONS[0],
    seed: Seed = 0,
    json: Json = None,
) -> None:
    """The five system-identification benchmarks: the paper's methods, and the library's defaults with every baseline."""
    settings = _chosen(reproduce.SysidSettings, quick, methods, seed, num_steps=steps)
    if data is not None:
        settings = replace(
            settings, names=_known(data, settings.names if not quick else reproduce.SysidSettings().names, "--datasets")
        )
    changes = {name: value for name, value in (("mean", mean), ("kernel", kernel)) if value is not None}
    settings = replace(settings, start=replace(settings.start, **changes))
    kinds = _known(ours, tuple(reproduce.BUILDERS), "--ours")
    builders = {"gpssm" if kind == "defaults" else f"gpssm, {kind}": reproduce.BUILDERS[kind] for kind in kinds}

    def carry_out(out: Path, settings: Any, *, say: Any) -> Report:
        return reproduce.reproduce_sysid(out, settings, ours=builders, say=say)

    _run("sysid", carry_out, settings, out, precision, json)


def cartpole(
    out: Out = None,
    quick: Quick = False,
    methods: Methods = None,
    draws: Draws = None,
    steps: Steps = None,
    precision: Precision = PRECISIONS[0],
    seed: Seed = 0,
    json: Json = None,
) -> None:
    """The cart and pole: forecasts of 20 steps and learned process noise by method."""
    settings = _chosen(reproduce.CartPoleSettings, quick, methods, seed, num_draws=draws, num_steps=steps)
    _run("cartpole", reproduce.reproduce_cart_pole, settings, out, precision, json)


def _chosen(
    kind: Any, quick: bool, methods: str | None, seed: int, *, num_steps: int | None, num_draws: int | None = None
) -> Any:
    """The settings of an experiment, as the options change them."""
    settings = kind.quick() if quick else kind()
    changes: dict[str, Any] = {"seed": seed}
    if methods is not None:
        changes["methods"] = _known(methods, kind().methods, "--methods")
    if num_draws is not None:
        console.at_least(num_draws, 1, "--draws")
        changes["num_draws"] = num_draws
    if num_steps is not None:
        console.at_least(num_steps, 1, "--steps")
        for name in ("fit", "first_fit"):
            if hasattr(settings, name):
                changes[name] = replace(getattr(settings, name), num_steps=num_steps)
    return replace(settings, **changes)


def _known(text: str, choices: tuple[str, ...], option: str) -> tuple[str, ...]:
    """The names in `a,b`, in that order; 'none' is no name at all."""
    if text == "none":
        return ()
    names = console.comma_list(text)
    for name in names:
        if name not in choices:
            raise ValueError(f"{option}: there is no '{name}'{nearest(name, list(choices))}. There are: {', '.join(choices)}.")
    if not names or len(set(names)) < len(names):
        raise ValueError(f"{option} takes names, each once, out of {', '.join(choices)}, or none, but got '{text}'.")
    return names


def _run(name: str, carry_out: Callable[..., Report], settings: Any, out: Path | None, precision: str, json: Path | None) -> None:
    """Carry out an experiment, and show its table."""
    console.check_writable(json)
    if precision not in PRECISIONS:
        raise ValueError(f"--precision must be float64 or float32, but got '{precision}'.")
    folder = out or Path(f"reproduce-{name}{'-quick' if settings.is_quick else ''}")
    runs.check_folder(folder)
    if settings.is_quick:
        show("Quick: small sizes and few steps, to see that it runs. These are not the numbers to quote.")
    with console.timed(f"reproduce {name}"), jax.enable_x64(precision == "float64"):
        try:
            report = carry_out(folder, settings, say=say)
        except KeyboardInterrupt:
            say(f"Interrupted. The same command goes on; what is done stands in {folder}.")
            raise
        show(report.text)
        show(f"Wrote {folder / TABLE}, results.json and {len(report.figures)} figures.")
        console.write_json(json, report.to_dict())
