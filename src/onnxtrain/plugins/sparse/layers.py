"""Find the layers of a model that can have sparse weights: a MatMul, Gemm or Conv with what directly follows it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import numpy_helper

from onnxtrain.graph.domains import is_default_domain
from onnxtrain.graph.layers import form_of
from onnxtrain.plugins.sparse.edited import attributes, names_in_subgraphs

Shape = tuple[int | str | None, ...]
"""Sizes and symbols of a value's axes; ``None`` for one that is unknown."""

ELEMENTWISE = frozenset(
    {"Clip", "Elu", "Erf", "Gelu", "HardSigmoid", "HardSwish", "Identity", "LeakyRelu", "Mish", "Relu", "Selu"}
    | {"Sigmoid", "Softplus", "Softsign", "Tanh", "ThresholdedRelu"}
)
"""Operators that compute each element of the result from the same element of their first input."""

_NO_LIMIT = float("inf")


@dataclass
class Layer:
    """A linear layer or a convolution, with bias, residual sum and limits.

    Attributes:
        nodes: Its nodes in the order of the graph.
        matrix: The weight as [outputs, depth].
        bias: [outputs].
        residual: A value of the shape of the result that is added before the limits, or none.
        lower: Least value of the result.
        upper: Largest value of the result.
        windows: Attributes of a convolution; empty for a linear layer.
    """

    nodes: list[onnx.NodeProto]
    matrix: np.ndarray
    bias: np.ndarray
    residual: str | None = None
    lower: float = -_NO_LIMIT
    upper: float = _NO_LIMIT
    windows: dict[str, list[int]] = field(default_factory=dict)

    @property
    def x(self) -> str:
        """The input of the layer."""
        return str(self.nodes[0].input[0])

    @property
    def reads(self) -> list[str]:
        """The input and the residual, each once."""
        return list(dict.fromkeys(name for name in (self.x, self.residual) if name))

    @property
    def y(self) -> str:
        """The result of the layer."""
        return str(self.nodes[-1].output[0])

    @property
    def name(self) -> str:
        """The node's name, or else its result's."""
        return str(self.nodes[0].name or self.nodes[0].output[0])

    @property
    def sparsity(self) -> float:
        """The fraction of zeros."""
        return float(1 - np.count_nonzero(self.matrix) / self.matrix.size)


