"""Linear layers: the operator that replaces matmul, bias and Relu, and what is fused into it and its gradient later.

ONNX Runtime multiplies by a transposed operand more slowly than this project's kernels, goes over the result once more
to add a bias, once more for Relu, and once more over its gradient to sum it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff.fused import KERNEL_TYPES, emit
from onnxtrain.autodiff.rules.fused_linear import ACTIVATION, RELU
from onnxtrain.graph import Builder, Value
from onnxtrain.graph.domains import ONNXTRAIN_DOMAIN
from onnxtrain.graph.layers import orientation, reads_transposed
from onnxtrain.graph.patterns import match_alike
from onnxtrain.graph.replace import take_over
from onnxtrain.graph.value import (
    HALVES,
    Dimension,
    attributes_of,
    constant_array,
    constant_number,
    dimensions,
    input_of,
    made_by,
    order_of,
    producer_of,
)
from onnxtrain.lowering.patterns import Match, OneOf, Op, Pattern, Var, operators
from onnxtrain.lowering.rewrite import Rewrite, Rule
from onnxtrain.lowering.rules.transposition import is_identity
from onnxtrain.lowering.training_info.recipe import MASK

_X, _W, _BIAS = Var("x"), Var("w"), Var("bias")
_MATMUL = OneOf(
    Op("MatMul", _X, _W, name="matmul"), Op("Gemm", _X, _W, name="matmul", transA=(None, 0), alpha=(None, 1.0))
)
_GEMM = Op("Gemm", _X, _W, _BIAS, name="matmul", transA=(None, 0), alpha=(None, 1.0), beta=(None, 1.0))
_LAYER = OneOf(Op("Add", _MATMUL, _BIAS), _GEMM, _MATMUL)

LAYER = Pattern("linear layer", _LAYER, {"MatMul", "Gemm"})
LAYER_WITH_RELU = Pattern("linear layer", OneOf(Op("Relu", _LAYER, name="relu"), _LAYER), {"MatMul", "Gemm"})


class _Layer(NamedTuple):
    """Operands of a linear layer."""

    x: ir.Value  # [..., K]
    w: ir.Value  # [K, N], or [N, K] if transposed
    transposed: bool  # true if w is transposed
    bias: ir.Value | None  # [N], or none


def _layer_of(match: Match, patterns: Sequence[str]) -> _Layer:
    """Return the operands of a match, with w before transpositions that recompute= does not tell apart."""
    matmul, w = match["matmul"], match["w"]
    transposed = reads_transposed(matmul)
    while (node := w.producer()) is not None and not node.domain and node.op_type == "Transpose":
        if (
            w.name in match.context.named
            or is_identity(order_of(node, 2))
            or not match_alike(patterns, [matmul.name or "", node.name or ""])
        ):
            break
        w, transposed = node.inputs[0], not transposed
    return _Layer(match["x"], w, transposed, match.get("bias"))


def _check_layer(match: Match, patterns: Sequence[str] = ()) -> str | None:
    """Return why the operator does not compute this layer."""
    x, w, bias, matmul = match["x"], match["w"], match.get("bias"), match["matmul"]
    if x.dtype not in KERNEL_TYPES or w.dtype != x.dtype:
        return f"x has type {x.dtype} and w {w.dtype}; the kernel takes FLOAT or DOUBLE, the same for both"
    if x.shape is None or w.shape is None or len(x.shape) < 2 or len(w.shape) != 2:
        return f"x has shape {dimensions(x)} and w {dimensions(w)}; x needs two axes or more, and w two"
    transposed = reads_transposed(matmul)
    size: Dimension = (dimensions(w) or ())[0 if transposed else 1]
    if bias is not None and (size is None or dimensions(bias) != (size,) or bias.dtype != x.dtype):
        return f"the bias has shape {dimensions(bias)} and type {bias.dtype}; it must be known as [{size}] of {x.dtype}"
    if not match_alike(patterns, [node.name or "" for node in match.nodes]):
        return "recompute= has patterns for some of its nodes and not for the others"
    return None


def _trained(match: Match) -> _Layer | str:
    """Return the layer, unless no gradient flows through it: the runtime packs weights that do not change."""
    options = match.context.options
    layer, varying = _layer_of(match, options.recompute), match.context.varying
    if options.compute != "bfloat16" and layer.x not in varying and layer.w not in varying:
        return "no gradient flows through its operands"
    return _check_layer(match, options.recompute) or layer


def _emit_linear(op: Builder, match: Match) -> Value:
    x, w, transposed, bias = match.found
    activation = {ACTIVATION: RELU} if match.get("relu") is not None else {}
    inputs = op.wrap(x), op.wrap(w), None if bias is None else op.wrap(bias)
    return emit(op, "Linear", *inputs, like=[op.wrap(match.y)], **orientation(transposed), **activation)[0]


fuse_linear = Rewrite(Rule(LAYER_WITH_RELU, _emit_linear, _trained, namesake="matmul", backwards=True))
"""Replace matmuls with a matrix, a bias and Relu by one node ``Linear`` of the domain ``onnxtrain``.

