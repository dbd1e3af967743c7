"""Functions of small arrays, taken apart into their entries.

Inside a fused kernel there are no small arrays: an array of five numbers is five numbers, each in a register (or five tiles, when
every thread has its own five). `unroll` turns a function of small arrays, a kernel of two points say, or a proposal, into the
same function of arrays of entries, by interpreting what JAX traced of it. So a kernel, a mean and a proposal are written once.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

Entries = np.ndarray  # of Python objects: tracers of scalars or of tiles that broadcast against each other

ELEMENTWISE = (
    *("abs", "acos", "add", "add_any", "and", "asin", "atan", "atan2", "cbrt", "ceil", "clamp", "convert_element_type", "cos"),
    *("cosh", "div", "eq", "exp", "exp2", "expm1", "floor", "ge", "gt", "integer_pow", "is_finite", "le", "log", "log1p"),
    *("logistic", "lt", "max", "min", "mul", "ne", "neg", "not", "or", "pow", "rem", "rsqrt", "select_n", "sign", "sin"),
    *("sinh", "sqrt", "square", "sub", "tan", "tanh"),
)
REARRANGING = (  # they move entries about, and do so to their indices just as well
    *("broadcast_in_dim", "copy", "dynamic_slice", "expand_dims", "gather", "reshape", "rev", "slice", "split", "squeeze"),
    *("transpose", "unstack", "copy_p"),
)
CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "custom_jvp_call": "call_jaxpr", "remat": "jaxpr"}
FOLDS: dict[str, Callable] = {
    "reduce_sum": operator.add,
    "reduce_prod": operator.mul,
    "reduce_max": jnp.maximum,
    "reduce_min": jnp.minimum,
}


def unroll(function: Callable, *examples: Any) -> Callable[..., list[Entries]]:
    """`function` as one of entries: those of every array among its arguments, in order, to those of every array of its answer.

    `examples` are arguments of the shapes to come; what in them is no array stays as it is.
    """
    arrays, rest = eqx.partition(examples, eqx.is_array)
    closed = jax.make_jaxpr(lambda arrays: function(*eqx.combine(arrays, rest)))(arrays)

    def entrywise(*leaves: Entries) -> list[Entries]:
        return _evaluate(closed.jaxpr, [_constants(value) for value in closed.consts], leaves)

    return entrywise


def can_unroll(function: Callable, *examples: Any) -> bool:
    """Whether every operation of `function` is one that `unroll` knows."""
    leaves = [leaf for leaf in jax.tree.leaves(examples) if eqx.is_array(leaf)]

    def attempt(scalars: list[list[jax.Array]]) -> list[list[Any]]:
        leaf_entries = [entries(flat, leaf.shape) for flat, leaf in zip(scalars, leaves, strict=True)]
        return [list(answer.flat) for answer in unroll(function, *examples)(*leaf_entries)]

    try:
        jax.eval_shape(attempt, [[jax.ShapeDtypeStruct((), leaf.dtype)] * leaf.size for leaf in leaves])
    except NotImplementedError:
        return False
    return True


def entries(values: Sequence[Any], shape: tuple[int, ...]) -> Entries:
    """`values` as the entries of an array of that shape."""
    result = np.empty(len(values), object)
    for index, value in enumerate(values):
        result[index] = value
    return result.reshape(shape)


def _evaluate(jaxpr: core.Jaxpr, consts: Sequence[Entries], arguments: Sequence[Entries]) -> list[Entries]:
    values: dict[Any, Entries] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *arguments), strict=True))

    def read(variable: Any) -> Entries:
        return _constants(variable.val) if isinstance(variable, core.Literal) else values[variable]

    for equation in jaxpr.eqns:
        results = _apply(equation, [read(variable) for variable in equation.invars])
        values.update(zip(equation.outvars, results, strict=True))
    return [read(variable) for variable in jaxpr.outvars]


def _apply(equation: Any, operands: list[Entries]) -> list[Entries]:
    name, params = equation.primitive.name, equation.params
    if name in CALLS:
        return _evaluate(*_inner(equation), operands)
    if name in ELEMENTWISE:
        return [_elementwise(equation, operands)]
    if name in REARRANGING:
        return _rearrange(equation, operands)
    if name in FOLDS:
        return [_fold(FOLDS[name], operands[0], params["axes"])]
    if name == "concatenate":
        return [np.concatenate(operands, axis=params["dimension"])]
    if name == "stack":
        return [np.stack(operands, axis=params["axis"])]
    if name == "dot_general":
        return [_dot(operands[0], operands[1], *params["dimension_numbers"])]
    if name == "cholesky":
        return [_cholesky(operands[0])]
    if name == "pad":
        return [_pad(operands[0], operands[1], params["padding_config"])]
    if name == "platform_index":  # where platforms differ, what serves all of them
        return [_constants(np.int32(next(i for i, names in enumerate(params["platforms"]) if names is None)))]
    if name == "cond" and isinstance(operands[0][()], np.generic):
        chosen = params["branches"][int(operands[0][()])]
        return _evaluate(chosen.jaxpr, [_constants(value) for value in chosen.consts], operands[1:])
    if name == "iota":
        with jax.ensure_compile_time_eval():
            return [_constants(equation.primitive.bind(**params))]
    raise NotImplementedError(f"`{name}` cannot be taken apart into entries.")


def _inner(equation: Any) -> tuple[core.Jaxpr, list[Entries]]:
    inner = equation.params[CALLS[equation.primitive.name]]
    return (inner.jaxpr, [_constants(value) for value in inner.consts]) if hasattr(inner, "jaxpr") else (inner, [])


def _elementwise(equation: Any, operands: list[Entries]) -> Entries:
    shape, dtypes = equation.outvars[0].aval.shape, [variable.aval.dtype for variable in equation.invars]
    result, operands = np.empty(shape, object), [np.broadcast_to(operand, shape) for operand in operands]
    for index in np.ndindex(shape):
        chosen = [operand[index] for operand in operands]
        if all(isinstance(entry, np.generic) for entry in chosen):
            with jax.ensure_compile_time_eval():
                result[index] = np.asarray(equation.primitive.bind(*map(jnp.asarray, chosen), **equation.params))[()]
            continue
        tile = jnp.broadcast_shapes(*(np.shape(entry) for entry in chosen))
        chosen = [
            jnp.full(tile, entry, dtype) if not np.shape(entry) else jnp.broadcast_to(entry, tile)
            for entry, dtype in zip(chosen, dtypes, strict=True)
        ]
        result[index] = equation.primitive.bind(*chosen, **equation.params)
    return result


def _rearrange(equation: Any, operands: list[Entries]) -> list[Entries]:
    """Do to the numbers of the entries what is to be done to the entries."""
    moved, rest = operands[0], operands[1:]
    if any(not isinstance(entry, np.generic) for operand in rest for entry in operand.flat):
        raise NotImplementedError(f"`{equation.primitive.name}` needs indices that are known when the program is traced.")
    with jax.ensure_compile_time_eval():
        numbers = jnp.arange(moved.size, dtype=jnp.int32).reshape(moved.shape)
        others = [
            jnp.asarray(operand.astype(variable.aval.dtype)) for operand, variable in zip(rest, equation.invars[1:], strict=True)
        ]
        chosen = equation.primitive.bind(numbers, *others, **equation.params)
        several = chosen if equation.primitive.multiple_results else [chosen]
        flat = moved.reshape(-1)
        return [entries([flat[i] for i in np.asarray(numbers).flat], numbers.shape) for numbers in several]


def _fold(combine: Callable, operand: Entries, axes: tuple[int, ...]) -> Entries:
    kept = [axis for axis in range(operand.ndim) if axis not in axes]
    shape = tuple(operand.shape[axis] for axis in kept)
    rows = operand.transpose(*kept, *axes).reshape(*shape, -1)
    result = np.empty(shape, object)
    for index in np.ndindex(shape):
        result[index] = functools.reduce(combine, rows[index])
    return result


def _dot(left: Entries, right: Entries, contracted: tuple, batched: tuple) -> Entries:
    def arrange(operand: Entries, batch: tuple, summed: tuple, is_sum_last: bool) -> tuple[Entries, tuple]:
        free = [axis for axis in range(operand.ndim) if axis not in (*batch, *summed)]
        sizes = tuple(operand.shape[axis] for axis in free)
        num_batch, num_sum = (int(np.prod([operand.shape[axis] for axis in axes], dtype=int)) for axes in (batch, summed))
        order = (*batch, *free, *summed) if is_sum_last else (*batch, *summed, *free)
        shape = (num_batch, -1, num_sum) if is_sum_last else (num_batch, num_sum, -1)
        return operand.transpose(order).reshape(shape), sizes

    batch = tuple(left.shape[axis] for axis in batched[0])
    rows, left_free = arrange(left, tuple(batched[0]), tuple(contracted[0]), True)
    columns, right_free = arrange(right, tuple(batched[1]), tuple(contracted[1]), False)
    result = np.empty((len(rows), rows.shape[1], columns.shape[2]), object)
    for b, i, j in np.ndindex(result.shape):
        result[b, i, j] = functools.reduce(operator.add, rows[b, i] * columns[b, :, j])
    return result.reshape(*batch, *left_free, *right_free)


def _cholesky(matrix: Entries) -> Entries:
    """The lower factor, row by row."""
    size = matrix.shape[-1]
    factor = np.full(matrix.shape, np.float32(0.0), object)
    for i in range(size):
        for j in range(i + 1):
            rest = functools.reduce(operator.sub, factor[i, :j] * factor[j, :j], matrix[i, j])
            factor[i, j] = jnp.sqrt(rest) if i == j else rest / factor[j, j]
    return factor


def _pad(operand: Entries, padding: Entries, config: Sequence[tuple[int, int, int]]) -> Entries:
    flat = [*operand.flat, padding[()]]
    with jax.ensure_compile_time_eval():
        numbers = jnp.arange(operand.size, dtype=jnp.int32).reshape(operand.shape)
        numbers = np.asarray(jax.lax.pad(numbers, jnp.int32(operand.size), config))
    return entries([flat[i] for i in numbers.flat], numbers.shape)


def _constants(value: Any) -> Entries:
    """The entries of an array that is known, as NumPy scalars of its type."""
    array = np.asarray(value)
    return entries([array[index] for index in np.ndindex(array.shape)], array.shape)
