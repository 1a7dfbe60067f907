"""The options of ``prune``: the only list of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

from onnxtrain.errors import OptionError
from onnxtrain.training.config import Flag, option

if TYPE_CHECKING:
    from onnxtrain.data.opening import Source
    from onnxtrain.operators import Optimizer
    from onnxtrain.training.callbacks.progress import Display
    from onnxtrain.training.schedules import Schedule

Method = Literal["ssgd", "magnitude", "random"]
Structure = Literal["channels", "heads", "hidden"]
Allocation = Literal["uniform", "global", "flops"]
Storage = Literal["dense", "sparse"]


@dataclass(frozen=True, kw_only=True)
class PruneOptions:
    """The options of :func:`onnxtrain.prune` beside those of the trainer.

    The documentation of an option and its flag are in the metadata of its field. ``tools/option_docs.py`` writes the
    signature and the docstring of ``prune`` from them; the command line makes its flags of them.
    """

    validation: Source | float | None = option(
        None,
        "Data to measure on, or the fraction of ``data`` to hold out; by default accuracy is measured on the "
        "training data, which is optimistic.",
    )
    method: Method = option(
        "ssgd",
        '"ssgd", or the baselines "magnitude" and "random", which train without sparsity promotion.',
        flag=Flag(
            "ssgd trains with sparsity promotion; the baselines cut the smallest weights, or random ones.",
            group="Pruning",
        ),
    )
    sparsity: float | None = option(
        None,
        "The fraction of weights to remove, in [0, 1).",
        flag=Flag("The fraction of weights to remove, at least 0 and below 1.", group="Pruning", common=True),
    )
    structure: Structure | Sequence[Structure] | None = option(
        None,
        'Remove whole "channels" of convolutions, "heads" of attention or "hidden" units, or several kinds: the '
        "result is a smaller dense model that runs wherever it ran. ``speedup`` makes sure that it is faster.",
        flag=Flag(
            "Remove whole channels, attention heads or hidden units: a smaller dense model. May be repeated.",
            group="Pruning",
            kind=list[Structure] | None,
            common=True,
        ),
    )
    flops: float | None = option(
        None,
        "With ``structure``, instead of ``sparsity``: the fraction of multiply-adds to remove.",
        flag=Flag("With --structure, instead of --sparsity: the fraction of multiply-adds to remove.", group="Pruning"),
    )
    speedup: float | None = option(
        None,
        "With ``structure``, instead of ``sparsity``: how many times as fast the model shall run, measured on this "
        "machine with one example and one thread.",
        flag=Flag(
            "With --structure, instead of --sparsity: times as fast as before, measured here with one thread.",
            group="Pruning",
            common=True,
        ),
    )
    accuracy_drop: float | None = option(
        None,
        "The largest drop of the validation accuracy from its value before the first cut; a search that fine-tunes "
        "at each sparsity finds it. An alternative to ``sparsity``.",
        flag=Flag(
            "Instead of --sparsity: the validation accuracy to lose at most (0.01 is one point).",
            group="Pruning",
            common=True,
        ),
    )
    block: tuple[int, int] = option(
        (1, 1),
        "(outputs, inputs) of the blocks that are cut together, by their norm. A linear layer is a matrix "
        "[outputs, inputs] whichever way round the file stores it; the inputs of a convolution are the channels at "
        "each position of its kernel. (4, 1) are four outputs with one input.",
        flag=Flag(
            "Cut blocks of so many outputs and inputs of a layer: 4,1.  [default: 1,1]",
            group="Pruning",
            metavar="OUT,IN",
        ),
    )
    n_m: tuple[int, int] | None = option(
        None,
        "(n, m): of each m successive inputs of an output n remain, such as (2, 4); instead of ``sparsity``.",
        flag=Flag(
            "Keep n of each m successive inputs of an output: 2,4; instead of --sparsity.",
            group="Pruning",
            metavar="N,M",
        ),
    )
    allocation: Allocation = option(
        "global",
        '"global" ranks the weights of all tensors together, "uniform" cuts each tensor to the same sparsity, '
        '"flops" ranks them together and removes more where a weight costs more multiplications.',
        flag=Flag(
            "Give each tensor the same sparsity, rank all weights together, or remove more where a weight costs "
            "more multiplications.",
            group="Pruning",
        ),
    )
    optimizer: Optimizer | None = option(
        None,
        "Update rule of the training; by default SSGD with momentum, at a learning rate of 0.025, and from the "
        "start again at a third of it, up to three times, where a training diverges or loses what the model had "
        'learned. An ``Adam`` or ``Momentum`` gets ``sparsity=Sparsity()`` for "ssgd".',
    )
    fine_tune_optimizer: Optimizer | None = option(
        None, "Update rule of the fine-tuning; by default the training's without sparsity promotion, or Adam in stages."
    )
    tensors: str | Sequence[str] | None = option(
        None,
        "Glob patterns of the parameters to prune; by default the weights of linear layers, convolutions, "
        "recurrent layers and embeddings.",
        flag=Flag(
            "Parameters to prune. May be repeated.  [default: weights and embeddings]",
            group="Pruning",
            kind=list[str] | None,
        ),
    )
    epochs: int | None = option(
        None,
        "Epochs of the training; 0 cuts the model as given. With ``epochs``, ``fine_tune_epochs`` or ``rounds`` "
        "there is one stage.",
        flag=Flag(
            "Epochs of the training; 0 cuts the model as it is.  [default: chosen by data and sparsity, in stages]",
            group="Training",
            common=True,
        ),
    )
    fine_tune_epochs: int | None = option(
        None,
        "Epochs of the fine-tuning.",
        flag=Flag("Epochs of fine-tuning under the last mask.  [default: likewise]", group="Training", common=True),
    )
    rounds: int | None = option(
        None,
        "Number of cuts, spread evenly over the training; the last at its end. By default one after each epoch, "
        "with ``accuracy_drop`` one at the end.",
        flag=Flag("Number of cuts, spread over the training on a cubic schedule.  [default: epochs]", group="Pruning"),
    )
    fresh: bool = option(
        False,
        "Initialize the parameters randomly first.",
        flag=Flag("Initialize the weights anew before the training.", group="Pruning"),
    )
    batch_size: int | None = option(
        None,
        "Examples per step; by default 64, and 32 for fewer than 10,000 examples.",
        flag=Flag("Examples per step.  [default: 64, for fewer than 10,000 examples 32]", group="Training"),
    )
    schedule: str | Schedule | None = option(
        None,
        "Learning rates of the training, as in ``fit``; by default constant after a warm-up.",
        flag=Flag(
            "Learning rates of the training, as in fit.  [default: constant after a warm-up]",
            group="Training",
            kind=str | None,
        ),
    )
    fine_tune_schedule: str | Schedule | None = option(
        None,
        "Learning rates of the fine-tuning; by default a cosine after a warm-up.",
        flag=Flag(
            "Learning rates of the fine-tuning, as in fit.  [default: cosine after a warm-up]",
            group="Training",
            kind=str | None,
        ),
    )
    target: str | None = option(None, "Name of the target array.")
    storage: Storage = option(
        "dense",
        '"dense", with the zeros, or "sparse": ``sparse_initializer`` where that takes fewer bytes.',
        flag=Flag("Write zeros, or sparse_initializer where that takes fewer bytes.", group="Results"),
    )
    save: str | os.PathLike[str] | None = option(
        None, "File to write the model to; or use :meth:`~onnxtrain.plugins.pruning.report.PruneResult.save`."
    )
    report: str | os.PathLike[str] | None = option(None, "Folder to write the report to: text, JSON and PNG.")
    progress: Callable[[str], None] | Display | None = option(
        None,
        "Called with a line after every epoch and cut; a "
        ":class:`~onnxtrain.training.callbacks.progress.Display` shows the steps, too.",
    )

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Self:
        """Take the options among the arguments of a call."""
        return cls(**{name: arguments[name] for name in cls.__dataclass_fields__})


@dataclass(frozen=True, kw_only=True)
class Plan(PruneOptions):
    """The options of a pruning, with its update rules chosen."""

    optimizer: Optimizer
    fine_tune_optimizer: Optimizer
    seed: int
    slower: bool = True
    """Whether a training that does harm starts again at a lower rate."""

    def __post_init__(self) -> None:
        self._check_one_of("method", get_args(Method))
        for name, least in (("epochs", 0), ("fine_tune_epochs", 0), ("rounds", 1)):
            if (given := getattr(self, name)) is not None and given < least:
                raise OptionError(f"{name} is {given}; it needs a number of at least {least}.")
        if self.storage not in get_args(Storage):
            raise OptionError(f"storage is {self.storage!r}; it needs to be 'dense' or 'sparse'.")

    def _check_one_of(self, name: str, allowed: Sequence[str]) -> None:
        if getattr(self, name) not in allowed:
            listed = ", ".join(map(repr, allowed))
            raise OptionError(f"{name} is {getattr(self, name)!r}; it needs to be one of {listed}.")
