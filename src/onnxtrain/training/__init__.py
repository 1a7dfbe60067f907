"""Parts of training that stand apart from the loop: data conversion, optimizers by name, run folders, quantization."""

import onnxtrain.graph.upstream.lazy_sympy  # noqa: F401 - before any module here imports onnx-ir
