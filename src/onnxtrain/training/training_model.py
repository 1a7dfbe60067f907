"""Write down the training of a model as the standard does."""

from __future__ import annotations

import os
from collections.abc import Sequence

import onnx

from onnxtrain.autodiff.options import Compute
from onnxtrain.config import TrainingConfig
from onnxtrain.losses.base import TargetKind
from onnxtrain.losses.loss_choice import LossLike
from onnxtrain.model_file.external import with_external_data
from onnxtrain.model_file.validity import refuses_invalid
from onnxtrain.operators.optimizer import Optimizer
from onnxtrain.spelling import checks_arguments
from onnxtrain.training.advice.hints import warn_of
from onnxtrain.training.preparation import prepare
from onnxtrain.training.working_copy.adaptation import Adaptation
from onnxtrain.training_info.build import build_training_model
from onnxtrain.weights.ema import EMA
from onnxtrain.weights.groups import Group


@checks_arguments
@refuses_invalid()
def training_model(
    model: str | os.PathLike[str] | onnx.ModelProto,
    *,
    loss: LossLike,
    optimizer: Optimizer | str,
    train: str | Sequence[str] | None = None,
    freeze: str | Sequence[str] | None = None,
    output: str | None = None,
    targets: TargetKind | None = None,
    batch_norm: str = "frozen",
    dropout: bool = False,
    seed: int = 0,
    untie: bool | str | Sequence[str] = False,
    clip_value: float | None = None,
    clip_norm: float | None = None,
    sparsify: str | Sequence[str] | None = None,
    accumulate: bool = False,
    straight_through: bool = False,
    qat: bool = False,
    recompute: str | Sequence[str] = (),
    lora: Adaptation | None = None,
    tie: bool | str | Sequence[str] = False,
    groups: Sequence[Group] = (),
    ema: float | EMA | None = None,
    state_dtype: str | None = None,
    compute: Compute = "float32",
    master_weights: bool = True,
    free_batch: bool = False,
) -> onnx.ModelProto:
    """Write down the training of a model as the standard does: a model with ``training_info``.

    The main graph is the model. The algorithm graph takes ``target`` and ``learning_rate``, and holds the loss,
    one Gradient node and one optimizer node; its initializers are the optimizer's states (``{parameter}/V``
    ...) and the update count ``T``. ``update_binding`` gives every parameter and state its next value, the
    initialization graph puts the states back. The output ``loss`` is returned by every step.

    Args:
        model: A path or a loaded model; below opset 18 it is upgraded.
        loss: See :class:`onnxtrain.Trainer`.
        optimizer: ``Adam(...)``, ``AdamW(...)`` or another, or its name, ``"adamw(lr=3e-4)"``.
        train: As all that is not described here, see :class:`onnxtrain.Trainer`.
        freeze: What not to train.
        ema: A moving average of the parameters: states ``{parameter}/average``.
        state_dtype: "bfloat16" for states of half the bytes: they are rounded by ``RoundStochastic`` of the domain
            ``onnxtrain``; "8bit" for a quarter: states and their scales, ``{parameter}/V_scale``, made by
            ``EncodeBlockwise``.
        compute: "bfloat16" for products with weights of factors rounded to it; likewise the metadata entry
            ``onnxtrain.compute``. Only sessions with native kernels run such a model.
        master_weights: Whether trained weights in bfloat16 are float32 there; ``False``: updates round them, by
            ``RoundStochastic``.
        groups: Parameters that are updated otherwise than the rest; each rule gets an optimizer node of its own.
        output: The output that the loss is built on.
        targets: "indices" or "values", where the loss takes both; by default indices.
        batch_norm: "frozen" or "train" ("sync" is the same here).
        dropout: Whether Dropout nodes drop.
        seed: Seed of the dropout masks, and of the rounding of states.
        untie: Which shared initializers to copy.
        tie: Which copies of initializers to train as one with their originals.
        clip_value: Clip gradients element by element.
        clip_norm: Clip gradients by their global norm.
        sparsify: Which parameters the optimizer makes sparse, where it does.
        accumulate: Write two entries: the first adds up the gradients of micro-batches, the second applies
            them.
        straight_through: Train through operators that round or quantize; see :func:`onnxtrain.gradient`. The
            Gradient node cannot say so: the training model's metadata entry ``onnxtrain.straight_through`` does.
        qat: Train a quantized model as it is quantized: weights in integers are trained as numbers that are rounded
            in every step, scales are learned, and integers and scales are saved
            ([quantization](docs/quantization.md)). Implies ``straight_through``.
        recompute: Glob patterns of names of nodes to compute again in the backward pass; likewise the entry
            ``onnxtrain.recompute``, a JSON list.
        free_batch: Free the batch size of a model that has a fixed one.
        lora: Adapters to train beside frozen weights; they are initializers of the main graph.

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
        seed=seed,
        untie=untie,
        tie=tie,
        clip_value=clip_value,
        clip_norm=clip_norm,
        sparsify=sparsify,
        accumulate=2 if accumulate else 1,  # any number of micro-batches makes the same model
        straight_through=straight_through,
        qat=qat,
        recompute=recompute,
        free_batch=free_batch,
        lora=lora,
    )
    file, objective = config.model, prepare(config)
    warn_of(objective.hints(config))
    return with_external_data(build_training_model(objective.recipe(config)), file.folder)
