"""Decide on tensors whose readers leave open whether they are trained, by their values and names.

Such tensors are operands of Add, Mul and the like, initial states, and scalars: a logit scale, a temperature or a gate
as opposed to 1 / sqrt(d), 0.5 or an epsilon. The name is an author's (a module path, a word) or an exporter's
(``val_5``, ``onnx::Mul_32``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from onnxtrain.graph.value import dimensions
from onnxtrain.parameters.buffers import is_bias, is_operand_of_weight, is_preprocessed, is_weight
from onnxtrain.parameters.names import (
    NameOrigin,
    is_buffer,
    is_computed_parameter,
    is_eager_result,
    is_learned,
    is_preprocessing,
    is_put_together,
    is_statistic_name,
    last_word,
    origin,
)
from onnxtrain.parameters.program import CALL
from onnxtrain.parameters.readers import (
    REARRANGING,
    Functions,
    Reader,
    ReaderUse,
    arrivals,
    behind_identity,
    is_lookup,
    is_normalization,
    summed_with,
    use_of,
)
from onnxtrain.parameters.stored import as_stored
from onnxtrain.parameters.ties import has_one_value

REASON = "a scalar of the computation"

_SPREADING = frozenset({"Expand", "Tile"})
"""Operators that fill a tensor with a scalar, such as the zeros of an initial state."""

_SHAPING = frozenset({"Exp", "Sigmoid", "Softplus", "Tanh"})
"""Functions that bound a trainable scalar; an exporter folds them for constants."""

_SHAPED = r"^(exp|sigmoid|softplus|tanh)(_\d+)?$"
"""Names of bounded scalars that PyTorch's newer exporter computed."""

_GUARDED = frozenset({"Sqrt", "Log", "Reciprocal", "Pow"})
"""Functions whose argument an epsilon keeps from zero."""

_LARGEST_EPSILON = 1e-2

_HUGE = 1e4
"""Magnitude of fill values of masks, which trainable scalars do not reach."""

_KNOWN = (math.pi, math.e, math.log(2), math.log(10), math.sqrt(2 / math.pi), 2 / math.sqrt(math.pi), 0.044715, 1.702)
"""Constants of formulas that are neither round numbers nor roots."""

_OF_ACTIVATIONS = (math.sqrt(2), math.sqrt(0.5), math.sqrt(2 / math.pi), 2 / math.sqrt(math.pi), 0.044715, 1.702)
"""Constants of GELU, which are no initial values of trainable scalars."""

_LARGEST_ROOT = 1 << 14


def is_scalar(value: ir.Value) -> bool:
    """Return whether a value has one element."""
    shape = dimensions(value)
    return shape is not None and all(size == 1 for size in shape)


def scalar_readers(value: ir.Value, functions: Functions | None = None) -> list[Reader]:
    """Return the readers of a one-element value, including operators that fill a tensor with it."""
    return arrivals(value, functions, REARRANGING - _SPREADING)


def scalar_decision(value: ir.Value) -> Decision:
    """Decide on a one-element initializer; open for a common number under an author's name, such as a scale of 1."""
    if is_weight_of_layer(value):
        return LEARNED
    name, readers = value.name or "", scalar_readers(value)
    number = _number(value)
    constant = Decision(REASON)
    if number is not None and (not math.isfinite(number) or abs(number) >= _HUGE):
        return constant
    author = origin(value)
    limited = arrivals(value, through=REARRANGING | {"Clip"})
    shaped = any(node.op_type in _SHAPING and not node.domain for node, _ in limited)
    if author is NameOrigin.EXPORTER:
        learned = shaped or (re.match(_SHAPED, name) is not None and number is not None and not is_common(number))
        return LEARNED if learned else constant
    if any(_is_epsilon(reader, number) for reader in readers) or _is_of_activation(number) or is_buffer(name):
        return constant
    if author is NameOrigin.MODULE or is_learned(name) or shaped or any(_is_bias(reader) for reader in readers):
        return LEARNED
    return Decision(REASON, open=True) if number is None or is_common(number) else LEARNED


def _number(value: ir.Value) -> float | None:
    tensor = value.const_value
    return None if tensor is None else float(np.asarray(tensor.numpy()).reshape(-1)[0])


