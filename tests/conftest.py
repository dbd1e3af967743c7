"""Decides the conditions of every test: float64, checked shapes, strict broadcasting, one thread a worker."""

import os

# Tests compile much and compute little. What the caller has set comes last, and wins.
os.environ["XLA_FLAGS"] = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true --xla_cpu_use_fusion_emitters=false "
    + os.environ.get("XLA_FLAGS", "")
)
if "PYTEST_XDIST_WORKER" in os.environ:  # workers share the cores: one thread each, set before jax and NumPy start
    flags = "--xla_cpu_multi_thread_eigen=false --xla_cpu_parallel_codegen_split_count=1"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
    for name in ("NPROC", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("MPLBACKEND", "Agg")

import jax
import jaxtyping
import numpy as np
import pytest

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_rank_promotion", "raise")

# Before anything imports gpssm: every call checks the shapes that its signature promises.
jaxtyping.install_import_hook("gpssm", "beartype.beartype")


@pytest.fixture
def rng() -> np.random.Generator:
    """NumPy randomness that is the same in every run and in any order of the tests."""
    return np.random.default_rng(20190513)