class LayerSearch:
    """The layers of one graph."""

    def __init__(self, graph: onnx.GraphProto, shapes: Mapping[str, Shape | None]) -> None:
        self._graph = graph
        self._shapes = shapes
        inputs = {value.name for value in graph.input}
        self._constants = {tensor.name: tensor for tensor in graph.initializer if tensor.name not in inputs}
        for node in graph.node:
            if node.op_type == "Constant" and is_default_domain(node.domain) and node.attribute[0].name == "value":
                self._constants[node.output[0]] = node.attribute[0].t
        self._readers: dict[str, list[onnx.NodeProto | None]] = {value.name: [None] for value in graph.output}
        for node in graph.node:
            for name in node.input:
                self._readers.setdefault(name, []).append(node)
            for name in names_in_subgraphs(node):
                self._readers.setdefault(name, []).append(None)

    def layers(self) -> Iterator[Layer]:
        """Yield the layers with constant float32 weights."""
        taken: set[str] = set()
        for node in self._graph.node:
            if not is_default_domain(node.domain):
                continue
            found = {"MatMul": self._matmul, "Gemm": self._gemm, "Conv": self._conv}.get(node.op_type, _nothing)(node)
            if found is None:
                continue
            self._extend(found, taken)
            taken.update(follower.output[0] for follower in found.nodes[1:])
            yield found

    def readers(self, name: str) -> list[onnx.NodeProto | None]:
        """Return the nodes that read a value; ``None`` stands for a subgraph and for an output of the model."""
        return self._readers.get(name, [])

    def _matrix(self, name: str, rank: int) -> np.ndarray | None:
        tensor = self._constants.get(name)
        if tensor is None or tensor.data_type != onnx.TensorProto.FLOAT or len(tensor.dims) != rank:
            return None
        array = numpy_helper.to_array(tensor)
        return array if array.size and np.isfinite(array).all() else None

    def constant(self, name: str) -> np.ndarray | None:
        """Return the array of a constant, or ``None`` for another value."""
        tensor = self._constants.get(name)
        return None if tensor is None else numpy_helper.to_array(tensor)

    def _matmul(self, node: onnx.NodeProto) -> Layer | None:
        weight = self._matrix(node.input[1], 2)
        if weight is None or len(self._shapes.get(node.input[0]) or ()) < 2:
            return None
        return Layer([node], weight.T, np.zeros(weight.shape[1], np.float32))

    def _gemm(self, node: onnx.NodeProto) -> Layer | None:
        given = attributes(node)
        weight, form = self._matrix(node.input[1], 2), form_of("Gemm", given)
        if weight is None or form is None:
            return None
        matrix = np.float32(given.get("alpha", 1.0)) * np.moveaxis(weight, form.outputs, 0)
        bias = self._bias(node, len(matrix))
        return None if bias is None else Layer([node], matrix, np.float32(given.get("beta", 1.0)) * bias)

    def _conv(self, node: onnx.NodeProto) -> Layer | None:
        given = attributes(node)
        weight = next((w for rank in (3, 4) if (w := self._matrix(node.input[1], rank)) is not None), None)
        if weight is None or given.get("group", 1) != 1 or given.get("auto_pad", b"NOTSET") != b"NOTSET":
            return None
        bias = self._bias(node, len(weight))
        if bias is None:
            return None
        axes = weight.ndim - 2
        windows = {
            "weight_shape": list(weight.shape),
            "kernel_shape": list(weight.shape[2:]),
            "strides": list(given.get("strides", [1] * axes)),
            "pads": list(given.get("pads", [0] * 2 * axes)),
            "dilations": list(given.get("dilations", [1] * axes)),
        }
        return Layer([node], weight.reshape(len(weight), -1), bias, windows=windows)

    def _bias(self, node: onnx.NodeProto, outputs: int) -> np.ndarray | None:
        """Return the bias in the third input, zeros without one; ``None`` where it is not a constant."""
        given = len(node.input) > 2 and node.input[2]
        return self._row(node.input[2], outputs) if given else np.zeros(outputs, np.float32)

    def _row(self, name: str, outputs: int) -> np.ndarray | None:
        """Return a constant that broadcasts along the last axis."""
        array = self.constant(name)
        if array is None or array.dtype != np.float32 or array.size not in (1, outputs):
            return None
        if array.size == outputs and array.ndim and array.shape[-1] != outputs:
            return None
        return np.broadcast_to(array.reshape(-1), outputs).astype(np.float32)

    def _extend(self, layer: Layer, taken: set[str]) -> None:
        """Take the nodes that directly follow into the layer, in place."""
        if layer.windows:
            self._take_normalization(layer)
        elif (node := self._only_reader(layer, "Add")) is not None:
            row = next((row for name in node.input if (row := self._row(name, len(layer.matrix))) is not None), None)
            if row is not None and not self._grows(layer, node):
                layer.bias = layer.bias + row
                layer.nodes.append(node)
        self._take_residual(layer, taken)
        self._take_limits(layer)

    def _only_reader(self, layer: Layer, operator: str) -> onnx.NodeProto | None:
        readers = self.readers(layer.y)
        node = readers[0] if len(readers) == 1 else None
        return node if node is not None and node.op_type == operator and is_default_domain(node.domain) else None

    def _grows(self, layer: Layer, node: onnx.NodeProto) -> bool:
        """Return whether a sum may have another shape than the layer's result."""
        before, after = self._shapes.get(layer.y), self._shapes.get(node.output[0])
        return before is None or before != after

    def _take_normalization(self, layer: Layer) -> None:
        """Fold a BatchNormalization with constant statistics into the weights."""
        node = self._only_reader(layer, "BatchNormalization")
        if node is None or len(node.output) > 1 or node.input[0] != layer.y or attributes(node).get("training_mode"):
            return
        constants = [self.constant(name) for name in node.input[1:5]]
        if any(array is None or array.shape != layer.bias.shape for array in constants):
            return
        scale, shift, mean, variance = (np.asarray(array, np.float64) for array in constants)
        factor = scale / np.sqrt(variance + attributes(node).get("epsilon", 1e-5))
        layer.matrix = (layer.matrix * factor[:, None]).astype(np.float32)
        layer.bias = ((layer.bias - mean) * factor + shift).astype(np.float32)
        layer.nodes.append(node)

    def _take_residual(self, layer: Layer, taken: set[str]) -> None:
        node = self._only_reader(layer, "Add")
        if node is None or node.output[0] in taken:
            return
        other = node.input[1] if node.input[0] == layer.y else node.input[0]
        shape = self._shapes.get(layer.y)
        known = shape is not None and None not in shape
        if known and other not in self._constants and other != layer.y and self._shapes.get(other) == shape:
            layer.residual = other
            layer.nodes.append(node)

    def _take_limits(self, layer: Layer) -> None:
        if (node := self._only_reader(layer, "Relu")) is not None:
            layer.lower = 0.0
            layer.nodes.append(node)
        elif (node := self._only_reader(layer, "Clip")) is not None and node.input[0] == layer.y:
            limits = [self.constant(name) if name else None for name in node.input[1:]]
            given = [name for name in node.input[1:] if name]
            if sum(limit is not None for limit in limits) != len(given):
                return
            for bound, limit in zip(("lower", "upper"), limits, strict=False):
                if limit is not None:
                    setattr(layer, bound, float(limit.reshape(())))
            layer.nodes.append(node)


def _nothing(node: onnx.NodeProto) -> None:
    return None
