"""A table becomes arrays, one a sequence, or the error says which cell stands in the way.

What a cell may hold is decided here (a number, a word for missing, a time), and what times must be like: increasing and even.
"""

import difflib
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pandas as pd
from jaxtyping import Float, Int

Columns: TypeAlias = Hashable | Iterable[Hashable]

MISSING_WORDS = frozenset({"", "nan", "na", "n/a", "#n/a", "<na>", "null", "none", "nat"})
TRUTH_WORDS = {"true": 1.0, "false": 0.0}
UNEVEN_TOLERANCE = 0.05  # of one step: clocks are rounded, and loggers are late
IN_SETTINGS = " (on the command line: under [data] in the file of --config)"  # where options of readers stand
LONGEST_FILLING = 10  # a sequence may become so many times longer when its gaps are filled in


class Table(NamedTuple):
    """What a table holds, one array a sequence."""

    outputs: list[Float[np.ndarray, "_time output"]]
    controls: list[Float[np.ndarray, "_time control"]] | None
    output_names: list[str]
    control_names: list[str]
    sequence_names: list[str]
    sampling_time: float | None
    time_unit: str


def take_apart(
    frame: pd.DataFrame,
    outputs: Columns,
    controls: Columns,
    sequence: Hashable | None,
    time: Hashable | None,
    decimal: str,
) -> Table:
    """The named columns of a table as arrays, one a sequence, with gaps in the times filled in."""
    output_columns, control_columns = labels_of(outputs), labels_of(controls)
    if not output_columns:
        raise ValueError("there are no outputs; expected at least one column, as in outputs=['temperature'].")
    if decimal not in (".", ","):
        raise ValueError(f"decimal must be '.' or ',', came {decimal!r}.")
    markers = {"sequence": [] if sequence is None else [sequence], "time": [] if time is None else [time]}
    in_index = [label for label in (sequence, time) if label is not None and label in frame.index.names]
    if in_index and not any(label in frame.columns for label in in_index):
        frame = frame.reset_index(level=in_index)
    check_columns(frame, {"output": output_columns, "control": control_columns, **markers})
    groups = [("0", np.arange(len(frame)))] if sequence is None else column_groups(frame, sequence)
    values = np.stack([column_numbers(frame, label, decimal) for label in output_columns], axis=1)
    pieces, step, unit = [values[rows] for _, rows in groups], None, ""
    if time is not None:
        times, unit = column_times(frame, time, decimal)
        pieces, step = fill_gaps(frame, groups, times, pieces, bool(control_columns))
    acting = None
    if control_columns:
        columns = np.stack([column_numbers(frame, label, decimal) for label in control_columns], axis=1)
        acting = [columns[rows] for _, rows in groups]
    names = [str(label) for label in output_columns], [str(label) for label in control_columns]
    return Table(pieces, acting, *names, [name for name, _ in groups], step, unit)


def labels_of(columns: Columns) -> list[Hashable]:
    """A lone column name is as good as a list of one."""
    return list(columns) if isinstance(columns, Iterable) and not isinstance(columns, str) else [columns]


def check_columns(frame: pd.DataFrame, roles: dict[str, Sequence[Hashable]]) -> None:
    """Every column that a role asks for is there, once, and plays that role only."""
    role_of: dict[Hashable, str] = {}
    columns = list(frame.columns)
    for role, labels in roles.items():
        for label in labels:
            if label in role_of:
                roles_of_it = f"both times as {role}" if role_of[label] == role else f"as {role_of[label]} and as {role}"
                raise ValueError(f"the column '{label}' is named twice: {roles_of_it}. Name it once.")
            role_of[label] = role
            count = columns.count(label)
            if count == 0:
                raise ValueError(unknown("column", label, columns))
            if count > 1:
                raise ValueError(f"{count} columns are called '{label}'. Rename them, so that the name says which one.")
    if len(frame) == 0:
        raise ValueError("there are column names but no rows below them; expected at least two rows.")


def unknown(kind: str, name: Hashable, known: Sequence[Hashable]) -> str:
    """What to say of a name that is not among the known ones."""
    listed = ", ".join(f"'{k}'" for k in known[:10]) + (f" and {len(known) - 10} more" if len(known) > 10 else "")
    return f"there is no {kind} '{name}'{nearest(name, known)}. There are: {listed or 'none'}."


