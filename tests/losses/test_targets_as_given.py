"""Targets in users' formats: text, integral floats, one axis too many or too few, tables."""

import copy
import json
import pickle

import numpy as np
import onnx
import pytest

import onnxtrain
from frames import Frame
from onnxtrain import examples
from onnxtrain.errors import CheckpointError, DataError, ModelError
from onnxtrain.errors.spelling import ALIASES
from onnxtrain.losses import LOSSES, Huber, SoftmaxCrossEntropy
from onnxtrain.losses.loss_choice import resolve_loss
from sentences import raises_sentence

RNG = np.random.default_rng(0)
X = RNG.normal(size=(12, 4)).astype(np.float32)
LABELS = RNG.integers(0, 3, 12)
TEXTS = np.array(["bird", "cat", "dog"])[LABELS]
LOSS = "softmax_cross_entropy"


def trained(y, loss=LOSS, width=3, x=X, **options):
    trainer = onnxtrain.Trainer(examples.mlp((4, 8, width)), loss=loss)
    history = trainer.fit(x, y, epochs=2, batch_size=5, **options)
    return trainer.get_weights(flat=True), history.rows, trainer


@pytest.mark.parametrize(
    "y",
    [
        LABELS[:, None],
        LABELS.astype(np.float32),
        LABELS[:, None].astype(np.float64),
        LABELS.astype(np.uint8),
        TEXTS,
        TEXTS.tolist(),
        TEXTS.astype(object),
        TEXTS[:, None],
    ],
    ids=["column", "floats", "column of floats", "bytes", "texts", "list", "objects", "column of texts"],
)
def test_labels_in_other_formats(y):
    expected, rows, _ = trained(LABELS, validation=(X, LABELS), metrics=["accuracy"])
    found, other, _trainer = trained(y, validation=(X, y), metrics=["accuracy"])
    np.testing.assert_array_equal(found, expected)
    assert other == rows
    one = onnxtrain.Trainer(examples.mlp((4, 8, 3)), loss=LOSS)
    one.labels = ("bird", "cat", "dog")
    two = onnxtrain.Trainer(examples.mlp((4, 8, 3)), loss=LOSS)
    assert one.train_step(X, y) == two.train_step(X, LABELS)


@pytest.mark.parametrize("loss", ["mse", "mae", "huber", "bce"])
def test_a_column_of_values_needs_no_extra_axis(loss):
    y = RNG.random(12).astype(np.float32)
    expected = trained(y[:, None], loss, 1)[0]
    np.testing.assert_array_equal(trained(y, loss, 1)[0], expected)
    np.testing.assert_array_equal(trained(y.tolist(), loss, 1)[0], expected)
    batches = [(X[start : start + 5], y[start : start + 5]) for start in range(0, 12, 5)]
    one, two = (onnxtrain.Trainer(examples.mlp((4, 8, 1)), loss=loss) for _ in range(2))
    one.fit(batches)
    two.fit(X, y[:, None], batch_size=5, shuffle=False)
    np.testing.assert_array_equal(one.get_weights(flat=True), two.get_weights(flat=True))


def test_fractions_are_not_labels():
    with pytest.raises(DataError, match="float64"):
        trained(LABELS + 0.5)


def test_text_that_is_not_a_label():
    trainer = trained(TEXTS)[2]
    assert trainer.labels == ("bird", "cat", "dog")
    with raises_sentence("unknown_label", what="targets", got="cow", wanted=["bird", "cat", "dog"]):
        trainer.evaluate(X[:2], ["cat", "cow"])
    with raises_sentence("number_of_labels", what="targets", got=4, wanted=3):
        trained(np.array(["a", "b", "c", "d"])[np.arange(12) % 4])
    with pytest.raises(DataError):
        trained(TEXTS, loss="mse")


def test_text_labels_of_numbers_match_numbers():
    """Validate on a file with numbers as labels after training on labels with a word among them."""
    texts = np.array(["7", "n/a", "3"])[LABELS]
    trainer = trained(texts)[2]
    assert trainer.labels == ("3", "7", "n/a")
    some = texts != "n/a"
    expected = trainer.evaluate(X[some], texts[some], metrics=["accuracy"])
    for numbers in (texts[some].astype(int), texts[some].astype(np.float32), texts[some].astype(int)[:, None]):
        assert trainer.evaluate(X[some], numbers, metrics=["accuracy"]) == expected
    with raises_sentence("unknown_label", what="targets", got="0", wanted=["3", "7", "n/a"]):
        trainer.evaluate(X, LABELS)
    shares = np.eye(3, dtype=np.float32)[LABELS]
    assert trainer.train_step(X, shares) > 0  # distributions over classes are unchanged


