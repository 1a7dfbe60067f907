"""Indexing of values as of NumPy arrays: whole numbers, slices, ``...``, ``None`` and one array of indices."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from onnxtrain.errors import OperatorError
from onnxtrain.ir.operands import as_array
from onnxtrain.ir.value import Value

_END: Final = np.iinfo(np.int64).max
_BEGIN: Final = np.iinfo(np.int64).min


def indexed(value: Value, key: Any) -> Value:
    """``value[key]``: one Slice for all slices, a Gather per number or array, one Unsqueeze for all ``None``.

    Raises:
        OperatorError: There are too many indices, one is outside of its axis, or of a kind that ONNX has not.
    """
    entries = _per_axis(value, key if isinstance(key, tuple) else (key,))
    axes = [entry for entry in entries if entry is not None]
    result = _sliced(value, axes)
    for axis in reversed(range(len(axes))):
        if not isinstance(axes[axis], slice):
            index, shape = _indices(value, axes[axis], axis), result.shape
            result = result.op.Gather(result, index, axis=axis)
            if shape is not None and index.shape is not None:
                result = result.with_shape((*shape[:axis], *index.shape, *shape[axis + 1 :]))
    added, position = [], 0
    for entry in entries:
        if entry is None:
            added.append(position)
        position += _rank(entry)
    return result.op.Unsqueeze(result, result.op.ints(*added)) if added else result


def _per_axis(value: Value, keys: tuple[Any, ...]) -> list[Any]:
    """One entry per axis that is named, and ``None`` for each new one; ``...`` filled in."""
    named = sum(key is not None and key is not Ellipsis for key in keys)
    gaps = sum(key is Ellipsis for key in keys)
    if gaps > 1:
        raise OperatorError(f"The index of {value.name!r} has {gaps} times '...'; it can stand there once.")
    if value.rank is not None and named > value.rank:
        raise OperatorError(f"The index of {value.name!r} names {named} axes, but it has shape {value.shape}.")
    if (
        sum(not isinstance(key, slice | int | np.integer) and key is not None and key is not Ellipsis for key in keys)
        > 1
    ):
        raise OperatorError(f"The index of {value.name!r} has several arrays; use op.GatherND.")
    entries: list[Any] = []
    for place, key in enumerate(keys):
        if key is not Ellipsis:
            entries.append(key)
        elif any(later is not None for later in keys[place + 1 :]) or None in keys[place + 1 :]:
            if value.rank is None:
                raise OperatorError(f"'...' needs the rank of {value.name!r}, which is not known.")
            entries += [slice(None)] * (value.rank - named)
    return entries


def _sliced(value: Value, axes: list[Any]) -> Value:
    starts, ends, places, steps = [], [], [], []
    for axis, entry in enumerate(axes):
        if not isinstance(entry, slice) or entry == slice(None):
            continue
        for bound in (entry.start, entry.stop, entry.step):
            if bound is not None and (isinstance(bound, bool) or not isinstance(bound, int | np.integer)):
                raise OperatorError(
                    f"A slice of {value.name!r} has the bound {bound!r}; it needs whole numbers. For computed bounds "
                    "use op.Slice."
                )
        step = 1 if entry.step is None else int(entry.step)
        if step == 0:
            raise OperatorError(f"A slice of {value.name!r} has the step 0; it needs another number.")
        starts.append((0 if step > 0 else _END) if entry.start is None else int(entry.start))
        ends.append((_END if step > 0 else _BEGIN) if entry.stop is None else int(entry.stop))
        places.append(axis)
        steps.append(step)
    if not places:
        return value
    op = value.op
    result = op.Slice(value, op.ints(*starts), op.ints(*ends), op.ints(*places), op.ints(*steps))
    if value.shape is None:
        return result
    sizes = list(value.shape)
    for axis in places:
        size = sizes[axis]
        sizes[axis] = len(range(*axes[axis].indices(size))) if isinstance(size, int) else None
    return result.with_shape(tuple(sizes))


def _indices(value: Value, entry: Any, axis: int) -> Value:
    if isinstance(entry, Value):
        if entry.ir.dtype is not None and not entry.ir.dtype.is_integer():
            raise OperatorError(
                f"The index of {value.name!r} is a value of type {entry.dtype.name}; it needs integers. To choose by "
                "a condition use op.Where or op.Compress."
            )
        return entry
    array = as_array(entry, f"the index of {value.name!r}")
    if array.dtype.kind not in "iu":
        raise OperatorError(
            f"The index of {value.name!r} is of type {array.dtype}; it needs whole numbers, a slice, None or '...'."
        )
    size = None if value.shape is None else value.shape[axis]
    if isinstance(size, int) and array.size and not (-size <= array.min() and array.max() < size):
        raise OperatorError(
            f"The index {array.max() if array.max() >= size else array.min()} is outside of axis {axis} of "
            f"{value.name!r}, which has shape {value.shape}."
        )
    return value.op.constant(array.astype(np.int64))


def _rank(entry: Any) -> int:
    """How many axes of the result come from an entry of the index."""
    if entry is None or isinstance(entry, slice):
        return 1
    if isinstance(entry, Value):
        if entry.rank is None:
            raise OperatorError(f"The rank of the index {entry.name!r} is not known.")
        return entry.rank
    return int(np.ndim(entry))
