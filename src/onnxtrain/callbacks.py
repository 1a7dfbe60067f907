"""``onnxtrain.callbacks``: the name under which users import what is in :mod:`onnxtrain.training.callbacks`."""

import sys

from onnxtrain.training import callbacks
from onnxtrain.training.callbacks import *  # noqa: F403 - for type checkers and editors

sys.modules[__name__] = callbacks
