"""Adapters in a graph: their tensors, and the nodes beside the layers that they adapt."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnxtrain.adapters.adapter import GAIN, A, Array, B, Entry
from onnxtrain.adapters.layers import Layer, Part, Target, find_layers
from onnxtrain.adapters.values import norms
from onnxtrain.autodiff.rules.no_gradient import stopped
from onnxtrain.errors import OptionError
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.layers import orientation, reads_transposed
from onnxtrain.graph.operands import Value
from onnxtrain.graph.shapes import infer_shapes
from onnxtrain.model_file.external import set_folder
from onnxtrain.model_file.file import ModelFile


@dataclass(frozen=True)
class Pair:
    """Graph values of the matrices of a layer, or of a part of a packed layer."""

    a: Value
    b: Value
    scale: float
    part: Part | None = None
    gain: Value | None = None


@dataclass(frozen=True)
class Dropout:
    """Probability and seed of the dropout on an adapter's input."""

    ratio: float
    seed: int


class Emitter:
    """Writes the adapters of layers into a graph."""

    def __init__(self, graph: ir.Graph, opset: int) -> None:
        self.graph = graph
        self._main = Builder(graph, opset)
        nodes = list(graph)
        self._next = dict(zip(nodes, [*nodes[1:], None], strict=True))

    def builder(self, layer: Layer) -> Builder:
        """Return a builder that inserts nodes directly behind the layer."""
        producer = layer.y.producer()
        assert producer is not None
        behind = self._next[producer]
        op = self._main if behind is None else self._main.before(behind)
        op.scope = f"{layer.name}/lora"
        return op

    def add(self, op: Builder, layer: Layer, pairs: Sequence[Pair], *, dropout: Dropout | None = None) -> None:
        """Add the adapters to a layer's output, and redirect all its readers to the sum."""
        readers = list(layer.y.uses())
        like = pairs[0].a
        if any(pair.gain is None for pair in pairs):
            added = self._low_rank(op, layer, pairs, dropout)
        else:
            product, low = self._product(op, layer, like.dtype), self._low_rank(op, layer, pairs, dropout)
            added = (product + low) * self._gain(op, layer, pairs) - product
        y = op.wrap(layer.y)
        result = op.cast(added, y.dtype).with_shape(y.shape)
        result = y + result
        _replace_value(self.graph, layer.y, result.ir, readers)
        self._main.scope = ""

    def _low_rank(self, op: Builder, layer: Layer, pairs: Sequence[Pair], dropout: Dropout | None) -> Value:
        """Emit scale x A B; zeros in the columns of a part without an adapter."""
        x = self._x(op, layer, pairs[0].a.dtype, dropout)
        if pairs[0].part is None:
            return _between(op, layer, x, pairs[0].a, _scaled(pairs[0]))
        missing = layer.outputs - sum(pair.part.size for pair in pairs if pair.part is not None)
        if missing == 0 and all(pair.a.static_shape is None for pair in pairs):  # slots: each part has its own rank
            return op.Concat(*(_between(op, layer, x, pair.a, _scaled(pair)) for pair in pairs), axis=-1)
        a = op.Concat(*(pair.a for pair in pairs), axis=1)
        return _between(op, layer, x, a, op.Concat(*(_block(op, layer, pair) for pair in pairs), axis=0))

    def _x(self, op: Builder, layer: Layer, dtype: ir.DataType, dropout: Dropout | None) -> Value:
        x = op.wrap(layer.x)
        if layer.is_embedding:
            return x
        x = op.cast(x, dtype).with_shape(x.shape)
        if dropout is None:
            return x
        ratio, training = op.scalar(dropout.ratio, x), op.constant(True)
        (dropped,) = op.several("Dropout", x, ratio, training, outputs=1, seed=dropout.seed)
        return dropped.with_shape(x.shape)

    def _product(self, op: Builder, layer: Layer, dtype: ir.DataType) -> Value:
        """Emit x W without the bias."""
        product = op.wrap(layer.product)
        shape = product.shape
        if (bias := layer.inner_bias) is not None:
            added = op.wrap(bias)
            if "beta" in layer.node.attributes:
                added = added * layer.node.attributes["beta"].as_float()
            product = product - (_over_window(op, layer, added) if layer.is_convolution else added)
        return op.cast(product, dtype).with_shape(shape)

    def _gain(self, op: Builder, layer: Layer, pairs: Sequence[Pair]) -> Value:
        gains = {pair.part: pair.gain for pair in pairs if pair.gain is not None}
        if pairs[0].part is None:
            gain = gains[None]
        else:
            pieces, end = [], 0
            for part, value in gains.items():
                assert part is not None
                pieces += [_ones(op, part.start - end, value), value]
                end = part.start + part.size
            pieces.append(_ones(op, layer.outputs - end, pairs[0].a))
            gain = op.Concat(*(piece for piece in pieces if piece is not None), axis=0)
        return _over_window(op, layer, gain) if layer.is_convolution else gain


