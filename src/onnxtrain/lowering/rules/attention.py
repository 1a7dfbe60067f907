"""Scaled dot-product attention, which exporters write as half a dozen nodes, as one node with a native kernel.

Written out, the scores, their softmax and its masks are tensors of batch x heads x queries x keys; the gradient
reads several of them, so that they are kept. The operator keeps one number per query instead, and takes its inputs as
the layers before it leave them: the transpositions around it go away, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff.fused import KERNEL_TYPES, VERSION
from onnxtrain.autodiff.rules.fused_attention import ATTENTION, PACKED
from onnxtrain.graph import Builder, Value
from onnxtrain.graph.domains import ONNXTRAIN_DOMAIN
from onnxtrain.graph.replace import remove_nodes, substitute, take_over
from onnxtrain.graph.value import Dimension, attributes_of, dimensions, made_by, order_of, producer_of
from onnxtrain.lowering.patterns import Match, OneOf, Op, Pattern, Scaled, Term, Var, operators
from onnxtrain.lowering.rewrite import Rewrite, Rule, is_needed, remove_unread
from onnxtrain.lowering.rules.transposition import composed, is_identity, transposed, transposes

_RANK = 4
_MOST_BIASES = 3
"""Masks and sums between matmul and softmax that the pattern allows; each sum has two terms to try."""

_HEADS_SECOND = (0, 2, 1, 3)
"""[batch, positions, heads, features] to [batch, heads, positions, features], and back."""
_TRANSPOSED_KEYS = (0, 3, 1, 2)
"""[batch, heads, features, positions] to [batch, positions, heads, features]."""


_SCORES: Term = Scaled(Op("MatMul", Scaled(Var("q"), "scale of q"), Scaled(Var("k"), "scale of k")), "scale")
for _ in range(_MOST_BIASES):
    _SCORES = OneOf(
        _SCORES,
        Op("Add", _SCORES, Var("bias", repeats=True)),
        Op("Where", Var("keep", repeats=True), _SCORES, -math.inf),
        Op("Where", Var("drop", repeats=True), -math.inf, _SCORES),
    )
_SOFTMAX = Op("Softmax", _SCORES, name="softmax")
_CLEANED = Op("Where", Op("IsNaN", _SOFTMAX), 0, _SOFTMAX, name="without NaN")

_ATTENTION = Pattern("attention", Op("MatMul", OneOf(_SOFTMAX, _CLEANED), Var("v")), {"Softmax"})


class _Attention(NamedTuple):
    """Matched attention y = softmax(scale q k + biases, masks) v, with heads before positions."""

    q: ir.Value  # [B, H, S, D]
    k: ir.Value  # [B, H, D, T]
    v: ir.Value  # [B, H, T, E]
    y: ir.Value  # [B, H, S, E]
    scale: float  # the constant factor of all scores
    scalars: Sequence[tuple[ir.Value, str]]  # of one element; each multiplies (Mul) or divides (Div) the scores
    biases: Sequence[ir.Value]
    masks: Sequence[tuple[ir.Value, bool]]  # true: a condition keeps the score; false: it puts -inf
    zero_empty_rows: bool  # NaN becomes zero

    @property
    def shape(self) -> tuple[Dimension, ...]:
        """B, H, S, T, E."""
        q, k, v = (dimensions(value) or () for value in (self.q, self.k, self.v))
        return q[0], q[1], q[2], k[3], v[3]


def _attention(match: Match) -> _Attention:
    """Return the operands and attributes of a match."""
    factors = [match.all(name) for name in ("scale", "scale of q", "scale of k")]
    # Multiplied group by group, outer factors first: the order decides the last bit.
    groups = [[factor for factor in some if isinstance(factor, float)] for some in factors]
    scale = math.prod(map(math.prod, groups), start=1.0)
    scalars = [factor for some in factors for factor in some if not isinstance(factor, float)]
    masks = [(value, name == "keep") for name, value in match.captures if name in ("keep", "drop")]
    return _Attention(
        q=match["q"],
        k=match["k"],
        v=match["v"],
        y=match.y,
        scale=scale,
        scalars=scalars,
        biases=match.all("bias"),
        masks=masks,
        zero_empty_rows=match.get("without NaN") is not None,
    )


def _check(match: Match) -> _Attention | str:
    """Return the attention, or why the operator does not compute it: only biases and masks may broadcast."""
    softmax, attention, opset = match["softmax"], _attention(match), match.context.main.opset
    # Before opset 13 Softmax was over all axes from ``axis`` on, 1 by default.
    axis = softmax.attributes.get_int("axis", -1 if opset >= 13 else 1)
    if axis not in (-1, _RANK - 1):
        return f"the softmax is along axis {axis}, not along the last of four"
    values = (attention.q, attention.k, attention.v)
    shapes = [dimensions(value) or () for value in values]
    if any(len(shape) != _RANK for shape in (*shapes, dimensions(softmax.outputs[0]) or ())):
        return f"q, k and v have shapes {', '.join(map(str, shapes))}; each needs four axes, and so do the scores"
    types = {value.dtype for value in (*values, *attention.biases, match.y, softmax.outputs[0])}
    if len(types) > 1 or match.y.dtype not in KERNEL_TYPES:
        return f"types are {', '.join(map(str, types))}; the kernel takes FLOAT or DOUBLE, one for all"
    if len({shape[:2] for shape in shapes}) > 1 or None in shapes[0][:2]:
        return f"batch and heads of q, k and v are not known to be equal: {', '.join(map(str, shapes))}"
    if not math.isfinite(attention.scale):
        return "the scale is not finite"
    for value in (*attention.biases, *(mask for mask, _ in attention.masks)):
        if not _broadcasts(value, attention.shape[:_RANK]):
            return f"{value.name!r} of shape {dimensions(value)} may enlarge the scores {attention.shape[:_RANK]}"
    return attention


def _broadcasts(value: ir.Value, scores: Sequence[Dimension]) -> bool:
    """Return whether a value broadcasts to the shape of the scores without enlarging them."""
    shape = dimensions(value)
    if shape is None or len(shape) > len(scores):
        return False
    return all(
        size == 1 or (isinstance(wanted, int) and wanted != 1) or (size is not None and size == wanted)
        for size, wanted in zip(reversed(shape), reversed(scores), strict=False)
    )


def _emit(op: Builder, match: Match) -> None:
    attention, named = match.found, match.context.named
    op.scope = f"fused {match['softmax'].name}" if match["softmax"].name else ""
    q = transposed(op, attention.q, _HEADS_SECOND, named)
    scale, scalars = attention.scale, attention.scalars
    factor: Value | None = None
    if q.dtype == ir.DataType.DOUBLE and float(np.float32(scale)) != scale:  # attributes are of single precision
        scale, factor = 1.0, op.scalar(scale, q)
    for scalar, operator in scalars:
        one = op.scalar(1.0, q) if factor is None and operator == "Div" else factor
        factor = op.wrap(scalar) if one is None else op.binary(operator, one, op.wrap(scalar))
    if factor is not None:
        q = (q * factor).with_shape(q.shape)
    k = transposed(op, attention.k, _TRANSPOSED_KEYS, named)
    v = transposed(op, attention.v, _HEADS_SECOND, named)
    biases = [op.wrap(value) for value in attention.biases]
    for mask, keep in attention.masks:
        zero, infinite = op.scalar(0.0, q), op.scalar(-math.inf, q)
        biases.append(op.Where(op.wrap(mask), *((zero, infinite) if keep else (infinite, zero))))
    bias = biases[0] if biases else None
    for more in biases[1:]:
        bias = more if bias is None else bias + more
    op.import_domain(ONNXTRAIN_DOMAIN, VERSION)
    attributes = {"scale": scale, "zero_empty_rows": int(attention.zero_empty_rows)}
    y, log_sum = op.several(ATTENTION, q, k, v, bias, outputs=2, domain=ONNXTRAIN_DOMAIN, **attributes)
    batch, heads, queries, _, features = attention.shape
    y.with_shape((batch, queries, heads, features))
    log_sum.with_shape((batch, heads, queries))
    y.ir.dtype = log_sum.ir.dtype = q.dtype
    op.emitted[-1].name = match.nodes[0].name  # recompute= names the node that computes y
    _replace(op, match.y, y.ir, named)


def _replace(op: Builder, y: ir.Value, result: ir.Value, named: set[str]) -> None:
    """Replace y by the result: directly where y is transposed to its layout, else through a Transpose."""
    graph, taken_over = op.graph, False
    for node in list(transposes(y, named)):
        order, output, source = composed(_HEADS_SECOND, order_of(node, _RANK)), node.outputs[0], node.inputs[0]
        if not is_identity(order):
            node.replace_input_with(0, result)
            node.attributes["perm"] = ir.AttrInt64s("perm", order)
        elif not taken_over:
            take_over(graph, {output: result})
            taken_over = True
        elif not output.is_graph_output():
            substitute(graph, {output: result})
        between = producer_of(source)
        remove_unread(graph, [node] if between is None else [node, between], named)
    if y.uses() or is_needed(y, named):
        take_over(graph, {y: op.Transpose(op.wrap(result), perm=list(_HEADS_SECOND)).ir})


# Sizes of a transposed value, read from the value before, so that no Transpose stays for its shape alone


def _shape_readers(match: Match) -> list[ir.Node] | str:
    """Return the readers of a Transpose, if they read only its shape."""
    (node,) = match.nodes
    y, named, graph = node.outputs[0], match.context.named, match.context.graph
    readers = [reader for reader, _ in y.uses()]
    if "perm" not in node.attributes or node.inputs[0] is None or is_needed(y, named):
        return "something else needs its result"
    return readers if all(_is_whole_shape(reader, graph) for reader in readers) else "its elements are read"


def _emit_sizes(_: Builder, match: Match) -> None:
    (node,) = match.nodes
    for reader in match.found:
        op = match.context.main.before(reader)
        sizes = op.Gather(op.Shape(op.wrap(node.inputs[0])), op.ints(*node.attributes["perm"].as_ints())).ir
        take_over(op.graph, {reader.outputs[0]: sizes})
    match.nodes = (*match.found, node)


def _is_whole_shape(node: ir.Node, graph: object) -> bool:
    return node.op_type == "Shape" and not node.domain and not node.attributes and node.graph is graph


_FUSE = Rewrite(Rule(_ATTENTION, _emit, _check))
_READ_SIZES = Rewrite(Rule(operators("sizes before a transposition", "Transpose"), _emit_sizes, _shape_readers))


def fuse_attention(model: ir.Model) -> None:
    """Replace softmax(scale q k^T + bias) v by one node ``Attention`` of the domain ``onnxtrain``, in place.

    With q [B, S, H, D], k [B, T, H, D], v [B, T, H, E] and a bias that broadcasts to [B, H, S, T] or none:
    y [B, S, H, E] and the logarithm of each softmax's sum [B, H, S]. The attribute ``zero_empty_rows`` replaces NaN
    from a softmax over -inf alone by 0. The pattern is for float and double, as PyTorch's exporters write it:

        MatMul -> Mul, Div by constants -> Add of a bias, Where(mask, scores, -inf) -> Softmax -> Where(IsNaN) -> MatMul

    where q and k may be scaled, too. A scale that the graph computes multiplies q. Left alone are matmuls that may
    broadcast, a bias or a mask that may enlarge the scores, masks of a finite number (they leave other probabilities in
    a row that is masked altogether), and a Dropout of training between softmax and matmul.

    Requires: a sorted graph with shapes. Ensures: values that outputs or Gradient nodes name stay, and so does what
    depends on them.
    """
    if _FUSE(model):
        _READ_SIZES(model)


# Attention of the three parts of a Split


_PARTS = 3


class _Packed(NamedTuple):
    """A Split into queries, keys and values, what it splits, and the sizes of a part's row."""

    split: ir.Node
    x: ir.Value
    heads: int
    size: int


