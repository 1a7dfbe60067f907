"""Optimizer nodes that native kernels run: their parameters, what is fused into them, when they run."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import onnx_ir as ir

from onnxtrain.autodiff.fused import VERSION
from onnxtrain.graph import Builder
from onnxtrain.graph.domains import ONNXTRAIN_DOMAIN
from onnxtrain.graph.replace import remove_nodes, take_over
from onnxtrain.graph.shapes import infer_shapes
from onnxtrain.graph.value import attributes_of, constant_number, made_by
from onnxtrain.lowering.memory.in_place import Ancestors, Readers
from onnxtrain.lowering.training_info.rounding import DECODE, ENCODE, OPERATOR, is_signed
from onnxtrain.operators.registry import find
from onnxtrain.operators.schema import OptimizerSchema

_TYPES = (ir.DataType.FLOAT, ir.DataType.DOUBLE)


class Variable(NamedTuple):
    """One parameter of an optimizer node."""

    inputs: tuple[ir.Value, ...]
    outputs: tuple[ir.Value, ...]
    mask: ir.Value | None = None
    seeds: tuple[int, ...] = ()
    blockwise: bool = False
    parameter_seed: int | None = None


def variables_of(node: ir.Node, schema: OptimizerSchema) -> list[Variable] | None:
    """Return the parameters of an optimizer node; ``None`` where the kernels cannot update them."""
    inputs = [value for value in node.inputs if value is not None]
    groups = 2 + len(schema.used_states(schema.complete(attributes_of(node))))
    count = (len(inputs) - 2) // groups
    if len(inputs) < len(node.inputs) or len(node.outputs) != count * (groups - 1):
        return None
    if any(value.dtype not in _TYPES for value in inputs[2 : 2 + count]):
        return None
    return [Variable(tuple(inputs[2 + i :: count]), tuple(node.outputs[i::count])) for i in range(count)]


def _held_in_bfloat16(x: ir.Value) -> ir.Value | None:
    """Return the bfloat16 value that a parameter is the float copy of, or ``None``."""
    cast = made_by(x, "Cast")
    return cast.inputs[0] if cast is not None and _is_bfloat16(cast.inputs[0]) else None


def _without_factor(variables: Sequence[Variable]) -> tuple[ir.Value | None, list[Variable], list[ir.Node]]:
    """Return the scalar that multiplies all gradients, the gradients before it, and the nodes that multiply."""
    nodes = [made_by(variable.inputs[1], "Mul", alone=True) for variable in variables]
    factors = {None if node is None else node.inputs[1] for node in nodes}
    factor = next(iter(factors)) if len(factors) == 1 else None
    if factor is None or factor.shape is None or len(factor.shape) != 0:
        return None, list(variables), []
    found = [node for node in nodes if node is not None]
    return factor, [_with_gradient(*pair) for pair in zip(variables, found, strict=True)], found


def _with_gradient(variable: Variable, node: ir.Node, *, slot: int = 0, mask: ir.Value | None = None) -> Variable:
    """Return the variable with its gradient replaced by an input of the node that computed it."""
    gradient = node.inputs[slot]
    assert gradient is not None
    inputs = (variable.inputs[0], gradient, *variable.inputs[2:])
    return variable._replace(inputs=inputs, mask=variable.mask if mask is None else mask)


def fuse_updates(model: ir.Model) -> None:
    """Fuse optimizer nodes with clipping factors, masks and rounding of states, in place: one pass over memory.

    Separate operators read and write all gradients again, which takes almost as long as the update itself, and bfloat16
    states would also exist in float32.

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
        factor, variables, passed = _without_factor(variables)
        variables, masking = _without_masks(variables)
        roles = [state.name for state in schema.used_states(schema.complete(attributes_of(node)))]
        variables, rounding, widening = _without_rounding(variables, node.inputs[1], roles)
        held_before = [variable for variable in variables if _held_in_bfloat16(variable.inputs[0]) is not None]
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
                **attributes_of(node),
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
        node = made_by(variable.inputs[1], "Where", alone=True)
        if node is None or constant_number(node.inputs[2]) != 0:
            found.append(variable)
            continue
        mask, x = node.inputs[0], variable.inputs[0]
        if mask is None or mask.shape is None or x.shape is None or not _same_sizes(mask.shape, x.shape):
            found.append(variable)
            continue
        found.append(_with_gradient(variable, node, slot=1, mask=mask))
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
        x, new = _held_in_bfloat16(variable.inputs[0]), variable.outputs[0]
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
    node = made_by(state, DECODE if blockwise else "Cast", ONNXTRAIN_DOMAIN if blockwise else "", alone=True)
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


