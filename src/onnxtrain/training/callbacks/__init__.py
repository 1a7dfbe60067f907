"""Callbacks: what runs at the ends of steps and epochs; early stopping, history, progress, and what keeps logs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onnxtrain.lazy import lazy_names, public_names

if TYPE_CHECKING:
    from onnxtrain.training.callbacks.base import Callback, CallbackList, TrainingState
    from onnxtrain.training.callbacks.history import History
    from onnxtrain.training.callbacks.loggers.csv_file import CsvLogger
    from onnxtrain.training.callbacks.loggers.json_lines import JsonLinesLogger
    from onnxtrain.training.callbacks.loggers.mlflow import MLflowLogger
    from onnxtrain.training.callbacks.loggers.tensorboard import TensorBoardLogger
    from onnxtrain.training.callbacks.loggers.wandb import WandbLogger
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

__dir__ = public_names(__name__)
__getattr__ = lazy_names(
    __name__,
    {
        "Callback": "onnxtrain.training.callbacks.base",
        "CallbackList": "onnxtrain.training.callbacks.base",
        "CsvLogger": "onnxtrain.training.callbacks.loggers.csv_file",
        "EarlyStopping": "onnxtrain.training.callbacks.watching",
        "History": "onnxtrain.training.callbacks.history",
        "JsonLinesLogger": "onnxtrain.training.callbacks.loggers.json_lines",
        "MLflowLogger": "onnxtrain.training.callbacks.loggers.mlflow",
        "Progress": "onnxtrain.training.callbacks.progress",
        "ReduceOnPlateau": "onnxtrain.training.callbacks.watching",
        "SaveBest": "onnxtrain.training.callbacks.watching",
        "TensorBoardLogger": "onnxtrain.training.callbacks.loggers.tensorboard",
        "TrainingState": "onnxtrain.training.callbacks.base",
        "WandbLogger": "onnxtrain.training.callbacks.loggers.wandb",
        "Watch": "onnxtrain.training.callbacks.watching",
    },
)
