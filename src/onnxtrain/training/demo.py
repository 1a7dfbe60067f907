"""Demonstration: train a convolutional network on handwritten digits, and check the file with ONNX Runtime."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx

from onnxtrain.errors import OptionError
from onnxtrain.operators import Adam
from onnxtrain.training.callbacks import Callback, History
from onnxtrain.training.trainer import Trainer

EPOCHS, BATCH_SIZE, LEARNING_RATE = 12, 32, 3e-3

GOAL = 0.97
"""The accuracy on held-out images that the demonstration must reach."""


@dataclass(frozen=True)
class Digits:
    """scikit-learn's handwritten digits: images [N, 1, 8, 8] from 0 to 1, and their labels."""

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray


@dataclass(frozen=True)
class FileCheck:
    """Result of running a trained file in ONNX Runtime and comparing it with the original."""

    accuracy: float
    trained: tuple[str, ...]
    unchanged: bool


def load_digits() -> Digits:
    """Load the digits of scikit-learn; a quarter of every class is held out."""
    try:
        from sklearn.datasets import load_digits as load
        from sklearn.model_selection import train_test_split
    except ImportError as error:
        raise OptionError(
            "The demonstration needs scikit-learn for its images, which is not installed; "
            "install it with pip install scikit-learn matplotlib."
        ) from error
    found = load()
    images = (found.images[:, None] / 16).astype(np.float32)
    labels = found.target.astype(np.int64)
    parts = train_test_split(images, labels, test_size=0.25, random_state=0, stratify=labels)
    train_images, test_images, train_labels, test_labels = parts
    return Digits(train_images, train_labels, test_images, test_labels)


def trainer_for(model: onnx.ModelProto | Path) -> Trainer:
    """Create the trainer of the demonstration."""
    return Trainer(model, loss="softmax_cross_entropy", optimizer=Adam(LEARNING_RATE))


def train(trainer: Trainer, digits: Digits, callbacks: Sequence[Callback] = ()) -> History:
    """Train on the digits, and evaluate on the held-out ones after every epoch."""
    history: History = trainer.fit(
        {"image": digits.train_images, "label": digits.train_labels},
        validation={"image": digits.test_images, "label": digits.test_labels},
        epochs=EPOCHS,
        batch_size=BATCH_SIZE,
        metrics=["accuracy"],
        callbacks=callbacks,
    )
    return history


def check_file(original: Path, tuned: Path, digits: Digits) -> FileCheck:
    """Run a trained file with plain onnxruntime, and compare it with the original file."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(tuned), providers=["CPUExecutionProvider"])
    logits = session.run(None, {session.get_inputs()[0].name: digits.test_images})[0]
    accuracy = float(np.mean(logits.argmax(1) == digits.test_labels))
    before, after = onnx.load(original), onnx.load(tuned)
    trained = []
    for old, new in zip(before.graph.initializer, after.graph.initializer, strict=True):
        if old.raw_data != new.raw_data:
            trained.append(old.name)
            new.raw_data = old.raw_data
    return FileCheck(accuracy, tuple(trained), before.SerializeToString() == after.SerializeToString())
