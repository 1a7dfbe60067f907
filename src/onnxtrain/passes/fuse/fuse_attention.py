"""Scaled dot-product attention, which exporters write as half a dozen nodes, as one operator with a native kernel.

Written out, the scores, their softmax and what masks them are tensors of batch x heads x queries x keys; the gradient
reads several of them, so that they are kept. The operator keeps one number per query instead, and takes its inputs as
the layers before it leave them: the transpositions around it go away, too. As with activations, this is done before
the gradient is built, in working copies for sessions that load the native kernels only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff.fused import KERNEL_TYPES, VERSION
from onnxtrain.ir import Builder, Value
from onnxtrain.ir.domains import ONNXTRAIN_DOMAIN
from onnxtrain.ir.replace import substitute, take_over
from onnxtrain.ir.value import Dimension, constant_number, dimensions
from onnxtrain.passes.fuse.patterns import (
    are_seen,
    is_needed,
    multiple_of,
    named_by_gradients,
    operands,
    readers,
    remove_unread,
    varying_values,
)
from onnxtrain.passes.fuse.transposition import composed, is_identity, order_of, transposed, transposes

OPERATOR = "Attention"

_RANK = 4
_MOST_BIASES = 3
"""Masks and sums between product and softmax that are looked through: each sum has two terms to try."""

_HEADS_SECOND = (0, 2, 1, 3)
"""[batch, positions, heads, features] to [batch, heads, positions, features], and back."""
_TRANSPOSED_KEYS = (0, 3, 1, 2)
"""[batch, heads, features, positions] to [batch, positions, heads, features]."""


def fuse_attention(model: ir.Model) -> None:
    """Write softmax(scale q k^T + bias) v as one node ``Attention`` of the domain ``onnxtrain``, in place.

    With q [B, S, H, D], k [B, T, H, D], v [B, T, H, E] and a bias that broadcasts to [B, H, S, T] or none:
    y [B, S, H, E] and the logarithm of each softmax's sum [B, H, S]. The attribute ``zero_empty_rows`` says that NaN
    from a softmax over -inf alone is replaced by 0. What is recognised, for float and double, as PyTorch's exporters
    write it:

        MatMul -> Mul, Div by constants -> Add of a bias, Where(mask, scores, -inf) -> Softmax -> Where(IsNaN) -> MatMul

    where the first product's factors may be multiplied, too. What multiplies is a constant, or a scalar that the graph
    computes, as exporters write the root of a size that they do not know: that one multiplies q. Left alone are:

    - those whose inner values others read, that are outputs, or that a Gradient node names;
    - products that may broadcast: batch and heads of q, k and v must be known to be equal, and a bias or a mask must
      be known not to enlarge the scores (its axes are 1 or equal, or the scores' size is a number above 1);
    - biases through which a gradient flows, as learned relative positions: it is made of all that is saved here;
    - masks of a finite number, which leaves other probabilities in a row that is masked altogether;
    - those with a Dropout of training between softmax and product, whose mask the operator does not apply.

    Requires: a sorted graph with shapes. Ensures: values that outputs or Gradient nodes name stay, and so does what
    depends on them.
    """
    graph = model.graph
    softmaxes = [node for node in graph if node.op_type == "Softmax" and not node.domain]
    if not softmaxes:
        return
    opset = graph.opset_imports[""]
    named, varying = named_by_gradients(graph), varying_values(graph)
    main, fused = Builder(graph, opset), False
    for softmax in softmaxes:
        pattern = _match(softmax, opset, named, varying)
        if pattern is None or are_seen(pattern.inside, pattern.y, named):
            continue
        last = pattern.y.producer()
        assert last is not None
        op = main.before(last)
        op.scope = f"fused {softmax.name}" if softmax.name else ""
        result = _emit(op, pattern, named)
        op.emitted[-1].name = last.name  # whoever wants y to be recomputed names the node that gives it
        _replace(op, pattern, result, named)
        varying.update(output for node in op.emitted for output in node.outputs)  # they stand for some that were
        fused = True
    if fused:
        _read_sizes_before_transposes(main, named)


class _Factor(NamedTuple):
    """A constant times scalars that the graph computes, or divided by them (``Mul`` or ``Div``)."""

    number: float = 1.0
    scalars: tuple[tuple[ir.Value, str], ...] = ()

    def times(self, other: _Factor) -> _Factor:
        return _Factor(self.number * other.number, (*self.scalars, *other.scalars))


class _Scores(NamedTuple):
    """factor q k^T + biases, with -inf where a mask says so, and the nodes that compute it.

    Attributes:
        q: [B, H, S, D], perhaps multiplied by a constant.
        k: [B, H, D, T], likewise.
        factor: What the product is multiplied by.
        biases: What is added.
        masks: Conditions, each with what its truth means: keep the score (true) or put -inf (false).
        inside: The nodes.
    """

    q: ir.Value
    k: ir.Value
    factor: _Factor
    inside: frozenset[ir.Node]
    biases: tuple[ir.Value, ...] = ()
    masks: tuple[tuple[ir.Value, bool], ...] = ()


class _Pattern(NamedTuple):
    """Attention as it stands in the graph: y = softmax(scale q k + biases, masks) v, with heads before positions."""

    q: ir.Value
    k: ir.Value
    v: ir.Value
    y: ir.Value
    scale: _Factor
    biases: tuple[ir.Value, ...]
    masks: tuple[tuple[ir.Value, bool], ...]
    zero_empty_rows: bool
    inside: set[ir.Node]

    @property
    def shape(self) -> tuple[Dimension, ...]:
        """B, H, S, T, E."""
        q, k, v = (dimensions(value) or () for value in (self.q, self.k, self.v))
        return q[0], q[1], q[2], k[3], v[3]


def _match(softmax: ir.Node, opset: int, named: set[str], varying: set[ir.Value]) -> _Pattern | None:
    """The attention that a Softmax is part of, where the operator can compute it."""
    given, p = softmax.inputs[0], softmax.outputs[0]
    if given is None or _rank(p) != _RANK or p.dtype not in KERNEL_TYPES or not _is_over_last_axis(softmax, opset):
        return None
    cleaned, replacing = _without_nan(p)
    product = next((node for node in readers(cleaned, "MatMul") if node.inputs[0] is cleaned), None)
    if product is None or product.graph is not softmax.graph or product.inputs[1] is None:
        return None
    v, y = product.inputs[1], product.outputs[0]
    for scores in _scores(given, _MOST_BIASES):
        if any(bias in varying for bias in scores.biases):
            continue
        inside = {softmax, product, *replacing, *scores.inside}
        q, of_q = _without_factors(scores.q, named, inside)
        k, of_k = _without_factors(scores.k, named, inside)
        scale = scores.factor.times(of_q).times(of_k)
        pattern = _Pattern(q, k, v, y, scale, scores.biases, scores.masks, bool(replacing), inside)
        if math.isfinite(scale.number) and _fits(pattern):
            return pattern
    return None


def _is_over_last_axis(softmax: ir.Node, opset: int) -> bool:
    """Whether it is along the last axis; before opset 13 it was over all axes from ``axis`` on, 1 by default."""
    attribute = softmax.attributes.get("axis")
    axis = attribute.as_int() if attribute is not None else -1 if opset >= 13 else 1
    return axis in (-1, _RANK - 1)


def _without_nan(p: ir.Value) -> tuple[ir.Value, list[ir.Node]]:
    """Where(IsNaN(p), 0, p) and its two nodes, or p."""
    for test in readers(p, "IsNaN"):
        for choice in readers(test.outputs[0], "Where"):
            condition, replacement, kept = choice.inputs
            if condition is test.outputs[0] and kept is p and constant_number(replacement) == 0:
                return choice.outputs[0], [test, choice]
    return p, []


def _scores(value: ir.Value, more: int) -> Iterator[_Scores]:
    """The ways to read a value as scores: usually one or none, two where both terms of a sum are products."""
    node = value.producer()
    if node is None or _rank(value) != _RANK:
        return
    product = _product(value)
    if product is not None:
        yield product
    elif more:
        for inner, bias, mask in _enclosed(node):
            for scores in _scores(inner, more - 1):
                inside = scores.inside | {node}
                biases, masks = (*scores.biases, *bias), (*scores.masks, *mask)
                yield _Scores(scores.q, scores.k, scores.factor, inside, biases, masks)


_Enclosed = tuple[ir.Value, Sequence[ir.Value], Sequence[tuple[ir.Value, bool]]]


def _enclosed(node: ir.Node) -> Iterator[_Enclosed]:
    """What a node may add a bias to or mask: the scores, and that bias or that mask."""
    y = node.outputs[0]
    sides = operands(y, "Add")
    for scores, bias in (sides, sides[::-1]) if sides is not None else ():
        yield scores, (bias,), ()
    if operands(y, "Where") is not None:
        mask, *choices = node.inputs
        for keep, (scores_or_none, other) in ((True, choices), (False, choices[::-1])):
            if mask is not None and scores_or_none is not None and constant_number(other) == -math.inf:
                yield scores_or_none, (), ((mask, keep),)


def _product(value: ir.Value) -> _Scores | None:
    """A product of two matrices, perhaps multiplied by scalars."""
    factor, inside = _Factor(), set[ir.Node]()
    while (found := _multiple_of(value)) is not None:
        inside.update(_producers(value))
        value, factor = found[0], factor.times(found[1])
    factors = operands(value, "MatMul")
    return None if factors is None else _Scores(*factors, factor, frozenset({*inside, *_producers(value)}))


def _without_factors(value: ir.Value, named: set[str], inside: set[ir.Node]) -> tuple[ir.Value, _Factor]:
    """What a value is a multiple of, and the factor; nodes that nothing else needs join those inside."""
    factor = _Factor()
    while (found := _multiple_of(value)) is not None and len(value.uses()) == 1 and not is_needed(value, named):
        inside.update(_producers(value))
        value, factor = found[0], factor.times(found[1])
    return value, factor


def _multiple_of(value: ir.Value) -> tuple[ir.Value, _Factor] | None:
    """What a value is a multiple of, and the factor: a constant, or a value of one element."""
    constant = multiple_of(value)
    if constant is not None:
        return constant[0], _Factor(constant[1])
    for operator in ("Mul", "Div"):
        x, factor = operands(value, operator) or (None, None)
        if operator == "Mul" and _is_scalar(x):
            x, factor = factor, x
        if x is not None and factor is not None and _is_scalar(factor):
            return x, _Factor(scalars=((factor, operator),))
    return None


def _is_scalar(value: ir.Value | None) -> bool:
    return value is not None and dimensions(value) in ((), (1,))


def _producers(value: ir.Value | None) -> list[ir.Node]:
    node = None if value is None else value.producer()
    return [] if node is None else [node]


def _rank(value: ir.Value) -> int | None:
    return None if value.shape is None else len(value.shape)


def _fits(pattern: _Pattern) -> bool:
    """Whether nothing is broadcast but biases and masks, as far as shapes prove it, and all has one type."""
    values = (pattern.q, pattern.k, pattern.v)
    shapes = [dimensions(value) or () for value in values]
    if any(len(shape) != _RANK for shape in shapes):
        return False
    if any(value.dtype != pattern.y.dtype for value in (*values, *pattern.biases)):
        return False
    leading = {shape[:2] for shape in shapes}
    if len(leading) > 1 or None in shapes[0][:2]:
        return False
    return all(
        _broadcasts(value, pattern.shape[:_RANK]) for value in (*pattern.biases, *(mask for mask, _ in pattern.masks))
    )


def _broadcasts(value: ir.Value, scores: Sequence[Dimension]) -> bool:
    """Whether a value broadcasts to the shape of the scores without giving them other sizes."""
    shape = dimensions(value)
    if shape is None or len(shape) > len(scores):
        return False
    return all(
        size == 1 or (isinstance(wanted, int) and wanted != 1) or (size is not None and size == wanted)
        for size, wanted in zip(reversed(shape), reversed(scores), strict=False)
    )


def _emit(op: Builder, pattern: _Pattern, named: set[str]) -> ir.Value:
    """The operator's node; its result is [B, S, H, E]."""
    q = transposed(op, pattern.q, _HEADS_SECOND, named)
    scale, scalars = pattern.scale.number, pattern.scale.scalars
    factor: Value | None = None
    if q.dtype == ir.DataType.DOUBLE and float(np.float32(scale)) != scale:  # attributes are of single precision
        scale, factor = 1.0, op.scalar(scale, q)
    for scalar, operator in scalars:
        one = op.scalar(1.0, q) if factor is None and operator == "Div" else factor
        factor = op.wrap(scalar) if one is None else op.binary(operator, one, op.wrap(scalar))
    if factor is not None:
        q = (q * factor).with_shape(q.shape)
    k = transposed(op, pattern.k, _TRANSPOSED_KEYS, named)
    v = transposed(op, pattern.v, _HEADS_SECOND, named)
    biases = [op.wrap(value) for value in pattern.biases]
    for mask, keep in pattern.masks:
        zero, infinite = op.scalar(0.0, q), op.scalar(-math.inf, q)
        biases.append(op.Where(op.wrap(mask), *((zero, infinite) if keep else (infinite, zero))))
    bias = biases[0] if biases else None
    for more in biases[1:]:
        bias = more if bias is None else bias + more
    op.import_domain(ONNXTRAIN_DOMAIN, VERSION)
    attributes = {"scale": scale, "zero_empty_rows": int(pattern.zero_empty_rows)}
    y, log_sum = op.several(OPERATOR, q, k, v, bias, outputs=2, domain=ONNXTRAIN_DOMAIN, **attributes)
    batch, heads, queries, _, features = pattern.shape
    y.with_shape((batch, queries, heads, features))
    log_sum.with_shape((batch, heads, queries))
    y.ir.dtype = log_sum.ir.dtype = q.dtype
    return y.ir


def _replace(op: Builder, pattern: _Pattern, result: ir.Value, named: set[str]) -> None:
    """Let the operator's result stand for y: directly where y is transposed to it, else through a Transpose."""
    graph, y = op.graph, pattern.y
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
        remove_unread(graph, [node, *_producers(source)], named)
    if y.uses() or is_needed(y, named):
        take_over(graph, {y: op.Transpose(op.wrap(result), perm=list(_HEADS_SECOND)).ir})
    remove_unread(graph, pattern.inside, named)


def _read_sizes_before_transposes(main: Builder, named: set[str]) -> None:
    """Where nothing but the shape of a transposed value is read any more, take it from the value as it was."""
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