def nearest(name: Hashable, known: Sequence[Hashable]) -> str:
    """The known name that a mistyped one resembles, to go into an error message; nothing if there is none."""
    by_text = {str(candidate).casefold(): str(candidate) for candidate in known}
    matches = difflib.get_close_matches(str(name).casefold(), list(by_text), n=1, cutoff=0.5)
    return f"; the nearest name is '{by_text[matches[0]]}'" if matches else ""


def row_name(frame: pd.DataFrame, position: int) -> str:
    """What a person would call this row: `line 7` of a file, `row 5` of a table without names."""
    if frame.index.nlevels == 1 and frame.index.name is not None:
        return f"{frame.index.name} {frame.index[position]}"
    return f"row {position} (the first is 0)"


def as_number(cell: Any, decimal: str) -> float | None:
    """A cell as a number, NaN where it is missing, None where it is neither."""
    if cell is None or cell is pd.NA or cell is pd.NaT:
        return float("nan")
    if isinstance(cell, str):
        word = cell.strip().casefold()
        if word in MISSING_WORDS:
            return float("nan")
        if word in TRUTH_WORDS:
            return TRUTH_WORDS[word]
        if "_" in word or (decimal != "." and "." in word):
            return None
        cell = word.replace(decimal, ".")
    try:
        return float(cell)
    except (TypeError, ValueError, OverflowError):
        return None


def column_numbers(frame: pd.DataFrame, label: Hashable, decimal: str = ".") -> Float[np.ndarray, "row"]:
    """A column as floats, missing cells as NaN."""
    column = frame[label]
    kind = column.dtype
    if pd.api.types.is_complex_dtype(kind) or pd.api.types.is_datetime64_any_dtype(kind) or kind.kind == "m":
        raise ValueError(f"the column '{label}' must hold real numbers, came {kind}. Convert it first.")
    if pd.api.types.is_numeric_dtype(kind):
        return column.to_numpy(dtype=np.float64, na_value=np.nan)
    numbers = np.empty(len(column))
    for position, cell in enumerate(column.astype(object)):
        number = as_number(cell, decimal)
        if number is None:
            comma = f" If that is a decimal comma, pass decimal=','{IN_SETTINGS}." if decimal == "." and "," in str(cell) else ""
            point = " Its decimal mark is '.', but decimal=',' was passed." if decimal == "," and "." in str(cell) else ""
            raise ValueError(
                f"column '{label}', {row_name(frame, position)}: expected a number, came {cell!r}. "
                f"Mend the cell, or leave it empty if the value is missing.{comma}{point}"
            )
        numbers[position] = number
    return numbers


def column_times(frame: pd.DataFrame, label: Hashable, decimal: str = ".") -> tuple[Float[np.ndarray, "row"], str]:
    """A column of times as floats, and their unit: `s` for timestamps and durations, unknown for numbers."""
    column = frame[label]
    unit = ""
    if not (pd.api.types.is_datetime64_any_dtype(column.dtype) or column.dtype.kind == "m"):
        try:
            times = column_numbers(frame, label, decimal)
        except ValueError:
            column = _timestamps(frame, label)
        else:
            column = pd.Series(times)
    if column.dtype.kind != "f":
        unit = "s"
        since_first = column if column.dtype.kind == "m" else column - column.min()
        times = (since_first / pd.Timedelta(seconds=1)).to_numpy(dtype=np.float64, na_value=np.nan)
    if not np.isfinite(times).all():
        position = int(np.argmin(np.isfinite(times)))
        raise ValueError(
            f"time column '{label}', {row_name(frame, position)}: expected a time, came "
            f"{frame[label].iloc[position]!r}. Every row needs its time."
        )
    return times, unit


def _timestamps(frame: pd.DataFrame, label: Hashable) -> pd.Series:
    texts = frame[label].reset_index(drop=True)
    stamps = pd.to_datetime(texts, format="ISO8601", utc=True, errors="coerce")
    if stamps.isna().any():
        position = int(np.argmax(stamps.isna().to_numpy()))
        raise ValueError(
            f"time column '{label}', {row_name(frame, position)}: expected a number or an ISO 8601 timestamp "
            f"(2024-01-31 13:45:00), came {texts[position]!r}. Mend the cell, or convert the column by "
            "pandas.to_datetime and use Dataset.from_dataframe."
        )
    return stamps


