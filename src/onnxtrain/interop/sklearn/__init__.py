"""ONNX models as scikit-learn estimators, for pipelines, grid searches and the like.

scikit-learn is an optional extra; see docs/sklearn.md.
"""

from __future__ import annotations

from onnxtrain.errors._internal import public_names
from onnxtrain.interop.sklearn.classifier import OnnxClassifier
from onnxtrain.interop.sklearn.regressor import OnnxRegressor

__all__ = ["OnnxClassifier", "OnnxRegressor"]

__dir__ = public_names(__name__)
