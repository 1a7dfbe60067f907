"""Weights of layers as dense float arrays: views and dequantization."""

from __future__ import annotations

from typing import Final

import numpy as np
import onnx_ir as ir

from onnxtrain.adapters.adapter import Array, Entry
from onnxtrain.adapters.layers import Layer, Target
from onnxtrain.errors import OptionError
from onnxtrain.graph.layers import reads_transposed

_BELOW_BYTE = {"int4": np.int8, "int2": np.int8, "uint4": np.uint8, "uint2": np.uint8}


def matrix(layer: Layer) -> Array:
    """Return the dense weight of a layer in float32 or wider: [inputs, outputs]; [outputs, ...] for a convolution."""
    if layer.kind == "MatMulNBits":
        return of_bits(layer.node)
    if layer.kind in ("MatMulInteger", "DynamicQuantizeMatMul"):
        raise OptionError(
            f"The weight of {layer.name!r} is quantized together with what it multiplies ({layer.kind})."
        ).about(layer.name, got=layer.kind)
    found = evaluate(layer.views[0])
    return found.T if reads_transposed(layer.node) else found


LEAST_NORM: Final = 1e-12
"""The norm of a column of zeros; its square is a normal number in float32."""


def norms(target: Target, entry: Entry | None = None) -> Array:
    """Compute the column norms of a target's weight [outputs] in float64, with an adapter added if one is given."""
    weight = target.of_weight(matrix(target.layer)).astype(np.float64)
    if entry is not None:
        weight = weight + entry.delta()
    flat = weight.reshape(len(weight), -1).T if target.layer.is_convolution else weight
    return np.asarray(np.maximum(np.sqrt(np.einsum("ij,ij->j", flat, flat)), LEAST_NORM))


def evaluate(value: ir.Value, initializer: Array | None = None) -> Array:
    """Evaluate a view of an initializer in float32 or wider; ``initializer`` replaces the initializer's value."""
    node = value.producer()
    if node is None:
        assert value.const_value is not None
        array = np.asarray(value.const_value.numpy()) if initializer is None else initializer
        if array.dtype.name in _BELOW_BYTE:
            return array.astype(_BELOW_BYTE[array.dtype.name])
        return array if array.dtype == np.float64 or array.dtype.kind in "iu" else array.astype(np.float32, copy=False)
    first = node.inputs[0]
    assert first is not None
    array = evaluate(first, initializer)
    if node.op_type == "Transpose":
        return array.transpose(node.attributes.get_ints("perm"))
    return dequantized(node, array) if node.op_type == "DequantizeLinear" else array


def dequantized(node: ir.Node, array: Array) -> Array:
    """Dequantize an array as DequantizeLinear does: (x - zero point) scale."""
    scale, zero = spread(node, 1, array), spread(node, 2, array)
    assert scale is not None
    return (array.astype(np.float32) - (0 if zero is None else zero)) * scale


def spread(node: ir.Node, input_index: int, array: Array) -> Array | None:
    """Return the scales or zero points of a DequantizeLinear node in a shape that broadcasts to the array."""
    value = node.inputs[input_index] if input_index < len(node.inputs) else None
    if value is None:
        return None
    given = evaluate(value).astype(np.float32)
    axis, block = axis_and_block(node, array.ndim)
    if block:
        return np.repeat(given, block, axis=axis)[tuple(slice(size) for size in array.shape)]
    if given.size == 1:
        return given.reshape(())
    return given.reshape([-1 if index == axis else 1 for index in range(array.ndim)])


def axis_and_block(node: ir.Node, rank: int) -> tuple[int, int]:
    """Return the axis of the scales of a DequantizeLinear node, and the size of a block along it, 0 without blocks."""
    return node.attributes.get_int("axis", 1) % max(rank, 1), node.attributes.get_int("block_size", 0)


def of_bits(node: ir.Node) -> Array:
    """Dequantize the weight of a MatMulNBits node [inputs, outputs]."""
    rows, columns, block, bits = bit_sizes(node)
    weight = node.inputs[1]
    assert weight is not None
    scales, zeros = bit_scales(node)
    dense = (
        unpacked(evaluate(weight).reshape(columns, -1, block * bits // 8), bits).astype(np.float32) - zeros
    ) * scales
    return dense.reshape(columns, -1)[:, :rows].T


def bit_sizes(node: ir.Node) -> tuple[int, int, int, int]:
    """Return the inputs, outputs, block size and bits of a MatMulNBits node."""
    rows, columns, block = (node.attributes[name].as_int() for name in ("K", "N", "block_size"))
    return rows, columns, block, node.attributes.get_int("bits", 4)


def bit_scales(node: ir.Node) -> tuple[Array, Array]:
    """Return scales and zero points of a MatMulNBits node [columns, blocks, 1]."""
    rows, columns, block, bits = bit_sizes(node)
    blocks = -(-rows // block)
    scale, zero = node.inputs[2], node.inputs[3] if len(node.inputs) > 3 else None
    assert scale is not None
    scales = evaluate(scale).astype(np.float32).reshape(columns, blocks, 1)
    if zero is None:
        return scales, np.full((columns, blocks, 1), 1 << (bits - 1), np.float32)
    zeros = evaluate(zero)
    if zero.dtype == ir.DataType.UINT8:
        zeros = unpacked(zeros.reshape(columns, -1), bits)[:, :blocks]
    return scales, zeros.astype(np.float32).reshape(columns, blocks, 1)


def unpacked(array: Array, bits: int) -> Array:
    """Unpack low-bit integers from bytes along the last axis, lowest bits first."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    return ((array[..., None] >> shifts) & np.uint8((1 << bits) - 1)).reshape(*array.shape[:-1], -1)


def packed(numbers: Array, bits: int) -> Array:
    """Pack low-bit integers into bytes, the inverse of :func:`unpacked`."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    grouped = numbers.reshape(*numbers.shape[:-1], -1, len(shifts))
    return np.asarray(np.bitwise_or.reduce(grouped << shifts, axis=-1), np.uint8)
