"""Callbacks: what runs at the ends of steps and epochs; early stopping, history, progress, and what keeps logs."""

from __future__ import annotations

from onnxtrain.callbacks.base import Callback, CallbackList, TrainingState
from onnxtrain.callbacks.history import History
from onnxtrain.callbacks.loggers.csv_file import CsvLogger
from onnxtrain.callbacks.loggers.json_lines import JsonLinesLogger
from onnxtrain.callbacks.loggers.mlflow import MLflowLogger
from onnxtrain.callbacks.loggers.tensorboard import TensorBoardLogger
from onnxtrain.callbacks.loggers.wandb import WandbLogger
from onnxtrain.callbacks.progress import Progress
from onnxtrain.callbacks.watching import EarlyStopping, ReduceOnPlateau, SaveBest, Watch
from onnxtrain.public_names import public_names

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
