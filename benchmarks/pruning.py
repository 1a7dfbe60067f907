"""Prunes LeNet-300-100 and LeNet-5 (Caffe's form) with SSGD and by magnitude, beside published results.

    python benchmarks/pruning.py --data MNIST [--fashion FASHION] [--quick]

MNIST and FASHION are folders with the four original files (train-images-idx3-ubyte.gz and so on). For every model
there is a dense training, and for every compression one by SSGD and one by magnitude: the same images, epochs, cuts and
fine-tuning. Errors are those on the test images after the last epoch, of the written file, by onnxruntime alone; no
epoch is chosen by its error. The exit code is 1 where the goal is missed on MNIST: LeNet-300-100 at 68x with at most
1.92 % error, LeNet-5 at 280x with at most 0.75 % (means over the seeds).

--held-out 10000 is how settings are chosen: it trains on all training images but the last 10,000, and measures on
these; no test image is read. --quick runs one seed, one compression, and fewer epochs; LeNet-5 on a tenth of the
images. Neither says anything about the goal.
"""

from __future__ import annotations

import argparse
import gzip
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from harness import ForeignLoad, load_line, machine_line, table, write_report
from idx import read_digits
from shifted import ShiftedImages

import onnxtrain
from onnxtrain.operators import SSGD, Adam, Momentum, Optimizer
from onnxtrain.pruning import PruneResult

METHODS = ("dense", "magnitude", "ssgd")
PUBLISHED = [
    ["dense", "1.64", "", "0.80", ""],
    ["Han et al. 2015, magnitude", "1.59", "12x", "0.77", "12x"],
    ["Guo et al. 2016, dynamic network surgery", "1.99", "56x", "0.91", "111x"],
    ["Ullrich et al. 2017, soft weight-sharing", "1.94", "23x", "0.97", "200x"],
    ["Molchanov et al. 2017, sparse variational dropout", "1.92", "68x", "0.75", "280x"],
]


@dataclass(frozen=True)
class Recipe:
    """How a model is trained and pruned, and the published result to reach.

    Attributes:
        model: The function of ``onnxtrain.examples``.
        weights: How many it has, without biases.
        ssgd: Update rule of SSGD.
        magnitude: Update rule of the baseline, and of the dense training.
        fine_tune: Update rule after the last cut.
        first_epochs: Epochs, and cuts, until ``surplus`` times the weights are left that will be.
        epochs: Epochs, and cuts, from there to the end.
        fine_tune_epochs: Epochs under the last mask.
        compressions: All weights over those that stay.
        goal: Compression and error in percent.
        surplus: See ``first_epochs``.
        batch_size: Images per step.
        shift: By how many pixels training images move at most.
        examples: How many training images are used; all by default.
    """

    model: str
    weights: int
    ssgd: Optimizer
    magnitude: Optimizer
    fine_tune: Optimizer
    first_epochs: int
    epochs: int
    fine_tune_epochs: int
    compressions: tuple[int, ...]
    goal: tuple[int, float]
    surplus: int = 6
    batch_size: int = 128
    shift: int = 0
    examples: int | None = None

    def optimizer(self, method: str) -> Optimizer:
        """The update rule before the fine-tuning; a dense training is that of the baseline."""
        return self.ssgd if method == "ssgd" else self.magnitude


RECIPES = [
    Recipe(
        model="lenet_300_100",
        weights=266_200,
        ssgd=SSGD(0.05, epsilon=1e-2, max_scale=5.0, alpha=0.9, regularization=1e-4),
        magnitude=Momentum(0.05, norm_coefficient=5e-4),
        fine_tune=Momentum(0.05, norm_coefficient=1e-4),
        first_epochs=0,
        epochs=24,
        fine_tune_epochs=12,
        compressions=(12, 30, 56, 68, 100, 150),
        goal=(68, 1.92),
    ),
    Recipe(
        model="lenet5_caffe",
        weights=430_500,
        ssgd=SSGD(0.02, epsilon=1e-2, max_scale=5.0, alpha=0.9, regularization=3e-4),
        magnitude=Momentum(0.02, norm_coefficient=5e-4),
        fine_tune=Adam(3e-3),
        first_epochs=6,
        epochs=24,
        fine_tune_epochs=14,
        compressions=(111, 280),
        goal=(280, 0.75),
        batch_size=64,
        shift=1,
    ),
]


