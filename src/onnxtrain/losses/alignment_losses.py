"""Losses of label sequences without alignment: CTC, as in text recognition, and the transducer loss (RNN-T)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import onnx_ir as ir

from onnxtrain.data.conversion import Array, first_row
from onnxtrain.data.target_checks import TargetCheck
from onnxtrain.errors import DataError, OptionError
from onnxtrain.errors.spelling import checks_arguments
from onnxtrain.graph import Builder, Value
from onnxtrain.graph.value import Dimension
from onnxtrain.losses.base import ScoreLoss, TargetKind, examples, known_size, mean_of, node_rank
from onnxtrain.lowering.training_info.recipe import LossTerms
from onnxtrain.metrics.base import MetricInput
from onnxtrain.metrics.error_rates import CharacterErrorRate
from onnxtrain.runtime.failures import explain_failure


class AlignmentLoss(ScoreLoss):
    """Base of losses that sum over all alignments of labels [N, S], padded at their end, with scores [..., C]."""

    target_kinds: ClassVar[tuple[TargetKind, ...]] = ("indices",)
    probabilities: ClassVar[Literal["distribution", "independent"] | None] = "distribution"
    axis: ClassVar[int] = -1

    blank: int
    input_lengths: str | None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.blank < 0:
            raise OptionError(f"blank is {self.blank}; {self.name} needs the number of a class, 0 or more.")

    def classes(self, prediction: Value) -> int | None:
        """Return the size of the last axis, where it is known."""
        return known_size(prediction, -1)

    def check_blank(self, prediction: Value) -> None:
        """Refuse a blank that is no class."""
        size = self.classes(prediction)
        if size is not None and self.blank >= size:
            raise OptionError(f"blank is {self.blank}, but there are {size} classes, from 0.")

    def real_labels(self, op: Builder, target: Value) -> tuple[Value, Value]:
        """Emit the labels with blanks as padding [N, S], and the number of labels of each example [N, 1]."""
        blank = op.scalar(self.blank, target)
        real = op.And(op.binary("GreaterOrEqual", target, 0), op.Not(op.Equal(target, blank)))
        count = op.ReduceSum(op.cast(real, ir.DataType.INT64), op.ints(1), keepdims=1)
        return op.Where(real, target, blank), count

    def valid_steps(self, op: Builder, target: Value) -> Value | None:
        """Emit the number of valid time steps [N] that a value of the model holds; ``None`` without a name."""
        name = self.input_lengths
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


def log_of_zero(scores: Value) -> float:
    """Return a logarithm that stands for log(0) and whose sums are finite."""
    return float(np.finfo(scores.dtype.numpy()).min) / 8


def log_of_sum(op: Builder, ways: Sequence[Value]) -> Value:
    """Emit the logarithm of the sum of probabilities that are given as logarithms."""
    return op.ReduceLogSumExp(
        op.Concat(*(op.Unsqueeze(way, op.ints(0)) for way in ways), axis=0), op.ints(0), keepdims=0
    )


def scan_body(
    op: Builder, prefix: str, names: Sequence[str], dtype: ir.DataType, *, masks: Collection[str]
) -> tuple[Builder, list[Value]]:
    """Return the body of a Scan, and its inputs of these names: masks [N, 1], and others [N, L]."""
    inputs = [
        ir.Value(
            name=name,
            type=ir.TensorType(ir.DataType.BOOL if name in masks else dtype),
            shape=ir.Shape((None, 1 if name in masks else None)),
        )
        for name in names
    ]
    body = op.body(inputs, prefix)
    for value in inputs:
        value.name = body.copied_name(str(value.name))
    return body, [body.wrap(value) for value in inputs]


@checks_arguments
@dataclass(frozen=True)
class CTC(AlignmentLoss):
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

    blank: int = 0
    zero_infinity: bool = False
    time_axis: int = 1
    input_lengths: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.time_axis not in (0, 1):
            raise OptionError(f"time_axis is {self.time_axis}; ctc takes 1 for scores [N, T, C] and 0 for [T, N, C].")

    def target_shape(self, prediction: Value, kind: TargetKind) -> tuple[Dimension, ...] | None:
        """Return [N, S] for any S."""
        if node_rank(prediction) != 3:
            form = "[N, T, C]" if self.time_axis else "[T, N, C]"
            raise OptionError(
                f"ctc needs scores {form} of examples, steps and classes, but {prediction.name!r} has shape "
                f"{prediction.shape}."
            )
        self.check_blank(prediction)
        return ((prediction.shape or (None, None))[1 - self.time_axis], None)

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
        log_p = self.log_probabilities(op, prediction, -1)
        if self.time_axis == 1:
            log_p = op.Transpose(log_p, perm=[1, 0, 2])
        never = log_of_zero(prediction)
        labels, count = self.real_labels(op, target)
        states = self._states(op, labels)
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
            lengths = op.cast(op.Squeeze(count, op.ints(1)), prediction.dtype)
            terms = terms / op.Max(lengths, op.scalar(1, lengths))
        number = op.cast(examples(op, target), prediction.dtype)
        return mean_of(op, terms.with_shape((None,)), number, weights)

    def _states(self, op: Builder, labels: Value) -> Value:
        """Insert blanks before, between and after labels [N, S]: [N, 2 S + 1]."""
        wide = op.Unsqueeze(labels, op.ints(2))
        filled = op.zeros_like(wide) + self.blank
        pairs = op.Flatten(op.Concat(filled, wide, axis=2), axis=1)
        return op.Concat(pairs, op.Slice(op.Squeeze(filled, op.ints(2)), op.ints(0), op.ints(1), op.ints(1)), axis=1)

    def _active(self, op: Builder, log_p: Value, target: Value) -> Value | None:
        """Emit the mask [T, N, 1] of valid steps; ``None`` where all are valid."""
        rows = self.valid_steps(op, target)
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

        names = ("paths", "scores_of_step", *(() if active is None else ("counts",)))
        body, (paths, score, *counts) = scan_body(op, "paths", names, log_p.dtype, masks=("counts",))
        padded = body.Pad(paths, body.ints(0, 2, 0, 0), body.scalar(never, paths))
        ways = [
            paths,
            body.Slice(padded, body.ints(1), body.ints(-1), body.ints(1)),
            body.Slice(padded, body.ints(0), body.ints(-2), body.ints(1)) + body.wrap(leap.ir),
        ]
        new = log_of_sum(body, ways) + score
        if counts:
            new = body.Where(counts[0], new, paths)
        body.output(new.with_shape((None, None)))
        taken: Sequence[Value] = [scores] if active is None else [scores, active]
        return op.Scan(start.with_shape((None, None)), *taken, body=body.graph, num_scan_inputs=len(taken))


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


@checks_arguments
@dataclass(frozen=True)
class Transducer(AlignmentLoss):
    """Transducer loss (RNN-T): mean over examples of -log p(labels).

    The joint network scores every pair of one of T frames and one of the U + 1 label histories: [N, T, U + 1, C], as
    logits or after a Softmax or LogSoftmax. At frame t after u labels, the blank leads to frame t + 1, and the next
    label to u + 1. p is the sum over all paths from the first frame to a blank at the last one after all labels. It is
    computed in log space, by one Scan over the T + U diagonals of the lattice forward and one backward::

        alpha(t, u) = log(exp(alpha(t-1, u) + blank(t-1, u)) + exp(alpha(t, u-1) + label(t, u-1)))

    Targets are labels [N, U] in order, one row per example, padded at its end with -1 (or any negative number, or the
    blank); where the number of histories is dynamic, the padding may be of any width. As
    ``torchaudio.functional.rnnt_loss(blank, reduction)``, whose target lengths are the numbers of labels before the
    padding, and whose blank is the last class by default.

    Args:
        blank: The blank class.
        input_lengths: Name of an input or a value of the model that holds the number of valid frames [N] per example,
            from 1; by default all frames.

    Source:
        A. Graves, "Sequence Transduction with Recurrent Neural Networks", arXiv 1211.3711; diagonals: T. Bagby, K. Rao,
        K. C. Sim, "Efficient Implementation of Recurrent Neural Network Transducer in TensorFlow", SLT 2018.
    """

    name: ClassVar[str] = "transducer"

    blank: int = 0
    input_lengths: str | None = None

    def target_shape(self, prediction: Value, kind: TargetKind) -> tuple[Dimension, ...] | None:
        """Return [N, U], one label less than there are histories.

        Raises:
            OptionError: The prediction has other axes, or no class is the blank.
        """
        if node_rank(prediction) != 4:
            raise OptionError(
                "transducer needs scores [N, T, U + 1, C] of examples, frames, label histories and classes, but "
                f"{prediction.name!r} has shape {prediction.shape}."
            )
        self.check_blank(prediction)
        shape = prediction.shape or (None,) * 4
        histories = shape[2]
        return (shape[0], histories - 1 if isinstance(histories, int) else None)

    def target_check(self, prediction: Value, kind: TargetKind) -> TargetCheck | None:
        """Check that labels are classes and come before the padding."""
        return PathCheck(self.classes(prediction), self.blank, None)

    def metric_input(self, prediction: Value, target: Value) -> MetricInput:
        """Return no kind of prediction: decoding runs the model once per label."""
        return MetricInput(self.name, None)

    def build(self, op: Builder, prediction: Value, target: Value, weights: Value | None = None) -> LossTerms:
        """Emit the loss on scores [N, T, U + 1, C]."""
        log_p = self.log_probabilities(op, prediction, -1)
        real, count = self.real_labels(op, target)
        frames = op.dimension(prediction, 1)  # [1]
        given = self.valid_steps(op, target)
        last = frames - 1 if given is None else op.Min(op.Max(given, op.ints(1)), frames) - 1
        last = op.Expand(last, op.Shape(count)) if given is None else op.Unsqueeze(last, op.ints(1))  # [N, 1]

        blank = op.scalar(self.blank, target)
        blanks = op.Gather(log_p, blank, axis=3)  # [N, T, U + 1]
        # Columns of padding may be more or fewer than the model's histories; GatherElements refuses too many labels.
        missing = op.dimension(prediction, 2) - 1 - op.dimension(target, 1)
        fitted = op.Pad(real, op.Concat(op.ints(0, 0, 0), missing, axis=0), blank)
        labels = op.Unsqueeze(fitted, op.ints(1, 3))  # [N, 1, U, 1]
        before = op.Slice(log_p, op.ints(0), op.ints(-1), op.ints(2))
        sizes = op.Concat(op.Shape(before, start=0, end=3), op.ints(1), axis=0)
        emitted = op.Squeeze(op.GatherElements(before, op.Expand(labels, sizes), axis=3), op.ints(3))  # [N, T, U]

        at_end = self._diagonals(op, blanks, emitted, last + count)
        end = op.Expand(op.Unsqueeze(last, op.ints(2)), op.Concat(op.Shape(last), op.Shape(blanks, start=2), axis=0))
        closing = op.Squeeze(op.GatherElements(blanks, end, axis=1), op.ints(1))  # [N, U + 1], at the last frame
        chosen = op.GatherElements(at_end + closing, count, axis=1)
        explain_failure(
            chosen,
            "An example has more labels than the model's scores [N, T, U + 1, C] have room for, U; shorten the labels, "
            "or give the model an input of more label histories.",
        )
        terms, number = -op.Squeeze(chosen, op.ints(1)), op.cast(examples(op, target), prediction.dtype)
        return mean_of(op, terms.with_shape((None,)), number, weights)

    def _diagonals(self, op: Builder, blanks: Value, emitted: Value, last: Value) -> Value:
        """Emit alpha [N, U + 1] on the last diagonal t + u of each example, [N, 1]; vectors run over u."""
        never = log_of_zero(blanks)
        none, zero = op.scalar(never, blanks), op.constant(0)
        frames = op.dimension(blanks, 1)
        histories = op.dimension(blanks, 2)
        diagonals = op.Range(op.constant(1), op.reshape(frames + histories, []) - 1, op.constant(1))  # 1 .. T + U - 1
        history = op.Range(zero, op.reshape(histories, []), op.constant(1))
        frame = op.Unsqueeze(diagonals, op.ints(1)) - op.Unsqueeze(history, op.ints(0))  # [diagonals, U + 1]
        # Frames outside the lattice read any value: no path leads back from there to the end.
        shifted = op.Pad(emitted, op.ints(0, 0, 1, 0, 0, 0), none)  # the label that leads to each history

        def skewed(scores: Value, at: Value) -> Value:
            inside = op.Min(op.Max(at, op.constant(0)), frames - 1)
            sizes = op.Concat(op.Shape(scores, start=0, end=1), op.Shape(inside), axis=0)
            rows = op.GatherElements(scores, op.Expand(op.Unsqueeze(inside, op.ints(0)), sizes), axis=1)
            return op.Transpose(rows, perm=[1, 0, 2])  # [diagonals, N, U + 1]

        first = op.Where(op.binary("Equal", history, 0), op.scalar(0.0, blanks), none)
        start = op.Expand(first, op.Concat(op.Shape(blanks, start=0, end=1), histories, axis=0))
        active = op.LessOrEqual(op.Unsqueeze(diagonals, op.ints(1, 2)), op.Unsqueeze(last, op.ints(0)))

        names = ("paths", "blank_before", "label_before", "goes_on")
        body, inner = scan_body(op, "diagonal", names, blanks.dtype, masks=("goes_on",))
        paths, blank_before, label_before, goes_on = inner
        neighbours = body.Slice(
            body.Pad(paths, body.ints(0, 1, 0, 0), body.scalar(never, paths)), body.ints(0), body.ints(-1), body.ints(1)
        )
        ways = [paths + blank_before, neighbours + label_before]
        new = body.Where(goes_on, log_of_sum(body, ways), paths)
        body.output(new.with_shape((None, None)))
        scanned = [skewed(blanks, frame - 1), skewed(shifted, frame), active]
        return op.Scan(start.with_shape((None, None)), *scanned, body=body.graph, num_scan_inputs=3)
