"""``onnxtrain.losses``: the name under which users import what is in :mod:`onnxtrain.training.losses`."""

import sys

from onnxtrain.training import losses
from onnxtrain.training.losses import *  # noqa: F403 - for type checkers and editors

sys.modules[__name__] = losses
