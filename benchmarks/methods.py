"""What is timed: optimiser steps of ours along one of the chains, compiled apart from being run."""

import time
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr

from benchmarks.datasets import Case
from gpssm.data import Dataset, Scaling
from gpssm.fit import FitSettings, TrainingState, _Blocks, _num_observed, _start, _with_plain_inducing
from gpssm.native.library import is_available
from gpssm.params import trainable, unwrap
from gpssm.posteriors.chains import ChainName, chain_of


@dataclass
class Steps:
    """A compiled block of steps: each is the bound, its gradient and what the optimiser makes of them."""

    program: Any
    arrays: Any
    state: Any
    block: int
    chain: str
    compile_seconds: float

    @classmethod
    def compiled(cls, case: Case, chain: ChainName, block: int) -> "Steps":
        """The block of `gpssm.fit`; several models are mapped over, as in `gpssm.fit_many`."""
        if jax.default_backend() == "cpu":
            is_available()  # once a machine, so it counts for no case
        built = [_built(case, chain, seed) for seed in range(case.models)]
        name, rest = built[0][2], built[0][1]
        arrays = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(one[0] for one in built))

        def run(given: Any) -> Any:
            blocks, state = eqx.combine(given, rest)
            return jax.lax.scan(lambda carry, _: blocks.step(carry), state, None, length=block)

        began = time.perf_counter()
        program = jax.jit(jax.vmap(run) if case.models > 1 else run)
        given = arrays if case.models > 1 else built[0][0]
        program = program.lower(given).compile()
        return cls(program, given[0], given[1], block, name, time.perf_counter() - began)

    def seconds(self) -> float:
        """Of one step, as a share of a block's; the next call goes on from there."""
        began = time.perf_counter()
        state, (_, is_finite) = jax.block_until_ready(self.program((self.arrays, self.state)))
        seconds = (time.perf_counter() - began) / self.block
        if not bool(jnp.all(is_finite)):
            raise FloatingPointError("a step was not finite, so its time means nothing")
        self.state = eqx.combine(eqx.filter(state, eqx.is_array), self.state)
        return seconds

    def memory_bytes(self) -> int:
        """What the program holds at its peak, as XLA plans it."""
        plan = self.program.memory_analysis()
        return plan.temp_size_in_bytes + plan.argument_size_in_bytes + plan.output_size_in_bytes


def fitting(
    data: Dataset, scaling: Scaling, model: Any, posterior: Any, settings: FitSettings, key: Any
) -> tuple[_Blocks, TrainingState, str]:
    """What `gpssm.fit` makes before it takes a step, and the name of the chain."""
    windows = data.windows(scaling)
    name = chain_of(unwrap(model), unwrap(posterior), jax.tree.map(lambda leaf: leaf[0], windows), settings.chain)
    if settings.natural_gradient is not None:
        posterior = _with_plain_inducing(posterior)
    params, static = eqx.partition((model, posterior), trainable((model, posterior)))
    return _Blocks(static, windows, settings, key, _num_observed(windows)), _start(params, settings), name


def _built(case: Case, chain: ChainName, seed: int) -> tuple[Any, Any, str]:
    data, model, posterior = case.build(seed)
    settings = FitSettings(num_samples=case.samples, chain=chain, num_steps=10**6)
    scaling = Scaling.identity(case.outputs, case.controls)
    blocks, state, name = fitting(data, scaling, model, posterior, settings, jr.key(seed))
    arrays, rest = eqx.partition((blocks, state), eqx.is_array)
    return arrays, rest, name
