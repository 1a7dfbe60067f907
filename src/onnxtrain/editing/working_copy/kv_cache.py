"""Remove the KV-cache inputs of language models from a working copy: training starts from an empty cache."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator

import numpy as np
import onnx_ir as ir

from onnxtrain.errors.formatting import listed
from onnxtrain.graph import Builder
from onnxtrain.graph.clone import Values, all_nodes, captured_values, clone_nodes, computed_from, subgraphs
from onnxtrain.graph.domains import MICROSOFT_DOMAIN
from onnxtrain.graph.replace import substitute_and_rename, take_over
from onnxtrain.graph.value import KV_CACHES, RIGHT_PADDED, Dimension, behind, constant_tensor, dimensions, is_float
from onnxtrain.model_file.exporters import optimum

_ROWS = 2
"""The axis of [batch, heads, rows, size] along which a cache grows."""

_CACHE_SLOTS = {
    ("", "Attention"): (4, 5),
    (MICROSOFT_DOMAIN, "GroupQueryAttention"): (3, 4),
    (MICROSOFT_DOMAIN, "MultiHeadAttention"): (6, 7),
}
"""Attention operators and their input slots for cached keys and values."""

_WINDOWED = "sliding_window_cache"
"""The attribute of GroupQueryAttention for a cache as long as the window, which the operator then requires."""

_LENGTHS = 5
"""The input slot of GroupQueryAttention for the lengths of sequences, less one."""

_STALE = "onnxtrain.weights_of_the_cache_branch"
"""Key of the metadata of an input: weights that only the removed branch of a merged decoder reads."""

_OFFSETS = "onnxtrain.constant_positions"
"""Key of the metadata of an input: positions that begin at a constant, by the name of their value."""

_LONGEST = 1 << 16
"""Elements of the largest constant that is read as positions, and the largest position."""

_KEEP_ELEMENTS = ("Cast", "Expand", "Identity", "Reshape", "Squeeze", "Unsqueeze")

_ARITHMETIC = ("ReduceSum", "Add", "Sub", *_KEEP_ELEMENTS)
"""Operators between a mask and the lengths of its rows."""

_LAYER_OR_CONTENT = r"\d+|keys?|values?"
"""Parts of a name that differ between the cache inputs of one model."""


def remove_cache_inputs(model: ir.Model) -> list[str]:
    """Remove the KV-cache inputs of a working copy, in place, as if the cache were empty."""
    names = _take_branch_without_cache(model.graph)
    growing = [value for value in model.graph.inputs if _may_be_cache(value)]
    offsets = _constant_positions(model.graph) if growing else {}
    caches = _remove_growing_caches(model.graph, growing) if growing else []
    names += caches
    for value in model.graph.inputs:
        value.meta[KV_CACHES] = tuple(names)
        if caches:
            value.meta[_OFFSETS] = offsets
    if caches:
        _shorten_masks(model.graph)
    for value in _counted_masks(model.graph):
        value.meta[RIGHT_PADDED] = True
    return names


def let_caches_grow(graph: ir.Graph) -> None:
    """Make caches that are as long as a window of attention grow from empty ones, as the others of a model do."""
    for node in graph:
        if node.op_type == "GroupQueryAttention":
            node.attributes.pop(_WINDOWED, None)


def cache_outputs(graph: ir.Graph) -> dict[str, str]:
    """Return the KV caches of a decoder: the name of each growing cache input, and of the output that continues it."""
    outputs = {str(value.name): value for value in graph.outputs}
    found = {}
    for value in graph.inputs:
        name = str(value.name)
        if _may_be_cache(value) and (output := optimum.continuation(name)):
            found[name] = output
    growing = [value for value in graph.inputs if _has_cache_name(value)]
    return found if found and len(growing) == len(found) and outputs.keys() >= {*found.values()} else {}


def head_size(graph: ir.Graph, cache: str) -> int | None:
    """Return the last size of a KV cache input: the declared one, else that of the queries of its attention node."""
    value = next(value for value in graph.inputs if value.name == cache)
    declared = (dimensions(value) or (None,))[-1]
    if isinstance(declared, int):
        return declared
    for node in value.consumers():
        query = node.inputs[0]
        width = None if query is None else (dimensions(query) or (None,))[-1]
        if node.op_type in ("GroupQueryAttention", "MultiHeadAttention") and isinstance(width, int):
            packed = node.op_type == "GroupQueryAttention" and node.inputs[1] is None
            heads = node.attributes["num_heads"].as_int()
            return width // (heads + 2 * node.attributes["kv_num_heads"].as_int() if packed else heads)
    return None


def _shorten_masks(graph: ir.Graph) -> None:
    """Declare that masks [batch, past and new tokens] have the length of the tokens, since there is no past."""
    inputs = [value for value in graph.inputs if len(dimensions(value) or ()) == 2 and not is_float(value)]
    masks = [value for value in inputs if re.search("mask", str(value.name).lower())]
    lengths = {dimensions(value)[1] for value in inputs if value not in masks}  # type: ignore[index]
    for value in masks if len(lengths) == 1 else ():
        assert value.shape is not None
        if not isinstance(value.shape[1], int) and not optimum.is_of_encoder(str(value.name)):
            value.shape = ir.Shape([value.shape[0], *lengths])


def _counted_masks(graph: ir.Graph) -> Iterator[ir.Value]:
    """Yield the masks [..., sequence] whose sums are the sequence lengths of GroupQueryAttention."""
    nodes = [node for node in graph if node.op_type == "GroupQueryAttention" and node.domain == MICROSOFT_DOMAIN]
    waiting = list(dict.fromkeys(node.inputs[_LENGTHS] for node in nodes if len(node.inputs) > _LENGTHS))
    while waiting:
        value = waiting.pop()
        node = None if value is None else value.producer()
        if node is None or node.domain or node.op_type not in _ARITHMETIC:
            continue
        if node.op_type == "ReduceSum":
            first = behind(node.inputs[0], _KEEP_ELEMENTS)
            if first is not None and first.is_graph_input() and dimensions(first) != ():
                yield first
        waiting += node.inputs[: 2 if node.op_type in ("Add", "Sub") else 1]


def cache_hints(graph: ir.Graph) -> Iterator[tuple[str, bool]]:
    """Describe the KV-cache inputs that a working copy still has: sentences, and whether each is a warning."""
    kept = [value for value in graph.inputs if _has_cache_name(value)]
    encoder = [value for value in kept if optimum.is_of_encoder(str(value.name))]
    fixed = [value for value in kept if value not in encoder and isinstance(_rows(value), int)]
    others = [value for value in kept if value not in encoder and value not in fixed]
    if encoder:
        yield (
            f"{_listed(encoder)} hold keys and values of an encoder and stay inputs: data must have them, and no "
            "gradient reaches the encoder. The decoder exported without a cache (use_cache=False) computes them from "
            "the encoder's output.",
            False,
        )
    if fixed:
        lengths = " or ".join(map(str, sorted({int(str(_rows(value))) for value in fixed})))
        yield (
            f"{_listed(fixed)} have a length of {lengths} that the file fixes, and stay inputs: data must have them. "
            "Export without a cache (use_cache=False), or with dynamic_axes for the length of the cache.",
            True,
        )
    if others:
        readers = ", ".join(sorted({node.op_type for value in others for node, _ in value.uses()})) or "no node"
        yield (
            f"{_listed(others)} are read by {readers} in a way that an empty cache cannot replace, and stay inputs: "
            "data must have them. Export without a cache (use_cache=False).",
            True,
        )
    offsets: dict[str, int] = next((value.meta[_OFFSETS] for value in graph.inputs if value.meta.get(_OFFSETS)), {})
    if offsets:
        numbers = " and ".join(map(str, sorted(set(offsets.values()))))
        yield (
            f"The model has positions or masks that begin at a constant ({numbers}, in {_some(offsets)}) "
            "whatever the length of its KV cache: most likely the exporter wrote the length of its example cache into "
            "the file. Training starts from an empty cache and would use shifted positions. Export without a cache "
            "(use_cache=False).",
            True,
        )
    stale = next((value.meta[_STALE] for value in graph.inputs if value.meta.get(_STALE)), ())
    if stale:
        yield (
            f"Training leaves weights that only the branch with the cache reads as they are ({_some(stale)}): the "
            "saved file would generate with trained and untrained weights. Merge decoders that share their weights, "
            "or train the decoder without a cache.",
            True,
        )


def _listed(inputs: list[ir.Value]) -> str:
    names = _some(value.name for value in inputs)
    return f"The model has KV-cache inputs ({len(inputs)}: {names}) that"


def _some(names: Iterable[object]) -> str:
    return listed(names, 2, counted=False)


def _has_cache_name(value: ir.Value) -> bool:
    """Return whether an input is a cache by its name: float with at least three axes, or the flag of a merged file."""
    if value.name == optimum.BRANCH:
        return True
    shape = dimensions(value)
    return is_float(value) and (shape is None or len(shape) >= 3) and optimum.is_cache(str(value.name))


def _rows(value: ir.Value) -> Dimension:
    shape = dimensions(value)
    return shape[_ROWS] if shape is not None and len(shape) == 4 else None


def _take_branch_without_cache(graph: ir.Graph) -> list[str]:
    """Replace the If nodes of a merged decoder by their else branches; return the inputs that became unused.

    If an else branch also reads a cache, nothing changes.
    """
    flag = next((value for value in graph.inputs if value.name == optimum.BRANCH), None)
    choices = [] if flag is None else [node for node, _ in flag.uses()]
    if not choices or any(node.op_type != "If" or node.domain or node.graph is not graph for node in choices):
        return []
    branches = {node: node.attributes["else_branch"].as_graph() for node in choices}
    read = {value for branch in branches.values() for node in all_nodes(branch) for value in node.inputs}
    if any(_has_cache_name(value) for value in graph.inputs if value in read):
        return []
    captured = {value for node in choices for value in captured_values(node)}
    for node, branch in branches.items():
        _inline(graph, node, branch)
    unread = [value for value in graph.inputs if value is flag or (value in captured and not value.uses())]
    for value in unread:
        graph.inputs.remove(value)
    stale = [str(v.name) for v in captured if v.is_initializer() and is_float(v) and dimensions(v) and not v.uses()]
    for value in graph.inputs:
        value.meta[_STALE] = tuple(sorted(stale))
    return [str(value.name) for value in unread]


def _inline(graph: ir.Graph, node: ir.Node, branch: ir.Graph) -> None:
    """Replace an If by the nodes of one of its branches."""
    taken = {str(value.name) for value in (*graph.inputs, *graph.initializers.values())}
    taken |= {str(output.name) for other in graph if other is not node for output in other.outputs}

    def rename(name: str) -> str:
        return f"{name}/without_cache" if name in taken else name

    values: Values = {}
    constants = []
    for name, value in branch.initializers.items():
        assert value.const_value is not None
        constant = ir.Node("", "Constant", [], [ir.AttrTensor("value", value.const_value)])
        made = constant.outputs[0]
        made.name, made.type, made.shape = rename(name), value.type, value.shape
        values[value] = made
        constants.append(constant)
    graph.insert_before(node, [*constants, *clone_nodes(branch, values, rename=rename)])
    for output, inner in zip(node.outputs, branch.outputs, strict=True):
        found = values.get(inner)
        if found is None or found.is_graph_output() or found.producer() in constants:
            copy = ir.Node("", "Identity", [found or inner])
            graph.insert_before(node, copy)
            found = copy.outputs[0]
        found.type, found.shape = found.type or output.type, found.shape or output.shape
        substitute_and_rename(graph, {output: found})
    bodies = subgraphs(node)
    graph.remove(node, safe=True)
    for inner_node in all_nodes(itertools.chain(*bodies)):  # they would still count as readers of captured values
        for index in range(len(inner_node.inputs)):
            inner_node.replace_input_with(index, None)


def _remove_growing_caches(graph: ir.Graph, growing: list[ir.Value]) -> list[str]:
    for value in growing:
        _read_itself(graph, value)
    caches = [value for value in growing if _is_only_appended_to(value)]
    rows = {_rows(cache) for cache in caches} - {None}
    families = {_family(cache) for cache in caches}
    kept = [value for value in growing if value not in caches]
    # Exporters may give each cache a symbol of its own, so that equal symbols are not the only sign.
    if any(_rows(value) in rows or _family(value) in families for value in kept):
        return []
    others = [value for value in graph.inputs if value not in caches and dimensions(value)]
    if not others:
        return []
    for cache in caches:
        for node, slot in list(cache.uses()):
            if _use(node, slot) == "attention":
                node.replace_input_with(slot, None)
                node.attributes.pop(_WINDOWED, None)  # ONNX Runtime refuses such a node without a cache
            elif node.op_type == "Concat":
                _remove_input(node, slot)
            else:
                _replace_shape(graph, node, cache, _with_batch_of(cache, others))
        graph.inputs.remove(cache)
    return [str(cache.name) for cache in caches]


def _constant_positions(graph: ir.Graph) -> dict[str, int]:
    """Find positions and causal masks that begin at a constant above 0 instead of at the length of the cache."""
    varying = computed_from(graph, graph.inputs)
    found: dict[str, int] = {}
    for node in graph:
        if node.domain in ("", MICROSOFT_DOMAIN) and len(node.inputs) > 1 and node.outputs:
            offset = _offset_of(node, varying)
            if 0 < offset <= _LONGEST:  # beyond are ends of slices without an end
                found[str(node.outputs[0].name)] = offset
    return found


def _offset_of(node: ir.Node, varying: set[ir.Value]) -> int:
    """Return the constant at which a node's positions begin, or 0."""
    inputs = list(node.inputs)
    if node.op_type == "Range" and inputs[1] in varying:
        start = _integers(inputs[0])
        return 0 if start is None else _largest_shift(node.outputs[0], int(start[0]))
    table = inputs[0] if node.op_type == "Gather" and inputs[0] not in varying else None
    if table is not None and is_float(table) and len(dimensions(table) or ()) == 2:
        return _start_of_positions(inputs[1])
    if node.op_type == "RotaryEmbedding" and len(inputs) > 3:
        return _start_of_positions(inputs[1 if node.domain else 3])
    if node.op_type == "Slice" and len(inputs) > 2 and inputs[0] not in varying and inputs[2] in varying:
        starts = _integers(inputs[1])
        return 0 if starts is None else int(starts.max())
    if node.op_type == "Trilu":
        diagonal, upper = _integers(inputs[1]), node.attributes.get_int("upper", 1)
        return 0 if diagonal is None else int(diagonal[0]) - (upper != 0)
    return 0


