"""Folders of images and masks: equal to the arrays in them, and one sentence for every misfit."""

from __future__ import annotations

import json

import numpy as np
import onnx
import pytest
from onnxtrain.images import MaskFolder
from pixel_models import channels_last, regressor, segmenter, write_squares

import onnxtrain
from onnxtrain.cli import main
from onnxtrain.errors import DataError

Image = pytest.importorskip("PIL.Image")
pytestmark = pytest.mark.plugins


@pytest.fixture
def folder(tmp_path):
    write_squares(tmp_path / "squares", 12)
    return tmp_path / "squares"


def opened(folder, channels=2, loss="cross_entropy", **model):
    """Return the inputs and targets that a training reads."""
    trainer = onnxtrain.Trainer(segmenter(channels, **model), loss=loss)
    (batch,) = trainer.open_data(folder).batches(100)
    return batch.inputs["image"], batch.targets


def resized(mask, size=(16, 16)):
    return np.asarray(Image.fromarray(mask).resize(size[::-1], Image.Resampling.NEAREST))


def write_masks(folder, change, mode=None):
    for path in sorted((folder / "masks").iterdir()):
        Image.fromarray(change(np.asarray(Image.open(path))), mode).save(path)


def test_training_equals_that_on_arrays(folder):
    masks = [np.asarray(Image.open(path)) for path in sorted((folder / "masks").iterdir())]
    files = sorted((folder / "images").iterdir())
    images = [Image.open(path).resize((16, 16), Image.Resampling.BILINEAR) for path in files]
    x = np.stack([np.asarray(image) for image in images]).transpose(0, 3, 1, 2).astype(np.float32) / 255
    y = np.stack([resized(mask) for mask in masks]).astype(np.int64)
    rows = []
    for data in (folder, (x, y)):
        trainer = onnxtrain.Trainer(segmenter(2), loss="cross_entropy", optimizer="adam(lr=0.02)", seed=0)
        rows.append(trainer.fit(data, epochs=6, batch_size=4, progress=False).rows)
        measured = trainer.evaluate(data, metrics="iou")
        assert measured["iou"] > 0.5
        rows[-1].append(measured)
        rows[-1].append(trainer.predict(data if data is folder else x).tolist())
    assert rows[0][-2] == pytest.approx(rows[1][-2], rel=1e-5)
    np.testing.assert_allclose(rows[0][-1], rows[1][-1], rtol=1e-4, atol=1e-5)


def test_validation_is_a_part_of_the_folder(folder):
    trainer = onnxtrain.Trainer(segmenter(2), loss="dice")
    row = trainer.fit(folder, validation=0.25, metrics="iou", progress=False).rows[0]
    assert {"val_loss", "val_iou"} <= row.keys()


@pytest.mark.parametrize(
    ("change", "mode"),
    [
        (lambda mask: mask * 255, None),
        (lambda mask: mask.astype(bool), None),
        (lambda mask: np.stack([mask] * 3, -1), None),
        (lambda mask: mask.astype(np.uint16), None),
    ],
    ids=["0 and 255", "one bit", "grey in three channels", "16 bits"],
)
def test_masks_of_two_classes(folder, change, mode):
    wanted = opened(folder)[1]
    assert set(np.unique(wanted)) == {0, 1}
    write_masks(folder, change, mode)
    np.testing.assert_array_equal(opened(folder)[1], wanted)


def test_palette_masks_have_their_numbers_not_their_colours(folder):
    wanted = opened(folder)[1]
    for path in (folder / "masks").iterdir():
        image = Image.frombytes("P", (24, 20), (np.asarray(Image.open(path)) * 2).tobytes())
        image.putpalette([0, 0, 0, 9, 9, 9, 255, 0, 7])
        image.save(path)
    np.testing.assert_array_equal(opened(folder, 3)[1], wanted * 2)


