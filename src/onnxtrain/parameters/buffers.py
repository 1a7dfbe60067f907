"""Recognize non-trainable buffers: position tables and masks that a gradient reaches."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxtrain.graph.value import dimensions, is_float
from onnxtrain.parameters.fixed_values import fixed_matrix
from onnxtrain.parameters.names import is_literal, is_mask, is_program_tensor, is_table, is_transform
from onnxtrain.parameters.program import is_declared_parameter
from onnxtrain.parameters.readers import (
    LINEAR,
    REARRANGING,
    Functions,
    Reader,
    ReaderUse,
    arrivals,
    is_linear,
    is_lookup,
    summed_with,
    use_of,
)
from onnxtrain.parameters.stored import as_stored

BY_VALUES = ", by its values"
"""End of the reason of a fixed matrix."""

_HUGE = 1e9
"""Magnitude that no weight has; exporters write masks as -inf or the smallest float."""

_FILL, _BEFORE_SOFTMAX = -1e4, -10.0
"""Values of an additive mask at hidden positions: in general, and before a softmax."""

_FEW = 3
"""Largest number of distinct values of a mask."""

_ROWS = 64
"""Number of rows of a table that are examined."""

_LEAST_ROWS = 8

_FIRST_ROW = 16
"""First examined row: earlier rows may be padding, later ones are less exact."""

_TOLERANCE = 5e-3
"""Tolerance of a column against a sinusoid, relative to its largest value; float16 tables are within it."""

_STEPS = 16
"""Number of nodes searched backward for preprocessing."""

_LOOKED_AT = 1 << 20
"""Number of elements examined to count distinct values."""


def table_reason(value: ir.Value, functions: Functions, readers: list[Reader]) -> str:
    """Return why a tensor is a table by its name or readers, such as of positions; "" where it is not.

    Args:
        value: An initializer of a model before functions are expanded.
        functions: Model-local functions.
        readers: The readers of the initializer.
    """
    name = value.name or ""
    if is_program_tensor(name):
        return "a tensor that was made of numbers, by its name"
    if not is_declared_parameter(value):  # its author says more than its name
        if is_table(name):
            return "a position table, by its name"
        if is_transform(name):
            return "a matrix of a spectrogram, by its name"
        if _only_angles(value, functions, readers):
            return "a position table: only its sines and cosines are used"
    weighing = [reader for reader in readers if use_of(reader) is ReaderUse.WEIGHT and not is_operand_of_weight(reader)]
    weighs = any(not is_lookup(reader) for reader in weighing)
    if not weighs and _is_sinusoid(value):
        return "a position table: its columns are sines and cosines"
    tensor = value.const_value
    is_judged = is_float(value) and not is_declared_parameter(value)
    if is_judged and tensor is not None and (kind := fixed_matrix(as_stored(tensor), readers)):
        return f"{kind}{BY_VALUES}"
    if weighs:
        return ""
    if any(is_lookup(reader) or is_bias(reader) for reader in readers):
        return ""
    written = is_literal(name) and any(size != 1 for size in dimensions(value) or ())
    return "a tensor written in the model's code, by its name" if written else ""


def mask_reason(value: ir.Value) -> str:
    """Return why a tensor is a mask; "" where it is not.

    A weight of a layer or lookup and a bias of a linear layer are not masks, whatever their values.
    """
    readers = arrivals(value)
    if any(use_of(reader) is ReaderUse.WEIGHT for reader in readers):
        return ""
    tensor = value.const_value
    if tensor is None or any(is_bias(reader) for reader in readers):
        return ""
    array = np.asarray(tensor.numpy())
    low, high = float(array.min()), float(array.max())
    if not (np.isfinite(low) and np.isfinite(high)) or max(abs(low), abs(high)) >= _HUGE:
        return "a mask: it holds infinite or huge values"
    if not is_declared_parameter(value) and is_mask(value.name or ""):
        return "a mask, by its name"
    fill = _BEFORE_SOFTMAX if all(_meets_softmax(reader[0]) for reader in readers) else _FILL
    if low <= fill and high <= 0 and _values(array) in range(2, _FEW + 1):
        return "a mask: it holds zeros and values that hide positions"
    if (low, high) == (0, 1) and array.ndim >= 2 and _multiplies(readers) and _values(array) == 2:
        return "a mask: it multiplies by zeros and ones"
    return ""


def is_bias(reader: Reader) -> bool:
    """Return whether a value is added to the result of a linear layer, not to a matmul of two activations."""
    producer = summed_with(reader)
    if producer is None or (producer.domain, producer.op_type) not in LINEAR:
        return False
    return any(is_weight(operand) for operand in producer.inputs)


def is_operand_of_weight(reader: Reader) -> bool:
    """Return whether the input is the data of a linear operator: its left operand, next to an initializer."""
    node, index = reader
    if index != 0 or not is_linear(reader) or node.op_type == "Einsum":
        return False
    return is_weight(node.inputs[1])


def is_preprocessed(reader: Reader) -> bool:
    """Return whether a node scales or shifts a raw floating input of the model, perhaps after other such nodes."""
    node, index = reader
    if node.domain or node.op_type not in ("Add", "Sub", "Mul", "Div") or index > 1:
        return False
    other = node.inputs[1 - index]
    if _widens(other, node.outputs[0]):
        return False
    for _ in range(_STEPS):
        producer = None if other is None else other.producer()
        if other is None or producer is None:
            return other is not None and not other.is_initializer()
        if producer.domain:
            return False
        if producer.op_type in ("Add", "Sub", "Mul", "Div"):
            one, two = producer.inputs[:2]
            if _is_given(two):
                other = one
            elif _is_given(one):
                other = two
            else:
                return False
            if _widens(other, producer.outputs[0]):
                return False
        elif producer.op_type in REARRANGING:
            other = producer.inputs[0]
        else:
            return False
    return False


def _widens(one: ir.Value | None, result: ir.Value) -> bool:
    """Return whether broadcasting repeats a value, as centres do to which an input is compared."""
    before, after = None if one is None else dimensions(one), dimensions(result)
    if before is None or after is None:
        return False
    return len(before) < len(after) or any(a == 1 != b for a, b in zip(before, after, strict=True))


def _is_given(value: ir.Value | None) -> bool:
    """Return whether a value is an initializer or an input of the model."""
    return value is not None and (is_weight(value) or value.producer() is None)


def is_weight(value: ir.Value | None) -> bool:
    """Return whether a value is a (rearranged) initializer."""
    while value is not None:
        if value.is_initializer():
            return True
        producer = value.producer()
        if producer is None or producer.domain or producer.op_type not in REARRANGING:
            return False
        value = producer.inputs[0]
    return False


def _meets_softmax(node: ir.Node) -> bool:
    """Return whether the result of an Add reaches a softmax."""
    if node.domain or node.op_type != "Add":
        return False
    behind = REARRANGING | {"Add"}
    return any(reader.op_type in ("Softmax", "LogSoftmax") for reader, _ in arrivals(node.outputs[0], through=behind))


def _multiplies(readers: list[Reader]) -> bool:
    return all(node.op_type == "Mul" and not node.domain for node, _ in readers)


def _values(array: np.ndarray) -> int:
    """Count the distinct values among the examined elements of an array."""
    return len(np.unique(array.reshape(-1)[:_LOOKED_AT]))


def _only_angles(value: ir.Value, functions: Functions, readers: list[Reader]) -> bool:
    """Return whether only sines and cosines of multiples of a tensor are used: frequencies, angles.

    Weights that multiply data do not count, since sinusoidal layers are trained. Positions are not data, nor is a raw
    input of the model, such as a time, where both sines and cosines are used.
    """
    seen: set[str] = set()
    waiting, known, multiplies_input = [readers], {value}, False
    while waiting:
        for node, index in waiting.pop():
            others = [other for at, other in enumerate(node.inputs) if at != index]
            if node.op_type in ("Cos", "Sin") and not node.domain:
                seen.add(node.op_type)
            elif (node.op_type in ("Mul", "Div") and not any(_is_data(other) for other in others)) or (
                is_linear((node, index)) and not any(_is_data(other, inputs=True) for other in others)
            ):
                multiplies_input = multiplies_input or any(_is_data(other, inputs=True) for other in others)
                waiting += [arrivals(output, functions) for output in node.outputs if output not in known]
                known.update(node.outputs)
            else:
                return False
    return seen == {"Cos", "Sin"} or (bool(seen) and not multiplies_input)


def _is_data(value: ir.Value | None, *, inputs: bool = False) -> bool:
    """Return whether a value depends on weights or on a floating input of the model.

    Args:
        value: The value.
        inputs: True if a rearranged raw input counts, too.
    """
    waiting, seen, computed = [(value, inputs)], set(), False
    while waiting:
        value, computed = waiting.pop()
        if value is None or (value, computed) in seen:
            continue
        seen.add((value, computed))
        producer = value.producer()
        if producer is not None:
            if producer.op_type not in ("Shape", "Size"):
                inner = computed or producer.op_type not in REARRANGING
                waiting += [(source, inner) for source in producer.inputs]
        elif value.is_initializer():
            if is_float(value) and any(size != 1 for size in dimensions(value) or ()):
                return True
        elif (value.dtype is None or is_float(value)) and computed:
            return True
    return False


def _is_sinusoid(value: ir.Value) -> bool:
    """Return whether the columns of a tensor are sinusoids of the row index.

    Such a column satisfies t[p + 1] + t[p - 1] = 2 cos(w) t[p] for its frequency w. Trained columns do not; constant
    and evenly spaced columns are inconclusive.
    """
    shape = dimensions(value)
    tensor = value.const_value
    if tensor is None or shape is None or value.dtype is None or not value.dtype.is_floating_point():
        return False
    sizes = [size for size in shape if size != 1]
    if len(sizes) < 2 or not all(isinstance(size, int) for size in sizes):
        return False
    rows = as_stored(tensor).reshape(int(sizes[0] or 0), -1)
    if len(rows) < _LEAST_ROWS:
        return _is_of_pairs(rows)
    start = min(len(rows) // 4, _FIRST_ROW)
    part = rows[start : start + _ROWS].astype(np.float64)
    if not np.isfinite(part).all():
        return False
    middle, around = part[1:-1], part[2:] + part[:-2]
    squares = (middle**2).sum(0)
    factors = np.divide((middle * around).sum(0), squares, out=np.full(squares.shape, 2.0), where=squares > 0)
    fits = np.abs(around - factors * middle) <= _TOLERANCE * np.abs(part).max(0)
    turns = np.abs(factors) < 2 - _TOLERANCE
    return bool(turns.any() and (np.abs(factors) <= 2 + _TOLERANCE).all() and fits.all())


def _is_of_pairs(rows: np.ndarray) -> bool:
    """Return whether few rows consist of (sine, cosine) pairs, adjacent or in two halves."""
    width = rows.shape[1]
    if width % 2 or not np.isfinite(rows).all() or (rows == rows[:1]).all():
        return False
    full = rows.astype(np.float64)
    halves = ((full[:, ::2], full[:, 1::2]), (full[:, : width // 2], full[:, width // 2 :]))
    return any(bool((np.abs(one**2 + two**2 - 1) <= _TOLERANCE).all()) for one, two in halves)
