"""Optimizer nodes that native kernels run: their parameters, what is fused into them, when they run."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import onnx_ir as ir

from onnxtrain.autodiff.fused import VERSION
from onnxtrain.graph import Builder, Value
from onnxtrain.graph.domains import ONNXTRAIN_DOMAIN
from onnxtrain.graph.replace import remove_nodes, take_over
from onnxtrain.graph.shapes import infer_shapes
from onnxtrain.graph.value import attributes_of, constant_number, have_one_shape, input_of, made_by
from onnxtrain.lowering.memory.in_place import Ancestors, Readers
from onnxtrain.lowering.rewrite import remove_unread
from onnxtrain.lowering.training_info.rounding import DECODE, ENCODE, OPERATOR, is_signed
from onnxtrain.operators.registry import find
from onnxtrain.operators.schema import OptimizerSchema

_TYPES = (ir.DataType.FLOAT, ir.DataType.DOUBLE)


_STORED = ("", "bfloat16", "8bit")
"""Formats of states that are not float."""


class Variable(NamedTuple):
    """One parameter of an optimizer node."""

    inputs: tuple[ir.Value, ...]
    outputs: tuple[ir.Value, ...]
    masked: bool = False
    seeds: tuple[int, ...] = ()
    stored: str = ""
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


def _emit(
    op: Builder, operator: str, given: Sequence[Value], variables: Sequence[Variable], domain: str, **attributes: Any
) -> dict[ir.Value, ir.Value]:
    """Emit an update of parameters, all X, all G and so on; return its outputs by those that they replace."""
    old, read = (
        [value for column in zip(*(variable[index] for variable in variables), strict=True) for value in column]
        for index in (1, 0)
    )
    new = op.several(operator, *given, *map(op.wrap, read), outputs=len(old), domain=domain, **attributes)
    return {before: after.ir for before, after in zip(old, new, strict=True)}


def _held_in_bfloat16(x: ir.Value) -> ir.Value | None:
    """Return the bfloat16 value that a parameter is the float copy of, or ``None``."""
    cast = made_by(x, "Cast")
    return cast.inputs[0] if cast is not None and _is_bfloat16(cast.inputs[0]) else None


def _without_factor(variables: list[Variable]) -> tuple[ir.Value | None, list[Variable]]:
    """Return the scalar that multiplies all gradients, and the parameters with the gradients before it."""
    nodes = [made_by(variable.inputs[1], "Mul", alone=True) for variable in variables]
    factors = {input_of(node, 1) if node is not None else None for node in nodes}
    factor = next(iter(factors)) if len(factors) == 1 else None
    if factor is None or factor.shape is None or len(factor.shape) != 0:
        return None, variables
    pairs = zip(variables, nodes, strict=True)
    return factor, [_with_gradient(variable, node.inputs[0]) for variable, node in pairs if node is not None]


def _with_gradient(variable: Variable, *gradient: ir.Value | None) -> Variable:
    """Return the parameter with another gradient, and perhaps a mask behind it."""
    given = (value for value in gradient if value is not None)
    return variable._replace(inputs=(variable.inputs[0], *given, *variable.inputs[2:]))


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
        roles = [state.name for state in schema.used_states(schema.complete(attributes_of(node)))]
        factor, fused = _without_factor(variables)
        fused = [_with_stored_states(variable, node.inputs[1], roles) for variable in fused]
        fused = [_with_mask(_with_stored_parameter(variable, node.inputs[1])) for variable in fused]
        if fused == variables:
            continue
        op = Builder(graph, before=node)
        rate, count = (op.wrap(value) for value in node.inputs[:2] if value is not None)
        given = rate, count, op.constant(1.0, ir.DataType.FLOAT) if factor is None else op.wrap(factor)
        substitutes: dict[ir.Value, ir.Value] = {}
        for (masked, stored, held), members in itertools.groupby(sorted(fused, key=_group), _group):
            group = list(members)
            labels = (node.name or "update", "masked" if masked else "", _STORED[stored], "held" if held else "")
            op.scope = "/".join(filter(None, labels))
            seeds = [seed for column in zip(*(variable.seeds for variable in group), strict=True) for seed in column]
            substitutes |= _emit(
                op,
                f"Fused{node.op_type}",
                given,
                group,
                ONNXTRAIN_DOMAIN,
                masked=int(masked),
                seeds=seeds or None,
                blockwise=1 if _STORED[stored] == "8bit" else None,
                parameter_seeds=[variable.parameter_seed for variable in group] if held else None,
                **attributes_of(node),
            )
        take_over(graph, substitutes)
        rounding = [reader for output in node.outputs for reader in output.consumers()]
        remove_unread(graph, [node, *rounding], ())
        op.import_domain(ONNXTRAIN_DOMAIN, VERSION)


def _group(variable: Variable) -> tuple[bool, int, bool]:
    """Return what the parameters of one node have in common."""
    return variable.masked, _STORED.index(variable.stored), variable.parameter_seed is not None


def _lacks_shapes(graph: ir.Graph) -> bool:
    """Return whether a factor or mask that is applied to gradients right before an update has no known shape."""
    updates = [node for node in graph if find(node.domain, node.op_type) is not None]
    producers = [value.producer() for node in updates for value in node.inputs if value is not None]
    combined = [node for node in producers if node is not None and node.op_type in ("Mul", "Where")]
    return any(value is not None and value.shape is None for node in combined for value in node.inputs)


def _with_mask(variable: Variable) -> Variable:
    """Return the parameter with the mask of its gradient, if it has one."""
    node = made_by(variable.inputs[1], "Where", alone=True)
    if node is None or constant_number(node.inputs[2]) != 0 or not have_one_shape(node.inputs[0], variable.inputs[0]):
        return variable
    return _with_gradient(variable, node.inputs[1], node.inputs[0])._replace(masked=True)


def _with_stored_states(variable: Variable, count: ir.Value | None, roles: Sequence[str]) -> Variable:
    """Return the parameter with its states as they are stored, if they are widened and rounded for this update."""
    x, *_ = variable.inputs
    for blockwise in (False, True):
        before = [_widened_by(state, role, blockwise) for state, role in zip(variable.inputs[2:], roles, strict=True)]
        after = [_rounded_by(new, count, blockwise) for new in variable.outputs[1:]]
        widening, rounding = ([node for node in nodes if node is not None] for nodes in (before, after))
        if not before or not len(widening) == len(rounding) == len(before) or x.dtype != ir.DataType.FLOAT:
            continue
        scales = [node.inputs[1] for node in widening] if blockwise else []
        stored = [value for value in (*scales, *(node.inputs[0] for node in widening)) if value is not None]
        for node in rounding:  # training models of other tools need not declare it
            node.outputs[0].dtype = ir.DataType.UINT8 if blockwise else ir.DataType.BFLOAT16
            node.outputs[0].shape = x.shape
        for node, scale in zip(rounding, scales, strict=False):
            node.outputs[1].dtype, node.outputs[1].shape = ir.DataType.FLOAT, None if scale is None else scale.shape
        outputs = [node.outputs[index] for index in range(1 + blockwise) for node in rounding]
        return variable._replace(
            inputs=(*variable.inputs[:2], *stored),
            outputs=(variable.outputs[0], *outputs),
            seeds=tuple(node.attributes["seed"].as_int() for node in rounding),
            stored="8bit" if blockwise else "bfloat16",
        )
    return variable


def _with_stored_parameter(variable: Variable, count: ir.Value | None) -> Variable:
    """Return the parameter as it is stored, if it is rounded for this update."""
    x, node = _held_in_bfloat16(variable.inputs[0]), _rounded_by(variable.outputs[0], count, blockwise=False)
    if x is None or node is None:
        return variable
    output, seed = node.outputs[0], node.attributes["seed"].as_int()
    output.dtype, output.shape = ir.DataType.BFLOAT16, x.shape
    inputs, outputs = (x, *variable.inputs[1:]), (output, *variable.outputs[1:])
    return variable._replace(inputs=inputs, outputs=outputs, parameter_seed=seed)


def _widened_by(state: ir.Value, role: str, blockwise: bool) -> ir.Node | None:
    """Return the node that widens a stored state, if nothing but the update reads its result."""
    node = made_by(state, DECODE if blockwise else "Cast", ONNXTRAIN_DOMAIN if blockwise else "", alone=True)
    if node is None or not blockwise:
        return node if node is not None and _is_bfloat16(node.inputs[0]) else None
    return node if node.attributes.get_int("signed", None) == int(is_signed(role)) else None


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
        op = Builder(graph, before=nodes[last + 1])
        op.scope = f"{node.name or 'update'}/{number}"
        ready = op.wrap(rate)
        if waiting:
            ready = op.After(ready, *map(op.wrap, waiting), domain=ONNXTRAIN_DOMAIN)
            graph.opset_imports.setdefault(ONNXTRAIN_DOMAIN, VERSION)
        substitutes |= _emit(op, node.op_type, (ready, op.wrap(count)), part, node.domain, **attributes_of(node))
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
