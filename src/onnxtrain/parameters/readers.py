"""Find the nodes that read an initializer, and what they read it as: a weight, a setting or an operand.

The readers of a tensor decide whether it is trained: where an operator reads a weight, the tensor is a parameter; where
it reads a setting, the tensor is a constant. Readers are found through operators that only rename or rearrange
(Identity, Cast, Reshape, Transpose, Slice, Concat, ...). Where readers leave it open, as Mul and Add do, values and
name decide (:mod:`~onnxtrain.parameters.operands`); where these leave it open too, the tensor is not trained, and a
hint says so.

| reader | input | the tensor is |
|---|---|---|
| matmul, convolution, recurrent layer | weights, biases, peepholes | a parameter |
| normalization | scale, bias | a parameter; not if an exporter filled it with one value |
| lookup (Gather), slope of PRelu | table, slope | a parameter |
| BatchNormalization | running mean and variance | a constant |
| comparison, Pow, Clip, Pad, Range, Resize, ... | operand, exponent, bound, fill | a constant |
| (De)QuantizeLinear, QLinear..., factor of integers or rounded values | scales, zero points | a constant |
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
    """Return the nodes that read the elements of a value, through shape operators and into functions and loops.

    Args:
        value: The value.
        functions: Model-local functions; the nodes of the body replace a call.
        through: ONNX operators that pass their first input on.

    Returns:
        Pairs of node and input index, each once, in order of discovery.
    """
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


_Slots = Mapping[tuple[str, str], tuple[int, ...]]


class ReaderUse(Enum):
    """Purpose for which an operator reads a tensor; settings are described in words instead."""

    WEIGHT = "a weight"
    STATE = "an initial state"
    OPEN = "an operand"


LINEAR: _Slots = {
    ("", "MatMul"): (0, 1),
    ("", "Gemm"): (0, 1),
    ("", "Conv"): (1,),
    ("", "ConvTranspose"): (1,),
    ("", "DeformConv"): (1,),
    ("", "RNN"): (1, 2),
    ("", "GRU"): (1, 2),
    ("", "LSTM"): (1, 2),
    (MICROSOFT_DOMAIN, "Attention"): (1,),
    (MICROSOFT_DOMAIN, "ConvTransposeWithDynamicPads"): (1,),
    (MICROSOFT_DOMAIN, "FusedConv"): (1,),
    (MICROSOFT_DOMAIN, "FusedGemm"): (0, 1),
    (MICROSOFT_DOMAIN, "FusedMatMul"): (0, 1),
    (MICROSOFT_DOMAIN, "GemmFastGelu"): (1,),
    (MICROSOFT_DOMAIN, "MoE"): (2, 4, 6),
    (MICROSOFT_DOMAIN, "NhwcConv"): (1,),
    (MICROSOFT_DOMAIN, "TransposeMatMul"): (0, 1),
}
"""Linear operators (matmul, convolution, recurrent layer) and their weight inputs."""

LOOKUPS: _Slots = {
    ("", "Gather"): (0,),
    ("", "GatherND"): (0,),
    ("", "GatherElements"): (0,),
    (MICROSOFT_DOMAIN, "EmbedLayerNormalization"): (2, 3, 4),
}
"""Lookup operators and their table inputs."""

NORMALIZATIONS: _Slots = {
    ("", "BatchNormalization"): (1, 2),
    ("", "GroupNormalization"): (1, 2),
    ("", "InstanceNormalization"): (1, 2),
    ("", "LayerNormalization"): (1, 2),
    ("", "RMSNormalization"): (1,),
    ("", "SimplifiedLayerNormalization"): (1,),
    (MICROSOFT_DOMAIN, "EmbedLayerNormalization"): (5, 6),
    (MICROSOFT_DOMAIN, "GroupNorm"): (1, 2),
    (MICROSOFT_DOMAIN, "SkipGroupNorm"): (1, 2),
    (MICROSOFT_DOMAIN, "SkipLayerNormalization"): (2, 3),
    (MICROSOFT_DOMAIN, "SkipSimplifiedLayerNormalization"): (2,),
}
"""Normalizations and their scale and bias inputs."""

BIASES: _Slots = {
    ("", "Conv"): (2,),
    ("", "ConvTranspose"): (2,),
    ("", "DeformConv"): (3,),
    ("", "Gemm"): (2,),
    ("", "RNN"): (3,),
    ("", "GRU"): (3,),
    ("", "LSTM"): (3, 7),
    ("", "PRelu"): (1,),
    (MICROSOFT_DOMAIN, "Attention"): (2,),
    (MICROSOFT_DOMAIN, "BiasGelu"): (1,),
    (MICROSOFT_DOMAIN, "FastGelu"): (1,),
    (MICROSOFT_DOMAIN, "FusedConv"): (2,),
    (MICROSOFT_DOMAIN, "FusedGemm"): (2,),
    (MICROSOFT_DOMAIN, "GemmFastGelu"): (2,),
    (MICROSOFT_DOMAIN, "MoE"): (3, 5, 7),
    (MICROSOFT_DOMAIN, "MultiHeadAttention"): (3,),
    (MICROSOFT_DOMAIN, "NhwcConv"): (2,),
    (MICROSOFT_DOMAIN, "SkipLayerNormalization"): (4,),
}
"""Layers and their bias, slope and peephole inputs."""

_STATES: _Slots = {("", "LSTM"): (5, 6), ("", "GRU"): (5,), ("", "RNN"): (5,)}

OPERAND_OF = "operand of "
"""Beginning of the purpose of a tensor that is compared."""

SCALE = "quantization scale"
"""Purpose of a scale: it is trained as a logarithm or not at all."""

_ZERO_POINT = "quantization zero point"

_SETTINGS: Mapping[tuple[str, str], Mapping[int, str]] = {
    ("", "BatchNormalization"): {
        3: "running mean of batch normalization",
        4: "running variance of batch normalization",
    },
    ("", "Clip"): {1: "bound of Clip", 2: "bound of Clip"},
    ("", "Dropout"): {1: "ratio of Dropout"},
    ("", "OneHot"): {2: "values of OneHot"},
    ("", "Pad"): {2: "padding value"},
    ("", "Pow"): {1: "exponent of Pow"},
    ("", "Range"): {0: "bound of Range", 1: "bound of Range", 2: "step of Range"},
    ("", "Resize"): {1: "region of Resize", 2: "scales of Resize"},
    ("", "RotaryEmbedding"): {
        1: "a position table: cosines of RotaryEmbedding",
        2: "a position table: sines of RotaryEmbedding",
    },
    ("", "STFT"): {2: "window of STFT"},
    ("", "Upsample"): {1: "scales of Upsample"},
    ("", "QuantizeLinear"): {1: SCALE},
    ("", "DequantizeLinear"): {1: SCALE},
    ("", "QLinearConv"): dict.fromkeys((1, 4, 6), SCALE),
    ("", "QLinearMatMul"): dict.fromkeys((1, 4, 6), SCALE),
    **{
        ("", operator): dict.fromkeys((0, 1), f"{OPERAND_OF}{operator}")
        for operator in ("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual")
    },
    (MICROSOFT_DOMAIN, "DequantizeLinear"): {1: SCALE},
    (MICROSOFT_DOMAIN, "DynamicQuantizeMatMul"): {2: SCALE},
    (MICROSOFT_DOMAIN, "GatherBlockQuantized"): {2: SCALE},
    (MICROSOFT_DOMAIN, "GroupQueryAttention"): {
        7: "a position table: cosines of GroupQueryAttention",
        8: "a position table: sines of GroupQueryAttention",
    },
    (MICROSOFT_DOMAIN, "MatMulIntegerToFloat"): dict.fromkeys((2, 3), SCALE),
    (MICROSOFT_DOMAIN, "MatMulNBits"): {2: SCALE, 3: _ZERO_POINT},
    (MICROSOFT_DOMAIN, "QAttention"): dict.fromkeys((3, 4), SCALE),
    (MICROSOFT_DOMAIN, "QGemm"): dict.fromkeys((1, 4, 7), SCALE),
    (MICROSOFT_DOMAIN, "QMoE"): dict.fromkeys((3, 6, 9), SCALE),
    (MICROSOFT_DOMAIN, "QuantizeLinear"): {1: SCALE},
    (MICROSOFT_DOMAIN, "RotaryEmbedding"): {
        2: "a position table: cosines of RotaryEmbedding",
        3: "a position table: sines of RotaryEmbedding",
    },
}
"""Inputs that configure an operator, with their meaning."""


def use_of(reader: Reader) -> ReaderUse | str:
    """Return the purpose of an input of an operator: a weight, a state, an operand, or the name of a setting.

    Example:
        >>> import onnx_ir as ir
        >>> x, w = ir.Value(name="x"), ir.Value(name="w")
        >>> [use_of((ir.Node("", operator, [x, w]), 1)) for operator in ("MatMul", "Pow", "Mul")]
        [<ReaderUse.WEIGHT: 'a weight'>, 'exponent of Pow', <ReaderUse.OPEN: 'an operand'>]
    """
    node, index = reader
    setting = _SETTINGS.get((node.domain, node.op_type), {}).get(index)
    if setting is not None:
        return setting
    if node.domain == MICROSOFT_DOMAIN and node.op_type.startswith("QLinear"):
        return SCALE
    if is_linear(reader) or is_lookup(reader) or is_normalization(reader) or _is_in(BIASES, reader):
        return ReaderUse.WEIGHT
    if is_scale(reader):
        return SCALE
    if _is_zero_point(reader):
        return _ZERO_POINT
    return ReaderUse.STATE if _is_in(_STATES, reader) else ReaderUse.OPEN


INTEGERS = frozenset(
    getattr(ir.DataType, name) for name in ("INT2", "UINT2", "INT4", "UINT4", "INT8", "UINT8", "INT16", "UINT16")
)
"""Element types of quantized values."""

_QUANTIZED_WEIGHTS: _Slots = {
    ("", "ConvInteger"): (1,),
    ("", "DequantizeLinear"): (0,),
    ("", "MatMulInteger"): (0, 1),
    ("", "QLinearConv"): (3,),
    ("", "QLinearMatMul"): (0, 3),
    (MICROSOFT_DOMAIN, "DequantizeLinear"): (0,),
    (MICROSOFT_DOMAIN, "DynamicQuantizeMatMul"): (1,),
    (MICROSOFT_DOMAIN, "GatherBlockQuantized"): (0,),
    (MICROSOFT_DOMAIN, "MatMulIntegerToFloat"): (0, 1),
    (MICROSOFT_DOMAIN, "MatMulNBits"): (1,),
    (MICROSOFT_DOMAIN, "QAttention"): (1,),
    (MICROSOFT_DOMAIN, "QGemm"): (3,),
    (MICROSOFT_DOMAIN, "QLinearAdd"): (0, 3),
    (MICROSOFT_DOMAIN, "QLinearMul"): (0, 3),
    (MICROSOFT_DOMAIN, "QMoE"): (2, 5, 8),
}
"""Operators on quantized weights and their inputs for these."""

_BEHIND_INTEGERS = REARRANGING | {"Add", "BitShift", "BitwiseAnd", "BitwiseOr", "Clip", "Gather", "Mod", "Sub"}
"""Operators between stored integers, or rounded values, and the multiplication with their scale."""

_LOOKED_AT = 1 << 16
"""Integers that are examined to tell a mask from a weight."""

_PRODUCTS = 3
"""Largest number of scales that are multiplied with each other."""


def is_scale(reader: Reader, products: int = _PRODUCTS) -> bool:
    """Return whether a value scales integers, those of a weight or of rounding, or what is rounded to integers.

    Scales are multiplied with each other first, as by ONNX Runtime's dynamic quantization.
    """
    node, index = reader
    if node.domain or (node.op_type, index) not in _FACTORS or not products:
        return False
    value, other = node.inputs[index], node.inputs[1 - index]
    if value is None or _holds_integers(other, value):
        return value is not None
    rounded = arrivals(node.outputs[0], through=_BEHIND_INTEGERS)
    if rounded and all(behind.op_type in _ROUNDING for behind, _ in rounded) and _is_fewer(value, other):
        return True
    further = arrivals(node.outputs[0])
    return bool(further) and all(is_scale(behind, products - 1) for behind in further)


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
        if tensor is None or tensor.size < _LEAST_WEIGHT or value.dtype is None or value.dtype.bitwidth > _WIDEST:
            continue
        readers = arrivals(value, through=_BEHIND_INTEGERS)
        reader = next((reader for reader in readers if _is_in(_QUANTIZED_WEIGHTS, reader)), None)
        if reader is not None:
            node = reader[0]
            bits = node.attributes["bits"].as_int() if "bits" in node.attributes else 4
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
_WIDEST = 16


def _is_scaled(node: ir.Node, index: int) -> bool:
    return node.op_type in ("Mul", "Div") and index < 2 and is_scale((node, 1 - index))


def _is_quantized(weight: ir.Value, scale: ir.Value | None) -> bool:
    """Return whether an initializer is a quantized weight: integers that are no mask, more than there are scales."""
    tensor = weight.const_value
    if tensor is None or not weight.is_initializer() or weight.dtype not in INTEGERS or scale is None:
        return False
    values = np.asarray(tensor.numpy()).reshape(-1)[:_LOOKED_AT].astype(np.int32)
    return _is_fewer(scale, weight) and bool(np.ptp(values) > 1)


def _holds_integers(value: ir.Value | None, scale: ir.Value) -> bool:
    """Return whether a value holds quantized integers, rounded values, or a matmul with the integers of a weight."""
    while value is not None and (producer := value.producer()) is not None:
        if producer.op_type in _INTEGER_LAYERS:
            return True
        if producer.domain:
            return False
        if producer.op_type in _ROUNDING:
            return _is_fewer(scale, value)
        if producer.op_type in ("Conv", "Gemm", "MatMul"):
            value = producer.inputs[1]
        elif producer.op_type in _BEHIND_INTEGERS:
            value = producer.inputs[0]
        else:
            return False
    return value is not None and _is_quantized(value, scale)


def is_linear(reader: Reader) -> bool:
    """Return whether the input is a weight of a linear operator."""
    node, _ = reader
    if node.op_type == "Einsum" and not node.domain:
        return len(node.inputs) > 1
    return _is_in(LINEAR, reader)


def is_lookup(reader: Reader) -> bool:
    """Return whether the input is the table of a lookup."""
    node, _ = reader
    return _is_in(LOOKUPS, reader) and not (node.op_type == "Gather" and chooses_one(node))


def is_normalization(reader: Reader) -> bool:
    """Return whether the input is the scale or bias of a normalization."""
    return _is_in(NORMALIZATIONS, reader)


def _is_in(slots: _Slots, reader: Reader) -> bool:
    node, index = reader
    return index in slots.get((node.domain, node.op_type), ())
