"""``onnxtrain.metrics``: the names under which users import metrics."""

from onnxtrain.lazy import public_names
from onnxtrain.training.metrics import *  # noqa: F403
from onnxtrain.training.metrics import __all__ as _functions
from onnxtrain.training.metrics.error_rates import CharacterErrorRate as CharacterErrorRate
from onnxtrain.training.metrics.error_rates import WordErrorRate as WordErrorRate

__all__ = ["CharacterErrorRate", "WordErrorRate", *_functions]

__dir__ = public_names(__name__)
