"""Fuse scaled dot-product attention, which exporters write as half a dozen nodes, into one with a native kernel.

Written out, the scores, their softmax and its masks are tensors of batch x heads x queries x keys; the gradient
reads several of them, so that they are kept. The operator keeps one number per query instead, and takes its inputs as
the layers before it leave them: the transpositions around it go away, too. As with activations, this is done before
the gradient is built, in working copies for sessions that load the native kernels only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff.fused import KERNEL_TYPES, VERSION
from onnxtrain.graph import Builder, Value
from onnxtrain.graph.domains import ONNXTRAIN_DOMAIN
from onnxtrain.graph.replace import substitute, take_over
from onnxtrain.graph.value import Dimension, dimensions
from onnxtrain.lowering.fuse.patterns import (
    Match,
    OneOf,
    Op,
    Pattern,
    Scaled,
    Term,
    Var,
    find,
    has_anchor,
    is_needed,
    named_by_gradients,
    remove_unread,
)
from onnxtrain.lowering.fuse.transposition import composed, is_identity, order_of, transposed, transposes

OPERATOR = "Attention"

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

PATTERN = Pattern("attention", Op("MatMul", OneOf(_SOFTMAX, _CLEANED), Var("v")), {"Softmax"})


def fuse_attention(model: ir.Model) -> None:
    """Replace softmax(scale q k^T + bias) v by one node ``Attention`` of the domain ``onnxtrain``, in place.

    With q [B, S, H, D], k [B, T, H, D], v [B, T, H, E] and a bias that broadcasts to [B, H, S, T] or none:
    y [B, S, H, E] and the logarithm of each softmax's sum [B, H, S]. The attribute ``zero_empty_rows`` replaces NaN
    from a softmax over -inf alone by 0. The pattern is for float and double, as PyTorch's exporters write it:

        MatMul -> Mul, Div by constants -> Add of a bias, Where(mask, scores, -inf) -> Softmax -> Where(IsNaN) -> MatMul

    where q and k may be scaled, too. A scale is a constant, or a scalar that the graph computes, as exporters write the
    root of a size that they do not know: that one multiplies q. Left alone are:

    - matmuls that may broadcast: batch and heads of q, k and v must be known to be equal, and a bias or a mask must
      be known not to enlarge the scores (its axes are 1 or equal, or the scores' size is a number above 1);
    - masks of a finite number, which leaves other probabilities in a row that is masked altogether;
    - those with a Dropout of training between softmax and matmul, whose mask the operator does not apply.

    Requires: a sorted graph with shapes. Ensures: values that outputs or Gradient nodes name stay, and so does what
    depends on them.
    """
    graph = model.graph
    if not has_anchor(graph, PATTERN):
        return
    named = named_by_gradients(graph)
    main, fused = Builder(graph, graph.opset_imports[""]), False
    for match in find(graph, PATTERN, named, lambda match: _check(match, main.opset)):
        attention = _attention(match)
        softmax, last = match["softmax"], match.nodes[0]
        op = main.before(last)
        op.scope = f"fused {softmax.name}" if softmax.name else ""
        result = _emit(op, attention, named)
        op.emitted[-1].name = last.name  # recompute= names the node that computes y
        _replace(op, attention, result, named)
        fused = True
    if fused:
        _read_sizes_before_transposes(main, named)


class _Attention(NamedTuple):
    """Matched attention y = softmax(scale q k + biases, masks) v, with heads before positions.

    Attributes:
        q: [B, H, S, D].
        k: [B, H, D, T].
        v: [B, H, T, E].
        y: [B, H, S, E].
        scale: The constant factor of all scores.
        scalars: Values of one element that multiply the scores (``Mul``) or divide them (``Div``).
        biases: Values to add.
        masks: Conditions, each with its meaning: keep the score (true) or put -inf (false).
        zero_empty_rows: True if NaN is replaced by zero.
        inside: The nodes.
    """

    q: ir.Value
    k: ir.Value
    v: ir.Value
    y: ir.Value
    scale: float
    scalars: Sequence[tuple[ir.Value, str]]
    biases: Sequence[ir.Value]
    masks: Sequence[tuple[ir.Value, bool]]
    zero_empty_rows: bool
    inside: Sequence[ir.Node]

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
        inside=match.nodes,
    )


def _check(match: Match, opset: int) -> str | None:
    """Return why the operator does not compute this attention: only biases and masks may broadcast."""
    softmax, attention = match["softmax"], _attention(match)
    attribute = softmax.attributes.get("axis")
    # Before opset 13 Softmax was over all axes from ``axis`` on, 1 by default.
    axis = attribute.as_int() if attribute is not None else -1 if opset >= 13 else 1
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
    return None


def _broadcasts(value: ir.Value, scores: Sequence[Dimension]) -> bool:
    """Return whether a value broadcasts to the shape of the scores without enlarging them."""
    shape = dimensions(value)
    if shape is None or len(shape) > len(scores):
        return False
    return all(
        size == 1 or (isinstance(wanted, int) and wanted != 1) or (size is not None and size == wanted)
        for size, wanted in zip(reversed(shape), reversed(scores), strict=False)
    )


def _emit(op: Builder, attention: _Attention, named: set[str]) -> ir.Value:
    """Emit the node of the operator; its result is [B, S, H, E]."""
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
    y, log_sum = op.several(OPERATOR, q, k, v, bias, outputs=2, domain=ONNXTRAIN_DOMAIN, **attributes)
    batch, heads, queries, _, features = attention.shape
    y.with_shape((batch, queries, heads, features))
    log_sum.with_shape((batch, heads, queries))
    y.ir.dtype = log_sum.ir.dtype = q.dtype
    return y.ir


def _replace(op: Builder, attention: _Attention, result: ir.Value, named: set[str]) -> None:
    """Replace y by the result: directly where y is transposed to its layout, else through a Transpose."""
    graph, y = op.graph, attention.y
    renamed = False
    for node in list(transposes(y, named)):
        order, output, source = composed(_HEADS_SECOND, order_of(node, _RANK)), node.outputs[0], node.inputs[0]
        if not is_identity(order):
            node.replace_input_with(0, result)
            node.attributes["perm"] = ir.AttrInt64s("perm", order)
        elif not renamed:
            take_over(graph, {output: result})
            renamed = True
        elif not output.is_graph_output():
            substitute(graph, {output: result})
        between = None if source is None else source.producer()
        remove_unread(graph, [node] if between is None else [node, between], named)
    if y.uses() or is_needed(y, named):
        take_over(graph, {y: op.Transpose(op.wrap(result), perm=list(_HEADS_SECOND)).ir})
    remove_unread(graph, attention.inside, named)


def _read_sizes_before_transposes(main: Builder, named: set[str]) -> None:
    """Let nodes that read only the shape of a transposed value read it from the value before."""
    graph = main.graph
    for node in list(graph):
        if node.op_type != "Transpose" or node.domain or is_needed(node.outputs[0], named) or node.inputs[0] is None:
            continue
        shapes = [reader for reader, _ in node.outputs[0].uses()]
        if "perm" not in node.attributes or not all(_is_whole_shape(reader, graph) for reader in shapes):
            continue
        for reader in shapes:
            op = main.before(reader)
            sizes = op.Gather(op.Shape(op.wrap(node.inputs[0])), op.ints(*node.attributes["perm"].as_ints())).ir
            take_over(graph, {reader.outputs[0]: sizes})
        remove_unread(graph, [*shapes, node], named)


def _is_whole_shape(node: ir.Node, graph: ir.Graph) -> bool:
    return node.op_type == "Shape" and not node.domain and not node.attributes and node.graph is graph
