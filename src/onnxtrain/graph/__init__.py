"""Building and rewriting graphs: typed values, a builder over onnx-ir, shapes and passes."""

import onnxtrain.graph.upstream.lazy_sympy  # noqa: F401 - before any module here imports onnx-ir
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.operands import Value

__all__ = ["Builder", "Value"]
