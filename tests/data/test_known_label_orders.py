"""Text labels become the classes that the model or the data says; a hint says where an order is assumed."""

from __future__ import annotations

import json
import warnings

import numpy as np
import onnx
import onnxruntime
import pytest

import onnxtrain
from onnxtrain import examples
from onnxtrain.data.data_names import recorded_labels
from onnxtrain.errors import DataError
from onnxtrain.model_file.file import ModelFile
from sentences import warns_sentence

LOSS = "cross_entropy"
ML = "ai.onnx.ml"
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


def classifier(labels):
    """Return a linear classifier as skl2onnx writes it: scores, and the label of the largest."""
    kind, name = (8, "classlabels_strings") if isinstance(labels[0], str) else (7, "classlabels_ints")
    settings = {"coefficients": [1.0, 0, 0, 1, -1, -1], "intercepts": [0.0] * 3, "post_transform": "NONE"}
    nodes = [
        onnx.helper.make_node("LinearClassifier", ["x"], ["label", "raw"], domain=ML, **settings, **{name: labels}),
        onnx.helper.make_node("Softmax", ["raw"], ["p"]),
    ]
    sizes = {"x": (1, ["N", 2]), "label": (kind, ["N"]), "p": (1, ["N", 3])}
    infos = [onnx.helper.make_tensor_value_info(name, *given) for name, given in sizes.items()]
    graph = onnx.helper.make_graph(nodes, "linear", infos[:1], infos[1:])
    opsets = [onnx.helper.make_opsetid("", 17), onnx.helper.make_opsetid(ML, 3)]
    return onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8)


@pytest.mark.parametrize("labels", [[1, 2, 3], [7, -1, 4], ["wolf", "cow", "ant"], [0, 1, 2]], ids=str)
def test_labels_of_a_classifier_in_the_graph_are_the_classes(labels):
    """Also where the data have some of them only."""
    x = RNG.normal(size=(60, 2)).astype(np.float32)
    classes = np.stack([x[:, 0], x[:, 1], -x.sum(1)]).argmax(0)
    for some in (classes >= 0, classes < 2):
        given = x[some], np.asarray(labels)[classes[some]]
        assert onnxtrain.evaluate(classifier(labels), given, loss=LOSS, metrics="accuracy")["accuracy"] == 1
        trainer = onnxtrain.Trainer(classifier(labels), loss=LOSS, optimizer="sgd(lr=0.01)")
        if not isinstance(labels[0], str):
            trainer.train_step(*given)
        trainer.fit(*given, epochs=1, progress=False)
        assert not [hint for hint in trainer.hints if "label" in hint]
        shown = onnxruntime.InferenceSession(trainer.model().SerializeToString()).run(["label"], {"x": given[0]})[0]
        assert np.mean(shown.astype(given[1].dtype) == given[1]) > 0.95
        assert np.mean(trainer.predict(given[0], labels=True).astype(given[1].dtype) == given[1]) > 0.95


def test_class_indices_go_on_where_they_are_no_labels():
    x = RNG.normal(size=(60, 2)).astype(np.float32)
    trainer = onnxtrain.Trainer(classifier([1, 2, 3]), loss=LOSS)
    trainer.fit(x, np.stack([x[:, 0], x[:, 1], -x.sum(1)]).argmax(0), epochs=1, progress=False)
    assert trainer.labels is None
    assert trainer.evaluate((x, np.arange(60) % 3))["loss"] > 0


def test_the_first_batch_of_numbers_decides():
    x = RNG.normal(size=(4, 2)).astype(np.float32)
    trainers = [onnxtrain.Trainer(classifier(labels), loss=LOSS) for labels in ([1, 2, 3], [0, 1, 2])]
    for targets in ([0, 1, 2, 1], [1, 2, 1, 2]):
        losses = [trainer.train_step(x, np.array(targets)) for trainer in trainers]
        assert losses[0] == losses[1]
    assert trainers[0].labels is None
