"""Callbacks: what runs at the ends of steps and epochs; early stopping, history, progress, and what keeps logs."""

from __future__ import annotations

from onnxtrain.training.callback import Callback, CallbackList, TrainingState
from onnxtrain.training.history import History
from onnxtrain.training.loggers.csv_file import CsvLogger
from onnxtrain.training.loggers.json_lines import JsonLinesLogger
from onnxtrain.training.loggers.mlflow import MLflowLogger
from onnxtrain.training.loggers.tensorboard import TensorBoardLogger
from onnxtrain.training.loggers.wandb import WandbLogger
from onnxtrain.training.progress import Progress
from onnxtrain.training.watching import EarlyStopping, ReduceOnPlateau, SaveBest, Watch

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
