"""COCO files: boxes, regions and keypoints equal to those worked out by hand, and one sentence for every misfit."""

from __future__ import annotations

import copy
import json
import logging
import runpy
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnxtrain.images import CocoFile
from pixel_models import regressor, segmenter, slots

import onnxtrain
from onnxtrain.cli import main
from onnxtrain.errors import DataError

Image = pytest.importorskip("PIL.Image")
pytestmark = pytest.mark.plugins

CONTENT = {
    "categories": [{"id": 90, "name": "dog"}, {"id": 7, "name": "cat"}],
    "images": [
        {"id": 5, "file_name": "a.png", "width": 40, "height": 20},
        {"id": 9, "file_name": "empty.png", "width": 20, "height": 20},
    ],
    "annotations": [
        {"id": 1, "image_id": 5, "category_id": 90, "bbox": [10, 5, 20, 10], "iscrowd": 0,
         "segmentation": [[10, 5, 30, 5, 30, 15, 10, 15]]},
        {"id": 2, "image_id": 5, "category_id": 7, "bbox": [0, 0, 4, 20], "iscrowd": 0,
         "segmentation": {"size": [20, 40], "counts": [0, 80, 720]}},
        {"id": 3, "image_id": 5, "category_id": 7, "bbox": [36, 0, 4, 20], "iscrowd": 1,
         "segmentation": {"size": [20, 40], "counts": [720, 80]}},
    ],
}  # fmt: skip
POINTS = {
    "categories": [{"id": 1, "name": "face", "keypoints": ["left", "right"]}],
    "images": [{"id": 1, "file_name": "a.png", "width": 40, "height": 20}],
    "annotations": [
        {"id": 1, "image_id": 1, "category_id": 1, "bbox": [10, 4, 16, 8], "keypoints": [14, 6, 2, 22, 10, 1]},
        {"id": 2, "image_id": 1, "category_id": 1, "keypoints": [10, 5, 2, 30, 15, 2]},
        {"id": 3, "image_id": 1, "category_id": 1, "keypoints": [10, 5, 2, 0, 0, 0]},
    ],
}


def written(folder, content=CONTENT, name="instances.json"):
    """Write a file and its images, of random pixels; return its path."""
    folder.mkdir(exist_ok=True)
    for image in content["images"]:
        pixels = np.random.default_rng(0).integers(0, 256, (image["height"], image["width"], 3)).astype(np.uint8)
        Image.fromarray(pixels).save(folder / image["file_name"])
    (folder / name).write_text(json.dumps(content))
    return folder / name


def opened(path, model, loss):
    (batch,) = onnxtrain.Trainer(model, loss=loss).open_data(path).batches(100)
    return next(iter(batch.inputs.values())), batch.targets


def segmented(path, channels, loss="cross_entropy"):
    return opened(path, segmenter(channels), loss)[1]


@pytest.mark.parametrize(("model", "loss"), [(segmenter(18, stride=4), "yolo(reg_max=4)"), (slots(2), "detr")])
def test_boxes_are_fractions_of_the_image(tmp_path, model, loss):
    images, boxes = opened(written(tmp_path), model, loss)
    wanted = [[(1, 0.5, 0.5, 0.5, 0.5), (0, 0.05, 0.5, 0.1, 1)], [(-1,) * 5] * 2]
    np.testing.assert_allclose(boxes, wanted, atol=1e-6)
    assert len(images) == 2, "an image without objects is kept, and a crowd is no box"
    assert CocoFile(tmp_path / "instances.json").categories == ("cat", "dog")


def test_boxes_train_and_are_measured(tmp_path):
    trainer = onnxtrain.Trainer(segmenter(18, stride=4), loss="yolo(reg_max=4)", optimizer="adam(lr=0.01)")
    rows = trainer.fit(written(tmp_path), epochs=5, progress=False, augment=onnxtrain.images.Flip()).rows
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert {"map", "map_50"} <= trainer.evaluate(tmp_path / "instances.json").keys()
    assert trainer.predict(tmp_path / "instances.json").shape == (2, 18, 4, 4)


@pytest.mark.sweep
@pytest.mark.thorough
def test_map_rises_above_a_half(tmp_path):
    path = Path(__file__).parents[3] / "examples" / "coco.py"
    found = runpy.run_path(str(path))["main"](tmp_path)
    assert found["before"] < 0.05
    assert found["after"] > 0.5


