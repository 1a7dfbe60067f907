"""Flips that move targets along, mixup and cutmix: equal to NumPy with the same random numbers."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnxtrain.images import CutMix, Flip, Mixup
from pixel_models import regressor, segmenter

import onnxtrain
from onnxtrain.errors import DataError, OptionError

pytestmark = pytest.mark.plugins

RNG = np.random.default_rng(0)
X = RNG.normal(size=(20, 1, 8, 8)).astype(np.float32)
Y = np.arange(20) % 10
COLOURED = RNG.normal(size=(12, 3, 16, 16)).astype(np.float32)


def generator(seed, epoch, index):
    """The random numbers of a batch, as `fit` makes them."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, epoch, index], spawn_key=(2,))))


def mixed(x, y, rng):
    share, other = rng.beta(0.4, 0.4), rng.permutation(len(x))
    return share * x + (1 - share) * x[other], share * y + (1 - share) * y[other]


def pasted(x, y, rng):
    share, other = rng.beta(1, 1), rng.permutation(len(x))
    half, found, area = [int(8 * (1 - share) ** 0.5) // 2] * 2, x.copy(), 1.0
    middles = [rng.integers(8), rng.integers(8)]
    (top, bottom), (left, right) = [(max(0, m - h), min(8, m + h)) for m, h in zip(middles, half, strict=True)]
    found[:, :, top:bottom, left:right] = x[other][:, :, top:bottom, left:right]
    area = (bottom - top) * (right - left) / 64
    return found, (1 - area) * y + area * y[other]


@pytest.mark.parametrize(("augment", "by_hand"), [(Mixup(alpha=0.4), mixed), (CutMix(), pasted)])
def test_training_equals_steps_on_batches_mixed_by_hand(augment, by_hand):
    ours, other = (
        onnxtrain.Trainer(onnxtrain.examples.digits_cnn(), loss="softmax_cross_entropy", seed=3) for _ in range(2)
    )
    ours.fit(X, Y, epochs=2, batch_size=8, shuffle=False, augment=augment, progress=False)
    for epoch in range(2):
        for index, start in enumerate(range(0, 20, 8)):
            x, y = X[start : start + 8], np.eye(10, dtype=np.float32)[Y[start : start + 8]]
            x, y = by_hand(x, y, generator(3, epoch, index))
            other.train_step(x.astype(np.float32), y.astype(np.float32))
    for name, value in ours.weights.items():
        np.testing.assert_allclose(value, other.weights[name], rtol=1e-5, atol=1e-6)


def test_labels_of_validation_and_of_folders_stay_labels(tmp_path):
    trainer = onnxtrain.Trainer(onnxtrain.examples.digits_cnn(), loss="softmax_cross_entropy")
    texts = np.array([f"digit {label}" for label in Y])
    row = trainer.fit(X, texts, validation=0.2, metrics="accuracy", augment=Mixup(), progress=False).rows[0]
    assert 0 <= row["val_accuracy"] <= 1
    assert trainer.labels == tuple(f"digit {label}" for label in range(10))
    assert trainer.evaluate(X, texts, metrics="accuracy").keys() == {"loss", "accuracy"}


def test_a_resumed_training_mixes_the_same(tmp_path):
    def run(epochs, **options):
        trainer = onnxtrain.Trainer(onnxtrain.examples.digits_cnn(), loss="softmax_cross_entropy")
        return trainer.fit(X, Y, epochs=epochs, batch_size=8, augment=Mixup(), progress=False, **options).rows

    run(1, checkpoint=tmp_path)
    assert run(2, checkpoint=tmp_path, resume=True) == run(2)


@pytest.mark.parametrize("augment", [Mixup(), CutMix()])
def test_integers_and_channels_last(augment):
    images = RNG.integers(0, 256, (6, 5, 7, 3)).astype(np.uint8)
    targets = np.eye(6, dtype=np.float32)
    found, mixed_targets = augment(images, targets, np.random.default_rng(1))
    assert found.dtype == np.uint8
    assert found.shape == images.shape
    np.testing.assert_allclose(mixed_targets.sum(1), 1, rtol=1e-6)


def test_flips_move_masks_boxes_and_keypoints():
    flip = Flip(p=1.0, vertical=True)
    rng = np.random.default_rng(0)
    images, masks = COLOURED.copy(), RNG.integers(0, 3, (12, 16, 16))
    found, moved = flip(images, masks.copy(), rng)
    np.testing.assert_array_equal(found, COLOURED[:, :, ::-1, ::-1])
    np.testing.assert_array_equal(moved, masks[:, ::-1, ::-1])
    channels = RNG.random((12, 2, 4, 4)).astype(np.float32)
    np.testing.assert_array_equal(flip(COLOURED.copy(), channels.copy(), rng)[1], channels[:, :, ::-1, ::-1])
    boxes = np.tile(np.array([[(1, 0.2, 0.3, 0.1, 0.4), (-1, -1, -1, -1, -1)]], np.float32), (12, 1, 1))
    moved = flip(COLOURED.copy(), boxes.copy(), rng)[1]
    np.testing.assert_allclose(moved[3], [(1, 0.8, 0.7, 0.1, 0.4), (-1, -1, -1, -1, -1)], rtol=1e-6)
    points = np.tile(np.array([0.1, 0.2, 0.7, 0.4], np.float32), (12, 1))
    for shape in ((12, 4), (12, 2, 2)):
        moved = Flip(p=1.0, keypoints=(1, 0))(COLOURED.copy(), points.reshape(shape).copy(), rng)[1]
        np.testing.assert_allclose(moved.reshape(12, 4)[0], [0.3, 0.4, 0.9, 0.2], rtol=1e-6)
    assert flip(COLOURED.copy(), None, rng)[1] is None
    labels = np.arange(12)
    np.testing.assert_array_equal(flip(COLOURED.copy(), labels, rng)[1], np.arange(12))


@pytest.mark.parametrize("shape", [(3, 2), (4, 4), (3, 3), (2, 3, 9), (2, 2, 16, 16)])
def test_targets_that_are_no_positions_of_pixels(shape):
    with pytest.raises(DataError, match=r"Flip cannot mirror targets of the shape .* with images of 16 x 16"):
        Flip(p=1.0)(COLOURED.copy(), np.zeros((12, *shape), np.float32), np.random.default_rng(0))


def test_numbers_of_a_regression_may_be_keypoints():
    trainer, points = onnxtrain.Trainer(regressor([4]), loss="mse"), np.zeros((12, 4), np.float32)
    with pytest.raises(OptionError, match="output 'numbers' has several numbers per image, which may be positions"):
        trainer.fit(COLOURED, points, augment=Flip(), progress=False)
    for keypoints in ((1, 0), ()):
        trainer.fit(COLOURED, points, augment=Flip(keypoints=keypoints), progress=False)
    np.testing.assert_array_equal(Flip(p=1.0, keypoints=())(COLOURED.copy(), points, RNG)[1], points)
    with pytest.raises(DataError, match=r"Flip has 2 keypoints, but the targets have the shape \(12, 6\); it needs"):
        Flip(p=1.0, keypoints=(1, 0))(COLOURED.copy(), np.zeros((12, 6), np.float32), RNG)
    single = onnxtrain.Trainer(regressor([1]), loss="mse")
    single.fit(COLOURED, points[:, :1], augment=Flip(), progress=False)


def test_masks_of_one_output_of_several():
    model = segmenter(2)
    model.graph.output.append(onnx.helper.make_tensor_value_info("active", onnx.TensorProto.FLOAT, ["N", 8, 16, 16]))
    trainer = onnxtrain.Trainer(model, loss={"logits": "cross_entropy", "active": "mse"})
    targets = {"logits": np.zeros((12, 16, 16), np.int64), "active": np.zeros((12, 8, 16, 16), np.float32)}
    with pytest.raises(OptionError, match="Flip mirrors the targets of one output along, but this training has 2"):
        trainer.fit(COLOURED, targets, augment=Flip(), progress=False)


def test_many_channels_behind_the_pixels():
    with pytest.raises(DataError, match=r"shape \(2, 16, 16, 4\), whose channels seem to be last; there they need"):
        Flip()(np.zeros((2, 16, 16, 4), np.float32), None, np.random.default_rng(0))


def test_a_flipped_image_keeps_its_own_mask():
    masks = (COLOURED[:, 0] > 0).astype(np.int64)
    seen = []

    def look(images, targets, rng):
        images, targets = Flip()(images, targets, rng)
        seen.append(((images[:, 0] > 0) == targets).all())
        return images, targets

    trainer = onnxtrain.Trainer(segmenter(2), loss="cross_entropy")
    trainer.fit(COLOURED, masks, epochs=2, batch_size=4, augment=look, progress=False)
    assert seen == [True] * 6
    np.testing.assert_array_equal(masks, COLOURED[:, 0] > 0)  # the data are not changed


@pytest.mark.parametrize(
    ("augment", "message"),
    [
        (lambda x, targets, rng: x, "augment returned nothing for the targets; it must return the changed inputs and"),
        (lambda x, targets, rng: (x, None), "augment returned nothing for the targets"),
        (lambda x, targets, rng: (x, targets[:3]), r"shape \(3, 16, 16\) for the targets; it must keep \(12, 16, 16\)"),
        (lambda x, targets, rng: (x, targets * 0.5), "augment returned float64 for the targets; it must keep int64"),
    ],
)
def test_functions_that_do_not_fit(augment, message):
    trainer = onnxtrain.Trainer(segmenter(2), loss="cross_entropy")
    with pytest.raises(DataError, match=message):
        trainer.fit(COLOURED, np.zeros((12, 16, 16), np.int64), augment=augment, progress=False)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Flip(p=2.0), "p is 2.0; Flip needs a probability from 0 to 1"),
        (lambda: Flip(keypoints=(0, 2)), r"keypoints is \[0, 2\]; Flip needs each number from 0 to 1 once"),
        (lambda: Mixup(alpha=0.0), "alpha is 0.0; Mixup needs a finite number greater than 0"),
        (lambda: CutMix(alpha=-1.0), "alpha is -1.0; CutMix needs a finite number greater than 0"),
    ],
)
def test_values_that_do_not_fit(make, message):
    with pytest.raises(OptionError, match=message):
        make()


