"""Accuracy of the forms of sparsity: single zeros, blocks, n of m weights, channels.

    python benchmarks/sparse_forms.py --data FASHION --csv results.csv [--jobs N] [--minutes M] [--table FILE]

FASHION is the folder of Fashion-MNIST's four original files; sentences and a table are generated. Every run prunes a
trained model in three stages, to 80, 90 and 95 % zeros, where each stage begins with the result of the one before; 2 of
4 weights is one stage, to 50 %. A run has a form, an allocation of the zeros to the layers, a method and a learning
rate:

- forms: single weights; blocks of 4 or 16 outputs with one input (4x1, 16x1); of one output with 4 inputs (1x4); whole
  output channels, the classes excepted; 2 of 4 weights;
- allocations: uniform, global, flops (prune's own);
- methods: SSGD, magnitude (one cut, then training) and gradual magnitude (Zhu and Gupta, 2018), with the same number of
  epochs and of learning rates.

Screening runs every combination with one seed on a part of the training images and measures on held-out training
images; no test image is read. Finals take, for each form, the best allocation, method and rate of the screening at 90 %
zeros, and the best rate and allocation of each method for single zeros; they train on more images with five seeds and
are measured on the test images.

Results are appended to the CSV file as they come; runs that are in it are skipped, so a call continues where the last
one ended. --minutes starts no run after that time. --table writes the tables of the CSV file without running anything.
--int8 instead trains the dense models of the finals with one seed and prints the errors of dense int8. --keep keeps the
models of the finals with seed 0, which sparse_forms_latency.py times.
"""

from __future__ import annotations

import argparse
import csv
import functools
import itertools
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Literal

import numpy as np
import onnx
import onnxruntime
import sparse_forms_models
from idx import read_digits

import onnxtrain
from onnxtrain import Sparsity
from onnxtrain.operators import SSGD, Adam, Momentum, Optimizer

SPARSITIES = (0.8, 0.9, 0.95)
HELD_OUT = 10_000
WHOLE = 1 << 20  # inputs of a block that is a whole output channel
BLOCKS = {"single": (1, 1), "4x1": (4, 1), "16x1": (16, 1), "1x4": (1, 4), "channels": (1, WHOLE)}
FORMS = (*BLOCKS, "2:4")
ALLOCATIONS = ("uniform", "global", "flops")
METHODS = ("ssgd", "magnitude", "gradual")
FINAL_SEEDS = range(5)

Phase = Literal["screen", "final"]


@dataclass(frozen=True)
class Network:
    """A model of the benchmark.

    Attributes:
        last: Pattern of the weights of its last layer.
        rates: Learning rates of the pruning, tried by every method.
        dense_rate: Learning rate of the dense training.
        images: Training images of a screening run and of a final run.
        batch_size: Images per step.
        data: "images"; "small images" of three equal channels and half the width and height, means of four pixels;
            "sentences" or "table", which are generated.
        adam: True for Adam instead of SGD with momentum and, with ``Sparsity``, instead of SSGD.
    """

    last: str
    rates: tuple[float, ...]
    dense_rate: float
    images: tuple[int, int]
    batch_size: int = 64
    data: str = "images"
    adam: bool = False
    batch_norm: str = "frozen"


NETWORKS = {
    "mlp": Network("fc3.weight", (0.05, 0.02), 0.05, (10_000, 30_000)),
    "lenet5": Network("ip2.weight", (0.02, 0.008), 0.02, (6_000, 20_000)),
    "resnet": Network("classifier.weight", (0.05, 0.02), 0.1, (4_000, 8_000), data="small images", batch_norm="train"),
    "vit": Network("classifier.weight", (2e-3,), 2e-3, (4_000, 8_000), adam=True),
    "text": Network("classifier.weight", (2e-3,), 2e-3, (6_000, 12_000), data="sentences", adam=True),
    "table": Network("layer3.weight", (0.05, 0.02), 0.05, (6_000, 20_000), data="table"),
}
DENSE_EPOCHS = {"screen": 8, "final": 8}
EPOCHS, FINE_TUNE_EPOCHS = 2, 1


