"""ONNX Runtime sessions, the state buffers bound to them, and the native library."""

import onnxtrain.workarounds.lazy_sympy  # noqa: F401 - before any module here imports onnx-ir
