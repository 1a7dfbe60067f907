"""One combination: a model, an optimizer, options and batches by a seed, trained on both sides and compared.

Tolerances follow from the precision: PyTorch trains in float64, which is taken for the truth, and in float32. A result
of onnxtrain, which computes in float32, may differ from the truth by ten times as much as PyTorch's float32, beside a
few roundings of the weights and of their movement. Where it differs by more, PyTorch trains in float64 again, several
times, disturbed as float32 disturbs: where the truth moves a third as far, it is chaos, and counted as such.
"""

from __future__ import annotations

import functools
import math
import warnings
from typing import Any, NamedTuple

import numpy as np
import onnx
import torch

import onnxtrain
from differential import double
from differential.modules import Draw, Model, make_model
from differential.reference import Layout, Plan, Result, single, train
from differential.surroundings import Surroundings, surroundings
from distributed.threads import in_threads
from onnxtrain import callbacks, losses, schedules
from onnxtrain.errors import OnnxTrainError

PER_MODEL = 10
"""Combinations that share a model: its export costs as much as several of them."""
DISTURBED = 6
"""Disturbed trainings that show chaos."""
LARGER = 3.0
"""Disturbances where the step graph is right in float64: sums of thousands round by several times one rounding."""

OPTIMIZERS = ("SGD", "SSGD", "Momentum", "Adam", "AdamW", "Adagrad", "RMSprop", "LAMB", "Lion")
LOSSES = {
    "vector": (
        "softmax_cross_entropy",
        "softmax_cross_entropy",
        "binary_cross_entropy",
        "mean_squared_error",
        "mean_absolute_error",
        "huber",
        "focal",
        "binary_focal",
        "triplet",
        "info_nce",
    ),
    "sequence": ("softmax_cross_entropy", "next_token", "ctc", "mean_squared_error", "binary_cross_entropy", "focal"),
    "image": ("softmax_cross_entropy", "dice", "binary_cross_entropy", "huber", "focal"),
}
SCHEDULES = ("Constant", "Linear", "Cosine", "Step", "Exponential", "Polynomial", "OneCycle", "WarmUp", "Custom")
TRAINER_OPTIONS = (
    "optimizer",
    "loss",
    "train",
    "freeze",
    "groups",
    "ema",
    "batch_norm",
    "clip_value",
    "clip_norm",
    "masks",
    "accumulate",
    "recompute",
    "tie",
    "distributed",
    "dynamic_batch",
    "threads",
    "runtime",
    "seed",
    "targets",
)
"""Arguments of Trainer that the combinations vary."""
FIT_OPTIONS = (
    "data",
    "y",
    "sample_weight",
    "epochs",
    "batch_size",
    "schedule",
    "shuffle",
    "callbacks",
    "prefetch",
    "progress",
)
"""Arguments of fit that the combinations vary."""


class Outcome(NamedTuple):
    """The outcome of a combination.

    Attributes:
        seed: Its number.
        kind: "equal", "chaotic" (as far from PyTorch as PyTorch's own rounding leads), "refused" (a sentence),
            "hinted" (the exporter wrote a second, computed copy of a parameter, which a hint names), "diverged"
            (PyTorch reaches infinity or NaN), or "different".
        text: The difference, or the error message.
        model: The model.
        options: Everything else.
    """

    seed: int
    kind: str
    text: str
    model: str
    options: str


@functools.lru_cache(maxsize=4)
def model_of(number: int) -> Model:
    """Return a model by its number."""
    return make_model(number)


class Setup(NamedTuple):
    """A combination on both sides."""

    model: Model
    plan: Plan
    layout: Layout
    initial: dict[str, np.ndarray]
    trainer: dict[str, Any]
    fit: dict[str, Any] | None
    text: str
    hinted: list[str]
    around: Surroundings


