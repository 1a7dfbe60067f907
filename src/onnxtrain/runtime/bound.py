"""Arrays checked once and bound to the native kernels, for many steps in place."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from onnxtrain.errors import OperatorError
from onnxtrain.runtime import arguments, native

_TYPES = {np.dtype(np.float32): 0, np.dtype(np.float64): 1}
_NOT_COUNTED: Any = object()  # for a rule without an update count
_TEXTS = ("measure", "mode", "reweighting")


class Bound:
    """Arrays checked once, for many steps in place.

    The arrays must stay where they are as long as this object is used; it keeps them alive.

    Args:
        parameters: The arrays to update, float32 or float64.
        gradients: One for each parameter, of its type and shape. They are read only.
        states: Zero, one or two for each parameter, of its type and shape, group after group.

    Raises:
        OperatorError: An array is read-only, not contiguous, overlaps another, or has the wrong type or
            shape; or the numbers of arrays do not fit.

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
            arguments.arrays(name, values)
            for name, values in (("parameters", parameters), ("gradients", gradients), ("states", states))
        )
        count = len(parameters)
        if len(gradients) != count:
            raise OperatorError(
                f"{count} parameters came with {len(gradients)} gradients: give one for each parameter."
            )
        if len(states) not in (0, count, 2 * count):
            raise OperatorError(f"{count} parameters came with {len(states)} states: give none, one or two for each.")
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
        self._tensors = (native.Tensors * count)()
        addresses = [array.ctypes.data for array in self._arrays]
        for i, tensors in enumerate(self._tensors):
            tensors.type = _TYPES[self._arrays[i].dtype]
            tensors.count = self._arrays[i].size
            tensors.parameter = addresses[i]
            tensors.gradient = addresses[count + i]
            for group in range(self._groups):
                tensors.states[group] = addresses[(2 + group) * count + i]

    def adagrad(
        self,
        *,
        learning_rate: float,
        step: int,
        decay_factor: float = 0.0,
        epsilon: float = 1e-6,
        norm_coefficient: float = 0.0,
        threads: int = 1,
    ) -> None:
        """One step of Adagrad; see :func:`adagrad_`."""
        attributes = {"decay_factor": decay_factor, "epsilon": epsilon, "norm_coefficient": norm_coefficient}
        self._call("adagrad", 1, threads, learning_rate, step, attributes)

    def adam(
        self,
        *,
        learning_rate: float,
        step: int,
        alpha: float = 0.9,
        beta: float = 0.999,
        epsilon: float = 1e-6,
        norm_coefficient: float = 0.0,
        norm_coefficient_post: float = 0.0,
        threads: int = 1,
    ) -> None:
        """One step of Adam; see :func:`adam_`."""
        attributes = {
            "alpha": alpha,
            "beta": beta,
            "epsilon": epsilon,
            "norm_coefficient": norm_coefficient,
            "norm_coefficient_post": norm_coefficient_post,
        }
        self._call("adam", 2, threads, learning_rate, step, attributes)

    def momentum(
        self,
        *,
        learning_rate: float,
        step: int,
        alpha: float,
        beta: float,
        norm_coefficient: float = 0.0,
        mode: str = "standard",
        threads: int = 1,
    ) -> None:
        """One step of Momentum; see :func:`momentum_`."""
        attributes: dict[str, float | str] = {
            "alpha": alpha,
            "beta": beta,
            "norm_coefficient": norm_coefficient,
            "mode": mode,
        }
        self._call("momentum", 1, threads, learning_rate, step, attributes)

    def ssgd(
        self,
        *,
        learning_rate: float,
        measure: str = "log-sum",
        reweighting: str = "l2",
        epsilon: float = 0.01,
        p: float = 0.5,
        regularization: float = 0.0,
        alpha: float = 0.0,
        norm_coefficient: float = 0.0,
        max_scale: float = 0.0,
        threads: int = 1,
    ) -> None:
        """One step of SSGD; see :func:`ssgd_`."""
        attributes: dict[str, float | str] = {
            "measure": measure,
            "reweighting": reweighting,
            "epsilon": epsilon,
            "p": p,
            "regularization": regularization,
            "alpha": arguments.number("ssgd: alpha", alpha),
            "norm_coefficient": norm_coefficient,
            "max_scale": max_scale,
        }
        self._call("ssgd", 1 if alpha > 0.0 else 0, threads, learning_rate, _NOT_COUNTED, attributes)

    def _call(
        self, name: str, groups: int, threads: int, rate: float, step: int, attributes: Mapping[str, float | str]
    ) -> None:
        threads = arguments.integer(f"{name}: threads", threads, 1, 2**31 - 1)
        given: list[float | bytes] = [arguments.wide_number(f"{name}: learning_rate", rate)]
        if step is not _NOT_COUNTED:
            given.append(arguments.integer(f"{name}: step", step, -(2**63), 2**63 - 1))
        for key, value in attributes.items():
            check = arguments.text if key in _TEXTS else arguments.number
            given.append(check(f"{name}: {key}", value))
        if self._count and groups != self._groups:
            raise OperatorError(
                f"{name} needs {groups} state{'' if groups == 1 else 's'} for each parameter and got {self._groups}: "
                "give the states in the operator's order, group after group."
            )
        function = getattr(native.library(), f"onnxtrain_{name}")
        error = function(ctypes.byref(self._tensors), self._count, threads, *given)
        if error is not None:
            raise OperatorError(f"{name}: {error.decode()}")


def _array(name: str, tensor: Any, *, writable: bool) -> np.ndarray[Any, Any]:
    """A NumPy view of ``tensor``, without a copy, of a type and layout that the kernels take."""
    if isinstance(tensor, np.ndarray):
        array = tensor
    elif hasattr(tensor, "__dlpack__"):
        try:
            array = np.from_dlpack(tensor)
        except Exception as error:
            raise OperatorError(
                f"{name} cannot be shared through DLPack ({error}): pass a plain CPU tensor."
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
    """Refuse arrays that share memory; gradients may share it among themselves: nothing writes to them."""
    spans = sorted(
        (array.ctypes.data, array.ctypes.data + array.nbytes, index)
        for index, array in enumerate(arrays)
        if array.nbytes
    )
    written_end, written = 0, -1  # how far the writable arrays so far reach, and which one reaches so far
    end, last = 0, -1  # the same of all arrays
    for start, stop, index in spans:
        writable = index not in read_only
        other = last if writable and start < end else written if start < written_end else -1
        if other >= 0:
            raise OperatorError(
                f"{names[other]} and {names[index]} overlap in memory: every array that is updated needs its own."
            )
        if writable and stop > written_end:
            written_end, written = stop, index
        if stop > end:
            end, last = stop, index
