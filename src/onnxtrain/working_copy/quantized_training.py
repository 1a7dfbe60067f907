"""Quantization-aware training: integer weights of the file are trained as floats, together with their scales.

In a working copy an integer weight becomes a float w that is quantized as in the file, q = clip(round(w / s) + z), in
front of every reader. Gradients pass straight through the rounding. A learned scale is s = exp(l): l is the parameter,
so that s stays positive, and its gradient is multiplied by 1 / sqrt(n Q), with n the number of elements that share the
scale and Q the largest integer (LSQ: Esser et al., ICLR 2020). Zero points stay. The saved file holds integers and
scales.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff.rules.no_gradient import stopped
from onnxtrain.errors import OptionError
from onnxtrain.ir import Builder
from onnxtrain.ir.domains import MICROSOFT_DOMAIN
from onnxtrain.ir.value import constant_tensor, dimensions
from onnxtrain.weights.stored import Stored


@dataclass(frozen=True)
class ScaleLayout:
    """Layout of scales along a tensor.

    Attributes:
        axis: The axis with several scales.
        block: Elements along the axis that share a scale; 0 for one scale per index.
    """

    axis: int
    block: int = 0

    def along(self, scales: np.ndarray, shape: Sequence[int]) -> np.ndarray:
        """Reshape or repeat scales or zero points so that they broadcast to the tensor."""
        if scales.size == 1 and not self.block:
            return scales.reshape(())
        axis = self.axis % len(shape)
        if self.block:
            return np.repeat(scales, self.block, axis=axis).take(np.arange(shape[axis]), axis=axis)
        return scales.reshape([-1 if index == axis else 1 for index in range(len(shape))])


@dataclass(frozen=True)
class QuantizationScale:
    """A scale of the file, which may be trained as the exponential of a parameter."""

    name: str
    tensor: ir.TensorProtocol

    def learned(self, trained: Collection[str]) -> bool:
        """Return whether it is trained."""
        return logarithm(self.name) in trained


@dataclass(frozen=True)
class Scales:
    """Compute the file's scales from logarithms; the scale of a bias is the product of two.

    Attributes:
        tensor: The scales of the file; a scale keeps its bits as long as its logarithms are the first ones.
        first: The trained factors of the file.
        constant: Further factors that are not trained.
    """

    tensor: ir.TensorProtocol
    first: Sequence[ir.TensorProtocol]
    constant: Sequence[np.ndarray] = ()

    def __call__(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """Return the scales for these logarithms."""
        own = np.asarray(self.tensor.numpy())
        product, unchanged = np.ones((), own.dtype), np.ones((), bool)
        for factor in (*map(np.exp, arrays), *self.constant):
            product = product * factor
        for array, first in zip(arrays, self.first, strict=True):
            unchanged = unchanged & (array == logarithms_of(first))
        changed = np.asarray(product, own.dtype)
        kept = np.broadcast_to(unchanged, changed.shape).reshape(own.shape)
        return np.where(kept, own, changed.reshape(own.shape))


def logarithms_of(scales: ir.TensorProtocol) -> np.ndarray:
    """Return the first values of the parameter for scales."""
    found: np.ndarray = np.log(np.asarray(scales.numpy()))
    return found


@dataclass(frozen=True)
class Integers:
    """Quantize a float weight, the first array, with the logarithms of its scales, the other arrays.

    Attributes:
        layout: Layout of the scales.
        dtype: Type of the integers.
        zeros: The zero points.
        scales: Computes the scales.
        weight: Returns the float weight if it is not trained.
    """

    layout: ScaleLayout
    dtype: ir.DataType
    zeros: np.ndarray | None
    scales: Scales
    weight: Callable[[], np.ndarray] | None = None

    def __call__(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """Return the integers."""
        w, logarithms = (arrays[0], arrays[1:]) if self.weight is None else (self.weight(), arrays)
        steps = np.round(w.astype(np.float32) / self.layout.along(self.scales(logarithms), w.shape)).astype(np.float64)
        if self.zeros is not None:
            steps = steps + self.layout.along(self.zeros, w.shape).astype(np.float64)
        clipped: np.ndarray = np.clip(steps, float(self.dtype.min), float(self.dtype.max))
        return clipped.astype(self.dtype.numpy())


@dataclass(frozen=True)
class QuantizedWeight:
    """An integer weight of the file that is a float in the working copy.

    Attributes:
        name: Name of the initializer.
        integers: The tensor of the file.
        dequantize: Computes the float weight.
        made: The value that replaces the integers for their readers.
        layout: Layout of its scales.
        zeros: Its zero points.
        scale: Its scale.
        factors: Factors of the scale: itself, or for a bias the scales of the operands of its layer.
    """

    name: str
    integers: ir.TensorProtocol
    dequantize: Callable[[], np.ndarray]
    made: ir.Value
    layout: ScaleLayout
    zeros: np.ndarray | None
    scale: QuantizationScale
    factors: tuple[QuantizationScale, ...]

    @property
    def is_bias(self) -> bool:
        """True for an int32 bias."""
        return self.integers.dtype == ir.DataType.INT32

    def stored(self, trained: Collection[str]) -> list[Stored]:
        """Return how the file's initializers are computed."""
        own_factors = [scale for scale in self.factors if scale.learned(trained)]
        learned = tuple(logarithm(scale.name) for scale in own_factors)
        constant = [np.asarray(scale.tensor.numpy()) for scale in self.factors if not scale.learned(trained)]
        scales = Scales(self.scale.tensor, [scale.tensor for scale in own_factors], constant)
        own: tuple[str, ...] = (self.name,)
        form = Integers(self.layout, self.integers.dtype, self.zeros, scales)
        if self.name not in trained:
            if not (self.is_bias and learned):
                return []
            own, form = (), replace(form, weight=self.dequantize)
        found = [Stored(self.name, (*own, *learned), form)]
        if self.is_bias and learned:
            found.append(Stored(self.scale.name, learned, scales))
        return found


