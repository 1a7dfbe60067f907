"""Matmuls, convolutions, recurrent layers and attention: their outputs are the structures."""

from __future__ import annotations

import numpy as np

from onnxtrain.graph.value import Dimension
from onnxtrain.plugins.structures.axes.labels import Axis, fixed, length
from onnxtrain.plugins.structures.axes.node import Node
from onnxtrain.plugins.structures.axes.registry import axes_of
from onnxtrain.plugins.structures.axes.rules.elementwise import any_zero, broadcast


@axes_of("MatMul", "MatMulInteger")
def matmul(node: Node) -> list[Axis]:
    """y [..., m, n] = sum over k of x_1 [..., m, k] x_2 [..., k, n]."""
    ranks = [node.rank(0), node.rank(1)]
    rows = [node.axis(0, -2)] if ranks[0] > 1 else []
    columns = [node.axis(1, -1)] if ranks[1] > 1 else []
    if node.operator == "MatMulInteger":
        if node.is_constant(1):  # masked weights are at their zero point
            columns = [axis.with_zero(True) for axis in columns]
        rows = [with_zero_points(node, axis, 2) for axis in rows]
        columns = [with_zero_points(node, axis, 3) for axis in columns]
    inner = node.axis(0, -1)
    node.sum_over(inner, node.axis(1, -2 if ranks[1] > 1 else 0))
    batched = [index for index in (0, 1) if ranks[index] > 2]
    outer = broadcast(node, any_zero, indices=batched, skip=2) if batched else []
    if node.is_constant(0) or node.is_constant(1):
        for axis in columns if node.is_constant(1) else rows:
            node.tag(axis, "hidden")
    else:
        for axis in outer:
            node.tag(axis, "heads")
    found = [*outer, *rows, *columns]
    node.multiplies(*map(length, found, node.output_shape()), length(inner, node.shape(0)[-1]))
    return found


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
    node.multiplies(*map(length, found, node.output_shape()), length(inner, node.shape(0)[0 if across else 1]))
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
    for place in range(-len(axes), 0):
        bias = node.axis(index, place) if node.rank(index) >= -place else None
        if bias is None or node.shape(index)[place] == 1:
            found[place] = axes[place].with_zero(False)
        else:
            found[place] = node.join(axes[place], bias).with_zero(axes[place].zero and bias.zero)
    return found


@axes_of("Conv", "ConvInteger", "ConvTranspose")
def conv(node: Node) -> list[Axis]:
    """y [n, o, ...] = sum over c of x [n, c, ...] w [o, c / groups, ...], or w [c, o / groups, ...], plus b [o]."""
    transposed, groups = node.operator == "ConvTranspose", node.attribute("group", 1)
    x, before, after, weight = node.positions(0, 1), node.shape(), node.output_shape(), node.shape(1)
    if groups == 1:
        found, summed = node.axis(1, int(transposed)), node.axis(1, int(not transposed))
        if before[1] != 1:
            node.sum_over(x, summed)
    else:
        found, summed = _grouped(node, x, groups, transposed=transposed)
    if node.operator == "ConvInteger":
        found = with_zero_points(node, found, 3)
    elif node.has(2):
        bias = node.axis(2, 0)
        found = node.join(found, bias).with_zero(found.zero and bias.zero)
    node.tag(found, "channels")
    outer, inner = length(found, after[1]), length(summed, weight[int(not transposed)])
    if transposed and groups > 1:
        outer, inner = length(x, before[1]), weight[1]
    node.multiplies(after[0], outer, inner, *weight[2:], *(before if transposed else after)[2:])
    return [node.axis(0, 0), found, *(fixed("it is an image axis of a convolution") for _ in after[2:])]


