"""Losses against NumPy, their gradients against central differences."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx.reference import ReferenceEvaluator

from losses.loss_models import loss_model
from onnxtrain.errors import OptionError
from onnxtrain.losses import (
    BinaryCrossEntropy,
    Huber,
    MeanAbsoluteError,
    MeanSquaredError,
    SoftmaxCrossEntropy,
)
from onnxtrain.runtime.testing import check_gradient

RNG = np.random.default_rng(7)


def build(loss, prediction: np.ndarray, target: np.ndarray, *, dynamic: bool) -> onnx.ModelProto:
    """Build a model from (prediction, target) to (loss, weight)."""
    return loss_model(loss, {"prediction": prediction, "target": target}, dynamic=dynamic, weight=True)


def log_softmax(z: np.ndarray, axis: int) -> np.ndarray:
    z = z - z.max(axis=axis, keepdims=True)
    return z - np.log(np.exp(z).sum(axis=axis, keepdims=True))


def cross_entropy(z, t, *, axis=1, weights=None, smoothing=0.0, ignore=None):
    """Compute the definition, label by label."""
    z = np.moveaxis(z, axis, -1)
    classes = z.shape[-1]
    weights = np.ones(classes) if weights is None else np.asarray(weights)
    total = weight = 0.0
    for index in np.ndindex(t.shape):
        label = t[index]
        if ignore is not None and label == ignore:
            continue
        p = log_softmax(z[index], 0)
        total += (1 - smoothing) * weights[label] * -p[label] + smoothing / classes * float(np.sum(weights * -p))
        weight += weights[label]
    return total / weight, weight


def labels(*shape: int, classes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, classes, shape)


LABELS = labels(6, classes=4)
IGNORING = np.where(np.arange(6) % 3 == 1, -100, LABELS)
ONE_HOT = np.eye(4)[LABELS]
SOFT = RNG.dirichlet(np.ones(4), 6)
Z = RNG.normal(size=(6, 4)) * 2
WEIGHTS = (0.5, 2.0, 0.0, 1.5)

CASES = {
    "labels": (SoftmaxCrossEntropy(), Z, LABELS, cross_entropy(Z, LABELS)),
    "weights": (
        SoftmaxCrossEntropy(class_weights=WEIGHTS),
        Z,
        LABELS,
        cross_entropy(Z, LABELS, weights=WEIGHTS),
    ),
    "smoothing": (SoftmaxCrossEntropy(label_smoothing=0.2), Z, LABELS, cross_entropy(Z, LABELS, smoothing=0.2)),
    "ignore": (SoftmaxCrossEntropy(ignore_index=-100), Z, IGNORING, cross_entropy(Z, IGNORING, ignore=-100)),
    "all": (
        SoftmaxCrossEntropy(class_weights=WEIGHTS, label_smoothing=0.1, ignore_index=-100),
        Z,
        IGNORING,
        cross_entropy(Z, IGNORING, weights=WEIGHTS, smoothing=0.1, ignore=-100),
    ),
    "one-hot": (SoftmaxCrossEntropy(), Z, ONE_HOT, cross_entropy(Z, LABELS)),
    "one-hot smoothed": (
        SoftmaxCrossEntropy(label_smoothing=0.2),
        Z,
        ONE_HOT,
        cross_entropy(Z, LABELS, smoothing=0.2),
    ),
    "distribution": (SoftmaxCrossEntropy(), Z, SOFT, (float(np.mean(-np.sum(SOFT * log_softmax(Z, 1), 1))), 6)),
    "binary": (
        BinaryCrossEntropy(),
        Z,
        ONE_HOT,
        (float(np.mean(np.log1p(np.exp(Z)) - ONE_HOT * Z)), Z.size),
    ),
    "binary positive weight": (
        BinaryCrossEntropy(positive_weight=3.0),
        Z,
        SOFT,
        (float(np.mean(3 * SOFT * np.log1p(np.exp(-Z)) + (1 - SOFT) * np.log1p(np.exp(Z)))), Z.size),
    ),
    "squared": (MeanSquaredError(), Z, SOFT, (float(np.mean((Z - SOFT) ** 2)), Z.size)),
    "absolute": (MeanAbsoluteError(), Z, SOFT, (float(np.mean(np.abs(Z - SOFT))), Z.size)),
    "huber": (
        Huber(0.7),
        Z,
        SOFT,
        (
            float(np.mean(np.where(np.abs(Z - SOFT) <= 0.7, (Z - SOFT) ** 2 / 2, 0.7 * (np.abs(Z - SOFT) - 0.35)))),
            Z.size,
        ),
    ),
}
_IMAGES = RNG.normal(size=(2, 5, 3, 2))
_PIXELS = labels(2, 3, 2, classes=5)
CASES["pixels"] = (SoftmaxCrossEntropy(), _IMAGES, _PIXELS, cross_entropy(_IMAGES, _PIXELS))
_TOKENS = RNG.normal(size=(2, 3, 7))
_WORDS = labels(2, 3, classes=7)
CASES["tokens"] = (SoftmaxCrossEntropy(), _TOKENS, _WORDS, cross_entropy(_TOKENS, _WORDS, axis=2))
_CHANNELS = labels(2, 7, classes=3)
CASES["axis 1"] = (SoftmaxCrossEntropy(axis=1), _TOKENS, _CHANNELS, cross_entropy(_TOKENS, _CHANNELS))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_loss_weight_and_gradient(name: str, dynamic: bool) -> None:
    loss, prediction, target, (expected, weight) = CASES[name]
    model = build(loss, prediction, target, dynamic=dynamic)
    onnx.checker.check_model(model, full_check=True)
    found, found_weight = ReferenceEvaluator(model).run(None, {"prediction": prediction, "target": target})
    assert found == pytest.approx(expected, rel=1e-9)
    assert found_weight == pytest.approx(weight, rel=1e-12)
    assert found.shape == ()
    del model.graph.output[1]
    check_gradient(model, {"prediction": prediction, "target": target}, wrt=["prediction"])


def test_losses_stay_finite_for_huge_logits() -> None:
    z = np.array([[1e4, -1e4], [-1e4, 1e4]], dtype=np.float32)
    one_hot = np.eye(2, dtype=np.float32)[[1, 1]]
    for loss, target, expected in (
        (SoftmaxCrossEntropy(), np.array([0, 0]), 1e4),
        (BinaryCrossEntropy(), one_hot, 5e3),
    ):
        model = build(loss, z, target, dynamic=False)
        session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        found = session.run(["loss"], {"prediction": z, "target": target})[0]
        assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SoftmaxCrossEntropy(label_smoothing=1.0), r"label_smoothing is 1.0; it needs a number in \[0, 1\)"),
        (lambda: SoftmaxCrossEntropy(class_weights=(-1.0, 1.0)), "class_weights needs finite numbers of at least 0"),
        (lambda: Huber(0.0), "delta is 0.0; the Huber loss needs a finite number above 0"),
        (lambda: build(SoftmaxCrossEntropy(), Z[:, 0], LABELS, dynamic=False), "needs logits of shape"),
        (lambda: build(SoftmaxCrossEntropy(axis=5), Z, LABELS, dynamic=False), "axis is 5, but the logits"),
        (
            lambda: build(SoftmaxCrossEntropy(class_weights=(1.0, 1.0)), Z, LABELS, dynamic=False),
            "class_weights has 2 numbers, but there are 4 classes",
        ),
        (lambda: build(SoftmaxCrossEntropy(ignore_index=0), Z, SOFT, dynamic=False), "ignore_index needs class indi"),
    ],
)
def test_bad_arguments(make, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        make()
