"""Types and shapes of single nodes as they are emitted: cheap, and exact where it says anything.

Whole graphs are inferred by ONNX itself (:mod:`onnxtrain.ir.shapes`); this is for the nodes that rules
emit between two such passes, of which there are thousands.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxtrain.ir.value import Dimension, constant_tensor, dimensions

_BOOLEAN = frozenset(
    {"Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "And", "Or", "Xor", "Not", "IsNaN", "IsInf"}
)
_INT64 = frozenset({"Shape", "Size", "NonZero", "ArgMax", "ArgMin", "SequenceLength"})
_ELEMENTWISE = frozenset(
    {"Add", "Sub", "Mul", "Div", "Pow", "Mod", "Min", "Max", "Sum", "Mean", "Where", "And", "Or", "Xor"}
    | {"Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"}
)
_SAME_SHAPE = frozenset(
    {
        "Abs",
        "Acos",
        "Acosh",
        "Asin",
        "Asinh",
        "Atan",
        "Atanh",
        "Cast",
        "CastLike",
        "Ceil",
        "Clip",
        "Cos",
        "Cosh",
    }
    | {
        "Erf",
        "Exp",
        "Floor",
        "Gelu",
        "Identity",
        "IsNaN",
        "IsInf",
        "Log",
        "LogSoftmax",
        "Neg",
        "Not",
        "Reciprocal",
    }
    | {
        "Relu",
        "Round",
        "Sigmoid",
        "Sign",
        "Sin",
        "Sinh",
        "Softmax",
        "Softplus",
        "Sqrt",
        "Tan",
        "Tanh",
        "CumSum",
    }
    | {"ScatterElements", "ScatterND", "Trilu", "BatchNormalization", "HardSigmoid", "Elu", "LeakyRelu"}
)

_ONE_TYPE = frozenset({"Split", "BatchNormalization", "SoftmaxCrossEntropyLoss", "LayerNormalization"})


def infer_outputs(node: ir.Node) -> None:
    """Set element type and shape of a new node's outputs as far as its inputs tell.

    Nothing is told where attributes and inputs do not go together, as in branches that are never taken.
    """
    try:
        _infer_outputs(node)
    except (LookupError, ValueError):
        return


def _infer_outputs(node: ir.Node) -> None:
    if node.op_type in _BODIES:
        _infer_from_body(node)
        return
    if node.op_type in _SEQUENCES:
        _infer_sequence(node)
        return
    dtype = _dtype(node)
    shape = _shape(node)
    for index, output in enumerate(node.outputs):
        if dtype is not None and (index == 0 or node.op_type in _ONE_TYPE):
            output.dtype = dtype
        if index == 0 and shape is not None:
            output.shape = ir.Shape(shape)
    if node.op_type == "Split":
        _split(node)
    if node.op_type == "SoftmaxCrossEntropyLoss" and len(node.outputs) == 2 and node.inputs[0] is not None:
        node.outputs[1].shape = node.inputs[0].shape  # the log-probabilities
    if node.op_type in ("MaxPool", "TopK") and len(node.outputs) == 2:
        node.outputs[1].dtype = ir.DataType.INT64


def told_shape(value: ir.Value) -> tuple[Dimension, ...] | None:
    """The shape of a value, or what the inputs of its node tell: ONNX's inference sees no constants outside a body."""
    producer = value.producer()
    known = dimensions(value)
    if known is not None or producer is None:
        return known
    return shape_from_inputs(value)


def shape_from_inputs(value: ir.Value) -> tuple[Dimension, ...] | None:
    """What the inputs of its node tell of the shape of a value, whatever else is known of it."""
    producer = value.producer()
    if producer is None or producer.domain or value is not producer.outputs[0]:
        return None
    try:
        return _shape(producer)
    except (LookupError, ValueError):
        return None


def is_followed(operator: str) -> bool:
    """Whether as much is told here of a standard operator's one output as ONNX's inference does for known inputs."""
    return keeps_shape(operator) or operator in _FOLLOWED