def test_texts_after_numbers_are_refused():
    message = "the targets are text labels, but earlier data had class indices"
    with pytest.raises(DataError, match=message):
        trained(LABELS, validation=(X, TEXTS))
    trainer = trained(LABELS)[2]
    with pytest.raises(DataError, match=message):
        trainer.evaluate(X, TEXTS)
    for other in (copy.deepcopy(trainer), pickle.loads(pickle.dumps(trainer)), trainer.rebuilt()):
        with pytest.raises(DataError, match=message):
            other.fit(X, TEXTS)
        assert other.labels is None


def test_labels_stay_with_the_model_and_the_checkpoint(tmp_path):
    trainer = onnxtrain.Trainer(examples.mlp((4, 8, 3)), loss=LOSS)
    trainer.fit(X, TEXTS, checkpoint=tmp_path / "kept")
    trainer.save(tmp_path / "tuned.onnx")
    assert json.loads((tmp_path / "tuned.labels.json").read_text()) == ["bird", "cat", "dog"]
    some = TEXTS != "bird"  # a separate map of these labels would differ
    expected = trainer.evaluate(X[some], LABELS[some], metrics=["accuracy"])
    again = onnxtrain.Trainer(tmp_path / "tuned.onnx", loss=LOSS)
    assert again.evaluate(X[some], TEXTS[some], metrics=["accuracy"]) == expected
    path = tmp_path / "tuned.onnx"
    assert onnxtrain.evaluate(path, (X[some], TEXTS[some]), loss=LOSS, metrics=["accuracy"]) == expected
    other = onnxtrain.Trainer(examples.mlp((4, 8, 3)), loss=LOSS)
    with pytest.raises(CheckpointError, match="labels is"):
        other.fit(X, LABELS, epochs=2, checkpoint=tmp_path / "kept", resume=True)
    (tmp_path / "tuned.labels.json").write_text('{"a": 1}')
    with pytest.raises(ModelError, match="must be a JSON list of strings"):
        onnxtrain.Trainer(path, loss=LOSS)


def frame(**more):
    return Frame({f"feature {index}": X[:, index] for index in range(4)} | more)


def test_a_table_with_a_column_of_targets():
    expected, rows, _ = trained(LABELS)
    trainer = onnxtrain.Trainer(examples.mlp((4, 8, 3)), loss=LOSS)
    assert trainer.fit(frame(species=TEXTS), target="species", epochs=2, batch_size=5).rows == rows
    np.testing.assert_array_equal(trainer.get_weights(flat=True), expected)
    assert trainer.evaluate(frame(species=TEXTS), target="species") == trainer.evaluate(X, LABELS)
    np.testing.assert_array_equal(trainer.predict(frame()), trainer.predict(X))
    np.testing.assert_array_equal(trained(TEXTS, x=frame())[0], expected)


@pytest.mark.parametrize(
    ("table", "target", "message"),
    [
        (frame(species=TEXTS), None, "say which is the target: target='species'"),
        (frame(species=TEXTS), "kind", "no column 'kind': it has 'feature 0'"),
        (frame(species=TEXTS, kind=LABELS), "kind", "column 'species' holds <U4, not numbers; encode it"),
        (
            frame(more=LABELS, kind=LABELS),
            "kind",
            r"has 5 columns besides the target 'kind' .* the input 'input' takes 4",
        ),
    ],
)
def test_tables_that_do_not_fit(table, target, message):
    with pytest.raises(DataError, match=message):
        onnxtrain.Trainer(examples.mlp((4, 8, 3)), loss=LOSS).fit(table, target=target)


@pytest.mark.plugins
def test_losses_have_common_names():
    for alias, name in ALIASES.items():
        assert resolve_loss(alias) == resolve_loss(name)
        assert name in LOSSES
        assert alias not in LOSSES
    assert resolve_loss("cross_entropy(label_smoothing=0.1)").label_smoothing == 0.1
    assert resolve_loss("smooth_l1(delta=2)") == Huber(2.0)


