"""Types and shapes of standard operators from their inputs: the one table behind both Python inferences.

The builder asks it for each node that a rule emits, thousands between two inferences of ONNX: there only constants
count as known elements. :mod:`onnxtrain.graph.shapes` asks it for whole graphs and follows sizes that the graph
computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import onnx_ir as ir

from onnxtrain.graph.domains import MICROSOFT_DOMAIN
from onnxtrain.graph.layers import reads_transposed
from onnxtrain.graph.sizes import product, quotient
from onnxtrain.graph.value import Dimension, constant_tensor, dimensions, input_of, order_of

Sizes = tuple[Dimension, ...] | None
"""A shape, or the elements of an integer vector; ``None`` where nothing is known."""


class Facts(Protocol):
    """The knowledge about a node's inputs from which the shape of its output follows."""

    divides_symbols: bool

    def shape(self, value: ir.Value | None) -> Sizes:
        """The shape of a value."""

    def content(self, value: ir.Value | None) -> Sizes:
        """The elements of a small integer tensor."""


class _Declared:
    """The shapes that values have, and the elements of constants."""

    divides_symbols = False

    def shape(self, value: ir.Value | None) -> Sizes:
        return dimensions(value)

    def content(self, value: ir.Value | None) -> Sizes:
        constant = constant_tensor(value)
        if constant is None or not constant.dtype.is_integer():
            return None
        return tuple(int(number) for number in constant.numpy().reshape(-1))


DECLARED = _Declared()
"""The facts that values and constants state."""

