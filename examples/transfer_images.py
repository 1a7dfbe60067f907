"""Transfer learning: a network trained on the digits 0 to 6 learns 7, 8 and 9 from 40 images of each.

The new last layer is trained alone first, then the whole network at a tenth of the rate. Needs `onnxtrain[images]`.
"""

from pathlib import Path

import onnxtrain

DATA = Path(__file__).resolve().parent / "data"


def main(folder: Path) -> float:
    """Train, write `tuned.onnx` into the folder, and return the accuracy on held-out images."""
    model = onnxtrain.replace_head(DATA / "digits.onnx", classes=3)

    head = onnxtrain.Trainer(model, loss="cross_entropy", optimizer="adam(lr=0.01)", train="head.*")
    head.fit(DATA / "pictures", validation=0.25, epochs=10, metrics="accuracy", progress=False)

    whole = onnxtrain.Trainer(head.model(), loss="cross_entropy", optimizer="adam(lr=0.001)")
    history = whole.fit(DATA / "pictures", validation=0.25, epochs=10, metrics="accuracy", progress=False)
    whole.save(folder / "tuned.onnx")  # and the class names, tuned.labels.json
    return history.rows[-1]["val_accuracy"]


if __name__ == "__main__":
    print(f"held-out accuracy {main(Path.cwd()):.2f}, in tuned.onnx")
