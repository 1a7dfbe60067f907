"""ONNX's shape inference with data propagation, guarded against three of its bugs.

Data propagation records the elements of every vector, fifty bytes each, even of vectors that hold no sizes. With a
batch size of 2**40 in a model it needs more memory than any machine has (workarounds: long vectors). It treats
computed bounds of a Slice as absent (workarounds: computed bounds), and an STFT as two-sided where it does not say
(workarounds: bins of STFT).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping
from typing import Final

import numpy as np
import onnx
import onnx.shape_inference
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, numpy_helper

from onnxtrain.errors import ModelError

LONGEST = 1 << 20
"""Length of the longest vector that data propagation may follow, far above the rank of any tensor."""

_DOUBLINGS = LONGEST.bit_length() // 2
"""Number of Concat nodes below which no short vector becomes too long, even if each node doubles it."""

_HIDDEN = "onnxtrain.hidden"
"""A domain unknown to ONNX's inference, which skips its operators."""


def infer_within_bounds(proto: ModelProto) -> ModelProto:
    """Infer types and shapes by ONNX with data propagation, without following vectors that are too long."""
    hide_computed_slices(proto.graph)
    for node in proto.graph.node:
        if node.op_type == "STFT" and not node.domain and not node.attribute:  # workarounds: bins of STFT
            node.attribute.append(onnx.helper.make_attribute("onesided", 1))
    try:
        if _has_large_sizes(proto.graph) or _large_makers(proto.graph):
            proto = onnx.shape_inference.infer_shapes(proto)
            makers = _large_makers(proto.graph)
            for node in makers:
                node.domain = _HIDDEN
            if _hide_readers(proto.graph, set()) or makers:
                proto.opset_import.add(domain=_HIDDEN, version=1)
        return onnx.shape_inference.infer_shapes(proto, data_prop=True)
    except onnx.shape_inference.InferenceError as error:
        reason = " ".join(str(error).split())[:300].rstrip(". ")
        raise ModelError(
            f"The model declares types or shapes that contradict what its nodes give: {reason}; export it again."
        ).about(got=reason) from error


_OF_SIZES: Final = frozenset({"Concat", "Cast", "Identity", "Slice", "Add", "Sub", "Mul", "Div", "Max", "Min", "Neg"})


def hide_computed_slices(graph: GraphProto) -> None:
    """Replace Slice nodes of sizes whose bounds are computed by Compress, in place: same types, no propagation."""
    known = {tensor.name for tensor in graph.initializer}
    known |= {node.output[0] for node in graph.node if node.op_type == "Constant"}
    # Vectors of sizes are propagated; the rank of one may not be declared yet.
    integers: set[str] = set()
    for node in graph.node:
        read = node.input[:1] if node.op_type == "Slice" else node.input  # bounds are sizes of any sliced tensor
        if node.op_type == "Shape" or (node.op_type in _OF_SIZES and any(name in integers for name in read)):
            integers.add(node.output[0])
    ranks = {info.name: len(info.type.tensor_type.shape.dim) for info in (*graph.value_info, *graph.input)}
    ranks.update((tensor.name, len(tensor.dims)) for tensor in graph.initializer)
    for node in graph.node:
        if node.op_type == "Slice" and any(name and name not in known for name in node.input[1:]):
            if ranks.get(node.input[0]) != 1 and node.input[0] not in integers:
                continue
            condition = node.input[1]
            del node.input[1:]
            node.input.append(condition)
            node.op_type = "Compress"
            node.attribute.append(onnx.helper.make_attribute("axis", 0))


def _has_large_sizes(graph: GraphProto) -> bool:
    """Return whether vectors may be too long: a tensor is as large, or holds numbers from which large sizes follow."""
    for info in _infos(graph):
        if math.prod(dim.dim_value for dim in info.type.tensor_type.shape.dim if dim.dim_value > 1) > LONGEST:
            return True
    floats = any(node.domain or node.op_type in _READING_FLOATS for node in graph.node)
    kinds = _NUMERIC if floats else _INTEGERS
    if any(_holds_large_sizes(tensor, kinds) for tensor in _tensors(graph)):
        return True
    if sum(node.op_type == "Concat" for node in graph.node) >= _DOUBLINGS:
        return True
    if any(_is_large(attribute) for node in graph.node for attribute in node.attribute):
        return True
    return any(_has_large_sizes(body) for node in graph.node for body in _bodies(node))


def _is_large(attribute: onnx.AttributeProto) -> bool:
    """Return whether an attribute holds a value too large to be a size, other than the open end of a Slice."""
    numbers = (attribute.i,) if attribute.type == onnx.AttributeProto.INT else _numbers(attribute)  # most are one
    return any(number > LONGEST and number not in (_END, _END_32) for number in numbers)


def _numbers(attribute: onnx.AttributeProto) -> Iterator[float]:
    yield from (attribute.i, attribute.f)
    yield from attribute.ints
    yield from attribute.floats


def _tensors(graph: GraphProto) -> Iterator[TensorProto]:
    yield from graph.initializer
    for node in graph.node:
        if node.op_type in ("Constant", "ConstantOfShape"):
            yield from (attribute.t for attribute in node.attribute if attribute.HasField("t"))


def _holds_large_sizes(tensor: TensorProto, kinds: Collection[int]) -> bool:
    if math.prod(tensor.dims) > LONGEST:
        return True
    if tensor.data_type not in kinds or tensor.data_location == TensorProto.EXTERNAL:
        return False
    numbers = numpy_helper.to_array(tensor)
    large = numbers > LONGEST
    return bool(large.any()) and bool(np.any(large & (numbers != _END) & (numbers != _END_32)))


