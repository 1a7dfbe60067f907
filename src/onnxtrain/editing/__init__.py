"""Edit models: replace the head, cut out a part, append layers, free the batch size, set inference mode.

Every function takes a path or a model and returns a new, self-contained model; its argument is not changed.
"""

import onnxtrain.graph.upstream.lazy_sympy  # noqa: F401 - before any module here imports onnx-ir
