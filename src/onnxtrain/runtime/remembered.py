"""Arrays that were checked once are not checked anew in every call, as long as nothing about them changes."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np

from onnxtrain.runtime import arguments
from onnxtrain.runtime.bound import Bound

MOST = 8
"""Sets of arrays that are remembered."""

_known: OrderedDict[tuple[int, ...], tuple[list[Any], Bound, list[Any]]] = OrderedDict()
_lock = threading.RLock()  # a weak reference may call back wherever memory is given back, within these functions too


def bound(parameters: Sequence[Any], gradients: Sequence[Any], states: Sequence[Any] = ()) -> Bound:
    """The arrays, bound; without checks where an earlier call had the same objects.

    The same are those whose memory, shape, type, layout and right to be written did not change either. Nothing here
    keeps an array alive. (NumPy does not resize in place what has a weak reference, as these arrays have.)

    Raises:
        OperatorError: As :class:`~onnxtrain.runtime.bound.Bound`.
    """
    lists = [
        arguments.arrays(name, values)
        for name, values in (("parameters", parameters), ("gradients", gradients), ("states", states))
    ]
    arrays = [array for values in lists for array in values]
    key = (*map(len, lists), *map(id, arrays))
    seen = [_seen(array) for array in arrays]
    with _lock:
        known = _known.get(key)
        if known is not None and known[0] == seen:
            _known.move_to_end(key)
            return known[1]
    made = Bound(*lists)
    if None in seen:
        return made
    try:
        references = [weakref.ref(array, lambda _: _forget(key)) for array in arrays]
    except TypeError:
        return made
    made.release()
    with _lock:
        _known[key] = seen, made, references
        while len(_known) > MOST:
            _known.popitem(last=False)
    return made


def _forget(key: tuple[int, ...]) -> None:
    with _lock:
        _known.pop(key, None)


def _seen(array: Any) -> tuple[Any, ...] | None:
    """What the checks of an array depend on; ``None`` where that cannot be told."""
    if type(array) is np.ndarray:
        try:  # a third of the time of array.ctypes.data
            address = ctypes.addressof(ctypes.c_char.from_buffer(array))  # type: ignore[arg-type]
        except (TypeError, ValueError, BufferError):  # read-only, empty, or not contiguous
            address = array.ctypes.data
        return address, array.shape, array.dtype, array.strides, array.flags.num
    try:  # PyTorch's
        return array.data_ptr(), array.shape, array.dtype, array.stride(), array.device, array.requires_grad
    except (AttributeError, TypeError, RuntimeError):
        return None
