"""Character and word error rates against the definition of the edit distance, and in trainers."""

from __future__ import annotations

import functools
import math

import numpy as np
import onnx
import pytest

import onnxtrain
from onnxtrain.errors import OptionError
from onnxtrain.metrics import CharacterErrorRate, WordErrorRate
from onnxtrain.metrics.error_rates import edit_distance
from sentences import raises_sentence

RANDOM = np.random.default_rng(0)


def distance(one, other):
    """Compute the Levenshtein distance by its definition."""

    @functools.cache
    def of(i, j):
        if not i or not j:
            return i + j
        return min(of(i - 1, j) + 1, of(i, j - 1) + 1, of(i - 1, j - 1) + (one[i - 1] != other[j - 1]))

    return of(len(one), len(other))


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [("kitten", "sitting", 3), ("", "", 0), ("", "abc", 3), ("abc", "", 3), ("abc", "abc", 0), ("ab", "ba", 2)],
)
def test_known_distances(one, other, expected):
    assert edit_distance(one, other) == edit_distance(other, one) == distance(one, other) == expected


def test_random_distances():
    for _ in range(200):
        one, other = (RANDOM.integers(0, 3, RANDOM.integers(0, 9)).tolist() for _ in range(2))
        assert edit_distance(one, other) == distance(tuple(one), tuple(other))


def scores(*rows, classes=5):
    """Return scores [N, T, C] with the given best classes."""
    return np.eye(classes, dtype=np.float32)[np.array(rows)] + RANDOM.uniform(0, 0.4, (*np.shape(rows), classes))


def rate(metric, *batches):
    state = metric.start()
    for y_true, y_pred in batches:
        state = metric.update(state, np.array(y_true), y_pred)
    return metric.result(state)


def test_repetitions_are_merged_and_blanks_removed():
    assert CharacterErrorRate().decode(scores([0, 1, 1, 0, 1, 2, 2, 0], [3, 3, 3, 3, 3, 3, 3, 3])) == [[1, 1, 2], [3]]
    assert CharacterErrorRate(blank=3).decode(scores([3, 0, 0, 3, 0])) == [[0, 0]]
    assert CharacterErrorRate(time_axis=0).decode(np.moveaxis(scores([0, 1, 2], [2, 2, 0]), 1, 0)) == [[1, 2], [2]]


def test_rates_cover_the_whole_dataset():
    first = [[1, 2, 3], [1, 1, -1]], scores([1, 0, 2, 0, 3], [1, 1, 1, 0, 0])  # 0 and 1 edits
    second = [[4, 0, 0]], scores([1, 2, 3, 3, 3])  # 3 edits
    assert rate(CharacterErrorRate(), first, second) == pytest.approx((0 + 1 + 3) / (3 + 2 + 1))
    assert math.isnan(rate(CharacterErrorRate(), ([[-1]], scores([0]))))


def test_spaces_separate_words():
    truth = [[1, 2, 4, 3, 4, 2, -1]]  # "ab c b"
    found = scores([1, 2, 4, 3, 0, 3, 4, 4, 0, 4, 2])  # "ab cc  b"
    assert rate(WordErrorRate(space=4), (truth, found)) == pytest.approx(1 / 3)
    with raises_sentence("word_error_rate_space"):
        WordErrorRate()


def test_other_predictions_are_refused():
    with raises_sentence("error_rate_shapes", what="character_error_rate", got=(2, 3), wanted=(1, 1)):
        rate(CharacterErrorRate(), ([[1]], np.zeros((2, 3))))


def reader():
    """Return a model of scores [N, 6, 4] of six steps with two values each."""
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 18]>
    f (float[n, 6, 2] x) => (float[n, 6, 4] y) { y = MatMul(x, w) }""")
    w = RANDOM.normal(size=(2, 4)).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(w, "w"))
    return model


def test_the_rate_is_measured_by_its_name():
    trainer = onnxtrain.Trainer(reader(), loss="ctc(blank=3)")
    x = RANDOM.normal(size=(7, 6, 2)).astype(np.float32)
    labels = RANDOM.integers(0, 3, (7, 2))
    found = CharacterErrorRate(blank=3).decode(np.asarray(trainer.predict(x)))
    edits = sum(distance(tuple(one), tuple(other)) for one, other in zip(labels.tolist(), found, strict=True))
    for name in ("character_error_rate", CharacterErrorRate(blank=3)):
        measured = trainer.evaluate(x, labels, batch_size=3, metrics=name)
        assert measured["character_error_rate"] == pytest.approx(edits / labels.size)
    history = trainer.fit(x, labels, validation=(x, labels), metrics=[WordErrorRate(space=2, blank=3)], progress=False)
    assert "val_word_error_rate" in history.rows[0]


@pytest.mark.parametrize(
    ("loss", "name", "message"),
    [
        (
            "cross_entropy",
            "character_error_rate",
            "for label sequences, as the loss ctc takes them, not for the loss so",
        ),
        ("ctc", "word_error_rate", r"needs the class of the space .* onnxtrain.metrics.WordErrorRate\(space=1\)"),
        ("ctc", "accuracy", "accuracy needs to know what the predictions are"),
        ("ctc", "nonsense", "There is no metric 'nonsense': use .*character_error_rate"),
    ],
)
def test_mismatches_are_refused(loss, name, message):
    trainer = onnxtrain.Trainer(reader(), loss=loss)
    with pytest.raises(OptionError, match=message):
        trainer.evaluate(
            np.zeros((1, 6, 2), np.float32), np.ones((1, 6 if loss == "cross_entropy" else 2), int), metrics=name
        )
