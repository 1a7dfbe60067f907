"""New scales and zero points for weights that are quantized again, by a search for the smallest squared error."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from onnxtrain.adapters.adapter import Array
from onnxtrain.adapters.values import bit_scales, bit_sizes, evaluate, packed, spread

_FACTORS = tuple(np.linspace(0.7, 1.1, 17))
"""Tried widths of the grid, relative to the range of a group's values."""

_REFINEMENTS = 2
"""Rounds of rounding and least squares from each candidate."""

_SMALLEST = 1e-12


@dataclass(frozen=True)
class Grid:
    """The values (n - zero) scale with low <= n <= high that a group of weights can take."""

    scales: Array
    zeros: Array
    low: int
    high: int
    symmetric: bool
    signed: bool
    dtype: np.dtype[np.generic]

    def rounded(self, weights: Array) -> Array:
        """Return the nearest integers for groups of weights [..., size]."""
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):  # of groups whose scale is zero
            numbers = np.nan_to_num(np.rint(weights / self.scales))
        return np.asarray(np.clip(np.rint(numbers + self.zeros), self.low, self.high))

    def values(self, numbers: Array) -> Array:
        """Return the weights of integers."""
        return np.asarray((numbers - self.zeros) * self.scales)

    def fitted(self, weights: Array) -> Grid:
        """Return the grid of smallest squared error for groups of weights [..., size] among candidates and this one."""
        best = self
        error = _squared(weights - self.values(self.rounded(weights)))
        for candidate in self._candidates(weights):
            grid = candidate
            for _ in range(_REFINEMENTS):
                scales = grid.scales.astype(self.dtype).astype(np.float32)
                grid = replace(grid, scales=scales)
                numbers = grid.rounded(weights)
                own = _squared(weights - grid.values(numbers))
                better = (own < error) & (scales != 0) & np.isfinite(scales)
                error = np.where(better, own, error)
                scales, zeros = (
                    np.where(better, mine, other)
                    for mine, other in ((grid.scales, best.scales), (grid.zeros, best.zeros))
                )
                best = replace(best, scales=scales, zeros=zeros)
                shifted = numbers - grid.zeros
                squares = _squared(shifted)
                scales = np.sum(weights * shifted, axis=-1, keepdims=True) / np.maximum(squares, _SMALLEST)
                grid = replace(grid, scales=np.where(squares > 0, scales, grid.scales).astype(np.float32))
        return best

    def _candidates(self, weights: Array) -> Iterator[Grid]:
        """Yield grids that cover 0.7 to 1.1 of the range of each group of weights [..., size]."""
        least = np.minimum(weights.min(axis=-1, keepdims=True), 0)
        most = np.maximum(weights.max(axis=-1, keepdims=True), 0)
        if not self.symmetric:
            for factor in _FACTORS:
                scales = np.maximum((most - least) * factor / (self.high - self.low), _SMALLEST)
                zeros = np.clip(np.rint(self.low - least * factor / scales), self.low, self.high)
                yield replace(self, scales=scales.astype(np.float32), zeros=zeros.astype(np.float32))
            return
        below, above = (np.maximum(side, 1) for side in (self.zeros - self.low, self.high - self.zeros))
        for factor in _FACTORS:
            for small, large in ((least, most), (-most, -least))[: 1 + self.signed]:  # a negative scale swaps the ends
                scales = np.maximum(np.maximum(-small / below, large / above) * factor, _SMALLEST)
                scales = scales if small is least else -scales
                yield replace(self, scales=scales.astype(np.float32))


def _squared(array: Array) -> Array:
    return np.asarray(np.einsum("...i,...i->...", array, array)[..., None])


@dataclass(frozen=True)
class Requantized:
    """A weight that was quantized again."""

    numbers: Array
    parameters: Mapping[str, Array]
    error: float


def requantized(node: ir.Node, weight: Array) -> Requantized:
    """Quantize a weight for the MatMulNBits or DequantizeLinear node that reads it in quantized form.

    Scales and zero points are recomputed if they are initializers that nothing else reads. Zero points are kept if all
    are in the middle of the range.
    """
    if node.op_type == "MatMulNBits":
        return _for_bits(node, weight)
    return _for_dequantization(node, weight)


def parameter_names(node: ir.Node) -> list[str]:
    """Return the names of a node's scales and zero points that :func:`requantized` recomputes."""
    indices = (2, 3) if node.op_type == "MatMulNBits" else (1, 2)
    if not _is_own(node, indices[0]):
        return []
    return [_name(node, indices[0]), *([] if _is_fixed(node, indices[1]) else [_name(node, indices[1])])]


def _is_fixed(node: ir.Node, index: int) -> bool:
    """Return whether zero points stay: others read them, they are not packed, or all are in the middle."""
    value = node.inputs[index] if index < len(node.inputs) else None
    if value is None or not _is_own(node, index):
        return True
    assert value.const_value is not None
    zeros = evaluate(value)
    if node.op_type == "MatMulNBits":
        bits = bit_sizes(node)[3]
        return value.dtype != ir.DataType.UINT8 or bool((bit_scales(node)[1] == 1 << (bits - 1)).all())
    assert value.dtype is not None
    return bool((zeros == (0 if value.dtype.is_signed() else 1 << (value.dtype.bitwidth - 1))).all())


