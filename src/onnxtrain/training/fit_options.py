"""The options of one call of ``fit``: the only list of them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from onnxtrain.errors import OptionError
from onnxtrain.training.config import Flag, option

if TYPE_CHECKING:
    from onnxtrain.data.naming import TargetNames
    from onnxtrain.data.opening import Source
    from onnxtrain.data.pipeline import Augment
    from onnxtrain.losses.heads import Metrics
    from onnxtrain.training.callbacks.base import Callback
    from onnxtrain.training.callbacks.progress import ProgressLike
    from onnxtrain.training.run_folder import RunFolder
    from onnxtrain.training.schedules import Schedule


@dataclass(frozen=True, kw_only=True)
class FitOptions:
    """The options of one call of :meth:`onnxtrain.Trainer.fit`.

    The documentation of an option and its flag are in the metadata of its field. ``tools/option_docs.py`` writes the
    signature and the docstring of ``fit`` from them; the command line makes its flags of them. A flag names its
    ``kind`` where it differs from the option's type, or where that is imported for type checkers alone.

    Raises:
        OptionError: A field has a value that it cannot have.
    """

    validation: Source | float = option(
        None,
        "Data to evaluate on after every epoch, which may be (inputs, targets, weights), or the fraction of "
        "``data`` to hold out: ``0.2``; without ``shuffle`` the last examples. Several sets are a mapping from name to "
        "data; their results are ``val_NAME_loss`` and so on.",
        flag=Flag(
            "Data to evaluate on, or the fraction to hold out: 0.1.",
            group="Data",
            kind=str | None,
            metavar="PATH",
            common=True,
        ),
    )
    sample_weight: Any = option(
        None,
        "One weight per example [N], at least 0, or the name of the array or column of ``data`` that has them. The "
        "loss is the mean over the examples of weight times loss, as in Keras; so weights of another mean are a "
        "learning rate of another size. The validation loss is weighted where its examples have weights: their "
        "own, those of the fraction that is held out, or the column of that name; metrics count all alike.",
        flag=Flag(
            "Weight of each example in the loss, 0 or more: a column or array of the data, or a .npy or text file "
            "with one number per example.",
            group="Data",
            kind=str | None,
            metavar="COLUMN",
        ),
    )
    target: TargetNames | None = option(
        None,
        "Name of the target: the array, where several are left beside the inputs, or the column of a table. Several "
        'columns, ``"width,height"`` or a list, are one target [N, columns]; a mapping has those of each output.',
        flag=Flag(
            "Name of the target: the array, where several are left, or the columns, as in 'width,height'.",
            group="Data",
            kind=str | None,
            metavar="NAME",
            common=True,
        ),
    )
    epochs: int = option(
        1,
        "How often to go through the data.",
        flag=Flag("Passes through the data.", group="Training", common=True),
    )
    steps_per_epoch: int | None = option(
        None,
        "Steps of an epoch; by default the batches of the data. The next epoch goes on where it ended, so that an "
        "iterator may be endless; data that end begin again.",
        flag=Flag("Steps of an epoch.  [default: the batches of the data]", group="Training", metavar="STEPS"),
    )
    batch_size: int = option(
        32,
        "Examples per step (split into micro-batches where the trainer accumulates). A model of a fixed batch size "
        "has its own, times the micro-batches of the trainer; a hint says so.",
        flag=Flag("Examples per step.", group="Training", common=True),
    )
    schedule: str | Schedule | None = option(
        None,
        'Learning rate by step: ``"cosine"``, ``"warmup(100)+linear"``, ``"step(30, 0.1)"`` ..., an object of '
        ":mod:`onnxtrain.training.schedules`, or a function; constant by default. A text starts from the "
        "trainer's learning rate.",
        flag=Flag(
            "Learning rate by step: constant, linear or cosine. Also 'step(30 epochs, 0.1)' and exponential(0.99); "
            "each with 'warmup(100)+' in front.",
            group="Training",
            kind=str | None,
            common=True,
        ),
    )
    metrics: Metrics = option(
        (),
        'What to measure on the validation data: names (``"accuracy,f1"``, or a list) or functions of (y_true, '
        "y_pred), which see all data at once; by output where several have losses. Without validation data they "
        "measure the training batches, each before its step.",
        flag=Flag(
            "Metrics to measure, such as accuracy,f1. Also auc, top_k(5), r2 and others, or a loss by its name.",
            group="Data",
            kind=list[str] | None,
            metavar="NAME",
            common=True,
        ),
    )
    shuffle: bool = option(
        True,
        "Whether to take the examples in a new order every epoch (by the trainer's seed).",
        flag=Flag("Shuffle the examples every epoch.", group="Training"),
    )
    callbacks: Sequence[Callback] = option((), "Called at the ends of steps and epochs.")
    progress: ProgressLike = option(
        "auto",
        "Shows loss, metrics, examples per second and time left: a table in a notebook, a bar in a terminal, else "
        'a line per epoch on the standard error; ``"notebook"``, ``"bar"`` or ``"lines"`` to say which, ``False`` '
        "for nothing.",
    )
    checkpoint: str | os.PathLike[str] | None = option(
        None,
        "Folder of checkpoints; none by default.",
        flag=Flag(
            "Write checkpoints to this folder.", group="Checkpoints", kind=str | None, metavar="FOLDER", common=True
        ),
    )
    checkpoint_every: int | None = option(
        None,
        "Steps between checkpoints; by default one per epoch.",
        flag=Flag("Steps between checkpoints.  [default: an epoch]", group="Checkpoints", metavar="STEPS"),
    )
    keep: int = option(
        3, "How many checkpoints to keep.", flag=Flag("Number of checkpoints to keep.", group="Checkpoints")
    )
    save_best: str | None = option(
        None,
        'A metric such as ``"val_accuracy"``: the model of its best epoch is in ``best.onnx`` in the folder of the '
        "checkpoints; with ``lora`` its adapter in ``best.onnx_adapter``.",
        flag=Flag(
            "Keep the best epoch's model by this metric, val_accuracy, as best.onnx there, or with --lora its "
            "adapter as best.onnx_adapter.",
            group="Checkpoints",
            metavar="METRIC",
        ),
    )
    resume: bool | str | os.PathLike[str] = option(
        False,
        "Go on from the newest checkpoint of the folder, or from the one of this path, bit for bit as if never "
        "stopped. Everything that changes numbers must be as it was: settings, schedule, the model, and the data, "
        "of which hashes are compared. (Of a function only its name is, and of an iterable of batches nothing.) "
        "More epochs are welcome where the schedule does not end with them.",
        flag=Flag(
            "Continue from the newest checkpoint, bit for bit as if never stopped.", group="Checkpoints", common=True
        ),
    )
    change: str | Sequence[str] = option(
        (),
        "Names of what may differ from the checkpoint all the same, as a list or separated by commas, such as "
        '``"epochs,learning_rate"``. The training goes on at its step with the new settings: a schedule is '
        "followed as if it had been this one from the first step.",
        flag=Flag(
            "Settings that may differ from the checkpoint with --resume: epochs,learning_rate. May be repeated.",
            group="Checkpoints",
            kind=list[str] | None,
            metavar="NAMES",
        ),
    )
    run: str | os.PathLike[str] | RunFolder | None = option(
        None,
        "Folder for ``metrics.csv``, ``curves.svg`` and ``report.html``: curves, mistakes or residuals on the "
        "validation data (the training data where there are none), parameters, gradients, sparsity.",
    )
    prefetch: bool = option(
        True,
        "Whether the next batch is prepared in a thread while a step runs, where that takes time; results are the "
        "same. An iterable that only the main thread may read needs ``False``.",
    )
    augment: Augment | None = option(
        None,
        "A function ``augment(inputs, rng)`` that changes the inputs of training batches: the array of the only "
        "input [N, ...], or a dictionary of several, and a ``numpy.random.Generator`` that follows from the seed, "
        "the epoch and the batch alone. It returns inputs of the same types and shapes. "
        "``augment(inputs, targets, rng)`` returns both. A checkpoint compares its name.",
    )
    ema: bool | None = option(
        None,
        "Whether validation measures the moving averages of the weights (``Trainer(ema=...)``), which "
        "``save_best`` then writes; by default where the trainer keeps them. Early stopping puts averages and "
        "weights back.",
    )
    cache_features: bool = option(
        False,
        "Whether to compute what the frozen layers before the first trained one give once, for all examples, and "
        "to run only the layers behind them in every step ([transfer learning](docs/transfer_learning.md)). Losses "
        "are the same to rounding; memory has to hold the features of all examples, of which :attr:`hints` says "
        "the size.",
        flag=Flag("Compute the frozen layers before the first trained one once, not in every epoch.", group="Training"),
    )

    def __post_init__(self) -> None:
        for name, value in (("epochs", self.epochs), ("steps_per_epoch", self.steps_per_epoch)):
            if value is not None and value < 1:
                raise OptionError(f"{name} is {value}; it needs a number of at least 1.")
        if isinstance(self.steps_per_epoch, float):
            raise OptionError(f"steps_per_epoch is {self.steps_per_epoch}; it needs a whole number of at least 1.")

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Self:
        """Take the options among the arguments of a call."""
        return cls(**{name: arguments[name] for name in cls.__dataclass_fields__})