def test_boxes_move_with_images_that_are_cut(tmp_path, caplog):
    path = written(tmp_path)
    onnx.save(segmenter(18, stride=4), tmp_path / "model.onnx")
    record = {"do_resize": True, "size": {"shortest_edge": 20}, "do_center_crop": True, "crop_size": 16}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(record | {"do_normalize": False}))
    boxes = opened(path, tmp_path / "model.onnx", "yolo(reg_max=4)")[1]
    # of 40 x 20 pixels, 16 x 16 remain in the middle: from (12, 2) to (28, 18); the box from (10, 5) to (30, 15)
    np.testing.assert_allclose(boxes[0], [(1, 0.5, 0.5, 1, 0.625)], atol=1e-6)
    assert "1 object without area inside of its image, left out" in caplog.text


def test_regions_are_classes_behind_the_background(tmp_path):
    found = segmented(written(tmp_path), 3)
    whole = np.zeros((20, 40), np.uint8)
    whole[5:15, 10:30], whole[:, :4], whole[:, 36:] = 2, 1, 1
    small = np.asarray(Image.fromarray(whole).resize((16, 16), Image.Resampling.NEAREST))
    np.testing.assert_array_equal(found, [small, np.zeros_like(small)])
    bare = segmented(tmp_path / "instances.json", 2)
    np.testing.assert_array_equal(bare, np.where(found == 0, -100, found.astype(int) - 1))
    any_object = segmented(tmp_path / "instances.json", 1, "bce")
    np.testing.assert_array_equal(any_object, (found > 0)[:, None])


def test_small_regions_lie_on_large_ones(tmp_path):
    content = copy.deepcopy(CONTENT)
    content["annotations"][1:] = [
        {"id": 8, "image_id": 5, "category_id": 7, "segmentation": [[0, 0, 40, 0, 40, 20, 0, 20]]}
    ]
    found = segmented(written(tmp_path, content), 3)
    assert found[0, 8, 8] == 2
    assert found[0, 0, 0] == 1


@pytest.mark.parametrize("shape", [[4], [2, 2]])
def test_keypoints_are_fractions_of_the_box_of_each_object(tmp_path, shape, caplog):
    with caplog.at_level(logging.WARNING):
        images, points = opened(written(tmp_path, POINTS), regressor(shape), "mse")
    np.testing.assert_allclose(points.reshape(2, 4), [[0.25, 0.25, 0.75, 0.75], [0.25, 0.25, 0.75, 0.75]], atol=1e-6)
    assert "1 object without a label for each keypoint, left out" in caplog.text
    with Image.open(tmp_path / "a.png") as image:
        cut = image.crop((10, 4, 26, 12)).resize((16, 16), Image.Resampling.BILINEAR)
    np.testing.assert_allclose(images[0], np.asarray(cut).transpose(2, 0, 1) / np.float32(255), atol=1e-6)


def test_images_are_found_beside_the_file_or_in_a_folder(tmp_path):
    path = written(tmp_path / "images")
    path = path.rename(tmp_path / "instances.json")
    assert opened(path, slots(2), "detr")[1].shape == (2, 2, 5)
    moved = (tmp_path / "images").rename(tmp_path / "elsewhere")
    with pytest.raises(
        DataError, match=r"has 2 images, of which 2 are missing, such as '.*a\.png'; name their folder by"
    ):
        opened(path, slots(2), "detr")
    assert opened(CocoFile(path, images=moved), slots(2), "detr")[1].shape == (2, 2, 5)


def test_commands(tmp_path, monkeypatch, capsys):
    written(tmp_path / "pictures").rename(tmp_path / "instances.json")
    onnx.save(slots(2), tmp_path / "model.onnx")
    monkeypatch.chdir(tmp_path)
    options = ("model.onnx", "--data", "instances.json", "--images", "pictures")
    assert main(["fit", *options, "--loss", "detr", "--batch-size", "2"]) == 0
    capsys.readouterr()
    assert main(["evaluate", *options, "--loss", "detr", "--json"]) == 0
    assert {"map", "map_50"} <= json.loads(capsys.readouterr().out).keys()
    assert main(["predict", *options, "--output", "found.npz"]) == 0


def changed(key, value, of="annotations", index=0):
    """Return a change of one field of the file."""

    def change(content):
        content[of][index][key] = value

    return change


