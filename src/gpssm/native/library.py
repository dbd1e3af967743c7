"""Finds the compiled chain, or compiles it: once a machine, compiler and version, into the user's cache, in a few seconds.

Nothing is compiled when the package is installed, so that it installs everywhere. Where there is no C++ compiler there is no
compiled chain either, and the plain one serves every model. `GPSSM_CXX` names another compiler, or none: an empty one.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
from pathlib import Path

import jax
from jaxlib import version as jaxlib_version

FOLDER = Path(__file__).parent
SOURCE = "calls.cc"
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared", "-fvisibility=hidden")
TARGETS = ("gpssm_walk", "gpssm_walk_back")
SECONDS_TO_COMPILE = 300


@functools.cache
def is_available() -> bool:
    """Whether the compiled chain can be called; the first call in a process loads it, the first on a machine compiles it.

    A compiler that fails is told about by a warning, and the answer is no.
    """
    try:
        library = _library()
    except (OSError, subprocess.SubprocessError) as error:
        output = getattr(error, "stderr", None) or str(error)
        warnings.warn(
            f"The compiled chain could not be built, so fits run along the plain one, which is slower: {output.strip()[-800:]} "
            "Name a working C++17 compiler in GPSSM_CXX, or set it to nothing to do without.",
            stacklevel=2,
        )
        return False
    if library is None:
        return False
    for target in TARGETS:
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(library, target)), platform="cpu")
    return True


def compiler() -> str | None:
    """The C++ compiler that would be used: the one that `GPSSM_CXX` or `CXX` names, or the first that is found."""
    named = os.environ.get("GPSSM_CXX", os.environ.get("CXX"))
    candidates = [named] if named is not None else ["g++", "clang++", "c++"]
    return next((path for name in candidates if name and (path := shutil.which(name))), None)


def cache_folder() -> Path:
    """Where compiled chains are kept: `GPSSM_CACHE`, or gpssm's folder in the user's cache."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("GPSSM_CACHE") or Path(base) / "gpssm")


def _library() -> ctypes.CDLL | None:
    command = compiler()
    if command is None:
        return None
    file = cache_folder() / f"chain-{_fingerprint(command)}.so"
    if not file.exists():
        _compile(command, file)
    return ctypes.CDLL(str(file))


def _fingerprint(command: str) -> str:
    """Of everything that the machine code depends on; a cache may be shared by machines that differ."""
    version = subprocess.run([command, "--version"], capture_output=True, text=True, check=True).stdout
    sources = [file.read_text() for file in sorted(FOLDER.iterdir()) if file.suffix in (".h", ".cc")]
    parts = (*sources, version, *FLAGS, jaxlib_version.__version__, platform.platform(), _processor())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor()
    lines = info.read_text().splitlines()
    return "\n".join(sorted({line for line in lines if line.split("\t")[0] in ("model name", "flags", "Features", "CPU part")}))


def _compile(command: str, file: Path) -> None:
    """Beside its place, then renamed into it: processes that start together each find a whole library."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent, prefix=".compiling-") as folder:
        built = Path(folder) / file.name
        arguments = [command, *FLAGS, "-isystem", jax.ffi.include_dir(), str(FOLDER / SOURCE), "-o", str(built)]
        subprocess.run(arguments, capture_output=True, text=True, check=True, timeout=SECONDS_TO_COMPILE)
        os.replace(built, file)