_FOLLOWED = frozenset({"Concat", "ConstantOfShape", "Expand", "Flatten", "MatMul", "Reshape", "Transpose", "Unsqueeze"})


def is_elementwise(operator: str) -> bool:
    """Whether a standard operator has one output, to whose shape its inputs broadcast."""
    return operator in _ELEMENTWISE


def keeps_shape(operator: str) -> bool:
    """Whether the result of a standard operator has the shape of its first input, or that to which all broadcast."""
    return operator in _ELEMENTWISE or operator in _SAME_SHAPE


def keeps_type(operator: str) -> bool:
    """Whether the element type of a standard operator's results follows from that of its inputs, as is told here."""
    return keeps_shape(operator) or operator in _SHAPES or operator in _TYPED


_TYPED = frozenset(
    {
        "Conv",
        "Expand",
        "Flatten",
        "Gather",
        "GatherElements",
        "Gemm",
        "LayerNormalization",
        "Pad",
        "Slice",
        "Split",
        "Tile",
    }
)

_SEQUENCES = frozenset(
    {"SequenceConstruct", "SequenceEmpty", "SequenceInsert", "SequenceErase", "SplitToSequence", "SequenceMap"}
)


def _infer_sequence(node: ir.Node) -> None:
    """These give sequences of tensors of the element type that comes in, SequenceMap of its body's."""
    sources = [value.dtype for value in node.inputs if value is not None]
    if node.op_type == "SequenceMap":
        sources = [value.dtype for value in node.attributes["body"].as_graph().outputs]
    if node.op_type == "SequenceEmpty":
        given = node.attributes.get("dtype")
        sources = [ir.DataType.FLOAT if given is None else ir.DataType(given.as_int())]
    for output, dtype in zip(node.outputs, sources, strict=False):
        if dtype is not None:
            output.type = ir.SequenceType(ir.TensorType(dtype))


# The attribute with a body whose outputs, after the first few, have the types of the node's outputs.
_BODIES = {"If": ("then_branch", 0), "Loop": ("body", 1), "Scan": ("body", 0)}


def _infer_from_body(node: ir.Node) -> None:
    name, skipped = _BODIES[node.op_type]
    for output, source in zip(node.outputs, node.attributes[name].as_graph().outputs[skipped:], strict=False):
        output.type = source.type


_TYPED_BY = {
    **dict.fromkeys(("CastLike", "DequantizeLinear", "Where"), 1),
    **dict.fromkeys(("EmbedLayerNormalization", "GatherBlockQuantized", "MatMulIntegerToFloat", "OneHot"), 2),
}
"""The input that gives an operator's first output its element type, where that is not the first input."""


def _dtype(node: ir.Node) -> ir.DataType | None:
    if node.op_type in _BOOLEAN:
        return ir.DataType.BOOL
    if node.op_type in _INT64:
        return ir.DataType.INT64
    if node.op_type == "Cast":
        return ir.DataType(node.attributes["to"].as_int())
    if node.op_type == "EyeLike" and "dtype" in node.attributes:
        return ir.DataType(node.attributes["dtype"].as_int())
    if node.op_type == "ConstantOfShape":
        value = node.attributes.get("value")
        return ir.DataType.FLOAT if value is None else value.as_tensor().dtype
    position = _TYPED_BY.get(node.op_type, 0)
    source = node.inputs[position] if position < len(node.inputs) else None
    return None if source is None else source.dtype


def _shape(node: ir.Node) -> tuple[Dimension, ...] | None:
    inputs = node.inputs
    if node.op_type in _ELEMENTWISE:
        return broadcast_shapes(*(None if v is None else dimensions(v) for v in inputs))
    if node.op_type in _SAME_SHAPE and inputs and inputs[0] is not None:
        return dimensions(inputs[0])
    if node.op_type in _SHAPES and inputs and inputs[0] is not None:
        source = dimensions(inputs[0])
        return None if source is None else _SHAPES[node.op_type](node, source)
    return None


