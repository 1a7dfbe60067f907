"""NumPy reference of the optimizer operators: checks, then the update rule for each variable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from onnxtrain.operators.arithmetic import Tensor, wide
from onnxtrain.operators.checks import Described, check_scalars, check_variable, group
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
