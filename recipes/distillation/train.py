"""Knowledge distillation on Fashion-MNIST: LeNet-5 learns from 3 % of the images and a teacher that learned from all.

The student is trained twice on the same 1,800 images: on their labels, and on the teacher's probabilities by the loss
`distillation`. Source: Hinton, Vinyals, Dean, "Distilling the knowledge in a neural network", 2015, section 6, whose
experiment is speech recognition with 3 % of the data.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import onnx

import onnxtrain
from onnxtrain.losses import Distillation
from onnxtrain.training.examples import lenet5

SHARE, TEACHER_EPOCHS, STUDENT_EPOCHS = 0.03, 5, 60


def train(options, seed: int) -> dict[str, float]:
    """Train teacher and students; return the test accuracies in percent, and how much of their gap is closed."""
    epochs, students = (1, 10) if options.quick else (TEACHER_EPOCHS, STUDENT_EPOCHS)
    images, labels = options.images("fashion", "train", 6000 if options.quick else None)
    few = np.random.default_rng(seed).permutation(len(labels))[: round(SHARE * len(labels))]
    test = options.images("fashion", "t10k")

    def fitted(model: onnx.ModelProto, loss: object, rows: object, epochs: int) -> onnxtrain.Trainer:
        trainer = onnxtrain.Trainer(model, loss=loss, optimizer=onnxtrain.Adam(1e-3), seed=seed, threads=1)
        trainer.fit(images[rows], labels[rows], epochs=epochs, batch_size=64, schedule="cosine", progress=False)
        return trainer

    def accuracy(trainer: onnxtrain.Trainer) -> float:
        return 100 * trainer.evaluate(*test, metrics="accuracy")["accuracy"]

    teacher = fitted(lenet5(seed=seed), "softmax_cross_entropy", slice(None), epochs)
    alone = accuracy(fitted(lenet5(seed=seed + 1), "softmax_cross_entropy", few, students))
    with tempfile.TemporaryDirectory() as folder:
        teacher.save(Path(folder) / "teacher.onnx")
        loss = Distillation(Path(folder) / "teacher.onnx", temperature=4.0, mix=1.0)
        distilled = accuracy(fitted(lenet5(seed=seed + 1), loss, few, students))
    best = accuracy(teacher)
    found = {
        "teacher, all images": best,
        "student, 3 % of the images": alone,
        "student, 3 % and the teacher": distilled,
    }
    return found if options.quick else found | {"gap closed, %": 100 * (distilled - alone) / (best - alone)}
