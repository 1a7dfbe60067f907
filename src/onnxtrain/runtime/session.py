"""Execute any valid training model on stock ONNX Runtime."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.errors import TrainingInfoError
from onnxtrain.runtime.options import RuntimeOptions
from onnxtrain.runtime.states import StateBuffers
from onnxtrain.runtime.step import StepSession, create_session
from onnxtrain.training_info.build import fill_states
from onnxtrain.training_info.check import check_training_model
from onnxtrain.training_info.join import bindings, state_tensors
from onnxtrain.training_info.lower import lower_entry, read_training_model


class TrainingSession:
    """Runs the training that a model's ``training_info`` describes, also one that onnxtrain did not write.

    One onnxruntime session per entry does forward pass, gradient and update. The states (parameters, optimizer
    states, update counts) live in buffers that are inputs and outputs of it; they start as the initializers
    of the model.

    Args:
        training_model: A model with ``training_info``, or the path of one.
        options: Threads, providers, memory, kernels.
        folder: Where external data lies, for a model given as a proto.
        values: First values of states, where they differ from the initializers.
        states: Buffers to begin with, instead of new ones with the first values.

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
        self.options = options or RuntimeOptions()
        self._folder = str(folder) or own_folder
        self._model = model
        self._values = values or {}
        self._tensors = state_tensors(model)
        if states is None:
            states = StateBuffers({name: self._first_value(name) for name in self._tensors})
        self._states = states
        self._steps: list[StepSession] = []
        self._open()

    def _open(self) -> None:
        kernels = self.options.uses_kernels()
        self._steps = [
            StepSession(
                lower_entry(self._model, index, kernels=kernels, folder=self._folder),
                self._states,
                self.options,
                kernels=kernels,
            )
            for index in range(len(self._model.training_info))
        ]

    def _first_value(self, name: str) -> np.ndarray:
        if name in self._values:
            return self._values[name]
        return np.asarray(ir.serde.deserialize_tensor(self._tensors[name], self._folder).numpy())

    @property
    def state(self) -> StateBuffers:
        """The current states by name: arrays to read and write; assigning copies into them."""
        return self._states

    def initialize(self) -> None:
        """Set every state to its initializer, then run the initialization graphs in order and assign."""
        for name in self._tensors:
            self._states[name] = self._first_value(name)
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
            session = create_session(ir.from_proto(graph), self.options)
            values = session.run(list(dict.fromkeys(binding.values())), {})
            found = dict(zip(dict.fromkeys(binding.values()), values, strict=True))
            for key, value in binding.items():
                self._states[key] = found[value]

    def step(self, feeds: Mapping[str, Any], *, entry: int | None = None) -> dict[str, np.ndarray]:
        """One training iteration: every entry in order, each assigning its states before the next.

        Args:
            feeds: Arrays by the names of the inputs of main graph and algorithms.
            entry: Run only this entry.

        Returns:
            The outputs of the algorithms that no binding takes (the loss), by name.

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
        """The training model with the current states as its initializers."""
        result = onnx.ModelProto()
        result.CopyFrom(self._model)
        return fill_states(result, self._states)
