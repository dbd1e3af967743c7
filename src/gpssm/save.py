"""Decides how anything of ours lies on disk: a folder with `config.json` and `arrays.npz`, and no pickle.

`config.json` is for reading: classes and functions by `module:name`, settings by value, arrays by their name
in `arrays.npz`. Loading imports the modules that it names and fills in the fields of dataclasses and
NamedTuples; it calls no constructor. As with any import, load only folders that you trust.
"""

import contextlib
import dataclasses
import enum
import importlib
import importlib.metadata
import io
import json
import math
import os
import platform
import re
import sys
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from gpssm.atomic import present_folder, replace_folder

_FORMAT = 1
_LINE_WIDTH = 110
_CONFIG, _ARRAYS = "config.json", "arrays.npz"
_PACKAGES = ("gpssm", "jax", "equinox", "optax", "numpy")
_FROM_ML_DTYPES = 2  # NumPy's `isbuiltin` of a dtype that another package registered
_FLOATS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


def save(path: str | os.PathLike[str], tree: Any) -> None:
    """Write a model, a posterior, a fit or any tree of them into the folder `path`; an older save there goes.

    The tree may hold modules, dataclasses, NamedTuples, tuples, lists, dicts, enumeration members, JAX and
    NumPy arrays, numbers, strings, None, and functions or classes at the top of an importable module.
    """
    folder = Path(path).resolve()
    _check_replaceable(folder)
    arrays: dict[str, np.ndarray] = {}
    config = {"format": _FORMAT, "versions": _versions(), "tree": _encode(tree, (), arrays)}
    text = _layout(config) + "\n"
    replace_folder(
        folder,
        {_CONFIG: text.encode("utf-8", "surrogatepass"), _ARRAYS: lambda file: _write_npz(file, arrays)},
    )


def load(path: str | os.PathLike[str], dtype: Any = None) -> Any:
    """Read back what `save` wrote into the folder `path`.

    Floating JAX arrays come in JAX's present default precision, in `dtype` if one is given, or, with
    dtype="saved", in the precision they were saved in. NumPy arrays stay as they were saved.
    """
    folder = present_folder(Path(path).resolve())
    if not folder.is_dir():
        raise ValueError(f"nothing is saved at {folder}: expected a folder with {_CONFIG} and {_ARRAYS} that save() wrote")
    config = _read_config(folder / _CONFIG)
    source = _Source(folder, config["versions"], _read_npz(folder / _ARRAYS), _float_dtype(dtype))
    tree = _decode(config["tree"], (), source)
    if source.arrays:
        raise source.error(_ARRAYS, f"holds arrays that {_CONFIG} does not name: {', '.join(sorted(source.arrays)[:5])}")
    return tree


# From a tree to JSON and arrays


def _encode(value: Any, where: tuple[str, ...], arrays: dict[str, np.ndarray]) -> Any:
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, enum.Enum):
        return {"enum": _reference(type(value), where), "name": _member_name(value, where)}
    if isinstance(value, jax.Array | np.generic) or type(value) is np.ndarray:
        return _encode_array(value, where, arrays)
    if type(value) is list:
        return [_encode(item, (*where, str(i)), arrays) for i, item in enumerate(value)]
    if type(value) is tuple:
        return {"tuple": [_encode(item, (*where, str(i)), arrays) for i, item in enumerate(value)]}
    if type(value) is dict:
        pairs = [(key, _encode(item, (*where, str(key)), arrays)) for key, item in value.items()]
        if all(type(key) is str for key in value):
            return {"dict": dict(pairs)}
        return {"items": [[_encode(key, (*where, "key"), arrays), node] for key, node in pairs]}
    if not isinstance(value, type) and (names := _field_names(type(value))) is not None:
        if missing := [name for name in names if not hasattr(value, name)]:
            raise ValueError(f"cannot save {_at(where)}: {type(value).__name__}.{missing[0]} was never set; set it first")
        fields = {name: _encode(getattr(value, name), (*where, name), arrays) for name in names}
        return {"class": _reference(type(value), where), "fields": fields}
    if callable(value):
        return {"function": _reference(value, where)}
    raise ValueError(
        f"cannot save {_at(where)}: a {type(value).__qualname__} is not a module, dataclass, NamedTuple, "
        "tuple, list, dict, array, number, string, None or function; convert it to one of these"
    )


