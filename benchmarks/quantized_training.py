"""Accuracy of quantization after training and of quantization-aware training: LeNet-5 on MNIST, a small transformer.

    python benchmarks/quantized_training.py FOLDER --seeds 0,1,2,3,4

FOLDER holds the four original files of MNIST. Each trial trains a model in single precision, quantizes it with
onnxtrain.quantize on 512 training examples, and trains the quantized model for one epoch more at a tenth of the
learning rate. The control trains the model in single precision for that epoch instead, and quantizes it then.
Accuracies are those of the saved file in plain onnxruntime. The exit code is 1 if a scale is not positive, if
quantization-aware training is worse than quantization alone, or if it is, at 8 bits, more than half a point worse than
single precision.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from harness import ForeignLoad, load_line, machine_line, table, write_report
from idx import read_digits
from onnx import numpy_helper

import onnxtrain

WORDS, LENGTH = 40, 12
MOST_LOST = 0.005

Examples = tuple[Any, np.ndarray]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of the idx files")
    parser.add_argument("--seeds", type=lambda text: [int(part) for part in text.split(",")], default=[0])
    parser.add_argument("--examples", type=int, default=60_000, help="train on the first examples only")
    parser.add_argument("--epochs", type=int, default=3, help="in single precision")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", help="also write the report to this Markdown file")
    options = parser.parse_args(arguments)
    try:
        train, test = (read_digits(options.folder, part) for part in ("train", "t10k"))
    except (OSError, ValueError) as error:
        parser.error(str(error))
    train = tuple(array[: options.examples] for array in train)
    rows, kept = [], True
    with ForeignLoad() as foreign:
        for seed in options.seeds:
            digits = onnxtrain.examples.lenet5(seed=seed)
            letters = onnxtrain.examples.small_transformer(vocabulary=WORDS, longest=LENGTH, classes=4, seed=seed)
            for name, model, learned, tested in (
                ("LeNet-5, MNIST", digits, train, test),
                ("transformer, sequences", letters, sequences(seed, 6000), sequences(100 + seed, 3000)),
            ):
                found = trial(model, learned, tested, seed, options)
                kept = kept and holds(found)
                accuracies = [f"{100 * found[way]:.2f}" for way in WAYS]
                rows.append([name, str(seed), *accuracies, f"{found['smallest scale']:.1e}"])
    header = ["model", "seed", *WAYS, "smallest scale after training"]
    write_report(
        "\n".join([table(header, rows), "", f"{machine_line()} {load_line(foreign)}"]),
        options.output,
    )
    return 0 if kept else 1


WAYS = (
    "single precision",
    "8 bits",
    "8 bits, control",
    "8 bits, trained",
    "4 bits",
    "4 bits, control",
    "4 bits, trained",
)


def holds(found: dict[str, float]) -> bool:
    """Return whether a trial passes."""
    no_worse = all(found[f"{bits} bits, trained"] >= found[f"{bits} bits"] for bits in (8, 4))
    near = found["8 bits, trained"] >= found["single precision"] - MOST_LOST
    return no_worse and near and found["smallest scale"] > 0


def trial(model: onnx.ModelProto, train: Examples, test: Examples, seed: int, options: Any) -> dict[str, float]:
    """Accuracy of each method."""
    common: dict[str, Any] = {"loss": "softmax_cross_entropy", "seed": seed, "threads": options.threads}
    trainer = onnxtrain.Trainer(model, optimizer="adam(lr=2e-3)", **common)
    trainer.fit(train, epochs=options.epochs, batch_size=64, schedule="cosine")
    single = trainer.model()
    found = {"single precision": accuracy(single, test), "smallest scale": np.inf}
    calibration = _first(train, 512)
    longer = onnxtrain.Trainer(single, optimizer="adam(lr=2e-4)", **common)
    longer.fit(train, epochs=1, batch_size=64, schedule="cosine")
    for bits in (8, 4):
        found[f"{bits} bits, control"] = accuracy(onnxtrain.quantize(longer.model(), calibration, bits=bits), test)
        quantized = onnxtrain.quantize(single, calibration, bits=bits)
        found[f"{bits} bits"] = accuracy(quantized, test)
        aware = onnxtrain.Trainer(quantized, optimizer="adam(lr=2e-4)", qat=True, **common)
        aware.fit(train, epochs=1, batch_size=64, schedule="cosine")
        saved = aware.model()
        found[f"{bits} bits, trained"] = accuracy(saved, test)
        scales = [numpy_helper.to_array(t).min() for t in saved.graph.initializer if t.name.endswith("_scale")]
        found["smallest scale"] = min(found["smallest scale"], *map(float, scales))
    return found


def accuracy(model: onnx.ModelProto, test: Examples) -> float:
    """Accuracy of a model in onnxruntime."""
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    inputs, labels = test
    feeds = inputs if isinstance(inputs, dict) else {session.get_inputs()[0].name: inputs}
    right = 0
    for begin in range(0, len(labels), 1000):
        part = {name: array[begin : begin + 1000] for name, array in feeds.items()}
        right += int((session.run(None, part)[0].argmax(-1) == labels[begin : begin + 1000]).sum())
    return right / len(labels)


def sequences(seed: int, count: int) -> Examples:
    """Token sequences, labelled by the most frequent of four token classes, with some label noise."""
    random = np.random.default_rng(seed)
    tokens = random.integers(0, WORDS, (count, LENGTH))
    kinds = np.stack([(tokens % 4 == kind).sum(1) for kind in range(4)], axis=1)
    return {"input_ids": tokens, "attention_mask": np.ones_like(tokens)}, kinds.argmax(1)


def _first(examples: Examples, count: int) -> Any:
    inputs = examples[0]
    return {name: array[:count] for name, array in inputs.items()} if isinstance(inputs, dict) else inputs[:count]


if __name__ == "__main__":
    raise SystemExit(main())