_INTEGERS = (TensorProto.INT64, TensorProto.INT32)
_NUMERIC = (*_INTEGERS, TensorProto.FLOAT, TensorProto.DOUBLE)
"""Element types of sizes, and of the scales and bounds from which sizes follow."""


_END, _END_32 = (np.iinfo(dtype).max for dtype in (np.int64, np.int32))
"""Exporters write these as the end of a slice that goes on to the last element."""


def _hide_readers(graph: GraphProto, outside: set[str]) -> bool:
    """Hide the nodes that read vectors that are too long; the shapes of their outputs are known by now."""
    long = outside | {
        info.name
        for info in _infos(graph)
        if len(info.type.tensor_type.shape.dim) == 1 and info.type.tensor_type.shape.dim[0].dim_value > LONGEST
    }
    hidden = False
    for node in graph.node:
        if long and any(name in long for name in node.input):
            node.domain, hidden = _HIDDEN, True
        for body in _bodies(node):
            hidden = _hide_readers(body, long) or hidden
    return hidden


_SIZES: Final = {"ConstantOfShape": 0, "Expand": 1, "Reshape": 1}
"""Operators that read the sizes of their output, and the input that holds them."""

_KEEPING: Final = frozenset(("Cast", "Gather", "Identity", "Reshape", "Slice", "Squeeze", "Unsqueeze"))
"""Operators whose output holds elements of their first input."""

_FOLLOWED: Final = _KEEPING | {"Add", "Concat", "Constant", "Mul", "Shape", "Size", "Sub", *_SIZES}
_WITH_BODIES: Final = frozenset(("If", "Loop", "Scan", "SequenceMap"))

_READING_FLOATS: Final = _WITH_BODIES | {"Cast", "CastLike", "Range", "Resize", "Upsample"}
"""Operators that compute sizes from floats, themselves or in their bodies; any function, which has a domain, may."""


def _large_makers(graph: GraphProto, outside: _Bounds | None = None, around: float = 1.0) -> list[NodeProto]:
    """The nodes that make a vector of a computed size that may be too long."""
    bounds = _Bounds({tensor.name: tensor for tensor in graph.initializer}, outside)
    largest, found = 0.0, []
    for node in graph.node:
        operator = node.op_type
        if operator not in _FOLLOWED:
            if operator in _WITH_BODIES:
                largest = largest or _largest_size(graph, around)
                for body in _bodies(node):
                    found += _large_makers(body, bounds, largest)
            continue
        read = [bounds[name] for name in node.input]
        bound = 0.0
        if operator == "Constant":
            bound = max(map(_bound_of_constant, node.attribute), default=0.0)
        elif operator == "Shape":
            bound = largest = largest or _largest_size(graph, around)
        elif operator == "Size":
            bound = math.inf
        elif operator in ("Add", "Sub"):
            bound = sum(read)
        elif operator == "Mul":
            bound = math.prod(read)
        elif operator == "Concat":
            bound = max(read, default=0.0)
        elif operator in _KEEPING and read:
            bound = read[0]
        if bound:
            bounds.update(dict.fromkeys(node.output, bound))
        at = _SIZES.get(operator, len(read))
        if at < len(read) and read[at]:
            if read[at] > LONGEST and not _has_several_sizes(graph, node.input[at]):
                found.append(node)
            largest = max(largest or _largest_size(graph, around), min(read[at], LONGEST))
    return found


class _Bounds(dict[str, float]):
    """The largest number of each value, computed on first use; 0 where nothing is known."""

    def __init__(self, tensors: Mapping[str, TensorProto], outside: _Bounds | None) -> None:
        super().__init__()
        self._tensors, self._outside = tensors, outside

    def __missing__(self, name: str) -> float:
        if name in self._tensors:
            found = _bound(self._tensors[name])
        else:
            found = 0.0 if self._outside is None else self._outside[name]
        self[name] = found
        return found


def _infos(graph: GraphProto) -> Iterator[onnx.ValueInfoProto]:
    yield from (*graph.input, *graph.output, *graph.value_info)


def _largest_size(graph: GraphProto, around: float) -> float:
    """The largest size of an axis that a graph, or its surroundings, states."""
    declared = (dim.dim_value for info in _infos(graph) for dim in info.type.tensor_type.shape.dim)
    stored = (size for tensor in _tensors(graph) for size in tensor.dims)
    return float(max(itertools.chain((around,), declared, stored)))


def _has_several_sizes(graph: GraphProto, name: str) -> bool:
    """Return whether a value holds the sizes of several axes, so that a tensor of these sizes is no vector."""
    return any(
        dim.dim_value > 1 for info in _infos(graph) if info.name == name for dim in info.type.tensor_type.shape.dim
    )


def _bound(tensor: TensorProto) -> float:
    """The largest number of a tensor that may hold sizes."""
    if tensor.data_type not in _NUMERIC or tensor.data_location == TensorProto.EXTERNAL:
        return 0.0
    if math.prod(tensor.dims) > LONGEST:
        return math.inf
    if tensor.data_type == TensorProto.INT64 and len(tensor.raw_data) == _BYTES:  # most hold one number
        return float(abs(int.from_bytes(tensor.raw_data, "little", signed=True)))
    return float(np.max(np.abs(numpy_helper.to_array(tensor).astype(np.float64)), initial=0.0))


_BYTES = 8
"""Bytes of a 64-bit integer."""


def _bound_of_constant(attribute: onnx.AttributeProto) -> float:
    return _bound(attribute.t) if attribute.HasField("t") else max(map(abs, _numbers(attribute)), default=0.0)


def _bodies(node: NodeProto) -> Iterator[GraphProto]:
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            yield attribute.g
        yield from attribute.graphs
