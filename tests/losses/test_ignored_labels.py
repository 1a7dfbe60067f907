"""Labels that are all ignored: an error for a whole data set, nothing to learn from for one batch of many."""

import numpy as np
import pytest

import onnxtrain
from onnxtrain.errors import DataError
from sentences import raises_sentence
from zoo.language_model import WORDS, language_model

IDS = np.random.default_rng(0).integers(0, WORDS, (4, 6))
FEEDS = {"input_ids": IDS, "attention_mask": np.ones_like(IDS)}
NONE = np.full_like(IDS, -100)
FIRST = np.where(np.arange(6) == 0, IDS, -100)
"""Labels at the first positions only, which next_token compares with no prediction."""

MESSAGE = r"^{} has no label that the loss next_token compares with a prediction: all are -100, which is ignored; the "


def trainer_of(loss="next_token", **options):
    return onnxtrain.Trainer(language_model(), loss=loss, output="logits", **options)


def batches(labels, size=2):
    return [
        ({name: array[start : start + size] for name, array in FEEDS.items()}, labels[start : start + size])
        for start in range(0, len(labels), size)
    ]


@pytest.mark.parametrize("labels", [NONE, FIRST], ids=["all", "all but the first"])
def test_a_data_set_without_labels_is_refused_before_training(labels, tmp_path):
    trainer = trainer_of()
    np.savez(tmp_path / "none.npz", labels=labels, **FEEDS)
    for data in ((FEEDS, labels), FEEDS | {"labels": labels}, tmp_path / "none.npz"):
        with pytest.raises(DataError, match=MESSAGE.format(".*")):
            trainer.fit(data, progress=False)
        with pytest.raises(DataError, match=MESSAGE.format(".*")):
            trainer.evaluate(data)
    with pytest.raises(DataError, match=MESSAGE.format(".*")):
        trainer.fit((FEEDS, IDS), validation=(FEEDS, labels), progress=False)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_batches_without_labels_are_refused_after_an_epoch_of_them(accumulate):
    trainer = trainer_of(accumulate=accumulate)
    with pytest.raises(DataError, match=MESSAGE.format("the list|the data|.*")):
        trainer.fit(lambda: iter(batches(NONE)), progress=False)
    with raises_sentence("nothing_to_evaluate", what="<lambda>"):
        trainer.evaluate(lambda: iter(batches(NONE)))
    with pytest.raises(DataError, match="has nothing to evaluate"):
        onnxtrain.evaluate(language_model(), (FEEDS, NONE), loss="next_token", output="logits")


@pytest.mark.parametrize("loss", ["next_token", "softmax_cross_entropy", "focal", "dice"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_one_batch_of_many_has_no_nan(loss, accumulate):
    trainer = trainer_of(loss, accumulate=accumulate, optimizer="sgd(lr=0.1)")
    before = {name: array.copy() for name, array in trainer.parameters.items()}
    assert trainer.train_step(FEEDS, NONE) == 0
    for name, array in trainer.parameters.items():
        np.testing.assert_array_equal(array, before[name], err_msg=name)
    labels = IDS.copy()
    labels[:2] = -100
    history = trainer.fit(lambda: iter(batches(labels)), epochs=2, progress=False)
    assert all(np.isfinite(row["loss"]) for row in history.rows)
    assert np.isfinite(trainer.evaluate(lambda: iter(batches(labels)))["loss"])
    history = trainer.fit((FEEDS, labels), batch_size=2, epochs=2, progress=False)
    assert all(np.isfinite(row["loss"]) for row in history.rows)
    assert all(np.isfinite(array).all() for array in trainer.parameters.values())


def test_class_labels():
    points = np.random.default_rng(1).normal(size=(4, 4)).astype(np.float32)
    trainer = onnxtrain.Trainer(onnxtrain.examples.mlp((4, 3)), loss="cross_entropy")
    message = r"has no label that the loss softmax_cross_entropy compares with a prediction: all are -100.* ignored\.$"
    with pytest.raises(DataError, match=message):
        trainer.fit(points, np.full(4, -100), progress=False)
