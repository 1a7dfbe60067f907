"""Images reach a model in the size that its author prepared them in: from its shape, or preprocessor_config.json."""

from __future__ import annotations

import json
import logging

import numpy as np
import onnx
import pytest

import onnxtrain
from sentences import raises_sentence

Image = pytest.importorskip("PIL.Image")

RNG = np.random.default_rng(0)
SIZES = [(30, 20), (20, 30), (25, 25), (41, 19)]


@pytest.fixture
def folder(tmp_path):
    for index, (width, height) in enumerate(SIZES):
        place = tmp_path / "data" / "ab"[index % 2]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(RNG.integers(0, 256, (height, width, 3), np.uint8)).save(place / f"{index}.png")
    return tmp_path / "data"


def files(folder):
    return sorted(folder.rglob("*.png"))


def opened(folder):
    found = []
    for file in files(folder):
        with Image.open(file) as image:
            found.append(image.copy())
    return found


def model(shape="N, C, H, W", before="x = Identity(image)"):
    """Return a classifier of two channels' means, whose image has the given shape."""
    weight = ", ".join(map(repr, np.linspace(-1, 1, 2 * 3 * 9).tolist()))
    return onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 17]> f (float[{shape}] image) => (float[N, 2] y) '
        f"<float[2, 3, 3, 3] w = {{{weight}}}> {{ {before} c = Conv(x, w) g = GlobalAveragePool(c) y = Flatten(g) }}"
    )


def write(tmp_path, settings, network=None, at="hub"):
    place = tmp_path / at
    place.mkdir(parents=True, exist_ok=True)
    (tmp_path / "hub" / "preprocessor_config.json").write_text(json.dumps(settings))
    onnx.save(network or model(), place / "model.onnx")
    return place / "model.onnx"


def as_input(images):
    return np.stack([np.asarray(image, np.float32).transpose(2, 0, 1) / 255 for image in images])


def middle(image, height, width):
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return image.crop((left, top, left + width, top + height))


def shorter(image, edge, how):
    sides = [int(edge * side / min(image.size)) for side in image.size]
    return image.resize(sides, how)


BOTH, CROP = {"do_resize": True, "do_center_crop": True}, {"crop_size": {"height": 12, "width": 14}}
BILINEAR, BICUBIC = Image.Resampling.BILINEAR, Image.Resampling.BICUBIC
PREPARED = {
    "a size": (
        {"do_resize": True, "size": {"height": 12, "width": 18}, "resample": 2},
        lambda image: image.resize((18, 12), BILINEAR),
    ),
    "a number, as a square": (
        {"do_resize": True, "size": 12, "resample": 3, "image_processor_type": "ViTImageProcessor"},
        lambda image: image.resize((12, 12), BICUBIC),
    ),
    "a number, as the shorter edge": (
        {**BOTH, "size": 16, "crop_size": 12, "resample": 3, "feature_extractor_type": "CLIPFeatureExtractor"},
        lambda image: middle(shorter(image, 16, BICUBIC), 12, 12),
    ),
    "a shorter edge and a crop": (
        {**BOTH, **CROP, "size": {"shortest_edge": 16}, "resample": 2},
        lambda image: middle(shorter(image, 16, BILINEAR), 12, 14),
    ),
    "a size and a crop": (
        {**BOTH, **CROP, "size": {"height": 16, "width": 16}, "resample": 0},
        lambda image: middle(image.resize((16, 16), Image.Resampling.NEAREST), 12, 14),
    ),
    "a crop alone": (
        {"do_resize": False, "do_center_crop": True, **CROP},
        lambda image: middle(image, 12, 14),
    ),
    "a crop beyond the image": (
        {"do_center_crop": True, "crop_size": {"height": 33, "width": 35}},
        lambda image: middle(image, 33, 35),
    ),
    "ConvNext": (
        {
            "do_resize": True,
            "size": {"shortest_edge": 14},
            "resample": 3,
            "image_processor_type": "ConvNextImageProcessor",
        },
        lambda image: middle(shorter(image, 16, BICUBIC), 14, 14),
    ),
    "a share that is cut": (
        {
            "do_resize": True,
            "size": {"shortest_edge": 14},
            "crop_pct": 0.7,
            "resample": 2,
            "image_processor_type": "ConvNextImageProcessor",
        },
        lambda image: middle(shorter(image, 20, BILINEAR), 14, 14),
    ),
    "PoolFormer": (
        {**BOTH, **CROP, "size": {"shortest_edge": 18}, "crop_pct": 0.9, "resample": 3},
        lambda image: middle(shorter(image, 20, BICUBIC), 12, 14),
    ),
    "Levit": (
        {
            **BOTH,
            **CROP,
            "size": {"shortest_edge": 14},
            "resample": 3,
            "image_processor_type": "LevitImageProcessorFast",
        },
        lambda image: middle(shorter(image, 16, BICUBIC), 12, 14),
    ),
}