def run(seed: int) -> Outcome:
    """Draw a combination, train on both sides, and compare."""
    model = model_of(seed // PER_MODEL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _run(seed, model)


def _run(seed: int, model: Model) -> Outcome:
    draw = Draw(27, seed)
    described: list[str] = []
    try:
        setup = _draw(draw, model, seed)
        described.append(setup.text)
        found = setup.layout.wrong
        if not found and setup.hinted:
            return Outcome(seed, "hinted", ", ".join(setup.hinted), model.text, setup.text)
        if not found:
            truth = train(model.module, setup.layout, setup.initial, setup.plan, torch.float64)
            if not all(math.isfinite(loss) and abs(loss) < 1e6 for loss in truth.losses) or not all(
                np.isfinite(array).all() and np.abs(array).max(initial=0) < 1e4 for array in truth.tensors.values()
            ):
                return Outcome(seed, "diverged", "", model.text, setup.text)
            rounded = train(model.module, setup.layout, setup.initial, setup.plan, torch.float32)
            ours = _train(setup)
            found = _compare(setup, ours, truth, [rounded])
            if found:
                near = [rounded, *_disturbed(setup, 1.0)]
                chaotic = not _compare(setup, ours, truth, near)
                if not chaotic and _right_in_double(setup, truth):
                    chaotic = not _compare(setup, ours, truth, [*near, *_disturbed(setup, LARGER)])
                if chaotic:
                    return Outcome(seed, "chaotic", "; ".join(found)[:400], model.text, setup.text)
    except OnnxTrainError as error:
        return Outcome(seed, "refused", f"{type(error).__name__}: {error}", model.text, " ".join(described))
    kind = "different" if found else "equal"
    return Outcome(seed, kind, "; ".join(found)[:600], model.text, " ".join(described))


def _disturbed(setup: Setup, times: float) -> list[Result]:
    """Train in PyTorch's float64 with disturbances of the given multiple of float32's rounding."""
    noises = [np.random.default_rng(position) for position in range(DISTURBED)]
    module, layout, initial, plan = setup.model.module, setup.layout, setup.initial, setup.plan
    return [train(module, layout, initial, plan, torch.float64, noise, times) for noise in noises]


def _right_in_double(setup: Setup, truth: Result) -> bool:
    """Return whether onnxtrain's step graph trains to the truth in float64, which excludes a defect of the graph."""
    try:
        found = double.train(setup.model, setup.plan, setup.trainer)
    except Exception:  # the reference evaluator lacks some activations of recurrent layers, and has bugs
        return False
    if found is None:
        return False
    for name, right in truth.tensors.items():
        moved = float(np.abs(right - setup.initial[name]).max(initial=0))
        error = float(np.abs(found[name] - right).max(initial=0))
        if not error <= 1e-6 * moved + 1e-12 * float(np.abs(right).max(initial=0)):
            return False
    return True


def _draw(draw: Draw, model: Model, seed: int) -> Setup:
    options: dict[str, Any] = {"threads": 1, "seed": seed % 1000}
    if draw.chance(0.4):
        options["runtime"] = onnxtrain.RuntimeOptions(threads=1, kernels=draw.pick([True, False]))
        del options["threads"]
    table = onnxtrain.inspect(model.file).initializers
    held = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.file.graph.initializer}
    trained = {row.name: held[row.name] for row in table if row.trainable and row.name in held}
    layout = Layout(model.module, trained)
    layout.wrong += [f"{r.name} is trained, but is no initializer" for r in table if r.trainable and r.name not in held]
    if layout.copies:
        options["tie"] = True
    known = {float(value) for parameter in model.module.parameters() for value in parameter.detach().reshape(-1)}
    hinted = []
    for row in table:
        if not row.trainable and row.name in held and held[row.name].dtype == np.float32:
            values = held[row.name].reshape(-1).tolist()
            if values and known.issuperset(values):
                hinted.append(row.name)
                if not row.undecided:
                    layout.wrong.append(f"{row.name} {row.shape} holds parameters, is not trained, and no hint says so")
    names = layout.order
    batch_mode = "train" if model.has_batch_norm() and draw.chance(0.6) else "frozen"
    if model.has_batch_norm():
        options["batch_norm"] = batch_mode

    name = draw.pick(LOSSES[model.kind])
    if name == "next_token" and model.output[0] < 3:
        name = "softmax_cross_entropy"
    compares = name in ("triplet", "info_nce")
    needs_full_batch = compares or batch_mode == "train"  # results of a micro-batch differ from the whole batch's

    fixed = model.batch
    if fixed is not None and draw.chance(0.3):
        options["dynamic_batch"], fixed = True, None
    cuts = draw.pick([1, 1, 1, 2, 3])
    size = (fixed or draw.integer(2, 5)) * cuts
    if compares and size // cuts < 4:
        if fixed:
            name, compares = "huber", False
            needs_full_batch = batch_mode == "train"
        else:
            size = 5 * cuts
    count = draw.integer(3, 6)
    sizes = [size] * count
    if not needs_full_batch and draw.chance(0.4):
        sizes[-1] = draw.integer(1, size)
    if cuts > 1:
        options["accumulate"] = cuts
    in_fit = draw.chance(0.5)
    weighted = not compares and draw.chance(0.2)

    loss, loss_options, make_target = _loss(draw, name, model)
    reduction = "sum" if draw.chance(0.1) else "mean"
    factor = draw.pick([1.0, 1.0, 1.0, 0.5])
    if name == "ctc":
        loss_options["reduction"] = reduction
    loss = type(loss)(**{**_arguments(loss), "reduction": reduction, "weight": factor})
    if "targets" in loss_options:
        options["targets"] = loss_options.pop("targets")
    options["loss"] = loss
    steps = []
    for rows in sizes:
        weights = draw.generator.uniform(0.2, 2.0, rows).astype(np.float32) if weighted else None
        steps.append((model.inputs(draw.generator, rows), make_target(rows), weights))

    chosen, rate, settings, theirs, own = _optimizer(draw, per_tensor=True)
    frozen: frozenset[str] = frozenset()
    if draw.chance(0.25) and len(names) > 1:
        copied = {layout.of[name][0] for name in layout.copies}  # one name of several: the trainer has the other one
        kept = [n for n in names if draw.chance(0.4) and layout.of[n][0] not in copied][: len(names) - 1]
        frozen = frozenset(kept)
        if kept and (layout.copies or draw.chance(0.5)):
            options["freeze"] = kept
        elif kept:
            options["train"] = [n for n in names if n not in kept]
    groups = []
    free = [n for n in names if n not in frozen]
    if draw.chance(0.3) and not layout.copies:
        part = [n for n in free if draw.chance(0.5)]
        if part:
            scale = draw.pick([1.0, 0.1, 2.0])
            key, value = draw.pick(own)
            key_there = {"norm_coefficient": "norm_coefficient"}.get(key, key)
            options["groups"] = [onnxtrain.Group(part, lr_scale=scale, **{key: value})]
            groups.append((part, scale, {key_there: single(value)}))
    masks = {}
    if draw.chance(0.12) and not layout.copies:
        for n in free[:2]:
            masks[n] = draw.generator.random(trained[n].shape) < 0.7
        options["masks"] = masks
    plan = Plan(steps, name, loss_options, chosen, theirs, [], reduction, factor, frozen, groups, masks, cuts)
    plan.train_statistics = batch_mode == "train"
    if draw.chance(0.3):
        options["clip_norm"] = plan.clip_norm = draw.pick([0.1, 0.5, 1.0])
    elif draw.chance(0.15):
        options["clip_value"] = plan.clip_value = draw.pick([0.01, 0.05])
    if draw.chance(0.2):
        decay, start, warmup = draw.pick([0.5, 0.9]), draw.pick([0, 0, 2]), draw.chance(0.4)
        options["ema"] = onnxtrain.EMA(decay, start=start, warmup=warmup)
        plan.ema = (decay, start, warmup)
    if draw.chance(0.1):
        options["recompute"] = "*"
    schedule = _schedule(draw, rate, count)
    plan.rates = [single(schedule(step)) for step in range(count)]
    options["optimizer"] = getattr(onnxtrain, chosen)(learning_rate=rate, **settings)
    fit: dict[str, Any] | None = None
    if in_fit:
        fit = {
            "schedule": schedule,
            "shuffle": False,
            "batch_size": size,
            "progress": False,
            "prefetch": draw.chance(0.5),
        }
        if draw.chance(0.3):  # several epochs of the same data
            half = -(-count // 2)
            plan.steps[half:] = plan.steps[: count - half]
            if count % 2:
                plan.steps.append(plan.steps[half - 1])
                plan.rates.append(single(schedule(count)))
            fit["epochs"] = 2
            if len(plan.steps[0][1]) != size or any(len(s[1]) != size for s in plan.steps[: half - 1]):
                raise AssertionError("only the last batch of an epoch may be smaller")
    whole = fixed is None and not needs_full_batch and not weighted and not options.get("recompute")
    around = surroundings(draw, model, plan, options["loss"], in_fit and whole)
    if around.ranks > 1 or around.threads > 1:
        options = {**options, "runtime": onnxtrain.RuntimeOptions(threads=around.threads)}
        options.pop("threads", None)
    shown = {k: v for k, v in options.items() if k != "masks"} | ({"masks": list(masks)} if masks else {})
    text = f"{sizes} {'fit ' + repr(fit) if fit else 'train_step'} weighted={weighted} {schedule!r} {shown!r} {around}"
    return Setup(model, plan, layout, trained, options, fit, " ".join(text.split()), hinted, around)


def _arguments(loss: Any) -> dict[str, Any]:
    import dataclasses

    return {field.name: getattr(loss, field.name) for field in dataclasses.fields(loss)}


def _loss(draw: Draw, name: str, model: Model) -> tuple[Any, dict[str, Any], Any]:
    """Return the loss, the reference's arguments, and a function that makes targets for a batch size."""
    axis = {"vector": 1, "sequence": 2, "image": 1}[model.kind]
    classes = model.output[axis - 1]
    positions = tuple(s for a, s in enumerate(model.output, 1) if a != axis)
    generator = draw.generator

    def labels(rows: int) -> np.ndarray:
        return generator.integers(0, classes, (rows, *positions))

    def values(rows: int) -> np.ndarray:
        return generator.normal(size=(rows, *model.output)).astype(np.float32)

    def bits(rows: int) -> np.ndarray:
        return (generator.random((rows, *model.output)) < 0.4).astype(np.float32)

    def distributions(rows: int) -> np.ndarray:
        drawn = generator.random((rows, *model.output)).astype(np.float32)
        return (drawn / drawn.sum(axis, keepdims=True)).astype(np.float32)

    if name in ("softmax_cross_entropy", "next_token"):
        options: dict[str, Any] = {}
        if draw.chance(0.3):
            options["class_weights"] = [float(w) for w in np.round(generator.uniform(0.2, 2, classes), 3)]
        if draw.chance(0.3):
            options["label_smoothing"] = draw.pick([0.1, 0.25])
        make = labels
        kind = "indices"
        if name != "next_token" and draw.chance(0.2):
            make, kind = distributions, "values"
        elif draw.chance(0.2):
            options["ignore_index"] = ignored = draw.pick([-100, 0])
            if ignored == -100:

                def make(rows: int) -> np.ndarray:
                    found = labels(rows)
                    found[generator.random(found.shape) < 0.2] = -100
                    return found

        theirs = dict(options)
        if name == "next_token":
            return losses.NextToken(**options), theirs, make
        return (
            losses.SoftmaxCrossEntropy(**options, axis=axis),
            theirs | {"axis": axis, "targets": kind},
            make,
        )
    if name == "focal":
        options = {"gamma": draw.pick([0.0, 1.0, 2.0])}
        if draw.chance(0.3):
            options["class_weights"] = [float(w) for w in np.round(generator.uniform(0.2, 2, classes), 3)]
        return losses.Focal(**options, axis=axis), options | {"axis": axis, "targets": "indices"}, labels
    if name == "binary_cross_entropy":
        options = {"positive_weight": draw.pick([1.0, 1.0, 3.0])}
        return losses.BinaryCrossEntropy(**options), options, bits
    if name == "binary_focal":
        options = {"gamma": draw.pick([1.0, 2.0]), "alpha": draw.pick([0.25, 0.6])}
        return losses.BinaryFocal(**options), options, bits
    if name == "huber":
        options = {"delta": draw.pick([1.0, 0.3])}
        return losses.Huber(**options), options, values
    if name == "mean_squared_error":
        return losses.MeanSquaredError(), {}, values
    if name == "mean_absolute_error":
        return losses.MeanAbsoluteError(), {}, values
    if name == "dice":
        options = {"smooth": draw.pick([1e-5, 1.0]), "background": draw.chance(0.6)}
        if draw.chance(0.5):
            return losses.Dice(**options), options | {"targets": "values"}, bits
        return losses.Dice(**options, axis=1), options | {"targets": "indices"}, labels
    if name == "ctc":
        length = max(1, model.output[0] // 2)

        def spoken(rows: int) -> np.ndarray:
            found = generator.integers(1, classes, (rows, length))
            for row in found[1:]:
                for position in range(1, length):  # equal neighbours need a blank between them
                    row[position] = (
                        row[position] % (classes - 1) + 1 if row[position] == row[position - 1] else row[position]
                    )
            for position in range(1, length):
                if found[0, position] == found[0, position - 1]:
                    found[0, position] = found[0, position] % (classes - 1) + 1
            cut = generator.integers(1, length + 1, rows)
            found[np.arange(length)[None] >= cut[:, None]] = -1
            return found

        return losses.CTC(), {}, spoken

    def pairs(rows: int) -> np.ndarray:
        return np.arange(rows) % 2

    if name == "triplet":
        options = {"margin": draw.pick([0.5, 1.0]), "mining": draw.pick(["hard", "all"])}
        return losses.Triplet(**options), options, pairs
    options = {"temperature": draw.pick([0.2, 1.0])}
    return losses.InfoNCE(**options), options, pairs


def _optimizer(
    draw: Draw, per_tensor: bool
) -> tuple[str, float, dict[str, Any], dict[str, Any], list[tuple[str, Any]]]:
    """Return name, learning rate, settings, the reference's settings, and settings that a group may override."""
    name = draw.pick(OPTIMIZERS)
    decay = draw.pick([0.0, 0.0, 0.01, 0.1])
    betas = draw.pick([(0.9, 0.999), (0.8, 0.95)])
    exact = (single(betas[0]), single(betas[1]))
    if name == "SGD":
        momentum = draw.pick([0.0, 0.5, 0.9])
        nesterov = momentum > 0 and draw.chance(0.4)
        damp = 0.0 if nesterov or not momentum else draw.pick([0.0, 0.1])
        settings = {"momentum": momentum, "dampening": damp, "weight_decay": decay, "nesterov": nesterov}
        theirs = {k: single(v) if isinstance(v, float) else v for k, v in settings.items()}
        return name, draw.pick([0.01, 0.1]), settings, theirs, [("weight_decay", 0.0), ("weight_decay", 0.2)]
    if name == "SSGD":
        settings = {"measure": "p-norm", "p": 2.0, "alpha": draw.pick([0.0, 0.9]), "norm_coefficient": decay}
        theirs = {k: single(v) if isinstance(v, float) else v for k, v in settings.items()}
        return name, draw.pick([0.01, 0.05]), settings, theirs, [("norm_coefficient", 0.1)]
    if name == "Momentum":
        mode = draw.pick(["standard", "nesterov"])
        settings = {"alpha": draw.pick([0.5, 0.9]), "beta": draw.pick([1.0, 0.8]), "mode": mode}
        settings["norm_coefficient"] = decay
        theirs = {k: single(v) if isinstance(v, float) else v for k, v in settings.items()}
        return name, draw.pick([0.01, 0.05]), settings, theirs, [("norm_coefficient", 0.1), ("norm_coefficient", 0.0)]
    if name == "Adam":
        settings = {"alpha": betas[0], "beta": betas[1], "epsilon": draw.pick([1e-6, 1e-3])}
        settings |= {"norm_coefficient": decay, "norm_coefficient_post": draw.pick([0.0, 0.0, 0.01])}
        theirs = {k: single(v) for k, v in settings.items()}
        return name, draw.pick([1e-3, 0.01]), settings, theirs, [("norm_coefficient", 0.1), ("norm_coefficient", 0.0)]
    if name == "Adagrad":
        settings = {
            "decay_factor": draw.pick([0.0, 0.1]),
            "epsilon": draw.pick([1e-6, 1e-3]),
            "norm_coefficient": decay,
        }
        theirs = {k: single(v) for k, v in settings.items()}
        return name, draw.pick([0.01, 0.05]), settings, theirs, [("norm_coefficient", 0.1)]
    if name == "RMSprop":
        settings = {"alpha": draw.pick([0.99, 0.9]), "eps": draw.pick([1e-8, 1e-4]), "weight_decay": decay}
        settings["momentum"] = draw.pick([0.0, 0.9])
        theirs = {k: single(v) for k, v in settings.items()}
        return name, draw.pick([1e-3, 0.01]), settings, theirs, [("weight_decay", 0.1)]
    settings = {"betas": betas, "weight_decay": decay}
    theirs = {"betas": exact, "weight_decay": single(decay)}
    if name != "Lion":
        settings["eps"] = draw.pick([1e-8, 1e-6])
        theirs["eps"] = single(settings["eps"])
    return name, draw.pick([1e-3, 0.01]), settings, theirs, [("weight_decay", 0.0), ("weight_decay", 0.3)]


def _schedule(draw: Draw, rate: float, count: int) -> Any:
    name = draw.pick(SCHEDULES)
    if name == "Custom":
        return schedules.Custom(lambda step: rate / (step + 1))
    make = getattr(schedules, name)
    if name == "WarmUp":
        return schedules.WarmUp(schedules.Cosine(rate, 5), draw.integer(1, 3))
    arguments = {
        "Constant": (),
        "Linear": (draw.integer(2, 6), 0.1),
        "Cosine": (draw.integer(2, 6), 0.0),
        "Step": (draw.integer(1, 3), 0.5),
        "Exponential": (0.7, draw.integer(1, 2)),
        "Polynomial": (draw.integer(2, 8), 2.0),
        "OneCycle": (draw.integer(5, 8), 0.4),
    }[name]
    return make(rate, *arguments)


class _Losses(callbacks.Callback):
    """Keeps the loss of every step."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_step_end(self, state: Any) -> None:
        self.found.append(float(state.loss))


def _train(setup: Setup) -> Result:
    """Train in onnxtrain, on as many ranks as are drawn."""
    if setup.around.ranks == 1:
        return _train_on(setup, None)
    return in_threads(setup.around.ranks, lambda rank: _train_on(setup, rank))[0]


def _train_on(setup: Setup, rank: Any) -> Result:
    plan, result, around = setup.plan, Result(), setup.around
    more: dict[str, Any] = {} if rank is None else {"distributed": rank}
    trainer = onnxtrain.Trainer(around.ended(setup.model.file), **setup.trainer, **more)
    if around.names:
        trainer.labels = around.names
    with around.readers(trainer, plan.steps[0][0]):
        if setup.fit is None:
            for rate, (inputs, target, weights) in zip(plan.rates, plan.steps, strict=True):
                trainer.learning_rate = rate
                more = {} if weights is None else {"sample_weight": weights}
                given = inputs if len(inputs) > 1 else inputs[0]
                result.losses.append(trainer.train_step(given, around.formed(target), **more))
        else:
            epochs = setup.fit.get("epochs", 1)
            steps = plan.steps[: len(plan.steps) // epochs]
            inputs = tuple(np.concatenate([step[0][place] for step in steps]) for place in range(len(steps[0][0])))
            target = around.formed(np.concatenate([step[1] for step in steps]))
            more = {} if steps[0][2] is None else {"sample_weight": np.concatenate([step[2] for step in steps])}
            kept = _Losses()
            names = [value.name for value in setup.model.file.graph.input]
            data = inputs[0] if len(inputs) == 1 else dict(zip(names, inputs, strict=True))
            trainer.fit(data, target, **setup.fit, **more, callbacks=[kept])
            result.losses = kept.found
    result.tensors = dict(trainer.initializers())
    if plan.ema is not None:
        result.averages = dict(trainer.initializers(ema=True))
    return result


def _compare(setup: Setup, ours: Result, truth: Result, near: list[Result]) -> list[str]:
    """Return the differences beyond rounding."""
    found: list[str] = []
    factor = 10 if len(near) == 1 else 3
    for step, loss in enumerate(truth.losses):
        spread = max(abs(other.losses[step] - loss) for other in near)
        error = abs(ours.losses[step] - loss)
        if not error <= factor * spread + 2e-6 * max(1.0, abs(loss)):
            found.append(f"loss of step {step}: {ours.losses[step]:.8g} for {loss:.8g} (PyTorch within {spread:.2g})")
    for name, start in setup.initial.items():
        kept = setup.layout.of[name][0]
        twin = name if name in truth.tensors else next(n for n in setup.layout.order if kept in setup.layout.of[n])
        value = _as_held(setup.layout, name, twin, truth.tensors[twin])
        others = [_as_held(setup.layout, name, twin, other.tensors[twin]) for other in near]
        pairs = [("", ours.tensors.get(name, start), value, others)]
        if setup.plan.ema is not None and twin in truth.averages:
            average = [_as_held(setup.layout, name, twin, other.averages[twin]) for other in near]
            pairs.append(
                (
                    "average of ",
                    ours.averages.get(name, start),
                    _as_held(setup.layout, name, twin, truth.averages[twin]),
                    average,
                )
            )
        for what, mine, right, around in pairs:
            spread = max((float(np.abs(other - right).max(initial=0)) for other in around), default=0.0)
            moved = float(np.abs(right - start).max(initial=0))
            bound = factor * spread + 5e-7 * float(np.abs(right).max(initial=0)) + 5e-5 * moved
            error = float(np.abs(mine - right).max(initial=0))
            if not error <= bound:
                found.append(
                    f"{what}{name} {start.shape}: off by {error:.2g}, PyTorch by {spread:.2g}, moved {moved:.2g}"
                )
    if setup.plan.train_statistics:
        found += _compare_statistics(setup, ours, truth, near, factor)
    return found


def _as_held(layout: Layout, name: str, twin: str, array: np.ndarray) -> np.ndarray:
    """Return a tensor's elements in the order of another tensor with the same elements."""
    if name == twin:
        return array
    by_key = dict(zip(layout.of[twin], array.reshape(-1).tolist(), strict=True))
    return np.array([by_key[key] for key in layout.of[name]]).reshape(layout.shapes[name])


def _compare_statistics(setup: Setup, ours: Result, truth: Result, near: list[Result], factor: int) -> list[str]:
    """Return the running statistics that differ; the file's initial values identify them."""
    found = []
    buffers = {n: b.numpy() for n, b in setup.model.module.named_buffers() if b.is_floating_point()}
    for tensor in setup.model.file.graph.initializer:
        array = onnx.numpy_helper.to_array(tensor)
        for name, start in buffers.items():
            if array.shape == start.shape and array.dtype == np.float32 and array.size and (array == start).all():
                right = truth.statistics[name]
                spread = max(float(np.abs(other.statistics[name] - right).max()) for other in near)
                error = float(np.abs(ours.tensors.get(tensor.name, array) - right).max())
                if not error <= factor * spread + 2e-6 * max(1.0, float(np.abs(right).max())):
                    found.append(f"{tensor.name}: off by {error:.2g}, PyTorch by {spread:.2g}")
    return found
