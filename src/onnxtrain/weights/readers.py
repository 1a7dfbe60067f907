"""Find the nodes that read an initializer, and what they read it as: a weight, a setting or an operand.

The readers of a tensor decide whether it is trained: where an operator reads a weight, the tensor is a parameter; where
it reads a setting, the tensor is a constant. Readers are found through operators that only rename or rearrange
(Identity, Cast, Reshape, Transpose, Slice, Concat, ...). Where readers leave it open, as Mul and Add do, values and
name decide (:mod:`~onnxtrain.weights.operands`); where these leave it open too, the tensor is not trained, and a hint
says so.

| reader | input | the tensor is |
|---|---|---|
| matmul, convolution, recurrent layer | weights, biases, peepholes | a parameter |
| normalization | scale, bias | a parameter; not if an exporter filled it with one value |
| lookup (Gather), slope of PRelu | table, slope | a parameter |
| BatchNormalization | running mean and variance | a constant |
| comparison, Pow, Clip, Pad, Range, Resize, ... | operand, exponent, bound, fill | a constant |
| QuantizeLinear, DequantizeLinear, QLinear... | scales | a constant |
| recurrent layer | initial state | open: a parameter if it has an author's name or its values differ |
| Add to a matmul with weights | the other operand | a parameter |
| Add, Mul, Where, Max, ... | any | open |
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from enum import Enum

import onnx_ir as ir

from onnxtrain.ir.domains import MICROSOFT_DOMAIN
from onnxtrain.ir.value import behind, constant_tensor

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
        >>> role_of("BatchNormalization", 4), role_of("Mul", 1)
        ('running variance', '')
    """
    return _ROLES.get(index, "") if operator.endswith("Normalization") else ""


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
    if node.op_type == "Gather" and index == 0 and "Slice" in through:
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

_QUANTIZED = "quantization scale"

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
    ("", "QuantizeLinear"): {1: _QUANTIZED},
    ("", "DequantizeLinear"): {1: _QUANTIZED},
    ("", "QLinearConv"): dict.fromkeys((1, 4, 6), _QUANTIZED),
    ("", "QLinearMatMul"): dict.fromkeys((1, 4, 6), _QUANTIZED),
    **{
        ("", operator): dict.fromkeys((0, 1), f"{OPERAND_OF}{operator}")
        for operator in ("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual")
    },
    (MICROSOFT_DOMAIN, "DequantizeLinear"): {1: _QUANTIZED},
    (MICROSOFT_DOMAIN, "GatherBlockQuantized"): {2: _QUANTIZED},
    (MICROSOFT_DOMAIN, "GroupQueryAttention"): {
        7: "a position table: cosines of GroupQueryAttention",
        8: "a position table: sines of GroupQueryAttention",
    },
    (MICROSOFT_DOMAIN, "MatMulNBits"): {2: _QUANTIZED, 3: "quantization zero point"},
    (MICROSOFT_DOMAIN, "QuantizeLinear"): {1: _QUANTIZED},
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
        return _QUANTIZED
    if is_linear(reader) or is_lookup(reader) or is_normalization(reader) or _is_in(BIASES, reader):
        return ReaderUse.WEIGHT
    return ReaderUse.STATE if _is_in(_STATES, reader) else ReaderUse.OPEN


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