@pytest.mark.parametrize("case", PREPARED)
def test_images_are_resized_and_cut_as_the_author_did(case, folder, tmp_path):
    settings, prepare = PREPARED[case]
    expected = onnxtrain.predict(model(), as_input([prepare(image) for image in opened(folder)]))
    path = write(tmp_path, settings)
    np.testing.assert_allclose(onnxtrain.predict(path, folder), expected, rtol=1e-5, atol=1e-6)
    trainer = onnxtrain.Trainer(path, loss="cross_entropy")
    np.testing.assert_allclose(trainer.predict(folder), expected, rtol=1e-5, atol=1e-6)


OPEN = {
    "no size": {"do_resize": True, "resample": 2, "image_mean": [0.0] * 3},
    "an unknown filter": {"do_resize": True, "size": 12, "resample": 9},
    "a longest edge": {"do_resize": True, "size": {"shortest_edge": 8, "longest_edge": 20}, "resample": 2},
    "a share of two sides": {"do_resize": True, "size": {"height": 8, "width": 8}, "crop_pct": 0.9, "resample": 2},
    "a share above 1": {"do_resize": True, "size": {"shortest_edge": 8}, "crop_pct": 2.0, "resample": 2},
    "an edge of millions": {"do_resize": True, "size": 10**6, "resample": 2},
    "no steps": {"size": 12, "crop_size": 8},
    "settings of sound": {"do_normalize": True, "feature_size": 80, "do_resize": True},
}


@pytest.mark.parametrize("case", OPEN)
def test_settings_that_leave_the_size_open_are_not_followed(case, folder, tmp_path):
    path = write(tmp_path, OPEN[case])
    with raises_sentence("image_sizes_differ", what=tmp_path / "data/a/2.png", got=(25, 25, 3), wanted=(20, 30, 3)):
        onnxtrain.predict(path, folder)


def test_a_fixed_size_of_the_model_counts(folder, tmp_path):
    settings = PREPARED["a shorter edge and a crop"][0]
    path = write(tmp_path, settings, model("N, 3, 10, 11"))
    expected = onnxtrain.predict(model(), as_input([image.resize((11, 10), BILINEAR) for image in opened(folder)]))
    np.testing.assert_allclose(onnxtrain.predict(path, folder), expected, rtol=1e-5, atol=1e-6)
    path = write(tmp_path, settings, model("N, 3, 12, 14"))
    prepared = [PREPARED["a shorter edge and a crop"][1](image) for image in opened(folder)]
    np.testing.assert_allclose(
        onnxtrain.predict(path, folder), onnxtrain.predict(model(), as_input(prepared)), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize(
    ("shape", "before"),
    [
        ("N, C, H, W", "x = Identity(image)"),
        ("N, H, W, C", "x = Transpose <perm = [0, 3, 1, 2]> (image)"),
        ("N, C, H, W", "two = Constant <value = float {2.0}> () a = Mul(two, image) x = Sub(a, two)"),
    ],
)
def test_convolutions_tell_the_number_of_channels(shape, before, folder, caplog):
    for image, file in zip(opened(folder), files(folder), strict=True):
        image.resize((20, 15)).save(file)
    network = model(shape, before)
    pixels = as_input(opened(folder))
    expected = onnxtrain.predict(network, pixels if shape == "N, C, H, W" else pixels.transpose(0, 2, 3, 1))
    np.testing.assert_allclose(onnxtrain.predict(network, folder), expected, rtol=1e-5, atol=1e-6)
    trainer = onnxtrain.Trainer(network, loss="cross_entropy")
    trainer.fit(folder, epochs=1, progress=False)
    assert trainer.predict(folder).shape == (4, 2)
    assert "The model leaves the size of images open: they keep theirs, 20 x 15." in caplog.text


def test_the_channels_of_a_grouped_convolution_are_those_of_all_groups(folder):
    network = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> f (float[N, C, 8, 8] image) => (float[N, 3] y) '
        "<float[3, 1, 1, 1] w = {1.0, 2.0, 3.0}> "
        "{ c = Conv <group = 3> (image, w) g = GlobalAveragePool(c) y = Flatten(g) }"
    )
    expected = onnxtrain.predict(network, as_input([image.resize((8, 8), BILINEAR) for image in opened(folder)]))
    np.testing.assert_allclose(onnxtrain.predict(network, folder), expected, rtol=1e-5, atol=1e-6)