def logarithm(scale: str) -> str:
    """Return the name of the parameter whose exponential is a scale."""
    return f"{scale}.log"


_WEIGHTS = {
    ("", "DequantizeLinear"): (0, 1, 2),
    (MICROSOFT_DOMAIN, "DequantizeLinear"): (0, 1, 2),
    ("", "QLinearMatMul"): (3, 4, 5),
    ("", "QLinearConv"): (3, 4, 5),
    (MICROSOFT_DOMAIN, "DynamicQuantizeMatMul"): (1, 2, 3),
    (MICROSOFT_DOMAIN, "MatMulIntegerToFloat"): (1, 3, 5),
}
"""Input slots of a quantized weight, its scale and its zero point."""

_AXES = {"QLinearMatMul": -1, "QLinearConv": 0, "DynamicQuantizeMatMul": -1, "MatMulIntegerToFloat": -1}
"""Axis of a weight's scales for operators without an attribute for it."""

_INTEGER_LAYERS = {"MatMulInteger": -1, "ConvInteger": 0}
"""Integer operators, whose result is multiplied by the scales, and the axis of their weights' scales."""

_SCALES = {
    **dict.fromkeys(("QuantizeLinear", "DequantizeLinear"), (1,)),
    **dict.fromkeys(("QLinearMatMul", "QLinearConv"), (1, 4, 6)),
    "DynamicQuantizeMatMul": (2,),
    "MatMulIntegerToFloat": (2, 3),
}
"""Input slots of scales."""

_SMALL = frozenset({ir.DataType.INT8, ir.DataType.UINT8, ir.DataType.INT4, ir.DataType.UINT4, ir.DataType.INT16})
_SMALL |= {ir.DataType.UINT16, ir.DataType.INT2, ir.DataType.UINT2}


