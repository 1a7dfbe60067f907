"""Targets: accepted values, ignored labels, and properties determined by data."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import onnxtrain
from onnxtrain.data import ArrayDataset
from onnxtrain.data.target_checks import BinaryCheck, DistributionCheck, check_labels
from onnxtrain.errors import DataError
from onnxtrain.losses import BinaryCrossEntropy, SoftmaxCrossEntropy
from onnxtrain.training.inference.forward import evaluate
from onnxtrain.training.trainer import Trainer
from sentences import raises_sentence
from zoo.arrays import assert_same, copied

RNG = np.random.default_rng(3)
X = RNG.normal(size=(12, 4)).astype(np.float32)
BINARY = (RNG.random((12, 5)) > 0.5).astype(np.float32)
SOFT = RNG.dirichlet(np.ones(5), 12)
LABELS = RNG.integers(0, 5, 12)


def trainer(loss="binary_cross_entropy", **options) -> Trainer:
    return Trainer(onnxtrain.examples.mlp((4, 5)), loss=loss, **options)


def spoilt(targets: np.ndarray, value: float) -> np.ndarray:
    result = np.array(targets, np.float64)
    result[3, 1] = value
    return result


WAYS = {
    "step": lambda loss, y: trainer(loss).train_step(X, y),
    "fit": lambda loss, y: trainer(loss).fit((X, y)),
    "list": lambda loss, y: trainer(loss, targets="values").fit([(X, y)]),
    "loader": lambda loss, y: trainer(loss, targets="values").fit(lambda: iter([(X, y)])),
    "dataset": lambda loss, y: trainer(loss).fit(ArrayDataset({"input": X}, y)),
    "validation": lambda loss, y: trainer(loss).fit((X, y[:0:-1][[0] * 12]), validation=(X, y)),
    "evaluate": lambda loss, y: trainer(loss).evaluate((X, y)),
    "untrained": lambda loss, y: evaluate(onnxtrain.examples.mlp((4, 5)), (X, y), loss=loss),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("loss", "targets", "message"),
    [
        ("binary_cross_entropy", spoilt(BINARY, 7), "7 at example 3, but binary_cross_entropy needs numbers from 0 to"),
        ("binary_cross_entropy", spoilt(BINARY, -1), "-1 at example 3, but binary_cross_entropy needs numbers from 0"),
        ("binary_cross_entropy", spoilt(BINARY, np.inf), "the target array.* holds inf at example 3"),
        ("softmax_cross_entropy", spoilt(SOFT, np.nan), "the target array.* holds nan at example 3"),
        ("softmax_cross_entropy", spoilt(SOFT, -1), "-1 at example 3, but softmax_cross_entropy needs numbers from 0"),
        (
            "softmax_cross_entropy",
            np.where(np.arange(12)[:, None] == 3, 1.0, SOFT),
            "a distribution with the sum 5 at example 3, but softmax_cross_entropy needs .* the sum 1 along axis 1",
        ),
        ("mean_squared_error", spoilt(SOFT, np.inf), "the target array.* holds inf at example 3"),
    ],
)
def test_invalid_targets(way, loss, targets, message):
    with pytest.raises(DataError, match=message):
        WAYS[way](loss, targets)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("loss", "targets"),
    [
        ("binary_cross_entropy(check_targets=false)", spoilt(BINARY, 7)),
        ("softmax_cross_entropy(check_targets=false)", SOFT * 6),
        ("binary_cross_entropy", BINARY.astype(int)),
        ("binary_cross_entropy", BINARY > 0),
        ("binary_cross_entropy", SOFT),
        ("softmax_cross_entropy", np.eye(5, dtype=np.uint8)[LABELS]),
        ("softmax_cross_entropy", np.round(SOFT, 3).astype(np.float16)),
    ],
)
def test_valid_targets(way, loss, targets):
    WAYS[way](loss, targets)


def test_the_binary_loss_of_allowed_targets_is_the_formula():
    loss, target = BinaryCrossEntropy(check_targets=False), spoilt(BINARY, 7)
    logits = trainer().predict(X)
    expected = np.mean(np.log1p(np.exp(logits)) - target * logits)
    assert trainer(loss).train_step(X, target) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("bad", [5, -1, -99])
@pytest.mark.parametrize("way", ["step", "fit", "evaluate", "untrained", "dataset"])
def test_labels_out_of_range(way, bad):
    labels = np.where(np.arange(12) == 3, bad, LABELS)
    message = rf"label {bad} at example 3, but labels must be 0 to 4 \(5 classes\) or -100, which is ignored"
    with pytest.raises(DataError, match=message):
        WAYS[way]("softmax_cross_entropy", labels)


def test_labels_of_an_unknown_number_of_classes_are_not_negative():
    check_labels(np.array([0, 7, -100]), None, -100)
    with raises_sentence("label_range", what="the targets", got=-2, wanted="at least 0", example=1):
        check_labels(np.array([0, -2]), None)


def test_fractional_labels_are_refused_with_advice():
    with raises_sentence(
        "array_type", what="the target array", got="float64", wanted="int64", hint="round and convert it first"
    ):
        trainer("softmax_cross_entropy").fit((X, LABELS + 0.5))


def test_targets_of_a_data_set_are_checked_once(monkeypatch):
    counted = []
    monkeypatch.setattr(BinaryCheck, "__call__", lambda self, targets, what, examples: counted.append(len(targets)))
    trainer().fit((X, BINARY), validation=(X[:5], BINARY[:5]), epochs=3)
    assert counted == [12, 5]


def test_changed_requirements_are_checked_again():
    dataset = ArrayDataset({"input": X}, SOFT * 6)
    dataset.validate()
    with pytest.raises(DataError, match="needs numbers from 0 to 1"):
        dataset.validate({None: DistributionCheck("a loss", 1)})


def test_a_one_shot_iterator_is_refused_for_validation_too():
    with pytest.raises(DataError, match="one-shot iterator"):
        trainer().fit((X, BINARY), validation=iter([(X, BINARY)]), epochs=2)


# --- ignored labels


@pytest.mark.parametrize(
    "loss",
    ["softmax_cross_entropy", "softmax_cross_entropy(label_smoothing=0.1)", SoftmaxCrossEntropy(ignore_index=-100)],
)
def test_minus_100_is_ignored_by_the_loss_given_as_text(loss):
    labels = np.where(np.arange(12) < 4, -100, LABELS)
    for accumulate in (1, 3):
        whole, rest = trainer(loss, accumulate=accumulate), trainer(loss)
        assert whole.train_step(X, labels) == pytest.approx(rest.train_step(X[4:], LABELS[4:]), rel=1e-5)
        for name, array in rest.parameters.items():
            np.testing.assert_allclose(whole.parameters[name], array, rtol=1e-4, atol=1e-6)
    measured = trainer(loss).evaluate((X, labels), metrics=["accuracy", "softmax_cross_entropy"])
    kept = trainer(loss).evaluate((X[4:], LABELS[4:]), metrics=["accuracy", "softmax_cross_entropy"])
    assert measured == pytest.approx(kept, rel=1e-5)


@pytest.mark.parametrize("loss", ["softmax_cross_entropy", SoftmaxCrossEntropy((1, 2, 1, 1, 0.5), ignore_index=-100)])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_batch_without_any_label_changes_nothing(loss, accumulate):
    subject = trainer(loss, optimizer=onnxtrain.Momentum(0.1), accumulate=accumulate)
    before = copied(subject.parameters)
    assert subject.train_step(X, np.full(12, -100)) == 0
    assert_same(subject.parameters, before)


def _operators(subject: Trainer) -> set[str]:
    lowered = onnxtrain.lower(subject.training_model())
    return {node.op_type for node in lowered.graph.node}


def test_the_text_adds_no_nodes_for_ignored_labels_that_data_lack():
    subject = trainer("softmax_cross_entropy", optimizer=onnxtrain.Momentum(0.1))
    subject.fit((X, LABELS))
    assert not {"Equal", "Not"} & _operators(subject)
    labels = np.where(np.arange(12) < 4, -100, LABELS)
    expected = subject.evaluate((X[4:], LABELS[4:]))["loss"]
    assert subject.train_step(X, labels) == pytest.approx(expected, rel=1e-5)
    assert {"Equal", "Not"} <= _operators(subject)
    assert {"Equal", "Not"} <= _operators(trainer(SoftmaxCrossEntropy(ignore_index=-100)))


@pytest.mark.parametrize("form", ["list", "loader"])
def test_a_later_batch_may_hold_ignored_labels(form):
    batches = [(X, LABELS), (X, np.where(np.arange(12) < 4, -100, LABELS))]
    losses = []
    for loss in ("softmax_cross_entropy", SoftmaxCrossEntropy(ignore_index=-100)):
        subject = trainer(loss)
        losses.append(subject.fit(batches if form == "list" else lambda: iter(batches)).rows[0]["loss"])
    assert losses[0] == losses[1]


def test_validation_data_may_hold_ignored_labels_that_training_data_lack():
    labels = np.where(np.arange(12) < 4, -100, LABELS)
    subject = trainer("softmax_cross_entropy", optimizer=onnxtrain.Momentum(0.0))
    row = subject.fit((X, LABELS), validation=(X, labels), metrics=["accuracy"]).rows[0]
    expected = subject.evaluate((X[4:], LABELS[4:]), metrics=["accuracy"])
    assert row["val_accuracy"] == pytest.approx(expected["accuracy"])
    assert row["val_loss"] == pytest.approx(expected["loss"], rel=1e-5)


def test_a_training_model_that_is_written_without_data_ignores_them():
    model = onnxtrain.examples.mlp((4, 5))
    made = onnxtrain.training_model(model, loss="softmax_cross_entropy", optimizer=onnxtrain.Momentum(0.1))
    session = onnxtrain.TrainingSession(made)
    labels = np.where(np.arange(12) < 4, -100, LABELS)
    found = session.step({"input": X, "target": labels, "learning_rate": np.float32(0)})["loss"]
    assert found == pytest.approx(trainer("softmax_cross_entropy").train_step(X[4:], LABELS[4:]), rel=1e-5)


def test_nothing_is_ignored_where_the_text_or_the_class_says_so():
    labels = np.where(np.arange(12) < 4, -100, LABELS)
    for loss in ("softmax_cross_entropy(ignore_index=none)", SoftmaxCrossEntropy()):
        with pytest.raises(DataError, match="label -100 at example 0"):
            trainer(loss).train_step(X, labels)


def test_the_number_of_labels_is_exact_in_16_bits():
    text = """<ir_version: 8, opset_import: ["": 18]> m (float16[N,2] x) => (float16[N,2] y)
        <float16[2] w = {1, 1}> { y = Mul(x, w) }"""
    x, y = np.zeros((5000, 2), np.float16), np.zeros(5000, int)
    y[:100] = -100
    found = evaluate(onnx.parser.parse_model(text), (x, y), loss="softmax_cross_entropy", batch_size=5000)
    assert found["loss"] == pytest.approx(np.log(2), rel=2e-3)


@pytest.mark.torch
def test_iterables_of_batches_train_like_arrays():
    torch = pytest.importorskip("torch")
    batches = [(X[p : p + 4], LABELS[p : p + 4]) for p in (0, 4, 8)]
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(LABELS)), batch_size=4
    )
    sources = [(X, LABELS), batches, tuple(batches), lambda: iter(batches), loader]
    results = []
    for source in sources:
        subject = trainer("softmax_cross_entropy", accumulate=2)
        rows = subject.fit(source, batch_size=4, shuffle=False, epochs=2, validation=source, metrics=["accuracy"]).rows
        results.append([row["loss"] for row in rows] + [rows[-1]["val_accuracy"]])
    for result in results[1:]:
        assert result == results[0]


@pytest.mark.parametrize("loss", ["next_token", "next_token(chunk=2)", "softmax_cross_entropy(axis=-1)"])
@pytest.mark.parametrize("length", [1, 3, 4, 6])
def test_labels_of_another_length_than_the_tokens_are_refused(loss: str, length: int) -> None:
    """Too few labels were compared with the logits of the first rows, and the mean of those was reported."""
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 18]>
        f (int64[N, T] ids) => (float[N, T, 7] logits) { hidden = Gather(table, ids)  logits = MatMul(hidden, head) }"""
    )
    for name, shape in (("table", (9, 4)), ("head", (4, 7))):
        model.graph.initializer.append(onnx.numpy_helper.from_array(RNG.normal(size=shape).astype(np.float32), name))
    ids, labels = RNG.integers(0, 9, (3, 5)), RNG.integers(0, 7, (3, length))
    learner = Trainer(model, loss=loss)
    for use in (
        lambda: learner.evaluate((ids, labels)),
        lambda: learner.evaluate({"ids": ids, "labels": labels}),
        lambda: learner.evaluate(lambda: iter([(ids, labels)])),
        lambda: learner.train_step(ids, labels),
        lambda: learner.fit((ids, labels), progress=False),
        lambda: evaluate(model, (ids, labels), loss=loss),
    ):
        with pytest.raises(DataError, match=rf"target.* has {length} for the dimension 'T' .* 'ids'.* has 5"):
            use()
