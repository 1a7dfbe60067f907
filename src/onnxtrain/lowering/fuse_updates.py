"""Updates of a training step together with what is done to gradients just before: one pass over memory, not two.

Clipping by norm multiplies every gradient by the same factor, and a mask makes a part of it zero; as operators of their
own, each reads and writes all gradients once more, beside an update that takes little longer than that. Only in working
copies for sessions that load the native kernels: a step graph for any runtime has the standard operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnxtrain.autodiff.fused import VERSION
from onnxtrain.graph import Builder
from onnxtrain.graph.domains import ONNXTRAIN_DOMAIN
from onnxtrain.graph.replace import remove_nodes, take_over
from onnxtrain.graph.shapes import infer_shapes
from onnxtrain.graph.value import constant_number
from onnxtrain.operators.registry import find
from onnxtrain.operators.schema import OptimizerSchema

_TYPES = (ir.DataType.FLOAT, ir.DataType.DOUBLE)


@dataclass(frozen=True)
class _Variable:
    """One parameter of an optimizer node.

    Attributes:
        inputs: X, G, and the states.
        outputs: The new X, and the new states.
        mask: Where it is false the gradient is zero; ``None`` for no mask.
    """

    inputs: tuple[ir.Value, ...]
    outputs: tuple[ir.Value, ...]
    mask: ir.Value | None = None


def fuse_updates(model: ir.Model) -> None:
    """Let optimizer nodes take their gradients as they were before a factor or a mask, in place.

    Optimizers over gradients that are all products with one scalar, or of which some are
    ``Where(mask, gradient, 0)``, become FusedAdagrad, FusedAdam, … of the domain ``onnxtrain``: inputs R, T, factor,
    then all X, all G, with ``masked = 1`` all masks (bool, of X's shape), and all states; the other attributes and the
    outputs are those of the operator. Parameters with a mask and those without get a node each. Where something else
    reads the gradient that the operator would have had, it keeps it.

    Requires: a sorted graph. Ensures: the same.
    """
    graph = model.graph
    if _lacks_shapes(graph):  # of factors and masks in a stranger's training model
        infer_shapes(model)
    for node in list(graph):
        schema = find(node.domain, node.op_type)
        variables = None if schema is None else _variables(node, schema)
        if schema is None or variables is None:
            continue
        factor, variables, passed = _without_factor(variables)
        variables, masking = _without_masks(variables)
        if factor is None and not masking:
            continue
        op = Builder(graph, graph.opset_imports[""], before=node)
        rate, count = (op.wrap(value) for value in node.inputs[:2] if value is not None)
        scale = op.constant(1.0, ir.DataType.FLOAT) if factor is None else op.wrap(factor)
        substitutes: dict[ir.Value, ir.Value] = {}
        for masked in (False, True):
            group = [variable for variable in variables if (variable.mask is not None) == masked]
            if not group:
                continue
            op.scope = "/".join(filter(None, (node.name or "update", "masked" if masked else "")))
            columns = [list(column) for column in zip(*(variable.inputs for variable in group), strict=True)]
            if masked:
                columns.insert(2, [variable.mask for variable in group if variable.mask is not None])
            old = [
                output for column in zip(*(variable.outputs for variable in group), strict=True) for output in column
            ]
            new = op.several(
                f"Fused{node.op_type}",
                rate,
                count,
                scale,
                *(op.wrap(value) for column in columns for value in column),
                outputs=len(old),
                domain=ONNXTRAIN_DOMAIN,
                masked=int(masked),
                **{name: attribute.value for name, attribute in node.attributes.items()},
            )
            substitutes.update({before: after.ir for before, after in zip(old, new, strict=True)})
        take_over(graph, substitutes)
        remove_nodes(graph, [node, *passed, *masking])
        graph.opset_imports.setdefault(ONNXTRAIN_DOMAIN, VERSION)


def _lacks_shapes(graph: ir.Graph) -> bool:
    """Whether the shape of something that gradients are combined with right before an update is not known."""
    updates = [node for node in graph if find(node.domain, node.op_type) is not None]
    producers = [value.producer() for node in updates for value in node.inputs if value is not None]
    combined = [node for node in producers if node is not None and node.op_type in ("Mul", "Where")]
    return any(value is not None and value.shape is None for node in combined for value in node.inputs)


def _variables(node: ir.Node, schema: OptimizerSchema) -> list[_Variable] | None:
    """The parameters of an optimizer node; ``None`` where the kernels cannot update them."""
    inputs = [value for value in node.inputs if value is not None]
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    groups = 2 + len(schema.used_states(schema.complete(attributes)))
    count = (len(inputs) - 2) // groups
    if len(inputs) < len(node.inputs) or len(node.outputs) != count * (groups - 1):
        return None
    if any(value.dtype not in _TYPES for value in inputs[2 : 2 + count]):
        return None
    return [_Variable(tuple(inputs[2 + i :: count]), tuple(node.outputs[i::count])) for i in range(count)]


def _without_factor(variables: Sequence[_Variable]) -> tuple[ir.Value | None, list[_Variable], list[ir.Node]]:
    """The scalar that all gradients are multiplied by, the gradients before it, and the nodes that multiply."""
    nodes = [_made_for_update(variable.inputs[1], "Mul") for variable in variables]
    factors = {None if node is None else node.inputs[1] for node in nodes}
    factor = next(iter(factors)) if len(factors) == 1 else None
    if factor is None or factor.shape is None or len(factor.shape) != 0:
        return None, list(variables), []
    found = [node for node in nodes if node is not None]
    return factor, [_with_gradient(*pair) for pair in zip(variables, found, strict=True)], found


def _without_masks(variables: Sequence[_Variable]) -> tuple[list[_Variable], list[ir.Node]]:
    """The variables with their masks, and the nodes that applied them."""
    found, nodes = [], []
    for variable in variables:
        node = _made_for_update(variable.inputs[1], "Where")
        if node is None or constant_number(node.inputs[2]) != 0:
            found.append(variable)
            continue
        mask, x = node.inputs[0], variable.inputs[0]
        if mask is None or mask.shape is None or x.shape is None or not _same_sizes(mask.shape, x.shape):
            found.append(variable)
            continue
        found.append(_with_gradient(variable, node, place=1, mask=mask))
        nodes.append(node)
    return found, nodes


def _made_for_update(gradient: ir.Value, operator: str) -> ir.Node | None:
    """The node that a gradient comes from, where it is this operator and nothing but the update reads its result."""
    node = gradient.producer()
    if node is None or node.domain or node.op_type != operator or gradient.is_graph_output():
        return None
    return node if len(gradient.uses()) == 1 else None


def _with_gradient(variable: _Variable, node: ir.Node, *, place: int = 0, mask: ir.Value | None = None) -> _Variable:
    gradient = node.inputs[place]
    assert gradient is not None
    return _Variable((variable.inputs[0], gradient, *variable.inputs[2:]), variable.outputs, mask)


def _same_sizes(one: ir.Shape, other: ir.Shape) -> bool:
    return one.is_static() and other.is_static() and list(one) == list(other)
