"""Pruning: measures of sparsity, thresholds, masks, sparse files and the job that puts them together."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import onnxtrain.workarounds.lazy_sympy  # noqa: F401 - before any module here imports onnx-ir

if TYPE_CHECKING:
    from onnxtrain.pruning.prune import prune
    from onnxtrain.pruning.report import PruneResult
    from onnxtrain.pruning.sparse import save_sparse

_HOMES = {"PruneResult": "report", "prune": "prune", "save_sparse": "sparse"}

__all__ = ["PruneResult", "prune", "save_sparse"]


def __getattr__(name: str) -> Any:
    # Lazily: the optimizers read the measures of this package, and the job imports the trainer.
    if name not in _HOMES:
        raise AttributeError(f"module 'onnxtrain.pruning' has no attribute {name!r}")
    return getattr(importlib.import_module(f"onnxtrain.pruning.{_HOMES[name]}"), name)
