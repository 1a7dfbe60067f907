"""Arrays that are made when they are asked for, so that one of many is in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import numpy as np

Array = np.ndarray


class MadeArrays(Mapping[str, Array]):
    """Arrays by name; each is made anew every time that it is asked for.

    Args:
        makers: What makes each.

    Example:
        >>> arrays = MadeArrays({"w": lambda: np.ones(2)}) | {"b": np.zeros(3)}
        >>> list(arrays), arrays["w"] is arrays["w"], arrays["b"] is arrays["b"]
        (['w', 'b'], False, True)
    """

    def __init__(self, makers: Mapping[str, Callable[[], Array]]) -> None:
        self._makers = dict(makers)

    def __getitem__(self, name: str) -> Array:
        return self._makers[name]()

    def __contains__(self, name: object) -> bool:  # without making it
        return name in self._makers

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)

    def __or__(self, other: Mapping[str, Array]) -> MadeArrays:
        return MadeArrays(self._makers | _makers(other))

    def __ror__(self, other: Mapping[str, Array]) -> MadeArrays:
        return MadeArrays(_makers(other) | self._makers)


def _makers(arrays: Mapping[str, Array]) -> dict[str, Callable[[], Array]]:
    return {name: partial(arrays.__getitem__, name) for name in arrays}
