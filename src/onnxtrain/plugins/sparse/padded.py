"""Keep images padded between sparse convolutions, so that none copies its input to pad it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import onnx
from onnx import helper

from onnxtrain.graph.domains import ONNXTRAIN_DOMAIN
from onnxtrain.plugins.sparse.functions import CONV, POOLED
from onnxtrain.plugins.sparse.layers import attributes, names_in_subgraphs

Pads = tuple[int, ...]
"""Sizes before the spatial axes, then behind them, as in Conv."""


def with_padded_images(proto: onnx.ModelProto) -> onnx.ModelProto | None:
    """Return the model with results of sparse and pooled convolutions written with the padding that readers need."""
    made = onnx.ModelProto()
    made.CopyFrom(proto)
    graph = made.graph
    own = [node for node in graph.node if node.domain == ONNXTRAIN_DOMAIN]
    layers, pooled = ([node for node in own if node.op_type == operator] for operator in (CONV, POOLED))
    found = _pads(graph, layers, pooled)
    if not found:
        return None
    for node in (*layers, *pooled):
        none = (0,) * len(attributes(node)["pads"])
        values = {"y_pads": node.output[0]}
        if node.op_type == CONV:
            values |= {"x_pads": node.input[0], "residual_pads": node.input[4]}
        node.attribute.extend(
            helper.make_attribute(name, list(found.get(value, none))) for name, value in values.items()
        )
    # Of a padded value, the shape depends on whether the kernels or the functions run.
    kept = [value for value in graph.value_info if value.name not in found]
    del graph.value_info[:]
    graph.value_info.extend(kept)
    return made


def _pads(
    graph: onnx.GraphProto, layers: Sequence[onnx.NodeProto], pooled: Sequence[onnx.NodeProto]
) -> dict[str, Pads]:
    """Return the padding of each result that gets one."""
    results = {node.output[0] for node in (*layers, *pooled)} - _read_by_others(graph, layers)
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


def check_padded_images(graph: onnx.GraphProto, layers: Sequence[onnx.NodeProto]) -> None:
    """Check that sparse convolutions read images with the padding that others write."""
    given = {node.output[0]: attributes(node) for node in layers if node.op_type in (CONV, POOLED)}
    layers = [node for node in layers if node.op_type == CONV]
    padded = {y: pads for y, values in given.items() if any(pads := values.get("y_pads", ()))}
    if found := sorted(set(padded) & _read_by_others(graph, layers)):
        raise ValueError(f"a node other than a sparse convolution reads {found[0]!r}, which is padded")
    for node in layers:
        for name, value in (("x_pads", node.input[0]), ("residual_pads", node.input[4])):
            pads = given[node.output[0]].get(name, [])
            if (pads if any(pads) else None) != padded.get(value):
                raise ValueError(f"{name} of the node of {node.output[0]!r} are not the padding of {value!r}")


def _read_by_others(graph: onnx.GraphProto, layers: Iterable[onnx.NodeProto]) -> set[str]:
    own = {node.output[0] for node in layers}
    others = {value.name for value in graph.output}
    others |= {name for node in graph.node if own.isdisjoint(node.output) for name in node.input}
    return others | {name for node in graph.node for name in names_in_subgraphs(node)}
