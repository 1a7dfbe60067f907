"""Correct shapes that a file declares and that cannot be true."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import onnx_ir as ir

from onnxtrain.graph.clone import all_graphs, all_nodes, subgraphs, values_read
from onnxtrain.graph.inference import is_elementwise, known_shape
from onnxtrain.graph.sizes import filled_in, is_made_up
from onnxtrain.graph.value import Dimension, constant_tensor, dimensions

_ANONYMOUS = frozenset({"", "?", "-1", "None", "unknown", "*"})
"""Exporters write these for a size that they do not know: axes that share such a name need not be equal."""


def forget_anonymous_axes(graph: ir.Graph) -> None:
    """Forget sizes whose name is no symbol, in place: two axes that are called ``?`` need not be equal."""
    _forget_sizes(graph, lambda size: size in _ANONYMOUS if isinstance(size, str) else size is not None and size < 0)


def forget_undefined_types(graph: ir.Graph) -> None:
    """Forget declared types without an element type, in place: inference finds the type."""
    for node in all_nodes(graph):
        for output in node.outputs:
            if isinstance(output.type, ir.TensorType) and output.dtype == ir.DataType.UNDEFINED:
                output.type = output.shape = None


def declare_initializers(graph: ir.Graph) -> None:
    """Give initializers the types and shapes of their tensors, in place: a file may declare other ones."""
    for value in [value for part in all_graphs(graph) for value in part.initializers.values()]:
        if value.const_value is not None:
            value.type = ir.TensorType(value.const_value.dtype)
            value.shape = ir.Shape(value.const_value.shape.numpy())


def believe_declared(graph: ir.Graph, declared: Mapping[ir.Value, ir.Shape]) -> bool:
    """Complete inferred shapes, in place, by declared ones that no node contradicts; the nodes decide.

    A declared shape behind one that turned out to be untrue is not believed, nor is a symbol that stands for several
    sizes. skl2onnx declares [N, 4] for a regression on 4 features whose nodes compute [N, 1]; exporters declare the
    shape of one branch of an If for both. Outputs of the main graph keep their rank, on which callers of it rely,
    and so do those of operators of other domains, which only the file tells.
    """
    untrue = _untrue_symbols(declared)
    _forget_sizes(graph, untrue.__contains__)
    doubted, completed = set[ir.Value](), bool(untrue)
    otherwise = graph.meta.setdefault(_OTHERWISE, {})
    for node in _bodies_first(graph):
        if node.op_type == "Constant" and not node.domain:
            continue  # its tensor has a shape; onnxruntime-genai's builder declares scalars for lists of one element
        behind = any(value in doubted for value in values_read(node))
        if behind:
            doubted.update(node.outputs)
        for index, output in enumerate(node.outputs):
            if output not in declared:
                continue
            old = tuple(None if size in untrue else size for size in _sizes_of(declared[output]))
            given = dimensions(output)
            if given is not None and _contradict(old, given):
                otherwise[output] = (old, given)
            if (
                behind
                or output in otherwise
                or _contradicts_operand(node, old)
                or _contradicts_branch(node, index, old)
            ):
                doubted.update(node.outputs)
                if given is None and (output in graph.outputs or (node.domain and output not in otherwise)):
                    output.shape = ir.Shape([None] * len(old))
                    completed = completed or bool(node.domain)
            elif (sizes := filled_in(given, old)) != given:
                output.shape, completed = ir.Shape(sizes or ()), True
    return completed


def _untrue_symbols(declared: Mapping[ir.Value, ir.Shape]) -> set[str]:
    """Return the declared symbols that stand for several sizes."""
    sizes: dict[str, set[int]] = {}
    for value, shape in declared.items():
        given = dimensions(value) or ()
        for old, new in zip(_sizes_of(shape), given, strict=False) if len(given) == len(shape) else ():
            if isinstance(old, str) and isinstance(new, int):
                sizes.setdefault(old, set()).add(new)
    return {symbol for symbol, numbers in sizes.items() if len(numbers) > 1}


_OTHERWISE = "onnxtrain.declared_otherwise"
"""Key of a graph's values whose declared shapes its nodes contradict, with both shapes."""


