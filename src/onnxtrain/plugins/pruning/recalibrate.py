"""Restore the mean and the spread of every layer's outputs after structures were removed from a model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from onnxtrain.graph.layers import Layer, layers, stored
from onnxtrain.graph.shapes import infer_shapes
from onnxtrain.graph.value import dimensions
from onnxtrain.model_file.upgrade import upgrade_opset

_SMALLEST = 1e-6
"""Spread below which a channel counts as constant."""

_RANGE = (1 / 3, 3.0)
"""Range of the factors of a channel's weights."""

_OPSET = 18
"""Opset of the models that are measured, of which the axes of ReduceMean are an input."""

_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE)

Statistics = tuple[np.ndarray, np.ndarray]
"""Mean and standard deviation of each channel."""


@dataclass(frozen=True)
class _Layer:
    """A linear layer or convolution whose weight no other node reads."""

    adds: onnx.NodeProto
    slot: int
    weight: str
    bias: np.ndarray | None
    outputs: int
    reduced: tuple[int, ...] | None

    @property
    def result(self) -> str:
        """The layer's output, with the bias."""
        return str(self.adds.output[0])


def recalibrated(
    before: onnx.ModelProto,
    after: onnx.ModelProto,
    stays: Callable[[str, int], np.ndarray | None],
    feeds: Mapping[str, np.ndarray],
    frozen: Container[str] = (),
) -> onnx.ModelProto:
    """Return the smaller model with weights and biases rescaled so that each channel has its former mean and spread.

    Removed inputs of a layer shift and shrink its outputs, which fine-tuning would have to repair first. The layers are
    corrected in their order, each for inputs that are corrected already.
    """
    corrected = onnx.ModelProto()
    corrected.CopyFrom(after)
    there = {name for node in before.graph.node for name in node.output}
    layers = [layer for layer in _layers(corrected) if layer.result in there and layer.weight not in frozen]
    if not layers:
        return after
    wanted = dict(zip((layer.result for layer in layers), _run(before, layers, feeds), strict=True))
    for layer in layers:
        mean, spread = wanted[layer.result]
        kept = stays(layer.result, -1 if layer.reduced is None else 1)
        if kept is not None:
            wanted[layer.result] = mean[kept], spread[kept]
    found = _run(after, layers, feeds, wanted)
    values = {tensor.name: tensor for tensor in corrected.graph.initializer}
    for layer, (mean, spread) in zip(layers, found, strict=True):
        factor = _factor(wanted[layer.result][1], spread)
        shift = wanted[layer.result][0] - factor * mean
        if not (np.isfinite(factor).all() and np.isfinite(shift).all()):
            return after
        _rescale(corrected, values, layer, factor, shift)
    return corrected


