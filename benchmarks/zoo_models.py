"""The generated zoo: forty models that nobody tuned for, drawn with a fixed seed over twenty kinds.

    model = ZOO["vgg_1"]
    model.module(), model.onnx("build/models"), model.batch(model.size)

Each kind lists the sizes that people use; a draw takes one of each. The draw does not change when the library does:
another set of models is another ``SEED``, in a commit of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from benchmark_model import BenchmarkModel

if TYPE_CHECKING:
    import torch

SEED = 31
DRAWS = 2
"""Models of each kind."""

ROWS = 0
"""Bound of integers that are rows of the batch."""

Sizes = Mapping[str, Any]


@dataclass(frozen=True)
class ZooModel(BenchmarkModel):
    """A drawn model.

    Attributes:
        size: Its batch.
        integers: The bound of each input of integers; ``ROWS`` where these are rows of the batch.
    """

    size: int = 1
    integers: Mapping[str, int] = field(default_factory=dict)

    def batch(self, size: int, seed: int = 0) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Random inputs by name, and class indices."""
        generator = np.random.default_rng(seed)
        inputs: dict[str, np.ndarray] = {}
        for name, shape in self.inputs.items():
            if name in self.integers:
                inputs[name] = generator.integers(0, self.integers[name] or size, (size, *shape))
            else:
                inputs[name] = generator.standard_normal((size, *shape)).astype(np.float32)
        return inputs, generator.integers(0, self.classes, (size, *self.labels))


@dataclass(frozen=True)
class Kind:
    """A kind of model.

    Attributes:
        title: Its name in tables.
        module: The function of ``zoo_modules.py`` that builds it.
        sizes: Choices for every argument of it.
        batches: Choices for the batch.
        inputs: Shapes of inputs without the batch, for the sizes drawn.
        integers: Bounds of the inputs of integers.
        labels: Shape of the labels of one example.
        classes: The number of logits.
    """

    title: str
    module: str
    sizes: Mapping[str, Sequence[Any]]
    batches: Sequence[int]
    inputs: Callable[[Sizes], dict[str, tuple[int, ...]]]
    integers: Callable[[Sizes], dict[str, int]] = lambda _: {}
    labels: Callable[[Sizes], tuple[int, ...]] = lambda _: ()
    classes: Callable[[Sizes], int] = lambda _: 10