def network(name: str, seed: int) -> onnx.ModelProto:
    """A new model; the ResNet is for images of 14 by 14 pixels."""
    if name == "mlp":
        return onnxtrain.examples.lenet_300_100(seed=seed)
    if name == "lenet5":
        return onnxtrain.examples.lenet5_caffe(seed=seed)
    if name == "table":
        columns, classes = sparse_forms_models.COLUMNS, sparse_forms_models.CLASSES
        return onnxtrain.examples.mlp((columns, 256, 128, classes), seed=seed)
    if name in ("vit", "text"):
        return getattr(sparse_forms_models, name)(seed)
    model = onnxtrain.examples.small_resnet(16, (1, 1, 1), seed=seed)
    for axis in model.graph.input[0].type.tensor_type.shape.dim[2:]:  # for the multiplications of each weight
        axis.dim_value = 14
    return model


@dataclass(frozen=True)
class Run:
    """One pruning through all of its stages."""

    phase: Phase
    model: str
    form: str
    method: str
    allocation: str
    rate: float
    seed: int

    def stages(self) -> tuple[float, ...]:
        """The sparsities of its stages."""
        return (0.5,) if self.form == "2:4" else SPARSITIES

    def kept(self, sparsity: float) -> str:
        """The name of the file of a stage with --keep."""
        return f"{self.model}-{self.form.replace(':', 'of')}-{self.method}-{sparsity:g}.onnx"


@dataclass(frozen=True)
class Row:
    """The result of a stage: a line of the CSV file."""

    phase: str
    model: str
    form: str
    method: str
    allocation: str
    rate: float
    seed: int
    sparsity: float
    zeros: float
    multiplications: float  # that remain, as a fraction
    error: float  # in percent: of held-out images, of test images in finals
    dense_error: float
    seconds: float

    def run(self) -> Run:
        """The run that it belongs to."""
        return Run(**{field.name: getattr(self, field.name) for field in fields(Run)})


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.int8:
        print("\n".join(int8_table(options.data, options.models, options.images)))
        return 0
    if not options.table:
        run_all(options)
    text = tables(read(options.csv))
    if options.table:
        options.table.write_text(text)
    print(text)
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of Fashion-MNIST's files")
    task = parser.add_mutually_exclusive_group(required=True)
    task.add_argument("--csv", type=Path, help="file of results, made or continued")
    task.add_argument("--int8", action="store_true", help="print the table of dense int8")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at a time, one thread each")
    parser.add_argument("--minutes", type=float, default=1e9, help="start no run after so many minutes")
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(NETWORKS))
    parser.add_argument("--phases", type=lambda text: text.split(","), default=["screen", "final"])
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the finals' models of seed 0 there")
    parser.add_argument("--images", type=int, help="train on so many images only, for a trial of the script")
    parser.add_argument(
        "--table", type=Path, help="write the tables of the CSV file to this Markdown file, run nothing"
    )
    options = parser.parse_args(arguments)
    for name, given, known in (("model", options.models, NETWORKS), ("phase", options.phases, DENSE_EPOCHS)):
        if unknown := set(given) - set(known):
            parser.error(f"there is no {name} {', '.join(unknown)}; use {', '.join(known)}")
    try:
        read_digits(options.data, "t10k")
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return options


def screening(models: Sequence[str]) -> list[Run]:
    """All runs of the screening, so that the first ones of every model come first."""
    most = max((len(NETWORKS[model].rates) for model in models), default=0)
    return [
        Run("screen", model, form, method, allocation, NETWORKS[model].rates[rate], 0)
        for rate, form, method, allocation in itertools.product(range(most), FORMS, METHODS, ALLOCATIONS)
        if form != "2:4" or allocation == "global"
        for model in models
        if rate < len(NETWORKS[model].rates)
    ]


def finals(models: Iterable[str], rows: Sequence[Row]) -> list[Run]:
    """The runs that the screening chose: for each form the best, and for single zeros that of each method."""
    chosen: dict[Run, None] = {}
    for model in models:
        screened = [row for row in rows if (row.phase, row.model) == ("screen", model)]
        if {row.run() for row in screened} < set(screening([model])):
            continue  # not complete
        for form in FORMS:
            own = [row for row in screened if row.form == form and row.sparsity in (0.9, 0.5)]
            groups = [own, *([[row for row in own if row.method == m] for m in METHODS] if form == "single" else [])]
            for group in groups:
                chosen[min(group, key=lambda row: row.error).run()] = None
    return [replace(run, phase="final", seed=seed) for seed in FINAL_SEEDS for run in chosen]


