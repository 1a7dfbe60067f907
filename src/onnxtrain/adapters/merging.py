"""Merging of adapters into the weights of their layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import onnx_ir as ir

from onnxtrain.adapters.adapter import Array, Entry
from onnxtrain.adapters.layers import Layer, Part
from onnxtrain.adapters.values import columns_of, evaluate, matrix, norms, of_bits, pack_bits, quantized
from onnxtrain.errors import ModelError, OptionError
from onnxtrain.model_file.large_data import MadeArrays

Adapted = tuple[Layer, Part | None, Entry]
"""A layer, the adapted part of it (``None`` for the whole layer), and the adapter."""


@dataclass(frozen=True)
class Cost:
    """Rounding error of requantizing the merged weight of a layer.

    Attributes:
        layer: Its name.
        lost: ‖exact merged weight - stored merged weight‖ / ‖exact merged weight - weight before‖.
    """

    layer: str
    lost: float


def merged_weights(
    adapted: Sequence[Adapted], *, requantize: bool = False, costs: dict[str, Cost] | None = None
) -> MadeArrays:
    """Return the merged weights, each computed at its first access.

    Args:
        adapted: The layers with their adapters.
        requantize: Quantize merged weights again with their old scales instead of refusing quantized ones.
        costs: Receives the rounding error of each requantized weight, by name, when it is computed.

    Returns:
        New values by initializer name.

    Raises:
        OptionError: A weight is quantized and ``requantize`` is false, or several nodes read the weight.
    """
    layers = {id(layer.node): layer for layer, _, _ in adapted}
    for layer in layers.values():
        check_mergeable(layer, requantize=requantize)
    parts = {key: [(part, entry) for other, part, entry in adapted if id(other.node) == key] for key in layers}
    return MadeArrays(
        {str(layer.weight.name): partial(_merged, layer, parts[key], costs) for key, layer in layers.items()}
    )


def _merged(layer: Layer, parts: Sequence[tuple[Part | None, Entry]], costs: dict[str, Cost] | None) -> Array:
    """Compute the initializer of a layer with the adapters of its parts merged into it."""
    before = matrix(layer)
    after = np.array(before, np.promote_types(before.dtype, np.float32), order="C")
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # non-finite values are refused below
        for part, entry in parts:
            _add(layer, part, entry, after)
    with np.errstate(over="ignore", invalid="ignore"):
        array, name = _stored(layer, after), str(layer.weight.name)
    if _overflows(array, before):
        raise ModelError(
            f"The weight {name!r} of {layer.name!r} gets values that are not finite in {array.dtype} with its adapter; "
            "train the adapter again, with a smaller scale."
        )
    if costs is not None and is_quantized(layer) and name not in costs:
        costs[name] = Cost(layer.name, _lost(layer, array, before, after))
    return array


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
    """Check that an adapter can be merged into a layer's weight.

    Raises:
        OptionError: The weight is quantized and ``requantize`` is false, the layer quantizes its input dynamically, or
            several nodes read the weight.
    """
    name = str(layer.weight.name)
    if is_quantized(layer) and not requantize:
        raise OptionError(
            f"The weight {name!r} of {layer.name!r} is quantized to {layer.bits} bits, which its adapter does not "
            "fit into: save the adapter (.onnx_adapter) and run the model with slots, or quantize it anew "
            "with `onnxtrain adapter merge --requantize`."
        )
    if layer.kind in ("MatMulInteger", "DynamicQuantizeMatMul"):
        raise OptionError(
            f"The weight {name!r} of {layer.name!r} is quantized together with what it multiplies ({layer.kind}), so "
            "that no adapter can be merged into it; save the adapter (.onnx_adapter) and run the model with slots."
        )
    if layer.readers > 1:
        raise OptionError(
            f"The weight {name!r} of {layer.name!r} is read in {layer.readers} places, so that an adapter of one "
            "cannot be merged into it; save the adapter (.onnx_adapter) and run the model with slots."
        )


def _stored(layer: Layer, weight: Array) -> Array:
    """Convert a dense weight to the layout and type of its initializer."""
    if layer.kind == "MatMulNBits":
        return pack_bits(layer.node, weight)
    transposed = "transB" in layer.node.attributes and layer.node.attributes["transB"].as_int() == 1
    value = layer.node.inputs[0 if layer.is_embedding else 1]
    assert value is not None
    return _back(value, weight.T if transposed else weight)


def _back(value: ir.Value, array: Array) -> Array:
    """Invert the views between an initializer and ``value``: return the initializer for a new value."""
    node = value.producer()
    if node is None:
        assert value.const_value is not None
        return np.ascontiguousarray(array.astype(value.const_value.numpy().dtype, copy=False))
    first = node.inputs[0]
    assert first is not None
    if node.op_type == "Transpose":
        order = node.attributes["perm"].as_ints() if "perm" in node.attributes else range(array.ndim)[::-1]
        array = array.transpose(np.argsort(list(order)))
    elif node.op_type == "DequantizeLinear":
        assert first.dtype is not None
        array = quantized(node, array, first.dtype)
    return _back(first, array)


def _lost(layer: Layer, stored: Array, before: Array, after: Array) -> float:
    """Compute :attr:`Cost.lost`."""
    if layer.kind == "MatMulNBits":
        now = of_bits(layer.node, stored)
    else:
        value = layer.node.inputs[0 if layer.is_embedding else 1]
        assert value is not None
        now = evaluate(value, stored)
        transposed = "transB" in layer.node.attributes and layer.node.attributes["transB"].as_int() == 1
        now = now.T if transposed else now
    added = float(np.linalg.norm(after - before))
    return float(np.linalg.norm(after - now)) / added if added else 0.0