def test_the_settings_of_a_repository_with_a_folder_onnx_are_found(folder, tmp_path):
    settings, prepare = PREPARED["a size"]
    path = write(tmp_path, settings, at="hub/onnx")
    expected = onnxtrain.predict(model(), as_input([prepare(image) for image in opened(folder)]))
    np.testing.assert_allclose(onnxtrain.predict(path, folder), expected, rtol=1e-5, atol=1e-6)


def test_the_size_of_a_training_stays_with_the_model(folder, tmp_path):
    settings, _ = PREPARED["a shorter edge and a crop"]
    trainer = onnxtrain.Trainer(write(tmp_path, settings), loss="cross_entropy")
    trainer.fit(folder, epochs=1, progress=False)
    saved = tmp_path / "elsewhere" / "tuned.onnx"
    saved.parent.mkdir()
    trainer.save(saved)
    record = json.loads(saved.with_name("tuned.labels.json").read_text())
    assert record == {"labels": ["a", "b"], "resize": [16], "crop": [12, 14], "resample": "bilinear"}
    expected = trainer.predict(folder)
    np.testing.assert_allclose(onnxtrain.predict(saved, folder), expected, rtol=1e-5, atol=1e-6)
    measured = onnxtrain.evaluate(saved, folder, loss="cross_entropy")["loss"]
    assert measured == pytest.approx(trainer.evaluate(folder)["loss"])


@pytest.mark.parametrize(
    "record",
    [
        {"resize": 16},
        {"resize": [1, 2, 3]},
        {"resize": [0, 4]},
        {"resize": [16], "crop": [4]},
        {"resize": [16], "crop": "4"},
        {"resize": [16], "resample": "cubic"},
        {"resize": [10**9]},
        {"resize": [True]},
    ],
)
def test_a_record_of_another_form_is_refused(record, tmp_path):
    onnx.save(model(), tmp_path / "tuned.onnx")
    (tmp_path / "tuned.labels.json").write_text(json.dumps(record))
    with raises_sentence("labels_file", what=f"'{tmp_path}/tuned.labels.json'"):
        onnxtrain.Trainer(tmp_path / "tuned.onnx", loss="cross_entropy")


def test_a_step_that_is_not_followed_is_named(folder, tmp_path, caplog):
    settings = {"do_resize": True, "size": 12, "resample": 2, "do_rescale": True, "do_normalize": False}
    path = write(tmp_path, {**settings, "do_flip_channel_order": True, "do_reduce_labels": True})
    with caplog.at_level(logging.WARNING, "onnxtrain"):
        onnxtrain.predict(path, folder)
    assert "beside the model says, except do_flip_channel_order, which is not followed." in caplog.text


def test_a_narrow_image_whose_longer_edge_would_be_huge_is_refused(tmp_path):
    (tmp_path / "data" / "a").mkdir(parents=True)
    Image.new("RGB", (60000, 1)).save(tmp_path / "data" / "a" / "0.png")
    path = write(tmp_path, {**BOTH, **CROP, "size": {"shortest_edge": 256}, "resample": 2})
    with raises_sentence("image_edge", what=(60000, 1), width=60000, height=1, long_edge=256, edge=256):
        onnxtrain.predict(path, tmp_path / "data")


def test_images_of_a_map_style_dataset_are_resized_likewise(folder, tmp_path):
    class Pictures:
        def __len__(self):
            return len(SIZES)

        def __getitem__(self, index):
            return {"image": opened(folder)[index]}

    settings, prepare = PREPARED["a shorter edge and a crop"]
    expected = onnxtrain.predict(model(), as_input([prepare(image) for image in opened(folder)]))
    found = onnxtrain.predict(write(tmp_path, settings), Pictures())
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
