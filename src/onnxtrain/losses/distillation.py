"""Knowledge distillation: a model learns from labels and from another model's outputs on the same inputs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from onnxtrain.editing.working_copy.training_modes import set_inference
from onnxtrain.errors import OptionError
from onnxtrain.errors.spelling import checks_arguments
from onnxtrain.graph import Builder, Value
from onnxtrain.graph.clone import Values, clone_nodes
from onnxtrain.graph.shapes import infer_shapes
from onnxtrain.graph.value import dimensions
from onnxtrain.losses.base import ClassLoss, check_above_zero, weighted
from onnxtrain.losses.cross_entropy import SoftmaxCrossEntropy
from onnxtrain.losses.heads import named_output
from onnxtrain.losses.probabilities import class_logits, logarithm
from onnxtrain.lowering.training_info.recipe import LossTerms


@checks_arguments
@dataclass(frozen=True)
class Distillation(ClassLoss):
    """Distillation: mix * K + (1 - mix) * C, with C the cross-entropy on targets and K the divergence to a teacher.

    ::

        K = temperature**2 * mean of sum_c q_c (log q_c - log p_c)
        q = softmax(teacher's logits / temperature), p = softmax(logits / temperature)

    Both are means over the same labels with the same weights, so that the loss of a large batch does not depend on its
    split into micro-batches.

    The teacher runs in the same step on the same inputs, in inference mode, and is never trained. Its inputs have the
    same names as the model's, or both models have a single input. A final Softmax of the teacher is removed. Positions
    whose label is ignored do not contribute to either part.

    Args:
        teacher: Path of an ONNX model with the same classes.
        temperature: Softmax temperature, above 0; a higher one emphasizes the order of the wrong classes.
        mix: Share of the teacher, in [0, 1].
        output: The teacher's output; by default its first floating one.
        class_weights: As in :class:`SoftmaxCrossEntropy`; the weight of a label applies to both parts.
            With distributions as targets they apply to the targets' part alone.
        label_smoothing: In [0, 1), for the targets' part.
        ignore_index: Label to ignore. The text ``"distillation"`` has -100.
        axis: The class axis of the logits.
        check_targets: Refuse targets that are no distributions.

    Source:
        G. Hinton, O. Vinyals, J. Dean, "Distilling the Knowledge in a Neural Network", arXiv 1503.02531.
    """

    name: ClassVar[str] = "distillation"

    teacher: str | os.PathLike[str]
    temperature: float = 2.0
    mix: float = 0.5
    output: str | None = None
    class_weights: Sequence[float] | Mapping[int, float] | None = None
    label_smoothing: float = 0.0
    ignore_index: int | None = None
    axis: int | None = None
    check_targets: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "teacher", Path(self.teacher))
        check_above_zero(self, temperature=self.temperature)
        if not 0.0 <= self.mix <= 1.0:
            raise OptionError(f"mix is {self.mix}; distillation needs a number in [0, 1].")

    @property
    def _cross_entropy(self) -> SoftmaxCrossEntropy:
        return SoftmaxCrossEntropy(
            self.class_weights,
            self.label_smoothing,
            self.ignore_index,
            self.axis,
            self.check_targets,
            from_logits=self.from_logits,
        )

    @property
    def counts_labels(self) -> bool:
        """True if labels may be ignored, or have weights."""
        return self._cross_entropy.counts_labels

    def label_weight(self, labels: np.ndarray) -> float:
        """The sum of the weights of the labels that count."""
        return self._cross_entropy.label_weight(labels)

    def build(self, op: Builder, prediction: Value, target: Value, weights: Value | None = None) -> LossTerms:
        """Emit the teacher and the loss."""
        cross_entropy = self._cross_entropy
        hard = cross_entropy.build(op, prediction, target, weights)
        axis = self.class_axis(prediction)
        taught = self._teacher_logits(op, prediction)
        log_q = op.LogSoftmax(taught / self.temperature, axis=axis)
        logits = logarithm(op, prediction) if self.from_logits is False else prediction
        log_p = op.LogSoftmax(logits / self.temperature, axis=axis)
        terms = op.Exp(log_q) * (log_q - log_p)
        terms = op.ReduceSum(terms, op.ints(axis), keepdims=0)
        shape = None if prediction.shape is None else tuple(s for a, s in enumerate(prediction.shape) if a != axis)
        if not target.is_float and (of_labels := cross_entropy.label_weights(op, prediction, target)) is not None:
            terms = terms * of_labels
        if weights is not None:
            terms = weighted(op, terms.with_shape(shape), weights)
        soft = op.ReduceSum(terms, keepdims=0) / cross_entropy.divisor(op, hard.weight) * self.temperature**2
        return LossTerms((soft * self.mix + hard.loss * (1.0 - self.mix)).with_shape(()), hard.weight)

    def _teacher_logits(self, op: Builder, prediction: Value) -> Value:
        model = self._teacher(op.opset)
        graph = model.graph
        axis = self.class_axis(prediction)
        output = named_output(graph, self.output)
        found = class_logits(Builder(graph, op.opset), output, axis, model.functions).ir
        mine, theirs = dimensions(prediction.ir), dimensions(found)
        if mine is not None and theirs is not None:
            sizes = (mine[axis], theirs[axis] if axis < len(theirs) else None)
            if len(mine) != len(theirs) or (all(isinstance(size, int) for size in sizes) and sizes[0] != sizes[1]):
                raise OptionError(
                    f"The teacher {str(self.teacher)!r} gives logits of shape {theirs}, the model of shape {mine}; "
                    "they need the same classes."
                ).about(str(self.teacher), got=theirs, wanted=mine)
        values: Values = dict(self._inputs(op, graph))
        for name, value in graph.initializers.items():
            fresh = ir.Value(name=f"teacher/{name}", type=value.type, shape=value.shape, const_value=value.const_value)
            op.graph.register_initializer(fresh)
            values[value] = fresh
        op.graph.extend(clone_nodes(graph, values, rename=lambda name: f"teacher/{name}"))
        result = values[found]
        assert result is not None
        logits = op.cast(op.wrap(result), prediction.dtype)
        if mine is None or theirs is None or mine[0] != theirs[0]:  # the loss excludes padded examples
            logits = op.Slice(logits, op.ints(0), op.dimension(prediction, 0), op.ints(0))
        return logits.with_shape(prediction.shape)

    def _teacher(self, opset: int) -> ir.Model:
        from onnxtrain.model_file.file import ModelFile

        model = infer_shapes(ModelFile.load(self.teacher).training_model(opset))
        set_inference(model)
        if model.functions:
            common.InlinePass()(model)
        version = model.graph.opset_imports.get("", opset)
        if version > opset:
            raise OptionError(
                f"The teacher {str(self.teacher)!r} is written in opset {version}, the model in {opset}; convert one "
                "of them."
            )
        for initializer in model.graph.initializers.values():
            tensor = initializer.const_value
            if tensor is not None and initializer.shape is None:
                initializer.shape = ir.Shape(tensor.shape.numpy())
        return model

    def _inputs(self, op: Builder, teacher: ir.Graph) -> dict[ir.Value, ir.Value]:
        own = {str(value.name): value for value in op.graph.inputs}
        given = [value for value in teacher.inputs if value.name not in teacher.initializers]
        if len(given) == len(own) == 1:
            return {given[0]: next(iter(own.values()))}
        missing = [str(value.name) for value in given if value.name not in own]
        if missing:
            raise OptionError(
                f"The teacher {str(self.teacher)!r} has the inputs {', '.join(missing)}, but the model's are "
                f"{', '.join(own)}; they need the same names."
            ).about(str(self.teacher), got=missing, wanted=own)
        return {value: own[str(value.name)] for value in given}