def run_all(options: argparse.Namespace) -> None:
    """Run what is missing; dense models first, then the screening, then the finals."""
    begin = time.monotonic()
    rows = read(options.csv)
    if options.keep:
        options.keep.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(options.jobs, mp_context=context) as pool:

            def submit(runs: Sequence[Run]) -> None:
                done = {row.run() for row in rows if row.sparsity == row.run().stages()[-1]}
                missing = [run for run in runs if run not in done]
                dense = {(run.phase, run.model, run.seed) for run in missing}
                waiting = [
                    (key, [run for run in missing if (run.phase, run.model, run.seed) == key])
                    for key in sorted(dense, key=lambda item: -list(NETWORKS).index(item[1]))
                ]
                running: dict[Future[list[Row]], list[Run]] = {
                    pool.submit(train_dense, options.data, key, folder, options.images, options.keep): own
                    for key, own in waiting
                }
                ready: list[Run] = []
                position = {run: index for index, run in enumerate(missing)}
                while running or ready:
                    late = time.monotonic() - begin > 60 * options.minutes
                    ready.sort(key=position.__getitem__)
                    while ready and not late and len(running) < options.jobs:
                        task = (options.data, ready.pop(0), folder, options.images, options.keep)
                        running[pool.submit(prune, *task)] = []
                    if late:
                        ready.clear()
                    if not running:
                        return
                    finished, _ = wait(running, return_when=FIRST_COMPLETED)
                    for future in finished:
                        after = running.pop(future)
                        if future.exception() is not None:
                            print(f"failed: {future.exception()!r}", file=sys.stderr, flush=True)
                            continue
                        ready += after
                        append(options.csv, future.result())
                        rows.extend(future.result())
                        for row in future.result():
                            print(f"{time.monotonic() - begin:5.0f} s {row}", flush=True)

            if "screen" in options.phases:
                submit(screening(options.models))
            if "final" in options.phases and time.monotonic() - begin < 60 * options.minutes:
                submit(finals(options.models, rows))


def read(path: Path) -> list[Row]:
    """The rows of a CSV file; none where there is no file."""
    if not path.exists():
        return []
    kinds = {field.name: {"str": str, "int": int, "float": float}[str(field.type)] for field in fields(Row)}
    with path.open(newline="") as file:
        return [Row(**{name: kind(line[name]) for name, kind in kinds.items()}) for line in csv.DictReader(file)]


def append(path: Path, rows: Sequence[Row]) -> None:
    """Add rows to a CSV file."""
    fresh = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)])
        if fresh:
            writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


@functools.cache
def examples_of(data: Path, phase: str, kind: str, count: int) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    """The training examples and the examples to measure on."""
    if kind in ("sentences", "table"):
        generate = getattr(sparse_forms_models, kind)
        return generate(count, 0), generate(HELD_OUT, 1 if phase == "screen" else 2)
    images, labels = read_digits(data, "train")
    train, held_out = (images[:-HELD_OUT][:count], labels[:-HELD_OUT][:count]), (images[-HELD_OUT:], labels[-HELD_OUT:])
    measured = held_out if phase == "screen" else read_digits(data, "t10k")
    if kind == "images":
        return train, measured
    return tuple((reduced(x), y) for x, y in (train, measured))


def reduced(images: np.ndarray) -> np.ndarray:
    """Three equal channels of half the width and height."""
    return np.repeat(images.reshape(-1, 1, 14, 2, 14, 2).mean(axis=(3, 5), dtype=np.float32), 3, axis=1)


def parts_of(data: Path, phase: str, model: str, limit: int | None) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    own = NETWORKS[model]
    count = own.images[0 if phase == "screen" else 1]
    return examples_of(data, phase, own.data, min(count, limit or count))


def dense_path(folder: Path, phase: str, model: str, seed: int) -> Path:
    return folder / f"{phase}-{model}-{seed}.onnx"


