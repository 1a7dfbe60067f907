"""What is trained, how, on what, and for how long: from arguments to a trained model."""

import onnxtrain.workarounds.lazy_sympy  # noqa: F401 - before any module here imports onnx-ir
