"""Run any valid training model on stock ONNX Runtime."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.errors import TrainingInfoError
from onnxtrain.errors.spelling import checks_arguments
from onnxtrain.lowering.lower import lower_entry, merge_algorithm
from onnxtrain.lowering.portable import Portable
from onnxtrain.lowering.training_info.build import fill_states
from onnxtrain.lowering.training_info.read import bindings, check_training_model, read_training_model, state_tensors
from onnxtrain.lowering.training_info.recipe import StepEntry
from onnxtrain.model_file.external import check_external_data, set_folder, with_external_data
from onnxtrain.runtime.options import RuntimeOptions
from onnxtrain.runtime.states import StateBuffers, new_states
from onnxtrain.runtime.step import StepSession, create_session


@checks_arguments
class TrainingSession:
    """Run the training that ``training_info`` of a model describes, written by onnxtrain or by another tool.

    One onnxruntime session per entry runs forward pass, gradient and update. The states (parameters, optimizer states,
    update counts) are buffers bound to its inputs and outputs; their first values are the initializers of the model.

    Args:
        training_model: A model with ``training_info``, or the path of one.
        runtime: Threads, providers, memory, kernels.
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
        runtime: RuntimeOptions | None = None,
        folder: str | os.PathLike[str] = "",
        values: Mapping[str, np.ndarray] | None = None,
        states: StateBuffers | None = None,
    ) -> None:
        model, own_folder = read_training_model(training_model)
        check_training_model(model)
        where, given = str(folder) or own_folder, values or {}
        check_external_data(model, where, without=set(given))
        tensors = state_tensors(model)

        def first_value(name: str) -> np.ndarray:
            if name in given:
                return given[name]
            return np.asarray(ir.serde.deserialize_tensor(tensors[name], where).numpy())

        self._folder, self._names = where, list(tensors)
        self._first_value: Callable[[str], np.ndarray] = first_value
        self._model: onnx.ModelProto | None = model
        self._write: Callable[[], onnx.ModelProto] = functools.partial(copy.deepcopy, model)
        entries = [merge_algorithm(model, index, folder=where) for index in range(len(model.training_info))]
        self._start(entries, runtime or RuntimeOptions(), states)

    @classmethod
    def of_entries(
        cls,
        entries: Sequence[StepEntry],
        first_values: Mapping[str, np.ndarray],
        write: Callable[[], onnx.ModelProto],
        *,
        runtime: RuntimeOptions,
        folder: str = "",
        states: StateBuffers | None = None,
    ) -> TrainingSession:
        """Create a session from entries that onnxtrain built; they are consumed and not checked.

        Args:
            entries: The entries.
            first_values: First values of the states, by name.
            write: Writes the training model; values of its states are arbitrary.
            runtime: Threads, providers, memory, kernels.
            folder: Folder of the external data of frozen tensors.
            states: Existing buffers to train on, instead of new ones with the first values.
        """
        session = cls.__new__(cls)
        session._folder, session._first_value, session._names = folder, first_values.__getitem__, list(first_values)
        session._model, session._write = None, write
        session._start(entries, runtime, states)
        return session

    def _start(self, entries: Sequence[StepEntry], runtime: RuntimeOptions, states: StateBuffers | None) -> None:
        self._runtime = runtime
        if states is None:
            states = new_states({name: self._first_value(name) for name in self._names}, runtime)
        self._states = states
        kernels, updates = runtime.uses_kernels(), runtime.updates()
        own = frozenset[str]() if updates is None else updates.operators
        portable: Portable | None = "cuda" if runtime.uses_cuda() else None
        self._steps = [
            StepSession(
                lower_entry(entry, kernels=kernels, portable=portable, updates=own), states, runtime, kernels=kernels
            )
            for entry in entries
        ]

    @property
    def state(self) -> StateBuffers:
        """Current states by name: live arrays to read and write; assigning copies into them."""
        return self._states

    def initialize(self) -> None:
        """Set every state to its initializer, then run the initialization graphs in order and assign their outputs."""
        with self._states.writing():
            for name in self._names:
                self._states[name] = self._first_value(name)
            for entry in () if self._model is None else self._model.training_info:
                self._run_initialization(entry)

    def _run_initialization(self, entry: onnx.TrainingInfoProto) -> None:
        binding = bindings(entry, "initialization_binding")
        if not binding:
            return
        assert self._model is not None
        graph = onnx.ModelProto(
            ir_version=max(8, self._model.ir_version),
            opset_import=self._model.opset_import,
            functions=self._model.functions,
        )
        graph.graph.CopyFrom(entry.initialization)
        working = ir.from_proto(graph)
        set_folder(working, self._folder)
        found = create_session(working, self._runtime).computed(working.graph.outputs)
        for key, value in binding.items():
            self._states[key] = found[value]

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
            BusyError: Another thread runs a step.
        """
        if entry is not None:
            if not 0 <= entry < len(self._steps):
                raise TrainingInfoError(f"There is no entry {entry}; the training model has {len(self._steps)}.")
            return self._steps[entry].run(feeds)
        results: dict[str, np.ndarray] = {}
        with self._states.training("step"):
            for session in self._steps:
                results.update(session.run(feeds))
        return results

    def model(self) -> onnx.ModelProto:
        """Return the training model with the current states as its initializers."""
        with self._states.snapshot() as states:
            return with_external_data(fill_states(self._write(), states), self._folder)
