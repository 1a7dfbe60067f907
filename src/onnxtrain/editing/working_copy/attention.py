"""Attention in a working copy: norms of heads become nodes, and the documents of a packed row are kept apart.

A mask [batch, tokens] then numbers the documents of a row, from 1; 0 is padding. In a model without a mask the
positions that it reads tell where documents begin: at each position 0. A row of one document is an ordinary row, so
that a working copy changed in this way takes unpacked rows, too.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import onnx_ir as ir

from onnxtrain.errors import DataError
from onnxtrain.graph import Builder, Value
from onnxtrain.graph.domains import MICROSOFT_DOMAIN
from onnxtrain.graph.shapes import infer_shapes
from onnxtrain.graph.value import DOCUMENTS, RIGHT_PADDED, dimensions, is_float

_BIAS_SLOTS: Final = {
    ("", "Attention"): 3,
    (MICROSOFT_DOMAIN, "Attention"): 5,
    (MICROSOFT_DOMAIN, "GroupQueryAttention"): 10,
    (MICROSOFT_DOMAIN, "MultiHeadAttention"): 5,
}
"""Attention operators and their input slots for a bias [batch, heads, queries, keys]."""

_POSITIONS: Final = 9
"""The input slot of GroupQueryAttention for positions."""

_MIXING: Final = frozenset(
    {"LSTM", "GRU", "RNN", "Conv", "ConvTranspose", "Scan", "Loop", "CausalConvWithState", "LinearAttention"}
)
"""Operators that mix tokens, but are no attention."""

_INTEGERS: Final = (ir.DataType.INT64, ir.DataType.INT32)


def numbers_documents(graph: ir.Graph) -> bool:
    """Return whether packed rows need a changed working copy.

    Its mask has two axes, and thus marks padding only, or it reads positions and no mask or segments, so that nothing
    says that its attention stays inside of a document.
    """
    masks = _inputs_named(graph, "mask")
    if masks or _inputs_named(graph, "segment"):
        return any(len(dimensions(value) or ()) == 2 for value in masks)
    return len(_inputs_named(graph, "position")) == 1


def _inputs_named(graph: ir.Graph, part: str) -> list[ir.Value]:
    given = [value for value in graph.inputs if value.name not in graph.initializers]
    return [value for value in given if part in str(value.name).lower()]


def separate_documents(model: ir.Model) -> None:
    """Let the mask of a working copy number the documents of a row, or its positions begin them, in place.

    The scores of attention get a block-diagonal bias; positions that are looked up in a table or read by
    GroupQueryAttention are counted within a document. Rotations that the graph computes itself keep their positions:
    attention depends on the differences of these only.
    """
    graph = model.graph
    masks = _inputs_named(graph, "mask")
    begins = [] if masks else _inputs_named(graph, "position")
    for value in begins:
        if value.dtype not in _INTEGERS or len(dimensions(value) or ()) != 2:
            raise DataError(
                f"packed sequences need positions of integers [batch, tokens], which begin again with each sequence of "
                f"a row, but the model has {value.name!r} ({_type(value)})."
            )
    if not begins and (len(masks) != 1 or masks[0].dtype not in _INTEGERS):
        shown = ", ".join(f"{value.name!r} ({_type(value)})" for value in masks)
        raise DataError(
            f"packed sequences need one mask of integers [batch, tokens], which then numbers the sequences of a row, "
            f"but the model has {shown}."
        )
    mixing = sorted({node.op_type for node in graph if node.op_type in _MIXING})
    if mixing:
        raise DataError(
            f"packed sequences would flow into each other in this model's {', '.join(mixing)}; train it without pack."
        )
    op = Builder(graph, graph.opset_imports[""], before=graph[0])
    op.scope = "documents"
    (given,) = begins or masks
    numbers = _begun(op, op.wrap(given)) if begins else _numbered(op, given)
    rows, columns = op.Unsqueeze(numbers, op.ints(2)), op.Unsqueeze(numbers, op.ints(1))
    same = op.Equal(rows, columns)
    _bias_attention(model, op, op.Or(same, op.Equal(rows, op.scalar(0, numbers))))
    _restart_positions(graph, op, numbers, same)
    given.meta[DOCUMENTS] = "begins" if begins else "numbers"
    given.meta.pop(RIGHT_PADDED, None)
    graph.sort()
    infer_shapes(model)


def _numbered(op: Builder, mask: ir.Value) -> Value:
    """Let all readers of a mask read ones and zeros, and return the numbers of documents."""
    readers, numbers = list(mask.uses()), op.wrap(mask)
    plain = op.Min(numbers, op.scalar(1, numbers))
    for node, slot in readers:
        node.replace_input_with(slot, plain.ir)
    return numbers


def _begun(op: Builder, positions: Value) -> Value:
    """Return the numbers of documents, one more at each position 0."""
    begins = op.cast(op.Equal(positions, op.scalar(0, positions)), ir.DataType.INT64)
    return op.CumSum(begins, op.constant(1, np.int64)).with_shape(positions.shape)


def _type(value: ir.Value) -> str:
    shape = dimensions(value)
    return f"{'unknown type' if value.dtype is None else value.dtype.name.lower()}, {len(shape or ())} axes"


def _bias_attention(model: ir.Model, op: Builder, seen: Value) -> None:
    """Add -inf to the scores of all attention where ``seen`` [batch, queries, keys] is false."""
    graph, biases = model.graph, dict[ir.DataType, Value]()
    four = op.Unsqueeze(seen, op.ints(1))

    def bias(dtype: ir.DataType) -> Value:
        if dtype not in biases:
            zero, never = (op.constant(np.asarray(number, np.float32), dtype) for number in (0, -np.inf))
            biases[dtype] = op.Where(four, zero, never)
        return biases[dtype]

    found = 0
    for node in list(graph):
        slot = _BIAS_SLOTS.get((node.domain, node.op_type))
        if slot is not None:
            assert node.inputs[0] is not None
            _add_to_slot(op, node, slot, four, bias(node.inputs[0].dtype or ir.DataType.FLOAT))
            found += 1
        elif node.op_type == "Softmax" and not node.domain and _over_tokens(node):
            scores = node.inputs[0]
            assert scores is not None
            own = op.before(node)
            total = own.wrap(scores) + bias(scores.dtype or ir.DataType.FLOAT)
            node.replace_input_with(0, total.with_shape(dimensions(scores)).ir)
            found += 1
    if not found:
        raise DataError(
            "packed sequences: the model has no attention with scores [batch, heads, tokens, tokens], so that tokens "
            "of other sequences cannot be masked; train it without pack."
        )


def _over_tokens(node: ir.Node) -> bool:
    """Return whether a Softmax is over scores [batch, heads, tokens, tokens], and not over classes or experts."""
    scores = node.inputs[0]
    shape = None if scores is None else dimensions(scores)
    axis = node.attributes.get_int("axis", -1)
    if shape is not None and (isinstance(shape[-1], int) or axis not in (-1, len(shape) - 1)):
        return len(shape) == 4 and axis in (-1, 3)
    if shape is None or len(shape) != 4:
        raise DataError(
            f"packed sequences: the Softmax {node.name!r} has scores of shape {shape}, but attention needs four axes "
            "[batch, heads, tokens, tokens], so that tokens of other sequences can be masked; train without pack."
        )
    return True


def _add_to_slot(op: Builder, node: ir.Node, slot: int, seen: Value, bias: Value) -> None:
    """Add a bias to the one of an attention operator."""
    if len(node.inputs) <= slot:
        node.resize_inputs(slot + 1)
    given = node.inputs[slot]
    if given is None:
        node.replace_input_with(slot, bias.ir)
        return
    own = op.before(node)
    joined = own.And(own.wrap(given), seen) if given.dtype == ir.DataType.BOOL else own.wrap(given) + bias
    node.replace_input_with(slot, joined.ir)


def _restart_positions(graph: ir.Graph, op: Builder, numbers: Value, same: Value) -> None:
    """Count positions from the first token of each document, where the graph counts them itself."""
    begins = op.ArgMax(op.cast(same, ir.DataType.FLOAT), axis=2, keepdims=0)  # the first token of the same document
    count = op.Range(
        op.constant(0, np.int64), op.Squeeze(op.dimension(numbers, 1)), op.constant(1, np.int64)
    ).with_shape((numbers.shape or (None, None))[1:])
    positions = op.Sub(op.Unsqueeze(count, op.ints(0)), begins)
    for node in list(graph):
        if node.op_type == "GroupQueryAttention" and node.domain == MICROSOFT_DOMAIN:
            rotates = node.attributes.get_int("do_rotary", 0)
            if rotates and (len(node.inputs) <= _POSITIONS or node.inputs[_POSITIONS] is None):
                node.replace_input_with(_POSITIONS, positions.ir)
        elif node.op_type == "Gather" and not node.domain and _is_table(node.inputs[0], 2):
            _look_up(node, op, positions)
        elif node.op_type == "Slice" and not node.domain and _is_table(node.inputs[0], 2, 3):
            added = [use for use in node.outputs[0].consumers() if use.op_type in ("Add", "Unsqueeze", "Expand")]
            if added and not isinstance((dimensions(node.outputs[0]) or (None,))[-2], int):
                assert node.inputs[0] is not None
                raise DataError(
                    f"packed sequences: the model takes positions as the first rows of {node.inputs[0].name!r}, which "
                    "do not begin again in a row; export the model with position_ids, or train it without pack."
                )


def _is_table(value: ir.Value | None, *ranks: int) -> bool:
    return value is not None and value.is_initializer() and is_float(value) and len(dimensions(value) or ()) in ranks


def _look_up(node: ir.Node, op: Builder, positions: Value) -> None:
    """Let a Gather of positions read those of each document; one of tokens, or of given positions, stays."""
    index = node.inputs[1]
    axis = node.attributes.get_int("axis", 0)
    if index is None or axis or len(dimensions(index) or ()) not in (1, 2):
        return
    read, counted = _read_inputs(index)
    if any("position" in name.lower() for name in read):
        return
    if any("mask" not in name.lower() for name in read):
        if counted:
            raise DataError(
                f"packed sequences: the model counts positions from the tokens ({', '.join(sorted(read))}), which do "
                "not begin again in a row; export the model with position_ids, or train it without pack."
            )
        return
    size = dimensions(index) or ()
    if len(size) == 2 and size[0] == size[1] is not None:
        return  # distances [tokens, tokens] between two positions, which are those within a document
    own = op.before(node)
    given = own.cast(own.wrap(index), ir.DataType.INT64)
    row = own.Unsqueeze(given, own.ints(0)) if len(size) == 1 else given
    every = own.Expand(row, own.Shape(positions))
    restarted = own.GatherElements(every, positions, axis=1).with_shape(positions.shape)
    node.replace_input_with(1, restarted.ir)
    _forget_shapes(node.outputs[0])


def _read_inputs(value: ir.Value) -> tuple[set[str], bool]:
    """Return the graph inputs whose values, not shapes, a value is computed from, and whether through a CumSum."""
    names, counted, seen, waiting = set[str](), False, set[ir.Value](), [value]
    while waiting:
        one = waiting.pop()
        if one in seen:
            continue
        seen.add(one)
        node = one.producer()
        if node is None:
            if one.is_graph_input() and not one.is_initializer():
                names.add(str(one.name))
        elif node.op_type not in ("Shape", "Size"):
            counted = counted or node.op_type == "CumSum"
            waiting += [each for each in node.inputs if each is not None]
    return names, counted


def _forget_shapes(value: ir.Value) -> None:
    """Forget the shapes of a value and of those that follow from it alone, whose first axis becomes the batch's."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        shape = dimensions(one)
        if shape is None or one.is_graph_output():
            continue
        one.shape = None
        if len(shape) < 3 or shape[0] == 1:
            waiting += [output for node in one.consumers() for output in node.outputs]


