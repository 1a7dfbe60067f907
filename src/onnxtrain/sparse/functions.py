"""The operators ``SparseLinear`` and ``SparseConv`` as ONNX functions: any runtime runs them without our library.

Their bodies make the weight dense from constants, so that a runtime folds all of it when it loads the model, and one
MatMul or Conv is left.
"""

from __future__ import annotations

import onnx
from onnx import parser

from onnxtrain.ir.domains import ONNXTRAIN_DOMAIN

LINEAR, CONV = "SparseLinear", "SparseConv"

LEAST_OPSET = 13
"""The bodies are written in operators of this opset; none of them changed its meaning after it."""

# [block rows, depth, block]: zeros, into which blocks are written at the running sums of the deltas.
_WEIGHT = """
    blocks_shape = Constant <value_ints: ints = @shape> ()
    zeros = ConstantOfShape <value: tensor = float[1] {0}> (blocks_shape)
    one = Constant <value_ints: ints = [1]> ()
    two = Constant <value_ints: ints = [2]> ()
    three = Constant <value_ints: ints = [3]> ()
    rest = Constant <value_ints: ints = [-1]> ()
    depth = Slice (blocks_shape, one, two)
    block = Slice (blocks_shape, two, three)
    row_shape = Concat <axis: int = 0> (rest, block)
    rows = Reshape (zeros, row_shape)
    wide_deltas = Cast <to: int = 7> (deltas)
    axis = Constant <value_int: int = 0> ()
    indices = CumSum (wide_deltas, axis)
    columns = Unsqueeze (indices, one)
    written = ScatterND (rows, columns, values)
    blocks = Reshape (written, blocks_shape)
"""

_END = """
    with_residual = Add ({}, residual)
    low = Constant <value_float: float = @lower> ()
    high = Constant <value_float: float = @upper> ()
    y = Clip (with_residual, low, high)
"""

# x_pads, y_pads and residual_pads are of the spatial axes, as Conv's pads: a row of those before, one of those behind.
_PAD_CONSTANTS = """
    two_rows = Constant <value_ints: ints = [2, -1]> ()
    no_pads = Constant <value: tensor = int64[2, 2] {0, 0, 0, 0}> ()
    first = Constant <value_int: int = 0> ()
    second = Constant <value_int: int = 1> ()
    open_end = Constant <value_int: int = 9223372036854775807> ()
"""

_ALL_AXES = """
    {name}_attribute = Constant <value_ints: ints = @{name}_pads> ()
    {name}_spatial = Reshape ({name}_attribute, two_rows)
    {name}_rows = Concat <axis: int = 1> (no_pads, {name}_spatial)
"""

_INNER = (
    _ALL_AXES
    + """
    {name}_begins = Gather ({name}_rows, first)
    {name}_behind = Gather ({name}_rows, second)
    {name}_open = Equal ({name}_behind, first)
    {name}_negative = Neg ({name}_behind)
    {name}_ends = Where ({name}_open, open_end, {name}_negative)
    {name}_inner = Slice ({name}, {name}_begins, {name}_ends)
"""
)

_PADDED_END = f"""
    {_INNER.format(name="residual")}
    {_END.format("sum").replace("residual)", "residual_inner)").replace("y =", "limited =")}
    {_ALL_AXES.format(name="y")}
    y_all = Reshape (y_rows, rest)
    y = Pad (limited, y_all)
"""

_BODIES = {
    LINEAR: f"""
<domain: "{ONNXTRAIN_DOMAIN}", opset_import: ["": OPSET]>
{LINEAR} <shape, lower, upper> (x, values, deltas, bias, residual) => (y)
{{
    {_WEIGHT}
    by_depth = Transpose <perm: ints = [1, 0, 2]> (blocks)
    weight_shape = Concat <axis: int = 0> (depth, rest)
    weight = Reshape (by_depth, weight_shape)
    product = MatMul (x, weight)
    sum = Add (product, bias)
    {_END.format("sum")}
}}
""",
    CONV: f"""
<domain: "{ONNXTRAIN_DOMAIN}", opset_import: ["": OPSET]>
{CONV} <shape, lower, upper, weight_shape, kernel_shape, strides, pads, dilations PADS_ATTRIBUTES>
    (x, values, deltas, bias, residual) => (y)
{{
    {_WEIGHT}
    by_output = Transpose <perm: ints = [0, 2, 1]> (blocks)
    full_shape = Constant <value_ints: ints = @weight_shape> ()
    weight = Reshape (by_output, full_shape)
    BEGINNING
    sum = Conv <kernel_shape: ints = @kernel_shape, strides: ints = @strides, pads: ints = @pads,
        dilations: ints = @dilations> (INPUT, weight, bias)
    END
}}
""",
}


def function(operator: str, opset: int, *, padded: bool = False) -> onnx.FunctionProto:
    """Return the function of an operator for a model of an opset.

    Args:
        operator: ``LINEAR`` or ``CONV``.
        opset: The model's opset.
        padded: Whether the nodes of a convolution have the attributes ``x_pads``, ``y_pads`` and ``residual_pads``.
    """
    parts = {
        "OPSET": str(opset),
        "PADS_ATTRIBUTES": ", x_pads, y_pads, residual_pads" if padded else "",
        "BEGINNING": _PAD_CONSTANTS + _INNER.format(name="x") if padded else "",
        "INPUT": "x_inner" if padded else "x",
        "END": _PADDED_END if padded else _END.format("sum"),
    }
    body = _BODIES[operator]
    for name, text in parts.items():
        body = body.replace(name, text)
    made: onnx.FunctionProto = parser.parse_function(body)
    return made
