"""Claims about saving: what comes back, what is refused, and what a killed process leaves behind."""

import dataclasses
import enum
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gpssm.atomic import present_folder, write_atomically
from gpssm.save import load, save


class Kernel(eqx.Module):
    variance: jax.Array
    dims: tuple[int, ...] = eqx.field(static=True)

    def __init__(self, variance: Any, dims: tuple[int, ...]):
        self.variance = jnp.asarray(variance)
        self.dims = dims

    def __check_init__(self):
        CHECKED.append(self.dims)


class Model(eqx.Module):
    kernels: list[Kernel]
    mean: Callable
    options: dict[str, Any]
    is_shared: bool = eqx.field(static=True)


class Status(enum.Enum):
    CONVERGED = 1
    NONFINITE = "nonfinite"


class Bits(enum.Flag):
    A = 1
    B = 2


class Row(NamedTuple):
    step: int
    bound: float


@dataclasses.dataclass(frozen=True)
class Scaling:
    offset: np.ndarray
    unit: str = ""


def physics(x):
    return 0.5 * x


CHECKED = []  # what went through a constructor


@pytest.fixture
def tree(rng) -> dict[str, Any]:
    kernels = [Kernel(rng.normal(size=3), (0, 1, 2)), Kernel(jnp.float32(0.1), ())]
    return {
        "model": Model(kernels, physics, {"rate": 0.1, "name": "Lüttich"}, True),
        "status": (Status.CONVERGED, Status.NONFINITE),
        "history": [Row(0, -np.inf), Row(10**30, np.nextafter(1.0, 2.0).item())],
        "scaling": Scaling(rng.normal(size=(2, 0, 3))),
        "numpy": (np.float32(0.1), np.arange(6).reshape(2, 3).T, np.array(["a", "äö"]), np.array(True)),
        "nothing": (None, (), [], {}, "", False, 0, -0.0),
        "by_number": {1: "one", (2, None): [np.zeros(2)]},
        "random": (jax.random.key(3), jax.random.PRNGKey(4)),
        "low": (jnp.arange(3, dtype=jnp.bfloat16), jnp.ones((), jnp.float8_e5m2), jnp.ones(1, jnp.float16)),
        "complex": jnp.asarray([1 + 2j]),
    }


def assert_same(one: Any, other: Any) -> None:
    """Equal down to types, dtypes and bits; functions and enumeration members are the very same objects."""
    assert type(one) is type(other)
    if isinstance(one, jax.Array) and jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
        assert one.dtype == other.dtype
        one, other = jax.random.key_data(one), jax.random.key_data(other)
    if isinstance(one, np.ndarray | np.generic | jax.Array):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
    elif dataclasses.is_dataclass(one):
        for field in dataclasses.fields(one):
            assert_same(getattr(one, field.name), getattr(other, field.name))
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        assert_same(list(one.values()), list(other.values()))
    elif callable(one) or isinstance(one, enum.Enum):
        assert one is other
    else:
        assert repr(one) == repr(other)


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def edit(folder: Path, old: str, new: str) -> None:
    text = (folder / "config.json").read_text()
    assert old in text
    (folder / "config.json").write_text(text.replace(old, new, 1))


def test_everything_comes_back_bit_for_bit(tmp_path, tree):
    save(tmp_path / "run", tree)
    assert_same(load(tmp_path / "run", dtype="saved"), tree)


def test_a_bare_leaf_comes_back(tmp_path):
    for leaf in (
        jnp.ones(3),
        np.ones(3),
        1.5,
        None,
        "text",
        Status.CONVERGED,
        jnp.tanh,
        jax.nn.relu,
        jnp.add,
        np.sin,
    ):
        save(tmp_path / "run", leaf)
        assert_same(load(tmp_path / "run"), leaf)


def test_a_loaded_module_flattens_as_the_saved_one_and_runs_no_constructor(tmp_path, tree):
    save(tmp_path / "run", tree["model"])
    CHECKED.clear()
    loaded = load(tmp_path / "run")
    assert jax.tree.structure(loaded) == jax.tree.structure(tree["model"])
    assert CHECKED == []