def test_class_weights_in_every_format():
    weights = (1.0, 1.0, 4.0)
    expected = trained(LABELS, SoftmaxCrossEntropy(class_weights=weights))[0]
    assert SoftmaxCrossEntropy(class_weights=np.array(weights)) == SoftmaxCrossEntropy(class_weights=list(weights))
    for given in (list(weights), np.array(weights), {2: 4}, {0: 1, 1: 1, 2: 4.0}):
        np.testing.assert_array_equal(trained(LABELS, SoftmaxCrossEntropy(class_weights=given))[0], expected)
    for text in ("[1, 1, 4]", "{2: 4}"):
        loss = resolve_loss(f"softmax_cross_entropy(class_weights={text}, ignore_index=none)")
        np.testing.assert_array_equal(trained(LABELS, loss)[0], expected)
    with raises_sentence("class_weight_without_class", what="class_weights", got=5, wanted=3):
        trained(LABELS, SoftmaxCrossEntropy(class_weights={5: 1.0}))
    with raises_sentence("class_weights_classes", what="class_weights", got=["cat"]):
        SoftmaxCrossEntropy(class_weights={"cat": 1.0})


def test_labels_are_in_the_metadata_on_request(tmp_path):
    onnx.save(examples.mlp((4, 8, 3)), tmp_path / "model.onnx")
    trainer = onnxtrain.Trainer(tmp_path / "model.onnx", loss=LOSS)
    trainer.fit(X, TEXTS)
    trainer.save(tmp_path / "plain.onnx")
    trainer.save(tmp_path / "tuned.onnx", labels=True)
    plain, tuned = (onnx.load(tmp_path / name) for name in ("plain.onnx", "tuned.onnx"))
    (entry,) = [entry for entry in tuned.metadata_props if entry.key == "onnxtrain.labels"]
    assert json.loads(entry.value) == ["bird", "cat", "dog"]
    tuned.metadata_props.remove(entry)
    assert tuned.SerializeToString() == plain.SerializeToString()
    (tmp_path / "tuned.labels.json").unlink()
    again = onnxtrain.Trainer(tmp_path / "tuned.onnx", loss=LOSS)
    assert again.labels == ("bird", "cat", "dog")
    again.save(tmp_path / "twice.onnx", labels=True)
    assert (tmp_path / "twice.onnx").read_bytes() == (tmp_path / "tuned.onnx").read_bytes()
    again.labels = ("a", "b", "c")
    with raises_sentence("metadata_entry_twice", what="onnxtrain.labels", got='[\n "bird",\n "cat",\n "dog"\n]'):
        again.save(tmp_path / "other.onnx", labels=True)
    tuned.metadata_props.add(key="onnxtrain.labels", value="{}")
    with raises_sentence("labels_file", what="The model's metadata entry 'onnxtrain.labels'"):
        onnxtrain.Trainer(tuned, loss=LOSS)


def test_copies_keep_the_labels():
    trainer = onnxtrain.Trainer(examples.mlp((4, 8, 3)), loss=LOSS)
    trainer.fit(X, TEXTS)
    for other in (copy.deepcopy(trainer), pickle.loads(pickle.dumps(trainer)), trainer.rebuilt()):
        assert other.labels == trainer.labels == ("bird", "cat", "dog")


LABELS_WITH_NAN = np.where(np.arange(len(X)) == 5, np.nan, LABELS)
TEXTS_WITHOUT_ONE = np.where(np.arange(len(X)) == 5, None, np.where(LABELS > 0, "cat", "dog")).astype(object)


@pytest.mark.parametrize("call", ["fit", "evaluate", "train_step"])
@pytest.mark.parametrize(
    ("loss", "targets", "message"),
    [
        (SoftmaxCrossEntropy(), LABELS_WITH_NAN, r"no label at example 5 \(nan\): leave such"),
        (SoftmaxCrossEntropy(), TEXTS_WITHOUT_ONE, r"no label at example 5 \(empty\): leave such"),
        ("bce", np.where(LABELS[:, None] > 1, -1, np.ones((1, 3))), "marks a missing label, leave the example"),
    ],
)
def test_missing_labels_are_called_missing(call, loss, targets, message):
    trainer = onnxtrain.Trainer(examples.mlp((4, 8, 3)), loss=loss)
    trainer.labels = ("cat", "dog", "eel") if targets.dtype == object else None
    with pytest.raises(DataError, match=message):
        getattr(trainer, call)(X, targets)
