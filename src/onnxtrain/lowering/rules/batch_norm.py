"""Batch normalization: folded into convolutions, with the activation behind it, over processes, in other operators."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff.engine import Backward
from onnxtrain.autodiff.fused import VERSION, emit
from onnxtrain.autodiff.node import Node
from onnxtrain.autodiff.rules.fused_batch_norm import ACTIVATION, OPERATOR, normalizes_batches
from onnxtrain.errors import OptionError
from onnxtrain.graph import Builder, Value
from onnxtrain.graph.domains import ONNXTRAIN_DOMAIN
from onnxtrain.graph.patterns import match_alike
from onnxtrain.graph.replace import take_over
from onnxtrain.graph.value import attributes_of, constant_array, constant_number, dimensions
from onnxtrain.lowering.patterns import Match, Op, Optional, Pattern, Var, operators
from onnxtrain.lowering.rewrite import Rewrite, Rule, is_needed
from onnxtrain.lowering.training_info.recipe import SYNCHRONIZED_KEY

_EPSILON, _MOMENTUM = 1e-5, 0.9
"""Defaults of attributes of BatchNormalization."""

_STATISTICS = ("scale", "offset", "mean", "variance")


# Constant statistics


_FOLDED = Pattern(
    "convolution before frozen statistics",
    Op(
        "BatchNormalization",
        Op("Conv", Var("x"), Var("w"), Optional(Var("bias")), name="conv"),
        *map(Var, _STATISTICS),
        outputs=1,
        training_mode=(None, 0),
    ),
    {"BatchNormalization"},
)


def _folded(match: Match) -> tuple[np.ndarray, np.ndarray] | str:
    """Return the weights and the bias of the convolution that computes both."""
    y, named = match.y, match.context.named
    if y.dtype != ir.DataType.FLOAT:
        return f"its type is {y.dtype}"
    w, scale, offset, mean, variance = (_frozen(match[name], named) for name in ("w", *_STATISTICS))
    bias = match.get("bias")
    shift = np.float64(0) if bias is None else _frozen(bias, named)
    if w is None or scale is None or offset is None or mean is None or variance is None or shift is None:
        return "its weights or statistics are trained or given"
    if w.size > math.prod(size for size in (dimensions(y) or ())[1:] if isinstance(size, int)):
        return "a copy of the weights is larger than the result for one example"
    factor = scale / np.sqrt(variance + match.nodes[0].attributes.get_float("epsilon", _EPSILON))
    return w * factor.reshape(-1, *[1] * (w.ndim - 1)), (shift - mean) * factor + offset


def _frozen(value: ir.Value, named: Collection[str]) -> np.ndarray | None:
    """Return a constant in float64, if no gradient by it is asked for."""
    array = None if value.is_graph_input() or value.name in named else constant_array(value)
    return None if array is None else array.astype(np.float64)


def _emit_folded(op: Builder, match: Match) -> Value:
    weights, added = (op.constant(array, match.y.dtype) for array in match.found)
    attributes = attributes_of(match["conv"])
    return op.Conv(op.wrap(match["x"]), weights, added, **attributes)


fold_batch_norm = Rewrite(Rule(_FOLDED, _emit_folded, _folded))
"""Replace y = BatchNormalization(Conv(x)) of frozen layers by one convolution with other weights.

