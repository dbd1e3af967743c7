"""The command line: which verbs there are, what they end with (0 done, 1 failed work, 2 bad input), and how errors are told.

Errors are `ValueError` and `FileNotFoundError` where somebody handed over something wrong, and take one or two lines; all else is
failed work. Unlike the library, the command line sets JAX up: float64, and a cache of compiled programs.
"""

import os
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import typer
from typer.main import get_command

from gpssm.commands import asking, benchmarks, fitting, reproducing, selecting
from gpssm.datasets import cache_folder

# typer's own class, or click's, of which older typers make use
UsageError: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
DONE, FAILED, BAD_INPUT = 0, 1, 2
INTERRUPTED = 130  # what typer makes of Ctrl-C

app = typer.Typer(
    name="gpssm",
    help="Gaussian process state-space models: from a file to a forecast that can be trusted.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    add_completion=False,
)
data_app = typer.Typer(help="The named benchmark data.", no_args_is_help=True)
app.add_typer(data_app, name="datasets")
reproduce_app = typer.Typer(help="The paper's experiments: tables beside its numbers, and figures.", no_args_is_help=True)
app.add_typer(reproduce_app, name="reproduce")
GROUPS = {"datasets": data_app, "reproduce": reproduce_app}

EXAMPLES: dict[str, str] = {
    "demo": "gpssm demo",
    "fit": "gpssm fit plant.csv --outputs temperature --controls valve --out run",
    "forecast": "gpssm forecast run --steps 30 --controls plan.csv --out forecast.csv",
    "filter": "gpssm filter run plant.csv --out states.csv",
    "evaluate": "gpssm evaluate run plant.csv --horizon 30 --json scores.json",
    "compare": "gpssm compare dryer --posteriors vcdt,factorised-linear --out comparison",
    "select": "gpssm select plant.csv --outputs temperature --controls valve --state-dim 1,2,4 --out best",
    "report": "gpssm report run",
    "datasets list": "gpssm datasets list",
    "datasets fetch": "gpssm datasets fetch dryer",
    "datasets show": "gpssm datasets show dryer",
    "reproduce kink": "gpssm reproduce kink --quick --out kink",
    "reproduce sysid": "gpssm reproduce sysid --quick --out sysid",
    "reproduce cartpole": "gpssm reproduce cartpole --quick --out cartpole",
}


def _add(name: str, verb: Callable[..., Any]) -> None:
    group = GROUPS.get(name.split()[0], app)
    group.command(name.split()[-1], epilog=f"Example: `{EXAMPLES[name]}`")(verb)


_add("demo", fitting.demo)
_add("fit", fitting.fit)
_add("forecast", asking.forecast)
_add("filter", asking.filter)
_add("evaluate", asking.evaluate)
_add("compare", fitting.compare)
_add("select", selecting.select)
_add("report", asking.report)
_add("datasets list", benchmarks.list_benchmarks)
_add("datasets fetch", benchmarks.fetch)
_add("datasets show", benchmarks.describe)
_add("reproduce kink", reproducing.kink)
_add("reproduce sysid", reproducing.sysid)
_add("reproduce cartpole", reproducing.cartpole)


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error; may stand anywhere.")] = False,
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and leave with its exit code."""
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: Sequence[str]) -> int:
    """Run one command; its exit code."""
    given = [argument for argument in arguments if argument != "--debug"]
    is_debug = len(given) < len(arguments)
    if not is_debug:
        warnings.showwarning = _show_warning
    _prepare_jax()
    try:
        code = get_command(app).main(args=list(given), prog_name="gpssm", standalone_mode=False)
    except UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error.format_message())
            return BAD_INPUT
        told = error.format_message()
        return _failed(f"{told}{'' if told.endswith(('.', '?')) else '.'} Try: gpssm {_verb(given)}--help", BAD_INPUT, is_debug)
    except np.linalg.LinAlgError as error:  # a kind of ValueError, but nobody's input
        return _failed(f"{type(error).__name__}: {error} (--debug shows where)", FAILED, is_debug)
    except PermissionError as error:
        return _failed(f"{error.filename or 'A file'} cannot be read or written: {error.strerror}.", BAD_INPUT, is_debug)
    except BrokenPipeError:  # as of `gpssm ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except (ValueError, FileNotFoundError) as error:
        is_ours = not isinstance(error, UnicodeError) or is_debug
        return _failed(str(error) if is_ours else f"A file is not UTF-8 text: {error}", BAD_INPUT, is_debug)
    except (KeyboardInterrupt, typer.Abort):
        return _failed("interrupted", FAILED, is_debug)
    except MemoryError:
        return _failed("Out of memory. Fewer inducing points (--inducing), rows or samples need less.", FAILED, is_debug)
    except Exception as error:
        told = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        return _failed(f"{told} (--debug shows where)", FAILED, is_debug)
    if code == INTERRUPTED:
        return _failed("interrupted", FAILED, is_debug)
    return code if isinstance(code, int) else DONE


def _failed(message: str, code: int, is_debug: bool) -> int:
    if is_debug:
        traceback.print_exc()
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return code


def _verb(arguments: Sequence[str]) -> str:
    names = {name.split()[0] for name in EXAMPLES}
    return f"{arguments[0]} " if arguments and arguments[0] in names else ""


def _prepare_jax() -> None:
    """float64, and programs compiled once for good in ~/.cache/gpssm/jax (GPSSM_JAX_CACHE: elsewhere, or off)."""
    jax.config.update("jax_enable_x64", True)
    wanted = os.environ.get("GPSSM_JAX_CACHE")
    if wanted == "off" or os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return
    folder = Path(wanted).expanduser() if wanted else cache_folder() / "jax"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return  # nothing is lost but time
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def _show_warning(message: Warning | str, category: type, *_: Any, **__: Any) -> None:
    print(f"note: {' '.join(str(message).split())}", file=sys.stderr)
