"""Rows of a table as the inputs of a model: so many columns for each."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from onnxtrain.data import TensorSpec
from onnxtrain.data.conversion import kind_of
from onnxtrain.errors import DataError


def rows_to_inputs(rows: np.ndarray, inputs: Sequence[TensorSpec]) -> dict[str, np.ndarray]:
    """The inputs of a model, cut from a table's columns in their order.

    An input takes as many columns as its shape has elements beside the batch axis; one of unknown size takes one, or
    all where it is the only input.

    Args:
        rows: Numbers [N, F].
        inputs: What the model takes.

    Raises:
        DataError: Their number is not that of the inputs' elements, or an input of integers gets fractions.

    Example:
        >>> image = TensorSpec("image", np.dtype(np.float32), ("N", 1, 2, 2))
        >>> rows_to_inputs(np.zeros((3, 4)), [image])["image"].shape
        (3, 1, 2, 2)
    """
    shapes = {spec.name: _elements(spec) for spec in inputs}
    if len(inputs) == 1 and None in shapes[inputs[0].name]:
        return {inputs[0].name: _of_kind(rows, inputs[0])}
    sizes = {name: tuple(1 if size is None else size for size in shape) for name, shape in shapes.items()}
    wanted = [math.prod(sizes[spec.name]) for spec in inputs]
    if sum(wanted) != rows.shape[1]:
        listed = ", ".join(f"{count} for {spec.name!r}" for count, spec in zip(wanted, inputs, strict=True))
        raise DataError(f"X has {rows.shape[1]} columns, but the model's inputs take {sum(wanted)} ({listed}).")
    parts = np.split(rows, np.cumsum(wanted)[:-1], axis=1)
    return {
        spec.name: _of_kind(part, spec).reshape(len(rows), *sizes[spec.name])
        for spec, part in zip(inputs, parts, strict=True)
    }


def _elements(spec: TensorSpec) -> tuple[int | None, ...]:
    """The shape of one example; ``None`` where a size is not known."""
    shape = (None, None) if spec.shape is None else spec.shape
    return tuple(size if isinstance(size, int) else None for size in shape[1:])


def _of_kind(part: np.ndarray, spec: TensorSpec) -> np.ndarray:
    """Integers where the input takes integers, and fractions where it takes these."""
    if kind_of(part.dtype) == kind_of(spec.dtype):
        return part  # the exact type is the data set's to convert
    whole = part.astype(spec.dtype)
    if kind_of(spec.dtype) != "float" and (whole != part).any():
        wrong = part[whole != part][0]
        raise DataError(f"X holds {wrong:g} in a column of the input {spec.name!r}, which takes {spec.dtype}.")
    return whole
