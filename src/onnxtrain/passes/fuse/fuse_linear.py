"""Products with weights, the biases added to them, and the Relu behind, as one operator with a native kernel.

ONNX Runtime multiplies by a transposed factor more slowly than this project's kernels, goes over the result once more
to add a bias, once more for Relu, and once more over its gradient to sum it. As with activations and attention, the
products are replaced before the gradient is built, in working copies for sessions that load the native kernels only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import onnx_ir as ir

from onnxtrain.autodiff.fused import KERNEL_TYPES, emit
from onnxtrain.autodiff.options import GradientOptions
from onnxtrain.autodiff.rules.fused_linear import ACTIVATION, RELU
from onnxtrain.ir import Builder
from onnxtrain.ir.replace import substitute_and_rename
from onnxtrain.ir.value import Dimension, dimensions
from onnxtrain.passes.fuse.patterns import is_needed, named_by_gradients, operands, remove_unread, varying_values
from onnxtrain.passes.fuse.transposition import is_identity, order_of
from onnxtrain.patterns import matches

OPERATOR = "Linear"


def fuse_linear(model: ir.Model, *, frozen: bool = False) -> None:
    """Write products with a matrix, a bias and Relu as one node ``Linear`` of the domain ``onnxtrain``, in place.

    With x [..., K] of two axes or more, w [K, N], and b [N] or none: y [..., N] = x w + b; with ``transB`` = 1 w is
    [N, K] and stands for its transposed; with ``activation`` = "Relu" y is relu(x w + b). What is recognised, for float
    and double:

        MatMul, Gemm without factors and without a transposed x, either with a transposed w -> Add of a bias -> Relu

    Left alone are:

    - products through whose factors no gradient flows, unless ``frozen`` ones are asked for: the runtime packs weights
      that do not change ahead of time;
    - a Gemm whose third input is not known to have one axis of N elements;
    - an Add where others read the product or it is an output, where a Gradient node names it, or where the other term
      is not known to have one axis of N elements: the addition then stays behind the product;
    - a Relu where others read what it gets or that is an output, or where a Gradient node names it;
    - a transposition of w that a Gradient node names: the transposed value is taken for w as it is;
    - additions, transpositions and a Relu that the patterns of what is recomputed tell apart from the product.

    The node has the name of the product. Requires: a sorted graph with shapes. Ensures: a sorted graph; values that
    outputs or Gradient nodes name stay, and so does what depends on them.
    """
    graph = model.graph
    finder = LayerFinder(named_by_gradients(graph), GradientOptions.read(model.metadata_props).recompute)
    varying = varying_values(graph)
    main = Builder(graph, graph.opset_imports[""])
    replaced = []
    for product in list(graph):
        layer = finder.match(product)
        if layer is None or not (frozen or layer.x in varying or layer.w in varying):
            continue
        relu = finder.relu_behind(product, layer.last)
        last, activation = (layer.last, {}) if relu is None else (relu, {ACTIVATION: RELU})
        op, y = main.before(last), last.outputs[0]
        bias = None if layer.bias is None else op.wrap(layer.bias)
        inputs = op.wrap(layer.x), op.wrap(layer.w), bias
        (result,) = emit(op, OPERATOR, *inputs, like=[op.wrap(y)], transB=int(layer.transposed), **activation)
        op.emitted[-1].name = product.name
        substitute_and_rename(graph, {y: result.ir})
        varying.add(result.ir)
        replaced.append(last)
    remove_unread(graph, replaced, finder.named)


class Layer(NamedTuple):
    """A product as it stands in the graph.

    Attributes:
        x: [..., K].
        w: [K, N], or [N, K] where it is transposed.
        transposed: Whether it is.
        bias: [N], or none.
        last: The node that gives the result: the product, or the addition of the bias.
    """

    x: ir.Value
    w: ir.Value
    transposed: bool
    bias: ir.Value | None
    last: ir.Node


class LayerFinder(NamedTuple):
    """Recognises products.

    Attributes:
        named: Names that Gradient nodes speak of.
        patterns: Of the names of nodes that are recomputed.
    """

    named: set[str]
    patterns: Sequence[str]

    def match(self, product: ir.Node) -> Layer | None:
        """What a node multiplies, with what is added to it, where the operator can compute it."""
        if product.domain or product.op_type not in ("MatMul", "Gemm") or (factors := _factors(product)) is None:
            return None
        x, w = factors
        transposed = _flag(product, "transB")
        bias = product.inputs[2] if len(product.inputs) > 2 else None
        size = _size(w, 0 if transposed else 1)
        if product.op_type == "Gemm" and not _is_plain(product, bias, size):
            return None
        while (source := self._before_transpose(product, w)) is not None:
            w, transposed = source, not transposed
        last = product
        if bias is None and (found := self._addition(product, size)) is not None:
            bias, last = found
        return Layer(x, w, transposed, bias, last)

    def _before_transpose(self, product: ir.Node, w: ir.Value) -> ir.Value | None:
        """The matrix that w is the transposed of."""
        node = w.producer()
        if node is None or node.domain or node.op_type != "Transpose" or w.name in self.named:
            return None
        return None if is_identity(order_of(node, 2)) or not self._alike(product, node) else node.inputs[0]

    def _addition(self, product: ir.Node, size: Dimension) -> tuple[ir.Value, ir.Node] | None:
        """The bias that is added to a product which nobody else looks at, and the node that adds it."""
        y = product.outputs[0]
        if is_needed(y, self.named) or len(y.uses()) != 1:
            return None
        ((node, place),) = y.uses()
        terms = operands(node.outputs[0], "Add")
        if terms is None or node.graph is not product.graph or not self._alike(product, node):
            return None
        bias = terms[1 - place]
        return (bias, node) if _is_bias(bias, product, size) else None

    def relu_behind(self, product: ir.Node, last: ir.Node) -> ir.Node | None:
        """The Relu that alone reads the result of a layer, which nobody else looks at."""
        y = last.outputs[0]
        if is_needed(y, self.named) or len(y.uses()) != 1:
            return None
        ((node, _),) = y.uses()
        is_relu = node.op_type == "Relu" and not node.domain and node.graph is product.graph
        return node if is_relu and self._alike(product, node) else None

    def _alike(self, one: ir.Node, other: ir.Node) -> bool:
        """Whether the same patterns match both nodes."""
        first, second = one.name or "", other.name or ""
        return all(matches(pattern, first) == matches(pattern, second) for pattern in self.patterns)


def _factors(product: ir.Node) -> tuple[ir.Value, ir.Value] | None:
    """x and w, where both have a type that kernels have, w two axes, and x at least two."""
    x, w = product.inputs[:2]
    if x is None or w is None or x.dtype not in KERNEL_TYPES or w.dtype != x.dtype:
        return None
    if x.shape is None or w.shape is None or len(x.shape) < 2 or len(w.shape) != 2:
        return None
    return x, w


def _is_plain(gemm: ir.Node, bias: ir.Value | None, size: Dimension) -> bool:
    """Whether a Gemm computes x w + b, or without b, and nothing else."""
    alpha, beta = (gemm.attributes[name].as_float() if name in gemm.attributes else 1.0 for name in ("alpha", "beta"))
    if alpha != 1 or _flag(gemm, "transA"):
        return False
    return bias is None or (beta == 1 and _is_bias(bias, gemm, size))


def _is_bias(value: ir.Value, product: ir.Node, size: Dimension) -> bool:
    """Whether a value is known to have one element for each of the last axis of a product."""
    x = product.inputs[0]
    return x is not None and size is not None and dimensions(value) == (size,) and value.dtype == x.dtype


def _size(value: ir.Value, axis: int) -> Dimension:
    shape = dimensions(value)
    return None if shape is None else shape[axis]


def _flag(node: ir.Node, name: str) -> bool:
    return name in node.attributes and node.attributes[name].as_int() != 0
