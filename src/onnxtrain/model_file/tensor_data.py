"""Arrays as a tensor of ONNX stores them: as raw data, or as the numbers of a typed field."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from onnx import TensorProto, numpy_helper

_UNSIZED = (ir.DataType.UNDEFINED, ir.DataType.STRING)

_PACKED = tuple(item.value for item in ir.DataType if item not in _UNSIZED and item.bitwidth < 8)
"""Element types of which several share a byte."""


def raw_bytes(array: npt.NDArray[np.generic], data_type: int) -> bytes | memoryview:
    """An array as ONNX's raw data: little-endian, rows first, small numbers packed."""
    if data_type in _PACKED:
        return numpy_helper.from_array(array).raw_data
    dtype = array.dtype.newbyteorder("<") if array.dtype.kind in "fciu" else array.dtype
    return np.ascontiguousarray(array, dtype).reshape(-1).view(np.uint8).data


def typed_elements(tensor: TensorProto, array: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    """The numbers that the field for this element type holds (see ``TensorProto.data_type`` in onnx.proto)."""
    flat = np.ascontiguousarray(array).reshape(-1)
    if tensor.data_type in (TensorProto.FLOAT, TensorProto.COMPLEX64):
        return flat.view(np.float32)
    if tensor.data_type in (TensorProto.DOUBLE, TensorProto.COMPLEX128):
        return flat.view(np.float64)
    if flat.dtype.kind in "iu":
        return flat.astype(np.int64)  # negative numbers are written with 64 bits
    if flat.dtype.itemsize == 2:
        return flat.view(np.uint16)
    return flat.view(np.uint8)
