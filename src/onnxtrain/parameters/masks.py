"""Weights to prune or sparsify, and masks: weights that stay zero while the others train."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from onnxtrain.errors import OptionError
from onnxtrain.graph.domains import MACHINE_LEARNING_DOMAIN, MICROSOFT_DOMAIN
from onnxtrain.graph.layers import constant_values
from onnxtrain.graph.patterns import matches, no_match, pattern_list
from onnxtrain.graph.value import dimensions
from onnxtrain.parameters.readers import REARRANGING, Functions, Reader, arrivals, is_linear, is_lookup

if TYPE_CHECKING:
    from onnxtrain.operators.optimizer import Optimizer
    from onnxtrain.runtime.states import StateBuffers

KEEP = "keep"
"""The text that stands for masks that keep the zeros of pruned tensors."""

_PRUNED = 0.1
"""Fraction of exact zeros from which a tensor counts as pruned."""

_SAMPLE = 1 << 14
"""Elements of a large tensor that tell whether to read all of it."""


_STANDARD = frozenset({"", MACHINE_LEARNING_DOMAIN, MICROSOFT_DOMAIN})

_REARRANGED = REARRANGING - {"Concat"}
"""A Concat with data, as of a class token, yields data."""


class Masks(Mapping[str, np.ndarray]):
    """Masks by parameter, as a value: never changed, and equal where all of their elements are."""

    def __init__(self, masks: Mapping[str, np.ndarray] | str | None = None) -> None:
        self.keep = isinstance(masks, str) and masks == KEEP
        self._arrays: dict[str, np.ndarray] = {}
        if self.keep:
            return
        if masks is not None and not isinstance(masks, Mapping):
            shown = repr(masks) if isinstance(masks, str) else f"a {type(masks).__name__}"
            raise OptionError(
                f"masks is {shown}; it needs {KEEP!r}, which keeps the zeros of a pruned model, or a mapping from "
                "parameters to boolean arrays, such as {'fc.weight': trainer.parameters['fc.weight'] != 0}."
            ).about("masks", got=masks, wanted=KEEP)
        for name, mask in (masks or {}).items():
            try:
                self._arrays[name] = np.array(mask)
            except (TypeError, ValueError) as error:
                kind = type(mask).__name__
                raise OptionError(f"The mask of {name!r} is a {kind} that is no array: {error}.") from error
        for array in self._arrays.values():
            array.flags.writeable = False

    def __getitem__(self, name: str) -> np.ndarray:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mapping):
            return NotImplemented
        if self.keep != getattr(other, "keep", False):
            return False
        return self.keys() == other.keys() and all(np.array_equal(mask, other[name]) for name, mask in self.items())

    def __hash__(self) -> int:
        return hash(frozenset((name, np.packbits(mask).tobytes()) for name, mask in self._arrays.items()))

    def __repr__(self) -> str:
        return f"Masks({', '.join(self._arrays)})"


def matmul_weights(model: ir.Model, names: Sequence[str]) -> list[str]:
    """Find the weights of linear layers, convolutions, recurrent layers and embeddings.

    The readers of a tensor decide, not its rank: a scale of shape [1, C, 1] or a bias of shape [1, C] is not a weight.
    A weight may be rearranged, normalized, masked or quantized before it is read. For unknown operators, tensors with
    several elements along at least two axes count as weights.
    """
    constant = constant_values(model)
    return [name for name in names if _is_weight(model.graph.initializers[name], model.functions, constant)]


def _is_weight(value: ir.Value, functions: Functions, constant: set[ir.Value]) -> bool:
    if value.shape is not None and len(value.shape) < 2:
        return False
    if any(_reads_weight(reader, value) for reader in arrivals(value, functions, _REARRANGED)):
        return True
    # After arithmetic with other weights, as in weight normalization, only tensors, not scales.
    return _axes(value) >= 2 and any(
        _reads_weight(reader, value) for reader in _behind_arithmetic(value, functions, constant)
    )


def _reads_weight(reader: Reader, value: ir.Value) -> bool:
    if is_linear(reader) or is_lookup(reader):
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


def choose_tensors(
    shapes: Mapping[str, tuple[int, ...]],
    patterns: str | Sequence[str] | None,
    argument: str,
    weights: Collection[str] | None = None,
) -> list[str]:
    """Return the parameters that match glob patterns; without patterns the weights, not biases or scales.

    Example:
        >>> choose_tensors({"fc.weight": (3, 4), "fc.bias": (3,)}, None, "tensors")
        ['fc.weight']
    """
    if patterns is None and weights is not None:
        return list(weights)
    if patterns is None:
        return [name for name, shape in shapes.items() if len(shape) >= 2]
    listed = pattern_list(patterns)
    for pattern in listed:
        if not matches(pattern, *shapes):
            raise OptionError(no_match(argument, pattern, "parameter that is trained", shapes))
    return [name for name in shapes if any(matches(pattern, name) for pattern in listed)]


def check_masks(
    masks: Mapping[str, np.ndarray], shapes: Mapping[str, tuple[int, ...]], optimizers: Iterable[Optimizer]
) -> None:
    """Refuse masks that do not fit their parameters or one of the optimizers."""
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
            ).about("epsilon", got=0)


def zero_masks(names: Iterable[str], value_of: Callable[[str], np.ndarray]) -> dict[str, np.ndarray]:
    """Return masks that keep the zeros of pruned tensors: those of which a tenth or more is zero, but not all.

    Example:
        >>> values = {"pruned": np.array([0.0, 1.0, 0.0]), "dense": np.ones(3), "initial": np.zeros(3)}
        >>> {name: mask.tolist() for name, mask in zero_masks(values, values.__getitem__).items()}
        {'pruned': [False, True, False]}
    """
    found = {}
    for name in names:
        array = value_of(name)
        sample = array.reshape(-1)[:: max(1, array.size // _SAMPLE)]
        if sample.size - np.count_nonzero(sample) < _PRUNED * sample.size / 2:
            continue
        mask = array != 0
        if 0 < np.count_nonzero(mask) <= (1 - _PRUNED) * mask.size:
            found[name] = np.asarray(mask)
    return found


def zeros_to_keep(names: Sequence[str], value_of: Callable[[str], np.ndarray]) -> Masks:
    """Return the masks for ``masks="keep"`` of the weights of these names: all zeros of a model with a pruned weight.

    A cut across all tensors takes few weights of some, so that each zero counts once one tensor is pruned; a tensor of
    zeros alone is an initial one.
    """
    if not zero_masks(names, value_of):
        raise OptionError(
            f"masks={KEEP!r} keeps the zeros of a pruned model, but no trained weight has at least a tenth of zeros; "
            "leave out masks, or give a mapping from parameters to boolean arrays."
        ).about("masks", got=KEEP)
    found = {name: np.asarray(value_of(name) != 0) for name in names}
    return Masks({name: mask for name, mask in found.items() if mask.any() and not mask.all()})


def set_to_zero(states: StateBuffers, masks: Mapping[str, np.ndarray]) -> None:
    """Set weights and their optimizer states (``{parameter}/...``) to zero where a mask is false, in place."""
    with states.writing():
        for name, mask in masks.items():
            for key in states:
                if key == name or (key.startswith(f"{name}/") and states[key].shape == mask.shape):
                    states[key][~mask] = 0


def non_zeros(arrays: Mapping[str, np.ndarray]) -> int:
    """Count the nonzero elements of all arrays."""
    return sum(int(np.count_nonzero(array)) for array in arrays.values())
