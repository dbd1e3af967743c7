"""A file becomes a table, or the error says what is wrong with the file.

Text is taken apart by Python's `csv`, because pandas fills short lines, renames repeated columns and drops blank lines without a
word.
"""

import csv
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pandas as pd
import scipy.io

from gpssm.tables import IN_SETTINGS, as_number, nearest, unknown

PathLike: TypeAlias = str | os.PathLike

TEXT_SEPARATORS = {".csv": ",", ".tsv": "\t", ".tab": "\t"}


@contextmanager
def naming_file(path: PathLike) -> Iterator[None]:
    """Puts the file's name before whatever its content is blamed for."""
    if not Path(path).exists():
        raise FileNotFoundError(f"There is no file '{path}'{nearest(Path(path).name, _siblings(path))}.")
    if not Path(path).is_file():
        raise ValueError(f"{path}: expected a file, came a folder. Name one file in it.")
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _siblings(path: PathLike) -> list[str]:
    folder = Path(path).parent
    return sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []


def load_text(path: PathLike, separator: str | None, encoding: str, wanted: Sequence[str]) -> pd.DataFrame:
    """The cells of a delimited text file as text, indexed by the line of the file they stand on."""
    if separator is None:
        separator = TEXT_SEPARATORS.get(Path(path).suffix.lower(), ",")
    if len(separator) != 1:
        raise ValueError(f"separator must be a single character such as ';', came {separator!r}.")
    _check_is_text(path, encoding)
    try:
        with open(path, encoding=encoding, newline="") as file:
            reader = csv.reader(file, delimiter=separator, skipinitialspace=True)
            lines = [(reader.line_num, [cell.strip() for cell in cells]) for cells in reader]
    except LookupError:
        raise ValueError(f"there is no encoding {encoding!r}. Usual ones are 'utf-8', 'utf-16' and 'cp1252'.") from None
    except UnicodeError:
        raise ValueError(
            f"the text is not {encoding.removesuffix('-sig')}. Save it as UTF-8, or pass encoding='cp1252'{IN_SETTINGS}."
        ) from None
    except csv.Error as error:
        raise ValueError(f"this is not a text table ({error}). Save it as UTF-8 text.") from None
    while lines and not lines[-1][1]:  # blank lines at the end
        lines.pop()
    while lines and not any(lines[0][1]):
        lines.pop(0)
    if not lines:
        raise ValueError("the file is empty; expected a line of column names and rows of numbers below it.")
    header = lines.pop(0)[1]
    while len(header) > 1 and not header[-1]:  # every line ends in a separator
        header.pop()
    _check_header(header, wanted, separator)
    if len(header) > 1:
        lines = [(number, cells) for number, cells in lines if cells not in ([], [""])]
    for number, cells in lines:
        while len(cells) > len(header) and not cells[-1]:
            cells.pop()
        if len(header) == 1 and not cells:  # in a lone column a blank line is a missing value
            cells.append("")
        if len(cells) != len(header):
            is_comma = separator == "," and len(cells) > len(header)
            hint = f" If those are decimal commas, quote the numbers and pass decimal=','{IN_SETTINGS}." if is_comma else ""
            hint = " A quotation mark is not closed." if any("\n" in cell for cell in cells) else hint
            raise ValueError(
                f"line {number} has {len(cells)} cells, but the header names {len(header)} columns. Mend or remove it.{hint}"
            )
    numbers = pd.Index([number for number, _ in lines], name="line")
    frame = pd.DataFrame([cells for _, cells in lines], index=numbers, columns=range(len(header)), dtype=object)
    frame.columns = pd.Index(header, dtype=object)
    return frame


def _check_is_text(path: PathLike, encoding: str) -> None:
    """Raise where a file holds zero bytes, as no text in a single-byte encoding or in UTF-8 does."""
    with open(path, "rb") as file:
        beginning = file.read(4096)
    if b"\0" not in beginning or encoding.lower().replace("_", "-").startswith(("utf-16", "utf-32")):
        return
    if beginning.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise ValueError(f"the text is UTF-16. Save it as UTF-8, or pass encoding='utf-16'{IN_SETTINGS}.")
    raise ValueError("this is not a text table, for it holds zero bytes. Save the table as CSV, in UTF-8.")


def _check_header(header: Sequence[str], wanted: Sequence[str], separator: str) -> None:
    if set(wanted) <= set(header):
        return
    others = [mark for mark in (";", "\t", "|", ",") if mark != separator and mark in header[0]]
    if len(header) == 1 and others:
        decimal = ", and decimal=',' if it writes 1,5 for one and a half" if others[0] != "," else ""
        raise ValueError(
            f"with the separator {separator!r} the first line is one column, {header[0]!r}. Pass "
            f"separator={others[0]!r}{decimal}{IN_SETTINGS}."
        )
    numbers = [as_number(cell, ".") for cell in header]
    if None not in numbers and any(header):
        raise ValueError(f"the first line must name the columns, but it holds numbers: {', '.join(header[:5])}.")


def load_parquet(path: PathLike) -> pd.DataFrame:
    """The table in a Parquet file."""
    try:
        return pd.read_parquet(path)
    except Exception as error:  # whatever a damaged file makes pyarrow say
        raise ValueError(f"cannot be read as Parquet ({_first_line(error)}). Write it again, or use CSV.") from None


def load_mat(path: PathLike, wanted: Sequence[str]) -> tuple[pd.DataFrame, dict[str, tuple[str, ...]]]:
    """The wanted variables of a MATLAB file as columns, and their names: a wide `y` becomes y1, y2, ..."""
    try:
        variables = scipy.io.loadmat(str(path), appendmat=False)
    except NotImplementedError:
        raise ValueError("MATLAB v7.3 files cannot be read. Save it as v7: in MATLAB, save('file.mat', '-v7').") from None
    except Exception as error:  # a damaged file makes scipy raise nearly anything
        raise ValueError(f"cannot be read as a MATLAB file ({_first_line(error)}). Save it again with '-v7'.") from None
    known = [name for name in variables if not name.startswith("__")]
    columns: dict[str, np.ndarray] = {}
    columns_of: dict[str, tuple[str, ...]] = {}
    for name in wanted:
        if name not in known:
            raise ValueError(unknown("variable", name, known))
        values = variables[name]
        if not isinstance(values, np.ndarray) or values.dtype.kind not in "biuf" or values.ndim != 2:
            kind = getattr(values, "dtype", type(values).__name__)
            raise ValueError(
                f"the variable '{name}' must be a real vector or a [time, column] matrix, came {kind} "
                f"of shape {getattr(values, 'shape', '?')}. Save its parts one by one, or use from_arrays."
            )
        matrix = values.reshape(-1, 1) if 1 in values.shape else values
        names = (name,) if matrix.shape[1] == 1 else tuple(f"{name}{i + 1}" for i in range(matrix.shape[1]))
        columns_of[name] = names
        columns.update(zip(names, matrix.T, strict=True))
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name}: {length}" for name, length in lengths.items())
        raise ValueError(f"the variables must have equally many rows, came {listed}.")
    return pd.DataFrame(columns), columns_of


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
