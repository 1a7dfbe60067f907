"""What goes into a trainer and what can be seen of it: arrays by name, fitted to the model; live parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np

from onnxtrain.data import TargetCheck, TensorSpec
from onnxtrain.data.conversion import check_finite, kind_of, to_numpy
from onnxtrain.data.naming import check_pasts
from onnxtrain.errors import DataError, OptionError
from onnxtrain.training.formatting import html_table, text_table


class Parameters(MutableMapping[str, np.ndarray]):
    """The live parameters by name: arrays to read and to write; assigning copies into them, as ``update`` does.

    An array that is kept has the current values after every step; ``np.array(parameters[name])`` has those of now.
    """

    def __init__(self, states: MutableMapping[str, np.ndarray], names: Sequence[str]) -> None:
        self._states = states
        self._names = dict.fromkeys(names)

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._names:
            raise KeyError(name)
        return self._states[name]

    def __setitem__(self, name: str, value: np.ndarray) -> None:
        if name not in self._names:
            raise OptionError(f"{name!r} is not a parameter; they are {', '.join(list(self._names)[:8])}.")
        self._states[name] = value

    def __repr__(self) -> str:
        return text_table(self._rows())

    def _repr_html_(self) -> str:
        return html_table(self._rows())

    def _rows(self) -> list[dict[str, object]]:
        return [{"name": name, "shape": list(array.shape), "dtype": array.dtype} for name, array in self.items()]

    def check(self, name: str, value: np.ndarray) -> None:
        """Refuse what cannot be assigned.

        Raises:
            OptionError: There is no such parameter, or it has another type or shape.
        """
        if name not in self._names:
            raise OptionError(f"{name!r} is not a parameter; they are {', '.join(list(self._names)[:8])}.")
        own = self._states[name]
        if (value.dtype, value.shape) != (own.dtype, own.shape):
            raise OptionError(
                f"The parameter {name!r} is {own.dtype} of shape {own.shape}; got {value.dtype} of shape {value.shape}."
            )

    def __delitem__(self, name: str) -> None:
        raise OptionError(f"The parameter {name!r} belongs to the model and cannot be deleted.")

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def cut(flat: np.ndarray, like: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The arrays that were joined to one.

    Args:
        flat: All elements.
        like: Arrays of the names, types and shapes wanted.

    Raises:
        OptionError: There are more elements or fewer.
    """
    size = sum(array.size for array in like.values())
    if flat.shape != (size,):
        raise OptionError(f"The weights are an array of shape {flat.shape}; together they have {size} elements.")
    ends = np.cumsum([array.size for array in like.values()])
    return {
        name: flat[end - array.size : end].reshape(array.shape).astype(array.dtype)
        for (name, array), end in zip(like.items(), ends, strict=True)
    }


def by_input_name(specs: Sequence[TensorSpec], inputs: Any) -> dict[str, Any]:
    """Inputs given in any form, by the names of the model.

    Raises:
        DataError: An input is missing, or there are too many.
    """
    if isinstance(inputs, Mapping):
        check_pasts(inputs, specs, "The batch")
        missing = [spec.name for spec in specs if spec.name not in inputs]
        if missing:
            raise DataError(f"The inputs {missing} are missing; got {', '.join(map(str, inputs)) or 'none'}.")
        return dict(inputs)
    positional = isinstance(inputs, tuple) or (isinstance(inputs, list) and len(specs) > 1)
    arrays = list(inputs) if positional else [inputs]
    if len(arrays) != len(specs):
        names = ", ".join(spec.name for spec in specs)
        raise DataError(f"The model has {len(specs)} inputs ({names}), but {len(arrays)} arrays were given.")
    return {spec.name: array for spec, array in zip(specs, arrays, strict=True)}


def fit_to_spec(value: Any, spec: TensorSpec) -> np.ndarray:
    """An array of the type of an input; ranks and fixed sizes checked."""
    array = to_numpy(value, repr(spec.name))
    if array.dtype != spec.dtype:
        found, needed = kind_of(array.dtype), kind_of(spec.dtype)
        if (found == "float" and needed in ("integer", "boolean")) or found in ("string", "other"):
            raise DataError(f"{spec.name!r} needs {spec.dtype}, but got {array.dtype}.")
        array = array.astype(spec.dtype)
    shape = spec.shape
    if shape is not None and (
        array.ndim != len(shape)
        or any(isinstance(size, int) and size != got for size, got in zip(shape, array.shape, strict=True))
    ):
        hint = spec.size_hint if array.ndim == len(shape) else spec.hint
        raise DataError(f"{spec.name!r} needs shape {spec.describe_shape()}, but got {array.shape}.{hint}")
    return array


def check_inputs(inputs: Mapping[str, np.ndarray]) -> None:
    """Refuse inputs of one step that hold NaN or infinity, as ``fit`` does.

    Raises:
        DataError: One does.
    """
    for name, array in inputs.items():
        if array.dtype.kind not in "iub":
            rows = np.atleast_1d(array)
            check_finite(rows, f"the input {name!r}", range(len(rows)))


def check_targets(targets: np.ndarray, check: TargetCheck | None) -> np.ndarray:
    """The targets of one step, unless they hold values that the loss has no use for.

    Raises:
        DataError: They hold NaN or infinity, or fail the loss's check.
    """
    examples = range(len(targets)) if targets.ndim else [0]
    if targets.dtype.kind not in "iu":
        check_finite(np.atleast_1d(targets), "the target array", examples)
    if check is not None:
        check(targets, "the target array", examples)
    return targets
