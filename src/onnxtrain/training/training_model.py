"""Write the training of a model in the standard's form."""

from __future__ import annotations

import os
from typing import Unpack

import onnx

from onnxtrain.config import ModelOptions, TrainingConfig, with_new_names
from onnxtrain.losses.loss_choice import LossLike
from onnxtrain.model_file.external import with_external_data
from onnxtrain.model_file.validity import refuses_invalid
from onnxtrain.operators.optimizer import Optimizer
from onnxtrain.prepare import hints_of, prepare
from onnxtrain.spelling import checks_arguments
from onnxtrain.training.advice.hints import warn_of
from onnxtrain.training_info.build import build_training_model


@checks_arguments(keywords=ModelOptions.__annotations__, convert=with_new_names)
@refuses_invalid()
def training_model(
    model: str | os.PathLike[str] | onnx.ModelProto,
    *,
    loss: LossLike,
    optimizer: Optimizer | str,
    accumulate: bool = False,
    **options: Unpack[ModelOptions],
) -> onnx.ModelProto:
    """Write the training of a model in the standard's form: a model with ``training_info``.

    The main graph is the model. The algorithm graph takes ``target`` and ``learning_rate``, and holds the loss,
    one Gradient node and one optimizer node; its initializers are the optimizer's states (``{parameter}/V``
    ...) and the update count ``T``. ``update_binding`` gives every parameter and state its next value, the
    initialization graph puts the states back. The output ``loss`` is returned by every step.

    Args:
        model: A path or a loaded model; below opset 18 it is upgraded.
        loss: See :class:`onnxtrain.Trainer`.
        optimizer: ``Adam(...)``, ``AdamW(...)`` or another, or its name, ``"adamw(lr=3e-4)"``.
        accumulate: Write two entries: the first accumulates the gradients of micro-batches, the second applies them.
        **options: Other options of :class:`onnxtrain.Trainer`. ``ema`` becomes states ``{parameter}/average``; each
            rule of ``groups`` gets an optimizer node of its own; adapters of ``lora`` are initializers of the main
            graph; ``batch_norm="sync"`` is ``"train"`` here.
            ``precision``: states in bfloat16 are rounded by ``RoundStochastic`` of the domain ``onnxtrain``; states in
            8 bits have scales, ``{parameter}/V_scale``, made by ``EncodeBlockwise``. The Gradient node cannot record
            ``straight_through``, ``recompute`` and the type of computation: metadata entries
            ``onnxtrain.straight_through``, ``onnxtrain.recompute`` (a JSON list) and ``onnxtrain.compute`` do. Only
            sessions with native kernels run a model with the last.

    Returns:
        The training model: valid ONNX that can be saved, sent, lowered and resumed; it holds all its data.

    Raises:
        ModelError: The model cannot be read.
        OptionError: An argument has a value that it cannot have; there is nothing to train.

    Warns:
        TrainingHint: Training does something else than its caller may expect.
    """
    config = TrainingConfig.of(
        model,
        loss,
        optimizer,
        accumulate=2 if accumulate else 1,  # any number of micro-batches makes the same model
        **options,
    )
    file, objective = config.model, prepare(config)
    warn_of(hints_of(objective, config))
    return with_external_data(build_training_model(objective.step_spec(config)), file.folder)
