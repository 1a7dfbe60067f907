"""The values of a model whose weights change: read, assign, copy and save them."""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, cast, overload

import numpy as np
import onnx

from onnxtrain.data.data_names import (
    DataNames,
    Labels,
    labels_text,
    names_of_checkpoint,
    read_names,
    recorded_labels,
    write_names,
)
from onnxtrain.distributed.communicator import Communicator, Single
from onnxtrain.editing.working_copy.inputs import refuse_texts
from onnxtrain.errors import CheckpointError, OptionError
from onnxtrain.errors._internal import gc_paused
from onnxtrain.errors.formatting import html_facts, plural
from onnxtrain.errors.hints import Hint, warn_of
from onnxtrain.errors.spelling import checks_arguments
from onnxtrain.graph.domains import LABELS
from onnxtrain.model_file.file import ModelFile
from onnxtrain.model_file.saving import kept_in_memory
from onnxtrain.parameters.masks import set_to_zero
from onnxtrain.training.config import TrainingConfig
from onnxtrain.training.data_adapter import DataAdapter
from onnxtrain.training.executors import executor_class
from onnxtrain.training.objective import Objective
from onnxtrain.training.prepare import hints_of, prepare, with_checked_masks
from onnxtrain.training.schedules import check_rate
from onnxtrain.training.state import LearningRate, Parameters, State, split_flat

F = TypeVar("F", bound=Callable[..., Any])

_RATE, _BASE_RATE, _EPOCHS = "trainer/learning_rate", "trainer/base_learning_rate", "trainer/epochs"
"""Names in a state dictionary of what is no array of a step."""


