"""Read, check, build and write ``TrainingInfoProto``, ONNX's format for training."""

import onnxtrain.graph.upstream.lazy_sympy  # noqa: F401 - before any module here imports onnx-ir
