"""Predictions averaged over views: equal to the mean that ONNX Runtime gives by hand."""

from __future__ import annotations

import functools

import numpy as np
import onnx
import onnxruntime
import pytest
from pixel_models import channels_last, regressor, segmenter, slots, write_squares

import onnxtrain
from onnxtrain.errors import DataError, OptionError

pytestmark = pytest.mark.plugins

RNG = np.random.default_rng(0)
LARGE = RNG.random((5, 1, 11, 11)).astype(np.float32)
COLOURED = RNG.random((5, 3, 16, 16)).astype(np.float32)


@functools.cache
def by_runtime(make):
    session = onnxruntime.InferenceSession(make().SerializeToString(), providers=["CPUExecutionProvider"])
    return lambda x: session.run(None, {session.get_inputs()[0].name: np.ascontiguousarray(x)})[0]


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("flips", [(), ("horizontal",), ("horizontal", "vertical")])
def test_scores_are_averaged(trained, flips):
    run, x = by_runtime(onnxtrain.examples.digits_cnn), LARGE[..., :8, :8]
    views = [x] + [x[..., ::-1]] * ("horizontal" in flips)
    views += [view[..., ::-1, :] for view in views] if "vertical" in flips else []
    model = onnxtrain.examples.digits_cnn()
    model = onnxtrain.Trainer(model, loss="softmax_cross_entropy") if trained else model
    found = onnxtrain.images.predict_views(model, x, flips=flips, batch_size=2)
    np.testing.assert_allclose(found, np.mean([run(view) for view in views], 0), rtol=1e-4, atol=1e-5)


def test_five_parts_of_larger_images():
    run = by_runtime(onnxtrain.examples.digits_cnn)
    parts = [LARGE[..., top : top + 8, left : left + 8] for top, left in ((0, 0), (0, 3), (3, 0), (3, 3), (1, 1))]
    wanted = np.mean([run(view) for part in parts for view in (part, part[..., ::-1])], 0)
    found = onnxtrain.images.predict_views(onnxtrain.examples.digits_cnn(), LARGE, margin=3)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_pixels_are_mirrored_back():
    run = by_runtime(functools.partial(segmenter, 2))
    wanted = (run(COLOURED) + run(COLOURED[..., ::-1])[..., ::-1]) / 2
    found = onnxtrain.images.predict_views(segmenter(2), COLOURED)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
    last = onnxtrain.images.predict_views(channels_last(2), COLOURED.transpose(0, 2, 3, 1))
    np.testing.assert_allclose(last.transpose(0, 3, 1, 2), wanted, rtol=1e-4, atol=1e-5)


def test_folders_are_read_as_by_predict(tmp_path):
    pytest.importorskip("PIL")
    write_squares(tmp_path, 3)
    trainer = onnxtrain.Trainer(segmenter(2), loss="cross_entropy")
    onnx.save(segmenter(2), tmp_path / "model.onnx")
    wanted = onnxtrain.predict(segmenter(2), tmp_path)
    for model in (trainer, tmp_path / "model.onnx"):
        np.testing.assert_allclose(onnxtrain.images.predict_views(model, tmp_path, flips=()), wanted, rtol=1e-5)
    digits = onnxtrain.examples.digits_cnn()
    assert onnxtrain.images.predict_views(digits, tmp_path / "images", margin=2).shape == (3, 10)


@pytest.mark.parametrize(
    ("model", "options", "error", "message"),
    [
        (segmenter(2), {"margin": 2}, OptionError, "margin is 2, but the output 'logits' has a value per pixel"),
        (segmenter(2), {"margin": -1}, OptionError, "margin is -1; it needs pixels, 0 or more"),
        (segmenter(2), {"flips": "left"}, OptionError, "flips has 'left'; it takes 'horizontal' and 'vertical'"),
        (segmenter(2, ("H", "W")), {"margin": 2}, OptionError, "margin is for a model of a fixed image size"),
        (slots(2), {}, DataError, r"The output 'logits' has the shape \(5, 3, 3\); predict_views averages"),
        (
            regressor([2, 9, 4]),
            {},
            DataError,
            r"has the shape \(5, 2, 9, 4\); predict_views averages an",
        ),
        (
            onnxtrain.Trainer(regressor([4]), loss="mse"),
            {},
            OptionError,
            "has several numbers per image, which may",
        ),
    ],
)
def test_models_and_values_that_do_not_fit(model, options, error, message):
    side = 16 + max(0, options.get("margin", 0))
    with pytest.raises(error, match=message):
        onnxtrain.images.predict_views(model, np.zeros((5, 3, side, side), np.float32), **options)
