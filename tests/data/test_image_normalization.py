"""Images reach a model in the numbers that it was trained with: recorded, beside the model, or scaled by itself."""

from __future__ import annotations

import json
import logging

import numpy as np
import onnx
import pytest

import onnxtrain
from onnxtrain import layers
from onnxtrain.cli import main
from onnxtrain.data import ImageFolder, TensorSpec, open_dataset
from sentences import raises_sentence

Image = pytest.importorskip("PIL.Image")

RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (6, 4, 5, 3), np.uint8)
CLASSES = ["cat", "cat", "dog", "dog", "dog", "cat"]
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
LOSS = "cross_entropy"


@pytest.fixture
def folder(tmp_path):
    for index, (pixels, name) in enumerate(zip(PIXELS, CLASSES, strict=True)):
        (tmp_path / "data" / name).mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(tmp_path / "data" / name / f"{index}.png")
    return tmp_path / "data"


ORDER = np.argsort(CLASSES, kind="stable")


def network(nodes="", dtype="float", **values):
    """Return a network of images [N, 4, 5, 3] with nodes between the input "image" and its flattened values "x"."""
    declared = ", ".join(
        f"float[{', '.join(map(str, np.shape(value)))}] {name} = {{{', '.join(map(repr, np.ravel(value).tolist()))}}}"
        for name, value in values.items()
    )
    text = (
        f'<ir_version: 8, opset_import: ["": 18]> f ({dtype}[N, 4, 5, 3] image) => (float[N, 60] y) '
        f"{f'<{declared}>' if declared else ''} {{ {nodes or 'x = Identity(image)'} y = Flatten(x) }}"
    )
    return onnxtrain.append(onnx.parser.parse_model(text), layers.Linear(2))


SCALING = {
    "a rescaling of Keras": ("a = Mul(image, scale) x = Sub(a, one)", {"scale": [1 / 127.5], "one": [1.0]}, True),
    "a division": ("x = Div(image, scale)", {"scale": [255.0]}, True),
    "a mean in bytes": ("x = Sub(image, mean)", {"mean": [103.9, 116.8, 123.7]}, True),
    "a mean that is added": ("x = Add(image, mean)", {"mean": [-103.9, -116.8, -123.7]}, True),
    "a deviation in bytes": ("a = Sub(image, zero) x = Div(a, std)", {"zero": [0.0], "std": [58.0, 57.0, 57.5]}, True),
    "behind a transposition": (
        "a = Transpose <perm = [0, 3, 1, 2]> (image) b = Mul(scale, a) x = Transpose <perm = [0, 2, 3, 1]> (b)",
        {"scale": [[[1 / 255]], [[1 / 255]], [[1 / 255]]]},
        True,
    ),
    "a mean of fractions": ("a = Sub(image, mean) x = Div(a, std)", {"mean": [*MEAN], "std": [*STD]}, False),
    "from -1 to 1": ("a = Mul(image, two) x = Sub(a, one)", {"two": [2.0], "one": [1.0]}, False),
    "scaled up by the model": ("a = Mul(image, up) x = Sub(a, mean)", {"up": [255.0], "mean": [103.9]}, False),
    "nothing": ("", {}, False),
}


@pytest.mark.parametrize("case", SCALING)
def test_a_model_that_scales_bytes_gets_bytes(case, folder, caplog):
    nodes, values, takes_bytes = SCALING[case]
    model = network(nodes, **values)
    images = PIXELS[ORDER].astype(np.float32)
    expected = images if takes_bytes else images * np.float32(1 / 255)
    trainer = onnxtrain.Trainer(model, loss=LOSS)
    with caplog.at_level(logging.WARNING, "onnxtrain"):
        np.testing.assert_array_equal(trainer.predict(folder), trainer.predict(expected))
    said = "Images are given to the model as pixels of 0 to 255, since the model scales images of 0 to 255 itself."
    assert (said in caplog.text) == takes_bytes
    np.testing.assert_array_equal(onnxtrain.predict(model, folder), onnxtrain.predict(model, expected))
    wanted = trainer.evaluate(expected, np.sort(CLASSES))["loss"]
    assert trainer.evaluate(folder)["loss"] == wanted
    with caplog.at_level(logging.WARNING, "onnxtrain"):
        caplog.clear()
        given = trainer.predict(ImageFolder(folder, mean=0, std=1))
        assert ("here they are given" in caplog.text) == takes_bytes
    np.testing.assert_array_equal(given, trainer.predict(images * np.float32(1 / 255)))