@dataclass(frozen=True)
class Task:
    """One training."""

    data: Path
    recipe: Recipe
    method: str
    compression: int
    seed: int
    held_out: int = 0
    file: Path | None = None


@dataclass(frozen=True)
class Outcome:
    """What came of it."""

    task: Task
    error: float
    compression: float
    seconds: float


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    recipes = [recipe for recipe in RECIPES if not options.models or recipe.model in options.models]
    if options.quick:
        recipes = [quick(recipe) for recipe in recipes]
    elif options.compressions:
        recipes = [replace(recipe, compressions=options.compressions) for recipe in recipes]
    folders = [options.data, *([options.fashion] if options.fashion else [])]
    with ForeignLoad() as foreign, tempfile.TemporaryDirectory() as scratch:
        tasks = [
            Task(folder, recipe, method, compression, seed, options.held_out, Path(scratch) / f"{recipe.model}.onnx")
            for folder in folders
            for recipe in recipes
            for method in options.methods
            for compression in ((1,) if method == "dense" else recipe.compressions)
            for seed in ([0] if options.quick else options.seeds)
        ]
        outcomes = run_all([replace(task, file=kept(task, options.data, recipes)) for task in tasks], options.workers)
        parts = [results(outcomes, folder, recipe) for folder in folders for recipe in recipes]
        parts += [storage(Path(task.file), task.recipe) for task in tasks if kept(task, options.data, recipes)]
    header = ["published", "LeNet-300-100 error, %", "weights", "LeNet-5 error, %", "weights"]
    parts.append("Published on MNIST\n\n" + table(header, PUBLISHED))
    reached = True
    if options.quick:
        verdict = "A quick run: few epochs, part of the data; it says nothing about the goal."
    elif options.held_out:
        verdict = f"Errors on {options.held_out:,} held out training images; they say nothing about the goal."
    elif "ssgd" not in options.methods:
        verdict = "The goal is one for SSGD, which was left out."
    else:
        verdict, reached = judge(outcomes, options.data, recipes)
    settings = "\n".join(
        f"{r.model}: SSGD by {r.ssgd}; magnitude by {r.magnitude}; then {r.fine_tune} on a cosine schedule; "
        f"{r.first_epochs} + {r.epochs} + {r.fine_tune_epochs} epochs with a cut after each but the last "
        f"{r.fine_tune_epochs}, batches of {r.batch_size}, images moved by up to {r.shift} pixels."
        for r in recipes
    )
    running = f"{machine_line()} {options.workers} trainings at a time, one thread each. {load_line(foreign)}"
    write_report("\n\n".join([*parts, verdict, settings, running]), options.output)
    if options.picture:
        draw(outcomes, options.data, recipes, options.picture)
    return 0 if reached else 1


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser.add_argument("--data", type=Path, required=True, help="folder of MNIST's files")
    parser.add_argument("--fashion", type=Path, help="folder of Fashion-MNIST's files")
    parser.add_argument("--quick", action="store_true", help="one seed, one compression, few epochs")
    parser.add_argument("--models", type=lambda text: text.split(","), help="lenet_300_100, lenet5_caffe or both")
    parser.add_argument("--methods", type=lambda text: text.split(","), default=METHODS, help=", ".join(METHODS))
    parser.add_argument("--compressions", type=numbers, help="such as 56,68,100; by default each model's own")
    parser.add_argument("--seeds", type=numbers, default=[0, 1, 2])
    parser.add_argument("--held-out", type=int, default=0, help="measure on so many of the training images instead")
    parser.add_argument("--workers", type=int, default=2, help="trainings at a time")
    parser.add_argument("--output", help="also write the report to this Markdown file")
    parser.add_argument("--picture", type=Path, help="write error over compression on MNIST to this PNG")
    options = parser.parse_args(arguments)
    for name, given, known in (
        ("model", options.models, [recipe.model for recipe in RECIPES]),
        ("method", options.methods, METHODS),
    ):
        if unknown := set(given or ()) - set(known):
            parser.error(f"there is no {name} {', '.join(unknown)}; use {', '.join(known)}")
    try:
        for folder in filter(None, (options.data, options.fashion)):
            read_digits(folder, "t10k")
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return options


def quick(recipe: Recipe) -> Recipe:
    """A recipe that takes a minute or two."""
    if recipe.model == "lenet5_caffe":
        return replace(recipe, first_epochs=2, epochs=4, fine_tune_epochs=3, compressions=(50,), examples=6000)
    return replace(recipe, epochs=12, fine_tune_epochs=6, compressions=(68,))


