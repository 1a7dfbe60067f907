"""From a training model, or a model whose gradient is asked for, to the graph that a session runs."""

import onnxtrain.workarounds.lazy_sympy  # noqa: F401 - before any module here imports onnx-ir
