"""Work around bugs of ONNX Runtime's sessions: options, inputs and outputs."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.errors import StepError

DISABLED_OPTIMIZERS = ("EliminateDropout", "WeightBiasQuantization")
"""Graph optimizers of ONNX Runtime that every session disables ("eliminated dropout", "quantized biases")."""


DISABLED_WITH_DEEP_BODIES = ("ConstantFolding",)
"""Also disabled where a node with a body is in a branch of a branch ("branches that move twice")."""

DISABLED_WITH_TWO_BITS = ("QDQSelectorActionTransformer",)
"""Also disabled where a matmul would read weights of two bits in the wrong order ("rows of two bits")."""


def mixed_two_bits(graph: ir.Graph) -> list[str]:
    """Return the int2 and uint2 weights that ONNX Runtime reads in the wrong order ("rows of two bits")."""
    found = []
    for node in graph:
        weight = node.inputs[0] if node.op_type == "DequantizeLinear" and not node.domain else None
        if weight is None or weight.dtype not in (ir.DataType.INT2, ir.DataType.UINT2) or weight.shape is None:
            continue
        columns = weight.shape[-1] if len(weight.shape) == 2 else 0
        if (
            isinstance(columns, int)
            and columns % 4
            and any(use.op_type == "MatMul" for use in node.outputs[0].consumers())
        ):
            found.append(str(weight.name))
    return found


def refuse_crashing_nodes(graph: ir.Graph) -> None:
    """Refuse nodes that crash ONNX Runtime instead of raising ("ellipses of different ranks")."""
    for node in graph:
        if node.op_type != "Einsum" or node.domain:
            continue
        equation = node.attributes["equation"].as_string().replace(" ", "")
        ranks = set()
        for term, value in zip(equation.split("->")[0].split(","), node.inputs, strict=False):
            if "..." in term and value is not None and value.shape is not None:
                ranks.add(len(value.shape) - len(term.replace("...", "")))
        if len(ranks) > 1:
            raise StepError(
                f"The Einsum node {node.name!r} ({equation}) has ellipses of {' and '.join(map(str, sorted(ranks)))} "
                "axes, on which ONNX Runtime crashes; write these axes as letters."
            ).about(node.name, got=sorted(ranks))


def share_initializers(
    settings: Any,
    arrays: Mapping[str, np.ndarray[Any, Any]],
    dtypes: Mapping[str, ir.DataType],
    *,
    shared: bool = True,
) -> list[Any]:
    """Let a session use initializers without a copy ("copies of external initializers")."""
    values = in_place(arrays, dtypes)
    if values:
        settings.add_external_initializers(list(arrays), values)
        for name, value in zip(arrays, values, strict=True) if shared else ():
            settings.add_initializer(name, value)
    return values


def in_place(arrays: Mapping[str, np.ndarray[Any, Any]], dtypes: Mapping[str, ir.DataType]) -> list[Any]:
    """Wrap arrays in OrtValues without a copy; the arrays must outlive them. See :func:`share_initializers`."""
    import onnxruntime

    make = onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type
    return [make(array, int(dtypes[name])) for name, array in arrays.items()]


def is_foreign(dtype: ir.DataType) -> bool:
    """Return whether a type is an ml_dtypes extension type ("extension types")."""
    if dtype in (ir.DataType.STRING, ir.DataType.UNDEFINED):
        return False
    return dtype.bitwidth in _BYTES and is_extension_type(dtype.numpy())


def is_extension_type(dtype: np.dtype[Any]) -> bool:
    """Return whether a type comes from ml_dtypes, such as bfloat16, and not from NumPy."""
    return dtype.type.__module__ != "numpy"


_BYTES = {8: np.uint8, 16: np.uint16}


def bind_foreign(binding: Any, name: str, array: np.ndarray[Any, Any], dtype: ir.DataType) -> Any:
    """Bind an input by the bytes of its elements; return the objects that must outlive the run."""
    (value,) = in_place({name: array.view(_BYTES[dtype.bitwidth])}, {name: dtype})
    binding.bind_ortvalue_input(name, value)
    return array, value


def fetched(value: Any, dtype: ir.DataType) -> np.ndarray[Any, Any]:
    """Copy a result of an extension type, by the bytes of its elements."""
    shape, unsigned = tuple(value.shape()), np.dtype(_BYTES[dtype.bitwidth])
    size = math.prod(shape) * unsigned.itemsize
    content = ctypes.string_at(value.data_ptr(), size) if size else b""
    return np.frombuffer(content, unsigned).reshape(shape).view(dtype.numpy()).copy()


def packed(raw: np.ndarray[Any, Any], shape: Sequence[int]) -> np.ndarray[Any, Any]:
    """View packed elements as an array with one byte per element in its shape ("packed elements").

    ONNX Runtime, which knows the element type, reads the packed bytes only. Nothing else may read the array.
    """
    strides = [1] * len(shape)
    for axis in reversed(range(len(shape) - 1)):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return np.lib.stride_tricks.as_strided(raw, shape, strides, writeable=False)
