"""A program of its own, for test_devices.py: the same fits on however many devices it sees, written to a file."""

import sys

import jax
import numpy as np

import gpssm
from gpssm.simulators import kink
from gpssm.starts import Problem, fit_many, starts_around


def main(out: str, *distributed: str) -> None:
    jax.config.update("jax_enable_x64", True)
    if distributed:
        address, processes, process = distributed
        jax.distributed.initialize(address, int(processes), int(process))
    data = kink(num_steps=12, num_sequences=2, seed=0).dataset
    settings = gpssm.FitSettings(num_steps=4, num_samples=4, block_steps=2)
    start = gpssm.StartSettings(state_dim=1, free_run=0, num_inducing=4)
    alone = gpssm.fit(data, key=jax.random.key(0), settings=settings, start=start)
    together = fit_many(starts_around(Problem.standardised(data, key=jax.random.key(0), start=start), 3), settings)
    leaves = [np.asarray(leaf) for result in (alone, *together) for leaf in jax.tree.leaves((result.model, result.posterior))]
    histories = [result.history.bound for result in (alone, *together)]
    np.savez(out, *leaves, *histories, num_devices=jax.device_count())


if __name__ == "__main__":
    main(*sys.argv[1:])
