"""ONNX Runtime sessions, the state buffers bound to them, and the native library."""

import onnxtrain.graph.upstream.lazy_sympy  # noqa: F401 - before any module here imports onnx-ir
