"""The state of a training: its specification, its session, and the values that steps change."""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self, overload

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.data.conversion import all_finite
from onnxtrain.data.data_names import LABELS, labels_text, names_of_checkpoint, read_names, write_names
from onnxtrain.errors import CheckpointError, ModelError, NumericalError, OptionError
from onnxtrain.gc_pause import gc_paused
from onnxtrain.model_file.file import ModelFile
from onnxtrain.model_file.rescue import kept_in_memory
from onnxtrain.operators.optimizer import Optimizer
from onnxtrain.parallel.communicator import Communicator
from onnxtrain.parallel.single import Single
from onnxtrain.runtime.options import RuntimeOptions
from onnxtrain.runtime.session import TrainingSession
from onnxtrain.runtime.states import StateBuffers
from onnxtrain.schedules.learning_rate import LearningRate
from onnxtrain.spelling import checks_arguments
from onnxtrain.training.formatting import html_facts, plural
from onnxtrain.training.objective import Objective
from onnxtrain.training.preparation import prepare
from onnxtrain.training.specification import Masks, Specification
from onnxtrain.training.steps.feeding import Parameters, cut
from onnxtrain.training.steps.steps import Steps
from onnxtrain.weights.ema import average_name
from onnxtrain.weights.masks import check_masks, set_to_zero
from onnxtrain.weights.parameters import Initializer
from onnxtrain.weights.stored import with_stored
from onnxtrain.weights.ties import with_copies


def _steps(objective: Objective, specification: Specification, **given: Any) -> Steps:
    """The steps of a process alone, or those of several."""
    if not specification.divided:
        return Steps(objective, specification, **given)
    from onnxtrain.training.steps.choose_steps import steps_of_several  # a process alone has no use for them

    return steps_of_several(objective, specification, **given)


