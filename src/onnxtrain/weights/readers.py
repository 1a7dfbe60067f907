"""Find the readers of an initializer, through renaming and rearranging nodes, into bodies and functions."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import onnx_ir as ir

from onnxtrain.ir.value import constant_tensor

Reader = tuple[ir.Node, int]
"""A node and the input at which it reads."""

Functions = Mapping[ir.OperatorIdentifier, ir.Function]

REARRANGING = frozenset(
    {"Identity", "Cast", "CastLike", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Expand", "Tile"}
    | {"Slice", "Split", "Concat"}
)
"""Operators whose result holds the elements of their first input (Concat: of all), in another form."""

SHAPE_ONLY = frozenset({"Shape", "Size", "EyeLike", "RandomNormalLike", "RandomUniformLike"})
"""Operators that read no element."""

_ROLES = {1: "scale", 2: "bias", 3: "running mean", 4: "running variance"}


def role_of(operator: str, index: int) -> str:
    """Return the role of a normalization's input (scale, bias, mean, variance); "" for other operators.

    Example:
        >>> role_of("BatchNormalization", 4), role_of("Mul", 1)
        ('running variance', '')
    """
    return _ROLES.get(index, "") if operator.endswith("Normalization") else ""


def is_statistic(operator: str, index: int) -> bool:
    """Whether a normalization takes an input for its running statistics."""
    return role_of(operator, index).startswith("running")


def behind_identity(value: ir.Value | None) -> ir.Value | None:
    """The value that Identity nodes hand on."""
    while value is not None:
        producer = value.producer()
        if producer is None or producer.op_type != "Identity" or producer.domain:
            return value
        value = producer.inputs[0]
    return None


def summed_with(reader: Reader) -> ir.Node | None:
    """The node whose result an Add joins with what it reads there; ``None`` where a reader is no Add."""
    node, index = reader
    if node.op_type != "Add" or node.domain:
        return None
    other = behind_identity(node.inputs[1 - index])
    return None if other is None else other.producer()


def read_through_identity(value: ir.Value) -> list[Reader]:
    """Who reads the elements of a value, by its own name or those that Identity nodes give it.

    Exporters tie equal initializers with Identity nodes. A node that asks for the shape only is no reader.
    """
    return arrivals(value, through={"Identity"})


def arrivals(
    value: ir.Value, functions: Functions | None = None, through: Collection[str] = REARRANGING
) -> list[Reader]:
    """Return the nodes that read the elements of a value, through shape operators and into functions and loops.

    Args:
        value: The value.
        functions: Model-local functions; a call of one is seen as the nodes of its body.
        through: Operators of ONNX that hand their first input on.

    Returns:
        Nodes and inputs, each once, in order of discovery.
    """
    known = functions or {}
    found: dict[Reader, None] = {}
    waiting: list[tuple[ir.Value, tuple[ir.Node, ...]]] = [(value, ())]  # a value, and the calls that it is seen in
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
    """Whether a Gather takes one fixed slice, as from a stack of weights: it looks nothing up."""
    tensor = None if node.inputs[1] is None else constant_tensor(node.inputs[1])
    return tensor is not None and tensor.size == 1
