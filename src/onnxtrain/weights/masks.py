"""Weights to prune or sparsify, and masks: weights that stay zero while the others train."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterable, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from onnxtrain.errors import OptionError
from onnxtrain.ir.clone import subgraphs
from onnxtrain.ir.domains import MACHINE_LEARNING_DOMAIN, MICROSOFT_DOMAIN
from onnxtrain.ir.sharing import RANDOM
from onnxtrain.ir.value import dimensions
from onnxtrain.weights.readers import REARRANGING, Functions, Reader, arrivals, is_lookup, is_product

if TYPE_CHECKING:
    from onnxtrain.operators.optimizer import Optimizer


_STANDARD = frozenset({"", MACHINE_LEARNING_DOMAIN, MICROSOFT_DOMAIN})

_REARRANGED = REARRANGING - {"Concat"}
"""Behind a Concat with data, as of a class token, lies data."""


def matmul_weights(model: ir.Model, names: Sequence[str]) -> list[str]:
    """The parameters that multiply data in products, convolutions and recurrent layers, or are embeddings.

    What reads a matrix or tensor decides, not its rank: a scale of shape [1, C, 1] is none, nor is a bias of shape
    [1, C]. A weight may be rearranged, normalized, masked or quantized before it is read. Where an operator is not
    known, tensors of at least two axes with several elements count as weights.

    Args:
        model: A working copy with shapes.
        names: Initializers of its main graph.

    Returns:
        Those of the names that are weights, in their order.
    """
    constant = _constants(model)
    return [name for name in names if _is_weight(model.graph.initializers[name], model.functions, constant)]


def _is_weight(value: ir.Value, functions: Functions, constant: set[ir.Value]) -> bool:
    if value.shape is not None and len(value.shape) < 2:
        return False
    if any(_weighs(reader, value) for reader in arrivals(value, functions, _REARRANGED)):
        return True
    # Behind arithmetic with other weights, as of weight normalization, only tensors and no scales.
    return _axes(value) >= 2 and any(
        _weighs(reader, value) for reader in _behind_arithmetic(value, functions, constant)
    )


def _weighs(reader: Reader, value: ir.Value) -> bool:
    if is_product(reader) or is_lookup(reader):
        return True
    return reader[0].domain not in _STANDARD and _axes(value) >= 2


def _axes(value: ir.Value) -> int:
    """Count the axes with more than one element."""
    return sum(size != 1 for size in dimensions(value) or ())


def _behind_arithmetic(value: ir.Value, functions: Functions, constant: set[ir.Value]) -> list[Reader]:
    found: list[Reader] = []
    seen: set[ir.Value] = set()
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if value in seen:
            continue
        seen.add(value)
        for reader in arrivals(value, functions, _REARRANGED):
            computed = [output for output in reader[0].outputs if output in constant]
            waiting += computed
            if not computed:
                found.append(reader)
    return found


def _constants(model: ir.Model) -> set[ir.Value]:
    """The values of the main graph that depend on initializers only, not on the inputs of the model."""
    found = {value for value in model.graph.initializers.values() if value not in model.graph.inputs}
    for node in model.graph:
        if not subgraphs(node) and node.op_type not in RANDOM and all(v is None or v in found for v in node.inputs):
            found.update(node.outputs)
    return found


def choose_tensors(
    shapes: Mapping[str, tuple[int, ...]],
    patterns: str | Sequence[str] | None,
    argument: str,
    weights: Collection[str] | None = None,
) -> list[str]:
    """The parameters that match glob patterns; without patterns the weights: not biases, nor scales.

    Args:
        shapes: All parameters.
        patterns: Glob patterns.
        argument: What the message calls the patterns.
        weights: Those that are weights, as :func:`onnxtrain.weights.masks.matmul_weights` finds them;
            by default those of rank 2 and more.

    Raises:
        OptionError: A pattern matches no parameter.

    Example:
        >>> choose_tensors({"fc.weight": (3, 4), "fc.bias": (3,)}, None, "tensors")
        ['fc.weight']
    """
    if patterns is None and weights is not None:
        return list(weights)
    if patterns is None:
        return [name for name, shape in shapes.items() if len(shape) >= 2]
    patterns = [patterns] if isinstance(patterns, str) else list(patterns)
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in shapes):
            raise OptionError(
                f"{argument}={pattern!r} matches no parameter that is trained; they are {', '.join(list(shapes)[:8])}."
            )
    return [name for name in shapes if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]


def check_masks(
    masks: Mapping[str, np.ndarray], shapes: Mapping[str, tuple[int, ...]], optimizers: Iterable[Optimizer]
) -> None:
    """Refuse masks that do not fit their parameters, of these shapes, or one of the optimizers.

    Raises:
        OptionError: A mask fits no parameter, or the optimizer divides 0 by 0 where a mask is false.
    """
    for name, mask in masks.items():
        if name not in shapes:
            raise OptionError(f"There is a mask for {name!r}, which is not trained; masks are for parameters.")
        wanted = shapes[name]
        if mask.dtype != bool or mask.shape != wanted:
            raise OptionError(
                f"The mask of {name!r} is {mask.dtype} of shape {mask.shape}; it needs to be bool of shape {wanted}."
            )
    for optimizer in optimizers if masks else ():
        if optimizer.schema.name != "SSGD" and optimizer.node_attributes().get("epsilon") == 0:
            raise OptionError(
                f"{optimizer.schema.name} has epsilon 0, with which the step of a masked weight is 0 / 0; "
                "give an epsilon above 0."
            )


def set_to_zero(states: MutableMapping[str, np.ndarray], masks: Mapping[str, np.ndarray]) -> None:
    """Set weights and their optimizer states (``{parameter}/...``) to zero where a mask is false, in place."""
    for name, mask in masks.items():
        for key in states:
            if key == name or (key.startswith(f"{name}/") and states[key].shape == mask.shape):
                states[key][~mask] = 0


def non_zeros(arrays: Mapping[str, np.ndarray]) -> int:
    """Count the nonzero elements of all arrays."""
    return sum(int(np.count_nonzero(array)) for array in arrays.values())
