"""Types and shapes behind operators that ONNX does not know but that have a registered body."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.autodiff.node import Node
from onnxtrain.autodiff.path import Forward
from onnxtrain.autodiff.registry import Body, find_registered_body
from onnxtrain.errors import GradientError
from onnxtrain.ir import Builder
from onnxtrain.ir.inference import infer_outputs, keeps_type
from onnxtrain.ir.shapes import infer_shapes


def learn_all_types(forward: Forward) -> None:
    """Give the values of a main graph the types that registered bodies tell, and infer what follows, until all is told.

    The bodies of operators have no imports of operator sets: ONNX's inference goes through them with their graph.
    """
    while forward.graph.opset_imports and learn_types(forward.graph, forward.opset):
        infer_shapes(ir.Model(forward.graph, ir_version=10, functions=list(forward.functions.values())))


def learn_types(graph: ir.Graph, opset: int) -> bool:
    """Give values without a type those that the bodies of their nodes would give them, in place.

    ONNX's inference stops at operators that it does not know. They stay as they are where no gradient flows through
    them (in layers that are frozen, say); what follows has to be known all the same.

    Returns:
        Whether anything was learned: then ONNX's inference may find more.
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
    """Whether a value has a type; ONNX's inference may find a shape and leave the type open."""
    return value.type is not None and value.dtype != ir.DataType.UNDEFINED


def _learn(node: ir.Node, body: Body, op: Builder) -> bool:
    """Write the body, look at what it gives, and remove it again."""
    graph = node.graph
    assert graph is not None
    try:
        results = body(Node(node, op))
    except GradientError:
        results = ()  # what a body does not cover is an error only where a gradient is asked for
    learned = False
    for output, result in zip(node.outputs, results, strict=False):
        if result is not None and not _is_known(output) and _is_known(result.ir):
            output.type, output.shape = result.ir.type, result.ir.shape
            learned = True
    graph.remove(op.emitted, safe=True)
    return learned
