"""Folders of images: equal to the arrays in them, and one sentence for every misfit."""

import builtins
import logging

import numpy as np
import onnx
import pytest

import onnxtrain
from onnxtrain import layers
from onnxtrain.data import ImageFolder, TensorSpec, open_dataset
from onnxtrain.data import files as array_files
from onnxtrain.errors import DataError, OptionError
from sentences import raises_sentence

Image = pytest.importorskip("PIL.Image")

RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (6, 8, 10, 3), np.uint8)
CLASSES = ["cat", "cat", "dog", "dog", "dog", "owl"]


@pytest.fixture
def folder(tmp_path):
    for index, (pixels, name) in enumerate(zip(PIXELS, CLASSES, strict=True)):
        (tmp_path / "data" / name).mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(tmp_path / "data" / name / f"{index}.png")
    (tmp_path / "data" / "cat" / ".hidden.png").write_text("no picture")
    (tmp_path / "data" / "cat" / "notes.txt").write_text("no picture")
    return tmp_path / "data"


def spec(*shape, dtype=np.float32):
    return TensorSpec("image", np.dtype(dtype), ("N", *shape))


def read(source, *shape, dtype=np.float32, **options):
    (batch,) = open_dataset(source, [spec(*shape, dtype=dtype)], **options).batches(100)
    return batch


def test_layouts(folder):
    expected = PIXELS.astype(np.float32) / 255
    last = read(folder, 8, 10, 3)
    np.testing.assert_allclose(last.inputs["image"], expected, rtol=1e-6)
    assert last.targets.tolist() == CLASSES
    first = read(str(folder), 3, 8, 10)
    np.testing.assert_array_equal(first.inputs["image"], last.inputs["image"].transpose(0, 3, 1, 2))
    grey = np.stack([np.asarray(Image.fromarray(pixels).convert("L")) for pixels in PIXELS])
    np.testing.assert_array_equal(read(folder, 1, 8, 10, dtype=np.uint8).inputs["image"][:, 0], grey)
    np.testing.assert_array_equal(read(folder, 8, 10, dtype=np.int64).inputs["image"], grey)
    np.testing.assert_array_equal(read(folder, 3, "H", "W").inputs["image"], first.inputs["image"])
    assert read(folder, 3, 8, 10, dtype=np.float16).inputs["image"].dtype == np.float16


def test_mean_and_deviation_by_channel(folder):
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    expected = (PIXELS / 255 - mean) / std
    for shape, values in (((8, 10, 3), expected), ((3, 8, 10), expected.transpose(0, 3, 1, 2))):
        found = read(ImageFolder(folder, mean=mean, std=std), *shape)
        np.testing.assert_allclose(found.inputs["image"], values, rtol=1e-5, atol=1e-6)
    found = read(ImageFolder(folder, mean=0.5, std=0.25), 8, 10, 3).inputs["image"]
    np.testing.assert_allclose(found, (PIXELS / 255 - 0.5) / 0.25, rtol=1e-5, atol=1e-6)


def test_other_sizes_are_stretched_and_turned(folder):
    tall = Image.fromarray(PIXELS[0])
    exif = tall.getexif()
    exif[0x0112] = 6  # to be turned by 90 degrees clockwise
    tall.save(folder / "owl" / "turned.png", exif=exif)
    tall.convert("P").save(folder / "owl" / "u.GIF")
    found = read(folder, 4, 5, 3, dtype=np.uint8).inputs["image"]
    assert found.shape == (8, 4, 5, 3)
    np.testing.assert_array_equal(found[0], np.asarray(tall.resize((5, 4), Image.Resampling.BILINEAR)))
    turned = tall.transpose(Image.Transpose.ROTATE_270).resize((5, 4), Image.Resampling.BILINEAR)
    np.testing.assert_array_equal(found[6], np.asarray(turned))


def test_orientation_follows_the_training(folder, tmp_path):
    """Without orientation images are read as torchvision reads them, also by the saved model."""
    tall = Image.fromarray(PIXELS[0])
    exif = tall.getexif()
    exif[0x0112] = 3  # to be turned by 180 degrees
    tall.save(folder / "cat" / "-.png", exif=exif)
    found = {
        orient: read(ImageFolder(folder, orient=orient), 8, 10, 3).inputs["image"] for orient in (None, True, False)
    }
    np.testing.assert_allclose(found[False][0] * 255, PIXELS[0], rtol=1e-5)
    np.testing.assert_array_equal(found[True], found[None])
    np.testing.assert_array_equal(found[True][0], found[False][0][::-1, ::-1])
    for orient in (True, False):
        trainer = onnxtrain.Trainer(onnxtrain.append(_flat(), layers.Linear(3)), loss="cross_entropy")
        trainer.fit(ImageFolder(folder, orient=orient), epochs=1, batch_size=4)
        trainer.save(tmp_path / "tuned.onnx")
        wanted = trainer.predict(found[orient])
        np.testing.assert_array_equal(onnxtrain.predict(tmp_path / "tuned.onnx", folder), wanted)
        np.testing.assert_array_equal(trainer.predict(folder), wanted)


def test_a_folder_larger_than_memory_is_mapped(folder, monkeypatch):
    expected = read(folder, 8, 10, 3).inputs["image"]
    monkeypatch.setattr(array_files, "MEMORY_BYTES", 1000)
    data = open_dataset(folder, [spec(8, 10, 3)])
    assert isinstance(data.values("image").base, np.memmap)
    (batch,) = data.batches(10)
    np.testing.assert_array_equal(batch.inputs["image"], expected)
    (shuffled,) = data.batches(10, shuffle=True, seed=1)
    assert sorted(shuffled.targets) == CLASSES
    for image, name in zip(shuffled.inputs["image"], shuffled.targets, strict=True):
        assert name == CLASSES[(expected == image).all(axis=(1, 2, 3)).argmax()]


