"""State buffers: one per tensor, two for a tensor that a step cannot update in place; in CPU or device memory."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np
import onnx_ir as ir

from onnxtrain.errors import OptionError
from onnxtrain.graph.upstream.sessions import is_extension_type
from onnxtrain.model_file.large_data import ALIGNMENT, aligned
from onnxtrain.runtime.options import Device, RuntimeOptions, device_of
from onnxtrain.runtime.versions import Versioned

_serials = itertools.count()

Take = Callable[[np.ndarray], "np.ndarray | None"]


class StateBuffers(Versioned):
    """The current values of all states, by name, in CPU memory.

    A state that a step cannot update in place has two buffers that alternate. They do not alternate while the caller
    holds the live array of the state, or a view of it, nor for a state in memory that the caller chose
    (:meth:`set_buffer`, :meth:`make_contiguous`): each new value is copied over the old one.
    """

    on_device = False
    """True for states in device memory."""

    def __init__(self, values: Mapping[str, np.ndarray], take: Take | None = None) -> None:
        super().__init__()
        self.serial = next(_serials)
        self._buffers: dict[str, list[np.ndarray]] = {
            name: [_aligned(value) if take is None else _taken(value, take)] for name, value in values.items()
        }
        self._turn: dict[str, int] = dict.fromkeys(values, 0)
        self.doubled: list[str] = []
        self._contiguous: dict[tuple[int | str, ...], np.ndarray] = {}
        self._pinned: set[str] = set()  # states whose memory others read
        # Bases of the live arrays. NumPy keeps the base alive as long as any view of it, or view of a view, exists.
        self._anchors: dict[str, weakref.ref[np.ndarray]] = {}
        self._handed_out: dict[str, weakref.ref[np.ndarray]] = {}

    def __getitem__(self, name: str) -> np.ndarray:
        with self._lock:
            if self.is_home:
                handed_out = self._handed_out.get(name)
                array = None if handed_out is None else handed_out()
                if array is None:
                    array = self._hand_out(name)
                    self._handed_out[name] = weakref.ref(array)
                return array
        if name not in self:
            raise KeyError(name)
        with self.reading((name,)) as reading:
            values = reading.begin()
            try:
                array = np.array(values.current(name))
            finally:
                reading.end(values)
        array.flags.writeable = False
        return array

    def copied(self, names: Collection[str], into: Self | None) -> Self:
        """Return a copy of some values, written into an earlier copy of the same names if there is one."""
        if into is None:
            return self._new({name: self.current(name) for name in names})
        for name in names:
            into._assign(name, self.current(name))
        return into

    @property
    def is_settled(self) -> bool:
        """True where the values stay until :attr:`version` changes: no change has begun, and no array is live."""
        return super().is_settled and not any(self._anchor(name) is not None for name in list(self._anchors))

    def _new(self, values: Mapping[str, np.ndarray]) -> Self:
        return type(self)(values)

    def _hand_out(self, name: str) -> np.ndarray:
        buffer = self.current(name)
        anchor = self._anchor(name)
        if anchor is None:
            if not buffer.nbytes:
                return buffer
            # Based on a memoryview, this array is the `base` of all views of it: NumPy collapses chains of views.
            anchor = np.frombuffer(buffer.reshape(-1).view(np.uint8).data, np.uint8)
            self._anchors[name] = weakref.ref(anchor)
            self.version += 1  # the caller may write to it
        return anchor.view(buffer.dtype).reshape(buffer.shape)

    def _anchor(self, name: str) -> np.ndarray | None:
        found = self._anchors.get(name)
        return None if found is None else found()

    def __setitem__(self, name: str, value: np.ndarray) -> None:
        array = self._fitting(name, value)
        with self.writing():
            self._assign(name, array)

    def _assign(self, name: str, array: np.ndarray) -> None:
        self.current(name)[...] = array

    def update(self, *values: Any, **named: Any) -> None:
        """Assign several states as one change."""
        with self.writing():
            super().update(*values, **named)

    def _fitting(self, name: str, value: np.ndarray) -> np.ndarray:
        """Return the value as an array, after a check against the type and shape of the state."""
        if name not in self:
            raise OptionError(f"There is no state {name!r}; the states are {', '.join(list(self)[:8])}.").about(
                name, wanted=[*self]
            )
        dtype, shape = self.kind(name)
        array = np.asarray(value)
        if array.shape != shape or array.dtype != dtype:
            raise OptionError(
                f"The state {name!r} is {dtype} of shape {shape}; got {array.dtype} of shape {array.shape}."
            ).about(name, got=array.shape, wanted=shape)
        return array

    def __delitem__(self, name: str) -> None:
        raise OptionError(f"The state {name!r} belongs to the training model and cannot be deleted.").about(name)

    def __contains__(self, name: object) -> bool:
        return name in self._buffers

    def __iter__(self) -> Iterator[str]:
        return iter(self._buffers)

    def __len__(self) -> int:
        return len(self._buffers)

    def give_second_buffer(self, name: str) -> None:
        """Allocate a second buffer for a state, to be written while the first is read."""
        buffers = self._buffers[name]
        if len(buffers) == 1:
            buffers.append(_aligned(buffers[0]))
            self.doubled.append(name)

    def set_buffer(self, name: str, memory: np.ndarray) -> None:
        """Hold a state in an array, with its values, from now on; call this before any session binds the state."""
        (buffer,) = self._buffers[name]
        assert memory.shape == buffer.shape
        assert memory.dtype == buffer.dtype
        self._buffers[name] = [memory]
        self._pinned.add(name)

    def make_contiguous(self, names: Sequence[str], *, parts: int = 1) -> np.ndarray:
        """Move states of one type into one contiguous array that holds them from now on; return it [elements]."""
        buffers = [self._buffers[name] for name in names]
        held = [name for name in names if name in self.doubled or self._anchor(name) is not None]
        if (parts, *names) in self._contiguous:
            return self._contiguous[parts, *names]
        if held or len({buffer.dtype for (buffer, *_) in buffers}) != 1:
            raise OptionError(f"The states {', '.join(held or names)} cannot be joined into one array.")
        starts = np.cumsum([0] + [-(-buffer.nbytes // ALIGNMENT) * ALIGNMENT for (buffer,) in buffers])
        unit = parts * ALIGNMENT
        memory = _aligned(np.zeros(-(-starts[-1] // unit) * unit, np.uint8))
        for (old,), name, start in zip(buffers, names, starts[:-1].tolist(), strict=True):
            new = memory[start : start + old.nbytes].view(old.dtype).reshape(old.shape)
            new[...] = old
            self._buffers[name] = [new]
        self._pinned.update(names)
        found = self._contiguous[parts, *names] = memory.view(buffers[0][0].dtype)
        return found

    def current(self, name: str) -> np.ndarray:
        """Return the buffer with the current value; callers must not keep it."""
        return self._buffers[name][self._turn[name]]

    def kind(self, name: str) -> tuple[np.dtype[Any], tuple[int, ...]]:
        """Return the type and shape of a state."""
        buffer = self._buffers[name][0]
        return buffer.dtype, buffer.shape

    def turn(self, name: str) -> int:
        """Return the index of the current buffer."""
        return self._turn[name]

    def buffer(self, name: str, turn: int) -> np.ndarray:
        """Return a buffer of a state by index."""
        buffers = self._buffers[name]
        return buffers[turn % len(buffers)]

    def bind_input(self, binding: Any, name: str) -> None:
        """Bind the current value to the graph input of the same name."""
        _bind(binding.bind_input, name, self.current(name))

    def bind_output(self, binding: Any, output: str, name: str, *, other: bool) -> None:
        """Bind an output to the current buffer of a state, or to the other one."""
        _bind(binding.bind_output, output, self.buffer(name, self._turn[name] + other))

    def before_step(self, binding: Any, names: Iterable[str]) -> None:
        """Prepare the states that a step reads; buffers in CPU memory need nothing."""

    def after_step(self, written: Iterable[str], swapped: tuple[str, ...]) -> None:
        """Make the other buffer of each state in ``swapped`` current, or copy it if the state keeps its memory."""
        for name in swapped:
            if self._anchor(name) is None and name not in self._pinned:
                self._turn[name] ^= 1
            else:
                turn = self._turn[name]
                self._buffers[name][turn][...] = self._buffers[name][turn ^ 1]

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.nbytes for buffers in self._buffers.values() for buffer in buffers)


class DeviceStates(StateBuffers):
    """The current values of all states, by name, in device memory; they are copied to the CPU when they are read."""

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
        """Copy mirrors to the device and bind the states that the step reads."""
        with self._lock:  # other threads may run on these states, too, and read others for the first time
            for name, mirror in self._mirrors.items():
                self._current_buffer(name).update_inplace(mirror)
        for name in names:  # anew: ORT copies a state when it is bound, if its first reader is not on the device
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
        return np.array(self._current_buffer(name).numpy())

    def _current_buffer(self, name: str) -> Any:
        return self._device_buffers[name][self._turn[name]]


def new_states(values: Mapping[str, np.ndarray], options: RuntimeOptions, take: Take | None = None) -> StateBuffers:
    """Create state buffers with these first values, in the memory of the provider that runs the steps."""
    device = device_of(options.provider_list())
    return StateBuffers(values, take) if device is None else DeviceStates(values, device)


def _bind(bind: Callable[..., None], name: str, buffer: np.ndarray) -> None:
    # ONNX Runtime knows the extension types of ml_dtypes by their numbers in ONNX.
    kind = int(ir.DataType.from_numpy(buffer.dtype)) if is_extension_type(buffer.dtype) else buffer.dtype
    bind(name, "cpu", 0, kind, list(buffer.shape), buffer.ctypes.data)


def _taken(value: np.ndarray, take: Take) -> np.ndarray:
    """Return the memory of a value if it can be taken and starts on a cache line, otherwise an aligned copy."""
    taken = take(value)
    return _aligned(value) if taken is None or taken.ctypes.data % ALIGNMENT else taken


def _aligned(value: np.ndarray) -> np.ndarray:
    value = np.asarray(value)
    zero = value.size > 1 and not any(value.strides) and not any(value.flat[:1].tobytes())  # a broadcast zero
    buffer = aligned(value.nbytes, zero=zero).view(value.dtype).reshape(value.shape)
    if not zero:
        buffer[...] = value
    return buffer
