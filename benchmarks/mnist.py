"""Train LeNet-5 from random weights on MNIST and check the saved file with plain onnxruntime.

    python benchmarks/mnist.py FOLDER

FOLDER holds the four original files (train-images-idx3-ubyte.gz and so on). Ten epochs of Adam with a cosine
schedule on the images as they are, no augmentation; the goal is 99.0 % on the test images, and the exit code is
1 where a seed misses it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from harness import ForeignLoad, load_line, machine_line, make_parser, table, write_report
from idx import read_digits

import onnxtrain
from onnxtrain.training.callbacks import Callback, TrainingState

GOAL = 0.99


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__, "one epoch on 1,000 examples: a test run", threads=2)
    parser.add_argument("folder", type=Path, help="folder of the idx files")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--seeds", type=lambda text: [int(part) for part in text.split(",")], default=[0])
    parser.add_argument("--examples", type=int, help="train on the first examples only")
    parser.add_argument("--model", type=Path, default=Path("build/benchmarks/mnist.onnx"), help="where to save it")
    options = parser.parse_args(arguments)
    if options.quick:
        options.epochs, options.examples = 1, 1000
    try:
        train, test = (read_digits(options.folder, part) for part in ("train", "t10k"))
    except (OSError, ValueError) as error:
        parser.error(str(error))
    train = tuple(array[: options.examples] for array in train)
    rows, reached = [], True
    with ForeignLoad() as foreign:
        for seed in options.seeds:
            accuracies, seconds = run(train, test, seed, options)
            saved = accuracy_of_file(options.model, *test)
            if saved != accuracies[-1]:
                raise SystemExit(f"The saved file scores {saved:.4f}, but training ended at {accuracies[-1]:.4f}.")
            reached = reached and saved >= GOAL
            rows.append([str(seed), f"{100 * saved:.2f}", f"{100 * max(accuracies):.2f}", f"{np.median(seconds):.1f}"])
    header = ["seed", "test accuracy after the last epoch, %", "best epoch, %", "seconds per epoch"]
    write_report(
        f"{table(header, rows)}\n\nGoal: {100 * GOAL:.1f} % within {options.epochs} epochs: "
        f"{'reached' if reached else 'missed'}.\n\n{machine_line()} {options.threads} threads, batches of "
        f"{options.batch_size}, Adam({options.learning_rate:g}), cosine schedule. {load_line(foreign)}",
        options.output,
    )
    return 0 if reached else 1


class Progress(Callback):
    """Print and record the test accuracy and time of every epoch."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.accuracies: list[float] = []
        self.seconds: list[float] = []

    def on_epoch_begin(self, state: TrainingState) -> None:  # noqa: D102
        self._begin = time.perf_counter()

    def on_epoch_end(self, state: TrainingState) -> None:  # noqa: D102
        self.seconds.append(time.perf_counter() - self._begin)
        self.accuracies.append(state.metrics["val_accuracy"])
        print(
            f"seed {self.seed}, epoch {len(self.accuracies)}: loss {state.loss:.4f}, "
            f"test accuracy {100 * self.accuracies[-1]:.2f} %, {self.seconds[-1]:.1f} s",
            flush=True,
        )


def run(
    train: tuple[np.ndarray, ...], test: tuple[np.ndarray, ...], seed: int, options: argparse.Namespace
) -> tuple[list[float], list[float]]:
    """Train once and save; return test accuracy and seconds (evaluation included) of every epoch."""
    trainer = onnxtrain.Trainer(
        onnxtrain.examples.lenet5(seed=seed),
        loss="softmax_cross_entropy",
        optimizer=onnxtrain.Adam(options.learning_rate),
        seed=seed,
        threads=options.threads,
    )
    progress = Progress(seed)
    trainer.fit(
        train,
        validation=test,
        epochs=options.epochs,
        batch_size=options.batch_size,
        schedule="cosine",
        metrics=["accuracy"],
        callbacks=[progress],
    )
    options.model.parent.mkdir(parents=True, exist_ok=True)
    trainer.save(options.model)
    return progress.accuracies, progress.seconds


def accuracy_of_file(path: Path, images: np.ndarray, labels: np.ndarray) -> float:
    """Accuracy of a model file in plain onnxruntime."""
    onnx.checker.check_model(str(path), full_check=True)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    parts = [
        session.run(None, {name: images[start : start + 500]})[0].argmax(axis=1) for start in range(0, len(images), 500)
    ]
    return float(np.mean(np.concatenate(parts) == labels))


if __name__ == "__main__":
    sys.exit(main())
