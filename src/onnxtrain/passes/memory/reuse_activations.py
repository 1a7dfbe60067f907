"""Let the gradient node of an activation recompute the activation, which is then not kept for the backward pass.

The gradient of an activation y = f(x) reads x, and the next node's gradient (mostly a weight's) reads y: both would be
kept. The gradient's kernel computes most of y from x anyway, so it returns y, too, in the memory of x, and y is
released in the forward pass. Only in graphs for native kernels: standard operators would need another pass over memory.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence

import onnx_ir as ir

from onnxtrain.autodiff.engine import Backward
from onnxtrain.ir.clone import Values, clone_nodes
from onnxtrain.ir.domains import MICROSOFT_DOMAIN
from onnxtrain.ir.replace import set_inputs
from onnxtrain.ir.value import constant_number
from onnxtrain.passes.memory.adapter_gradients import SHAPES_ONLY, only_adapters_read
from onnxtrain.passes.memory.recompute import COPY

_VIEWS = frozenset({"Flatten", "Reshape"})


def reuse_activations(graph: ir.Graph, backward: Backward) -> None:
    """Let gradients that read a Clip, Gelu or SiLU read the second output of its gradient's node, in place.

    Left alone are an activation read by a gradient that the gradient of the activation depends on, and one that is
    recomputed: it is not kept, and waiting for the gradient would keep others.

    Requires: a sorted graph whose fused operators are those that kernels run. Ensures: a sorted graph.

    Args:
        graph: The main graph.
        backward: The nodes that carry gradients; those no longer in the graph are passed over.
    """
    carrying = {node for node in backward.nodes if node.graph is graph}
    changed = False
    for node in list(graph):
        y = _activation(node, carrying) if node in carrying and len(node.outputs) == 1 else None
        if y is None:
            continue
        readers = dict.fromkeys(reader for reader, _ in _reads(y, carrying))
        if readers and not _leads_to(node, readers, carrying):
            _reuse(graph, node, y, carrying)
            _multiply_again(graph, node, y, carrying)
            changed = True
    if changed:
        graph.sort()


def _activation(node: ir.Node, carrying: Collection[ir.Node]) -> ir.Value | None:
    """Return y of the activation whose gradient a node computes from dy and x."""
    if node.op_type not in ("ClipGradient", "GeluGradient") or node.inputs[1] is None:
        return None
    for forward, slot in node.inputs[1].uses():
        if (slot and forward.op_type != "Mul") or str(forward.outputs[0].name).startswith(COPY):
            continue
        if forward not in carrying and forward.graph is node.graph and _is_function_of(forward, node):
            return forward.outputs[0]
    return None


def _is_function_of(forward: ir.Node, gradient: ir.Node) -> bool:
    """Return whether a node computes the activation that the other node is the gradient of."""
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
    own = forward.attributes.get("approximate")
    return forward.op_type == "Gelu" and approximate == ("none" if own is None else own.as_string())


def _is_silu(node: ir.Node, x: ir.Value | None) -> bool:
    """Return whether a node computes x sigmoid(x)."""
    if node.op_identifier() != ("", "Mul", "") or x not in node.inputs:
        return False
    other = node.inputs[1] if node.inputs[0] is x else node.inputs[0]
    source = None if other is None else other.producer()
    return source is not None and source.op_identifier() == ("", "Sigmoid", "") and source.inputs[0] is x


def _given(values: Sequence[ir.Value | None]) -> list[tuple[int, ir.Value]]:
    return [(slot, value) for slot, value in enumerate(values) if value is not None]


def _bounds(values: Sequence[ir.Value | None]) -> list[tuple[int, ir.Value]]:
    """Return the bounds that are given; a lower bound of minus infinity is none."""
    return [(slot, value) for slot, value in _given(values) if slot or constant_number(value) != -math.inf]


def _reads(y: ir.Value, carrying: Collection[ir.Node]) -> Iterator[tuple[ir.Node, ir.Value]]:
    """Yield gradient nodes that read the elements of y, each with y or a forward node's view of y."""
    for reader in dict.fromkeys(reader for reader, _ in y.uses()):
        if reader in carrying:
            if reader.op_type not in SHAPES_ONLY:
                yield reader, y
        elif reader.op_type in _VIEWS and not reader.domain and reader.inputs[0] is y:
            yield from _reads(reader.outputs[0], carrying)


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


def _reuse(graph: ir.Graph, node: ir.Node, y: ir.Value, carrying: set[ir.Node]) -> None:
    node.resize_outputs(2)
    again = node.outputs[1]
    again.name = f"again/{y.name}"
    again.type, again.shape = y.type, y.shape
    mapping: Values = {y: again}
    for reader, read in list(_reads(y, carrying)):
        if read not in mapping:
            carrying.update(_copy_views(graph, node, read, mapping))
        set_inputs(reader, [mapping[read] if value is read else value for value in reader.inputs])


def _multiply_again(graph: ir.Graph, node: ir.Node, y: ir.Value, carrying: set[ir.Node]) -> None:
    """Multiply by the activation once more, where only adapters' gradients read the product (a gated layer's)."""
    for reader in y.consumers():
        if (
            reader in carrying
            or reader.op_identifier() != ("", "Mul", "")
            or not only_adapters_read(reader.outputs[0], carrying)
        ):
            continue
        product = reader.outputs[0]
        mapping: Values = {y: node.outputs[1]}
        copies = clone_nodes([reader], mapping, rename=lambda name: f"again/{name}")
        graph.insert_after(node, copies)
        carrying.update(copies)
        for gradient in [each for each in product.consumers() if each in carrying]:
            set_inputs(gradient, [mapping[product] if value is product else value for value in gradient.inputs])


def _copy_views(graph: ir.Graph, after: ir.Node, view: ir.Value, mapping: Values) -> list[ir.Node]:
    """Copy the views that lead from a value of the mapping to ``view`` for its substitute."""
    chain: list[ir.Node] = []
    while view not in mapping:
        producer = view.producer()
        assert producer is not None
        chain.append(producer)
        assert producer.inputs[0] is not None
        view = producer.inputs[0]
    copies = clone_nodes(chain[::-1], mapping, rename=lambda name: f"again/{name}")
    graph.insert_after(after, copies)
    return copies