@dataclass
class QuantizedTraining:
    """Changes of a working copy for quantization-aware training.

    Attributes:
        weights: Integer weights that are floats now.
        scales: Trained scales of the file by name.
        made: The values that replace these scales.
    """

    weights: list[QuantizedWeight] = field(default_factory=list)
    scales: dict[str, ir.TensorProtocol] = field(default_factory=dict)
    made: dict[str, ir.Value] = field(default_factory=dict)

    @property
    def learned(self) -> list[str]:
        """Initializers of the working copy that are parameters whatever their use and name."""
        return [*(weight.name for weight in self.weights), *map(logarithm, self.scales)]

    def keep_frozen(self, model: ir.Model, trained: Collection[str]) -> None:
        """Restore the file's integers of weights that are not trained, in place."""
        for weight in self.weights:
            if weight.name not in trained and not weight.is_bias:
                value = ir.Value(name=f"{weight.name}.integers", const_value=weight.integers)
                value.dtype, value.shape = weight.integers.dtype, ir.Shape(weight.integers.shape.numpy())
                model.graph.register_initializer(value)
                weight.made.replace_all_uses_with(value)
        for name, tensor in self.scales.items():
            if logarithm(name) not in trained:
                value = ir.Value(name=name, const_value=tensor)
                value.dtype, value.shape = tensor.dtype, ir.Shape(tensor.shape.numpy())
                model.graph.register_initializer(value)
                self.made[name].replace_all_uses_with(value)

    def stored(self, trained: Collection[str]) -> list[Stored]:
        """Return how the file's weights and scales are computed."""
        found = [item for weight in self.weights for item in weight.stored(trained)]
        for name, tensor in self.scales.items():
            if logarithm(name) in trained:
                found.append(Stored(name, (logarithm(name),), Scales(tensor, [tensor])))
        return found


def train_quantized(model: ir.Model) -> QuantizedTraining:
    """Replace integer weights of a working copy by floats, and scales by logarithms, in place.

    Requires: a sorted graph with types. Ensures: the same results, up to the rounding of a scale.

    Raises:
        OptionError: The model has no trainable quantized weight.
    """
    found = QuantizedTraining()
    graph = model.graph
    for node in list(graph):
        _make_trainable(graph, node, found)
    for name, uses in _learnable_scales(graph, {weight.scale.name for weight in found.weights}).items():
        _make_scale_trainable(graph, name, uses, found)
    for weight in found.weights:
        if weight.is_bias:
            _round_bias(graph, weight, found)
    if not found.weights and not found.scales:
        raise OptionError(
            "qat=True, but the model has no integer weight that DequantizeLinear, a QLinear operator or "
            "MatMulInteger reads; make one with onnxtrain.quantize(model, calibration), or train without qat."
        )
    return found


def _make_trainable(graph: ir.Graph, node: ir.Node, found: QuantizedTraining) -> None:
    """Quantize a float weight for a node that reads an integer weight."""
    read = _weight_of(node)
    if read is None or _is_number(node):
        return
    slot, scale, zero, layout = read
    value = node.inputs[slot]
    assert value is not None
    tensor, scales = value.const_value, scale.const_value
    if not _is_own(graph, value) or tensor is None or scales is None or len(value.uses()) != 1:
        return
    zeros = None if zero is None else constant_tensor(zero)
    if (zero is not None and zeros is None) or not (np.asarray(scales.numpy()) > 0).all():
        return
    points = None if zeros is None else np.asarray(zeros.numpy())
    name, shape = str(value.name), tensor.shape.numpy()
    given = np.asarray(scales.numpy())
    if tensor.dtype == ir.DataType.INT32:
        _make_bias_float(graph, node, value, layout, found)
        return
    if tensor.dtype not in _SMALL or (layout.block and scales.shape.rank() != len(shape)):
        return

    def dequantize() -> np.ndarray:
        integers = np.asarray(tensor.numpy()).astype(np.float32)
        shift = np.float32(0) if points is None else layout.along(points.astype(np.float32), shape)
        return np.asarray((integers - shift) * layout.along(given.astype(np.float32), shape))

    op = Builder(graph, graph.opset_imports[""], before=node)
    _become_float(value, dequantize)
    if zero is None:
        zero = op.constant(np.zeros(scales.shape.numpy(), tensor.dtype.numpy())).ir
    several = scales.size > 1 or bool(layout.block)
    axis = layout.axis % max(len(shape), 1) if several else None
    domain = node.domain if node.op_type == "DequantizeLinear" else ""
    operands = op.wrap(value), op.wrap(scale), op.wrap(zero)
    made = op.QuantizeLinear(*operands, domain=domain, axis=axis, block_size=layout.block or None)
    made.ir.dtype = tensor.dtype
    made.with_shape(tuple(shape))
    node.replace_input_with(slot, made.ir)
    own = QuantizationScale(str(scale.name), scales)
    found.weights.append(QuantizedWeight(name, tensor, dequantize, made.ir, layout, points, own, (own,)))


