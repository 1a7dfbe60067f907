"""Optimizers as ONNX operators: schema, reference over NumPy arrays, body in standard operators.

Each optimizer is one module in ``rules/`` with its update rule and the class of its settings (:class:`Adam`), which
has the schema. The operator over arrays (:func:`adam`, the operator's name in lower case) is made of both. The rest of
the package finds optimizers by reflection; ``__init__.pyi`` lists them for type checkers.
"""

from __future__ import annotations

import onnxtrain.graph.upstream.lazy_sympy  # noqa: F401 - before any module here imports onnx-ir
from onnxtrain.errors._internal import public_names
from onnxtrain.operators.evaluation import emit
from onnxtrain.operators.nodes import infer_optimizer_types
from onnxtrain.operators.optimizer import Optimizer
from onnxtrain.operators.registry import OPTIMIZERS

_found = {name: entry.settings for name, entry in OPTIMIZERS.items()}
_found |= {name.lower(): entry.reference for name, entry in OPTIMIZERS.items()}
globals().update(_found)

__all__ = ["OPTIMIZERS", "Optimizer", "emit", "infer_optimizer_types", *_found]

__dir__ = public_names(__name__)
