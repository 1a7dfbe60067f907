"""Quantization-aware training: integer weights of the file are trained as floats, together with their scales.

In a working copy an integer weight becomes a float w that is quantized as in the file, q = clip(round(w / s) + z), in
front of every reader. Gradients pass straight through the rounding. A learned scale is s = ±exp(l): l is the parameter,
so that s keeps its sign, and its gradient is multiplied by 1 / sqrt(n Q), with n the number of elements that share the
scale and Q the largest integer (LSQ: Esser et al., ICLR 2020). Zero points stay. The saved file holds integers and
scales.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff.rules.no_gradient import stopped
from onnxtrain.errors import OptionError
from onnxtrain.graph import Builder
from onnxtrain.graph.domains import MICROSOFT_DOMAIN
from onnxtrain.graph.layers import reads_transposed
from onnxtrain.graph.value import constant_tensor, dimensions
from onnxtrain.parameters.readers import INTEGERS, SCALE, arrivals, use_of
from onnxtrain.parameters.stored import Stored


@dataclass(frozen=True)
class ScaleLayout:
    """Layout of scales along a tensor."""

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
    """Compute the file's scales from logarithms; the scale of a bias is the product of two."""

    tensor: ir.TensorProtocol
    first: Sequence[ir.TensorProtocol]
    constant: Sequence[np.ndarray] = ()

    def __call__(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """Return the scales for these logarithms."""
        own = np.asarray(self.tensor.numpy())
        product, unchanged = np.ones((), own.dtype), np.ones((), bool)
        signed = (np.sign(np.asarray(first.numpy())) * np.exp(a) for first, a in zip(self.first, arrays, strict=True))
        for factor in (*signed, *self.constant):
            product = product * factor
        for array, first in zip(arrays, self.first, strict=True):
            unchanged = unchanged & (array == logarithms_of(first))
        changed = np.asarray(product, own.dtype)
        kept = np.broadcast_to(unchanged, changed.shape).reshape(own.shape)
        return np.where(kept, own, changed.reshape(own.shape))


def logarithms_of(scales: ir.TensorProtocol) -> np.ndarray:
    """Return the first values of the parameter for scales."""
    magnitudes = np.abs(np.asarray(scales.numpy()))
    found: np.ndarray = np.log(np.where(magnitudes > 0, magnitudes, 1))
    return found


@dataclass(frozen=True)
class Integers:
    """Quantize a float weight, the first array, with the logarithms of its scales, the other arrays."""

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
    """An integer weight of the file that is a float in the working copy."""

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
        if self.is_bias and learned and self.scale.name:
            found.append(Stored(self.scale.name, learned, scales))
        return found


def logarithm(scale: str) -> str:
    """Return the name of the parameter whose exponential is a scale."""
    return f"{scale}.log"


_WEIGHTS: Mapping[tuple[str, str], Sequence[tuple[int, int | None, int]]] = {
    ("", "DequantizeLinear"): ((0, 1, 2),),
    (MICROSOFT_DOMAIN, "DequantizeLinear"): ((0, 1, 2),),
    ("", "QLinearMatMul"): ((0, 1, 2), (3, 4, 5)),
    ("", "QLinearConv"): ((3, 4, 5),),
    ("", "MatMulInteger"): ((0, None, 2), (1, None, 3)),
    ("", "ConvInteger"): ((1, None, 3),),
    (MICROSOFT_DOMAIN, "QGemm"): ((3, 4, 5),),
    (MICROSOFT_DOMAIN, "QLinearAdd"): ((0, 1, 2), (3, 4, 5)),
    (MICROSOFT_DOMAIN, "QLinearMul"): ((0, 1, 2), (3, 4, 5)),
    (MICROSOFT_DOMAIN, "DynamicQuantizeMatMul"): ((1, 2, 3),),
    (MICROSOFT_DOMAIN, "MatMulIntegerToFloat"): ((0, 2, 4), (1, 3, 5)),
}
"""Input slots of quantized weights, their scales (``None`` if they are multiplied later) and their zero points."""

_AXES = {"QLinearConv": 0, "ConvInteger": 0, "DequantizeLinear": 1}
"""Axis of a weight's scales for operators without an attribute for it, the last one by default."""

_STEPS_OF_SCALES = {
    ("", "QLinearMatMul"): {1: 0, 4: 3},
    ("", "QLinearConv"): {1: 0, 4: 3},
    (MICROSOFT_DOMAIN, "QGemm"): {1: 0, 4: 3},
    (MICROSOFT_DOMAIN, "QLinearAdd"): {1: 0, 4: 3},
    (MICROSOFT_DOMAIN, "QLinearMul"): {1: 0, 4: 3},
    (MICROSOFT_DOMAIN, "MatMulIntegerToFloat"): {2: 0, 3: 1},
    (MICROSOFT_DOMAIN, "DynamicQuantizeMatMul"): {2: 1},
}
"""Input slots of scales with the slots of the integers that they scale."""


@dataclass
class QuantizedTraining:
    """Changes of a working copy for quantization-aware training."""

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
    """
    found = QuantizedTraining()
    graph = model.graph
    sites: dict[ir.Value, list[_Site]] = {}
    for node in graph:
        _make_operand_float(graph, node, found)
        for site in _sites(graph, node):
            sites.setdefault(site.weight, []).append(site)
    for weight, own in sites.items():
        readers = {(site.node, site.slot) for site in own}
        if readers == set(weight.uses()) and len({(site.scale, site.zero, site.layout) for site in own}) == 1:
            _make_trainable(graph, own, found)
    for name, uses in _learnable_scales(graph).items():
        _make_scale_trainable(graph, name, uses, found)
    for quantized in found.weights:
        if quantized.is_bias:
            _round_bias(graph, quantized, found)
    if not found.weights and not found.scales:
        raise OptionError(
            "qat=True, but the model has no integer weight that DequantizeLinear, a QLinear operator or "
            "MatMulInteger reads; make one with onnxtrain.quantize(model, calibration), or train without qat."
        )
    return found


@dataclass(frozen=True)
class _Site:
    """A node that reads an integer weight."""

    weight: ir.Value
    node: ir.Node
    slot: int
    reader: ir.Node
    scale: ir.Value
    zero: ir.Value | None
    layout: ScaleLayout


def _sites(graph: ir.Graph, node: ir.Node) -> Iterator[_Site]:
    """Yield the integer weights that a node reads, directly or as rows of an embedding."""
    for slot, scale_slot, zero_slot in _WEIGHTS.get((node.domain, node.op_type), ()):
        first, at = node, slot
        value = _input(node, slot)
        while value is not None and (producer := value.producer()) is not None and producer.op_type in _LOOKUPS:
            first, at, value = producer, 0, producer.inputs[0]
        if value is None or not _is_own(graph, value):
            continue
        scale = _scale_behind(node, value) if scale_slot is None else _input(node, scale_slot)
        if scale is None or not scale.is_initializer() or scale.const_value is None:
            continue
        if first is not node and scale.const_value.size > 1:
            continue  # the axes of the scales are those of the rows
        by_default = 0 if reads_transposed(node) else _AXES.get(node.op_type, -1)
        axis = node.attributes.get_int("axis", by_default)
        block = node.attributes.get_int("block_size", 0)
        yield _Site(value, first, at, node, scale, _input(node, zero_slot), ScaleLayout(axis, block))


_LOOKUPS = frozenset({"Gather", "Identity", "Reshape", "Squeeze", "Unsqueeze", "Transpose"})
"""Operators between an integer weight with one scale and the node that reads its rows."""


def _input(node: ir.Node, slot: int) -> ir.Value | None:
    return node.inputs[slot] if slot < len(node.inputs) else None


def _make_trainable(graph: ir.Graph, sites: Sequence[_Site], found: QuantizedTraining) -> None:
    """Quantize a float weight for the nodes that read an integer weight."""
    site = sites[0]
    value, zero, layout, node = site.weight, site.zero, site.layout, site.reader
    tensor, scales = value.const_value, site.scale.const_value
    assert scales is not None
    zeros = None if zero is None else constant_tensor(zero)
    given = np.asarray(scales.numpy())
    if tensor is None or (zero is not None and zeros is None) or not given.all() or _is_number(node):
        return
    points = None if zeros is None else np.asarray(zeros.numpy())
    name, shape = str(value.name), tensor.shape.numpy()
    if tensor.dtype == ir.DataType.INT32 and len(sites) == 1:
        if node.op_type == "DequantizeLinear":
            own = QuantizationScale(str(site.scale.name), scales)
            factors = _scales_of_operands(node) or (own,)
            node.outputs[0].replace_all_uses_with(value)
            graph.remove(node, safe=True)
            _make_bias_float(value, layout, own, factors, found)
        return
    if tensor.dtype not in INTEGERS or (layout.block and scales.shape.rank() != len(shape)):
        return

    def dequantize() -> np.ndarray:
        integers = np.asarray(tensor.numpy()).astype(np.float32)
        shift = np.float32(0) if points is None else layout.along(points.astype(np.float32), shape)
        return np.asarray((integers - shift) * layout.along(given.astype(np.float32), shape))

    op = Builder(graph, graph.opset_imports[""], before=site.node)
    _become_float(value, dequantize)
    if zero is None:
        zero = op.constant(np.zeros(scales.shape.numpy(), tensor.dtype.numpy())).ir
    several = scales.size > 1 or bool(layout.block)
    axis = layout.axis % max(len(shape), 1) if several else None
    domain = node.domain if node.op_type == "DequantizeLinear" else ""
    operands = op.wrap(value), op.wrap(site.scale), op.wrap(zero)
    made = op.QuantizeLinear(*operands, domain=domain, axis=axis, block_size=layout.block or None)
    made.ir.dtype = tensor.dtype
    made.with_shape(tuple(shape))
    for each in sites:
        each.node.replace_input_with(each.slot, made.ir)
    own = QuantizationScale(str(site.scale.name), scales)
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
    value: ir.Value,
    layout: ScaleLayout,
    scale: QuantizationScale,
    factors: Sequence[QuantizationScale],
    found: QuantizedTraining,
) -> None:
    """Replace an int32 bias by a float; :func:`_round_bias` rounds it."""
    tensor = value.const_value
    assert tensor is not None
    shape = tensor.shape.numpy()

    def dequantize() -> np.ndarray:
        along = layout.along(np.asarray(scale.tensor.numpy()).astype(np.float64), shape)
        return np.asarray(np.asarray(tensor.numpy()) * along, np.float32)

    _become_float(value, dequantize)
    weight = QuantizedWeight(str(value.name), tensor, dequantize, value, layout, None, scale, tuple(factors))
    found.weights.append(weight)


_BIASES = {("", "QLinearConv"): 8, (MICROSOFT_DOMAIN, "QGemm"): 6}
"""Input slots of int32 biases in units of the product of the scales in slots 1 and 4."""


def _make_operand_float(graph: ir.Graph, node: ir.Node, found: QuantizedTraining) -> None:
    """Replace the int32 bias of an operator on integers by a float."""
    slot = _BIASES.get((node.domain, node.op_type))
    value = None if slot is None else _input(node, slot)
    if value is None or value.const_value is None or not _is_own(graph, value) or len(value.uses()) != 1:
        return
    factors = [_scale(_input(node, own)) for own in (1, 4)]
    given = [factor for factor in factors if factor is not None]
    if len(given) < len(factors) or node.attributes.get_float("alpha", 1.0) != 1:
        return
    step = math.prod(np.asarray(one.tensor.numpy()).reshape(-1) for one in given)
    if np.all(step):
        _make_bias_float(value, ScaleLayout(0), QuantizationScale("", ir.tensor(np.asarray(step))), given, found)


def _scale(value: ir.Value | None) -> QuantizationScale | None:
    return None if value is None or value.const_value is None else QuantizationScale(str(value.name), value.const_value)


def _round_bias(graph: ir.Graph, bias: QuantizedWeight, found: QuantizedTraining) -> None:
    """Round a bias to multiples of its scale for its readers, as the file does; gradients pass straight through."""
    readers = list(bias.made.uses())
    if not readers:
        return
    op = Builder(graph, graph.opset_imports[""], before=readers[0][0])
    names = [scale.name for scale in bias.factors]
    factors = [op.wrap(found.made[name] if name in found.made else graph.initializers[name]) for name in names]
    step = stopped(op, math.prod(factors[1:], start=factors[0]))
    y = op.Round(op.wrap(bias.made) / step)
    y = (y * step if bias.scale.name else op.cast(y, ir.DataType.INT32)).with_shape(dimensions(bias.made))
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
        scale = _scale(producer.inputs[1]) if producer is not None and producer.op_type == "DequantizeLinear" else None
        if scale is None:
            return ()
        found.append(scale)
    return tuple(found)


def _scale_behind(node: ir.Node, weight: ir.Value) -> ir.Value | None:
    """Return a weight's scale that multiplies the result of an integer operator, behind a Cast."""
    readers = arrivals(node.outputs[0])
    if len(readers) != 1 or readers[0][0].op_type != "Mul":
        return None
    mul, index = readers[0]
    waiting, constants = [mul.inputs[1 - index]], []
    while waiting:
        value = waiting.pop()
        producer = None if value is None else value.producer()
        if value is not None and value.is_initializer() and value.const_value is not None:
            constants.append(value)
        elif producer is not None and producer.op_type == "Mul":
            waiting += producer.inputs
    if len(constants) > _OPERANDS:
        return None

    def likeness(value: ir.Value) -> tuple[bool, int]:
        several = value.const_value is not None and value.const_value.size > 1
        pairs = enumerate(zip(str(value.name), str(weight.name), strict=False))
        return several, next((at for at, (one, other) in pairs if one != other), len(str(weight.name)))

    return max(constants, key=likeness, default=None)


_OPERANDS = 2


def _is_own(graph: ir.Graph, value: ir.Value) -> bool:
    return value.is_initializer() and graph.initializers.get(str(value.name)) is value and not value.is_graph_output()


def _is_number(node: ir.Node) -> bool:
    """Return whether a node dequantizes a scalar of the computation, such as the 0.5 of tanh(z) / 2 + 0.5."""
    value = node.inputs[0] if node.op_type == "DequantizeLinear" else None
    return value is not None and value.const_value is not None and not value.const_value.shape.rank()


_Uses = list[tuple[ir.Node, int]]


def _learnable_scales(graph: ir.Graph) -> dict[str, _Uses]:
    """Return trainable scales by name: initializers that are scales for all of their readers."""
    found: dict[str, _Uses] = {}
    for name, value in graph.initializers.items():
        uses: _Uses = list(value.uses())
        if not uses or value.const_value is None or value.dtype != ir.DataType.FLOAT or value.is_graph_output():
            continue
        if {use_of(reader) for reader in arrivals(value)} == {SCALE} and not all(_is_number(node) for node, _ in uses):
            found[name] = uses
    return found


def _make_scale_trainable(graph: ir.Graph, name: str, uses: _Uses, found: QuantizedTraining) -> None:
    """Replace a scale by the exponential of a parameter, with the sign of the file."""
    value = graph.initializers[name]
    tensor = value.const_value
    assert tensor is not None
    found.scales[name] = tensor
    op = Builder(graph, graph.opset_imports[""], before=next(iter(graph)))
    factor = _gradient_factor(value, found.weights)
    del graph.initializers[name]
    parameter = ir.Value(name=logarithm(name), type=value.type, shape=value.shape)
    parameter.const_value = ir.tensor(logarithms_of(tensor), name=logarithm(name))
    graph.register_initializer(parameter)
    scale = op.Exp(op.wrap(parameter)).with_shape(tuple(tensor.shape.numpy()))
    signs = np.sign(np.asarray(tensor.numpy()))
    if not (signs > 0).all():
        scale = (scale * op.constant(signs, scale.dtype)).with_shape(scale.shape)
    if factor < 1:
        part = scale * factor
        scale = (stopped(op, scale) + (part - stopped(op, part))).with_shape(scale.shape)  # of the same bits
    for node, slot in uses:
        node.replace_input_with(slot, scale.ir)
    found.made[name] = scale.ir


def _gradient_factor(scale: ir.Value, weights: Sequence[QuantizedWeight]) -> float:
    """Return 1 / sqrt(n Q), with n elements per example that share a scale, and Q the largest integer."""
    assert scale.const_value is not None
    own = next((weight for weight in weights if weight.scale.name == scale.name and not weight.is_bias), None)
    if own is not None:
        count, most = own.integers.size, float(own.integers.dtype.max)
    else:
        count, most = _scaled_elements(arrivals(scale))
    return 1 / math.sqrt(max(count / scale.const_value.size, 1) * most)


def _scaled_elements(readers: _Uses) -> tuple[int, float]:
    """Return how many elements a scale that is not a trained weight's belongs to, and their largest integer."""
    node, slot = next(((node, slot) for node, slot in readers if node.op_type == "QuantizeLinear"), readers[0])
    if (bits := node.attributes.get("bits")) is not None or node.op_type in ("MatMulNBits", "GatherBlockQuantized"):
        width = 4 if bits is None else bits.as_int()
        packed = node.inputs[0 if node.op_type == "GatherBlockQuantized" else 1]
        sizes = () if packed is None else dimensions(packed) or ()
        count = math.prod(size for size in sizes if isinstance(size, int))
        is_packed = packed is not None and packed.dtype == ir.DataType.UINT8
        return count * (8 // width if is_packed else 1), float((1 << (width - 1)) - 1)
    integers: ir.Value | None = node.outputs[0]
    if node.op_type == "DequantizeLinear":
        integers = node.inputs[0]
    elif (node.domain, node.op_type) in _STEPS_OF_SCALES:
        at = _STEPS_OF_SCALES[node.domain, node.op_type].get(slot)
        integers = node.outputs[0] if at is None else node.inputs[at]
    known = [size for size in (() if integers is None else dimensions(integers) or ()) if isinstance(size, int)]
    dtype = None if integers is None else integers.dtype
    return math.prod(known), float(dtype.max) if dtype in INTEGERS and dtype is not None else 127.0
