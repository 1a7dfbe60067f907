"""Prunes LeNet-300-100 and LeNet-5 (Caffe's form) with SSGD and by magnitude, beside published results.

    python benchmarks/pruning.py --data MNIST [--fashion FASHION] [--quick] [--log FILE]

MNIST and FASHION are folders with the four original files (train-images-idx3-ubyte.gz and so on). A model is pruned in
stages, by SSGD and by magnitude: the same images, epochs, cuts and fine-tuning; each stage begins with the model that
the one before it ended with, so that all compressions of one method and seed are one training. Beside them stands a
dense training by the baseline's rule; with the model that it ends with the pruning of LeNet-5 begins, that of
LeNet-300-100 with a fresh one. Errors are those on the test images after a stage's last epoch, of the written file, by
onnxruntime alone; no epoch is chosen by its error. The exit code is 1 where the goal is missed on MNIST: LeNet-300-100
at 68x with at most 1.92 % error, LeNet-5 at 280x with at most 0.75 % (means over the seeds).

The whole run takes about two hours on two quiet cores; with --log FILE, results are saved as they come, and those
already there are skipped. --held-out 10000 is for choosing settings: it trains on all training images except
the last 10,000 and measures on those; no test image is read. --methods default prunes to the goal by
prune without settings. --quick runs one seed, one stage and fewer epochs, LeNet-5
on a tenth of the images. Neither measures the goal.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import warnings
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from harness import ForeignLoad, load_line, machine_line, make_parser, write_report
from idx import read_digits
from pruning_report import DEFAULT, DENSE, METHODS, Outcome, draw, published, results, storage, verdict_of
from shifted import ShiftedImages

import onnxtrain
from onnxtrain.operators import SSGD, Adam, Momentum, Optimizer


@dataclass(frozen=True)
class Stage:
    """A part of a pruning.

    Attributes:
        compression: All weights over remaining weights.
        epochs: Epochs, with a cut after each.
        fine_tune_epochs: Epochs with the final mask.
    """

    compression: int
    epochs: int
    fine_tune_epochs: int


@dataclass(frozen=True)
class StepSpec:
    """Training and pruning settings of a model, and the published result to reach.

    Attributes:
        model: The function of ``onnxtrain.examples``.
        weights: Number of weights, without biases.
        ssgd: Update rule of SSGD.
        magnitude: Update rule of the baseline, and of the dense training.
        fine_tune: Update rule after the last cut of a stage.
        stages: Stages of the pruning.
        dense_epochs: Epochs of the dense training, then of its fine-tuning.
        goal: Compression, and error in percent.
        from_dense: True if pruning starts from the result of the dense training with the same seed instead of a fresh
            model.
        batch_size: Images per step.
        shift: Maximum shift of training images in pixels.
        examples: Number of training images; all by default.
    """

    model: str
    weights: int
    ssgd: Optimizer
    magnitude: Optimizer
    fine_tune: Optimizer
    stages: tuple[Stage, ...]
    dense_epochs: tuple[int, int]
    goal: tuple[int, float]
    from_dense: bool = False
    batch_size: int = 128
    shift: int = 0
    examples: int | None = None

    def stages_of(self, method: str) -> tuple[Stage, ...]:
        """The stages of a method."""
        if method == DEFAULT:  # prune chooses the stages up to the goal
            return (Stage(self.goal[0], 0, 0),)
        return (Stage(1, *self.dense_epochs),) if method == DENSE else self.stages

    def optimizer_of(self, method: str) -> Optimizer:
        """The update rule of a method."""
        return self.ssgd if method == "ssgd" else self.magnitude

    def begins_dense(self, method: str) -> bool:
        """Return whether a method starts from the result of the dense training."""
        return self.from_dense and method != DENSE


RECIPES = [
    StepSpec(
        model="lenet_300_100",
        weights=266_200,
        ssgd=SSGD(0.05, epsilon=1e-2, max_scale=5.0, alpha=0.9, regularization=1e-4),
        magnitude=Momentum(0.05, norm_coefficient=5e-4),
        fine_tune=Momentum(0.05, norm_coefficient=1e-4),
        stages=(Stage(12, 8, 4), Stage(30, 6, 4), Stage(68, 8, 8), Stage(150, 8, 8)),
        dense_epochs=(24, 12),
        goal=(68, 1.92),
    ),
    StepSpec(
        model="lenet5_caffe",
        weights=430_500,
        ssgd=SSGD(0.02, epsilon=1e-2, max_scale=5.0, alpha=0.9, regularization=3e-4),
        magnitude=Momentum(0.02, norm_coefficient=5e-4),
        fine_tune=Adam(3e-3),
        stages=(Stage(46, 5, 2), Stage(111, 5, 3), Stage(280, 9, 6)),
        dense_epochs=(12, 6),
        from_dense=True,
        goal=(280, 0.75),
        batch_size=64,
        shift=1,
    ),
]


@dataclass(frozen=True)
class Task:
    """One training, through all of its stages."""

    data: Path
    recipe: StepSpec
    method: str
    seed: int
    held_out: int = 0
    file: Path | None = None  # output path of the model at the goal's compression
    folder: Path = Path()  # folder of dense models

    def dense(self) -> Task:
        """The dense training of the same seed."""
        return replace(self, method=DENSE, file=None)

    def dense_file(self) -> Path:
        """Path of its model."""
        return self.folder / f"dense_{zlib.crc32(self.dense().key().encode()):08x}.onnx"

    def key(self) -> str:
        """Key of its results, which includes the settings that they depend on."""
        recipe, method = self.recipe, self.method
        settings = [recipe.optimizer_of(method), recipe.fine_tune, recipe.stages_of(method)]
        if recipe.begins_dense(method):
            settings += ["after", recipe.optimizer_of(DENSE), recipe.stages_of(DENSE)]
        settings += [recipe.batch_size, recipe.shift, recipe.examples]
        return f"{self.data.name} {recipe.model} {method} {self.seed} {self.held_out} {settings}"


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    recipes = [recipe for recipe in RECIPES if not options.models or recipe.model in options.models]
    if options.quick:
        recipes = [quick(recipe) for recipe in recipes]
    folders = [options.data, *([options.fashion] if options.fashion else [])]
    names = {recipe.model: Path(f"{recipe.model}.onnx") for recipe in recipes}
    with ForeignLoad() as foreign, tempfile.TemporaryDirectory() as scratch:
        kept = options.log.parent if options.log else Path(scratch)
        written = {model: kept / name for model, name in names.items()}
        tasks = [
            Task(
                folder,
                recipe,
                method,
                seed,
                options.held_out,
                written[recipe.model] if (folder, method, seed) == (options.data, "ssgd", 0) else None,
                kept,
            )
            for folder in folders
            for recipe in recipes
            for method in options.methods
            for seed in ([0] if options.quick else options.seeds)
        ]
        outcomes = run_all(tasks, options.workers, options.log)
        parts = [
            results(f"{r.model} ({r.weights:,} weights) on {folder.name}{some_of(r)}", group)
            for folder in folders
            for r in recipes
            if (group := [o for o in outcomes if (o.data, o.model) == (folder.name, r.model)])
        ]
        parts += [
            storage(path, f"Storage of {model}, pruned by SSGD to {goal_of(model)}x")
            for model, path in written.items()
            if path.exists()
        ]
    parts.append(published())
    judged = [
        verdict_of(r.model, r.goal, [o for o in outcomes if (o.data, o.model) == (options.data.name, r.model)])
        for r in recipes
    ]
    if options.quick:
        verdict, reached = "A quick run: few epochs, part of the data; it says nothing about the goal.", True
    elif options.held_out:
        verdict = f"Errors on {options.held_out:,} held out training images; they say nothing about the goal."
        reached = True
    else:
        verdict, reached = "\n".join(text for text, _ in judged), all(good for _, good in judged)
    running = f"{machine_line()} {options.workers} trainings at a time, one thread each. {load_line(foreign)}"
    write_report("\n\n".join([*parts, verdict, *map(settings, recipes), running]), options.output)
    if options.picture:
        draw(outcomes, {r.model: r.goal for r in recipes}, options.picture)
    return 0 if reached else 1


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__, "one seed, one compression, few epochs")

    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser.add_argument("--data", type=Path, required=True, help="folder of MNIST's files")
    parser.add_argument("--fashion", type=Path, help="folder of Fashion-MNIST's files")
    parser.add_argument("--models", type=lambda text: text.split(","), help="lenet_300_100, lenet5_caffe or both")
    methods = (*METHODS, DEFAULT)
    parser.add_argument("--methods", type=lambda text: text.split(","), default=METHODS, help=", ".join(methods))
    parser.add_argument("--seeds", type=numbers, default=[0, 1, 2])
    parser.add_argument("--held-out", type=int, default=0, help="measure on so many of the training images instead")
    parser.add_argument("--workers", type=int, default=2, help="trainings at a time")
    parser.add_argument("--log", type=Path, help="keep results in this file, and take those that are in it")
    parser.add_argument("--picture", type=Path, help="write error over compression to this PNG")
    options = parser.parse_args(arguments)
    for name, given, known in (
        ("model", options.models, [recipe.model for recipe in RECIPES]),
        ("method", options.methods, methods),
    ):
        if unknown := set(given or ()) - set(known):
            parser.error(f"there is no {name} {', '.join(unknown)}; use {', '.join(known)}")
    try:
        for folder in filter(None, (options.data, options.fashion)):
            read_digits(folder, "t10k")
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return options


def quick(recipe: StepSpec) -> StepSpec:
    """Shorten a recipe to a minute or two."""
    if recipe.model == "lenet5_caffe":
        return replace(recipe, stages=(Stage(50, 6, 3),), dense_epochs=(6, 3), examples=6000)
    return replace(recipe, stages=(Stage(68, 12, 6),), dense_epochs=(12, 6))


def some_of(recipe: StepSpec) -> str:
    return "" if recipe.examples is None else f", trained on {recipe.examples:,} images"


def goal_of(model: str) -> int:
    return next(recipe.goal[0] for recipe in RECIPES if recipe.model == model)


def settings(recipe: StepSpec) -> str:
    stages = ", then ".join(f"to {s.compression}x {s.epochs} + {s.fine_tune_epochs}" for s in recipe.stages)
    return (
        f"{recipe.model}: SSGD by {recipe.ssgd}; magnitude by {recipe.magnitude}; epochs with a cut after each + "
        f"epochs of fine-tuning by {recipe.fine_tune} on a cosine schedule: {stages}; dense "
        f"{' + '.join(map(str, recipe.dense_epochs))}{', from which the others begin' if recipe.from_dense else ''}; "
        f"batches of {recipe.batch_size}, images moved by up to "
        f"{recipe.shift} pixels."
    )


def run_all(tasks: Sequence[Task], workers: int, log: Path | None) -> list[Outcome]:
    known: dict[str, list[Outcome]] = {}
    for line in log.read_text().splitlines() if log is not None and log.exists() else ():
        entry = json.loads(line)
        known[entry["key"]] = [Outcome(**outcome) for outcome in entry["outcomes"]]
    missing = [task for task in tasks if task.key() not in known]
    first = [task for task in missing if task.method == DENSE]
    first += [
        task.dense()
        for task in missing
        if task.recipe.begins_dense(task.method) and not (task.dense().key() in known and task.dense_file().exists())
    ]
    waves = [list({task.key(): task for task in first}.values()), [task for task in missing if task.method != DENSE]]
    done, total = 0, sum(map(len, waves))
    with ProcessPoolExecutor(workers) as pool:
        for wave in waves:
            running = {pool.submit(run, task): task for task in wave}
            for future in as_completed(running):
                task, outcomes, done = running[future], future.result(), done + 1
                known[task.key()] = outcomes
                if log is not None:
                    with log.open("a") as file:
                        print(json.dumps({"key": task.key(), "outcomes": [asdict(o) for o in outcomes]}), file=file)
                said = ", ".join(f"{o.error:.2f} % error at {o.compression:.1f}x" for o in outcomes)
                print(
                    f"{done} of {total}: {task.data.name}, {task.recipe.model}, {task.method}, seed {task.seed}: "
                    f"{said}; {sum(o.seconds for o in outcomes):.0f} s",
                    flush=True,
                )
    return [outcome for task in tasks for outcome in known[task.key()]]


def run(task: Task) -> list[Outcome]:
    """Train, prune, save, and measure the file of each stage."""
    return list(stages_of(task))


def stages_of(task: Task) -> Iterator[Outcome]:
    recipe = task.recipe
    train, test = parts_of(task)
    images = ShiftedImages(*train, batch_size=recipe.batch_size, reach=recipe.shift, seed=task.seed)
    model: onnx.ModelProto = getattr(onnxtrain.examples, recipe.model)(seed=task.seed)
    if recipe.begins_dense(task.method):
        model = onnx.load(task.dense_file())
    for stage in recipe.stages_of(task.method):
        begin = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # at 150x a layer may become nearly empty: the error shows it
            result = (
                prune_by_default(model, train, test, task)
                if task.method == DEFAULT
                else onnxtrain.prune(
                    model,
                    images,
                    loss="softmax_cross_entropy",
                    validation=tuple(array[:1024] for array in train),  # which chooses a point of each fine-tuning
                    method="ssgd" if task.method == "ssgd" else "magnitude",
                    sparsity=1 - 1 / stage.compression,
                    optimizer=recipe.optimizer_of(task.method),
                    fine_tune_optimizer=recipe.fine_tune,
                    epochs=stage.epochs,
                    fine_tune_epochs=stage.fine_tune_epochs,
                    rounds=stage.epochs,
                    schedule=f"warmup({warm_up(len(images) * stage.epochs, 400)})+constant",
                    fine_tune_schedule=f"warmup({warm_up(len(images) * stage.fine_tune_epochs, 100)})+cosine",
                    seed=task.seed,
                    threads=1,
                )
            )
        model = result.model()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.onnx"
            result.save(path)
            error = error_of_file(path, *test)
            if task.method == DENSE:
                result.save(task.dense_file())
            if task.file is not None and stage.compression == goal_of(recipe.model):
                result.save(task.file)
        yield Outcome(
            task.data.name,
            recipe.model,
            task.method,
            task.seed,
            stage.compression,
            result.compression,
            error,
            time.perf_counter() - begin,
        )


def prune_by_default(
    model: onnx.ModelProto, train: tuple[np.ndarray, ...], test: tuple[np.ndarray, ...], task: Task
) -> onnxtrain.PruneResult:
    """Prune to the goal's compression without settings."""
    return onnxtrain.prune(
        model,
        train,
        loss="softmax_cross_entropy",
        validation=tuple(array[:1024] for array in train),
        sparsity=1 - 1 / task.recipe.goal[0],
        seed=task.seed,
        threads=1,
    )


def warm_up(steps: int, most: int) -> int:
    """Steps of warm-up: a quarter of all at most."""
    return max(1, min(most, steps // 4))


def parts_of(task: Task) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """The training and the test set."""
    images, labels = read_digits(task.data, "train")
    count = len(labels) - task.held_out
    train = images[:count][: task.recipe.examples], labels[:count][: task.recipe.examples]
    return train, (images[count:], labels[count:]) if task.held_out else read_digits(task.data, "t10k")


def error_of_file(path: Path, images: np.ndarray, labels: np.ndarray) -> float:
    """Error in percent in plain onnxruntime."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    parts = [session.run(None, {name: images[i : i + 500]})[0].argmax(axis=1) for i in range(0, len(images), 500)]
    return 100 * float(np.mean(np.concatenate(parts) != labels))


if __name__ == "__main__":
    sys.exit(main())
