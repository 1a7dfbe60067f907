"""Optimizers as ONNX operators: schema, reference over NumPy arrays, body in standard operators.

Each optimizer is one module with its schema, its update rule, the operator over arrays (:func:`adam`, the operator's
name in lower case) and the class of its settings (:class:`Adam`). The rest of the package finds them by reflection.
"""

from __future__ import annotations

import onnxtrain.graph.upstream.lazy_sympy  # noqa: F401 - before any module here imports onnx-ir
from onnxtrain.errors._internal import public_names
from onnxtrain.operators.adagrad import Adagrad, adagrad
from onnxtrain.operators.adam import Adam, adam
from onnxtrain.operators.adamw import AdamW, adamw
from onnxtrain.operators.body import emit
from onnxtrain.operators.lamb import LAMB, lamb
from onnxtrain.operators.lion import Lion, lion
from onnxtrain.operators.momentum import Momentum, momentum
from onnxtrain.operators.nodes import infer_optimizer_types
from onnxtrain.operators.optimizer import Optimizer
from onnxtrain.operators.registry import OPTIMIZERS
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

__dir__ = public_names(__name__)