@pytest.mark.parametrize(("loss", "ignored"), [("cross_entropy", -100), ("cross_entropy(ignore_index=255)", 255)])
def test_255_beside_other_classes_is_ignored(folder, loss, ignored):
    def bordered(mask):
        found = mask.copy()
        found[:3] = 255
        return found

    before = opened(folder)[1]
    write_masks(folder, bordered)
    found = opened(folder, loss=loss)[1]
    np.testing.assert_array_equal(found[:, 3:], before[:, 3:])
    assert (found[:, :2] == ignored).all()
    with pytest.raises(
        DataError, match=r"png' has pixels to ignore \(255\), which the loss binary_cross_entropy on 'logits' c"
    ):
        opened(folder, 1, "bce")


@pytest.mark.parametrize(("channels", "loss"), [(1, "bce"), (1, "dice"), (2, "bce")])
def test_losses_on_values_get_a_channel_per_class(folder, channels, loss):
    labels = opened(folder)[1]
    found = opened(folder, channels, loss)[1]
    wanted = labels[:, None] == ([1] if channels == 1 else np.arange(2)[:, None, None])
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, wanted)


def test_channels_may_be_last(folder):
    labels = opened(folder)[1]
    for loss, wanted in (("cross_entropy(axis=-1)", labels), ("bce", labels[..., None] == np.arange(2))):
        (batch,) = onnxtrain.Trainer(channels_last(2), loss=loss).open_data(folder).batches(100)
        np.testing.assert_array_equal(batch.targets, wanted)


def test_masks_have_the_size_of_the_output(folder):
    found = opened(folder, stride=4)[1]
    paths = sorted((folder / "masks").iterdir())
    np.testing.assert_array_equal(found, [resized(np.asarray(Image.open(path)), (4, 4)) for path in paths])
    assert opened(folder, size=("H", "W"))[1].shape == (12, 20, 24), "images of an open size keep theirs"


def test_masks_are_cut_along_with_images(tmp_path):
    write_squares(tmp_path / "squares", 3, size=(40, 60))
    onnx.save(segmenter(2), tmp_path / "model.onnx")
    record = {"do_resize": True, "size": {"shortest_edge": 20}, "do_center_crop": True, "crop_size": 16}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(record | {"do_normalize": False}))
    trainer = onnxtrain.Trainer(tmp_path / "model.onnx", loss="cross_entropy")
    (batch,) = trainer.open_data(tmp_path / "squares").batches(9)
    for path, found in zip(sorted((tmp_path / "squares" / "masks").iterdir()), batch.targets, strict=True):
        whole = Image.open(path).resize((30, 20), Image.Resampling.NEAREST)
        np.testing.assert_array_equal(found, np.asarray(whole.crop((7, 2, 23, 18))))


def test_predictions_need_no_masks(folder):
    (folder / "masks" / "00.png").unlink()
    trainer = onnxtrain.Trainer(segmenter(2), loss="cross_entropy")
    assert trainer.predict(folder).shape == onnxtrain.predict(segmenter(2), folder).shape == (12, 2, 16, 16)


