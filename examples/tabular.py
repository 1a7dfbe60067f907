"""Tabular data: columns of a CSV file are the inputs, a text column is the target."""

import json
from pathlib import Path

import numpy as np
import onnxruntime

import onnxtrain

DATA = Path(__file__).resolve().parent / "data"


def main(folder: Path) -> float:
    """Train, write `flowers.onnx` into the folder, and return the accuracy on held-out rows."""
    trainer = onnxtrain.Trainer(DATA / "flowers.onnx", loss="cross_entropy", optimizer="adam(lr=0.01)")
    history = trainer.fit(
        DATA / "flowers.csv",
        target="species",
        validation=0.2,
        epochs=60,
        schedule="cosine",
        metrics="accuracy",
        progress=False,
    )
    trainer.save(folder / "flowers.onnx")

    # Inference needs only ONNX Runtime.
    session = onnxruntime.InferenceSession(folder / "flowers.onnx")
    (logits,) = session.run(None, {"input": np.array([[5.1, 3.5, 1.4, 0.2]], np.float32)})
    names = json.loads((folder / "flowers.labels.json").read_text())["labels"]
    print(f"sepals of 5.1 x 3.5 and petals of 1.4 x 0.2 cm: class {logits.argmax()} of {names}")
    return history.rows[-1]["val_accuracy"]


if __name__ == "__main__":
    print(f"held-out accuracy {main(Path.cwd()):.2f}")
