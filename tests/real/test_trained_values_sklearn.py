"""The trainable parameters of skl2onnx files equal scikit-learn's ``coef_`` and ``intercept_``."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

import onnxtrain
from onnxtrain.model_file.file import ModelFile

skl2onnx = pytest.importorskip("skl2onnx")
pytest.importorskip("sklearn")
pytestmark = pytest.mark.torch

RNG = np.random.default_rng(0)
X = (RNG.normal(size=(60, 4)) * [1, 2, 3, 4] + 5).astype(np.float32)
VALUE = X @ np.array([1.0, -2.0, 0.5, 1.5]) + RNG.normal(size=60)
KINDS = np.digitize(VALUE, np.quantile(VALUE, [0.3, 0.6]))


def estimators():
    from sklearn import linear_model as linear
    from sklearn.neural_network import MLPClassifier, MLPRegressor
    from sklearn.svm import LinearSVR

    small = {"hidden_layer_sizes": (5,), "max_iter": 20, "random_state": 0}
    return {
        "linear regression": (linear.LinearRegression(), VALUE),
        "regression of two": (linear.LinearRegression(), np.stack([VALUE, -VALUE], 1)),
        "ridge": (linear.Ridge(), VALUE),
        "lasso": (linear.Lasso(0.01), VALUE),
        "elastic net": (linear.ElasticNet(0.01), VALUE),
        "support vector regression": (LinearSVR(random_state=0, max_iter=10000), VALUE),
        "logistic regression": (linear.LogisticRegression(), KINDS),
        "logistic regression of two": (linear.LogisticRegression(), KINDS > 0),
        "perceptron": (MLPClassifier(**small), KINDS),
        "perceptron of two": (MLPClassifier(**small), KINDS > 0),
        "perceptron of two layers": (MLPClassifier(**small | {"hidden_layer_sizes": (5, 3)}), KINDS),
        "regressing perceptron": (MLPRegressor(**small), VALUE),
        "tanh": (MLPRegressor(activation="tanh", **small), VALUE),
        "logistic": (MLPRegressor(activation="logistic", **small), VALUE),
    }


NAMES = [
    "linear regression",
    "regression of two",
    "ridge",
    "lasso",
    "elastic net",
    "support vector regression",
    "logistic regression",
    "logistic regression of two",
    "perceptron",
    "perceptron of two",
    "perceptron of two layers",
    "regressing perceptron",
    "tanh",
    "logistic",
]


def learned(estimator) -> list[float]:
    if hasattr(estimator, "coefs_"):
        arrays = [*estimator.coefs_, *estimator.intercepts_]
    else:
        arrays = [np.asarray(estimator.coef_), np.atleast_1d(estimator.intercept_)]
    return sorted(np.float32(value) for array in arrays for value in array.reshape(-1))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("scaled", ["plain", "StandardScaler", "MinMaxScaler", "RobustScaler", "MaxAbsScaler"])
@pytest.mark.parametrize("name", NAMES)
def test_trainable_parameters_equal_the_fitted_ones(name, scaled):
    from sklearn import preprocessing
    from sklearn.pipeline import make_pipeline

    estimator, target = estimators()[name]
    steps = [] if scaled == "plain" else [getattr(preprocessing, scaled)()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pipeline = make_pipeline(*steps, estimator).fit(X, target)
        classifies = hasattr(estimator, "classes_")
        proto = skl2onnx.to_onnx(pipeline, X[:1], **({"options": {"zipmap": False}} if classifies else {}))
    rows = onnxtrain.inspect(proto).initializers
    file = ModelFile.load(proto)
    arrays = [np.asarray(file.value(row.name)) for row in rows if row.trainable]
    assert sorted(value for array in arrays for value in array.reshape(-1)) == pytest.approx(learned(estimator))
    assert not any("not trained" in hint for hint in onnxtrain.inspect(proto).hints)
