"""Decide which fused operators stay nodes, for native kernels, and which are written in standard operators."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.autodiff.engine import Backward
from onnxtrain.autodiff.expand import expand_registered
from onnxtrain.autodiff.fused import find_fused, has_kernel
from onnxtrain.autodiff.registry import find_registered_body
from onnxtrain.errors import GradientError
from onnxtrain.graph import Builder
from onnxtrain.graph.clone import all_nodes, subgraphs
from onnxtrain.graph.domains import ONNXTRAIN_DOMAIN
from onnxtrain.graph.inference import infer_outputs
from onnxtrain.lowering.portable.provider_bodies import Portable, body_for


def resolve_fused(model: ir.Model, backward: Backward, *, kernels: bool, portable: Portable | None = None) -> None:
    """Keep the nodes of fused operators that a kernel can run, and write the others in standard operators, in place.

    Requires: a graph whose inputs have types. Ensures: the nodes of a body are where their node was; their readers have
    types. ONNX infers no types for ONNX Runtime's own operators.

    Args:
        model: A model whose gradients are built.
        backward: The nodes that the engine emitted; bodies replace their nodes in it.
        kernels: True if the model is for a session that loads the native kernels.
        portable: The provider that the graph is for, where it is not the CPU.
    """
    kept, renamed = False, dict[ir.Value, ir.Value]()
    emitted = set(backward.nodes)
    opset = model.graph.opset_imports.get("", 1)
    main = Builder(model.graph, opset)
    graphs = [model.graph, *model.graph.subgraphs()]
    for graph in graphs:
        nodes = list(graph)
        for node in nodes:
            if find_fused(node) is None:
                if any(output.dtype is None for output in node.outputs):  # it reads the output of a runtime's operator
                    infer_outputs(node)
                continue
            if kernels and has_kernel(node):
                kept = kept or node.domain == ONNXTRAIN_DOMAIN
                continue
            assert isinstance(graph, ir.Graph)
            body = body_for(portable, node.op_type) or find_registered_body(node.op_type, node.domain)
            assert body is not None
            op = main.before(node) if graph is model.graph else Builder(graph, opset, before=node, outer=main)
            try:
                written = expand_registered(node, body, op, renamed)
            except GradientError:
                if node.domain == ONNXTRAIN_DOMAIN or node in emitted:
                    raise
                graph.remove(op.emitted, safe=True)  # the model's own node, which the body does not cover: it stays
                continue
            nodes += [made for made in written if find_fused(made) is not None]
            for inner in [inner for made in written for inner in subgraphs(made)]:
                graphs += [inner, *inner.subgraphs()]
            if node in emitted:  # other nodes belong to the model, or to the body of an emitted node
                backward.nodes += written
    backward.arriving = {renamed.get(value, value) for value in backward.arriving}
    others = any(node.domain == ONNXTRAIN_DOMAIN for node in all_nodes(model.graph))
    if not kept and not others:
        model.graph.opset_imports.pop(ONNXTRAIN_DOMAIN, None)
