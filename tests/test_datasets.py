"""Benchmark files are the right bytes, the right way round; simulators are exact, seeded and keep their truth."""

import hashlib
import io
import os
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest

from gpssm import datasets

SHAPES = {"actuator": 1024, "ballbeam": 1000, "drive": 500, "dryer": 1000, "gas_furnace": 296}
FOLDER = os.environ.get("GPSSM_DATA", "")
needs_files = pytest.mark.skipif(
    not all((Path(FOLDER) / datasets.benchmark(name).file).is_file() for name in SHAPES),
    reason="set GPSSM_DATA to the folder of the benchmark files",
)
SIMULATORS = [
    datasets.kink,
    datasets.cart_pole,
    datasets.pendulum,
    datasets.van_der_pol,
    datasets.coupled_tanks,
]


@pytest.fixture
def no_files(monkeypatch, tmp_path):
    """Nothing in GPSSM_DATA, nothing in the cache, no network."""

    def refuse(url, timeout):
        raise urllib.error.URLError("no route to host")

    monkeypatch.setenv("GPSSM_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("GPSSM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    return tmp_path


def tiny(content: bytes) -> datasets.Benchmark:
    digest = hashlib.sha256(content).hexdigest()
    return datasets.Benchmark("tiny", "Tiny", "", "", "tiny.dat", digest, 1, 0, "y", "u")


@needs_files
@pytest.mark.parametrize("name", SHAPES)
def test_every_benchmark_loads_and_splits_in_halves(name):
    data = datasets.load(name)
    assert data.lengths == (SHAPES[name],)
    assert (data.num_outputs, data.num_controls) == (1, 1)
    train, test = datasets.benchmark(name).split()
    assert train.lengths == test.lengths == (SHAPES[name] // 2,)


@needs_files
@pytest.mark.parametrize(
    ("name", "output", "control"),
    [
        ("actuator", -0.000262404, -0.0068164),
        ("ballbeam", -4.885198e-03, -1.963499e-03),
        ("drive", 0.0317460317, 1.0),
        ("dryer", 4.7660989, 6.41),
        ("gas_furnace", 53.8, -0.109),
    ],
)
def test_outputs_and_controls_are_the_right_way_round(name, output, control):
    data = datasets.load(name)
    assert data.outputs[0][0, 0] == pytest.approx(output, rel=1e-6)
    assert data.controls[0][0, 0] == pytest.approx(control, rel=1e-6)


def test_every_benchmark_tells_its_origin():
    assert datasets.names() == tuple(SHAPES)
    for name in SHAPES:
        record = datasets.benchmark(name)
        assert record.title
        assert record.description
        assert record.source
        assert record.url.endswith(f"/system_identification/{record.file}")


def test_an_unknown_name_is_answered_with_the_known_ones():
    with pytest.raises(ValueError, match=r"no dataset 'drier'.*dryer"):
        datasets.load("drier")


def test_without_file_and_network_the_error_says_both_ways_out(no_files):
    with pytest.raises(FileNotFoundError, match=r"(?s)set GPSSM_DATA.*fetched from https://raw.*/dryer.dat"):
        datasets.load("dryer")
    assert not (no_files / "cache").exists()


def test_a_wrong_checksum_names_the_file_and_both_sums(no_files):
    content = b"1 2\n3 4\n"
    (no_files / "data").mkdir()
    (no_files / "data" / "dryer.dat").write_bytes(content)
    expected = datasets.benchmark("dryer").sha256
    with pytest.raises(ValueError, match=f"dryer.dat has SHA-256 {hashlib.sha256(content).hexdigest()}.*{expected}"):
        datasets.load("dryer")


def test_a_download_is_checked_stored_once_and_found_again(no_files, monkeypatch):
    content, calls = b"1 2\n3 4\n5 6\n", []

    def answer(url, timeout):
        calls.append(url)
        return io.BytesIO(content)

    monkeypatch.setattr(urllib.request, "urlopen", answer)
    record = tiny(content)
    assert np.array_equal(record.load().outputs[0], [[2], [4], [6]])
    assert np.array_equal(record.load().controls[0], [[1], [3], [5]])
    assert calls == [record.url]
    assert [path.name for path in (no_files / "cache").iterdir()] == ["tiny.dat"]
    with pytest.raises(ValueError, match=r"raw\.githubusercontent\.com.*expected"):
        datasets.load("dryer")
    assert [path.name for path in (no_files / "cache").iterdir()] == ["tiny.dat"]


def test_the_cache_is_where_the_environment_says(monkeypatch):
    monkeypatch.delenv("GPSSM_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert datasets.cache_folder() == Path("/x/gpssm")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert datasets.cache_folder() == Path.home() / ".cache" / "gpssm"
    monkeypatch.setenv("GPSSM_CACHE", "/y")
    assert datasets.cache_folder() == Path("/y")


@pytest.mark.parametrize("simulate", SIMULATORS)
def test_a_simulation_is_its_seed_and_its_states_follow_f(simulate):
    once, again, other = (simulate(num_sequences=2, num_steps=15, process_scale=0.0, seed=s) for s in (3, 3, 4))
    for sequence in range(2):
        assert np.array_equal(once.dataset.outputs[sequence], again.dataset.outputs[sequence])
        assert not np.array_equal(once.dataset.outputs[sequence], other.dataset.outputs[sequence])
        states, controls = once.states[sequence], once.dataset.controls[sequence]
        assert states.shape == (15, len(once.state_names))
        # The rows of a sequence are solved together here and over the sequences there: same to the solver's tolerance.
        assert once.transition(states[:-1], controls[:-1]) == pytest.approx(states[1:], rel=1e-8, abs=1e-8)


def test_kink_is_the_function_of_the_paper():
    simulation = datasets.kink(seed=0)
    assert simulation.states[0].shape == (120, 1)
    points = np.array([[-3.0], [-0.2], [0.0], [1.0]])
    expected = [
        [0.8 - 2.8 * (1 - 5 / (1 + np.exp(6)))],
        [0.8],
        [0.5],  # 0.8 + 0.2 (1 - 5 / 2)
        [0.8 + 1.2 * (1 - 5 / (1 + np.exp(-2)))],
    ]
    assert simulation.transition(points, np.zeros((4, 0))) == pytest.approx(np.array(expected), rel=1e-14)
    assert datasets.kink(initial_state=0.5, seed=0).states[0][0, 0] == 0.5


def test_kink_has_the_noise_it_was_asked_for():
    simulation = datasets.kink(num_steps=4000, seed=1)
    states = simulation.states[0]
    process = states[1:] - simulation.transition(states[:-1], np.zeros((3999, 0)))
    observation = simulation.dataset.outputs[0] - states
    assert process.std() == pytest.approx(0.05, rel=4 / np.sqrt(8000))
    assert observation.var() == pytest.approx(0.8, rel=4 * np.sqrt(2 / 4000))


def test_cart_pole_has_the_noise_of_the_paper():
    simulation = datasets.cart_pole(num_sequences=200, seed=0)
    noise = np.concatenate(simulation.dataset.outputs) - np.concatenate(simulation.states)
    assert noise.std(0) == pytest.approx([0.03, 0.1047, 0.4, 1.3963], rel=0.05)
    assert np.abs(np.concatenate(simulation.dataset.controls)).max() <= 10


def test_the_pole_keeps_its_energy_without_friction_and_force():
    simulation = datasets.cart_pole(num_sequences=3, num_steps=60, initial_scale=1.5, force_limit=0.0, friction=0.0, seed=0)
    for states in simulation.states:
        _, angle, speed, rate = states.T
        kinetic = 0.5 * speed**2 + 0.125 * speed * rate * np.cos(angle) + 0.5 * 0.5**2 * rate**2 / 6
        energy = kinetic - 0.125 * 9.82 * np.cos(angle)
        assert energy == pytest.approx(energy[0], rel=1e-8)


def test_the_cart_pole_balances_its_momentum():
    simulation = datasets.cart_pole(num_sequences=1, num_steps=30, initial_scale=1.0, force_limit=0.0, friction=0.0, seed=1)
    _, angle, speed, rate = simulation.states[0].T
    momentum = 1.0 * speed + 0.125 * rate * np.cos(angle)
    assert momentum == pytest.approx(momentum[0], abs=1e-9)


def test_the_undamped_pendulum_keeps_its_energy():
    simulation = datasets.pendulum(num_steps=200, torque_limit=0.0, damping=0.0, initial_scale=2.0, seed=0)
    angle, rate = simulation.states[0].T
    energy = 0.5 * rate**2 - 9.82 * np.cos(angle)
    assert energy == pytest.approx(energy[0], rel=1e-8)


def test_the_free_van_der_pol_oscillator_ends_on_its_limit_cycle():
    simulation = datasets.van_der_pol(num_steps=600, force_limit=0.0, seed=0)
    assert simulation.dataset.num_controls == 0
    assert np.abs(simulation.states[0][400:, 0]).max() == pytest.approx(2.0086, abs=0.01)


def test_tanks_settle_where_inflow_equals_outflow():
    simulation = datasets.coupled_tanks(num_steps=400, voltage_limits=(6.0, 6.0), seed=0)
    level = (3.3 * 6.0 / 0.178) ** 2 / (2 * 982)
    assert simulation.states[0][-1] == pytest.approx([level, level], rel=1e-6)
