"""Images are prepared as the image processors of ``transformers`` prepare them, with their defaults and others."""

from __future__ import annotations

import json

import numpy as np
import onnx
import pytest

import onnxtrain

transformers = pytest.importorskip("transformers")
pytest.importorskip("torch")
Image = pytest.importorskip("PIL.Image")

RNG = np.random.default_rng(1)
IDENTITY = onnx.parser.parse_model(
    '<ir_version: 8, opset_import: ["": 17]> '
    "f (float[N, 3, H, W] image) => (float[N, 3, H, W] y) { y = Identity(image) }"
)
SETTINGS = [
    ("ViT", {}),
    ("ViT", {"size": {"height": 40, "width": 64}, "resample": 0}),
    ("DeiT", {}),
    ("Beit", {}),
    ("CLIP", {}),
    ("CLIP", {"size": 48, "crop_size": 40}),
    ("CLIP", {"size": {"shortest_edge": 30}, "crop_size": {"height": 44, "width": 20}}),
    ("Siglip", {}),
    ("ConvNext", {}),
    ("ConvNext", {"size": {"shortest_edge": 224}, "crop_pct": 0.95}),
    ("ConvNext", {"size": 192}),
    ("MobileNetV1", {}),
    ("MobileNetV2", {"do_normalize": False}),
    ("Bit", {}),
    ("Levit", {}),
    ("PoolFormer", {}),
    ("PoolFormer", {"crop_pct": 0.95}),
    ("Pvt", {"rescale_factor": 1 / 127.5}),
    ("Blip", {}),
    ("ViT", {"do_resize": False}),
    ("ViT", {"do_rescale": False, "image_mean": [120.0, 110.0, 100.0], "image_std": [60.0, 50.0, 40.0]}),
]


@pytest.mark.parametrize(("kind", "settings"), SETTINGS)
@pytest.mark.parametrize("size", [(300, 200), (64, 211)])
def test_images_are_prepared_as_by_transformers(kind, settings, size, tmp_path):
    (tmp_path / "data").mkdir()
    image = Image.fromarray(RNG.integers(0, 256, (*size, 3), np.uint8))
    image.save(tmp_path / "data" / "0.png")
    processor = getattr(transformers, f"{kind}ImageProcessorPil")(**settings)
    onnx.save(IDENTITY, tmp_path / "model.onnx")
    processor.save_pretrained(tmp_path)
    if isinstance(settings.get("size"), int):  # as older versions wrote it
        config = json.loads((tmp_path / "preprocessor_config.json").read_text())
        (tmp_path / "preprocessor_config.json").write_text(json.dumps({**config, **settings}))
    expected = processor(image, return_tensors="np")["pixel_values"]
    found = onnxtrain.predict(tmp_path / "model.onnx", tmp_path / "data")
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())