With f = scale / sqrt(variance + ε) the weights are w f and the bias is (b - mean) f + B, computed in float64. ONNX
Runtime does that itself, but not for weights that a session gets by address. The new weights are a copy, which each
session holds beside the file's.
"""


# Training mode, with the activation behind it. Each is a pass over memory forwards, and another in its gradient, and
# the normalized values are kept for the gradient of the activation. One node reads and writes once, and its gradient
# computes the normalized values again.

_SAME_NAME = frozenset({"HardSwish", "Relu"})


class _Behind(NamedTuple):
    """The nodes behind a normalization that the fused node computes, too."""

    nodes: tuple[ir.Node, ...] = ()  # the nodes, in order
    attributes: Mapping[str, str | float] = {}  # those of the fused node
    addend: ir.Value | None = None  # A residual, added before the activation


def _followed(match: Match) -> _Behind | str:
    """Return what the fused node computes behind the normalization."""
    (norm,), context = match.nodes, match.context
    if not normalizes_batches(norm) or context.model.metadata_props.get(SYNCHRONIZED_KEY) == "true":
        return "another pass computes its statistics, or the kernel does not"
    behind = _behind(norm, context.named)
    if not behind.nodes:
        return "nothing behind it is part of the kernel, or something else needs the normalized values"
    if _reads_running_statistics(norm, behind, context.places):
        return "a running statistic is read before the activation"
    if not match_alike(context.options.recompute, [node.name or "" for node in (norm, *behind.nodes)]):
        return "recompute= has patterns for some of its nodes and not for the others"
    return behind


def _emit_followed(_: Builder, match: Match) -> None:
    (norm,), behind = match.nodes, match.found
    op = match.context.main.before(behind.nodes[-1])
    given = [None if value is None else op.wrap(value) for value in (*norm.inputs[:5], behind.addend)]
    y, scale = behind.nodes[-1].outputs[0], given[1]
    assert scale is not None
    attributes = {name: attribute.value for name, attribute in norm.attributes.items() if name != "training_mode"}
    like = [op.wrap(y), scale, scale, None, None]
    made = emit(op, OPERATOR, *given, like=like, **attributes, **behind.attributes)
    op.emitted[-1].name = norm.name
    channels = (dimensions(scale.ir) or (None,))[0]
    for value in made[3:]:
        value.ir.dtype = scale.dtype
        value.with_shape((2, channels))
    old = [y, *norm.outputs[1:]]
    take_over(op.graph, {value: new.ir for value, new in zip(old, made, strict=False) if value.name})
    match.nodes = (*behind.nodes, norm)


def _behind(norm: ir.Node, named: Collection[str]) -> _Behind:
    """The nodes behind the normalized values, if nothing else needs these."""
    n = norm.outputs[0]
    if is_needed(n, named):
        return _Behind()
    readers = [reader for reader, _ in n.uses()]
    if len(readers) != 1 or readers[0].graph is not norm.graph or readers[0].domain:
        return _Behind()
    (node,) = readers
    if node.op_type in _SAME_NAME:
        return _Behind((node,), {ACTIVATION: node.op_type})
    if node.op_type == "Clip" and node.inputs[0] is n:
        return _clip(node)
    return _residual(n, node, named) if node.op_type == "Add" else _Behind()


def _clip(node: ir.Node) -> _Behind:
    """A Clip whose bounds are numbers of single precision, which attributes are."""
    bounds = {}
    for name, value in zip(("low", "high"), node.inputs[1:], strict=False):
        if value is None:
            continue
        number = constant_number(value)
        if number is None or float(np.float32(number)) != number:
            return _Behind()
        bounds[name] = number
    low, high = bounds.get("low", -np.inf), bounds.get("high", np.inf)
    return _Behind((node,), {ACTIVATION: "Clip", "low": low, "high": high}) if low <= high else _Behind()


def _residual(n: ir.Value, add: ir.Node, named: Collection[str]) -> _Behind:
    """The sum with a value of the same sizes, and Relu."""
    total, sizes = add.outputs[0], dimensions(n)
    other = add.inputs[1] if add.inputs[0] is n else add.inputs[0]
    if other is None or not sizes or dimensions(other) != sizes or None in sizes or other.dtype != n.dtype:
        return _Behind()
    readers = [reader for reader, _ in total.uses()]
    if len(readers) != 1 or readers[0].op_identifier() != ("", "Relu", "") or is_needed(total, named):
        return _Behind()
    return _Behind((add, readers[0]), {ACTIVATION: "Relu"}, other)


def _reads_running_statistics(norm: ir.Node, behind: _Behind, place: Mapping[ir.Node, int]) -> bool:
    """Return whether a node before the last one reads a running statistic that the normalization returns."""
    end = place[behind.nodes[-1]]
    return any(place.get(reader, -1) < end for output in norm.outputs[1:] for reader, _ in output.uses())


fuse_batch_norm = Rewrite(Rule(operators("batch normalization", "BatchNormalization"), _emit_followed, _followed))
"""Replace batch normalization in training mode, and what follows it, by one node of the domain ``onnxtrain``.

