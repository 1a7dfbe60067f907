"""Training on Ray: several workers train one ONNX model on Ray Data, and restart after a failure.

Ray is an optional extra; see docs/ray.md.
"""

from __future__ import annotations

from onnxtrain.errors._internal import public_names
from onnxtrain.interop.ray.collective import Collective
from onnxtrain.interop.ray.fitting import fit

__all__ = ["Collective", "fit"]

__dir__ = public_names(__name__)
