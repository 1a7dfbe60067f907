"""The Trainer: train an ONNX model on stock ONNX Runtime."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack, overload

import numpy as np
import onnx

from onnxtrain.config import (
    ADVANCED,
    AdvancedOptions,
    Distributed,
    Masks,
    Precision,
    TrainingConfig,
    with_new_names,
)
from onnxtrain.data import Dataset, split_validation
from onnxtrain.data.data_names import LABELS, labels_text, names_of_checkpoint, read_names, write_names
from onnxtrain.data.labels import fewer_labels
from onnxtrain.data.naming import NoSuchArrayError
from onnxtrain.distributed.communicator import Communicator, Single
from onnxtrain.errors import CheckpointError, OptionError
from onnxtrain.executor import Executor
from onnxtrain.gc_pause import gc_paused
from onnxtrain.losses.base import Forms, TargetKind
from onnxtrain.losses.heads import Metrics, are_none, check_numbers
from onnxtrain.losses.loss_choice import LossLike
from onnxtrain.model_file.file import ModelFile
from onnxtrain.model_file.rescue import kept_in_memory
from onnxtrain.model_file.validity import refuses_invalid
from onnxtrain.objective import Objective, prepare
from onnxtrain.operators.optimizer import Optimizer
from onnxtrain.renamed import old_attribute
from onnxtrain.runtime.options import RuntimeOptions
from onnxtrain.runtime.session import TrainingSession
from onnxtrain.runtime.states import StateBuffers
from onnxtrain.schedules.learning_rate import LearningRate
from onnxtrain.spelling import checks_arguments
from onnxtrain.state import Parameters, State, split_flat
from onnxtrain.training.advice.hints import Hint, warn_of
from onnxtrain.training.data_adapter import DataAdapter
from onnxtrain.training.description import describe_data, describe_model, describe_settings
from onnxtrain.training.formatting import html_facts, plural
from onnxtrain.training.working_copy.adaptation import Adaptation
from onnxtrain.training.working_copy.training_modes import Modes
from onnxtrain.weights.ema import EMA
from onnxtrain.weights.groups import Group
from onnxtrain.weights.masks import KEEP, check_masks, set_to_zero, zero_masks
from onnxtrain.weights.parameters import Initializer

if TYPE_CHECKING:
    from onnxtrain.callbacks.base import Callback
    from onnxtrain.callbacks.history import History
    from onnxtrain.callbacks.progress import ProgressLike
    from onnxtrain.data.augmentation import Augment
    from onnxtrain.loop import Checkpoints
    from onnxtrain.metrics.base import MetricInput
    from onnxtrain.schedules.learning_rate import Schedule
    from onnxtrain.training.inference.evaluation import Evaluator
    from onnxtrain.training.run_folder import RunFolder

Source = Any
"""Data in any form that :func:`onnxtrain.data.open_dataset` takes."""


@checks_arguments(keywords=ADVANCED, convert=with_new_names)
class Trainer:
    """Train an ONNX model on stock ONNX Runtime.

    Args:
        model: A path or a loaded model. It is never changed; :meth:`save` writes a copy in which only the
            trained initializers differ. A path takes less memory: the weights are held once, and not a second
            time in the loaded model.
        loss: What to minimise: ``"softmax_cross_entropy"``, ``"next_token"``, ``"binary_cross_entropy"``,
            ``"mean_squared_error"``, ``"mean_absolute_error"``, ``"huber"``, each with arguments as in
            ``"huber(delta=0.5)"``, ``"output:NAME"`` for a scalar output of the model, a
            :class:`~onnxtrain.losses.Loss`, the path of an ONNX model of (prediction, target), or a
            function (builder, prediction, target) -> value. A model that ends in the Softmax or Sigmoid that a
            cross-entropy contains is trained on its logits.
        optimizer: Update rule, by default ``Adam()``; or its name, ``"adamw(lr=3e-4)"``.
        train: Glob patterns of the initializers to train; by default all parameters
            (``onnxtrain inspect MODEL`` lists them).
        freeze: Glob patterns of initializers to freeze; wins over ``train``.
        groups: Parameter groups with settings of their own, :class:`~onnxtrain.Group`. A parameter belongs to the first
            group that matches it, as in PyTorch.
        ema: Keep an exponential moving average of the parameters, with this decay, or as an :class:`~onnxtrain.EMA`
            says; ``evaluate``, ``predict``, ``save`` and ``model`` take it with ``ema=True``.
        output: The output that the loss reads, by default the first one of a floating type.
        targets: ``"indices"`` or ``"values"`` (distributions over classes), where the loss takes both; by
            default decided by the first data.
        batch_norm: ``"frozen"``: running statistics, whatever mode the file sets; ``"train"``: batch statistics, with
            the running ones written back; ``"sync"``: synchronized over all ranks (SyncBatchNorm).
        dropout: Whether Dropout nodes are active while training, whatever mode the file sets.
        clip_norm: Scale the gradients so that their global norm is at most this.
        accumulate: Split every batch into this many micro-batches; the step equals that of the whole batch.
        qat: Quantization-aware training of a quantized model: integer weights are trained as floats that every step
            rounds, scales are trained, and integers and scales are saved
            ([quantization](docs/quantization.md)). Implies ``straight_through``.
        lora: Adapters to train beside frozen weights, :class:`onnxtrain.Lora`. Then ``train`` names the initializers
            that are trained in full beside them, by default none.
        seed: Seed of shuffling and of dropout.
        threads: Threads within an operator; default one per core.
        precision: Number formats of computation, states and weights, :class:`onnxtrain.Precision`, or text:
            ``"bfloat16"``.
        distributed: Data-parallel training with other processes: a communicator such as
            ``onnxtrain.distributed.MPI()``, ``"mpi"``, or :class:`onnxtrain.Distributed`.
        runtime: Options of the ONNX Runtime sessions, :class:`onnxtrain.RuntimeOptions`.
        clip_value: Clip every element of the gradients to [-clip_value, clip_value].
        masks: Boolean arrays by parameter name; elements stay zero where a mask is false. ``"keep"`` keeps the zeros of
            the tensors that were pruned. See :meth:`set_masks`.
        sparsify: Glob patterns of the parameters whose sparsity an optimizer such as ``SSGD`` promotes; by
            default the weights of linear layers, convolutions, recurrent layers and embeddings. Other
            parameters take plain steps.
        untie: Split shared initializers, so that each node has its own: ``True`` for those that exporters merge
            (scales, biases and statistics), or glob patterns.
        tie: Train initializers that hold the same values (an embedding, and the output projection as its
            transposed copy) as one: ``True`` for all, or glob patterns.
        straight_through: Pass gradients unchanged through operators that round or quantize (straight-through
            estimator); see :func:`onnxtrain.gradient`.
        recompute: Glob patterns of names of nodes whose outputs are recomputed in the backward pass (activation
            checkpointing): takes time, saves memory, changes no result. ``"layers"`` recomputes every numbered
            layer from its input.
        dynamic_batch: Train a model of a fixed batch size on batches of any size, by :func:`onnxtrain.dynamic_batch`;
            the saved file keeps its own.

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
        optimizer: Optimizer | str | None = None,
        train: str | Sequence[str] | None = None,
        freeze: str | Sequence[str] | None = None,
        groups: Sequence[Group] = (),
        output: str | None = None,
        targets: TargetKind | None = None,
        batch_norm: str = "frozen",
        dropout: bool = False,
        clip_norm: float | None = None,
        accumulate: int = 1,
        ema: float | EMA | None = None,
        lora: Adaptation | None = None,
        qat: bool = False,
        seed: int = 0,
        threads: int | None = None,
        precision: Precision | str | None = None,
        distributed: Distributed | Communicator | Literal["mpi"] | None = None,
        runtime: RuntimeOptions | None = None,
        **advanced: Unpack[AdvancedOptions],
    ) -> None:
        config = TrainingConfig.of(
            model,
            loss,
            optimizer,
            train=train,
            freeze=freeze,
            groups=groups,
            output=output,
            targets=targets,
            batch_norm=batch_norm,
            dropout=dropout,
            clip_norm=clip_norm,
            accumulate=accumulate,
            ema=ema,
            lora=lora,
            qat=qat,
            seed=seed,
            threads=threads,
            precision=precision,
            distributed=distributed,
            runtime=runtime,
            **advanced,
        )
        with gc_paused():
            self._start(config)
        warn_of(self._hints)

    def _start(
        self,
        config: TrainingConfig,
        objective: Objective | None = None,
        values: Mapping[str, np.ndarray] | None = None,
        data: DataAdapter | None = None,
    ) -> None:
        """Set all attributes: of a new trainer, a copy, or one that is unpickled."""
        if objective is None:
            objective = prepare(config, ignoring=False, differentiable=True)
        if config.masks.keep:
            config = dataclasses.replace(config, masks=_kept_zeros(objective, config.model.value))
        check_masks(config.masks, objective.shapes, objective.optimizers(config))
        self._hints = objective.hints(config)  # reads weights, which the executor then releases
        self._executor = _executor_class(config)(objective, config, values)
        self._state = State(self._executor.states, objective, keeps_averages=config.ema is not None)
        for name, average in self._state.averages.items():
            if values is None or average not in values:
                self.states[average] = self.states[name]
        set_to_zero(self.states, config.masks)
        self._rate = LearningRate(config.optimizer.learning_rate)
        self._data = data or DataAdapter(read_names(config.model, getattr(config.lora, "adapter", None)))
        self._evaluators: dict[tuple[Forms | None, bool, bool], Evaluator] = {}
        self._in_inference: Objective | None = None

    @classmethod
    @gc_paused()
    def _of(
        cls,
        config: TrainingConfig,
        objective: Objective,
        values: Mapping[str, np.ndarray],
        data: DataAdapter | None = None,
    ) -> Self:
        """Return a trainer of a prepared objective that begins with given values."""
        found = object.__new__(cls)
        found._start(config, objective, values, data)
        return found

    def _again(self, **changes: Any) -> Self:
        """Return a trainer with the current parameters, fresh optimizer states and some other settings."""
        config = dataclasses.replace(self.config, **changes)
        return self._of(config, self._objective, dict(self._trained), self._data.copy())

    def __repr__(self) -> str:
        loss = self._objective.loss
        shown = f"output:{self._objective.prediction.name}" if loss is None else loss.name
        count = sum(array.size for array in self.parameters.values())
        name = "" if self._file.path is None else f"{str(self._file.path)!r}, "
        return (
            f"<{type(self).__name__}: {name}loss {shown}, {self.optimizer}, {len(self.parameters)} parameters of "
            f"{count:,} elements>"
        )

    def _repr_html_(self) -> str:
        objective, counts = self._objective, [array.size for array in self.parameters.values()]
        loss = "an output of the model" if objective.loss is None else objective.loss.name
        rows = {
            "model": "in memory" if self._file.path is None else str(self._file.path),
            "inputs": ", ".join(f"{spec.name} {spec.dtype} {spec.describe_shape()}" for spec in objective.inputs),
            "trained on": f"{objective.prediction.name}, {loss}",
            "optimizer": repr(self.optimizer),
            "learning rate": f"{self.learning_rate:g}",
            "parameters": f"{plural(sum(counts), 'element')} in {plural(len(counts), 'array')}",
        }
        return html_facts(rows, notes=self.hints)

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if not name.startswith("_") or name.endswith("__")]

    @property
    def config(self) -> TrainingConfig:
        """The frozen configuration of this training."""
        return self._executor.config

    @property
    def _file(self) -> ModelFile:
        """The model as it was read."""
        return self.config.model

    @property
    def _objective(self) -> Objective:
        """The loss over the model, for the form of the targets seen so far."""
        return self._executor.objective

    @property
    def _session(self) -> TrainingSession:
        """The session that runs the steps."""
        return self._executor.session

    @property
    def _communicator(self) -> Communicator:
        """The communicator of the data-parallel ranks; a single process has one of its own."""
        return self.config.parallel or Single()

    def _change(self, config: TrainingConfig) -> None:
        """Train by another configuration from the next step on; parameters and optimizer states are kept.

        The model and the trainable parameters stay the same.
        """
        if config != self.config:
            objective = self._objective.with_form(config.form).weighting(config.weighted)
            self._executor.change(objective, config)

    def _use(self, objective: Objective) -> None:
        """Switch the steps to the targets and weights of an objective."""
        if objective is not self._objective:
            form = self.config.form if objective.form == self._objective.form else objective.form
            self._change(dataclasses.replace(self.config, form=form, weighted=objective.weights is not None))

    @property
    def parameters(self) -> Parameters:
        """Live views of the trainable parameters by name: read them, or assign to them."""
        return self._state.parameters

    @property
    def _trained(self) -> Parameters:
        """Live views of trainable parameters and running statistics by name."""
        return self._state.trained

    @property
    def states(self) -> StateBuffers:
        """Live views of all values that steps change, by name: parameters, running statistics, optimizer states."""
        return self._executor.states

    @property
    def labels(self) -> tuple[str, ...] | None:
        """Text labels in the order of the classes; ``None`` until targets are text.

        They are taken from the first targets, or from the file beside the model where :meth:`save` has written them.
        """
        return self._data.labels

    @labels.setter
    def labels(self, labels: Sequence[str] | None) -> None:
        self._data.labels = labels

    @property
    def columns(self) -> dict[str, tuple[str, ...]]:
        """Column names of each input, in the order in which the model reads them.

        They are taken from the first tables that ``fit`` gets, or from the file beside the model where :meth:`save` has
        written them. Later tables are read by these names.
        """
        return dict(self._data.names.columns)

    @property
    def optimizer(self) -> Optimizer:
        """The update rule."""
        return self.config.optimizer

    @property
    def accumulate(self) -> int:
        """The number of micro-batches per batch (gradient accumulation)."""
        return self.config.accumulate

    @property
    def seed(self) -> int:
        """The seed of shuffling and of dropout."""
        return self.config.seed

    @property
    def options(self) -> RuntimeOptions:
        """The options of the ONNX Runtime sessions."""
        return self.config.runtime

    @property
    def _prunable(self) -> list[str]:
        """Names of the weights that :func:`onnxtrain.prune` cuts by default: of linear and other such layers."""
        return self._objective.matmul_weights

    trained = old_attribute("trained", "parameters (live views) or get_weights() (copies)", "_trained")
    weights = old_attribute("weights", "found by onnxtrain.inspect", "_prunable")

    @property
    def sparsified(self) -> list[str]:
        """Names of the parameters whose sparsity the optimizer promotes; empty for other optimizers."""
        return self._objective.sparsified(self.config.sparsify)

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step: at first the optimizer's, then the value set last.

        Setting it before :meth:`fit` sets where that starts from: the highest rate of a schedule given as text. Setting
        it in a callback takes the rate from the schedule, from the next step on to the end of that ``fit``.
        """
        return self._rate.current

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        self._rate.choose(value)

    @property
    def table(self) -> list[Initializer]:
        """All initializers of the model: trained or not, and why not."""
        return list(self._objective.table)

    @property
    def hints(self) -> list[str]:
        """Hints about this model and its training; surprising ones were also warnings."""
        return [hint.text for hint in self._hints]

    @property
    def masks(self) -> Mapping[str, np.ndarray]:
        """The masks of :meth:`set_masks` by parameter."""
        return self.config.masks

    @checks_arguments
    def set_masks(self, masks: Mapping[str, np.ndarray] | str) -> None:
        """Keep weights at zero where a mask is false, from the next step on.

        Weights and their optimizer states become zero where a mask is false, and the gradient is zero there in
        every later step, before clipping: every update rule then keeps both at exactly zero, also in a training
        model that is saved and resumed elsewhere.

        Args:
            masks: Boolean arrays by parameter, of its shape. They replace all earlier masks. ``"keep"`` keeps the zeros
                that pruned tensors have now: those of which a tenth or more is zero.

        Raises:
            OptionError: A mask fits no parameter, or the optimizer's epsilon is 0, where 0 / 0 is no zero.
        """
        chosen = Masks(masks)
        if chosen.keep:
            chosen = _kept_zeros(self._objective, self.parameters.__getitem__)
        check_masks(chosen, self._objective.shapes, self._objective.optimizers(self.config))
        self._change(dataclasses.replace(self.config, masks=chosen))
        set_to_zero(self.states, chosen)

    @property
    def statistics(self) -> list[str]:
        """Names of the running statistics that training updates (``batch_norm="train"``)."""
        return list(self._objective.statistics)

    @checks_arguments
    def train_step(self, inputs: Source, targets: Any = None, sample_weight: Any = None) -> float:
        """Train one step on one batch; smaller batches are padded for models with a fixed batch size.

        Args:
            inputs: An array, a tuple of arrays in the order of the model's inputs, or a mapping.
            targets: Class indices or values, by output where several have losses; ``None`` where the loss is an output
                of the model.
            sample_weight: One weight per example [N], at least 0, that multiplies its term of the loss.

        Returns:
            The loss before the update.

        Raises:
            DataError: Arrays do not fit the model, or hold NaN or infinity.
            StepError: onnxruntime failed.
        """
        objective, feeds = self._data.step_feeds(self._objective, inputs, targets, sample_weight)
        self._use(objective)
        return self._executor.step(feeds, self.learning_rate)

    @property
    def loss_parts(self) -> dict[str, float]:
        """Unweighted losses of the last step by output, ``{output}_loss``; empty for a single loss."""
        return dict(self._executor.parts)

    @checks_arguments
    def fit(
        self,
        data: Source,
        y: Any = None,
        *,
        validation: Source | float = None,
        sample_weight: Any = None,
        target: str | None = None,
        epochs: int = 1,
        batch_size: int = 32,
        schedule: str | Schedule | None = None,
        metrics: Metrics = (),
        shuffle: bool = True,
        callbacks: Sequence[Callback] = (),
        progress: ProgressLike = "auto",
        checkpoint: str | os.PathLike[str] | None = None,
        checkpoint_every: int | None = None,
        keep: int = 3,
        save_best: str | None = None,
        resume: bool | str | os.PathLike[str] = False,
        change: str | Sequence[str] = (),
        run: str | os.PathLike[str] | RunFolder | None = None,
        prefetch: bool = True,
        augment: Augment | None = None,
        ema: bool | None = None,
    ) -> History:
        """Train for some epochs.

        The last batch of an epoch may be smaller than the others: its step is one on the mean over its own examples. A
        model of a fixed batch size gets such a batch padded; the padding does not count in the loss.

        The learning rate is the schedule's, which starts from :attr:`onnxtrain.Trainer.learning_rate`. A callback that
        sets that of the trainer or of its :class:`~onnxtrain.callbacks.TrainingState` takes it over from the
        next step on; the rate that was set last wins, and a resumed training goes on with it.

        Args:
            data: Training data: a ``.npz`` file, a folder of ``.npy`` files, a ``.csv`` file, a folder of pictures by
                class, a mapping of arrays, (inputs, targets), or an iterable of batches; with ``y`` the inputs alone.
            y: The targets, where ``data`` has none; by output where several have losses.
            validation: Data to evaluate on after every epoch, which may be (inputs, targets, weights), or the fraction
                of ``data`` to hold out: ``0.2``.
            sample_weight: One weight per example [N], at least 0, or the name of the array or column of ``data`` that
                has them. The loss is the mean over the examples of weight times loss, as in Keras; so weights of
                another mean are a learning rate of another size. The validation loss is weighted where its examples
                have weights: their own, those of the fraction that is held out, or the column of that name; metrics
                count all alike.
            target: Name of the target: the array, where several are left beside the inputs, or the column of a table.
            epochs: How often to go through the data.
            batch_size: Examples per step (split into micro-batches where the trainer accumulates). A model of a fixed
                batch size has its own, times the micro-batches of the trainer.
            schedule: Learning rate by step: ``"cosine"``, ``"warmup(100)+linear"``, ``"step(30, 0.1)"`` ..., an object
                of :mod:`onnxtrain.schedules`, or a function; constant by default. A text starts from the
                trainer's learning rate.
            metrics: What to measure on the validation data: names (``"accuracy,f1"``, or a list) or functions of
                (y_true, y_pred), which see all data at once; by output where several have losses.
            shuffle: Whether to take the examples in a new order every epoch (by the trainer's seed).
            callbacks: Called at the ends of steps and epochs.
            progress: Shows loss, metrics, examples per second and time left: a table in a notebook, a bar in a
                terminal, else a line per epoch on the standard error; ``"notebook"``, ``"bar"`` or ``"lines"`` to say
                which, ``False`` for nothing.
            checkpoint: Folder of checkpoints; none by default.
            checkpoint_every: Steps between checkpoints; by default one per epoch.
            keep: How many checkpoints to keep.
            save_best: A metric such as ``"val_accuracy"``: the model of its best epoch is in ``best.onnx`` in
                the folder of the checkpoints.
            resume: Go on from the newest checkpoint of the folder, or from the one of this path, bit for bit as if
                never stopped. Everything that changes numbers must be as it was: settings, schedule, the model, and the
                data, of which hashes are compared. (Of a function only its name is, and of an iterable of batches
                nothing.) More epochs are welcome where the schedule does not end with them.
            change: Names of what may differ from the checkpoint all the same, as a list or separated by commas, such as
                ``"epochs,learning_rate"``. The training goes on at its step with the new settings: a schedule is
                followed as if it had been this one from the first step.
            run: Folder for ``metrics.csv``, ``curves.svg`` and ``report.html``: curves, mistakes or residuals on the
                validation data (the training data where there are none), parameters, gradients, sparsity.
            prefetch: Whether the next batch is prepared in a thread while a step runs, where that takes time; results
                are the same. An iterable that only the main thread may read needs ``False``.
            augment: A function ``augment(inputs, rng)`` that changes the inputs of training batches: the array of the
                only input [N, ...], or a dictionary of several, and a ``numpy.random.Generator`` that follows from the
                seed, the epoch and the batch alone. It returns inputs of the same types and shapes. A checkpoint
                compares its name.
            ema: Whether validation measures the moving averages of the weights (``Trainer(ema=...)``), which
                ``save_best`` then writes; by default where the trainer keeps them. Early stopping puts averages and
                weights back.

        Returns:
            One row per epoch: loss, learning rate, the loss of each output where several have one, validation loss and
            metrics.

        Raises:
            DataError: Data does not fit the model.
            NumericalError: The loss became NaN; the message names the step and the last good checkpoint.
            CheckpointError: The checkpoint to resume does not belong to this training, or the folder cannot be written
                to.
            KeyboardInterrupt: Ctrl-C was pressed. The step was finished, and a checkpoint written where there is a
                folder for it; the message says how to go on. SIGTERM does the same and ends the process, with status
                143. A second Ctrl-C interrupts at once.
        """
        # a step alone does not need these
        from onnxtrain.callbacks import CallbackList, History, SaveBest, TrainingState
        from onnxtrain.loop import Checkpoints, Loop, LoopOptions, examples_per_step, shown_progress, steps_per_epoch
        from onnxtrain.training.checkpoints.fingerprint import describe_course

        if epochs < 1:
            raise OptionError(f"epochs is {epochs}; it needs a number of at least 1.")
        ema = self._chosen_averages(ema)
        checkpoints = Checkpoints.of(
            checkpoint, every=checkpoint_every, keep=keep, resume=resume, change=change, save_best=save_best
        )
        if save_best is not None and checkpoint is not None and os.path.isdir(checkpoint):
            self._file.check_writable(os.path.join(checkpoint, "best.onnx"))
        folder = None if run is None else _run_folder(run, resume=bool(resume))
        if checkpoints.resume:
            self._take_names(checkpoints)
        dataset, validated = self._open_fit_data(data, y, validation, target, sample_weight, metrics, ema)
        size = examples_per_step(self._executor, dataset, batch_size)
        per_epoch = steps_per_epoch(self._executor, dataset, size)
        rate, rank = self._schedule(schedule, epochs, per_epoch), self._communicator.rank
        measured = self._objective.resolve_metrics(metrics)
        check_numbers(measured)
        history = History()
        if save_best is not None and checkpoint is not None:
            callbacks = [*callbacks, SaveBest(os.path.join(checkpoint, "best.onnx"), save_best)]
        if folder is not None:
            callbacks = [*callbacks, folder]
            folder.writes = not rank
            folder.describe(history, self, dataset, validated and validated[0], size, schedule)
        listeners = CallbackList([history, *callbacks, *([] if rank else shown_progress(progress, callbacks))])
        listeners.silent = rank > 0
        identity: dict[str, Any] = {}
        if checkpoints.store is not None or self._communicator.size > 1:
            identity = {
                **describe_settings(self.config, self._objective),
                **describe_course(
                    self._rate.base,
                    schedule=schedule,
                    epochs=epochs,
                    per_epoch=per_epoch,
                    batch_size=size,
                    shuffle=shuffle,
                    callbacks=callbacks,
                    augment=augment,
                ),
                **describe_model(self._file),
                "labels": None if self.labels is None else list(self.labels),
                "columns": {name: list(names) for name, names in self.columns.items()},
                "data": describe_data(dataset),
                "validation": describe_data(validated and validated[0]),
                **({} if self.config.ema is None else {"measures_ema": ema}),
            }
        Loop(
            LoopOptions(
                executor=self._executor,
                state=self._state,
                rate=self._rate,
                dataset=dataset,
                validation=validated,
                metrics=measured,
                schedule=rate,
                callbacks=listeners,
                progress=TrainingState(
                    epochs=epochs,
                    steps_per_epoch=per_epoch,
                    learning_rate=self.learning_rate,
                    batch_size=size,
                    trainer=self,
                ),
                epochs=epochs,
                batch_size=size,
                shuffle=shuffle,
                prefetch=prefetch,
                augment=augment,
                ema=ema,
                checkpoints=checkpoints,
                identity=identity,
                columns_left_out=self._data.names.left_out,
            )
        ).run()
        self._data.learn(dataset.columns)  # an iterable knows them only now
        if folder is not None:
            folder.finish(self, ema=ema)
        return history

    def _chosen_averages(self, ema: bool | None) -> bool:
        """Return whether validation measures the moving averages: by default where they are kept.

        Raises:
            OptionError: They are asked for, and not kept.
        """
        keeps_averages = self.config.ema is not None
        if ema and not keeps_averages:
            raise OptionError(
                "ema=True measures the moving averages of the weights, but this trainer keeps none; make it with "
                "Trainer(ema=0.999)."
            )
        return keeps_averages if ema is None else ema

    def _take_names(self, checkpoints: Checkpoints) -> None:
        """Read data by the names that columns and classes had when the checkpoint was written."""
        store = checkpoints.store
        assert store is not None
        metadata = self._communicator.on_root(lambda: store.metadata(checkpoints.path))
        kept = names_of_checkpoint(metadata or {})
        self._data.learn(kept.columns, kept.left_out)
        self._data.expected_labels = kept.labels

    def _open_fit_data(
        self, data: Source, y: Any, validation: Any, target: str | None, sample_weight: Any, metrics: Metrics, ema: bool
    ) -> tuple[Dataset, tuple[Dataset, Evaluator] | None]:
        """Open the training data, and the validation data with the evaluator that measures them.

        Raises:
            DataError: They cannot be read or do not fit.
            OptionError: There are metrics without validation data.
        """
        if validation is None and not are_none(metrics):
            raise OptionError("metrics are measured on validation data; give validation=.")
        dataset = self.open(data if y is None else (data, y), target=target, sample_weight=sample_weight)
        if isinstance(validation, float | int):
            dataset, validation = split_validation(dataset, validation, self.seed)
        if validation is None:
            return dataset, None
        evaluator: Evaluator | None = None
        if isinstance(sample_weight, str) and not isinstance(validation, Dataset):
            with contextlib.suppress(NoSuchArrayError):  # then the validation data are not weighted
                evaluator, held_out = self._open_for_evaluation(
                    validation, target=target, ema=ema, sample_weight=sample_weight
                )
        if evaluator is None:
            evaluator, held_out = self._open_for_evaluation(validation, target=target, ema=ema)
        evaluator.check(held_out)
        return dataset, (held_out, evaluator)

    def _schedule(self, schedule: str | Schedule | None, epochs: int, per_epoch: int | None) -> Schedule:
        """Return the learning rate by step.

        Warns:
            TrainingHint: It vanishes.
        """
        from onnxtrain.schedules.choice import resolve_schedule, vanishing_hint

        total = None if per_epoch is None else per_epoch * epochs
        found = resolve_schedule(schedule, self._rate.base, total_steps=total, steps_per_epoch=per_epoch)
        if schedule is not None and per_epoch and not self._communicator.rank:
            text = vanishing_hint(schedule, found, per_epoch * epochs, per_epoch)
            warn_of([Hint(text, surprising=True)] if text else [])
        return found

    @checks_arguments
    def open(
        self, source: Source, *, target: str | None = None, need_target: bool = True, sample_weight: Any = None
    ) -> Dataset:
        """Open data in any form as a dataset that fits this model.

        Args:
            source: The data.
            target: Name of the target in a file with several arrays left.
            need_target: Whether there have to be targets, where the loss takes some.
            sample_weight: One weight per example [N], at least 0, that multiplies its term of the loss; or the name of
                the array or column that has them.

        Raises:
            DataError: It cannot be read or does not fit.
        """
        if not need_target:
            return self._data.open(self._objective, source, target=target)
        dataset, form, weights = self._data.open_with_targets(
            self._objective, source, target=target, sample_weight=sample_weight, learning=True
        )
        self._use(self._objective.with_form(form).weighting(weights is not None))
        dataset = self._objective.accept(dataset, weights)
        named = weights if isinstance(weights, str) else None
        self._data.learn(dataset.columns, (target, named))
        self._warn_of_few_labels()
        return dataset

    def _warn_of_few_labels(self) -> None:
        """Warn where a model has more classes than the data have labels.

        Warns:
            TrainingHint: It has.
        """
        labels, targets = self._data.take_new_labels(), self._objective.targets
        if labels is None or targets is None or targets.classes is None or len(labels) >= targets.classes:
            return
        self._hints.append(Hint(fewer_labels(labels, targets.classes), surprising=True))
        warn_of(self._hints[-1:])

    @checks_arguments
    def evaluate(
        self,
        data: Source,
        y: Any = None,
        *,
        sample_weight: Any = None,
        target: str | None = None,
        batch_size: int = 256,
        metrics: Metrics = (),
        ema: bool = False,
    ) -> dict[str, Any]:
        """Compute loss and metrics on data in inference mode: no dropout, running statistics.

        Args:
            data: Data in any form; with ``y`` the inputs alone.
            y: The targets, where ``data`` has none.
            sample_weight: One weight per example [N], at least 0, or the name of the array or column that has them. The
                loss is the mean over the examples of weight times loss; metrics count all examples alike (as in Keras).
            target: Name of the target in a file with several arrays left.
            batch_size: Examples per batch.
            metrics: Names (``"accuracy,f1"``, or a list) or functions of (y_true, y_pred), which see all data at once;
                by output where several have losses.
            ema: Whether to measure the moving average of the parameters (``Trainer(ema=...)``).

        Returns:
            ``loss`` and every metric of all examples; ``confusion_matrix`` is an array. Where several outputs have
            losses, ``{output}_loss`` is that of each, and metrics are ``{output}_{metric}``. A prediction that is NaN
            makes every metric NaN.
        """
        source = data if y is None else (data, y)
        evaluator, dataset = self._open_for_evaluation(source, target=target, ema=ema, sample_weight=sample_weight)
        return evaluator.evaluate(dataset, batch_size, metrics, self._communicator)

    def _open_for_evaluation(
        self, source: Source, *, target: str | None = None, ema: bool = False, sample_weight: Any = None
    ) -> tuple[Evaluator, Dataset]:
        """Open data in any form; return the evaluator and the dataset.

        The form of the targets may differ from the one that the model is trained on: labels where it learns from
        distributions over classes.

        Raises:
            DataError: It cannot be read or does not fit.
        """
        if self._objective.targets is None:
            return self._evaluator(None, ema), self.open(source, target=target, sample_weight=sample_weight)
        dataset, form, weights = self._data.open_with_targets(
            self._objective, source, target=target, sample_weight=sample_weight, learning=False
        )
        evaluator = self._evaluator(form, ema, weighted=weights is not None or dataset.weighted)
        return evaluator, evaluator.objective.accept(dataset, weights)

    @checks_arguments
    def predict(
        self,
        data: Source,
        *,
        target: str | None = None,
        batch_size: int = 256,
        ema: bool = False,
        labels: bool = False,
    ) -> np.ndarray | dict[str, np.ndarray]:
        """Return the model's outputs for inputs, or the labels of the predicted classes.

        Args:
            data: Inputs in any form that ``fit`` takes; targets are not needed.
            target: A column of a table that is not one of the inputs.
            batch_size: Examples per batch.
            ema: Whether to predict with the moving average of the parameters.
            labels: Return the most probable class of every example: the text of its label where targets were texts,
                else its number, and -1 for scores that are NaN. Yes-or-no questions have 1 and 0. By output where
                several have losses.

        Returns:
            One array per tensor output by name, or the array itself where the model has one output.

        Raises:
            OptionError: `labels` is given, and predictions are neither scores over classes nor binary logits.
        """
        if labels:
            from onnxtrain.training.inference.evaluation import answers

            return self._by_head(data, target, batch_size, ema, "predict(labels=True)", answers)
        arrays = self._evaluator(self._objective.form, ema).predict(
            self.open(data, target=target, need_target=False), batch_size
        )
        return next(iter(arrays.values())) if len(arrays) == 1 else arrays

    @checks_arguments
    def predict_proba(
        self, data: Source, *, target: str | None = None, batch_size: int = 256, ema: bool = False
    ) -> np.ndarray | dict[str, np.ndarray]:
        """Return class probabilities for inputs, from logits or from a final Softmax or Sigmoid.

        Args:
            data: Inputs in any form that ``fit`` takes; targets are not needed.
            target: A column of a table that is not one of the inputs.
            batch_size: Examples per batch.
            ema: Whether to predict with the moving average of the parameters.

        Returns:
            Probabilities [N, C, ...] over classes, or [N, K] of yes for K questions; one question has those of no and
            yes [N, 2], as in scikit-learn. By output where several have losses.

        Raises:
            OptionError: Predictions are neither scores over classes nor binary logits.
        """
        from onnxtrain.training.inference.evaluation import probabilities

        def found(metric_input: MetricInput, scores: np.ndarray, labels: Sequence[str] | None) -> np.ndarray:
            return probabilities(metric_input, scores)

        return self._by_head(data, target, batch_size, ema, "predict_proba", found)

    def _by_head(
        self,
        data: Source,
        target: str | None,
        batch_size: int,
        ema: bool,
        caller: str,
        found: Callable[[MetricInput, np.ndarray, Sequence[str] | None], np.ndarray],
    ) -> np.ndarray | dict[str, np.ndarray]:
        """Apply a function to the predictions of each output that has a loss; by output where there are several."""
        from onnxtrain.training.inference.evaluation import check_answers

        evaluator = self._evaluator(self._objective.form, ema)
        heads = evaluator.objective.heads
        if not heads:
            raise OptionError(
                f"{caller} needs a loss on targets, which says what predictions are, but the loss is an output."
            )
        for head in heads:
            check_answers(head.targets.metric_input, caller)
        dataset = self.open(data, target=target, need_target=False)
        arrays = evaluator.predict(dataset, batch_size, [head.prediction for head in heads])
        labels = self.labels if len(heads) == 1 else None
        by_head = {
            head.name: found(head.targets.metric_input, arrays[str(head.prediction.name)], labels) for head in heads
        }
        return next(iter(by_head.values())) if len(heads) == 1 else by_head

    def _evaluator(self, form: Forms | None, ema: bool, weighted: bool = False) -> Evaluator:
        self._state.check_averages(ema)
        key = form, ema, weighted
        if key not in self._evaluators:
            from onnxtrain.training.inference.evaluation import Evaluator  # a step does not need it

            config, objective = self.config, self._objective
            if self._in_inference is None:
                self._in_inference = objective
                if objective.modes.training or (config.lora is not None and config.lora.drops):
                    self._in_inference = prepare(config, modes=Modes(), copies=objective.copies, table=objective.table)
            self._evaluators[key] = Evaluator(
                self._in_inference.with_form(form).weighting(weighted),
                self.states,
                self.options,
                self._state.averages if ema else None,
            )
        return self._evaluators[key]

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
        if self._communicator.rank:
            return
        self.check_weights(ema)
        adapted = self._objective.adapted
        with kept_in_memory(path):
            if adapted is not None and adapted.writes(path):
                adapted.write(path, self._file, self._state.values(ema=ema))
            else:
                metadata = {LABELS: labels_text(self.labels)} if labels and self.labels is not None else {}
                self._file.save(path, self._initializers(ema), metadata)
        write_names(Path(path), self._data.names)

    def _initializers(self, ema: bool = False) -> Mapping[str, np.ndarray]:
        """Return the initializers that :meth:`save` writes."""
        return self._state.initializers(self._objective, self._file, ema=ema)

    @checks_arguments
    def check_weights(self, ema: bool = False) -> None:
        """Check that no weight became NaN or infinite in training.

        Args:
            ema: Whether to look at the moving averages of parameters.

        Raises:
            NumericalError: One did; the message names the first parameter.
        """
        self._state.check_finite(self._file, ema=ema)

    @checks_arguments
    def model(self, *, ema: bool = False) -> onnx.ModelProto:
        """Return the model with its trained weights in memory, as :meth:`save` writes it.

        Raises:
            NumericalError: A weight is NaN or infinite.
        """
        self.check_weights(ema)
        return self._file.filled(self._initializers(ema))

    def _base(self) -> onnx.ModelProto:
        """Return the model with its current weights, without adapters."""
        adapted = self._objective.adapted
        if adapted is None:
            return self._file.filled(self._initializers())
        return self._file.filled({n: a for n, a in self._trained.items() if n not in adapted.parameters})

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
            return np.concatenate([array.reshape(-1) for array in self._trained.values()])
        return {name: np.array(array) for name, array in self._trained.items()}

    @checks_arguments
    def set_weights(self, weights: Mapping[str, Any] | np.ndarray) -> None:
        """Assign weights in the form of :meth:`get_weights`; optimizer states are kept.

        Args:
            weights: Arrays by name, of all weights or of some, or one array with the elements of all.

        Raises:
            OptionError: An array is of another type or shape, or there is no such weight; nothing is changed.
        """
        given = weights if isinstance(weights, Mapping) else split_flat(np.asarray(weights), self._trained)
        arrays = {name: np.asarray(array) for name, array in given.items()}
        for name, array in arrays.items():
            self._trained.check(name, array)
        self._trained.update(arrays)

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return copies of all values that steps change.

        Returns:
            Parameters, running statistics, optimizer states (``{parameter}/V`` ...) and moving averages, by name.
        """
        return {name: np.array(array) for name, array in self.states.items()}

    @checks_arguments
    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Assign the values of :meth:`state_dict`.

        Args:
            state: Arrays by name.
            strict: Whether ``state`` has to hold every value.

        Raises:
            OptionError: An array is missing, has no counterpart, or is of another type or shape; nothing is changed.

        Example:
            >>> import onnxtrain
            >>> model = onnxtrain.examples.mlp((4, 3))
            >>> one, other = (onnxtrain.Trainer(model, loss="mse", optimizer="adam") for _ in range(2))
            >>> other.load_state_dict(one.state_dict())
        """
        values = Parameters(self.states, list(self.states))
        arrays = {name: np.asarray(array) for name, array in state.items()}
        missing = [name for name in values if name not in arrays]
        if strict and missing:
            raise OptionError(
                f"The state lacks {len(missing)} of {len(values)} values, such as {missing[0]!r}; give all, or "
                "strict=False."
            )
        for name, array in arrays.items():
            values.check(name, array)
        values.update(arrays)

    def __deepcopy__(self, memory: dict[int, Any]) -> Self:
        """Return an independent copy with the current state; both share the immutable file."""
        found = object.__new__(type(self))
        found._start(self.config, None, self.states, self._data.copy())
        found._rate = copy.copy(self._rate)
        memory[id(self)] = found
        return found

    def __getstate__(self) -> dict[str, Any]:
        """Return the model with its current weights, and all states, for another process."""
        fields = {name: value for name, value in vars(self.config).items() if name != "model"}
        states = {name: np.array(array) for name, array in self.states.items()}
        kept = {"fields": fields, "states": states, "rate": self._rate, "data": (self._data.names, self._data.numbered)}
        return {"model": self._base().SerializeToString(), **kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the pickled state with a new session."""
        file = ModelFile.load(onnx.ModelProto.FromString(state["model"]))
        names, numbered = state["data"]
        data = DataAdapter(names, numbered=numbered)
        self._start(TrainingConfig(model=file, **state["fields"]), None, state["states"], data)
        self._rate = state["rate"]

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
        for name, own in self._trained.items():
            shape = found[name].shape if name in found else None
            if shape != own.shape:
                raise CheckpointError(
                    f"The checkpoint {os.fspath(path)!r} has {'no' if shape is None else f'another shape {shape} of'} "
                    f"{name!r}, which this training changes; it is of another training."
                )
        written = metadata.get("fingerprint")
        same = isinstance(written, dict) and written.get("optimizer") == type(self.optimizer).__name__
        for name, array in found.items():
            if name in self._trained or (same and name in self.states and self.states[name].shape == array.shape):
                self.states[name] = array
        set_to_zero(self.states, self.config.masks)
        kept = names_of_checkpoint(metadata)
        if self.labels is None:
            self.labels = kept.labels
        self._data.learn(kept.columns, kept.left_out)

    def training_model(self) -> onnx.ModelProto:
        """Return the training model (``TrainingInfoProto``) with the current weights and optimizer states."""
        return self._session.model()

    @checks_arguments
    def save_training_model(self, path: str | os.PathLike[str]) -> None:
        """Write :meth:`training_model` to a file, from which a :class:`onnxtrain.TrainingSession` resumes."""
        model = self.training_model()  # for which all processes give their share
        if not self._communicator.rank:
            ModelFile.load(model, folder=self._file.folder).save(path, {})


def _kept_zeros(objective: Objective, value_of: Callable[[str], np.ndarray]) -> Masks:
    """Return the masks for ``masks="keep"``.

    Raises:
        OptionError: No trained weight is pruned.
    """
    found = zero_masks(objective.own_weights, value_of)
    if not found:
        raise OptionError(
            f"masks={KEEP!r} keeps the zeros of a pruned model, but no trained weight has at least a tenth of zeros; "
            "leave out masks, or give a mapping from parameters to boolean arrays."
        )
    return Masks(found)


def _executor_class(config: TrainingConfig) -> type[Executor]:
    """Return the executor of one process or of several."""
    if not config.divided:
        return Executor
    from onnxtrain.distributed.sharded import executor_class  # one process does not need it

    return executor_class(config)


def _run_folder(run: str | os.PathLike[str] | RunFolder, *, resume: bool) -> RunFolder:
    from onnxtrain.training.run_folder import RunFolder  # imports the charts

    folder = run if isinstance(run, RunFolder) else RunFolder(run)
    folder.check(resume=resume)
    return folder
