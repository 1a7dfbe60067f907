"""Sizes: products of numbers and symbols, and the small integer tensors in which graphs compute them."""

from __future__ import annotations

import math
import operator
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.graph.value import Dimension, constant_tensor, dimensions, order_of

MADE_UP = "unk__"
"""Prefix of the symbols that ONNX's inference makes up."""

LONGEST = 64
"""Elements up to which an integer tensor may hold sizes: longer ones are not followed, whatever sizes a model has."""

Product = tuple[int, tuple[str, ...]]
"""A product of sizes: the numbers multiplied, and the symbols in order."""

_PLAIN = re.compile(r"\w+( ?\* ?\w+)*")


def is_made_up(size: Dimension) -> bool:
    """Return whether a size is a symbol that ONNX's inference made up, or a product with one."""
    return isinstance(size, str) and MADE_UP in size


def is_open(shape: Sequence[Dimension] | None) -> bool:
    """Return whether the rank or a size is not known."""
    return shape is None or any(size is None or is_made_up(size) for size in shape)


def filled_in(shape: Sequence[Dimension] | None, other: Sequence[Dimension] | None) -> tuple[Dimension, ...] | None:
    """Return a shape with the sizes of another where its own are open."""
    if shape is None or other is None or len(shape) != len(other):
        known = other if shape is None else shape
        return None if known is None else tuple(known)
    pairs = zip(shape, other, strict=True)
    return tuple(new if new is not None and is_open((old,)) else old for old, new in pairs)


def is_plain(size: Dimension) -> bool:
    """Return whether products of a size can be written: a number, a symbol, or a product of these."""
    return isinstance(size, int) or (size is not None and _PLAIN.fullmatch(size) is not None)


def factors(size: Dimension) -> Product | None:
    """Return the number and the symbols whose product a size is, such as 4 and ``("batch",)``."""
    if isinstance(size, int):
        return size, ()
    if size is None:
        return None
    if not is_plain(size):
        return 1, (size,)
    parts = size.replace(" ", "").split("*")
    number = math.prod(int(part) for part in parts if part.isdecimal())
    return number, tuple(sorted(part for part in parts if not part.isdecimal()))


def times(*parts: Product | None) -> Product | None:
    """Return the product of products."""
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    return math.prod(number for number, _ in known), tuple(sorted(symbol for part in known for symbol in part[1]))


