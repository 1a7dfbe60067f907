"""A COCO file: squares, discs and triangles as PNG files with boxes in JSON, and a YOLO-like detector trained on them.

Needs `onnxtrain[images]`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

import onnxtrain

sys.path.insert(0, str(Path(__file__).parent))
from detection import CLASSES, REG_MAX, SIZE, shapes_in_noise, yolo_like


def write(folder: Path, name: str, count: int, seed: int) -> Path:
    """Write images, and a JSON file in COCO's format with their boxes; return its path."""
    from PIL import Image

    (folder / "images").mkdir(exist_ok=True)
    categories = [{"id": 10 * (label + 1), "name": kind} for label, kind in enumerate(CLASSES)]
    content: dict[str, list[dict[str, object]]] = {"images": [], "annotations": [], "categories": categories}
    for number, (image, boxes) in enumerate(zip(*shapes_in_noise(count, seed), strict=True)):
        file_name = f"{name}{number:04}.png"
        pixels = (image.clip(0, 1) * 255).astype(np.uint8).transpose(1, 2, 0)
        Image.fromarray(pixels).save(folder / "images" / file_name)
        content["images"].append({"id": number, "file_name": file_name, "width": SIZE, "height": SIZE})
        for label, x, y, width, height in boxes[boxes[:, 0] >= 0].tolist():
            box = [side * SIZE for side in (x - width / 2, y - height / 2, width, height)]
            content["annotations"].append(
                {
                    "id": len(content["annotations"]),
                    "image_id": number,
                    "category_id": 10 * (int(label) + 1),
                    "bbox": box,
                }
            )
    path = folder / f"{name}.json"
    path.write_text(json.dumps(content))
    return path


def main(folder: Path, images: int = 1200, epochs: int = 10) -> dict[str, float]:
    """Write both files, train `coco_detector.onnx`, and return the mean average precision before and after."""
    train, test = write(folder, "train", images, 0), write(folder, "test", 200, 1)
    trainer = onnxtrain.Trainer(yolo_like(), loss=f"yolo(reg_max={REG_MAX})", optimizer="adamw(lr=2e-3)", seed=0)
    before = trainer.evaluate(test)["map"]
    trainer.fit(train, epochs=epochs, batch_size=32, schedule="cosine", progress=False)
    trainer.save(folder / "coco_detector.onnx")
    return {"before": before, "after": trainer.evaluate(test)["map"]}


if __name__ == "__main__":
    print(main(Path.cwd()))