def is_weight_of_layer(value: ir.Value) -> bool:
    """Return whether readers show a weight: a parameter of a layer, or a bias of a linear layer."""
    readers = scalar_readers(value)
    weighing = [reader for reader in readers if use_of(reader) is ReaderUse.WEIGHT and not is_operand_of_weight(reader)]
    # Exporters add a scale and bias to a normalization without them.
    is_fill = origin(value) is NameOrigin.EXPORTER and _number(value) in (0, 1)
    weighing = [reader for reader in weighing if not (is_fill and is_normalization(reader))]
    # jax2onnx writes the third operand of Gemm as a zero where there is no bias.
    if dimensions(value) == () and _number(value) == 0:
        weighing = [reader for reader in weighing if reader[0].op_type != "Gemm" or _has_one_output(reader[0])]
    if weighing:
        return True
    biases = [reader for reader in readers if _is_bias(reader)] if dimensions(value) != () else []
    if origin(value) is NameOrigin.EXPORTER:
        biases = [reader for reader in biases if _has_one_channel(reader)]
    return bool(biases)


def _has_one_channel(reader: Reader) -> bool:
    """Return whether the linear layer of a bias has a single output."""
    layer = summed_with(reader)
    return layer is not None and _has_one_output(layer)


def _has_one_output(layer: ir.Node) -> bool:
    shape = dimensions(layer.outputs[0])
    return shape is not None and len(shape) > 1 and shape[1 if layer.op_type.startswith("Conv") else -1] == 1


def _is_epsilon(reader: Reader, number: float | None) -> bool:
    """Return whether a small number keeps the argument of a root, a logarithm or a division from zero."""
    node, _ = reader
    if number is None or abs(number) > _LARGEST_EPSILON or node.op_type not in ("Add", "Max") or node.domain:
        return False
    return any(
        not other.domain and (other.op_type in _GUARDED or (other.op_type, index) == ("Div", 1))
        for other, index in node.outputs[0].uses()
    )


def _is_bias(reader: Reader) -> bool:
    """Return whether a node adds a value to the result of a linear layer."""
    producer = summed_with(reader)
    return producer is not None and producer.op_type in ("MatMul", "Gemm", "Conv", "ConvTranspose")


def _is_of_activation(number: float | None) -> bool:
    return number is not None and any(math.isclose(abs(number), one, rel_tol=1e-6) for one in _OF_ACTIVATIONS)


def is_common(number: float) -> bool:
    """Return whether a number is typical of formulas: round, a root of an integer or its inverse, or known.

    Example:
        >>> [is_common(number) for number in (0.5, 1e-5, 1 / math.sqrt(80), 2.6592)]
        [True, True, True, False]
    """
    return _is_round(number) or _is_root(number) or any(math.isclose(abs(number), k, rel_tol=1e-6) for k in _KNOWN)


def _is_round(number: float) -> bool:
    digits = np.format_float_scientific(np.float32(number), trim="-").partition("e")[0]
    return len(digits.replace("-", "").replace(".", "")) <= 3 or float(number).is_integer()


def _is_root(number: float) -> bool:
    if number == 0:
        return True
    square = number * number
    candidates: Sequence[float] = (square, 1 / square, 1 / abs(number))
    return any(
        math.isclose(c, round(c), rel_tol=1e-6) and 1 <= round(c) <= _LARGEST_ROOT for c in candidates if c < 2**31
    )


_WEIGHT_NAMES = frozenset({"weight", "bias", "gamma", "beta", "kernel"})

_TOLERANCE = 1e-5

_CIRCLE = 1e-3
"""Tolerance of cos² + sin² = 1."""

_LEAST_STEPS = 3
"""Smallest number of values that can be evenly spaced."""


class Decision(NamedTuple):
    """Reason why a tensor is not a parameter.

    Attributes:
        reason: The reason; "" for a parameter.
        open: True if neither use nor name decides, so that a hint is given.
    """

    reason: str = ""
    open: bool = False


LEARNED = Decision()
OPEN = Decision("neither its use nor its name says that it is learned", open=True)
FILL = Decision("ones, zeros or another single value that an exporter wrote")
PREPROCESSING = Decision("mean or deviation of preprocessing")
_BY_NAME = Decision("mean or deviation of preprocessing, by its name", open=True)
_TABLE = Decision("a position table: its values are evenly spaced")


