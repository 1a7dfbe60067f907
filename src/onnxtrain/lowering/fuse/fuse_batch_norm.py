"""Fuse batch normalization in training mode with what follows it: a residual sum, an activation.

Each is a pass over memory forwards, and another in its gradient, and the normalized values are kept for the gradient of
the activation. One node reads and writes once, and its gradient computes the normalized values again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff.fused import emit
from onnxtrain.autodiff.options import GradientOptions
from onnxtrain.autodiff.rules.fused_batch_norm import ACTIVATION, OPERATOR, normalizes_batches
from onnxtrain.graph import Builder
from onnxtrain.graph.patterns import match_alike
from onnxtrain.graph.replace import remove_nodes, take_over
from onnxtrain.graph.value import constant_number, dimensions
from onnxtrain.lowering.fuse.patterns import is_needed, named_by_gradients
from onnxtrain.lowering.training_info.recipe import SYNCHRONIZED_KEY

_SAME_NAME = frozenset({"HardSwish", "Relu"})


class _Behind(NamedTuple):
    """The nodes behind a normalization that the fused node computes, too.

    Attributes:
        nodes: The nodes, in order.
        attributes: Those of the fused node.
        addend: A residual, added before the activation.
    """

    nodes: tuple[ir.Node, ...] = ()
    attributes: Mapping[str, str | float] = {}
    addend: ir.Value | None = None


def fuse_batch_norm(model: ir.Model) -> None:
    """Replace batch normalization in training mode, and what follows it, by one node of the domain ``onnxtrain``.

    Behind it may be Relu, Clip by constants, or HardSwish; or the addition of a value of the same sizes and then Relu.
    Left alone are:

    - normalization with nothing of this behind it, which another pass gives a kernel;
    - normalization over several processes, whose statistics another pass computes;
    - what the kernel of :mod:`~onnxtrain.lowering.kernels.use_normalization_kernels` does not take;
    - nodes behind a value that something else needs, and nodes that the patterns of ``recompute`` tell apart.

    Requires: a sorted graph with shapes. Ensures: the new node is where the last of the old ones was, and has the name
    of the normalization; values that outputs or Gradient nodes name stay.
    """
    graph = model.graph
    if model.metadata_props.get(SYNCHRONIZED_KEY) == "true":
        return
    norms = [node for node in graph if normalizes_batches(node)]
    if not norms:
        return
    main, named = Builder(graph, graph.opset_imports[""]), named_by_gradients(graph)
    patterns = GradientOptions.read(model.metadata_props).recompute
    place = {node: index for index, node in enumerate(graph)}
    gone: set[ir.Node] = set()
    for norm in norms:
        behind = _behind(norm, named)
        if not behind.nodes or gone.intersection(behind.nodes) or _reads_running_statistics(norm, behind, place):
            continue
        if not match_alike(patterns, [node.name or "" for node in (norm, *behind.nodes)]):
            continue
        last = behind.nodes[-1]
        _emit(main.before(last), graph, norm, behind, last.outputs[0])
        gone.update((norm, *behind.nodes))
    remove_nodes(graph, gone)


def _emit(op: Builder, graph: ir.Graph, norm: ir.Node, behind: _Behind, y: ir.Value) -> None:
    given = [None if value is None else op.wrap(value) for value in (*norm.inputs[:5], behind.addend)]
    scale = given[1]
    assert scale is not None
    attributes = {name: attribute.value for name, attribute in norm.attributes.items() if name != "training_mode"}
    like = [op.wrap(y), scale, scale, None, None]
    made = emit(op, OPERATOR, *given, like=like, **attributes, **behind.attributes)
    op.emitted[-1].name = norm.name
    channels = (dimensions(scale.ir) or (None,))[0]
    for value in made[3:]:
        value.ir.dtype = scale.dtype
        value.with_shape((2, channels))
    old = [y, *norm.outputs[1:]]
    take_over(graph, {value: new.ir for value, new in zip(old, made, strict=False) if value.name})


def _behind(norm: ir.Node, named: Collection[str]) -> _Behind:
    """The nodes behind the normalized values, if nothing else needs these."""
    n = norm.outputs[0]
    if is_needed(n, named):
        return _Behind()
    readers = [reader for reader, _ in n.uses()]
    if len(readers) != 1 or readers[0].graph is not norm.graph or readers[0].domain:
        return _Behind()
    (node,) = readers
    if node.op_type in _SAME_NAME:
        return _Behind((node,), {ACTIVATION: node.op_type})
    if node.op_type == "Clip" and node.inputs[0] is n:
        return _clip(node)
    return _residual(n, node, named) if node.op_type == "Add" else _Behind()


def _clip(node: ir.Node) -> _Behind:
    """A Clip whose bounds are numbers of single precision, which attributes are."""
    bounds = {}
    for name, value in zip(("low", "high"), node.inputs[1:], strict=False):
        if value is None:
            continue
        number = constant_number(value)
        if number is None or float(np.float32(number)) != number:
            return _Behind()
        bounds[name] = number
    low, high = bounds.get("low", -np.inf), bounds.get("high", np.inf)
    return _Behind((node,), {ACTIVATION: "Clip", "low": low, "high": high}) if low <= high else _Behind()


def _residual(n: ir.Value, add: ir.Node, named: Collection[str]) -> _Behind:
    """The sum with a value of the same sizes, and Relu."""
    total, sizes = add.outputs[0], dimensions(n)
    other = add.inputs[1] if add.inputs[0] is n else add.inputs[0]
    if other is None or not sizes or dimensions(other) != sizes or None in sizes or other.dtype != n.dtype:
        return _Behind()
    readers = [reader for reader, _ in total.uses()]
    if len(readers) != 1 or readers[0].op_identifier() != ("", "Relu", "") or is_needed(total, named):
        return _Behind()
    return _Behind((add, readers[0]), {ACTIVATION: "Relu"}, other)


def _reads_running_statistics(norm: ir.Node, behind: _Behind, place: Mapping[ir.Node, int]) -> bool:
    """Return whether a node before the last one reads a running statistic that the normalization returns."""
    end = place[behind.nodes[-1]]
    return any(place.get(reader, -1) < end for output in norm.outputs[1:] for reader, _ in output.uses())
