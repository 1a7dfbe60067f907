"""Updates of a training step together with what is done to gradients just before, and to states: one pass over memory.

Clipping by norm multiplies every gradient by the same factor, and a mask makes a part of it zero; as operators of their
own, each reads and writes all gradients once more, beside an update that takes little longer than that. States that are
kept in bfloat16 would be there in float as well. Only in working copies for sessions that load the native kernels: a
step graph for any runtime has the standard operators.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import onnx_ir as ir

from onnxtrain.autodiff.fused import VERSION
from onnxtrain.graph import Builder
from onnxtrain.graph.domains import ONNXTRAIN_DOMAIN
from onnxtrain.graph.replace import remove_nodes, take_over
from onnxtrain.graph.shapes import infer_shapes
from onnxtrain.graph.value import constant_number
from onnxtrain.lowering.updates import (
    Variable,
    held_in_bfloat16,
    made_for_update,
    variables_of,
    with_gradient,
    without_factor,
)
from onnxtrain.operators.registry import find
from onnxtrain.training_info.rounding import OPERATOR


def fuse_updates(model: ir.Model) -> None:
    """Let optimizer nodes take their gradients as they were before a factor or a mask, in place.

    Optimizers over gradients that are all products with one scalar, or of which some are
    ``Where(mask, gradient, 0)``, or whose states are bfloat16 and rounded at random, become FusedAdagrad, FusedAdam, …
    of the domain ``onnxtrain``: inputs R, T, factor, then all X, all G, with ``masked = 1`` all masks (bool, of X's
    shape), and all states; the other attributes and the outputs are those of the operator. With ``seeds``, one for each
    of the states in their order, states are bfloat16, and with ``parameter_seeds`` so is X. Parameters with a mask and
    those without get a node each, and so do those in other types. Where something else reads the gradient that the
    operator would have had, it keeps it.

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
        variables, rounding, widening = _without_rounding(variables, node.inputs[1])
        held_before = [variable for variable in variables if held_in_bfloat16(variable.inputs[0]) is not None]
        variables, more = _without_parameter_rounding(variables, node.inputs[1])
        rounding += more
        if factor is None and not masking and not rounding:
            continue
        op = Builder(graph, graph.opset_imports[""], before=node)
        rate, count = (op.wrap(value) for value in node.inputs[:2] if value is not None)
        scale = op.constant(1.0, ir.DataType.FLOAT) if factor is None else op.wrap(factor)
        substitutes: dict[ir.Value, ir.Value] = {}
        for masked, kept, held in itertools.product((False, True), repeat=3):
            group = [
                variable
                for variable in variables
                if (variable.mask is not None, bool(variable.seeds), variable.parameter_seed is not None)
                == (masked, kept, held)
            ]
            if not group:
                continue
            labels = (
                node.name or "update",
                "masked" if masked else "",
                "bfloat16" if kept else "",
                "held" if held else "",
            )
            op.scope = "/".join(filter(None, labels))
            columns = [list(column) for column in zip(*(variable.inputs for variable in group), strict=True)]
            if masked:
                columns.insert(2, [variable.mask for variable in group if variable.mask is not None])
            old = [
                output for column in zip(*(variable.outputs for variable in group), strict=True) for output in column
            ]
            seeds = [variable.seeds for variable in group]
            new = op.several(
                f"Fused{node.op_type}",
                rate,
                count,
                scale,
                *(op.wrap(value) for column in columns for value in column),
                outputs=len(old),
                domain=ONNXTRAIN_DOMAIN,
                masked=int(masked),
                **({"seeds": [seed for row in zip(*seeds, strict=True) for seed in row]} if kept else {}),
                **({"parameter_seeds": [variable.parameter_seed for variable in group]} if held else {}),
                **{name: attribute.value for name, attribute in node.attributes.items()},
            )
            substitutes.update({before: after.ir for before, after in zip(old, new, strict=True)})
        take_over(graph, substitutes)
        casts = [cast for variable in held_before if (cast := variable.inputs[0].producer()) is not None]
        remove_nodes(graph, [*rounding, node, *passed, *masking, *widening])
        remove_nodes(graph, [cast for cast in dict.fromkeys(casts) if not cast.outputs[0].uses()])
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


def _without_rounding(
    variables: Sequence[Variable], count: ir.Value | None
) -> tuple[list[Variable], list[ir.Node], list[ir.Node]]:
    """The variables with their states as they are kept, the nodes that rounded these, and those that widened them."""
    found, rounding, widening = [], list[ir.Node](), list[ir.Node]()
    for variable in variables:
        wide = [made_for_update(state, "Cast") for state in variable.inputs[2:]]
        rounds = [_rounded_by(new, count) for new in variable.outputs[1:]]
        own = [node for node in wide if node is not None and _is_bfloat16(node.inputs[0])]
        after = [node for node in rounds if node is not None]
        if not wide or len(own) < len(wide) or len(after) < len(wide) or variable.inputs[0].dtype != ir.DataType.FLOAT:
            found.append(variable)
            continue
        inputs = (*variable.inputs[:2], *(node.inputs[0] for node in own if node.inputs[0] is not None))
        outputs = (variable.outputs[0], *(node.outputs[0] for node in after))
        for output in outputs[1:]:  # a stranger's training model need not say it
            output.dtype, output.shape = ir.DataType.BFLOAT16, variable.inputs[0].shape
        seeds = tuple(node.attributes["seed"].as_int() for node in after)
        found.append(replace(variable, inputs=inputs, outputs=outputs, seeds=seeds))
        rounding += after
        widening += own
    return found, rounding, widening


def _without_parameter_rounding(
    variables: Sequence[Variable], count: ir.Value | None
) -> tuple[list[Variable], list[ir.Node]]:
    """The variables with their parameters as they are held, and the nodes that rounded these; casts may have others."""
    found, rounding = [], list[ir.Node]()
    for variable in variables:
        x, new = held_in_bfloat16(variable.inputs[0]), variable.outputs[0]
        node = _rounded_by(new, count)
        if x is None or node is None:
            found.append(variable)
            continue
        output, seed = node.outputs[0], node.attributes["seed"].as_int()
        output.dtype, output.shape = ir.DataType.BFLOAT16, x.shape
        inputs, outputs = (x, *variable.inputs[1:]), (output, *variable.outputs[1:])
        found.append(replace(variable, inputs=inputs, outputs=outputs, parameter_seed=seed))
        rounding.append(node)
    return found, rounding


def _rounded_by(new: ir.Value, count: ir.Value | None) -> ir.Node | None:
    """The node that rounds the new value of a state, where nothing else reads that."""
    readers = list(new.consumers())
    if len(readers) != 1 or len(new.uses()) != 1 or new.is_graph_output():
        return None
    (node,) = readers
    rounds = (node.domain, node.op_type) == (ONNXTRAIN_DOMAIN, OPERATOR)
    return node if rounds and node.inputs[0] is new and node.inputs[1] is count else None


def _is_bfloat16(value: ir.Value | None) -> bool:
    return value is not None and value.dtype == ir.DataType.BFLOAT16


def _same_sizes(one: ir.Shape, other: ir.Shape) -> bool:
    return one.is_static() and other.is_static() and list(one) == list(other)
