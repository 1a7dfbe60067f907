"""The standard's ``TrainingInfoProto``: read, check, build, write."""

import onnxtrain.workarounds.lazy_sympy  # noqa: F401 - before any module here imports onnx-ir
