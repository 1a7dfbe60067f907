"""Optimizers as ONNX operators: schema, reference over NumPy arrays, body in standard operators.

Each has a module of its own, with its schema, its update rule, the operator over arrays (:func:`adam`, under the
operator's name in lower case) and the class of its settings (:class:`Adam`). Everything else finds them there.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

import onnxtrain.workarounds.lazy_sympy  # noqa: F401 - before any module here imports onnx-ir
from onnxtrain.operators.body import emit
from onnxtrain.operators.nodes import infer_optimizer_types
from onnxtrain.operators.optimizer import Optimizer
from onnxtrain.operators.registry import OPTIMIZERS

if TYPE_CHECKING:  # below, they are found by their names
    from onnxtrain.operators.adagrad import Adagrad, adagrad
    from onnxtrain.operators.adam import Adam, adam
    from onnxtrain.operators.adamw import AdamW, adamw
    from onnxtrain.operators.lamb import LAMB, lamb
    from onnxtrain.operators.lion import Lion, lion
    from onnxtrain.operators.momentum import Momentum, momentum
    from onnxtrain.operators.rmsprop import RMSprop, rmsprop
    from onnxtrain.operators.sgd import SGD, sgd
    from onnxtrain.operators.ssgd import SSGD, ssgd

__all__ = [
    "LAMB",
    "OPTIMIZERS",
    "SGD",
    "SSGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Lion",
    "Momentum",
    "Optimizer",
    "RMSprop",
    "adagrad",
    "adam",
    "adamw",
    "emit",
    "infer_optimizer_types",
    "lamb",
    "lion",
    "momentum",
    "rmsprop",
    "sgd",
    "ssgd",
]


class _Package(ModuleType):
    """Binds the operator over arrays, instead of the module that has it, to the name of both."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        entry = OPTIMIZERS.read(value) if isinstance(value, ModuleType) else None
        if entry is not None:
            super().__setattr__(name, entry.reference)
            super().__setattr__(entry.schema.name, entry.settings)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name.lower() in OPTIMIZERS.files:
        importlib.import_module(f"{__name__}.{name.lower()}")
        if name in globals():
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