With x [..., K] of two axes or more, w [K, N], or [N, K] read transposed, and b [N] or none: y [..., N] = x w + b; with
``activation`` = "Relu" y is relu(x w + b). The pattern, for float and double:

    MatMul, Gemm without factors and without a transposed x, either with a transposed w -> Add of a bias -> Relu

A bias must be known to have one axis of N elements. The node has the name of the matmul.
"""


# A 16-bit weight reaches a matmul in float32 through a Cast. Linear layers widen it tile by tile instead.


def _stored(weight: ir.Value | None) -> ir.Value | None:
    """Return the 16-bit value that a weight in float32 is cast from, or ``None``."""
    cast = made_by(weight, "Cast")
    stored = None if cast is None or cast.outputs[0].dtype != ir.DataType.FLOAT else cast.inputs[0]
    return stored if stored is not None and stored.dtype in HALVES else None


def _read_as_stored(_: Builder, match: Match) -> None:
    match.nodes[0].replace_input_with(1, match.found)


def _stored_layer(match: Match) -> _Layer | str:
    layer = _layer_of(match, ())
    stored = _stored(layer.w)
    if stored is None:
        return "its weight is not stored in 16 bits"
    return _check_layer(match) or layer._replace(w=stored)


use_half_weights = Rewrite(
    Rule(
        operators("layer with a 16-bit weight", "Linear", "LinearGradient", domain=ONNXTRAIN_DOMAIN),
        _read_as_stored,
        lambda match: _stored(match.nodes[0].inputs[1]) or "its weight is not stored in 16 bits",
        everywhere=True,
    ),
    Rule(LAYER, _emit_linear, _stored_layer, namesake="matmul", everywhere=True, backwards=True),
)
"""Let linear layers read weights in float16 and bfloat16 as they are stored, with the same bits.

Also in the bodies of operators, where a loss computes logits in chunks. Casts without readers may remain.
"""


# A layer that reads inputs beside computed values has a gradient that is split, and only the part of the computed
# values is wanted. Multiplying by that part of the weight saves the rest, and a copy. Where two wide parts are wanted,
# two multiplications save the copies, too.

LEAST_COLUMNS = 64
"""Columns of a part from which on a multiplication of its own is as fast as its share of a larger one."""


class _Parts(NamedTuple):
    """A layer, and the columns of its result that anything reads, by output of the Split."""

    layer: ir.Node
    read: dict[int, tuple[int, int]]


def _unread(match: Match) -> _Parts | str:
    (split,) = match.nodes
    layer = _layer_before(split)
    if layer is None:
        return "it does not cut apart the columns of a linear layer that could compute some of them alone"
    widths = [(dimensions(output) or (None,))[-1] for output in split.outputs]
    known = [size for size in widths if isinstance(size, int)]
    if len(known) < len(widths):
        return "its sizes are not known"
    ends = [0, *accumulate(known)]
    wanted = [output.uses() or output.is_graph_output() for output in split.outputs]
    read = {index: (ends[index], ends[index + 1]) for index, needed in enumerate(wanted) if needed}
    narrow = len(read) == 2 and min(known[index] for index in read) < LEAST_COLUMNS
    return "several parts are read" if narrow or len(read) not in (1, 2) else _Parts(layer, read)


def _emit_parts(op: Builder, match: Match) -> list[Value | None]:
    layer, read = match.found
    x, w = (op.wrap(value) for value in layer.inputs[:2] if value is not None)
    axis = 0 if reads_transposed(layer) else 1
    attributes = attributes_of(layer)
    made: list[Value | None] = [None] * len(match.nodes[0].outputs)
    for index, (begin, end) in read.items():
        shape = tuple(end - begin if each == axis else size for each, size in enumerate(w.shape or ()))
        part = op.Slice(w, op.ints(begin), op.ints(end), op.ints(axis)).with_shape(shape)
        (made[index],) = op.several("Linear", x, part, outputs=1, domain=ONNXTRAIN_DOMAIN, **attributes)
    return made


def _layer_before(split: ir.Node) -> ir.Node | None:
    """Return the linear layer whose columns a Split cuts apart, if it can compute some of them alone."""
    layer = made_by(split.inputs[0], "Linear", ONNXTRAIN_DOMAIN, alone=True)
    sizes = None if layer is None else dimensions(layer.outputs[0])
    if layer is None or sizes is None or ACTIVATION in layer.attributes:
        return None
    if "axis" not in split.attributes or split.attributes["axis"].as_int() not in (-1, len(sizes) - 1):
        return None
    w = layer.inputs[1]
    if w is None or w.dtype not in KERNEL_TYPES or any(value is not None for value in layer.inputs[2:]):
        return None
    shape = dimensions(w)
    if shape is None or len(shape) != 2 or None in shape:
        return None
    depth, rows = shape[1 if reads_transposed(layer) else 0], sizes[:-1]
    known = [size for size in rows if isinstance(size, int)]
    few = isinstance(depth, int) and len(known) == len(rows) and math.prod(known) < depth
    return None if few else layer


skip_unread_columns = Rewrite(Rule(operators("unread columns", "Split"), _emit_parts, _unread))
"""Let a linear layer before a Split compute the only part that is read, or each of two wide ones, with the same bits.

    x, w -> Linear -> Split -> y, others        becomes        w -> Slice -> part;  x, part -> Linear -> y
