"""State in memory: one buffer per tensor, two for what a step may not overwrite."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping

import numpy as np

from onnxtrain.errors import OptionError

_ALIGNMENT = 64


class StateBuffers(MutableMapping[str, np.ndarray]):
    """The current values of all states, by name.

    Reading gives the live array: writing into it changes the state. Assigning copies into it, after a check
    of type and shape. A state that a step cannot update in place has two buffers that take turns: after a
    step the array to read is the other one.
    """

    def __init__(self, values: Mapping[str, np.ndarray]) -> None:
        self._buffers: dict[str, list[np.ndarray]] = {name: [_aligned(value)] for name, value in values.items()}
        self._turn: dict[str, int] = dict.fromkeys(values, 0)
        self.doubled: list[str] = []

    def __getitem__(self, name: str) -> np.ndarray:
        return self._buffers[name][self._turn[name]]

    def __setitem__(self, name: str, value: np.ndarray) -> None:
        if name not in self._buffers:
            raise OptionError(f"There is no state {name!r}; the states are {', '.join(list(self)[:8])}.")
        buffer = self[name]
        array = np.asarray(value)
        if array.shape != buffer.shape or array.dtype != buffer.dtype:
            raise OptionError(
                f"The state {name!r} is {buffer.dtype} of shape {buffer.shape}; "
                f"got {array.dtype} of shape {array.shape}."
            )
        buffer[...] = array

    def __delitem__(self, name: str) -> None:
        raise OptionError(f"The state {name!r} belongs to the training model and cannot be deleted.")

    def __iter__(self) -> Iterator[str]:
        return iter(self._buffers)

    def __len__(self) -> int:
        return len(self._buffers)

    def give_second_buffer(self, name: str) -> None:
        """Let a state have a buffer to write to while the other is read."""
        buffers = self._buffers[name]
        if len(buffers) == 1:
            buffers.append(_aligned(buffers[0]))
            self.doubled.append(name)

    def turn(self, name: str) -> int:
        """Which buffer is current."""
        return self._turn[name]

    def buffer(self, name: str, turn: int) -> np.ndarray:
        """One of the buffers of a state."""
        buffers = self._buffers[name]
        return buffers[turn % len(buffers)]

    def swap(self, names: tuple[str, ...]) -> None:
        """Make the other buffer of each the current one: a step has written it."""
        for name in names:
            self._turn[name] ^= 1

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.nbytes for buffers in self._buffers.values() for buffer in buffers)


def _aligned(value: np.ndarray) -> np.ndarray:
    """A writable copy that starts on a cache line, as vector loops like it."""
    value = np.asarray(value)
    raw = np.empty(value.nbytes + _ALIGNMENT, dtype=np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    buffer = raw[start : start + value.nbytes].view(value.dtype).reshape(value.shape)
    buffer[...] = value
    return buffer
