"""MatMulNBits of ONNX Runtime: matmuls with frozen weights of 2, 4 or 8 bits.

The weight w [N, K] is stored as integers in blocks of ``block_size`` along K; the last block of a row may reach beyond
K. w = (integer - zero point) * scale, with one scale and zero point for each block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff.fused import KERNEL_TYPES, emit, matmul_operands, register_fused
from onnxtrain.autodiff.node import Node, describe
from onnxtrain.autodiff.registry import Gradients, register_body, register_gradient
from onnxtrain.autodiff.rules.matmul import rows
from onnxtrain.errors import GradientError
from onnxtrain.graph import Value
from onnxtrain.graph.domains import MICROSOFT_DOMAIN

PRODUCT, GRADIENT = "MatMulNBits", "MatMulNBitsGradient"
"""Operators of the domain ``onnxtrain``: y = x wᵀ, and dx = dy w."""

_KERNEL_BITS = (2, 4, 8)
_LEAST_BLOCK = 16
_GROUP_INDEX = 4  # the input


class PackedWeight(NamedTuple):
    """Layout of the integers of a weight [outputs, inputs] in bytes, the lowest bits first."""

    inputs: int
    outputs: int
    bits: int
    block: int

    @classmethod
    def of(cls, node: ir.Node) -> PackedWeight:
        """Read the layout from the attributes of a node."""
        found = {
            name: node.attributes[name].as_int() for name in ("K", "N", "bits", "block_size") if name in node.attributes
        }
        size = cls(found.get("K", -1), found.get("N", -1), found.get("bits", 4), found.get("block_size", 0))
        if min(size.inputs, size.outputs) < 0 or size.bits not in _KERNEL_BITS or size.block < _LEAST_BLOCK:
            raise GradientError(
                f"{describe(node)} has {', '.join(f'{name} = {number}' for name, number in found.items())}; it needs "
                f"K and N, bits of 2, 4 or 8, and a block_size that is a power of two, at least {_LEAST_BLOCK}."
            ).about(describe(node), got=found)
        return size

    @property
    def attributes(self) -> dict[str, int]:
        """The attributes of a node."""
        return {"K": self.inputs, "N": self.outputs, "bits": self.bits, "block_size": self.block}

    @property
    def blocks(self) -> int:
        """Blocks of a row."""
        return -(-self.inputs // self.block)

    def steps(self, packed: Value, zeros: Value | None, dtype: ir.DataType) -> Value:
        """Integer - zero point [N, blocks, block]; zero points are packed, floating, or none for the middle."""
        op, integers = packed.op, self._integers(packed, dtype)
        if zeros is None:
            return integers - float(1 << (self.bits - 1))
        return integers - op.reshape(self._zero_points(zeros, dtype), (self.outputs, self.blocks, 1))

    def weight(self, packed: Value, scales: Value, zeros: Value | None, groups: Value | None = None) -> Value:
        """w [N, K], of the type of the scales; ``groups`` [K] names the block of each column."""
        op, dtype = packed.op, scales.dtype
        if groups is None:
            blocks = self.steps(packed, zeros, dtype) * op.reshape(scales, (self.outputs, self.blocks, 1))
            return self._columns(blocks)
        points = op.scalar(1 << (self.bits - 1), scales) if zeros is None else self._zero_points(zeros, dtype)
        points, factors = (
            op.Gather(value, groups, axis=1) if value.rank else value
            for value in (points, op.reshape(scales, (self.outputs, self.blocks)))
        )
        w = (self._columns(self._integers(packed, dtype)) - points) * factors
        return w.with_shape((self.outputs, self.inputs))

    def _integers(self, packed: Value, dtype: ir.DataType) -> Value:
        shape = (self.outputs, self.blocks, self.block)
        return packed.op.cast(packed.op.reshape(unpacked(packed, self.bits), shape), dtype)

    def _zero_points(self, zeros: Value, dtype: ir.DataType) -> Value:
        """Zero points [N, blocks], from packed or floating ones."""
        op = zeros.op
        if zeros.dtype == ir.DataType.UINT8:
            listed = op.reshape(unpacked(zeros, self.bits), (self.outputs, -1))
            zeros = op.Slice(listed, op.ints(0), op.ints(self.blocks), op.ints(1))
        return op.cast(op.reshape(zeros, (self.outputs, self.blocks)), dtype)

    def _columns(self, blocks: Value) -> Value:
        """Reshape [N, blocks, block] to [N, K]."""
        op = blocks.op
        padded = op.reshape(blocks, (self.outputs, self.blocks * self.block))
        if self.blocks * self.block == self.inputs:
            return padded
        cut = op.Slice(padded, op.ints(0), op.ints(self.inputs), op.ints(1))
        return cut.with_shape((self.outputs, self.inputs))

    def by_block(self, w: Value) -> Value:
        """Reshape [N, K] to [N, blocks, block], padded with zeros."""
        op, rest = w.op, self.blocks * self.block - self.inputs
        padded = op.Pad(w, op.ints(0, 0, 0, rest)) if rest else w
        return op.reshape(padded, (self.outputs, self.blocks, self.block))


def unpacked(packed: Value, bits: int) -> Value:
    """All integers in order, one per byte."""
    op, per_byte = packed.op, 8 // bits
    if per_byte == 1:
        return packed
    shifts = op.constant(np.arange(per_byte) * bits, np.uint8)
    parts = op.BitShift(op.Unsqueeze(op.reshape(packed, [-1]), op.ints(1)), shifts, direction="RIGHT")
    return op.BitwiseAnd(parts, op.constant((1 << bits) - 1, np.uint8))


@register_body("MatMulNBits", domain=MICROSOFT_DOMAIN)
def matmul_nbits_body(node: Node) -> list[Value | None]:
    """y = x wᵀ + bias; ``g_idx`` names the block of each column, whose scale and zero point apply."""
    size = PackedWeight.of(node.ir)
    w = size.weight(node.input_required(1), node.input_required(2), node.input(3), node.input(_GROUP_INDEX))
    y, bias = node.x @ node.op.Transpose(w, perm=[1, 0]), node.input(5)
    return [y if bias is None else y + bias]


@register_body("GatherBlockQuantized", domain=MICROSOFT_DOMAIN)
def gather_block_quantized(node: Node) -> list[Value | None]:
    """y = ((integers - zero points) scales)[indices], with a scale for each block along an axis."""
    op, data, scales, zeros = node.op, node.x, node.input_required(2), node.input(3)
    bits, block = int(node.attribute("bits", 4)), int(node.attribute("block_size", 128))
    packed = data.dtype == ir.DataType.UINT8
    *outer, width = _sizes(node, data)
    sizes = (*outer, width * 8 // bits if packed else width)
    axis = int(node.attribute("quantize_axis", 1)) % len(sizes)
    of_each = op.constant(np.arange(sizes[axis]) // block, np.int64)
    integers = _each(data, bits, sizes) if packed else op.cast(data, scales.dtype)
    if zeros is not None:
        counts = _sizes(node, scales)
        points = _each(zeros, bits, counts) if packed else op.cast(zeros, scales.dtype)
        integers = integers - op.Gather(points, of_each, axis=axis)
    elif packed:
        integers = integers - float(1 << (bits - 1))
    table = (integers * op.Gather(scales, of_each, axis=axis)).with_shape(sizes)
    return [op.Gather(table, node.input_required(1), axis=int(node.attribute("gather_axis", 0)))]


def _sizes(node: Node, value: Value) -> tuple[int, ...]:
    shape = value.static_shape
    if shape is None:
        raise GradientError(f"{describe(node.ir)}: its body needs the sizes of {value.name!r}, which are not known.")
    return shape


def _each(packed: Value, bits: int, sizes: tuple[int, ...]) -> Value:
    """Unpack integers to floats; a row may not fill its last byte."""
    op, per_byte = packed.op, 8 // bits
    integers = op.reshape(unpacked(packed, bits), (*sizes[:-1], -(-sizes[-1] // per_byte) * per_byte))
    return op.cast(op.Slice(integers, op.ints(0), op.ints(sizes[-1]), op.ints(-1)), ir.DataType.FLOAT)


@register_gradient("MatMulNBits", domain=MICROSOFT_DOMAIN)
def matmul_nbits(node: Node, dy: Value) -> Gradients:
    """y = x wᵀ + b: dx = dy w, db = dy summed over all rows; ds = dw (integer - zero), dz = -dw s with dw = dyᵀ x.

    Half precision is multiplied in single precision.
    """
    _refuse_group_index(node)
    op, x, scales, zeros, bias = node.op, node.x, node.input_required(2), node.input(3), node.input(5)
    size = PackedWeight.of(node.ir)
    dx = dscales = dzeros = None
    if node.wants(x):
        dx = multiplied(GRADIENT, dy, size, node.input_required(1), scales, zeros).with_shape(x.shape)
        dx = op.cast(dx, x.dtype)
    wants_zeros = zeros is not None and zeros.is_float and node.wants(zeros)
    if node.wants(scales) or wants_zeros:
        dw = op.Gemm(*(rows(op, op.cast(value, _wide(value))) for value in (dy, x)), transA=1)
        by_block = size.by_block(dw)
        steps = size.steps(node.input_required(1), zeros, dw.dtype)
        last = op.ints(2)
        dscales = op.reshape_like(op.cast(op.ReduceSum(by_block * steps, last, keepdims=0), scales.dtype), scales)
        if zeros is not None and wants_zeros:
            factors = op.cast(op.reshape(scales, (size.outputs, size.blocks)), dw.dtype)
            products = op.ReduceSum(by_block, last, keepdims=0) * factors
            dzeros = op.reshape_like(op.cast(-products, zeros.dtype), zeros)
    dbias = None if bias is None or not node.wants(bias) else op.reduce_to(dy, bias)
    return [dx, None, dscales, dzeros, None, dbias][: len(node.inputs)]


def multiplied(operator: str, x: Value, size: PackedWeight, packed: Value, scales: Value, zeros: Value | None) -> Value:
    """x wᵀ (``PRODUCT``) or x w (``GRADIENT``) by an operator of this project, in single precision or more."""
    op, wide = x.op, _wide(x)
    by_block = (size.outputs, size.blocks)
    packed = _of_shape(packed, (*by_block, size.block * size.bits // 8))
    scales = _of_shape(op.cast(scales, wide), by_block)
    packed_zeros, floating_zeros = None, None
    if zeros is not None and zeros.is_float:
        floating_zeros = _of_shape(op.cast(zeros, wide), by_block)
        packed_zeros = op.constant([], np.uint8)  # (workarounds: optional inputs of custom operators)
    elif zeros is not None:
        packed_zeros = _of_shape(zeros, (size.outputs, -(-size.blocks * size.bits // 8)))
    x = op.cast(x, wide)
    (y,) = emit(op, operator, x, packed, scales, packed_zeros, floating_zeros, like=[None], **size.attributes)
    y.ir.dtype = x.dtype
    return y


def _of_shape(value: Value, shape: tuple[int, ...]) -> Value:
    return value if value.shape == shape else value.op.reshape(value, shape)


def _wide(value: Value) -> ir.DataType:
    return value.dtype if value.dtype in KERNEL_TYPES else ir.DataType.FLOAT


def _refuse_group_index(node: Node) -> None:
    if node.input(_GROUP_INDEX) is not None:
        raise GradientError(
            f"{describe(node.ir)} has an input g_idx, which puts the columns of its weight into groups in another "
            "order; its gradient needs groups that lie side by side: quantize the model without act_order (desc_act)."
        )


def _has_kernel(node: ir.Node) -> bool:
    block = node.attributes["block_size"].as_int()
    return block >= _LEAST_BLOCK and block & (block - 1) == 0


@register_fused(PRODUCT, has_kernel=_has_kernel)
def matmul_nbits_product(node: Node) -> Sequence[Value]:
    """From x [..., K], integers, scales, packed_zeros? and zeros?: y [..., N] = x wᵀ."""
    x, w = matmul_operands(node, node.x, _late_weight(node))
    return [x @ node.op.Transpose(w, perm=[1, 0])]


@register_fused(GRADIENT, has_kernel=_has_kernel)
def matmul_nbits_gradient(node: Node) -> Sequence[Value]:
    """From dy [..., N], integers, scales, packed_zeros? and zeros?: dx [..., K] = dy w."""
    dy, w = matmul_operands(node, node.x, _late_weight(node))
    return [dy @ w]


def _late_weight(node: Node) -> Value:
    """w [N, K] of one of this project's operators, dequantized no earlier than x is computed."""
    op, x = node.op, node.x
    # Without the dependency on x, the runtime would fold the constants to a dequantized weight and keep it.
    never = op.cast(op.IsNaN(op.ReduceSum(x, keepdims=0)), ir.DataType.UINT8)
    late = op.BitwiseAnd(never, op.constant(0, np.uint8))
    packed = op.BitwiseOr(node.input_required(1), late).with_shape(node.input_required(1).shape)
    zeros = node.input(3) if node.input(4) is None else node.input(4)
    return PackedWeight.of(node.ir).weight(packed, node.input_required(2), zeros)
