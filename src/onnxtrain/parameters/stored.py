"""Conversions between the tensors of a file and those of its working copy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from onnxtrain.model_file.large_data import MadeArrays


class Stored(NamedTuple):
    """An initializer of the file that is computed from parameters."""

    name: str
    parameters: tuple[str, ...]
    convert: Callable[[Sequence[np.ndarray]], np.ndarray]


def with_stored(values: Mapping[str, np.ndarray], stored: Iterable[Stored]) -> MadeArrays:
    """Replace parameters by the initializers of the file that are computed from them."""
    stored = list(stored)
    made = {item.name: partial(_converted, item, values) for item in stored}
    used = {name for item in stored for name in item.parameters}
    return {name: array for name, array in values.items() if name not in used} | MadeArrays(made)


def _converted(item: Stored, values: Mapping[str, np.ndarray]) -> np.ndarray:
    return item.convert([values[name] for name in item.parameters])


class WidenedTensor(ir.LazyTensor):
    """A float16 or bfloat16 tensor that is widened to float32 on every read."""

    __slots__ = ("narrow",)

    def __init__(self, narrow: ir.TensorProtocol) -> None:
        self.narrow = narrow
        super().__init__(self._read, dtype=ir.DataType.FLOAT, shape=ir.Shape(narrow.shape.numpy()), name=narrow.name)

    def _read(self) -> ir.TensorProtocol:
        return ir.tensor(np.asarray(self.narrow.numpy()).astype(np.float32), name=self.narrow.name)


def as_stored(tensor: ir.TensorProtocol) -> np.ndarray:
    """Return the elements of a tensor without widening them, for reading a few."""
    return np.asarray(tensor.narrow.numpy() if isinstance(tensor, WidenedTensor) else tensor.numpy())
