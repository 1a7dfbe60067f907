"""Passes that turn a training model, or a model to differentiate, into the graph that a session runs."""

import onnxtrain.workarounds.lazy_sympy  # noqa: F401 - before any module here imports onnx-ir
