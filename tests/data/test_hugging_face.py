"""Hugging Face datasets: columns as inputs, labels by name, images."""

import numpy as np
import pytest

import onnxtrain
from onnxtrain import examples, layers
from onnxtrain.data import TensorSpec, open_dataset
from onnxtrain.errors import DataError
from sentences import raises_sentence

datasets = pytest.importorskip("datasets", reason="Hugging Face's datasets are not installed")

RNG = np.random.default_rng(0)
X = RNG.normal(size=(40, 4)).astype(np.float32)
LABELS = X[:, :3].argmax(1)
NAMES = ["cow", "ant", "bee"]


def trainer():
    return onnxtrain.Trainer(examples.mlp((4, 8, 3)), loss="softmax_cross_entropy", seed=2)


def table(**more):
    return {name: X[:, index] for index, name in enumerate("abcd")} | more


def test_columns_side_by_side():
    data = datasets.Dataset.from_dict(table(kind=np.array(NAMES)[LABELS]))
    ours, theirs = trainer(), trainer()
    rows = ours.fit(data, target="kind", epochs=2, batch_size=7, validation=0.25).rows
    assert rows == theirs.fit(X, np.array(NAMES)[LABELS], epochs=2, batch_size=7, validation=0.25).rows
    assert ours.labels == ("ant", "bee", "cow")
    np.testing.assert_array_equal(ours.predict(data, target="kind"), theirs.predict(X))


def test_a_column_of_lists_and_class_labels(tmp_path):
    features = datasets.Features(
        {"input": datasets.Sequence(datasets.Value("float32")), "label": datasets.ClassLabel(names=NAMES)}
    )
    data = datasets.Dataset.from_dict({"input": list(X), "label": LABELS}, features=features)
    data.save_to_disk(tmp_path / "saved")
    for each in (data, datasets.load_from_disk(tmp_path / "saved"), data.with_format("numpy")):
        ours = trainer()
        rows = ours.fit(each, target="label", batch_size=7).rows
        assert rows == trainer().fit(X, LABELS, batch_size=7).rows
        assert ours.labels == tuple(NAMES)
    part = data.select(range(10))
    assert trainer().fit(part, target="label").rows == trainer().fit(X[:10], LABELS[:10]).rows


def test_pictures():
    image = pytest.importorskip("PIL.Image")
    pixels = RNG.integers(0, 256, (6, 8, 8, 3), np.uint8)
    data = datasets.Dataset.from_dict(
        {"picture": [image.fromarray(each) for each in pixels], "label": [0, 1, 2, 0, 1, 2]},
        features=datasets.Features({"picture": datasets.Image(), "label": datasets.Value("int64")}),
    )
    spec = TensorSpec("image", np.dtype(np.float32), ("N", 3, 8, 8))
    (batch,) = open_dataset(data, [spec], target="label").batches(10)
    np.testing.assert_allclose(batch.inputs["image"], pixels.transpose(0, 3, 1, 2) / np.float32(255), rtol=1e-6)
    (batch,) = open_dataset(data.remove_columns("label"), [spec], need_target=False).batches(10)
    assert batch.inputs["image"].shape == (6, 3, 8, 8)
    model = onnxtrain.append(_flat(), layers.Linear(3))
    assert onnxtrain.Trainer(model, loss="softmax_cross_entropy").fit(data, target="label").rows


def _flat():
    onnx = pytest.importorskip("onnx")
    return onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 18]> f (float[N, 3, 8, 8] image) => (float[N, 192] y) '
        "{ y = Flatten(image) }"
    )


def test_mismatches():
    data = datasets.Dataset.from_dict(table(kind=LABELS, name=["x"] * 40))
    with raises_sentence("target_not_named", what="target", subject="the dataset"):
        trainer().fit(data)
    with raises_sentence(
        "number_of_columns",
        what="input",
        got="5 columns",
        wanted=4,
        subject="the dataset",
        beside="besides the target 'kind'",
    ):
        trainer().fit(data, target="kind")
    with pytest.raises(DataError, match="the dataset has no column 'label'"):
        trainer().fit(data, target="label")
    missing = datasets.Dataset.from_dict({"input": [[1.0] * 4, None], "label": [0, 1]})
    with raises_sentence("missing_value", column="input"):
        trainer().fit(missing, target="label")
    ragged = datasets.Dataset.from_dict({"input": [[1.0] * 4, [1.0]], "label": [0, 1]})
    with raises_sentence("different_lengths_in_column", column="input"):
        trainer().fit(ragged, target="label")
    with raises_sentence("dictionary_of_datasets", what="data", got=["train"]):
        trainer().fit(datasets.DatasetDict(train=data), target="kind")
    with raises_sentence("stream_of_examples"):  # without plugins
        open_dataset(data.to_iterable_dataset(), [TensorSpec("input", np.dtype(np.float32), ("N", 4))], target="kind")