Behind it may be Relu, Clip by constants, or HardSwish; or the addition of a value of the same sizes and then Relu. The
new node is where the last of the old ones was, and has the name of the normalization.
"""


# Other providers


def _trains(match: Match) -> str | None:
    trains = match.nodes[0].attributes.get_int("training_mode", 0) == 1
    return None if trains else "it reads given statistics"


def _emit_written(op: Builder, match: Match) -> Sequence[Value]:
    (node,) = match.nodes
    x, scale, bias, mean, variance = (op.wrap(value) for value in node.inputs if value is not None)
    epsilon, momentum = _epsilon_and_momentum(node)
    if x.rank is None:
        raise OptionError(f"The rank of {x.ir.name!r} is not known; declare its shape in the model.")
    rank, column = x.rank, op.ints(*range(1, x.rank - 1))

    def per_channel(value: Value) -> Value:
        return op.Unsqueeze(value, column) if rank > 2 else value

    over = op.ints(0, *range(2, rank))
    centred = x - (batch_mean := op.ReduceMean(x, over, keepdims=1))
    batch_variance = op.ReduceMean(centred * centred, over, keepdims=1)
    y = centred * (per_channel(scale) * op.Reciprocal(op.Sqrt(batch_variance + epsilon))) + per_channel(bias)
    new = [y]
    for running, own in ((mean, batch_mean), (variance, batch_variance)):
        new.append(running * momentum + op.Reshape(own, op.ints(-1)) * (1 - momentum))
    return new


write_batch_norm = Rewrite(
    Rule(operators("batch normalization", "BatchNormalization"), _emit_written, _trains, everywhere=True)
)
"""Write every BatchNormalization in training mode in operators that every provider has.

(workarounds: statistics on WebGPU, statistics on CUDA)

