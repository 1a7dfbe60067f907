"""RMS norms that exporters write as several nodes, as the one operator that ONNX Runtime has for them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff.fused import KERNEL_TYPES
from onnxtrain.ir import Builder
from onnxtrain.ir.replace import remove_nodes, take_over
from onnxtrain.ir.value import constant_number, constant_tensor, dimensions
from onnxtrain.passes.fuse.patterns import is_needed, named_by_gradients, operands

OPERATOR = "SimplifiedLayerNormalization"


def fuse_norms(model: ir.Model) -> None:
    """Write y = g x / sqrt(mean(x²) + ε) over the last axis as one node, whose gradient is one node, too, in place.

    The square may be Pow or Mul; x is divided by the root, or multiplied by its reciprocal; g is a vector as long as
    the axis. Only where nobody else reads what lies between: a Gradient node may name any value.

    Requires: shapes. Ensures: the new node stands where the last of the old ones stood, and has its name.
    """
    graph = model.graph
    finder = _Finder(named_by_gradients(graph))
    main, replaced = Builder(graph, graph.opset_imports[""]), list[ir.Node]()
    for mean in list(graph):
        norm = finder.match(mean)
        if norm is None:
            continue
        last = norm.nodes[-1]
        op, y = main.before(last), last.outputs[0]
        given = op.wrap(norm.x), op.wrap(norm.scale)
        result = op.several(OPERATOR, *given, outputs=1, axis=-1, epsilon=norm.epsilon, stash_type=1)[0].ir
        op.emitted[-1].name = last.name  # whoever wants y to be recomputed names the node that gives it
        take_over(graph, {y: result})
        replaced += norm.nodes
    remove_nodes(graph, replaced)


class _Norm(NamedTuple):
    """A norm as it stands in the graph; the nodes are those that compute it, in order."""

    x: ir.Value
    scale: ir.Value
    epsilon: float
    nodes: list[ir.Node]


class _Finder(NamedTuple):
    """Recognises norms; ``named`` are the names that Gradient nodes speak of."""

    named: set[str]

    def match(self, mean: ir.Node) -> _Norm | None:
        """The norm that a mean of squares is part of."""
        if mean.domain or mean.op_type != "ReduceMean":
            return None
        square = mean.inputs[0]
        x = _squared(square)
        sizes = None if x is None else dimensions(x)
        if square is None or x is None or not sizes or not isinstance(sizes[-1], int) or x.dtype not in KERNEL_TYPES:
            return None
        if self._reader(square) is not mean or not _is_over_last(mean, len(sizes)):
            return None
        nodes, after = [square.producer(), mean], self._reader(mean.outputs[0])
        epsilon = None if after is None or after.op_type != "Add" else _other_number(after, mean.outputs[0])
        root = None if epsilon is None or after is None else self._reader(after.outputs[0])
        if root is None or root.op_type != "Sqrt" or epsilon is None:
            return None
        divided = self._divided(root.outputs[0], x)
        if divided is None:
            return None
        last = self._reader(divided[-1].outputs[0])
        if last is None or last.op_type != "Mul":
            return None
        scale = next((value for value in last.inputs if value is not divided[-1].outputs[0]), None)
        if scale is None or dimensions(scale) != sizes[-1:] or scale.dtype != x.dtype:
            return None
        return _Norm(x, scale, epsilon, [node for node in (*nodes, after, root, *divided, last) if node is not None])

    def _divided(self, root: ir.Value, x: ir.Value) -> list[ir.Node] | None:
        """The nodes that divide x by a root."""
        node = self._reader(root)
        if node is None:
            return None
        if node.op_type == "Div" and node.inputs[1] is root and node.inputs[0] is x:
            return [node]
        inverts = node.op_type == "Div" and node.inputs[1] is root and constant_number(node.inputs[0]) == 1
        if node.op_type != "Reciprocal" and not inverts:
            return None
        product = self._reader(node.outputs[0])
        if product is None or product.op_type != "Mul" or x not in product.inputs:
            return None
        return [node, product]

    def _reader(self, value: ir.Value) -> ir.Node | None:
        """The one standard node that reads a value, once, where nobody else looks at it."""
        uses = list(value.uses())
        if len(uses) != 1 or is_needed(value, self.named):
            return None
        node = uses[0][0]
        producer = value.producer()
        return node if not node.domain and producer is not None and node.graph is producer.graph else None


def _squared(value: ir.Value | None) -> ir.Value | None:
    """x of x²."""
    power = operands(value, "Pow")
    if power is not None:
        return power[0] if constant_number(power[1]) == 2 else None
    factors = operands(value, "Mul")
    return factors[0] if factors is not None and factors[0] is factors[1] else None


def _is_over_last(mean: ir.Node, rank: int) -> bool:
    """Whether a mean is over the last axis, which stays."""
    keep = mean.attributes.get("keepdims")
    axes = None if len(mean.inputs) < 2 or mean.inputs[1] is None else constant_tensor(mean.inputs[1])
    if axes is None or (keep is not None and not keep.as_int()):
        return False
    return [int(axis) % rank for axis in np.asarray(axes.numpy()).reshape(-1)] == [rank - 1]


def _other_number(node: ir.Node, value: ir.Value) -> float | None:
    """The number beside a value."""
    return constant_number(next((item for item in node.inputs if item is not value), None))
