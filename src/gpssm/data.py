"""The one gate for a user's arrays: behind it they are checked and named, and NaN is a missing output.

A `Dataset` always holds the user's units. A fit standardises by the `Scaling` of its training data and keeps
it; compiled code sees a `Window`, padded and masked so that one program serves all sequences.
"""

import dataclasses
import math
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from jaxtyping import Array, Bool, Float, Int

from gpssm import readers
from gpssm.readers import PathLike
from gpssm.sequences import check_channels_observed, check_names, check_sequences, check_units, real_array, sequence_arrays
from gpssm.tables import Columns, labels_of, take_apart

AnyArray: TypeAlias = np.ndarray | jax.Array


class Window(eqx.Module):
    """A sequence as compiled code sees it, in standard units; a batch of them has a `sequence` axis first."""

    outputs: Float[Array, "*sequence time output"]  # missing and padded entries hold 0
    is_observed: Bool[Array, "*sequence time output"]
    controls: Float[Array, "*sequence time control"]  # 0 in the padding
    is_real: Bool[Array, "*sequence time"]  # False in the padding
    sequence: Int[Array, "*sequence"]  # row of the per-sequence tables
    start: Int[Array, "*sequence"]  # first time step, when a window is a piece of a sequence


@dataclasses.dataclass(frozen=True, eq=False)
class Scaling:
    """From the user's units to standard ones, `(value - offset) / scale` for every channel, and back."""

    output_offset: Float[np.ndarray, "output"]
    output_scale: Float[np.ndarray, "output"]
    control_offset: Float[np.ndarray, "control"]
    control_scale: Float[np.ndarray, "control"]

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            values = real_array(getattr(self, field.name), field.name)
            if values.ndim != 1 or not np.isfinite(values).all():
                raise ValueError(f"{field.name} must be a vector of finite numbers, one a channel, came {values}.")
            if field.name.endswith("scale") and not (values > 0).all():
                raise ValueError(f"{field.name} must be positive, came {values}.")
            object.__setattr__(self, field.name, values)

    @classmethod
    def of(cls, train: "Dataset") -> "Scaling":
        """The mean and standard deviation of every channel of the training data, missing outputs left out."""
        check_channels_observed(train.outputs, train.output_names)
        outputs = _mean_and_deviation(np.concatenate(train.outputs), train.output_names, "output")
        controls = _mean_and_deviation(np.concatenate(train.controls), train.control_names, "control")
        return cls(*outputs, *controls)

    @classmethod
    def identity(cls, num_outputs: int, num_controls: int) -> "Scaling":
        """Leaves every value as it is."""
        return cls(np.zeros(num_outputs), np.ones(num_outputs), np.zeros(num_controls), np.ones(num_controls))

    def outputs(self, values: Float[AnyArray, "*batch output"]) -> Float[AnyArray, "*batch output"]:
        """Outputs in standard units."""
        return (values - _along_last(self.output_offset, values)) / _along_last(self.output_scale, values)

    def controls(self, values: Float[AnyArray, "*batch control"]) -> Float[AnyArray, "*batch control"]:
        """Controls in standard units."""
        return (values - _along_last(self.control_offset, values)) / _along_last(self.control_scale, values)

    def outputs_back(self, values: Float[AnyArray, "*batch output"]) -> Float[AnyArray, "*batch output"]:
        """Outputs in the user's units."""
        return values * _along_last(self.output_scale, values) + _along_last(self.output_offset, values)

    def scale_back(self, deviation: Float[AnyArray, "*batch output"]) -> Float[AnyArray, "*batch output"]:
        """Standard deviations (or differences) of outputs in the user's units."""
        return deviation * _along_last(self.output_scale, deviation)

    @property
    def log_jacobian(self) -> Float[np.ndarray, "output"]:
        """What each observed output adds to a log density to bring it from standard units to the user's."""
        return -np.log(self.output_scale)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Scaling):
            return NotImplemented
        return all(np.array_equal(getattr(self, f.name), getattr(other, f.name)) for f in dataclasses.fields(self))


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Dataset:
    """One or many sequences of outputs, and the controls that act on them, in the user's units.

    Row t of the controls acts between rows t and t+1 of the outputs. The arrays are read-only copies. Build
    one by `from_arrays`, `from_dataframe` or a `read_...` function: these refuse a channel that is missing
    throughout, while a part of a dataset may have one.
    """

    outputs: tuple[Float[np.ndarray, "_time output"], ...]  # NaN = missing
    controls: tuple[Float[np.ndarray, "_time control"], ...]  # [time, 0] when there are none
    output_names: tuple[str, ...]
    control_names: tuple[str, ...]
    output_units: tuple[str, ...]  # "" = unknown
    control_units: tuple[str, ...]
    sequence_names: tuple[str, ...]
    sampling_time: float | None = None
    time_unit: str = ""

    def __post_init__(self) -> None:
        for field in ("outputs", "controls"):
            object.__setattr__(self, field, tuple(real_array(values, field) for values in getattr(self, field)))
        for field in ("output_names", "control_names", "output_units", "control_units", "sequence_names"):
            object.__setattr__(self, field, tuple(getattr(self, field)))
        if self.sampling_time is not None:
            if not (math.isfinite(self.sampling_time) and self.sampling_time > 0):
                raise ValueError(f"sampling_time must be positive, or None if unknown, came {self.sampling_time}.")
            object.__setattr__(self, "sampling_time", float(self.sampling_time))
        check_names("outputs and controls", (*self.output_names, *self.control_names))
        check_names("sequences", self.sequence_names)
        if not self.output_names:
            raise ValueError("there are no outputs; expected at least one channel to model.")
        check_units("output", self.output_names, self.output_units)
        check_units("control", self.control_names, self.control_units)
        check_sequences(self.sequence_names, self.outputs, self.controls, self.output_names, self.control_names)

    @classmethod
    def from_arrays(
        cls,
        outputs: Any,
        controls: Any = None,
        *,
        output_names: Sequence[str] | None = None,
        control_names: Sequence[str] | None = None,
        output_units: Sequence[str] | None = None,
        control_units: Sequence[str] | None = None,
        sequence_names: Sequence[str] | None = None,
        sampling_time: float | int | None = None,
        time_unit: str = "",
    ) -> "Dataset":
        """A dataset of arrays: `[time]`, `[time, output]`, `[sequence, time, output]`, or a list.

        NaN in an output means missing. Channels are called y1, y2, ... and u1, u2, ... unless they are named.
        """
        output_arrays = sequence_arrays(outputs, "outputs")
        num_outputs = output_arrays[0].shape[1]
        if controls is None:
            control_arrays = tuple(np.zeros((len(values), 0)) for values in output_arrays)
        else:
            control_arrays = sequence_arrays(controls, "controls")
        num_controls = control_arrays[0].shape[1] if control_arrays else 0
        data = cls(
            outputs=output_arrays,
            controls=control_arrays,
            output_names=_names("output", output_names, [f"y{i + 1}" for i in range(num_outputs)]),
            control_names=_names("control", control_names, [f"u{i + 1}" for i in range(num_controls)]),
            output_units=_given_or(output_units, [""] * num_outputs),
            control_units=_given_or(control_units, [""] * num_controls),
            sequence_names=_given_or(sequence_names, [str(i) for i in range(len(output_arrays))]),
            sampling_time=None if sampling_time is None else float(sampling_time),
            time_unit=time_unit,
        )
        check_channels_observed(data.outputs, data.output_names)
        return data

    @classmethod
    def from_dataframe(
        cls,
        frame: pd.DataFrame,
        outputs: Columns,
        controls: Columns = (),
        sequence: Hashable | None = None,
        time: Hashable | None = None,
        *,
        output_units: Sequence[str] | None = None,
        control_units: Sequence[str] | None = None,
        sampling_time: float | int | None = None,
        time_unit: str = "",
        decimal: str = ".",
    ) -> "Dataset":
        """A dataset of the named columns of a table; the column `sequence` tells the sequences apart.

        Rows are evenly spaced and in order. The column `time` (numbers or timestamps) proves it and gives the
        sampling time; rows left out become missing outputs if there are no controls. `decimal` is the decimal
        mark of numbers held as text.
        """
        table = take_apart(frame, outputs, controls, sequence, time, decimal)
        if time is not None and sampling_time is not None:
            raise ValueError("time and sampling_time both say how far apart rows are. Give one of them.")
        if table.time_unit and time_unit not in ("", table.time_unit):
            raise ValueError(f"'{time}' holds timestamps, in {table.time_unit}, but time_unit is '{time_unit}'.")
        return cls.from_arrays(
            table.outputs,
            table.controls,
            output_names=table.output_names,
            control_names=table.control_names,
            output_units=output_units,
            control_units=control_units,
            sequence_names=table.sequence_names,
            sampling_time=sampling_time if time is None else table.sampling_time,
            time_unit=table.time_unit or time_unit,
        )

    @property
    def num_sequences(self) -> int:
        return len(self.outputs)

    @property
    def num_outputs(self) -> int:
        return len(self.output_names)

    @property
    def num_controls(self) -> int:
        return len(self.control_names)

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(len(values) for values in self.outputs)

    @property
    def max_length(self) -> int:
        return max(self.lengths)

    @property
    def num_rows(self) -> int:
        return sum(self.lengths)

    def __len__(self) -> int:
        return self.num_sequences

    def __getitem__(self, which: int | slice) -> "Dataset":
        """Some of the sequences."""
        chosen = range(self.num_sequences)[which]
        return self._pick([chosen] if isinstance(chosen, int) else chosen)

    def _pick(self, indices: Sequence[int]) -> "Dataset":
        fields = {f: tuple(getattr(self, f)[i] for i in indices) for f in ("outputs", "controls", "sequence_names")}
        return dataclasses.replace(self, **fields)

    def _cut(self, pieces: Sequence[slice]) -> "Dataset":
        outputs = tuple(values[piece] for values, piece in zip(self.outputs, pieces, strict=True))
        controls = tuple(values[piece] for values, piece in zip(self.controls, pieces, strict=True))
        return dataclasses.replace(self, outputs=outputs, controls=controls)

    def rows(self, start: int, stop: int | None = None) -> "Dataset":
        """The rows `start:stop` of every sequence, counted from 0, or from the end when negative."""
        return self._cut([slice(start, stop)] * self.num_sequences)

    def up_to(self, ends: Sequence[int]) -> "Dataset":
        """The rows of every sequence before an end of its own."""
        return self._cut([slice(0, end) for end in ends])

    def split(self, fraction: float) -> tuple["Dataset", "Dataset"]:
        """(train, test): the first `fraction` of every sequence, and what comes after it."""
        _check_fraction(fraction)
        cuts = [round(fraction * length) for length in self.lengths]
        for name, length, cut in zip(self.sequence_names, self.lengths, cuts, strict=True):
            if min(cut, length - cut) < 2:
                raise ValueError(
                    f"split({fraction}) cuts sequence '{name}' into {cut} and {length - cut} rows; expected "
                    "at least 2 on each side. Choose another fraction, or split_sequences."
                )
        return self.up_to(cuts), self._cut([slice(cut, None) for cut in cuts])

    def split_sequences(self, which: float | Sequence[int | str]) -> tuple["Dataset", "Dataset"]:
        """(train, test): a first fraction of the sequences, or those named or indexed; the others."""
        if isinstance(which, float):
            _check_fraction(which)
            train = list(range(round(which * self.num_sequences)))
        elif isinstance(which, Sequence) and not isinstance(which, str):
            train = [self._sequence_index(w) for w in which]
        else:
            raise ValueError(f"split_sequences takes a fraction or a list of indices or names, came {which!r}.")
        test = [i for i in range(self.num_sequences) if i not in train]
        if not train or not test or len(set(train)) < len(train):
            raise ValueError(
                f"split_sequences({which!r}) makes {train} of the {self.num_sequences} sequences the training part; "
                "expected each once, and at least one on each side."
            )
        return self._pick(train), self._pick(test)

    def _sequence_index(self, which: int | str) -> int:
        index = self.sequence_names.index(which) if which in self.sequence_names else which
        if isinstance(index, str) or not -self.num_sequences <= index < self.num_sequences:
            names = ", ".join(self.sequence_names[:10])
            raise ValueError(f"there is no sequence {which!r} among the {self.num_sequences}, called {names}.")
        return index % self.num_sequences

    def to_dataframe(self, sequence: str = "sequence", time: str = "time") -> pd.DataFrame:
        """All rows in one table: a column for the sequence, and for the time if its step is known.

        `Dataset.from_dataframe` with these names makes the same dataset of it again (units aside).
        """
        columns: dict[str, Any] = {sequence: np.repeat(self.sequence_names, self.lengths)}
        if self.sampling_time is not None:
            columns[time] = np.concatenate([np.arange(length) * self.sampling_time for length in self.lengths])
        names = (*self.output_names, *self.control_names)
        for name in names:
            if name in columns:
                raise ValueError(f"a channel is called '{name}' too: to_dataframe(sequence=..., time=...) renames.")
        values = np.hstack([np.concatenate(self.outputs), np.concatenate(self.controls)])
        return pd.DataFrame({**columns, **dict(zip(names, values.T, strict=True))})

    def windows(self, scaling: Scaling, dtype: Any = None) -> Window:
        """All sequences in standard units, padded to the longest: a `Window` with a leading `sequence` axis.

        `dtype` is JAX's default float unless it is given.
        """
        wanted = np.dtype(jnp.result_type(float) if dtype is None else dtype)
        if not jnp.issubdtype(wanted, jnp.floating):
            raise ValueError(f"dtype must be a floating-point type, came {wanted}.")
        if jax.dtypes.canonicalize_dtype(wanted) != wanted:
            raise ValueError(f"JAX computes without {wanted}. Call jax.config.update('jax_enable_x64', True) first.")
        if (scaling.output_scale.size, scaling.control_scale.size) != (self.num_outputs, self.num_controls):
            raise ValueError(
                f"the scaling has {scaling.output_scale.size} outputs and {scaling.control_scale.size} "
                f"controls, the data {self.num_outputs} and {self.num_controls}. Take the scaling of data with "
                "the same columns."
            )
        shape = (self.num_sequences, self.max_length)
        outputs, controls = np.full((*shape, self.num_outputs), np.nan), np.zeros((*shape, self.num_controls))
        for i, length in enumerate(self.lengths):
            outputs[i, :length] = scaling.outputs(self.outputs[i])
            controls[i, :length] = scaling.controls(self.controls[i])
        is_observed = ~np.isnan(outputs)
        outputs[~is_observed] = 0.0
        largest = max((np.abs(values).max() for values in (outputs, controls) if values.size), default=0.0)
        if largest > float(jnp.finfo(wanted).max):
            raise ValueError(f"a value is {largest:.3g} in standard units, too large for {wanted}. Rescale the data.")
        return Window(
            outputs=jnp.asarray(outputs, wanted),
            is_observed=jnp.asarray(is_observed),
            controls=jnp.asarray(controls, wanted),
            is_real=jnp.asarray(np.arange(self.max_length) < np.array(self.lengths)[:, None]),
            sequence=jnp.arange(self.num_sequences, dtype=jnp.int32),
            start=jnp.zeros(self.num_sequences, jnp.int32),
        )

    def __eq__(self, other: object) -> bool:
        """Equal content; sampling times up to rounding."""
        if not isinstance(other, Dataset):
            return NotImplemented
        ours, theirs = self.sampling_time or 0.0, other.sampling_time or 0.0
        texts = ("output_names", "control_names", "output_units", "control_units", "sequence_names", "time_unit")
        return (
            all(getattr(self, text) == getattr(other, text) for text in texts)
            and math.isclose(ours, theirs, rel_tol=1e-9)
            and all(np.array_equal(a, b, equal_nan=True) for a, b in zip(self.outputs, other.outputs, strict=True))
            and all(np.array_equal(a, b) for a, b in zip(self.controls, other.controls, strict=True))
        )

    def _missing_share(self) -> float:
        return sum(int(np.isnan(values).sum()) for values in self.outputs) / (self.num_rows * self.num_outputs)

    def __repr__(self) -> str:
        shape = f"{self.num_sequences} sequence{'s' * (self.num_sequences > 1)}, {self.num_rows} rows"
        every = "" if self.sampling_time is None else f" every {self.sampling_time:.6g} {self.time_unit}".rstrip()
        missing = f", {self._missing_share():.1%} of outputs missing" if self._missing_share() else ""
        names = f"outputs={list(self.output_names)}" + f", controls={list(self.control_names)}" * (self.num_controls > 0)
        return f"Dataset({shape}{every}, {names}{missing})"

    def describe(self) -> str:
        """A few lines for a person: how much there is, how much is missing, and each channel's range."""
        lines = [repr(self), f"rows in a sequence: {min(self.lengths)} to {self.max_length}"]
        values_of = dict(zip(self.output_names, np.concatenate(self.outputs).T, strict=True))
        values_of |= zip(self.control_names, np.concatenate(self.controls).T, strict=True)
        units = (*self.output_units, *self.control_units)
        for i, ((name, values), unit) in enumerate(zip(values_of.items(), units, strict=True)):
            seen = values[~np.isnan(values)]
            extent = f"{seen.min():.6g} to {seen.max():.6g} {unit}".rstrip() if seen.size else "nothing observed"
            absent = f", {1 - seen.size / values.size:.1%} missing" if seen.size < values.size else ""
            kind = "output" if i < self.num_outputs else "control"
            lines.append(f"  {kind:<7} {name:<{max(map(len, values_of))}}  {extent}{absent}")
        return "\n".join(lines)


