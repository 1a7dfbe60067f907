"""``onnxtrain.metrics``: the name under which users import what is in :mod:`onnxtrain.training.metrics`."""

from onnxtrain.training.metrics import *  # noqa: F403
from onnxtrain.training.metrics import __all__ as __all__