def column_norms(op: Builder, layer: Layer, pair: Pair, squares: Value) -> Value:
    """Emit the column norms ‖W + scale A B‖ [outputs], which are constants for the gradient."""
    a, b = stopped(op, pair.a), stopped(op, _scaled(pair))
    if layer.is_convolution:
        rank = a.shape[0] if a.shape is not None else None
        assert isinstance(rank, int)
        rows = op.reshape(a, [rank, -1])
        weight = op.reshape(op.cast(op.wrap(layer.node.inputs[1]), a.dtype), [layer.outputs, -1])  # type: ignore[arg-type]
        product = rows @ op.Transpose(weight, perm=[1, 0])
        b = op.Transpose(op.reshape(b, [layer.outputs, rank]), perm=[1, 0])
    else:
        rows = op.Transpose(a, perm=[1, 0])
        product = _times_weight(op, layer, rows)
        if pair.part is not None:
            product = op.Slice(product, op.ints(pair.part.start), op.ints(pair.part.start + pair.part.size), op.ints(1))
    gram = rows @ op.Transpose(rows, perm=[1, 0])
    mixed = op.ReduceSum(b * product, op.ints(0), keepdims=0)
    own = op.ReduceSum(b * (gram @ b), op.ints(0), keepdims=0)
    return stopped(op, op.Sqrt(squares + mixed * 2.0 + own).with_shape(squares.shape))


def _times_weight(op: Builder, layer: Layer, rows: Value) -> Value:
    """Emit rows @ W, computed by the layer's operator, which reads a quantized W as it is stored."""
    weight = layer.node.inputs[1]
    assert weight is not None
    if layer.kind == "MatMulNBits":
        x = op.wrap(layer.x)
        inputs = [None if value is None else op.wrap(value) for value in layer.node.inputs[1:4]]
        attributes = {name: item.value for name, item in layer.node.attributes.items()}
        (made,) = op.several(
            layer.kind, op.cast(rows, x.dtype), *inputs, outputs=1, domain=layer.node.domain, **attributes
        )
        made.ir.dtype = x.dtype
        return op.cast(made.with_shape((rows.shape[0] if rows.shape else None, layer.outputs)), rows.dtype)
    factor = op.cast(op.wrap(weight), rows.dtype)
    return op.Gemm(rows, factor, **orientation()) if reads_transposed(layer.node) else rows @ factor


def _scaled(pair: Pair) -> Value:
    return (pair.b * pair.scale).with_shape(pair.b.shape)


def _between(op: Builder, layer: Layer, x: Value, a: Value, b: Value) -> Value:
    """Emit x A B by the operator of the layer."""
    if layer.is_embedding:
        return op.Gather(a, x, axis=0) @ b
    if not layer.is_convolution:
        return (x @ a) @ b
    kept = {name: layer.node.attributes[name].value for name in _WINDOW if name in layer.node.attributes}
    return op.Conv(op.Conv(x, a, **kept), b)


