"""Find the axis of a prediction along which its independent outputs lie: the axis of the last layer's units."""

from __future__ import annotations

from typing import Final

import onnx_ir as ir

from onnxtrain.graph.bounds import is_weight
from onnxtrain.graph.domains import MICROSOFT_DOMAIN
from onnxtrain.graph.value import constant_array, dimensions

_CHANNELS_SECOND: Final = frozenset({"Conv", "ConvTranspose", "FusedConv", "QLinearConv", "ConvInteger"})

_UNITS_LAST: Final = frozenset({"Gemm", "MatMul", "FusedMatMul", "FusedGemm", "MatMulNBits", "QGemm", "MatMulInteger"})

_KEEPING: Final = frozenset(
    {"Identity", "Cast", "Dropout", "Clip", "Neg", "Sigmoid", "HardSigmoid", "Tanh", "Relu", "LeakyRelu", "Elu"}
    | {"Softplus", "BatchNormalization", "Resize", "Upsample", "Pad", "Slice", "MaxPool", "AveragePool"}
    | {"GlobalMaxPool", "GlobalAveragePool", "QuantizeLinear", "DequantizeLinear"}
    | {"Softmax", "LogSoftmax", "Exp", "Log", "Reciprocal", "Abs", "Sqrt", "Pow"}
)
"""Operators whose result has the axes of their first input."""

_BY_ELEMENT: Final = frozenset({"Add", "Sub", "Mul", "Div"})

_GONE: Final = -1
"""The axis of a single unit that was squeezed out."""


def output_axis(value: ir.Value, preferred: int) -> int:
    """Return the axis of independent outputs; the rank, which is no axis, where there is one output without an axis."""
    shape = dimensions(value) or ()
    rank = len(shape)
    found = units_axis(value)
    if found == _GONE or rank < 2:
        return rank
    if found is not None and 0 < found < rank:
        return found
    single = [axis for axis, size in enumerate(shape) if axis and size == 1]
    return single[0] if rank > 2 and len(single) == 1 else preferred


def units_axis(value: ir.Value | None) -> int | None:
    """Return the axis of the last layer's units, `_GONE`, or ``None`` where it is not known."""
    node, shape = (None, None) if value is None else (value.producer(), dimensions(value))
    if node is None or shape is None or node.domain not in ("", MICROSOFT_DOMAIN):
        return None
    if node.op_type in _CHANNELS_SECOND:
        return 1
    if node.op_type in _UNITS_LAST:
        return len(shape) - 1 if is_weight(node.inputs[1]) else None
    if node.op_type in _KEEPING:
        return units_axis(node.inputs[0])
    if node.op_type in _BY_ELEMENT:
        operands = (each for each in node.inputs if each is not None and len(dimensions(each) or ()) == len(shape))
        return next((axis for each in operands if (axis := units_axis(each)) is not None), None)
    if node.op_type == "Concat":
        axes = {units_axis(each) for each in node.inputs}
        return axes.pop() if len(axes) == 1 else None
    if node.op_type == "Reshape" and dimensions(node.inputs[0]) == shape:
        return units_axis(node.inputs[0])
    return _moved(node, len(shape))


def _moved(node: ir.Node, rank: int) -> int | None:
    """Return the axis behind a node that moves, removes or adds axes; ``None`` behind other nodes."""
    if node.op_type not in ("Transpose", "Squeeze", "Unsqueeze"):
        return None
    inner = units_axis(node.inputs[0])
    if inner is None or inner == _GONE:
        return inner
    before = len(dimensions(node.inputs[0]) or ())
    if node.op_type == "Transpose":
        order = list(node.attributes["perm"].as_ints()) if "perm" in node.attributes else list(range(before))[::-1]
        return order.index(inner)
    axes = _axes(node)
    if axes is None:
        return None
    if node.op_type == "Squeeze":
        removed = {axis % before for axis in axes}
        return _GONE if inner in removed else inner - sum(axis < inner for axis in removed)
    added = {axis % rank for axis in axes}
    return [axis for axis in range(rank) if axis not in added][inner]


def _axes(node: ir.Node) -> list[int] | None:
    """Return the axes of Squeeze or Unsqueeze: an attribute, since opset 13 a constant input."""
    if "axes" in node.attributes:
        return list(node.attributes["axes"].as_ints())
    found = constant_array(node.inputs[1]) if len(node.inputs) > 1 else None
    return None if found is None else found.reshape(-1).tolist()