def _encode_array(value: Any, where: tuple[str, ...], arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    if isinstance(value, Tracer):
        raise ValueError(f"cannot save {_at(where)}: it has no value yet inside a jax transformation; save outside jit")
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        extra = {"kind": "key", "implementation": str(jax.random.key_impl(value))}
        array = np.asarray(jax.random.key_data(value))
    else:
        numpy_kind = "numpy scalar" if isinstance(value, np.generic) else "numpy"
        extra = {"kind": "jax" if isinstance(value, jax.Array) else numpy_kind}
        array = np.asarray(value)
    if array.dtype.hasobject or array.dtype.type is np.void:
        raise ValueError(
            f"cannot save {_at(where)}: an array of dtype {array.dtype} has no plain form on disk; "
            "use numbers, booleans or strings"
        )
    name = re.sub(r"[^\w.-]", "_", ".".join(where)) or "array"
    while name in arrays:
        name += "~"
    # npy has no name for bfloat16 and its kin: their bits travel as unsigned integers
    arrays[name] = array.view(f"u{array.dtype.itemsize}") if array.dtype.isbuiltin == _FROM_ML_DTYPES else array
    return {"array": name, **extra, "dtype": _dtype_name(array.dtype), "shape": list(array.shape)}


def _dtype_name(dtype: np.dtype) -> str:
    return dtype.name if dtype.isnative and dtype.kind not in "USMm" else dtype.str


def _member_name(member: enum.Enum, where: tuple[str, ...]) -> str:
    if member.name is None or type(member).__members__.get(member.name) is not member:
        raise ValueError(f"cannot save {_at(where)}: {member!r} has no single name in its enumeration; save its value")
    return member.name


def _field_names(cls: Any) -> list[str] | None:
    """The fields of a dataclass (every module is one) or NamedTuple; None for other classes."""
    if not isinstance(cls, type):
        return None
    if issubclass(cls, tuple):
        return list(getattr(cls, "_fields", ())) if hasattr(cls, "_fields") else None
    return [field.name for field in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else None


def _reference(value: Any, where: tuple[str, ...]) -> str:
    """`module:name` of a class or function; when that module is private, by a public one that has it too."""
    module = getattr(value, "__module__", None)
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    if isinstance(module, str) and isinstance(name, str):
        for home in [*_public_homes(module), module]:
            if _find(sys.modules.get(home), name) is value:
                return f"{home}:{name}"
        # equinox names a lambda, which then does not know its own name
        for alias, other in vars(sys.modules.get(module, sys)).items():
            if other is value:
                return f"{module}:{alias}"
    what = "class" if isinstance(value, type) else "function"
    raise ValueError(
        f"cannot save {_at(where)}: the {what} {name or value!r} cannot be found again by module and name "
        f"(a lambda, a closure, a bound method or a local class cannot); define a named {what} at the top of "
        "an importable module, and hold what it captures in the fields of an equinox Module"
    )


def _public_homes(module: str) -> list[str]:
    """Where a package may show what its private module defines, shortest name first."""
    if not _is_private(module):
        return []
    package = module.partition(".")[0]
    shown = [name for name in sys.modules if name.partition(".")[0] == package and not _is_private(name)]
    return sorted(shown, key=lambda name: (len(name), name))


def _is_private(module: str) -> bool:
    return any(part.startswith("_") and part != "__main__" for part in module.split("."))


def _find(module: Any, name: str) -> Any:
    value = module
    for part in name.split("."):
        value = vars(value).get(part) if hasattr(value, "__dict__") else None
    return value


def _at(where: tuple[str, ...]) -> str:
    return f"'{'.'.join(where)}'" if where else "this"


# From JSON and arrays to a tree


@dataclasses.dataclass(frozen=True)
class _Source:
    """What is being loaded; decoding takes each array out, so what stays was never named."""

    folder: Path
    versions: dict[str, Any]
    arrays: dict[str, np.ndarray]
    dtype: Any  # of floating JAX arrays; None keeps each one's own

    def error(self, file: str, problem: str) -> ValueError:
        return ValueError(
            f"{self.folder / file} {problem}. It was saved by gpssm {self.versions.get('gpssm', 'unknown')} "
            f"(this is {_version('gpssm')}): load it with that version, or save it anew"
        )


def _decode(node: Any, where: tuple[str, ...], source: _Source) -> Any:
    if node is None or type(node) in (bool, int, float, str):
        return node
    if type(node) is list:
        return [_decode(item, (*where, str(i)), source) for i, item in enumerate(node)]
    match node:
        case {"float": str(name)} if len(node) == 1 and name in _FLOATS:
            return _FLOATS[name]
        case {"tuple": list(items)} if len(node) == 1:
            return tuple(_decode(item, (*where, str(i)), source) for i, item in enumerate(items))
        case {"dict": dict(items)} if len(node) == 1:
            return {key: _decode(item, (*where, key), source) for key, item in items.items()}
        case {"items": list(pairs)} if len(node) == 1 and all(type(p) is list and len(p) == 2 for p in pairs):
            items = [(_decode(k, (*where, "key"), source), _decode(v, (*where, str(k)), source)) for k, v in pairs]
            with contextlib.suppress(TypeError):  # a list cannot be a key
                return dict(items)
        case {"enum": str(reference), "name": str(name)} if len(node) == 2:
            cls = _resolve(reference, where, source)
            if isinstance(cls, enum.EnumMeta) and name in cls.__members__:
                return cls[name]
            raise source.error(_CONFIG, f"names {reference}.{name} at {_at(where)}, and there is no such enumeration member")
        case {"class": str(reference), "fields": dict(fields)} if len(node) == 2:
            return _decode_object(reference, fields, where, source)
        case {"function": str(reference)} if len(node) == 1:
            function = _resolve(reference, where, source)
            if callable(function):
                return function
            raise source.error(_CONFIG, f"names the function {reference} at {_at(where)}, which is not one")
        case {"array": str(), "kind": str(), "dtype": str(), "shape": list()}:
            return _decode_array(node, where, source)
    raise source.error(_CONFIG, f"has an entry at {_at(where)} that is not understood: {json.dumps(node)[:80]}")


def _decode_object(reference: str, nodes: dict[str, Any], where: tuple[str, ...], source: _Source) -> Any:
    cls = _resolve(reference, where, source)
    names = _field_names(cls)
    if names is None:
        raise source.error(_CONFIG, f"names {reference} at {_at(where)}, which is no module, dataclass or NamedTuple")
    if set(names) != set(nodes):
        lacks, extra = sorted(set(names) - set(nodes)), sorted(set(nodes) - set(names))
        problem = "; ".join(f"{word} {', '.join(keys)}" for word, keys in (("lacks", lacks), ("has also", extra)) if keys)
        raise source.error(_CONFIG, f"does not have the fields of {reference} at {_at(where)}: it {problem}")
    values = {name: _decode(nodes[name], (*where, name), source) for name in names}
    if issubclass(cls, tuple):
        return tuple.__new__(cls, values.values())
    try:
        made = object.__new__(cls)
        for name, value in values.items():
            object.__setattr__(made, name, value)
    except (TypeError, AttributeError) as error:
        raise source.error(_CONFIG, f"names {reference} at {_at(where)}, which cannot be made: {error}") from error
    return made


def _decode_array(node: dict[str, Any], where: tuple[str, ...], source: _Source) -> Any:
    name, kind = node["array"], node["kind"]
    if name not in source.arrays:
        raise source.error(_ARRAYS, f"lacks the array '{name}', or {_CONFIG} names it twice")
    array = source.arrays.pop(name)
    try:
        dtype = jnp.dtype(node["dtype"])
    except TypeError as error:
        raise source.error(_CONFIG, f"names the unknown dtype {node['dtype']} at {_at(where)}") from error
    if dtype.isbuiltin == _FROM_ML_DTYPES and array.dtype == np.dtype(f"u{dtype.itemsize}"):
        array = array.view(dtype)
    if list(array.shape) != node["shape"] or array.dtype != dtype:
        found = f"{array.dtype} of shape {list(array.shape)}"
        raise source.error(_ARRAYS, f"has '{name}' as {found}; {_CONFIG} says {dtype} of shape {node['shape']}")
    if kind == "numpy":
        return array
    if kind == "numpy scalar" and array.ndim == 0:
        return array[()]
    if kind == "jax":
        return _to_jax(array, name, source)
    if kind == "key":
        try:
            return jax.random.wrap_key_data(jnp.asarray(array), impl=node.get("implementation"))
        except (TypeError, ValueError) as error:
            raise source.error(_CONFIG, f"has a random key at {_at(where)} that jax refuses: {error}") from error
    raise source.error(_CONFIG, f"has the unknown kind of array '{kind}' at {_at(where)}")


def _to_jax(array: np.ndarray, name: str, source: _Source) -> jax.Array:
    if jnp.issubdtype(array.dtype, jnp.floating) and source.dtype is not None:
        dtype = source.dtype
    else:
        dtype = jax.dtypes.canonicalize_dtype(array.dtype)
        if jnp.issubdtype(array.dtype, jnp.floating) and dtype != array.dtype:
            raise source.error(_ARRAYS, f"has '{name}' as {array.dtype}, which needs the setting jax_enable_x64")
    with np.errstate(over="ignore"):
        cast = array.astype(dtype)
    is_exact = array.dtype.kind not in "iu" or np.array_equal(cast, array)
    if not is_exact or np.any(np.isinf(cast) & ~np.isinf(array)):
        raise source.error(_ARRAYS, f"has numbers in '{name}' too large for {dtype}; set jax_enable_x64 before loading")
    return jnp.asarray(cast)


def _resolve(reference: str, where: tuple[str, ...], source: _Source) -> Any:
    module, _, name = reference.partition(":")
    try:
        if not all(part.isidentifier() for part in [*module.split("."), *name.split(".")]):
            raise ImportError("this is not of the form module:name")
        value = _find(importlib.import_module(module), name)
        if value is None:
            raise ImportError(f"module {module} has no {name}")
    except Exception as error:
        advice = f"; {module} must be importable here, from the folder you run in or installed"
        if module == "__main__":
            advice = "; it stood in the script that was run: move it into a module of its own and save again"
        raise source.error(_CONFIG, f"names {reference} at {_at(where)}, not found: {error}{advice}") from error
    return value


def _float_dtype(dtype: Any) -> Any:
    if isinstance(dtype, str) and dtype == "saved":
        return None
    if dtype is None:
        return jnp.result_type(float)
    try:
        wanted = jnp.dtype(dtype)
    except TypeError as error:
        raise ValueError(f"dtype {dtype!r} is unknown: expected 'saved', None or a floating dtype") from error
    if not jnp.issubdtype(wanted, jnp.floating):
        raise ValueError(f"dtype {wanted} is not floating: expected 'saved', None or a dtype such as jax.numpy.float32")
    if jax.dtypes.canonicalize_dtype(wanted) != wanted:
        raise ValueError(f"dtype {wanted} needs jax.config.update('jax_enable_x64', True) first, or ask for float32")
    return wanted


# Files


def _read_config(file: Path) -> dict[str, Any]:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    advice = "copy the whole folder again from where it was saved, or save it anew"
    try:
        config = json.loads(file.read_bytes().decode("utf-8", "surrogatepass"), parse_constant=refuse)
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{file} is missing or not readable ({error}): {advice}") from error
    if type(config) is not dict or not {"format", "versions", "tree"} <= set(config) or type(config["versions"]) is not dict:
        raise ValueError(f"{file} is not the configuration of a saved model (no format, versions and tree): {advice}")
    if config["format"] != _FORMAT:
        newer = config["versions"].get("gpssm", "unknown")
        raise ValueError(f"{file} has format {config['format']}, this gpssm reads {_FORMAT}: use gpssm {newer} to load it")
    return config


def _read_npz(file: Path) -> dict[str, np.ndarray]:
    try:
        with zipfile.ZipFile(file) as archive:
            # a whole member at a time: its checksum is verified before NumPy sees a byte
            members = {name: io.BytesIO(archive.read(name)) for name in archive.namelist()}
        return {n.removesuffix(".npy"): np.lib.format.read_array(m, allow_pickle=False) for n, m in members.items()}
    except Exception as error:
        advice = "copy the whole folder again from where it was saved, or save it anew"
        raise ValueError(f"{file} is missing or not a readable npz file ({error}): {advice}") from error


def _layout(node: Any, indent: str = "") -> str:
    """JSON for reading: on one line what fits there, else one entry a line."""
    line = json.dumps(node, ensure_ascii=False, allow_nan=False)
    if len(line) <= _LINE_WIDTH or not isinstance(node, dict | list) or not node:
        return line
    deeper = indent + "  "
    if isinstance(node, list):
        opened, closed, entries = "[", "]", [_layout(item, deeper) for item in node]
    else:
        names = [json.dumps(key, ensure_ascii=False) for key in node]
        items = [_layout(item, deeper) for item in node.values()]
        opened, closed = "{", "}"
        entries = [f"{name}: {item}" for name, item in zip(names, items, strict=True)]
    return f"{opened}\n{deeper}" + f",\n{deeper}".join(entries) + f"\n{indent}{closed}"


def _write_npz(file: BinaryIO, arrays: dict[str, np.ndarray]) -> None:
    """What np.savez writes, but with a constant date (equal trees give equal bytes) and any name allowed."""
    with zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            member = zipfile.ZipInfo(f"{name}.npy", date_time=(1980, 1, 1, 0, 0, 0))
            member.external_attr = 0o644 << 16
            with archive.open(member, "w", force_zip64=True) as stream:
                np.lib.format.write_array(stream, array, allow_pickle=False)


def _check_replaceable(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"cannot save into {folder}: it is a file; choose the name of a folder")
    found = {entry.name for entry in folder.iterdir()} - {".DS_Store"} if folder.exists() else set()
    if found and found != {_CONFIG, _ARRAYS}:
        raise ValueError(
            f"cannot save into {folder}: it holds what save() did not write ({', '.join(sorted(found)[:3])}) "
            "and saving replaces the whole folder; choose a new folder"
        )


def _versions() -> dict[str, str]:
    return {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
