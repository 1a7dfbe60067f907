"""Learning-rate schedules: functions from the index of a step, from 0, to its learning rate."""

from __future__ import annotations

from onnxtrain.errors._internal import public_names
from onnxtrain.training.schedules.choice import parse_schedule, resolve_schedule
from onnxtrain.training.schedules.shapes import (
    Constant,
    Cosine,
    Custom,
    Exponential,
    Linear,
    OneCycle,
    Polynomial,
    Schedule,
    Step,
    WarmUp,
    check_rate,
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