def _image(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    return {"image": (3, sizes["image"], sizes["image"])}


def _small_image(_: Sizes) -> dict[str, tuple[int, ...]]:
    return {"image": (3, 32, 32)}


def _tokens(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    return {"tokens": (sizes["length"],)}


def _vocabulary(sizes: Sizes) -> dict[str, int]:
    return {"tokens": sizes["vocabulary"]}


def _pixels(sizes: Sizes) -> tuple[int, ...]:
    return (sizes["image"], sizes["image"])


KINDS: dict[str, Kind] = {
    "messages": Kind(
        "message passing",
        "MessagePassing",
        {"width": (32, 64, 128), "layers": (2, 3), "degree": (4, 8, 16), "sums": ("scatter_add", "index_put")},
        (1024, 2048, 4096),
        lambda sizes: {"x": (32,), "source": (sizes["degree"],), "target": (sizes["degree"],)},
        lambda _: {"source": ROWS, "target": ROWS},
    ),
    "columns": Kind(
        "columns as tokens",
        "FeatureTokens",
        {"features": (16, 24, 32), "width": (32, 64), "heads": (4, 8), "layers": (2, 3)},
        (256, 512),
        lambda sizes: {"x": (sizes["features"],)},
    ),
    "relative": Kind(
        "encoder with relative positions",
        "relative_encoder",
        {"length": (64, 128), "width": (128, 192), "heads": (4, 8), "layers": (2, 3), "vocabulary": (4000, 8000)},
        (4, 8, 16),
        _tokens,
        _vocabulary,
    ),
    "conformer": Kind(
        "Conformer",
        "conformer",
        {"length": (100, 160), "width": (96, 144), "heads": (4,), "layers": (2, 3), "kernel": (15, 31)},
        (4, 8),
        lambda sizes: {"x": (sizes["length"], 80)},
        labels=lambda sizes: (sizes["length"],),
    ),
    "tabular": Kind(
        "tabular with batch normalization",
        "tabular",
        {"features": (16, 50, 100), "width": (128, 256, 512), "layers": (2, 3, 4)},
        (256, 1024),
        lambda sizes: {"x": (sizes["features"],)},
    ),
    "recommender": Kind(
        "26 categories",
        "Recommender",
        {"tables": ("one", "many"), "size": (500, 2000), "width": (8, 16, 32), "hidden": (128, 256)},
        (512, 1024, 2048),
        lambda _: {"numbers": (13,), "category": (26,)},
        lambda sizes: {"category": sizes["size"]},
    ),
    "windows": Kind(
        "shifted windows",
        "shifted_windows",
        {"image": (64, 96), "patch": (4,), "width": (64, 96), "heads": (2, 4), "window": (4, 8), "layers": (2, 4)},
        (4, 8),
        _image,
    ),
    "temporal": Kind(
        "dilated causal convolutions",
        "temporal",
        {"length": (128, 256, 512), "channels": (1, 8), "width": (32, 64), "kernel": (2, 3), "levels": (5, 6)},
        (8, 16),
        lambda sizes: {"x": (sizes["channels"], sizes["length"])},
        labels=lambda sizes: (sizes["length"],),
    ),
    "vgg": Kind(
        "VGG, 32x32",
        "vgg",
        {"width": (32, 48, 64), "convolutions": (1, 2), "hidden": (256, 512)},
        (8, 16, 32),
        _small_image,
    ),
    "recurrent": Kind(
        "recurrent",
        "recurrent",
        {"kind": ("LSTM", "GRU"), "length": (32, 64), "width": (128, 256), "layers": (1, 2), "both": (False, True)},
        (8, 16, 32),
        lambda sizes: {"x": (sizes["length"], 64)},
    ),
    "volume": Kind(
        "3-D convolutions",
        "volume",
        {"size": (16, 24), "width": (8, 16), "norm": (False, True)},
        (4, 8),
        lambda sizes: {"volume": (1, sizes["size"], sizes["size"], sizes["size"])},
    ),
    "unet": Kind(
        "U-Net with bilinear resize",
        "unet",
        {"image": (64, 96), "width": (12, 16, 24)},
        (2, 4),
        _image,
        labels=_pixels,
    ),
    "depthwise": Kind(
        "depthwise convolutions",
        "depthwise",
        {
            "image": (48, 64),
            "width": (16, 24),
            "kernel": (3, 5),
            "blocks": (1, 2, 3),
            "activation": ("ReLU6", "SiLU", "Hardswish"),
            "excitation": (False, True),
        },
        (4, 8, 16),
        _image,
    ),
    "segmentation": Kind(
        "dilated segmentation",
        "segmentation",
        {"image": (64, 96, 128), "width": (16, 32), "layers": (3, 4)},
        (2, 4),
        _image,
        labels=_pixels,
    ),
    "convnext": Kind(
        "ConvNeXt",
        "convnext",
        {"image": (32, 48), "width": (32, 48), "layers": (2, 3)},
        (4, 8),
        _image,
    ),
    "mixer": Kind(
        "MLP-Mixer",
        "mixer",
        {"image": (32, 48), "patch": (4,), "width": (96, 128), "layers": (3, 4)},
        (8, 16),
        _image,
    ),
    "decoder": Kind(
        "causal language model, tied",
        "Decoder",
        {"length": (64, 128), "width": (128, 192), "heads": (4,), "layers": (2, 3), "vocabulary": (1000, 4000)},
        (2, 4, 8),
        _tokens,
        _vocabulary,
        labels=lambda sizes: (sizes["length"],),
        classes=lambda sizes: sizes["vocabulary"],
    ),
    "upsampler": Kind(
        "transposed convolutions",
        "upsampler",
        {"width": (8, 16), "stages": (3,), "norm": (False, True)},
        (8, 16),
        lambda _: {"latent": (64,)},
        labels=lambda sizes: (4 << sizes["stages"], 4 << sizes["stages"]),
    ),
    "dense": Kind(
        "DenseNet, 32x32",
        "dense",
        {"growth": (12, 16, 24), "layers": (4, 6)},
        (4, 8, 16),
        _small_image,
    ),
    "texts": Kind(
        "1-D convolutions over texts",
        "TextConvolutions",
        {"length": (64, 128), "width": (64, 128), "filters": (64, 100), "vocabulary": (5000, 20000)},
        (16, 32, 64),
        _tokens,
        _vocabulary,
    ),
}


def draw(seed: int = SEED, count: int = DRAWS) -> dict[str, ZooModel]:
    """Draw ``count`` different models of every kind."""
    generator = np.random.default_rng(seed)
    drawn: dict[str, ZooModel] = {}
    for name, kind in KINDS.items():
        seen: list[tuple[dict[str, Any], int]] = []
        while len(seen) < count:
            sizes = {key: choices[generator.integers(len(choices))] for key, choices in kind.sizes.items()}
            batch = kind.batches[generator.integers(len(kind.batches))]
            if (sizes, batch) not in seen:
                seen.append((sizes, batch))
                model = _model(f"{name}_{len(seen)}", kind, sizes, batch)
                drawn[model.name] = model
    return drawn


def _model(name: str, kind: Kind, sizes: Sizes, batch: int) -> ZooModel:
    words = [f"{key} {value}" for key, value in sizes.items() if not isinstance(value, bool)]
    words += [key for key, value in sizes.items() if value is True]

    def build() -> torch.nn.Module:
        import zoo_modules

        return getattr(zoo_modules, kind.module)(**sizes)

    return ZooModel(
        name,
        f"{kind.title}: {', '.join(words)}",
        build,
        kind.inputs(sizes),
        classes=kind.classes(sizes),
        labels=kind.labels(sizes),
        size=batch,
        integers=kind.integers(sizes),
    )


ZOO: dict[str, ZooModel] = draw()
