"""``onnxtrain.metrics``: the name under which users import what is in :mod:`onnxtrain.training.metrics`."""

import sys

from onnxtrain.training import metrics
from onnxtrain.training.metrics import *  # noqa: F403 - for type checkers and editors

sys.modules[__name__] = metrics
