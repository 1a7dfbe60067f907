"""Replace nodes by the bodies of their functions, and learn types from registered bodies.

Functions are model-local ones, those that ONNX defines, and registered bodies of operators that ONNX does not know.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import onnx
import onnx_ir as ir
from onnx import defs, version_converter

from onnxtrain.autodiff.node import Node, too_large
from onnxtrain.autodiff.path import Forward, Route, may_carry
from onnxtrain.autodiff.registry import Body, find_registered_body
from onnxtrain.errors import GradientError
from onnxtrain.graph import Builder
from onnxtrain.graph.clone import Values, captured_values, clone_nodes, subgraphs, values_read
from onnxtrain.graph.domains import is_default_domain
from onnxtrain.graph.inference import infer_outputs, keeps_type
from onnxtrain.graph.limits import TooLargeError
from onnxtrain.graph.shapes import infer_shapes
from onnxtrain.graph.value import dimensions, is_float


def expand_functions(forward: Forward, route: Route, *, shapes: bool = True) -> tuple[list[ir.Node], list[ir.Node]]:
    """Expand functions on the path, in place, until every node has a rule, or neither rule nor body."""
    while True:
        learn_all_types(forward)
        path = forward.path(route)
        given = {output for node in path for output in node.outputs}
        missing = []
        op: Builder | None = None  # bodies share constants, sizes, and nodes such as masks
        expanded, known = False, True
        for node in path:
            entry = forward.entry(node)
            if entry is None:
                op = op or Builder(forward.graph, forward.opset)
                outputs = [output for output in node.outputs if output.uses()]
                made = _expand_node(forward, node, op)
                if made is None:
                    missing.append(node)
                else:
                    expanded = True
                    outputs += [output for one in made for output in one.outputs]
                    known = known and all(_is_inferred(output, shapes) for output in outputs)
            elif entry.function is None or _loses_quantized(node, given):
                missing.append(node)
            elif subgraphs(node):
                missing += _missing_inside(forward, node, set(map(forward.current, (*route.xs, *given))))
        if not expanded:
            return path, missing
        # The types in most bodies are known as soon as their nodes are emitted.
        if not known or any(forward.entry(node) is None for node in forward.path(route)):
            _infer_bodies(forward)


def is_expanded(forward: Forward, route: Route) -> bool:
    """Return whether a gradient has nothing to expand and no types to learn, so that a search keeps the graph."""
    if any(output.type is None for node in forward.graph for output in node.outputs if output.name):
        return False
    return all(forward.entry(node) is not None and not subgraphs(node) for node in forward.path(route))


def _expand_node(forward: Forward, node: ir.Node, op: Builder) -> list[ir.Node] | None:
    """Replace a node by its body; return the body's nodes, or ``None`` without a body."""
    body = find_body(node, forward.opsets, forward.functions)
    if body is not None:
        return expand(node, body, forward.replaced, forward.functions)
    written = find_registered_body(node.op_type, node.domain)
    if written is None:
        return None
    return expand_registered(node, written, op.before(node, sharing=True), forward.replaced)


def _missing_inside(forward: Forward, node: ir.Node, active: Collection[ir.Value]) -> list[ir.Node]:
    """Return the nodes without a rule in the bodies of an operator."""
    captured = [value for value in captured_values(node) if value in active]
    found: list[ir.Node] = []
    for graph in subgraphs(node):
        inputs = [value for value in graph.inputs if may_carry(value)]
        outputs = [value for value in graph.outputs if may_carry(value)]
        found += expand_functions(forward.inside(graph), Route(tuple(outputs), (*inputs, *captured)))[1]
    return found


def _infer_bodies(forward: Forward) -> None:
    """Infer the shapes inside expanded bodies, which rules and nested bodies use."""
    if forward.graph.opset_imports:  # a main graph
        infer_shapes(ir.Model(forward.graph, ir_version=10, functions=list(forward.functions.values())))
        return
    for node in forward.graph:  # after calls in the body of an operator
        if any(output.type is None for output in node.outputs):
            infer_outputs(node)


def _is_inferred(value: ir.Value, shapes: bool) -> bool:
    """Return whether a value has a type and, if shapes are wanted and it is floating, a size or symbol per axis."""
    if not isinstance(value.type, ir.TensorType) or value.dtype == ir.DataType.UNDEFINED:
        return value.type is not None and not isinstance(value.type, ir.TensorType)
    if not shapes:
        return True
    shape = dimensions(value)
    return shape is not None and (not is_float(value) or None not in shape)