def _become_float(value: ir.Value, compute: Callable[[], np.ndarray]) -> None:
    """Replace an initializer by a lazily computed float tensor."""
    tensor = value.const_value
    assert tensor is not None
    shape = ir.Shape(tensor.shape.numpy())

    def read() -> ir.TensorProtocol:
        return ir.tensor(compute().astype(np.float32), name=value.name)

    value.const_value = ir.LazyTensor(read, dtype=ir.DataType.FLOAT, shape=shape, name=value.name)
    value.type = ir.TensorType(ir.DataType.FLOAT)


def _make_bias_float(
    graph: ir.Graph, node: ir.Node, value: ir.Value, layout: ScaleLayout, found: QuantizedTraining
) -> None:
    """Replace an int32 bias by a float; :func:`_round_bias` rounds it."""
    tensor, scale = value.const_value, node.inputs[1]
    if node.op_type != "DequantizeLinear" or tensor is None or scale is None or scale.const_value is None:
        return
    given, shape = scale.const_value, tensor.shape.numpy()

    def dequantize() -> np.ndarray:
        along = layout.along(np.asarray(given.numpy()).astype(np.float64), shape)
        return np.asarray(np.asarray(tensor.numpy()) * along, np.float32)

    own = QuantizationScale(str(scale.name), given)
    factors = _scales_of_operands(node) or (own,)
    _become_float(value, dequantize)
    node.outputs[0].replace_all_uses_with(value)
    graph.remove(node, safe=True)
    found.weights.append(QuantizedWeight(str(value.name), tensor, dequantize, value, layout, None, own, factors))


def _round_bias(graph: ir.Graph, bias: QuantizedWeight, found: QuantizedTraining) -> None:
    """Round a bias to multiples of its scale for its readers, as the file does; gradients pass straight through."""
    readers = list(bias.made.uses())
    if not readers:
        return
    op = Builder(graph, graph.opset_imports[""], before=readers[0][0])
    names = [scale.name for scale in bias.factors]
    factors = [op.wrap(found.made[name] if name in found.made else graph.initializers[name]) for name in names]
    step, b = math.prod(factors[1:], start=factors[0]), op.wrap(bias.made)
    rounded = stopped(op, (op.Round(b / step) * step).with_shape(b.shape))
    y = (rounded + (b - stopped(op, b))).with_shape(b.shape)
    for node, slot in readers:
        node.replace_input_with(slot, y.ir)


def _scales_of_operands(node: ir.Node) -> tuple[QuantizationScale, ...]:
    """Return the scales of the operands of a bias's layer, whose product is the scale of the bias."""
    readers = [(reader, slot) for reader, slot in node.outputs[0].uses()]
    if len(readers) != 1 or readers[0][1] != 2 or readers[0][0].op_type not in ("Conv", "Gemm"):
        return ()
    found = []
    for value in readers[0][0].inputs[:2]:
        producer = None if value is None else value.producer()
        scale = producer.inputs[1] if producer is not None and producer.op_type == "DequantizeLinear" else None
        if scale is None or scale.const_value is None:
            return ()
        found.append(QuantizationScale(str(scale.name), scale.const_value))
    return tuple(found)


def _weight_of(node: ir.Node) -> tuple[int, ir.Value, ir.Value | None, ScaleLayout] | None:
    """Return the slot of a node's weight, its scale, its zero point and their layout."""
    if node.op_type in _INTEGER_LAYERS and not node.domain:
        scale = _scale_behind(node)
        zero = node.inputs[3] if len(node.inputs) > 3 else None
        return None if scale is None else (1, scale, zero, ScaleLayout(_INTEGER_LAYERS[node.op_type]))
    slots = _WEIGHTS.get((node.domain, node.op_type))
    if slots is None:
        return None
    given = [node.inputs[slot] if slot < len(node.inputs) else None for slot in slots]
    if given[0] is None or given[1] is None or not given[1].is_initializer():
        return None
    axis = node.attributes["axis"].as_int() if "axis" in node.attributes else _AXES.get(node.op_type, 1)
    block = node.attributes["block_size"].as_int() if "block_size" in node.attributes else 0
    return slots[0], given[1], given[2], ScaleLayout(axis, block)


