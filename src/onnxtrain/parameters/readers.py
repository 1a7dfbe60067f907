"""Find the nodes that read an initializer, and what they read it as: a weight, a setting or an operand.

Readers are found through operators that only rename or rearrange (Identity, Cast, Reshape, Transpose, Slice, Concat,
...). What they read decides for :mod:`~onnxtrain.parameters.classify`, or leaves it open.

| reader | input | the tensor is |
|---|---|---|
| matmul, convolution, recurrent layer | weights, biases, peepholes | a parameter |
| normalization | scale, bias | a parameter; not if an exporter filled it with one value |
| lookup (Gather), slope of PRelu | table, slope | a parameter |
| BatchNormalization | running mean and variance | a constant |
| comparison, Pow, Clip, Pad, Range, Resize, ... | operand, exponent, bound, fill | a constant |
| (De)QuantizeLinear, QLinear..., factor of integers | scales, zero points | a constant |
| factor of rounded values | scale | a constant; open under an author's name |
| recurrent layer | initial state | open: a parameter if it has an author's name or its values differ |
| Add to a matmul with weights | the other operand | a parameter |
| Add, Mul, Where, Max, ... | any | open |
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from enum import Enum

import numpy as np
import onnx_ir as ir

from onnxtrain.graph.domains import MICROSOFT_DOMAIN
from onnxtrain.graph.value import behind, constant_tensor, dimensions

Reader = tuple[ir.Node, int]
"""A node and the index of its input that reads a value."""

Functions = Mapping[ir.OperatorIdentifier, ir.Function]

REARRANGING = frozenset(
    {"Identity", "Cast", "CastLike", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Expand", "Tile"}
    | {"Slice", "Split", "Concat"}
)
"""Operators whose result holds the elements of their first input (Concat: of all inputs) in another shape."""

SHAPE_ONLY = frozenset({"Shape", "Size", "EyeLike", "RandomNormalLike", "RandomUniformLike"})
"""Operators that read no elements."""

_ROLES = {1: "scale", 2: "bias", 3: "running mean", 4: "running variance"}


def role_of(operator: str, index: int) -> str:
    """Return the role of a normalization's input (scale, bias, mean, variance); "" for other operators.

    Example:
        >>> role_of("BatchNormalization", 4), role_of("SkipLayerNormalization", 3), role_of("Mul", 1)
        ('running variance', 'bias', '')
    """
    if not operator.endswith("Normalization"):
        return ""
    found = _ROLES.get(index - operator.startswith("Skip"), "")  # what is skipped comes before
    return found if operator == "BatchNormalization" or not found.startswith("running") else ""


def is_statistic(operator: str, index: int) -> bool:
    """Return whether an input of a normalization holds running statistics."""
    return role_of(operator, index).startswith("running")


def behind_identity(value: ir.Value | None) -> ir.Value | None:
    """Return the value before any Identity nodes."""
    return behind(value, ("Identity",))


def summed_with(reader: Reader) -> ir.Node | None:
    """Return the node of the other operand of an Add; ``None`` where the reader is not an Add."""
    node, index = reader
    if node.op_type != "Add" or node.domain:
        return None
    other = behind_identity(node.inputs[1 - index])
    return None if other is None else other.producer()


def is_weight(value: ir.Value | None) -> bool:
    """Return whether a value is a (rearranged) initializer."""
    source = behind(value, REARRANGING)
    return source is not None and source.is_initializer()


def is_bias(reader: Reader) -> bool:
    """Return whether a value is added to the result of a linear layer, not to a matmul of two activations."""
    layer = summed_with(reader)
    return layer is not None and (layer.domain, layer.op_type) in LINEAR and any(map(is_weight, layer.inputs))


def is_operand_of_weight(reader: Reader) -> bool:
    """Return whether the input is the data of a linear operator: its left operand, next to an initializer."""
    node, index = reader
    return index == 0 and is_linear(reader) and node.op_type != "Einsum" and is_weight(node.inputs[1])


def read_through_identity(value: ir.Value) -> list[Reader]:
    """Return the readers of the elements of a value, directly or after Identity nodes.

    Exporters tie equal initializers with Identity nodes. A node that only reads the shape does not count.
    """
    return arrivals(value, through={"Identity"})


def arrivals(
    value: ir.Value, functions: Functions | None = None, through: Collection[str] = REARRANGING
) -> list[Reader]:
    """Return the nodes that read the elements of a value, through shape operators and into functions and loops."""
    known = functions or {}
    found: dict[Reader, None] = {}
    waiting: list[tuple[ir.Value, tuple[ir.Node, ...]]] = [(value, ())]  # a value and its enclosing calls
    seen = set(waiting)
    for value, calls in waiting:
        further = []
        if calls:
            body = known[calls[-1].op_identifier()]
            handed = zip(body.outputs, calls[-1].outputs, strict=False)
            further += [(outer, calls[:-1]) for inner, outer in handed if inner is value]
        for node, index in value.uses():
            function = known.get(node.op_identifier())
            if function is not None:
                further += [(formal, (*calls, node)) for formal in function.inputs[index : index + 1]]
            elif not node.domain and _hands_on(node, index, through):
                further += [(inner, calls) for inner in _handed(node, index)]
            elif node.op_type not in SHAPE_ONLY and (node.op_type, index) != ("CastLike", 1):
                found[(node, index)] = None
        waiting += [item for item in further if item not in seen]
        seen.update(further)
    return list(found)


def _handed(node: ir.Node, index: int) -> Sequence[ir.Value]:
    """Return the values through which a node passes an input on."""
    if node.op_type in ("Loop", "Scan"):
        return [node.attributes["body"].as_graph().inputs[index]]
    return node.outputs


def _hands_on(node: ir.Node, index: int, through: Collection[str]) -> bool:
    if node.op_type in ("Loop", "Scan"):
        return index >= (2 if node.op_type == "Loop" else 0)
    if node.op_type == "Gather" and index == 0 and "Slice" in through and "Gather" not in through:
        return chooses_one(node)
    return node.op_type in through and (index == 0 or node.op_type == "Concat")


def chooses_one(node: ir.Node) -> bool:
    """Return whether a Gather takes one constant slice, as from stacked weights, instead of a lookup."""
    tensor = None if node.inputs[1] is None else constant_tensor(node.inputs[1])
    return tensor is not None and tensor.size == 1


class ReaderUse(Enum):
    """Purpose for which an operator reads a tensor; settings are described in words instead."""

    WEIGHT = "a weight"
    STATE = "an initial state"
    OPEN = "an operand"


OPERAND_OF = "operand of "
"""Beginning of the purpose of a tensor that is compared."""

SCALE = "quantization scale"
"""Purpose of a scale: it is trained as a logarithm or not at all."""

ROUNDING = "scale of rounded values"
"""Purpose of a scale that no quantizing operator reads: a program may train it as it is."""

_ZERO_POINT = "quantization zero point"

_TABLES = "a position table: cosines of {0}, a position table: sines of {0}"

_INPUTS = {
    "MatMul": "weight, weight",
    "Gemm": "weight, weight, bias",
    "Conv": "x, weight, bias",
    "ConvTranspose": "x, weight, bias",
    "DeformConv": "x, weight, offset, bias",
    "RNN": "x, weight, weight, bias, lengths, state",
    "GRU": "x, weight, weight, bias, lengths, state",
    "LSTM": "x, weight, weight, bias, lengths, state, state, bias",
    "PRelu": "x, bias",
    "Gather": "table",
    "GatherND": "table",
    "GatherElements": "table",
    "BatchNormalization": (
        "x, affine, affine, running mean of batch normalization, running variance of batch normalization"
    ),
    "GroupNormalization": "x, affine, affine",
    "InstanceNormalization": "x, affine, affine",
    "LayerNormalization": "x, affine, affine",
    "RMSNormalization": "x, affine",
    "SimplifiedLayerNormalization": "x, affine",
    "Clip": "x, bound of Clip, bound of Clip",
    "Dropout": "x, ratio of Dropout",
    "OneHot": "x, depth, values of OneHot",
    "Pad": "x, pads, padding value",
    "Pow": "x, exponent of Pow",
    "Range": "bound of Range, bound of Range, step of Range",
    "Resize": "x, region of Resize, scales of Resize",
    "RotaryEmbedding": f"x, {_TABLES.format('RotaryEmbedding')}",
    "STFT": "x, step, window of STFT",
    "Upsample": "x, scales of Upsample",
    **{name: f"{OPERAND_OF}{name}, {OPERAND_OF}{name}" for name in ("Equal", "Less", "LessOrEqual")},
    **{name: f"{OPERAND_OF}{name}, {OPERAND_OF}{name}" for name in ("Greater", "GreaterOrEqual")},
    "QuantizeLinear": f"x, {SCALE}",
    "DequantizeLinear": f"integers, {SCALE}",
    "ConvInteger": "x, integers",
    "MatMulInteger": "integers, integers",
    "QLinearConv": f"x, {SCALE}, zero, integers, {SCALE}, zero, {SCALE}",
    "QLinearMatMul": f"integers, {SCALE}, zero, integers, {SCALE}, zero, {SCALE}",
    "com.microsoft.Attention": "x, weight, bias",
    "com.microsoft.BiasGelu": "x, bias",
    "com.microsoft.ConvTransposeWithDynamicPads": "x, weight",
    "com.microsoft.EmbedLayerNormalization": "tokens, segments, table, table, table, affine, affine",
    "com.microsoft.FastGelu": "x, bias",
    "com.microsoft.FusedConv": "x, weight, bias",
    "com.microsoft.FusedGemm": "weight, weight, bias",
    "com.microsoft.FusedMatMul": "weight, weight",
    "com.microsoft.GemmFastGelu": "x, weight, bias",
    "com.microsoft.GroupNorm": "x, affine, affine",
    "com.microsoft.GroupQueryAttention": f"q, k, v, key, value, counts, total, {_TABLES.format('GroupQueryAttention')}",
    "com.microsoft.MoE": "x, router, weight, bias, weight, bias, weight, bias",
    "com.microsoft.MultiHeadAttention": "q, k, v, bias",
    "com.microsoft.NhwcConv": "x, weight, bias",
    "com.microsoft.RotaryEmbedding": f"x, positions, {_TABLES.format('RotaryEmbedding')}",
    "com.microsoft.SkipGroupNorm": "x, affine, affine",
    "com.microsoft.SkipLayerNormalization": "x, skip, affine, affine, bias",
    "com.microsoft.SkipSimplifiedLayerNormalization": "x, skip, affine",
    "com.microsoft.TransposeMatMul": "weight, weight",
    "com.microsoft.QuantizeLinear": f"x, {SCALE}",
    "com.microsoft.DequantizeLinear": f"integers, {SCALE}",
    "com.microsoft.DynamicQuantizeMatMul": f"x, integers, {SCALE}",
    "com.microsoft.GatherBlockQuantized": f"integers, tokens, {SCALE}",
    "com.microsoft.MatMulIntegerToFloat": f"integers, integers, {SCALE}, {SCALE}",
    "com.microsoft.MatMulNBits": f"x, integers, {SCALE}, {_ZERO_POINT}",
    "com.microsoft.QAttention": f"x, integers, offset, {SCALE}, {SCALE}",
    "com.microsoft.QGemm": f"x, {SCALE}, zero, integers, {SCALE}, zero, offset, {SCALE}",
    "com.microsoft.QLinearAdd": "integers, scale, zero, integers",
    "com.microsoft.QLinearMul": "integers, scale, zero, integers",
    "com.microsoft.QMoE": f"x, router, integers, {SCALE}, offset, integers, {SCALE}, offset, integers, {SCALE}",
}
"""Inputs of operators by what they hold: weights, biases, scales and biases of normalizations (affine), tables of
lookups, integers of quantized weights, initial states, settings in words of several parts, and data by other names."""

_PURPOSES = {
    (domain, operator): dict(enumerate(inputs.split(", ")))
    for name, inputs in _INPUTS.items()
    for domain, _, operator in [name.rpartition(".")]
}


def _with(purpose: str) -> dict[tuple[str, str], tuple[int, ...]]:
    """Return the operators with inputs of this purpose, and these inputs."""
    found = {key: tuple(at for at, own in inputs.items() if own == purpose) for key, inputs in _PURPOSES.items()}
    return {key: slots for key, slots in found.items() if slots}


LINEAR = _with("weight")
"""Linear operators (matmul, convolution, recurrent layer) and their weight inputs."""

NORMALIZATIONS = _with("affine")
"""Normalizations and their scale and bias inputs."""

_QUANTIZED_WEIGHTS = _with("integers")


def _purpose(reader: Reader) -> str:
    node, index = reader
    return _PURPOSES.get((node.domain, node.op_type), {}).get(index, "")


def use_of(reader: Reader) -> ReaderUse | str:
    """Return the purpose of an input of an operator: a weight, a state, an operand, or the name of a setting.

    Example:
        >>> import onnx_ir as ir
        >>> x, w = ir.Value(name="x"), ir.Value(name="w")
        >>> [use_of((ir.Node("", operator, [x, w]), 1)) for operator in ("MatMul", "Pow", "Mul")]
        [<ReaderUse.WEIGHT: 'a weight'>, 'exponent of Pow', <ReaderUse.OPEN: 'an operand'>]
    """
    node, _ = reader
    purpose = _purpose(reader)
    if " " in purpose:
        return purpose
    if node.domain == MICROSOFT_DOMAIN and node.op_type.startswith("QLinear"):
        return SCALE
    if is_linear(reader) or is_lookup(reader) or purpose in ("affine", "bias"):
        return ReaderUse.WEIGHT
    if scale := scale_of(reader):
        return scale
    if _is_zero_point(reader):
        return _ZERO_POINT
    return ReaderUse.STATE if purpose == "state" else ReaderUse.OPEN


INTEGERS = frozenset(
    getattr(ir.DataType, name) for name in ("INT2", "UINT2", "INT4", "UINT4", "INT8", "UINT8", "INT16", "UINT16")
)
"""Element types of quantized values."""

_BEHIND_INTEGERS = REARRANGING | {"Add", "BitShift", "BitwiseAnd", "BitwiseOr", "Clip", "Gather", "Mod", "Sub"}
"""Operators between stored integers, or rounded values, and the multiplication with their scale."""

_LOOKED_AT = 1 << 16
"""Integers that are examined to tell a mask from a weight."""

_PRODUCTS = 3
"""Largest number of scales that are multiplied with each other."""


def scale_of(reader: Reader, products: int = _PRODUCTS) -> str:
    """Return the purpose of a value that scales integers, or what is or will be rounded; "" for another value."""
    node, index = reader
    if node.domain or (node.op_type, index) not in _FACTORS or not products:
        return ""
    value, other = node.inputs[index], node.inputs[1 - index]
    if value is None:
        return ""
    if held := _integers_held(other, value):
        return held
    rounded = arrivals(node.outputs[0], through=_BEHIND_INTEGERS)
    if rounded and all(behind.op_type in _ROUNDING for behind, _ in rounded) and _is_fewer(value, other):
        return ROUNDING
    further = {scale_of(behind, products - 1) for behind in arrivals(node.outputs[0])}
    return min(further, default="")  # "" before SCALE before ROUNDING


_FACTORS = frozenset({("Mul", 0), ("Mul", 1), ("Div", 1)})
_ROUNDING = frozenset({"Ceil", "Floor", "Round"})
_INTEGER_LAYERS = frozenset({"ConvInteger", "MatMulInteger", "QuantizeLinear"})


def _is_zero_point(reader: Reader) -> bool:
    """Return whether a value is added to the integers of a weight."""
    node, index = reader
    if node.domain or node.op_type not in ("Add", "Sub") or index > 1:
        return False
    value = behind(node.inputs[1 - index], _BEHIND_INTEGERS)
    return value is not None and _is_quantized(value, node.inputs[index])


def _is_fewer(value: ir.Value, other: ir.Value | None) -> bool:
    """Return whether a value has fewer elements than another, or but one axis where those are not known."""
    own, sizes = (None if one is None else dimensions(one) for one in (value, other))
    if own is None or not all(isinstance(size, int) for size in own):
        return False
    count = math.prod(int(size or 0) for size in own)
    if sizes is None or not all(isinstance(size, int) for size in sizes):
        return sum(size != 1 for size in own) <= 1
    return count < math.prod(int(size or 0) for size in sizes)


def quantized_weights(graph: ir.Graph) -> dict[str, int]:
    """Return the initializers that hold quantized weights, with their numbers of elements."""
    found = {}
    for name, value in graph.initializers.items():
        tensor = value.const_value
        if tensor is None or tensor.size < _LEAST_WEIGHT or value.dtype in _UNSIZED or value.dtype.bitwidth > _WIDEST:
            continue
        readers = arrivals(value, through=_BEHIND_INTEGERS)
        reader = next((reader for reader in readers if _purpose(reader) == "integers"), None)
        if reader is not None:
            node = reader[0]
            bits = node.attributes.get_int("bits", 4)
            is_packed = node.op_type in ("GatherBlockQuantized", "MatMulNBits") and value.dtype == ir.DataType.UINT8
            found[name] = tensor.size * 8 // bits if is_packed else tensor.size
        elif value.dtype in INTEGERS and any(is_linear(one) or _is_scaled(*one) for one in readers):
            found[name] = tensor.size
    return found


_INTEGERS_STAY = frozenset({"GatherBlockQuantized", "MatMulNBits", "QAttention", "QMoE"})


def trains_integers(graph: ir.Graph) -> bool:
    """Return whether an operator reads integers that quantization-aware training changes."""
    trained = {operator for operator in _QUANTIZED_WEIGHTS if operator[1] not in _INTEGERS_STAY}
    return any((node.domain, node.op_type) in trained for node in graph)


_LEAST_WEIGHT = 2

_UNSIZED = (None, ir.DataType.UNDEFINED, ir.DataType.STRING)

_WIDEST = 16


def _is_scaled(node: ir.Node, index: int) -> bool:
    return node.op_type in ("Mul", "Div") and index < 2 and bool(scale_of((node, 1 - index)))


def _is_quantized(weight: ir.Value, scale: ir.Value | None) -> bool:
    """Return whether an initializer is a quantized weight: integers that are no mask, more than there are scales."""
    tensor = weight.const_value
    if tensor is None or not weight.is_initializer() or weight.dtype not in INTEGERS or scale is None:
        return False
    values = np.asarray(tensor.numpy()).reshape(-1)[:_LOOKED_AT].astype(np.int32)
    return _is_fewer(scale, weight) and bool(np.ptp(values) > 1)


def _integers_held(value: ir.Value | None, scale: ir.Value) -> str:
    """Return the purpose of the scale of quantized integers, of a matmul with those of a weight, of rounded values."""
    while value is not None and (producer := value.producer()) is not None:
        if producer.op_type in _INTEGER_LAYERS:
            return SCALE
        if producer.domain:
            return ""
        if producer.op_type in _ROUNDING:
            return ROUNDING if _is_fewer(scale, value) else ""
        if producer.op_type in ("Conv", "Gemm", "MatMul"):
            value = producer.inputs[1]
        elif producer.op_type in _BEHIND_INTEGERS:
            value = producer.inputs[0]
        else:
            return ""
    return SCALE if value is not None and _is_quantized(value, scale) else ""


def is_linear(reader: Reader) -> bool:
    """Return whether the input is a weight of a linear operator."""
    node, _ = reader
    if node.op_type == "Einsum" and not node.domain:
        return len(node.inputs) > 1
    return _purpose(reader) == "weight"


def is_lookup(reader: Reader) -> bool:
    """Return whether the input is the table of a lookup."""
    node, _ = reader
    return _purpose(reader) == "table" and not (node.op_type == "Gather" and chooses_one(node))


def is_normalization(reader: Reader) -> bool:
    """Return whether the input is the scale or bias of a normalization."""
    return _purpose(reader) == "affine"
