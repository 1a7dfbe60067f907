"""Callbacks: what runs at the ends of steps and epochs; early stopping, history, progress, and what keeps logs."""

from __future__ import annotations

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