def _bodies_first(graph: ir.Graph) -> Iterator[ir.Node]:
    for node in graph:
        for body in subgraphs(node):
            yield from _bodies_first(body)
        yield node


def _sizes_of(shape: ir.Shape) -> tuple[Dimension, ...]:
    return tuple(size if isinstance(size, int) else size.value for size in shape)


def _contradicts_operand(node: ir.Node, declared: Sequence[Dimension]) -> bool:
    """Return whether one operand does not broadcast to the declared shape, whatever the others are."""
    if node.domain or not is_elementwise(node.op_type):
        return False
    shapes = [shape for value in node.inputs if value is not None and (shape := dimensions(value)) is not None]
    return any(len(shape) > len(declared) or _contradict_broadcast(declared, shape) for shape in shapes)


def _contradict_broadcast(declared: Sequence[Dimension], operand: Sequence[Dimension]) -> bool:
    pairs = zip(reversed(declared), reversed(operand), strict=False)
    return any(isinstance(a, int) and isinstance(b, int) and b not in (1, a) for a, b in pairs)


def _contradicts_branch(node: ir.Node, index: int, declared: Sequence[Dimension]) -> bool:
    """Return whether a declared shape of an If output contradicts the shape in a branch that may be taken."""
    if node.op_type != "If" or node.domain or node.inputs[0] is None or constant_tensor(node.inputs[0]) is not None:
        return False
    inner = [known_shape(body.outputs[index]) for body in subgraphs(node)]
    return any(
        shape is not None and (len(shape) != len(declared) or any(map(_differ, declared, shape))) for shape in inner
    )


def declared_otherwise(graph: ir.Graph) -> list[str]:
    """Return sentences about values whose declared shapes the nodes of a graph contradict: one for each output."""
    found = {value.name: shapes for value, shapes in graph.meta.get(_OTHERWISE, {}).items() if value.name}
    outputs = {output.name for output in graph.outputs}
    inner = [name for name in found if name not in outputs]
    named = [(f"the output {name!r}", *found[name]) for name in found if name in outputs]
    if inner:
        more = f" (and {len(inner) - 1} more so)" if len(inner) > 1 else ""
        named.append((f"the value {inner[0]!r}{more}", *found[inner[0]]))
    return [
        f"the file declares {what} as {_shown(before)}, but its nodes give {_shown(after)}; the nodes decide"
        for what, before, after in named
    ]


def _contradict(declared: Sequence[Dimension], given: Sequence[Dimension]) -> bool:
    """Return whether ranks, or sizes that both state as numbers, differ."""
    sizes = zip(declared, given, strict=False)
    return len(declared) != len(given) or any(isinstance(a, int) and isinstance(b, int) and a != b for a, b in sizes)


def _shown(shape: Sequence[Dimension]) -> str:
    """Return a shape as text, with N for a size that has no name or a made-up one."""
    sizes = ["N" if size is None or is_made_up(size) else str(size) for size in shape]
    return f"[{', '.join(sizes)}]"


def _differ(outer: Dimension, inner: Dimension) -> bool:
    return None not in (outer, inner) and outer != inner and not is_made_up(inner)


def _forget_sizes(graph: ir.Graph, is_unknown: Callable[[Dimension], bool]) -> None:
    for value in all_values(graph):
        sizes = dimensions(value) or ()
        if any(is_unknown(size) for size in sizes):
            value.shape = ir.Shape([None if is_unknown(size) else size for size in sizes])


def all_values(graph: ir.Graph) -> Iterator[ir.Value]:
    """Iterate over the inputs of a graph and the outputs of its nodes, those in bodies included."""
    for part in all_graphs(graph):
        yield from part.inputs
        for node in part:
            yield from node.outputs


def forget_shapes(graph: ir.Graph, *, ranks: bool = True) -> dict[ir.Value, ir.Shape]:
    """Remove the shapes of all node outputs, those in bodies included."""
    removed: dict[ir.Value, ir.Shape] = {}
    for output in [output for node in all_nodes(graph) for output in node.outputs]:
        if output.shape is not None:
            removed[output] = output.shape
            output.shape = None
    for output in graph.outputs:
        if ranks and output in removed:
            output.shape = ir.Shape([None] * len(removed[output]))
    return removed
