"""``onnxtrain.losses``: the name under which users import what is in :mod:`onnxtrain.training.losses`."""

from onnxtrain.training.losses import *  # noqa: F403
from onnxtrain.training.losses import __all__ as __all__
