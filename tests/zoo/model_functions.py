"""Rewrite a model into functions: every rule then works through calls, arguments and references."""

from __future__ import annotations

from collections.abc import Sequence

import onnx
from onnx import helper

DOMAIN = "local"


def in_functions(model: onnx.ModelProto, length: int = 5) -> onnx.ModelProto:
    """The model with each run of ``length`` nodes as a function, whose nodes are calls of functions, too.

    The inner functions hold one node each; its attributes are arguments of the call. Nodes with subgraphs stay
    themselves in the outer function.
    """
    result = onnx.ModelProto()
    result.CopyFrom(model)
    graph = result.graph
    nodes = list(graph.node)
    del graph.node[:]
    for start in range(0, len(nodes), length):
        run = nodes[start : start + length]
        read_later = _read(nodes[start + length :]) | {value.name for value in graph.output}
        inputs, outputs = _interface(run, read_later)
        calls = [_call(result, node, f"Inner{start + index}") for index, node in enumerate(run)]
        _add_function(result, f"Outer{start}", inputs, outputs, calls)
        graph.node.append(helper.make_node(f"Outer{start}", inputs, outputs, f"outer_{start}", domain=DOMAIN))
    result.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    onnx.checker.check_model(result)
    return result


def _read(nodes: Sequence[onnx.NodeProto]) -> set[str]:
    """All that the nodes and their subgraphs read from around them."""
    names = {name for node in nodes for name in node.input if name}
    for node in nodes:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                body = attribute.g
                own = {name for inner in body.node for name in inner.output}
                own |= {value.name for value in (*body.input, *body.initializer)}
                names |= (_read(body.node) | {value.name for value in body.output}) - own
    return names


def _interface(run: Sequence[onnx.NodeProto], read_later: set[str]) -> tuple[list[str], list[str]]:
    """The values that enter a run of nodes, and those that are read after it."""
    made = [name for node in run for name in node.output if name]
    return sorted(_read(run) - set(made)), [name for name in made if name in read_later]


def _call(model: onnx.ModelProto, node: onnx.NodeProto, name: str) -> onnx.NodeProto:
    """Return a call of a new function that contains the node; the node itself if it has subgraphs."""
    if any(attribute.type == onnx.AttributeProto.GRAPH for attribute in node.attribute):
        return node
    inputs = [f"x{index}" if given else "" for index, given in enumerate(node.input)]
    outputs = [f"y{index}" if given else "" for index, given in enumerate(node.output)]
    body = helper.make_node(node.op_type, inputs, outputs, domain=node.domain)
    for attribute in node.attribute:
        body.attribute.add(name=attribute.name, ref_attr_name=attribute.name, type=attribute.type)
    formal = list(filter(None, inputs)), list(filter(None, outputs))
    _add_function(model, name, *formal, [body], [attribute.name for attribute in node.attribute])
    call = helper.make_node(name, list(filter(None, node.input)), list(filter(None, node.output)), domain=DOMAIN)
    call.attribute.extend(node.attribute)
    return call


def _add_function(
    model: onnx.ModelProto,
    name: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    nodes: Sequence[onnx.NodeProto],
    attributes: Sequence[str] = (),
) -> None:
    opsets = [*(o for o in model.opset_import if o.domain != DOMAIN), helper.make_opsetid(DOMAIN, 1)]
    function = helper.make_function(DOMAIN, name, inputs, outputs, nodes, opsets, attributes)
    model.functions.append(function)