def _largest_shift(positions: ir.Value, start: int) -> int:
    """Return the sum of the constants that are added to positions; where readers differ, the largest."""
    largest, waiting = 0, [(positions, start)]
    while waiting:
        value, offset = waiting.pop()
        for node, slot in value.uses():
            if node.op_type == "Add" and not node.domain:
                added = _integers(node.inputs[1 - slot])
                if added is not None and added.size == 1:
                    waiting.append((node.outputs[0], offset + int(added[0])))
            elif node.op_type in _KEEP_ELEMENTS and not node.domain and slot == 0:
                waiting.append((node.outputs[0], offset))
            else:
                strict = (node.op_type, slot) in (("Less", 1), ("Greater", 0))  # key < position + 1: key <= position
                largest = max(largest, offset - strict)
    return largest


def _start_of_positions(value: ir.Value | None) -> int:
    """Return the first of constant positions with at least one axis: integers that count up."""
    found = _integers(value)
    if value is None or found is None or dimensions(value) == () or found.size == 0 or (np.diff(found) != 1).any():
        return 0
    return int(found[0])


def _integers(value: ir.Value | None) -> np.ndarray | None:
    """Return the elements of a constant of integers, flat, also behind nodes that keep the elements."""
    source = behind(value, _KEEP_ELEMENTS)
    tensor = None if source is None else constant_tensor(source)
    if tensor is None or tensor.dtype not in (ir.DataType.INT64, ir.DataType.INT32) or not 0 < tensor.size <= _LONGEST:
        return None
    return np.asarray(tensor.numpy()).ravel().astype(np.int64)


