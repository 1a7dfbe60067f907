"""Fuse linear layers, their biases and the Relu behind into one operator with a native kernel.

ONNX Runtime multiplies by a transposed operand more slowly than this project's kernels, goes over the result once more
to add a bias, once more for Relu, and once more over its gradient to sum it. As with activations and attention, the
nodes are replaced before the gradient is built, in working copies for sessions that load the native kernels only.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.autodiff.fused import emit
from onnxtrain.autodiff.options import GradientOptions
from onnxtrain.autodiff.rules.fused_linear import ACTIVATION, RELU
from onnxtrain.graph import Builder
from onnxtrain.graph.replace import substitute_and_rename
from onnxtrain.lowering.fuse.linear_layers import LAYER_WITH_RELU, OPERATOR, check_layer, layer_of
from onnxtrain.lowering.fuse.patterns import Match, find, named_by_gradients, remove_unread, varying_values


def fuse_linear(model: ir.Model, *, frozen: bool = False) -> None:
    """Replace matmuls with a matrix, a bias and Relu by one node ``Linear`` of the domain ``onnxtrain``, in place.

    With x [..., K] of two axes or more, w [K, N], and b [N] or none: y [..., N] = x w + b; with ``transB`` = 1 w is
    [N, K] and is read transposed; with ``activation`` = "Relu" y is relu(x w + b). The pattern, for float and double:

        MatMul, Gemm without factors and without a transposed x, either with a transposed w -> Add of a bias -> Relu

    Left alone are:

    - matmuls through whose operands no gradient flows, unless ``frozen`` ones are asked for: the runtime packs weights
      that do not change ahead of time;
    - a Gemm whose third input is not known to have one axis of N elements;
    - an Add where something else needs the matmul's result, or where the other term is not known to have one axis of N
      elements: the addition then stays behind the node;
    - a Relu where something else needs its input;
    - a transposition of w that a Gradient node names: the transposed value becomes w;
    - additions, transpositions and a Relu that the patterns of ``recompute`` tell apart from the matmul.

    The node has the name of the matmul. Requires: a sorted graph with shapes. Ensures: a sorted graph; values that
    outputs or Gradient nodes name stay, and so do their dependents.
    """
    graph = model.graph
    named, varying = named_by_gradients(graph), varying_values(graph)
    patterns = GradientOptions.read(model.metadata_props).recompute
    main = Builder(graph, graph.opset_imports[""])
    replaced = []

    def check(match: Match) -> str | None:
        layer = layer_of(match, named, patterns)
        if not (frozen or layer.x in varying or layer.w in varying):
            return "no gradient flows through its operands"
        return check_layer(match, patterns)

    for match in find(graph, LAYER_WITH_RELU, named, check, backwards=True):
        layer, y = layer_of(match, named, patterns), match.y
        op = main.before(match.nodes[0])
        activation = {ACTIVATION: RELU} if match.get("relu") is not None else {}
        inputs = op.wrap(layer.x), op.wrap(layer.w), None if layer.bias is None else op.wrap(layer.bias)
        (result,) = emit(op, OPERATOR, *inputs, like=[op.wrap(y)], transB=int(layer.transposed), **activation)
        op.emitted[-1].name = match["matmul"].name
        substitute_and_rename(graph, {y: result.ir})
        replaced.append(match.nodes[0])
    remove_unread(graph, replaced, named)
