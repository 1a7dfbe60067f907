"""Bind arrays to the native optimizer kernels: checked once, updated in place by many steps.

Arguments are checked here, since C would wrap integers and cut strings that do not fit.
"""

from __future__ import annotations

import ctypes
import functools
import math
import operator
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, Protocol

import numpy as np

from onnxtrain.errors import OperatorError
from onnxtrain.operators.registry import OPTIMIZERS, Entry
from onnxtrain.runtime import native

_TYPES = {np.dtype(np.float32): 0, np.dtype(np.float64): 1}


class Bound:
    """Arrays checked once and updated in place by many steps.

    Each optimizer is a method named after its operator, in lower case: ``bound.adam(learning_rate=1e-3, step=1)`` does
    the same as :func:`onnxtrain.kernels.adam_`. This object keeps the arrays alive; do not reallocate their memory
    while it is in use.

    Args:
        parameters: Arrays to update, float32 or float64.
        gradients: One array per parameter, of the same type and shape; never written to.
        states: Zero, one or two arrays per parameter, of the same type and shape: first the first state of all
            parameters, then the second.

    Raises:
        OperatorError: An array is read-only, not contiguous, overlaps another, or has the wrong type or
            shape; or the lists have lengths that do not fit.

    Example:
        >>> import numpy as np
        >>> x, g, v = np.ones(3), np.ones(3), np.zeros(3)
        >>> bound = Bound([x], [g], [v])
        >>> bound.momentum(learning_rate=0.5, step=0, alpha=0.9, beta=1.0)
        >>> x
        array([0.5, 0.5, 0.5])
    """

    def __init__(self, parameters: Sequence[Any], gradients: Sequence[Any], states: Sequence[Any] = ()) -> None:
        parameters, gradients, states = (
            _list(name, values)
            for name, values in (("parameters", parameters), ("gradients", gradients), ("states", states))
        )
        count = len(parameters)
        if len(gradients) != count:
            raise OperatorError(
                f"{count} parameters came with {len(gradients)} gradients: give one for each parameter."
            ).about("gradients", got=len(gradients), wanted=count)
        if len(states) not in (0, count, 2 * count):
            raise OperatorError(
                f"{count} parameters came with {len(states)} states: give none, one or two for each."
            ).about("states", got=len(states), wanted=count)
        self._groups = len(states) // count if count else 0
        self._arrays = [
            *(_array(f"parameters[{i}]", x, writable=True) for i, x in enumerate(parameters)),
            *(_array(f"gradients[{i}]", x, writable=False) for i, x in enumerate(gradients)),
            *(_array(f"states[{i}]", x, writable=True) for i, x in enumerate(states)),
        ]
        names = [
            f"{group}[{i}]"
            for group, arrays in (("parameters", parameters), ("gradients", gradients), ("states", states))
            for i in range(len(arrays))
        ]
        for index, array in enumerate(self._arrays):
            _check_like(names[index], array, f"parameters[{index % count}]", self._arrays[index % count])
        _check_apart(names, self._arrays, read_only=range(count, 2 * count))
        self._count = count
        self._last: tuple[Entry, list[type], dict[str, Any], tuple[Any, int]] | None = None  # see _attributes
        self._tensors = (native.Tensors * count)()
        addresses = [array.ctypes.data for array in self._arrays]
        for i, tensors in enumerate(self._tensors):
            tensors.type = _TYPES[self._arrays[i].dtype]
            tensors.count = self._arrays[i].size
            tensors.parameter = addresses[i]
            tensors.gradient = addresses[count + i]
            for group in range(self._groups):
                tensors.states[group] = addresses[(2 + group) * count + i]

    def release(self) -> None:
        """Drop the references to the arrays; from now on the caller must keep them alive."""
        self._arrays = []

    def __getattr__(self, name: str) -> Update:
        entry = None if name.startswith("_") else _optimizers().get(name)
        if entry is None:
            raise AttributeError(f"Bound has no attribute {name!r}; it has the optimizers {', '.join(_optimizers())}.")
        return functools.partial(self.update, entry)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *_optimizers()]

    def update(self, entry: Entry, *, learning_rate: float, threads: int = 1, **given: Any) -> None:
        """Update the parameters by one step of an optimizer; :mod:`~onnxtrain.runtime.kernels` lists the arguments.

        Args:
            entry: The optimizer.
            learning_rate: The learning rate.
            threads: Number of threads; the result does not depend on it.
            **given: ``step``, where the update rule counts steps, and the operator's attributes.

        Raises:
            OperatorError: An argument is out of range, or the optimizer needs another number of states.
        """
        schema, name = entry.schema, entry.schema.name.lower()
        threads = _integer(f"{name}: threads", threads, 1, 2**31 - 1)
        rate = _wide_number(f"{name}: learning_rate", learning_rate)
        step = 0
        if schema.counted:
            if "step" not in given:
                raise TypeError(f"{name} needs the argument step, the number of the step.")
            step = _integer(f"{name}: step", given.pop("step"), -(2**63), 2**63 - 1)
        attributes, groups = self._attributes(entry, given)
        if self._count and groups != self._groups:
            raise OperatorError(
                f"{name} needs {groups} state{'' if groups == 1 else 's'} for each parameter and got {self._groups}: "
                "give the states in the operator's order, group after group."
            ).about(name, got=self._groups, wanted=groups)
        error = native.library().onnxtrain_update(
            schema.name.encode(),
            ctypes.byref(self._tensors),
            self._count,
            threads,
            rate,
            step,
            ctypes.byref(attributes),
            len(attributes),
        )
        if error is not None:
            raise OperatorError(f"{name}: {error.decode()}")

    def _attributes(self, entry: Entry, given: dict[str, Any]) -> tuple[Any, int]:
        """Return the attributes as a C array and the number of states they require; cached for repeated arguments."""
        kinds = [type(value) for value in given.values()]
        last = self._last  # another thread may replace it
        if last is not None and last[:2] == (entry, kinds) and last[2] == given:
            return last[3]
        schema, name = entry.schema, entry.schema.name.lower()
        values = {**defaults(entry), **given}
        if len(values) > len(schema.attributes):
            known = [attribute.name for attribute in schema.attributes]
            odd = next(argument for argument in given if argument not in known)
            raise TypeError(f"{name} has no argument {odd!r}; its attributes are {', '.join(known)}.")
        attributes = (native.Attribute * len(schema.attributes))()
        rounded: dict[str, float | str] = {}
        for item, attribute in zip(attributes, schema.attributes, strict=True):
            item.name, label = attribute.name.encode(), f"{name}: {attribute.name}"
            if attribute.kind is tuple:
                if values[attribute.name] != ():
                    raise OperatorError(
                        f"{label} is {values[attribute.name]!r}, but the kernels over arrays have no blocks; "
                        "train with Trainer, or run the operator's reference."
                    )
                item.text = b""
            elif attribute.kind is str:
                item.text = _text(label, values[attribute.name])
            else:
                item.number = _number(label, values[attribute.name])
            rounded[attribute.name] = item.number if attribute.kind is float else values[attribute.name]
        found = attributes, len(schema.used_states(rounded))
        self._last = entry, kinds, dict(given), found
        return found


