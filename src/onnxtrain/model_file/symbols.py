"""Names of sizes that an inference has written into a file, where they say nothing any more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from onnx import GraphProto, TensorShapeProto, ValueInfoProto

from onnxtrain.model_file.skeleton import proto_subgraphs

_MADE_UP = "unk__"
"""Prefix of the symbols that ONNX's shape inference invents for unknown sizes."""


def forget_made_up_symbols(graph: GraphProto) -> None:
    """Forget the symbols that inference made up, in place.

    Models are joined and cut, so that two axes of one such symbol need not be equal. A symbol of which the graph's
    inputs have a single axis stays there; what follows from it is found out again.
    """
    if _MADE_UP.encode() not in graph.SerializeToString():  # going through all shapes takes long
        return
    inputs = [axis for info in graph.input for axis in _axes(info)]
    counts = Counter(axis.dim_param for axis in inputs)
    kept = {id(axis) for axis in inputs if counts[axis.dim_param] == 1}
    for axis in [*inputs, *_axes_inside(graph)]:
        if id(axis) not in kept and axis.dim_param.startswith(_MADE_UP):
            axis.ClearField("dim_param")


def _axes_inside(graph: GraphProto) -> Iterator[TensorShapeProto.Dimension]:
    for info in (*graph.value_info, *graph.output):
        yield from _axes(info)
    for node in graph.node:
        for body in proto_subgraphs(node):
            for info in body.input:
                yield from _axes(info)
            yield from _axes_inside(body)


def _axes(info: ValueInfoProto) -> list[TensorShapeProto.Dimension]:
    """The axes of a tensor, of the items of a sequence or of what may be missing."""
    kind = info.type
    while kind.WhichOneof("value") in ("sequence_type", "optional_type"):
        kind = getattr(kind, kind.WhichOneof("value")).elem_type
    return list(kind.tensor_type.shape.dim)
