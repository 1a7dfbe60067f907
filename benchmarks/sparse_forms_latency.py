"""Accuracy over latency: the pruned models of sparse_forms.py beside dense float32 and dense int8 in ONNX Runtime.

    python benchmarks/sparse_forms.py --data FASHION --csv results.csv --keep models
    python benchmarks/sparse_forms_latency.py --data FASHION --csv results.csv --models models [--output FILE.md]

Pruned models are compiled with `compile_sparse`, which takes whole channels of zeros out. All variants of a model take
turns in one process, one thread each, in processor time; a figure is the median over the turns of dense float32's
time by the variant's. Errors are means over the seeds in the CSV file; that of int8 is of the model with seed 0. A
variant is on the front if no other one is at least as fast and has less error.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import harness
import numpy as np
import onnx
from onnxruntime import InferenceSession
from sparse_forms import NETWORKS, Row, error_of, parts_of, read
from sparse_models import seconds, session

import onnxtrain

TURN_SECONDS = 0.02


@dataclass(frozen=True)
class Variant:
    """A model as it is deployed: its name, its error in percent and its file."""

    name: str
    error: float
    path: Path
    kernels: bool = False


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of Fashion-MNIST's files")
    parser.add_argument("--csv", type=Path, required=True, help="the results of sparse_forms.py")
    parser.add_argument("--models", type=Path, required=True, help="the folder of its --keep")
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(NETWORKS), help=", ".join(NETWORKS))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32], help="examples of a call (1 and 32)")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--output", type=Path, metavar="FILE.md")
    options = parser.parse_args(arguments)
    rows = [row for row in read(options.csv) if row.phase == "final"]
    parts = []
    for name in options.only:
        if not (options.models / f"{name}.onnx").exists():
            print(f"{options.models} has no {name}.onnx; sparse_forms.py --keep writes it", file=sys.stderr)
            continue
        speeds, variants = {}, []
        for batch in options.batches:
            with tempfile.TemporaryDirectory() as folder:
                made = variants_of(name, batch, rows, options, Path(folder))
                variants = [variant for variant, _ in made]
                speeds[batch] = speed_ups(made, inputs_of(name, batch, options.data), options.rounds)
        parts.append(table(name, variants, speeds))
    parts.append(harness.machine_line())
    harness.write_report("\n\n".join(parts), options.output)
    return 0


def inputs_of(name: str, batch: int, data: Path) -> np.ndarray:
    """A batch of test examples."""
    return parts_of(data, "final", name, None)[1][0][:batch]


def variants_of(
    name: str, batch: int, rows: Sequence[Row], options: argparse.Namespace, folder: Path
) -> list[tuple[Variant, InferenceSession]]:
    """Write dense float32, dense int8 and every pruned model for one batch size, and open a session of each."""
    own = [row for row in rows if row.model == name]
    train, measured = parts_of(options.data, "final", name, None)
    dense = fixed(options.models / f"{name}.onnx", batch)
    small = onnxtrain.quantize(onnx.load(options.models / f"{name}.onnx"), train[0][:200])
    small_error = error_of(small, *measured)
    onnx.save(dense, folder / "dense.onnx")
    onnx.save(sized(small, batch), folder / "int8.onnx")
    dense_error = statistics.mean({row.seed: row.dense_error for row in own}.values())
    variants = [
        Variant("dense float32", dense_error, folder / "dense.onnx"),
        Variant("dense int8", small_error, folder / "int8.onnx"),
    ]
    for row in (row for row in own if row.seed == 0):
        file = row.run().kept(row.sparsity)
        if not (options.models / file).exists():
            continue
        pruned, path = fixed(options.models / file, batch), folder / file
        onnxtrain.compile_sparse(pruned, path)
        errors = [other.error for other in own if recipe(other) == recipe(row)]
        title = f"{row.form}, {row.method}, {row.sparsity:.0%}"
        variants.append(Variant(title, statistics.mean(errors), path, kernels=True))
    return [(variant, session(variant.path, 1, kernels=variant.kernels)) for variant in variants]


def recipe(row: Row) -> tuple[object, ...]:
    """The settings that a row shares with those of other seeds."""
    return (row.form, row.method, row.allocation, row.rate, row.sparsity)


def fixed(path: Path, batch: int) -> onnx.ModelProto:
    """Read a model for this batch size."""
    return sized(onnx.load(path), batch)


def sized(model: onnx.ModelProto, batch: int) -> onnx.ModelProto:
    """Set the size of the first axis of the input."""
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = batch
    return model


def speed_ups(made: Sequence[tuple[Variant, InferenceSession]], x: np.ndarray, rounds: int) -> list[float]:
    """Dense float32's time by that of each, medians over turns."""
    sessions = [one for _, one in made]
    calls = [max(1, int(TURN_SECONDS / max(1e-6, seconds(one, x, 3)))) for one in sessions]
    times = [[seconds(one, x, count) for one, count in zip(sessions, calls, strict=True)] for _ in range(rounds)]
    return [statistics.median(turn[0] / turn[place] for turn in times) for place in range(len(sessions))]


def on_front(errors: Sequence[float], speeds: Sequence[float]) -> Iterator[bool]:
    """Whether no other one is at least as fast with less error, or faster with the same."""
    for error, speed in zip(errors, speeds, strict=True):
        yield not any(
            other_error <= error and other_speed >= speed and (other_error, other_speed) != (error, speed)
            for other_error, other_speed in zip(errors, speeds, strict=True)
        )


def table(name: str, variants: Sequence[Variant], speeds: dict[int, list[float]]) -> str:
    """The variants of a model, slowest first at the first batch size; figures on a front are bold."""
    errors = [variant.error for variant in variants]
    fronts = {batch: list(on_front(errors, own)) for batch, own in speeds.items()}
    lines = [
        f"{name}: error on test images, and times dense float32",
        "",
        f"| variant | error, % | {' | '.join(f'batch {batch}' for batch in speeds)} |",
        f"| --- | ---: |{' ---: |' * len(speeds)}",
    ]
    for place in sorted(range(len(variants)), key=lambda place: next(iter(speeds.values()))[place]):
        cells = [
            f"**{own[place]:.2f}**" if fronts[batch][place] else f"{own[place]:.2f}" for batch, own in speeds.items()
        ]
        lines.append(f"| {variants[place].name} | {errors[place]:.2f} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
