"""Write down the training of a model as the standard does."""

from __future__ import annotations

import os
from collections.abc import Sequence

import onnx

from onnxtrain.autodiff.options import GradientOptions
from onnxtrain.errors import OptionError
from onnxtrain.model.file import ModelFile
from onnxtrain.model.validity import refuses_invalid
from onnxtrain.model.whole import with_external_data
from onnxtrain.operators.optimizer import Optimizer
from onnxtrain.training.hints import warn_of
from onnxtrain.training.loss_choice import LossLike
from onnxtrain.training.subject import Modes, prepare
from onnxtrain.training.ties import choose_copies
from onnxtrain.training.untie import untied
from onnxtrain.training_info.build import build_training_model
from onnxtrain.training_info.recipe import Clipping


@refuses_invalid()
def training_model(
    model: str | os.PathLike[str] | onnx.ModelProto,
    *,
    loss: LossLike,
    optimizer: Optimizer,
    train: str | Sequence[str] | None = None,
    freeze: str | Sequence[str] | None = None,
    output: str | None = None,
    targets: str | None = None,
    batch_norm: str = "frozen",
    dropout: bool = False,
    seed: int = 0,
    untie: bool | str | Sequence[str] = False,
    clip_value: float | None = None,
    clip_norm: float | None = None,
    accumulate: bool = False,
    straight_through: bool = False,
    recompute: str | Sequence[str] = (),
    tie: bool | str | Sequence[str] = False,
) -> onnx.ModelProto:
    """Write down the training of a model as the standard does: a model with ``training_info``.

    The main graph is the model. The algorithm graph takes ``target`` and ``learning_rate``, and holds the loss,
    one Gradient node and one optimizer node; its initializers are the optimizer's states (``{parameter}/V``
    ...) and the update count ``T``. ``update_binding`` gives every parameter and state its next value, the
    initialization graph puts the states back. The output ``loss`` is returned by every step.

    Args:
        model: A path or a loaded model; below opset 18 it is upgraded.
        loss: See :class:`onnxtrain.Trainer`.
        optimizer: ``Adagrad(...)``, ``Adam(...)``, ``Momentum(...)`` or ``SSGD(...)``.
        train: Glob patterns of the initializers to train.
        freeze: Glob patterns of those to keep.
        output: The output that the loss is built on.
        targets: "indices" or "values", where the loss takes both; by default indices.
        batch_norm: "frozen" or "train".
        dropout: Whether Dropout nodes drop.
        seed: Seed of the dropout masks.
        untie: Which shared initializers to copy.
        clip_value: Clip gradients element by element.
        clip_norm: Clip gradients by their global norm.
        accumulate: Write two entries: the first adds up the gradients of micro-batches, the second applies
            them.
        straight_through: Train through operators that round or quantize; see :func:`onnxtrain.gradient`. The
            Gradient node cannot say so: the training model's metadata entry ``onnxtrain.straight_through`` does.
        recompute: Glob patterns of names of nodes to compute again in the backward pass; likewise the entry
            ``onnxtrain.recompute``, a JSON list.
        tie: Which copies of initializers to train as one with their originals.

    Returns:
        The training model: valid ONNX that can be saved, sent, lowered and resumed; it holds all its data.

    Raises:
        ModelError: The model cannot be read.
        OptionError: An argument has a value that it cannot have; there is nothing to train.

    Warns:
        TrainingHint: Training does something else than its caller may expect.
    """
    if targets not in (None, "indices", "values"):
        raise OptionError(f"targets is {targets!r}; it is 'indices' or 'values'.")
    file = untied(ModelFile.load(model), untie)
    subject = prepare(
        file,
        loss,
        output=output,
        target_kind=targets,  # type: ignore[arg-type]
        modes=Modes(batch_norm, dropout, seed),
        train=train,
        freeze=freeze,
        options=GradientOptions.of(straight_through, recompute),
        copies=choose_copies(file, tie),
    )
    warn_of(subject.hints(file), stacklevel=3)  # the decorator is one of them
    recipe = subject.recipe(optimizer, Clipping(clip_value, clip_norm), accumulate=accumulate)
    return with_external_data(build_training_model(recipe), file.folder)
