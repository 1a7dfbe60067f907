"""Learning-rate schedules: from the number of the step, counted from 0, to the learning rate of that step."""

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
