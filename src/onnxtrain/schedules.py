"""``onnxtrain.schedules``: the name under which users import what is in :mod:`onnxtrain.training.schedules`."""

from onnxtrain.training.schedules import *  # noqa: F403
from onnxtrain.training.schedules import __all__ as __all__
