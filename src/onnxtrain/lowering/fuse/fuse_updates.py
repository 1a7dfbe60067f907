"""Fuse updates with the preceding operations on gradients and with the rounding of states: one pass over memory.

Clipping by norm multiplies every gradient by the same factor, and a mask zeroes a part of it. As separate operators,
each reads and writes all gradients again, which takes almost as long as the update itself. Unfused bfloat16 states
would also exist in float32. Only for sessions that load the native kernels: a portable step graph keeps the standard
operators.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import onnx_ir as ir

from onnxtrain.autodiff.fused import VERSION
from onnxtrain.graph import Builder
from onnxtrain.graph.domains import ONNXTRAIN_DOMAIN
from onnxtrain.graph.replace import remove_nodes, take_over
from onnxtrain.graph.shapes import infer_shapes
from onnxtrain.graph.value import constant_number
from onnxtrain.lowering.training_info.rounding import DECODE, ENCODE, OPERATOR, is_signed
from onnxtrain.lowering.updates import (
    Variable,
    held_in_bfloat16,
    made_for_update,
    variables_of,
    with_gradient,
    without_factor,
)
from onnxtrain.operators.nodes import attributes_of
from onnxtrain.operators.registry import find


def fuse_updates(model: ir.Model) -> None:
    """Fuse optimizer nodes with clipping factors, masks and rounding of states, in place.

    An optimizer node is replaced if all its gradients are multiplied by one scalar, if some gradients are
    ``Where(mask, gradient, 0)``, or if its states are bfloat16 or 8-bit with stochastic rounding. It becomes
    FusedAdagrad, FusedAdam, … of the domain ``onnxtrain``, with inputs R, T, factor, then all X, all G, with
    ``masked = 1`` all masks (bool, of X's shape), and all states, and with the attributes and outputs of the operator.

    - With ``seeds``, one for each state in order, states are bfloat16.
    - With ``blockwise = 1``, too, states are 8-bit; their scales precede them in the inputs and follow them in the
      outputs.
    - With ``parameter_seeds``, X is bfloat16, rounded likewise.

    Parameters with a mask and parameters without get separate nodes, and so do parameters with other states and
    parameters held in bfloat16. Other readers of the clipped or masked gradient keep reading it.

    Requires: a sorted graph. Ensures: the same.
    """
    graph = model.graph
    if _lacks_shapes(graph):  # of factors and masks in training models of other tools
        infer_shapes(model)
    for node in list(graph):
        schema = find(node.domain, node.op_type)
        variables = None if schema is None else variables_of(node, schema)
        if schema is None or variables is None:
            continue
        factor, variables, passed = without_factor(variables)
        variables, masking = _without_masks(variables)
        roles = [state.name for state in schema.used_states(schema.complete(attributes_of(node)))]
        variables, rounding, widening = _without_rounding(variables, node.inputs[1], roles)
        held_before = [variable for variable in variables if held_in_bfloat16(variable.inputs[0]) is not None]
        variables, more = _without_parameter_rounding(variables, node.inputs[1])
        rounding += more
        if factor is None and not masking and not rounding:
            continue
        op = Builder(graph, graph.opset_imports[""], before=node)
        rate, count = (op.wrap(value) for value in node.inputs[:2] if value is not None)
        scale = op.constant(1.0, ir.DataType.FLOAT) if factor is None else op.wrap(factor)
        substitutes: dict[ir.Value, ir.Value] = {}
        for masked, kept, held in itertools.product((False, True), ("", "bfloat16", "8bit"), (False, True)):
            group = [
                variable
                for variable in variables
                if (variable.mask is not None, _kept(variable), variable.parameter_seed is not None)
                == (masked, kept, held)
            ]
            if not group:
                continue
            labels = (node.name or "update", "masked" if masked else "", kept, "held" if held else "")
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
                **({"blockwise": 1} if kept == "8bit" else {}),
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
    """Return whether a factor or mask that is applied to gradients right before an update has no known shape."""
    updates = [node for node in graph if find(node.domain, node.op_type) is not None]
    producers = [value.producer() for node in updates for value in node.inputs if value is not None]
    combined = [node for node in producers if node is not None and node.op_type in ("Mul", "Where")]
    return any(value is not None and value.shape is None for node in combined for value in node.inputs)


def _without_masks(variables: Sequence[Variable]) -> tuple[list[Variable], list[ir.Node]]:
    """Return the variables with their masks, and the nodes that applied them."""
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
        found.append(with_gradient(variable, node, slot=1, mask=mask))
        nodes.append(node)
    return found, nodes


def _without_rounding(
    variables: Sequence[Variable], count: ir.Value | None, roles: Sequence[str]
) -> tuple[list[Variable], list[ir.Node], list[ir.Node]]:
    """Return the variables with their stored states, the nodes that rounded them, and those that widened them."""
    found, rounding, widening = [], list[ir.Node](), list[ir.Node]()
    for variable in variables:
        for blockwise in (False, True):
            before = [
                _widened_by(state, role, blockwise) for state, role in zip(variable.inputs[2:], roles, strict=True)
            ]
            rounds = [_rounded_by(new, count, blockwise) for new in variable.outputs[1:]]
            own = [node for node in before if node is not None]
            after = [node for node in rounds if node is not None]
            if before and len(own) == len(after) == len(before) and variable.inputs[0].dtype == ir.DataType.FLOAT:
                variable = _with_kept_states(variable, own, after, blockwise)
                rounding += after
                widening += own
                break
        found.append(variable)
    return found, rounding, widening


def _without_parameter_rounding(
    variables: Sequence[Variable], count: ir.Value | None
) -> tuple[list[Variable], list[ir.Node]]:
    """Return the variables with their stored parameters, and the nodes that rounded them."""
    found, rounding = [], list[ir.Node]()
    for variable in variables:
        x, new = held_in_bfloat16(variable.inputs[0]), variable.outputs[0]
        node = _rounded_by(new, count, blockwise=False)
        if x is None or node is None:
            found.append(variable)
            continue
        output, seed = node.outputs[0], node.attributes["seed"].as_int()
        output.dtype, output.shape = ir.DataType.BFLOAT16, x.shape
        inputs, outputs = (x, *variable.inputs[1:]), (output, *variable.outputs[1:])
        found.append(variable._replace(inputs=inputs, outputs=outputs, parameter_seed=seed))
        rounding.append(node)
    return found, rounding


def _with_kept_states(
    variable: Variable, widening: Sequence[ir.Node], rounding: Sequence[ir.Node], blockwise: bool
) -> Variable:
    """Return the variable with its stored states."""
    states = [node.inputs[0] for node in widening]
    scales = [node.inputs[1] for node in widening] if blockwise else []
    x = variable.inputs[0]
    inputs = (*variable.inputs[:2], *(value for value in (*scales, *states) if value is not None))
    for node in rounding:  # training models of other tools need not declare it
        node.outputs[0].dtype = ir.DataType.UINT8 if blockwise else ir.DataType.BFLOAT16
        node.outputs[0].shape = x.shape
    for node, scale in zip(rounding, scales, strict=False):
        node.outputs[1].dtype, node.outputs[1].shape = ir.DataType.FLOAT, None if scale is None else scale.shape
    outputs = [output for index in range(1 + blockwise) for output in (node.outputs[index] for node in rounding)]
    seeds = tuple(node.attributes["seed"].as_int() for node in rounding)
    return variable._replace(inputs=inputs, outputs=(variable.outputs[0], *outputs), seeds=seeds, blockwise=blockwise)


def _kept(variable: Variable) -> str:
    """Return the format in which the states of a variable are stored."""
    return "" if not variable.seeds else "8bit" if variable.blockwise else "bfloat16"


def _widened_by(state: ir.Value, role: str, blockwise: bool) -> ir.Node | None:
    """Return the node that widens a stored state, if nothing but the update reads its result."""
    node = made_for_update(state, DECODE if blockwise else "Cast", ONNXTRAIN_DOMAIN if blockwise else "")
    if node is None or not blockwise:
        return node if node is not None and _is_bfloat16(node.inputs[0]) else None
    signed = node.attributes.get("signed")
    return node if signed is not None and bool(signed.as_int()) == is_signed(role) else None


def _rounded_by(new: ir.Value, count: ir.Value | None, blockwise: bool) -> ir.Node | None:
    """Return the node that rounds the new value of a state, if nothing else reads that value."""
    readers = list(new.consumers())
    if len(readers) != 1 or len(new.uses()) != 1 or new.is_graph_output():
        return None
    (node,) = readers
    rounds = (node.domain, node.op_type) == (ONNXTRAIN_DOMAIN, ENCODE if blockwise else OPERATOR)
    return node if rounds and node.inputs[0] is new and node.inputs[1] is count else None


def _is_bfloat16(value: ir.Value | None) -> bool:
    return value is not None and value.dtype == ir.DataType.BFLOAT16


def _same_sizes(one: ir.Shape, other: ir.Shape) -> bool:
    return one.is_static() and other.is_static() and list(one) == list(other)
