"""Models into other models: another head, a part cut out, layers added.

Everything here takes a path or a model and returns a new, whole model; what it was given stays as it is.
"""

import onnxtrain.workarounds.lazy_sympy  # noqa: F401 - before any module here imports onnx-ir