def test_a_frozen_batch_norm_on_bytes_tells_it_too(folder):
    values = {"s": [1.0] * 3, "b": [0.0] * 3, "m": [120.0] * 3, "v": [60.0] * 3}
    model = network(
        "a = Transpose <perm = [0, 3, 1, 2]> (image) c = BatchNormalization(a, s, b, m, v) "
        "x = Transpose <perm = [0, 2, 3, 1]> (c)",
        **values,
    )
    expected = onnxtrain.predict(model, PIXELS[ORDER].astype(np.float32))
    np.testing.assert_array_equal(onnxtrain.predict(model, folder), expected)


def test_the_normalization_of_a_training_stays_with_the_model(folder, tmp_path, caplog):
    """Evaluation, prediction and the next training read images as the training did."""
    trainer = onnxtrain.Trainer(network(), loss=LOSS)
    trainer.fit(ImageFolder(folder, mean=MEAN, std=STD), progress=False)
    trainer.save(tmp_path / "tuned.onnx")
    record = json.loads((tmp_path / "tuned.labels.json").read_text())
    assert record == {"labels": ["cat", "dog"], "mean": [*MEAN], "std": [*STD]}
    normalized = ((PIXELS[ORDER] / 255 - MEAN) / STD).astype(np.float32)
    expected = onnxtrain.predict(tmp_path / "tuned.onnx", normalized)
    with caplog.at_level(logging.WARNING, "onnxtrain"):
        for found in (
            onnxtrain.predict(tmp_path / "tuned.onnx", folder),
            onnxtrain.Trainer(tmp_path / "tuned.onnx", loss=LOSS).predict(folder),
            trainer.predict(folder),
        ):
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert not caplog.records
    measured = onnxtrain.evaluate(tmp_path / "tuned.onnx", folder, loss=LOSS)["loss"]
    assert measured == pytest.approx(trainer.evaluate(ImageFolder(folder, mean=MEAN, std=STD))["loss"])
    with caplog.at_level(logging.WARNING, "onnxtrain"):
        onnxtrain.predict(tmp_path / "tuned.onnx", ImageFolder(folder, mean=0.5))
    assert "as in the training of the model; here they are given" in caplog.text


def test_the_normalization_of_a_checkpoint_is_read(folder, tmp_path):
    source = ImageFolder(folder, mean=MEAN, std=STD)
    first = onnxtrain.Trainer(network(), loss=LOSS)
    first.fit(source, progress=False, checkpoint=tmp_path / "kept")
    second = onnxtrain.Trainer(network(), loss=LOSS)
    second.load_checkpoint(tmp_path / "kept")
    np.testing.assert_array_equal(second.predict(folder), first.predict(source))
    second.save(tmp_path / "tuned.onnx")
    assert json.loads((tmp_path / "tuned.labels.json").read_text())["std"] == [*STD]
    resumed = onnxtrain.Trainer(network(), loss=LOSS)
    resumed.fit(folder, epochs=2, progress=False, checkpoint=tmp_path / "kept", resume=True)
    first.fit(source, progress=False)
    assert resumed.predict(folder).shape == (6, 2)


