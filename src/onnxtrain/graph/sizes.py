"""Replace sizes that a graph computes from shapes by constants, where the shapes are known."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.graph.declared_shapes import MADE_UP
from onnxtrain.graph.shapes import infer_shapes
from onnxtrain.graph.value import Dimension, constant_tensor, dimensions

_LONGEST = 64
"""Elements up to which an integer tensor may hold sizes."""

_ROUNDS = 8
"""Times that shapes are inferred again with sizes that reshapes have taught."""

Content = np.ndarray
"""The elements of a small integer tensor, as objects: integers, symbols of sizes and products of them such as
``"4*batch"``, or ``None`` for an element that is not known."""

_ARITHMETIC: dict[str, Callable[..., object]] = {
    "Add": lambda a, b: a + b,
    "Sub": lambda a, b: a - b,
    "Mul": lambda a, b: a * b,
    "Div": lambda a, b: int(a / b),
    "Mod": lambda a, b: a % b,
    "Max": max,
    "Min": min,
    "Neg": lambda a: -a,
    "Equal": lambda a, b: a == b,
    "Where": lambda condition, a, b: a if condition else b,
}


def fold_sizes(model: ir.Model) -> dict[ir.Value, Content]:
    """Replace small integer tensors that follow from known shapes by constants, in place."""
    known: dict[ir.Value, Content] = {}
    for _ in range(_ROUNDS):
        if not _fold(model.graph, known):
            break
        infer_again(model)
        known.clear()
    return known


def infer_again(model: ir.Model) -> None:
    """Infer the sizes that inference did not find before, in place."""
    for value in [output for node in model.graph for output in node.outputs]:
        sizes = dimensions(value)
        if sizes is not None and any(_is_made_up(size) for size in sizes):
            value.shape = ir.Shape([None if _is_made_up(size) else size for size in sizes])
    infer_shapes(model)


def _fold(graph: ir.Graph, known: dict[ir.Value, Content]) -> bool:
    """Fold once; return whether a reshape taught a size from which others may follow."""
    learned = False
    for node in list(graph):
        if node.domain or len(node.outputs) != 1:
            continue
        learned = _learn_reshaped(node, known) or learned
        try:
            content = _content(node, known)
        except (IndexError, TypeError, ValueError, ZeroDivisionError, AttributeError):
            continue
        output = node.outputs[0]
        if content is None or content.size > _LONGEST:
            continue
        known[output] = content
        if node.op_type == "Constant" or output.dtype not in (ir.DataType.INT64, ir.DataType.INT32):
            continue
        if not output.is_graph_output() and not any(item is None or isinstance(item, str) for item in content.flat):
            array = content.astype(np.int64 if output.dtype == ir.DataType.INT64 else np.int32)
            name = f"{output.name}/known"
            while name in graph.initializers:
                name += "'"
            value = ir.Value(
                name=name,
                type=ir.TensorType(output.dtype),
                shape=ir.Shape(array.shape),
                const_value=ir.tensor(array, name=name),
            )
            graph.register_initializer(value)
            output.replace_all_uses_with(value)
            known[value] = content
    return learned


def factors(size: Dimension) -> tuple[int, list[str]] | None:
    """Return the number and the symbols whose product a size is, such as 4 and ``["batch"]``."""
    if isinstance(size, int):
        return size, []
    if size is None:
        return None
    if not _PLAIN.fullmatch(size):
        return 1, [size]
    parts = size.replace(" ", "").split("*")
    return math.prod(int(part) for part in parts if part.isdecimal()), sorted(x for x in parts if not x.isdecimal())


def _is_made_up(size: Dimension) -> bool:
    return MADE_UP in str(size)


def _learn_reshaped(node: ir.Node, known: dict[ir.Value, Content]) -> bool:
    """Give the output of a reshape the sizes that its target holds; return whether any was not known."""
    if node.op_type != "Reshape" or node.inputs[0] is None or node.inputs[1] is None or "allowzero" in node.attributes:
        return False
    before, after, target = dimensions(node.inputs[0]), dimensions(node.outputs[0]), _of(node.inputs[1], known)
    if before is None or after is None or target is None or len(target) != len(after):
        return False
    found: list[Dimension] = []
    for place, (size, item) in enumerate(zip(after, target.tolist(), strict=True)):
        found.append(
            size
            if size is not None and not _is_made_up(size)
            else before[place]
            if item == 0
            else None
            if item == -1
            else item
        )
    if found.count(None) == 1:
        whole = product(before)
        found[found.index(None)] = None if whole is None else _divided(whole, product([x or 1 for x in found]))
    found = [old if size is None or _is_made_up(size) else size for size, old in zip(found, after, strict=True)]
    if found == list(after):
        return False
    node.outputs[0].shape = ir.Shape(found)
    return True


def product(sizes: Sequence[Dimension]) -> Dimension:
    """Return the product of sizes, such as ``batch*sequence``; ``None`` if one is unknown."""
    parts = [factors(size) for size in sizes]
    if any(part is None for part in parts):
        return None
    number = math.prod(part[0] for part in parts if part)
    return _written(number, [symbol for part in parts if part for symbol in part[1]])


def _divided(one: Dimension, other: Dimension) -> Dimension:
    own, rest = factors(one), factors(other)
    if own is None or rest is None or not rest[0] or own[0] % rest[0]:
        return None
    left = Counter(own[1])
    left.subtract(rest[1])
    return None if min(left.values(), default=0) < 0 else _written(own[0] // rest[0], list(left.elements()))


def _written(number: int, symbols: list[str]) -> Dimension:
    if not symbols or not number:
        return number
    return "*".join([*([str(number)] if number != 1 else []), *sorted(symbols)])


def _content(node: ir.Node, known: dict[ir.Value, Content]) -> Content | None:
    def integers(name: str, default: int) -> int:
        return node.attributes[name].as_int() if name in node.attributes else default

    operator = node.op_type
    if operator == "Shape":
        shape = dimensions(node.inputs[0])
        if shape is None:
            return None
        sizes = [None if isinstance(size, str) and not _PLAIN.fullmatch(size) else size for size in shape]
        return _array(sizes[integers("start", 0) : integers("end", len(sizes))])
    if operator == "Constant":
        return _of(node.outputs[0], known)
    found = [None if value is None else _of(value, known) for value in node.inputs]
    if not found or found[0] is None:
        return None
    first = found[0]
    if operator in ("Identity", "Cast"):
        return first if node.outputs[0].dtype in (ir.DataType.INT64, ir.DataType.INT32, ir.DataType.BOOL) else None
    if any(content is None for content in found):
        return None
    rest = [content for content in found[1:] if content is not None]
    if operator in _ARITHMETIC:
        rule = np.frompyfunc(_or_none(operator), len(found), 1)
        return np.asarray(rule(first, *rest), object)
    if operator == "Gather" and integers("axis", 0) == 0 and first.ndim == 1:
        return np.asarray(first[rest[0].astype(np.int64)], object)
    if operator == "Slice":
        starts, ends, *more = (content.reshape(-1).astype(np.int64).tolist() for content in rest)
        axes, steps = more[0] if more else range(len(starts)), more[1] if len(more) > 1 else [1] * len(starts)
        cut = [slice(None)] * first.ndim
        for axis, *bounds in zip(axes, starts, ends, steps, strict=True):
            cut[axis] = slice(*bounds)
        return first[tuple(cut)]
    if operator == "Transpose":
        permutation = node.attributes.get_ints("perm", range(first.ndim)[::-1])
        return first.transpose(list(permutation))
    if operator == "ConstantOfShape" and math.prod(first) <= _LONGEST:
        filled = node.attributes.get("value")
        return np.full(first.astype(np.int64), 0 if filled is None else filled.as_tensor().numpy().item(), object)
    if operator == "Concat" and all(content.ndim == 1 for content in (first, *rest)):
        return np.concatenate([first, *rest])
    if operator in ("Squeeze", "Unsqueeze", "Reshape"):
        shape = dimensions(node.outputs[0])
        return None if shape is None else first.reshape([size for size in shape if isinstance(size, int)])
    return None


def _or_none(operator: str) -> Callable[..., object]:
    def apply(*items: Any) -> object:
        if any(item is None for item in items):
            return None
        if not any(isinstance(item, str) for item in items):
            return _ARITHMETIC[operator](*items)
        return _SYMBOLIC[operator](*items) if operator in _SYMBOLIC else None

    return apply


_SYMBOLIC: dict[str, Callable[..., object]] = {"Mul": lambda a, b: product([a, b]), "Div": _divided}
_PLAIN = re.compile(r"\w+( ?\* ?\w+)*")


def _array(items: Sequence[Dimension]) -> Content:
    found = np.empty(len(items), object)
    found[:] = items
    return found


def _of(value: ir.Value, known: dict[ir.Value, Content]) -> Content | None:
    if value in known:
        return known[value]
    tensor = constant_tensor(value)
    if tensor is None or tensor.size > _LONGEST or not (tensor.dtype.is_integer() or tensor.dtype == ir.DataType.BOOL):
        return None
    return np.array(tensor.numpy(), object)
