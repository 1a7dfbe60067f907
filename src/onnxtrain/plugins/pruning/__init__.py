"""Pruning: train with sparsity promotion, cut, fine-tune; sparse files and reports."""

from __future__ import annotations

import onnxtrain.graph.upstream.lazy_sympy  # noqa: F401 - before any module here imports onnx-ir
from onnxtrain.errors._internal import public_names
from onnxtrain.plugins.pruning.prune import prune
from onnxtrain.plugins.pruning.report import PruneResult
from onnxtrain.plugins.pruning.sparse import save_sparse

__all__ = ["PruneResult", "prune", "save_sparse"]

__dir__ = public_names(__name__)
