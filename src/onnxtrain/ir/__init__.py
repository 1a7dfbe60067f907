"""Building and rewriting graphs: typed values, a builder over onnx-ir, shapes and passes."""

from onnxtrain.ir.builder import Builder
from onnxtrain.ir.value import Value

__all__ = ["Builder", "Value"]

import onnxtrain.workarounds.lazy_sympy  # noqa: F401 - before any module here imports onnx-ir
