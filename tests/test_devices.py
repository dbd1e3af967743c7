"""More devices, same numbers: virtual ones on this machine, and two processes that talk to each other."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

PROGRAM = Path(__file__).with_name("spread.py")


def start(out: Path, num_devices: int, *distributed: str) -> subprocess.Popen:
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={num_devices}"
    environment = {**os.environ, "XLA_FLAGS": flags}
    return subprocess.Popen([sys.executable, str(PROGRAM), str(out), *distributed], env=environment, stderr=subprocess.PIPE)


def finish(*processes: subprocess.Popen) -> None:
    for process in processes:
        message = process.communicate(timeout=240)[1].decode()
        assert process.returncode == 0, message[-3000:]


@pytest.fixture(scope="module")
def on_one_device(tmp_path_factory):
    out = tmp_path_factory.mktemp("devices") / "one.npz"
    finish(start(out, 1))
    return np.load(out)


def assert_same(answers, reference, num_devices: int) -> None:
    assert int(answers["num_devices"]) == num_devices
    assert int(reference["num_devices"]) == 1
    for name in reference.files:
        if name != "num_devices":
            np.testing.assert_allclose(answers[name], reference[name], rtol=1e-9, atol=1e-11, err_msg=name)


@pytest.mark.slow
def test_fits_on_eight_devices_give_the_numbers_of_one(on_one_device, tmp_path):
    """Four samples and two sequences share eight devices; so do three problems, which do not fill them."""
    finish(start(tmp_path / "eight.npz", 8))
    assert_same(np.load(tmp_path / "eight.npz"), on_one_device, 8)


@pytest.mark.slow
def test_two_processes_give_the_numbers_of_one(on_one_device, tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    outs = [tmp_path / f"process-{i}.npz" for i in range(2)]
    finish(*(start(out, 2, address, "2", str(i)) for i, out in enumerate(outs)))
    for out in outs:
        assert_same(np.load(out), on_one_device, 4)
