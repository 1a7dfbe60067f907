"""``onnxtrain.callbacks``: the name under which users import what is in :mod:`onnxtrain.training.callbacks`."""

from onnxtrain.training.callbacks import *  # noqa: F403
from onnxtrain.training.callbacks import __all__ as __all__