_QUERY_NORM = 14
"""The input slot of the weight [n] for queries; the one for keys follows."""


def separate_head_norms(model: ir.Model) -> None:
    """Move the normalization of queries and keys out of GroupQueryAttention, into nodes before it."""
    graph = model.graph
    for node in list(graph):
        if node.op_type != "GroupQueryAttention" or node.domain != MICROSOFT_DOMAIN or len(node.inputs) <= _QUERY_NORM:
            continue
        query, *weights = node.inputs[0], *node.inputs[_QUERY_NORM : _QUERY_NORM + 2]
        sizes = [dimensions(weight) if weight is not None else None for weight in weights]
        size = (sizes[0] or (None,))[0]
        if query is None or not isinstance(size, int) or len(weights) != 2 or None in weights:
            continue  # the operator's gradient raises the error
        op = Builder(graph, graph.opset_imports[""], before=node)
        settings = {name: attribute.value for name, attribute in node.attributes.items()}
        heads = [int(settings["num_heads"]), *[int(settings["kv_num_heads"])] * 2]
        parts = [op.wrap(value) for value in node.inputs[:3] if value is not None]
        if len(parts) < 3:
            counts = op.ints(*(count * size for count in heads))
            parts = list(op.several("Split", parts[0], counts, outputs=3, axis=2))
            for part, count in zip(parts, heads, strict=True):
                part.ir.dtype = op.wrap(query).dtype
                part.with_shape((*(dimensions(query) or (None, None))[:2], count * size))
        shared = settings.get("qk_norm_epsilon", 1e-6)
        for slot, own in enumerate(("q_norm_epsilon", "k_norm_epsilon")):
            weight = weights[slot]
            assert weight is not None
            part = _normalized(op, parts[slot], op.wrap(weight), heads[slot], size, float(settings.get(own, shared)))
            node.replace_input_with(slot, part.ir)
            node.replace_input_with(_QUERY_NORM + slot, None)
            node.attributes.pop(own, None)
        node.attributes.pop("qk_norm_epsilon", None)
        node.replace_input_with(2, parts[2].ir)


def _normalized(op: Builder, x: Value, weight: Value, heads: int, size: int, epsilon: float) -> Value:
    """y = weight x / sqrt(mean x² + epsilon) per head of x [b, s, heads n]."""
    shape = x.shape or (None, None, None)
    divided = op.Reshape(x, op.ints(0, 0, heads, size)).with_shape((*shape[:2], heads, size))
    norm = op.several(
        "SimplifiedLayerNormalization", divided, weight, outputs=1, axis=-1, epsilon=epsilon, stash_type=1
    )
    norm[0].ir.dtype = x.dtype
    return op.Reshape(norm[0].with_shape(divided.shape), op.ints(0, 0, heads * size)).with_shape(x.shape)
