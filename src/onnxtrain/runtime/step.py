"""Run a step graph in one onnxruntime session, with states bound to inputs and outputs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from onnxtrain.errors import DataError, OnnxTrainError, StepError
from onnxtrain.graph.limits import has_body_in_branches
from onnxtrain.graph.upstream.sessions import (
    DISABLED_OPTIMIZERS,
    DISABLED_WITH_DEEP_BODIES,
    DISABLED_WITH_TWO_BITS,
    bind_foreign,
    fetched,
    is_foreign,
    mixed_two_bits,
    refuse_crashing_nodes,
)
from onnxtrain.graph.value import Dimension, dimensions
from onnxtrain.lowering.lower import StepGraph
from onnxtrain.runtime.failures import explained, failure
from onnxtrain.runtime.frozen import FrozenTensors
from onnxtrain.runtime.options import CPU, RuntimeOptions, name_of
from onnxtrain.runtime.states import StateBuffers
from onnxtrain.runtime.versions import Reading

_MOST_IDLE = 16
"""Sets of buffers whose idle bindings a session keeps: those of a training, and of its copies for readers."""


class _Binding(NamedTuple):
    """Bound inputs and outputs of one run at a time."""

    binding: Any
    numbers: dict[str, np.ndarray]


class StepSession:
    """Session of one entry of a training model."""

    def __init__(
        self, step: StepGraph, states: StateBuffers, options: RuntimeOptions, *, kernels: bool, bind: bool = True
    ) -> None:
        self.step = step
        self._states = states
        graph = step.model.graph
        written = {name: new for name, new in step.states.items() if new is not None}
        self.second_buffers = tuple(name for name in written if name not in step.in_place)
        for name in self.second_buffers:
            states.give_second_buffer(name)
        self._inputs = {str(value.name): _dtype(value) for value in graph.inputs if value.name in step.feeds}
        self._binds = bind and not any(dtype.kind in "OSU" for dtype in self._inputs.values())
        bound = set(written.values())
        with _without_shapes(value for value in graph.outputs if value.name in bound):
            self._session = create_session(step.model, options, kernels=kernels, bind=self._binds)
        self._read = [str(value.name) for value in graph.inputs if value.name not in self._inputs]
        self._written = written
        # Bindings that no run uses, by the buffers that they bind: each run has one of its own.
        self._idle: dict[tuple[int, ...], list[_Binding]] = {}
        given = {*self._inputs, *step.results}
        moving = [value for value in (*graph.inputs, *graph.outputs) if value.name in given]
        # Scalars, such as the learning rate and the loss, have memory that is bound once; a device would keep a copy.
        scalars = [] if states.on_device else [value for value in moving if value.dtype in _NUMBERS]
        self._scalars = {str(value.name): _dtype(value) for value in scalars if dimensions(value) == ()}
        # The memory of a bound output may not fit the next batch size (workarounds: shapes of bound outputs).
        shapes = {value.name: dimensions(value) for value in graph.outputs if value.name in given}
        self._varying = [name for name in step.results if not _is_static(shapes[name])]
        self._results = list(step.results)
        self._fetched = [(index, name) for index, name in enumerate(step.results) if name not in self._scalars]
        # Arrays of ml_dtypes extension types, such as bfloat16, are bound by address (workarounds: extension types).
        self._foreign = {
            str(value.name): value.dtype for value in moving if value.dtype is not None and is_foreign(value.dtype)
        }

    def run(self, feeds: Mapping[str, Any], reading: Reading | None = None) -> dict[str, np.ndarray]:
        """Run the step; return the outputs that are not states."""
        if not self._written:
            if not self._read and not self._binds:
                return self._run_unbound(feeds, self._states)
            if reading is not None:
                return self._run_on(feeds, reading)
            with self._states.reading(self._read) as own:
                return self._run_on(feeds, own)
        if self._states.is_own:
            self._states.change()
            return self._run(feeds, self._states)
        with self._states.training("a step"):
            self._states.change()
            return self._run(feeds, self._states)

    def _run_on(self, feeds: Mapping[str, Any], reading: Reading) -> dict[str, np.ndarray]:
        states = reading.begin()
        try:
            return self._run(feeds, states)
        finally:
            reading.end(states)

    def _run(self, feeds: Mapping[str, Any], states: StateBuffers) -> dict[str, np.ndarray]:
        if not self._binds:
            return self._run_unbound(feeds, states)
        key = (states.serial, *map(states.turn, states.doubled))
        idle = self._idle.get(key)
        try:
            bound = idle.pop() if idle else self._bind_states(states)
            found = self._run_bound(feeds, states, *bound)
        except MemoryError as error:
            raise self._failure(error, feeds) from error
        if idle is None:
            idle = self._idle.setdefault(key, [])
            while len(self._idle) > _MOST_IDLE:
                self._idle.pop(next(iter(self._idle)), None)
        idle.append(bound)
        return found

    def _failure(self, error: Exception, feeds: Mapping[str, Any]) -> OnnxTrainError:
        states = self._states
        size = 0 if states.on_device else sum(states.current(name).nbytes for name in states)
        return failure(error, self.step.model.graph, feeds, size)

    def _run_bound(
        self, feeds: Mapping[str, Any], states: StateBuffers, binding: Any, numbers: Mapping[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        held = list[Any]()
        for name, dtype in self._inputs.items():
            try:
                array = np.asarray(feeds[name], dtype=dtype, order="C")
            except KeyError:
                raise DataError(f"The step needs the input {name!r}; got {', '.join(feeds) or 'nothing'}.") from None
            if name in self._foreign:
                held.append(bind_foreign(binding, name, array, self._foreign[name]))
            elif name not in numbers:
                binding.bind_cpu_input(name, array)
            elif array.ndim:
                raise StepError(f"The step needs a scalar as {name!r}; got an array of shape {array.shape}.")
            else:
                numbers[name][...] = array
        for name in self._varying:
            binding.bind_output(name, "cpu")
        states.before_step(binding, self._read)
        try:
            self._session.run_with_iobinding(binding)
        except Exception as error:
            raise self._failure(error, feeds) from error
        if self._written:
            states.after_step(self._written, self.second_buffers)
        results = {name: numbers[name].copy() for name in self.step.results if name in numbers}
        if self._fetched:
            outputs = binding.get_outputs_as_ortvaluevector()
            for index, name in self._fetched:
                foreign = self._foreign.get(name)
                results[name] = (
                    np.array(outputs[index].numpy()) if foreign is None else fetched(outputs[index], foreign)
                )
        return results

    def _run_unbound(self, feeds: Mapping[str, Any], states: StateBuffers) -> dict[str, np.ndarray]:
        """Run without binding, as graphs with string inputs need, since strings cannot be bound by address."""
        if self._written:
            raise StepError("A model with string inputs cannot be trained; cut off the nodes that encode the strings.")
        arrays = {name: states.current(name) for name in self._read}
        for name, dtype in self._inputs.items():
            if name not in feeds:
                raise DataError(f"The step needs the input {name!r}; got {', '.join(feeds) or 'nothing'}.")
            arrays[name] = np.asarray(feeds[name], dtype=dtype, order="C")
        try:
            found = self._session.run(self._results, arrays)
        except Exception as error:
            raise self._failure(error, feeds) from error
        return dict(zip(self.step.results, found, strict=True))

    def _bind_states(self, states: StateBuffers) -> _Binding:
        binding = self._session.io_binding()
        numbers = {name: np.zeros((), dtype) for name, dtype in self._scalars.items()}
        for name in self.step.results:
            if name not in numbers:
                binding.bind_output(name, "cpu")
        for name, number in numbers.items():
            bind = binding.bind_input if name in self._inputs else binding.bind_output
            bind(name, "cpu", 0, number.dtype, [], number.ctypes.data)
        for name in self._read:
            states.bind_input(binding, name)
        for name, new_name in self._written.items():
            states.bind_output(binding, new_name, name, other=name in self.second_buffers)
        return _Binding(binding, numbers)


@contextmanager
def _without_shapes(outputs: Iterable[ir.Value]) -> Iterator[None]:
    """Context in which outputs that no node reads have no shapes; their bound memory has them."""
    shapes = {value: value.shape for value in outputs if not value.uses()}
    try:
        for value in shapes:
            value.shape = None
        yield
    finally:
        for value, shape in shapes.items():
            value.shape = shape


class Session:
    """An onnxruntime session with the memory that it reads, which must live as long."""

    def __init__(self, session: Any, frozen: FrozenTensors) -> None:
        self._session = session
        self._frozen = frozen

    def get_inputs(self) -> list[Any]:
        """Return names, types and shapes of the inputs."""
        return list(self._session.get_inputs())

    def run(self, names: Sequence[str] | None, feeds: Mapping[str, Any]) -> list[Any]:
        """Run the session; return the named outputs, or all for ``None``."""
        return list(self._session.run(names, feeds))

    def computed(self, outputs: Iterable[ir.Value]) -> dict[str, np.ndarray]:
        """Run a graph without inputs; return its outputs by name, including ml_dtypes extension types."""
        binding, kinds = self.io_binding(), {str(value.name): value.dtype for value in outputs}
        for name in kinds:
            binding.bind_output(name, "cpu")
        self.run_with_iobinding(binding)
        values = binding.get_outputs_as_ortvaluevector()
        return {
            name: fetched(values[index], kind)
            if kind is not None and is_foreign(kind)
            else np.array(values[index].numpy())
            for index, (name, kind) in enumerate(kinds.items())
        }

    def io_binding(self) -> Any:
        """Return an ``onnxruntime.IOBinding`` with frozen tensors bound, valid as long as this session."""
        binding = self._session.io_binding()
        for name, value in self._frozen.inputs.items():
            binding.bind_ortvalue_input(name, value)
        return binding

    def run_with_iobinding(self, binding: Any) -> None:
        """Run with bound inputs and outputs."""
        self._session.run_with_iobinding(binding)

    def end_profiling(self) -> str:
        """Finish the profile that the options requested; return the path of its file."""
        return str(self._session.end_profiling())


def create_session(model: ir.Model, options: RuntimeOptions, *, kernels: bool = False, bind: bool = False) -> Session:
    """Create an onnxruntime session for a working graph."""
    import onnxruntime

    refuse_crashing_nodes(model.graph)
    deep = has_body_in_branches(model, 2)
    disabled = [*DISABLED_OPTIMIZERS, *_WITHOUT_GAIN, *(DISABLED_WITH_DEEP_BODIES if deep else ())]
    disabled += DISABLED_WITH_TWO_BITS if mixed_two_bits(model.graph) else ()
    settings, providers = options.session_options(kernels=kernels), options.provider_list()
    on_cpu = name_of(providers[0]) == CPU  # others have memory of their own
    frozen = FrozenTensors(model, bind=bind and on_cpu)
    with frozen.left_out():
        proto = ir.to_proto(model)
    try:
        frozen.register(settings, shared=on_cpu)
        session = onnxruntime.InferenceSession(
            proto.SerializeToString(),
            settings,
            providers,
            disabled_optimizers=disabled,
        )
    except Exception as error:
        known = isinstance(error, (RuntimeError, ValueError)) or type(error).__module__.startswith("onnxruntime")
        if not known:
            raise
        hint = "" if on_cpu else _OF_PROVIDERS
        raise StepError(f"{explained(error)}{hint}") from error
    started, wanted = session.get_providers(), name_of(providers[0])
    if wanted not in started:
        raise StepError(
            f"ONNX Runtime has the provider {wanted!r} but could not start it here, and would run on "
            f"{', '.join(started)} instead; its driver or libraries are missing or of another version."
        ).about(wanted, got=started)
    return Session(session, frozen)


_OF_PROVIDERS = (
    " (Some providers want static shapes: give the model a fixed batch size. `onnxtrain check MODEL --provider NAME` "
    "finds the operator.)"
)

_WITHOUT_GAIN = ("CommonSubexpressionElimination", "ConstantSharing")
"""Graph optimizers of ONNX Runtime that cost time without a gain.

CommonSubexpressionElimination repeats work of the lowering passes and took a third of the time to create a session of
6,000 nodes. Without it, 142 of 144 step graphs of tests and benchmarks are unchanged; two keep three subtractions of
equal but separate constants. ConstantSharing merges equal small constants, after which ONNX Runtime runs over the whole
graph again: a sixth of the remaining time."""


_NUMBERS = frozenset({ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.INT64, ir.DataType.INT32})
"""Scalar types whose memory layout NumPy and ONNX Runtime share."""


def _is_static(shape: tuple[Dimension, ...] | None) -> bool:
    return shape is not None and all(isinstance(size, int) for size in shape)


def _dtype(value: ir.Value) -> np.dtype[Any]:
    assert value.dtype is not None
    return value.dtype.numpy()
