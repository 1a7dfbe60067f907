"""Restore the mean and the spread of every layer's outputs after structures were removed from a model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto, numpy_helper

from onnxtrain.graph import Builder, Value
from onnxtrain.graph.layers import Layer, layers, stored
from onnxtrain.graph.shapes import infer_shapes
from onnxtrain.graph.value import dimensions
from onnxtrain.model_file.upgrade import upgrade_opset
from onnxtrain.runtime.turns import session_of_one_thread

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
    measured = _copied(model)
    made = {str(value.name): value for node in measured.graph for value in node.outputs}
    readers = layers(infer_shapes(ir.from_proto(model)).graph)
    reduced = {layer.x: layer.summed for layer in readers if layer.x in made and layer.x in names}
    op = Builder(measured.graph, _OPSET)
    spreads = [_statistics(op, made[name], axes).spread for name, axes in reduced.items()]
    return dict(zip(reduced, _outputs(measured, spreads, feeds), strict=True)) if spreads else {}


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
    measured = _copied(model)
    op, found = Builder(measured.graph, _OPSET), []
    values = {str(value.name): value for node in measured.graph for value in node.outputs}
    for layer in layers:
        value = values[layer.result]
        readers = list(value.uses())
        result = _statistics(op, value, layer.reduced)
        found += [result.mean, result.spread]
        if wanted is not None:
            shape = [-1, *[1] * (len(layer.reduced) - 1)] if layer.reduced is not None else [-1]
            mean, spread = (op.constant(array.astype(np.float32).reshape(shape)) for array in wanted[layer.result])
            least, low, high = (op.constant(np.float32(bound)) for bound in (_SMALLEST, *_RANGE))
            factor = op.Clip(spread / op.Max(result.spread, least), low, high)
            moved = op.Reshape(result.centred * factor + mean, op.Shape(op.wrap(value)))
            weight = measured.graph.initializers[layer.weight]
            corrected = op.Cast(moved, to=int(weight.dtype or ir.DataType.FLOAT))
            for node, index in readers:
                node.replace_input_with(index, corrected.ir)
    flat = [array.astype(np.float64) for array in _outputs(measured, found, feeds)]
    return list(zip(flat[::2], flat[1::2], strict=True))


class _Measured(NamedTuple):
    """Mean and standard deviation of the channels of a value, and the value without its mean."""

    mean: Value
    spread: Value
    centred: Value


def _statistics(op: Builder, value: ir.Value, reduced: Sequence[int] | None) -> _Measured:
    """Emit the statistics of a value over axes; of a matrix of rows and channels, over its rows."""
    table = op.Cast(op.wrap(value), to=int(ir.DataType.FLOAT))
    if reduced is None:
        table = op.Flatten(table, axis=-1)
    axes = op.ints(*(reduced or [0]))
    mean = op.ReduceMean(table, axes, keepdims=1)
    centred = table - mean
    return _Measured(mean, op.Sqrt(op.ReduceMean(centred * centred, axes, keepdims=1)), centred)


def _copied(model: onnx.ModelProto) -> ir.Model:
    """Return a copy that the operators of the measurement can be added to; names are the same."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    return ir.from_proto(upgrade_opset(copy, _OPSET))


def _outputs(model: ir.Model, values: Sequence[Value], feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """Compute some values of a model as vectors."""
    model.graph.outputs[:] = [value.ir for value in values]
    model.graph.sort()
    session = session_of_one_thread(ir.to_proto(model).SerializeToString())
    names = {value.name for value in session.get_inputs()}
    arrays = session.run(None, {name: array for name, array in feeds.items() if name in names})
    return [np.asarray(array).reshape(-1) for array in arrays]
