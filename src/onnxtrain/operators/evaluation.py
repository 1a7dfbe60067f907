"""Run the update rule of an optimizer operator: on NumPy arrays, or on graph values, which emits its body."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from onnxtrain.errors import OperatorError
from onnxtrain.graph import Builder, Value
from onnxtrain.operators.arithmetic import Data, Tensor, wide
from onnxtrain.operators.checks import Described, broadcasts, check_scalars, check_variable, group
from onnxtrain.operators.schema import Attributes, OptimizerSchema


def evaluate(
    schema: OptimizerSchema, R: ArrayLike, T: ArrayLike, *inputs: ArrayLike, **attributes: Any
) -> tuple[np.ndarray, ...]:
    """Run an optimizer operator on arrays.

    Args:
        schema: The operator.
        R: The learning rate, one element of float32 or float64.
        T: The update count, one int64.
        *inputs: All X, then all G, then all of each state.
        **attributes: The operator's attributes.

    Returns:
        All X_new, then all of each new state, each of the type and shape of its input.

    Raises:
        OperatorError: Inputs or attributes violate the operator's schema.
    """
    values = schema.complete(attributes)
    rate, count = np.asarray(R), np.asarray(T)
    check_scalars(schema, _describe(rate), _describe(count))
    tensors = [np.asarray(item) for item in inputs]
    variables = group(schema, values, len(tensors))
    results = []
    with np.errstate(all="ignore"):  # NaN and infinity are valid results
        for index in range(variables):
            own = tensors[index::variables]
            check_variable(schema, values, index, [_describe(tensor) for tensor in own])
            new = schema.rule(wide(rate), wide(count), *map(Tensor, own), **arguments(values))
            results.append([np.asarray(tensor.data) for tensor in new])
    return tuple(item for role in zip(*results, strict=True) for item in role)


def operator_over_arrays(schema: OptimizerSchema) -> Callable[..., tuple[np.ndarray, ...]]:
    """Return the public function that runs an operator on arrays; it has the operator's name in lower case."""

    def run(R: ArrayLike, T: ArrayLike, *inputs: ArrayLike, **attributes: Any) -> tuple[np.ndarray, ...]:
        return evaluate(schema, R, T, *inputs, **attributes)

    run.__name__ = run.__qualname__ = schema.name.lower()
    run.__module__ = __name__.rpartition(".")[0]
    run.__doc__ = description(schema)
    return run


def description(schema: OptimizerSchema) -> str:
    """Return the docstring of the operator over arrays."""
    inputs = ", ".join(["all X", "all G", *(f"all {state.name}" for state in schema.states)])
    outputs = ", ".join(["All X_new", *(f"all {state.name}_new" for state in schema.states)])
    given = ", ".join(
        f"``{a.name}`` ({'required' if a.default is None else repr(a.default)})" for a in schema.attributes
    )
    return f"""Run the operator {schema.name} on arrays.

    :class:`{schema.name}` has the equations, and an example.

    Args:
        R: Learning rate, one float32 or float64 number.
        T: Update count, one int64 number.
        *inputs: In this order {inputs}; float32 or float64, one type for each variable. States that the
            attributes switch off are left out.
        **attributes: {given}.

    Returns:
        {outputs}, each of the type and shape of its input.

    Raises:
        OperatorError: The operator does not accept the types, shapes, counts or attributes.
    """


def arguments(attributes: Attributes) -> dict[str, Any]:
    """Convert attributes to arguments of a rule: numbers become float64 :class:`Wide` values."""
    return {name: item if isinstance(item, (str, tuple)) else wide(item) for name, item in attributes.items()}


def _describe(array: np.ndarray) -> Described:
    return Described(array.dtype, array.shape)


def emit(
    builder: Builder,
    schema: OptimizerSchema,
    R: Value,
    T: Value,
    variables: Sequence[Sequence[Value]],
    attributes: Mapping[str, Any],
) -> list[tuple[Value, ...]]:
    """Emit the body of an optimizer operator for any number of variables.

    Expressions of R, T and attributes alone are computed once, in float64, and shared by all variables.

    Args:
        builder: The builder that emits the nodes.
        schema: The operator.
        R: The learning rate.
        T: The update count.
        variables: X, G and the states of each variable; their types must be known.
        attributes: The operator's attributes; omitted ones have their defaults.

    Returns:
        X_new and the new states of each variable, with the types and shapes of X and the states.

    Raises:
        OperatorError: Attributes, types or shapes violate the operator's requirements. With unknown shapes, a G larger
            than X or an R of several elements fails when the graph runs.
    """
    values = schema.complete(attributes)
    check_scalars(schema, describe(R), describe(T))
    rate, count, given = wide(R), wide(T), arguments(values)
    results = []
    for index, own in enumerate(variables):
        described = [describe(value) for value in own]
        check_variable(schema, values, index, described)
        for value, item in zip(own, described, strict=True):
            if item.dtype is None:
                raise OperatorError(
                    f"{schema.name}: the type of {value.name!r} is not known; infer the model's types first."
                ).about(value.name)
        X, G, *states = own
        tensors = map(Tensor, (X, _within(G, X), *states))
        new = schema.rule(rate, count, *tensors, **given)
        old = (X, *states)
        results.append(tuple(_as(like, tensor.data) for like, tensor in zip(old, new, strict=True)))
    return results


def describe(value: Value) -> Described:
    """Return the known type and shape of a graph value."""
    dtype = None if value.dtype.name == "UNDEFINED" else np.dtype(value.dtype.numpy())
    return Described(dtype, value.shape, value.name)


def _within(G: Value, X: Value) -> Value:
    """Return G if it is known to broadcast to X, else G expanded to X's shape; a larger G fails at run time."""
    if broadcasts(G.shape, X.shape):
        return G
    op = X.op
    shape = op.Shape(X)
    # Expand broadcasts both ways; if G is larger than X, the Reshape fails.
    return op.Reshape(op.Expand(G, shape), shape).with_shape(X.shape)


def _as(like: Value, data: Data) -> Value:
    assert isinstance(data, Value)
    return data.with_shape(like.shape) if data.ir is not like.ir else data
