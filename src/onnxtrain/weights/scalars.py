"""Which one-element initializers are learned, and which are constants of the computation.

The operator that reads a scalar decides where it can: a slope of PRelu is a weight, a bound of Clip is not. Elsewhere
(a logit scale, a temperature, a gate against 1 / sqrt(d), 0.5 and epsilon) name and value are the evidence.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxtrain.ir.value import dimensions
from onnxtrain.weights.names import Origin, is_buffer, is_learned, origin_of
from onnxtrain.weights.readers import REARRANGING, Functions, Reader, arrivals, summed_with
from onnxtrain.weights.rule import Use, is_normalization, use_of
from onnxtrain.weights.tables import is_operand_of_weight

REASON = "a scalar of the computation"

_SPREADING = frozenset({"Expand", "Tile"})
"""Operators that fill a tensor with a scalar, as with the zeros of an initial state."""

_SHAPING = frozenset({"Exp", "Sigmoid", "Softplus", "Tanh"})
"""Functions that keep a learned number in its range; of a constant an exporter would have computed them."""

_SHAPED = r"^(exp|sigmoid|softplus|tanh)(_\d+)?$"
"""The name of a shaped number that PyTorch's newer exporter computed."""

_GUARDED = frozenset({"Sqrt", "Log", "Reciprocal", "Pow"})
"""Functions that an epsilon keeps away from zero."""

_LARGEST_EPSILON = 1e-2

_HUGE = 1e4
"""Fill values of masked positions are larger than this; trainable scalars are not."""

_KNOWN = (math.pi, math.e, math.log(2), math.log(10), math.sqrt(2 / math.pi), 2 / math.sqrt(math.pi), 0.044715, 1.702)
"""Numbers of formulas that are neither round nor roots."""

_OF_ACTIVATIONS = (math.sqrt(2), math.sqrt(0.5), math.sqrt(2 / math.pi), 2 / math.sqrt(math.pi), 0.044715, 1.702)
"""Numbers in the formulas of GELU, with which nothing that is learned begins."""

_LARGEST_ROOT = 1 << 14


def is_scalar(value: ir.Value) -> bool:
    """Whether a value has one element."""
    shape = dimensions(value)
    return shape is not None and all(size == 1 for size in shape)


def scalar_readers(value: ir.Value, functions: Functions | None = None) -> list[Reader]:
    """Find the readers of a one-element value; what fills a tensor with it is one."""
    return arrivals(value, functions, REARRANGING - _SPREADING)


def scalar_reason(value: ir.Value) -> str:
    """Why a one-element initializer is no parameter; "" where it is one."""
    if _is_weight(value):
        return ""
    name, readers = value.name or "", scalar_readers(value)
    number = _number(value)
    if number is not None and (not math.isfinite(number) or abs(number) >= _HUGE):
        return REASON
    origin = origin_of(name)
    limited = arrivals(value, through=REARRANGING | {"Clip"})
    shaped = any(node.op_type in _SHAPING and not node.domain for node, _ in limited)
    if origin is Origin.EXPORTER:
        learned = shaped or (re.match(_SHAPED, name) is not None and number is not None and not is_common(number))
    elif any(_is_epsilon(reader, number) for reader in readers) or _is_of_activation(number) or is_buffer(name):
        learned = False
    elif origin is Origin.MODULE or is_learned(name) or shaped or any(_is_bias(reader) for reader in readers):
        learned = True
    else:
        learned = number is not None and not is_common(number)
    return "" if learned else REASON


def _number(value: ir.Value) -> float | None:
    tensor = value.const_value
    return None if tensor is None else float(np.asarray(tensor.numpy()).reshape(-1)[0])


def _is_weight(value: ir.Value) -> bool:
    """Whether an operator says that it weighs data: a parameter of a layer, or added to a product with weights."""
    readers = scalar_readers(value)
    weighing = [reader for reader in readers if use_of(reader) is Use.WEIGHT and not is_operand_of_weight(reader)]
    # Exporters fill in the scale and bias of a normalization that has none.
    is_fill = origin_of(value.name or "") is Origin.EXPORTER and _number(value) in (0, 1)
    weighing = [reader for reader in weighing if not (is_fill and is_normalization(reader))]
    # jax2onnx writes the third operand of Gemm as a zero where there is no bias.
    if dimensions(value) == () and _number(value) == 0:
        weighing = [reader for reader in weighing if reader[0].op_type != "Gemm" or _has_one_output(reader[0])]
    if weighing:
        return True
    biases = [reader for reader in readers if _is_bias(reader)] if dimensions(value) != () else []
    if origin_of(value.name or "") is Origin.EXPORTER:
        biases = [reader for reader in biases if _has_one_channel(reader)]
    return bool(biases)


def _has_one_channel(reader: Reader) -> bool:
    """Return whether the product that a bias is added to has a single output."""
    product = summed_with(reader)
    return product is not None and _has_one_output(product)


def _has_one_output(product: ir.Node) -> bool:
    shape = dimensions(product.outputs[0])
    return shape is not None and len(shape) > 1 and shape[1 if product.op_type.startswith("Conv") else -1] == 1


def _is_epsilon(reader: Reader, number: float | None) -> bool:
    """Return whether a small number keeps the argument of a root, a logarithm or a quotient away from zero."""
    node, _ = reader
    if number is None or abs(number) > _LARGEST_EPSILON or node.op_type not in ("Add", "Max") or node.domain:
        return False
    return any(
        not other.domain and (other.op_type in _GUARDED or (other.op_type, index) == ("Div", 1))
        for other, index in node.outputs[0].uses()
    )


def _is_bias(reader: Reader) -> bool:
    """Whether a node adds a value to a product with weights."""
    producer = summed_with(reader)
    return producer is not None and producer.op_type in ("MatMul", "Gemm", "Conv", "ConvTranspose")


def _is_of_activation(number: float | None) -> bool:
    return number is not None and any(math.isclose(abs(number), one, rel_tol=1e-6) for one in _OF_ACTIVATIONS)


def is_common(number: float) -> bool:
    """Whether formulas hold such a number: a round one, a root of an integer, its inverse, or a known one.

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
