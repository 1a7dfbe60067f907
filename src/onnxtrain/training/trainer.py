"""Train an ONNX model: the object that most people use."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.autodiff.options import GradientOptions
from onnxtrain.errors import DataError, NumericalError, OptionError
from onnxtrain.model.file import ModelFile
from onnxtrain.model.validity import refuses_invalid
from onnxtrain.operators import Adam
from onnxtrain.operators.optimizer import Optimizer
from onnxtrain.runtime.options import RuntimeOptions
from onnxtrain.runtime.session import TrainingSession
from onnxtrain.runtime.states import StateBuffers
from onnxtrain.training.data import Batch, Dataset, TensorSpec, open_dataset
from onnxtrain.training.data.conversion import symbol_sizes
from onnxtrain.training.evaluation import Evaluator
from onnxtrain.training.feeding import Parameters, by_input_name, check_targets, fit_to_spec
from onnxtrain.training.fitting import fit
from onnxtrain.training.hints import Hint, warn_of
from onnxtrain.training.learning_rate import LearningRate
from onnxtrain.training.loss import TargetForm, TargetKind
from onnxtrain.training.loss_choice import LossLike
from onnxtrain.training.masks import check_masks, choose_tensors, set_to_zero
from onnxtrain.training.parameters import Initializer
from onnxtrain.training.partial import FixedBatch, on_real_rows
from onnxtrain.training.subject import Modes, Subject, prepare, tensor_spec
from onnxtrain.training.ties import choose_copies, with_copies
from onnxtrain.training.untie import untied
from onnxtrain.training_info.build import build_entries, build_skeleton
from onnxtrain.training_info.recipe import Clipping, Recipe

Source = Any
"""Data in any form that :func:`onnxtrain.training.data.open_dataset` takes."""


class Trainer:
    """Trains an ONNX model on stock ONNX Runtime.

    Args:
        model: A path or a loaded model. It is never changed; :meth:`save` writes a copy in which only the
            trained initializers differ. A path takes less memory: the weights are held once, and not a second
            time in the loaded model.
        loss: What to minimise: ``"softmax_cross_entropy"``, ``"binary_cross_entropy"``,
            ``"mean_squared_error"``, ``"mean_absolute_error"``, ``"huber"``, each with arguments as in
            ``"huber(delta=0.5)"``, ``"output:NAME"`` for a scalar output of the model, a
            :class:`~onnxtrain.training.losses.Loss`, the path of an ONNX model of (prediction, target), or a
            function (builder, prediction, target) -> value. A model that ends in the Softmax or Sigmoid that a
            cross-entropy contains trains through what stands before it.
        optimizer: Update rule, by default ``Adam()``.
        train: Glob patterns of the initializers to train; by default all parameters
            (``onnxtrain inspect MODEL`` lists them).
        freeze: Glob patterns of those to keep; wins over ``train``.
        output: The output that the loss is built on, by default the first floating one.
        targets: ``"indices"`` or ``"values"`` (distributions over classes), where the loss takes both; by
            default what the first data hold.
        batch_norm: ``"frozen"``: running statistics, whatever mode the file sets; or ``"train"``: batch
            statistics, with the running ones written back.
        dropout: Whether Dropout nodes drop while training, whatever mode the file sets.
        untie: Give initializers that several nodes share one each: ``True`` for what exporters merge (scales,
            biases and statistics), or glob patterns.
        tie: Train initializers that hold the same values (an embedding, and the output projection as its
            transposed copy) as one: ``True`` for all, or glob patterns.
        clip_value: Clip every element of the gradients to [-clip_value, clip_value].
        clip_norm: Scale the gradients so that their global norm is at most this.
        masks: Parameters of which a part stays zero, by name: boolean arrays, false where it does. See
            :meth:`set_masks`.
        sparsify: Glob patterns of the parameters whose sparsity an optimizer such as ``SSGD`` promotes; by
            default the weights of products, convolutions, recurrent layers and embeddings. The others take
            plain steps.
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

    Warns:
        TrainingHint: Training does something else than its caller may expect; :attr:`hints` has all hints.

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

    @refuses_invalid()
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
        tie: bool | str | Sequence[str] = False,
    ) -> None:
        if accumulate < 1:
            raise OptionError(f"accumulate is {accumulate}; it needs a number of micro-batches of at least 1.")
        self.file = untied(ModelFile.load(model), untie)
        self._copies = choose_copies(self.file, tie)
        self.optimizer = optimizer or Adam()
        self._rate = LearningRate(self.optimizer.learning_rate)
        self.accumulate = accumulate
        self.seed = seed
        self.options = options or RuntimeOptions()
        if threads is not None:
            self.options = dataclasses.replace(self.options, threads=threads)
        self._loss = loss
        self._output, self._train, self._freeze = output, train, freeze
        self._clipping = Clipping(clip_value, clip_norm)
        self._modes = Modes(batch_norm, dropout, seed)
        self._kind = targets
        self._form: TargetForm | None = None
        self._masks: dict[str, np.ndarray] = {}
        self._sparsify = sparsify
        self._gradient_options = GradientOptions.of(straight_through, recompute)
        self._hints: list[Hint] | None = None
        self._build()
        warn_of(self._hints or (), stacklevel=3)  # the decorator is one of them
        if masks:
            self.set_masks(masks)

    def _build(self, *, table: list[Initializer] | None = None, states: StateBuffers | None = None) -> None:
        """Everything from the model to the session; ``table`` and ``states`` go on where it was built before."""
        subject = self._prepare(table)
        self._subject, self._form = subject, subject.form
        self._inputs = [tensor_spec(value) for value in subject.model.graph.inputs]
        self._fixed = FixedBatch.of(subject.model.graph)
        if self._hints is None:
            self._hints = subject.hints(self.file)
        self.weights = subject.weights
        self.session = self._open(subject, states)
        self._partial: TrainingSession | None = None
        self._evaluators: dict[TargetForm | None, Evaluator] = {}
        self._target_spec, self._target_check = subject.target_spec, subject.target_check
        self._last_shapes: tuple[Any, ...] = ()  # of train_step; of the same shapes targets mean the same
        specs = self._inputs if self._target_spec is None else [*self._inputs, self._target_spec]
        self._batched = {
            s.name for s in specs if self._fixed is not None and s.shape and s.shape[0] == self._fixed.size
        }
        self.parameters = Parameters(self.session, subject.parameters)

    def _open(self, subject: Subject, states: StateBuffers | None) -> TrainingSession:
        """A session for a subject, whose graph it uses up."""
        recipe = self._recipe(subject)
        self._names = recipe.names
        entries, first_values = build_entries(recipe)
        if states is None:
            states = StateBuffers(first_values)
            # It is the buffers that have the weights from now on.
            self.file.release([*first_values, *(copy.name for copy in self._copies)])
        return TrainingSession.of_entries(
            entries,
            first_values,
            self._write_training_model,
            options=self.options,
            folder=str(self.file.folder or ""),
            states=states,
        )

    def _prepare(self, table: list[Initializer] | None) -> Subject:
        return prepare(
            self.file,
            self._loss,
            target_kind=self._kind,
            form=self._form,
            ignoring=False,
            modes=self._modes,
            output=self._output,
            train=self._train,
            freeze=self._freeze,
            options=self._gradient_options,
            table=table,
            copies=self._copies,
        )

    def working_model(self) -> ir.Model:
        """A working copy of the model in training mode, as the step graph was built from."""
        return self._prepare(self._subject.table).model

    def _recipe(self, subject: Subject) -> Recipe:
        recipe = subject.recipe(self.optimizer, self._clipping, accumulate=self.accumulate > 1)
        shapes = {row.name: row.shape for row in subject.table if row.trainable}
        self.sparsified = choose_tensors(shapes, self._sparsify, "sparsify", recipe.sparsified)
        recipe.masks, recipe.sparsified = self._masks, self.sparsified
        return recipe

    def _write_training_model(self) -> onnx.ModelProto:
        return build_skeleton(self._recipe(self._prepare(self._subject.table))).proto

    def _partial_session(self, rows: int) -> TrainingSession:
        """The same steps on the same states for padded batches, with the loss on the real examples.

        Raises:
            DataError: Padding cannot be left out of this loss.
        """
        if self._partial is None:
            assert self._fixed is not None
            subject = on_real_rows(self._prepare(self._subject.table), self._fixed, rows)
            self._partial = self._open(subject, self.session.state)
        return self._partial

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step: the optimizer's at first; what was set last wins.

        Setting it before :meth:`fit` sets where that starts from: the highest rate of a schedule given as text. Setting
        it in a callback takes the rate from the schedule, from the next step on to the end of that ``fit``.
        """
        return self._rate.current

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        self._rate.choose(value)

    @property
    def table(self) -> list[Initializer]:
        """All initializers of the model: which are trained, and why the others are not."""
        return self._subject.table

    @property
    def hints(self) -> list[str]:
        """What is worth knowing about this model before it is trained; what surprises was warned of as well."""
        return [hint.text for hint in self._hints or ()]

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
        """One step on one batch; a model of a fixed batch size takes fewer examples, too, and pads them.

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
        rate = {names.learning_rate: np.asarray(self.learning_rate, dtype=np.float32)}
        if self._fixed is not None:
            self._check_rows(feeds, self._fixed)
        if self.accumulate == 1:
            return float(self._run(feeds, rate)[names.loss])
        if self._fixed is None:
            size = next(len(feeds[spec.name]) for spec in self._inputs if feeds[spec.name].ndim)
            micro = -(-size // self.accumulate)
        else:
            size, micro = self._fixed.rows(feeds), self._fixed.size
        for start in range(0, size, micro):
            part = {key: value[start : start + micro] if value.ndim else value for key, value in feeds.items()}
            self._run(part, rate)
        return float(self.session.step(rate, entry=1)[names.loss])

    def _run(self, feeds: dict[str, np.ndarray], rate: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The first entry on a batch or micro-batch; one that is smaller than the model takes is padded."""
        fixed = self._fixed
        if fixed is None or fixed.rows(feeds) == fixed.size:
            return self.session.step(feeds | rate, entry=0)
        rows, target = fixed.rows(feeds), self._names.target
        session = self._partial_session(rows)
        if len(feeds[target]) != rows:
            raise DataError(f"{target!r} has {len(feeds[target])} examples, but {fixed.input!r} has {rows}.")
        inputs = fixed.filled({name: array for name, array in feeds.items() if name != target})
        return session.step({**inputs, target: feeds[target]} | rate, entry=0)

    def _check_rows(self, feeds: Mapping[str, np.ndarray], fixed: FixedBatch) -> None:
        """Refuse more examples than a step takes, and arrays of different lengths."""
        rows, most = fixed.rows(feeds), fixed.size * self.accumulate
        if not 1 <= rows <= most:
            raise DataError(
                f"{fixed.input!r} has {rows} examples, but the model takes batches of {fixed.size}; "
                f"give at {'most ' + str(most) if rows else 'least one'}."
            )
        for name in self._batched:
            if len(feeds[name]) != rows:
                raise DataError(f"{name!r} has {len(feeds[name])} examples, but {fixed.input!r} has {rows}.")
        if rows % fixed.size:
            self._partial_session(rows % fixed.size)  # what cannot be padded is found out before any micro-batch

    def _step_batch(self, batch: Batch) -> float:
        """One step on a batch of a dataset, which is checked already."""
        feeds = dict(batch.inputs)
        if batch.targets is not None and self._target_spec is not None:
            feeds[self._names.target] = batch.targets
        return self._step(feeds)

    def _rebuild(self) -> None:
        """Build everything again with the states as they are."""
        self._build(table=self._subject.table, states=self.session.state)

    def _feeds(self, inputs: Any, targets: Any) -> dict[str, np.ndarray]:
        """Arrays by the names of the step graph, of its types."""
        arrays = by_input_name(self._inputs, inputs)
        feeds = {spec.name: fit_to_spec(arrays[spec.name], self._for_any_rows(spec)) for spec in self._inputs}
        if self._target_spec is not None:
            if targets is None:
                raise DataError("This loss needs targets; give them to train_step(inputs, targets).")
            targets = np.asarray(targets)
            shapes = (targets.dtype, targets.shape, *(feeds[spec.name].shape for spec in self._inputs))
            if shapes != self._last_shapes or self._subject.holds_ignored(targets):
                sizes = symbol_sizes((spec, feeds[spec.name].shape) for spec in self._inputs)
                self._choose_form(self._subject.form_of(targets, sizes))
                self._last_shapes = shapes
            feeds[self._names.target] = check_targets(
                fit_to_spec(targets, self._for_any_rows(self._target_spec)), self._target_check
            )
        return feeds

    def _for_any_rows(self, spec: TensorSpec) -> TensorSpec:
        """What an array must be beside its number of examples, which padding makes right."""
        if spec.name not in self._batched:
            return spec
        assert spec.shape is not None
        return dataclasses.replace(spec, shape=(None, *spec.shape[1:]))

    def _choose_form(self, form: TargetForm | None) -> None:
        """Rebuild when other targets come than were expected: distributions, or labels along another axis."""
        if form != self._form:
            self._form = form
            self._rebuild()

    def open(self, source: Source, *, target: str | None = None, need_target: bool = True) -> Dataset:
        """Data in any form as a dataset that fits this model.

        Raises:
            DataError: It cannot be read or does not fit.
        """
        wanted = self._target_spec is not None and need_target
        if wanted:
            self._subject.check_batch_axis()
        dataset = open_dataset(
            source,
            self._inputs,
            target=target,
            target_spec=None if wanted else self._target_spec,
            need_target=wanted,
            validate=False,
        )
        if wanted:
            self._choose_form(self._subject.form_of_dataset(dataset))
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
        """Loss and metrics on data, in inference mode: no dropout, running statistics.

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
            return self._evaluation(self._form), self.open(source, target=target)
        self._subject.check_batch_axis()
        dataset = open_dataset(source, self._inputs, target=target, validate=False)
        evaluator = self._evaluation(self._subject.form_of_dataset(dataset))
        dataset = dataset.expecting(evaluator.target_spec)
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
        arrays = self._evaluation(self._form).predict(self.open(data, need_target=False), batch_size)
        return next(iter(arrays.values())) if len(arrays) == 1 else arrays

    def _evaluation(self, form: TargetForm | None) -> Evaluator:
        if form not in self._evaluators:
            evaluated = prepare(
                self.file,
                self._loss,
                form=form,
                output=self._output,
                target_name=self._names.target,
                table=self._subject.table,
                copies=self._copies,
            )
            self._evaluators[form] = Evaluator(evaluated, self.session.state, self.options, self._names)
        return self._evaluators[form]

    def trained_values(self) -> dict[str, np.ndarray]:
        """The live values of what is trained: parameters and running statistics by name."""
        return {name: self.session.state[name] for name in (*self._subject.parameters, *self.statistics)}

    def saved_values(self) -> dict[str, np.ndarray]:
        """What :meth:`save` writes: :meth:`trained_values`, and the copies that are tied to parameters."""
        return with_copies(self.trained_values(), self._copies)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model with its trained weights; nothing else differs from the model given.

        Raises:
            ModelError: The path cannot be written; nothing is left half written.
        """
        self.file.save(path, self.saved_values())

    def training_model(self) -> onnx.ModelProto:
        """The training model with the current weights and optimizer states: ``TrainingInfoProto`` and all."""
        return self.session.model()

    def save_training_model(self, path: str | os.PathLike[str]) -> None:
        """Write :meth:`training_model` to a file, from which a :class:`TrainingSession` resumes."""
        ModelFile.load(self.training_model(), folder=self.file.folder).save(path, {})

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