def test_equinox_networks_and_optimiser_states_come_back(tmp_path):
    network = eqx.nn.MLP(2, 1, 4, 2, jax.nn.softplus, key=jax.random.key(0))
    optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(optax.cosine_decay_schedule(0.1, 9)))
    state = optimiser.init(eqx.filter(network, eqx.is_inexact_array))
    save(tmp_path / "run", (network, state))
    loaded, loaded_state = load(tmp_path / "run")
    assert np.array_equal(loaded(jnp.ones(2)), network(jnp.ones(2)))
    assert eqx.tree_equal(loaded_state, state)
    assert "_src" not in (tmp_path / "run" / "config.json").read_text()  # public names outlive private modules


def test_arrays_have_readable_names_and_settings_readable_values(tmp_path, tree):
    save(tmp_path / "run", tree)
    with np.load(tmp_path / "run" / "arrays.npz", allow_pickle=False) as arrays:
        assert np.array_equal(arrays["model.kernels.0.variance"], tree["model"].kernels[0].variance)
    config = config_of(tmp_path / "run")
    assert config["format"] == 1
    assert {"gpssm", "jax", "numpy", "python"} <= set(config["versions"])
    model = config["tree"]["dict"]["model"]
    assert model["class"] == "test_save:Model"
    assert model["fields"]["mean"] == {"function": "test_save:physics"}
    assert model["fields"]["options"] == {"dict": {"rate": 0.1, "name": "Lüttich"}}


def test_names_that_collide_keep_their_arrays_apart(tmp_path):
    tree = {
        "a": {"b": np.zeros(1)},
        "a.b": np.ones(1),
        "a/b": np.full(1, 2.0),
        "file": np.full(1, 3.0),
        "": np.full(1, 4.0),
    }
    save(tmp_path / "run", tree)
    assert_same(load(tmp_path / "run"), tree)


def test_equal_trees_give_equal_bytes_and_the_files_hold_no_pickle(tmp_path, tree):
    save(tmp_path / "one", tree)
    save(tmp_path / "two", tree)
    for name in ("config.json", "arrays.npz"):
        content = (tmp_path / "one" / name).read_bytes()
        assert content == (tmp_path / "two" / name).read_bytes()
        assert b"pickle" not in content
    with zipfile.ZipFile(tmp_path / "one" / "arrays.npz") as archive:
        for member in archive.namelist():
            assert archive.read(member).startswith(b"\x93NUMPY")


def test_jax_floats_come_in_the_session_s_precision_and_numpy_ones_as_saved(tmp_path):
    tree = {"jax": jnp.asarray([0.1, 0.2], jnp.float64), "numpy": np.array([0.1]), "count": jnp.arange(2)}
    save(tmp_path / "double", tree)
    assert load(tmp_path / "double")["jax"].dtype == jnp.float64
    assert load(tmp_path / "double", dtype=jnp.float32)["jax"].dtype == jnp.float32
    with jax.enable_x64(False):
        single = load(tmp_path / "double")
        assert (single["jax"].dtype, single["numpy"].dtype) == (jnp.float32, np.float64)
        assert single["count"].dtype == jnp.int32
        save(tmp_path / "single", single)
        with pytest.raises(ValueError, match="jax_enable_x64"):
            load(tmp_path / "double", dtype=jnp.float64)
        with pytest.raises(ValueError, match="jax_enable_x64"):
            load(tmp_path / "double", dtype="saved")
    back = load(tmp_path / "single")["jax"]
    assert back.dtype == jnp.float64
    assert np.array_equal(back, np.asarray(tree["jax"], np.float32).astype(float))


def test_numbers_that_do_not_fit_the_precision_are_refused(tmp_path):
    save(tmp_path / "float", jnp.asarray([1e300]))
    save(tmp_path / "int", jnp.asarray([2**40]))
    with jax.enable_x64(False):
        for name in ("float", "int"):
            with pytest.raises(ValueError, match="too large"):
                load(tmp_path / name)


@pytest.mark.parametrize("dtype", ["flaot32", int, "int32"])
def test_a_dtype_that_is_not_floating_is_refused(tmp_path, dtype):
    save(tmp_path / "run", jnp.ones(1))
    with pytest.raises(ValueError, match="expected"):
        load(tmp_path / "run", dtype=dtype)


