"""A linear layer (matmul and bias) as one operator of this project's domain, and its gradient.

x is [..., K], the weight [K, N], or [N, K] with ``transB``, the bias [N], y [..., N]. The leading axes are rows. With
``compute`` = "bfloat16" both operands are rounded to bfloat16. The kernel also takes 16-bit weights beside a float32 x.
"""

from __future__ import annotations

from collections.abc import Sequence

from onnxtrain.autodiff.fused import emit, matmul_operands, register_fused
from onnxtrain.autodiff.node import Node
from onnxtrain.autodiff.registry import Gradients, register_gradient
from onnxtrain.autodiff.rules.activation import where_positive
from onnxtrain.autodiff.rules.matmul import rows
from onnxtrain.graph import Value
from onnxtrain.graph.domains import ONNXTRAIN_DOMAIN

ACTIVATION, RELU = "activation", "Relu"
"""The attribute for the activation of a Linear node, and its value."""


@register_fused("Linear")
def linear(node: Node) -> Sequence[Value]:
    """From x, w and b?: y = x w + b, or x wᵀ + b with ``transB``; with ``activation`` = "Relu", y = relu of that."""
    op, b = node.op, node.input(2)
    x, w = matmul_operands(node, node.x, node.input_required(1))
    y = x @ (op.Transpose(w, perm=[1, 0]) if node.attribute("transB", 0) else w)
    y = y if b is None else y + b
    return [op.Relu(y) if _has_relu(node) else y]


@register_gradient("Linear", domain=ONNXTRAIN_DOMAIN)
def linear_rule(node: Node, dy: Value) -> Gradients:
    """y = x w + b: dx = dy wᵀ, dw = xᵀ dy and db = dy, both summed over all rows; with ``transB`` w stands for wᵀ.

    With an activation dy is multiplied by its derivative first. Where x is the output of a Relu, one node gives all
    gradients; the gradient of that Relu can be fused into it (:mod:`onnxtrain.lowering.rules.linear`).
    """
    op, x, w, b = node.op, node.x, node.input_required(1), node.input(2)
    transposed = int(node.attribute("transB", 0))
    dx = dw = db = None
    if _has_relu(node):
        (dy,) = emit(op, "ReluGradient", dy, node.y, like=[dy])
    if node.wants(x) and node.wants(w) and _is_relu(x):
        like = [x, w, b] if node.wants(b) else [x, w]
        dx, dw, *rest = emit(op, "LinearGradient", dy, w, x, like=like, transB=transposed)
        return [dx, dw, rest[0] if rest else None][: len(node.inputs)]
    if node.wants(x):
        (dx,) = emit(op, "Linear", dy, w, like=[x], transB=1 - transposed)
    if node.wants(w):
        like = [w, b] if node.wants(b) else [w]
        dw, *rest = emit(op, "LinearWeightGradient", dy, x, like=like, transB=transposed)
        db = rest[0] if rest else None
    elif b is not None and node.wants(b):
        db = op.reduce_to(dy, b)
    return [dx, dw, db][: len(node.inputs)]


def _is_relu(x: Value) -> bool:
    """Return whether a value is the output of Relu, alone or fused into a Linear node."""
    source = x.ir.producer()
    if source is None:
        return False
    if source.domain == ONNXTRAIN_DOMAIN and source.op_type == "Linear":
        return ACTIVATION in source.attributes
    return source.op_type == "Relu" and not source.domain


def _has_relu(node: Node) -> bool:
    return bool(node.attribute(ACTIVATION, "") == RELU)


@register_fused("LinearGradient")
def linear_gradient(node: Node) -> Sequence[Value | None]:
    """From dy, w and x: dx = dy wᵀ, or dy w with ``transB``, and optionally dw and db.

    With ``activation`` = "Relu" x is the output of a Relu, and dx the gradient of its input: 0 where x ≤ 0.
    """
    op, x = node.op, node.input_required(2)
    dy, w = matmul_operands(node, node.x, node.input_required(1))
    dx = dy @ (w if node.attribute("transB", 0) else op.Transpose(w, perm=[1, 0]))
    if _has_relu(node):
        dx = where_positive(dx, x)
    dw = _weight_gradient(node, node.x, x) if node.has_output(1) else None
    return [dx, dw, _bias_gradient(node, node.x) if node.has_output(2) else None]


@register_fused("LinearWeightGradient")
def linear_weight_gradient(node: Node) -> Sequence[Value | None]:
    """From dy and x: dw = xᵀ dy, or dyᵀ x with ``transB``, and optionally db = dy; summed over rows."""
    dw = _weight_gradient(node, node.x, node.input_required(1))
    return [dw, _bias_gradient(node, node.x) if node.has_output(1) else None]


def _weight_gradient(node: Node, dy: Value, x: Value) -> Value:
    op = node.op
    dy, x = rows(op, dy), rows(op, x)
    left, right = (dy, x) if node.attribute("transB", 0) else (x, dy)
    return op.Gemm(*matmul_operands(node, left, right), transA=1)


def _bias_gradient(node: Node, dy: Value) -> Value:
    op = node.op
    return op.ReduceSum(rows(op, dy), op.ints(0), keepdims=0)