def test_broken_images_are_skipped_with_their_masks(folder):
    (folder / "images" / "03.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"1 of 12 images cannot be read: '.*03\.png'; correct or remove them"):
        opened(folder)
    images, masks = opened(MaskFolder(folder, skip_broken=True))
    assert len(images) == len(masks) == 11


def break_masks(folder, name, array, mode=None):
    Image.fromarray(array, mode).save(folder / "masks" / name)


MISFITS = {
    "no mask": (
        lambda f: (f / "masks" / "00.png").unlink(),
        r"has 1 image without a mask, such as '00\.png'; an image",
    ),
    "no image": (
        lambda f: (f / "images" / "01.png").rename(f / "images" / "x.png"),
        r"has 1 image without a mask, such as 'x\.png' and 1 mask without an image, such as '01\.png'",
    ),
    "size": (
        lambda f: break_masks(f, "02.png", np.zeros((5, 6), np.uint8)),
        r"the mask '.*02\.png' has 6 x 5 pixels, but its image has 24 x 20; they need one size",
    ),
    "colours": (
        lambda f: break_masks(f, "02.png", np.random.default_rng(0).integers(0, 9, (20, 24, 3)).astype(np.uint8)),
        r"the mask '.*02\.png' has colours \(mode RGB\), which do not say their classes",
    ),
    "label": (
        lambda f: break_masks(f, "02.png", np.full((20, 24), 7, np.uint8)),
        r"'.*02\.png' has the label 7, but the output 'logits' has 2 classes, 0 to 1",
    ),
    "16 bits": (
        lambda f: break_masks(f, "02.png", np.full((20, 24), 300, np.uint16)),
        r"the mask '.*02\.png' \(mode I.*\) needs classes 0 to 254, and 255 for pixels to ignore",
    ),
    "jpeg": (
        lambda f: (f / "masks" / "02.png").rename(f / "masks" / "02.jpg"),
        r"the mask '.*02\.jpg' is \.jpg, which blurs classes; save it as \.png",
    ),
    "damaged": (
        lambda f: (f / "masks" / "02.png").write_bytes(b"\x89PNG broken"),
        r"the mask '.*02\.png' cannot be read \(.*\); save it again",
    ),
    "twice": (
        lambda f: (f / "masks" / "02.bmp").write_bytes(b""),
        r"has '02\.(bmp|png)' and '02\.(bmp|png)' of one name; remove one of them",
    ),
    "empty": (
        lambda f: [path.unlink() for path in (f / "masks").iterdir()],
        r"masks' holds no images \(\.png",
    ),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_misfits_are_one_sentence(folder, misfit):
    spoil, message = MISFITS[misfit]
    spoil(folder)
    with pytest.raises(DataError, match=message):
        opened(folder)


def test_0_and_255_do_not_say_which_of_three_classes(folder):
    for path in (folder / "masks").iterdir():
        Image.fromarray(np.asarray(Image.open(path)) * np.uint8(255)).save(path)
    with pytest.raises(DataError, match="0 and 255 alone, the classes 0 and 1 of two, but the output 'logits' has 3"):
        onnxtrain.Trainer(segmenter(3), loss="cross_entropy").open_data(folder)


def test_a_mask_that_is_not_rotated_as_its_image(folder):
    exif = Image.Exif()
    exif[0x0112] = 6
    path = folder / "images" / "01.png"
    Image.open(path).save(path, exif=exif)
    with pytest.raises(DataError, match="they need one size; if an EXIF tag rotates one of them, give orient=False"):
        opened(folder)
    assert len(opened(MaskFolder(folder, orient=False))[1]) == 12


def test_models_without_a_value_per_pixel(folder):
    with pytest.raises(
        DataError, match=r"holds masks, but the loss mean_squared_error on the output 'numbers' \(N, 4\) r"
    ):
        onnxtrain.Trainer(regressor([4]), loss="mse").open_data(folder)
    with pytest.raises(DataError, match=r"whose targets are their masks; leave out target="):
        onnxtrain.Trainer(segmenter(2), loss="cross_entropy").fit(folder, target="mask")


def test_commands(folder, tmp_path, monkeypatch, capsys):
    onnx.save(segmenter(2), tmp_path / "model.onnx")
    monkeypatch.chdir(tmp_path)
    options = ("--data", "squares", "--loss", "cross_entropy")
    assert main(["fit", "model.onnx", *options, "--validation", "0.25", "--metrics", "iou", "--mean", "0.1"]) == 0
    capsys.readouterr()
    assert main(["evaluate", "model.onnx", *options, "--metrics", "iou", "--json"]) == 0
    assert "iou" in json.loads(capsys.readouterr().out)
    assert main(["predict", "model.onnx", "--data", "squares", "--output", "found.csv"]) == 0
    assert (tmp_path / "found.csv").read_text().splitlines()[1].startswith("squares/images/00.png,")
    assert main(["evaluate", "model.onnx", *options, "--delimiter", ";"]) == 2
    assert "--delimiter is ';', but 'squares' is read as images; leave it out" in capsys.readouterr().err
