"""Replace sizes that a graph computes from shapes by constants, where the shapes are known."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from onnxtrain.ir.value import constant_tensor, dimensions

_LONGEST = 64
"""Elements up to which an integer tensor may hold sizes."""

Content = np.ndarray
"""The elements of a small integer tensor, as objects: integers, or ``None`` for an element that is not known."""

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
    """Replace small integer tensors that follow from known shapes by constants, in place.

    Returns:
        The elements of the others, as far as they are known.
    """
    graph = model.graph
    known: dict[ir.Value, Content] = {}
    for node in list(graph):
        if node.domain or len(node.outputs) != 1:
            continue
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
        if not output.is_graph_output() and all(item is not None for item in content.reshape(-1)):
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
    return known


def _content(node: ir.Node, known: dict[ir.Value, Content]) -> Content | None:
    def integers(name: str, default: int) -> int:
        return node.attributes[name].as_int() if name in node.attributes else default

    operator = node.op_type
    if operator == "Shape":
        shape = None if node.inputs[0] is None else dimensions(node.inputs[0])
        if shape is None:
            return None
        sizes = [size if isinstance(size, int) else None for size in shape]
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
        rule = np.frompyfunc(_or_none(_ARITHMETIC[operator]), len(found), 1)
        return np.asarray(rule(first, *rest), object)
    if operator == "Gather" and integers("axis", 0) == 0 and first.ndim == 1:
        return np.asarray(first[rest[0].astype(np.int64)], object)
    if operator == "Slice" and first.ndim == 1:
        bounds = [content.reshape(-1).astype(np.int64).tolist() for content in rest]
        step = bounds[3][0] if len(bounds) > 3 else 1
        start, end = bounds[0][0], bounds[1][0]
        return first[slice(start, end, step)] if step > 0 else None
    if operator == "Concat" and all(content.ndim == 1 for content in (first, *rest)):
        return np.concatenate([first, *rest])
    if operator in ("Squeeze", "Unsqueeze", "Reshape"):
        shape = dimensions(node.outputs[0])
        return None if shape is None else first.reshape([size for size in shape if isinstance(size, int)])
    return None


def _or_none(rule: Callable[..., object]) -> Callable[..., object]:
    return lambda *items: None if any(item is None for item in items) else rule(*items)


def _array(items: list[int | None]) -> Content:
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
