"""The operators of compiled models as ONNX functions: any runtime runs them without our library.

The bodies of ``SparseLinear`` and ``SparseConv`` make the weight dense from constants, so that a runtime folds all of
it when it loads the model, and one MatMul or Conv is left. ``ConvReluMaxPool`` is a Conv with dense weights, Relu and
MaxPool; ``TransposeRows`` does nothing.
"""

from __future__ import annotations

import onnx
from onnx import parser

from onnxtrain.graph.domains import ONNXTRAIN_DOMAIN

LINEAR, CONV, POOLED, TRANSPOSE = "SparseLinear", "SparseConv", "ConvReluMaxPool", "TransposeRows"

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
    with_residual = Add (sum, residual)
    low = Constant <value_float: float = @lower> ()
    high = Constant <value_float: float = @upper> ()
    y = Clip (with_residual, low, high)
"""

_BODIES = {
    LINEAR: f"""
<domain: "{ONNXTRAIN_DOMAIN}", opset_import: ["": OPSET]>
{LINEAR} <shape, lower, upper, x_panel, y_panel> (x, values, deltas, bias, residual) => (y)
{{
    {_WEIGHT}
    by_depth = Transpose <perm: ints = [1, 0, 2]> (blocks)
    weight_shape = Concat <axis: int = 0> (depth, rest)
    weight = Reshape (by_depth, weight_shape)
    product = MatMul (x, weight)
    sum = Add (product, bias)
    {_END}
}}
""",
    CONV: f"""
<domain: "{ONNXTRAIN_DOMAIN}", opset_import: ["": OPSET]>
{CONV} <shape, lower, upper, weight_shape, kernel_shape, strides, pads, dilations,
    x_pads, y_pads, residual_pads>
    (x, values, deltas, bias, residual) => (y)
{{
    {_WEIGHT}
    by_output = Transpose <perm: ints = [0, 2, 1]> (blocks)
    full_shape = Constant <value_ints: ints = @weight_shape> ()
    weight = Reshape (by_output, full_shape)
    sum = Conv <kernel_shape: ints = @kernel_shape, strides: ints = @strides, pads: ints = @pads,
        dilations: ints = @dilations> (x, weight, bias)
    {_END}
}}
""",
    POOLED: f"""
<domain: "{ONNXTRAIN_DOMAIN}", opset_import: ["": OPSET]>
{POOLED} <kernel_shape, strides, pads, pool_shape, pool_pads, y_pads> (x, w, bias) => (y)
{{
    sum = Conv <kernel_shape: ints = @kernel_shape, strides: ints = @strides, pads: ints = @pads> (x, w, bias)
    above = Relu (sum)
    y = MaxPool <kernel_shape: ints = @pool_shape, strides: ints = [2, 2], pads: ints = @pool_pads> (above)
}}
""",
    TRANSPOSE: f"""
<domain: "{ONNXTRAIN_DOMAIN}", opset_import: ["": OPSET]>
{TRANSPOSE} <panel> (x) => (y)
{{
    y = Identity (x)
}}
""",
}


def function(operator: str, opset: int) -> onnx.FunctionProto:
    """Return the function of an operator for a model of an opset."""
    made: onnx.FunctionProto = parser.parse_function(_BODIES[operator].replace("OPSET", str(opset)))
    return made
