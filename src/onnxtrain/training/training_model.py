"""Write a training as an ONNX model with ``training_info``."""

from __future__ import annotations

import os
from typing import Unpack

import onnx

from onnxtrain.errors.spelling import checks_arguments
from onnxtrain.losses.loss_choice import LossLike
from onnxtrain.lowering.training_info.build import build_training_model
from onnxtrain.model_file.external import with_external_data
from onnxtrain.model_file.validity import refuses_invalid
from onnxtrain.operators.optimizer import Optimizer
from onnxtrain.training.advice.hints import warn_of
from onnxtrain.training.config import ModelOptions, TrainingConfig
from onnxtrain.training.prepare import hints_of, prepare, with_checked_masks


@checks_arguments(keywords=ModelOptions.__annotations__)
@refuses_invalid()
def training_model(
    model: str | os.PathLike[str] | onnx.ModelProto,
    *,
    loss: LossLike,
    optimizer: Optimizer | str,
    accumulate: bool = False,
    **options: Unpack[ModelOptions],
) -> onnx.ModelProto:
    """Write a training as standard ONNX: a model with ``training_info``.

    The main graph is the model. The algorithm graph has the inputs ``target`` and ``learning_rate`` and contains the
    loss, one Gradient node and one optimizer node; its initializers are the optimizer states (``{parameter}/V`` ...)
    and the update count ``T``. ``update_binding`` maps every parameter and state to its next value; the initialization
    graph resets the states. Every step returns the output ``loss``.

    Args:
        model: A path or a loaded model; a model below opset 18 is upgraded to 18.
        loss: See :class:`onnxtrain.Trainer`.
        optimizer: ``Adam(...)``, ``AdamW(...)`` or another, or its name, ``"adamw(lr=3e-4)"``.
        accumulate: Write two entries: the first accumulates the gradients of micro-batches, the second applies them.
        **options: Other options of :class:`onnxtrain.Trainer`. ``ema`` becomes states ``{parameter}/average``; each
            rule of ``groups`` gets its own optimizer node; adapters of ``lora`` are initializers of the main graph;
            ``batch_norm="sync"`` means ``"train"`` here. Weights are zero where ``masks`` are false.
            ``precision``: ``RoundStochastic`` of the domain ``onnxtrain`` rounds states in bfloat16;
            ``EncodeBlockwise`` encodes states in 8 bits, with scales ``{parameter}/V_scale``. The Gradient node has no
            attributes for ``straight_through``, ``recompute`` and the compute type; metadata entries
            ``onnxtrain.straight_through``, ``onnxtrain.recompute`` (a JSON list) and ``onnxtrain.compute`` record
            them. A model with ``onnxtrain.compute`` needs native kernels.

    Returns:
        The training model: valid ONNX that can be saved, sent, lowered and resumed; it contains all its data.

    Raises:
        ModelError: The model cannot be read.
        OptionError: An argument has a value that is not accepted; there is nothing to train.

    Warns:
        TrainingHint: Training differs from the likely intent of the caller.
    """
    config = TrainingConfig.of(
        model,
        loss,
        optimizer,
        accumulate=2 if accumulate else 1,  # the model does not depend on the number of micro-batches
        **options,
    )
    file, objective = config.model, prepare(config)
    config = with_checked_masks(config, objective)
    warn_of(hints_of(objective, config))
    return with_external_data(build_training_model(objective.step_spec(config)), file.folder)
