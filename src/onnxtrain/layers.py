"""``onnxtrain.layers``: the name under which users import what is in :mod:`onnxtrain.edit.layers`."""

from onnxtrain.edit.layers import *  # noqa: F403
from onnxtrain.edit.layers import __all__ as __all__
