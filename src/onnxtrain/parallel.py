"""The communicators of :mod:`onnxtrain.distributed`, under a name that stays."""

from onnxtrain.distributed import *  # noqa: F403
from onnxtrain.distributed import __all__ as __all__
from onnxtrain.distributed import __dir__ as __dir__
