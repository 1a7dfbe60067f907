"""Dequantize low-bit weights at each use instead of keeping the floats from the first use to the last.

These are frozen weights, and those that are trained in bfloat16 without a copy in float32.
"""

from __future__ import annotations

import functools
import math
from itertools import filterfalse

import onnx_ir as ir

from onnxtrain.graph import Builder
from onnxtrain.graph.clone import clone_nodes
from onnxtrain.graph.domains import MICROSOFT_DOMAIN
from onnxtrain.graph.value import dimensions
from onnxtrain.operators.registry import find

_LEAST_ELEMENTS = 1 << 14
"""Smaller weights are kept: that takes less than more nodes cost."""


def rematerialize_dequantized(graph: ir.Graph) -> None:
    """Give each reader of a low-bit weight a dequantizing node of its own, in place.

    A weight is read in the forward pass, and for the gradient of the other operand: kept from one to the other, all
    weights of a model would be in float at once, four or eight times as large as they are. ONNX Runtime would also run
    these nodes, which need nothing but weights, ahead of all others; so their scales wait for the other input of the
    reader: zero times its number of elements is added to them.

    An update that reads a weight keeps the node as it is: :mod:`onnxtrain.lowering.updates` fuses the two.

    Requires: a sorted graph whose trainable parameters are inputs. Ensures: a sorted graph that computes the same.
    """
    count, order = 0, {node: index for index, node in enumerate(graph)}
    main = Builder(graph)
    for node in list(graph):
        if not _widens_weight(node, graph):
            continue
        (value,) = node.outputs
        readers = [reader for reader in dict.fromkeys(reader for reader, _ in value.uses()) if reader.graph is graph]
        if not readers or len(readers) < len({reader for reader, _ in value.uses()}):
            continue  # bodies of control flow read it wherever they run
        first: ir.Node | None = None
        others = sorted(readers, key=order.__getitem__)
        if not any(map(_updates, others)):
            first, *others = others
            graph.remove(node)
            graph.insert_before(first, node)
        for reader in filterfalse(_updates, others):
            count += 1
            (copy,) = clone_nodes([node], {}, rename=functools.partial("{1}/again_{0}".format, count))
            copy.outputs[0].type, copy.outputs[0].shape = value.type, value.shape
            graph.insert_before(reader, copy)
            for slot, read in enumerate(reader.inputs):
                if read is value:
                    reader.replace_input_with(slot, copy.outputs[0])
            _wait(main.before(copy), copy, reader)
        if first is not None:
            _wait(main.before(node), node, first)


def _wait(op: Builder, node: ir.Node, reader: ir.Node) -> None:
    """Delay a node until the other inputs of its reader are computed."""
    others = [value for value in reader.inputs if value is not None and value.producer() not in (None, node)]
    awaited = next(iter(others), None)
    if awaited is None or not isinstance(awaited.type, ir.TensorType):
        return
    nothing = op.Size(op.wrap(awaited)) * 0
    slot = 0 if node.op_type == "Cast" else 1
    value = node.inputs[slot]
    assert value is not None
    given = op.wrap(value)
    if node.op_type == "Cast":
        sizes = [size for size in dimensions(value) or () if isinstance(size, int)]
        view = op.Reshape(given, op.ints(*sizes) + nothing)
    else:
        view = given + op.cast(nothing, given.dtype)
    node.replace_input_with(slot, view.with_shape(given.shape).ir)


def _updates(node: ir.Node) -> bool:
    return find(node.domain, node.op_type) is not None


def _widens_weight(node: ir.Node, graph: ir.Graph) -> bool:
    """Return whether a node makes floats of a large low-bit initializer, or of an input of a known size."""
    if not _dequantizes(node) and not _widens(node):
        return False
    if node.outputs[0].is_graph_output():
        return False
    held = _widens(node) and node.inputs[0] in graph.inputs
    if not held and not all(value is None or value.name in graph.initializers for value in node.inputs):
        return False
    shape = dimensions(node.outputs[0])
    if shape is None or not all(isinstance(size, int) for size in shape):
        return False
    return math.prod(size for size in shape if isinstance(size, int)) >= _LEAST_ELEMENTS


def _dequantizes(node: ir.Node) -> bool:
    return node.op_type == "DequantizeLinear" and node.domain in ("", MICROSOFT_DOMAIN)


def _widens(node: ir.Node) -> bool:
    """Return whether a node is a Cast to wider numbers."""
    if node.op_type != "Cast" or node.domain != "":
        return False
    given, made = node.inputs[0], node.outputs[0]
    if given is None or given.dtype is None or made.dtype is None:
        return False
    return given.dtype.bitwidth < made.dtype.bitwidth
