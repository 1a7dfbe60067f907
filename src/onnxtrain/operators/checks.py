"""Checks of the inputs of optimizer operators, for arrays and for graph values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from onnxtrain.errors import OperatorError
from onnxtrain.graph.value import Dimension
from onnxtrain.operators.schema import Attributes, OptimizerSchema

FLOATS = (np.dtype(np.float32), np.dtype(np.float64))


class Described(NamedTuple):
    """Known properties of a tensor."""

    dtype: np.dtype[Any] | None
    shape: tuple[Dimension, ...] | None
    name: str = ""


def group(schema: OptimizerSchema, attributes: Attributes, count: int) -> int:
    """Return the number of variables whose X, G and states are the ``count`` tensors after R and T."""
    roles = ["X", "G", *(state.name for state in schema.used_states(attributes))]
    if count == 0 or count % len(roles):
        order = ", ".join(f"all {role}" for role in roles)
        raise OperatorError(
            f"{schema.name} got {count} tensors after R and T, but takes {len(roles)} for each variable, "
            f"in the order {order}: give a multiple of {len(roles)}."
        ).about(schema.name, got=count, wanted=len(roles))
    return count // len(roles)


def check_output_count(schema: OptimizerSchema, attributes: Attributes, variables: int, count: int) -> None:
    """Raise OperatorError unless there is one output for each variable and each of its states."""
    states = schema.used_states(attributes)
    needed = variables * (1 + len(states))
    if count != needed:
        order = ", ".join(f"all {name}_new" for name in ("X", *(state.name for state in states)))
        raise OperatorError(
            f"{schema.name} has {count} outputs, but {variables} variable{'s' if variables > 1 else ''} "
            f"make {needed}, in the order {order}; give an output that is not wanted an empty name."
        ).about(schema.name, got=count, wanted=needed)


def check_scalars(schema: OptimizerSchema, R: Described, T: Described) -> None:
    """Raise OperatorError if R is known not to be one float, or T not to be one int64."""
    if R.dtype is not None and R.dtype not in FLOATS:
        raise OperatorError(f"{schema.name}: R is of type {R.dtype}, but must be float32 or float64.")
    if T.dtype is not None and T.dtype != np.int64:
        raise OperatorError(f"{schema.name}: T is of type {T.dtype}, but must be int64.")
    for letter, described in (("R", R), ("T", T)):
        if described.shape is not None and any(d != 1 for d in described.shape if isinstance(d, int)):
            raise OperatorError(
                f"{schema.name}: {letter} has shape {_shown(described.shape)}, but must have exactly one element."
            )


def check_variable(schema: OptimizerSchema, attributes: Attributes, index: int, tensors: Sequence[Described]) -> None:
    """Raise OperatorError if the known types and shapes of one variable's tensors do not fit together."""
    roles = ("X", "G", *(state.name for state in schema.used_states(attributes)))
    x = tensors[0]
    for role, tensor in zip(roles, tensors, strict=True):
        label = f"{schema.name}: {role} of variable {index + 1}" + (f" ({tensor.name!r})" if tensor.name else "")
        if tensor.dtype is not None and tensor.dtype not in FLOATS:
            raise OperatorError(f"{label} is of type {tensor.dtype}, but must be float32 or float64.")
        if tensor.dtype is not None and x.dtype is not None and tensor.dtype != x.dtype:
            raise OperatorError(
                f"{label} is of type {tensor.dtype}, but its X is of type {x.dtype}; the tensors of one variable "
                "have one type."
            )
        if role == "G" and broadcasts(tensor.shape, x.shape) is False:
            raise OperatorError(
                f"{label} has shape {_shown(tensor.shape)}, which does not broadcast to the shape "
                f"{_shown(x.shape)} of X; a gradient may be smaller than X, never larger."
            ).about(label, got=tensor.shape, wanted=x.shape)
        if role not in ("X", "G") and _differ(tensor.shape, x.shape):
            raise OperatorError(
                f"{label} has shape {_shown(tensor.shape)}, but must have the shape {_shown(x.shape)} of X."
            )


def broadcasts(source: tuple[Dimension, ...] | None, target: tuple[Dimension, ...] | None) -> bool | None:
    """Return whether ``source`` broadcasts to ``target`` without growing it; ``None`` if unknown sizes decide."""
    if source is None or target is None:
        return None
    if len(source) > len(target):
        return False
    verdict: bool | None = True
    for a, b in zip(source[::-1], target[::-1], strict=False):
        if a == 1 or (a == b and a is not None):
            continue
        if isinstance(a, int) and isinstance(b, int):
            return False
        verdict = None
    return verdict


def _differ(shape: tuple[Dimension, ...] | None, other: tuple[Dimension, ...] | None) -> bool:
    if shape is None or other is None:
        return False
    if len(shape) != len(other):
        return True
    return any(isinstance(a, int) and isinstance(b, int) and a != b for a, b in zip(shape, other, strict=True))


def _shown(shape: tuple[Dimension, ...] | None) -> str:
    items = ["?" if d is None else str(d) for d in shape or ()]
    return f"({', '.join(items)}{',' if len(items) == 1 else ''})"