def kept(task: Task, data: Path, recipes: Sequence[Recipe]) -> Path | None:
    """Where the model of a task is written: of one per architecture, whose forms of storage are measured."""
    goal = task.recipe.goal[0] if task.recipe.goal[0] in task.recipe.compressions else task.recipe.compressions[-1]
    wanted = task.data == data and task.method == "ssgd" and task.compression == goal and task.seed == 0
    return task.file if wanted else None


def run_all(tasks: Sequence[Task], workers: int) -> list[Outcome]:
    outcomes = []
    with ProcessPoolExecutor(workers) as pool:
        for done, outcome in enumerate(pool.map(run, tasks), start=1):
            task = outcome.task
            print(
                f"{done} of {len(tasks)}: {task.data.name}, {task.recipe.model}, {task.method}, seed {task.seed}: "
                f"{outcome.error:.2f} % error at {outcome.compression:.1f}x, {outcome.seconds:.0f} s",
                flush=True,
            )
            outcomes.append(outcome)
    return outcomes


def run(task: Task) -> Outcome:
    """Train, prune, write, and measure the file."""
    recipe, begin = task.recipe, time.perf_counter()
    train, test = parts_of(task)
    images = ShiftedImages(*train, batch_size=recipe.batch_size, reach=recipe.shift, seed=task.seed)

    def prune(model: onnx.ModelProto, compression: float, epochs: int, fine_tune_epochs: int) -> PruneResult:
        return onnxtrain.prune(
            model,
            images,
            loss="softmax_cross_entropy",
            validation=tuple(array[:256] for array in test),  # what prune itself prints; nothing depends on it
            method="ssgd" if task.method == "ssgd" else "magnitude",
            sparsity=1 - 1 / compression,
            optimizer=recipe.optimizer(task.method),
            fine_tune_optimizer=recipe.fine_tune,
            epochs=epochs,
            fine_tune_epochs=fine_tune_epochs,
            rounds=epochs,
            schedule=f"warmup({min(400, len(images) * epochs // 4)})+constant",
            fine_tune_schedule=f"warmup({min(100, len(images) * fine_tune_epochs // 4)})+cosine",
            seed=task.seed,
            threads=1,
        )

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # at 150x little may be left of a layer: the error shows it
        model = getattr(onnxtrain.examples, recipe.model)(seed=task.seed)
        if recipe.first_epochs:
            model = prune(model, max(1.0, task.compression / recipe.surplus), recipe.first_epochs, 0).model()
        result = prune(model, task.compression, recipe.epochs, recipe.fine_tune_epochs)
    with tempfile.TemporaryDirectory() as folder:
        path = task.file or Path(folder) / "model.onnx"
        result.save(path)
        error = error_of_file(path, *test)
    return Outcome(task, error, result.compression, time.perf_counter() - begin)


def parts_of(task: Task) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """What is trained and what is measured on."""
    images, labels = read_digits(task.data, "train")
    count = len(labels) - task.held_out
    train = images[:count][: task.recipe.examples], labels[:count][: task.recipe.examples]
    return train, (images[count:], labels[count:]) if task.held_out else read_digits(task.data, "t10k")


