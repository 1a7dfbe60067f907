"""The Trainer: train an ONNX model on stock ONNX Runtime."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx

from onnxtrain.autodiff.options import Compute
from onnxtrain.losses.base import TargetKind
from onnxtrain.losses.heads import Metrics
from onnxtrain.losses.loss_choice import LossLike
from onnxtrain.model_file.validity import refuses_invalid
from onnxtrain.operators.optimizer import Optimizer
from onnxtrain.parallel.communicator import Communicator
from onnxtrain.runtime.options import RuntimeOptions
from onnxtrain.spelling import checks_arguments
from onnxtrain.training.advice.hints import warn_of
from onnxtrain.training.learner import Learner, Source
from onnxtrain.training.specification import Specification
from onnxtrain.training.working_copy.adaptation import Adaptation
from onnxtrain.weights.ema import EMA
from onnxtrain.weights.groups import Group

if TYPE_CHECKING:
    from onnxtrain.callbacks.base import Callback
    from onnxtrain.callbacks.history import History
    from onnxtrain.callbacks.progress import ProgressLike
    from onnxtrain.data.augmentation import Augment
    from onnxtrain.schedules.learning_rate import Schedule
    from onnxtrain.training.run_folder import RunFolder

_INTERNALS = frozenset(
    {"again", "change", "check_finite", "communicator", "file", "objective", "open", "open_for_evaluation", "rate"}
    | {"saved_values", "session", "specification", "step_batch", "steps", "trained_values", "working_model"}
)
"""Attributes of a trainer that other modules use and that completion does not offer."""


@checks_arguments
class Trainer(Learner):
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
        state_dtype: ``"bfloat16"`` keeps the optimizer's states of float32 parameters in half the bytes; ``"8bit"``, or
            ``"int8"``, in a quarter, block-wise: 8-bit values with one scale per 256, for parameters of at least 4,096
            elements, with the native kernels only. Rounding is stochastic and unbiased; its samples follow from
            ``seed``, so that a resumed training goes on bit for bit. By default states have the type of their
            parameter.
        compute: ``"bfloat16"`` rounds the operands of linear layers to bfloat16, forward and backward, and accumulates
            in float32: about twice the rate on CPUs with AVX512-BF16; other CPUs refuse it. Linear layers with fewer
            than 64 rows or columns (adapters), attention, norms, losses and updates stay in float32, as do
            ``evaluate`` and ``predict``, which compute as the saved model does.
        master_weights: Whether trained weights of a file in float16 or bfloat16 are held in float32, and rounded when
            they are saved. ``False`` keeps bfloat16 weights in bfloat16, half the bytes: every update rounds them
            stochastically, as ``state_dtype`` rounds states.
        output: The output that the loss reads, by default the first one of a floating type.
        targets: ``"indices"`` or ``"values"`` (distributions over classes), where the loss takes both; by
            default decided by the first data.
        batch_norm: ``"frozen"``: running statistics, whatever mode the file sets; ``"train"``: batch statistics, with
            the running ones written back; ``"sync"``: synchronized over all ranks (SyncBatchNorm).
        dropout: Whether Dropout nodes are active while training, whatever mode the file sets.
        untie: Split shared initializers, so that each node has its own: ``True`` for those that exporters merge
            (scales, biases and statistics), or glob patterns.
        tie: Train initializers that hold the same values (an embedding, and the output projection as its
            transposed copy) as one: ``True`` for all, or glob patterns.
        clip_value: Clip every element of the gradients to [-clip_value, clip_value].
        clip_norm: Scale the gradients so that their global norm is at most this.
        masks: Boolean arrays by parameter name; elements stay zero where a mask is false. See :meth:`set_masks`.
        sparsify: Glob patterns of the parameters whose sparsity an optimizer such as ``SSGD`` promotes; by
            default the weights of linear layers, convolutions, recurrent layers and embeddings. Other
            parameters take plain steps.
        accumulate: Split every batch into this many micro-batches; the step equals that of the whole batch.
        straight_through: Pass gradients unchanged through operators that round or quantize (straight-through
            estimator); see :func:`onnxtrain.gradient`.
        qat: Quantization-aware training of a quantized model: integer weights are trained as floats that every step
            rounds, scales are trained, and integers and scales are saved
            ([quantization](docs/quantization.md)). Implies ``straight_through``.
        recompute: Glob patterns of names of nodes whose outputs are recomputed in the backward pass (activation
            checkpointing): takes time, saves memory, changes no result. ``"layers"`` recomputes every numbered
            layer from its input.
        lora: Adapters to train beside frozen weights, :class:`onnxtrain.Lora`. Then ``train`` names the initializers
            that are trained in full beside them, by default none.
        free_batch: Train a model of a fixed batch size on batches of any size, as :func:`onnxtrain.free_batch` makes
            it; the saved file keeps its own.
        seed: Seed of shuffling and of dropout.
        threads: Threads within an operator; default one per core.
        options: All other options of the ONNX Runtime sessions.
        parallel: The processes that train this model together, each on its part of every batch, such as
            ``onnxtrain.parallel.MPI()``; by default this one alone.
        shard_states: Whether of N such processes each keeps an N-th of the optimizer's states, and updates an N-th of
            the weights.
        shard_gradients: Whether it keeps no more than that share of the gradients, too; with ``shard_states`` only.

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
        qat: bool = False,
        recompute: str | Sequence[str] = (),
        lora: Adaptation | None = None,
        seed: int = 0,
        threads: int | None = None,
        options: RuntimeOptions | None = None,
        tie: bool | str | Sequence[str] = False,
        parallel: Communicator | None = None,
        shard_states: bool = False,
        shard_gradients: bool = False,
        groups: Sequence[Group] = (),
        ema: float | EMA | None = None,
        state_dtype: str | None = None,
        compute: Compute = "float32",
        master_weights: bool = True,
        free_batch: bool = False,
    ) -> None:
        specification = Specification.of(
            model,
            loss,
            optimizer,
            train=train,
            freeze=freeze,
            groups=groups,
            ema=ema,
            state_dtype=state_dtype,
            compute=compute,
            master_weights=master_weights,
            output=output,
            targets=targets,
            batch_norm=batch_norm,
            dropout=dropout,
            untie=untie,
            tie=tie,
            clip_value=clip_value,
            clip_norm=clip_norm,
            masks=masks,
            sparsify=sparsify,
            accumulate=accumulate,
            straight_through=straight_through,
            qat=qat,
            recompute=recompute,
            free_batch=free_batch,
            lora=lora,
            seed=seed,
            threads=threads,
            options=options,
            parallel=parallel,
            shard_states=shard_states,
            shard_gradients=shard_gradients,
        )
        super().__init__(specification)
        warn_of(self._hints)

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
        from onnxtrain.training.fitting import fit  # your own loop has no use for it

        return fit(
            self,
            data,
            y,
            validation=validation,
            sample_weight=sample_weight,
            target=target,
            epochs=epochs,
            batch_size=batch_size,
            schedule=schedule,
            metrics=metrics,
            shuffle=shuffle,
            callbacks=callbacks,
            progress=progress,
            checkpoint=checkpoint,
            checkpoint_every=checkpoint_every,
            keep=keep,
            save_best=save_best,
            resume=resume,
            change=change,
            run=run,
            prefetch=prefetch,
            augment=augment,
            ema=ema,
        )

    def __dir__(self) -> list[str]:
        names = set(super().__dir__()) - _INTERNALS
        return sorted(name for name in names if not name.startswith("_") or name.endswith("__"))
