"""Keep images padded between sparse convolutions, so that none copies its input to pad it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import onnx
from onnx import helper, numpy_helper

from onnxtrain.ir.domains import ONNXTRAIN_DOMAIN
from onnxtrain.sparse.functions import CONV, function
from onnxtrain.sparse.layers import attributes, names_in_subgraphs, unused

Pads = tuple[int, ...]
"""Sizes before the spatial axes, then behind them, as in Conv."""


def with_padded_images(proto: onnx.ModelProto, opset: int) -> onnx.ModelProto | None:
    """Return the model with results of sparse convolutions written with the padding that their readers need.

    Only sparse convolutions read such a result. ``None`` if there is none.

    Args:
        proto: A model whose nodes of the operator ``SparseConv`` pad no result; it is not changed.
        opset: Its opset.
    """
    made = onnx.ModelProto()
    made.CopyFrom(proto)
    graph = made.graph
    layers = [node for node in graph.node if node.domain == ONNXTRAIN_DOMAIN and node.op_type == CONV]
    found = _pads(graph, layers)
    if not found:
        return None
    for node in layers:
        given = attributes(node)
        none = (0,) * len(given["pads"])
        x, y, residual = node.input[0], node.output[0], node.input[4]
        inner = [pad - padded for pad, padded in zip(given["pads"], found.get(x, none), strict=True)]
        _set(node, pads=inner, y_pads=found.get(y, none), residual_pads=found.get(residual, none))
    _widen_no_residual(graph, layers)
    kept = [entry for entry in made.functions if (entry.domain, entry.name) != (ONNXTRAIN_DOMAIN, CONV)]
    del made.functions[:]
    made.functions.extend([*kept, function(CONV, opset, padded=True)])
    for value in graph.value_info:
        for axis, size in enumerate(_sums(found.get(value.name, ()))):
            dim = value.type.tensor_type.shape.dim[2 + axis]
            if dim.HasField("dim_value"):
                dim.dim_value += size
            elif size:
                dim.Clear()
    return made


def _pads(graph: onnx.GraphProto, layers: Iterable[onnx.NodeProto]) -> dict[str, Pads]:
    """Return the padding of each result that gets one."""
    own = {id(node) for node in layers}
    others = {value.name for value in graph.output}
    others |= {name for node in graph.node if id(node) not in own for name in node.input}
    others |= {name for node in graph.node for name in names_in_subgraphs(node)}
    results = {node.output[0] for node in layers} - others
    found: dict[str, Pads] = {}
    for y in results:
        readers = [attributes(node) for node in layers if node.input[0] == y]
        pads = tuple(min(sizes) for sizes in zip(*(given["pads"] for given in readers), strict=True))
        # A convolution with strides copies its input in any case, to read it in steps.
        direct = any(tuple(given["pads"]) == pads and set(given["strides"]) == {1} for given in readers)
        if any(pads) and direct:
            found[y] = pads
    for node in layers:
        residual, pads = node.input[4], found.get(node.output[0])
        if pads and residual in results - set(found) and all(reader.input[0] != residual for reader in layers):
            found[residual] = pads  # rows as long as those of the result that it is added to
    return found


def _sums(pads: Pads) -> list[int]:
    return [before + behind for before, behind in zip(pads[: len(pads) // 2], pads[len(pads) // 2 :], strict=True)]


def _set(node: onnx.NodeProto, **changed: Iterable[int]) -> None:
    kept = [attribute for attribute in node.attribute if attribute.name not in changed]
    del node.attribute[:]
    node.attribute.extend([*kept, *(helper.make_attribute(name, list(value)) for name, value in changed.items())])


def _widen_no_residual(graph: onnx.GraphProto, layers: Iterable[onnx.NodeProto]) -> None:
    """Give scalar residuals an axis for each of the image, since the function slices them."""
    scalars = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer if not tensor.dims}
    names = {name for node in graph.node for name in (*node.input, *node.output)}
    names |= {value.name for value in (*graph.input, *graph.initializer)}
    wide: dict[tuple[str, int], str] = {}
    for node in layers:
        if (scalar := scalars.get(node.input[4])) is None:
            continue
        axes = 2 + len(attributes(node)["strides"])
        key = (node.input[4], axes)
        if key not in wide:
            wide[key] = unused(f"{node.input[4]}.{axes}", names)
            graph.initializer.append(numpy_helper.from_array(np.reshape(scalar, [1] * axes), wide[key]))
        node.input[4] = wide[key]
