"""Structured pruning: train, remove whole channels, heads or hidden units, fine-tune the smaller model."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx

from onnxtrain.axes import Structures, find_structures
from onnxtrain.callbacks import Callback, TrainingState
from onnxtrain.callbacks.progress import Display, Progress, StepsOf
from onnxtrain.config import Options
from onnxtrain.data import split_validation
from onnxtrain.edit.working import Working
from onnxtrain.errors import OptionError
from onnxtrain.losses import BinaryCrossEntropy, SoftmaxCrossEntropy
from onnxtrain.losses.loss_choice import LossLike
from onnxtrain.operators import Optimizer
from onnxtrain.pruning.choose_structures import STRUCTURES, Structure, first_reaching, in_vectors, removal_order
from onnxtrain.pruning.latency import speedup as measured_speedup
from onnxtrain.pruning.record import LayerRow, Point
from onnxtrain.pruning.report import PruneResult
from onnxtrain.pruning.thresholds import Allocation
from onnxtrain.schedules import Schedule
from onnxtrain.trained_model import Source
from onnxtrain.trainer import Trainer

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
    epochs: int
    fine_tune_epochs: int
    batch_size: int
    schedule: str | Schedule | None
    fine_tune_schedule: str | Schedule | None
    seed: int

    def __post_init__(self) -> None:
        if self.allocation not in ("global", "uniform"):
            raise OptionError(
                f"allocation is {self.allocation!r}; structure= needs 'global' or 'uniform'; flops= is a target for it."
            )
        for kind in self.structure:
            if kind not in STRUCTURES:
                listed = ", ".join(map(repr, STRUCTURES))
                raise OptionError(f"structure is {kind!r}; it needs to be one or several of {listed}.")
        targets = {"sparsity": self.sparsity, "flops": self.flops, "speedup": self.speedup}
        given = [name for name, target in targets.items() if target is not None]
        if not self.structure or len(given) != 1:
            found = " and ".join(f"{name}=" for name in given) or "none of them"
            raise OptionError(f"structure= needs one target: sparsity=, flops= or speedup=; it got {found}.")
        for name in ("sparsity", "flops"):
            target = targets[name]
            if target is not None and not (isinstance(target, (int, float)) and 0 < target < 1):
                raise OptionError(f"{name} is {target!r}; it needs a fraction above 0 and below 1.")
        if self.speedup is not None and not (isinstance(self.speedup, (int, float)) and 1 < self.speedup < 1000):
            raise OptionError(f"speedup is {self.speedup!r}; it needs a factor above 1 and below 1000, such as 2.0.")
        for name in ("epochs", "fine_tune_epochs"):
            if getattr(self, name) < 0:
                raise OptionError(f"{name} is {getattr(self, name)}; it needs a number of at least 0.")

    def order(self, structures: Structures) -> list[int]:
        """Return the structures that may go, the first to go first.

        Raises:
            OptionError: There are none.
        """
        random = self.seed if self.method == "random" else None
        order = removal_order(structures, self.structure, by_layer=self.allocation == "uniform", seed=random)
        if order:
            return order
        reasons = dict.fromkeys(structures.locked.values())
        stops = "; ".join(list(reasons)[:3])
        raise OptionError(
            f"The model has no {' or '.join(self.structure)} to remove"
            + (f": {stops}." if stops else "; choose another structure=.")
        )

    def choose(self, trained: onnx.ModelProto) -> tuple[list[int], Structures]:
        """Return the structures to remove from a trained model, and all of its structures.

        Raises:
            OptionError: The target cannot be reached.
        """
        structures = find_structures(Working(trained).model)
        order = self.order(structures)
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
    classifies = isinstance(trainer._objective.loss, (SoftmaxCrossEntropy, BinaryCrossEntropy))
    metric = "accuracy" if classifies else "loss"
    measured_on = "training data" if validation is None else "validation data"
    if isinstance(validation, float):
        parts = split_validation(trainer._open(data, target=target), validation, plan.seed)
        data, validation = parts.train, parts.validation
    measured: Source = data if validation is None else validation

    def accuracy(of: Trainer) -> float:
        metrics = ["accuracy"] if classifies else []
        return float(of.evaluate(measured, target=target, metrics=metrics)[metric])

    def fit(who: Trainer, phase: str, epochs: int, schedule: str | Schedule | None) -> None:
        if epochs:
            callbacks = [_Lines(say, phase), Progress(StepsOf(display))]
            who.fit(
                data, target=target, epochs=epochs, batch_size=plan.batch_size, schedule=schedule, callbacks=callbacks
            )

    before = accuracy(trainer)
    fit(trainer, "training", plan.epochs, plan.schedule)
    accuracy_trained = accuracy(trainer)
    trained = trainer.model()
    removed, structures = plan.choose(trained)
    small = without(trained, removed)
    faster = measured_speedup(trained, small)
    tuner = Trainer(small, loss=loss, optimizer=plan.fine_tune_optimizer, **options)
    cut_accuracy = accuracy(tuner)
    kept = structures.kept(removed)
    size, left = structures.size(), structures.size(kept)
    say(
        f"removed {len(removed)} structures: {size:,} weights became {left:,}, {metric} {accuracy_trained:.4f} before, "
        f"{cut_accuracy:.4f} after"
    )
    fit(tuner, "fine-tuning", plan.fine_tune_epochs, plan.fine_tune_schedule)
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
        names=trainer._data.names,
        structure=plan.structure,
        removed_structures=len(removed),
        multiply_adds=(structures.multiply_adds(), structures.multiply_adds(kept)),
        speedup=faster,
        stops=dict(structures.stops),
    )


def _row(name: str, array: np.ndarray, mask: np.ndarray | None) -> LayerRow:
    remaining = array if mask is None else array[mask]
    return LayerRow(
        name=name,
        shape=array.shape,
        size=array.size,
        non_zeros=remaining.size,
        threshold=float(np.min(np.abs(remaining), initial=np.inf)),
        max_scale=None,
    )


class _Lines(Callback):
    """Print a line after every epoch."""

    def __init__(self, say: Callable[[str], None], phase: str) -> None:
        self.say, self.phase = say, phase

    def on_epoch_end(self, state: TrainingState) -> None:
        self.say(f"{self.phase}: epoch {state.epoch} of {state.epochs}, loss {state.loss:.4f}")
