"""Predict with the model as it was before training: the reference of losses that compare rows."""

from __future__ import annotations

import dataclasses

import numpy as np

from onnxtrain.data.opening import open_dataset
from onnxtrain.plugins.text.comparison_data import Comparisons
from onnxtrain.runtime.states import new_states
from onnxtrain.training.config import TrainingConfig
from onnxtrain.training.inference.evaluation import Evaluator
from onnxtrain.training.prepare import prepare
from onnxtrain.training.working_copy.training_modes import Modes

_BATCH_SIZE = 8


def predict_reference(config: TrainingConfig, source: Comparisons) -> np.ndarray:
    """Predict what the loss compares with the model before training: the file's, with an adapter to continue."""
    lora = config.lora if getattr(config.lora, "adapter", None) is not None else None
    plain = dataclasses.replace(config, lora=lora, qat=False, train=None, freeze=("*",), groups=())
    objective = prepare(plain, modes=Modes(), copies=(), table=())
    dataset = open_dataset(source, objective.inputs, need_target=False, validate=False)
    evaluator = Evaluator(objective, new_states({}, config.runtime), config.runtime)
    (found,) = evaluator.predict(dataset, _BATCH_SIZE).values()
    return found
