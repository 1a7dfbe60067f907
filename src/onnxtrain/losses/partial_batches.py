"""Partial batches for models of a fixed batch size: pad the inputs, and exclude the padding from the loss.

The model runs on whole batches. A partial batch is padded with its own examples in turn, and the loss is built on the
rows of the real ones: it is a mean over them alone, and so is its gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from onnxtrain.data.model_inputs import FixedBatch
from onnxtrain.errors import DataError
from onnxtrain.graph import Builder, Value
from onnxtrain.graph.batch_axis import ONE, BatchAxes
from onnxtrain.graph.clone import computed_from
from onnxtrain.graph.value import Dimension, dimensions
from onnxtrain.losses.base import Loss, LossByExample, TargetKind
from onnxtrain.losses.heads import REAL_ROWS, LossHead, wrapped
from onnxtrain.lowering.training_info.recipe import LossTerms


def on_real_rows(model: ir.Model, head: LossHead, fixed: FixedBatch, rows: int) -> LossHead:
    """Return a head with its loss on the real examples alone."""
    prediction, shape = head.prediction, dimensions(head.prediction)
    untold = 0 if not shape or not isinstance(shape[0], int) or shape[0] == fixed.size else None
    axis = batch_axes(model, [prediction]).get(str(prediction.name), untold)
    if axis != 0:
        where = "no axis of examples" if axis is None else f"its examples in axis {axis}"
        raise DataError(
            f"{prediction.name!r} has {where}, so that the padding of a batch of {rows} examples cannot be left "
            f"out of the loss; give whole batches of {fixed.size} or export the model with a dynamic batch axis."
        )
    # The target shape for a symbolic batch shows whether the loss takes any number of examples.
    free = ir.Value(
        name=prediction.name,
        type=prediction.type,
        shape=None if shape is None else ir.Shape((REAL_ROWS, *shape[1:])),
    )
    value = head.target
    kind: TargetKind = "indices" if value.dtype is not None and value.dtype.is_integer() else "values"
    wanted = head.loss.target_shape(wrapped(free), kind)
    found = dimensions(value)
    if not found or not wanted or isinstance(wanted[0], int):
        raise DataError(
            f"The loss {head.loss.name!r} takes targets of shape {wanted} only, but the last batch has {rows} "
            f"examples; give a multiple of {fixed.size} or export the loss with a dynamic batch axis."
        ).about(head.loss.name, got=rows, wanted=wanted)
    real = ir.Value(name=value.name, type=value.type, shape=ir.Shape((REAL_ROWS, *found[1:])))
    return replace(head, loss=_LossOnRealRows(head.loss), target=real)


@dataclass(frozen=True)
class _LossOnRealRows(LossByExample):
    """A loss on as many first rows of the prediction as there are targets."""

    name: ClassVar[str] = "loss on the real rows"

    inner: Loss

    def __post_init__(self) -> None:
        object.__setattr__(self, "weight", self.inner.weight)
        object.__setattr__(self, "reduction", self.inner.reduction)

    @property
    def counts_labels(self) -> bool:
        """As the loss itself."""
        return self.inner.counts_labels

    def target_shape(self, prediction: Value, kind: TargetKind) -> tuple[Dimension, ...] | None:
        """As the loss itself."""
        return self.inner.target_shape(prediction, kind)

    def build(self, op: Builder, prediction: Value, target: Value, weights: Value | None = None) -> LossTerms:
        """Emit the loss."""
        rows = op.Shape(target, start=0, end=1)
        real = op.Slice(prediction, op.ints(0), rows, op.ints(0))
        if prediction.shape is not None:
            real = real.with_shape((REAL_ROWS, *prediction.shape[1:]))
        if isinstance(self.inner, LossByExample):
            return self.inner.build(op, real, target, weights)
        return self.inner.build(op, real, target)


def batch_axes(model: ir.Model, values: Sequence[ir.Value]) -> dict[str, int | None]:
    """Find the batch axis of each value; ``None`` where it has none, and no entry where its nodes do not tell."""
    fixed, graph = FixedBatch.of(model.graph), model.graph
    axes = BatchAxes.of_inputs(graph, None if fixed is None else fixed.size)
    reached = computed_from(graph, axes)
    sizes = {shape[own.axis] for value, own in axes.items() if (shape := dimensions(value))}
    symbols = {size for size in sizes if isinstance(size, str)}
    axes.follow(graph)
    found: dict[str, int | None] = {}
    for value in values:
        named = [axis for axis, size in enumerate(dimensions(value) or ()) if size in symbols]
        if value in axes and axes[value].before == ONE:
            found[str(value.name)] = axes[value].axis
        elif named:
            found[str(value.name)] = named[0]
        elif value not in reached:
            found[str(value.name)] = None
    return found


def joined_axis(name: str, arrays: Sequence[np.ndarray], rows: Sequence[int]) -> int | None:
    """Find the axis along which to concatenate results of batches, where the nodes of the model do not tell it."""
    sizes = [array.shape for array in arrays]
    fitting = [
        axis
        for axis in range(min(map(len, sizes)))
        if all(size[axis] == count for size, count in zip(sizes, rows, strict=True))
    ]
    if len(fitting) > 1 and fitting[0] != 0:
        raise DataError(
            f"The batches of the output {name!r} have the shapes {', '.join(map(str, dict.fromkeys(sizes)))}, in which "
            f"axes {' and '.join(map(str, fitting))} may be the batch axis; predict with another batch_size or "
            "export the model with names for its axes."
        ).about(name, got=sizes, wanted=fitting)
    return fitting[0] if fitting else None