"""


# In a layer y = x w + b with x = relu(z), the gradient by x is in the nearest cache when it is complete, and so is the
# part of x that says where z was above zero.


def _layer_behind(match: Match) -> ir.Node | str:
    """Return the LinearGradient whose dx only this ReluGradient reads, if both have the same x."""
    (relu,) = match.nodes
    dx, x = relu.inputs[:2]
    layer = made_by(dx, "LinearGradient", ONNXTRAIN_DOMAIN, alone=True)
    if layer is None or dx is not layer.outputs[0] or layer.graph is not relu.graph:
        return "its dy is not that of a linear layer, or something else reads it"
    return "x is another one" if layer.inputs[2] is not x or ACTIVATION in layer.attributes else layer


def _emit_relu(op: Builder, match: Match) -> Value:
    match.found.attributes[ACTIVATION] = ir.AttrString(ACTIVATION, RELU)
    return op.wrap(match.found.outputs[0])


fuse_relu = Rewrite(
    Rule(operators("gradient of Relu", "ReluGradient", domain=ONNXTRAIN_DOMAIN), _emit_relu, _layer_behind)
)
"""Let the gradients of linear layers return the gradient by the input of the Relu before the layer, with the same bits.

    dy, w, x -> LinearGradient -> dx, dw, db;  dx, x -> ReluGradient -> dz

becomes ``LinearGradient`` with ``activation`` = "Relu" and dz as its first output.
"""


# Additions. An adapter multiplies by a matrix of a few rows, and its result is added to that of a layer; in the
# backward pass it is added to the other gradients of the layer's input. As the bias of the multiplication, the other
# term is read and written once, in place if nothing else reads it. The gradient of an embedding is zero in most rows;
# added to a dense one, as of an output layer that shares its weights, it needs three tensors of the size of the
# embedding, in place one. Where values are joined to those before them, as in a DenseNet, the gradient of a batch
# normalization is added to that of the earlier channels, the first part of a Split: it is read where it lies, and added
# in the cache.

MOST_ROWS, LEAST_COLUMNS_BY_ROW = 64, 2
"""Shape of an adapter's matrix: at most so many rows, and at least so many columns for each."""

_BY_CHANNEL = "BatchNormalizationGradient"
_SLOTS = {"Linear": 2, "GatherGradient": 3, _BY_CHANNEL: 6}
"""Operators that add another term to their first output, and the input that has it."""


class _Sum(NamedTuple):
    """Terms of a sum: those whose nodes can add the rest, each with its producer and the slot; and the others."""

    adding: list[tuple[ir.Value, ir.Node, int]]
    others: list[ir.Value]


