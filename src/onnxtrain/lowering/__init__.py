"""Passes that turn a training model, or a model to differentiate, into the graph that a session runs."""

import onnxtrain.graph.upstream.lazy_sympy  # noqa: F401 - before any module here imports onnx-ir