def read_csv(
    path: PathLike,
    outputs: Columns,
    controls: Columns = (),
    sequence: str | None = None,
    time: str | None = None,
    *,
    separator: str | None = None,
    decimal: str = ".",
    encoding: str = "utf-8-sig",
    **details: Any,
) -> Dataset:
    """The named columns of a text table whose first line names them; `,` separates cells, in .tsv a tab.

    Empty cells of outputs are missing outputs. For `details` (units, ...) see `Dataset.from_dataframe`.
    """
    wanted = [str(c) for c in (*labels_of(outputs), *labels_of(controls), sequence, time) if c is not None]
    with readers.naming_file(path):
        frame = readers.load_text(path, separator, encoding, wanted)
        return Dataset.from_dataframe(frame, outputs, controls, sequence, time, decimal=decimal, **details)


def read_parquet(path: PathLike, outputs: Columns, controls: Columns = (), *where: Any, **details: Any) -> Dataset:
    """The named columns of a Parquet file; all arguments as in `Dataset.from_dataframe`."""
    with readers.naming_file(path):
        return Dataset.from_dataframe(readers.load_parquet(path), outputs, controls, *where, **details)


def read_mat(
    path: PathLike,
    outputs: Columns,
    controls: Columns = (),
    sequence: str | None = None,
    time: str | None = None,
    **details: Any,
) -> Dataset:
    """The named variables of a MATLAB file (v4 to v7): vectors, or matrices, `y` giving y1, y2, ...

    Rows of a matrix are time steps. For `details` (units, ...) see `Dataset.from_dataframe`.
    """
    with readers.naming_file(path):
        wanted = (*labels_of(outputs), *labels_of(controls), sequence, time)
        frame, columns_of = readers.load_mat(path, [str(c) for c in wanted if c is not None])
        outputs = [column for name in labels_of(outputs) for column in columns_of[str(name)]]
        controls = [column for name in labels_of(controls) for column in columns_of[str(name)]]
        return Dataset.from_dataframe(frame, outputs, controls, sequence, time, **details)


