"""Let the gradient node of an activation or a norm recompute its result, which is then not kept for the backward pass.

The gradient of an activation y = f(x) reads x, and the next node's gradient (mostly a weight's) reads y: both would be
kept. The gradient's kernel computes most of y from x anyway, so it returns y, too, and y is released in the forward
pass. So is a product of y with another value that a gradient reads, as in gated units. Only in graphs for native
kernels: standard operators would need another pass over memory.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff.engine import Backward
from onnxtrain.graph.clone import Values, clone_nodes
from onnxtrain.graph.domains import MICROSOFT_DOMAIN, ONNXTRAIN_DOMAIN
from onnxtrain.graph.replace import set_inputs
from onnxtrain.graph.value import constant_number, dimensions, input_of, made_by
from onnxtrain.lowering.memory.recompute import COPY, SHAPES_ONLY

_VIEWS = frozenset({"Flatten", "Reshape"})

_PLACES = {"ClipGradient": 1, "GeluGradient": 1, "RMSNormalizationGradient": 2, "LayerNormalizationGradient": 3}
_PLACES |= {"BatchNormalizationGradient": 3}
"""Operators that give y, and the place of this output."""

_NORMS = {
    "RMSNormalizationGradient": {
        ("", "RMSNormalization", ""),
        ("", "SimplifiedLayerNormalization", ""),
        (MICROSOFT_DOMAIN, "SimplifiedLayerNormalization", ""),
    },
    "LayerNormalizationGradient": {("", "LayerNormalization", "")},
}


class _Read(NamedTuple):
    """A gradient node that reads y, or what cheap forward nodes compute from y."""

    reader: ir.Node
    value: ir.Value  # what it reads
    nodes: tuple[ir.Node, ...]  # the forward nodes from y to the value


def reuse_activations(graph: ir.Graph, backward: Backward) -> None:
    """Let gradients that read a Clip, Gelu, SiLU or norm read another output of its gradient's node, in place.

    Left alone are an activation read by a gradient that the gradient of the activation depends on, and one that is
    recomputed: it is not kept, and waiting for the gradient would keep others.

    Requires: a sorted graph whose fused operators are those that kernels run. Ensures: a sorted graph.
    """
    carrying = {node for node in backward.nodes if node.graph is graph}
    changed = False
    for node in list(graph):
        forward = _activation(node, carrying) if node in carrying else None
        if forward is None:
            continue
        reads = list(_reads(forward.outputs[0], carrying))
        if reads and not _leads_to(node, dict.fromkeys(read.reader for read in reads), carrying):
            _reuse(graph, node, forward, reads, carrying)
            changed = True
    if changed:
        graph.sort()


def _activation(node: ir.Node, carrying: Collection[ir.Node]) -> ir.Node | None:
    """Return the node of the activation or norm whose gradient a node computes from dy and x."""
    place = _PLACES.get(node.op_type)
    if place is None or len(node.outputs) > place or node.inputs[1] is None:
        return None
    for forward, slot in node.inputs[1].uses():
        if (slot and forward.op_type != "Mul") or str(forward.outputs[0].name).startswith(COPY):
            continue
        if forward not in carrying and forward.graph is node.graph and _is_function_of(forward, node):
            return forward
    return None


def _is_function_of(forward: ir.Node, gradient: ir.Node) -> bool:
    """Return whether a node computes the activation or norm that the other node is the gradient of."""
    if gradient.op_type == "BatchNormalizationGradient":
        return _is_batch_norm(forward, gradient)
    if gradient.op_type in _NORMS:
        return _is_norm(forward, gradient)
    if gradient.op_type == "ClipGradient":
        return forward.op_identifier() == ("", "Clip", "") and _bounds(forward.inputs[1:]) == _bounds(
            gradient.inputs[2:]
        )
    approximate = gradient.attributes["approximate"].as_string()
    if approximate == "sigmoid":
        return gradient.attributes["alpha"].as_float() == 1 and _is_silu(forward, gradient.inputs[1])
    if forward.domain:
        name = {"none": "Gelu", "tanh": "FastGelu"}[approximate]
        return forward.op_identifier() == (MICROSOFT_DOMAIN, name, "") and not _given(forward.inputs[1:])
    return forward.op_type == "Gelu" and approximate == forward.attributes.get_string("approximate", "none")


def _is_batch_norm(forward: ir.Node, gradient: ir.Node) -> bool:
    """Return whether a node keeps the statistics that the gradient reads, and gives what it computes again."""
    if forward.op_identifier() != (ONNXTRAIN_DOMAIN, "BatchNormalization", "") or len(forward.inputs) > 5:
        return False  # a residual was added
    if "activation" not in forward.attributes:
        return False  # its gradient would write one tensor more than before
    return len(gradient.inputs) > 5 and list(gradient.inputs[3:5]) == list(forward.outputs[3:5])


def _is_norm(forward: ir.Node, gradient: ir.Node) -> bool:
    """Return whether a node normalizes with the scale, axes and epsilon of the gradient, and a bias of its sizes."""
    x, scale = gradient.inputs[1:3]
    if forward.op_identifier() not in _NORMS[gradient.op_type] or forward.inputs[1] is not scale:
        return False
    if forward.inputs[0] is not x or x is None or scale is None or forward.outputs[0].dtype != x.dtype:
        return False
    bias = input_of(forward, 2)
    if bias is not None and (dimensions(bias) != dimensions(scale) or bias.dtype != scale.dtype):
        return False
    rank = len(dimensions(x) or ())
    own, given = forward.attributes, gradient.attributes
    epsilons = (own.get_float("epsilon", 1e-5), given["epsilon"].as_float())  # one may have been single precision
    alike = np.float32(epsilons[0]) == np.float32(epsilons[1])
    return bool(alike) and own.get_int("axis", -1) % rank == given["axis"].as_int() % rank


def _is_silu(node: ir.Node, x: ir.Value | None) -> bool:
    """Return whether a node computes x sigmoid(x)."""
    if node.op_identifier() != ("", "Mul", "") or x not in node.inputs:
        return False
    other = node.inputs[1] if node.inputs[0] is x else node.inputs[0]
    source = made_by(other, "Sigmoid")
    return source is not None and source.inputs[0] is x


def _given(values: Sequence[ir.Value | None]) -> list[tuple[int, ir.Value]]:
    return [(slot, value) for slot, value in enumerate(values) if value is not None]


def _bounds(values: Sequence[ir.Value | None]) -> list[tuple[int, ir.Value]]:
    """Return the bounds that are given; a lower bound of minus infinity is none."""
    return [(slot, value) for slot, value in _given(values) if slot or constant_number(value) != -math.inf]


def _reads(y: ir.Value, carrying: Collection[ir.Node], nodes: tuple[ir.Node, ...] = ()) -> Iterator[_Read]:
    """Yield the gradient nodes that read elements of y, of views of y, and of products that cost no other value."""
    for reader in dict.fromkeys(reader for reader, _ in y.uses()):
        if reader in carrying:
            if reader.op_type not in SHAPES_ONLY:
                yield _Read(reader, y, nodes)
        elif _is_view(reader, y) or _is_cheap_product(reader, y, carrying):
            yield from _reads(reader.outputs[0], carrying, (*nodes, reader))


def _is_view(node: ir.Node, y: ir.Value) -> bool:
    return node.op_type in _VIEWS and not node.domain and node.inputs[0] is y


def _is_cheap_product(node: ir.Node, y: ir.Value, carrying: Collection[ir.Node]) -> bool:
    """Return whether a node multiplies y by a value of its shape that a gradient reads: it is kept in any case."""
    if node.op_identifier() != ("", "Mul", ""):
        return False
    first, second = node.inputs
    other = second if first is y else first
    if other is None or other is y or not dimensions(y) or dimensions(other) != dimensions(y):
        return False
    return any(reader in carrying and reader.op_type not in SHAPES_ONLY for reader, _ in other.uses())


def _leads_to(target: ir.Node, nodes: Collection[ir.Node], carrying: Collection[ir.Node]) -> bool:
    """Return whether a gradient node depends on one of others."""
    pending, seen = list(nodes), set(nodes)
    while pending:
        for output in pending.pop().outputs:
            for reader, _ in output.uses():
                if reader is target:
                    return True
                if reader in carrying and reader not in seen:
                    seen.add(reader)
                    pending.append(reader)
    return False


def _reuse(graph: ir.Graph, node: ir.Node, forward: ir.Node, reads: Sequence[_Read], carrying: set[ir.Node]) -> None:
    y, place = forward.outputs[0], _PLACES[node.op_type]
    node.resize_outputs(place + 1)
    again = node.outputs[place]
    again.name = f"again/{y.name}"
    again.type, again.shape = y.type, y.shape
    if node.op_type == "LayerNormalizationGradient" and len(forward.inputs) > 2:
        node.resize_inputs(4)
        node.replace_input_with(3, forward.inputs[2])
    mapping: Values = {y: again}
    for read in reads:
        missing = [inner for inner in read.nodes if inner.outputs[0] not in mapping]
        copies = clone_nodes(missing, mapping, rename=lambda name: f"again/{name}")
        graph.insert_after(node, copies)
        carrying.update(copies)
        inputs = [mapping[read.value] if value is read.value else value for value in read.reader.inputs]
        set_inputs(read.reader, inputs)
