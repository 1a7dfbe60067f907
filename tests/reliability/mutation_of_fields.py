"""Change any field of any message by reflection: change, remove, double, exchange, fill."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from onnx import ModelProto, NodeProto

INTEGERS = (
    0,
    1,
    -1,
    2,
    3,
    7,
    13,
    26,
    255,
    256,
    65536,
    2**31 - 1,
    -(2**31),
    2**31,
    2**32,
    2**40,
    2**62,
    2**63 - 1,
    -(2**63),
)
FLOATS = (0.0, -0.0, 1.0, -1.0, 1e-45, 1e38, float("inf"), float("-inf"), float("nan"))
TEXTS = (
    "", " ", "x", "\n", "a" * 300, "\x1b[31m", "\u202ex", "\u03bb", "../../x", "/etc/passwd", "NHWC", "[bold]", "%s%n",
    "ai.onnx", "ai.onnx.ml", "com.microsoft", "ai.onnx.preview.training", "onnxtrain", "own", "auto", "SAME_UPPER",
    "ij,jk->ik", "...i,i...->...", "linear", "cubic", "sum", "external", "location", "offset", "length",
)  # fmt: skip
OPERATORS = (
    "Add", "Mul", "Div", "Sub", "Pow", "MatMul", "Gemm", "Relu", "Softmax", "Identity", "Cast", "Reshape", "Transpose",
    "Concat", "Split", "Slice", "Gather", "GatherND", "ScatterND", "ScatterElements", "Squeeze", "Unsqueeze", "Expand",
    "Tile", "Pad", "Resize", "Conv", "ConvTranspose", "MaxPool", "AveragePool", "GlobalAveragePool", "LpPool",
    "BatchNormalization", "InstanceNormalization", "LayerNormalization", "GroupNormalization", "Dropout", "LSTM", "GRU",
    "RNN", "If", "Loop", "Scan", "Einsum", "ReduceSum", "ReduceMax", "ReduceMean", "ReduceProd", "ReduceLogSumExp",
    "ArgMax", "TopK", "CumSum", "Range", "ConstantOfShape", "Shape", "Size", "NonZero", "Where", "Clip", "Erf", "Gelu",
    "OneHot", "EyeLike", "RandomNormal", "Bernoulli", "SequenceConstruct", "SequenceAt", "ConcatFromSequence",
    "SplitToSequence", "Optional", "OptionalGetElement", "QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear",
    "MatMulInteger", "StringNormalizer", "DepthToSpace", "SpaceToDepth", "GridSample", "RoiAlign", "DFT", "STFT",
    "MaxUnpool", "Det", "Trilu", "Mod", "BitShift", "IsNaN", "NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss",
    "Gradient", "Adam", "Momentum", "SSGD", "Attention", "FusedMatMul", "Mystery",
)  # fmt: skip


def messages(message: Message) -> Iterator[Message]:
    """Yield a message and all messages inside it."""
    yield message
    for field, value in message.ListFields():
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            for part in value if _repeated(field) else (value,):
                yield from messages(part)


def _repeated(field: Any) -> bool:
    return bool(field.is_repeated)


def any_field(model: ModelProto, generator: random.Random) -> None:
    """Change, remove, double, exchange or fill a field of a message, known or not."""
    everything = list(messages(model))
    message = generator.choice(everything)
    if generator.random() < 0.03:
        _unknown_field(message, generator)
        return
    field = generator.choice(message.DESCRIPTOR.fields if generator.random() < 0.2 else _set_fields(message))
    if _repeated(field):
        _repeated_field(message, field, generator, everything)
    elif generator.random() < 0.15:
        message.ClearField(field.name)
    elif field.type == FieldDescriptor.TYPE_MESSAGE:
        getattr(message, field.name).CopyFrom(_another(everything, field, generator))
    else:
        setattr(message, field.name, _scalar(getattr(message, field.name), field, generator, everything))


def _set_fields(message: Message) -> list[Any]:
    return [field for field, _ in message.ListFields()]


def _another(everything: list[Message], field: Any, generator: random.Random) -> Message:
    """Return a message of the field's type from anywhere in the model."""
    same = [message for message in everything if message.DESCRIPTOR is field.message_type]
    copied = type(generator.choice(same))()
    copied.CopyFrom(generator.choice(same))
    return copied


def _repeated_field(message: Message, field: Any, generator: random.Random, everything: list[Message]) -> None:
    values = getattr(message, field.name)
    items = list(values)
    choice = generator.randrange(5)
    at = generator.randrange(len(items)) if items else 0
    is_message = field.type == FieldDescriptor.TYPE_MESSAGE
    if choice == 0 and items:
        del items[at]
    elif choice == 1 and items:
        items.insert(generator.randrange(len(items) + 1), items[at])
    elif choice == 2 and len(items) > 1:
        generator.shuffle(items)
    elif is_message:
        items.insert(at, _another(everything, field, generator))
    elif items and choice == 3:
        items[at] = _scalar(items[at], field, generator, everything)
    else:
        items.insert(at, _scalar(items[at] if items else None, field, generator, everything))
    copies = [copy(item) for item in items] if is_message else items
    message.ClearField(field.name)
    getattr(message, field.name).extend(copies)


def copy(message: Message) -> Message:
    copied = type(message)()
    copied.CopyFrom(message)
    return copied


def _scalar(value: Any, field: Any, generator: random.Random, everything: list[Message]) -> Any:
    if field.type == FieldDescriptor.TYPE_ENUM:
        return generator.choice([*(v.number for v in field.enum_type.values), 77])
    if field.cpp_type in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return generator.choice(FLOATS)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return other_data(value or b"", generator)
    if field.type == FieldDescriptor.TYPE_STRING:
        return other_name(everything, generator)
    near = [] if value is None else [value + 1, value - 1, -value, value * 2]
    low, high = {
        FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
        FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
    }.get(field.cpp_type, (-(2**63), 2**63 - 1))
    return min(max(generator.choice([*INTEGERS, *near]), low), high)


def other_data(value: bytes, generator: random.Random) -> bytes:
    match generator.randrange(4):
        case 0:
            return value[: generator.randrange(len(value) + 1)]
        case 1:
            return value + generator.randbytes(generator.choice((1, 4, 8)))
        case 2:
            return generator.randbytes(len(value))
        case _:
            return generator.choice((b"", b"\xff" * len(value), b"\x00\x00\xc0\x7f" * (len(value) // 4), b"\xff\xfe"))


def other_name(everything: list[Message], generator: random.Random) -> str:
    """Return a name in use in the model, an operator, or a text that is no valid name."""
    if generator.random() < 0.6:
        node = generator.choice([message for message in everything if isinstance(message, NodeProto)] or [NodeProto()])
        names = [*node.input, *node.output, node.name]
        return str(generator.choice(names))
    return generator.choice(TEXTS + OPERATORS)


def _unknown_field(message: Message, generator: random.Random) -> None:
    number = generator.choice((99, 1000, 536870911))
    key = number << 3 | 2
    head = bytearray()
    while key > 0x7F:
        head.append(key & 0x7F | 0x80)
        key >>= 7
    message.MergeFromString(bytes(head) + bytes([key, 3]) + b"abc")
