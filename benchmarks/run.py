"""`python -m benchmarks.run step | growth | memory | convergence | accuracy`: one JSON row a case, to the screen and to a file.

Every row says what was run, on what, with which versions, and every single time that its medians come from.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax

from benchmarks.datasets import FAMILIES, Case
from benchmarks.floors import floor_of
from benchmarks.methods import Steps

GROWTH: dict[str, tuple[int, ...]] = {
    "steps": (125, 250, 500, 1000, 2000),
    "inducing": (20, 50, 100, 200, 400),
    "samples": (4, 16, 100, 400),
    "states": (1, 2, 4, 8, 16),
    "sequences": (1, 4, 16),
    "models": (1, 4, 16),
}
LENGTHS = (1_000, 10_000, 100_000)


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    jax.config.update("jax_enable_x64", options.precision == "float64")
    file = Path(options.out) / f"{options.command}.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    verbs = {"step": step, "growth": growth, "memory": memory, "convergence": bounds, "accuracy": scores}
    for row in verbs[options.command](options):
        line = json.dumps({**row, "benchmark": options.command, **_where(options)})
        print(line, flush=True)
        with file.open("a") as rows:
            rows.write(line + "\n")


def step(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The cases that were asked for, each along every chain; the floor is measured between them, in the same run."""
    for family in options.families.split(","):
        yield from _rows(_case(options, family), options)


def growth(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One variable at a time."""
    for variable in options.variables.split(","):
        for family in options.families.split(","):
            for value in GROWTH[variable]:
                for row in _rows(replace(_case(options, family), **{variable: value}), options):
                    yield {"variable": variable, **row}


def memory(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Longer and longer series, each in a process of its own, whose largest memory is told."""
    given = ["--families", options.families, "--chains", options.chains, "--precision", options.precision, "--repeats", "1"]
    given += ["--inducing", str(options.inducing), "--samples", str(options.samples), "--states", str(options.states)]
    for length in LENGTHS:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "benchmarks.run", "step", *given, "--steps", str(length), "--block", "1"]
            subprocess.run([*command, "--out", folder], check=True, stdout=subprocess.DEVNULL)
            yield from (json.loads(line) for line in (Path(folder) / "step.jsonl").read_text().splitlines())


def bounds(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The bound over time."""
    from benchmarks.convergence import convergence

    yield from convergence(options.problems.split(","), options.methods.split(","), options.seeds, options.seconds)


def scores(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Accuracy for the time spent."""
    from benchmarks.convergence import accuracy

    yield from accuracy(options.problems.split(","), options.methods.split(","), options.seconds)


def _case(options: argparse.Namespace, family: str) -> Case:
    names = ("steps", "states", "controls", "inducing", "samples", "sequences", "models")
    return Case(family, **{name: getattr(options, name) for name in names}, is_shared=options.shared, is_full=options.full)


def _rows(case: Case, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    floor, programs, failed = floor_of(case), {}, {}
    for chain in options.chains.split(","):
        try:
            programs[chain] = _program(case, chain, options)
        except ValueError as error:  # the chain does not serve the case
            failed[chain] = str(error)
    first = {chain: program.seconds() for chain, program in programs.items()}
    floor()
    floors, times, busy = [], {chain: [] for chain in programs}, {chain: [] for chain in programs}
    for _ in range(options.repeats):
        floors.append(floor())
        for chain, program in programs.items():
            program.seconds()  # what another program has left in the caches is gone when the next one is timed
            began = time.process_time()
            times[chain].append(program.seconds())
            busy[chain].append(time.process_time() - began)
    least = min(floors, key=lambda one: one["seconds"])  # the strictest: chance can only have made it longer
    for chain, message in failed.items():
        yield {**asdict(case), "chain": chain, "error": message}
    for chain, program in programs.items():
        seconds = statistics.median(times[chain])
        yield {
            **asdict(case),
            "chain": program.chain,
            "seconds": seconds,
            "floor_seconds": least["seconds"],
            "ratio": seconds / least["seconds"],
            "processor_seconds": min(busy[chain]) / options.block,  # of all threads; hardly longer on a machine that others use
            "compile_seconds": program.compile_seconds,
            "first_step_seconds": first[chain],
            "memory_bytes": program.memory_bytes(),
            "peak_bytes": _peak_bytes(),
            "all_seconds": times[chain],
            "floor": least,
            "all_floor_seconds": [one["seconds"] for one in floors],
        }


def _program(case: Case, chain: str, options: argparse.Namespace) -> Any:
    if chain != "torch":
        return Steps.compiled(case, chain, options.block)
    from benchmarks.torch_loop import TorchSteps

    return TorchSteps(case, options.precision)


def _peak_bytes() -> int:
    """The most that this process has held so far: of the device's memory, or on a processor of all."""
    statistics = jax.devices()[0].memory_stats() or {}
    return statistics.get("peak_bytes_in_use", 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def _where(options: argparse.Namespace) -> dict[str, Any]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    return {
        "precision": options.precision,
        "device": jax.devices()[0].device_kind,
        "num_devices": jax.device_count(),
        "threads": len(os.sched_getaffinity(0)),
        "jax": jax.__version__,
        "python": platform.python_version(),
        "commit": commit,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S"),
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    parser.add_argument("command", choices=("step", "growth", "memory", "convergence", "accuracy"))
    parser.add_argument("--families", default="vcdt", help=f"names, with commas between: {', '.join(FAMILIES)}")
    parser.add_argument("--chains", default="plain,auto", help="of plain, compiled, fused, auto; or torch, a rival")
    parser.add_argument("--precision", choices=("float64", "float32"), default="float64")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--block", type=int, default=2, help="steps that are timed together")
    parser.add_argument("--variables", default="steps,inducing,samples,states,sequences", help="that grow")
    parser.add_argument("--out", default=os.environ.get("OUT", "benchmark-results"), help="folder of the rows")
    for name in ("steps", "states", "controls", "inducing", "samples", "sequences", "models"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Case(), name))
    parser.add_argument("--problems", default="kink-20", help="of convergence: kink-N, or a benchmark's name")
    parser.add_argument("--methods", default="adam-100,default", help="of convergence")
    parser.add_argument("--seeds", type=int, default=1, help="of convergence")
    parser.add_argument("--seconds", type=float, default=60.0, help="of convergence, for each method")
    parser.add_argument("--shared", action="store_true", help="one kernel and one set of inducing inputs")
    parser.add_argument("--full", action="store_true", help="full matrices A and S")
    return parser


if __name__ == "__main__":
    main(sys.argv[1:])
