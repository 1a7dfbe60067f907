"""Merging of adapters into the weights of their layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import onnx_ir as ir

from onnxtrain.adapters.adapter import Array, Entry
from onnxtrain.adapters.layers import Layer, Part
from onnxtrain.adapters.requantizing import parameter_names, requantized
from onnxtrain.adapters.values import columns_of, matrix, norms
from onnxtrain.errors import ModelError, OptionError
from onnxtrain.graph.layers import reads_transposed
from onnxtrain.model_file.large_data import MadeArrays

Adapted = tuple[Layer, Part | None, Entry]
"""A layer, the adapted part of it (``None`` for the whole layer), and the adapter."""


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
    layers = {id(layer.node): layer for layer, _, _ in adapted}
    for layer in layers.values():
        check_mergeable(layer, requantize=requantize)
    makers: dict[str, Callable[[], Array]] = {}
    for key, layer in layers.items():
        merged = _Merged(layer, [(part, entry) for other, part, entry in adapted if id(other.node) == key], costs)
        makers |= {name: partial(merged.take, name) for name in merged.names()}
    return MadeArrays(makers)


class _Merged:
    """The initializers of a layer with its adapters merged into them, which are computed when the first is taken."""

    def __init__(self, layer: Layer, parts: Sequence[tuple[Part | None, Entry]], costs: dict[str, Cost] | None) -> None:
        self._layer, self._parts, self._costs = layer, parts, costs
        self._made: dict[str, Array] = {}

    def names(self) -> list[str]:
        """Return the names of the initializers that may change."""
        return [str(self._layer.weight.name), *(() if self._grid is None else parameter_names(self._grid))]

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
        value = _view(self._layer)
        while (node := value.producer()) is not None and node.op_type != "DequantizeLinear":
            first = node.inputs[0]
            assert first is not None
            value = first
        return node

    def _computed(self) -> dict[str, Array]:
        layer, name = self._layer, str(self._layer.weight.name)
        before = matrix(layer)
        after = np.array(before, np.promote_types(before.dtype, np.float32), order="C")
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # non-finite values are refused below
            for part, entry in self._parts:
                _add(layer, part, entry, after)
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


def _add(layer: Layer, part: Part | None, entry: Entry, weight: Array) -> None:
    """Add the adapter of a layer, or of a part of it, to its weight, in place."""
    own = columns_of(layer, part, weight)
    delta = entry.delta()
    alpha = layer.node.attributes.get("alpha")  # of Gemm: y = alpha x W
    if alpha is not None and not layer.is_convolution:
        delta = delta / delta.dtype.type(alpha.as_float())
    own += delta
    if entry.magnitude is not None:
        gain = entry.magnitude / norms(layer, entry, part)
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


def _view(layer: Layer) -> ir.Value:
    """Return the value that the layer's node reads as its weight."""
    value = layer.node.inputs[0 if layer.is_embedding else 1]
    assert value is not None
    return value


def _stored(layer: Layer, weight: Array) -> tuple[dict[str, Array], float]:
    """Convert a dense weight to the layout and type of its initializers; return these and the rounding error."""
    if layer.kind == "MatMulNBits":
        found = requantized(layer.node, weight)
        return {str(layer.weight.name): found.numbers, **found.parameters}, found.error
    return initializers_of(_view(layer), weight.T if reads_transposed(layer.node) else weight)


def initializers_of(value: ir.Value, array: Array) -> tuple[dict[str, Array], float]:
    """Invert the views between an initializer and ``value``: return the initializers for a new value, and the error."""
    node = value.producer()
    if node is None:
        assert value.const_value is not None
        return {str(value.name): np.ascontiguousarray(array.astype(value.const_value.numpy().dtype, copy=False))}, 0.0
    first = node.inputs[0]
    assert first is not None
    if node.op_type == "DequantizeLinear":
        found = requantized(node, array)
        return {**initializers_of(first, found.numbers)[0], **found.parameters}, found.error
    if node.op_type == "Transpose":
        order = node.attributes["perm"].as_ints() if "perm" in node.attributes else range(array.ndim)[::-1]
        array = array.transpose(np.argsort(list(order)))
    return initializers_of(first, array)
