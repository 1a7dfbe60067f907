"""Evaluate and predict with a model in inference mode: forward only, so that no operator needs a gradient."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import onnx

from onnxtrain.config import TrainingConfig
from onnxtrain.data import Dataset, open_dataset
from onnxtrain.data.conversion import kind_of
from onnxtrain.data.data_names import read_names
from onnxtrain.data.labels import learn_labels, no_labels
from onnxtrain.errors import DataError
from onnxtrain.ir.shapes import infer_shapes
from onnxtrain.losses.heads import Metrics, Targets
from onnxtrain.losses.loss_choice import LossLike
from onnxtrain.model_file.file import ModelFile
from onnxtrain.model_file.validity import refuses_invalid
from onnxtrain.runtime.device_states import new_states
from onnxtrain.runtime.options import RuntimeOptions
from onnxtrain.spelling import checks_arguments
from onnxtrain.training.data_adapter import open_with_targets
from onnxtrain.training.inference.evaluation import Evaluator
from onnxtrain.training.objective import of_model
from onnxtrain.training.preparation import prepare
from onnxtrain.training.working_copy.kv_cache import leave_out_pasts
from onnxtrain.training.working_copy.training_modes import set_inference


@checks_arguments
@refuses_invalid()
def evaluate(
    model: str | os.PathLike[str] | onnx.ModelProto,
    data: Any,
    *,
    loss: LossLike,
    target: str | None = None,
    metrics: Metrics = (),
    batch_size: int = 256,
    output: str | None = None,
    options: RuntimeOptions | None = None,
) -> dict[str, Any]:
    """Loss and metrics of a model on data; what :meth:`onnxtrain.Trainer.evaluate` measures, without a trainer.

    Args:
        model: A path or a loaded model.
        data: Data in any form that :func:`onnxtrain.data.open_dataset` takes.
        loss: See :class:`onnxtrain.Trainer`.
        target: Name of the target in a file with several arrays left.
        metrics: Names (``"accuracy,f1"``, or a list) or functions of (y_true, y_pred), which see all data at once; by
            output where several have losses.
        batch_size: Examples per batch.
        output: The output that the loss is built on.
        options: Threads and providers.

    Returns:
        ``loss`` and every metric of all examples; ``confusion_matrix`` is an array.

    Raises:
        ModelError: The model cannot be read.
        DataError: The data does not fit the model.
        OptionError: An unknown loss, metric or output.
    """
    config = TrainingConfig.of(model, loss, output=output, options=options)
    objective = prepare(config, table=())
    names = read_names(config.model)
    labels, inputs = names.labels, names.specs(objective.inputs)

    def adapted(dataset: Dataset, targets: Targets, name: str | None) -> Dataset:
        found = dataset.targets if name is None else None
        if labels is None and found is not None and kind_of(found.dtype) == "string" and targets.take_labels:
            raise DataError(no_labels(learn_labels(found, None), targets.classes))
        return dataset.adapting(lambda array: targets.adapt(array, labels), name)

    wanted = objective.targets is not None
    if wanted:
        dataset, forms = open_with_targets(objective, data, inputs=inputs, target=target, adapted=adapted)
        objective = objective.with_form(forms)
        dataset = objective.expected(dataset)
    else:
        dataset = open_dataset(data, inputs, target=target, need_target=False, validate=False)
    objective.validate(dataset, labels=wanted)
    options = config.options
    return Evaluator(objective, new_states({}, options), options).evaluate(dataset, batch_size, metrics)


@checks_arguments
@refuses_invalid()
def predict(
    model: str | os.PathLike[str] | onnx.ModelProto,
    data: Any,
    *,
    target: str | None = None,
    batch_size: int = 256,
    options: RuntimeOptions | None = None,
) -> np.ndarray | dict[str, np.ndarray]:
    """The outputs of a model for data; what :meth:`onnxtrain.Trainer.predict` computes, without trainer and loss.

    Args:
        model: A path or a loaded model.
        data: Inputs in any form that :func:`onnxtrain.data.open_dataset` takes; targets are not needed.
        target: A column of a table that is not one of the inputs.
        batch_size: Examples per batch.
        options: Threads and providers.

    Returns:
        One array per tensor output by name, or the array itself where the model has one output.

    Raises:
        ModelError: The model cannot be read.
        DataError: The data does not fit the model.

    Example:
        >>> import onnxtrain
        >>> onnxtrain.predict(onnxtrain.examples.mlp((4, 3)), np.zeros((2, 4))).shape
        (2, 3)
    """
    arrays = outputs(model, data, target=target, batch_size=batch_size, options=options)
    return next(iter(arrays.values())) if len(arrays) == 1 else arrays


@refuses_invalid()
def outputs(
    model: str | os.PathLike[str] | onnx.ModelProto,
    data: Any,
    *,
    target: str | None = None,
    batch_size: int = 256,
    options: RuntimeOptions | None = None,
) -> dict[str, np.ndarray]:
    """What :func:`predict` returns, by name also where the model has one output."""
    file = ModelFile.load(model)
    working = file.training_model()
    leave_out_pasts(working)
    infer_shapes(working)
    set_inference(working)
    objective = of_model(working)
    inputs = read_names(file).specs(objective.inputs)
    dataset = open_dataset(data, inputs, target=target, need_target=False)
    options = options or RuntimeOptions()
    return Evaluator(objective, new_states({}, options), options).predict(dataset, batch_size)