def _family(value: ir.Value) -> str:
    """Return the name of a cache without layer, key or value: equal for all caches of one model."""
    return re.sub(_LAYER_OR_CONTENT, "#", str(value.name).lower())


def _may_be_cache(value: ir.Value) -> bool:
    """Return whether an input has the axes of a cache with any number of rows."""
    shape = dimensions(value)
    if shape is None or len(shape) != 4 or isinstance(shape[_ROWS], int) or not isinstance(shape[1], int):
        return False
    return not value.is_graph_output() and not value.is_initializer()


def _read_itself(graph: ir.Graph, value: ir.Value) -> None:
    """Redirect the readers of copies of a cache to the cache: Identity, and Concat of one input."""
    waiting = [value]
    while waiting:
        for node, _ in list(waiting.pop().uses()):
            copies = node.op_type == "Identity" or (node.op_type == "Concat" and len(node.inputs) == 1)
            if copies and not node.domain and node.graph is graph and not node.outputs[0].is_graph_output():
                node.outputs[0].replace_all_uses_with(value)
                graph.remove(node, safe=True)
                waiting.append(value)
                break


def _is_only_appended_to(value: ir.Value) -> bool:
    uses = {_use(node, slot) for node, slot in value.uses()}
    return uses <= {"attention", "concat", "shape"} and bool(uses - {"shape"})


