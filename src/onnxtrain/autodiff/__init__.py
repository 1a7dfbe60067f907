"""Gradients of ONNX graphs: the engine and the rule book."""

from __future__ import annotations

from onnxtrain.autodiff.node import Node
from onnxtrain.autodiff.registry import no_gradient, register_gradient, unregister_gradient

__all__ = ["Node", "no_gradient", "register_gradient", "unregister_gradient"]
