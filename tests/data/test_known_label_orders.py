"""Text labels become the classes that the model or the data says; a hint says where an order is assumed."""

from __future__ import annotations

import json
import warnings

import numpy as np
import onnx
import pytest

import onnxtrain
from onnxtrain import examples
from onnxtrain.data.data_names import recorded_labels
from onnxtrain.errors import DataError
from onnxtrain.model_file.file import ModelFile
from sentences import warns_sentence

LOSS = "cross_entropy"
RNG = np.random.default_rng(0)
X = RNG.normal(size=(30, 4)).astype(np.float32)
INDICES = X[:, :3].argmax(1)
NAMES = ("fox", "cow", "elk")
TEXTS = np.array(NAMES)[INDICES]


def network(**metadata):
    model = examples.mlp((4, 8, 3))
    for key, value in metadata.items():
        model.metadata_props.add(key=key, value=value)
    return model


def at_path(folder, metadata, config):
    onnx.save(network(**metadata), folder / "model.onnx")
    if config is not None:
        (folder / "config.json").write_text(config)
    return folder / "model.onnx"


RECORDED = {
    "Ultralytics": ({"names": "{0: 'fox', 1: 'cow', 2: 'elk'}"}, None),
    "Hugging Face": ({}, json.dumps({"id2label": {"1": "cow", "0": "fox", "2": "elk"}})),
    "a list": ({"class_names": json.dumps(NAMES)}, None),
}

UNUSABLE = {
    "a gap": ({"names": "{0: 'fox', 2: 'elk'}"}, None),
    "no texts": ({"names": "[1, 2]"}, None),
    "code": ({"names": "__import__('os')"}, None),
    "deep": ({"names": "[" * 100_000}, None),
    "null": ({}, "null"),
    "damaged": ({}, "{"),
}


@pytest.mark.parametrize("case", RECORDED)
def test_labels_that_another_tool_recorded_are_the_classes(case, tmp_path):
    path = at_path(tmp_path, *RECORDED[case])
    expected = onnxtrain.evaluate(path, (X, INDICES), loss=LOSS, metrics="accuracy")
    some = INDICES != 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert onnxtrain.evaluate(path, (X, TEXTS), loss=LOSS, metrics="accuracy") == expected
        assert onnxtrain.Trainer(path, loss=LOSS).evaluate((X, TEXTS), metrics="accuracy") == expected
        trainer, by_index = (onnxtrain.Trainer(path, loss=LOSS) for _ in range(2))
        rows = trainer.fit(X[some], TEXTS[some], progress=False).rows
    assert trainer.labels == NAMES
    assert rows == by_index.fit(X[some], INDICES[some], progress=False).rows


@pytest.mark.parametrize("case", UNUSABLE)
def test_records_of_another_form_are_no_labels(case, tmp_path):
    path = at_path(tmp_path, *UNUSABLE[case])
    assert recorded_labels(ModelFile.load(path)) == ()
    with pytest.raises(DataError, match="their classes are unknown"):
        onnxtrain.evaluate(path, (X, TEXTS), loss=LOSS)


def test_other_labels_than_the_recorded_ones_get_a_hint(tmp_path):
    trainer = onnxtrain.Trainer(network(names="{0: 'ant', 1: 'bee', 2: 'cow'}"), loss=LOSS)
    with warns_sentence("other_classes_in_file", recorded="'ant', 'bee', 'cow'"):
        trainer.fit(X, TEXTS, progress=False)
    assert trainer.labels == ("cow", "elk", "fox")


def test_a_record_for_another_number_of_classes_is_not_used():
    """As of a head that was replaced."""
    trainer = onnxtrain.Trainer(network(names="{0: 'fox', 1: 'cow', 2: 'elk', 3: 'ant'}"), loss=LOSS)
    trainer.fit(X, TEXTS, progress=False)
    assert trainer.labels == ("cow", "elk", "fox")


def test_the_numbers_of_class_names_stay():
    """Of a dataset of Hugging Face: its numbers are the classes, as for every other reader of its numbers."""
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {"input": datasets.Sequence(datasets.Value("float32")), "kind": datasets.ClassLabel(names=[*NAMES])}
    )
    data = datasets.Dataset.from_dict({"input": list(X), "kind": INDICES}, features)
    model = network()
    expected = onnxtrain.evaluate(model, (X, INDICES), loss=LOSS, metrics="accuracy")
    assert onnxtrain.evaluate(model, data, target="kind", loss=LOSS, metrics="accuracy") == expected
    trainer, by_index = (onnxtrain.Trainer(model, loss=LOSS) for _ in range(2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert trainer.evaluate(data, target="kind", metrics="accuracy") == expected
        rows = trainer.fit(data, target="kind", progress=False).rows
    assert rows == by_index.fit(X, INDICES, progress=False).rows
    assert trainer.labels == NAMES
    named = onnxtrain.Trainer(network(names="{0: 'cow', 1: 'elk', 2: 'fox'}"), loss=LOSS)
    named.fit(data, target="kind", progress=False)
    assert named.labels == ("cow", "elk", "fox")  # the order of the model is that of its classes


def test_an_assumed_order_is_told():
    trainer = onnxtrain.Trainer(network(), loss=LOSS)
    with warns_sentence("labels_in_alphabetical_order", labels="'cow', 'elk', 'fox'"):
        trainer.evaluate((X, TEXTS))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.evaluate((X, TEXTS))


def test_numbers_in_alphabetical_order_are_told():
    model = examples.mlp((4, 8, 11))
    labels = np.array([str(index % 11) for index in range(30)])
    trainer = onnxtrain.Trainer(model, loss=LOSS)
    with warns_sentence("numbers_in_alphabetical_order", label="'10'", index=2):
        trainer.fit(X, labels, progress=False)
    padded = onnxtrain.Trainer(model, loss=LOSS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        padded.fit(X, np.char.zfill(labels, 2), progress=False)
