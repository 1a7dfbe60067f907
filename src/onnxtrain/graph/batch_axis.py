"""Follow the batch axis from the inputs of a graph through its nodes: by their meaning, not by the sizes of axes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import onnx_ir as ir

from onnxtrain.graph.clone import subgraphs
from onnxtrain.graph.domains import MACHINE_LEARNING_DOMAIN, MICROSOFT_DOMAIN, is_default_domain
from onnxtrain.graph.inference import DECLARED, integer, is_elementwise, slice_bounds
from onnxtrain.graph.layers import reads_transposed
from onnxtrain.graph.sizes import Product, factors, is_made_up, over, times
from onnxtrain.graph.value import TIME_FIRST, Dimension, constant_ints, dimensions, input_of, order_of

ONE: Product = (1, ())


_TIME = re.compile(r"[tsl]|time\w*|\w*seq\w*|\w*len(gth)?|\w*(step|frame|token)s?", re.IGNORECASE)
"""Names of axes of time."""

_BATCH = re.compile(r"[nb]|bs|\w*batch\w*|\w*examples?", re.IGNORECASE)
"""Names of axes of examples."""


def named_time_first(value: ir.Value) -> list[str] | None:
    """Return the names of the first two axes where they are those of time and of examples, in this order."""
    names = [size if isinstance(size, str) else "" for size in (dimensions(value) or ())[:2]]
    return names if len(names) > 1 and _TIME.fullmatch(names[0]) and _BATCH.fullmatch(names[1]) else None


class BatchAxis(NamedTuple):
    """The batch axis of a value."""

    axis: int
    before: Product = ONE


class BatchAxes(dict[ir.Value, BatchAxis]):
    """The batch axes of values; a value without one, or with an unknown one, is absent."""

    def __init__(self, given: dict[ir.Value, BatchAxis], size: Dimension) -> None:
        super().__init__(given)
        self.size = size

    @classmethod
    def of_inputs(cls, graph: ir.Graph, size: Dimension) -> BatchAxes:
        """Begin with the inputs whose first axis has the batch size; any unknown one, where the size is no number.

        An input with time first begins with the axis that was found for it.
        """
        fixed = isinstance(size, int)
        inputs = [(value, dimensions(value)) for value in graph.inputs if value.name not in graph.initializers]
        given = {
            v: BatchAxis(0)
            for v, shape in inputs
            if shape and (shape[0] == size or not (fixed or _is_int(shape[0]))) and TIME_FIRST not in v.meta
        }
        found = {v: v.meta[TIME_FIRST][1] for v in graph.inputs if TIME_FIRST in v.meta}
        given |= {v: BatchAxis(axis) for v, axis in found.items() if axis is not None}
        return cls(given, size)

    def follow(self, nodes: Iterable[ir.Node]) -> BatchAxes:
        """Find the batch axes of the outputs of nodes in topological order, and of the values in their bodies."""
        for node in nodes:
            for output, found in zip(node.outputs, self.of_outputs(node), strict=True):
                if found is not None:
                    self[output] = found
        return self

    def of_outputs(self, node: ir.Node) -> list[BatchAxis | None]:
        """Return the batch axis of each output of a node."""
        bodies = list(subgraphs(node))
        if bodies and is_default_domain(node.domain):
            return self._of_bodies(node, bodies)
        return [self._of_output(node, index) for index in range(len(node.outputs))]

    def _of_output(self, node: ir.Node, index: int) -> BatchAxis | None:
        after = dimensions(node.outputs[index])
        for slot, value in enumerate(node.inputs):
            if value is None or value not in self:
                continue
            source, before = self[value], dimensions(value)
            if before is None:
                continue
            if node.op_type in RESHAPING and is_default_domain(node.domain):
                found = None if slot or after is None else _reshaped(before, after, source, self.size)
            else:
                axis = _axis(node, slot, index, source.axis, len(before))
                found = None if axis is None else BatchAxis(axis, source.before)
                if found is not None and source.before == ONE and after is not None and not self._fits(after, axis):
                    found = None
            if found is not None:
                return found
        return None

    def _fits(self, shape: Sequence[Dimension], axis: int | None) -> bool:
        """Return whether an axis can hold the batch, whose size a Slice or a Concat along it changes."""
        if axis is None or not 0 <= axis < len(shape):
            return False
        found = shape[axis]
        return not (_is_int(found) and _is_int(self.size)) or found % self.size == 0  # type: ignore[operator]

    def _of_bodies(self, node: ir.Node, bodies: Sequence[ir.Graph]) -> list[BatchAxis | None]:
        """Follow into the bodies of If, Loop and Scan."""
        if node.op_type == "If":
            for body in bodies:
                self.follow(body)
            found = [{self.get(body.outputs[index]) for body in bodies} - {None} for index in range(len(node.outputs))]
            return [axes.pop() if len(axes) == 1 else None for axes in found]
        (body,) = bodies[:1]
        first = 2 if node.op_type == "Loop" else 0
        scanned = 0 if node.op_type == "Loop" else integer(node, "num_scan_inputs", 0)
        states = len(node.inputs) - first - scanned
        for slot, (outer, inner) in enumerate(zip(node.inputs, body.inputs, strict=False)):
            if outer is not None and outer in self and slot >= first:
                axis = self[outer].axis
                along = _listed(node, "scan_input_axes", slot - first - states, len(dimensions(outer) or ()))
                if slot < first + states:
                    self[inner] = self[outer]
                elif axis != along:
                    self[inner] = BatchAxis(axis - (axis > along), self[outer].before)
        self.follow(body)
        results = body.outputs[1:] if node.op_type == "Loop" else body.outputs
        made: list[BatchAxis | None] = []
        for index, inner_result in enumerate(results):
            found_inside = self.get(inner_result)
            if found_inside is not None and index >= states:
                along = _listed(node, "scan_output_axes", index - states, len(dimensions(inner_result) or ()) + 1)
                found_inside = BatchAxis(found_inside.axis + (found_inside.axis >= along), found_inside.before)
            made.append(found_inside)
        return made[: len(node.outputs)] + [None] * (len(node.outputs) - len(made))


def _is_int(size: Dimension) -> bool:
    return isinstance(size, int)


def _listed(node: ir.Node, name: str, index: int, rank: int) -> int:
    """Return an axis that an attribute of Scan lists; 0 by default."""
    axes = node.attributes.get_ints(name, ())
    return axes[index] % max(rank, 1) if 0 <= index < len(axes) else 0


def _product(sizes: Iterable[Dimension]) -> Product | None:
    return times(*(None if is_made_up(size) else factors(size) for size in sizes))


def _reshaped(
    before: Sequence[Dimension], after: Sequence[Dimension], source: BatchAxis, size: Dimension
) -> BatchAxis | None:
    """Return the batch axis behind a Reshape: the axes before it have as many elements as before."""
    earlier = _product(before[: source.axis])
    if earlier is None:
        return None
    outer, passed = times(earlier, source.before), times()
    sizes = [_product([size]) for size in after]
    total, known = _product(before), _product(size for size in after if _product([size]) is not None)
    if sizes.count(None) == 1 and total is not None and known is not None:
        sizes[sizes.index(None)] = over(total, known)
    for axis, own in enumerate(sizes):
        rest = over(outer, passed)
        if rest is None:
            return None
        if rest == ONE and (own != ONE or size == 1):
            return BatchAxis(axis)
        if own is None:
            return None
        merged = None if rest == ONE else over(own, rest)
        following = sizes[axis + 1] if axis + 1 < len(sizes) else None
        if merged is not None and (merged != ONE or (size == 1 and following != ONE)):
            return BatchAxis(axis, rest)  # merged with the axes before it
        passed = times(passed, own)
    return None


_Rule = Callable[[ir.Node, int, int, int, int], int | None]
"""From a node, the slot and the axis and the rank of an input, the index of an output and its rank, to its axis."""

_DATA_INPUTS = {
    "Attention": 3, "MultiHeadAttention": 3, "GroupQueryAttention": 3, "SkipLayerNormalization": 2,
    "SkipSimplifiedLayerNormalization": 2, "GridSample": 2,
}  # fmt: skip
"""Operators with several inputs of examples, and their number; others have one."""

RECURRENT = frozenset({"LSTM", "GRU", "RNN", "DynamicQuantizeLSTM"})
"""Operators that step along axis 0 of their first input and have the batch on axis 1; with layout=1 the reverse."""

RESHAPING = frozenset({"Reshape", "Flatten"})
"""Operators that may merge and split axes."""

_WITHOUT = frozenset(
    {"Shape", "Size", "NonZero", "Unique", "Compress", "NonMaxSuppression", "ConstantOfShape", "Range"}
)
"""Operators whose results have no batch axis."""

_KEEPING_FIRST = frozenset({"SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss", "STFT", "EmbedLayerNormalization"})
"""Operators with examples first before and after, whatever becomes of the other axes."""


def _axis(node: ir.Node, slot: int, index: int, axis: int, rank: int) -> int | None:
    """Return the batch axis of an output, given that of one input."""
    operator, shape = node.op_type, dimensions(node.outputs[index])
    own = None if shape is None else len(shape)
    if operator in _WITHOUT and is_default_domain(node.domain):
        return None
    if node.domain in ("", MICROSOFT_DOMAIN):
        rule = _RULES.get(operator)
        if rule is not None:
            return rule(node, slot, axis, rank, index)
        if is_elementwise(operator) or operator in ("PRelu", "Expand"):
            if slot and operator == "Expand":
                return None
            return axis if own is None else axis + own - rank  # broadcasting aligns the last axes
        if operator.startswith(("Reduce", "Arg")) or operator in ("Squeeze", "Unsqueeze"):
            return _moved(node, axis, rank, rank if own is None else own)
    if slot >= _DATA_INPUTS.get(operator, 1):
        return None
    if operator in _KEEPING_FIRST or node.domain == MACHINE_LEARNING_DOMAIN:
        return 0 if axis == 0 and own != 0 else None
    return axis if own in (None, rank) else None


def _moved(node: ir.Node, axis: int, rank: int, own: int) -> int | None:
    """Return an axis behind operators that add or remove axes: Squeeze, Unsqueeze, reductions."""
    given = node.attributes.get("axes") or node.attributes.get("axis")
    listed: list[int] | None
    if given is not None:
        listed = [given.as_int()] if given.type == ir.AttributeType.INT else list(given.as_ints())
    elif node.op_type.startswith("Arg"):
        listed = [0]
    else:
        listed = constant_ints(input_of(node, 1))
    if node.op_type == "Unsqueeze":
        new = sorted(added % (rank + len(listed)) for added in listed) if listed is not None else []
        for added in new:
            axis += added <= axis
        return axis
    if listed is None:  # all axes, or those of size 1
        return axis if own == rank else None
    gone = {removed % rank for removed in listed}
    if axis in gone:
        return None
    return axis if own == rank else axis - sum(removed < axis for removed in gone)


def _transpose(node: ir.Node, slot: int, axis: int, rank: int, index: int) -> int | None:
    return order_of(node, rank).index(axis)


def _recurrent(node: ir.Node, slot: int, axis: int, rank: int, index: int) -> int | None:
    batch_first = integer(node, "layout", 0) == 1
    if slot not in (0, 5, 6) or axis != (0 if batch_first else 1):
        return None
    return 0 if batch_first else (2 if index == 0 else 1)


def _gather(node: ir.Node, slot: int, axis: int, rank: int, index: int) -> int | None:
    data, indices = (dimensions(value) for value in node.inputs[:2])
    if data is None or indices is None or slot > 1:
        return None
    gathered = integer(node, "axis", 0) % max(len(data), 1)
    if slot == 1:
        return gathered + axis
    if axis == gathered:
        return None
    return axis if axis < gathered else axis + len(indices) - 1


def _gather_nd(node: ir.Node, slot: int, axis: int, rank: int, index: int) -> int | None:
    batched = integer(node, "batch_dims", 0)
    return axis if (slot == 1 and axis < rank - 1) or (slot == 0 and axis < batched) else None


def _matmul(node: ir.Node, slot: int, axis: int, rank: int, index: int) -> int | None:
    shape = dimensions(node.outputs[index])
    others = [dimensions(value) for value in node.inputs[:2] if value is not None]
    if slot > 1 or rank < 2 or any(other is not None and len(other) < 2 for other in others):
        return axis if slot == 0 and axis < rank - 1 else None
    turned = reads_transposed(node, slot)
    if axis >= rank - 2 and axis != (rank - 2 if (slot == 0) != turned else rank - 1):
        return None  # the axis that is summed up
    new = max(len(other or ()) for other in others) if shape is None else len(shape)
    return new - (2 if slot == 0 else 1) if axis >= rank - 2 else axis + new - rank


def _gemm(node: ir.Node, slot: int, axis: int, rank: int, index: int) -> int | None:
    return axis + 2 - rank if slot == 2 else _matmul(node, slot, axis, rank, index)


def _concat(node: ir.Node, slot: int, axis: int, rank: int, index: int) -> int | None:
    return None if integer(node, "axis", 0) % rank == axis else axis


def _slice(node: ir.Node, slot: int, axis: int, rank: int, index: int) -> int | None:
    before, after = dimensions(node.inputs[0]), dimensions(node.outputs[0])
    if slot or before is None:
        return None
    if after is not None and _is_int(before[axis]):
        return axis if after[axis] == before[axis] else None
    cut = (slice_bounds(node, DECLARED, rank) or {}).get(axis, slice(0, LARGEST, 1))
    return axis if cut.start == 0 and cut.step == 1 and cut.stop >= LARGEST else None


LARGEST = 2**31 - 1
"""Exporters write this, or more, as the end of a slice that goes on to the last element."""


def _one_hot(node: ir.Node, slot: int, axis: int, rank: int, index: int) -> int | None:
    return axis + (integer(node, "axis", -1) % (rank + 1) <= axis) if slot == 0 else None


def _scatter(node: ir.Node, slot: int, axis: int, rank: int, index: int) -> int | None:
    return axis if slot == 0 else None


def _einsum(node: ir.Node, slot: int, axis: int, rank: int, index: int) -> int | None:
    equation = node.attributes["equation"].as_string().replace(" ", "")
    terms, _, result = equation.partition("->")
    if "." in equation or not result:
        return None
    return result.find(terms.split(",")[slot][axis]) if terms.split(",")[slot][axis] in result else None


_RULES: dict[str, _Rule] = {
    "Transpose": _transpose,
    **dict.fromkeys(RECURRENT, _recurrent),
    **dict.fromkeys(("Gather", "GatherBlockQuantized"), _gather),
    "GatherND": _gather_nd,
    **dict.fromkeys(("MatMul", "FusedMatMul"), _matmul),
    **dict.fromkeys(("Gemm", "FusedGemm"), _gemm),
    "Concat": _concat,
    "Slice": _slice,
    "OneHot": _one_hot,
    "Einsum": _einsum,
    **dict.fromkeys(("ScatterND", "ScatterElements", "Scatter"), _scatter),
}
