"""The training half of ONNX: train, fine-tune and prune ONNX models on stock ONNX Runtime.

Names are loaded when they are first used, so that importing the package costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from onnxtrain.deferred import defer_imports
from onnxtrain.version import __version__ as __version__

defer_imports()

if TYPE_CHECKING:
    from onnxtrain import backend, errors, examples, kernels, operators, pruning, testing
    from onnxtrain.autodiff import no_gradient, register_gradient, unregister_gradient
    from onnxtrain.lowering.lower import lower
    from onnxtrain.operators import SGD, SSGD, Adagrad, Adam, AdamW, Lion, Momentum, RMSprop
    from onnxtrain.operators.sparsity import Sparsity
    from onnxtrain.pruning.prune import prune
    from onnxtrain.runtime.native import custom_ops_library
    from onnxtrain.runtime.options import RuntimeOptions
    from onnxtrain.runtime.session import TrainingSession
    from onnxtrain.training import callbacks, losses, metrics, schedules
    from onnxtrain.training.gradient import gradient
    from onnxtrain.training.inspection import inspect
    from onnxtrain.training.trainer import Trainer
    from onnxtrain.training.training_model import training_model

_HOMES = {
    "Adagrad": "onnxtrain.operators",
    "Adam": "onnxtrain.operators",
    "AdamW": "onnxtrain.operators",
    "Momentum": "onnxtrain.operators",
    "Lion": "onnxtrain.operators",
    "RMSprop": "onnxtrain.operators",
    "SGD": "onnxtrain.operators",
    "SSGD": "onnxtrain.operators",
    "RuntimeOptions": "onnxtrain.runtime.options",
    "Sparsity": "onnxtrain.operators.sparsity",
    "Trainer": "onnxtrain.training.trainer",
    "TrainingSession": "onnxtrain.runtime.session",
    "custom_ops_library": "onnxtrain.runtime.native",
    "gradient": "onnxtrain.training.gradient",
    "inspect": "onnxtrain.training.inspection",
    "lower": "onnxtrain.lowering.lower",
    "no_gradient": "onnxtrain.autodiff",
    "prune": "onnxtrain.pruning.prune",
    "register_gradient": "onnxtrain.autodiff",
    "training_model": "onnxtrain.training.training_model",
    "unregister_gradient": "onnxtrain.autodiff",
}
_TOP = ("backend", "errors", "examples", "kernels", "operators", "pruning", "testing")
_OF_TRAINING = ("callbacks", "losses", "metrics", "schedules")
_MODULES = {name: f"onnxtrain.{name}" for name in _TOP} | {name: f"onnxtrain.training.{name}" for name in _OF_TRAINING}

__all__ = [
    "SGD",
    "SSGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Lion",
    "Momentum",
    "RMSprop",
    "RuntimeOptions",
    "Sparsity",
    "Trainer",
    "TrainingSession",
    "backend",
    "callbacks",
    "custom_ops_library",
    "errors",
    "examples",
    "gradient",
    "inspect",
    "kernels",
    "losses",
    "lower",
    "metrics",
    "no_gradient",
    "operators",
    "prune",
    "pruning",
    "register_gradient",
    "schedules",
    "testing",
    "training_model",
    "unregister_gradient",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    elif name in _MODULES:
        value = importlib.import_module(_MODULES[name])
    else:
        raise AttributeError(f"module 'onnxtrain' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
