"""Body of an optimizer operator: its update rule, run on graph values, emits standard operators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from onnxtrain.errors import OperatorError
from onnxtrain.graph import Builder, Value
from onnxtrain.operators.arithmetic import Data, Tensor, wide
from onnxtrain.operators.checks import Described, broadcasts, check_scalars, check_variable
from onnxtrain.operators.reference import arguments
from onnxtrain.operators.schema import OptimizerSchema


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
    dtype = None if value.dtype.name == "UNDEFINED" else _numpy_type(value)
    return Described(dtype, value.shape, value.name)


def _numpy_type(value: Value) -> np.dtype[Any]:
    return np.dtype(value.dtype.numpy())


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
