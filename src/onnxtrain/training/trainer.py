"""The Trainer: train an ONNX model on stock ONNX Runtime."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, Literal, Unpack

import numpy as np
import onnx

from onnxtrain.data import Dataset, split_validation
from onnxtrain.data.data_names import names_of_checkpoint
from onnxtrain.data.labels import doubts
from onnxtrain.data.naming import NoSuchArrayError, TargetNames, is_array_like, is_frame
from onnxtrain.data.opening import Source
from onnxtrain.distributed.communicator import Communicator
from onnxtrain.editing.working_copy.adaptation import Adaptation
from onnxtrain.errors import ArgumentError, OptionError
from onnxtrain.errors._internal import gc_paused
from onnxtrain.errors.hints import Hint, warn_of
from onnxtrain.errors.spelling import checks_arguments
from onnxtrain.losses.base import TargetKind
from onnxtrain.losses.heads import Metrics, are_none, check_numbers
from onnxtrain.losses.loss_choice import LossLike
from onnxtrain.model_file.validity import refuses_invalid
from onnxtrain.operators.optimizer import Optimizer
from onnxtrain.parameters.ema import EMA
from onnxtrain.parameters.groups import Group
from onnxtrain.parameters.masks import Masks, check_masks, set_to_zero, zeros_to_keep
from onnxtrain.runtime.options import RuntimeOptions
from onnxtrain.training.config import (
    ADVANCED,
    AdvancedOptions,
    Distributed,
    Options,
    Precision,
    TrainingConfig,
    optional_patterns,
)
from onnxtrain.training.objective import Objective
from onnxtrain.training.prepare import prepare
from onnxtrain.training.trained_model import TrainedModel
from onnxtrain.training.trained_values import trains

if TYPE_CHECKING:
    from onnxtrain.data.pipeline import Augment
    from onnxtrain.training.callbacks.base import Callback
    from onnxtrain.training.callbacks.history import History
    from onnxtrain.training.callbacks.progress import ProgressLike
    from onnxtrain.training.fit_options import FitOptions
    from onnxtrain.training.inference.evaluation import Evaluator
    from onnxtrain.training.loop import Checkpoints
    from onnxtrain.training.run_folder import RunFolder
    from onnxtrain.training.schedules import Schedule


@checks_arguments(keywords=(*ADVANCED, "parallel"))
class Trainer(TrainedModel):
    """Train an ONNX model on stock ONNX Runtime.

    Args:
        model: A path or a loaded model. It is never changed; :meth:`save` writes a copy in which only the trained
            initializers differ. A path takes less memory: the weights are held once, and not a second time in the
            loaded model.
        loss: What to minimise: ``"softmax_cross_entropy"``, ``"next_token"``, ``"binary_cross_entropy"``,
            ``"mean_squared_error"``, ``"mean_absolute_error"``, ``"huber"``, each with arguments as in
            ``"huber(delta=0.5)"``, ``"output:NAME"`` for a scalar output of the model, a
            :class:`~onnxtrain.losses.Loss`, the path of an ONNX model of (prediction, target), or a function (builder,
            prediction, target) -> value. A model that ends in the Softmax or Sigmoid that a cross-entropy contains is
            trained on its logits.
        optimizer: Update rule, by default ``Adam()``; or its name, ``"adamw(lr=3e-4)"``.
        train: Glob patterns of the initializers to train; by default all parameters (``onnxtrain inspect MODEL`` lists
            them).
        freeze: Glob patterns of initializers to freeze; wins over ``train``.
        groups: Parameter groups with settings of their own, :class:`~onnxtrain.Group`. A parameter belongs to the first
            group that matches it, as in PyTorch.
        output: The output that the loss reads, by default the first one of a floating type.
        targets: ``"indices"`` or ``"values"`` (distributions over classes), where the loss takes both; by default
            decided by the first data.
        batch_norm: ``"frozen"``: running statistics, whatever mode the file sets; ``"train"``: batch statistics, with
            the running ones written back; ``"sync"``: synchronized over all ranks (SyncBatchNorm).
        dropout: Whether Dropout nodes are active while training, whatever mode the file sets.
        clip_norm: Scale the gradients so that their global norm is at most this.
        accumulate: Split every batch into this many micro-batches; the step equals that of the whole batch.
        ema: Keep an exponential moving average of the parameters, with this decay, or as an :class:`~onnxtrain.EMA`
            says; ``evaluate``, ``predict``, ``save`` and ``model`` take it with ``ema=True``.
        lora: Adapters to train beside frozen weights, :class:`onnxtrain.Lora`. Then ``train`` names the initializers
            that are trained in full beside them, by default none.
        qat: Quantization-aware training of a quantized model: integer weights are trained as floats that every step
            rounds, scales are trained, and integers and scales are saved ([quantization](docs/quantization.md)).
            Implies ``straight_through``.
        seed: Seed of shuffling and of dropout.
        threads: Threads within an operator; default one per core.
        precision: Number formats of computation, states and weights, :class:`onnxtrain.Precision`, or text:
            ``"bfloat16"``.
        distributed: Data-parallel training with other processes: a communicator such as
            ``onnxtrain.distributed.MPI()``, ``"mpi"``, or :class:`onnxtrain.Distributed`; ``parallel=`` is the same
            argument.
        runtime: Options of the ONNX Runtime sessions, :class:`onnxtrain.RuntimeOptions`.
        clip_value: Clip every element of the gradients to [-clip_value, clip_value].
        masks: Boolean arrays by parameter name; elements stay zero where a mask is false. ``"keep"`` keeps the zeros of
            the tensors that were pruned. See :meth:`set_masks`.
        sparsify: Glob patterns of the parameters whose sparsity an optimizer such as ``SSGD`` promotes; by default the
            weights of linear layers, convolutions, recurrent layers and embeddings. Other parameters take plain steps.
        untie: Split shared initializers, so that each node has its own: ``True`` for those that exporters merge
            (scales, biases and statistics), or glob patterns.
        tie: Train initializers that hold the same values (an embedding, and the output projection as its transposed
            copy) as one: ``True`` for all, or glob patterns.
        straight_through: Pass gradients unchanged through operators that round or quantize (straight-through
            estimator); see :func:`onnxtrain.gradient`.
        recompute: Glob patterns of names of nodes whose outputs are recomputed in the backward pass (activation
            checkpointing): takes time, saves memory, changes no result. ``"layers"`` recomputes every numbered layer
            from its input.
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
        options = {name: value for name, value in locals().items() if name in Options.__annotations__}
        options.update(advanced)
        if "parallel" in options:  # promised beside distributed
            if distributed is not None:
                raise ArgumentError("Trainer has both 'distributed' and 'parallel'; leave 'parallel' out.")
            options["distributed"] = options.pop("parallel")
        config = TrainingConfig.of(model, loss, optimizer, **options)
        with gc_paused():
            self._start(config)
        warn_of(self._hints)

    @trains
    def change_settings(self, **changes: Any) -> None:
        """Change fields of :attr:`config` from the next step on; parameters and optimizer states are kept.

        The model and the trainable parameters stay the same.
        """
        config = dataclasses.replace(self.config, **changes)
        if config != self.config:
            objective = self.objective.packing(config.packed).with_forms(config.forms).weighting(config.weighted)
            self.executor.change(objective, config)

    def _use(self, objective: Objective) -> None:
        """Switch the steps to the targets and weights of an objective."""
        if objective is not self.objective:
            forms = self.config.forms if objective.forms == self.objective.forms else objective.forms
            weighted, packed = objective.weights is not None, objective.packed
            self.change_settings(forms=forms, weighted=weighted, packed=packed)

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
    def hints(self) -> list[str]:
        """Hints about this model and its training; surprising ones were also warnings."""
        return [hint.text for hint in self._hints]

    @checks_arguments
    @trains
    def set_trained(self, train: str | Sequence[str] | None = None, freeze: str | Sequence[str] | None = None) -> None:
        """Choose anew which parameters are trained, between two calls of :meth:`fit`.

        The others are frozen: they keep their values and optimizer states, and go on with them when they are trained
        again. Their update counts are their own, as in PyTorch.

        Args:
            train: As in :class:`Trainer`; by default all parameters.
            freeze: As in :class:`Trainer`; wins over ``train``.

        Raises:
            OptionError: A pattern matches nothing, nothing is left to train, or :meth:`fit` is running.
        """
        config = dataclasses.replace(self.config, train=optional_patterns(train), freeze=optional_patterns(freeze))
        names, first = prepare(config).parameters, config.optimizer.schema.first_count
        now = int(self.executor.states[self.objective.names.count])
        counts = {**config.held, **{name: now - config.missed.get(name, 0) for name in self.parameters}}
        missed = {name: own for name in names if (own := now - counts.pop(name, first))}
        self._go_on(dataclasses.replace(config, held=counts, missed=missed), "set_trained")

    @property
    def masks(self) -> Mapping[str, np.ndarray]:
        """The masks of :meth:`set_masks` by parameter."""
        return self.config.masks

    @checks_arguments
    @trains
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
            chosen = zeros_to_keep(self.objective.own_weights, self.parameters.__getitem__)
        check_masks(chosen, self.objective.shapes, self.objective.optimizers(self.config))
        self.change_settings(masks=chosen)
        set_to_zero(self.executor.states, chosen)

    @checks_arguments
    def train_step(self, inputs: Source, targets: Any = None, sample_weight: Any = None) -> float:
        """Train one step on one batch; smaller batches are padded for models with a fixed batch size.

        Args:
            inputs: An array, a tuple of arrays in the order of the model's inputs, or a mapping. Without ``targets``, a
                batch as ``fit`` takes it: a mapping that has the targets too, (inputs, targets), or these and weights.
            targets: Class indices or values, by output where several have losses; ``None`` where the loss is an output
                of the model, or where the batch holds them.
            sample_weight: One weight per example [N], at least 0, that multiplies its term of the loss.

        Returns:
            The loss before the update.

        Raises:
            DataError: Arrays do not fit the model, or hold NaN or infinity.
            StepError: onnxruntime failed.
            BusyError: Another thread trains.
        """
        with self.executor.states.training("train_step", changes=self.config.divided):
            objective, feeds = self.data_adapter.step_feeds(self.objective, inputs, targets, sample_weight)
            self._use(objective)
            return self.executor.step(feeds, self.learning_rate)

    @property
    def loss_parts(self) -> dict[str, float]:
        """Unweighted losses of the last step by output, ``{output}_loss``; empty for a single loss."""
        return dict(self.executor.parts)

    @checks_arguments
    @trains
    def fit(
        self,
        data: Source,
        y: Any = None,
        *,
        validation: Source | float = None,
        sample_weight: Any = None,
        target: TargetNames | None = None,
        epochs: int = 1,
        steps_per_epoch: int | None = None,
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
        cache_features: bool = False,
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
                With the loss ``next_token`` also rows of texts, such as a ``.jsonl`` file of chats, a list or an
                iterator of dictionaries, or an :class:`onnxtrain.text.ChatData`.
            y: The targets, where ``data`` has none; by output where several have losses.
            validation: Data to evaluate on after every epoch, which may be (inputs, targets, weights), or the fraction
                of ``data`` to hold out: ``0.2``; without ``shuffle`` the last examples. Several sets are a mapping from
                name to data; their results are ``val_NAME_loss`` and so on.
            sample_weight: One weight per example [N], at least 0, or the name of the array or column of ``data`` that
                has them. The loss is the mean over the examples of weight times loss, as in Keras; so weights of
                another mean are a learning rate of another size. The validation loss is weighted where its examples
                have weights: their own, those of the fraction that is held out, or the column of that name; metrics
                count all alike.
            target: Name of the target: the array, where several are left beside the inputs, or the column of a table.
                Several columns, ``"width,height"`` or a list, are one target [N, columns]; a mapping has those of each
                output.
            epochs: How often to go through the data.
            steps_per_epoch: Steps of an epoch; by default the batches of the data. The next epoch goes on where it
                ended, so that an iterator may be endless; data that end begin again.
            batch_size: Examples per step (split into micro-batches where the trainer accumulates). A model of a fixed
                batch size has its own, times the micro-batches of the trainer; a hint says so.
            schedule: Learning rate by step: ``"cosine"``, ``"warmup(100)+linear"``, ``"step(30, 0.1)"`` ..., an object
                of :mod:`onnxtrain.training.schedules`, or a function; constant by default. A text starts from the
                trainer's learning rate.
            metrics: What to measure on the validation data: names (``"accuracy,f1"``, or a list) or functions of
                (y_true, y_pred), which see all data at once; by output where several have losses. Without validation
                data they measure the training batches, each before its step.
            shuffle: Whether to take the examples in a new order every epoch (by the trainer's seed).
            callbacks: Called at the ends of steps and epochs.
            progress: Shows loss, metrics, examples per second and time left: a table in a notebook, a bar in a
                terminal, else a line per epoch on the standard error; ``"notebook"``, ``"bar"`` or ``"lines"`` to say
                which, ``False`` for nothing.
            checkpoint: Folder of checkpoints; none by default.
            checkpoint_every: Steps between checkpoints; by default one per epoch.
            keep: How many checkpoints to keep.
            save_best: A metric such as ``"val_accuracy"``: the model of its best epoch is in ``best.onnx`` in the
                folder of the checkpoints; with ``lora`` its adapter in ``best.onnx_adapter``.
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
                seed, the epoch and the batch alone. It returns inputs of the same types and shapes. ``augment(inputs,
                targets, rng)`` returns both. A checkpoint compares its name.
            ema: Whether validation measures the moving averages of the weights (``Trainer(ema=...)``), which
                ``save_best`` then writes; by default where the trainer keeps them. Early stopping puts averages and
                weights back.
            cache_features: Whether to compute what the frozen layers before the first trained one give once, for all
                examples, and to run only the layers behind them in every step ([transfer
                learning](docs/transfer_learning.md)). Losses are the same to rounding; memory has to hold the features
                of all examples, of which :attr:`hints` says the size.

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
        from onnxtrain.training.callbacks import CallbackList, History, SaveBest, TrainingState
        from onnxtrain.training.fit_options import FitOptions
        from onnxtrain.training.loop import (
            Checkpoints,
            Loop,
            LoopOptions,
            examples_per_step,
            fixed_batch_hints,
            shown_progress,
            steps_of_epoch,
        )

        options = FitOptions.of(locals())
        rank, ema = self._communicator.rank, self.config.ema is not None if ema is None else ema
        self._state.check_averages(ema)
        checkpoints = Checkpoints.of(options)
        name = "best.onnx" if self.config.lora is None else "best.onnx_adapter"  # the weights may be quantized
        best = None if save_best is None or checkpoint is None else os.path.join(checkpoint, name)
        if best is not None and os.path.isdir(os.path.dirname(best)):
            self.config.model.check_writable(best)
        folder = None
        if run is not None:
            from onnxtrain.training.run_folder import RunFolder  # imports the charts

            folder = run if isinstance(run, RunFolder) else RunFolder(run)
            folder.check(resume=checkpoints.resume)
        if checkpoints.resume:
            self._take_names(checkpoints)
        self.data_adapter.paired = -(-batch_size // self.config.accumulate)
        dataset, held_out = self._open_fit_data(data, y, options, ema=ema)
        dataset = getattr(augment, "opened", lambda _, own: own)(self, dataset)  # with targets that can be mixed
        size = examples_per_step(self.executor, dataset, batch_size)
        self._warn_once(*(() if rank else fixed_batch_hints(self.executor, dataset, batch_size)))
        per_epoch = steps_per_epoch or steps_of_epoch(self.executor, dataset, size)
        rates = self._schedule(schedule, epochs, per_epoch)
        measured = self.objective.resolve_metrics(metrics)
        check_numbers(measured)
        features = self._features(dataset, size, augment) if cache_features else None
        history, own, of_training = History(), self.objective, not held_out and not are_none(metrics)
        saving = [] if best is None or save_best is None else [SaveBest(best, save_best)]
        callbacks = [*callbacks, history, *saving]  # with what callbacks add to the metrics
        if folder is not None:
            callbacks = [*callbacks, folder]
            folder.writes = not rank
            folder.describe(history, self, dataset, next((each for each, _ in held_out.values()), None), size, schedule)
        listeners = CallbackList([*callbacks, *([] if rank else shown_progress(progress, callbacks))])
        listeners.silent = rank > 0
        loop = Loop(
            LoopOptions(
                given=options,
                executor=self.executor,
                state=self._state,
                rate=self._rate,
                names=self.data_adapter.names,
                metrics=measured,
                rates=rates,
                callbacks=listeners,
                progress=TrainingState(
                    epochs=epochs,
                    steps_per_epoch=per_epoch,
                    learning_rate=self.learning_rate,
                    batch_size=size,
                    first_set=next(iter(held_out), ""),
                    trainer=self,
                ),
                batch_size=size,
                ema=ema,
                checkpoints=checkpoints,
            ),
            dataset,
            held_out,
            features,
            self._evaluator(own.forms, False, own.weights is not None, own.packed) if of_training else None,
        )
        self.executor.use_features(wanted=cache_features)
        try:
            loop.run()
        finally:
            self.executor.use_features(wanted=False)
        self.data_adapter.learn(dataset.columns)  # an iterable knows them only now
        if folder is not None and not folder.waits:
            folder.finish(self, ema=ema)
        return history

    def _features(self, dataset: Dataset, batch_size: int, augment: Augment | None) -> Dataset:
        """Return the training data with the outputs of the frozen layers in place of the model's inputs."""
        from onnxtrain.training.features import compute_features
        from onnxtrain.training.inference.evaluation import Evaluator

        if augment is not None:
            raise OptionError(
                "cache_features computes the frozen layers once, but augment changes their inputs in every epoch; "
                "leave one of them out."
            )
        if self._communicator.size > 1:
            raise OptionError(
                f"cache_features keeps the features in one process, but {self._communicator.size} train together; "
                "leave cache_features or distributed out."
            )
        runner = Evaluator(self.objective, self.executor.states, self.config.runtime).runner
        found, text = compute_features(self.objective, runner, dataset, batch_size)
        self._hints.append(Hint(text))
        return found

    def _take_names(self, checkpoints: Checkpoints) -> None:
        """Read data by the names that columns and classes had when the checkpoint was written."""
        store = checkpoints.store
        assert store is not None
        metadata = self._communicator.on_root(lambda: store.metadata(checkpoints.path))
        kept = names_of_checkpoint(metadata or {})
        self.data_adapter.learn(kept.columns, kept.left_out)
        self.data_adapter.learn_facts(kept)
        self.data_adapter.expected_labels = kept.labels

    def _open_fit_data(
        self,
        data: Source,
        y: Any,
        options: FitOptions,
        *,
        ema: bool,
    ) -> tuple[Dataset, dict[str, tuple[Dataset, Evaluator]]]:
        """Open the training data, and the validation data by name with the evaluators that measure them."""
        validation, target, sample_weight = options.validation, options.target, options.sample_weight
        if validation is None and options.cache_features and not are_none(options.metrics):
            raise OptionError("metrics are measured on validation data; give validation=.")
        adapter, kept = self.data_adapter, self.data_adapter.names.kept
        dataset = self.open_data(data if y is None else (data, y), target=target, sample_weight=sample_weight)
        if isinstance(validation, float | int):
            adapter.names = dataclasses.replace(adapter.names, kept=kept)  # without those of the part that is held out
            dataset, validation = split_validation(dataset, validation, self.config.seed, shuffle=options.shuffle)
            adapter.learn_facts(dataset)
        found = {}
        for name, source in _named_sets(validation, {spec.name for spec in self.objective.inputs}).items():
            opened: tuple[Evaluator, Dataset] | None = None
            if isinstance(sample_weight, str) and not isinstance(source, Dataset):
                with contextlib.suppress(NoSuchArrayError):  # then the validation data are not weighted
                    opened = self.open_for_evaluation(source, target=target, ema=ema, sample_weight=sample_weight)
            evaluator, held_out = opened or self.open_for_evaluation(source, target=target, ema=ema)
            evaluator.check(held_out)
            found[name] = held_out, evaluator
        return dataset, found

    def _schedule(self, schedule: str | Schedule | None, epochs: int, per_epoch: int | None) -> Schedule:
        from onnxtrain.training.schedules import resolve_schedule, vanishing_hint

        total = None if per_epoch is None else per_epoch * epochs
        found = resolve_schedule(schedule, self._rate.base, total_steps=total, steps_per_epoch=per_epoch)
        if schedule is not None and per_epoch and not self._communicator.rank:
            text = vanishing_hint(schedule, found, per_epoch * epochs, per_epoch)
            warn_of([Hint(text, surprising=True)] if text else [])
        return found

    @checks_arguments
    @trains
    def open_data(self, source: Source, *, target: TargetNames | None = None, sample_weight: Any = None) -> Dataset:
        """Open data to train on; the steps take targets and weights of this form from now on.

        Args:
            source: The data.
            target: Name of the target in a file with several arrays left.
            sample_weight: One weight per example [N], at least 0, that multiplies its term of the loss; or the name of
                the array or column that has them.

        Raises:
            DataError: The data cannot be read or do not fit.
        """
        dataset, objective = self.data_adapter.open_with_targets(
            self.objective, source, target=target, sample_weight=sample_weight, learning=True, config=self.config
        )
        self._warn_once(*dataset.hints)
        self._use(objective)
        adapter, heads = self.data_adapter, dict(self.objective.targets)
        for name in adapter.take_new_labels():
            recorded = adapter.recorded if name is None else ()
            self._warn_once(*doubts(adapter.labels_of(name) or (), heads[name].classes, recorded))
        return dataset


def _named_sets(validation: Source, inputs: Set[str]) -> dict[str, Source]:
    """Return validation data with the prefix of their results: several sets of a mapping by name, or one."""
    named = isinstance(validation, Mapping) and validation and not inputs & validation.keys()
    if named and not any(is_array_like(each) and not is_frame(each) for each in validation.values()):
        return {f"{name}_": each for name, each in validation.items()}
    return {} if validation is None else {"": validation}
