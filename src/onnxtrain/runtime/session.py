"""Run any valid training model on stock ONNX Runtime."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.errors import TrainingInfoError
from onnxtrain.model_file.external import check_external_data, set_folder, with_external_data
from onnxtrain.passes.lower import lower_entry
from onnxtrain.passes.merge_algorithm import merge_algorithm
from onnxtrain.runtime.device_states import new_states
from onnxtrain.runtime.options import RuntimeOptions
from onnxtrain.runtime.states import StateBuffers
from onnxtrain.runtime.step import StepSession, create_session
from onnxtrain.spelling import checks_arguments
from onnxtrain.training_info.build import fill_states
from onnxtrain.training_info.check import check_training_model
from onnxtrain.training_info.read import bindings, read_training_model, state_tensors
from onnxtrain.training_info.recipe import StepEntry


@checks_arguments
class TrainingSession:
    """Run the training that ``training_info`` of a model describes, written by onnxtrain or by another tool.

    One onnxruntime session per entry runs forward pass, gradient and update. The states (parameters, optimizer states,
    update counts) are buffers bound to its inputs and outputs; their first values are the initializers of the model.

    Args:
        training_model: A model with ``training_info``, or the path of one.
        options: Threads, providers, memory, kernels.
        folder: Folder of external data, for a model given as a proto.
        values: First values of states that differ from the initializers.
        states: Existing buffers to train on, instead of new ones with the first values.

    Raises:
        TrainingInfoError: ``training_info`` is not valid; the message names the binding and the reason.
        GradientError: A gradient cannot be built.
    """

    def __init__(
        self,
        training_model: onnx.ModelProto | str | os.PathLike[str],
        *,
        options: RuntimeOptions | None = None,
        folder: str | os.PathLike[str] = "",
        values: Mapping[str, np.ndarray] | None = None,
        states: StateBuffers | None = None,
    ) -> None:
        model, own_folder = read_training_model(training_model)
        check_training_model(model)
        check_external_data(model, str(folder) or own_folder, without=set(values or ()))
        source = _File(model, str(folder) or own_folder, values or {})
        entries = [merge_algorithm(model, index, folder=source.folder) for index in range(len(model.training_info))]
        self._start(source, entries, options or RuntimeOptions(), states)

    @classmethod
    def of_entries(
        cls,
        entries: Sequence[StepEntry],
        first_values: Mapping[str, np.ndarray],
        write: Callable[[], onnx.ModelProto],
        *,
        options: RuntimeOptions,
        folder: str = "",
        states: StateBuffers | None = None,
    ) -> TrainingSession:
        """Create a session from entries that onnxtrain built; they are consumed and not checked.

        Args:
            entries: The entries.
            first_values: First values of the states, by name.
            write: Writes the training model; values of its states are arbitrary.
            options: Threads, providers, memory, kernels.
            folder: Folder of the external data of frozen tensors.
            states: Existing buffers to train on, instead of new ones with the first values.
        """
        session = cls.__new__(cls)
        session._start(_Built(first_values, write, folder), entries, options, states)
        return session

    def _start(
        self, source: _Source, entries: Sequence[StepEntry], options: RuntimeOptions, states: StateBuffers | None
    ) -> None:
        self.options = options
        self._source = source
        if states is None:
            states = new_states(source.first_values(), options)
        self._states = states
        kernels, updates = options.uses_kernels(), options.updates()
        own = frozenset[str]() if updates is None else updates.operators
        self._steps = [
            StepSession(lower_entry(entry, kernels=kernels, updates=own), states, options, kernels=kernels)
            for entry in entries
        ]

    @property
    def state(self) -> StateBuffers:
        """Current states by name: live arrays to read and write; assigning copies into them."""
        return self._states

    def initialize(self) -> None:
        """Set every state to its initializer, then run the initialization graphs in order and assign their outputs."""
        self._source.initialize(self._states, self.options)

    @checks_arguments
    def step(self, feeds: Mapping[str, Any], *, entry: int | None = None) -> dict[str, np.ndarray]:
        """Run one training iteration: every entry in order, each assigning its states before the next starts.

        Args:
            feeds: Arrays by input name of main graph and algorithms.
            entry: Index of the only entry to run.

        Returns:
            The algorithm outputs without an update binding (the loss), by name.

        Raises:
            DataError: An input is missing.
            StepError: onnxruntime failed.
        """
        if entry is not None:
            if not 0 <= entry < len(self._steps):
                raise TrainingInfoError(f"There is no entry {entry}; the training model has {len(self._steps)}.")
            return self._steps[entry].run(feeds)
        results: dict[str, np.ndarray] = {}
        for session in self._steps:
            results.update(session.run(feeds))
        return results

    def model(self) -> onnx.ModelProto:
        """Return the training model with the current states as its initializers."""
        return with_external_data(fill_states(self._source.write(), self._states), self._source.folder)


class _Source(Protocol):
    """Source of a session's states and training model.

    Attributes:
        folder: Folder of external data.
    """

    folder: str

    def first_values(self) -> Mapping[str, np.ndarray]:
        """Return the values of the states before training."""

    def initialize(self, states: StateBuffers, options: RuntimeOptions) -> None:
        """Set the states to their values at the start of training."""

    def write(self) -> onnx.ModelProto:
        """Return a training model that the caller may modify; values of its states are arbitrary."""


class _File:
    """A training model from a file or proto."""

    def __init__(self, model: onnx.ModelProto, folder: str, values: Mapping[str, np.ndarray]) -> None:
        self.folder = folder
        self._model = model
        self._values = values
        self._tensors = state_tensors(model)

    def _value(self, name: str) -> np.ndarray:
        if name in self._values:
            return self._values[name]
        return np.asarray(ir.serde.deserialize_tensor(self._tensors[name], self.folder).numpy())

    def first_values(self) -> Mapping[str, np.ndarray]:
        return {name: self._value(name) for name in self._tensors}

    def initialize(self, states: StateBuffers, options: RuntimeOptions) -> None:
        for name in self._tensors:
            states[name] = self._value(name)
        for entry in self._model.training_info:
            binding = bindings(entry, "initialization_binding")
            if not binding:
                continue
            graph = onnx.ModelProto(
                ir_version=max(8, self._model.ir_version),
                opset_import=self._model.opset_import,
                functions=self._model.functions,
            )
            graph.graph.CopyFrom(entry.initialization)
            working = ir.from_proto(graph)
            set_folder(working, self.folder)
            found = create_session(working, options).computed(working.graph.outputs)
            for key, value in binding.items():
                states[key] = found[value]

    def write(self) -> onnx.ModelProto:
        result = onnx.ModelProto()
        result.CopyFrom(self._model)
        return result


class _Built:
    """Entries that onnxtrain built."""

    def __init__(
        self, first_values: Mapping[str, np.ndarray], write: Callable[[], onnx.ModelProto], folder: str
    ) -> None:
        self.folder = folder
        self._first_values = first_values
        self.write = write

    def first_values(self) -> Mapping[str, np.ndarray]:
        return self._first_values

    def initialize(self, states: StateBuffers, options: RuntimeOptions) -> None:
        for name, value in self._first_values.items():
            states[name] = value
