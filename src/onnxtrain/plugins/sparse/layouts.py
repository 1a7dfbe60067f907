"""Keep values between sparse layers as kernels read them, so that none copies: padded images, transposed rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import onnx
from onnx import helper

from onnxtrain.graph.domains import ONNXTRAIN_DOMAIN, is_default_domain
from onnxtrain.plugins.sparse.edited import Edited, assign, attributes, names_in_subgraphs
from onnxtrain.plugins.sparse.layers import ELEMENTWISE, LayerSearch, Shape
from onnxtrain.plugins.sparse.operators import CONV, LINEAR, POOLED, TRANSPOSE, define

Pads = tuple[int, ...]
"""Sizes before the spatial axes, then behind them, as in Conv."""

_ROWS = {1: 128, 4: 64, 16: 32}
"""By block, rows of a panel of x that the kernels multiply at a time with AVX-512."""

_OF_ALL_INPUTS = frozenset({"Add", "Div", "Max", "Min", "Mul", "Pow", "Sub", "Sum"})
"""Operators that compute each element of the result from the same element of every input."""


def with_padded_images(proto: onnx.ModelProto) -> onnx.ModelProto | None:
    """Return the model with results of sparse and pooled convolutions written with the padding that readers need."""
    made = Edited(proto)
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
    assign(graph.value_info, (value for value in graph.value_info if value.name not in found))
    return made.proto


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


def with_transposed_rows(proto: onnx.ModelProto, shapes: Mapping[str, Shape | None]) -> onnx.ModelProto | None:
    """Return the model with rows left transposed between sparse linear layers.

    A layer writes its result transposed where only other layers and elementwise operators in front of these read it.
    What several layers read is transposed once. Only the kernels do so: the functions ignore it. ``None`` if there is
    nothing to exchange.
    """
    made = Edited(proto)
    graph = made.graph
    panels = _panels(graph, shapes)
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in filter(_is_layer, graph.node):
        readers.setdefault(node.input[0], []).append(node)
    shared = {name: min(map(_panel, some)) for name, some in readers.items() if len(some) > 1 and name not in panels}
    if not panels and not shared:
        return None
    transposed = {name: made.unused(f"{name}.transposed") for name in shared}
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        if _is_layer(node):
            x, y = node.input[0], node.output[0]
            if x in shared and y == readers[x][0].output[0]:
                nodes.append(
                    helper.make_node(TRANSPOSE, [x], [transposed[x]], domain=ONNXTRAIN_DOMAIN, panel=shared[x])
                )
            node.input[0] = transposed.get(x, x)
            rows = {"x_panel": (panels | shared).get(x), "y_panel": panels.get(y)}
            node.attribute.extend(helper.make_attribute(name, size) for name, size in rows.items() if size)
        nodes.append(node)
    assign(graph.node, nodes)
    if transposed:
        define(made.proto, {TRANSPOSE})
    return made.proto


def _is_layer(node: onnx.NodeProto) -> bool:
    return node.domain == ONNXTRAIN_DOMAIN and node.op_type == LINEAR


def _panel(node: onnx.NodeProto) -> int:
    """Return the rows of a panel that a layer reads best."""
    return _ROWS[attributes(node)["shape"][2]]


def _panels(graph: onnx.GraphProto, shapes: Mapping[str, Shape | None]) -> dict[str, int]:
    """Return the rows of a panel of each result that layers, and elementwise operators between them, exchange."""
    search = LayerSearch(graph, shapes)
    like = {
        node.output[0]: inputs for node in graph.node if (inputs := _laid_out_alike(node, search, shapes)) is not None
    }
    found = set(like)

    def takes(node: onnx.NodeProto | None, name: str) -> bool:
        """Return whether a node can read a value transposed."""
        if node is not None and name in like.get(node.output[0], ()):
            return node.output[0] in found
        return node is not None and _is_layer(node)

    def fits(y: str) -> bool:
        readers = search.readers(y)
        return bool(readers) and found.issuperset(like[y]) and all(takes(node, y) for node in readers)

    while wrong := {y for y in found if not fits(y)}:
        found -= wrong

    panels = dict.fromkeys(found, max(_ROWS.values()))
    for node in filter(_is_layer, graph.node):
        if node.input[0] in found:
            panels[node.input[0]] = min(panels[node.input[0]], _panel(node))
    alike = [[y, *like[y]] for y in found if like[y]]
    while wider := [some for some in alike if len({panels[name] for name in some}) > 1]:
        for some in wider:
            panels |= dict.fromkeys(some, min(panels[name] for name in some))
    return panels


def _laid_out_alike(node: onnx.NodeProto, search: LayerSearch, shapes: Mapping[str, Shape | None]) -> list[str] | None:
    """Return the inputs that are laid out like the result; ``None`` for nodes that cannot write it transposed."""
    arrays = {name: search.constant(name) for name in (node.input[4:] if _is_layer(node) else node.input) if name}
    inputs = [name for name, array in arrays.items() if array is None or array.size != 1]
    if _is_layer(node):
        return inputs
    if not is_default_domain(node.domain) or not inputs:
        return None
    fits = node.op_type in _OF_ALL_INPUTS or (node.op_type in ELEMENTWISE and inputs == [node.input[0]])
    return inputs if fits and _have_one_shape(inputs, shapes) else None


def _have_one_shape(names: list[str], shapes: Mapping[str, Shape | None]) -> bool:
    """Return whether values have the same shape, so that none is repeated to that of another."""
    found = {shapes.get(name) for name in names}
    return len(names) == 1 or (len(found) == 1 and all(shape is not None and None not in shape for shape in found))