def _use(node: ir.Node, slot: int) -> str:
    if slot in _CACHE_SLOTS.get((node.domain, node.op_type), ()):
        return "attention"
    if node.op_type == "Concat" and not node.domain and len(node.inputs) > 1:
        return "concat" if node.attributes["axis"].as_int() in (_ROWS, _ROWS - 4) else ""
    return "shape" if node.op_type == "Shape" and not node.domain else ""


def _remove_input(concat: ir.Node, slot: int) -> None:
    """Remove an input of a Concat; the output keeps its name and shape."""
    inputs = [value for index, value in enumerate(concat.inputs) if index != slot]
    concat.resize_inputs(len(inputs))
    for index, value in enumerate(inputs):
        concat.replace_input_with(index, value)


def _with_batch_of(cache: ir.Value, others: list[ir.Value]) -> ir.Value:
    """Return an input with the first axis of the cache."""
    size = (dimensions(cache) or (None,))[0]
    return next((value for value in others if (dimensions(value) or (None,))[0] == size), others[0])


def _replace_shape(graph: ir.Graph, node: ir.Node, cache: ir.Value, other: ir.Value) -> None:
    """Replace a Shape node by the shape of an empty cache."""
    op = Builder(graph, graph.opset_imports[""], before=node)
    sizes = [size if isinstance(size, int) else 0 for size in dimensions(cache) or ()]
    sizes[_ROWS] = 0
    whole = op.Concat(op.Shape(op.wrap(other), start=0, end=1), op.ints(*sizes[1:]), axis=0)
    begin, end = node.attributes.get_int("start", 0), node.attributes.get_int("end", 4)
    result = whole if (begin, end) == (0, 4) else op.Slice(whole, op.ints(begin), op.ints(end), op.ints(0))
    take_over(graph, {node.outputs[0]: result.ir})
    graph.remove(node, safe=True)