_WINDOW = ("auto_pad", "dilations", "kernel_shape", "pads", "strides")


def _block(op: Builder, layer: Layer, pair: Pair) -> Value:
    """Pad the B of a part with zeros to the columns of all parts."""
    assert pair.part is not None
    behind = layer.outputs - pair.part.start - pair.part.size
    return op.Pad(_scaled(pair), op.ints(0, pair.part.start, 0, behind))


def _ones(op: Builder, count: int, like: Value) -> Value | None:
    return op.constant(np.ones(count), like.dtype) if count else None


def _over_window(op: Builder, layer: Layer, value: Value) -> Value:
    """Reshape one value per channel to broadcast over the spatial axes."""
    return op.reshape(value, [layer.outputs, *(1,) * len(layer.window)])


def _replace_value(graph: ir.Graph, old: ir.Value, new: ir.Value, readers: Sequence[tuple[ir.Node, int]]) -> None:
    """Replace a value by a new one in the given readers and in the graph's outputs, which keep their names."""
    for node, index in readers:
        node.replace_input_with(index, new)
    new.type, new.shape = old.type, old.shape
    if old.is_graph_output():
        name = old.name
        for index, value in enumerate(list(graph.outputs)):
            if value is old:
                graph.outputs[index] = new
        old.name = f"{name}/base"
        new.name = name


def rewritten(file: ModelFile, edit: Callable[[ir.Model, list[Layer]], None]) -> ModelFile:
    """Return a file with a changed graph; values that the file did not declare stay undeclared."""
    file = file.dense()
    working = ir.from_proto(file.whole())
    graph = working.graph
    set_folder(working, str(file.folder or ""))
    declared = {value for value in _computed(graph) if value.shape is not None}
    infer_shapes(working)
    edit(working, find_layers(working))
    for value in _computed(graph):
        if value not in declared and not value.is_graph_output():
            value.type = value.shape = None
    return file.changed(ir.to_proto(working))


def _computed(graph: ir.Graph) -> list[ir.Value]:
    return [value for node in graph for value in node.outputs]


def with_adapters(file: ModelFile, entries: Mapping[str, Entry], names: Collection[str]) -> ModelFile:
    """Return a file in which some layers have their adapters beside them, as initializers and nodes."""

    def edit(working: ir.Model, layers: list[Layer]) -> None:
        emitter = Emitter(working.graph, working.graph.opset_imports[""])
        for layer in layers:
            if layer.name not in names:
                continue
            op = emitter.builder(layer)
            own = [(target, entries[target.name]) for target in layer.targets if target.name in entries]
            emitter.add(op, layer, [_pair(op, target, entry) for target, entry in own])

    return rewritten(file, edit)


def _pair(op: Builder, target: Target, entry: Entry) -> Pair:
    dtype = target.layer.y.dtype or ir.DataType.FLOAT

    def added(end: str, array: Array) -> Value:
        return add_tensor(op, target.name + end, array.astype(dtype.numpy()), "adapters; give the model without")

    gain = None if entry.magnitude is None else added(GAIN, entry.magnitude / norms(target, entry))
    return Pair(added(A, entry.a), added(B, entry.b), entry.scale, target.part, gain)


def add_tensor(op: Builder, name: str, array: Array, told: str) -> Value:
    """Add an initializer to the main graph; ``told`` says what a model has that has the name already."""
    graph = op.graph
    if name in graph.initializers or any(value.name == name for value in graph.inputs):
        raise OptionError(f"The model has a tensor {name!r} already, so that it has {told}.").about(name)
    value = ir.val(name, const_value=ir.tensor(np.ascontiguousarray(array), name=name))
    graph.register_initializer(value)
    return op.wrap(value)
