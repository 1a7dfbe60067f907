"""Values for loggers: metrics under names with a slash, settings, and the error for a missing package."""

from __future__ import annotations

import importlib.util
from typing import Any

from onnxtrain.callbacks.base import TrainingState
from onnxtrain.errors import OptionError
from onnxtrain.renamed import VALIDATION
from onnxtrain.training.description import describe_settings

_LEFT_OUT = ("parameters", "sparsify")
"""Settings that are as long as the model."""


def needs(package: str, logger: str) -> None:
    """Refuse to make a logger whose package is not installed.

    Raises:
        OptionError: It is not.
    """
    if importlib.util.find_spec(package) is None:
        raise OptionError(f"{logger} needs the package {package}; install it: pip install 'onnxtrain[{package}]'.")


def epoch_values(state: TrainingState) -> dict[str, float]:
    """The values of an epoch, in groups: ``training/loss``, ``training/learning_rate``, ``validation/accuracy``."""
    found = {
        "training/loss": state.loss,
        "training/learning_rate": state.rate_of_last_step,
        "training/epoch": state.epoch,
    }
    for name, value in state.metrics.items():
        start, _, rest = name.partition(VALIDATION)
        found[f"validation/{rest}" if rest and not start else f"training/{name}"] = value
    return {name: float(value) for name, value in found.items()}


def settings(state: TrainingState) -> dict[str, Any]:
    """Return the settings of the training under flat names: ``optimizer``, ``optimizer.beta``, ``batch_size``."""
    found: dict[str, Any] = {"epochs": state.epochs, "batch_size": state.batch_size}
    if state.trainer is None:
        return found
    trainer = state.trainer
    found["learning_rate"] = trainer.learning_rate
    found["model"] = None if trainer._file.path is None else str(trainer._file.path)
    for name, value in describe_settings(trainer.config, trainer._objective).items():
        if name == "attributes" and isinstance(value, dict):
            found |= {f"optimizer.{attribute}": setting for attribute, setting in value.items()}
        elif name not in _LEFT_OUT:
            found[name] = value
    return {name: value for name, value in found.items() if value is not None}