def operand_decision(value: ir.Value) -> Decision:
    """Decide on a floating tensor of several elements that is not a setting, table or mask."""
    readers, name = arrivals(value), value.name or ""
    if is_statistic_name(name):
        return Decision("a running statistic, by its name")
    if found := preprocessing(value, readers):
        return found
    if _is_filled_state(value, readers):
        return FILL
    if is_eager_result(name) and not any(use_of(reader) is ReaderUse.WEIGHT for reader in readers):
        return OPEN  # a buffer, more often than not
    if origin(value) is not NameOrigin.EXPORTER:
        return LEARNED
    if is_put_together(name) and value.const_value is not None and not as_stored(value.const_value).any():
        return Decision(FILL.reason, open=True)
    weighing = [reader for reader in readers if use_of(reader) is ReaderUse.WEIGHT and not is_operand_of_weight(reader)]
    if any(not is_normalization(reader) for reader in weighing):
        return LEARNED
    tensor = value.const_value
    if tensor is None:
        return LEARNED if weighing else OPEN
    array = as_stored(tensor)
    if has_one_value(array):
        if not weighing and any(_is_affine(reader, name) for reader in readers):
            return LEARNED
        if any(map(is_bias, readers)):
            return LEARNED
        # Exporters fill in ones and zeros.
        return FILL if weighing or array.flat[0] in (0, 1) else OPEN
    if weighing:
        return LEARNED
    if _is_repeated(array):
        return OPEN
    if any(map(is_bias, readers)):
        return LEARNED
    return _by_values(array, readers)


def may_be_fresh(value: ir.Value) -> bool:
    """Return whether a tensor of one value may be an untrained scale or bias: it is not an initial state."""
    return not any(use_of(reader) is ReaderUse.STATE for reader in arrivals(value))


def preprocessing(value: ir.Value, readers: Sequence[Reader]) -> Decision | None:
    """Decide on a mean or deviation that normalizes an input of the model; ``None`` for another tensor."""
    name = value.name or ""
    if last_word(name) not in _WEIGHT_NAMES and any(map(_normalizes, readers)):
        return PREPROCESSING
    if not (is_preprocessing(name) and any(map(is_preprocessed, readers))):
        return None
    return PREPROCESSING if is_scalar(value) else _BY_NAME


def _by_values(array: np.ndarray, readers: Sequence[Reader]) -> Decision:
    """Decide on an operand with an exporter's name by its values."""
    if _is_evenly_spaced(array):
        return _TABLE
    if any(map(is_preprocessed, readers)):
        return PREPROCESSING if all(map(_is_of_affine, readers)) else OPEN
    operators = {node.op_type for node, _ in readers if not node.domain}
    if any(use_of(reader) is ReaderUse.STATE for reader in readers):
        return LEARNED if all(_is_one_state(array, node) for node, _ in readers) else OPEN
    axes = sum(size != 1 for size in array.shape)
    if operators & {"Add", "Sub"} or (operators & {"Mul", "Div"} and axes == 1):
        return LEARNED
    return OPEN


def rotary_tables(values: Iterable[ir.Value]) -> set[ir.Value]:
    """Find pairs of cosine and sine tables: tensors of one shape with a constant sum of squares."""
    alike: dict[tuple[object, ...], list[tuple[ir.Value, np.ndarray]]] = {}
    for value in values:
        tensor, shape = value.const_value, dimensions(value) or ()
        is_table = sum(size != 1 for size in shape) > 1
        if is_table and tensor is not None and all(map(_may_be_table, arrivals(value))):
            alike.setdefault(tuple(shape), []).append((value, as_stored(tensor)))
    found: set[ir.Value] = set()
    for group in alike.values():
        for index, (one, cosines) in enumerate(group):
            found.update(v for two, sines in group[index + 1 :] if _are_circle(cosines, sines) for v in (one, two))
    return found


def _may_be_table(reader: Reader) -> bool:
    return use_of(reader) is ReaderUse.OPEN or is_lookup(reader)


def _are_circle(cosines: np.ndarray, sines: np.ndarray) -> bool:
    """Return whether pairs of elements lie on a circle; checking the ends rejects most others early."""
    ends = [float(cosines.flat[index]) ** 2 + float(sines.flat[index]) ** 2 for index in (0, -1)]
    if ends[0] == 0 or not math.isclose(*ends, rel_tol=_CIRCLE) or has_one_value(cosines):
        return False
    return np.allclose(cosines.astype(np.float64) ** 2 + sines.astype(np.float64) ** 2, ends[0], rtol=_CIRCLE)


