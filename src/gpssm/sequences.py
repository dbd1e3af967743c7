"""What a user may hand over as sequences, and the refusal of everything else: shapes, names, units, values."""

from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Bool, Float

Sequences: TypeAlias = tuple[Float[np.ndarray, "..."], ...]


def sequence_arrays(values: Any, what: str) -> tuple[Float[np.ndarray, "_time _channel"], ...]:
    """One `[time, channel]` array a sequence; only a list of arrays is taken for a list of sequences."""
    if isinstance(values, list | tuple) and any(getattr(piece, "ndim", 0) > 0 for piece in values):
        arrays = [real_array(piece, f"{what}[{i}]") for i, piece in enumerate(values)]
        expected = "every sequence must be [time] or [time, channel]"
    else:
        array = real_array(values, what)
        arrays = list(array) if array.ndim == 3 else [array]
        expected = "expected [time], [time, channel], [sequence, time, channel] or a list of arrays"
    arrays = [array[:, None] if array.ndim == 1 else array for array in arrays]
    for array in arrays:
        if array.ndim != 2:
            raise ValueError(f"{what}: {expected}, came the shape {array.shape}.")
    if not arrays:
        raise ValueError(f"{what} holds no sequence; expected at least one.")
    return tuple(arrays)


def real_array(values: Any, what: str) -> Float[np.ndarray, "..."]:
    """A read-only float64 copy."""
    try:
        array = values if isinstance(values, np.ndarray) else np.asarray(values)
    except ValueError:
        raise ValueError(f"{what}: the nested lists are ragged. Give a list of NumPy arrays, one a sequence.") from None
    if array.dtype.kind not in "biuf":
        raise ValueError(f"{what} must hold real numbers, came an array of {array.dtype}. Convert it: array.astype(float).")
    copy = np.array(array, dtype=np.float64)
    if isinstance(array, np.ma.MaskedArray):
        copy[np.ma.getmaskarray(array)] = np.nan
    copy.setflags(write=False)
    return copy


def check_names(what: str, names: tuple[str, ...]) -> None:
    """Every name is a text, not empty, and used once."""
    if not all(isinstance(name, str) and name for name in names):
        raise ValueError(f"the names of {what} must be texts that are not empty, came {list(names)}.")
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"the names of {what} must differ, but {repeated} come more than once. Rename them.")


def check_units(kind: str, names: tuple[str, ...], units: tuple[str, ...]) -> None:
    """Every channel has a unit, if only the unknown one."""
    if len(units) != len(names) or not all(isinstance(unit, str) for unit in units):
        raise ValueError(f"{kind}_units must be one text for each of {list(names)} ('' = unknown), came {list(units)}.")


def check_sequences(
    names: tuple[str, ...],
    outputs: Sequences,
    controls: Sequences,
    output_names: tuple[str, ...],
    control_names: tuple[str, ...],
) -> None:
    """Outputs and controls come in pairs that are equally long, with a column a channel, and only an output may be missing."""
    counts = len(outputs), len(controls), len(names)
    if counts[0] == 0 or len(set(counts)) > 1:
        raise ValueError(
            "expected as many sequences of outputs as of controls and as names, at least one; came "
            f"{counts[0]}, {counts[1]} and {counts[2]}."
        )
    for name, seen, acting in zip(names, outputs, controls, strict=True):
        for kind, values, channels in (("output", seen, output_names), ("control", acting, control_names)):
            if values.ndim != 2 or values.shape[1] != len(channels):
                shape = f"[time, {len(channels)}] for {list(channels)}"
                raise ValueError(f"sequence '{name}': expected {kind}s of shape {shape}, came {values.shape}.")
        if len(seen) < 2:
            rows = f"{len(seen)} row{'s' * (len(seen) != 1)}"
            raise ValueError(f"sequence '{name}' has {rows}; expected at least 2. Leave it out, or join it to another.")
        if len(acting) != len(seen):
            raise ValueError(
                f"sequence '{name}' has {len(seen)} rows of outputs and {len(acting)} of controls; "
                "expected as many. Row t of the controls acts between outputs t and t+1; repeat the last if unknown."
            )
        _refuse(np.isinf(seen), name, output_names, "is infinite. Correct it, or use NaN if it is missing")
        _refuse(np.isinf(acting), name, control_names, "is infinite; expected a number. Correct it")
        _refuse(np.isnan(acting), name, control_names, "is missing, but controls must be known. Fill it in")


def _refuse(bad: Bool[np.ndarray, "time channel"], sequence: str, names: tuple[str, ...], what: str) -> None:
    if bad.any():
        row, channel = np.argwhere(bad)[0]
        more = f" (and {bad.sum() - 1} more)" if bad.sum() > 1 else ""
        raise ValueError(f"sequence '{sequence}', row {row} (the first is 0), column '{names[channel]}' {what}{more}.")


def check_channels_observed(outputs: Sequences, names: tuple[str, ...]) -> None:
    """Every output is seen at least once, in whichever sequence."""
    missing = np.all([np.isnan(values).all(axis=0) for values in outputs], axis=0)
    if missing.any():
        name, num_rows = names[int(np.argmax(missing))], sum(map(len, outputs))
        raise ValueError(f"the output '{name}' is missing in all {num_rows} rows. Leave it out, or check the column.")
