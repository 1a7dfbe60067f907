"""Tensors of 16 bits that a working copy has in single precision, made when somebody reads them."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir


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
