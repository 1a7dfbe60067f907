"""Structured pruning: train, remove whole channels, heads or hidden units, fine-tune the smaller model."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx

from onnxtrain.axes import Structures, find_structures
from onnxtrain.callbacks import Callback, TrainingState
from onnxtrain.callbacks.progress import Display, Progress, StepsOf
from onnxtrain.config import Options
from onnxtrain.data import Dataset, split_validation
from onnxtrain.edit.working import Working
from onnxtrain.errors import OptionError
from onnxtrain.losses.loss_choice import LossLike
from onnxtrain.operators import Optimizer
from onnxtrain.pruning.choose_structures import STRUCTURES, Structure, first_reaching, in_vectors, removal_order
from onnxtrain.pruning.job import metric_of
from onnxtrain.pruning.latency import speedup as measured_speedup
from onnxtrain.pruning.recalibrate import recalibrated, spreads_of
from onnxtrain.pruning.recipe import choose_batch_size, choose_schedule, choose_stages
from onnxtrain.pruning.record import LayerRow, Point
from onnxtrain.pruning.report import PruneResult
from onnxtrain.pruning.thresholds import Allocation
from onnxtrain.schedules import Schedule
from onnxtrain.trained_model import Source
from onnxtrain.trainer import Trainer

_EXAMPLES, _SMALL = 256, 1 << 14
"""Examples on which the layers are recalibrated, and the elements of an example up to which so many are taken."""

_TRIES = 6
"""Models that are cut and timed in the search for a speed-up."""


@dataclass(frozen=True)
class StructurePlan:
    """Settings of a structured pruning; arguments of :func:`onnxtrain.prune`.

    Raises:
        OptionError: An argument is outside its range, or two contradict each other.
    """

    structure: tuple[Structure, ...]
    sparsity: float | None
    flops: float | None
    speedup: float | None
    method: str
    allocation: Allocation
    optimizer: Optimizer
    fine_tune_optimizer: Optimizer
    epochs: int | None
    fine_tune_epochs: int | None
    batch_size: int | None
    schedule: str | Schedule | None
    fine_tune_schedule: str | Schedule | None
    seed: int

    def __post_init__(self) -> None:
        if self.allocation not in ("global", "uniform"):
            raise OptionError(
                f"allocation is {self.allocation!r}; structure= needs 'global' or 'uniform'; flops= is a target for it."
            )
        if not self.structure:
            raise OptionError("structure= is empty; give 'channels', 'heads', 'hidden', or several of them.")
        for kind in self.structure:
            if kind not in STRUCTURES:
                listed = ", ".join(map(repr, STRUCTURES))
                raise OptionError(f"structure is {kind!r}; it needs to be one or several of {listed}.")
        targets = {"sparsity": self.sparsity, "flops": self.flops, "speedup": self.speedup}
        given = [name for name, target in targets.items() if target is not None]
        if len(given) != 1:
            found = " and ".join(f"{name}=" for name in given) or "none of them"
            raise OptionError(f"structure= needs one target: sparsity=, flops= or speedup=; it got {found}.")
        for name in ("sparsity", "flops"):
            target = targets[name]
            if target is not None and not (isinstance(target, (int, float)) and 0 < target < 1):
                raise OptionError(f"{name} is {target!r}; it needs a fraction above 0 and below 1.")
        if self.speedup is not None and not (isinstance(self.speedup, (int, float)) and 1 < self.speedup < 1000):
            raise OptionError(f"speedup is {self.speedup!r}; it needs a factor above 1 and below 1000, such as 2.0.")
        for name in ("epochs", "fine_tune_epochs"):
            if (given_epochs := getattr(self, name)) is not None and given_epochs < 0:
                raise OptionError(f"{name} is {given_epochs}; it needs a number of at least 0.")

    def order(self, structures: Structures, spreads: Mapping[str, np.ndarray] | None = None) -> list[int]:
        """Return the structures that may go, the first to go first.

        Raises:
            OptionError: There are none.
        """
        random = self.seed if self.method == "random" else None
        by_layer = self.allocation == "uniform"
        order = removal_order(structures, self.structure, spreads=spreads, by_layer=by_layer, seed=random)
        if order:
            return order
        held = structures.tagged(self.structure, locked=True)
        reasons = "; ".join(list(dict.fromkeys(structures.locked[root] for root in held.tolist()))[:3])
        raise OptionError(
            f"The model has no {' or '.join(self.structure)} to remove"
            + (f": {reasons}." if reasons else "; choose another structure=.")
        )

    def choose(self, trained: onnx.ModelProto, feeds: Mapping[str, np.ndarray] | None) -> tuple[list[int], Structures]:
        """Return the structures to remove from a trained model, and all of its structures.

        Args:
            trained: The model.
            feeds: Inputs of examples, on which the layers' inputs are measured; without, norms of weights decide.

        Raises:
            OptionError: The target cannot be reached.
        """
        structures = find_structures(Working(trained).model)
        measured = None
        if feeds is not None:
            measured = spreads_of(without(trained, ()), {name for name, *_ in structures.read()}, feeds)
        order = self.order(structures, measured)
        if self.sparsity is not None:
            most = structures.size() * (1 - self.sparsity)
            return first_reaching(order, structures, structures.size, most), structures
        if self.flops is not None:
            most = structures.multiply_adds() * (1 - self.flops)
            return first_reaching(order, structures, structures.multiply_adds, most), structures
        return self._timed(trained, order, structures), structures

    def _timed(self, trained: onnx.ModelProto, order: list[int], structures: Structures) -> list[int]:
        assert self.speedup is not None
        whole_vectors = True

        def removed(count: int) -> list[int]:
            return in_vectors(structures, order[:count]) if whole_vectors else order[:count]

        def factor(count: int) -> float:
            return measured_speedup(trained, without(trained, removed(count)))

        best = factor(len(order))
        if best < self.speedup and len(removed(len(order))) < len(order):
            whole_vectors = False
            best = factor(len(order))
        if best < self.speedup:
            raise OptionError(
                f"speedup={self.speedup} cannot be reached: with all structures removed that may go (a tenth of each "
                f"layer stays), the model runs {best:.2f} times as fast; lower it, or allow more kinds of structures."
            )
        low, high = 0, len(order)
        for _ in range(_TRIES):
            middle = (low + high) // 2
            if middle in (low, high):
                break
            if factor(middle) >= self.speedup:
                high = middle
            else:
                low = middle
        # One lucky measurement must not decide on a busy machine.
        while high < len(order) and factor(high) < self.speedup:
            high = (high + len(order) + 1) // 2
        return removed(high)


def without(model: onnx.ModelProto, removed: Sequence[int]) -> onnx.ModelProto:
    """Return a model without some of its structures."""
    working = Working(model)
    find_structures(working.model).remove(removed)
    return working.finish()


def prune_structures(
    plan: StructurePlan,
    model: str | os.PathLike[str] | onnx.ModelProto,
    data: Source,
    validation: Source | float | None,
    *,
    loss: LossLike,
    target: str | None,
    options: Options,
    say: Callable[[str], None],
    display: Display,
) -> PruneResult:
    """Train, remove structures, and fine-tune the smaller model.

    Raises:
        OptionError: There is nothing to remove, the target cannot be reached, or the options have masks.
    """
    if options.get("masks") is not None:
        raise OptionError("masks= holds single weights at zero, structure= removes whole structures; give one of them.")
    trainer = Trainer(model, loss=loss, optimizer=plan.optimizer, **options)
    metric = metric_of(trainer)
    measured_on = "training data" if validation is None else "validation data"
    if isinstance(validation, float):
        parts = split_validation(trainer._open(data, target=target), validation, plan.seed)
        data, validation = parts.train, parts.validation
    measured: Source = data if validation is None else validation

    def accuracy(of: Trainer) -> float:
        metrics = ["accuracy"] if metric == "accuracy" else []
        return float(of.evaluate(measured, target=target, metrics=metrics)[metric])

    opened = None if hasattr(data, "__next__") else trainer._open(data, target=target)
    examples = None if opened is None else opened.size
    batch_size = plan.batch_size or choose_batch_size(examples)
    stage = choose_stages(
        None,
        zeros=0.0,
        examples=examples,
        epochs=plan.epochs,
        rounds=None,
        fine_tune_epochs=plan.fine_tune_epochs,
    )[0]

    def fit(who: Trainer, phase: str, epochs: int, given: str | Schedule | None, *, falling: bool) -> None:
        if epochs:
            batches = None if opened is None else opened.batch_count(batch_size)
            steps = None if batches is None else epochs * batches
            schedule = given or choose_schedule(steps, falling=falling)
            callbacks = [_Lines(say, phase), Progress(StepsOf(display))]
            who.fit(data, target=target, epochs=epochs, batch_size=batch_size, schedule=schedule, callbacks=callbacks)

    before = accuracy(trainer)
    fit(trainer, "training", stage.epochs, plan.schedule, falling=False)
    accuracy_trained = accuracy(trainer)
    trained = trainer.model()
    feeds = None if opened is None else _batch(trainer, opened, plan)
    removed, structures = plan.choose(trained, feeds)
    small = without(trained, removed)
    faster = measured_speedup(trained, small)
    kept = structures.kept(removed)
    if feeds is not None:
        own = {tensor.name for tensor in small.graph.initializer}
        frozen = own - set(trainer.parameters) if options.get("lora") is None else ()
        whole = without(trained, ())
        small = recalibrated(whole, small, lambda name, axis: structures.kept_along(name, axis, kept), feeds, frozen)
    tuner = Trainer(small, loss=loss, optimizer=plan.fine_tune_optimizer, **options)
    cut_accuracy = accuracy(tuner)
    size, left = structures.size(), structures.size(kept)
    say(
        f"removed {len(removed)} structures: {size:,} weights became {left:,}, {metric} {accuracy_trained:.4f} before, "
        f"{cut_accuracy:.4f} after"
    )
    fit(tuner, "fine-tuning", stage.fine_tune_epochs, plan.fine_tune_schedule, falling=True)
    after = accuracy(tuner)
    say(f"result: {metric} {after:.4f}, {faster:.2f} times as fast")
    values = {name: np.array(array) for name, array in tuner._initializers().items()}
    masks = {name: mask for name, mask in structures.masks(removed).items() if name in values}
    given = {
        str(value.name): np.array(value.const_value.numpy())
        for value, _ in structures.parameters()
        if structures.is_weight(value) and value.const_value is not None and value.name in values
    }
    at_once = (Point(1 - left / size, cut_accuracy),)
    return PruneResult(
        method=plan.method,
        optimizer=repr(plan.optimizer),
        allocation=plan.allocation,
        block=(1, 1),
        n_m=None,
        metric=metric,
        measured_on=measured_on,
        accuracy_before=before,
        accuracy_trained=accuracy_trained,
        accuracy_after=after,
        layers=tuple(_row(name, array, masks.get(name)) for name, array in given.items() if array.ndim > 1),
        points=at_once,
        curve=at_once,
        probes=(),
        masks=masks,
        given=given,
        values=values,
        file=tuner._file,
        names=trainer._names,
        structure=plan.structure,
        removed_structures=len(removed),
        multiply_adds=(structures.multiply_adds(), structures.multiply_adds(kept)),
        speedup=faster,
        stops=dict(structures.stops),
    )


def _batch(trainer: Trainer, data: Dataset, plan: StructurePlan) -> dict[str, np.ndarray]:
    """Return the inputs of some random examples."""
    fixed, elements = trainer._objective.fixed_batch, 0
    for spec in trainer._objective.inputs:
        elements += math.prod(size for size in (spec.shape or ())[1:] if isinstance(size, int))
    rows = fixed.size if fixed is not None else _EXAMPLES if elements <= _SMALL else choose_batch_size(data.size)
    batch = next(iter(data.batches(rows, shuffle=True, seed=plan.seed)))
    return dict(trainer._objective.inputs_of(batch))


def _row(name: str, array: np.ndarray, mask: np.ndarray | None) -> LayerRow:
    remaining = array if mask is None else array[mask]
    return LayerRow(
        name=name,
        shape=array.shape,
        size=array.size,
        non_zeros=remaining.size,
        threshold=float(np.min(np.abs(remaining.astype(np.float32)), initial=np.inf)),
        max_scale=None,
    )


class _Lines(Callback):
    """Print a line after every epoch."""

    def __init__(self, say: Callable[[str], None], phase: str) -> None:
        self.say, self.phase = say, phase

    def on_epoch_end(self, state: TrainingState) -> None:
        self.say(f"{self.phase}: epoch {state.epoch} of {state.epochs}, loss {state.loss:.4f}")
