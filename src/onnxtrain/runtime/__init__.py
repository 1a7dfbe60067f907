"""Sessions of ONNX Runtime with the states of a training in their buffers, and the native library."""

import onnxtrain.workarounds.lazy_sympy  # noqa: F401 - before any module here imports onnx-ir
