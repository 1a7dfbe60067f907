"""Tables of positions and masks: tensors that nobody trained, though a gradient reaches them."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxtrain.ir.value import dimensions, is_float
from onnxtrain.weights.names import is_literal, is_mask, is_table
from onnxtrain.weights.readers import (
    PRODUCTS,
    REARRANGING,
    Functions,
    Reader,
    ReaderUse,
    arrivals,
    is_lookup,
    is_product,
    summed_with,
    use_of,
)
from onnxtrain.weights.stored import as_stored

_HUGE = 1e9
"""No weight is as large; exporters write masks as -inf or the smallest float."""

_FILL, _BEFORE_SOFTMAX = -1e4, -10.0
"""Values that an additive mask adds to hidden positions: anywhere, and to scores before a softmax."""

_FEW = 3
"""A mask has no more values than this, unless a bias is added in."""

_ROWS = 64
"""Number of positions of a table that are examined."""

_LEAST_ROWS = 8

_FIRST_ROW = 16
"""First row that is examined: earlier rows may be padding, later ones are less exact."""

_TOLERANCE = 5e-3
"""Tolerance of a column against a sinusoid, relative to its largest value; float16 tables are within it."""

_STEPS = 16
"""Number of nodes that are searched backward for preprocessing."""

_LOOKED_AT = 1 << 20
"""Number of elements of a tensor that are examined to count its distinct values."""


def table_reason(value: ir.Value, functions: Functions, readers: list[Reader]) -> str:
    """Why a tensor is a table or a mask by its name or what reads it; "" where it is not.

    Args:
        value: An initializer of a model in which no function is expanded yet.
        functions: Model-local functions.
        readers: Where it arrives.
    """
    name = value.name or ""
    if is_table(name):
        return "a table of positions, by its name"
    if _only_angles(value, functions, readers):
        return "a table of positions: only sines and cosines of it are used"
    weighing = [reader for reader in readers if use_of(reader) is ReaderUse.WEIGHT and not is_operand_of_weight(reader)]
    if any(not is_lookup(reader) for reader in weighing):
        return ""
    if _is_sinusoid(value):
        return "a table of positions: its columns are sines and cosines"
    if any(is_lookup(reader) or is_bias(reader) for reader in readers):
        return ""
    written = is_literal(name) and any(size != 1 for size in dimensions(value) or ())
    return "a tensor written in the model's code, by its name" if written else ""


def mask_reason(value: ir.Value) -> str:
    """Why a tensor is a mask; "" where it is not.

    A weight is none, whatever its values: what a product, a layer or a lookup reads, and a bias of a product.
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
    if is_mask(value.name or ""):
        return "a mask, by its name"
    fill = _BEFORE_SOFTMAX if all(_meets_softmax(reader[0]) for reader in readers) else _FILL
    if low <= fill and high <= 0 and _values(array) in range(2, _FEW + 1):
        return "a mask: it holds zeros and values that hide places"
    if (low, high) == (0, 1) and array.ndim >= 2 and _multiplies(readers) and _values(array) == 2:
        return "a mask: it multiplies by zeros and ones"
    return ""


def is_bias(reader: Reader) -> bool:
    """Whether a value is added to a product with weights; scores of attention are a product of data."""
    producer = summed_with(reader)
    if producer is None or (producer.domain, producer.op_type) not in PRODUCTS:
        return False
    return any(is_weight(factor) for factor in producer.inputs)


def is_operand_of_weight(reader: Reader) -> bool:
    """Return whether a product reads data there: the left operand, with an initializer as the right one."""
    node, index = reader
    if index != 0 or not is_product(reader) or node.op_type == "Einsum":
        return False
    return is_weight(node.inputs[1])


def is_preprocessed(reader: Reader) -> bool:
    """Return whether a node scales or shifts a floating input of the model as it comes, perhaps shifted before."""
    node, index = reader
    if node.domain or node.op_type not in ("Add", "Sub", "Mul", "Div") or index > 1:
        return False
    other = node.inputs[1 - index]
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
        elif producer.op_type in REARRANGING:
            other = producer.inputs[0]
        else:
            return False
    return False


def _is_given(value: ir.Value | None) -> bool:
    """Return whether a value is an initializer or an input of the model."""
    return value is not None and (is_weight(value) or value.producer() is None)


def is_weight(value: ir.Value | None) -> bool:
    """Return whether a value is an initializer, perhaps rearranged."""
    while value is not None:
        if value.is_initializer():
            return True
        producer = value.producer()
        if producer is None or producer.domain or producer.op_type not in REARRANGING:
            return False
        value = producer.inputs[0]
    return False


def _meets_softmax(node: ir.Node) -> bool:
    """Whether what a node adds up goes to a softmax."""
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
    """Whether all that is made of a tensor are sines and cosines of its multiples: frequencies, angles.

    Weights that multiply data are none: sinusoidal layers learn theirs. Positions are no such data, nor is an input of
    the model as it comes, such as a time, where both sines and cosines are taken.
    """
    seen: set[str] = set()
    waiting, known, times = [readers], {value}, False
    while waiting:
        for node, index in waiting.pop():
            others = [other for at, other in enumerate(node.inputs) if at != index]
            if node.op_type in ("Cos", "Sin") and not node.domain:
                seen.add(node.op_type)
            elif (node.op_type in ("Mul", "Div") and not any(_is_data(other) for other in others)) or (
                is_product((node, index)) and not any(_is_data(other, inputs=True) for other in others)
            ):
                times = times or any(_is_data(other, inputs=True) for other in others)
                waiting += [arrivals(output, functions) for output in node.outputs if output not in known]
                known.update(node.outputs)
            else:
                return False
    return seen == {"Cos", "Sin"} or (bool(seen) and not times)


def _is_data(value: ir.Value | None, *, inputs: bool = False) -> bool:
    """Whether a value depends on weights, or on a floating input of the model.

    Args:
        value: The value.
        inputs: Whether an input that is only rearranged counts, too.
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
    """Whether the columns of a tensor are sines and cosines of their row's number.

    Such a column satisfies t[p + 1] + t[p - 1] = 2 cos(w) t[p] for a frequency w of its own. What was learned does not,
    and a column that is constant or rises evenly says nothing.
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
    """Return whether few rows consist of pairs of a sine and a cosine of one angle, side by side or half and half."""
    width = rows.shape[1]
    if width % 2 or not np.isfinite(rows).all() or (rows == rows[:1]).all():
        return False
    full = rows.astype(np.float64)
    halves = ((full[:, ::2], full[:, 1::2]), (full[:, : width // 2], full[:, width // 2 :]))
    return any(bool((np.abs(one**2 + two**2 - 1) <= _TOLERANCE).all()) for one, two in halves)
