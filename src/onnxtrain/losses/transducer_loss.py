"""Transducer loss (RNN-T): label sequences without alignment, from scores of pairs of a frame and a label history."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from onnxtrain.data.target_checks import TargetCheck
from onnxtrain.errors import OptionError
from onnxtrain.errors.spelling import checks_arguments
from onnxtrain.graph import Builder, Value
from onnxtrain.graph.value import Dimension
from onnxtrain.losses.base import ScoreLoss, TargetKind, examples, node_rank
from onnxtrain.losses.ctc_loss import PathCheck, valid_steps
from onnxtrain.losses.probabilities import logarithm
from onnxtrain.lowering.training_info.recipe import LossTerms
from onnxtrain.metrics.base import MetricInput
from onnxtrain.runtime.failures import explain_failure

_WHOLE = ir.DataType.INT64


@checks_arguments
@dataclass(frozen=True)
class Transducer(ScoreLoss):
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
    target_kinds: ClassVar[tuple[TargetKind, ...]] = ("indices",)
    probabilities = "distribution"
    axis: ClassVar[int] = -1

    blank: int = 0
    input_lengths: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.blank < 0:
            raise OptionError(f"blank is {self.blank}; transducer needs the number of a class, 0 or more.")

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
        size = self.classes(prediction)
        if size is not None and self.blank >= size:
            raise OptionError(f"blank is {self.blank}, but there are {size} classes, from 0.")
        shape = prediction.shape or (None,) * 4
        histories = shape[2]
        return (shape[0], histories - 1 if isinstance(histories, int) else None)

    def target_dtype(self, prediction: Value, kind: TargetKind) -> ir.DataType:
        """Return int64."""
        return _WHOLE

    def classes(self, prediction: Value) -> int | None:
        """Return the size of the last axis, where it is known."""
        size = None if prediction.shape is None else prediction.shape[-1]
        return size if isinstance(size, int) else None

    def target_check(self, prediction: Value, kind: TargetKind) -> TargetCheck | None:
        """Check that labels are classes and come before the padding."""
        return PathCheck(self.classes(prediction), self.blank, None)

    def metric_input(self, prediction: Value, target: Value) -> MetricInput:
        """Return no kind of prediction: decoding runs the model once per label."""
        return MetricInput(self.name, None)

    def build(self, op: Builder, prediction: Value, target: Value, weights: Value | None = None) -> LossTerms:
        """Emit the loss on scores [N, T, U + 1, C]."""
        log_p = logarithm(op, prediction) if self.from_logits is False else op.LogSoftmax(prediction, axis=-1)
        blank = op.scalar(self.blank, target)
        real = op.And(op.binary("GreaterOrEqual", target, 0), op.Not(op.Equal(target, blank)))
        count = op.ReduceSum(op.cast(real, _WHOLE), op.ints(1), keepdims=1)  # [N, 1]
        frames = op.dimension(prediction, 1)  # [1]
        given = valid_steps(op, self.input_lengths, target)
        last = frames - 1 if given is None else op.Min(op.Max(given, op.ints(1)), frames) - 1
        last = op.Expand(last, op.Shape(count)) if given is None else op.Unsqueeze(last, op.ints(1))  # [N, 1]

        blanks = op.Gather(log_p, blank, axis=3)  # [N, T, U + 1]
        # Columns of padding may be more or fewer than the model's histories; GatherElements refuses too many labels.
        missing = op.dimension(prediction, 2) - 1 - op.dimension(target, 1)
        fitted = op.Pad(op.Where(real, target, blank), op.Concat(op.ints(0, 0, 0), missing, axis=0), blank)
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
        terms = -op.Squeeze(chosen, op.ints(1))
        if weights is not None:
            terms = terms * weights
        number = op.cast(examples(op, target), prediction.dtype)
        return LossTerms((op.ReduceSum(terms, keepdims=0) / number).with_shape(()), number)

    def _diagonals(self, op: Builder, blanks: Value, emitted: Value, last: Value) -> Value:
        """Emit alpha [N, U + 1] on the last diagonal t + u of each example, [N, 1]; vectors run over u."""
        never = float(np.finfo(blanks.dtype.numpy()).min) / 8  # log(0) without NaN
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

        def given(name: str, dtype: ir.DataType, size: Dimension) -> ir.Value:
            return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape((None, size)))

        inputs = [given(name, blanks.dtype, None) for name in ("paths", "blank_before", "label_before")]
        inputs.append(given("goes_on", ir.DataType.BOOL, 1))
        body = op.body(inputs, "diagonal")
        for value in inputs:
            value.name = body.copied_name(str(value.name))
        paths, blank_before, label_before, goes_on = map(body.wrap, inputs)
        neighbours = body.Slice(
            body.Pad(paths, body.ints(0, 1, 0, 0), body.scalar(never, paths)), body.ints(0), body.ints(-1), body.ints(1)
        )
        ways = [paths + blank_before, neighbours + label_before]
        together = body.Concat(*(body.Unsqueeze(way, body.ints(0)) for way in ways), axis=0)
        new = body.Where(goes_on, body.ReduceLogSumExp(together, body.ints(0), keepdims=0), paths)
        body.output(new.with_shape((None, None)))
        scanned = [skewed(blanks, frame - 1), skewed(shifted, frame), active]
        return op.Scan(start.with_shape((None, None)), *scanned, body=body.graph, num_scan_inputs=3)