def _addition(match: Match) -> _Sum | str:
    (node,), y, places = match.nodes, match.y, match.context.places
    terms, sizes = [term for term in node.inputs if term is not None], dimensions(y)
    if not sizes or None in sizes or any(dimensions(term) != sizes or term.dtype != y.dtype for term in terms):
        return "its terms are not known to be of one shape and type"
    adding = {term: (producer, slot) for term in terms for producer, slot in _able_to_add(term)}
    if not any(producer.op_type == "Linear" and _is_narrow(producer) for producer, _ in adding.values()):
        adding = {term: found for term, found in adding.items() if found[0].op_type != "Linear"}
    others = [producer for term in terms if term not in adding and (producer := term.producer()) is not None]
    # Another term may depend on another result of a gradient, if it comes later.
    last = max((places[producer] for producer in others), default=-1)
    found = [
        (term, producer, slot)
        for term, (producer, slot) in adding.items()
        if len(producer.outputs) == 1 or places[producer] > last
    ]
    if not found or len(terms) < 2:
        return "no node of a term can add the others"
    found.sort(key=lambda each: places[each[1]])
    chosen = {term for term, *_ in found}
    return _Sum(found, [term for term in terms if term not in chosen])


def _emit_addition(op: Builder, match: Match) -> Value:
    """Give each such node the sum before it, behind the sum of the terms of other nodes."""
    (node,), (adding, others), places = match.nodes, match.found, match.context.places
    if len(others) > 1:
        total = op.Sum(*map(op.wrap, others)).ir
        total.name, total.type, total.shape = f"{match.y.name}/others", match.y.type, match.y.shape
        places[op.emitted[-1]] = places[node]
    else:
        total = others[0] if others else adding.pop(0)[0]
    for term, producer, slot in adding:
        producer.resize_inputs(slot + 1)
        producer.replace_input_with(slot, total)
        places[producer] = places[node]
        total = term
    return op.wrap(total)


def _able_to_add(term: ir.Value) -> Iterator[tuple[ir.Node, int]]:
    """Yield a value's producer and its input that is added to the value, if it is free and nothing else reads it."""
    node = term.producer()
    if node is None or node.domain != ONNXTRAIN_DOMAIN or len(term.uses()) != 1 or term.is_graph_output():
        return
    slot = _SLOTS.get(node.op_type)
    if slot is None or term is not node.outputs[0] or (node.op_type == "Linear" and ACTIVATION in node.attributes):
        return
    if len(node.inputs) > slot and node.inputs[slot] is not None:
        return
    # Nothing can stand for an input before the other term.
    if node.op_type != _BY_CHANNEL or (len(node.inputs) >= slot and None not in node.inputs[:slot]):
        yield node, slot


def _is_narrow(layer: ir.Node) -> bool:
    """Return whether a linear layer multiplies by a matrix of few rows, as an adapter does."""
    weight = dimensions(layer.inputs[1])
    if weight is None or len(weight) != 2:
        return False
    rows, columns = weight[::-1] if reads_transposed(layer) else weight
    if not isinstance(rows, int) or not isinstance(columns, int):
        return False
    return rows <= MOST_ROWS and columns >= LEAST_COLUMNS_BY_ROW * rows


def _before_split(match: Match) -> tuple[ir.Node, int, int] | str:
    """Return the Split of the channels whose first part a gradient alone adds, and the begin and end of the other."""
    (gradient,), slot = match.nodes, _SLOTS[_BY_CHANNEL]
    first = input_of(gradient, slot)
    split = made_by(first, "Split", alone=True)
    if split is None or len(split.outputs) != 2:
        return "it adds no part of a Split in two for it alone"
    if first is not split.outputs[0] or split.attributes.get_int("axis", 0) != 1:
        return "it adds another part"
    begin, count = ((dimensions(value) or (None, None))[1] for value in split.outputs)
    if not isinstance(begin, int) or not isinstance(count, int) or split.outputs[1].is_graph_output():
        return "the other part is an output, or sizes are not known"
    return split, begin, begin + count


def _emit_unsplit(_: Builder, match: Match) -> None:
    (gradient,), (split, begin, end) = match.nodes, match.found
    op, whole = match.context.main.before(split), split.inputs[0]
    op.scope = split.name or ""
    part = op.Slice(op.wrap(whole), op.ints(begin), op.ints(end), op.ints(1))
    gradient.replace_input_with(_SLOTS[_BY_CHANNEL], whole)
    take_over(op.graph, {split.outputs[1]: part.ir})
    match.nodes = (gradient, split)


