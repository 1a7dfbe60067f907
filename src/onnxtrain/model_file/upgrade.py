"""Raise a model to a newer opset, with the same results.

ONNX's version converter does the work. Its internal representation loses functions, sparse initializers, metadata and
references to attributes (workarounds: functions and metadata of converted models). So it converts a skeleton, and
everything that the conversion need not change is restored. Operators that it converts wrongly or refuses are rewritten
first (workarounds: converted Hardmax, converted Resize, converted BatchNormalization):

========================  ======  ==================================================================
operator                  before  defect of the converter
========================  ======  ==================================================================
Hardmax                   13      keeps ``axis`` though it no longer flattens the input at the axis
Upsample, Resize          11      becomes a Resize with another coordinate transformation
BatchNormalization        14      refused with the outputs of training mode
BatchNormalization        9       ``spatial=0`` has no equivalent: refused here, by name
Scan                      9       keeps the batch dimension that it no longer has: refused here
========================  ======  ==================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import onnx
import onnx.inliner
import onnx.shape_inference
import onnx.version_converter
from onnx import FunctionProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, numpy_helper

from onnxtrain.errors import ModelError
from onnxtrain.graph.domains import is_default_domain
from onnxtrain.model_file.proto import (
    STAND_IN_DOMAIN,
    all_nodes,
    default_opset,
    graph_skeleton,
    is_runtime_operator,
    proto_subgraphs,
    stand_in,
    without_data,
)


def repair_graph(graph: GraphProto, opset: int) -> None:
    """Rewrite operators that the converter gets wrong, in a graph and its subgraphs, in place."""
    for node in graph.node:
        for inner in proto_subgraphs(node):
            repair_graph(inner, opset)
    read = _names_read(graph)
    nodes: list[NodeProto] = []
    for node in graph.node:
        repair = _REPAIRS.get(node.op_type) if is_default_domain(node.domain) else None
        nodes += [node] if repair is None or opset >= repair[0] else repair[1](node, graph, read)
    del graph.node[:]
    graph.node.extend(nodes)


def _names_read(graph: GraphProto) -> set[str]:
    names = {value.name for value in graph.output}
    for node in graph.node:
        names.update(node.input)
        for inner in proto_subgraphs(node):
            names |= _names_read(inner)
    return names


def _attributes(node: NodeProto) -> dict[str, object]:
    return {item.name: onnx.helper.get_attribute_value(item) for item in node.attribute}


def _hardmax(node: NodeProto, graph: GraphProto, read: set[str]) -> list[NodeProto]:
    """Write Hardmax of opset 12 and earlier, which flattens its input at the axis, as explicit nodes."""
    x, y = node.input[0], node.output[0]
    axis = _attributes(node).get("axis", 1)
    shape, matrix, hard = (f"{y}.onnxtrain.{part}" for part in ("shape", "matrix", "hardmax"))
    return [
        onnx.helper.make_node("Shape", [x], [shape]),
        onnx.helper.make_node("Flatten", [x], [matrix], axis=axis),
        onnx.helper.make_node("Hardmax", [matrix], [hard], name=node.name, axis=1),
        onnx.helper.make_node("Reshape", [hard, shape], [y]),
    ]


def _resize(node: NodeProto, graph: GraphProto, read: set[str]) -> list[NodeProto]:
    """Write Upsample and earlier Resize as the Resize of opset 11.

    They map coordinates by ``x / scale`` ("asymmetric"), and round nearest neighbours down where an axis grows and up
    where it shrinks. No rounding mode does both. So if the scales do both, or are unknown, two nodes follow each other:
    one grows, one shrinks. Each is exact, since nearest neighbours are chosen axis by axis.
    """
    attributes = _attributes(node)
    mode = attributes.get("mode", b"nearest")
    x, y = node.input[0], node.output[0]
    nodes: list[NodeProto] = []
    known: np.ndarray | None
    if "scales" in attributes:  # Upsample before opset 9
        known, scales = np.array(attributes["scales"], np.float32), f"{y}.onnxtrain.scales"
        nodes.append(_constant(scales, known))
    else:
        scales = node.input[1]
        known = _constant_value(graph, scales)
    if mode != b"nearest" or node.op_type == "Upsample" or (known is not None and bool((known >= 1).all())):
        return [*nodes, _asymmetric(node.name, x, scales, y, mode, "floor")]
    if known is not None and bool((known <= 1).all()):
        return [*nodes, _asymmetric(node.name, x, scales, y, mode, "ceil")]
    one, larger, smaller, grown = (f"{y}.onnxtrain.{part}" for part in ("one", "larger", "smaller", "grown"))
    return [
        *nodes,
        _constant(one, np.array([1], np.float32)),
        onnx.helper.make_node("Max", [scales, one], [larger]),
        onnx.helper.make_node("Min", [scales, one], [smaller]),
        _asymmetric("", x, larger, grown, mode, "floor"),
        _asymmetric(node.name, grown, smaller, y, mode, "ceil"),
    ]


def _asymmetric(name: str, x: str, scales: str, y: str, mode: object, nearest_mode: str) -> NodeProto:
    # in the placeholder domain during the conversion, since this form is invalid before opset 13
    return onnx.helper.make_node(
        "Resize",
        [x, "", scales],
        [y],
        name=name,
        domain=STAND_IN_DOMAIN,
        mode=mode,
        coordinate_transformation_mode="asymmetric",
        nearest_mode=nearest_mode,
    )


def _constant(name: str, value: np.ndarray) -> NodeProto:
    return onnx.helper.make_node("Constant", [], [name], value=numpy_helper.from_array(value))


def _constant_value(graph: GraphProto, name: str) -> np.ndarray | None:
    for tensor in graph.initializer:
        if tensor.name == name:
            return numpy_helper.to_array(tensor)
    for node in graph.node:
        if node.op_type == "Constant" and name in node.output and is_default_domain(node.domain):
            return numpy_helper.to_array(node.attribute[0].t) if node.attribute[0].HasField("t") else None
    return None


def _batch_normalization(node: NodeProto, graph: GraphProto, read: set[str]) -> list[NodeProto]:
    """Write BatchNormalization before opset 14, where further outputs imply training mode, with the attribute."""
    attributes = _attributes(node)
    if attributes.pop("spatial", 1) != 1:
        raise ModelError(
            f"BatchNormalization {_label(node)} has spatial=0, which opset 9 removed, so that it cannot be "
            "upgraded; export the model at opset 9 or newer."
        )
    saved = [name for name in node.output[3:] if name in read]
    if saved:
        raise ModelError(
            f"BatchNormalization {_label(node)} has outputs that are read, {', '.join(map(repr, saved))}, but that "
            "opset 14 removed, so that it cannot be upgraded; export the model at opset 14 or newer."
        )
    if not any(node.output[1:]):
        del node.output[1:]
        return [node]
    # in the placeholder domain, since the converter refuses further outputs
    return [
        onnx.helper.make_node(
            "BatchNormalization",
            node.input,
            node.output[:3],
            name=node.name,
            domain=STAND_IN_DOMAIN,
            training_mode=1,
            epsilon=attributes.get("epsilon", 1e-5),
            momentum=attributes.get("momentum", 0.9),
        )
    ]


def _scan(node: NodeProto, graph: GraphProto, read: set[str]) -> list[NodeProto]:
    raise ModelError(
        f"Scan {_label(node)} has opset 8, whose batch dimension opset 9 removed, so that it cannot be "
        "upgraded; export the model at opset 9 or newer."
    )


def _label(node: NodeProto) -> str:
    return f"(node {node.name or node.output[0]!r})"


_Repair = Callable[[NodeProto, GraphProto, set[str]], list[NodeProto]]
_REPAIRS: dict[str, tuple[int, _Repair]] = {
    "Hardmax": (13, _hardmax),
    "Upsample": (10, _resize),
    "Resize": (11, _resize),
    "BatchNormalization": (14, _batch_normalization),
    "Scan": (9, _scan),
}
"""Opset below which an operator is rewritten, and the function that rewrites it."""

_FAILURES = (RuntimeError, onnx.version_converter.ConvertError, onnx.shape_inference.InferenceError)
"""Exceptions of the converter: assertions, refusals, and errors of its shape inference."""

_GRAPH_TYPES = (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS)


def upgrade_opset(proto: ModelProto, minimum: int) -> ModelProto:
    """Raise a model and its functions to an opset, with the same results.

    Args:
        proto: The model; it is not modified. External tensors stay external.
        minimum: Minimum opset of the default domain.

    Returns:
        The same object if nothing is below ``minimum``, else a new model. Values keep their names, and unaffected nodes
        are unchanged. A function that passes its attributes on to an operator whose schema changed is inlined, since
        only its calls have their values.

    Raises:
        ModelError: An operator has no equivalent at the newer opset; the message names it.

    Example:
        >>> model = onnx.parser.parse_model('''
        ... <ir_version: 7, opset_import: ["": 11]>
        ... f (float[2, 3] x) => (float[2] y) { y = ReduceSum<axes = [1], keepdims = 0>(x) }''')
        >>> [node.op_type for node in upgrade_opset(model, 18).graph.node]
        ['Constant', 'ReduceSum']
    """
    low = [function for function in proto.functions if _is_below(function, minimum)]
    if not _is_below(proto, minimum) and not low:
        return proto
    inlined = [function for function in low if _passes_attributes_on(function.node, function, minimum)]
    if inlined:
        return upgrade_opset(_inline(proto, inlined), minimum)
    result = ModelProto()
    result.CopyFrom(without_data(proto))
    _put_data_back(proto, result)
    if _is_below(proto, minimum):
        upgraded = _upgrade_graph(proto.graph, proto.opset_import, minimum)
        del result.graph.node[:]
        result.graph.node.extend(upgraded.node)
        names = {tensor.name for tensor in result.graph.initializer}
        result.graph.initializer.extend(item for item in upgraded.initializer if item.name not in names)
        _set_opset(result.opset_import, minimum)
    for function in result.functions:
        if _is_below(function, minimum):
            _upgrade_function(function, minimum)
    return result


def _is_below(proto: ModelProto | FunctionProto, minimum: int) -> bool:
    opset = default_opset(proto.opset_import)
    return opset is not None and opset < minimum


def _set_opset(imports: Iterable[OperatorSetIdProto], version: int) -> None:
    for item in imports:
        if is_default_domain(item.domain):
            item.version = version


def _put_data_back(source: ModelProto, target: ModelProto) -> None:
    tensors = {tensor.name: tensor for tensor in source.graph.initializer}
    for tensor in target.graph.initializer:
        tensor.CopyFrom(tensors[tensor.name])


def _inline(proto: ModelProto, functions: Sequence[FunctionProto]) -> ModelProto:
    names = [(function.domain, function.name) for function in functions]
    try:
        result = onnx.inliner.inline_selected_functions(without_data(proto), names)
    except RuntimeError as error:
        raise ModelError(
            f"The model's functions {', '.join(sorted(repr(name) for _, name in names))} pass attributes on to "
            "operators that newer opsets redefine, and import another opset than the model, so that they "
            "cannot be upgraded; export the model without functions or at a newer opset."
        ).about(sorted((name for _, name in names))) from error
    _put_data_back(proto, result)
    return result


def _passes_attributes_on(nodes: Iterable[NodeProto], function: FunctionProto, minimum: int) -> bool:
    opset = default_opset(function.opset_import) or minimum
    return any(
        (_refers(node) and not _is_same(node, opset, minimum))
        or any(_passes_attributes_on(graph.node, function, minimum) for graph in proto_subgraphs(node))
        for node in nodes
    )


def _refers(node: NodeProto) -> bool:
    return any(attribute.ref_attr_name for attribute in node.attribute)


def _is_same(node: NodeProto, before: int, after: int) -> bool:
    """Return whether an operator has the same definition at two opsets (Constant only gained attributes)."""
    if not is_default_domain(node.domain) or node.op_type == "Constant":
        return True
    try:
        versions = {onnx.defs.get_schema(node.op_type, opset, "").since_version for opset in (before, after)}
    except onnx.defs.SchemaError:  # an operator of ONNX Runtime in this domain
        return True
    return len(versions) == 1


def _upgrade_function(function: FunctionProto, minimum: int) -> None:
    """Convert the body of a function as a graph with untyped inputs."""
    graph = GraphProto(name=function.name, node=function.node)
    graph.input.extend(onnx.ValueInfoProto(name=name) for name in function.input)
    graph.output.extend(onnx.ValueInfoProto(name=name) for name in function.output)
    upgraded = _upgrade_graph(graph, function.opset_import, minimum)
    del function.node[:]
    # a function has no initializers, so that those of the converter become constants
    function.node.extend(
        onnx.helper.make_node("Constant", [], [tensor.name], value=tensor) for tensor in upgraded.initializer
    )
    function.node.extend(upgraded.node)
    _set_opset(function.opset_import, minimum)


def _upgrade_graph(graph: GraphProto, imports: Iterable[OperatorSetIdProto], minimum: int) -> GraphProto:
    """Return the graph with converted nodes, without its large initializers."""
    opset = default_opset(imports)
    assert opset is not None
    model = ModelProto(ir_version=8, graph=graph_skeleton(graph))
    model.opset_import.extend(item for item in imports if not is_default_domain(item.domain))
    model.opset_import.add(domain="", version=opset)
    model.opset_import.add(domain=STAND_IN_DOMAIN, version=1)
    repair_graph(model.graph, opset)
    _protect(model.graph, opset)
    try:
        converted = onnx.version_converter.convert_version(model, minimum)
    except _FAILURES as error:
        raise ModelError(_explain(model, minimum, str(error))) from error
    _restore(graph, converted.graph, opset, minimum)
    return converted.graph


def _protect(graph: GraphProto, opset: int) -> None:
    """Replace nodes that the converter would damage or refuse by placeholders.

    It drops references to attributes of a function (workarounds: references in converted functions), and does not know
    ONNX Runtime's own operators.
    """
    for node in graph.node:
        if _refers(node) or is_runtime_operator(node, opset):
            node.CopyFrom(stand_in(node.op_type, node.output, node.input))
        for inner in proto_subgraphs(node):
            _protect(inner, opset)


def _restore(original: GraphProto, converted: GraphProto, before: int, after: int) -> None:
    """Restore everything that needed no conversion, and remove the placeholders."""
    originals = {_key(node): node for node in original.node}
    nodes = []
    for node in converted.node:
        if node.domain == STAND_IN_DOMAIN and node.op_type == "Initializer":
            continue
        source = originals.get(_key(node))
        if source is not None and source.op_type == node.op_type:
            _restore_node(source, node, before, after)
        if node.domain == STAND_IN_DOMAIN:
            node.ClearField("domain")
        nodes.append(node)
    del converted.node[:]
    converted.node.extend(nodes)


def _key(node: NodeProto) -> str:
    return next((name for name in node.output if name), "")


def _restore_node(source: NodeProto, node: NodeProto, before: int, after: int) -> None:
    graphs = [attribute for attribute in node.attribute if attribute.type in _GRAPH_TYPES]
    if not graphs and node.input == source.input and _is_same(source, before, after):
        node.CopyFrom(source)
        return
    for field in ("name", "domain", "overload", "doc_string"):
        if source.HasField(field):
            setattr(node, field, getattr(source, field))
        else:
            node.ClearField(field)
    node.metadata_props.extend(source.metadata_props)
    given = {attribute.name: attribute for attribute in source.attribute}
    for attribute in graphs:
        pairs = [(given[attribute.name].g, attribute.g)] if attribute.HasField("g") else []
        pairs += zip(given[attribute.name].graphs, attribute.graphs, strict=True)
        for inner_source, inner in pairs:
            _restore_subgraph(inner_source, inner, before, after)


def _restore_subgraph(source: GraphProto, graph: GraphProto, before: int, after: int) -> None:
    _restore(source, graph, before, after)
    names = {tensor.name for tensor in source.initializer}
    added = [tensor for tensor in graph.initializer if tensor.name not in names]
    nodes = list(graph.node)
    graph.CopyFrom(source)
    del graph.node[:]
    graph.node.extend(nodes)
    graph.initializer.extend(added)


def _explain(model: ModelProto, minimum: int, reason: str) -> str:
    """Return the error for the operator that cannot be converted, which is found by converting each alone."""
    opset = default_opset(model.opset_import)
    reason = reason.strip().partition("\n")[0].rsplit("failed: ", 1)[-1]
    if "no registered schema" in reason:  # a message without the operator
        reason = "the ONNX standard does not define it"
    for node in all_nodes(model.graph):
        graph = GraphProto(name="single", node=[node])
        graph.input.extend(onnx.ValueInfoProto(name=name) for name in dict.fromkeys(node.input) if name)
        graph.output.extend(onnx.ValueInfoProto(name=name) for name in node.output if name)
        try:
            onnx.version_converter.convert_version(
                ModelProto(ir_version=8, graph=graph, opset_import=model.opset_import), minimum
            )
        except _FAILURES:
            return (
                f"The operator {node.op_type} (node {node.name or _key(node)!r}) cannot be upgraded from opset "
                f"{opset} to {minimum}, which training needs: {reason}; export the model at a newer opset."
            )
    return (
        f"The model cannot be upgraded from opset {opset} to {minimum}, which training needs: {reason}; "
        "export it at a newer opset."
    )