def broadcast_shapes(*shapes: tuple[Dimension, ...] | None) -> tuple[Dimension, ...] | None:
    """The shape that NumPy broadcasting gives; ``None`` per axis that the sizes do not decide."""
    if any(shape is None for shape in shapes):
        return None
    known = [shape for shape in shapes if shape is not None]
    rank = max((len(shape) for shape in known), default=0)
    result: list[Dimension] = []
    for axis in range(-rank, 0):
        sizes = {shape[axis] for shape in known if -axis <= len(shape)} - {1}
        fixed = [size for size in sizes if isinstance(size, int)]
        if fixed:
            result.append(fixed[0])
        elif not sizes:
            result.append(1)
        else:
            result.append(next(iter(sizes)) if len(sizes) == 1 else None)
    return tuple(result)


def _transpose(node: ir.Node, shape: tuple[Dimension, ...]) -> tuple[Dimension, ...]:
    attribute = node.attributes.get("perm")
    order = list(attribute.as_ints()) if attribute is not None else list(range(len(shape)))[::-1]
    return tuple(shape[axis] for axis in order)


def _reduce(node: ir.Node, shape: tuple[Dimension, ...]) -> tuple[Dimension, ...] | None:
    keep = node.attributes.get("keepdims")
    keepdims = keep is None or keep.as_int() == 1
    noop = node.attributes.get("noop_with_empty_axes")
    given = node.inputs[1] if len(node.inputs) > 1 else None
    constant = None if given is None else constant_tensor(given)
    if given is not None and constant is None:
        return (None,) * len(shape) if keepdims and noop is None else None
    axes = set() if constant is None else {int(axis) % len(shape) for axis in constant.numpy().reshape(-1)}
    if not axes:
        if noop is not None and noop.as_int() == 1:
            return shape
        return (1,) * len(shape) if keepdims else ()
    if keepdims:
        return tuple(1 if axis in axes else size for axis, size in enumerate(shape))
    return tuple(size for axis, size in enumerate(shape) if axis not in axes)


def _matmul(node: ir.Node, left: tuple[Dimension, ...]) -> tuple[Dimension, ...] | None:
    second = node.inputs[1]
    right = None if second is None else dimensions(second)
    if right is None or len(left) < 2 or len(right) < 2:
        return None
    batch = broadcast_shapes(left[:-2], right[:-2])
    return None if batch is None else (*batch, left[-2], right[-1])


def _unsqueeze(node: ir.Node, shape: tuple[Dimension, ...]) -> tuple[Dimension, ...] | None:
    axes = _constant_axes(node)
    if axes is None:
        return None
    rank = len(shape) + len(axes)
    new = {axis % rank for axis in axes}
    rest = iter(shape)
    return tuple(1 if axis in new else next(rest) for axis in range(rank))


def _squeeze(node: ir.Node, shape: tuple[Dimension, ...]) -> tuple[Dimension, ...] | None:
    axes = _constant_axes(node)
    if axes is None:
        return () if shape == (1,) else None
    gone = {axis % len(shape) for axis in axes}
    return tuple(size for axis, size in enumerate(shape) if axis not in gone)


def _constant_axes(node: ir.Node) -> list[int] | None:
    given = node.inputs[1] if len(node.inputs) > 1 else None
    constant = None if given is None else constant_tensor(given)
    return None if constant is None else [int(axis) for axis in constant.numpy().reshape(-1)]


def _shape_operator(node: ir.Node, shape: tuple[Dimension, ...]) -> tuple[Dimension, ...]:
    start, end = node.attributes.get("start"), node.attributes.get("end")
    first = 0 if start is None else start.as_int()
    last = len(shape) if end is None else end.as_int()
    return (len(range(len(shape))[first:last]),)


