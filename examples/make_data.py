"""Write the sample files in examples/data: a model, images for a new head, and a table with its model.

    pip install ".[demo,images]" && python examples/make_data.py

The files are in the repository; this script documents their origin. Flowers and digits are data sets of scikit-learn.
"""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits, load_iris

import onnxtrain

DATA = Path(__file__).resolve().parent / "data"
NEW = {7: "seven", 8: "eight", 9: "nine"}


def digits() -> None:
    """Write a network trained on the digits 0 to 6, and 40 images each of 7, 8 and 9."""
    x, y = load_digits(return_X_y=True)
    images = (x / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    known = y < 7
    model = onnxtrain.replace_head(onnxtrain.examples.digits_cnn(), classes=7, name="classifier")
    trainer = onnxtrain.Trainer(model, loss="cross_entropy", optimizer="adam(lr=0.002)")
    trainer.fit(images[known], y[known], epochs=20, schedule="cosine")
    trainer.save(DATA / "digits.onnx")
    for digit, name in NEW.items():
        folder = DATA / "pictures" / name
        folder.mkdir(parents=True, exist_ok=True)
        for number, image in enumerate(images[y == digit][:40]):
            Image.fromarray(np.round(image[0] * 255).astype(np.uint8)).save(folder / f"{number:02}.png", optimize=True)


def flowers() -> None:
    """Write Iris as a table with text labels, and an untrained network for it."""
    iris = load_iris()
    with (DATA / "flowers.csv").open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow([name.removesuffix(" (cm)").replace(" ", "_") for name in iris.feature_names] + ["species"])
        for row, kind in zip(iris.data, iris.target, strict=True):
            table.writerow([*row, iris.target_names[kind]])
    (DATA / "flowers.onnx").write_bytes(onnxtrain.examples.mlp((4, 16, 3)).SerializeToString())


if __name__ == "__main__":
    DATA.mkdir(exist_ok=True)
    digits()
    flowers()
