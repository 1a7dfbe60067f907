"""What ONNX's inference leaves open: which of the symbols that it made up stand for sizes that are known.

Exporters compute shapes in the graph (the shape of one tensor, taken apart and put together, reshapes another).
ONNX's inference follows that in part and gives every size that it cannot tell a new symbol, also where it is plainly
the batch size again. Each such symbol costs gradients a computation of the axes along which something was broadcast.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import onnx_ir as ir

from onnxtrain.ir.clone import subgraphs
from onnxtrain.ir.declared_shapes import MADE_UP
from onnxtrain.ir.inference import broadcast_shapes, is_elementwise, is_followed, shape_from_inputs
from onnxtrain.ir.value import Dimension, constant_tensor, dimensions

_LONGEST = 64
"""Elements up to which an integer tensor is taken for sizes."""


def resolve_symbols(graph: ir.Graph) -> bool:
    """Replace made-up symbols by the sizes or symbols that they are equal to, in place.

    Requires: a sorted graph whose shapes ONNX has inferred. Ensures: shapes say the same or more.

    Returns:
        Whether there were any, so that another inference may find more.
    """
    resolver = _Resolver()
    for node in graph:
        resolver.visit(node)
    if resolver.found:
        resolver.write(graph)
    return bool(resolver.found)


def asks_again(graph: ir.Graph) -> bool:
    """Whether another inference of ONNX's may find a size that is still made up, now that others are known.

    It finds none where all that is open are operators that are followed here, too; what is known of these is filled in.

    Requires: a graph of which :func:`resolve_symbols` has looked at all nodes.
    """
    for node in graph:
        if subgraphs(node):
            return True
        open_ones = [output for output in node.outputs if output.name and _is_open(dimensions(output))]
        if open_ones and (node.domain or not is_followed(node.op_type)):
            return True
        for output in open_ones:
            output.shape = _filled_in(dimensions(output), shape_from_inputs(output))
    return False


def _is_made_up(size: Dimension) -> bool:
    return isinstance(size, str) and size.startswith(MADE_UP)


def _is_open(shape: tuple[Dimension, ...] | None) -> bool:
    return shape is None or any(size is None or _is_made_up(size) for size in shape)


def _filled_in(shape: tuple[Dimension, ...] | None, told: tuple[Dimension, ...] | None) -> ir.Shape | None:
    """A shape with what is told of its open sizes."""
    if shape is None or told is None or len(shape) != len(told):
        known = told if shape is None else shape
        return None if known is None else ir.Shape(known)
    pairs = zip(shape, told, strict=True)
    return ir.Shape([new if new is not None and _is_open((old,)) else old for old, new in pairs])


class _Resolver:
    """Follows sizes through a graph."""

    def __init__(self) -> None:
        self.found: dict[str, int | str] = {}
        self._values: dict[ir.Value, tuple[Dimension, ...] | None] = {}

    def shape(self, value: ir.Value | None) -> tuple[Dimension, ...] | None:
        """The shape of a value by all that is known so far."""
        known = None if value is None else dimensions(value)
        return None if known is None else tuple(self._resolved(size) for size in known)

    def _resolved(self, size: Dimension) -> Dimension:
        while isinstance(size, str) and size in self.found:
            size = self.found[size]
        return size

    def content(self, value: ir.Value | None) -> tuple[Dimension, ...] | None:
        """The elements of an integer tensor of rank 0 or 1; ``None`` where it is none or nothing is known."""
        if value is None or (value.dtype is not None and not value.dtype.is_integer() and value.dtype.name != "BOOL"):
            return None
        if value not in self._values:
            tensor = constant_tensor(value)
            small = tensor is not None and len(tensor.shape) <= 1 and tensor.size <= _LONGEST
            numbers = tensor.numpy().reshape(-1) if tensor is not None and small else None
            self._values[value] = None if numbers is None else tuple(int(number) for number in numbers)
        known = self._values[value]
        return None if known is None else tuple(self._resolved(size) for size in known)

    def visit(self, node: ir.Node) -> None:
        """Learn what one node tells."""
        if node.domain or not node.outputs:
            return
        output = node.outputs[0]
        follow = _CONTENTS.get(node.op_type)
        if follow is not None and (output.shape is None or len(output.shape) <= 1):
            self._values[output] = follow(self, node)
        derive = _broadcast if is_elementwise(node.op_type) else _SHAPES.get(node.op_type)
        old = dimensions(output)
        if derive is None or (old is not None and not any(map(_is_made_up, old))):
            return
        new = derive(self, node)
        if new is None:
            return
        if old is None:
            output.shape = ir.Shape(new)
            return
        for before, now in zip(map(self._resolved, old), new, strict=False):
            if now is not None and now != before and isinstance(before, str) and _is_made_up(before):
                self.found[before] = now

    def write(self, graph: ir.Graph) -> None:
        """Put what was found into all shapes."""
        for node in graph:
            for output in node.outputs:
                old = dimensions(output)
                if old is not None and any(isinstance(size, str) and size in self.found for size in old):
                    output.shape = ir.Shape(tuple(self._resolved(size) for size in old))
            for body in subgraphs(node):
                self.write(body)


Sizes = tuple[Dimension, ...] | None


def _broadcast(known: _Resolver, node: ir.Node) -> Sizes:
    return broadcast_shapes(*(known.shape(value) for value in node.inputs))


def _input(node: ir.Node, index: int) -> ir.Value | None:
    return node.inputs[index] if index < len(node.inputs) else None


def _integer(node: ir.Node, name: str, default: int) -> int:
    attribute = node.attributes.get(name)
    return default if attribute is None or attribute.is_ref() else attribute.as_int()


def _shape(known: _Resolver, node: ir.Node) -> Sizes:
    sizes = known.shape(node.inputs[0])
    if sizes is None:
        return None
    end = _integer(node, "end", len(sizes))
    return sizes[_integer(node, "start", 0) : end]


def _same(known: _Resolver, node: ir.Node) -> Sizes:
    return known.content(node.inputs[0])


def _gather(known: _Resolver, node: ir.Node) -> Sizes:
    elements, places = known.content(node.inputs[0]), known.content(node.inputs[1])
    if elements is None or places is None:
        return None
    chosen = [place for place in places if isinstance(place, int) and -len(elements) <= place < len(elements)]
    return tuple(elements[place] for place in chosen) if len(chosen) == len(places) else None


def _concat(known: _Resolver, node: ir.Node) -> Sizes:
    parts = [known.content(value) for value in node.inputs]
    return None if any(part is None for part in parts) else tuple(size for part in parts for size in part or ())


def _slice_bounds(known: _Resolver, node: ir.Node, rank: int) -> dict[int, slice] | None:
    """The part of each sliced axis, where all bounds are numbers."""
    parts = [known.content(_input(node, index)) for index in (1, 2)]
    count = len(parts[0] or ())
    for index, default in ((3, tuple(range(count))), (4, (1,) * count)):
        parts.append(default if _input(node, index) is None else known.content(_input(node, index)))
    bounds: dict[int, slice] = {}
    for bound in zip(*(part or () for part in parts), strict=False):
        start, end, axis, step = bound
        if not (isinstance(start, int) and isinstance(end, int) and isinstance(axis, int) and isinstance(step, int)):
            return None
        if step < 1:
            return None
        bounds[axis % rank] = slice(start, end, step)
    return bounds if count and len(bounds) == count else None


def _slice_content(known: _Resolver, node: ir.Node) -> Sizes:
    elements, bounds = known.content(node.inputs[0]), _slice_bounds(known, node, 1)
    return None if elements is None or bounds is None else elements[bounds[0]]


def _slice(known: _Resolver, node: ir.Node) -> Sizes:
    sizes = known.shape(node.inputs[0])
    bounds = None if not sizes else _slice_bounds(known, node, len(sizes))
    if sizes is None or bounds is None:
        return None
    return tuple(
        size if axis not in bounds else len(range(size)[bounds[axis]]) if isinstance(size, int) else None
        for axis, size in enumerate(sizes)
    )


def _constant_of_shape(known: _Resolver, node: ir.Node) -> Sizes:
    count, value = known.content(node.inputs[0]), node.attributes.get("value")
    if count is None or len(count) != 1 or not isinstance(count[0], int) or count[0] > _LONGEST:
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


def _reshape(known: _Resolver, node: ir.Node) -> Sizes:
    target, source = known.content(node.inputs[1]), known.shape(node.inputs[0])
    if target is None:
        return None
    result = list(target)
    if not _integer(node, "allowzero", 0):
        for axis, size in enumerate(target):
            if size == 0:
                result[axis] = None if source is None or axis >= len(source) else source[axis]
    if -1 in result:
        place = result.index(-1)
        result[place] = None if source is None else _quotient(source, [*result[:place], *result[place + 1 :]])
    return tuple(result)


def _quotient(sizes: Sequence[Dimension], divisors: Sequence[Dimension]) -> Dimension:
    """The product of sizes over that of others, where it is a number or one symbol."""
    if None in sizes or None in divisors or 0 in divisors:
        return None
    symbols = [size for size in sizes if isinstance(size, str)]
    for size in divisors:
        if isinstance(size, str):
            if size not in symbols:
                return None
            symbols.remove(size)
    above = math.prod(size for size in sizes if isinstance(size, int))
    below = math.prod(size for size in divisors if isinstance(size, int))
    if not symbols:
        return above // below if above % below == 0 else None
    return symbols[0] if len(symbols) == 1 and above == below else None


def _expand(known: _Resolver, node: ir.Node) -> Sizes:
    return broadcast_shapes(known.shape(node.inputs[0]), known.content(node.inputs[1]))


def _matmul(known: _Resolver, node: ir.Node) -> Sizes:
    left, right = known.shape(node.inputs[0]), known.shape(node.inputs[1])
    if left is None or right is None or len(left) < 2 or len(right) < 2:
        return None
    batch = broadcast_shapes(left[:-2], right[:-2])
    return None if batch is None else (*batch, left[-2], right[-1])


def _filled(known: _Resolver, node: ir.Node) -> Sizes:
    return known.content(node.inputs[0])


def _range(known: _Resolver, node: ir.Node) -> Sizes:
    bounds = [known.content(value) for value in node.inputs]
    if any(bound is None or len(bound) != 1 for bound in bounds):
        return None
    start, limit, delta = (bound[0] for bound in bounds if bound)
    return (limit,) if start == 0 and delta == 1 and not (isinstance(limit, int) and limit < 0) else None


_CONTENTS: dict[str, Callable[[_Resolver, ir.Node], Sizes]] = {
    "Shape": _shape,
    **dict.fromkeys(("Unsqueeze", "Squeeze", "Identity", "Cast", "Reshape"), _same),
    "Gather": _gather,
    "Concat": _concat,
    "Slice": _slice_content,
    "ConstantOfShape": _constant_of_shape,
    "Add": _pairwise(_add),
    "Mul": _pairwise(_multiply),
    "Div": _pairwise(_divide),
    "Equal": _pairwise(_equal),
    "Where": _where,
}
"""How the elements of integer tensors follow from those that a node reads."""

_SHAPES: dict[str, Callable[[_Resolver, ir.Node], Sizes]] = {
    "Reshape": _reshape,
    "Expand": _expand,
    "ConstantOfShape": _filled,
    "MatMul": _matmul,
    "Range": _range,
    "Slice": _slice,
}
"""How the shapes of results follow from elements: where ONNX's inference gives up."""
