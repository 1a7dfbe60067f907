"""Explain failures inside ONNX Runtime: memory, indices beyond a table, sequences that are too long, unequal sizes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.errors import DataError, OnnxTrainError, StepError
from onnxtrain.graph.domains import MICROSOFT_DOMAIN
from onnxtrain.graph.operands import Value
from onnxtrain.graph.value import dimensions

_MEBIBYTE = 2**20

_NO_MEMORY = re.compile(r"failed to allocate memory|bad.alloc|out of memory|not enough memory", re.IGNORECASE)

_OUTSIDE = re.compile(r"(?:idx=|an index is )(-?\d+)\D+ \[?-\d+\D+(\d+)")
"""Index and largest index in messages of ONNX Runtime's Gather, and of the sums of rows of this project."""

_TOO_LONG = re.compile(r"cos_cache dimension 0 shall not be less|Updating cos_cache and sin_cache in RotaryEmbedding")

_UNEQUAL = re.compile(r"Attempting to broadcast an axis by a dimension other than 1\. (\d+) by (\d+)")
"""ONNX Runtime makes a Slice of the Gather of counted positions, which ends at the last row."""

_CACHES = {"RotaryEmbedding": 2, "GroupQueryAttention": 7}
"""Operators of ONNX Runtime with tables of cosines, one row a position, and their input slots for them."""

_REASON = "onnxtrain.failure"
"""Metadata key of a node that data can make fail: the sentence for that."""

_RESHAPED = re.compile(r"Input shape: ?\{([\d,]*)\}, requested shape: ?\{([\d,]*)\}")

_ASKED = "onnxtrain.asked"
"""Metadata key of a Reshape of :func:`require_shape`: the sizes it asks for, those needed or sums."""

_KEEP_ELEMENTS = ("Cast", "Expand", "Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze")


def explain_failure(output: Value, sentence: str) -> None:
    """Say why the node of an output fails, where only data of the wrong size can make it fail."""
    producer = output.ir.producer()
    assert producer is not None
    producer.metadata_props[_REASON] = sentence


def require_shape(value: Value, needed: Value, sentence: str, *, may_differ: int) -> Value:
    """Emit the same elements, in nodes that fail in a step where their shape differs, also where it would broadcast."""
    op, shape = value.op, needed
    if may_differ > 1:  # other sizes may have as many elements in all
        given = op.Shape(value)
        # Where sizes differ, their sum is asked for: more elements than there are, in every runtime an error.
        shape = op.Where(op.Equal(given, needed), given, given + needed)
    result = op.Reshape(value, shape).with_shape(value.shape)
    explain_failure(result, sentence)
    producer = result.ir.producer()
    assert producer is not None
    producer.metadata_props[_ASKED] = "needed" if shape is needed else "sum"
    return result


def explained(error: Exception) -> str:
    """Rewrite an exception of ONNX Runtime as one sentence: operator, node and reason."""
    text = " ".join(str(error).split())
    found = _failed_node(text)
    if found:
        operator, name, reason = found.groups()
        return f"ONNX Runtime failed in the {operator} node {name!r}: {reason or text}"
    return f"ONNX Runtime refused the graph or a step: {text}"


def failure(error: Exception, graph: ir.Graph, feeds: Mapping[str, Any], states: int) -> OnnxTrainError:
    """Return the error for a step that failed."""
    text = " ".join(str(error).split())
    arrays = {
        name: array
        for value in graph.inputs
        if isinstance(array := feeds.get(name := str(value.name)), np.ndarray)  # others may have no memory, either
    }
    if isinstance(error, MemoryError) or _NO_MEMORY.search(text):
        return StepError(_out_of_memory(text, arrays, states))
    sentence = None
    if outside := _OUTSIDE.search(text):
        sentence = _beyond_a_table(text, graph, arrays, int(outside[1]), int(outside[2]) + 1)
    elif _TOO_LONG.search(text):
        sentence = _too_long(arrays, _positions(graph))
    elif unequal := _UNEQUAL.search(text):
        sentence = _beyond_a_slice(graph, arrays, *sorted(map(int, unequal.groups())))
    sentence = sentence or _by_the_node(text, graph, arrays)
    return DataError(sentence) if sentence else StepError(explained(error))


def _by_the_node(text: str, graph: ir.Graph, arrays: Mapping[str, np.ndarray]) -> str | None:
    """Return the sentence that the failed node carries, with the shapes of the step's arrays."""
    node = _named_node(text, graph)
    sentence = None if node is None else node.metadata_props.get(_REASON)
    if node is None or sentence is None:
        return None
    if reshaped := _RESHAPED.search(text):
        given, needed = ([int(size) for size in shape.split(",") if size] for shape in reshaped.groups())
        if node.metadata_props.get(_ASKED) == "sum":
            needed = [size if size == own else size - own for own, size in zip(given, needed, strict=True)]
        return f"{sentence} It has the shape {tuple(given)}, and needs {tuple(needed)}."
    return (
        f"{sentence} The step got "
        + ", ".join(f"{name!r} {array.shape}" for name, array in arrays.items() if array.ndim)
        + "."
    )