def _reshape(node: ir.Node, shape: tuple[Dimension, ...]) -> tuple[Dimension, ...] | None:
    target = _constant_axes(node)
    if target is None:
        second = node.inputs[1] if len(node.inputs) > 1 else None
        wanted = None if second is None else dimensions(second)
        return (None,) * wanted[0] if wanted is not None and isinstance(wanted[0], int) else None
    allow = node.attributes.get("allowzero")
    copied = allow is None or allow.as_int() == 0
    sizes: list[Dimension] = [
        shape[axis] if size == 0 and copied and axis < len(shape) else size for axis, size in enumerate(target)
    ]
    if -1 in sizes:
        rest = [size for size in sizes if size != -1]
        missing: Dimension = None
        if all(isinstance(size, int) for size in (*shape, *rest)):
            total, known = 1, 1
            for size in shape:
                total *= int(size)  # type: ignore[arg-type]
            for size in rest:
                known *= int(size)  # type: ignore[arg-type]
            missing = total // known if known else None
        sizes[sizes.index(-1)] = missing
    return tuple(sizes)


def _split(node: ir.Node) -> None:
    """Give the parts of a Split their shapes, where their sizes are constants or follow from their number."""
    source = None if node.inputs[0] is None else dimensions(node.inputs[0])
    if source is None:
        return
    given = node.attributes.get("axis")
    axis = (0 if given is None else given.as_int()) % len(source)
    sizes: Sequence[Dimension] | None = _constant_axes(node)
    if sizes is None:
        whole, parts = source[axis], len(node.outputs)
        sizes = [None] * parts
        if isinstance(whole, int) and len(node.inputs) < 2:
            each = -(-whole // parts)
            sizes = [each] * (parts - 1) + [whole - each * (parts - 1)]
    for output, size in zip(node.outputs, sizes, strict=True):
        if output.shape is None:
            output.shape = ir.Shape((*source[:axis], size, *source[axis + 1 :]))


def _gather(node: ir.Node, shape: tuple[Dimension, ...]) -> tuple[Dimension, ...] | None:
    places = None if node.inputs[1] is None else dimensions(node.inputs[1])
    if places is None:
        return None
    given = node.attributes.get("axis")
    axis = (0 if given is None else given.as_int()) % len(shape)
    return (*shape[:axis], *places, *shape[axis + 1 :])


def _pad(node: ir.Node, shape: tuple[Dimension, ...]) -> tuple[Dimension, ...]:
    pads, rank = _constant_axes(node), len(shape)
    if pads is None or len(pads) != 2 * rank or len(node.inputs) > 3:
        return (None,) * rank
    added = [pads[axis] + pads[rank + axis] for axis in range(rank)]
    return tuple(
        size if not more else size + more if isinstance(size, int) else None
        for size, more in zip(shape, added, strict=True)
    )


def _concat(node: ir.Node, shape: tuple[Dimension, ...]) -> tuple[Dimension, ...] | None:
    axis = node.attributes["axis"].as_int() % max(len(shape), 1)
    total = 0
    for value in node.inputs:
        source = None if value is None else dimensions(value)
        if source is None:
            return (*shape[:axis], None, *shape[axis + 1 :])
        size = source[axis]
        if not isinstance(size, int):
            return (*shape[:axis], None, *shape[axis + 1 :])
        total += size
    return (*shape[:axis], total, *shape[axis + 1 :])


_SHAPES = {
    "Transpose": _transpose,
    "MatMul": _matmul,
    "Unsqueeze": _unsqueeze,
    "Squeeze": _squeeze,
    "Shape": _shape_operator,
    "Size": lambda node, shape: (),
    "Reshape": _reshape,
    "Concat": _concat,
    "Gather": _gather,
    "Pad": _pad,
    "Range": lambda node, shape: (None,),
    **dict.fromkeys(
        (
            *("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2"),
            *("ReduceSumSquare", "ReduceLogSum", "ReduceLogSumExp"),
        ),
        _reduce,
    ),
}
