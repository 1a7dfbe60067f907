"""Callbacks, called at the ends of steps and epochs: early stopping, history, progress, loggers."""

from __future__ import annotations

from onnxtrain.errors._internal import public_names
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
from onnxtrain.training.callbacks.samples import Samples
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
    "Samples",
    "SaveBest",
    "TensorBoardLogger",
    "TrainingState",
    "WandbLogger",
    "Watch",
]

__dir__ = public_names(__name__)
