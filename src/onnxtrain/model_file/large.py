"""The raw data of a file's large initializers: held once, beside the parsed model, and only while it is needed.

A message of protocol buffers frees its memory as a whole, and gives its data away in copies. What is read here are
views, and each tensor's memory is free as soon as it is released.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Mapping

import numpy as np

from onnxtrain.model_file.background import BackgroundRead
from onnxtrain.model_file.origin import Origin


class LargeData:
    """Raw data by the names of the initializers.

    Args:
        data: The serialised model; not kept, unless it is lent.
        places: Where in it the data of each large initializer is.
        origin: Where some or all of it can be read again.
        lent: Whether to look at the data where it is, until :meth:`release` is called, instead of copying it.
        background: Reads the data of all places; then there is none in ``data``.
    """

    def __init__(
        self,
        data: bytes | mmap.mmap = b"",
        places: Mapping[str, slice] | None = None,
        origin: Origin | None = None,
        *,
        lent: bool = False,
        background: BackgroundRead | None = None,
    ):
        self.origin = origin
        source = memoryview(data) if lent else data
        self._background = background
        self._held: dict[str, bytes | memoryview | None] = {
            name: source[place] if background is None else None for name, place in (places or {}).items()
        }

    def __contains__(self, name: str) -> bool:
        return name in self._held

    def read(self, name: str) -> bytes | memoryview:
        """The data of an initializer, from the file again where it was released.

        Raises:
            ModelError: It was released, and the file is not what it was; or the file cannot be read.
        """
        if self._background is not None and name in self._background:
            return self._background[name]
        held = self._held[name]
        if held is not None:
            return held
        assert self.origin is not None  # nothing else is released
        return self.origin.read(name)

    def release(self, names: Iterable[str]) -> None:
        """Free the memory of what can be read from the file again; what stays is not lent any more."""
        for name in names:
            if self._background is not None:
                self._background.drop(name)
            if name in self._held and self.origin is not None and name in self.origin.places:
                self._held[name] = None
        self._held = {name: None if held is None else bytes(held) for name, held in self._held.items()}

    def take(self, array: np.ndarray) -> np.ndarray | None:
        """Release what an array shows, and hand over its memory: an array like it which may be written.

        ``None`` where it shows nothing that can be handed over.
        """
        return None if self._background is None else self._background.take(array)