def _named_node(text: str, graph: ir.Graph) -> ir.Node | None:
    found = _failed_node(text)
    return None if found is None else next((node for node in graph if node.name == found[2]), None)


def _failed_node(text: str) -> re.Match[str] | None:
    return re.search(r"running (\w+) node\. Name:'([^']*)'(?: Status Message:)? ?(.*)", text)


def _out_of_memory(text: str, arrays: Mapping[str, np.ndarray], states: int) -> str:
    """Describe a failed allocation, with the sizes of weights, optimizer states and the step's arrays."""
    size, node = re.search(r"requested buffer of size (\d+)", text), _failed_node(text)
    wanted = f"{_mebibytes(int(size[1]))} MiB" if size else "a buffer"
    where = f" for the {node[1]} node {node[2]!r}" if node else ""
    given = sum(array.nbytes for array in arrays.values())
    return (
        f"There is not enough memory for this step: {wanted} could not be allocated{where}, beside "
        f"{_mebibytes(states)} MiB of weights and optimizer states and {_mebibytes(given)} MiB of data. Take smaller "
        "batches (batch_size=) or micro-batches (accumulate=), compute large logits in chunks (the loss's chunk=), or "
        'recompute activations (recompute="layers").'
    )


def _mebibytes(size: int) -> str:
    return f"{size / _MEBIBYTE:,.1f}" if size < 10 * _MEBIBYTE else f"{size / _MEBIBYTE:,.0f}"


def _beyond_a_table(text: str, graph: ir.Graph, arrays: Mapping[str, np.ndarray], value: int, rows: int) -> str | None:
    """Describe indices outside of a table: values of an input, or positions that the model counts itself."""
    node, slot = _named_node(text, graph), 4 if "(taken)" in text else 1
    source = node.inputs[slot] if node is not None and len(node.inputs) > slot else None
    while source is not None and (producer := source.producer()) is not None and producer.op_type in _KEEP_ELEMENTS:
        source = producer.inputs[0]
    name = "" if source is None else str(source.name)
    if name not in arrays or "position" in name:
        return _too_long(arrays, rows)
    places = np.argwhere(arrays[name] == value)
    if not len(places):  # it was computed from the input
        return None
    example = int(places[0][0])
    return outside_of_table(repr(name), value, f"example {example} of the batch", rows)


def outside_of_table(subject: str, value: int, where: str, rows: int) -> str:
    """Return the sentence about a token id or position that is no row of its table."""
    if "position" in subject:
        return (
            f"{subject} has the position {value} at {where}, but the model has {rows} positions: they must be 0 to "
            f"{rows - 1}."
        )
    return (
        f"{subject} has the value {value} at {where}, but the model looks it up in a table of {rows} rows: values must "
        f"be 0 to {rows - 1} (for tokens, the vocabulary; another tokenizer may have written them)."
    )


def _too_long(arrays: Mapping[str, np.ndarray], limit: int | None) -> str | None:
    """Describe sequences that are longer than the model's positions, or positions given beyond them."""
    if limit is None:
        return None
    for name, array in arrays.items():
        if "position" in name and array.size and array.dtype.kind in "iu" and array.max() >= limit:
            example = int(np.argwhere(array == array.max())[0][0]) if array.ndim else 0
            return outside_of_table(repr(name), int(array.max()), f"example {example} of the batch", limit)
    for name, array in arrays.items():
        if array.ndim > 1 and array.shape[1] > limit:
            return (
                f"{name!r} has sequences of {array.shape[1]} positions (shape {array.shape}), but the model has "
                f"{limit}; cut them to at most {limit} (with a tokenizer: truncation=True, max_length={limit}; packed "
                f"rows: pack={limit})."
            )
    return None


def _beyond_a_slice(graph: ir.Graph, arrays: Mapping[str, np.ndarray], rows: int, length: int) -> str | None:
    """Describe sequences that are longer than a table of which the model takes the first rows."""
    tables = [node.inputs[0] for node in graph if node.op_type in ("Gather", "Slice") and node.inputs]
    sizes = {
        size for table in tables if table is not None and table.producer() is None for size in dimensions(table) or ()
    }
    as_long = any(array.ndim > 1 and array.shape[1] == length for array in arrays.values())
    return _too_long(arrays, rows) if rows in sizes and as_long else None


def _positions(graph: ir.Graph) -> int | None:
    """Return the number of positions of the shortest rotary cosine table; ``None`` if it is unknown."""
    found = []
    for node in graph:
        slot = _CACHES.get(node.op_type)
        if slot is not None and node.domain == MICROSOFT_DOMAIN and slot < len(node.inputs):
            table = node.inputs[slot]
            rows = (dimensions(table) or (None,))[0] if table is not None else None
            found += [rows] if isinstance(rows, int) else []
    return min(found, default=None)
