"""Images with masks and COCO files, damaged byte by byte or changed field by field."""

from __future__ import annotations

import copy
import io
import json
import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from reliability.mutation import damage
from reliability.subject_adapters import spoil_json
from reliability.worker import Operations

CONTENT: dict[str, Any] = {
    "categories": [
        {"id": 3, "name": "a", "keypoints": ["left", "right"]},
        {"id": 1, "name": "b", "keypoints": ["left", "right"]},
    ],
    "images": [
        {"id": 1, "file_name": "0.png", "width": 6, "height": 4},
        {"id": 2, "file_name": "1.png", "width": 6, "height": 4},
    ],
    "annotations": [
        {"id": 1, "image_id": 1, "category_id": 3, "bbox": [1, 1, 3.5, 2], "iscrowd": 0,
         "segmentation": [[1, 1, 4, 1, 4, 3], [0, 0, 2, 0, 2, 2.5]], "keypoints": [1, 2, 2, 3, 1, 1]},
        {"id": 2, "image_id": 2, "category_id": 1, "bbox": [0, 0, 6, 4], "iscrowd": 1,
         "segmentation": {"size": [4, 6], "counts": [3, 5, 16]}, "keypoints": [0, 0, 0, 3, 1, 1]},
        {"id": 3, "image_id": 2, "category_id": 1, "bbox": [0, 0, 6, 4],
         "segmentation": {"size": [4, 6], "counts": "35`0"}, "keypoints": [1, 0, 2, 3, 1, 1]},
    ],
}  # fmt: skip
MODES = ("L", "P", "1", "RGB", "I;16", "LA")


class Subject:
    """A folder read as the data of a model for boxes, pixels or keypoints."""

    def __init__(self, shared: Path) -> None:
        import onnxtrain
        from plugins.images import pixel_models

        warnings.simplefilter("ignore")
        models = {
            "detr": pixel_models.slots(2, 8),
            "cross_entropy": pixel_models.segmenter(3, (8, 8)),
            "bce": pixel_models.segmenter(1, (8, 8)),
            "mse": pixel_models.regressor([4], 8),
        }
        self._trainers = [onnxtrain.Trainer(model, loss=loss) for loss, model in models.items()]

    def run(self, seed: int, index: int, case: Path, operations: Operations) -> None:
        """Write the files and read them."""
        generator = random.Random(f"images {seed} {index}")
        warnings.simplefilter("ignore")
        kind = generator.choice((self._coco, self._coco, self._masks))
        with np.errstate(all="ignore"):
            operations.run(kind.__name__.strip("_"), lambda: kind(generator, case))

    def _image(self, path: Path, generator: random.Random, mode: str = "RGB") -> None:
        from PIL import Image

        kinds, stream = generator.choice((2, 3, 256)), io.BytesIO()
        values = np.array([generator.randrange(kinds) for _ in range(24)], np.uint16).reshape(4, 6)
        image = Image.fromarray(values) if mode == "I;16" else Image.fromarray(values.astype(np.uint8)).convert(mode)
        image.save(stream, "png")
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(damage(stream.getvalue(), generator) if generator.random() < 0.1 else stream.getvalue())

    def _read(self, source: Any, generator: random.Random) -> None:
        trainer = generator.choice(self._trainers)
        for batch in trainer.open_data(source).batches(4):
            assert batch.targets is not None
            assert len(batch.targets) == batch.size

    def _coco(self, generator: random.Random, case: Path) -> None:
        from onnxtrain.images import CocoFile

        content = copy.deepcopy(CONTENT)
        if generator.random() < 0.8:
            spoil_json(content, generator)
        for number in range(2):
            self._image(case / f"{number}.png", generator)
        text = json.dumps(content).encode()
        (case / "d.json").write_bytes(damage(text, generator) if generator.random() < 0.2 else text)
        self._read(CocoFile(case / "d.json", skip_broken=generator.random() < 0.3), generator)

    def _masks(self, generator: random.Random, case: Path) -> None:
        from onnxtrain.images import MaskFolder

        for number in range(3):
            self._image(case / "images" / f"{number}.png", generator)
            self._image(case / "masks" / f"{number}.png", generator, generator.choice(MODES))
        self._read(MaskFolder(case, skip_broken=generator.random() < 0.3), generator)
