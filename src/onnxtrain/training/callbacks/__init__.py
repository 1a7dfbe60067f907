"""Callbacks, called at the ends of steps and epochs: early stopping, history, progress, loggers."""

from __future__ import annotations

from typing import Any, Final

from onnxtrain.errors._internal import public_names
from onnxtrain.errors.registries import ClassRegistry
from onnxtrain.training.callbacks.base import Callback, CallbackList, TrainingState
from onnxtrain.training.callbacks.history import History
from onnxtrain.training.callbacks.loggers import (
    CsvLogger,
    JsonLinesLogger,
    MLflowLogger,
    TensorBoardLogger,
    WandbLogger,
)
from onnxtrain.training.callbacks.progress import Progress
from onnxtrain.training.callbacks.watching import EarlyStopping, ReduceOnPlateau, SaveBest, Watch

__all__ = [
    "Callback",
    "CallbackList",
    "CsvLogger",
    "EarlyStopping",
    "History",
    "JsonLinesLogger",
    "MLflowLogger",
    "Progress",
    "ReduceOnPlateau",
    "SaveBest",
    "TensorBoardLogger",
    "TrainingState",
    "WandbLogger",
    "Watch",
]


CALLBACKS: Final[ClassRegistry[Callback]] = ClassRegistry("callback", Callback)
"""Callbacks of plugins."""

__dir__ = public_names(__name__, CALLBACKS.class_names)


def __getattr__(name: str) -> Any:
    return CALLBACKS.of_class(name, __name__)
