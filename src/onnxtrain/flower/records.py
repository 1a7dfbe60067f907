"""Weights as Flower's records: arrays by the names of initializers, checked when they come in."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from onnxtrain.errors import DataError, OptionError

EXAMPLES = "num-examples"
"""The metric by which Flower's strategies weigh the weights of clients."""

CLIENT_FAILED = 2
"""Flower's code of an error in a client."""


def flower(module: str) -> Any:
    """A module of Flower.

    Raises:
        OptionError: Flower is not installed, or has no such module.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise OptionError(
            f"onnxtrain.flower needs Flower 1.41 or newer ({error}); install it with pip install 'onnxtrain[flower]'."
        ) from None


def to_record(values: Mapping[str, np.ndarray]) -> Any:
    """An ``ArrayRecord`` with copies of arrays, by name and in their order."""
    app = flower("flwr.app")
    return app.ArrayRecord({name: app.Array(np.array(value)) for name, value in values.items()})


def from_record(
    record: Mapping[str, Any], like: Mapping[str, np.ndarray], sender: str, *, averaged: bool = False
) -> dict[str, np.ndarray]:
    """The arrays of an ``ArrayRecord``.

    Args:
        record: What was sent.
        like: Arrays of the names, types and shapes that are needed.
        sender: Who sent it, for error messages.
        averaged: Whether a strategy has made it, which may have computed in another floating type.

    Raises:
        DataError: A name is missing or unknown, a type or shape differs, or a number is NaN or infinite.
    """
    missing = [name for name in like if name not in record]
    unknown = [name for name in record if name not in like]
    if missing or unknown:
        what = f"no {missing[0]!r}" if missing else f"{unknown[0]!r}, which is not trained here"
        raise DataError(
            f"{sender} sent {what}; both sides need the same model, and the same options of what is trained "
            f"({', '.join(list(like)[:8])})."
        )
    arrays = {}
    for name, own in like.items():
        array = _array(record[name], name, sender)
        if averaged and array.dtype.kind == "f":
            array = array.astype(own.dtype)
        if array.shape != own.shape or array.dtype != own.dtype:
            raise DataError(
                f"{sender} sent {name!r} as {array.dtype} of shape {array.shape}; it needs {own.dtype} of shape "
                f"{own.shape}."
            )
        if not np.isfinite(array).all():
            raise DataError(f"{sender} sent {name!r} with NaN or infinite numbers; it needs finite ones.")
        arrays[name] = array
    return arrays


def _array(item: Any, name: str, sender: str) -> np.ndarray:
    """The array of an item of a record; whoever sent it chose its bytes."""
    try:
        return np.asarray(item.numpy())
    except Exception as error:
        raise DataError(f"{sender} sent {name!r} in a form that is no NumPy array ({error}).") from error