def column_groups(frame: pd.DataFrame, label: Hashable) -> list[tuple[str, Int[np.ndarray, "_row"]]]:
    """The name and the row positions of each sequence, in order of appearance; its rows may lie apart."""
    codes, names = pd.factorize(frame[label].map(lambda cell: None if isinstance(cell, str) and not cell.strip() else cell))
    if (codes < 0).any():
        missing = row_name(frame, int(np.argmax(codes < 0)))
        raise ValueError(f"sequence column '{label}', {missing}: the cell is empty. Every row needs a sequence.")
    order = np.argsort(codes, kind="stable")
    pieces = np.split(order, np.cumsum(np.bincount(codes))[:-1])
    return [(str(name), rows) for name, rows in zip(names, pieces, strict=True)]


def even_steps(
    times: Float[np.ndarray, "_time"], rows: Int[np.ndarray, "_time"], frame: pd.DataFrame, what: str
) -> tuple[float, Int[np.ndarray, "_time"]]:
    """The step of a sequence's times, and how many steps after the first row each row comes.

    The step is the mean of the differences that are no gaps; every difference must be a whole multiple of it
    to within `UNEVEN_TOLERANCE` steps, so that times which were rounded, or logged a little late, pass.
    """
    between = np.diff(times)
    if not (between > 0).all():
        row = int(np.argmin(between > 0)) + 1
        verb = "comes twice" if between[row - 1] == 0 else f"comes after {times[row - 1]:.12g}"
        raise ValueError(
            f"{what}: times must increase, but {times[row]:.12g} in "
            f"{row_name(frame, int(rows[row]))} {verb}. "
            "Mend or sort the rows, or name the column that tells sequences apart (`sequence`)."
        )
    step = float(between[between < 1.25 * between.min()].mean())
    whole = np.rint(between / step)
    uneven = np.abs(between / step - whole) > UNEVEN_TOLERANCE
    if uneven.any():
        row = int(np.argmax(uneven))
        raise ValueError(
            f"{what}: times must be evenly spaced, but {between[row]:.6g} passes after "
            f"{row_name(frame, int(rows[row]))}, elsewhere {step:.6g}. Resample to even steps, or leave the "
            "time column out if the rows are evenly spaced all the same."
        )
    if whole.sum() + 1 > LONGEST_FILLING * len(times):
        row = int(np.argmax(whole))
        raise ValueError(
            f"{what}: after {row_name(frame, int(rows[row]))} there is a gap of {whole[row] - 1:.0f} steps, "
            "too long to fill. Check the times, or name the two stretches apart in a sequence column."
        )
    index = np.concatenate([[0], np.cumsum(whole)]).astype(np.int64)
    return float(times[-1] - times[0]) / float(index[-1]), index


def fill_gaps(
    frame: pd.DataFrame,
    groups: Sequence[tuple[str, Int[np.ndarray, "_row"]]],
    times: Float[np.ndarray, "row"],
    outputs: Sequence[Float[np.ndarray, "_time output"]],
    has_controls: bool,
) -> tuple[list[Float[np.ndarray, "_time output"]], float | None]:
    """The outputs, with missing ones in the rows that the times show to be left out, and the common step."""
    filled, steps = [], {}
    for (name, rows), values in zip(groups, outputs, strict=True):
        if len(rows) > 1:
            steps[name], index = even_steps(times[rows], rows, frame, f"sequence '{name}'")
            gaps = np.diff(index)
            if has_controls and gaps.max() > 1:
                row = int(np.argmax(gaps > 1))
                raise ValueError(
                    f"sequence '{name}': {gaps[row] - 1} rows are left out after "
                    f"{row_name(frame, int(rows[row]))} (time {times[rows[row]]:.12g}), and the "
                    "controls in them are unknown. Add them with their controls (outputs may be "
                    "empty), or give each stretch its own name in a sequence column."
                )
            values = _spread(values, index)
        filled.append(values)
    if not steps:
        return filled, None
    (first, step), *others = steps.items()
    for name, other in others:
        if abs(other / step - 1.0) > UNEVEN_TOLERANCE:
            raise ValueError(
                f"sequence '{first}' has a row every {step:.6g}, sequence '{name}' every {other:.6g}; "
                "expected one sampling time for all. Resample them alike, or model them apart."
            )
    num_steps = np.array([len(values) - 1 for values in filled if len(values) > 1])
    return filled, float(f"{np.average(list(steps.values()), weights=num_steps):.12g}")


def _spread(values: Float[np.ndarray, "_row output"], index: Int[np.ndarray, "_row"]) -> Float[np.ndarray, "_time output"]:
    spread = np.full((int(index[-1]) + 1, values.shape[1]), np.nan)
    spread[index] = values
    return spread