class Update(Protocol):
    """Signature of an optimizer step."""

    def __call__(  # noqa: D102 - the class says it
        self, *, learning_rate: float, step: int = ..., threads: int = 1, **attributes: float | str
    ) -> None: ...


@functools.cache
def defaults(entry: Entry) -> Mapping[str, float | str]:
    """Return the operator attributes of an optimizer's default settings."""
    return entry.settings().node_attributes()


@functools.cache
def _optimizers() -> Mapping[str, Entry]:
    return {name.lower(): entry for name, entry in OPTIMIZERS.items()}


def _array(name: str, tensor: Any, *, writable: bool) -> np.ndarray[Any, Any]:
    """Return a NumPy view of ``tensor`` without a copy, after a check of its type and layout."""
    if isinstance(tensor, np.ndarray):
        array = tensor
    elif hasattr(tensor, "__dlpack__"):
        try:
            array = np.from_dlpack(tensor)
        except Exception as error:
            raise OperatorError(f"{name} cannot be shared through DLPack ({error}): pass a plain CPU tensor.").about(
                name
            ) from error
    else:
        raise OperatorError(
            f"{name} is a {type(tensor).__name__}: it must be a NumPy array or a tensor with __dlpack__."
        )
    if array.dtype not in _TYPES:
        raise OperatorError(f"{name} has type {array.dtype}: it must be float32 or float64 in native byte order.")
    if not (array.flags.c_contiguous and array.flags.aligned):
        raise OperatorError(f"{name} is not contiguous in memory: pass an aligned array in C order.")
    if writable and not array.flags.writeable:
        raise OperatorError(f"{name} is read-only: it is updated in place, so pass a writable array.")
    return array


def _check_like(name: str, array: np.ndarray[Any, Any], parameter_name: str, parameter: np.ndarray[Any, Any]) -> None:
    if array.dtype != parameter.dtype:
        raise OperatorError(
            f"{name} has type {array.dtype} and {parameter_name} has type {parameter.dtype}: they must agree."
        )
    if array.shape != parameter.shape:
        raise OperatorError(
            f"{name} has shape {array.shape} and {parameter_name} has shape {parameter.shape}: they must agree."
        )


