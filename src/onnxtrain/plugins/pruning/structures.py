"""Structured pruning: train, remove whole channels, heads or hidden units, fine-tune the smaller model."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import onnxruntime

from onnxtrain.data import Dataset
from onnxtrain.data.opening import Source
from onnxtrain.editing.working import Working
from onnxtrain.errors import OptionError
from onnxtrain.losses.loss_choice import LossLike
from onnxtrain.plugins.pruning.choose_structures import STRUCTURES, beginnings, first_reaching, removal_order
from onnxtrain.plugins.pruning.options import Plan, Structure
from onnxtrain.plugins.pruning.phases import Phases
from onnxtrain.plugins.pruning.recalibrate import recalibrated, spreads_of
from onnxtrain.plugins.pruning.recipe import choose_batch_size
from onnxtrain.plugins.pruning.report import LayerRow, Point, PruneResult
from onnxtrain.plugins.structures.axes import Structures, find_structures
from onnxtrain.runtime.turns import session_of_one_thread, times_in_turns
from onnxtrain.training.config import Options
from onnxtrain.training.trainer import Trainer

_EXAMPLES, _SMALL = 256, 1 << 14
"""Examples on which the layers are recalibrated, and the elements of an example up to which so many are taken."""

_TRIES = 6
"""Models that are cut and timed in the search for a speed-up."""


_FREE_SIZES = (1, 8, 16, 32, 64, 224)
"""Sizes for free axes behind the first, tried in this order; the first axis, the batch, gets 1."""


@dataclass(frozen=True, kw_only=True)
class StructurePlan(Plan):
    """The options of a structured pruning."""

    structure: tuple[Structure, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
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

    def order(self, structures: Structures, spreads: Mapping[str, np.ndarray] | None = None) -> list[int]:
        """Return the structures that may go, the first to go first."""
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

    def check(self, model: onnx.ModelProto) -> None:
        """Refuse a model from which the target cannot be removed, before it is trained."""
        structures = find_structures(Working(model).model)
        order = self.order(structures)
        if self.speedup is None:
            self._reaching(order, structures)
        else:
            self._all_of(model, order, structures)

    def choose(
        self, trained: onnx.ModelProto, feeds: Mapping[str, np.ndarray]
    ) -> tuple[list[int], Structures, float | None]:
        """Return the structures to remove from a trained model, all of its structures, and the speed-up if measured."""
        structures = find_structures(Working(trained).model)
        measured = spreads_of(without(trained, ()), {name for name, *_ in structures.read()}, feeds)
        order = self.order(structures, measured)
        if self.speedup is None:
            return self._reaching(order, structures), structures, None
        removed, faster = self._timed(trained, order, structures)
        return removed, structures, faster

    def _reaching(self, order: list[int], structures: Structures) -> list[int]:
        target, cost = (
            (self.sparsity, structures.size) if self.flops is None else (self.flops, structures.multiply_adds)
        )
        assert target is not None
        return first_reaching(order, structures, cost, cost() * (1 - target))

    def _all_of(
        self, trained: onnx.ModelProto, order: list[int], structures: Structures
    ) -> tuple[Callable[[int], list[int]], Callable[[int], float]]:
        """Return functions of the beginning of an order to remove: its structures, and the speed-up without them."""
        assert self.speedup is not None
        best = 0.0
        for chosen in beginnings(order, structures):

            def factor(count: int, chosen: Callable[[int], list[int]] = chosen) -> float:
                return measured_speedup(trained, without(trained, chosen(count)))

            best = factor(len(order))
            if best >= self.speedup:
                return chosen, factor
        raise OptionError(
            f"speedup={self.speedup} cannot be reached: with all structures removed that may go (a tenth of each "
            f"layer stays), the model runs {best:.2f} times as fast; lower it, or allow more kinds of structures."
        )

    def _timed(self, trained: onnx.ModelProto, order: list[int], structures: Structures) -> tuple[list[int], float]:
        assert self.speedup is not None
        chosen, factor = self._all_of(trained, order, structures)
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
        while (faster := min(factor(high), factor(high))) < self.speedup and high < len(order):
            high = min(len(order), high + max(1, (len(order) - high) // 8))
        return chosen(high), faster


def without(model: onnx.ModelProto, removed: Sequence[int]) -> onnx.ModelProto:
    """Return a model without some of its structures."""
    working = Working(model)
    find_structures(working.model).remove(removed)
    return working.finish()


def measured_speedup(before: onnx.ModelProto, after: onnx.ModelProto) -> float:
    """Return the time of the first model over that of the second, for one example and one thread."""
    first, second = (session_of_one_thread(model.SerializeToString()) for model in (before, after))
    one, other = times_in_turns(first, second, _random_feeds(before, first))
    return one / other


def _random_feeds(model: onnx.ModelProto, session: onnxruntime.InferenceSession) -> dict[str, np.ndarray]:
    """Return random inputs on which a model runs."""
    rng = np.random.default_rng(0)
    problem: Exception | None = None
    initialized = {tensor.name for tensor in model.graph.initializer}
    for free in _FREE_SIZES:
        feeds: dict[str, np.ndarray] = {}
        for info in model.graph.input:
            if info.name in initialized:
                continue
            dims = info.type.tensor_type.shape.dim
            shape = [dim.dim_value or (1 if place == 0 else free) for place, dim in enumerate(dims)]
            dtype = onnx.helper.tensor_dtype_to_np_dtype(info.type.tensor_type.elem_type)
            drawn = rng.integers(0, 2, shape) if dtype.kind in "iub" else rng.normal(size=shape)
            feeds[info.name] = drawn.astype(dtype)
        try:
            session.run(None, feeds)
        except Exception as error:  # another size may do
            problem = problem or error
        else:
            return feeds
    raise OptionError(
        f"speedup= is measured on random inputs, on which the model does not run ({problem}); give flops=."
    )


@dataclass(frozen=True)
class _Smaller:
    """A model without some of its structures, ready for fine-tuning."""

    tuner: Trainer
    structures: Structures
    removed: list[int]
    speedup: float
    accuracy: float


def prune_structures(
    plan: StructurePlan,
    model: str | os.PathLike[str] | onnx.ModelProto,
    data: Source,
    loss: LossLike,
    options: Options,
) -> PruneResult:
    """Train, remove structures, and fine-tune the smaller model."""
    if options.get("masks") is not None:
        raise OptionError("masks= holds single weights at zero, structure= removes whole structures; give one of them.")
    given = Trainer(model, loss=loss, optimizer=plan.optimizer, **options)
    plan.check(given.model())
    phases = Phases(given, data, plan)
    (stage,) = phases.stages(None)

    def cut(trainer: Trainer) -> _Smaller:
        trained = trainer.model()
        feeds = _batch(trainer, phases.opened, plan)
        removed, structures, faster = plan.choose(trained, feeds)
        small, kept = without(trained, removed), structures.kept(removed)
        faster = measured_speedup(trained, small) if faster is None else faster
        own = {tensor.name for tensor in small.graph.initializer}
        frozen = own - set(trainer.parameters) if options.get("lora") is None else ()
        whole = without(trained, ())
        small = recalibrated(whole, small, lambda name, axis: structures.kept_along(name, axis, kept), feeds, frozen)
        tuner = Trainer(small, loss=loss, optimizer=plan.fine_tune_optimizer, **options)
        return _Smaller(tuner, structures, removed, faster, phases.measure(tuner))

    before = accuracy_trained = phases.measure(given)
    trainer = phases.train(given, "training", stage.epochs)
    found = cut(trainer)
    if trainer is not given:
        accuracy_trained = phases.measure(trainer)
        if phases.is_better((untrained := cut(given)).accuracy, found.accuracy):
            phases.say(f"cut without the training, the given model is better: {phases.metric} {untrained.accuracy:.4f}")
            found, trainer, accuracy_trained = untrained, given, before
    structures, removed = found.structures, found.removed
    size, left = structures.size(), structures.size(kept := structures.kept(removed))
    phases.say(
        f"removed {len(removed)} structures: {size:,} weights became {left:,}, "
        f"{phases.metric} {accuracy_trained:.4f} before, {found.accuracy:.4f} after"
    )
    tuner = phases.train(found.tuner, "fine-tuning", stage.fine_tune_epochs)
    after = phases.measure(tuner)
    phases.say(f"result: {phases.metric} {after:.4f}, {found.speedup:.2f} times as fast")
    values = tuner.initializers()
    masks = {name: mask for name, mask in structures.masks(removed).items() if name in values}
    weights = {
        str(value.name): np.array(value.const_value.numpy())
        for value, _ in structures.parameters()
        if structures.is_weight(value) and value.const_value is not None and value.name in values
    }
    at_once = (Point(1 - left / size, found.accuracy),)
    shortfall = ""
    if plan.speedup is not None and found.speedup < plan.speedup:
        shortfall = f"The model runs {found.speedup:.2f} times as fast, not {plan.speedup}; other programs may disturb."
    elif stage.fine_tune_epochs > 0 and plan.method != "random":
        shortfall = phases.shortfall(after, before, accuracy_trained)
    return phases.result(
        before,
        accuracy_trained,
        after,
        layers=tuple(_row(name, array, masks.get(name)) for name, array in weights.items() if array.ndim > 1),
        points=at_once,
        curve=at_once,
        probes=(),
        masks=masks,
        given=weights,
        values=values,
        file=tuner.config.model,
        names=given.data_names,
        structure=plan.structure,
        removed_structures=len(removed),
        multiply_adds=(structures.multiply_adds(), structures.multiply_adds(kept)),
        speedup=found.speedup,
        stops=dict(structures.stops),
        shortfall=shortfall,
    )


def _batch(trainer: Trainer, data: Dataset, plan: StructurePlan) -> dict[str, np.ndarray]:
    """Return the inputs of some random examples."""
    fixed, elements = trainer.objective.fixed_batch, 0
    for spec in trainer.objective.inputs:
        elements += math.prod(size for size in (spec.shape or ())[1:] if isinstance(size, int))
    rows = fixed.size if fixed is not None else _EXAMPLES if elements <= _SMALL else choose_batch_size(data.size)
    batch = next(iter(data.batches(rows, shuffle=True, seed=plan.seed)))
    return dict(trainer.objective.inputs_of(batch))


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