@pytest.mark.parametrize("settings", [None, {"do_normalize": True, "image_mean": [*MEAN], "image_std": [*STD]}])
def test_a_new_head_reads_images_as_the_model_before(settings, folder, tmp_path):
    """On the command line, where the path of the model is known."""
    onnx.save(network(), tmp_path / "model.onnx")
    if settings is None:
        (tmp_path / "model.labels.json").write_text(json.dumps({"labels": ["a", "b"], "mean": [*MEAN], "std": [*STD]}))
    else:
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    flags = ["--data", str(folder), "--loss", LOSS, "--new-head", "2", "--quiet", "--learning-rate", "0"]
    assert main(["fit", str(tmp_path / "model.onnx"), *flags, "-o", str(tmp_path / "out" / "tuned.onnx")]) != 0
    (tmp_path / "out").mkdir()
    assert main(["fit", str(tmp_path / "model.onnx"), *flags, "-o", str(tmp_path / "out" / "tuned.onnx")]) == 0
    record = json.loads((tmp_path / "out" / "tuned.labels.json").read_text())
    assert record == {"labels": ["cat", "dog"], "mean": [*MEAN], "std": [*STD]}


def test_a_model_that_is_changed_when_it_is_read_keeps_its_normalization(folder, tmp_path):
    """Shared initializers are copied with untie, sparse ones made dense."""
    names = {"labels": ["cat", "dog"], "mean": [*MEAN], "std": [*STD]}
    (tmp_path / "model.labels.json").write_text(json.dumps(names))
    model = network()
    model.graph.node.add(op_type="Mul", input=["b", "b"], output=["unused"])
    first, second = (node for node in model.graph.node if node.op_type in ("Gemm", "Mul"))
    second.CopyFrom(onnx.helper.make_node("Add", [first.output[0], first.input[2]], ["logits"]))
    model.graph.output[0].name = "logits"
    onnx.save(model, tmp_path / "model.onnx")
    trainer = onnxtrain.Trainer(tmp_path / "model.onnx", loss=LOSS, untie="*")
    assert len(trainer.parameters) == 3
    assert trainer.labels == ("cat", "dog")
    normalized = ((PIXELS[ORDER] / 255 - MEAN) / STD).astype(np.float32)
    np.testing.assert_allclose(trainer.predict(folder), trainer.predict(normalized), rtol=1e-5, atol=1e-5)


def test_a_new_head_forgets_the_labels_in_the_metadata():
    model = network()
    model.metadata_props.add(key="onnxtrain.labels", value='["a", "b"]')
    model.metadata_props.add(key="author", value="me")
    assert onnxtrain.Trainer(model, loss=LOSS).labels == ("a", "b")
    changed = onnxtrain.replace_head(model, 2)
    assert onnxtrain.Trainer(changed, loss=LOSS).labels is None
    assert [entry.key for entry in changed.metadata_props] == ["author"]


def test_normalization_that_was_not_given_is_not_recorded(folder, tmp_path):
    trainer = onnxtrain.Trainer(network(), loss=LOSS)
    trainer.fit(folder, progress=False)
    trainer.save(tmp_path / "tuned.onnx")
    assert json.loads((tmp_path / "tuned.labels.json").read_text()) == ["cat", "dog"]


@pytest.mark.parametrize(
    ("settings", "mean", "std"),
    [
        ({"do_normalize": True, "image_mean": [*MEAN], "image_std": [*STD], "rescale_factor": 1 / 255}, MEAN, STD),
        ({"do_normalize": True, "image_mean": [1.0] * 3, "image_std": [2.0] * 3, "rescale_factor": 1 / 127.5}, 0.5, 1),
        ({"do_normalize": False, "image_mean": [*MEAN], "image_std": [*STD]}, 0, 1),
        ({"do_normalize": True, "do_rescale": False, "image_mean": [99.0], "image_std": [51.0]}, 99 / 255, 0.2),
        ({"do_normalize": True, "image_mean": "MEAN", "image_std": [0.0] * 3}, 0, 1),
        (["no object"], 0, 1),
    ],
)
def test_the_settings_of_hugging_face_beside_a_model_are_read(settings, mean, std, folder, tmp_path, caplog):
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "preprocessor_config.json").write_text(json.dumps(settings))
    onnx.save(network(), tmp_path / "hub" / "model.onnx")
    expected = onnxtrain.predict(network(), ((PIXELS[ORDER] / 255 - mean) / std).astype(np.float32))
    with caplog.at_level(logging.WARNING, "onnxtrain"):
        found = onnxtrain.predict(tmp_path / "hub" / "model.onnx", folder)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    followed = isinstance(settings, dict) and settings["image_std"] != [0.0] * 3
    assert ("as preprocessor_config.json beside the model says" in caplog.text) == followed
    trainer = onnxtrain.Trainer(tmp_path / "hub" / "model.onnx", loss=LOSS)
    trainer.fit(folder, progress=False)
    trainer.save(tmp_path / "tuned.onnx")
    assert isinstance(json.loads((tmp_path / "tuned.labels.json").read_text()), dict) == followed


