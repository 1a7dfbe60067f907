"""A value that the gradient takes for a constant."""

from __future__ import annotations

from onnxtrain.autodiff.fused import emit, register_fused
from onnxtrain.autodiff.node import Node
from onnxtrain.autodiff.registry import no_gradient
from onnxtrain.ir import Builder, Value
from onnxtrain.ir.domains import ONNXTRAIN_DOMAIN

OPERATOR = "StopGradient"

no_gradient(OPERATOR, domain=ONNXTRAIN_DOMAIN, reason="it is there so that none goes through")


@register_fused(OPERATOR, has_kernel=None)
def stop_gradient(node: Node) -> list[Value | None]:
    """y = x."""
    return [node.op.Identity(node.x).with_shape(node.x.shape)]


def stopped(op: Builder, x: Value) -> Value:
    """The value, through which no gradient goes."""
    return emit(op, OPERATOR, x, like=[x])[0]