LEAST_BYTES = 4 << 20
"""Smallest weights, in bytes, that one node updates: fewer do not pay for starting all threads."""


def optimizer_in_backward(graph: ir.Graph) -> None:
    """Split optimizer nodes into parts in the order in which gradients become ready, in place.

    One node for all parameters keeps all gradients until it runs: as many bytes as the weights. Behind the last reader
    of its weights, a part's gradients are released at once. In a portable graph the runtime chooses the order.

    If a node that is not an ancestor of a part's gradients reads its weights, such as the matmul for the gradient of a
    layer's input, the part gets its learning rate through ``After``, so that it may write the weights in place. Each
    part is inserted at the earliest possible position, since ONNX Runtime mostly keeps the order of a graph. Optimizer
    nodes whose gradients share a clipping factor stay: the factor needs the norm of all of them.

    Requires: a sorted graph. Ensures: the same.
    """
    for node in list(graph):
        schema = find(node.domain, node.op_type)
        variables = None if schema is None else variables_of(node, schema)
        if variables is None or _without_factor(variables)[0] is not None:
            continue
        parts = list(_parts(graph, variables))
        rate = node.inputs[0]
        if len(parts) > 1 and rate is not None and rate.dtype == ir.DataType.FLOAT:
            _split(graph, node, parts)


def _parts(graph: ir.Graph, variables: Sequence[Variable]) -> Iterator[list[Variable]]:
    """Return the parameters in the order in which their gradients come, cut where a part is large enough."""
    index = {node: position for position, node in enumerate(graph)}

    def comes(variable: Variable) -> int:
        producer = variable.inputs[1].producer()
        return -1 if producer is None else index[producer]

    part: list[Variable] = []
    size, left = 0, sum(map(_bytes, variables))
    for variable in sorted(variables, key=comes):
        part.append(variable)
        size += _bytes(variable)
        if size >= LEAST_BYTES and left - size >= LEAST_BYTES:
            yield part
            left, part, size = left - size, [], 0
    if part:
        yield part


def _bytes(variable: Variable) -> int:
    x = variable.inputs[0]
    if x.dtype is None or x.shape is None or not x.shape.is_static():
        return 0
    return math.prod(x.shape.numpy()) * int(x.dtype.itemsize)


def _split(graph: ir.Graph, node: ir.Node, parts: Sequence[Sequence[Variable]]) -> None:
    ancestors, readers, nodes = Ancestors(graph), Readers(graph), list(graph)
    substitutes: dict[ir.Value, ir.Value] = {}
    rate, count = node.inputs[:2]
    assert rate is not None
    assert count is not None
    for number, part in enumerate(parts):
        waiting = _unordered(part, node, readers, ancestors)
        read = [rate, count, *waiting, *(value for variable in part for value in variable.inputs)]
        producers = [producer for value in read if (producer := value.producer()) is not None]
        last = max(map(ancestors.position, producers), default=-1)
        op = Builder(graph, graph.opset_imports[""], before=nodes[last + 1])
        op.scope = f"{node.name or 'update'}/{number}"
        ready = op.wrap(rate)
        if waiting:
            ready = op.After(ready, *map(op.wrap, waiting), domain=ONNXTRAIN_DOMAIN)
            graph.opset_imports.setdefault(ONNXTRAIN_DOMAIN, VERSION)
        old = [output for column in zip(*(variable.outputs for variable in part), strict=True) for output in column]
        columns = zip(*(variable.inputs for variable in part), strict=True)
        new = op.several(
            node.op_type,
            ready,
            op.wrap(count),
            *(op.wrap(value) for column in columns for value in column),
            outputs=len(old),
            domain=node.domain,
            **attributes_of(node),
        )
        substitutes.update({before: after.ir for before, after in zip(old, new, strict=True)})
    take_over(graph, substitutes)
    remove_nodes(graph, [node])


def _unordered(part: Sequence[Variable], node: ir.Node, readers: Readers, ancestors: Ancestors) -> list[ir.Value]:
    """Return results of readers of weights that may run after the gradients of a part are ready."""
    producers = [producer for variable in part if (producer := variable.inputs[1].producer()) is not None]
    late = {
        reading.node: None
        for variable in part
        for reading in readers.of(_held_in_bfloat16(variable.inputs[0]) or variable.inputs[0])
        if reading.node not in (node, variable.inputs[0].producer())
    }
    found: list[ir.Node] = []
    for reader in sorted(late, key=ancestors.position, reverse=True):  # later ones first: they cover earlier ones
        if not any(ancestors.includes(known, reader) for known in (*producers, *found)):
            found.append(reader)
    return [reader.outputs[0] for reader in found]