def trains(method: F) -> F:
    """Decorate a method that changes what a trainer trains: one thread at a time may call such methods."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.executor.states.training(method.__name__):
            return method(self, *args, **kwargs)

    return cast("F", call)


class TrainedValues:
    """Everything of an :class:`onnxtrain.Trainer` that is no computation: its values, their files, its settings.

    The model, the objective and the executor with its buffers are made from a frozen configuration.

    Attributes:
        executor: Runs the steps on its buffers, ``executor.states``, with its session, ``executor.session``.
        data_adapter: Reads data by the names and labels of earlier data.
    """

    def _start(
        self,
        config: TrainingConfig,
        objective: Objective | None = None,
        values: Mapping[str, np.ndarray] | None = None,
        data: DataAdapter | None = None,
    ) -> None:
        """Set all attributes: of a new trainer, a copy, or one that is unpickled."""
        if objective is None:
            objective = prepare(config, ignoring=False, differentiable=True).packing(config.packed)
            refuse_texts(objective.model.graph)
        config = with_checked_masks(config, objective)
        self._hints = hints_of(objective, config)  # reads weights, which the executor then releases
        self.executor = executor_class(config)(objective, config, values)
        self._state = State(self.executor.states, objective, config.held, keeps_averages=config.ema is not None)
        for name, average in self._state.averages.items():
            if values is None or average not in values:
                self.executor.states[average] = self.executor.states[name]
        set_to_zero(self.executor.states, config.masks)
        self._rate = LearningRate(config.optimizer.learning_rate)
        self._lock = threading.RLock()  # for what readers make at first use, and the hints
        names = None if config.lora is None else config.lora.adapter
        self.data_adapter = data or DataAdapter(
            objective.own_names(read_names(config.model, names)),
            folder=config.model.folder,
            recorded=recorded_labels(config.model),
        )

    @classmethod
    @gc_paused()
    def _of(
        cls,
        config: TrainingConfig,
        objective: Objective | None,
        values: Mapping[str, np.ndarray],
        data: DataAdapter | None = None,
    ) -> Self:
        """Return a trainer that begins with given values, of an objective that may have been prepared before."""
        found = object.__new__(cls)
        found._start(config, objective, values, data)
        return found

    def rebuilt(self, objective: Objective | None = None, **changes: Any) -> Self:
        """Return a new trainer with the current parameters and fresh optimizer states.

        Args:
            objective: Another loss on the same parameters; by default that of this trainer.
            changes: Fields of :attr:`config` that differ.
        """
        config = dataclasses.replace(self.config, **changes)
        with self._state.snapshot() as state:
            return self._of(config, objective or self.objective, dict(state.trained), copy.copy(self.data_adapter))

    def _go_on(self, config: TrainingConfig, call: str) -> None:
        """Train with other parameters from now on; values, counts and names stay."""
        if self.config.divided or self._rate.is_training:
            raise OptionError(f"{call} changes which weights are live, in one process and between two trainings only.")
        rate, epochs = self._rate, self._state.epochs
        with self.executor.states.snapshot() as states:
            self._start(config, None, states, self.data_adapter)
        self._rate, self._state.epochs = rate, epochs

    def __repr__(self) -> str:
        loss = self.objective.loss
        shown = f"output:{self.objective.prediction.name}" if loss is None else loss.name
        count = sum(array.size for array in self.parameters.values())
        name = "" if self.config.model.path is None else f"{str(self.config.model.path)!r}, "
        return (
            f"<{type(self).__name__}: {name}loss {shown}, {self.config.optimizer}, {len(self.parameters)} parameters "
            f"of {count:,} elements>"
        )

    def _repr_html_(self) -> str:
        objective, counts = self.objective, [array.size for array in self.parameters.values()]
        loss = "an output of the model" if objective.loss is None else objective.loss.name
        rows = {
            "model": "in memory" if self.config.model.path is None else str(self.config.model.path),
            "inputs": ", ".join(f"{spec.name} {spec.dtype} {spec.describe_shape()}" for spec in objective.inputs),
            "trained on": f"{objective.prediction.name}, {loss}",
            "optimizer": repr(self.config.optimizer),
            "learning rate": f"{self._rate.current:g}",
            "parameters": f"{plural(sum(counts), 'element')} in {plural(len(counts), 'array')}",
        }
        return html_facts(rows, notes=[hint.text for hint in self._hints])

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if not name.startswith("_") or name.endswith("__")]

    @property
    def config(self) -> TrainingConfig:
        """The frozen configuration of this training."""
        return self.executor.config

    @property
    def objective(self) -> Objective:
        """The loss over the model, for the form of the targets seen so far."""
        return self.executor.objective

    @property
    def _communicator(self) -> Communicator:
        return self.config.parallel or Single()

    @property
    def parameters(self) -> Parameters:
        """Live views of the trainable parameters by name: read them, or assign to them.

        They are live in the thread that trained last; others get read-only copies of the values after one step.
        """
        return self._state.parameters

    @property
    def weights(self) -> Parameters:
        """Live views of trainable parameters and running statistics by name."""
        return self._state.trained

    @property
    def labels(self) -> Labels | None:
        """Text labels in the order of the classes, by output where several have losses; ``None`` before.

        They are taken from the first targets, or from the file beside the model where :meth:`save` has written them.
        """
        return self.data_adapter.names.labels

    @labels.setter
    def labels(self, labels: Sequence[str] | Mapping[str, Sequence[str]] | None) -> None:
        by_output, outputs = isinstance(labels, Mapping), self.objective.output_names
        if labels is not None and (by_output != self.objective.several or (by_output and {*labels} - {*outputs})):
            form = f"give a mapping with {', '.join(outputs)}" if self.objective.several else "give a list"
            raise OptionError(f"labels is {labels!r}, but {len(outputs)} outputs have losses; {form}.").about("labels")
        if isinstance(labels, Mapping):
            self.data_adapter.set_labels({name: tuple(own) for name, own in labels.items()})
        else:
            self.data_adapter.set_labels(None if labels is None else tuple(labels))

    @property
    def data_names(self) -> DataNames:
        """Names of the data as :meth:`save` writes them, with the output whose classes the labels are."""
        return dataclasses.replace(self.data_adapter.names, output=self.objective.chosen_output)

    @property
    def columns(self) -> dict[str, tuple[str, ...]]:
        """Column names of each input, in the order in which the model reads them.

        They are taken from the first tables that ``fit`` gets, or from the file beside the model where :meth:`save` has
        written them. Later tables are read by these names.
        """
        return dict(self.data_adapter.names.columns)

    def _warn_once(self, *texts: str) -> None:
        """Add hints, and warn of those that are new."""
        with self._lock:
            known = {hint.text for hint in self._hints}
            found = [Hint(text, surprising=True) for text in texts if text not in known]
            self._hints += found
        warn_of(found)

    @checks_arguments
    def save(
        self,
        path: str | os.PathLike[str],
        *,
        ema: bool = False,
        labels: bool = False,
        base_model: str | os.PathLike[str] | None = None,
    ) -> None:
        """Write the model with its trained weights; everything else stays as in the original file.

        With ``lora``, a path that ends in ``.onnx_adapter`` gets the adapters alone, as ONNX Runtime loads them, and a
        folder, or a path without an ending, gets them as PEFT reads them. A model gets them merged into its weights.
        Tensors that were trained in full beside them, as a head, are in all three.

        Names of the data go to a file beside it, ``tuned.labels.json`` for ``tuned.onnx``: a list of the labels in the
        order of the classes, or an object with ``columns``, ``labels``, ``mean`` and ``std``, and ``output`` where the
        labels are not those of the first floating output.

        Of several processes that train together rank 0 writes; for the others this does nothing.

        Args:
            path: The file.
            ema: Take the moving averages of the weights (``Trainer(ema=...)``); running statistics are the live ones.
            labels: Write the labels into the model's metadata, too, as the entry ``onnxtrain.labels``, a JSON list.
            base_model: For adapters: the PyTorch model that the ONNX model was exported from, a folder or a name on the
                Hugging Face Hub, which PEFT's ``AutoPeftModel`` classes load. By default ``config.json`` beside the
                model says it.

        Raises:
            ModelError: The path cannot be written; nothing is left half written, and the trainer keeps its weights. The
                message names a path that can be written. PEFT has no module for a tensor that was trained in full.
            NumericalError: A weight is NaN or infinite; nothing is written.
            OptionError: Adapters cannot be merged, since weights are quantized, or shared; a model has no
                ``base_model``.
        """
        names, adapted = self.data_names, self.objective.adapted
        if base_model is not None and (adapted is None or not adapted.writes(path)):
            raise OptionError(
                f"base_model names the PyTorch model of an adapter, but {str(path)!r} gets a model; leave it out."
            )
        if self._communicator.rank:
            return
        with self._state.snapshot() as state:
            state.check_finite(self.config.model, ema=ema)
            with kept_in_memory(path):
                if adapted is not None and adapted.writes(path):
                    values = state.values(ema=ema)
                    added = {name: values[name] for name in adapted.parameters}
                    own = state.own_initializers(self.objective, ema=ema)
                    adapted.write(path, self.config.model, {**added, **own}, base_model)
                else:
                    metadata = {LABELS: labels_text(names.labels)} if labels and names.labels is not None else {}
                    self.config.model.save(
                        path, state.initializers(self.objective, self.config.model, ema=ema), metadata
                    )
        write_names(Path(path), names)

    @checks_arguments
    def initializers(self, *, ema: bool = False) -> dict[str, np.ndarray]:
        """Return copies of the initializers that :meth:`save` writes."""
        with self._state.snapshot() as state:
            found = state.initializers(self.objective, self.config.model, ema=ema)
            return {name: np.array(array) for name, array in found.items()}

    @checks_arguments
    def model(self, *, ema: bool = False) -> onnx.ModelProto:
        """Return the model with its trained weights in memory, as :meth:`save` writes it.

        Raises:
            NumericalError: A weight is NaN or infinite.
        """
        with self._state.snapshot() as state:
            state.check_finite(self.config.model, ema=ema)
            return self.config.model.filled(state.initializers(self.objective, self.config.model, ema=ema))

    @overload
    def get_weights(self, *, flat: Literal[False] = False) -> dict[str, np.ndarray]: ...

    @overload
    def get_weights(self, *, flat: Literal[True]) -> np.ndarray: ...

    @checks_arguments
    def get_weights(self, *, flat: bool = False) -> dict[str, np.ndarray] | np.ndarray:
        """Return copies of trainable parameters and running statistics.

        Args:
            flat: Whether to return all elements in one array of one axis, in the order of the names.

        Returns:
            Arrays by name, or one array.
        """
        with self._state.snapshot() as state:
            if flat:
                return np.concatenate([array.reshape(-1) for array in state.trained.values()])
            return {name: np.array(array) for name, array in state.trained.items()}

    @checks_arguments
    @trains
    def set_weights(self, weights: Mapping[str, Any] | np.ndarray) -> None:
        """Assign weights in the form of :meth:`get_weights`; optimizer states are kept.

        Args:
            weights: Arrays by name, of all weights or of some, or one array with the elements of all. Frozen weights of
                the model can be set, too; from then on they are among :attr:`weights`.

        Raises:
            OptionError: An array is of another type or shape, or there is no such weight; nothing is changed.
        """
        given = weights if isinstance(weights, Mapping) else split_flat(np.asarray(weights), self.weights)
        initializers = self.objective.model.graph.initializers
        first = self.config.optimizer.schema.first_count
        frozen = {name: first for name in given if name not in self.weights and name in initializers}
        before = self.config
        if frozen:
            self._go_on(dataclasses.replace(self.config, held={**self.config.held, **frozen}), "set_weights")
        arrays = {name: np.asarray(array) for name, array in given.items()}
        try:
            for name, array in arrays.items():
                self.weights.check(name, array)
        except OptionError:
            if frozen:
                self._go_on(before, "set_weights")
            raise
        self.weights.update(arrays)

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return copies of all values that training changes.

        Returns:
            Parameters, running statistics, optimizer states (``{parameter}/V`` ...) and moving averages, by name; with
            ``trainer/`` before their names the learning rate, its base and the number of epochs so far.
        """
        with self.executor.states.snapshot() as states:
            arrays = {name: np.array(array) for name, array in states.items()}
        return arrays | {name: np.asarray(value) for name, value in self._counts().items()}

    def _counts(self) -> dict[str, float]:
        return {_RATE: self._rate.current, _BASE_RATE: self._rate.base, _EPOCHS: self._state.epochs}

    @checks_arguments
    @trains
    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Assign the values of :meth:`state_dict`, with the learning rate and the number of epochs.

        Args:
            state: Arrays by name.
            strict: Whether ``state`` has to hold every array of the training.

        Raises:
            OptionError: An array is missing, has no counterpart, or is of another type or shape; nothing is changed.
            BusyError: Another thread trains.

        Example:
            >>> import onnxtrain
            >>> model = onnxtrain.examples.mlp((4, 3))
            >>> one, other = (onnxtrain.Trainer(model, loss="mse", optimizer="adam") for _ in range(2))
            >>> other.load_state_dict(one.state_dict())
        """
        values = Parameters(self.executor.states, list(self.executor.states))
        own = self._counts()
        counts = {name: float(np.asarray(value)) for name, value in state.items() if name in own}
        arrays = {name: np.asarray(array) for name, array in state.items() if name not in own}
        missing = [name for name in values if name not in arrays]
        if strict and missing:
            raise OptionError(
                f"The state lacks {len(missing)} of {len(values)} values, such as {missing[0]!r}; give all, or "
                "strict=False."
            )
        for name, array in arrays.items():
            values.check(name, array)
        for name, value in counts.items():
            check_rate(value, repr(name))
        values.update(arrays)
        own |= counts
        self._state.epochs = int(own[_EPOCHS])
        self._rate.restore(own[_RATE], own[_BASE_RATE])

    def __deepcopy__(self, memory: dict[int, Any]) -> Self:
        """Return an independent copy with the current state; both share the immutable file."""
        with self.executor.states.snapshot() as states:
            found = self._of(self.config, None, states, copy.copy(self.data_adapter))
        found._rate, found._state.epochs = self._rate.copy(), self._state.epochs
        memory[id(self)] = found
        return found

    def __getstate__(self) -> dict[str, Any]:
        """Return the model with its current weights, and all states, for another process."""
        fields = {name: value for name, value in vars(self.config).items() if name != "model"}
        data = copy.copy(self.data_adapter)
        kept = {"fields": fields, "rate": self._rate.copy(), "epochs": self._state.epochs, "data": data}
        adapted = self.objective.adapted
        with self._state.snapshot(everything=True) as state:
            if adapted is None:
                base = state.initializers(self.objective, self.config.model)
            else:
                base = {name: array for name, array in state.trained.items() if name not in adapted.parameters}
            states = {name: np.array(array) for name, array in state.buffers.items()}
            return {"model": self.config.model.filled(base).SerializeToString(), "states": states, **kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the pickled state with a new session."""
        file = ModelFile.load(onnx.ModelProto.FromString(state["model"]))
        self._start(TrainingConfig(model=file, **state["fields"]), None, state["states"], state["data"])
        self._rate, self._state.epochs = state["rate"], state.get("epochs", 0)

    @checks_arguments
    @trains
    def load_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Load weights, optimizer states, and the names and normalization of data from a checkpoint of :meth:`fit`.

        States that this training does not share with the one of the checkpoint (of another optimizer) stay as they are.
        To go on at the checkpoint's step and example, give ``fit`` its path as ``resume``.

        Args:
            path: Either file of the checkpoint, or the folder, of which the newest is taken.

        Raises:
            CheckpointError: There is none, it is damaged, or it has not the parameters of this model.
        """
        from onnxtrain.training.checkpoints import read_checkpoint  # imports safetensors

        tensors, metadata = read_checkpoint(path)
        found = {name.removeprefix("state/"): array for name, array in tensors.items() if name.startswith("state/")}
        for name, own in self.weights.items():
            shape = found[name].shape if name in found else None
            if shape != own.shape:
                raise CheckpointError(
                    f"The checkpoint {os.fspath(path)!r} has {'no' if shape is None else f'another shape {shape} of'} "
                    f"{name!r}, which this training changes; it belongs to another training."
                )
        written = metadata.get("fingerprint")
        same = isinstance(written, dict) and written.get("optimizer") == type(self.config.optimizer).__name__
        fits = {
            name
            for name in self.executor.states
            if name in found and self.executor.states.kind(name)[1] == found[name].shape
        }
        with self.executor.states.writing():
            self.executor.states.update({name: found[name] for name in fits if same or name in self.weights})
            set_to_zero(self.executor.states, self.config.masks)
        if isinstance(epochs := metadata.get("epochs"), int):
            self._state.epochs = max(0, epochs)
        kept = names_of_checkpoint(metadata)
        if self.labels is None:
            self.data_adapter.set_labels(kept.labels)
        self.data_adapter.learn(kept.columns, kept.left_out)
        self.data_adapter.learn_facts(kept)

    def training_model(self) -> onnx.ModelProto:
        """Return the training model (``TrainingInfoProto``) with the current weights and optimizer states."""
        return self.executor.session.model()

    @checks_arguments
    def save_training_model(self, path: str | os.PathLike[str]) -> None:
        """Write :meth:`training_model` to a file, from which a :class:`onnxtrain.TrainingSession` resumes."""
        model = self.training_model()  # for which all processes give their share
        if not self._communicator.rank:
            ModelFile.load(model, folder=self.config.model.folder).save(path, {})
