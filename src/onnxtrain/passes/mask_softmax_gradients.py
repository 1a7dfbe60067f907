"""Gradients of masked softmax read what the model puts in the place of NaN."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.autodiff.engine import Backward
from onnxtrain.autodiff.masked_softmax import read_replacements
from onnxtrain.ir import Builder


def mask_softmax_gradients(model: ir.Model, backward: Backward) -> None:
    """Let a SoftmaxGradient of a softmax whose NaN the model replaces read the replacement, in place.

    Gradients in the bodies of operators have been treated when they were written (:mod:`onnxtrain.autodiff.bodies`).

    Requires: a sorted graph in which all nodes that read the softmax still stand, and SoftmaxGradient nodes are not
    resolved. Ensures: a sorted graph.

    Args:
        model: A model with one gradient.
        backward: What the engine emitted for it; what is emitted here is added.
    """
    graph = model.graph
    backward.nodes += read_replacements(Builder(graph, graph.opset_imports.get("", 1)))