def train_dense(
    data: Path, key: tuple[str, str, int], folder: Path, limit: int | None, keep: Path | None = None
) -> list[Row]:
    """Train a model without zeros, from which the prunings of a seed begin."""
    phase, model, seed = key
    train, _ = parts_of(data, phase, model, limit)
    own = NETWORKS[model]
    trainer = onnxtrain.Trainer(
        network(model, seed),
        loss="softmax_cross_entropy",
        optimizer=Adam(own.dense_rate) if own.adam else Momentum(own.dense_rate, norm_coefficient=5e-4),
        seed=seed,
        batch_norm=own.batch_norm,
        threads=1,
    )
    steps = DENSE_EPOCHS[phase] * -(-len(train[0]) // own.batch_size)
    schedule = f"warmup({min(50, steps // 4)})+cosine"
    trainer.fit(train, epochs=DENSE_EPOCHS[phase], batch_size=own.batch_size, schedule=schedule, progress=False)
    trainer.save(dense_path(folder, phase, model, seed))
    if keep and (phase, seed) == ("final", 0):
        trainer.save(keep / f"{model}.onnx")
    return []


def prune(data: Path, run: Run, folder: Path, limit: int | None, keep: Path | None = None) -> list[Row]:
    """Prune a dense model through all stages."""
    train, measured = parts_of(data, run.phase, run.model, limit)
    own = NETWORKS[run.model]
    path = dense_path(folder, run.phase, run.model, run.seed)
    dense_error = error_of(onnx.load(path), *measured)
    model = onnx.load(path)
    rows = []
    for sparsity in run.stages():
        begin = time.perf_counter()
        result = stage(model, train, run, own, sparsity)
        model = result.model()
        if keep and (run.phase, run.seed) == ("final", 0):
            onnx.save(model, keep / run.kept(sparsity))
        values = {name: getattr(run, name) for name in (field.name for field in fields(Run))}
        rows.append(
            Row(
                **values,
                sparsity=sparsity,
                zeros=round(result.sparsity, 4),
                multiplications=round(multiplications(result, run.model), 4),
                error=round(error_of(model, *measured), 3),
                dense_error=round(dense_error, 3),
                seconds=round(time.perf_counter() - begin, 1),
            )
        )
    return rows


def stage(
    model: onnx.ModelProto, train: tuple[np.ndarray, np.ndarray], run: Run, own: Network, sparsity: float
) -> onnxtrain.PruneResult:
    """Prune to one sparsity: by one cut and training, or by a cut after each epoch, and a last epoch without cuts."""
    once = run.method == "magnitude"
    plain: Optimizer = Adam(run.rate) if own.adam else Momentum(run.rate, norm_coefficient=1e-4)
    rule = plain
    if run.method == "ssgd" and own.adam:
        rule = Adam(run.rate / 3, sparsity=Sparsity(max_scale=5.0))  # scaled steps are larger
    elif run.method == "ssgd":
        rule = SSGD(run.rate, alpha=0.9, max_scale=5.0, regularization=1e-4)
    kinds = {"n_m": (2, 4)} if run.form == "2:4" else {"sparsity": sparsity, "block": BLOCKS[run.form]}
    names = [name for name in weights_of(run.model) if run.form != "channels" or name != own.last]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a layer may become empty: the error shows it
        return onnxtrain.prune(
            model,
            train,
            loss="softmax_cross_entropy",
            validation=tuple(array[:256] for array in train),  # which chooses a point of the fine-tuning
            method="ssgd" if run.method == "ssgd" else "magnitude",
            allocation=run.allocation,
            tensors=names,
            optimizer=rule,
            fine_tune_optimizer=plain,
            epochs=0 if once else EPOCHS,
            rounds=1 if once else EPOCHS,
            fine_tune_epochs=FINE_TUNE_EPOCHS + (EPOCHS if once else 0),
            batch_size=own.batch_size,
            seed=run.seed,
            batch_norm=own.batch_norm,
            threads=1,
            **kinds,
        )


@functools.cache
def weights_of(model: str) -> dict[str, int]:
    """The weights of a model without its embeddings, with the number of multiplications of each for one example."""
    from onnxtrain.parameters.layouts import product_layouts

    objective = onnxtrain.Trainer(network(model, 0), loss="softmax_cross_entropy").objective
    names = [name for name in objective.matmul_weights if not name.startswith("embeddings.")]
    return {name: layout.uses for name, layout in product_layouts(objective.model, names).items()}


def multiplications(result: onnxtrain.PruneResult, model: str) -> float:
    """The fraction of the multiplications that remain."""
    uses = weights_of(model)
    values = {name: result.values[name] for name in uses}
    left = sum(uses[name] * int(np.count_nonzero(array)) for name, array in values.items())
    return left / sum(uses[name] * array.size for name, array in values.items())


def error_of(model: onnx.ModelProto, images: np.ndarray, labels: np.ndarray) -> float:
    """The error in percent on onnxruntime."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    parts = [session.run(None, {name: images[i : i + 500]})[0].argmax(axis=1) for i in range(0, len(images), 500)]
    return 100 * float(np.mean(np.concatenate(parts) != labels))


def int8_table(data: Path, models: Iterable[str], limit: int | None) -> list[str]:
    """Quantize the dense models of the finals (seed 0), and return the table of errors on test images."""
    lines = ["| model | dense float32, error, % | dense int8, error, % |", "| --- | ---: | ---: |"]
    for name in models:
        train, measured = parts_of(data, "final", name, limit)
        with tempfile.TemporaryDirectory() as folder:
            train_dense(data, ("final", name, 0), Path(folder), limit)
            model = onnx.load(dense_path(Path(folder), "final", name, 0))
        small = onnxtrain.quantize(model, train[0][:200])
        errors = [error_of(each, *measured) for each in (model, small)]
        lines.append(f"| {name} | {errors[0]:.2f} | {errors[1]:.2f} |")
    return lines


def tables(rows: Sequence[Row]) -> str:
    """The tables of all results as Markdown."""
    parts = []
    for model in NETWORKS:
        for phase in ("final", "screen"):
            own = [row for row in rows if (row.phase, row.model) == (phase, model)]
            if own:
                parts += [final_table(model, own) if phase == "final" else screen_table(model, own)]
    return "\n\n".join(parts) + "\n"


def final_table(model: str, rows: Sequence[Row]) -> str:
    """Mean and standard deviation of the error on test images."""
    groups: dict[tuple[str, str, str, float], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.form, row.method, row.allocation, row.rate), []).append(row)
    dense = statistics.mean({row.seed: row.dense_error for row in rows}.values())
    lines = [
        f"{model}, finals: error on test images, % (mean ± standard deviation of seeds); dense {dense:.2f} %",
        "",
        "| form | method | allocation | rate | seeds | 50 % | 80 % | 90 % | 95 % | multiplications left at 90 % |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for (form, method, allocation, rate), own in sorted(groups.items(), key=lambda item: FORMS.index(item[0][0])):
        at = {s: [row for row in own if row.sparsity == s] for s in (0.5, *SPARSITIES)}
        cells = [shown([row.error for row in at[s]]) for s in at]
        left = at[0.9] or at[0.5]
        fraction = f"{100 * statistics.mean(row.multiplications for row in left):.1f} %" if left else ""
        seeds = len({row.seed for row in own})
        lines.append(f"| {' | '.join([form, method, allocation, f'{rate:g}', str(seeds), *cells, fraction])} |")
    return "\n".join(lines)


def shown(errors: Sequence[float]) -> str:
    """Mean and standard deviation."""
    if not errors:
        return ""
    spread = f" ± {statistics.stdev(errors):.2f}" if len(errors) > 1 else ""
    return f"{statistics.mean(errors):.2f}{spread}"


def screen_table(model: str, rows: Sequence[Row]) -> str:
    """The better rate of each combination on held-out images."""
    dense = rows[0].dense_error
    lines = [
        f"{model}, screening: error on held-out training images, %, of the better learning rate at each sparsity; "
        f"dense {dense:.2f} %",
        "",
        "| form | allocation | " + " | ".join(f"{method}: 80 / 90 / 95 %" for method in METHODS) + " |",
        "| --- | --- | " + " | ".join("---:" for _ in METHODS) + " |",
    ]
    for form, allocation in itertools.product(FORMS, ALLOCATIONS):
        own = [row for row in rows if (row.form, row.allocation) == (form, allocation)]
        if not own:
            continue
        cells = []
        for method in METHODS:
            best = [
                min((row.error for row in own if row.method == method and row.sparsity == s), default=None)
                for s in ((0.5,) if form == "2:4" else SPARSITIES)
            ]
            cells.append(" / ".join("" if error is None else f"{error:.2f}" for error in best))
        lines.append(f"| {form} | {'' if form == '2:4' else allocation} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
