"""Rewrite what ONNX's opset converter gets wrong, before it runs.

(workarounds: converted Hardmax, converted Resize, converted BatchNormalization)

========================  ======  ==================================================================
operator                  before  what is wrong
========================  ======  ==================================================================
Hardmax                   13      keeps ``axis`` though it no longer flattens the input at the axis
Upsample, Resize          11      becomes a Resize with another coordinate transformation
BatchNormalization        14      refused with the outputs of training mode
BatchNormalization        9       ``spatial=0`` has no equivalent: refused here, by name
Scan                      9       keeps the batch dimension that it no longer has: refused here
========================  ======  ==================================================================
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
from onnx import GraphProto, NodeProto, numpy_helper

from onnxtrain.errors import ModelError
from onnxtrain.ir.domains import is_default_domain
from onnxtrain.model_file.skeleton import STAND_IN_DOMAIN, proto_subgraphs


def repair_graph(graph: GraphProto, opset: int) -> None:
    """Rewrite a graph and its subgraphs in place.

    Args:
        graph: At an opset below the converter's target.
        opset: The opset of its default domain.

    Raises:
        ModelError: An operator has no equivalent at newer opsets.
    """
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
    """Up to opset 12 the input was a matrix, made by flattening at the axis; say so with nodes."""
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
    """Write the Resize of opset 11 and later that computes what Upsample and Resize did before.

    They mapped coordinates by ``x / scale`` ("asymmetric"), and nearest neighbours were rounded down where an
    axis grows and up where it shrinks. No rounding mode does both, so where the scales do both, or are not
    known, two nodes follow each other: one that grows, one that shrinks. Each is exact, as nearest neighbours
    are chosen axis by axis.
    """
    attributes = _attributes(node)
    mode = _text(attributes.get("mode", b"nearest"))
    x, y = node.input[0], node.output[0]
    nodes: list[NodeProto] = []
    known: np.ndarray | None
    if "scales" in attributes:  # Upsample before opset 9
        known, scales = np.array(attributes["scales"], np.float32), f"{y}.onnxtrain.scales"
        nodes.append(_constant(scales, known))
    else:
        scales = node.input[1]
        known = _constant_value(graph, scales)
    if mode != "nearest" or node.op_type == "Upsample" or (known is not None and bool((known >= 1).all())):
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


def _asymmetric(name: str, x: str, scales: str, y: str, mode: str, nearest_mode: str) -> NodeProto:
    # A stand-in, as this form is not valid before opset 13; its domain becomes ONNX's after the conversion.
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


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


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
    """Up to opset 13 further outputs meant training: batch statistics; opset 14 says so with an attribute."""
    attributes = _attributes(node)
    if attributes.pop("spatial", 1) != 1:
        raise ModelError(
            f"BatchNormalization {_label(node)} has spatial=0, which opset 9 removed, so that it cannot be "
            "upgraded; export the model at opset 9 or newer."
        )
    saved = [name for name in node.output[3:] if name in read]
    if saved:
        raise ModelError(
            f"BatchNormalization {_label(node)} has outputs that are read, {', '.join(map(repr, saved))}, and that "
            "opset 14 removed, so that it cannot be upgraded; export the model at opset 14 or newer."
        )
    if not any(node.output[1:]):
        del node.output[1:]
        return [node]
    # A stand-in, as the converter refuses further outputs.
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
        f"Scan {_label(node)} is of opset 8, whose batch dimension opset 9 removed, so that it cannot be "
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
"""Below which opset an operator is rewritten, and how."""
