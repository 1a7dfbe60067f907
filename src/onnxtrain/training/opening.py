"""Data with the targets that losses need, of one output or of several."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from onnxtrain.data import Dataset, TensorSpec
from onnxtrain.data.conversion import is_array_like
from onnxtrain.data.naming import NoSuchArrayError, is_batch_list
from onnxtrain.data.table_columns import NamedColumns, column_of, columns_of_table, is_frame
from onnxtrain.errors import DataError
from onnxtrain.losses.base import Forms
from onnxtrain.losses.heads import Head, Targets
from onnxtrain.training.objective import Objective

Adapting = Callable[[Dataset, Targets, str | None], Dataset]
"""Makes targets, or those of a name, what the loss takes."""


def open_with_targets(
    objective: Objective,
    source: Any,
    *,
    inputs: Sequence[TensorSpec],
    target: str | None,
    adapted: Adapting,
    weights: str | None = None,
) -> tuple[Dataset, Forms]:
    """Data in any form with targets, and what these are; values are not checked yet.

    Several targets are arrays named like the outputs, or the mapping in (inputs, targets).

    Args:
        objective: What is minimised.
        source: The data.
        inputs: What the model needs of its inputs.
        target: Name of the target.
        adapted: Makes targets what the loss takes.
        weights: Name of the array of weights, which stays in the data under this name.

    Raises:
        DataError: The data cannot be read, or something is missing.
    """
    from onnxtrain.data.opening import open_dataset  # a single step has no use for the readers of files

    beside = [] if weights is None else [weights]
    if weights is not None:
        source = with_named(source, weights, inputs)
    heads = objective.heads
    for head in heads:
        head.targets.check_batch_axis()
    if len(heads) == 1:
        (head,) = heads
        if isinstance(source, tuple) and len(source) == 2 and isinstance(source[1], Mapping):
            source = (source[0], targets_by_output(heads, source[1])[head.name])
        dataset = open_dataset(source, inputs, target=target, validate=False, others=beside)
        dataset = adapted(dataset, head.targets, None)
        return dataset, head.targets.form_of_dataset(dataset)
    if target is not None:
        raise DataError(
            f"target={target!r} names one target, but {len(heads)} outputs have losses; name the arrays of targets "
            f"like the outputs: {', '.join(head.name for head in heads)}."
        )
    if isinstance(source, tuple) and len(source) == 2 and (isinstance(source[1], Mapping) or is_array_like(source[1])):
        source = (source[0], targets_by_output(heads, source[1]))
    names = [head.name for head in heads]
    dataset = open_dataset(source, inputs, need_target=False, validate=False, others=[*names, *beside])
    forms = []
    for head in heads:
        dataset = adapted(dataset, head.targets, head.name)
        forms.append(head.targets.form_of_dataset(dataset, head.name))
    return dataset, tuple(forms)


def with_named(source: Any, weights: str, inputs: Sequence[TensorSpec]) -> Any:
    """Data in which the weights have their name: a table of inputs becomes the mapping that it stands for.

    Raises:
        NoSuchArrayError: It is arrays without names.
    """
    if not isinstance(source, tuple) or len(source) != 2 or isinstance(source[0], Mapping):
        return source
    table, targets = source
    if is_frame(table) and len(inputs) == 1:
        keys = columns_of_table(table, "the table")
        if weights in keys:
            rest = {name: column_of(table, key, name) for name, key in keys.items() if name != weights}
            features = NamedColumns(np.stack(list(rest.values()), axis=1), tuple(rest))
            return {inputs[0].name: features, weights: column_of(table, keys[weights], weights)}, targets
    raise NoSuchArrayError(
        f"sample_weight is {weights!r}, but the inputs have no column of this name; give the weights themselves, or a "
        "table with them."
    )


def with_weights(source: Any, weights: Any, inputs: Sequence[TensorSpec]) -> tuple[Any, Any]:
    """Data without their weights, and these: what was given, or the third part of (inputs, targets, weights).

    Raises:
        DataError: Both are there.
    """
    triple = isinstance(source, tuple) and len(source) == 3
    flat = triple and len(inputs) == 2 and all(is_array_like(part) for part in source)
    if not triple or flat or is_batch_list(source) or isinstance(source[2], Mapping):
        return source, weights
    if weights is not None and not isinstance(weights, str):
        raise DataError("The data are (inputs, targets, weights), and sample_weight is given, too; leave one out.")
    return source[:2], source[2]


def targets_by_output(heads: list[Head], targets: Any) -> dict[str, Any]:
    """Targets of one step by the outputs that they are for.

    Raises:
        DataError: One is missing, or it is not said whose they are.
    """
    names = [head.name for head in heads]
    if not isinstance(targets, Mapping):
        if len(heads) == 1:
            return {names[0]: targets}
        raise DataError(
            f"{len(heads)} outputs have losses, but the targets are a {type(targets).__name__}; give a mapping with "
            f"{', '.join(names)}."
        )
    for name in names:
        if name not in targets:
            raise DataError(f"The targets of {name!r} are missing; got {', '.join(map(str, targets)) or 'none'}.")
    return {name: targets[name] for name in names}