def test_losses_without_classes_to_mix():
    regression = onnxtrain.Trainer(regressor([4]), loss="mse")
    with pytest.raises(OptionError, match="Mixup mixes the classes of one output, but this training has the loss mean"):
        regression.fit(COLOURED, np.zeros((12, 4), np.float32), augment=Mixup(), progress=False)
    digits = onnxtrain.Trainer(onnxtrain.examples.digits_cnn(), loss="softmax_cross_entropy")
    with pytest.raises(OptionError, match="but this training has sample_weight; leave it out"):
        digits.fit(X, Y, sample_weight=np.ones(20), augment=CutMix(), progress=False)
    with pytest.raises(OptionError, match=r"Mixup needs one label per image, and an output 'logits' \[N, classes\]"):
        onnxtrain.Trainer(segmenter(2), loss="cross_entropy").fit(
            COLOURED, np.zeros((12, 16, 16), np.int64), augment=Mixup(), progress=False
        )
    ignored = onnxtrain.Trainer(onnxtrain.examples.digits_cnn(), loss="cross_entropy")
    with pytest.raises(DataError, match="Mixup needs labels 0 to 9, but one is -100"):
        ignored.fit(X, np.where(Y == 3, -100, Y), augment=Mixup(), progress=False)
    with pytest.raises(DataError, match=r"This is for one input of images, .* but the model has an input of shape"):
        Flip()(np.zeros((3, 4)), np.zeros(3), np.random.default_rng(0))
