"""Gradients of ONNX graphs: the engine and the registry of gradient rules."""

from __future__ import annotations

import onnxtrain.graph.upstream.lazy_sympy  # noqa: F401 - before any module here imports onnx-ir
from onnxtrain.autodiff import rules as rules  # its modules register their rules
from onnxtrain.autodiff.node import Node
from onnxtrain.autodiff.registry import no_gradient, register_gradient, unregister_gradient

__all__ = ["Node", "no_gradient", "register_gradient", "unregister_gradient"]
