"""A product with a weight, and its bias, as one operator of this project's domain, and its gradient.

x is [..., K], the weight [K, N], or [N, K] with ``transB``, the bias [N], y [..., N]. The leading axes are rows. With
``compute`` = "bfloat16" both factors are rounded to bfloat16. Beside x in float32 the kernel reads weights in 16 bits,
too.
"""

from __future__ import annotations

from collections.abc import Sequence

from onnxtrain.autodiff.fused import emit, factors, register_fused
from onnxtrain.autodiff.node import Node
from onnxtrain.autodiff.registry import Gradients, register_gradient
from onnxtrain.autodiff.rules.matmul import rows
from onnxtrain.graph import Value
from onnxtrain.graph.domains import ONNXTRAIN_DOMAIN


@register_fused("Linear")
def linear(node: Node) -> Sequence[Value]:
    """From x, w and b?: y = x w + b, or x wᵀ + b with ``transB``."""
    op, b = node.op, node.input(2)
    x, w = factors(node, node.x, node.input_required(1))
    y = x @ (op.Transpose(w, perm=[1, 0]) if node.attribute("transB", 0) else w)
    return [y if b is None else y + b]


@register_gradient("Linear", domain=ONNXTRAIN_DOMAIN)
def linear_rule(node: Node, dy: Value) -> Gradients:
    """y = x w + b: dx = dy wᵀ, dw = xᵀ dy and db = dy, both summed over all rows; with ``transB`` w stands for wᵀ."""
    op, x, w, b = node.op, node.x, node.input_required(1), node.input(2)
    transposed = int(node.attribute("transB", 0))
    dx = dw = db = None
    if node.wants(x):
        (dx,) = emit(op, "Linear", dy, w, like=[x], transB=1 - transposed)
    if node.wants(w):
        like = [w, b] if node.wants(b) else [w]
        dw, *rest = emit(op, "LinearWeightGradient", dy, x, like=like, transB=transposed)
        db = rest[0] if rest else None
    elif b is not None and node.wants(b):
        db = op.reduce_to(dy, b)
    return [dx, dw, db][: len(node.inputs)]


@register_fused("LinearWeightGradient")
def linear_weight_gradient(node: Node) -> Sequence[Value | None]:
    """From dy and x: dw = xᵀ dy, or dyᵀ x with ``transB``, and, where it is asked for, db = dy; summed over rows."""
    op = node.op
    dy, x = rows(op, node.x), rows(op, node.input_required(1))
    left, right = (dy, x) if node.attribute("transB", 0) else (x, dy)
    db = op.ReduceSum(dy, op.ints(0), keepdims=0) if node.has_output(1) else None
    return [op.Gemm(*factors(node, left, right), transA=1), db]
