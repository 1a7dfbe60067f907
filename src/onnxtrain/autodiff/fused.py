"""Operators of this project's own domain that gradient rules emit: one node where standard operators need many.

Each has a body in standard operators. :func:`resolve_fused` is the one place that decides which of the two a graph
gets: the node, for a session that loads the native kernels, or the body, for any runtime. Rules, second derivatives
and every pass before it see the node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from onnxtrain.autodiff.engine import Backward
from onnxtrain.autodiff.expand import expand_registered
from onnxtrain.autodiff.registry import Body, find_registered_body, register_body
from onnxtrain.graph import Builder, Value
from onnxtrain.graph.value import is_float

DOMAIN = "onnxtrain"
VERSION = 1

KERNEL_TYPES = (ir.DataType.FLOAT, ir.DataType.DOUBLE)
"""The element types that native kernels have."""


@dataclass(frozen=True)
class FusedOperator:
    """An operator with a native kernel.

    Attributes:
        name: Its name.
        domain: Its domain: ``onnxtrain``, or that of ONNX Runtime's own operators, whose kernels it has itself.
        has_kernel: Whether the kernel can run a node, beyond float and double being the only types it has.
    """

    name: str
    domain: str
    has_kernel: Callable[[ir.Node], bool]


_operators: dict[tuple[str, str], FusedOperator] = {}


def register_fused(
    name: str, *, domain: str = DOMAIN, has_kernel: Callable[[ir.Node], bool] = lambda node: True
) -> Callable[[Body], Body]:
    """Register the body of an operator that has a native kernel, too.

    The body gets the node and returns its outputs, as with ``register_body``; through it goes the second derivative,
    unless a rule is registered for the operator.

    Args:
        name: The operator's name.
        domain: Its domain.
        has_kernel: Which nodes the kernel can run, where it is not all of type float or double.
    """
    _operators[domain, name] = FusedOperator(name, domain, has_kernel)
    return register_body(name, domain=domain)


def fused_operators() -> list[FusedOperator]:
    """All operators with a native kernel of this project that gradient rules, and passes over a model, emit."""
    find_registered_body("", DOMAIN)  # loads the rules
    return [operator for operator in _operators.values() if operator.domain == DOMAIN]


def emit(
    op: Builder, name: str, *inputs: Value | None, like: Sequence[Value | None], **attributes: Any
) -> tuple[Value, ...]:
    """Emit one node of the domain ``onnxtrain``.

    Args:
        op: The builder of the rule's node.
        name: The operator.
        *inputs: Its inputs.
        like: Per output, a value whose type and shape it has.
        **attributes: Its attributes.
    """
    op.import_domain(DOMAIN, VERSION)
    outputs = op.several(name, *inputs, outputs=len(like), domain=DOMAIN, **attributes)
    for output, source in zip(outputs, like, strict=True):
        if source is not None:
            output.ir.dtype = source.dtype
            output.with_shape(source.shape)
    return outputs


def resolve_fused(model: ir.Model, backward: Backward, *, kernels: bool) -> None:
    """Keep the nodes of fused operators that a kernel can run, and write the others in standard operators, in place.

    Args:
        model: A model whose gradients are built.
        backward: What the engine emitted; bodies take the place of their nodes in it.
        kernels: Whether the model is for a session that loads the native kernels.
    """
    fused_operators()  # loads the rules
    kept, renamed = False, dict[ir.Value, ir.Value]()
    emitted = set(backward.nodes)
    opset = model.graph.opset_imports.get("", 1)
    main = Builder(model.graph, opset)
    for graph in [model.graph, *model.graph.subgraphs()]:
        nodes = [node for node in graph if (node.domain, node.op_type) in _operators]
        for node in nodes:
            if kernels and _runs(node):
                kept = kept or node.domain == DOMAIN
                continue
            assert isinstance(graph, ir.Graph)
            body = find_registered_body(node.op_type, node.domain)
            assert body is not None
            op = main.before(node) if graph is model.graph else Builder(graph, opset, before=node, outer=main)
            written = expand_registered(node, body, op, renamed)
            if node in emitted:  # the others are the model's own, or stand in the body of one that was emitted
                backward.nodes += written
    backward.arriving = {renamed.get(value, value) for value in backward.arriving}
    others = any(node.domain == DOMAIN for node in model.graph.all_nodes())
    if not kept and not others:
        model.graph.opset_imports.pop(DOMAIN, None)


def _runs(node: ir.Node) -> bool:
    floating = [value.dtype for value in node.inputs if value is not None and is_float(value)]
    return all(dtype in KERNEL_TYPES for dtype in floating) and _operators[node.domain, node.op_type].has_kernel(node)
