"""The operators of compiled models: their packed weights, and their ONNX functions.

Any runtime runs the functions without our library.

The bodies of ``SparseLinear`` and ``SparseConv`` make the weight dense from constants, so that a runtime folds all of
it when it loads the model, and one MatMul or Conv is left. ``ConvReluMaxPool`` is a Conv with dense weights, Relu and
MaxPool; ``TransposeRows`` does nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx
from onnx import helper, parser

from onnxtrain.graph.domains import ONNXTRAIN_DOMAIN
from onnxtrain.model_file.checks import is_plausible
from onnxtrain.model_file.proto import default_opset

LINEAR, CONV, POOLED, TRANSPOSE = "SparseLinear", "SparseConv", "ConvReluMaxPool", "TransposeRows"

LEAST_OPSET = 13
"""The bodies are written in operators of this opset; none of them changed its meaning after it."""

_LEAST_IR = 8
"""The IR version that introduced functions."""

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


def define(proto: onnx.ModelProto, operators: set[str]) -> None:
    """Import the domain of our operators, and add the functions of some of them that a model lacks."""
    proto.ir_version = max(proto.ir_version, _LEAST_IR)
    if all(entry.domain != ONNXTRAIN_DOMAIN for entry in proto.opset_import):
        proto.opset_import.append(helper.make_opsetid(ONNXTRAIN_DOMAIN, 1))
    opset = default_opset(proto.opset_import)
    defined = {entry.name for entry in proto.functions if entry.domain == ONNXTRAIN_DOMAIN}
    for operator in sorted(operators - defined):
        proto.functions.append(parser.parse_function(_BODIES[operator].replace("OPSET", str(opset))))


BLOCKS = (1, 4, 16)
"""Outputs of a block, which share an index."""


COST = {1: 1.0, 4: 0.5, 16: 0.55}
"""Time of a multiplication in a block, relative to one of a single weight: a block loads its input once
(``benchmarks/sparse_models.py`` measures it)."""


_LARGEST_DELTA = np.iinfo(np.uint16).max


@dataclass(frozen=True)
class PackedWeight:
    """A matrix [outputs, depth] as blocks."""

    values: np.ndarray
    deltas: np.ndarray
    outputs: int
    depth: int

    @property
    def block(self) -> int:
        """Outputs that share an index."""
        return int(self.values.shape[1])

    @property
    def shape(self) -> list[int]:
        """The attribute ``shape`` of the operators: [block rows, depth, block]."""
        return [self.outputs // self.block, self.depth, self.block]

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return int(self.values.nbytes + self.deltas.nbytes)


def pack(matrix: np.ndarray) -> PackedWeight:
    """Pack a matrix [outputs, depth] in the blocks that multiply fastest.

    Example:
        >>> packed = pack(np.array([[0, 2, 0], [0, 0, 3]], np.float32))
        >>> packed.values.ravel().tolist(), packed.deltas.tolist(), packed.shape
        ([2.0, 3.0], [1, 4], [2, 3, 1])
    """
    outputs, depth = matrix.shape
    stored = {block: _blocks(matrix, block) for block in BLOCKS if outputs % block == 0}
    block = min(stored, key=lambda size: np.count_nonzero(stored[size].any(axis=1)) * size * COST[size])
    blocks = stored[block]
    indices = np.flatnonzero(blocks.any(axis=1))
    deltas, kept = _deltas(indices)
    values = np.where(kept[:, None] >= 0, blocks[indices[kept]] if len(indices) else 0, 0)
    return PackedWeight(values.astype(np.float32).reshape(-1, block), deltas, outputs, depth)


def _blocks(matrix: np.ndarray, block: int) -> np.ndarray:
    """Return the blocks, [outputs / block * depth, block]."""
    outputs, depth = matrix.shape
    return matrix.reshape(outputs // block, block, depth).transpose(0, 2, 1).reshape(-1, block)


def _deltas(indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the deltas, and for each the place of its index; -1 for one that bridges a gap of more than 16 bits."""
    gaps = np.diff(indices, prepend=0)
    bridges = np.maximum(gaps - 1, 0) // _LARGEST_DELTA
    count = len(indices) + int(bridges.sum())
    places = np.full(count, -1)
    at = np.arange(len(indices)) + np.cumsum(bridges)
    places[at] = np.arange(len(indices))
    deltas = np.full(count, _LARGEST_DELTA, np.uint16)
    deltas[at] = gaps - bridges * _LARGEST_DELTA
    return deltas, places


def dense_matrix(values: np.ndarray, deltas: np.ndarray, shape: list[int]) -> np.ndarray:
    """Return the matrix [outputs, depth] of packed weights.

    Example:
        >>> packed = np.array([[2], [3]], np.float32), np.array([1, 4], np.uint16)
        >>> dense_matrix(*packed, [2, 3, 1]).tolist()
        [[0.0, 2.0, 0.0], [0.0, 0.0, 3.0]]
    """
    rows, depth, block = shape
    if min(shape) < 1 or not is_plausible(4 * rows * depth * block, values.nbytes + deltas.nbytes):
        raise ValueError(f"a shape of {shape}")
    blocks = np.zeros((rows * depth, block), np.float32)
    blocks[np.cumsum(deltas, dtype=np.int64)] = values
    return blocks.reshape(rows, depth, block).transpose(0, 2, 1).reshape(rows * block, depth)