With mean m and variance v of a channel over the batch: y = scale (x - m) / sqrt(v + epsilon) + bias, and each running
statistic r becomes momentum r + (1 - momentum) times that of the batch. An x of unknown rank is an ``OptionError``.
"""


# The statistics of all processes (SyncBatchNorm). The part of a batch in one process has n elements of a channel, with
# mean m and variance v. The sums of n, n m and n (v + m²) over the processes, in double precision, give the mean and
# the variance of the global batch, and so
#
#     forward:   y = scale x̂ + bias, x̂ = (x - mean) r, r = 1 / sqrt(variance + ε)
#     backward:  dx = scale r (dy - (Σ dy + x̂ Σ dy x̂) / Σ n)
#
# with Σ over all processes: one sum in the forward pass of a node, and one in the backward pass. The caller ensures
# that the losses of the processes add up, so that dy is the gradient of their sum.

_GRADIENT = "BatchNormalizationGradient"


class _GlobalStatistics(NamedTuple):
    """Statistics of the batch of all processes, in double precision: [C], [C] and [1]."""

    mean: Value
    variance: Value
    rows: Value


def synchronize_batch_norm(model: ir.Model, backward: Backward) -> None:
    """Let batch normalization in training mode, and its gradient, sum over all processes, in place.

    An entry of the model's metadata enables the pass; the pass removes it. ``AllReduce`` nodes block until all
    processes reach them, so all processes must run graphs with the same nodes in the same order.

    Requires: a sorted graph whose nodes have types, in which BatchNormalizationGradient nodes are not resolved.
    Ensures: a sorted graph.
    """
    if model.metadata_props.pop(SYNCHRONIZED_KEY, "false") != "true":
        return
    known: dict[ir.Value, _GlobalStatistics] = {}

    def normalize(op: Builder, match: Match) -> Sequence[Value]:
        view = Node(match.nodes[0], op)
        results, known[view.x.ir] = _normalize(view)
        return results

    def statistics(match: Match) -> _GlobalStatistics | str:
        _, x, *others = match.nodes[0].inputs
        found = known.get(x) if x is not None and len(others) < 2 else None
        return found or "its statistics are those of one process"

    Rewrite(Rule(operators("batch_norm", "BatchNormalization"), normalize, _trains))(model)
    Rewrite(Rule(operators(_GRADIENT, _GRADIENT, domain=ONNXTRAIN_DOMAIN), _differentiate, statistics))(model, backward)


def _epsilon_and_momentum(node: ir.Node) -> tuple[float, float]:
    return node.attributes.get_float("epsilon", _EPSILON), node.attributes.get_float("momentum", _MOMENTUM)


def _normalize(view: Node) -> tuple[Sequence[Value], _GlobalStatistics]:
    """Emit nodes that normalize over all processes; return the results and the statistics."""
    op = view.op
    op.import_domain(ONNXTRAIN_DOMAIN, VERSION)
    epsilon, momentum = _epsilon_and_momentum(view.ir)
    x, scale, bias, mean, variance = (view.input_required(index) for index in range(5))
    zeros, ones = op.zeros_like(mean), op.ones_like(mean)
    # With a momentum of 0 the running statistics that come out are those of x.
    inputs = (x, scale, bias, zeros, ones)
    _, own_mean, own_variance = op.several(
        "BatchNormalization", *inputs, outputs=3, training_mode=1, momentum=0.0, epsilon=epsilon
    )
    for value in (own_mean, own_variance):
        value.ir.dtype = mean.dtype
        value.with_shape(mean.shape)
    m, v = (op.cast(value, ir.DataType.DOUBLE) for value in (own_mean, own_variance))
    n = op.cast(op.Size(x), ir.DataType.DOUBLE) / op.cast(op.Size(scale), ir.DataType.DOUBLE)
    sizes = op.Concat(op.ints(1), op.shape_of(scale), op.shape_of(scale), axis=0)
    count, first, second = _all_reduced(op, [op.reshape(n, [1]), n * m, n * (v + m * m)], sizes)
    global_mean = (first / count).with_shape(mean.shape)
    spread = second / count - global_mean * global_mean
    global_variance = op.Max(spread, op.scalar(0.0, spread)).with_shape(mean.shape)
    new_mean, new_variance = op.cast(global_mean, mean.dtype), op.cast(global_variance, mean.dtype)
    y = op.BatchNormalization(x, scale, bias, new_mean, new_variance, epsilon=epsilon)
    results = (y, mean * momentum + new_mean * (1 - momentum), variance * momentum + new_variance * (1 - momentum))
    return results, _GlobalStatistics(global_mean, global_variance, count)


def _differentiate(op: Builder, match: Match) -> Sequence[Value]:
    """Emit the gradient by the statistics of all processes."""
    view = Node(match.nodes[0], op)
    epsilon, _ = _epsilon_and_momentum(view.ir)
    dy, x, scale = (view.input_required(index) for index in range(3))
    mean, variance, count = (op.wrap(value.ir) for value in match.found)
    single = [op.cast(value, scale.dtype).with_shape(scale.shape) for value in (mean, variance)]
    inputs = (dy, x, scale, *single)
    alone, dscale, dbias = emit(op, _GRADIENT, *inputs, like=[x, scale, scale], epsilon=epsilon)
    sums = [op.cast(value, ir.DataType.DOUBLE) for value in (dscale, dbias)]
    of_scale, of_bias = _all_reduced(op, sums, op.Concat(op.shape_of(scale), op.shape_of(scale), axis=0))
    inverse = op.Reciprocal(op.Sqrt(variance + epsilon))
    factor = op.cast(scale, ir.DataType.DOUBLE) * inverse / count
    slope, level = (op.cast(factor * value, scale.dtype).with_shape(scale.shape) for value in (of_scale, of_bias))
    through = op.BatchNormalization(x, slope, level, *single, epsilon=epsilon)  # slope x̂ + level
    return (alone - through).with_shape(x.shape), dscale, dbias


def _all_reduced(op: Builder, terms: list[Value], sizes: Value) -> tuple[Value, ...]:
    """Return the sums of vectors over all processes, in one message."""
    joined = op.Concat(*terms, axis=0)
    joined.ir.dtype = ir.DataType.DOUBLE
    total = op.AllReduce(joined.with_shape((None,)), domain=ONNXTRAIN_DOMAIN)
    total.ir.dtype = ir.DataType.DOUBLE
    parts = op.several("Split", total.with_shape((None,)), sizes, outputs=len(terms), axis=0)
    for part in parts:
        part.ir.dtype = ir.DataType.DOUBLE
    return parts