def _check_apart(names: list[str], arrays: list[np.ndarray[Any, Any]], read_only: range) -> None:
    """Refuse arrays that share memory; gradients are only read and may share memory with each other."""
    spans = sorted(
        (array.ctypes.data, array.ctypes.data + array.nbytes, index)
        for index, array in enumerate(arrays)
        if array.nbytes
    )
    written_end, written = 0, -1  # largest end address of the writable arrays so far, and the index of that array
    end, last = 0, -1  # the same for all arrays
    for start, stop, index in spans:
        writable = index not in read_only
        other = last if writable and start < end else written if start < written_end else -1
        if other >= 0:
            raise OperatorError(
                f"{names[other]} and {names[index]} overlap in memory: every array that is updated needs its own."
            ).about(names[other], got=names[index])
        if writable and stop > written_end:
            written_end, written = stop, index
        if stop > end:
            end, last = stop, index


MOST = 8
"""Number of array sets in the cache."""

_known: OrderedDict[tuple[int, ...], tuple[list[Any], Bound, list[Any]]] = OrderedDict()
_lock = threading.RLock()  # reentrant: a weakref callback may fire within these functions


def bound(parameters: Sequence[Any], gradients: Sequence[Any], states: Sequence[Any] = ()) -> Bound:
    """Bind arrays; return the cached :class:`Bound` if an earlier call had the same objects."""
    lists = [
        _list(name, values)
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
    """Return the properties that the checks of an array depend on; ``None`` where they are unknown."""
    if type(array) is np.ndarray:
        try:  # takes a third of the time of array.ctypes.data
            address = ctypes.addressof(ctypes.c_char.from_buffer(array))  # type: ignore[arg-type]
        except (TypeError, ValueError, BufferError):  # read-only, empty, or not contiguous
            address = array.ctypes.data
        return address, array.shape, array.dtype, array.strides, array.flags.num
    try:  # a PyTorch tensor
        return array.data_ptr(), array.shape, array.dtype, array.stride(), array.device, array.requires_grad
    except (AttributeError, TypeError, RuntimeError):
        return None


_INFINITE = 2.0**128 - 2.0**103
"""Smallest value that rounds to infinity in float32."""


def _integer(name: str, value: Any, low: int, high: int) -> int:
    """Return ``value`` as an integer from ``low`` to ``high``."""
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise OperatorError(
            f"{name} is {_shown(value)}: it must be an integer from {_power(low)} to {_power(high)}."
        ) from None
    if number < low:
        raise OperatorError(f"{name} is {_shown(number)}: it must be {_power(low)} or more.")
    if number > high:
        raise OperatorError(f"{name} is {_shown(number)}: it must be at most {_power(high)}.")
    return number


def _wide_number(name: str, value: Any) -> float:
    fits = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    try:
        number = float(value) if fits else math.nan
    except OverflowError:
        number, fits = math.nan, False
    if not fits or (math.isinf(number) and not np.isinf(value)):
        raise OperatorError(f"{name} is {_shown(value)}: it must be a number that float64 holds.")
    return number


def _number(name: str, value: Any) -> float:
    """Return ``value`` as float64 after a check that float32, the type of ONNX attributes, can hold it."""
    found = _wide_number(name, value)
    if math.isfinite(found) and abs(found) >= _INFINITE:
        raise OperatorError(
            f"{name} is {found!r}: its magnitude must be at most 3.402823e+38, since it is stored as float32."
        ).about(name, got=found)
    return found


def _text(name: str, value: Any) -> bytes:
    """Return ``value`` as bytes without NUL, which C would take for the end."""
    if not isinstance(value, str):
        raise OperatorError(f"{name} is {_shown(value)}: it must be a string.")
    if "\0" in value:
        raise OperatorError(f"{name} is {_shown(value)}: it must be a string without NUL.")
    return value.encode(errors="backslashreplace")


def _list(name: str, values: Any) -> list[Any]:
    if isinstance(values, (str, bytes, Mapping, Set)) or not isinstance(values, Iterable):
        raise OperatorError(f"{name} is {_shown(values)}: it must be a list of arrays.")
    try:
        return list(values)
    except TypeError:  # a 0-d array has __iter__ but refuses to iterate
        raise OperatorError(f"{name} is {_shown(values)}: it must be a list of arrays.") from None


def _shown(value: Any) -> str:
    """Format a value for a message: shortened, or its type for arrays and other objects."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 1 << 64:
        return f"an integer of {value.bit_length()} bits"  # repr() raises ValueError on very long integers
    if isinstance(value, (bool, int, float, str, bytes, type(None), np.generic)):
        shown = ascii(value) if isinstance(value, str) else repr(value)
        return shown if len(shown) <= 60 else f"{shown[:57]}..."
    return f"of type {type(value).__name__}"


def _power(bound: int) -> str:
    return {2**63 - 1: "2**63 - 1", -(2**63): "-2**63", 2**31 - 1: "2**31 - 1"}.get(bound, str(bound))
