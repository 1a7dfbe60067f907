"""Connectionist temporal classification: label sequences without alignment, as in text recognition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from onnxtrain.data.conversion import Array, first_row
from onnxtrain.data.target_checks import TargetCheck
from onnxtrain.errors import DataError, OptionError
from onnxtrain.errors.spelling import checks_arguments
from onnxtrain.graph import Builder, Value
from onnxtrain.graph.value import Dimension
from onnxtrain.losses.base import ScoreLoss, TargetKind, examples, node_rank
from onnxtrain.losses.probabilities import logarithm
from onnxtrain.lowering.training_info.recipe import LossTerms
from onnxtrain.metrics.base import MetricInput
from onnxtrain.metrics.error_rates import CharacterErrorRate


@checks_arguments
@dataclass(frozen=True)
class CTC(ScoreLoss):
    """Connectionist temporal classification: mean over examples of -log p(labels) / their number.

    p is the sum over all paths of one class per step that yield the labels when equal neighbours are merged and blanks
    removed; it is computed in log space, by one Scan over the steps forward and one backward. Scores are
    [N, T, C], as logits or after a Softmax or LogSoftmax. Targets are labels [N, S] in order, one row per example,
    padded at its end with -1 (or any negative number, or the blank).

    As ``torch.nn.CTCLoss(blank, reduction, zero_infinity)``, whose target lengths are the numbers of labels before the
    padding.

    Args:
        blank: The blank class.
        zero_infinity: True if examples with too many labels for their steps have loss 0, instead of infinity, which
            stops the training.
        time_axis: 1 for scores [N, T, C], 0 for [T, N, C].
        input_lengths: Name of an input or a value of the model that holds the number of valid steps [N] per example; by
            default all steps.

    Source:
        A. Graves, S. Fernández, F. Gomez, J. Schmidhuber, "Connectionist Temporal Classification", ICML 2006.
    """

    name: ClassVar[str] = "ctc"
    target_kinds: ClassVar[tuple[TargetKind, ...]] = ("indices",)
    probabilities = "distribution"
    axis: ClassVar[int] = -1

    blank: int = 0
    zero_infinity: bool = False
    time_axis: int = 1
    input_lengths: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.time_axis not in (0, 1):
            raise OptionError(f"time_axis is {self.time_axis}; ctc takes 1 for scores [N, T, C] and 0 for [T, N, C].")
        if self.blank < 0:
            raise OptionError(f"blank is {self.blank}; ctc needs the number of a class, 0 or more.")

    def target_shape(self, prediction: Value, kind: TargetKind) -> tuple[Dimension, ...] | None:
        """Return [N, S] for any S."""
        if node_rank(prediction) != 3:
            form = "[N, T, C]" if self.time_axis else "[T, N, C]"
            raise OptionError(
                f"ctc needs scores {form} of examples, steps and classes, but {prediction.name!r} has shape "
                f"{prediction.shape}."
            )
        size = self.classes(prediction)
        if size is not None and self.blank >= size:
            raise OptionError(f"blank is {self.blank}, but there are {size} classes, from 0.")
        return ((prediction.shape or (None, None))[1 - self.time_axis], None)

    def target_dtype(self, prediction: Value, kind: TargetKind) -> ir.DataType:
        """Return int64."""
        return ir.DataType.INT64

    def classes(self, prediction: Value) -> int | None:
        """Return the size of the last axis, where it is known."""
        size = None if prediction.shape is None else prediction.shape[-1]
        return size if isinstance(size, int) else None

    def target_check(self, prediction: Value, kind: TargetKind) -> TargetCheck | None:
        """Check that labels are classes, come before the padding, and fit into the steps."""
        steps = None if prediction.shape is None else prediction.shape[self.time_axis]
        known = isinstance(steps, int) and not self.zero_infinity
        return PathCheck(self.classes(prediction), self.blank, steps if known and isinstance(steps, int) else None)

    def metric_input(self, prediction: Value, target: Value) -> MetricInput:
        """Return label sequences, which only error rates accept."""
        return MetricInput(self.name, None, sequence=CharacterErrorRate(self.blank, self.time_axis))

    def build(self, op: Builder, prediction: Value, target: Value, weights: Value | None = None) -> LossTerms:
        """Emit the loss on scores [N, T, C]."""
        log_p = logarithm(op, prediction) if self.from_logits is False else op.LogSoftmax(prediction, axis=-1)
        if self.time_axis == 1:
            log_p = op.Transpose(log_p, perm=[1, 0, 2])
        never = float(np.finfo(prediction.dtype.numpy()).min) / 8  # log(0) without NaN
        blank = op.scalar(self.blank, target)
        real = op.And(op.binary("GreaterOrEqual", target, 0), op.Not(op.Equal(target, blank)))
        count = op.ReduceSum(op.cast(real, ir.DataType.INT64), op.ints(1), keepdims=1)  # [N, 1]
        states = self._states(op, op.Where(real, target, blank))
        last = self._forward(op, log_p, states, self._active(op, log_p, target), never)
        zero, none = op.scalar(0.0, prediction), op.scalar(never, prediction)
        end = count * 2  # the blank after the last label
        ends = [
            op.GatherElements(last, end, axis=1),
            op.GatherElements(last, op.Max(end - 1, op.scalar(0, end)), axis=1)
            + op.Where(op.binary("Greater", count, 0), zero, none),
        ]
        terms = -op.ReduceLogSumExp(op.Concat(*ends, axis=1), op.ints(1), keepdims=0)  # [N]
        impossible = op.binary("Greater", terms, -never / 2)
        terms = op.Where(impossible, op.scalar(0.0 if self.zero_infinity else np.inf, prediction), terms)
        if self.reduction == "mean":
            labels = op.cast(op.Squeeze(count, op.ints(1)), prediction.dtype)
            terms = terms / op.Max(labels, op.scalar(1, labels))
        if weights is not None:
            terms = terms * weights
        number = examples(op, target)
        number = op.cast(number, prediction.dtype)
        return LossTerms((op.ReduceSum(terms, keepdims=0) / number).with_shape(()), number)

    def _states(self, op: Builder, labels: Value) -> Value:
        """Insert blanks before, between and after labels [N, S]: [N, 2 S + 1]."""
        wide = op.Unsqueeze(labels, op.ints(2))
        filled = op.zeros_like(wide) + self.blank
        pairs = op.Flatten(op.Concat(filled, wide, axis=2), axis=1)
        return op.Concat(pairs, op.Slice(op.Squeeze(filled, op.ints(2)), op.ints(0), op.ints(1), op.ints(1)), axis=1)

    def _active(self, op: Builder, log_p: Value, target: Value) -> Value | None:
        """Emit the mask [T, N, 1] of valid steps; ``None`` where all are valid."""
        rows = valid_steps(op, self.input_lengths, target)
        if rows is None:
            return None
        steps = op.Range(op.constant(0), op.reshape(op.dimension(log_p, 0), []), op.constant(1))
        return op.Less(op.Unsqueeze(steps, op.ints(1, 2)), op.Unsqueeze(rows, op.ints(0, 2)))

    def _forward(self, op: Builder, log_p: Value, states: Value, active: Value | None, never: float) -> Value:
        """Emit the log-probability [N, L] of all paths that end in each state after the last step.

        alpha_t(s) = log(exp alpha_t-1(s) + exp alpha_t-1(s-1) + exp alpha_t-1(s-2)) + log p_t(label of s), with the
        third term only between different labels.
        """
        none = op.scalar(never, log_p)
        before = op.Slice(
            op.Pad(states, op.ints(0, 2, 0, 0), op.scalar(-1, states)), op.ints(0), op.ints(-2), op.ints(1)
        )
        other = op.And(op.Not(op.Equal(states, before)), op.Not(op.Equal(states, op.scalar(self.blank, states))))
        leap = op.Where(other, op.scalar(0.0, log_p), none)  # [N, L]
        steps = op.Concat(op.dimension(log_p, 0), op.Shape(states), axis=0)
        scores = op.GatherElements(log_p, op.Expand(op.Unsqueeze(states, op.ints(0)), steps), axis=2)  # [T, N, L]
        first = op.binary("Equal", op.CumSum(op.ones_like(states), op.constant(1)), 1)
        start = op.Where(first, op.scalar(0.0, log_p), none)

        def given(name: str, dtype: ir.DataType, last: Dimension) -> ir.Value:
            return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape((None, last)))

        inputs = [given("paths", log_p.dtype, None), given("scores_of_step", log_p.dtype, None)]
        if active is not None:
            inputs.append(given("counts", ir.DataType.BOOL, 1))
        body = op.body(inputs, "paths")
        for value in inputs:
            value.name = body.copied_name(str(value.name))
        paths, score = map(body.wrap, inputs[:2])
        padded = body.Pad(paths, body.ints(0, 2, 0, 0), body.scalar(never, paths))
        ways = [
            paths,
            body.Slice(padded, body.ints(1), body.ints(-1), body.ints(1)),
            body.Slice(padded, body.ints(0), body.ints(-2), body.ints(1)) + body.wrap(leap.ir),
        ]
        together = body.Concat(*(body.Unsqueeze(way, body.ints(0)) for way in ways), axis=0)
        new = body.ReduceLogSumExp(together, body.ints(0), keepdims=0) + score
        if active is not None:
            new = body.Where(body.wrap(inputs[2]), new, paths)
        body.output(new.with_shape((None, None)))
        taken: Sequence[Value] = [scores] if active is None else [scores, active]
        return op.Scan(start.with_shape((None, None)), *taken, body=body.graph, num_scan_inputs=len(taken))


def valid_steps(op: Builder, name: str | None, target: Value) -> Value | None:
    """Emit the number of valid time steps [N] that a value of the model holds; ``None`` without a name."""
    if name is None:
        return None
    named = {value.name: value for value in op.graph.inputs}
    named |= {output.name: output for node in op.graph for output in node.outputs}
    if name not in named:
        inputs = ", ".join(str(value.name) for value in op.graph.inputs)
        raise OptionError(
            f"input_lengths is {name!r}, but the model has no value of that name; its inputs are {inputs}."
        )
    lengths = op.cast(op.wrap(named[name]), ir.DataType.INT64)
    return op.Slice(op.Reshape(lengths, op.ints(-1)), op.ints(0), op.dimension(target, 0), op.ints(0))


@dataclass(frozen=True)
class PathCheck:
    """Check that labels are classes, come before the padding, and fit into the steps where their number is known."""

    classes: int | None
    blank: int
    steps: int | None

    def __call__(self, targets: Array, what: str, examples: Sequence[int] | Array) -> None:
        """See `TargetCheck`."""
        real = (targets >= 0) & (targets != self.blank)
        late = real[:, 1:] & ~real[:, :-1]
        if late.any():
            raise DataError(
                f"{what} has a label after padding at example {int(examples[first_row(late)])}; pad rows at their "
                f"end only, with -1 or the blank, {self.blank}."
            )
        outside = targets >= self.classes if self.classes is not None else np.zeros(targets.shape, bool)
        if outside.any():
            raise DataError(
                f"{what} has label {targets[outside][0]} at example {int(examples[first_row(outside)])}, but labels "
                f"must be below {self.classes}, and -1 for padding."
            ).about(what, got=targets[outside][0], wanted=self.classes)
        if self.steps is not None:
            repeated = (real[:, 1:] & (targets[:, 1:] == targets[:, :-1])).sum(axis=1)
            needed = real.sum(axis=1) + repeated
            if (needed > self.steps).any():
                row = first_row(needed > self.steps)
                raise DataError(
                    f"{what} needs {int(needed[row])} steps at example {int(examples[row])}, one for each label and "
                    f"one between equal ones, but the model has {self.steps}; shorten it, or give the loss "
                    "zero_infinity=True."
                )