BOX = (slots(2), "detr")
PIXELS = (segmenter(3), "cross_entropy")
MISFITS = {
    "bbox": (BOX, changed("bbox", [1, 2, None, 4]), r"the annotation 1 with the bbox \[1, 2, None, 4\]; it needs four"),
    "image": (BOX, changed("image_id", 77), "has the annotation 1 of the image 77, which is not in the file"),
    "category": (BOX, changed("category_id", 0), "has the annotation 1 of the category 0, which is not in the file"),
    "size": (
        BOX,
        changed("width", 41, "images"),
        r"'.*a\.png' has 40 x 20 pixels, but '.*instances\.json' says 41 x 20, to which its objects belong",
    ),
    "width": (BOX, changed("width", "40", "images"), "an image has width '40'; it needs the width in pixels"),
    "polygon": (
        PIXELS,
        changed("segmentation", [[1, 2, 3]]),
        r"the annotation 1 with a segmentation of another form \(a polygon needs three points or more",
    ),
    "runs": (
        PIXELS,
        changed("segmentation", {"size": [20, 40], "counts": [0, 81]}),
        r"\(its counts are 81 pixels, not 800\); it needs polygons or run lengths of 20 x 40 pixels",
    ),
    "text": (PIXELS, changed("segmentation", {"size": [20, 40], "counts": "\u00e9"}), "its counts are no run lengths"),
    "classes": (
        (segmenter(2), "cross_entropy"),
        lambda content: content["categories"].append({"id": 3, "name": "cow"}),
        r"has 3 categories, but the output 'logits' has 2 classes; it needs 4, of which 0 is the background, or 3",
    ),
    "two images of one id": (
        (slots(2), "detr"),
        lambda content: content["images"][1].update(id=5),
        "has several images of the id 5; give each its own",
    ),
    "two categories of one id": (
        (slots(2), "detr"),
        lambda content: content["categories"][1].update(id=90),
        "has several categories of the id 90; give each its own",
    ),
    "keypoints": (
        (regressor([4]), "mse"),
        lambda content: None,
        r"has no keypoints, but the output 'numbers' of the loss mean_squared_error has the shape \(batch, 4\)",
    ),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_misfits_are_one_sentence(tmp_path, misfit):
    (model, loss), change, message = MISFITS[misfit]
    path = written(tmp_path)
    content = copy.deepcopy(CONTENT)
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match=message):
        opened(path, model, loss)


def test_a_later_file_has_the_same_classes(tmp_path):
    trainer = onnxtrain.Trainer(segmenter(3), loss="cross_entropy")
    first, other = written(tmp_path), copy.deepcopy(CONTENT)
    trainer.open_data(first)
    trainer.evaluate(first)
    other["categories"] = [{"id": 90, "name": "cat"}, {"id": 7, "name": "dog"}]
    path = written(tmp_path, other, "other.json")
    message = r"other\.json' has the category 'cat' as class 1, but the model was trained on it as class 0; write"
    with pytest.raises(DataError, match=message):
        trainer.evaluate(path)
    trainer.predict(path)
    trainer.save(tmp_path / "tuned.onnx")
    with pytest.raises(DataError, match=message):
        onnxtrain.evaluate(tmp_path / "tuned.onnx", path, loss="cross_entropy")
    other["categories"] = [{"id": 90, "name": "bus"}, {"id": 7, "name": "bus"}]  # others altogether
    trainer.open_data(written(tmp_path, other, "other.json"))
    trainer.evaluate(path)


def test_points_that_do_not_fit(tmp_path):
    with pytest.raises(DataError, match=r"has categories of 2 keypoints, but the output 'numbers' .* \(batch, 4\) or"):
        opened(written(tmp_path, POINTS), regressor([6]), "mse")
    content = copy.deepcopy(POINTS)
    content["annotations"][0]["keypoints"] = [1, 2]
    with pytest.raises(DataError, match=r"has the annotation 1 without 2 keypoints \(x, y, v\)"):
        opened(written(tmp_path, content), regressor([4]), "mse")
    content["annotations"] = content["annotations"][2:]
    with pytest.raises(DataError, match="has no object with all its keypoints labelled"):
        opened(written(tmp_path, content), regressor([4]), "mse")


@pytest.mark.parametrize("text", ["{", "[1]", '{"images": 3, "annotations": []}', '{"images": [], "annotations": []}'])
def test_files_of_another_form(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(DataError, match=r"a\.json' (cannot be read as JSON|has no list of (images|categories))"):
        opened(CocoFile(tmp_path / "a.json"), slots(2), "detr")
    assert CocoFile.reads(tmp_path / "a.json") == ("images" in text)


def test_an_image_that_its_tag_rotates(tmp_path):
    path = written(tmp_path)
    exif = Image.Exif()
    exif[0x0112] = 6
    with Image.open(tmp_path / "a.png") as image:
        image.load()
        image.save(tmp_path / "a.png", exif=exif)
    with pytest.raises(DataError, match=r"has 20 x 40 pixels, .* to which its objects belong; its EXIF tag rotates it"):
        opened(path, slots(2), "detr")
    assert len(opened(CocoFile(path, orient=False), slots(2), "detr")[0]) == 2
