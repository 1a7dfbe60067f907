"""``onnxtrain.schedules``: the name under which users import what is in :mod:`onnxtrain.training.schedules`."""

import sys

from onnxtrain.training import schedules
from onnxtrain.training.schedules import *  # noqa: F403 - for type checkers and editors

sys.modules[__name__] = schedules