def _loses_quantized(node: ir.Node, given: Collection[ir.Value]) -> bool:
    """Return whether the bodies of a node read quantized values, to which no gradient is carried."""
    return bool(subgraphs(node)) and any(value in given and value.dtype in _QUANTIZED for value in values_read(node))


_QUANTIZED = frozenset(
    {ir.DataType.INT8, ir.DataType.UINT8, ir.DataType.INT16, ir.DataType.UINT16, ir.DataType.INT4, ir.DataType.UINT4}
)
"""Types of quantized values; wider integers are mostly indices and sizes."""


def find_body(
    node: ir.Node, opsets: Mapping[str, int], functions: Mapping[ir.OperatorIdentifier, ir.Function]
) -> ir.Function | None:
    """The function that defines a node's operator, or ``None`` where it is primitive or unknown."""
    local = functions.get(node.op_identifier())
    return local if local is not None else _standard_body(node, opsets)


def _standard_body(node: ir.Node, opsets: Mapping[str, int]) -> ir.Function | None:
    version = opsets.get(node.domain)
    if version is None:
        return None
    try:
        schema: Any = defs.get_schema(node.op_type, version, node.domain)
    except defs.SchemaError:
        return None

    def newest(versions: Iterable[int]) -> int:
        return max((v for v in versions if v <= version), default=0)

    if schema.has_function and (found := newest(schema.function_opset_versions)):
        return _deserialize(schema.get_function_with_opset_version(found), node, opsets)
    if schema.has_context_dependent_function and (found := newest(schema.context_dependent_function_opset_versions)):
        types = [_type_bytes(value) for value in node.inputs]
        proto = ir.serde.serialize_node(node).SerializeToString()
        body = schema.get_context_dependent_function_with_opset_version(found, proto, types)
        return _deserialize(body, node, opsets) if body else None
    return None


def _type_bytes(value: ir.Value | None) -> bytes:
    if value is None or value.type is None:
        return bytes(onnx.TypeProto().SerializeToString())
    proto = onnx.ValueInfoProto()
    ir.serde.serialize_value_into(proto, value)
    return bytes(proto.type.SerializeToString())


def _deserialize(body: bytes, node: ir.Node, opsets: Mapping[str, int]) -> ir.Function:
    proto = onnx.FunctionProto.FromString(body)
    _trim_outputs(proto)
    # The subgraphs of the node become part of the body; the values that they capture become inputs.
    proto.input.extend(value.name or "" for value in captured_values(node))
    _upgrade(proto, opsets.get("", 1))
    function = ir.serde.deserialize_function(proto)
    schema = defs.get_schema(node.op_type, opsets[node.domain], node.domain)
    for name, attribute in schema.attributes.items():
        if name not in node.attributes and attribute.default_value.name:
            node.attributes.add(ir.serde.deserialize_attribute(attribute.default_value))
    return function


def _trim_outputs(proto: onnx.FunctionProto) -> None:
    """Remove outputs that a body declares and does not produce, since the node leaves them out."""
    produced = {name for node in proto.node for name in node.output} | set(proto.input)
    while proto.output and proto.output[-1] not in produced:
        proto.output.pop()
    for name in proto.output:
        if name not in produced:
            proto.node.append(onnx.helper.make_node("Identity", [proto.input[0]], [name]))


def _upgrade(proto: onnx.FunctionProto, version: int) -> None:
    """Bring a body that is written for an older opset to the graph's, if any of its operators changed."""
    own = {entry.domain: entry.version for entry in proto.opset_import}.get("", version)
    operators = {node.op_type for node in proto.node if is_default_domain(node.domain)}
    if own >= version or all(_since(operator, own) == _since(operator, version) for operator in operators):
        return
    inputs, outputs = ([onnx.ValueInfoProto(name=name) for name in names] for names in (proto.input, proto.output))
    graph = onnx.GraphProto(name="body", node=proto.node, input=inputs, output=outputs)
    model = onnx.ModelProto(graph=graph, opset_import=[onnx.helper.make_opsetid("", own)], ir_version=10)
    try:
        converted = version_converter.convert_version(model, version)
    except (RuntimeError, version_converter.ConvertError):
        return  # reference attributes are beyond the converter; the operators differ in types only
    del proto.node[:]
    proto.node.extend(converted.graph.node)


def _since(operator: str, version: int) -> int:
    """The opset in which a standard operator got the form that it has at a version."""
    return int(defs.get_schema(operator, version, "").since_version)


