"""Prune a model: train with sparsity promotion, cut, fine-tune, report."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Unpack

import onnx

from onnxtrain.data.opening import Source
from onnxtrain.errors import OptionError
from onnxtrain.losses.loss_choice import LossLike
from onnxtrain.model_file.saving import current_folder, reached_from, save_or_rescue
from onnxtrain.model_file.writing import check_writable, only_warns
from onnxtrain.operators import SSGD, Optimizer
from onnxtrain.operators.sparsity import Sparsity, block_of
from onnxtrain.plugins.pruning.job import Job, PruningWarning, WeightPlan
from onnxtrain.plugins.pruning.options import Allocation, Method, PruneOptions, Storage, Structure
from onnxtrain.plugins.pruning.recipe import choose_fine_tuning, choose_optimizer
from onnxtrain.plugins.pruning.report import PruneResult, check_report_folder
from onnxtrain.plugins.pruning.structures import StructurePlan, prune_structures
from onnxtrain.training.callbacks.progress import Display
from onnxtrain.training.config import Options
from onnxtrain.training.schedules import Schedule


def prune(
    model: str | os.PathLike[str] | onnx.ModelProto,
    data: Source,
    *,
    loss: LossLike,
    validation: Source | float | None = None,
    method: Method = "ssgd",
    sparsity: float | None = None,
    structure: Structure | Sequence[Structure] | None = None,
    flops: float | None = None,
    speedup: float | None = None,
    accuracy_drop: float | None = None,
    block: tuple[int, int] = (1, 1),
    n_m: tuple[int, int] | None = None,
    allocation: Allocation = "global",
    optimizer: Optimizer | None = None,
    fine_tune_optimizer: Optimizer | None = None,
    tensors: str | Sequence[str] | None = None,
    epochs: int | None = None,
    fine_tune_epochs: int | None = None,
    rounds: int | None = None,
    fresh: bool = False,
    batch_size: int | None = None,
    schedule: str | Schedule | None = None,
    fine_tune_schedule: str | Schedule | None = None,
    target: str | None = None,
    storage: Storage = "dense",
    save: str | os.PathLike[str] | None = None,
    report: str | os.PathLike[str] | None = None,
    progress: Callable[[str], None] | Display | None = None,
    **options: Unpack[Options],
) -> PruneResult:
    """Make a model sparse and keep its accuracy.

    1. Train with an update rule that promotes sparsity (``method="ssgd"``), or without (the baselines).
    2. Cut: set the weights of smallest magnitude to zero (``"random"``: random ones).
    3. Fine-tune the remaining weights with the plain rule under a fixed mask.

    Training makes several cuts, at sparsities that rise from the model's own by a cubic schedule, and continues under
    each mask. Without settings the number of examples and the sparsity decide on epochs, batches, cuts, and on stages
    for high sparsities: from a compression of 15 on, each stage multiplies it by at most three and ends with
    fine-tuning. A fine-tuning ends with the weights of its best epoch, or with those before it if these are better.

    Args:
        model: A path or a loaded model; never changed.
        data: Training data, as for :meth:`onnxtrain.Trainer.fit`.
        loss: The loss; see :class:`onnxtrain.Trainer`.
        validation: Data to measure on, or the fraction of ``data`` to hold out; by default accuracy is measured on the
            training data, which is optimistic.
        method: "ssgd", or the baselines "magnitude" and "random", which train without sparsity promotion.
        sparsity: The fraction of weights to remove, in [0, 1).
        structure: Remove whole "channels" of convolutions, "heads" of attention or "hidden" units, or several kinds:
            the result is a smaller dense model that runs wherever it ran. ``speedup`` makes sure that it is faster.
        flops: With ``structure``, instead of ``sparsity``: the fraction of multiply-adds to remove.
        speedup: With ``structure``, instead of ``sparsity``: how many times as fast the model shall run, measured on
            this machine with one example and one thread.
        accuracy_drop: The largest drop of the validation accuracy from its value before the first cut; a search that
            fine-tunes at each sparsity finds it. An alternative to ``sparsity``.
        block: (outputs, inputs) of the blocks that are cut together, by their norm. A linear layer is a matrix
            [outputs, inputs] whichever way round the file stores it; the inputs of a convolution are the channels at
            each position of its kernel. (4, 1) are four outputs with one input.
        n_m: (n, m): of each m successive inputs of an output n remain, such as (2, 4); instead of ``sparsity``.
        allocation: "global" ranks the weights of all tensors together, "uniform" cuts each tensor to the same sparsity,
            "flops" ranks them together and removes more where a weight costs more multiplications.
        optimizer: Update rule of the training; by default SSGD with momentum, at a learning rate of 0.025, and from the
            start again at a third of it, up to three times, where a training diverges or loses what the model had
            learned. An ``Adam`` or ``Momentum`` gets ``sparsity=Sparsity()`` for "ssgd".
        fine_tune_optimizer: Update rule of the fine-tuning; by default the training's without sparsity promotion, or
            Adam in stages.
        tensors: Glob patterns of the parameters to prune; by default the weights of linear layers, convolutions,
            recurrent layers and embeddings.
        epochs: Epochs of the training; 0 cuts the model as given. With ``epochs``, ``fine_tune_epochs`` or ``rounds``
            there is one stage.
        fine_tune_epochs: Epochs of the fine-tuning.
        rounds: Number of cuts, spread evenly over the training; the last at its end. By default one after each epoch,
            with ``accuracy_drop`` one at the end.
        fresh: Initialize the parameters randomly first.
        batch_size: Examples per step; by default 64, and 32 for fewer than 10,000 examples.
        schedule: Learning rates of the training, as in ``fit``; by default constant after a warm-up.
        fine_tune_schedule: Learning rates of the fine-tuning; by default a cosine after a warm-up.
        target: Name of the target array.
        storage: "dense", with the zeros, or "sparse": ``sparse_initializer`` where that takes fewer bytes.
        save: File to write the model to; or use :meth:`~onnxtrain.plugins.pruning.report.PruneResult.save`.
        report: Folder to write the report to: text, JSON and PNG.
        progress: Called with a line after every epoch and cut; a
            :class:`~onnxtrain.training.callbacks.progress.Display` shows the steps, too.
        **options: All other options of :class:`onnxtrain.Trainer`. ``seed`` also seeds the random cut, the
            initialization of ``fresh`` and the split of ``validation``.

    Returns:
        The pruned model and the report.

    Raises:
        OptionError: An argument is outside its range, or there is nothing to prune.
        ModelError: The model cannot be read, or an output cannot be written.
        DataError: The data does not fit the model.

    Warns:
        PruningWarning: A cut leaves nothing of a tensor, or the result has lost more than ten points of accuracy or
            twice its loss (with epochs or update rules of your own, four tenths, or four times).

    Example:
        >>> import numpy as np
        >>> import onnxtrain
        >>> y = np.arange(60) % 3
        >>> x = np.eye(4, dtype=np.float32)[y] + 0.1
        >>> model = onnxtrain.examples.mlp((4, 16, 3))
        >>> result = onnxtrain.prune(model, (x, y), loss="softmax_cross_entropy", sparsity=0.75)
        >>> result.non_zeros, result.size, result.accuracy_after
        (28, 112, 1.0)
    """
    block = block_of("prune", block)
    asked = PruneOptions.of(locals())
    rule = optimizer or choose_optimizer(sparsity)
    promoting = _promoting(rule, block) if method == "ssgd" else rule.plain()
    chosen = {**vars(asked), "optimizer": promoting, "seed": options.get("seed", 0), "slower": optimizer is None}
    plan: StructurePlan | WeightPlan
    if structure is not None:
        _refuse_with_structure(asked)
        chosen["structure"] = tuple(structure) if isinstance(structure, (list, tuple)) else (structure,)
        plan = StructurePlan(**chosen | {"fine_tune_optimizer": fine_tune_optimizer or rule.plain()})
    elif options.get("lora") is not None:
        raise OptionError(
            "lora= freezes the model's own weights, so that prune() would make the adapter sparse and not the model; "
            "prune without lora=, then train an adapter of the pruned file."
        )
    elif flops is not None or speedup is not None:
        name = "flops" if flops is not None else "speedup"
        raise OptionError(
            f"{name}= is a target for whole structures; give structure=, or sparsity= for single weights."
        )
    else:
        tuning = fine_tune_optimizer or (rule.plain() if optimizer else choose_fine_tuning(sparsity, rule))
        plan = WeightPlan(**chosen | {"n_m": _pair_of(n_m), "fine_tune_optimizer": tuning})
    if save is not None:
        check_writable(save)
    if report is not None:
        check_report_folder(report)
    start = current_folder()
    if isinstance(plan, StructurePlan):
        result = prune_structures(plan, model, data, loss, options)
    else:
        result = Job(plan, model, data, loss, options).run()
    try:
        if save is not None:
            save_or_rescue(lambda path: result.save(path, storage=storage), save, start)
    finally:
        if report is not None:
            with only_warns("The pruning has no report"):
                result.save_report(reached_from(start, report))
    if result.shortfall:
        warnings.warn(result.shortfall, PruningWarning, stacklevel=2)
    return result


def _refuse_with_structure(asked: PruneOptions) -> None:
    """Raise OptionError for options of single weights that come with structures."""
    own = ("tensors", "accuracy_drop", "rounds", "block", "n_m", "fresh", "storage")
    wrong = [name for name in own if getattr(asked, name) != getattr(PruneOptions, name)]
    if wrong:
        raise OptionError(
            f"{wrong[0]}= is an option for single weights, but structure= removes whole structures; "
            "leave out one of them."
        )


def _promoting(optimizer: Optimizer, block: tuple[int, int]) -> Optimizer:
    """Add sparsity promotion to an optimizer that lacks it, by the blocks of the cut."""
    modifier = optimizer.sparsity_modifier
    if isinstance(optimizer, SSGD) and optimizer.promotes_sparsity:
        return replace(optimizer, block=block)
    if hasattr(optimizer, "sparsity"):
        return replace(optimizer, **{"sparsity": replace(modifier or Sparsity(), block=block)})  # type: ignore[arg-type]
    raise OptionError(
        f"method='ssgd' promotes sparsity, which {type(optimizer).__name__} with these settings does not; "
        "give SSGD with another measure, Adam or Momentum."
    )


def _pair_of(n_m: object) -> tuple[int, int] | None:
    """Return n and m."""
    if n_m is None:
        return None
    pair = tuple(n_m) if isinstance(n_m, (tuple, list)) else ()
    if len(pair) != 2 or not all(isinstance(item, int) and not isinstance(item, bool) for item in pair):
        raise OptionError(f"n_m is {n_m!r}; it needs two integers, such as (2, 4): two of four weights remain.")
    return pair[0], pair[1]
