"""State buffers in device memory; a state is copied to the CPU only when it is read."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from onnxtrain.errors import OptionError
from onnxtrain.runtime.options import Device, RuntimeOptions, device_of
from onnxtrain.runtime.states import StateBuffers, Take


def new_states(values: Mapping[str, np.ndarray], options: RuntimeOptions, take: Take | None = None) -> StateBuffers:
    """Create state buffers with these first values, in the memory of the provider that runs the steps."""
    device = device_of(options.provider_list())
    return StateBuffers(values, take) if device is None else DeviceStates(values, device)


class DeviceStates(StateBuffers):
    """The current values of all states, by name, in device memory."""

    on_device = True

    def __init__(self, values: Mapping[str, np.ndarray], device: Device) -> None:
        super().__init__({})
        self._device = device
        self._kinds: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {}
        self._device_buffers: dict[str, list[Any]] = {}
        self._mirrors: dict[str, np.ndarray] = {}
        for name, value in values.items():
            array = np.asarray(value)
            self._kinds[name] = array.dtype, array.shape
            self._device_buffers[name] = [device.upload(array)]
            self._turn[name] = 0

    def __contains__(self, name: object) -> bool:
        return name in self._device_buffers

    def __iter__(self) -> Iterator[str]:
        return iter(self._device_buffers)

    def __len__(self) -> int:
        return len(self._device_buffers)

    def _new(self, values: Mapping[str, np.ndarray]) -> DeviceStates:
        return DeviceStates(values, self._device)

    def _assign(self, name: str, array: np.ndarray) -> None:
        if name in self._mirrors:
            self._mirrors[name][...] = array
        self._current_buffer(name).update_inplace(np.asarray(array, order="C"))

    def kind(self, name: str) -> tuple[np.dtype[Any], tuple[int, ...]]:
        """Return the type and shape of a state."""
        return self._kinds[name]

    def current(self, name: str) -> np.ndarray:
        """Return the current value in CPU memory; callers must neither keep it nor write to it."""
        return self._mirrors[name] if name in self._mirrors else self._fetch(name)

    def give_second_buffer(self, name: str) -> None:
        """Allocate a second buffer for a state, to be written while the first is read."""
        buffers = self._device_buffers[name]
        if len(buffers) == 1:
            dtype, shape = self._kinds[name]
            buffers.append(self._device.upload(np.zeros(shape, dtype)))
            self.doubled.append(name)

    def make_contiguous(self, names: Sequence[str], *, parts: int = 1) -> np.ndarray:
        """Refuse: communication between ranks reads CPU memory."""
        raise OptionError(
            f"Data-parallel training needs states in CPU memory, but they are in {self._device.kind} memory; leave "
            "providers or parallel out."
        ).about("states", got=self._device.kind, wanted="cpu")

    def set_buffer(self, name: str, memory: np.ndarray) -> None:
        """Refuse, like :meth:`make_contiguous`."""
        self.make_contiguous([name])

    def bind_input(self, binding: Any, name: str) -> None:
        """Bind the current value to the graph input of the same name."""
        binding.bind_ortvalue_input(name, self._current_buffer(name))

    def bind_output(self, binding: Any, output: str, name: str, *, other: bool) -> None:
        """Bind an output to the current buffer of a state, or to the other one."""
        binding.bind_ortvalue_output(output, self._device_buffers[name][self._turn[name] ^ other])

    def before_step(self, binding: Any, names: Iterable[str]) -> None:
        """Copy mirrors to the device and bind the states that the step reads.

        States are bound anew for every step: if the first node that reads a state does not run on the device, ONNX
        Runtime copies the state at binding time.
        """
        with self._lock:  # other threads may run on these states, too, and read others for the first time
            for name, mirror in self._mirrors.items():
                self._current_buffer(name).update_inplace(mirror)
        for name in names:
            self.bind_input(binding, name)

    def after_step(self, written: Iterable[str], swapped: tuple[str, ...]) -> None:
        """Swap the buffers of ``swapped`` and copy the new values of written states into their mirrors."""
        for name in swapped:
            self._turn[name] ^= 1
        for name in self._mirrors.keys() & set(written):
            self._mirrors[name][...] = self._current_buffer(name).numpy()

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers on the device."""
        sizes = {name: dtype.itemsize * int(np.prod(shape)) for name, (dtype, shape) in self._kinds.items()}
        return sum(sizes[name] * len(buffers) for name, buffers in self._device_buffers.items())

    def _hand_out(self, name: str) -> np.ndarray:
        anchor = self._anchor(name)
        if anchor is None:
            mirror = self._mirrors[name] = self._fetch(name)
            if not mirror.nbytes:
                return mirror
            anchor = np.frombuffer(mirror.reshape(-1).view(np.uint8).data, np.uint8)
            self._anchors[name] = weakref.ref(anchor)
            # Values written into the mirror after the last step reach the device when the mirror is freed.
            weakref.finalize(anchor, self._take_back, name).atexit = False
        mirror = self._mirrors[name]
        return anchor.view(mirror.dtype).reshape(mirror.shape)

    def _take_back(self, name: str) -> None:
        self._current_buffer(name).update_inplace(self._mirrors.pop(name))

    def _fetch(self, name: str) -> np.ndarray:
        """Copy a state to CPU memory."""
        return np.array(self._current_buffer(name).numpy())

    def _current_buffer(self, name: str) -> Any:
        return self._device_buffers[name][self._turn[name]]