def _normalizes(reader: Reader) -> bool:
    """Return whether a node is part of (x - mean) / deviation of a raw input x of the model.

    Both are tensors that a single node reads.
    """
    node, index = reader
    if not is_preprocessed(reader) or (node.op_type in ("Sub", "Div") and index != 1):
        return False
    before = node if node.op_type == "Sub" else None
    if before is None and node.op_type in ("Mul", "Div"):
        other = node.inputs[1 - index]
        before = None if other is None else other.producer()
    if before is None or before.op_type != "Sub" or not is_weight(before.inputs[1]):
        return False
    after = [user for user, _ in before.outputs[0].uses()]
    if len(after) != 1 or after[0].op_type not in ("Mul", "Div") or not is_preprocessed((before, 1)):
        return False
    pair = [behind_identity(value) for value in (before.inputs[1], after[0].inputs[1])]
    known = [value for value in pair if value is not None and is_weight(value)]
    # Other names belong to a trainable normalization.
    is_named = any(is_preprocessing(v.name or "") or origin(v) is NameOrigin.EXPORTER for v in known)
    return len(known) == 2 and is_named and dimensions(known[0]) == dimensions(known[1])


def _is_of_affine(reader: Reader) -> bool:
    """Return whether a node is part of x scale + shift with two initializers."""
    node, index = reader
    other = node.inputs[1 - index]
    before = None if other is None else other.producer()
    after = list(node.outputs[0].uses())
    pairs = [(before, node)] + ([(node, after[0][0])] if len(after) == 1 else [])
    return any(
        one is not None
        and one.op_type in ("Mul", "Div")
        and two.op_type in ("Add", "Sub")
        and all(any(map(_is_made, pair.inputs)) for pair in (one, two))
        for one, two in pairs
    )


def _is_made(value: ir.Value | None) -> bool:
    """Return whether a value is an initializer with an exporter's name."""
    return value is not None and is_weight(value) and origin(value) is NameOrigin.EXPORTER


def _is_affine(reader: Reader, name: str) -> bool:
    """Return whether an operand with a single element is a scale or bias of a normalization.

    PyTorch's newer exporter writes the original call of a node, with its parameters. The older one writes the fill of a
    normalization without parameters as Constant nodes, and the module's parameters as initializers.
    """
    node, index = reader
    if node.op_type not in ("Mul", "Add") or node.domain:
        return False
    call = node.metadata_props.get(CALL)
    if call is not None:
        return "norm" in call and len(re.findall(r"%p_\w+", call)) > (node.op_type == "Add")
    other = node.inputs[1 - index]
    for _ in range(3):  # InstanceNormalization, Reshape, Mul, Add
        producer = None if other is None else other.producer()
        if producer is None:
            return False
        if producer.op_type == "InstanceNormalization":
            return is_computed_parameter(name)
        other = producer.inputs[0]
    return False


def _is_filled_state(value: ir.Value, readers: Sequence[Reader]) -> bool:
    """Return whether a tensor of one value is the initial state of each example of a fixed batch."""
    nodes = [reader[0] for reader in readers if use_of(reader) is ReaderUse.STATE]
    if not nodes or len(nodes) < len(readers) or value.const_value is None:
        return False
    array = as_stored(value.const_value)
    return has_one_value(array) and not any(_is_one_state(array, node) for node in nodes)


def _is_one_state(array: np.ndarray, node: ir.Node) -> bool:
    """Return whether all examples of a batch share an initial state."""
    layout = node.attributes["layout"].as_int() if "layout" in node.attributes else 0
    return array.ndim == 3 and array.shape[0 if layout else 1] == 1


def _is_repeated(array: np.ndarray) -> bool:
    """Return whether values repeat along an axis, such as an exporter's copies for each example of a batch."""
    if sum(size != 1 for size in array.shape) < 2:
        return False
    return any(size > 1 and bool((array == array.take([0], axis)).all()) for axis, size in enumerate(array.shape))


def _is_evenly_spaced(array: np.ndarray) -> bool:
    """Return whether values are evenly spaced along an axis (grids, distances, anchors) or geometric (slopes)."""
    full = array.astype(np.float64)
    if not np.isfinite(full).all():
        return False
    for axis, size in enumerate(full.shape):
        if size >= _LEAST_STEPS:
            steps = np.diff(full, axis=axis)
            largest = float(np.abs(full).max())
            if steps.any() and np.abs(np.diff(steps, axis=axis)).max() <= _TOLERANCE * largest:
                return True
    if math.prod(full.shape) == max(full.shape, default=0) >= _LEAST_STEPS and (full > 0).all():
        logarithms = np.diff(np.log(full.reshape(-1)))
        if logarithms.any() and np.ptp(logarithms) <= _TOLERANCE:
            return True
    halves = 2 * full
    return bool(full.size > _LEAST_STEPS and (halves == np.round(halves)).all())
