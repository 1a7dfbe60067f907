"""Merge adapters into the weights of their layers, of which quantized ones get new scales and zero points."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import onnx_ir as ir

from onnxtrain.adapters.adapter import Array, Entry
from onnxtrain.adapters.layers import Layer, Target
from onnxtrain.adapters.values import (
    axis_and_block,
    bit_scales,
    bit_sizes,
    evaluate,
    matrix,
    norms,
    packed,
    spread,
)
from onnxtrain.errors import ModelError, OptionError
from onnxtrain.graph.layers import reads_transposed
from onnxtrain.model_file.large_data import MadeArrays

Adapted = tuple[Target, Entry]
"""A layer, or a part of one, and its adapter."""


@dataclass(frozen=True)
class Cost:
    """Rounding error of requantizing the merged weight of a layer.

    Attributes:
        layer: Its name.
        lost: ‖exact merged weight - stored merged weight‖ / ‖exact merged weight - weight before‖; 0 where the adapter
            stays beside the weight.
        beside: True where the adapter stays beside the weight, since more than half of its change would be lost.
    """

    layer: str
    lost: float
    beside: bool = False

    @property
    def is_high(self) -> bool:
        """Return whether more than a tenth of the adapter's change is lost."""
        return self.lost > _HIGH


_HIGH = 0.1

MOST_LOST = 0.5
"""Share of an adapter's change from which it stays beside the weight: docs/adapters.md has what the loss keeps."""


def merged_weights(
    adapted: Sequence[Adapted], *, requantize: bool = False, costs: dict[str, Cost] | None = None
) -> MadeArrays:
    """Return the merged weights, each computed at its first access."""
    layers = {id(target.layer.node): target.layer for target, _ in adapted}
    for layer in layers.values():
        check_mergeable(layer, requantize=requantize)
    makers: dict[str, Callable[[], Array]] = {}
    for key, layer in layers.items():
        merged = _Merged(layer, [item for item in adapted if id(item[0].layer.node) == key], costs)
        makers |= {name: partial(merged.take, name) for name in merged.names()}
    return MadeArrays(makers)


class _Merged:
    """The initializers of a layer with its adapters merged into them, which are computed when the first is taken."""

    def __init__(self, layer: Layer, adapted: Sequence[Adapted], costs: dict[str, Cost] | None) -> None:
        self._layer, self._adapted, self._costs = layer, adapted, costs
        self._made: dict[str, Array] = {}

    def names(self) -> list[str]:
        """Return the names of the initializers that may change."""
        return [str(self._layer.weight.name), *(() if self._grid is None else _parameter_names(self._grid))]

    def take(self, name: str) -> Array:
        """Return an initializer, and forget it."""
        if name not in self._made:
            self._made = self._computed()
        return self._made.pop(name)

    @property
    def _grid(self) -> ir.Node | None:
        """The node that dequantizes the weight."""
        if self._layer.kind == "MatMulNBits":
            return self._layer.node
        nodes = (value.producer() for value in self._layer.views)
        return next((node for node in nodes if node is not None and node.op_type == "DequantizeLinear"), None)

    def _computed(self) -> dict[str, Array]:
        layer, name = self._layer, str(self._layer.weight.name)
        before = matrix(layer)
        after = np.array(before, np.promote_types(before.dtype, np.float32), order="C")
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # non-finite values are refused below
            for target, entry in self._adapted:
                add_to_weight(target, entry, after)
            made, error = _stored(layer, after)
        overflowing = [one for one, array in made.items() if _overflows(array, before)]
        if overflowing or (is_quantized(layer) and _overflows(after, before)):
            raise ModelError(
                f"The weight {name!r} of {layer.name!r} has values that are not finite in {made[name].dtype} when its "
                "adapter is merged; train the adapter again, with a smaller scale."
            )
        if self._costs is not None and is_quantized(layer) and name not in self._costs:
            added = float(np.linalg.norm(after - before))
            self._costs[name] = Cost(layer.name, error / added if added else 0.0)
        return made


def _overflows(array: Array, before: Array) -> bool:
    """Return whether merging turned finite weights infinite or NaN."""
    if array.dtype.kind != "f" and array.dtype.name != "bfloat16":
        return False
    wide = array.astype(np.float32) if array.dtype.itemsize < 4 else array
    return not np.isfinite(wide).all() and bool(np.isfinite(before.astype(np.float64)).all())


