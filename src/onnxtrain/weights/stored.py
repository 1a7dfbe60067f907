"""Tensors whose form in the file differs from the form that a working copy trains or reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from onnxtrain.model_file.lazy_arrays import MadeArrays


class Stored(NamedTuple):
    """An initializer of the file that is made from parameters.

    Attributes:
        name: Its name.
        parameters: What it is made from.
        form: Makes it of their arrays.
    """

    name: str
    parameters: tuple[str, ...]
    form: Callable[[Sequence[np.ndarray]], np.ndarray]


def with_stored(values: Mapping[str, np.ndarray], stored: Iterable[Stored]) -> MadeArrays:
    """Values by name as the file has them: what is stored in another form, in the place of what that is made from."""
    stored = list(stored)
    made = {item.name: partial(_formed, item, values) for item in stored}
    used = {name for item in stored for name in item.parameters}
    return {name: array for name, array in values.items() if name not in used} | MadeArrays(made)


def _formed(item: Stored, values: Mapping[str, np.ndarray]) -> np.ndarray:
    return item.form([values[name] for name in item.parameters])


class WidenedTensor(ir.LazyTensor):
    """A tensor of 16 bits in float32, which is not kept.

    Attributes:
        halves: The tensor as it is stored.
    """

    __slots__ = ("halves",)

    def __init__(self, halves: ir.TensorProtocol) -> None:
        self.halves = halves
        super().__init__(self._read, dtype=ir.DataType.FLOAT, shape=ir.Shape(halves.shape.numpy()), name=halves.name)

    def _read(self) -> ir.TensorProtocol:
        return ir.tensor(np.asarray(self.halves.numpy()).astype(np.float32), name=self.halves.name)


def as_stored(tensor: ir.TensorProtocol) -> np.ndarray:
    """The elements of a tensor, of one that was widened those that are stored: for whoever looks at a few."""
    return np.asarray(tensor.halves.numpy() if isinstance(tensor, WidenedTensor) else tensor.numpy())
