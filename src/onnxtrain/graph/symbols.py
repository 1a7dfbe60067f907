"""Resolve the symbols that ONNX's inference makes up to sizes that are known.

Exporters compute shapes in the graph (the shape of one tensor, taken apart and joined again, reshapes another). ONNX's
inference follows that in part and gives every size that it cannot determine a new symbol, even where it is plainly the
batch size again. Each such symbol costs gradients a computation of the axes along which something was broadcast.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxtrain.graph.clone import all_nodes, subgraphs
from onnxtrain.graph.inference import Sizes, is_inferred, output_shape, shape_from_inputs
from onnxtrain.graph.sizes import Content, computed_content, constant_content, filled_in, is_made_up, is_open
from onnxtrain.graph.value import Dimension, dimensions, is_float


def resolve_symbols(graph: ir.Graph) -> bool:
    """Replace made-up symbols by the sizes or symbols that they are equal to, in place.

    Requires: a sorted graph whose shapes ONNX has inferred. Ensures: shapes are the same or more specific.

    Returns:
        True if any symbol was replaced, so that another inference may find more.
    """
    resolver = _Resolver()
    for node in graph:
        resolver.visit(node)
    if resolver.found:
        resolver.write(graph)
    return bool(resolver.found)


def needs_inference(graph: ir.Graph) -> bool:
    """Return whether ONNX may infer further unknown sizes, now that others are known.

    It cannot if each unknown shape belongs to an operator that Python infers, too; these shapes are filled in.

    Requires: a graph that :func:`resolve_symbols` has gone through.
    """
    for node in graph:
        if subgraphs(node):
            return True
        open_ones = [output for output in node.outputs if output.name and is_open(dimensions(output))]
        if open_ones and (node.domain or not is_inferred(node.op_type)):
            return True
        for output in open_ones:
            _fill_in(output, shape_from_inputs(output))
    return False


def _fill_in(value: ir.Value, shape: Sizes) -> None:
    sizes = filled_in(dimensions(value), shape)
    value.shape = None if sizes is None else ir.Shape(sizes)


class _Resolver:
    """Propagate sizes through a graph."""

    divides_symbols = True

    def __init__(self) -> None:
        self.found: dict[str, int | str] = {}
        self._contents: dict[ir.Value, Content | None] = {}

    def shape(self, value: ir.Value | None) -> Sizes:
        """The shape of a value by all that is known so far."""
        known = dimensions(value)
        return None if known is None else tuple(self._resolved(size) for size in known)

    def _resolved(self, size: Dimension) -> Dimension:
        while isinstance(size, str) and size in self.found:
            size = self.found[size]
        return size

    def content(self, value: ir.Value | None) -> Sizes:
        """The elements of an integer tensor of rank 0 or 1; ``None`` for other tensors or where nothing is known."""
        known = self._elements(value)
        return None if known is None else tuple(known.flat)

    def _elements(self, value: ir.Value | None) -> Content | None:
        if value is None or is_float(value):
            return None
        if value not in self._contents:
            self._contents[value] = constant_content(value)
        known = self._contents[value]
        return None if known is None else np.asarray(np.frompyfunc(self._resolved, 1, 1)(known), object)

    def visit(self, node: ir.Node) -> None:
        """Follow sizes through one node."""
        if node.domain or not node.outputs:
            return
        output = node.outputs[0]
        if output.shape is None or len(output.shape) <= 1:
            found = computed_content(node, self._elements, self.shape)
            if found is not None:
                self._contents[output] = self._without_products(node, found)
        old = dimensions(output)
        new = output_shape(node, self) if is_open(old) else None
        if new is None or output.type is None:  # only shapes with a type are written
            return
        for before, now in zip(map(self._resolved, old or ()), new, strict=False):
            if now is not None and now != before and isinstance(before, str) and is_made_up(before):
                self.found[before] = now
        if old is None or None in old:
            _fill_in(output, new)

    def _without_products(self, node: ir.Node, found: Content) -> Content:
        """Forget products of symbols: an axis gets a number or a symbol of the model."""
        if node.op_type not in ("Mul", "Div"):
            return found
        known = {size for value in node.inputs for size in self.content(value) or ()}
        sizes = [size if isinstance(size, int) or size in known else None for size in found.flat]
        return np.array(sizes, object).reshape(found.shape)

    def write(self, graph: ir.Graph) -> None:
        """Replace the resolved symbols in all shapes."""
        for output in [output for node in all_nodes(graph) for output in node.outputs]:
            old = dimensions(output)
            if old is not None and any(isinstance(size, str) and size in self.found for size in old):
                output.shape = ir.Shape(tuple(self._resolved(size) for size in old))