def test_training_on_pictures_equals_training_on_their_arrays(folder, tmp_path):
    model = onnxtrain.append(_flat(), layers.Linear(3))
    x, y = PIXELS.astype(np.float32) * np.float32(1 / 255), np.array(CLASSES)
    ours, theirs = (onnxtrain.Trainer(model, loss="softmax_cross_entropy") for _ in range(2))
    rows = ours.fit(folder, epochs=2, batch_size=4, validation=0.4, metrics="accuracy").rows
    assert rows == theirs.fit(x, y, epochs=2, batch_size=4, validation=0.4, metrics="accuracy").rows
    assert ours.labels == ("cat", "dog", "owl")
    ours.save(tmp_path / "tuned.onnx")
    measured = onnxtrain.evaluate(tmp_path / "tuned.onnx", folder, loss="softmax_cross_entropy")
    assert measured["loss"] == ours.evaluate(x, y)["loss"]
    np.testing.assert_array_equal(onnxtrain.predict(tmp_path / "tuned.onnx", folder / "dog"), ours.predict(x[2:5]))


def _flat():
    return onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 18]> f (float[N, 8, 10, 3] image) => (float[N, 240] y) '
        "{ y = Flatten(image) }"
    )


def test_broken_pictures_are_named_or_left_out(folder, caplog):
    whole = (folder / "dog" / "3.png").read_bytes()
    (folder / "dog" / "3.png").write_bytes(whole[: len(whole) // 2])
    (folder / "cat" / "0.png").write_bytes(b"")
    with raises_sentence("images_cannot_be_read", what=f"'{folder}/cat/0.png', '{folder}/dog/3.png'", got=2, of=6):
        read(folder, 8, 10, 3)
    with caplog.at_level(logging.WARNING, "onnxtrain"):
        batch = read(ImageFolder(folder, skip_broken=True), 8, 10, 3)
    assert "2 of 6 images cannot be read and are skipped: '" in caplog.text
    assert batch.targets.tolist() == ["cat", "dog", "dog", "owl"]
    np.testing.assert_allclose(batch.inputs["image"], PIXELS[[1, 2, 4, 5]] / np.float32(255), rtol=1e-6)
    for path in folder.rglob("*.png"):
        path.write_bytes(b"")
    with pytest.raises(DataError, match="none of 6 images can be read"):
        read(ImageFolder(folder, skip_broken=True), 8, 10, 3)


def test_folders_that_do_not_fit(folder, tmp_path):
    def refused(message, source=folder, shape=(8, 10, 3), error=DataError, **options):
        with pytest.raises(error, match=message):
            read(source, *shape, **options)

    refused(r"'.*missing' is not a folder", ImageFolder(tmp_path / "missing"))
    refused(r"leave out target=", target="label")
    refused(r"'image' is float32 \(batch, 4\); it needs \(batch, channels, height, width\)", shape=(4,))
    refused(r"'image' is float32 \(batch, any, 8, any\); it needs", shape=(None, 8, None))
    with pytest.raises(DataError, match="the model has 2 inputs; it needs one"):
        open_dataset(folder, [spec(8, 10, 3), TensorSpec("b", np.dtype(np.float32), ("N",))])
    refused(
        r"mean is \(1, 2\); it needs one finite number, or one for each of 3",
        ImageFolder(folder, mean=(1, 2)),
        error=OptionError,
    )
    refused(r"std is 0; it needs numbers greater than 0", ImageFolder(folder, std=0), error=OptionError)
    refused(r"mean is 1, but .* uint8", ImageFolder(folder, mean=1), error=OptionError, dtype=np.uint8)
    Image.fromarray(PIXELS[0, :4]).save(folder / "owl" / "flat.png")
    refused(r"'.*flat\.png' has 10 x 4 pixels, but '.*0\.png' has 10 x 8, .* one size", shape=(3, "H", "W"))
    Image.fromarray(np.zeros((8, 10), np.uint16)).save(folder / "owl" / "deep.png")
    refused(r"'.*deep\.png' has more than 8 bits")
    (folder / "wolf").mkdir()
    refused(r"the folder '.*wolf' holds no images .* remove it if it is no class")
    Image.fromarray(PIXELS[0]).save(folder / "loose.png")
    refused(r"holds images itself, such as 'loose\.png'; for training")
    (tmp_path / "empty").mkdir()
    refused(r"is empty; it needs one folder of images per class", ImageFolder(tmp_path / "empty"))
    refused(r"holds no images", ImageFolder(tmp_path / "empty"), need_target=False)
    refused(r"holds no \.npy file; it needs .* one folder of images per class", tmp_path / "empty")


def test_a_full_disk_is_an_error_of_the_data(folder, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(array_files.GrowingArray, "append", full)
    with raises_sentence(
        "images_folder_cannot_be_read", subject=f"the folder '{folder}'", reason="No space left on device"
    ):
        read(folder, 8, 10, 3)


def test_one_class_only(folder, tmp_path):
    (tmp_path / "one").mkdir()
    (folder / "dog").rename(tmp_path / "one" / "dog")
    trainer = onnxtrain.Trainer(onnxtrain.append(_flat(), layers.Linear(3)), loss="softmax_cross_entropy")
    with raises_sentence("one_label", what="targets", got="dog"):
        trainer.fit(tmp_path / "one")


def test_without_pillow(folder, monkeypatch):
    original = builtins.__import__

    def refuse(name, *arguments, **options):
        if name == "PIL":
            raise ImportError(name)
        return original(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with raises_sentence("pillow_missing"):
        read(folder, 8, 10, 3)
