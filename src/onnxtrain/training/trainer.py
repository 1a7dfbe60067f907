"""Train an ONNX model: the object that most people use."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx

from onnxtrain.autodiff.options import GradientOptions
from onnxtrain.errors import DataError, NumericalError, OptionError
from onnxtrain.model.file import ModelFile
from onnxtrain.model.inspection import hints
from onnxtrain.model.parameters import Initializer
from onnxtrain.model.untie import untied
from onnxtrain.operators import Adam
from onnxtrain.operators.optimizer import Optimizer
from onnxtrain.pruning.masks import check_masks, choose_tensors, set_to_zero
from onnxtrain.runtime.options import RuntimeOptions
from onnxtrain.runtime.session import TrainingSession
from onnxtrain.runtime.states import StateBuffers
from onnxtrain.training.data import Batch, Dataset, open_dataset
from onnxtrain.training.evaluation import Evaluator
from onnxtrain.training.feeding import Parameters, by_input_name, fit_to_spec
from onnxtrain.training.fitting import fit
from onnxtrain.training.losses import TargetKind
from onnxtrain.training.subject import LossLike, Modes, prepare, tensor_spec
from onnxtrain.training_info.build import build_skeleton
from onnxtrain.training_info.recipe import Clipping

Source = Any
"""Data in any form that :func:`onnxtrain.training.data.open_dataset` takes."""


class Trainer:
    """Trains an ONNX model on stock ONNX Runtime.

    Args:
        model: A path or a loaded model. It is never changed; :meth:`save` writes a copy in which only the
            trained initializers differ. A path takes less memory: the weights are held once, and not a second
            time in the loaded model.
        loss: What to minimise: ``"softmax_cross_entropy"``, ``"binary_cross_entropy"``,
            ``"mean_squared_error"``, ``"mean_absolute_error"``, ``"huber"``, ``"output:NAME"`` for a scalar
            output of the model, a :class:`~onnxtrain.training.losses.Loss`, the path of an ONNX model of
            (prediction, target), or a function (builder, prediction, target) -> value. A model that ends in
            the Softmax or Sigmoid that a cross-entropy contains trains through what stands before it.
        optimizer: Update rule, by default ``Adam()``.
        train: Glob patterns of the initializers to train; by default all parameters
            (``onnxtrain inspect MODEL`` lists them).
        freeze: Glob patterns of those to keep; wins over ``train``.
        output: The output that the loss is built on, by default the first floating one.
        targets: ``"indices"`` or ``"values"`` (distributions over classes), where the loss takes both; by
            default what the first data hold.
        batch_norm: ``"frozen"`` as the graph has it, or ``"train"``: batch statistics, with the running ones
            written back.
        dropout: Whether Dropout nodes drop while training.
        untie: Give initializers that several nodes share one each: ``True`` for vectors (the scales and
            statistics that exporters merge), or glob patterns.
        clip_value: Clip every element of the gradients to [-clip_value, clip_value].
        clip_norm: Scale the gradients so that their global norm is at most this.
        masks: Parameters of which a part stays zero, by name: boolean arrays, false where it does. See
            :meth:`set_masks`.
        sparsify: Glob patterns of the parameters whose sparsity an optimizer such as ``SSGD`` promotes; by
            default those of rank 2 and more. The others take plain steps.
        accumulate: Split every batch into this many micro-batches; the step equals that of the whole batch.
        straight_through: Train through operators that round or quantize, as if they did not
            (quantization-aware training); see :func:`onnxtrain.gradient`.
        recompute: Glob patterns of names of nodes whose results are computed again in the backward pass instead
            of being kept: takes time, saves memory, changes no number.
        seed: Seed of the order of the data and of dropout.
        threads: Threads within an operator; default one per core.
        options: All other options of the sessions.

    Raises:
        ModelError: The model cannot be read.
        OptionError: An argument has a value that it cannot have; there is nothing to train.
        GradientError: Operators between parameters and loss have no gradient; all are listed.

    Example:
        >>> import numpy as np
        >>> import onnxtrain
        >>> model = onnxtrain.examples.mlp((4, 8, 3))
        >>> trainer = onnxtrain.Trainer(model, loss="softmax_cross_entropy", optimizer=onnxtrain.Adam(0.05))
        >>> x, y = np.eye(4, dtype=np.float32)[:3], np.arange(3)
        >>> losses = [trainer.train_step(x, y) for _ in range(20)]
        >>> losses[-1] < losses[0]
        True
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | onnx.ModelProto,
        *,
        loss: LossLike,
        optimizer: Optimizer | None = None,
        train: str | Sequence[str] | None = None,
        freeze: str | Sequence[str] | None = None,
        output: str | None = None,
        targets: TargetKind | None = None,
        batch_norm: str = "frozen",
        dropout: bool = False,
        untie: bool | str | Sequence[str] = False,
        clip_value: float | None = None,
        clip_norm: float | None = None,
        masks: Mapping[str, np.ndarray] | None = None,
        sparsify: str | Sequence[str] | None = None,
        accumulate: int = 1,
        straight_through: bool = False,
        recompute: str | Sequence[str] = (),
        seed: int = 0,
        threads: int | None = None,
        options: RuntimeOptions | None = None,
    ) -> None:
        if accumulate < 1:
            raise OptionError(f"accumulate is {accumulate}; it needs a number of micro-batches of at least 1.")
        self.file = untied(ModelFile.load(model), untie)
        self.optimizer = optimizer or Adam()
        self.learning_rate = self.optimizer.learning_rate
        self.accumulate = accumulate
        self.seed = seed
        self.options = options or RuntimeOptions()
        if threads is not None:
            self.options = dataclasses.replace(self.options, threads=threads)
        self._loss = loss
        self._output, self._train, self._freeze = output, train, freeze
        self._clipping = Clipping(clip_value, clip_norm)
        self._modes = Modes(batch_norm, dropout, seed)
        self._kind: TargetKind | None = targets
        self._masks: dict[str, np.ndarray] = {}
        self._sparsify = sparsify
        self._gradient_options = GradientOptions.of(straight_through, recompute)
        self._build()
        if masks:
            self.set_masks(masks)

    def _build(self, *, table: list[Initializer] | None = None, states: StateBuffers | None = None) -> None:
        """Everything from the model to the session; ``table`` and ``states`` go on where it was built before."""
        subject = prepare(
            self.file,
            self._loss,
            target_kind=self._kind,
            modes=self._modes,
            output=self._output,
            train=self._train,
            freeze=self._freeze,
            options=self._gradient_options,
            table=table,
        )
        recipe = subject.recipe(self.optimizer, self._clipping, accumulate=self.accumulate > 1)
        shapes = {row.name: row.shape for row in subject.table if row.trainable}
        recipe.masks, recipe.sparsified = self._masks, choose_tensors(shapes, self._sparsify, "sparsify")
        self.sparsified = list(recipe.sparsified)
        self._names = recipe.names
        self._subject = subject
        skeleton = build_skeleton(recipe)
        if states is None:
            states = StateBuffers(skeleton.values)
            self.file.release(skeleton.values)  # it is the buffers that have the weights from now on
        self.session = TrainingSession(
            skeleton.proto,
            options=self.options,
            folder=self.file.folder or "",
            values=skeleton.values,
            states=states,
        )
        self._evaluators: dict[TargetKind | None, Evaluator] = {}
        self._inputs = [tensor_spec(value) for value in subject.model.graph.inputs]
        self._target_spec = subject.target_spec
        self.parameters = Parameters(self.session, subject.parameters)

    @property
    def table(self) -> list[Initializer]:
        """All initializers of the model: which are trained, and why the others are not."""
        return self._subject.table

    @property
    def hints(self) -> list[str]:
        """What is worth knowing about this model before it is trained."""
        return hints(self._subject.model, self._subject.parameters, batch_norm=self._modes.batch_norm)

    @property
    def masks(self) -> Mapping[str, np.ndarray]:
        """The masks of :meth:`set_masks` by parameter."""
        return self._masks

    def set_masks(self, masks: Mapping[str, np.ndarray]) -> None:
        """Hold a part of the weights at zero from now on.

        Weights and their optimizer states become zero where a mask is false, and the gradient is zero there in
        every later step, before clipping: every update rule then keeps both at exactly zero, also in a training
        model that is saved and resumed elsewhere.

        Args:
            masks: Boolean arrays by parameter, of its shape. They replace all earlier masks.

        Raises:
            OptionError: A mask fits no parameter, or the optimizer's epsilon is 0, where 0 / 0 is no zero.
        """
        self._masks = check_masks(masks, self.parameters, self.optimizer)
        self._rebuild()
        set_to_zero(self.session.state, self._masks)

    @property
    def statistics(self) -> list[str]:
        """Names of the running statistics that training updates (``batch_norm="train"``)."""
        return list(self._subject.statistics)

    def train_step(self, inputs: Source, targets: Any = None) -> float:
        """One step on one batch.

        Args:
            inputs: An array, a tuple of arrays in the order of the model's inputs, or a mapping.
            targets: Class indices or values; ``None`` where the loss is an output of the model.

        Returns:
            The loss before the update.

        Raises:
            DataError: Arrays do not fit the model.
            StepError: onnxruntime failed.
        """
        return self._step(self._feeds(inputs, targets))

    def _step(self, feeds: dict[str, np.ndarray]) -> float:
        names = self._names
        feeds[names.learning_rate] = np.asarray(self.learning_rate, dtype=np.float32)
        if self.accumulate == 1:
            return float(self.session.step(feeds, entry=0)[names.loss])
        size = len(feeds[self._inputs[0].name])
        micro = -(-size // self.accumulate)
        for start in range(0, size, micro):
            part = {
                key: value if key == names.learning_rate else value[start : start + micro]
                for key, value in feeds.items()
            }
            self.session.step(part, entry=0)
        return float(self.session.step(feeds, entry=1)[names.loss])

    def _step_batch(self, batch: Batch) -> float:
        """One step on a batch of a dataset, which is checked already."""
        feeds = dict(batch.inputs)
        if batch.targets is not None and self._target_spec is not None:
            feeds[self._names.target] = batch.targets
        return self._step(feeds)

    def reseed(self, step: int) -> None:
        """Start the dropout masks anew from (seed, step): whoever resumes at this step draws the same."""
        if not self._modes.dropout or not self._has_dropout():
            return
        self._modes = dataclasses.replace(self._modes, seed=self.seed + 7919 * (step + 1))
        self._rebuild()

    def _has_dropout(self) -> bool:
        return any(node.op_type == "Dropout" for node in self._subject.model.graph)

    def _rebuild(self) -> None:
        """Build everything again with the states as they are."""
        self._build(table=self._subject.table, states=self.session.state)

    def _feeds(self, inputs: Any, targets: Any) -> dict[str, np.ndarray]:
        """Arrays by the names of the step graph, of its types."""
        arrays = by_input_name(self._inputs, inputs)
        feeds = {spec.name: fit_to_spec(arrays[spec.name], spec) for spec in self._inputs}
        if self._target_spec is not None:
            if targets is None:
                raise DataError("This loss needs targets; give them to train_step(inputs, targets).")
            targets = np.asarray(targets)
            self._choose_target_kind(self._subject.target_kind(targets.dtype, targets.ndim))
            feeds[self._names.target] = fit_to_spec(targets, self._target_spec)
        return feeds

    def _choose_target_kind(self, kind: TargetKind | None) -> None:
        """Rebuild for distributions over classes when such targets come where labels were expected."""
        loss = self._subject.loss
        if kind is not None and loss is not None and kind != (self._kind or loss.target_kinds[0]):
            self._kind = kind
            self._rebuild()

    def open(self, source: Source, *, target: str | None = None, need_target: bool = True) -> Dataset:
        """Data in any form as a dataset that fits this model.

        Raises:
            DataError: It cannot be read or does not fit.
        """
        if isinstance(source, Dataset):
            return source
        wanted = self._target_spec is not None and need_target
        dataset = open_dataset(
            source,
            self._inputs,
            target=target,
            target_spec=None if wanted else self._target_spec,
            need_target=wanted,
            validate=False,
        )
        if wanted:
            self._choose_target_kind(self._subject.kind_of(dataset))
            dataset = dataset.expecting(self._target_spec)
        self._subject.validate(dataset, labels=wanted)
        return dataset

    fit = fit

    def evaluate(
        self,
        data: Source,
        *,
        target: str | None = None,
        batch_size: int = 256,
        metrics: Sequence[Any] = (),
    ) -> dict[str, float]:
        """Loss and metrics on data, with the model as it is saved (no dropout, frozen statistics).

        Args:
            data: Data in any form.
            target: Name of the target in a file with several arrays left.
            batch_size: Examples per batch.
            metrics: Names (``"accuracy"``, ...) or functions of (y_true, y_pred).

        Returns:
            ``loss`` and every metric: averages over all examples.
        """
        evaluator, dataset = self.open_for_evaluation(data, target=target)
        return evaluator.evaluate(dataset, batch_size, metrics)

    def open_for_evaluation(self, source: Source, *, target: str | None = None) -> tuple[Evaluator, Dataset]:
        """Data in any form, and what measures the model on it.

        Targets may be of another kind than those that the model is trained on: labels where it learns from
        distributions over classes.

        Raises:
            DataError: It cannot be read or does not fit.
        """
        if self._target_spec is None:
            return self._evaluation(self._kind), self.open(source, target=target)
        dataset = open_dataset(source, self._inputs, target=target, validate=False)
        evaluator = self._evaluation(self._subject.kind_of(dataset) or self._kind)
        dataset = dataset.expecting(evaluator.target_spec)
        if not isinstance(source, Dataset):
            evaluator.subject.validate(dataset, labels=True)
        return evaluator, dataset

    def predict(self, data: Source, *, batch_size: int = 256) -> np.ndarray | dict[str, np.ndarray]:
        """The model's outputs for inputs.

        Args:
            data: Inputs in any form that ``fit`` takes; targets are not needed.
            batch_size: Examples per batch.

        Returns:
            One array per tensor output by name, or the array itself where the model has one output.
        """
        arrays = self._evaluation(self._kind).predict(self.open(data, need_target=False), batch_size)
        return next(iter(arrays.values())) if len(arrays) == 1 else arrays

    def _evaluation(self, kind: TargetKind | None) -> Evaluator:
        if kind not in self._evaluators:
            evaluated = prepare(
                self.file,
                self._loss,
                target_kind=kind,
                output=self._output,
                target_name=self._names.target,
                table=self._subject.table,
            )
            self._evaluators[kind] = Evaluator(evaluated, self.session.state, self.options, self._names)
        return self._evaluators[kind]

    def trained_values(self) -> dict[str, np.ndarray]:
        """What :meth:`save` writes: parameters and running statistics by name."""
        return {name: self.session.state[name] for name in (*self._subject.parameters, *self.statistics)}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model with its trained weights; nothing else differs from the model given.

        Raises:
            ModelError: The path cannot be written; nothing is left half written.
        """
        self.file.save(path, self.trained_values())

    def training_model(self) -> onnx.ModelProto:
        """The training model with the current weights and optimizer states: ``TrainingInfoProto`` and all."""
        return self.session.model()

    def save_training_model(self, path: str | os.PathLike[str]) -> None:
        """Write :meth:`training_model` to a file, from which a :class:`TrainingSession` resumes."""
        ModelFile.load(self.training_model()).save(path, {})

    def check_finite(self, loss: float, step: int, hint: str = "") -> None:
        """Stop when the loss is not a number any more.

        Raises:
            NumericalError: It is NaN or infinite.
        """
        if not math.isfinite(loss):
            raise NumericalError(
                f"The loss became {loss} at step {step} (learning rate {self.learning_rate:g}); "
                f"lower the learning rate or clip gradients (clip_norm=1.0). {hint}".strip()
            )
