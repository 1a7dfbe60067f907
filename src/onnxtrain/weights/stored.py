"""Parameters that the file holds in another form: what is trained is a number, what is stored is made of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from onnxtrain.model_file.large_data import MadeArrays


class Stored(NamedTuple):
    """An initializer of the file that is made from parameters.

    Attributes:
        name: Its name.
        parameters: What it is made from.
        form: Makes it of their arrays.
    """

    name: str
    parameters: tuple[str, ...]
    form: Callable[[Sequence[np.ndarray]], np.ndarray]


def with_stored(values: Mapping[str, np.ndarray], stored: Iterable[Stored]) -> MadeArrays:
    """Values by name as the file has them: what is stored in another form, in the place of what that is made from."""
    stored = list(stored)
    made = {item.name: partial(_formed, item, values) for item in stored}
    used = {name for item in stored for name in item.parameters}
    return {name: array for name, array in values.items() if name not in used} | MadeArrays(made)


def _formed(item: Stored, values: Mapping[str, np.ndarray]) -> np.ndarray:
    return item.form([values[name] for name in item.parameters])
