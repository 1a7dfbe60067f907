"""Pruning: measures of sparsity, thresholds, masks, sparse files and the job that puts them together."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnxtrain.workarounds.lazy_sympy  # noqa: F401 - before any module here imports onnx-ir
from onnxtrain.lazy import lazy_names, public_names

if TYPE_CHECKING:
    from onnxtrain.pruning.prune import prune
    from onnxtrain.pruning.report import PruneResult
    from onnxtrain.pruning.sparse import save_sparse

__all__ = ["PruneResult", "prune", "save_sparse"]

# Lazily: the optimizers read the measures of this package, and the job imports the trainer.
__dir__ = public_names(__name__)
__getattr__ = lazy_names(
    __name__,
    {
        "PruneResult": "onnxtrain.pruning.report",
        "prune": "onnxtrain.pruning.prune",
        "save_sparse": "onnxtrain.pruning.sparse",
    },
)