def add_to_weight(target: Target, entry: Entry, weight: Array) -> None:
    """Add an adapter to the weight of its layer, in place."""
    layer, own, delta = target.layer, target.of_weight(weight), entry.delta()
    if "alpha" in layer.node.attributes:  # of Gemm: y = alpha x W
        delta = delta / delta.dtype.type(layer.node.attributes.get_float("alpha"))
    own += delta
    if entry.magnitude is not None:
        gain = entry.magnitude / norms(target, entry)
        own *= gain.reshape(-1, *(1,) * (weight.ndim - 1)) if layer.is_convolution else gain


def is_quantized(layer: Layer) -> bool:
    """Return whether a layer's weight is stored as integers."""
    return layer.weight.dtype is not None and layer.weight.dtype.is_integer()


def check_mergeable(layer: Layer, *, requantize: bool) -> None:
    """Check that an adapter can be merged into a layer's weight."""
    name = str(layer.weight.name)
    if is_quantized(layer) and not requantize:
        raise OptionError(
            f"The weight {name!r} of {layer.name!r} is quantized to {layer.bits} bits, which its adapter does not "
            "fit into: save the adapter (.onnx_adapter) and run the model with slots, or quantize it anew "
            "with `onnxtrain adapter merge --requantize`."
        ).about(name, got=layer.bits)
    if layer.kind in ("MatMulInteger", "DynamicQuantizeMatMul"):
        raise OptionError(
            f"The weight {name!r} of {layer.name!r} is quantized together with what it multiplies ({layer.kind}), so "
            "that no adapter can be merged into it; save the adapter (.onnx_adapter) and run the model with slots."
        )
    if layer.readers > 1:
        raise OptionError(
            f"The weight {name!r} of {layer.name!r} is read {layer.readers} times in the model, so an adapter of one "
            "reader cannot be merged into it; save the adapter (.onnx_adapter) and run the model with slots."
        )


def _stored(layer: Layer, weight: Array) -> tuple[dict[str, Array], float]:
    """Convert a dense weight to the layout and type of its initializers; return these and the rounding error."""
    if layer.kind == "MatMulNBits":
        found = _requantized(layer.node, weight)
        return {**_like(layer.node, 1, found.numbers), **found.parameters}, found.error
    return initializers_of(layer.views[0], weight.T if reads_transposed(layer.node) else weight)


def initializers_of(value: ir.Value, array: Array) -> tuple[dict[str, Array], float]:
    """Invert the views between an initializer and ``value``: return the initializers for a new value, and the error."""
    node = value.producer()
    if node is None:
        assert value.const_value is not None
        return {str(value.name): np.ascontiguousarray(array.astype(value.const_value.numpy().dtype, copy=False))}, 0.0
    first = node.inputs[0]
    assert first is not None
    if node.op_type == "DequantizeLinear":
        found = _requantized(node, array)
        return {**initializers_of(first, found.numbers)[0], **found.parameters}, found.error
    if node.op_type == "Transpose":
        order = node.attributes.get_ints("perm", range(array.ndim)[::-1])
        array = array.transpose(np.argsort(list(order)))
    return initializers_of(first, array)


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


def _requantized(node: ir.Node, weight: Array) -> Requantized:
    """Quantize a weight for the MatMulNBits or DequantizeLinear node that reads it in quantized form.

    Scales and zero points are recomputed if they are initializers that nothing else reads. Zero points are kept if all
    are in the middle of the range.
    """
    if node.op_type == "MatMulNBits":
        return _for_bits(node, weight)
    return _for_dequantization(node, weight)


def _parameter_names(node: ir.Node) -> list[str]:
    """Return the names of a node's scales and zero points that :func:`_requantized` recomputes."""
    scales, zeros = (2, 3) if node.op_type == "MatMulNBits" else (1, 2)
    if not _is_own(node, scales):
        return []
    recomputed = [scales] if _is_fixed(node, zeros) else [scales, zeros]
    return [str(value.name) for index in recomputed if (value := node.inputs[index]) is not None]


