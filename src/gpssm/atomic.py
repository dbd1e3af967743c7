"""Decides how files get to disk: whole or not at all, at whatever moment the process dies.

Everything is written beside its place (`.NAME.writing-PID`), synchronised and renamed. A folder cannot be
renamed over another, so the older one steps aside to `.NAME.previous` for the moment between two renames;
`present_folder` finds it there if the process died just then. One process writes to a place at a time.
"""

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO

Content = bytes | Callable[[BinaryIO], None]


def write_atomically(path: str | os.PathLike[str], content: Content) -> None:
    """Write one file: whenever the process dies, `path` holds all of the old content or all of the new.

    `content` is bytes, or a function that writes to the open file it is given.
    """
    file = Path(path).resolve()
    file.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(file)
    temporary = _temporary(file)
    try:
        _write(temporary, content)
        os.replace(temporary, file)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _synchronise(file.parent)


def replace_folder(path: str | os.PathLike[str], files: Mapping[str, Content]) -> None:
    """Make `path` a folder of exactly these files, in place of the folder that may be there.

    Whenever the process dies, `present_folder(path)` is all of the old folder or all of the new one.
    """
    folder = Path(path).resolve()
    folder.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(folder)
    temporary, previous = _temporary(folder), _previous(folder)
    temporary.mkdir()
    try:
        for name, content in files.items():
            _write(temporary / name, content)
        _synchronise(temporary)
        if folder.exists():
            shutil.rmtree(previous, ignore_errors=True)  # of a process that died after its second rename
            os.replace(folder, previous)
        try:
            os.replace(temporary, folder)
        except BaseException:
            if previous.exists():
                os.replace(previous, folder)
            raise
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _synchronise(folder.parent)
    shutil.rmtree(previous, ignore_errors=True)


def present_folder(path: str | os.PathLike[str]) -> Path:
    """Where the folder is that `replace_folder` last left complete at `path`."""
    folder = Path(path).resolve()
    return _previous(folder) if not folder.exists() and _previous(folder).is_dir() else folder


def _write(file: Path, content: Content) -> None:
    with file.open("wb") as stream:
        if isinstance(content, bytes):
            stream.write(content)
        else:
            content(stream)
        stream.flush()
        os.fsync(stream.fileno())


def _synchronise(folder: Path) -> None:
    """Make renames inside the folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.writing-{os.getpid()}")


def _previous(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.previous")


def _remove_leftovers(path: Path) -> None:
    """Remove what processes that were killed while writing `path` left beside it."""
    for entry in path.parent.iterdir():
        process = entry.name.removeprefix(f".{path.name}.writing-")
        if process == entry.name or not process.isdigit():
            continue
        if int(process) == os.getpid() or not _is_running(int(process)):
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
