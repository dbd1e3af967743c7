"""How work is spread over the devices that JAX sees: the trajectories of a bound, or whole problems.

Every device walks its share of the chains and holds everything else whole, so that answers do not depend on how many there are
but for rounding. After `jax.distributed.initialize` the devices are those of all processes, each of which runs the same program
on the same data and ends up with the same answer. On one device, nothing happens.
"""

import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

TRAJECTORIES = PartitionSpec("sequence", "sample")
SEQUENCES = PartitionSpec("sequence")
WHOLE = PartitionSpec()


def everywhere(tree: Any) -> Any:
    """`tree` with a whole copy of every array on every device."""
    if jax.device_count() == 1:
        return tree
    whole = NamedSharding(_mesh(1, 1), WHOLE)

    def put(leaf: Any) -> Any:
        if not eqx.is_array(leaf):
            return leaf
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):  # several processes can exchange numbers alone
            return jr.wrap_key_data(put(jr.key_data(leaf)), impl=jr.key_impl(leaf))
        return jax.device_put(np.asarray(leaf), whole)

    return jax.tree.map(put, tree)


def here(tree: Any) -> Any:
    """`tree` with what is everywhere on one device of this process alone."""

    def one(leaf: Any) -> Any:
        is_everywhere = eqx.is_array(leaf) and isinstance(leaf, jax.Array) and len(leaf.sharding.device_set) > 1
        return leaf.addressable_data(0) if is_everywhere else leaf

    return jax.tree.map(one, tree)


def over_trajectories(function: Callable, fitted: Any, windows: Any, noise: Any) -> Any:
    """`function(fitted, windows, noise)`, whose answers are [sequence, sample, ...].

    So is the noise, but for its key. As many devices as divide their numbers share samples and sequences.
    """
    num_sequences, num_samples = noise.states.shape[:2]
    for_samples = math.gcd(jax.device_count(), num_samples)
    for_sequences = math.gcd(jax.device_count() // for_samples, num_sequences)
    if for_samples * for_sequences == 1 or _is_inside():
        return function(fitted, windows, noise)
    arrays, rest = eqx.partition(fitted, eqx.is_array)
    of_noise = type(noise)(*(TRAJECTORIES for _ in noise[:-1]), key=SEQUENCES)
    spread = jax.shard_map(
        lambda arrays, windows, noise: function(eqx.combine(arrays, rest), windows, noise),
        mesh=_mesh(for_sequences, for_samples),
        in_specs=(WHOLE, SEQUENCES, of_noise),
        out_specs=TRAJECTORIES,
        check_vma=False,  # the chains' own primitives do not say what they vary over
    )
    return _whole(spread(arrays, windows, noise))


def over_problems(function: Callable, num_problems: int) -> Callable:
    """`jax.vmap(function)`, every device with its share of the problems; what is left over is filled up with the last one."""
    together = jax.vmap(function)
    if jax.device_count() == 1 or num_problems == 1:
        return together
    filled = np.minimum(np.arange(num_problems + -num_problems % jax.device_count()), num_problems - 1)
    spread = jax.shard_map(together, mesh=_mesh(jax.device_count(), 1), in_specs=SEQUENCES, out_specs=SEQUENCES, check_vma=False)

    def run(*trees: Any) -> Any:
        answers = spread(*jax.tree.map(lambda leaf: leaf[filled], trees))
        return _whole(jax.tree.map(lambda leaf: leaf[:num_problems], answers))

    return run


def _whole(tree: Any) -> Any:
    return jax.lax.with_sharding_constraint(tree, NamedSharding(_mesh(1, 1), WHOLE))


def _mesh(for_sequences: int, for_samples: int) -> Mesh:
    """All devices, also those that are left over: their work repeats that of others."""
    devices = np.array(jax.devices()).reshape(for_sequences, for_samples, -1)
    return Mesh(devices, ("sequence", "sample", "idle"), axis_types=(AxisType.Auto,) * 3)


def _is_inside() -> bool:
    """Whether this is the share of one device already."""
    return not jax.sharding.get_abstract_mesh().empty
