"""Matrix multiplications."""

from __future__ import annotations

from onnxtrain.plugins.structures.axes.broadcasting import any_zero, broadcast
from onnxtrain.plugins.structures.axes.labels import Axis
from onnxtrain.plugins.structures.axes.node import Node
from onnxtrain.plugins.structures.axes.registry import axes_of, no_rule


@axes_of("MatMul", "MatMulInteger")
def matmul(node: Node) -> list[Axis]:
    """y [..., m, n] = sum over k of x_1 [..., m, k] x_2 [..., k, n]."""
    ranks = [node.rank(0), node.rank(1)]
    rows = [node.axis(0, -2)] if ranks[0] > 1 else []
    columns = [node.axis(1, -1)] if ranks[1] > 1 else []
    if node.operator == "MatMulInteger":
        if node.is_constant(1):  # masked weights are at their zero point
            columns = [axis.with_zero(True) for axis in columns]
        rows, columns = (
            [with_zero_points(node, axis, 2) for axis in rows],
            [with_zero_points(node, axis, 3) for axis in columns],
        )
    inner = node.axis(0, -1)
    node.sum_over(inner, node.axis(1, -2 if ranks[1] > 1 else 0))
    outer = broadcast(node, [index for index in (0, 1) if ranks[index] > 2], any_zero, skip=2) if max(ranks) > 2 else []
    if node.is_constant(0) or node.is_constant(1):
        for axis in columns if node.is_constant(1) else rows:
            node.tag(axis, "hidden")
    else:
        for axis in outer:
            node.tag(axis, "heads")
    shape = node.output_shape()
    lengths = [
        axis if axis.labels is not None else size for axis, size in zip([*outer, *rows, *columns], shape, strict=True)
    ]
    node.multiplies(*lengths, inner if inner.labels is not None else node.shape(0)[-1])
    return [*outer, *rows, *columns]


@axes_of("Gemm")
def gemm(node: Node) -> list[Axis]:
    """y [m, n] = a sum over k of x_1 [m, k] x_2 [k, n], plus b x_3, which broadcasts."""
    across, down = node.attribute("transA", 0), node.attribute("transB", 0)
    rows, inner = node.axis(0, 1 if across else 0), node.axis(0, 0 if across else 1)
    columns = node.axis(1, 0 if down else 1)
    node.sum_over(inner, node.axis(1, 1 if down else 0))
    if node.is_constant(1):
        node.tag(columns, "hidden")
    found = [rows, columns]
    node.multiplies(
        *(axis if axis.labels is not None else size for axis, size in zip(found, node.output_shape(), strict=True)),
        inner if inner.labels is not None else node.shape(0)[0 if across else 1],
    )
    return with_bias(node, found, 2) if node.has(2) else found


def with_zero_points(node: Node, axis: Axis, index: int) -> Axis:
    """Join an axis with the zero points that each of its indices may have."""
    if not node.has(index) or all(size == 1 for size in node.shape(index)):
        return axis
    node.keep_values(index)
    if node.rank(index) > 1:
        return node.fix(axis, f"{node.describe()} has a table of zero points")
    return node.join(axis, node.axis(index, 0)).with_zero(axis.zero)


def with_bias(node: Node, axes: list[Axis], index: int) -> list[Axis]:
    """Add an input that broadcasts to axes that are known already."""
    found = list(axes)
    rank = node.rank(index)
    for place in range(-len(axes), 0):
        present = rank >= -place and node.shape(index)[place] != 1
        if present:
            bias = node.axis(index, place)
            found[place] = node.join(axes[place], bias).with_zero(axes[place].zero and bias.zero)
        else:
            if rank >= -place:
                node.axis(index, place)
            found[place] = axes[place].with_zero(False)
    return found


no_rule("Det", reason="a determinant mixes both axes of its matrices")
