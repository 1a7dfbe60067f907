"""Keep images padded between sparse convolutions, so that none copies its input to pad it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import onnx
from onnx import helper, numpy_helper

from onnxtrain.ir.domains import ONNXTRAIN_DOMAIN
from onnxtrain.model_file.proto import default_opset
from onnxtrain.sparse.functions import CONV, function
from onnxtrain.sparse.layers import attributes, names_in_subgraphs, unused

Pads = tuple[int, ...]
"""Sizes before the spatial axes, then behind them, as in Conv."""


def with_padded_images(proto: onnx.ModelProto) -> onnx.ModelProto | None:
    """Return the model with results of sparse convolutions written with the padding that their readers need.

    Only sparse convolutions read such a result. ``None`` if there is none.

    Args:
        proto: A model whose nodes of the operator ``SparseConv`` pad no result; it is not changed.
    """
    opset = default_opset(proto.opset_import)
    assert opset is not None
    made = onnx.ModelProto()
    made.CopyFrom(proto)
    graph = made.graph
    layers = [node for node in graph.node if node.domain == ONNXTRAIN_DOMAIN and node.op_type == CONV]
    found = _pads(graph, layers)
    if not found:
        return None
    for node in layers:
        pads = attributes(node)["pads"]
        none = (0,) * len(pads)
        around_x = found.get(node.input[0], none)
        _set(
            node,
            pads=[max(pad - padded, 0) for pad, padded in zip(pads, around_x, strict=True)],
            x_pads=[max(padded - pad, 0) for pad, padded in zip(pads, around_x, strict=True)],
            y_pads=found.get(node.output[0], none),
            residual_pads=found.get(node.input[4], none),
        )
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


def _pads(graph: onnx.GraphProto, layers: Sequence[onnx.NodeProto]) -> dict[str, Pads]:
    """Return the padding of each result that gets one."""
    results = {node.output[0] for node in layers} - _read_by_others(graph, layers)
    found: dict[str, Pads] = {}
    for y in results:
        readers = [attributes(node) for node in layers if node.input[0] == y]
        # A convolution with strides copies its input in any case, to read it in steps.
        wanted = [given["pads"] for given in readers if set(given["strides"]) == {1} and any(given["pads"])]
        if wanted and any(least := tuple(map(min, *wanted, wanted[0]))):
            found[y] = least
    while added := _like_residuals(layers, results, found):
        found |= added
    return found


def _like_residuals(layers: Iterable[onnx.NodeProto], results: set[str], found: Mapping[str, Pads]) -> dict[str, Pads]:
    """Return the padding of results that others with padding are added to, or that are added to these."""
    pairs = [(node.output[0], node.input[4]) for node in layers]
    pairs += [(residual, y) for y, residual in pairs]
    return {name: found[other] for name, other in pairs if name in results - set(found) and other in found}


def _sums(pads: Pads) -> list[int]:
    return [before + behind for before, behind in zip(pads[: len(pads) // 2], pads[len(pads) // 2 :], strict=True)]


def without_padded_images(graph: onnx.GraphProto, layers: Sequence[onnx.NodeProto]) -> dict[str, list[int]]:
    """Return the padding of the convolutions' inputs, by their results, if no image of the graph is padded.

    Args:
        graph: The graph, whose declared shapes of padded results are removed.
        layers: Nodes of it that become dense.

    Raises:
        ValueError: An attribute of a convolution does not fit the one that computes its input.
    """
    layers = [node for node in layers if node.op_type == CONV]
    given = {node.output[0]: attributes(node) for node in layers}
    none = {y: (0,) * len(values["pads"]) for y, values in given.items()}
    around = {y: tuple(values.get("y_pads", none[y])) for y, values in given.items()}
    padded = {y for y, pads in around.items() if any(pads)}
    if found := sorted(padded & _read_by_others(graph, layers)):
        raise ValueError(f"a node other than a sparse convolution reads {found[0]!r}, which is padded")
    pads: dict[str, list[int]] = {}
    for node in layers:
        y, values = node.output[0], given[node.output[0]]
        around_x = around.get(node.input[0], none[y])
        inner = values.get("x_pads", none[y])
        of_residual = tuple(values.get("residual_pads", none[y]))
        pads[y] = [pad + size - left for pad, size, left in zip(values["pads"], around_x, inner, strict=True)]
        if min(pads[y]) < 0 or of_residual != around.get(node.input[4], none[y]):
            raise ValueError("x_pads or residual_pads are not those of the node that computes the input")
    kept = [value for value in graph.value_info if value.name not in padded]
    del graph.value_info[:]
    graph.value_info.extend(kept)
    return pads


def _read_by_others(graph: onnx.GraphProto, layers: Iterable[onnx.NodeProto]) -> set[str]:
    own = {node.output[0] for node in layers}
    others = {value.name for value in graph.output}
    others |= {name for node in graph.node if own.isdisjoint(node.output) for name in node.input}
    return others | {name for node in graph.node for name in names_in_subgraphs(node)}


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