def _for_bits(node: ir.Node, weight: Array) -> Requantized:
    rows, columns, block, bits = bit_sizes(node)
    blocks = -(-rows // block)
    whole = np.zeros((columns, blocks * block), np.float32)
    whole[:, :rows] = weight.T
    groups = whole.reshape(columns, blocks, block)
    before = _grid(node, (2, 3), bit_scales(node), (0, (1 << bits) - 1), signed=True)
    fits = _is_own(node, 2)
    grid = before.fitted(groups) if fits else before
    numbers = grid.rounded(groups)
    error = float(np.linalg.norm(groups - grid.values(numbers)))
    parameters = {}
    if fits:
        parameters[_name(node, 2)] = grid.scales.reshape(_shape(node, 2)).astype(grid.dtype)
    if fits and not grid.symmetric:
        zeros = np.pad(grid.zeros[..., 0].astype(np.uint8), ((0, 0), (0, -blocks % (8 // bits))))
        parameters[_name(node, 3)] = packed(zeros, bits).reshape(_shape(node, 3))
    return Requantized(packed(numbers.astype(np.uint8), bits).reshape(_shape(node, 1)), parameters, error)


def _for_dequantization(node: ir.Node, weight: Array) -> Requantized:
    first = node.inputs[0]
    assert first is not None
    assert first.dtype is not None
    bits = first.dtype.bitwidth
    limits = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if first.dtype.is_signed() else (0, (1 << bits) - 1)
    scale, zero = spread(node, 1, weight), spread(node, 2, weight)
    assert scale is not None
    block = node.attributes["block_size"].as_int() if "block_size" in node.attributes else 0
    axis = (node.attributes["axis"].as_int() if "axis" in node.attributes else 1) % max(weight.ndim, 1)

    def grouped(array: Array) -> Array:
        """Return groups [..., size] of values that share a scale."""
        array = np.broadcast_to(array, weight.shape)
        if block:
            last = np.moveaxis(array, axis, -1)
            filled = np.pad(last, [(0, 0)] * (last.ndim - 1) + [(0, -last.shape[-1] % block)], mode="edge")
            return filled.reshape(*last.shape[:-1], -1, block)
        return array.reshape(1, -1) if scale.size == 1 else np.moveaxis(array, axis, 0).reshape(weight.shape[axis], -1)

    def ungrouped(groups: Array) -> Array:
        if block:
            shape = (*(size for other, size in enumerate(weight.shape) if other != axis), -1)
            return np.moveaxis(groups.reshape(shape)[..., : weight.shape[axis]], -1, axis)
        if scale.size == 1:
            return groups.reshape(weight.shape)
        rest = [size for other, size in enumerate(weight.shape) if other != axis]
        return np.moveaxis(groups.reshape(weight.shape[axis], *rest), 0, axis)

    pair = (grouped(scale)[..., :1], grouped(np.zeros((), np.float32) if zero is None else zero)[..., :1])
    before = _grid(node, (1, 2), pair, limits, signed=False)
    groups = grouped(weight)
    fits = _is_own(node, 1)
    grid = before.fitted(groups) if fits else before
    numbers = grid.rounded(groups)
    error = float(np.linalg.norm(weight - ungrouped(grid.values(numbers))))
    parameters = {}
    for index, values in ((1, grid.scales), (2, grid.zeros)):
        if fits and (index == 1 or not grid.symmetric):
            ordered = np.moveaxis(values[..., 0], -1, axis) if block else values
            old = node.inputs[index]
            assert old is not None
            assert old.const_value is not None
            parameters[_name(node, index)] = ordered.reshape(_shape(node, index)).astype(old.const_value.numpy().dtype)
    return Requantized(ungrouped(numbers), parameters, error)


def _grid(
    node: ir.Node, indices: tuple[int, int], pair: tuple[Array, Array], limits: tuple[int, int], *, signed: bool
) -> Grid:
    """Return the present grid of a node's weight, from its scales and zero points."""
    scales, zeros = pair
    low, high = limits
    symmetric = _is_fixed(node, indices[1])
    scale = node.inputs[indices[0]]
    assert scale is not None
    assert scale.dtype is not None
    return Grid(scales, zeros, low, high, symmetric, signed, np.dtype(scale.dtype.numpy()))


def _is_own(node: ir.Node, index: int) -> bool:
    """Return whether an input of a node is an initializer that nothing else reads."""
    value = node.inputs[index] if index < len(node.inputs) else None
    if value is None or not value.is_initializer() or value.is_graph_output() or value.is_graph_input():
        return False
    return len(value.uses()) == 1


def _name(node: ir.Node, index: int) -> str:
    value = node.inputs[index]
    assert value is not None
    return str(value.name)


def _shape(node: ir.Node, index: int) -> tuple[int, ...]:
    value = node.inputs[index]
    assert value is not None
    assert value.const_value is not None
    return tuple(value.const_value.shape.numpy())