def closure(scale):
    return lambda x: scale * x


@pytest.mark.parametrize(
    ("leaf", "says"),
    [
        (closure(2), "top of an importable module"),
        (lambda x: x, "top of an importable module"),
        ([].append, "top of an importable module"),
        (type("Local", (eqx.Module,), {})(), "top of an importable module"),
        ({1, 2}, "a set is not"),
        (object(), "an? object is not"),
        (np.array([object()]), "plain form"),
        (np.ma.masked_array([1.0], [True]), "MaskedArray"),
        (1j, "complex"),
        (object.__new__(Scaling), "never set"),
        (Bits.A | Bits.B, "single name"),
    ],
)
def test_what_cannot_be_saved_is_refused_with_its_place_before_anything_is_written(tmp_path, leaf, says):
    with pytest.raises(ValueError, match=says) as caught:
        save(tmp_path / "run", {"model": [leaf]})
    assert "model.0" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_saving_inside_jit_is_refused(tmp_path):
    with pytest.raises(ValueError, match="outside jit"):
        jax.jit(lambda x: save(tmp_path / "run", x))(1.0)


def test_a_folder_with_other_files_is_never_replaced(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"notes\.txt"):
        save(tmp_path, 1)
    with pytest.raises(ValueError, match="it is a file"):
        save(tmp_path / "notes.txt", 1)
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('"format": 1', '"format": 2', "format 2"),
        ("test_save:Kernel", "test_save:Colonel", "Colonel"),
        ("test_save:Kernel", "no_such_module:Kernel", "importable here"),
        ("test_save:Kernel", "__main__:Kernel", "module of its own"),
        ("test_save:Kernel", "os:system", "no module, dataclass or NamedTuple"),
        ("test_save:Kernel", "test_save", "module:name"),
        ("test_save:physics", "sys:version", "not one"),
        ("CONVERGED", "DIVERGED", "no such enumeration member"),
        ('"dims"', '"axes"', "lacks dims; has also axes"),
        ('"array": "model.kernels.0.variance"', '"array": "gone"', "lacks the array 'gone'"),
        ('"array": "model.kernels.0.variance"', '"array": "complex"', "names it twice|says"),
        ('"dtype": "float64"', '"dtype": "float23"', "unknown dtype"),
        ('"dtype": "float64"', '"dtype": "float32"', "says float32"),
        ('"kind": "jax"', '"kind": "torch"', "torch"),
        ('"threefry2x32"', '"rot13"', "random key"),
        ('"rate": 0.1', '"rate": NaN', "NaN is not JSON"),
        ('"rate": 0.1', '"rate": {"what": 1}', "not understood"),
        ('"tree"', '"shrub"', "no format, versions and tree"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(tmp_path, tree, old, new, says):
    save(tmp_path / "run", tree)
    edit(tmp_path / "run", old, new)
    with pytest.raises(ValueError, match=says) as caught:
        load(tmp_path / "run")
    assert str(tmp_path / "run") in str(caught.value)


def test_missing_extra_and_damaged_files_are_refused(tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(ValueError, match="nothing is saved at"):
        load(folder)
    tree = {"a": jnp.arange(50.0), "b": jnp.ones(2)}
    save(folder, tree)
    arrays = (folder / "arrays.npz").read_bytes()
    for damaged in (b"", arrays[:200], arrays[:100] + b"????" + arrays[104:], b"text"):
        (folder / "arrays.npz").write_bytes(damaged)
        with pytest.raises(ValueError, match="readable npz"):
            load(folder)
    np.savez(folder / "arrays.npz", a=np.arange(49.0), b=np.ones(2))
    with pytest.raises(ValueError, match=r"shape \[49\]"):
        load(folder)
    np.savez(folder / "arrays.npz", a=np.arange(50.0), b=np.ones(2), c=np.ones(2))
    with pytest.raises(ValueError, match="does not name: c"):
        load(folder)
    np.savez(folder / "arrays.npz", a=np.array([object()]), b=np.ones(2))
    with pytest.raises(ValueError, match="allow_pickle"):
        load(folder)
    for name in ("arrays.npz", "config.json"):
        save(tmp_path / name, tree)
        (tmp_path / name / name).unlink()
        with pytest.raises(ValueError, match="missing"):
            load(tmp_path / name)


@hypothesis.given(st.data())
@hypothesis.settings(max_examples=150, deadline=None, derandomize=True)
def test_damaged_bytes_load_or_raise_value_error_and_nothing_else(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("damaged") / "run"
    save(
        folder,
        (Kernel(jnp.ones(3), (1,)), {"scaling": Scaling(np.ones(2))}, Status.CONVERGED, jnp.tanh, -np.inf),
    )
    file = folder / data.draw(st.sampled_from(["config.json", "arrays.npz"]))
    content = bytearray(file.read_bytes())
    start = data.draw(st.integers(0, len(content)))
    stop = min(len(content), start + data.draw(st.integers(0, 12)))
    content[start:stop] = data.draw(st.binary(max_size=12) | st.sampled_from([b"[", b"}", b'"', b"null", b"1"]))
    file.write_bytes(content)
    try:
        load(folder)
    except ValueError as error:
        assert str(folder) in str(error)  # noqa: PT017


def test_a_save_replaces_the_older_one_and_leaves_nothing_beside_it(tmp_path):
    save(tmp_path / "deep" / "run", {"a": np.ones(1), "b": 1})
    save(tmp_path / "deep" / "run", 2)
    assert load(tmp_path / "deep" / "run") == 2
    assert os.listdir(tmp_path / "deep") == ["run"]


@pytest.mark.parametrize("survives", [0, 1])
def test_a_save_that_fails_at_a_rename_keeps_the_older_one(tmp_path, monkeypatch, survives):
    save(tmp_path / "run", "old")
    rename, calls = os.replace, []

    def fail(source, target):
        calls.append(target)
        if len(calls) == survives + 1:
            raise OSError("disk on fire")
        rename(source, target)

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="fire"):
        save(tmp_path / "run", "new")
    assert load(tmp_path / "run") == "old"
    assert os.listdir(tmp_path) == ["run"]


KILLED = """
import os, signal, sys
from gpssm.save import save
calls, moment = 0, int(sys.argv[2])
def counted(real):
    def call(*arguments):
        global calls
        calls += 1
        if calls == moment:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments)
    return call
os.replace, os.fsync = counted(os.replace), counted(os.fsync)
save(sys.argv[1], "new")
"""


def test_a_process_killed_at_any_moment_of_a_save_leaves_the_old_or_the_new(tmp_path):
    folder = tmp_path / "run"
    outcomes = []
    for moment in range(1, 8):  # four fsyncs and two renames, then none
        save(folder, "old")
        command = [sys.executable, "-c", KILLED, str(folder), str(moment)]
        killed = subprocess.run(command, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, check=False)
        outcomes.append((killed.returncode, load(folder)))
    assert outcomes == [(-9, "old")] * 5 + [(-9, "new"), (0, "new")]
    save(folder, "last")
    assert os.listdir(tmp_path) == ["run"]


def test_a_save_after_a_kill_between_the_renames_keeps_the_old_one_until_the_new_is_there(tmp_path, monkeypatch):
    save(tmp_path / "run", "old")
    os.rename(tmp_path / "run", tmp_path / ".run.previous")
    assert present_folder(tmp_path / "run") == tmp_path / ".run.previous"
    monkeypatch.setattr(os, "replace", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        save(tmp_path / "run", "new")
    assert load(tmp_path / "run") == "old"
    monkeypatch.undo()
    save(tmp_path / "run", "new")
    assert load(tmp_path / "run") == "new"
    assert os.listdir(tmp_path) == ["run"]


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    file = tmp_path / "history.csv"
    write_atomically(file, b"old")

    def fail(stream):
        stream.write(b"half")
        raise RuntimeError("full")

    with pytest.raises(RuntimeError, match="full"):
        write_atomically(file, fail)
    assert file.read_bytes() == b"old"
    write_atomically(file, lambda stream: stream.write(b"new"))
    assert file.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["history.csv"]
