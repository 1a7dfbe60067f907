"""States in the memory of a device, where the steps are done: they come to the processor only when somebody looks."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from onnxtrain.errors import OptionError
from onnxtrain.runtime.options import Device, RuntimeOptions, device_of
from onnxtrain.runtime.states import StateBuffers, Take


def new_states(values: Mapping[str, np.ndarray], options: RuntimeOptions, take: Take | None = None) -> StateBuffers:
    """States with these first values, in the memory of the provider that does the steps."""
    device = device_of(options.provider_list())
    return StateBuffers(values, take) if device is None else DeviceStates(values, device)


class DeviceStates(StateBuffers):
    """The current values of all states, by name, in the memory of a device.

    Reading gives a copy in the processor's memory that is live as long as somebody keeps it, as that of
    :class:`StateBuffers` is: before a step it goes to the device, and after a step the new value comes back. What
    nobody holds stays where it is.

    Args:
        values: First values.
        device: Where they go.
    """

    on_device = True

    def __init__(self, values: Mapping[str, np.ndarray], device: Device) -> None:
        super().__init__({})
        self._device = device
        self._kinds: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {}
        self._there: dict[str, list[Any]] = {}
        self._mirrors: dict[str, np.ndarray] = {}
        for name, value in values.items():
            array = np.asarray(value)
            self._kinds[name] = array.dtype, array.shape
            self._there[name] = [device.place(array)]
            self._turn[name] = 0

    def __contains__(self, name: object) -> bool:
        return name in self._there

    def __iter__(self) -> Iterator[str]:
        return iter(self._there)

    def __len__(self) -> int:
        return len(self._there)

    def __setitem__(self, name: str, value: np.ndarray) -> None:
        array = self._fitting(name, value)
        if name in self._mirrors:
            self._mirrors[name][...] = array
        self._now(name).update_inplace(np.ascontiguousarray(array))

    def kind(self, name: str) -> tuple[np.dtype[Any], tuple[int, ...]]:
        """Type and shape of a state."""
        return self._kinds[name]

    def current(self, name: str) -> np.ndarray:
        """The current value, for those who do not keep it and do not write to it."""
        return self._mirrors[name] if name in self._mirrors else self._fetch(name)

    def give_second_buffer(self, name: str) -> None:
        """Let a state have a buffer to write to while the other is read."""
        buffers = self._there[name]
        if len(buffers) == 1:
            dtype, shape = self._kinds[name]
            buffers.append(self._device.place(np.zeros(shape, dtype)))
            self.doubled.append(name)

    def join(self, names: Sequence[str], *, parts: int = 1) -> np.ndarray:
        """States on a device are not in memory that other processes could be sent.

        Raises:
            OptionError: Always.
        """
        raise OptionError(
            f"Several processes train together in the processor's memory only, not in that of {self._device.kind}; "
            "leave providers or parallel out."
        )

    def place(self, name: str, memory: np.ndarray) -> None:
        """As :meth:`join`."""
        self.join([name])

    def bind_input(self, binding: Any, name: str) -> None:
        """Bind the current value as the input of its name."""
        binding.bind_ortvalue_input(name, self._now(name))

    def bind_output(self, binding: Any, output: str, name: str, *, other: bool) -> None:
        """Bind an output to the buffer of a state, or to its other one."""
        binding.bind_ortvalue_output(output, self._there[name][self._turn[name] ^ other])

    def before_step(self, binding: Any, names: Iterable[str]) -> None:
        """Take over what was written into arrays that somebody holds, and bind what the step reads.

        It is bound for every step: where the first node that reads a state does not run on the device, ONNX Runtime
        takes a copy of it when it is bound.
        """
        for name, mirror in self._mirrors.items():
            self._now(name).update_inplace(mirror)
        for name in names:
            self.bind_input(binding, name)

    def after_step(self, written: Iterable[str], swapped: tuple[str, ...]) -> None:
        """A step has written these states, some of them into their other buffer."""
        for name in swapped:
            self._turn[name] ^= 1
        for name in self._mirrors.keys() & set(written):
            self._mirrors[name][...] = self._now(name).numpy()

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers on the device."""
        sizes = {name: dtype.itemsize * int(np.prod(shape)) for name, (dtype, shape) in self._kinds.items()}
        return sum(sizes[name] * len(buffers) for name, buffers in self._there.items())

    def _hand_out(self, name: str) -> np.ndarray:
        anchor = self._anchor(name)
        if anchor is None:
            mirror = self._mirrors[name] = self._fetch(name)
            if not mirror.nbytes:
                return mirror
            anchor = np.frombuffer(mirror.reshape(-1).view(np.uint8).data, np.uint8)
            self._anchors[name] = weakref.ref(anchor)
            # What was written into the array after the last step goes to the device when the array does.
            weakref.finalize(anchor, self._take_back, name).atexit = False
        mirror = self._mirrors[name]
        return anchor.view(mirror.dtype).reshape(mirror.shape)

    def _take_back(self, name: str) -> None:
        self._now(name).update_inplace(self._mirrors.pop(name))

    def _fetch(self, name: str) -> np.ndarray:
        """A copy in the processor's memory."""
        return np.array(self._now(name).numpy())

    def _now(self, name: str) -> Any:
        """The buffer that has the current value."""
        return self._there[name][self._turn[name]]
