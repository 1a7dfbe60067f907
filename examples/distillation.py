"""Distillation: a small network is trained on the probabilities of a large one, without labels.

`softmax_cross_entropy` takes distributions as targets, here the teacher's probabilities at temperature 2, which give
the student more information about wrong classes. Source: Hinton, Vinyals, Dean, "Distilling the
Knowledge in a Neural Network", 2015. If there are labels, too, `loss="distillation(teacher=teacher.onnx)"` mixes
both.
"""

from pathlib import Path

import numpy as np

import onnxtrain

TEMPERATURE = 2.0


def examples(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return points [N, 8] and classes 0 to 3, the quadrant of two hidden sums."""
    points = np.random.default_rng(seed).normal(size=(count, 8)).astype(np.float32)
    first, second = points[:, :4].sum(axis=1), points[:, 2:6].sum(axis=1)
    return points, (2 * (first > 0) + (second > 0)).astype(np.int64)


def main(folder: Path) -> tuple[float, float]:
    """Train teacher and student, and return the accuracies of both on new points."""
    points, labels = examples(1000, seed=0)
    test = examples(500, seed=1)

    teacher = onnxtrain.Trainer(
        onnxtrain.examples.mlp((8, 128, 64, 4)), loss="cross_entropy", optimizer="adam(lr=3e-3)"
    )
    teacher.fit(points, labels, epochs=15, progress=False)

    unlabeled, _ = examples(2000, seed=2)
    scores = np.exp(teacher.predict(unlabeled) / TEMPERATURE)
    probabilities = scores / scores.sum(axis=1, keepdims=True)

    student = onnxtrain.Trainer(
        onnxtrain.examples.mlp((8, 12, 4)), loss="softmax_cross_entropy", optimizer="adam(lr=1e-2)"
    )
    student.fit(unlabeled, probabilities, epochs=15, schedule="cosine", progress=False)
    student.save(folder / "student.onnx")
    return tuple(trainer.evaluate(test, metrics="accuracy")["accuracy"] for trainer in (teacher, student))


if __name__ == "__main__":
    print("accuracy of the teacher {:.2f}, of the student {:.2f}".format(*main(Path.cwd())))
