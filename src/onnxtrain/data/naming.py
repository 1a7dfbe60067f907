"""Which array is which: matching what a user gives to the inputs of a model and its target."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from onnxtrain.data.conversion import TensorSpec, is_array_like
from onnxtrain.errors import DataError


class NoSuchArrayError(DataError):
    """A named array beside the inputs is missing."""


def check_beside(names: Iterable[str], there: Iterable[str], what: str) -> None:
    """Check that what goes beside the inputs is there.

    Raises:
        NoSuchArrayError: it is not; the message begins with ``what``.
    """
    held = list(there)
    for name in names:
        if name not in held:
            raise NoSuchArrayError(f"{what} '{name}': it has {_names(held[:8])}{' ...' if len(held) > 8 else ''}.")


def check_pasts(arrays: Mapping[str, object], specs: Sequence[TensorSpec], what: str) -> tuple[str, ...]:
    """Refuse a KV cache with rows, which a model without its KV-cache inputs would ignore.

    Returns:
        The names of the KV-cache inputs.

    Raises:
        DataError: A KV cache has rows, or the flag of a merged decoder asks for one.
    """
    pasts = specs[0].pasts if specs else ()
    for name in pasts:
        shape = _shape_of_cache(arrays[name]) if name in arrays else None
        if shape is not None:
            raise DataError(
                f"{what} has a past of shape {shape} in '{name}', but training, evaluation and prediction begin "
                f"with an empty KV cache: give whole sequences, and leave the inputs of the past out or without rows."
            )
    return pasts


def _shape_of_cache(value: Any) -> tuple[int, ...] | None:
    """The shape of a cache; None where it has no rows, or is the flag of a merged decoder and false."""
    try:
        shape = tuple(np.shape(value))
    except ValueError:  # lists of several lengths
        return (len(value),)
    is_false = len(shape) < 3 and np.asarray(value).dtype.kind == "b" and not np.any(value)
    return None if 0 in shape or is_false else shape


def match_names(
    arrays: Mapping[str, object],
    specs: Sequence[TensorSpec],
    what: str,
    *,
    target: str | None = None,
    need_target: bool = True,
) -> tuple[dict[str, object], object | None]:
    """Find inputs and targets by name.

    Arrays named like the model's inputs are its inputs; the one that is left is the target.

    Args:
        arrays: the arrays by name.
        specs: the model's inputs.
        what: how an error message calls the data.
        target: the name of the target, needed when several arrays are left; an input's name is allowed
            (an autoencoder's target).
        need_target: whether there has to be a target; without need none is looked for unless named.

    Returns:
        The inputs by name in the model's order, and the targets or None.

    Raises:
        DataError: an input is missing, the target does not exist, or it is not clear which it is.
    """
    pasts = check_pasts(arrays, specs, what)
    missing = [spec.name for spec in specs if spec.name not in arrays]
    if not any(spec.name in missing for spec in specs if not spec.beside):
        check_beside(missing, arrays, f"{what} has no array")
    if missing:
        raise DataError(
            f"{what} has no array for {_plural('input', missing)} {_names(missing)}: "
            f"it holds {_names(arrays)}, "
            f"the model needs {_names(spec.name for spec in specs)}; name the arrays like the model's inputs."
        )
    inputs = {spec.name: arrays[spec.name] for spec in specs}
    if target is not None:
        if target not in arrays:
            raise DataError(f"{what} has no target '{target}': it holds {_names(arrays)}.")
        return inputs, arrays[target]
    if not need_target:
        return inputs, None
    left = [name for name in arrays if name not in inputs and name not in pasts]
    if not left:
        raise DataError(
            f"{what} holds only the {_plural('input', inputs)} {_names(inputs)}: "
            f"add an array of targets, or name one of them as the target."
        )
    if len(left) > 1:
        raise DataError(f"{what} leaves {_names(left)} besides the inputs: name the one that is the target.")
    return inputs, arrays[left[0]]


def match_positions(
    parts: Sequence[object],
    specs: Sequence[TensorSpec],
    what: str,
    *,
    target: str | None = None,
    need_target: bool = True,
) -> tuple[dict[str, object], object | None]:
    """Find inputs and targets in a tuple.

    It may be ``(inputs, targets)``, where inputs is an array, a sequence of arrays in the order of the
    model's inputs, or a mapping; or flat, all inputs in order and then the targets; or, where no targets are
    needed, only the inputs in order.

    Raises:
        DataError: the tuple has another form.
    """
    count = len(specs)
    flat = all(is_array_like(part) for part in parts)
    if flat and len(parts) == count + 1:
        return _named(parts[:-1], specs), parts[-1]
    if flat and len(parts) == count and not need_target:
        return _named(parts, specs), None
    if len(parts) == 2 and isinstance(parts[1], Mapping) and not need_target:
        return match_names(joined(parts[0], parts[1], specs, what), specs, what, need_target=False)
    if len(parts) == 2 and is_array_like(parts[1]):
        inputs, targets = parts
        if isinstance(inputs, Mapping):
            return match_names(inputs, specs, f"the mapping of inputs in {what}", need_target=False)[0], targets
        if isinstance(inputs, list | tuple) and not is_array_like(inputs) and len(inputs) == count:
            return _named(inputs, specs), targets
    if len(parts) == 1 and isinstance(parts[0], Mapping):
        return match_names(parts[0], specs, what, target=target, need_target=need_target)
    raise DataError(
        f"{what} is a sequence of {_kinds(parts)}; it needs (inputs, targets), where inputs are "
        f"{count} {_plural('array', specs)} for {_names(spec.name for spec in specs)} in this order, "
        f"or a mapping from name to array."
    )


def joined(inputs: object, targets: Mapping[str, object], specs: Sequence[TensorSpec], what: str) -> dict[str, object]:
    """Inputs in any form and several targets by name, as one mapping.

    Raises:
        DataError: the inputs have another form.
    """
    own = [spec for spec in specs if spec.name not in targets]
    return {**match_batch(inputs, own, f"the inputs of {what}", need_target=False)[0], **targets}


def match_batch(
    item: object,
    specs: Sequence[TensorSpec],
    what: str,
    *,
    target: str | None = None,
    need_target: bool = True,
) -> tuple[dict[str, object], object | None]:
    """Find inputs and targets in one batch: a mapping, a tuple, or a bare array where one input is all.

    Raises:
        DataError: what is needed is not there.
    """
    if isinstance(item, Mapping):
        return match_names(item, specs, what, target=target, need_target=need_target)
    if isinstance(item, tuple) or (isinstance(item, list) and not is_array_like(item)):
        return match_positions(item, specs, what, target=target, need_target=need_target)
    if is_array_like(item):
        if len(specs) == 1 and not need_target:
            return {specs[0].name: item}, None
        needed = _names([*(spec.name for spec in specs), *(["targets"] if need_target else [])])
        raise DataError(f"{what} is one array, but {needed} are needed; give (inputs, targets) or a mapping.")
    raise DataError(f"{what} is a {type(item).__name__}; it must be a mapping from name to array or (inputs, targets).")


def is_batch_list(source: list[object] | tuple[object, ...]) -> bool:
    """Return whether a list holds batches, each a container, rather than arrays."""
    return bool(source) and all(isinstance(item, Mapping | list | tuple) and not is_array_like(item) for item in source)


def _named(arrays: Sequence[object], specs: Sequence[TensorSpec]) -> dict[str, object]:
    return {spec.name: array for spec, array in zip(specs, arrays, strict=True)}


def _names(names: Iterable[str]) -> str:
    listed = [f"'{name}'" for name in names]
    return " and ".join([", ".join(listed[:-1]), listed[-1]] if len(listed) > 1 else listed) or "no arrays"


def _plural(word: str, items: Iterable[object]) -> str:
    return word if len(list(items)) == 1 else word + "s"


def _kinds(parts: Sequence[object]) -> str:
    kinds = [type(part).__name__ for part in parts[:4]] + ["..."] * (len(parts) > 4)
    return f"{len(parts)} ({', '.join(kinds)})"