def _packed(match: Match) -> _Packed | str:
    """Return the Split before an attention that alone reads its parts."""
    (node,), named = match.nodes, match.context.named
    parts = [_part(value, named) for value in node.inputs[:_PARTS]]
    split = made_by(parts[0], "Split")
    if split is None or list(split.outputs) != parts:
        return "no Split makes queries, keys and values for it alone"
    x = split.inputs[0]
    sizes = dimensions(x)
    shapes = {dimensions(value) for value in node.inputs[:_PARTS] if value is not None}
    if x is None or sizes is None or len(sizes) != 3 or len(shapes) != 1:
        return "queries, keys and values are not known to have one shape"
    (shape,) = shapes
    if shape is None or split.attributes.get_int("axis", 0) not in (-1, 2) or shape[:2] != sizes[:2]:
        return "the Split is along another axis than the last"
    heads, size = shape[2:]
    widths = {(dimensions(part) or (None,))[-1] for part in split.outputs}
    if None in shape[:2] or not isinstance(heads, int) or not isinstance(size, int):
        return "the sizes are not known"
    if sizes[2] != _PARTS * heads * size or widths != {heads * size}:
        return "the parts are not queries, keys and values of one width"
    return _Packed(split, x, heads, size)


def _emit_packed(op: Builder, match: Match) -> Sequence[Value]:
    (node,), packed = match.nodes, match.found
    heads, size = packed.heads, packed.size
    shapes = [reader for value in node.inputs[:_PARTS] for reader in _readers(value) if reader is not node]
    if shapes:
        first = match.context.main.before(packed.split)
        first.scope = op.scope
        sizes = first.Concat(
            first.Gather(first.Shape(first.wrap(packed.x)), first.ints(0, 1)), first.ints(heads, size), axis=0
        )
        substitute(op.graph, {reader.outputs[0]: sizes.ir for reader in shapes})
        remove_nodes(op.graph, shapes)
    x = op.wrap(packed.x)
    shape = (*(x.shape or ())[:2], _PARTS, heads, size)
    qkv = op.Reshape(x, op.ints(0, 0, _PARTS, heads, size)).with_shape(shape)
    bias = [op.wrap(value) for value in node.inputs[_PARTS:] if value is not None]
    attributes = attributes_of(node)
    return op.several(PACKED, qkv, *bias, outputs=len(node.outputs), domain=ONNXTRAIN_DOMAIN, **attributes)


