"""Metrics of independent binary outputs average over outputs, on whichever axis these lie, not over pixels."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import onnxtrain

oracle = pytest.importorskip("sklearn.metrics")

CONV = "c = Conv(x, w, b)"
LAYOUTS = {
    "one mask": ("N, 2, 5, 4", "3, 2, 1, 1", CONV, "y = Identity(c)", "N, 3, 5, 4", 1),
    "behind a resize": (
        "N, 2, 5, 4",
        "3, 2, 1, 1",
        CONV,
        'y = Resize<mode = "nearest">(c, , scales)',
        "N, 3, 10, 8",
        1,
    ),
    "a sum of two": ("N, 2, 5, 4", "3, 2, 1, 1", CONV, "r = Relu(c) y = Add(r, c)", "N, 3, 5, 4", 1),
    "channels last": (
        "N, 2, 5, 4",
        "3, 2, 1, 1",
        CONV,
        "y = Transpose<perm = [0, 2, 3, 1]>(c)",
        "N, 5, 4, 3",
        3,
    ),
    "of a signal": ("N, 2, 5", "3, 2, 1", CONV, "s = Sigmoid(c) y = Identity(s)", "N, 3, 5", 1),
    "tokens": ("N, 5, 2", "2, 3", "c = MatMul(x, w)", "y = Add(c, b)", "N, 5, 3", 2),
    "a transposed weight": ("N, 5, 2", "3, 2", "t = Transpose(w) c = MatMul(x, t)", "y = Add(c, b)", "N, 5, 3", 2),
    "with another axis": (
        "N, 5, 2",
        "2, 3",
        "c = MatMul(x, w)",
        "y = Unsqueeze(c, second)",
        "N, 1, 5, 3",
        3,
    ),
    "without the axis of patches": (
        "N, 1, 2",
        "2, 3",
        "c = MatMul(x, w)",
        "y = Squeeze(c, second)",
        "N, 3",
        1,
    ),
    "joined": ("N, 2, 5, 4", "3, 2, 1, 1", CONV, "n = Neg(c) y = Concat<axis = 1>(c, n)", "N, 6, 5, 4", 1),
    "nothing known": ("N, 3, 5, 4", "3, 1, 1", "c = PRelu(x, w)", "y = Softsign(c)", "N, 3, 5, 4", 1),
    "no layer, tokens": ("N, 5, 3", "3", "c = PRelu(x, w)", "y = Softsign(c)", "N, 5, 3", 2),
}
SINGLE = {
    "a mask": ("N, 2, 5, 4", "1, 2, 1, 1", CONV, "y = Identity(c)", "N, 1, 5, 4"),
    "a mask without channels": ("N, 2, 5, 4", "1, 2, 1, 1", CONV, "y = Squeeze(c, second)", "N, 5, 4"),
    "a mask, channels last": (
        "N, 2, 5, 4",
        "1, 2, 1, 1",
        CONV,
        "y = Transpose<perm = [0, 2, 3, 1]>(c)",
        "N, 5, 4, 1",
    ),
    "one number for each token": ("N, 5, 2", "2, 1", "c = MatMul(x, w)", "y = Squeeze(c, last)", "N, 5"),
    "nothing known": ("N, 5, 4, 1", "1", "c = PRelu(x, w)", "y = Softsign(c)", "N, 5, 4, 1"),
    "one column": ("N, 2", "2, 1", "c = MatMul(x, w)", "y = Identity(c)", "N, 1"),
    "no column": ("N, 2", "2, 1", "c = MatMul(x, w)", "y = Squeeze(c, second)", "N"),
}
METRICS = "f1,precision,recall,iou,auc,average_precision,accuracy"


def trained(given, weight, layer, tail, result, loss="bce"):
    """Return a trainer of a model, with random inputs, targets of zeros and ones, and the logits."""
    random = np.random.default_rng(0)
    sizes = tuple(int(size) for size in weight.split(","))
    values = random.normal(size=sizes).astype(np.float32)
    outputs = sizes[-1] if "MatMul(x, w)" in layer else sizes[0]
    text = (
        f'<ir_version: 8, opset_import: ["": 18]> f (float[{given}] x) => (float[{result}] y) '
        f"<float[{weight}] w = {{{', '.join(map(repr, values.ravel().tolist()))}}}, "
        f"float[{outputs}] b = {{{', '.join(['0.1'] * outputs)}}}, "
        f"float[4] scales = {{1, 1, 2, 2}}, int64[1] second = {{1}}, int64[1] last = {{-1}}> {{ {layer} {tail} }}"
    )
    trainer = onnxtrain.Trainer(onnx.parser.parse_model(text), loss=loss)
    x = random.normal(size=(8, *(int(size) for size in given.split(",")[1:]))).astype(np.float32)
    z = trainer.predict(x)
    y = (random.random(z.shape) < 0.5).astype(np.float32)
    return trainer, x, y, np.log(z / (1 - z)) if "Sigmoid" in tail else z


def by_scikit_learn(y, z):
    several = y.ndim > 1
    average = {"average": "macro" if several else "binary", "zero_division": 0}
    return {
        "f1": oracle.f1_score(y, z > 0, **average),
        "precision": oracle.precision_score(y, z > 0, **average),
        "recall": oracle.recall_score(y, z > 0, **average),
        "iou": oracle.jaccard_score(y, z > 0, **average),
        "auc": oracle.roc_auc_score(y, z),
        "average_precision": oracle.average_precision_score(y, z),
        "accuracy": np.mean((z > 0) == y),
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_metrics_average_over_outputs(layout):
    *parts, axis = LAYOUTS[layout]
    trainer, x, y, z = trained(*parts)
    flat = [np.moveaxis(each, axis, -1).reshape(-1, each.shape[axis]) for each in (y, z)]
    found = trainer.evaluate((x, y), metrics=METRICS, batch_size=3)
    found.pop("loss")
    assert found == pytest.approx(by_scikit_learn(*flat), abs=1e-6)


@pytest.mark.parametrize("layout", SINGLE)
def test_one_output_is_not_divided(layout):
    trainer, x, y, z = trained(*SINGLE[layout])
    found = trainer.evaluate((x, y), metrics=f"{METRICS},confusion_matrix", batch_size=3)
    matrix = found.pop("confusion_matrix")
    np.testing.assert_array_equal(matrix, oracle.confusion_matrix(y.ravel(), z.ravel() > 0))
    found.pop("loss")
    assert found == pytest.approx(by_scikit_learn(y.ravel(), z.ravel()), abs=1e-6)


@pytest.mark.parametrize("loss", ["binary_focal", "dice"])
@pytest.mark.parametrize("layout", ["a mask", "one mask"])
def test_other_losses_of_masks(loss, layout):
    parts = SINGLE[layout] if layout in SINGLE else LAYOUTS[layout][:-1]
    trainer, x, y, z = trained(*parts, loss=loss)
    found = trainer.evaluate((x, y), metrics="iou")["iou"]
    channels = [np.moveaxis(each, 1, -1).reshape(-1, each.shape[1]) for each in (y, z)]
    average = "binary" if y.shape[1] == 1 else "macro"
    assert found == pytest.approx(oracle.jaccard_score(channels[0], channels[1] > 0, average=average), abs=1e-6)
