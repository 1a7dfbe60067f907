"""Decide whether a floating tensor is trained, by the first of these that tells.

1. The file declares it: a parameter is trained unless no gradient passes its use; a buffer, a tensor of the code and
   what the exporter computed from these are not (use, value and name only word the reason).
2. Its use says that it is a constant: a setting of an operator, angles, the mean of preprocessing.
3. Its values do: position tables, masks, matrices of signal processing.
4. Its name does: a table, a mask, a literal, a running statistic.
5. Nothing says that it is a constant, and its use (a layer reads it), its author's name or its values say that it is
   learned: it is trained.
6. It stays undecided: it is not trained, and a hint names it.

Scalars have tests of their own: a logit scale, a temperature or a gate against 1 / sqrt(d), 0.5 or an epsilon.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np
import onnx_ir as ir

from onnxtrain.graph.value import behind, dimensions, is_float
from onnxtrain.model_file.embedded_weights import EMBEDDED
from onnxtrain.model_file.exporters import NameOrigin, gives, origin
from onnxtrain.model_file.exporters.pytorch import (
    declared_kind,
    is_affine_call,
    is_declared_parameter,
    is_folded_constant,
)
from onnxtrain.model_file.exporters.torchscript import is_literal_node
from onnxtrain.parameters import fixed_values
from onnxtrain.parameters.names import last_word, means
from onnxtrain.parameters.readers import (
    OPERAND_OF,
    REARRANGING,
    ROUNDING,
    Functions,
    Reader,
    ReaderUse,
    arrivals,
    behind_identity,
    is_bias,
    is_linear,
    is_lookup,
    is_normalization,
    is_operand_of_weight,
    is_weight,
    summed_with,
    use_of,
)
from onnxtrain.parameters.stored import as_stored

BY_VALUES: Final = ", by its values"
"""End of the reason of a fixed matrix."""


class Decision(NamedTuple):
    """Reason why a tensor is not a parameter, "" for one; ``open`` if nothing decides, so that a hint is given."""

    reason: str = ""
    open: bool = False


LEARNED: Final = Decision()
OPEN: Final = Decision("neither its use nor its name says that it is learned", open=True)
FILL: Final = Decision("ones, zeros or another single value that an exporter wrote")
_SCALAR: Final = Decision("a scalar of the computation")
_PREPROCESSING: Final = Decision("mean or deviation of preprocessing")
_CODE: Final = "a tensor written in the model's code, by its name"

_LITERAL: Final = "a literal"
_CONSTANT: Final = "a constant"
"""Kind of a tensor that is neither an initializer of the file nor a literal."""

_DECLARED: Final = {
    "BUFFER": "a buffer of a PyTorch module",
    "CONSTANT_TENSOR": "a tensor written in the model's code",
    _LITERAL: _CODE,
    "folded": "computed from constants by the exporter",
}

_EXPONENT: Final = "exponent of Pow"
_PASSED: Final = (OPERAND_OF, "bound of Clip", _EXPONENT, "padding value", "window of STFT")
"""Purposes that leave open whether a declared parameter is one: gradients pass these inputs, or the others it has."""

_SPREADING: Final = frozenset({"Expand", "Tile"})
"""Operators that fill a tensor with a scalar, such as the zeros of an initial state."""

_SHAPING: Final = frozenset({"Exp", "Sigmoid", "Softplus", "Tanh"})
"""Functions that bound a trainable scalar; an exporter folds them for constants."""

_GUARDED: Final = frozenset({"Sqrt", "Log", "Reciprocal", "Pow"})
"""Functions whose argument an epsilon keeps from zero."""

_LARGEST_EPSILON: Final = 1e-2
_HUGE: Final = 1e4
"""Magnitude of fill values of masks, which trainable scalars do not reach."""

_STEPS: Final = 16
"""Number of nodes searched backward for preprocessing."""


class Tensor:
    """A floating initializer and what its readers show, gathered while operators show the roles of their inputs."""

    def __init__(self, value: ir.Value, functions: Functions) -> None:
        self.value, self.name = value, value.name or ""
        self.is_scalar = is_scalar(value)
        self.is_declared = is_declared_parameter(value)
        self._before = scalar_readers(value, functions) if self.is_scalar else arrivals(value, functions)
        uses = {use_of(reader) for reader in self._before}
        settings = sorted(use for use in uses if isinstance(use, str))
        self.setting = " and ".join(settings) if ReaderUse.WEIGHT not in uses else ""
        weighing = _weighing(self._before)
        self._is_layers = any(not is_lookup(reader) for reader in weighing)
        self._is_read = self._is_layers or any(is_lookup(reader) or is_bias(reader) for reader in self._before)
        self.has_angles = not self.is_declared and _only_angles(value, functions, self._before)
        self.kind = _kind(value)
        # No code writes the weights of a recurrent layer as a literal.
        is_recurrent = any(node.op_type in ("LSTM", "GRU", "RNN") and at in (1, 2, 3, 7) for node, at in self._before)
        if self.kind == _LITERAL and is_recurrent:
            self.kind = ""

    @cached_property
    def readers(self) -> list[Reader]:
        """The readers in the expanded model."""
        return arrivals(self.value)

    @cached_property
    def is_weight(self) -> bool:
        """True if an operator reads it as a weight."""
        return any(use_of(reader) is ReaderUse.WEIGHT for reader in self.readers)

    @cached_property
    def is_added(self) -> bool:
        """True if it is added to the result of a linear layer."""
        return any(map(is_bias, self.readers))

    @property
    def may_be_mask(self) -> bool:
        """True if no layer reads its values, which are known."""
        return not (self.is_scalar or self.array is None or self.is_weight or self.is_added)

    @cached_property
    def array(self) -> np.ndarray | None:
        """The values, as the file stores them."""
        return None if self.value.const_value is None else as_stored(self.value.const_value)

    @cached_property
    def is_made(self) -> bool:
        """True if an exporter gave the name."""
        return origin(self.value) is NameOrigin.EXPORTER

    @property
    def is_rotary(self) -> bool:
        """True if it may be one of a pair of cosine and sine tables."""
        is_table = sum(size != 1 for size in dimensions(self.value) or ()) > 1
        open_uses = all(use_of(reader) is ReaderUse.OPEN or is_lookup(reader) for reader in self.readers)
        return is_table and self.array is not None and not (self.setting or self.is_position_table) and open_uses

    @cached_property
    def is_position_table(self) -> bool:
        """True if no layer reads it and its columns are sinusoids."""
        array = None if self._is_layers else self.array
        return array is not None and fixed_values.are_positions(array)

    @cached_property
    def fixed(self) -> str:
        """The kind of a fixed matrix that its values show."""
        if self.array is None or self.is_declared:
            return ""
        return fixed_values.fixed_matrix(self.array, self._before)

    @property
    def is_literal(self) -> bool:
        """True if an exporter gives such a name to tensors of the code, and no layer reads it."""
        return not self.is_scalar and not self._is_read and gives("literal", self.name)


def classify(tensor: Tensor, rotary: set[ir.Value]) -> tuple[Decision, str]:
    """Decide on a tensor of an expanded model that no option names; return a doubt about a declared parameter, too."""
    if tensor.is_declared and 0 not in (dimensions(tensor.value) or ()):
        if tensor.setting and not all(use.startswith(_PASSED) for use in tensor.setting.split(" and ")):
            return Decision(tensor.setting, open=tensor.setting.startswith(ROUNDING)), ""
        return LEARNED, _by_value(tensor, set()) or (_CODE if tensor.is_literal else "")
    found = _by_use(tensor)
    if found is None:
        reason = _by_value(tensor, rotary)
        if reason and reason != fixed_values.INFINITE:
            reason = _called(tensor) or reason  # a name that says the same says it in fewer words
        reason = reason or _by_name(tensor)
        found = Decision(reason) if reason else _scalar(tensor) if tensor.is_scalar else _learned(tensor)
    if tensor.kind == _CONSTANT and tensor.is_scalar and not _is_weight_of_layer(tensor):
        return Decision(found.reason or _SCALAR.reason), ""  # one value in a node or body is a number of a formula
    declared = _DECLARED.get(tensor.kind, "")
    return (Decision(declared) if declared and (found.open or not found.reason) else found), ""


def _by_use(tensor: Tensor) -> Decision | None:
    """Decide by the operators that read a tensor; ``None`` where they leave it open."""
    value = tensor.value
    if tensor.setting:
        # An author's exponent may be trained, as in generalized-mean pooling, and so may a threshold that is compared.
        is_exponent = tensor.setting == _EXPONENT
        may_be = is_exponent or all(use.startswith((OPERAND_OF, ROUNDING)) for use in tensor.setting.split(" and "))
        varies = tensor.array is not None and not tensor.is_scalar and not fixed_values.has_one_value(tensor.array)
        return Decision(tensor.setting, open=may_be and (not tensor.is_made or (is_exponent and varies)))
    if 0 in (dimensions(value) or ()):
        return Decision("empty")
    if tensor.has_angles:
        return Decision(_called(tensor) or "a position table: only its sines and cosines are used")
    return None


def _by_value(tensor: Tensor, rotary: set[ir.Value]) -> str:
    """Return why a tensor is a constant by its values; "" where they do not tell."""
    if tensor.is_position_table:
        return "a position table: its columns are sines and cosines"
    if tensor.fixed:
        return f"{tensor.fixed}{BY_VALUES}"
    if tensor.value in rotary:
        return "a position table: cosines and sines"
    if tensor.array is None or not tensor.may_be_mask:
        return ""
    masked = all(map(_meets_softmax, tensor.readers))
    scales = all(node.op_type == "Mul" and not node.domain for node, _ in tensor.readers)
    return fixed_values.mask_kind(tensor.array, meets_softmax=masked, multiplies=scales)


def _by_name(tensor: Tensor) -> str:
    """Return why a tensor is a constant by its name; "" where it does not tell."""
    name = tensor.name
    if gives("numbers", name):
        return "a tensor that was made of numbers, by its name"
    if called := _called(tensor):
        return called
    if tensor.is_literal:
        return _CODE
    if tensor.is_scalar:
        return ""
    return "a running statistic, by its name" if means("statistic", name) or gives("statistic", name) else ""


def _called(tensor: Tensor) -> str:
    """Return what the author calls a table, a transform or a mask; "" for other tensors."""
    if means("table", tensor.name):
        return "a position table, by its name"
    if means("transform", tensor.name):
        return "a matrix of a spectrogram, by its name"
    return "a mask, by its name" if means("mask", tensor.name) and tensor.may_be_mask else ""


def _learned(tensor: Tensor) -> Decision:
    """Decide whether a tensor of several elements that may be a parameter is one, by use, values and name."""
    name, readers, array = tensor.name, tensor.readers, tensor.array
    if found := _preprocessing(tensor):
        return found
    if array is not None and _is_filled_state(array, readers):
        return FILL
    if gives("eager", name) and not tensor.is_weight:
        return OPEN  # a buffer, more often than not
    zeros = array is not None and not array.any()
    if not tensor.is_made and not (zeros and tensor.kind == _CONSTANT):  # zeros in a body may be what a branch returns
        return LEARNED
    if gives("joined biases", name) and zeros:
        return Decision(FILL.reason, open=True)
    weighing = _weighing(readers)
    if any(not is_normalization(reader) for reader in weighing):
        return LEARNED
    if array is None:
        return LEARNED if weighing else OPEN
    if fixed_values.has_one_value(array):
        if tensor.is_added or (not weighing and any(_is_affine(reader, name) for reader in readers)):
            return LEARNED
        # Exporters fill in ones and zeros.
        return FILL if weighing or array.flat[0] in (0, 1) else OPEN
    if weighing:
        return LEARNED
    if fixed_values.is_repeated(array):
        return OPEN
    if tensor.is_added:
        return LEARNED
    if fixed_values.is_evenly_spaced(array):
        return Decision("a position table: its values are evenly spaced")
    if any(map(_is_preprocessed, readers)):
        return _PREPROCESSING if all(map(_is_of_affine, readers)) else OPEN
    if any(use_of(reader) is ReaderUse.STATE for reader in readers):
        return LEARNED if all(_is_one_state(array, node) for node, _ in readers) else OPEN
    operators = {node.op_type for node, _ in readers if not node.domain}
    is_vector = sum(size != 1 for size in array.shape) == 1
    return LEARNED if operators & {"Add", "Sub"} or (operators & {"Mul", "Div"} and is_vector) else OPEN


def _scalar(tensor: Tensor) -> Decision:
    """Decide on one element; open for a common number under an author's name, such as a scale of 1."""
    if found := _preprocessing(tensor):
        return found
    if _is_weight_of_layer(tensor):
        return LEARNED
    name, number, readers = tensor.name, _number(tensor), scalar_readers(tensor.value)
    if number is not None and (not math.isfinite(number) or abs(number) >= _HUGE):
        return _SCALAR
    limited = arrivals(tensor.value, through=REARRANGING | {"Clip"})
    shaped = any(node.op_type in _SHAPING and not node.domain for node, _ in limited)
    is_common = number is None or fixed_values.is_common(number)
    if tensor.is_made:
        return LEARNED if shaped or (gives("bounded", name) and not is_common) else _SCALAR
    if number is not None and (fixed_values.is_of_activation(number) or any(_is_epsilon(r, number) for r in readers)):
        return _SCALAR
    if means("scalar", name):
        return _SCALAR
    is_authors = origin(tensor.value) is NameOrigin.MODULE or means("learned", name)
    if is_authors or shaped or any(_added_to(reader) is not None for reader in readers):
        return LEARNED
    return Decision(_SCALAR.reason, open=True) if is_common else LEARNED