_BOOLEAN = frozenset(
    {"Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "And", "Or", "Xor", "Not", "IsNaN", "IsInf"}
)
_INT64 = frozenset({"Shape", "Size", "NonZero", "ArgMax", "ArgMin", "SequenceLength"})
_ELEMENTWISE = frozenset(
    {"Add", "Sub", "Mul", "Div", "Pow", "Mod", "Min", "Max", "Sum", "Mean", "Where", "And", "Or", "Xor"}
    | {"Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"}
)
_SAME_SHAPE = frozenset(
    {"Abs", "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Cast", "CastLike", "Ceil", "Clip", "Cos", "Cosh"}
    | {"CumSum", "Elu", "Erf", "Exp", "Floor", "Gelu", "HardSigmoid", "Identity", "IsInf", "IsNaN", "LeakyRelu", "Log"}
    | {"LogSoftmax", "Neg", "Not", "Reciprocal", "Relu", "Round", "Sigmoid", "Sign", "Sin", "Sinh", "Softmax"}
    | {"CumProd", "Softplus", "Sqrt", "Tan", "Tanh", "BatchNormalization", "ScatterElements", "ScatterND", "Trilu"}
)
_TYPED = frozenset(
    {"Conv", "Expand", "Flatten", "Gather", "GatherElements", "LayerNormalization", "Pad", "Slice", "Split"}
)
_ONE_TYPE = frozenset({"Split", "BatchNormalization", "SoftmaxCrossEntropyLoss", "LayerNormalization"})
_SEQUENCES = frozenset(
    {"SequenceConstruct", "SequenceEmpty", "SequenceInsert", "SequenceErase", "SplitToSequence", "SequenceMap"}
)
_TYPED_BY = {
    **dict.fromkeys(("CastLike", "DequantizeLinear", "Where"), 1),
    **dict.fromkeys(("EmbedLayerNormalization", "GatherBlockQuantized", "MatMulIntegerToFloat", "OneHot"), 2),
}
"""The input that gives an operator's first output its element type, where that is not the first input."""

_BODIES = {"If": ("then_branch", 0), "Loop": ("body", 1), "Scan": ("body", 0)}
"""The attribute with a body whose outputs, after the first few, have the types of the node's outputs."""


def infer_outputs(node: ir.Node) -> None:
    """Set element type and shape of a new node's outputs as far as its inputs determine them.

    They stay unknown where attributes and inputs do not fit, as in branches that are never taken.
    """
    try:
        _infer_outputs(node)
    except (LookupError, ValueError):
        return


def _infer_outputs(node: ir.Node) -> None:
    if node.op_type in _BODIES:
        name, skipped = _BODIES[node.op_type]
        for output, source in zip(node.outputs, node.attributes[name].as_graph().outputs[skipped:], strict=False):
            output.type = source.type
        return
    if node.op_type in _SEQUENCES:
        _infer_sequence(node)
        return
    dtype = _dtype(node)
    shape = _declared_shape(node)
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


def _infer_sequence(node: ir.Node) -> None:
    """Give sequences the element type of the tensors that enter them; SequenceMap's that of its body's outputs."""
    sources = [value.dtype for value in node.inputs if value is not None]
    if node.op_type == "SequenceMap":
        sources = [value.dtype for value in node.attributes["body"].as_graph().outputs]
    if node.op_type == "SequenceEmpty":
        sources = [ir.DataType(node.attributes.get_int("dtype", ir.DataType.FLOAT))]
    for output, dtype in zip(node.outputs, sources, strict=False):
        if dtype is not None:
            output.type = ir.SequenceType(ir.TensorType(dtype))


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
    source = input_of(node, _TYPED_BY.get(node.op_type, 0))
    return None if source is None else source.dtype


def _split(node: ir.Node) -> None:
    """Give the parts of a Split their shapes, where their sizes are constants or follow from their number."""
    source = DECLARED.shape(node.inputs[0])
    if source is None:
        return
    axis = integer(node, "axis", 0) % len(source)
    sizes: Sequence[Dimension] | None = DECLARED.content(input_of(node, 1))
    if sizes is None:
        whole, parts = source[axis], len(node.outputs)
        sizes = [None] * parts
        if isinstance(whole, int) and len(node.inputs) < 2:
            each = -(-whole // parts)
            sizes = [each] * (parts - 1) + [whole - each * (parts - 1)]
    for output, size in zip(node.outputs, sizes, strict=True):
        if output.shape is None:
            output.shape = ir.Shape((*source[:axis], size, *source[axis + 1 :]))


def _declared_shape(node: ir.Node) -> Sizes:
    """The shape of the first output as the shapes of inputs and constants determine it."""
    if node.op_type in _NOT_AS_EMITTED:
        return None
    if node.op_type in _SHAPES and DECLARED.shape(input_of(node, 0)) is None:
        return None
    return output_shape(node, DECLARED)


def known_shape(value: ir.Value) -> Sizes:
    """Return a value's shape, or infer it from its node's inputs: in a body, ONNX ignores constants outside."""
    known = dimensions(value)
    return shape_from_inputs(value) if known is None else known


def shape_from_inputs(value: ir.Value) -> Sizes:
    """The shape of a value as its node's inputs determine it, whatever else is known of the value."""
    producer = value.producer()
    if producer is None or producer.domain or value is not producer.outputs[0]:
        return None
    try:
        return _declared_shape(producer)
    except (LookupError, ValueError):
        return None


def is_inferred(operator: str) -> bool:
    """Return whether this module finds as much of a standard operator's one output as ONNX does for known inputs."""
    return keeps_shape(operator) or operator in _INFERRED


_INFERRED = frozenset({"Concat", "ConstantOfShape", "Expand", "Flatten", "MatMul", "Reshape", "Transpose", "Unsqueeze"})


def is_elementwise(operator: str) -> bool:
    """Return whether a standard operator has one output, to whose shape its inputs broadcast."""
    return operator in _ELEMENTWISE


def keeps_shape(operator: str) -> bool:
    """Return whether a standard operator's output has its first input's shape, or the broadcast shape of all inputs."""
    return operator in _ELEMENTWISE or operator in _SAME_SHAPE


def keeps_type(operator: str) -> bool:
    """Return whether the element types of a standard operator's outputs follow from its inputs here."""
    return keeps_shape(operator) or operator in _SHAPES.keys() - _NOT_AS_EMITTED or operator in _TYPED


def output_shape(node: ir.Node, facts: Facts) -> Sizes:
    """The shape of the first output of a standard operator, as far as the facts about its inputs determine it."""
    if node.op_type in _ELEMENTWISE:
        return broadcast_shapes(*map(facts.shape, node.inputs))
    if node.op_type in _SAME_SHAPE:
        return facts.shape(input_of(node, 0))
    rule = _SHAPES.get(node.op_type)
    return None if rule is None else rule(node, facts)


def broadcast_shapes(*shapes: tuple[Dimension, ...] | None) -> Sizes:
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


def _quotient(sizes: Sequence[Dimension], divisors: Sequence[Dimension]) -> Dimension:
    """The product of sizes over the product of divisors, where it is a number or one of the sizes."""
    found = quotient(product(sizes), product(divisors))
    return found if isinstance(found, int) or found in sizes else None


def integer(node: ir.Node, name: str, default: int) -> int:
    """An integer attribute of a node, or its default."""
    attribute = node.attributes.get(name)
    return default if attribute is None or attribute.is_ref() else attribute.as_int()


def slice_bounds(node: ir.Node, facts: Facts, rank: int) -> dict[int, slice] | None:
    """The slice of each axis that a Slice cuts, where all bounds are numbers and steps are positive."""
    parts = [facts.content(input_of(node, index)) for index in (1, 2)]
    count = len(parts[0] or ())
    for index, default in ((3, tuple(range(count))), (4, (1,) * count)):
        parts.append(default if input_of(node, index) is None else facts.content(input_of(node, index)))
    bounds: dict[int, slice] = {}
    for bound in zip(*(part or () for part in parts), strict=False):
        start, end, axis, step = bound
        if not (isinstance(start, int) and isinstance(end, int) and isinstance(axis, int) and isinstance(step, int)):
            return None
        if step < 1:
            return None
        bounds[axis % rank] = slice(start, end, step)
    return bounds if count and len(bounds) == count else None


def _axes(node: ir.Node, facts: Facts) -> list[int] | None:
    """The axes that a node's second input lists, or its attribute in older opsets, where they are known."""
    if "axes" in node.attributes:
        return list(node.attributes["axes"].as_ints())
    content = facts.content(input_of(node, 1))
    axes = [axis for axis in content or () if isinstance(axis, int)]
    return axes if content is not None and len(axes) == len(content) else None


def _transpose(node: ir.Node, facts: Facts) -> Sizes:
    shape = facts.shape(node.inputs[0])
    return None if shape is None else tuple(shape[axis] for axis in order_of(node, len(shape)))


def _reduce(node: ir.Node, facts: Facts) -> Sizes:
    shape, keepdims = facts.shape(node.inputs[0]), integer(node, "keepdims", 1) == 1
    if shape is None:
        return None
    listed = () if input_of(node, 1) is None and "axes" not in node.attributes else _axes(node, facts)
    if listed is None:
        return (None,) * len(shape) if keepdims and "noop_with_empty_axes" not in node.attributes else None
    axes = {axis % len(shape) for axis in listed}
    if not axes:
        if integer(node, "noop_with_empty_axes", 0) == 1:
            return shape
        return (1,) * len(shape) if keepdims else ()
    if keepdims:
        return tuple(1 if axis in axes else size for axis, size in enumerate(shape))
    return tuple(size for axis, size in enumerate(shape) if axis not in axes)


def _matmul(node: ir.Node, facts: Facts) -> Sizes:
    left, right = facts.shape(node.inputs[0]), facts.shape(node.inputs[1])
    if left is None or right is None or len(left) < 2 or len(right) < 2:
        return None
    batch = broadcast_shapes(left[:-2], right[:-2])
    return None if batch is None else (*batch, left[-2], right[-1])


def _gemm(node: ir.Node, facts: Facts) -> Sizes:
    left, right = facts.shape(node.inputs[0]), facts.shape(node.inputs[1])
    if left is None or right is None or not len(left) == len(right) == 2:
        return None
    return left[reads_transposed(node, 0)], right[not reads_transposed(node)]


def _unsqueeze(node: ir.Node, facts: Facts) -> Sizes:
    shape, axes = facts.shape(node.inputs[0]), _axes(node, facts)
    if shape is None or axes is None:
        return None
    rank = len(shape) + len(axes)
    new = {axis % rank for axis in axes}
    rest = iter(shape)
    return tuple(1 if axis in new else next(rest) for axis in range(rank))


def _squeeze(node: ir.Node, facts: Facts) -> Sizes:
    shape, axes = facts.shape(node.inputs[0]), _axes(node, facts)
    if shape is None:
        return None
    if axes is None:
        return () if shape == (1,) else None
    gone = {axis % len(shape) for axis in axes}
    return tuple(size for axis, size in enumerate(shape) if axis not in gone)


def _shape_operator(node: ir.Node, facts: Facts) -> Sizes:
    shape = facts.shape(node.inputs[0])
    if shape is None:
        return None
    return (len(shape[integer(node, "start", 0) : integer(node, "end", len(shape))]),)


def _reshape(node: ir.Node, facts: Facts) -> Sizes:
    shape, target = facts.shape(node.inputs[0]), facts.content(input_of(node, 1))
    if target is None:
        return None
    sizes = list(target)
    if not integer(node, "allowzero", 0):
        for axis, size in enumerate(target):
            if size == 0:
                sizes[axis] = None if shape is None or axis >= len(shape) else shape[axis]
    if -1 in sizes:
        at = sizes.index(-1)
        rest = [*sizes[:at], *sizes[at + 1 :]]
        static = all(isinstance(size, int) for size in (*(shape or ()), *rest))
        sizes[at] = _quotient(shape, rest) if shape is not None and (static or facts.divides_symbols) else None
    return tuple(sizes)


def _gather(node: ir.Node, facts: Facts) -> Sizes:
    shape, indices = facts.shape(node.inputs[0]), facts.shape(node.inputs[1])
    if shape is None or indices is None:
        return None
    axis = integer(node, "axis", 0) % len(shape)
    return (*shape[:axis], *indices, *shape[axis + 1 :])


def _pad(node: ir.Node, facts: Facts) -> Sizes:
    shape, pads = facts.shape(node.inputs[0]), _axes(node, facts)
    if shape is None:
        return None
    rank = len(shape)
    if pads is None or len(pads) != 2 * rank or len(node.inputs) > 3:
        return (None,) * rank
    added = [pads[axis] + pads[rank + axis] for axis in range(rank)]
    return tuple(
        size if not more else size + more if isinstance(size, int) else None
        for size, more in zip(shape, added, strict=True)
    )


def _concat(node: ir.Node, facts: Facts) -> Sizes:
    shape = facts.shape(node.inputs[0])
    if shape is None:
        return None
    axis = node.attributes["axis"].as_int() % max(len(shape), 1)
    total = 0
    for value in node.inputs:
        source = facts.shape(value)
        size = None if source is None else source[axis]
        if not isinstance(size, int):
            return (*shape[:axis], None, *shape[axis + 1 :])
        total += size
    return (*shape[:axis], total, *shape[axis + 1 :])


def _range(node: ir.Node, facts: Facts) -> Sizes:
    bounds = [facts.content(value) for value in node.inputs]
    if all(bound is not None and len(bound) == 1 for bound in bounds):
        start, limit, delta = (bound[0] for bound in bounds if bound)
        if start == 0 and delta == 1 and not (isinstance(limit, int) and limit < 0):
            return (limit,)
    return (None,)


def _slice(node: ir.Node, facts: Facts) -> Sizes:
    sizes = facts.shape(node.inputs[0])
    bounds = None if not sizes else slice_bounds(node, facts, len(sizes))
    if sizes is None or bounds is None:
        return None
    return tuple(
        size if axis not in bounds else len(range(size)[bounds[axis]]) if isinstance(size, int) else None
        for axis, size in enumerate(sizes)
    )


def _tile(node: ir.Node, facts: Facts) -> Sizes:
    shape, repeats = facts.shape(node.inputs[0]), facts.content(input_of(node, 1))
    if shape is None or repeats is None or len(shape) != len(repeats):
        return None if shape is None else (None,) * len(shape)
    return tuple(
        size if times == 1 else size * times if isinstance(size, int) and isinstance(times, int) else None
        for size, times in zip(shape, repeats, strict=True)
    )


_SHAPES: dict[str, Callable[[ir.Node, Facts], Sizes]] = {
    "Transpose": _transpose,
    "MatMul": _matmul,
    "Gemm": _gemm,
    "Unsqueeze": _unsqueeze,
    "Squeeze": _squeeze,
    "Shape": _shape_operator,
    "Size": lambda node, facts: (),
    "Reshape": _reshape,
    "Concat": _concat,
    "ConstantOfShape": lambda node, facts: facts.content(node.inputs[0]),
    "Expand": lambda node, facts: broadcast_shapes(facts.shape(node.inputs[0]), facts.content(node.inputs[1])),
    "Gather": _gather,
    "Pad": _pad,
    "Range": _range,
    "Slice": _slice,
    "Tile": _tile,
    **dict.fromkeys(
        (
            *("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2"),
            *("ReduceSumSquare", "ReduceLogSum", "ReduceLogSumExp"),
        ),
        _reduce,
    ),
}

_NOT_AS_EMITTED = frozenset({"ConstantOfShape", "Expand", "Slice"})
"""Operators whose shapes only a whole graph's inference takes from the table; rules state those that they emit."""


# Microsoft's operators in language models, which ONNX's inference does not know

_LIKE_INPUT = {
    "BiasGelu": (0,),
    "FastGelu": (0,),
    "QuickGelu": (0,),
    "RotaryEmbedding": (0,),
    "SimplifiedLayerNormalization": (0,),
    "SkipLayerNormalization": (0, 3),
    "SkipSimplifiedLayerNormalization": (0, 3),
}
"""The outputs that have type and shape of the first input."""

_OWN = frozenset({*_LIKE_INPUT, "GroupQueryAttention", "MatMulNBits"})


def infer_microsoft_types(node: ir.Node) -> bool:
    """Give a type to outputs without one, in the order of the graph, also behind such nodes in standard operators."""
    source = node.inputs[0] if node.inputs else None
    if source is None or source.type is None or not node.outputs or node.outputs[0].type is not None:
        return False
    if node.op_type in _OWN and node.domain in ("", MICROSOFT_DOMAIN):
        last = {"MatMulNBits": _width_of_product, "GroupQueryAttention": _width_of_attention}.get(node.op_type)
        shape = dimensions(source)
        if shape is not None and last is not None:
            shape = (*shape[:-1], last(node, shape))
        for index in _LIKE_INPUT.get(node.op_type, (0,)):
            if index < len(node.outputs) and node.outputs[index].type is None:
                node.outputs[index].type = source.type
                node.outputs[index].shape = None if shape is None else ir.Shape(shape)
    elif not node.domain:
        infer_outputs(node)
    return node.outputs[0].type is not None


def _width_of_product(node: ir.Node, shape: tuple[Dimension, ...]) -> Dimension:
    return integer(node, "N", 0) or None


def _width_of_attention(node: ir.Node, shape: tuple[Dimension, ...]) -> Dimension:
    """The width of the queries, which may hold keys and values, too."""
    width = shape[-1]
    if len(node.inputs) > 1 and node.inputs[1] is not None:
        return width
    heads, groups = integer(node, "num_heads", 0), integer(node, "kv_num_heads", 0)
    return heads * width // (heads + 2 * groups) if isinstance(width, int) and heads else None
