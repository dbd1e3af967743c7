"""What a parameter node promises: the array that was put in comes out, an optimiser sees what it may move, and nothing else."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gpssm.params import (
    SMALLEST_POSITIVE,
    AbstractParameter,
    Frozen,
    LowerTriangular,
    Positive,
    as_floating,
    as_parameter,
    as_positive,
    fix,
    freeze,
    softplus_inverse,
    trainable,
    unwrap,
)

FACTOR = jnp.array([[[2.0, 0.0], [-3.0, 0.5]], [[1.0, 0.0], [0.0, 1.0]]])


class Emission(eqx.Module):
    matrix: jax.Array | AbstractParameter
    scale: AbstractParameter


class Model(eqx.Module):
    chol: AbstractParameter
    emission: Emission
    jitter: Frozen
    count: jax.Array
    name: str = eqx.field(static=True)


@pytest.fixture
def model() -> Model:
    emission = Emission(jnp.arange(6.0).reshape(2, 3), Positive(jnp.array([0.1, 0.2])))
    return Model(LowerTriangular(FACTOR), emission, Frozen(jnp.array(1e-6)), jnp.array(3), "kink")


def movable(tree):
    """The leaves that an optimiser sees."""
    return jax.tree.leaves(eqx.filter(tree, trainable(tree)))


@settings(deadline=None)  # the first example compiles
@given(hnp.arrays(np.float64, (2, 3), elements=st.floats(1e-5, 1e8)))
def test_positive_gives_back_what_was_put_in(values):
    np.testing.assert_allclose(Positive(values).value(), values, rtol=1e-11)


@settings(deadline=None)
@given(st.floats(1e-8, 1e12))
def test_softplus_inverse_undoes_softplus_without_overflow(value):
    np.testing.assert_allclose(jax.nn.softplus(softplus_inverse(jnp.asarray(value))), value, rtol=1e-11)


@pytest.mark.parametrize("value", [0.0, 1e-300])
def test_positive_stays_above_its_floor_and_finite(value):
    node = Positive(value)
    assert jnp.isfinite(node.raw)
    assert node.value() > SMALLEST_POSITIVE
    assert eqx.tree_at(lambda n: n.raw, node, jnp.asarray(-1e6)).value() == SMALLEST_POSITIVE


def test_lower_triangular_gives_back_a_factor_and_drops_what_stands_above_its_diagonal():
    np.testing.assert_allclose(LowerTriangular(FACTOR).value(), FACTOR, rtol=1e-12)
    np.testing.assert_allclose(LowerTriangular(FACTOR + jnp.triu(jnp.ones((2, 2)), 1)[None]).value(), FACTOR, rtol=1e-12)


def test_lower_triangular_is_a_cholesky_factor_wherever_the_optimiser_goes(rng):
    raw = jnp.asarray(30 * rng.standard_normal((5, 4, 4)))
    factor = eqx.tree_at(lambda n: n.raw, LowerTriangular(jnp.abs(raw)), raw).value()
    assert jnp.all(jnp.diagonal(factor, axis1=1, axis2=2) >= SMALLEST_POSITIVE)
    assert not jnp.any(jnp.triu(factor, 1))


def test_unwrap_leaves_plain_arrays_and_is_idempotent(model):
    plain = unwrap(model)
    assert not any(isinstance(x, AbstractParameter) for x in (plain.chol, plain.emission.scale, plain.jitter))
    np.testing.assert_allclose(plain.chol, FACTOR, rtol=1e-12)
    np.testing.assert_allclose(plain.emission.scale, [0.1, 0.2], rtol=1e-12)
    assert (plain.jitter, plain.count, plain.name) == (1e-6, 3, "kink")
    assert eqx.tree_equal(unwrap(plain), plain)


def test_trainable_is_every_floating_array_outside_frozen_nodes(model):
    shapes = sorted(leaf.shape for leaf in movable(model))
    assert shapes == [(2,), (2, 2, 2), (2, 3)]


def test_a_frozen_array_is_absent_from_the_partition_and_not_merely_stopped(model):
    params, static = eqx.partition(model, trainable(model))
    assert params.jitter.array is None
    assert static.jitter.array == 1e-6
    assert eqx.tree_equal(eqx.combine(params, static), model)


def test_freeze_keeps_every_value_and_leaves_nothing_to_move(model):
    frozen = freeze(model)
    assert movable(frozen) == []
    assert eqx.tree_equal(unwrap(frozen), unwrap(model))
    assert eqx.tree_equal(freeze(frozen), frozen)


def test_fix_freezes_the_part_it_is_shown_and_no_other(model):
    fixed = fix(model, lambda m: m.emission)
    assert [leaf.shape for leaf in movable(fixed)] == [(2, 2, 2)]
    assert eqx.tree_equal(unwrap(fixed), unwrap(model))


@pytest.mark.parametrize("where", [lambda m: m.emission.scale, lambda m: m.emission.matrix], ids=["node", "array"])
def test_fix_takes_a_single_parameter(model, where):
    fixed = fix(model, where)
    assert isinstance(where(fixed), Frozen)
    assert len(movable(fixed)) == len(movable(model)) - 1


@pytest.mark.parametrize("value", [1, 0.5, True, np.float32(2), np.arange(3), jnp.sin(1.0)], ids=repr)
def test_no_parameter_is_weakly_typed(value):
    leaves = jax.tree.leaves((as_floating(value), as_parameter(value), as_positive(value), Positive(value).value()))
    assert not any(leaf.weak_type for leaf in leaves)
    assert not LowerTriangular(jnp.eye(2)).raw.weak_type


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32, jnp.float64])
def test_a_floating_type_is_kept(dtype):
    assert as_floating(jnp.ones(2, dtype)).dtype == dtype
    assert Positive(jnp.ones(2, dtype)).value().dtype == dtype
    assert LowerTriangular(jnp.eye(2, dtype=dtype)).value().dtype == dtype


@pytest.mark.parametrize("value", [1, True, np.arange(3), jnp.arange(3)], ids=repr)
def test_what_has_no_floating_type_takes_the_default_one(value):
    assert as_floating(value).dtype == jnp.result_type(float)


def test_a_node_that_is_given_is_taken_as_it_is():
    node = Frozen(jnp.ones(2))
    assert as_parameter(node) is node
    assert as_positive(node) is node


def test_an_update_of_a_parameter_compiles_nothing_again():
    num_traces = 0

    @eqx.filter_jit
    def step(node):
        nonlocal num_traces
        num_traces += 1
        return jax.tree.map(lambda raw: raw - jnp.asarray(0.1, raw.dtype), node)

    node = Positive(0.5)
    for _ in range(3):
        node = step(node)
    assert num_traces == 1


def test_the_gradient_flows_through_the_constraints_and_is_that_of_finite_differences(model):
    params, static = eqx.partition(model, trainable(model))

    def loss(params):
        plain = unwrap(eqx.combine(params, static))
        return jnp.sum(jnp.sin(plain.chol)) + jnp.sum(plain.emission.scale**2) + jnp.sum(plain.emission.matrix**3)

    gradients = jax.grad(loss)(params)
    assert gradients.jitter.array is None
    leaves, structure = jax.tree.flatten(params)
    for i, leaf in enumerate(leaves):
        for index in np.ndindex(leaf.shape):

            def along(step, i=i, index=index):
                moved = [other.at[index].add(step) if j == i else other for j, other in enumerate(leaves)]
                return loss(jax.tree.unflatten(structure, moved))

            slope = (along(1e-6) - along(-1e-6)) / 2e-6
            np.testing.assert_allclose(jax.tree.leaves(gradients)[i][index], slope, rtol=1e-6, atol=1e-8)