def spreads_of(
    model: onnx.ModelProto, names: Collection[str], feeds: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Return the standard deviation of each channel of the inputs of linear layers and convolutions."""
    copy = _copied(model)
    made = {name for node in copy.graph.node for name in node.output}
    readers = layers(infer_shapes(ir.from_proto(model)).graph)
    found = {layer.x: _Measured(layer.x, layer.summed) for layer in readers if layer.x in made and layer.x in names}
    del copy.graph.output[:]
    for value in found.values():
        copy.graph.node.extend(value.nodes(copy))
        copy.graph.output.add().CopyFrom(helper.make_tensor_value_info(f"{value.name}/spread", TensorProto.FLOAT, None))
    return dict(zip(found, _outputs(copy, feeds), strict=True)) if found else {}


def _factor(wanted: np.ndarray, found: np.ndarray) -> np.ndarray:
    factor = np.clip(wanted / np.maximum(found, _SMALLEST), *_RANGE)
    return np.where(np.maximum(wanted, found) < _SMALLEST, 1.0, factor)


def _rescale(
    model: onnx.ModelProto, values: dict[str, TensorProto], layer: _Layer, factor: np.ndarray, shift: np.ndarray
) -> None:
    weight = values[layer.weight]
    array = numpy_helper.to_array(weight)
    shape = [-1 if axis == layer.outputs else 1 for axis in range(array.ndim)]
    weight.CopyFrom(numpy_helper.from_array((array * factor.reshape(shape)).astype(array.dtype), weight.name))
    inputs = [*layer.adds.input, *[""] * (layer.slot + 1 - len(layer.adds.input))]
    bias = np.zeros(len(factor)) if layer.bias is None else layer.bias.astype(np.float64)
    name, given = inputs[layer.slot], inputs[layer.slot] in values
    if not given or sum(name in node.input for node in model.graph.node) > 1:
        name = name if given else f"{layer.weight}/bias"
        while name in values:
            name = f"{name}'"
        values[name] = model.graph.initializer.add()
        inputs[layer.slot] = name
        del layer.adds.input[:]
        layer.adds.input.extend(inputs)
    values[name].CopyFrom(numpy_helper.from_array((bias.reshape(-1) * factor + shift).astype(array.dtype), name))


def _layers(model: onnx.ModelProto) -> Iterator[_Layer]:
    """Yield the layers of the main graph that can be rescaled, in their order."""
    nodes = {node.output[0]: node for node in model.graph.node}
    for layer in layers(infer_shapes(ir.from_proto(model)).graph):
        node, outputs = layer.node, layer.outputs
        if layer.weight.dtype not in _FLOATS or outputs is None or not _alone(layer.weight, node):
            continue
        adds, slot = node, layer.form.bias
        if node.op_type == "MatMul":
            readers = list(node.outputs[0].uses())
            if len(layer.axes) != 2 or len(readers) != 1 or node.outputs[0].is_graph_output():
                continue
            adds, slot = readers[0][0], 1 - readers[0][1]
            if adds.op_type != "Add" or adds.domain:
                continue
        elif not _is_plain(layer):
            continue
        assert slot is not None
        given = adds.inputs[slot] if len(adds.inputs) > slot else None
        source = None if given is None else stored(given)
        bias = None
        if source is not None and source[0].const_value is not None:
            bias = np.asarray(source[0].const_value.numpy()).reshape(-1)
        size = (dimensions(layer.weight) or ())[outputs]
        if (given is None and adds is node) or (bias is not None and bias.shape == (size,) == _shape(given)):
            yield _Layer(nodes[str(adds.outputs[0].name)], slot, str(layer.weight.name), bias, outputs, layer.summed)


def _is_plain(layer: Layer) -> bool:
    """Return whether a layer adds its bias to the products of its weight as they are, in one group."""
    factors = [layer.node.attributes.get_float(name, 1.0) for name in ("alpha", "beta")]
    return factors == [1.0, 1.0] and (layer.node.op_type == "Conv" or layer.form.groups == 1)


def _shape(value: ir.Value | None) -> tuple[object, ...]:
    return () if value is None else tuple(dimensions(value) or ())


def _alone(weight: ir.Value, node: ir.Node) -> bool:
    """Return whether nothing but a layer reads its weight."""
    value = weight
    while not value.is_graph_output() and len(readers := list(value.uses())) == 1:
        if readers[0][0] is node:
            return True
        value = readers[0][0].outputs[0]
    return False


def _run(
    model: onnx.ModelProto,
    layers: Sequence[_Layer],
    feeds: Mapping[str, np.ndarray],
    wanted: Mapping[str, Statistics] | None = None,
) -> list[Statistics]:
    """Return the statistics of the layers' results; with wanted ones, each layer gets inputs that have these."""
    copy = _copied(model)
    graph = copy.graph
    of = {layer.result: layer for layer in layers}
    types = {tensor.name: tensor.data_type for tensor in graph.initializer}
    nodes = list(graph.node)
    del graph.node[:]
    del graph.output[:]
    for node in nodes:
        layer = of.get(node.output[0]) if node.output else None
        if layer is None:
            graph.node.append(node)
            continue
        graph.node.extend(_measuring(copy, node, layer, types[layer.weight], wanted))
    for name in of:
        for kind in ("mean", "spread"):
            graph.output.add().CopyFrom(helper.make_tensor_value_info(f"{name}/{kind}", TensorProto.FLOAT, None))
    flat = [array.astype(np.float64) for array in _outputs(copy, feeds)]
    return list(zip(flat[::2], flat[1::2], strict=True))


def _copied(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy that the operators of the measurement can be added to; names are the same."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    return upgrade_opset(copy, _OPSET)


def _outputs(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """Run a model; return its outputs as vectors."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = {value.name for value in session.get_inputs()}
    arrays = session.run(None, {name: array for name, array in feeds.items() if name in names})
    return [np.asarray(array).reshape(-1) for array in arrays]


@dataclass(frozen=True)
class _Measured:
    """A value whose channels are measured."""

    name: str
    reduced: tuple[int, ...] | None
    source: str | None = None

    def constant(self, model: onnx.ModelProto, kind: str, array: np.ndarray) -> str:
        """Add an initializer; return its name."""
        model.graph.initializer.append(numpy_helper.from_array(array, f"{self.name}/{kind}"))
        return f"{self.name}/{kind}"

    def nodes(self, model: onnx.ModelProto) -> list[onnx.NodeProto]:
        """Return nodes that compute name/mean and name/spread, and name/centred on the way."""
        name, wide = self.name, f"{self.name}/wide"
        found = [helper.make_node("Cast", [self.source or name], [wide], to=TensorProto.FLOAT)]
        table = wide
        if self.reduced is None:  # a matrix of rows and channels
            table = f"{name}/table"
            found.append(helper.make_node("Flatten", [wide], [table], axis=-1))
        return [
            *found,
            self._mean(model, table, f"{name}/mean"),
            helper.make_node("Sub", [table, f"{name}/mean"], [f"{name}/centred"]),
            helper.make_node("Mul", [f"{name}/centred", f"{name}/centred"], [f"{name}/squares"]),
            self._mean(model, f"{name}/squares", f"{name}/variance"),
            helper.make_node("Sqrt", [f"{name}/variance"], [f"{name}/spread"]),
        ]

    def _mean(self, model: onnx.ModelProto, source: str, target: str) -> onnx.NodeProto:
        axes = np.array([0] if self.reduced is None else self.reduced)
        listed = self.constant(model, f"{target.rpartition('/')[2]}/axes", axes)
        return helper.make_node("ReduceMean", [source, listed], [target], keepdims=1)


def _measuring(
    model: onnx.ModelProto,
    node: onnx.NodeProto,
    layer: _Layer,
    dtype: int,
    wanted: Mapping[str, Statistics] | None,
) -> list[onnx.NodeProto]:
    """Return the node with nodes behind it that measure its result, and that give it the wanted statistics."""
    name = layer.result
    value = _Measured(name, layer.reduced, f"{name}/raw")
    measured = onnx.NodeProto()
    measured.CopyFrom(node)
    measured.output[0] = f"{name}/raw"
    found = [measured, *value.nodes(model)]
    if wanted is None:
        return [*found, helper.make_node("Identity", [f"{name}/raw"], [name])]
    shape = [-1, *[1] * (len(layer.reduced) - 1)] if layer.reduced is not None else [-1]
    mean, spread = (array.astype(np.float32).reshape(shape) for array in wanted[name])
    small, low, high = (
        value.constant(model, f"bound{place}", np.array(bound, np.float32))
        for place, bound in enumerate((_SMALLEST, *_RANGE))
    )
    return [
        *found,
        helper.make_node("Max", [f"{name}/spread", small], [f"{name}/divisor"]),
        helper.make_node("Div", [value.constant(model, "wanted", spread), f"{name}/divisor"], [f"{name}/ratio"]),
        helper.make_node("Clip", [f"{name}/ratio", low, high], [f"{name}/factor"]),
        helper.make_node("Mul", [f"{name}/centred", f"{name}/factor"], [f"{name}/scaled"]),
        helper.make_node("Add", [f"{name}/scaled", value.constant(model, "centre", mean)], [f"{name}/moved"]),
        helper.make_node("Shape", [f"{name}/raw"], [f"{name}/sizes"]),
        helper.make_node("Reshape", [f"{name}/moved", f"{name}/sizes"], [f"{name}/back"]),
        helper.make_node("Cast", [f"{name}/back"], [name], to=dtype),
    ]