def _is_fixed(node: ir.Node, index: int) -> bool:
    """Return whether zero points stay: others read them, they are not packed, or all are in the middle."""
    value = node.inputs[index] if index < len(node.inputs) else None
    if value is None or not _is_own(node, index):
        return True
    if node.op_type == "MatMulNBits":
        middle = 1 << (bit_sizes(node)[3] - 1)
        return value.dtype != ir.DataType.UINT8 or bool((bit_scales(node)[1] == middle).all())
    assert value.dtype is not None
    return bool((evaluate(value) == (0 if value.dtype.is_signed() else 1 << (value.dtype.bitwidth - 1))).all())


def _for_bits(node: ir.Node, weight: Array) -> Requantized:
    rows, columns, block, bits = bit_sizes(node)
    blocks = -(-rows // block)
    whole = np.zeros((columns, blocks * block), np.float32)
    whole[:, :rows] = weight.T
    groups = whole.reshape(columns, blocks, block)
    grid, numbers = _fitted(node, 2, bit_scales(node), (0, (1 << bits) - 1), groups, signed=True)
    error = float(np.linalg.norm(groups - grid.values(numbers)))
    parameters = _like(node, 2, grid.scales) if _is_own(node, 2) else {}
    if parameters and not grid.symmetric:
        zeros = np.pad(grid.zeros[..., 0].astype(np.uint8), ((0, 0), (0, -blocks % (8 // bits))))
        parameters |= _like(node, 3, packed(zeros, bits))
    return Requantized(packed(numbers.astype(np.uint8), bits), parameters, error)


def _for_dequantization(node: ir.Node, weight: Array) -> Requantized:
    first = node.inputs[0]
    assert first is not None
    assert first.dtype is not None
    bits = first.dtype.bitwidth
    limits = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if first.dtype.is_signed() else (0, (1 << bits) - 1)
    scale, zero = spread(node, 1, weight), spread(node, 2, weight)
    assert scale is not None
    axis, block = axis_and_block(node, weight.ndim)
    rest = [size for other, size in enumerate(weight.shape) if other != axis]

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
            return np.moveaxis(groups.reshape(*rest, -1)[..., : weight.shape[axis]], -1, axis)
        if scale.size == 1:
            return groups.reshape(weight.shape)
        return np.moveaxis(groups.reshape(weight.shape[axis], *rest), 0, axis)

    pair = (grouped(scale)[..., :1], grouped(np.zeros((), np.float32) if zero is None else zero)[..., :1])
    grid, numbers = _fitted(node, 1, pair, limits, grouped(weight), signed=False)
    error = float(np.linalg.norm(weight - ungrouped(grid.values(numbers))))
    parameters: dict[str, Array] = {}
    for index, values in ((1, grid.scales), (2, grid.zeros)):
        if _is_own(node, 1) and (index == 1 or not grid.symmetric):
            parameters |= _like(node, index, np.moveaxis(values[..., 0], -1, axis) if block else values)
    return Requantized(ungrouped(numbers), parameters, error)


def _fitted(
    node: ir.Node, index: int, pair: tuple[Array, Array], limits: tuple[int, int], groups: Array, *, signed: bool
) -> tuple[Grid, Array]:
    """Return the grid for groups of weights and their integers: the present grid if others read its scales."""
    scale = node.inputs[index]
    assert scale is not None
    assert scale.dtype is not None
    grid = Grid(*pair, *limits, _is_fixed(node, index + 1), signed, np.dtype(scale.dtype.numpy()))
    grid = grid.fitted(groups) if _is_own(node, index) else grid
    return grid, grid.rounded(groups)


def _is_own(node: ir.Node, index: int) -> bool:
    """Return whether an input of a node is an initializer that nothing else reads."""
    value = node.inputs[index] if index < len(node.inputs) else None
    if value is None or not value.is_initializer() or value.is_graph_output() or value.is_graph_input():
        return False
    return len(value.uses()) == 1


def _like(node: ir.Node, index: int, array: Array) -> dict[str, Array]:
    """Return an array by the name, in the shape and in the type of the initializer that a node reads."""
    value = node.inputs[index]
    assert value is not None
    assert value.const_value is not None
    return {str(value.name): array.reshape(value.const_value.shape.numpy()).astype(value.const_value.dtype.numpy())}
