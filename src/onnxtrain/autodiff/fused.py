"""Fused operators of this project's own domain that gradient rules emit: one node instead of many standard ones.

Each has a body in standard operators. The pass :mod:`~onnxtrain.lowering.rules.kernels` keeps the node in a
graph for a session with native kernels, and replaces it by the body in a graph for any runtime. Rules, second
derivatives and all earlier passes see the node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import onnx_ir as ir

from onnxtrain.autodiff.node import Node
from onnxtrain.autodiff.registry import Body, register_body
from onnxtrain.graph import Builder, Value
from onnxtrain.graph.domains import ONNXTRAIN_DOMAIN
from onnxtrain.graph.value import is_float

VERSION = 1
"""Version of the domain ``onnxtrain``."""

KERNEL_TYPES = (ir.DataType.FLOAT, ir.DataType.DOUBLE)
"""The element types that native kernels have."""


class FusedOperator(NamedTuple):
    """An operator with a native kernel."""

    name: str
    domain: str
    has_kernel: Callable[[ir.Node], bool] | None


_operators: dict[tuple[str, str], FusedOperator] = {}


def register_fused(
    *names: str, domain: str = ONNXTRAIN_DOMAIN, has_kernel: Callable[[ir.Node], bool] | None = lambda node: True
) -> Callable[[Body], Body]:
    """Register the body of operators that also have a native kernel.

    The body gets the node and returns its outputs, as with ``register_body``. The second derivative goes through it
    unless a rule is registered for the operator.
    """
    _operators.update({(domain, name): FusedOperator(name, domain, has_kernel) for name in names})
    return register_body(*names, domain=domain)


def fused_operators() -> list[FusedOperator]:
    """All operators with a native kernel of this project."""
    return [one for one in _operators.values() if one.domain == ONNXTRAIN_DOMAIN and one.has_kernel is not None]


def emit(
    op: Builder, name: str, *inputs: Value | None, like: Sequence[Value | None], **attributes: Any
) -> tuple[Value, ...]:
    """Emit one node of the domain ``onnxtrain``; ``like`` has a value of the type and shape of each output."""
    op.import_domain(ONNXTRAIN_DOMAIN, VERSION)
    outputs = op.several(name, *inputs, outputs=len(like), domain=ONNXTRAIN_DOMAIN, **attributes)
    for output, source in zip(outputs, like, strict=True):
        if source is not None:
            output.ir.dtype = source.dtype
            output.with_shape(source.shape)
    return outputs


def matmul_operands(node: Node, *values: Value) -> list[Value]:
    """The operands of a matmul or convolution, rounded to bfloat16 where the attribute ``compute`` is "bfloat16"."""
    if node.attribute("compute", "float32") != "bfloat16":
        return list(values)
    return [node.op.cast(node.op.cast(value, ir.DataType.BFLOAT16), ir.DataType.FLOAT) for value in values]


def find_fused(node: ir.Node) -> FusedOperator | None:
    """The fused operator that a node applies, if it is one."""
    return _operators.get((node.domain, node.op_type))


def has_kernel(node: ir.Node) -> bool:
    """Return whether a native kernel can run a node of a fused operator."""
    runs = _operators[node.domain, node.op_type].has_kernel
    floating = [value.dtype for value in node.inputs if value is not None and is_float(value)]
    return runs is not None and all(dtype in KERNEL_TYPES for dtype in floating) and runs(node)
