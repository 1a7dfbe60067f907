"""A user's file: its bytes read, checked, upgraded for training, and written back."""

import onnxtrain.graph.upstream.lazy_sympy  # noqa: F401 - before any module here imports onnx-ir