def _grouped(node: Node, x: Axis, groups: int, *, transposed: bool) -> tuple[Axis, Axis]:
    """Relate the channels of a grouped convolution: whole groups, or the same channels of all groups."""
    channels, size = node.shape(0)[1], node.output_shape()[1]
    stays = fixed(f"{node.describe()} has groups")
    if not isinstance(size, int) or not isinstance(channels, int):
        return node.fix(stays if transposed else node.axis(1, 0), x.reason), stays
    made = node.new(size).with_zero(True) if transposed else node.axis(1, 0)
    if made.labels is None:
        return node.fix(x, stays.reason), stays
    own_made = made.labels.reshape(groups, -1)
    if x.labels is None:  # all groups stay, each without the same channels
        if own_made.shape[1] == 1:
            return node.fix(made, x.reason), stays
        united = node.unite(own_made.T)
        if transposed:
            node.join(made.taken(united), node.axis(1, 1))
        return made, stays
    own = x.labels.reshape(groups, -1)
    if transposed:  # the groups lie on the weight's axis of inputs
        node.join(x, node.axis(1, 0))
    node.judge_by(x)
    if node.choice(2 if max(own.shape[1], own_made.shape[1]) > 1 else 1) == 0:
        node.unite(np.concatenate([own, own_made], axis=1))
        node.on_cut(lambda cut: cut.set_attribute(node.ir, "group", cut.count(x) // own.shape[1]))
        return made, stays
    node.judge_by(made)
    united, united_made, summed = node.unite(own.T), node.unite(own_made.T), stays
    if not transposed:
        summed = node.axis(1, 1)
        if united.size > 1:
            node.sum_over(x.taken(united), summed)
    elif united_made.size > 1:
        node.join(x.taken(united_made), node.axis(1, 1))
    return made, summed


@axes_of("Einsum")
def einsum(node: Node) -> list[Axis]:
    """y = a sum of products over the letters that the output lacks."""
    equation = node.attribute("equation").replace(" ", "")
    left, _, right = equation.partition("->")
    terms = left.split(",")
    if "..." in equation or not right or any(len(set(term)) < len(term) for term in (*terms, right)):
        reason = f"{node.describe()} has the equation {equation!r}; only letters once per operand are followed"
        for index in range(len(terms)):
            for axis in node.all_axes(index):
                node.fix(axis, reason)
        return [fixed(reason) for _ in node.output_shape()]
    wide: dict[str, list[Axis]] = {letter: [] for term in terms for letter in term}
    sizes: dict[str, Dimension] = dict.fromkeys(wide, 1)
    for index, term in enumerate(terms):
        for letter, axis, size in zip(term, node.all_axes(index), node.shape(index), strict=True):
            if size != 1:
                wide[letter].append(axis)
                sizes[letter] = size
    found: dict[str, Axis] = {}
    for letter, axes in wide.items():
        if not axes:
            found[letter] = fixed("its size is 1")
            continue
        found[letter] = node.join(*axes).with_zero(any(axis.zero for axis in axes))
        if letter not in right:
            node.sum_over(*axes)
    constant = [index for index in range(len(terms)) if node.is_constant(index)]
    for letter in right:
        if not constant and all(letter in term for term in terms):
            node.tag(found[letter], "heads")
        if any(letter in terms[index] for index in constant):
            node.tag(found[letter], "hidden")
    node.multiplies(*(length(axis, sizes[letter]) for letter, axis in found.items()))
    return [found[letter] for letter in right]


_GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}


_ZERO = frozenset({"Tanh", "Relu", "Affine", "LeakyRelu", "ScaledTanh", "Elu", "Softsign"})


@axes_of("LSTM", "GRU", "RNN")
def recurrent(node: Node) -> list[list[Axis]]:
    """Y [t, d, n, h], Y_h [d, n, h], Y_c [d, n, h] from X [t, n, i], W [d, g h, i], R [d, g h, h], B [d, 2 g h]."""
    gates = _GATES[node.operator]
    node.sum_over(node.axis(0, -1), node.axis(1, -1))
    rows = node.axis(2, -1)
    units = rows
    if rows.labels is not None:
        zero = _cell_is_zero(node)
        for index, count in ((1, gates), (2, gates), (3, 2 * gates), (7, 3)):
            if node.has(index):
                stacked = node.axis(index, 1)
                node.join(Axis(np.tile(rows.labels, count)), stacked)
                zero = zero and (stacked.zero or index == 7)
        for index in (5, 6):
            if node.has(index):
                state = node.axis(index, -1)
                node.join(rows, state)
                zero = zero and state.zero
        units = rows.with_zero(zero)
        if not zero:
            node.fix(rows, f"{node.describe()}: masked units would not stay at zero")
        node.tag(units, "hidden")
        node.on_cut(lambda cut: cut.set_attribute(node.ir, "hidden_size", cut.count(rows)))
    for read in (node.axis(1, -1), units):
        node.multiplies(*node.shape()[:2], gates, units, read)
    rest = fixed("it is an axis of steps, directions or examples")
    for axis in (0, 1):
        node.fix(node.axis(0, axis), rest.reason)
    return [[rest, rest, rest, units], [rest, rest, units], [rest, rest, units]][: len(node.ir.outputs)]


def _cell_is_zero(node: Node) -> bool:
    """Return whether the activations that make a cell's content are zero at zero."""
    default = {"LSTM": ["Sigmoid", "Tanh", "Tanh"], "GRU": ["Sigmoid", "Tanh"], "RNN": ["Tanh"]}[node.operator]
    names = node.attribute("activations") or default
    per = len(default)
    contents = [name for index, name in enumerate(names) if per == 1 or index % per]
    betas = node.attribute("activation_beta")
    return all(name in _ZERO for name in contents) and not ("Affine" in contents and betas)


@axes_of("Attention")
def attention(node: Node) -> list[list[Axis]]:
    """Y = softmax(Q K^T) V per head, with heads as an axis or inside the last one."""
    reason = f"{node.describe()} keeps it"
    apart = node.rank(0) == 4
    if len([value for value in node.ir.outputs if value.name]) > 1 or node.has(4) or node.has(5):
        return [[fixed(f"{node.describe()} has a cache") for _ in value.shape or ()] for value in node.ir.outputs]
    if apart:
        heads = [node.positions(index, 1) for index in range(3)]
        counts = [size if isinstance(size, int) else 0 for size in (node.shape(index)[1] for index in range(3))]
    else:
        counts = [node.attribute("q_num_heads"), *[node.attribute("kv_num_heads")] * 2]
        heads = []
        for index, count in enumerate(counts):
            packed = node.positions(index, 2)
            heads.append(
                packed if packed.labels is None else packed.taken(node.unite(packed.labels.reshape(count, -1)))
            )
    if node.has(3) and node.rank(3) == 4 and node.shape(3)[1] != 1:
        for axis in heads:
            node.fix(axis, f"{node.describe()} has a mask per head")
    query = heads[0]
    if any(axis.labels is None for axis in heads):
        joined = node.join(*heads) if counts[0] == counts[1] else query
        for axis in heads:
            node.fix(axis, joined.reason or reason)
        query = fixed(joined.reason or reason)
    else:
        repeats = counts[0] // counts[1]
        own, values = heads[1].labels, heads[2].labels
        assert own is not None
        assert values is not None
        node.join(query, Axis(np.repeat(own, repeats)), Axis(np.repeat(values, repeats)))
        node.tag(query, "heads")
        if not apart:
            node.on_cut(lambda cut: cut.set_attribute(node.ir, "q_num_heads", cut.count(heads[0])))
            node.on_cut(lambda cut: cut.set_attribute(node.ir, "kv_num_heads", cut.count(heads[1])))
    batch = node.axis(0, 0)
    if apart:
        return [[batch, query.with_zero(heads[2].zero), fixed(reason), fixed(reason)]]
    width = node.output_shape()[2]
    if query.labels is None or not isinstance(width, int):
        return [[batch, fixed(reason), fixed(query.reason or reason)]]
    labels = np.repeat(query.labels, width // counts[0])
    return [[batch, fixed(reason), Axis(labels, zero=node.axis(2, 2).zero)]]
