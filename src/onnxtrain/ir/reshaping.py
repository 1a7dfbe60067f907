"""Values in the shapes of others: reshaped, or summed where they were broadcast."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from onnxtrain.ir.value import Dimension, Value

if TYPE_CHECKING:
    from onnxtrain.ir.builder import Builder


def reshape(op: Builder, value: Value, shape: Value | Sequence[int], known: Sequence[Dimension] | None = None) -> Value:
    """Reshape with zeros meaning size zero; ``known`` states the result's axes where they are known."""
    target = shape if isinstance(shape, Value) else op.ints(*shape)
    result = op.Reshape(value, target, allowzero=1 if not _has_minus_one(target) else None)
    return result.with_shape(tuple(known)) if known is not None else result


def reshape_like(op: Builder, value: Value, like: Value) -> Value:
    """The elements of ``value`` in the shape of ``like``."""
    shape = like.shape
    if shape is not None and shape == value.shape and None not in shape:
        return value
    target = None if shape is None else _constant_target(shape, value.shape)
    if target is not None:
        return op.Reshape(value, op.ints(*target)).with_shape(shape)
    return reshape(op, value, op.shape_of(like)).with_shape(shape)


def reduce_to(op: Builder, value: Value, like: Value) -> Value:
    """Sum ``value`` over the axes along which ``like`` was broadcast to its shape.

    Decided from the shapes where they say enough: an axis of size 1 in ``like`` is summed, equal symbols
    are equal sizes. The rest is decided in the graph.
    """
    from_shape, to_shape = value.shape, like.shape
    if from_shape is None or to_shape is None or len(to_shape) > len(from_shape):
        return _reduce_dynamically(op, value, like)
    extra = len(from_shape) - len(to_shape)
    axes = list(range(extra))
    for axis, (source, target) in enumerate(zip(from_shape[extra:], to_shape, strict=True), start=extra):
        if target == 1:
            if source != 1:
                axes.append(axis)
        elif not isinstance(target, int) and (target is None or source != target) and source != 1:
            return _reduce_dynamically(op, value, like)
    if not axes:
        return value
    if axes == list(range(extra)):
        summed = op.ReduceSum(value, op.ints(*axes), keepdims=0)
        return summed.with_shape(to_shape)
    kept = tuple(1 if a in axes else d for a, d in enumerate(from_shape))
    summed = op.ReduceSum(value, op.ints(*axes), keepdims=1).with_shape(kept)
    return summed if not extra else reshape_like(op, summed, like)


def _reduce_dynamically(op: Builder, value: Value, like: Value) -> Value:
    source, target = op.Shape(value), op.Shape(like)
    missing = op.Sub(op.Shape(source), op.Shape(target))
    ones = op.ConstantOfShape(missing, value=ir.tensor(np.asarray([1], dtype=np.int64)))
    padded = op.Concat(ones, target, axis=0)
    differs = op.Not(op.Equal(padded, source))
    axes = op.Reshape(op.NonZero(differs), op.ints(-1))
    summed = op.ReduceSum(value, axes, keepdims=1, noop_with_empty_axes=1)
    result = op.Reshape(summed, target, allowzero=1)
    result.ir.dtype = value.dtype
    return result.with_shape(like.shape)


def _constant_target(shape: Sequence[Dimension], source: Sequence[Dimension] | None) -> list[int] | None:
    """The shape as numbers, where -1 (one unknown axis) or 0 (axes that stay) stand for what is not known."""
    if 0 in shape:
        return None
    unknown = [axis for axis, size in enumerate(shape) if not isinstance(size, int)]
    if len(unknown) == 1:
        return [size if isinstance(size, int) else -1 for size in shape]
    known = list(source or ())
    stays = [axis < len(known) and shape[axis] is not None and shape[axis] == known[axis] for axis in unknown]
    if unknown and all(stays):
        return [size if isinstance(size, int) else 0 for size in shape]
    return None


def _has_minus_one(shape: Value) -> bool:
    known = shape.constant()
    return known is not None and bool((known == -1).any())