def _part(value: ir.Value | None, named: set[str]) -> ir.Value | None:
    """Return what a Reshape takes, if nothing reads that, or its result but this attention, and the result's shape."""
    reshape = made_by(value, "Reshape")
    if value is None or reshape is None or is_needed(value, named):
        return None
    others = [reader for reader in _readers(value) if reader.op_type != ATTENTION]
    if len(others) != len(value.uses()) - 1 or not all(
        _is_whole_shape(reader, reshape.graph) and not is_needed(reader.outputs[0], named) for reader in others
    ):
        return None
    part = reshape.inputs[0]
    return part if part is not None and len(part.uses()) == 1 and not is_needed(part, named) else None


def _readers(value: ir.Value | None) -> list[ir.Node]:
    return [] if value is None else [reader for reader, _ in value.uses()]


pack_attention = Rewrite(Rule(operators("packed attention", ATTENTION, domain=ONNXTRAIN_DOMAIN), _emit_packed, _packed))
"""Replace attention of the three parts of a Split by ``PackedAttention`` of the whole, with the same bits.

With x [b, s, 3 h d] and parts [b, s, h d]:

    x -> Split -> Reshape, Reshape, Reshape to [b, s, h, d] -> Attention of q, k, v
    becomes    x -> Reshape to [b, s, 3, h, d] -> PackedAttention

The parts would be three copies of the layer's result, and their gradients would be put together again.
"""
