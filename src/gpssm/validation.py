"""How well fits forecast rows that they were not made of: blocks of the training data, held out one after the other."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

import jax.random as jr
import numpy as np

from gpssm._types import PRNGKey
from gpssm.atomic import present_folder
from gpssm.data import Dataset, Scaling
from gpssm.evaluate import Errors, Evaluation, rolling_origin
from gpssm.filter import FittedForecaster
from gpssm.fit import with_process_factor
from gpssm.result import FitResult
from gpssm.save import load, save

T = TypeVar("T")
EVALUATION = 2**31 - 2  # folded into the key
WINDOWS = 40  # of a block, about, where no stride is asked for
TYPICAL_FACTOR = 1.5  # of the learnt process noise: what forecasts of simulated systems needed on average


class Block(NamedTuple):
    """A part of the data that is held out."""

    rest: Dataset  # what fits are made of
    until: Dataset  # everything up to the block's end: forecasts see what lies before their origin
    starts: tuple[int, ...]  # the block's first row in every sequence


@dataclass(frozen=True)
class Validation:
    """What is asked of every fit: forecasts of so many rows, from origins so many rows apart."""

    horizon: int
    stride: int | None
    num_samples: int
    process_factors: tuple[float, ...]


def blocks(data: Dataset, fraction: float, count: int) -> list[Block]:
    """The last `fraction` of every sequence, the one before it, and so on, as long as as much is left before them."""
    held_out = []
    for number in range(max(1, min(count, int(1 / fraction + 1e-9) - 1))):
        shares = (1 - (number + 1) * fraction, 1 - number * fraction)
        starts, ends = (tuple(round(share * length) for length in data.lengths) for share in shares)
        held_out.append(Block(_without(data, starts, ends, data.split(shares[0])[0]), data.up_to(ends), starts))
    return held_out


def _without(data: Dataset, starts: Sequence[int], ends: Sequence[int], before: Dataset) -> Dataset:
    """What comes before the rows of a block, and what comes after them as sequences of their own."""
    later = [i for i, (end, length) in enumerate(zip(ends, data.lengths, strict=True)) if length - end >= 2]
    return dataclasses.replace(
        before,
        outputs=(*before.outputs, *(data.outputs[i][ends[i] :] for i in later)),
        controls=(*before.controls, *(data.controls[i][ends[i] :] for i in later)),
        sequence_names=(*before.sequence_names, *(f"{data.sequence_names[i]}, from row {ends[i]}" for i in later)),
    )


def validated(
    name: str,
    results: Sequence[FitResult],
    held_out: Sequence[Block],
    asked: Validation,
    scaling: Scaling,
    *,
    key: PRNGKey,
    folder: Path | None = None,
) -> tuple[Evaluation, float]:
    """The forecasts of all blocks, each by the fit to the rest, and the factor of the process noise that serves them.

    What is done is kept in `folder`, and taken from there.
    """
    if folder is not None and present_folder(folder).is_dir():
        return load(folder)

    def evaluated(factor: float) -> Evaluation:
        return joined([_forecasts(name, *each, factor, asked, scaling, key) for each in zip(results, held_out, strict=True)])

    evaluation, factor = _settled(evaluated, lambda evaluation: evaluation.score(name).nlpd, asked.process_factors)
    if folder is not None:
        save(folder, (evaluation, factor))
    return evaluation, factor


def with_factor(result: FitResult, factor: float) -> FitResult:
    """The fit with `factor` times its process noise."""
    return dataclasses.replace(result, model=with_process_factor(result.model, factor))


def joined(parts: Sequence[Evaluation]) -> Evaluation:
    """The windows of evaluations of the same forecasters, one after the other."""
    errors = {
        name: Errors(
            *(np.concatenate([getattr(part.errors[name], field) for part in parts]) for field in Errors.__dataclass_fields__)
        )
        for name in parts[0].errors
    }
    sequence, origin = (np.concatenate([getattr(part, field) for part in parts]) for field in ("sequence", "origin"))
    seconds = {name: sum(part.seconds[name] for part in parts) for name in parts[0].seconds}
    return dataclasses.replace(parts[0], errors=errors, sequence=sequence, origin=origin, seconds=seconds)


def _forecasts(
    name: str, result: FitResult, block: Block, factor: float, asked: Validation, scaling: Scaling, key: PRNGKey
) -> Evaluation:
    rooms = [length - start for length, start in zip(block.until.lengths, block.starts, strict=True)]
    horizon = min(asked.horizon, *rooms)
    num_origins = sum(room - horizon + 1 for room in rooms)
    return rolling_origin(
        {name: FittedForecaster(with_factor(result, factor), num_samples=asked.num_samples)},
        block.until,
        horizon=horizon,
        stride=asked.stride or max(1, num_origins // WINDOWS),
        start=list(block.starts),
        scaling=scaling,
        key=jr.fold_in(key, EVALUATION),
    )


def _settled(evaluated: Callable[[float], T], nlpd: Callable[[T], float], factors: Sequence[float]) -> tuple[T, float]:
    """The factor of the process noise half-way between the one with the highest log score and the typical one, in log units.

    The bound sees the next row, a forecast many; where they disagree on the noise, rows that were not fitted to decide. But
    these are few, so that their word counts half. Factors are tried upwards until the score falls; a single one is taken as it
    is.
    """
    if len(factors) == 1:
        return evaluated(factors[0]), factors[0]
    best, least = factors[0], np.inf
    for factor in factors:
        score = nlpd(evaluated(factor))
        if not score < least:
            break
        best, least = factor, score
    settled = float(np.sqrt(best * TYPICAL_FACTOR))
    return evaluated(settled), settled