def _scale_behind(node: ir.Node) -> ir.Value | None:
    """Return the weight's scale of an integer operator: after a Cast, a product of two scales, one of them constant."""
    value = node.outputs[0]
    for operator in ("Cast", "Mul"):
        readers = [reader for reader, _ in value.uses()]
        if len(readers) != 1 or readers[0].op_type != operator:
            return None
        last, value = value, readers[0].outputs[0]
    others = [operand for operand in readers[0].inputs if operand is not last]
    product = None if len(others) != 1 or others[0] is None else others[0].producer()
    if product is None or product.op_type != "Mul":
        return None
    constants = [operand for operand in product.inputs if operand is not None and operand.is_initializer()]
    return constants[0] if len(constants) == 1 else None


def _is_own(graph: ir.Graph, value: ir.Value) -> bool:
    return value.is_initializer() and graph.initializers.get(str(value.name)) is value and not value.is_graph_output()


def _is_number(node: ir.Node) -> bool:
    """Return whether a node dequantizes a scalar of the computation, such as the 0.5 of tanh(z) / 2 + 0.5."""
    value = node.inputs[0] if node.op_type == "DequantizeLinear" else None
    return value is not None and value.const_value is not None and not value.const_value.shape.rank()


_Uses = list[tuple[ir.Node, int]]


def _learnable_scales(graph: ir.Graph, of_weights: Collection[str]) -> dict[str, _Uses]:
    """Return trainable scales by name: initializers that are only scales, or a weight's scale and an operand of Mul."""
    found: dict[str, _Uses] = {}
    for name, value in graph.initializers.items():
        uses: _Uses = [(node, slot) for node, slot in value.uses()]
        tensor = value.const_value
        if not uses or tensor is None or value.dtype != ir.DataType.FLOAT or value.is_graph_output():
            continue
        others = [node.op_type for node, slot in uses if slot not in _SCALES.get(node.op_type, ())]
        known = not others or (name in of_weights and set(others) == {"Mul"})
        if known and not all(_is_number(node) for node, _ in uses) and (np.asarray(tensor.numpy()) > 0).all():
            found[name] = uses
    return found


def _make_scale_trainable(graph: ir.Graph, name: str, uses: _Uses, found: QuantizedTraining) -> None:
    """Replace a scale by the exponential of a parameter."""
    value = graph.initializers[name]
    tensor = value.const_value
    assert tensor is not None
    found.scales[name] = tensor
    op = Builder(graph, graph.opset_imports[""], before=next(iter(graph)))
    del graph.initializers[name]
    parameter = ir.Value(name=logarithm(name), type=value.type, shape=value.shape)
    parameter.const_value = ir.tensor(logarithms_of(tensor), name=logarithm(name))
    graph.register_initializer(parameter)
    scale = op.Exp(op.wrap(parameter)).with_shape(tuple(tensor.shape.numpy()))
    factor = _gradient_factor(uses, tensor.size)
    if factor < 1:
        part = scale * factor
        scale = (stopped(op, scale) + (part - stopped(op, part))).with_shape(scale.shape)  # of the same bits
    for node, slot in uses:
        node.replace_input_with(slot, scale.ir)
    found.made[name] = scale.ir


def _gradient_factor(uses: _Uses, scales: int) -> float:
    """Return 1 / sqrt(n Q), with n elements per example that share a scale, and Q the largest integer."""
    node = next((node for node, _ in uses if node.op_type == "QuantizeLinear"), uses[0][0])
    quantized = node.outputs[0] if node.op_type == "QuantizeLinear" else node.inputs[0]
    x = node.inputs[0]
    sizes = () if x is None else dimensions(x) or ()
    known = math.prod(size for size in sizes if isinstance(size, int))
    most = 127.0 if quantized is None or quantized.dtype is None else float(quantized.dtype.max)
    return 1 / math.sqrt(max(known / scales, 1) * most)