class Learned:
    """Hold the specification of a training, its session and its state; read, set, copy and save them.

    The session is built when the first step needs it, and kept as long as the specification is equal. Where that
    changes, with masks or with what the data say of the targets, a new one goes on with the same values.

    Args:
        specification: What is trained.
        objective: What :func:`~onnxtrain.training.preparation.prepare` makes of it, where it is known already.
        values: Values to begin with; by default those of the model.
    """

    @gc_paused()
    def __init__(
        self,
        specification: Specification,
        objective: Objective | None = None,
        values: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        self._begin(specification, objective, values)

    def _begin(
        self, specification: Specification, objective: Objective | None, values: Mapping[str, np.ndarray] | None
    ) -> None:
        """Construct from a specification; constructors of subclasses take a model and options."""
        if objective is None:
            objective = prepare(specification, ignoring=False, differentiable=True)
        check_masks(specification.masks, objective.shapes, objective.optimizers(specification))
        self._hints = objective.hints(specification)  # which read weights: the steps release those of the file
        self._steps = _steps(objective, specification, values=values)
        for name, average in self._averages.items():
            if values is None or average not in values:
                self.states[average] = self.states[name]
        set_to_zero(self.states, specification.masks)
        self._inputs = objective.inputs
        self.rate = LearningRate(specification.optimizer.learning_rate)
        self.names = read_names(specification.model, getattr(specification.lora, "adapter", None))
        """Names of columns and labels in the data, which :meth:`save` writes beside the model: see :attr:`columns` and
        :attr:`labels`."""
        self._numbered = False  # whether the first targets were numbers of classes instead
        self.parameters = Parameters(self.states, objective.parameters)
        """Live views of the trainable parameters by name: read them, or assign to them."""
        self.trained = Parameters(self.states, [*objective.parameters, *objective.statistics])
        """Live views of trainable parameters and running statistics by name."""

    def __repr__(self) -> str:
        loss = self.objective.loss
        shown = f"output:{self.objective.prediction.name}" if loss is None else loss.name
        count = sum(array.size for array in self.parameters.values())
        name = "" if self.file.path is None else f"{str(self.file.path)!r}, "
        return (
            f"<{type(self).__name__}: {name}loss {shown}, {self.optimizer}, {len(self.parameters)} parameters of "
            f"{count:,} elements>"
        )

    def _repr_html_(self) -> str:
        objective, counts = self.objective, [array.size for array in self.parameters.values()]
        loss = "an output of the model" if objective.loss is None else objective.loss.name
        rows = {
            "model": "in memory" if self.file.path is None else str(self.file.path),
            "inputs": ", ".join(f"{spec.name} {spec.dtype} {spec.describe_shape()}" for spec in self._inputs),
            "trained on": f"{objective.prediction.name}, {loss}",
            "optimizer": repr(self.optimizer),
            "learning rate": f"{self.learning_rate:g}",
            "parameters": f"{plural(sum(counts), 'element')} in {plural(len(counts), 'array')}",
        }
        return html_facts(rows, notes=self.hints)

    @property
    def labels(self) -> tuple[str, ...] | None:
        """Text labels in the order of the classes; ``None`` until targets are text.

        They are taken from the first targets, or from the file beside the model where :meth:`save` has written them.
        """
        return self.names.labels

    @labels.setter
    def labels(self, labels: Sequence[str] | None) -> None:
        self.names = dataclasses.replace(self.names, labels=None if labels is None else tuple(labels))

    @property
    def columns(self) -> dict[str, tuple[str, ...]]:
        """Column names of each input, in the order in which the model reads them.

        They are taken from the first tables that ``fit`` gets, or from the file beside the model where :meth:`save` has
        written them. Later tables are read by these names.
        """
        return dict(self.names.columns)

    @property
    def specification(self) -> Specification:
        """The frozen configuration of this training."""
        return self._steps.specification

    @checks_arguments
    def change(self, specification: Specification) -> None:
        """Train another specification from the next step on; parameters and optimizer states are kept.

        The model and what is trained of it stay the same.
        """
        if specification != self.specification:
            objective = self._steps.objective.with_form(specification.form).weighting(specification.weighted)
            before = self._steps
            self._steps = _steps(objective, specification, states=self.states)
            self._steps.go_on_from(before)

    def again(self, **changes: Any) -> Self:
        """Return a trainer with the current parameters and fresh optimizer states.

        Args:
            changes: Fields of :attr:`specification` that differ.
        """
        found = object.__new__(type(self))
        specification = dataclasses.replace(self.specification, **changes)
        found._begin(specification, self.objective, self.trained_values())
        found.names, found._numbered = self.names, self._numbered
        return found

    @property
    def objective(self) -> Objective:
        """The loss over the model, for the kind of targets seen so far."""
        return self._steps.objective

    @property
    def states(self) -> StateBuffers:
        """Live views of all values that steps change, by name: parameters, running statistics, optimizer states."""
        return self._steps.states

    @property
    def session(self) -> TrainingSession:
        """The session that runs the steps."""
        return self._steps.session

    @property
    def file(self) -> ModelFile:
        """The model as it was read."""
        return self.specification.model

    @property
    def optimizer(self) -> Optimizer:
        """The update rule."""
        return self.specification.optimizer

    @property
    def communicator(self) -> Communicator:
        """The communicator of the data-parallel ranks; a single process has one of its own."""
        return self.specification.parallel or Single()

    @property
    def steps(self) -> Steps:
        """The executor of the steps."""
        return self._steps

    @property
    def accumulate(self) -> int:
        """The number of micro-batches per batch (gradient accumulation)."""
        return self.specification.accumulate

    @property
    def seed(self) -> int:
        """The seed of shuffling and of dropout."""
        return self.specification.seed

    @property
    def options(self) -> RuntimeOptions:
        """The options of the ONNX Runtime sessions."""
        return self.specification.options

    @property
    def weights(self) -> list[str]:
        """Names of the weights of linear, convolutional, recurrent and embedding layers: pruned by default."""
        return self.objective.matmul_weights

    @property
    def sparsified(self) -> list[str]:
        """Names of the parameters whose sparsity the optimizer promotes; empty for other optimizers."""
        return self.objective.sparsified(self.specification.sparsify)

    def working_model(self) -> ir.Model:
        """Return a working copy of the model in training mode: the source of the step graph."""
        return self.objective.model.clone()

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step: at first the optimizer's, then the value set last.

        Setting it before :meth:`fit` sets where that starts from: the highest rate of a schedule given as text. Setting
        it in a callback takes the rate from the schedule, from the next step on to the end of that ``fit``.
        """
        return self.rate.current

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        self.rate.choose(value)

    @property
    def table(self) -> list[Initializer]:
        """All initializers of the model: trained or not, and why not."""
        return list(self.objective.table)

    @property
    def hints(self) -> list[str]:
        """Hints about this model and its training; surprising ones were also warnings."""
        return [hint.text for hint in self._hints]

    @property
    def masks(self) -> Mapping[str, np.ndarray]:
        """The masks of :meth:`set_masks` by parameter."""
        return self.specification.masks

    @checks_arguments
    def set_masks(self, masks: Mapping[str, np.ndarray]) -> None:
        """Keep weights at zero where a mask is false, from the next step on.

        Weights and their optimizer states become zero where a mask is false, and the gradient is zero there in
        every later step, before clipping: every update rule then keeps both at exactly zero, also in a training
        model that is saved and resumed elsewhere.

        Args:
            masks: Boolean arrays by parameter, of its shape. They replace all earlier masks.

        Raises:
            OptionError: A mask fits no parameter, or the optimizer's epsilon is 0, where 0 / 0 is no zero.
        """
        chosen = Masks(masks)
        check_masks(chosen, self.objective.shapes, self.objective.optimizers(self.specification))
        self.change(dataclasses.replace(self.specification, masks=chosen))
        set_to_zero(self.states, chosen)

    @property
    def statistics(self) -> list[str]:
        """Names of the running statistics that training updates (``batch_norm="train"``)."""
        return list(self.objective.statistics)

    @property
    def _averages(self) -> dict[str, str]:
        """Names of the moving averages by parameter; empty without ``ema``."""
        if self.specification.ema is None:
            return {}
        return {name: average_name(name) for name in self.objective.parameters}

    def _check_averages(self, ema: bool) -> None:
        if ema and self.specification.ema is None:
            raise OptionError(
                "ema=True asks for the moving average of the parameters, but this trainer keeps none; make it with "
                "Trainer(ema=0.999)."
            )

    def trained_values(self) -> dict[str, np.ndarray]:
        """Live views of parameters and running statistics by name."""
        return dict(self.trained)

    @checks_arguments
    def saved_values(self, ema: bool = False) -> Mapping[str, np.ndarray]:
        """Return the initializers that :meth:`save` writes: trained values in the types of the file, and tied copies.

        Adapters are merged into their weights, lazily for each weight.

        Args:
            ema: Whether to take the moving averages of parameters.

        Raises:
            OptionError: Adapters cannot be merged, since weights are quantized, or shared; no averages are kept.
        """
        values, adapted = with_copies(self._trained_or_averaged(ema), self.objective.copies), self.objective.adapted
        if adapted is None:
            return with_stored(values, self.objective.stored)
        own = {name: array for name, array in values.items() if name not in adapted.parameters}
        return with_stored(own, self.objective.stored) | adapted.merged(self.file, values)

    def _trained_or_averaged(self, ema: bool) -> dict[str, np.ndarray]:
        self._check_averages(ema)
        averages = {name: self.states[average] for name, average in self._averages.items()} if ema else {}
        return self.trained_values() | averages

    @checks_arguments
    def save(self, path: str | os.PathLike[str], *, ema: bool = False, labels: bool = False) -> None:
        """Write the model with its trained weights; everything else stays as in the original file.

        With ``lora``, a path that ends in ``.onnx_adapter`` gets the adapters alone, as ONNX Runtime loads them, and a
        folder, or a path without an ending, gets them as PEFT reads them. A model gets them merged into its weights.

        Names of the data go to a file beside it, ``tuned.labels.json`` for ``tuned.onnx``: a list of the labels in the
        order of the classes, or, where tables had named columns, an object with ``columns`` and ``labels``.

        Of several processes that train together rank 0 writes; for the others this does nothing.

        Args:
            path: The file.
            ema: Take the moving averages of the weights (``Trainer(ema=...)``); running statistics are the live ones.
            labels: Write the labels into the model's metadata, too, as the entry ``onnxtrain.labels``, a JSON list.

        Raises:
            ModelError: The path cannot be written; nothing is left half written, and the trainer keeps its weights. The
                message names a path that can be written.
            NumericalError: A weight is NaN or infinite; nothing is written.
            OptionError: Adapters cannot be merged, since weights are quantized, or shared.
        """
        if self.communicator.rank:
            return
        self.check_weights(ema)
        adapted = self.objective.adapted
        with kept_in_memory(path):
            if adapted is not None and adapted.writes(path):
                adapted.write(path, self.file, self._trained_or_averaged(ema))
            else:
                metadata = {LABELS: labels_text(self.labels)} if labels and self.labels is not None else {}
                self.file.save(path, self.saved_values(ema), metadata)
        write_names(Path(path), self.names)

    @checks_arguments
    def check_weights(self, ema: bool = False) -> None:
        """Raise an error for weights that became NaN or infinite in training.

        Args:
            ema: Whether to look at the moving averages of parameters.

        Raises:
            NumericalError: There are some; the message names the first parameter.
        """
        for name, array in self._trained_or_averaged(ema).items():
            if all_finite(array) or self._came_so(name, array):
                continue
            values = np.asarray(array, np.float64)
            wrong = values[~np.isfinite(values)]
            raise NumericalError(
                f"The weight {name!r} holds {wrong[0]} ({wrong.size:,} of {values.size:,} values), so that nothing is "
                "saved; go on from a checkpoint (load_checkpoint), or train again with a lower learning rate or "
                "clip_norm=1.0."
            )

    def _came_so(self, name: str, array: np.ndarray) -> bool:
        """Return whether an array equals the initializer of the file."""
        try:
            return np.array_equal(self.file.value(name).astype(np.float64), array.astype(np.float64), equal_nan=True)
        except ModelError:  # of an adapter, which the file lacks
            return False

    @checks_arguments
    def model(self, *, ema: bool = False) -> onnx.ModelProto:
        """Return the model with its trained weights in memory, as :meth:`save` writes it.

        Raises:
            NumericalError: A weight is NaN or infinite.
        """
        self.check_weights(ema)
        return self.file.filled(self.saved_values(ema))

    def _base(self) -> onnx.ModelProto:
        """Return the model with its current weights, without adapters."""
        adapted = self.objective.adapted
        if adapted is None:
            return self.file.filled(self.saved_values())
        return self.file.filled({n: a for n, a in self.trained_values().items() if n not in adapted.parameters})

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
        if flat:
            return np.concatenate([array.reshape(-1) for array in self.trained.values()])
        return {name: np.array(array) for name, array in self.trained.items()}

    @checks_arguments
    def set_weights(self, weights: Mapping[str, Any] | np.ndarray) -> None:
        """Assign weights in the form of :meth:`get_weights`; optimizer states are kept.

        Args:
            weights: Arrays by name, of all weights or of some, or one array with the elements of all.

        Raises:
            OptionError: An array is of another type or shape, or there is no such weight; nothing is changed.
        """
        given = weights if isinstance(weights, Mapping) else cut(np.asarray(weights), self.trained)
        arrays = {name: np.asarray(array) for name, array in given.items()}
        for name, array in arrays.items():
            self.trained.check(name, array)
        self.trained.update(arrays)

    def __deepcopy__(self, memory: dict[int, Any]) -> Self:
        """Return an independent copy with the current state; both share the immutable file."""
        found = object.__new__(type(self))
        found._begin(self.specification, self.objective, self.states)
        found.rate, found.names, found._numbered = copy.copy(self.rate), self.names, self._numbered
        memory[id(self)] = found
        return found

    def __getstate__(self) -> dict[str, Any]:
        """Return the model with its current weights, and all states, for another process."""
        fields = {name: value for name, value in vars(self.specification).items() if name != "model"}
        states = {name: np.array(array) for name, array in self.states.items()}
        kept = {"fields": fields, "states": states, "rate": self.rate, "names": (self.names, self._numbered)}
        return {"model": self._base().SerializeToString(), **kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the pickled state with a new session."""
        file = ModelFile.load(onnx.ModelProto.FromString(state["model"]))
        self._begin(Specification(model=file, **state["fields"]), None, state["states"])
        self.rate, (self.names, self._numbered) = state["rate"], state["names"]

    @checks_arguments
    def load_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Load weights, optimizer states, column names and labels from a checkpoint of :meth:`fit`.

        States that this training does not share with the one of the checkpoint (of another optimizer) stay as they are.
        To go on at the checkpoint's step and example, give ``fit`` its path as ``resume``.

        Args:
            path: Either file of the checkpoint, or the folder, of which the newest is taken.

        Raises:
            CheckpointError: There is none, it is damaged, or it has not the parameters of this model.
        """
        from onnxtrain.training.checkpoints.checkpoint import read_checkpoint  # imports safetensors

        tensors, metadata = read_checkpoint(path)
        found = {name.removeprefix("state/"): array for name, array in tensors.items() if name.startswith("state/")}
        for name, own in self.trained.items():
            shape = found[name].shape if name in found else None
            if shape != own.shape:
                raise CheckpointError(
                    f"The checkpoint {os.fspath(path)!r} has {'no' if shape is None else f'another shape {shape} of'} "
                    f"{name!r}, which this training changes; it is of another training."
                )
        written = metadata.get("fingerprint")
        same = isinstance(written, dict) and written.get("optimizer") == type(self.optimizer).__name__
        for name, array in found.items():
            if name in self.trained or (same and name in self.states and self.states[name].shape == array.shape):
                self.states[name] = array
        set_to_zero(self.states, self.specification.masks)
        kept = names_of_checkpoint(metadata)
        if self.labels is None:
            self.labels = kept.labels
        self.names = self.names.learned(kept.columns, kept.left_out)

    def training_model(self) -> onnx.ModelProto:
        """Return the training model (``TrainingInfoProto``) with the current weights and optimizer states."""
        return self.session.model()

    @checks_arguments
    def save_training_model(self, path: str | os.PathLike[str]) -> None:
        """Write :meth:`training_model` to a file, from which a :class:`onnxtrain.TrainingSession` resumes."""
        model = self.training_model()  # for which all processes give their share
        if not self.communicator.rank:
            ModelFile.load(model, folder=self.file.folder).save(path, {})