fuse_additions = Rewrite(
    Rule(operators("addition", "Add", "Sum"), _emit_addition, _addition),
    Rule(operators("addition of a part", _BY_CHANNEL, domain=ONNXTRAIN_DOMAIN), _emit_unsplit, _before_split),
    sort=True,
)
"""Let linear layers, sums of rows and gradients of batch norms add the other terms of a sum to theirs.

    x, w -> Linear -> t;  c, t -> Add -> y                  becomes     x, w, c -> Linear -> y
    dy, i, s -> GatherGradient -> t;  c, t -> Add -> y      becomes     dy, i, s, c -> GatherGradient -> y

For ``BatchNormalizationGradient`` c may be the first part of a ``Split`` of the channels: it gets all of them. Left
alone are linear layers in sums without an adapter's output, and gradients that come before another term. Gradients are
built before: neither has a rule for such a term.
"""


# Layers that train under a mask

LEAST_ZEROS = 0.5
"""Fraction of zeros from which the kernels get a mask; they multiply densely where that is faster."""

_MASK_INPUT = {"Linear": 3, "LinearGradient": 3, "LinearWeightGradient": 2}


def use_mask_kernels(graph: ir.Graph) -> None:
    """Give linear layers the mask of their weight as a constant input, in place.

    For a float32 weight w of two axes with a mask of which at least half is false:

    - ``Linear`` of the domain ``onnxtrain`` and its gradient by x skip what is false. They check that w is zero there.
    - ``LinearWeightGradient`` and ``LinearGradient`` compute dw where the mask is true; the rest is zero. They get the
      mask only where nothing reads dw but ``Where(mask, dw, 0)``, directly or through sums.

    Requires: types, and the shapes of weights; gradients that are not yet part of updates. Ensures: a sorted graph.
    """
    main = Builder(graph)
    values = {str(value.name): value for value in (*graph.inputs, *graph.initializers.values())}
    for name, mask in list(graph.initializers.items()):
        weight = values.get(name.removesuffix(MASK)) if name.endswith(MASK) else None
        if weight is None or not _is_sparse(weight, mask):
            continue
        for node in [where for where, _ in mask.uses() if where.op_type == "Where"]:
            for layer in _layer_gradients(node, weight):
                _give(layer, mask)
        for layer, place in list(weight.uses()):
            if place == 1 and layer.graph is graph and _is(layer, "Linear"):
                _give(layer, mask)
                if layer.inputs[2] is None:  # workarounds: optional inputs of custom operators
                    layer.replace_input_with(2, main.constant(_zeros(layer, mask), weight.dtype).ir)


def _is_sparse(weight: ir.Value, mask: ir.Value) -> bool:
    sizes = dimensions(weight)
    if weight.dtype != ir.DataType.FLOAT or sizes is None or len(sizes) != 2 or dimensions(mask) != sizes:
        return False
    if mask.dtype != ir.DataType.BOOL or mask.const_value is None:
        return False
    kept = mask.const_value.numpy()
    return bool(np.count_nonzero(kept) <= (1 - LEAST_ZEROS) * kept.size)


def _layer_gradients(where: ir.Node, weight: ir.Value) -> Iterator[ir.Node]:
    """Yield the nodes whose gradient of the weight only this Where reads, if it sets the rest to zero."""
    waiting = [where.inputs[1]] if constant_number(where.inputs[2]) == 0 else []
    while waiting:
        gradient = waiting.pop()
        node = producer_of(gradient)
        if gradient is None or node is None or len(gradient.uses()) != 1 or gradient.is_graph_output():
            continue
        if not node.domain and node.op_type in ("Add", "Sum", "Identity"):
            waiting += node.inputs
        elif dimensions(gradient) == dimensions(weight) and gradient.dtype == weight.dtype:
            of_weight = _is(node, "LinearWeightGradient") and gradient is node.outputs[0]
            of_both = _is(node, "LinearGradient") and gradient is node.outputs[1] and node.inputs[1] is weight
            if of_weight or of_both:
                yield node


def _zeros(layer: ir.Node, mask: ir.Value) -> np.ndarray:
    """Return a bias of zeros for a layer whose weight has a constant mask."""
    kept = constant_array(mask)
    assert kept is not None
    return np.zeros(kept.shape[0 if reads_transposed(layer) else 1])


def _give(layer: ir.Node, mask: ir.Value) -> None:
    place = _MASK_INPUT[layer.op_type]
    layer.resize_inputs(place + 1)
    layer.replace_input_with(place, mask)


def _is(node: ir.Node, operator: str) -> bool:
    return node.domain == ONNXTRAIN_DOMAIN and node.op_type == operator