def _number(tensor: Tensor) -> float | None:
    return None if tensor.array is None else float(tensor.array.reshape(-1)[0])


def _kind(value: ir.Value) -> str:
    """Return what the file says of a tensor, by its record or its place; "" where it does not."""
    if is_folded_constant(value):
        return "folded"
    embedded = value.metadata_props.get(EMBEDDED)
    if embedded is None:
        return declared_kind(value)
    return _LITERAL if is_literal_node(embedded) else _CONSTANT


def is_scalar(value: ir.Value) -> bool:
    """Return whether a value has one element."""
    shape = dimensions(value)
    return shape is not None and all(size == 1 for size in shape)


def scalar_readers(value: ir.Value, functions: Functions | None = None) -> list[Reader]:
    """Return the readers of a one-element value, including operators that fill a tensor with it."""
    return arrivals(value, functions, REARRANGING - _SPREADING)


def may_be_fresh(tensor: Tensor) -> bool:
    """Return whether a tensor of one value may be an untrained scale or bias: it is not an initial state."""
    return not any(use_of(reader) is ReaderUse.STATE for reader in tensor.readers)


def rotary_tables(tensors: Iterable[Tensor]) -> set[ir.Value]:
    """Find pairs of cosine and sine tables: tensors of one shape with a constant sum of squares."""
    alike: dict[tuple[object, ...], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.is_rotary:
            alike.setdefault(dimensions(tensor.value) or (), []).append(tensor)
    found: set[ir.Value] = set()
    for group in alike.values():
        for index, one in enumerate(group):
            for two in group[index + 1 :]:
                if one.array is not None and two.array is not None and fixed_values.are_circle(one.array, two.array):
                    found |= {one.value, two.value}
    return found


def _weighing(readers: Iterable[Reader]) -> list[Reader]:
    """Return the readers that use a tensor as a weight, not as the data of a linear operator."""
    return [reader for reader in readers if use_of(reader) is ReaderUse.WEIGHT and not is_operand_of_weight(reader)]


def _is_weight_of_layer(tensor: Tensor) -> bool:
    """Return whether readers show that a scalar is a weight: a parameter of a layer, or a bias of a linear layer."""
    readers, number, shape = scalar_readers(tensor.value), _number(tensor), dimensions(tensor.value)
    weighing = _weighing(readers)
    if tensor.is_made and number in (0, 1):  # exporters add a scale and bias to a normalization without them
        weighing = [reader for reader in weighing if not is_normalization(reader)]
    if shape == () and number == 0:  # the third operand of a Gemm without a bias
        weighing = [reader for reader in weighing if reader[0].op_type != "Gemm" or _has_one_output(reader[0])]
    if weighing:
        return True
    added = [layer for reader in readers if (layer := _added_to(reader)) is not None]
    return shape != () and any(not tensor.is_made or _has_one_output(layer) for layer in added)


def _added_to(reader: Reader) -> ir.Node | None:
    """Return the linear layer to whose result a node adds a value."""
    producer = summed_with(reader)
    return (
        producer if producer is not None and producer.op_type in ("MatMul", "Gemm", "Conv", "ConvTranspose") else None
    )


def _has_one_output(layer: ir.Node) -> bool:
    shape = dimensions(layer.outputs[0])
    return shape is not None and len(shape) > 1 and shape[1 if layer.op_type.startswith("Conv") else -1] == 1


def _is_epsilon(reader: Reader, number: float) -> bool:
    """Return whether a small number keeps the argument of a root, a logarithm or a division from zero."""
    node, _ = reader
    if abs(number) > _LARGEST_EPSILON or node.op_type not in ("Add", "Max") or node.domain:
        return False
    return any(
        not other.domain and (other.op_type in _GUARDED or (other.op_type, index) == ("Div", 1))
        for other, index in node.outputs[0].uses()
    )


def _preprocessing(tensor: Tensor) -> Decision | None:
    """Decide on a mean or deviation that normalizes an input of the model; ``None`` for another tensor."""
    is_layers = last_word(tensor.name) in ("weight", "bias", "gamma", "beta", "kernel")
    if not is_layers and any(map(_normalizes, tensor.readers)):
        return _PREPROCESSING
    if not (means("preprocessing", tensor.name) and any(map(_is_preprocessed, tensor.readers))):
        return None
    return _PREPROCESSING if tensor.is_scalar else Decision(f"{_PREPROCESSING.reason}, by its name", open=True)


def _normalizes(reader: Reader) -> bool:
    """Return whether a node is part of (x - mean) / deviation of a raw input x of the model."""
    node, index = reader
    if not _is_preprocessed(reader) or (node.op_type in ("Sub", "Div") and index != 1):
        return False
    before = node if node.op_type == "Sub" else None
    if before is None and node.op_type in ("Mul", "Div"):
        other = node.inputs[1 - index]
        before = None if other is None else other.producer()
    if before is None or before.op_type != "Sub" or not is_weight(before.inputs[1]):
        return False
    after = [user for user, _ in before.outputs[0].uses()]
    if len(after) != 1 or after[0].op_type not in ("Mul", "Div") or not _is_preprocessed((before, 1)):
        return False
    pair = [behind_identity(value) for value in (before.inputs[1], after[0].inputs[1])]
    known = [value for value in pair if value is not None and is_weight(value)]
    # Other names belong to a trainable normalization.
    is_named = any(means("preprocessing", v.name or "") or origin(v) is NameOrigin.EXPORTER for v in known)
    return len(known) == 2 and is_named and dimensions(known[0]) == dimensions(known[1])


def _is_preprocessed(reader: Reader) -> bool:
    """Return whether a node scales or shifts a raw floating input of the model, perhaps after other such nodes."""
    node, index = reader
    if node.domain or node.op_type not in ("Add", "Sub", "Mul", "Div") or index > 1:
        return False
    other = node.inputs[1 - index]
    if _widens(other, node.outputs[0]):
        return False
    for _ in range(_STEPS):
        other = behind(other, REARRANGING)
        producer = None if other is None else other.producer()
        if other is None or producer is None:
            return other is not None and not other.is_initializer()
        if producer.domain or producer.op_type not in ("Add", "Sub", "Mul", "Div"):
            return False
        one, two = producer.inputs[:2]
        if not (_is_given(one) or _is_given(two)):
            return False
        other = one if _is_given(two) else two
        if _widens(other, producer.outputs[0]):
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


def _is_of_affine(reader: Reader) -> bool:
    """Return whether a node is part of x scale + shift with two initializers that an exporter named."""
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
    return value is not None and is_weight(value) and origin(value) is NameOrigin.EXPORTER


def _is_affine(reader: Reader, name: str) -> bool:
    """Return whether an operand with a single element is a scale or bias of a normalization."""
    node, index = reader
    if node.op_type not in ("Mul", "Add") or node.domain:
        return False
    told = is_affine_call(node)
    if told is not None:
        return told
    other = node.inputs[1 - index]
    for _ in range(3):  # InstanceNormalization, Reshape, Mul, Add
        producer = None if other is None else other.producer()
        if producer is None:
            return False
        if producer.op_type == "InstanceNormalization":
            return gives("of module", name)
        other = producer.inputs[0]
    return False


def _is_filled_state(array: np.ndarray, readers: Sequence[Reader]) -> bool:
    """Return whether a tensor of one value is the initial state of each example of a fixed batch."""
    nodes = [reader[0] for reader in readers if use_of(reader) is ReaderUse.STATE]
    if not nodes or len(nodes) < len(readers):
        return False
    return fixed_values.has_one_value(array) and not any(_is_one_state(array, node) for node in nodes)


def _is_one_state(array: np.ndarray, node: ir.Node) -> bool:
    """Return whether all examples of a batch share an initial state."""
    return array.ndim == 3 and array.shape[0 if node.attributes.get_int("layout", 0) else 1] == 1


def _meets_softmax(reader: Reader) -> bool:
    """Return whether the result of an Add reaches a softmax."""
    node, _ = reader
    if node.domain or node.op_type != "Add":
        return False
    reached = arrivals(node.outputs[0], through=REARRANGING | {"Add"})
    return any(other.op_type in ("Softmax", "LogSoftmax") for other, _ in reached)


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
    """Return whether a value depends on weights or a floating input, with ``inputs`` on a rearranged raw one, too."""
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
