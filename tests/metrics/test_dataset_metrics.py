"""Metrics of whole datasets against scikit-learn, for any batches."""

import numpy as np
import pytest

import onnxtrain
from onnxtrain import examples
from onnxtrain.errors import OptionError

oracle = pytest.importorskip("sklearn.metrics")

RNG = np.random.default_rng(0)
X = RNG.normal(size=(40, 4)).astype(np.float32)
LABELS = RNG.integers(0, 3, 40)
ONE = {"average": "macro", "zero_division": 0}


def softmax(z):
    p = np.exp(z.astype(np.float64) - z.max(1, keepdims=True))
    return p / p.sum(1, keepdims=True)


def measured(metric, loss, y, width, batch_size=7):
    trainer = onnxtrain.Trainer(examples.mlp((4, 8, width), seed=3), loss=loss)
    found = trainer.evaluate(X, y, metrics=metric, batch_size=batch_size)
    (name,) = set(found) - {"loss"}
    return found[name], trainer.predict(X), name


CLASSES = {
    "precision": lambda t, z: oracle.precision_score(t, z.argmax(1), **ONE),
    "recall": lambda t, z: oracle.recall_score(t, z.argmax(1), **ONE),
    "f1": lambda t, z: oracle.f1_score(t, z.argmax(1), **ONE),
    "iou": lambda t, z: oracle.jaccard_score(t, z.argmax(1), average="macro"),
    "auc": lambda t, z: oracle.roc_auc_score(t, softmax(z), multi_class="ovr"),
    "average_precision": lambda t, z: oracle.average_precision_score(t, softmax(z)),
    "top_k(2)": lambda t, z: oracle.top_k_accuracy_score(t, z, k=2),
    "perplexity": lambda t, z: np.exp(oracle.log_loss(t, softmax(z), labels=[0, 1, 2])),
}


@pytest.mark.parametrize("batch_size", [7, 40])
@pytest.mark.parametrize("metric", CLASSES)
def test_several_classes(metric, batch_size):
    found, z, name = measured(metric, "cross_entropy", LABELS, 3, batch_size)
    assert found == pytest.approx(CLASSES[metric](LABELS, z), abs=1e-6)
    assert name == metric


TWO = {
    "precision": lambda t, z: oracle.precision_score(t, z[:, 1] > z[:, 0]),
    "recall": lambda t, z: oracle.recall_score(t, z[:, 1] > z[:, 0]),
    "f1": lambda t, z: oracle.f1_score(t, z[:, 1] > z[:, 0]),
    "iou": lambda t, z: oracle.jaccard_score(t, z[:, 1] > z[:, 0]),
    "auc": lambda t, z: oracle.roc_auc_score(t, z[:, 1] - z[:, 0]),
    "average_precision": lambda t, z: oracle.average_precision_score(t, z[:, 1] - z[:, 0]),
}


@pytest.mark.parametrize("metric", TWO)
def test_the_second_of_two_classes_is_positive(metric):
    found, z, _ = measured(metric, "cross_entropy", LABELS % 2, 2)
    assert found == pytest.approx(TWO[metric](LABELS % 2, z), abs=1e-6)


def averaged(score):
    """Average the scores of several binary outputs."""
    return lambda t, z: score(t, z > 0, average="macro" if t.shape[1] > 1 else "binary")


QUESTIONS = {
    "precision": averaged(oracle.precision_score),
    "recall": averaged(oracle.recall_score),
    "f1": averaged(oracle.f1_score),
    "iou": averaged(oracle.jaccard_score),
    "auc": oracle.roc_auc_score,
    "average_precision": oracle.average_precision_score,
}


@pytest.mark.parametrize("questions", [1, 3])
@pytest.mark.parametrize("metric", QUESTIONS)
def test_binary_outputs(metric, questions):
    y = RNG.integers(0, 2, (40, questions))
    found, z, _ = measured(metric, "bce", y.astype(np.float32), questions)
    assert found == pytest.approx(QUESTIONS[metric](y, z), abs=1e-6)


def test_values():
    y = RNG.normal(size=40).astype(np.float32)
    found, z, _ = measured("r2", "mse", y, 1)
    assert found == pytest.approx(oracle.r2_score(y, z), abs=1e-6)
    found, z, name = measured("mae", "mse", y, 1)
    assert (found, name) == (pytest.approx(oracle.mean_absolute_error(y, z[:, 0]), abs=1e-6), "mae")


def test_ties_and_absent_classes():
    from onnxtrain.metrics.dataset_metrics import DATASET_METRICS, Predictions

    scores, truth = RNG.integers(0, 3, (30, 1)).astype(float), RNG.integers(0, 2, (30, 1))
    for name, expected in (("auc", oracle.roc_auc_score), ("average_precision", oracle.average_precision_score)):
        metric = DATASET_METRICS[name]
        kept = metric.measure(Predictions.of("binary", truth, scores))
        assert metric.finish(kept) == pytest.approx(expected(truth, scores))
    alike = DATASET_METRICS["auc"].measure(Predictions.of("binary", np.ones_like(truth), scores))
    assert np.isnan(DATASET_METRICS["auc"].finish(alike))
    few = np.where(LABELS == 2, 0, LABELS)
    z = RNG.normal(size=(40, 4))
    z[:, 3] -= 100
    kept = DATASET_METRICS["f1"].measure(Predictions.of("classes", few, z))
    assert DATASET_METRICS["f1"].finish(kept) == pytest.approx(oracle.f1_score(few, z.argmax(1), **ONE))


def test_ignored_labels_are_skipped():
    y = np.where(np.arange(40) % 4 == 0, -100, LABELS)
    for metric in ("f1", "perplexity", "auc"):
        found, z, _ = measured(metric, "cross_entropy", y, 3)
        assert found == pytest.approx(CLASSES[metric](LABELS[y >= 0], z[y >= 0]), abs=1e-6)


def test_one_name_needs_no_list():
    trainer = onnxtrain.Trainer(examples.mlp((4, 8, 3)), loss="cross_entropy")
    rows = trainer.fit(X, LABELS, validation=(X, LABELS), metrics="f1").rows
    assert rows[0]["val_f1"] == trainer.evaluate(X, LABELS, metrics=["f1"])["f1"]
    assert onnxtrain.evaluate(trainer.model(), (X, LABELS), loss="cross_entropy", metrics="accuracy")["accuracy"] > 0


@pytest.mark.parametrize(
    ("metric", "loss", "message"),
    [
        (
            "r2",
            "cross_entropy",
            "metric r2 is for numbers, but with the loss softmax_cross_entropy predictions are sco",
        ),
        ("f1", "mse", "metric f1 is for scores over classes or independent binary logits, but with the loss mean_s"),
        ("top_k(none)", "cross_entropy", r"'top_k\(none\)' needs a number of classes of at least 1"),
        ("f2", "cross_entropy", r"There is no metric 'f2': use accuracy, .*, f1, .* top_k"),
    ],
)
def test_metrics_that_do_not_fit(metric, loss, message):
    trainer = onnxtrain.Trainer(examples.mlp((4, 8, 3)), loss=loss)
    with pytest.raises(OptionError, match=message):
        trainer.evaluate(X, LABELS if loss == "cross_entropy" else X[:, :3], metrics=metric)