def read_table(path: PathLike, outputs: Columns, controls: Columns = (), *where: Any, **details: Any) -> Dataset:
    """The named columns of a CSV, TSV, Parquet or MATLAB file, by its suffix; see those readers."""
    known = {".parquet": read_parquet, ".pq": read_parquet, ".mat": read_mat}
    known |= dict.fromkeys(readers.TEXT_SEPARATORS, read_csv)
    suffix = Path(path).suffix.lower()
    if suffix not in known:
        raise ValueError(
            f"{path}: expected the ending {', '.join(sorted(known))}, came '{suffix}'. Rename it, or save it as one of these."
        )
    return known[suffix](path, outputs, controls, *where, **details)


def _given_or(names: Sequence[str] | None, default: list[str]) -> tuple[str, ...]:
    return tuple(default if names is None else [names] if isinstance(names, str) else names)


def _names(kind: str, given: Sequence[str] | None, default: list[str]) -> tuple[str, ...]:
    names = _given_or(given, default)
    if len(names) != len(default):
        raise ValueError(f"{kind}_names must name {len(default)} {kind}s, one a column of the array, came {list(names)}.")
    return names


def _along_last(vector: Float[np.ndarray, "channel"], values: AnyArray) -> np.ndarray:
    return vector.reshape((1,) * (values.ndim - 1) + (-1,))


def _check_fraction(fraction: float) -> None:
    if not 0 < fraction < 1:
        raise ValueError(f"the fraction must lie between 0 and 1 (0.7: the first 70 % for training), came {fraction}.")


def _mean_and_deviation(
    values: Float[np.ndarray, "row channel"], names: tuple[str, ...], kind: str
) -> tuple[Float[np.ndarray, "channel"], Float[np.ndarray, "channel"]]:
    with np.errstate(over="ignore", invalid="ignore"):
        offset, scale = np.nanmean(values, axis=0), np.nanstd(values, axis=0)
        largest = np.nanmax(np.abs(values), axis=0)
    for i, name in enumerate(names):
        if not math.isfinite(scale[i]):
            raise ValueError(f"the {kind} '{name}' reaches {largest[i]:.3g}, too large to scale. Choose another unit.")
        if scale[i] <= 1e-12 * largest[i]:
            value = values[~np.isnan(values[:, i]), i][0]
            reason = "it can explain nothing" if kind == "control" else "there is nothing to model in it"
            raise ValueError(f"the {kind} '{name}' is always {value:.6g}, so that {reason}. Leave it out.")
    return offset, scale