@pytest.mark.parametrize(
    "record", [{"mean": [0.5]}, {"mean": [0.5], "std": [0]}, {"mean": [0.5, 0.5], "std": [1]}, {"mean": 1, "std": 1}]
)
def test_a_damaged_record_is_refused(record, tmp_path):
    onnx.save(network(), tmp_path / "model.onnx")
    (tmp_path / "model.labels.json").write_text(json.dumps(record))
    with raises_sentence("labels_file", what=f"'{tmp_path}/model.labels.json'"):
        onnxtrain.Trainer(tmp_path / "model.onnx", loss=LOSS)


def test_images_of_a_dataset_are_normalized_alike():
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict(
        {"picture": [Image.fromarray(each) for each in PIXELS]},
        features=datasets.Features({"picture": datasets.Image()}),
    )
    nodes, values, _ = SCALING["a division"]
    model = network(nodes, **values)
    expected = onnxtrain.predict(model, PIXELS.astype(np.float32))
    np.testing.assert_array_equal(onnxtrain.predict(model, data), expected)


def test_images_of_a_dataset_with_16_bits_are_refused():
    datasets = pytest.importorskip("datasets")
    deep = Image.fromarray(np.full((4, 5), 40000, np.uint16))
    data = datasets.Dataset.from_dict({"picture": [deep]}, features=datasets.Features({"picture": datasets.Image()}))
    spec = TensorSpec("image", np.dtype(np.float32), ("N", 4, 5, 3))
    with raises_sentence("image_bits", what="an image of the dataset", got="I;16"):
        list(open_dataset(data, [spec], need_target=False).batches(1))


def test_a_normalization_for_other_channels_is_refused(folder, tmp_path):
    grey = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 18]> f (float[N, 1, 4, 5] image) => (float[N, 20] y) { y = Flatten(image) }'
    )
    onnx.save(onnxtrain.append(grey, layers.Linear(2)), tmp_path / "grey.onnx")
    (tmp_path / "grey.labels.json").write_text(json.dumps({"mean": [*MEAN], "std": [*STD]}))
    with raises_sentence("image_channels", what="mean", got=3, wanted=1, mean="0.485,0.456,0.406"):
        onnxtrain.predict(tmp_path / "grey.onnx", folder)


class Examples:
    """A map-style dataset of images, as torchvision's are without a transform."""

    def __len__(self):
        return len(PIXELS)

    def __getitem__(self, index):
        return Image.fromarray(PIXELS[index]), int(CLASSES[index] == "dog")


@pytest.mark.parametrize("case", ["nothing", "a division"])
def test_images_of_a_map_style_dataset_are_read_alike(case):
    nodes, values, takes_bytes = SCALING[case]
    model = network(nodes, **values)
    expected = PIXELS.astype(np.float32) if takes_bytes else PIXELS.astype(np.float32) * np.float32(1 / 255)
    targets = [int(name == "dog") for name in CLASSES]
    ours, theirs = (onnxtrain.Trainer(model, loss=LOSS) for _ in range(2))
    assert ours.evaluate(Examples()) == theirs.evaluate(expected, np.array(targets))
    rows = ours.fit(Examples(), batch_size=3, progress=False).rows
    assert rows == theirs.fit(expected, np.array(targets), batch_size=3, progress=False).rows
