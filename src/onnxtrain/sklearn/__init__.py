"""ONNX models as estimators of scikit-learn: in pipelines, in grid searches, wherever its own estimators stand.

scikit-learn is an optional extra; see docs/sklearn.md.
"""

from __future__ import annotations

from onnxtrain.public_names import public_names
from onnxtrain.sklearn.classifier import OnnxClassifier
from onnxtrain.sklearn.regressor import OnnxRegressor

__all__ = ["OnnxClassifier", "OnnxRegressor"]

__dir__ = public_names(__name__)
