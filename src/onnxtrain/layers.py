"""``onnxtrain.layers``: the name under which users import what is in :mod:`onnxtrain.edit.layers`."""

import sys

from onnxtrain.edit import layers
from onnxtrain.edit.layers import *  # noqa: F403 - for type checkers and editors

sys.modules[__name__] = layers
