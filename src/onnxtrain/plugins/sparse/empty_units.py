"""Take units without effect out of a pruned model: those that are constant, and those that nothing reads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from onnxtrain.errors import OptionError
from onnxtrain.errors._internal import ignored_warnings
from onnxtrain.graph.domains import is_default_domain
from onnxtrain.graph.layers import orientation
from onnxtrain.plugins.sparse.edited import Edited, assign, attributes
from onnxtrain.plugins.sparse.layers import ELEMENTWISE, Layer, LayerSearch, Shape
from onnxtrain.plugins.structures.shrink import ShrinkWarning, shrink
from onnxtrain.runtime.turns import session_of_one_thread

_POOLING = frozenset({"AveragePool", "GlobalAveragePool", "GlobalMaxPool", "MaxPool"})
"""Operators that leave a channel as it is where it is constant, without padding."""


def without_empty_units(proto: onnx.ModelProto, shapes: Mapping[str, Shape | None]) -> onnx.ModelProto:
    """Return the model without units (outputs of a layer, with all that belongs to them) that have no effect."""
    made = Edited(proto)
    if not _Units(made, shapes).clear():
        return proto
    with ignored_warnings(ShrinkWarning):  # empty inputs and outputs of the model stay, as they should
        try:
            return shrink(made.proto)
        except OptionError:  # nothing of what is empty can be removed, or nothing of a layer would remain
            return proto


class _Units:
    """The units of a graph: which are constant, and which are read."""

    def __init__(self, made: Edited, shapes: Mapping[str, Shape | None]) -> None:
        self._made, self._graph, self._shapes = made, made.graph, shapes
        self._search = LayerSearch(made.graph, shapes)
        self._layers = {layer.nodes[0].output[0]: layer for layer in self._search.layers()}
        self._changed: dict[str, Layer] = {}

    def clear(self) -> bool:
        """Set all weights and biases of units without effect to zero, in place; return whether there are any."""
        self._fold_constants()
        empty = False
        for layer in reversed(self._layers.values()):
            unread = ~self._read(layer.y, self._axis(layer, layer.y), len(layer.matrix))
            empty = empty or bool(unread.any())
            if layer.matrix[unread].any() or layer.bias[unread].any():
                self._change(layer, np.where(unread[:, None], 0, layer.matrix), np.where(unread, 0, layer.bias))
        for layer in self._changed.values():
            self._write(layer)
        return empty

    def _change(self, layer: Layer, matrix: np.ndarray, bias: np.ndarray) -> None:
        layer.matrix, layer.bias = matrix.astype(np.float32), bias.astype(np.float32)
        self._changed[layer.y] = layer

    def _axis(self, layer: Layer, name: str) -> int | None:
        """Return the axis of channels of an input or a result of the layer; ``None`` if it is not known."""
        shape = self._shapes.get(name)
        return None if shape is None else 1 if layer.windows else len(shape) - 1

    def _fold_constants(self) -> None:
        """Move what constant units contribute to a layer from its weights into its bias."""
        known: dict[str, tuple[int, np.ndarray]] = {}  # the axis of channels, and their values; NaN: not constant
        for node in self._graph.node:
            layer = self._layers.get(node.output[0])
            if layer is not None:
                axis, values = known.get(layer.x, (None, np.zeros(0)))
                if axis is not None and axis == self._axis(layer, layer.x):
                    self._fold(layer, values)
                result = self._axis(layer, layer.y)
                if result is not None and layer.residual is None:
                    constant = np.clip(layer.bias, layer.lower, layer.upper)
                    known[layer.y] = result, np.where(layer.matrix.any(axis=1), np.nan, constant)
            elif node.input and node.input[0] in known and (repeats := self._repeats(node, known[node.input[0]][0])):
                axis, values = known[node.input[0]]
                if node.op_type in ELEMENTWISE:
                    known[node.output[0]] = axis, self._evaluated(node, values)
                elif not _is_padded(node):
                    known[node.output[0]] = axis, np.repeat(values, repeats)

    def _fold(self, layer: Layer, values: np.ndarray) -> None:
        weight = _by_channel(layer)
        if weight.shape[1] != len(values):
            return
        padded = any(layer.windows.get("pads", ()))  # the border of a padded constant is no constant, but for zero
        constant = np.isfinite(values) & ((values == 0) | (not padded)) & weight.any(axis=(0, 2))
        if not constant.any():
            return
        bias = layer.bias + weight[:, constant].sum(axis=2, dtype=np.float64) @ values[constant].astype(np.float64)
        self._change(layer, np.where(constant[:, None], 0, weight).reshape(layer.matrix.shape), bias)

    def _read(self, name: str, axis: int | None, count: int) -> np.ndarray:
        """Return which channels of a value have an effect."""
        read = np.zeros(count, bool)
        for node in self._search.readers(name):
            layer = None if node is None else self._layers.get(node.output[0])
            if node is None or axis is None or list(node.input).count(name) != 1 or node.input[0] != name:
                return np.ones(count, bool)
            if layer is not None and axis == self._axis(layer, name) and _by_channel(layer).shape[1] == count:
                read |= _by_channel(layer).any(axis=(0, 2))
            elif layer is None and (repeats := self._repeats(node, axis)):
                read |= self._read(node.output[0], axis, count * repeats).reshape(count, repeats).any(axis=1)
            else:
                return np.ones(count, bool)
        return read

    def _repeats(self, node: onnx.NodeProto, axis: int) -> int:
        """Return how many channels of the result each of a node's input becomes, in order; 0 if this is not so."""
        if not is_default_domain(node.domain) or len(node.output) != 1:
            return 0
        if node.op_type in ELEMENTWISE:
            return int(all(self._search.constant(name) is not None for name in node.input[1:] if name))
        if node.op_type in _POOLING:
            return int(axis == 1)
        before, after = self._shapes.get(node.input[0]), self._shapes.get(node.output[0])
        if node.op_type not in ("Flatten", "Reshape") or before is None or after is None or axis != 1:
            return 0
        sizes = [size for size in before[1:] if isinstance(size, int)]
        flat = len(sizes) == len(before) - 1 and len(after) == 2 and after[1] == math.prod(sizes)
        return math.prod(sizes[1:]) if flat and before[0] is not None and before[0] == after[0] else 0

    def _evaluated(self, node: onnx.NodeProto, values: np.ndarray) -> np.ndarray:
        """Return the results of an elementwise operator."""
        x = helper.make_tensor_value_info(node.input[0], onnx.TensorProto.FLOAT, values.shape)
        y = helper.make_tensor_value_info(node.output[0], onnx.TensorProto.FLOAT, None)
        others = [(name, constant) for name in node.input[1:] if (constant := self._search.constant(name)) is not None]
        graph = helper.make_graph([node], "unit", [x], [y], [numpy_helper.from_array(*pair[::-1]) for pair in others])
        imports = self._made.proto.opset_import
        model = helper.make_model(graph, opset_imports=imports, ir_version=self._made.proto.ir_version)
        session = session_of_one_thread(model.SerializeToString())
        found = session.run(None, {node.input[0]: np.nan_to_num(values.astype(np.float32))})[0]
        return np.where(np.isnan(values), np.nan, found)

    def _write(self, layer: Layer) -> None:
        """Give the nodes of a layer its new weights and bias; a batch normalization has become part of these."""
        first, rest = layer.nodes[0], layer.nodes[1:2]
        taken = [
            node
            for node in rest
            if node.op_type == "BatchNormalization" or (node.op_type == "Add" and layer.residual not in node.input)
        ]
        replaced = [first, *taken]
        end, old = replaced[-1].output[0], first.input[1]
        alone = len(self._search.readers(old)) == 1 and old in {tensor.name for tensor in self._graph.initializer}
        weight, bias = old if alone else self._made.unused(f"{old}.kept"), self._made.unused(f"{old}.bias")
        array = layer.matrix.reshape(layer.windows["weight_shape"]) if layer.windows else layer.matrix
        if first.op_type == "MatMul":
            array, product = array.T, self._made.unused(f"{end}.product")
            made = [
                helper.make_node("MatMul", [layer.x, weight], [product], name=first.name),
                helper.make_node("Add", [product, bias], [end]),
            ]
        else:
            given: dict[str, Any] = {key: value for key, value in layer.windows.items() if key != "weight_shape"}
            given = given or orientation()
            made = [helper.make_node(first.op_type, [layer.x, weight, bias], [end], name=first.name, **given)]
        gone = {node.output[0] for node in taken}
        nodes: list[onnx.NodeProto] = []
        for node in self._graph.node:
            if first.output[0] in node.output:
                nodes.extend(made)
            elif gone.isdisjoint(node.output):
                nodes.append(node)
        tensors = [tensor for tensor in self._graph.initializer if tensor.name != weight]
        tensors += [
            numpy_helper.from_array(np.ascontiguousarray(array), weight),
            numpy_helper.from_array(np.ascontiguousarray(layer.bias), bias),
        ]
        read = {name for node in replaced for name in node.input}
        assign(self._graph.node, nodes)
        assign(self._graph.initializer, tensors)
        self._made.remove_unread(read)


def _is_padded(node: onnx.NodeProto) -> bool:
    given = attributes(node)
    return any(given.get("pads", ())) or bool(given.get("ceil_mode")) or given.get("auto_pad", b"NOTSET") != b"NOTSET"


def _by_channel(layer: Layer) -> np.ndarray:
    """Return the weight as [outputs, channels, places of the window]."""
    channels = layer.windows["weight_shape"][1] if layer.windows else layer.matrix.shape[1]
    return layer.matrix.reshape(len(layer.matrix), channels, -1)
