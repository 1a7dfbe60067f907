"""Updates of a training step together with what is done to gradients just before: one pass over memory, not two.

Clipping by norm multiplies every gradient by the same factor, and a mask makes a part of it zero; as operators of their
own, each reads and writes all gradients once more, beside an update that takes little longer than that. Only in working
copies for sessions that load the native kernels: a step graph for any runtime has the standard operators.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxtrain.autodiff.fused import VERSION
from onnxtrain.graph import Builder
from onnxtrain.graph.domains import ONNXTRAIN_DOMAIN
from onnxtrain.graph.replace import remove_nodes, take_over
from onnxtrain.graph.shapes import infer_shapes
from onnxtrain.graph.value import constant_number
from onnxtrain.lowering.updates import Variable, made_for_update, variables_of, with_gradient, without_factor
from onnxtrain.operators.registry import find


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
        variables = None if schema is None else variables_of(node, schema)
        if schema is None or variables is None:
            continue
        factor, variables, passed = without_factor(variables)
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


def _without_masks(variables: Sequence[Variable]) -> tuple[list[Variable], list[ir.Node]]:
    """The variables with their masks, and the nodes that applied them."""
    found, nodes = [], []
    for variable in variables:
        node = made_for_update(variable.inputs[1], "Where")
        if node is None or constant_number(node.inputs[2]) != 0:
            found.append(variable)
            continue
        mask, x = node.inputs[0], variable.inputs[0]
        if mask is None or mask.shape is None or x.shape is None or not _same_sizes(mask.shape, x.shape):
            found.append(variable)
            continue
        found.append(with_gradient(variable, node, place=1, mask=mask))
        nodes.append(node)
    return found, nodes


def _same_sizes(one: ir.Shape, other: ir.Shape) -> bool:
    return one.is_static() and other.is_static() and list(one) == list(other)