def over(whole: Product | None, divisor: Product | None) -> Product | None:
    """Return the quotient of two products; ``None`` where it is none."""
    if whole is None or divisor is None or not divisor[0] or whole[0] % divisor[0]:
        return None
    if not divisor[1]:
        return whole[0] // divisor[0], whole[1]
    symbols, divisors = Counter(whole[1]), Counter(divisor[1])
    return None if divisors - symbols else (whole[0] // divisor[0], tuple(sorted((symbols - divisors).elements())))


def product(sizes: Sequence[Dimension]) -> Dimension:
    """Return the product of sizes, such as ``batch*sequence``; ``None`` if one is unknown."""
    return _written(times(*map(factors, sizes)))


def quotient(size: Dimension, divisor: Dimension) -> Dimension:
    """Return the quotient of two sizes; ``None`` if it is unknown, or none."""
    return _written(over(factors(size), factors(divisor)))


def _written(found: Product | None) -> Dimension:
    if found is None:
        return None
    number, symbols = found
    return number if not symbols or not number else "*".join([*([str(number)] if number != 1 else []), *symbols])


Content = np.ndarray
"""The elements of a small integer tensor, as objects: integers, symbols of sizes and products of them such as
``"4*batch"``, or ``None`` for an element that is not known."""


def constant_content(value: ir.Value | None) -> Content | None:
    """Return the elements of a small constant of integers or truth values."""
    tensor = constant_tensor(value)
    if tensor is None or tensor.size > LONGEST or not (tensor.dtype.is_integer() or tensor.dtype == ir.DataType.BOOL):
        return None
    return np.array(tensor.numpy(), object)


def computed_content(
    node: ir.Node,
    content: Callable[[ir.Value | None], Content | None],
    shape: Callable[[ir.Value | None], Sequence[Dimension] | None],
) -> Content | None:
    """Return the elements of the small integer tensor that a standard node computes, as its inputs determine them."""
    rule, dtype = _RULES.get(node.op_type), node.outputs[0].dtype
    if rule is None or node.domain or (dtype is not None and not dtype.is_integer() and dtype != ir.DataType.BOOL):
        return None
    try:
        if rule is _sizes:
            sizes = shape(node.inputs[0])
            return None if sizes is None else _sizes(node, sizes)
        given: list[Content | None] = []
        for value in node.inputs[: 1 if rule is _reshaped else None]:
            given.append(content(value))
            if given[-1] is None and value is not None:
                return None
        found = rule(node, *given)
    except (IndexError, TypeError, ValueError, ZeroDivisionError):
        return None
    return found if found is not None and found.size <= LONGEST else None


def _array(items: Sequence[Dimension]) -> Content:
    found = np.empty(len(items), object)
    found[:] = items
    return found


def _sizes(node: ir.Node, sizes: Sequence[Dimension]) -> Content:
    return _array(sizes[node.attributes.get_int("start", 0) : node.attributes.get_int("end", len(sizes))])


def _integers(content: Content) -> list[int]:
    return [operator.index(item) for item in content.flat]


def _reshaped(node: ir.Node, data: Content) -> Content:
    sizes = dimensions(node.outputs[0])
    return data.reshape(-1 if sizes is None or len(sizes) == 1 else _integers(_array(sizes)))


def _gather(node: ir.Node, data: Content, indices: Content) -> Content | None:
    if data.ndim != 1 or node.attributes.get_int("axis", 0) not in (0, -1):
        return None
    return np.asarray(data[np.array(_integers(indices), np.int64).reshape(indices.shape)], object)


def _slice(
    node: ir.Node,
    data: Content,
    starts: Content,
    ends: Content,
    axes: Content | None = None,
    steps: Content | None = None,
) -> Content:
    count = starts.size
    along = range(count) if axes is None else _integers(axes)
    cut = [slice(None)] * data.ndim
    bounds = _integers(starts), _integers(ends), [1] * count if steps is None else _integers(steps)
    for axis, *bound in zip(along, *bounds, strict=True):
        cut[axis] = slice(*bound)
    return np.asarray(data[tuple(cut)])


def _constant_of_shape(node: ir.Node, shape: Content) -> Content | None:
    sizes, filled = _integers(shape), node.attributes.get_tensor("value")
    if filled is None or not filled.dtype.is_integer() or math.prod(sizes) > LONGEST:
        return None
    return np.full(sizes, filled.numpy().item(), object)


def _elementwise(function: Callable[..., Any]) -> Callable[..., Content]:
    def rule(node: ir.Node, *given: Content) -> Content:
        return np.asarray(np.frompyfunc(function, len(given), 1)(*given), object)

    return rule


def _of_integers(function: Callable[..., int]) -> Callable[..., Content]:
    """Return the rule of a function of integers alone."""
    return _elementwise(lambda *items: function(*items) if all(isinstance(item, int) for item in items) else None)


def _add(a: Dimension, b: Dimension) -> Dimension:
    if isinstance(a, int) and isinstance(b, int):
        return a + b
    return a if b == 0 else b if a == 0 else None


def _divide(a: Dimension, b: Dimension) -> Dimension:
    if isinstance(a, int) and isinstance(b, int):
        return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)  # towards zero
    return quotient(a, b)


def _equal(a: Dimension, b: Dimension) -> int | None:
    if isinstance(a, int) and isinstance(b, int):
        return int(a == b)
    if a is not None and a == b:
        return 1
    negative = any(isinstance(size, int) and size < 0 for size in (a, b))
    return 0 if negative and isinstance(a if isinstance(b, int) else b, str) else None


def _where(condition: int | None, a: Dimension, b: Dimension) -> Dimension:
    return a if condition == 1 else b if condition == 0 else a if a == b else None


_RULES: dict[str, Callable[..., Content | None]] = {
    "Shape": _sizes,
    **dict.fromkeys(("Identity", "Cast"), lambda node, data: data),
    **dict.fromkeys(("Squeeze", "Unsqueeze", "Reshape"), _reshaped),
    "Gather": _gather,
    "Slice": _slice,
    "Transpose": lambda node, data: data.transpose(order_of(node, data.ndim)),
    "ConstantOfShape": _constant_of_shape,
    "Concat": lambda node, *parts: np.concatenate(parts) if all(part.ndim == 1 for part in parts) else None,
    "Add": _elementwise(_add),
    "Sub": _of_integers(operator.sub),
    "Mul": _elementwise(lambda a, b: product([a, b])),
    "Div": _elementwise(_divide),
    "Mod": _of_integers(operator.mod),
    "Max": _of_integers(max),
    "Min": _of_integers(min),
    "Neg": _of_integers(operator.neg),
    "Equal": _elementwise(_equal),
    "Where": _elementwise(_where),
}
"""The elements that operators compute from those of their inputs; Shape from the sizes of its input."""
