"""Resolve the symbols that ONNX's inference makes up to sizes that are known.

Exporters compute shapes in the graph (the shape of one tensor, taken apart and joined again, reshapes another). ONNX's
inference follows that in part and gives every size that it cannot determine a new symbol, even where it is plainly the
batch size again. Each such symbol costs gradients a computation of the axes along which something was broadcast.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from onnxtrain.graph.clone import subgraphs
from onnxtrain.graph.declared_shapes import MADE_UP
from onnxtrain.graph.inference import (
    LONGEST,
    Sizes,
    integer,
    is_inferred,
    output_shape,
    shape_from_inputs,
    slice_bounds,
)
from onnxtrain.graph.value import Dimension, constant_tensor, dimensions


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
            output.shape = _filled_in(dimensions(output), shape_from_inputs(output))
    return False


def _is_made_up(size: Dimension) -> bool:
    return isinstance(size, str) and size.startswith(MADE_UP)


def is_open(shape: Sizes) -> bool:
    """Return whether the rank or a size is not known."""
    return shape is None or any(size is None or _is_made_up(size) for size in shape)


def _filled_in(shape: Sizes, other: Sizes) -> ir.Shape | None:
    """A shape with the sizes of another where its own are open."""
    if shape is None or other is None or len(shape) != len(other):
        known = other if shape is None else shape
        return None if known is None else ir.Shape(known)
    pairs = zip(shape, other, strict=True)
    return ir.Shape([new if new is not None and is_open((old,)) else old for old, new in pairs])


class _Resolver:
    """Propagate sizes through a graph."""

    divides_symbols = True

    def __init__(self) -> None:
        self.found: dict[str, int | str] = {}
        self._contents: dict[ir.Value, Sizes] = {}

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
        if value is None or (value.dtype is not None and not value.dtype.is_integer() and value.dtype.name != "BOOL"):
            return None
        if value not in self._contents:
            tensor = constant_tensor(value)
            small = tensor is not None and len(tensor.shape) <= 1 and tensor.size <= LONGEST
            numbers = tensor.numpy().reshape(-1) if tensor is not None and small else None
            self._contents[value] = None if numbers is None else tuple(int(number) for number in numbers)
        known = self._contents[value]
        return None if known is None else tuple(self._resolved(size) for size in known)

    def visit(self, node: ir.Node) -> None:
        """Follow sizes through one node."""
        if node.domain or not node.outputs:
            return
        output = node.outputs[0]
        follow = _CONTENTS.get(node.op_type)
        if follow is not None and (output.shape is None or len(output.shape) <= 1):
            self._contents[output] = follow(self, node)
        old = dimensions(output)
        new = output_shape(node, self) if is_open(old) else None
        if new is None or output.type is None:  # only shapes with a type are written
            return
        for before, now in zip(map(self._resolved, old or ()), new, strict=False):
            if now is not None and now != before and isinstance(before, str) and _is_made_up(before):
                self.found[before] = now
        if old is None or None in old:
            output.shape = _filled_in(old, new)

    def write(self, graph: ir.Graph) -> None:
        """Replace the resolved symbols in all shapes."""
        for node in graph:
            for output in node.outputs:
                old = dimensions(output)
                if old is not None and any(isinstance(size, str) and size in self.found for size in old):
                    output.shape = ir.Shape(tuple(self._resolved(size) for size in old))
            for body in subgraphs(node):
                self.write(body)


def _shape(known: _Resolver, node: ir.Node) -> Sizes:
    sizes = known.shape(node.inputs[0])
    return None if sizes is None else sizes[integer(node, "start", 0) : integer(node, "end", len(sizes))]


def _same(known: _Resolver, node: ir.Node) -> Sizes:
    return known.content(node.inputs[0])


def _gather(known: _Resolver, node: ir.Node) -> Sizes:
    elements, indices = known.content(node.inputs[0]), known.content(node.inputs[1])
    if elements is None or indices is None:
        return None
    chosen = [index for index in indices if isinstance(index, int) and -len(elements) <= index < len(elements)]
    return tuple(elements[index] for index in chosen) if len(chosen) == len(indices) else None


def _concat(known: _Resolver, node: ir.Node) -> Sizes:
    parts = [known.content(value) for value in node.inputs]
    return None if any(part is None for part in parts) else tuple(size for part in parts for size in part or ())


def _slice(known: _Resolver, node: ir.Node) -> Sizes:
    elements, bounds = known.content(node.inputs[0]), slice_bounds(node, known, 1)
    return None if elements is None or bounds is None else elements[bounds[0]]


def _constant_of_shape(known: _Resolver, node: ir.Node) -> Sizes:
    count, value = known.content(node.inputs[0]), node.attributes.get("value")
    if count is None or len(count) != 1 or not isinstance(count[0], int) or count[0] > LONGEST:
        return None
    if value is None or not value.as_tensor().dtype.is_integer():
        return None
    return (int(value.as_tensor().numpy().item()),) * count[0]


def _pairwise(function: Callable[[Dimension, Dimension], Dimension]) -> Callable[[_Resolver, ir.Node], Sizes]:
    def follow(known: _Resolver, node: ir.Node) -> Sizes:
        left, right = (known.content(value) for value in node.inputs)
        if left is None or right is None or (len(left) != len(right) and 1 not in (len(left), len(right))):
            return None
        count = max(len(left), len(right)) if left and right else 0
        repeated = (side * count if len(side) == 1 else side for side in (left, right))
        return tuple(function(a, b) for a, b in zip(*repeated, strict=True))

    return follow


def _add(a: Dimension, b: Dimension) -> Dimension:
    if isinstance(a, int) and isinstance(b, int):
        return a + b
    return a if b == 0 else b if a == 0 else None


def _multiply(a: Dimension, b: Dimension) -> Dimension:
    if isinstance(a, int) and isinstance(b, int):
        return a * b
    return a if b == 1 else b if a == 1 else None


def _divide(a: Dimension, b: Dimension) -> Dimension:
    if isinstance(a, int) and isinstance(b, int):
        return a // b if a >= 0 and b > 0 else None
    return a if b == 1 else None


def _equal(a: Dimension, b: Dimension) -> Dimension:
    if isinstance(a, int) and isinstance(b, int):
        return int(a == b)
    if a is not None and a == b:
        return 1
    negative = any(isinstance(size, int) and size < 0 for size in (a, b))
    return 0 if negative and isinstance(a if isinstance(b, int) else b, str) else None


def _where(known: _Resolver, node: ir.Node) -> Sizes:
    parts = [known.content(value) for value in node.inputs]
    if any(part is None for part in parts):
        return None
    count = max(len(part or ()) for part in parts)
    rows = [(part or ()) * count if len(part or ()) == 1 else part or () for part in parts]
    if any(len(row) != count for row in rows):
        return None
    return tuple(
        a if condition == 1 else b if condition == 0 else a if a == b else None
        for condition, a, b in zip(*rows, strict=True)
    )


_CONTENTS: dict[str, Callable[[_Resolver, ir.Node], Sizes]] = {
    "Shape": _shape,
    **dict.fromkeys(("Unsqueeze", "Squeeze", "Identity", "Cast", "Reshape"), _same),
    "Gather": _gather,
    "Concat": _concat,
    "Slice": _slice,
    "ConstantOfShape": _constant_of_shape,
    "Add": _pairwise(_add),
    "Mul": _pairwise(_multiply),
    "Div": _pairwise(_divide),
    "Equal": _pairwise(_equal),
    "Where": _where,
}
"""The elements of an integer tensor from those of its node's inputs."""