def error_of_file(path: Path, images: np.ndarray, labels: np.ndarray) -> float:
    """Error in percent with nothing but onnxruntime."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    parts = [session.run(None, {name: images[i : i + 500]})[0].argmax(axis=1) for i in range(0, len(images), 500)]
    return 100 * float(np.mean(np.concatenate(parts) != labels))


def results(outcomes: Sequence[Outcome], folder: Path, recipe: Recipe) -> str:
    """A row for each method and compression."""
    rows = []
    for method in METHODS:
        for compression in (1,) if method == "dense" else recipe.compressions:
            found = select(outcomes, folder, recipe, method, compression)
            if not found:
                continue
            errors = [outcome.error for outcome in found]
            rows.append(
                [
                    method,
                    f"{np.mean([outcome.compression for outcome in found]):.1f}x",
                    f"{np.mean(errors):.2f}",
                    " ".join(f"{error:.2f}" for error in errors),
                    f"{np.mean([outcome.seconds for outcome in found]):.0f}",
                ]
            )
    header = ["method", "weights", "error, % (mean)", "of each seed", "seconds"]
    some = "" if recipe.examples is None else f", trained on {recipe.examples:,} images"
    return f"{recipe.model} ({recipe.weights:,} weights) on {folder.name}{some}\n\n{table(header, rows)}"


def select(outcomes: Sequence[Outcome], folder: Path, recipe: Recipe, method: str, compression: int) -> list[Outcome]:
    wanted = (folder, recipe, method, compression)
    return [o for o in outcomes if (o.task.data, o.task.recipe, o.task.method, o.task.compression) == wanted]


def judge(outcomes: Sequence[Outcome], data: Path, recipes: Sequence[Recipe]) -> tuple[str, bool]:
    """Whether SSGD reached the published result on MNIST."""
    lines, reached = [], True
    for recipe in recipes:
        compression, bound = recipe.goal
        means = {
            c: np.mean([outcome.error for outcome in select(outcomes, data, recipe, "ssgd", c)])
            for c in recipe.compressions
            if c >= compression
        }
        best = max((c for c, error in means.items() if round(error, 2) <= bound), default=None)
        reached = reached and best is not None
        verdict = "missed" if best is None else f"reached, up to {best}x"
        lines.append(f"Goal for {recipe.model}: {compression}x with at most {bound} % error: {verdict}.")
    return "\n".join(lines), reached


def storage(path: Path, recipe: Recipe) -> str:
    """Bytes and times of a pruned model in the forms that it can be written in."""
    sparse = path.with_suffix(".sparse.onnx")
    onnxtrain.pruning.save_sparse(path, sparse)
    packed = path.with_suffix(".onnx.gz")
    packed.write_bytes(gzip.compress(path.read_bytes(), mtime=0))
    image = np.zeros((1, 1, 28, 28), np.float32)
    rows = []
    for name, file in (("dense, with its zeros", path), ("sparse_initializer", sparse), ("dense through gzip", packed)):
        data = file.read_bytes()
        loads, runs = [], []
        for _ in range(20):
            begin = time.perf_counter()
            content = gzip.decompress(file.read_bytes()) if file is packed else file.read_bytes()
            session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
            loads.append(time.perf_counter() - begin)
        feeds = {session.get_inputs()[0].name: image}
        for _ in range(200):
            begin = time.perf_counter()
            session.run(None, feeds)
            runs.append(time.perf_counter() - begin)
        zipped = "" if file is packed else f"{len(gzip.compress(data, mtime=0)):,}"
        rows.append([name, f"{len(data):,}", zipped, f"{1e3 * np.median(loads):.2f}", f"{1e6 * np.median(runs):.0f}"])
    header = ["storage", "bytes", "through gzip", "load, ms", "one image, us"]
    title = f"Storage of {recipe.model}, pruned by SSGD, on onnxruntime {onnxruntime.__version__}"
    return f"{title}\n\n{table(header, rows)}"


def draw(outcomes: Sequence[Outcome], data: Path, recipes: Sequence[Recipe], path: Path) -> None:
    """Error over compression, a panel for each model."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5 * len(recipes), 4), layout="constrained")
    for axes, recipe in zip(figure.subplots(1, len(recipes), squeeze=False)[0], recipes, strict=True):
        for method, colour in (("magnitude", "#64748b"), ("ssgd", "#2563eb")):
            found = [select(outcomes, data, recipe, method, compression) for compression in recipe.compressions]
            found = [group for group in found if group]
            xs = [np.mean([o.compression for o in group]) for group in found]
            means = [np.mean([o.error for o in group]) for group in found]
            axes.plot(xs, means, color=colour, marker="o", label=method)
            for x, group in zip(xs, found, strict=True):
                axes.plot([x] * len(group), [o.error for o in group], ".", color=colour, alpha=0.4)
        dense = [o.error for o in select(outcomes, data, recipe, "dense", 1)]
        if dense:
            axes.axhline(np.mean(dense), color="#94a3b8", linestyle=":", label="dense")
        axes.plot(*recipe.goal, marker="*", color="#ea580c", markersize=12, linestyle="none", label="published, 2017")
        axes.set_xscale("log")
        ticks = sorted({*recipe.compressions, recipe.goal[0]})
        axes.set_xticks(ticks, [f"{c}x" for c in ticks])
        axes.set_xlim(ticks[0] / 1.4, ticks[-1] * 1.4)
        axes.minorticks_off()
        axes.set_xlabel("all weights / non-zero weights")
        axes.set_ylabel("test error, %")
        axes.set_title(recipe.model, loc="left")
        axes.grid(alpha=0.25)
        axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    sys.exit(main())