def expand(
    node: ir.Node,
    body: ir.Function,
    replaced: dict[ir.Value, ir.Value],
    functions: Collection[ir.OperatorIdentifier] = (),
) -> list[ir.Node]:
    """Replace a node that calls a function by the function's nodes."""
    graph = node.graph
    assert graph is not None
    values: Values = dict.fromkeys(body.inputs)
    values.update(zip(body.inputs, node.inputs, strict=False))
    captured = captured_values(node)
    last = body.inputs[len(body.inputs) - len(captured) :]
    if [formal.name for formal in last] == [value.name for value in captured]:
        values.update(zip(last, captured, strict=True))
    prefix = _prefix(node)
    defaults = {a.name: a for a in body.attributes.values() if a.value is not None}
    new = clone_nodes(body, values, rename=lambda name: f"{prefix}/{name}", attributes={**defaults, **node.attributes})
    graph.insert_before(node, new)
    for made in new:
        if made.op_identifier() not in functions:
            infer_outputs(made)
    for old, formal in zip(node.outputs, body.outputs, strict=False):
        result = values[formal]
        if result is None:
            continue
        if result.producer() not in new:  # the body passes an input through: the output's name needs a value of its own
            identity = ir.Node("", "Identity", [result], num_outputs=1, name=f"{prefix}/Identity")
            graph.insert_before(node, identity)
            infer_outputs(identity)
            new.append(identity)
            result = identity.outputs[0]
        _replace_output(old, result, replaced)
    graph.remove(node, safe=True)
    return new


def expand_registered(node: ir.Node, body: Body, op: Builder, replaced: dict[ir.Value, ir.Value]) -> list[ir.Node]:
    """Replace a node by the nodes that its registered body emits."""
    graph = node.graph
    assert graph is not None
    op.scope = _prefix(node)
    op.prefix = f"{op.scope}/"
    try:
        results = body(Node(node, op))
    except TooLargeError as error:
        raise too_large(node, error) from error
    for old, result in zip(node.outputs, results, strict=False):
        if result is None:
            continue
        # A value of its own: the body may pass an input through.
        _replace_output(old, op.Identity(result).ir, replaced)
    graph.remove(node, safe=True)
    return op.emitted


def _prefix(node: ir.Node) -> str:
    """The prefix of the names in a node's body: unique, and the same each time for the same model.

    The result of a body takes the name of the node's output. A node of the body that has a body itself may give that
    result; it then has another name or operator, since functions do not call themselves.
    """
    given = next((output.name for output in node.outputs if output.name), "body")
    return f"{node.name or node.op_type}/{given}"


def _replace_output(old: ir.Value, new: ir.Value, replaced: dict[ir.Value, ir.Value]) -> None:
    replaced[old], name = new, old.name
    new.type = new.type if old.type is None else old.type
    new.shape = new.shape if old.shape is None else old.shape
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    if name:
        old.name = None
        new.name = name


def learn_all_types(forward: Forward) -> None:
    """Give the values of a main graph the types that registered bodies determine, and infer those that follow."""
    while forward.graph.opset_imports and learn_types(forward.graph, forward.opset):
        infer_shapes(ir.Model(forward.graph, ir_version=10, functions=list(forward.functions.values())))


def learn_types(graph: ir.Graph, opset: int) -> bool:
    """Give values without a type the type that the registered bodies of their nodes give them, in place.

    ONNX's inference stops at operators that it does not know. Where no gradient flows through such a node (in frozen
    layers, for example) it is not expanded, but the nodes behind it need types all the same.
    """
    learned = False
    for node in list(graph):
        if all(_is_known(output) for output in node.outputs if output.name):
            continue
        if not all(value is None or _is_known(value) for value in node.inputs):
            continue
        body = find_registered_body(node.op_type, node.domain)
        if body is not None:
            learned = _learn(node, body, Builder(graph, opset, before=node)) or learned
        elif not node.domain and keeps_type(node.op_type):
            infer_outputs(node)
    return learned


def _is_known(value: ir.Value) -> bool:
    """Return whether a value has a type; ONNX's inference may find a shape and leave the type open."""
    return value.type is not None and value.dtype != ir.DataType.UNDEFINED


def _learn(node: ir.Node, body: Body, op: Builder) -> bool:
    """Emit the body, take over its types, and remove it again."""
    graph = node.graph
    assert graph is not None
    try:
        results = body(Node(node, op))
    except GradientError:
        results = ()  # a body that does not cover the node is an error only where a gradient needs it
    learned = False
    for output, result in zip(node.outputs, results, strict=False):
        if result is not None and not _is_known(output) and _is_known(result.ir):
            output.type, output.shape = result.ir.type, result.ir.shape
            learned = True
    graph.remove(op.emitted, safe=True)
    return learned
