"""Learning-rate schedules: from the number of the step, counted from 0, to the learning rate of that step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onnxtrain.lazy import lazy_names, public_names

if TYPE_CHECKING:
    from onnxtrain.training.schedules.choice import parse_schedule, resolve_schedule
    from onnxtrain.training.schedules.learning_rate import Schedule, check_rate
    from onnxtrain.training.schedules.shapes import (
        Constant,
        Cosine,
        Custom,
        Exponential,
        Linear,
        OneCycle,
        Polynomial,
        Step,
        WarmUp,
    )

__all__ = [
    "Constant",
    "Cosine",
    "Custom",
    "Exponential",
    "Linear",
    "OneCycle",
    "Polynomial",
    "Schedule",
    "Step",
    "WarmUp",
    "check_rate",
    "parse_schedule",
    "resolve_schedule",
]

__dir__ = public_names(__name__)
__getattr__ = lazy_names(
    __name__,
    {
        "check_rate": "onnxtrain.training.schedules.learning_rate",
        "Constant": "onnxtrain.training.schedules.shapes",
        "Cosine": "onnxtrain.training.schedules.shapes",
        "Custom": "onnxtrain.training.schedules.shapes",
        "Exponential": "onnxtrain.training.schedules.shapes",
        "Linear": "onnxtrain.training.schedules.shapes",
        "OneCycle": "onnxtrain.training.schedules.shapes",
        "parse_schedule": "onnxtrain.training.schedules.choice",
        "Polynomial": "onnxtrain.training.schedules.shapes",
        "resolve_schedule": "onnxtrain.training.schedules.choice",
        "Schedule": "onnxtrain.training.schedules.learning_rate",
        "Step": "onnxtrain.training.schedules.shapes",
        "WarmUp": "onnxtrain.training.schedules.shapes",
    },
)
