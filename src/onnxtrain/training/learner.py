"""Steps, evaluation and prediction of a training."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from onnxtrain.data import Batch, Dataset, TensorSpec
from onnxtrain.data.conversion import kind_of, symbol_sizes
from onnxtrain.data.labels import fewer_labels, learn_labels, no_labels
from onnxtrain.data.table_columns import is_frame, named_array
from onnxtrain.data.target_checks import check_weights
from onnxtrain.errors import DataError, NumericalError, OptionError
from onnxtrain.losses.base import Forms
from onnxtrain.losses.heads import Metrics, Targets, tensor_spec
from onnxtrain.spelling import checks_arguments
from onnxtrain.training.advice.hints import Hint, warn_of
from onnxtrain.training.learned import Learned
from onnxtrain.training.objective import Objective
from onnxtrain.training.opening import open_with_targets, targets_by_output, with_weights
from onnxtrain.training.preparation import prepare
from onnxtrain.training.specification import Specification
from onnxtrain.training.steps.feeding import by_input_name, check_inputs, check_targets, fit_to_spec
from onnxtrain.training.working_copy.training_modes import Modes

if TYPE_CHECKING:
    from onnxtrain.metrics.base import MetricInput
    from onnxtrain.training.inference.evaluation import Evaluator

Source = Any
"""Data in any form that :func:`onnxtrain.data.open_dataset` takes."""


class Learner(Learned):
    """Step, evaluate and predict with the state of a training.

    The arguments are those of :class:`~onnxtrain.training.learned.Learned`.
    """

    def _begin(
        self, specification: Specification, objective: Objective | None, values: Mapping[str, np.ndarray] | None
    ) -> None:
        super()._begin(specification, objective, values)
        self._evaluators: dict[tuple[Forms | None, bool, bool], Evaluator] = {}
        self._in_inference: Objective | None = None
        self._labels_are_new = False
        self.expected_labels: tuple[str, ...] | None = None
        """Labels of the checkpoint that is resumed, for text targets."""
        self._last_shapes: tuple[Any, ...] = ()  # of train_step; of the same shapes targets mean the same

    @checks_arguments
    def train_step(self, inputs: Source, targets: Any = None, sample_weight: Any = None) -> float:
        """Train one step on one batch; smaller batches are padded for models with a fixed batch size.

        Args:
            inputs: An array, a tuple of arrays in the order of the model's inputs, or a mapping.
            targets: Class indices or values, by output where several have losses; ``None`` where the loss is an output
                of the model.
            sample_weight: One weight per example [N], at least 0, that multiplies its term of the loss.

        Returns:
            The loss before the update.

        Raises:
            DataError: Arrays do not fit the model, or hold NaN or infinity.
            StepError: onnxruntime failed.
        """
        self._weigh(sample_weight is not None)
        feeds = self._feeds(inputs, targets)  # which may change the specification, and with it the steps
        if sample_weight is not None:
            assert self.objective.weights is not None
            spec = dataclasses.replace(tensor_spec(self.objective.weights), shape=(None,))
            feeds[spec.name] = weights = check_weights(fit_to_spec(sample_weight, spec))
            first = next(iter(targets.values())) if isinstance(targets, Mapping) else targets
            if first is not None and len(weights) != len(first):
                raise DataError(f"sample_weight has {len(weights)} numbers, but there are {len(first)} targets.")
        return self._steps.step(feeds, self.learning_rate)

    @checks_arguments
    def step_batch(self, batch: Batch) -> float:
        """Train one step on this rank's share of a batch; return the loss before the update."""
        objective = self.objective
        return self._steps.step_share(objective.inputs_of(batch) | objective.targets_of(batch), self.learning_rate)

    @property
    def loss_parts(self) -> dict[str, float]:
        """Unweighted losses of the last step by output, ``{output}_loss``; empty for a single loss."""
        return dict(self._steps.parts)

    def _feeds(self, inputs: Any, targets: Any) -> dict[str, np.ndarray]:
        """Return arrays by input name of the step graph, in its types."""
        arrays = by_input_name(self._inputs, inputs)
        feeds = {}
        for spec in self._inputs:
            given = arrays[spec.name]
            if is_frame(given):
                (own,) = self.names.specs([spec])
                given, columns = named_array(given, own, repr(spec.name))
                self.names = self.names.learned({} if columns is None else {spec.name: columns}, ())
            feeds[spec.name] = fit_to_spec(given, self._for_any_rows(spec))
        check_inputs(feeds)
        wanted = self.objective.targets
        if wanted is None:
            return feeds
        if targets is None:
            raise DataError("This loss needs targets; give them to train_step(inputs, targets).")
        if self.objective.others:
            return feeds | self._targets_of_several(targets, feeds)
        if isinstance(targets, Mapping):
            (targets,) = targets_by_output(self.objective.heads, targets).values()
        targets = wanted.adapt(np.asarray(targets), self.labels)
        shapes = (targets.dtype, targets.shape, *(feeds[spec.name].shape for spec in self._inputs))
        classes = wanted.are_classes(targets)  # then nothing is ignored and nothing is wrong
        if shapes != self._last_shapes or (not classes and wanted.hold_ignored(targets)):
            sizes = symbol_sizes((spec, feeds[spec.name].shape) for spec in self._inputs)
            wanted = self._expect(wanted.form_of(targets, sizes))
            self._last_shapes = shapes
            classes = wanted.are_classes(targets)
        feeds[wanted.name] = fitted = fit_to_spec(targets, self._for_any_rows(wanted.spec))
        if not classes:
            check_targets(fitted, wanted.check)
        return feeds

    def _targets_of_several(self, targets: Any, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the targets of several outputs by input name of the step graph."""
        heads = self.objective.heads
        given = targets_by_output(heads, targets)
        arrays = [head.targets.adapt(np.asarray(given[head.name])) for head in heads]
        shapes = (*((array.dtype, array.shape) for array in arrays), *(array.shape for array in inputs.values()))
        pairs = list(zip(heads, arrays, strict=True))
        if shapes != self._last_shapes or any(head.targets.hold_ignored(array) for head, array in pairs):
            sizes = symbol_sizes((spec, inputs[spec.name].shape) for spec in self._inputs)
            self._expect(tuple(head.targets.form_of(array, sizes) for head, array in pairs))
            self._last_shapes = shapes
        found = {}
        for head, array in zip(self.objective.heads, arrays, strict=True):
            own = head.targets
            found[own.name] = check_targets(fit_to_spec(array, self._for_any_rows(own.spec)), own.check)
        return found

    def _weigh(self, weighted: bool) -> None:
        """Switch the step between weighted and unweighted examples."""
        if weighted != self.specification.weighted:
            self.change(dataclasses.replace(self.specification, weighted=weighted))

    def _for_any_rows(self, spec: TensorSpec) -> TensorSpec:
        """Return the specification of an array without its batch size where batches are padded."""
        if spec.name not in self._steps.batched:
            return spec
        assert spec.shape is not None
        return dataclasses.replace(spec, shape=(None, *spec.shape[1:]))

    def _expect(self, form: Forms) -> Targets:
        """Switch the step to another form of targets: distributions, or labels along another axis."""
        if form != self.objective.form:
            self.change(dataclasses.replace(self.specification, form=form))
        assert self.objective.targets is not None
        return self.objective.targets

    @checks_arguments
    def open(
        self, source: Source, *, target: str | None = None, need_target: bool = True, sample_weight: Any = None
    ) -> Dataset:
        """Open data in any form as a dataset that fits this model.

        Args:
            source: The data.
            target: Name of the target in a file with several arrays left.
            need_target: Whether there have to be targets, where the loss takes some.
            sample_weight: One weight per example [N], at least 0, that multiplies its term of the loss; or the name of
                the array or column that has them.

        Raises:
            DataError: It cannot be read or does not fit.
        """
        targets = self.objective.targets
        wanted = targets is not None and need_target
        if need_target:
            source, sample_weight = with_weights(source, sample_weight, self._inputs)
        if wanted:
            name = sample_weight if isinstance(sample_weight, str) else None
            dataset, forms = open_with_targets(
                self.objective, source, inputs=self._named_inputs, target=target, adapted=self._adapted, weights=name
            )
            self._expect(forms)
            dataset = self.objective.expected(dataset)
        else:
            from onnxtrain.data.opening import open_dataset

            dataset = open_dataset(
                source,
                self._named_inputs,
                target=target,
                target_spec=None if targets is None else targets.spec,
                need_target=False,
                validate=False,
            )
        if need_target:
            self._weigh(sample_weight is not None)
        if sample_weight is not None:
            dataset = self.objective.weighted(dataset, sample_weight)
        self.objective.validate(dataset, labels=wanted)
        if need_target:
            weights = sample_weight if isinstance(sample_weight, str) else None
            self.names = self.names.learned(dataset.columns, (target, weights))
            self._check_label_count()
        return dataset

    @property
    def _named_inputs(self) -> list[TensorSpec]:
        """Specifications of the inputs, with their column names."""
        return self.names.specs(self._inputs)

    @checks_arguments
    def evaluate(
        self,
        data: Source,
        y: Any = None,
        *,
        sample_weight: Any = None,
        target: str | None = None,
        batch_size: int = 256,
        metrics: Metrics = (),
        ema: bool = False,
    ) -> dict[str, Any]:
        """Compute loss and metrics on data in inference mode: no dropout, running statistics.

        Args:
            data: Data in any form; with ``y`` the inputs alone.
            y: The targets, where ``data`` has none.
            sample_weight: One weight per example [N], at least 0, or the name of the array or column that has them. The
                loss is the mean over the examples of weight times loss; metrics count all examples alike (as in Keras).
            target: Name of the target in a file with several arrays left.
            batch_size: Examples per batch.
            metrics: Names (``"accuracy,f1"``, or a list) or functions of (y_true, y_pred), which see all data at once;
                by output where several have losses.
            ema: Whether to measure the moving average of the parameters (``Trainer(ema=...)``).

        Returns:
            ``loss`` and every metric of all examples; ``confusion_matrix`` is an array. Where several outputs have
            losses, ``{output}_loss`` is that of each, and metrics are ``{output}_{metric}``. A prediction that is NaN
            makes every metric NaN.
        """
        source = data if y is None else (data, y)
        evaluator, dataset = self.open_for_evaluation(source, target=target, ema=ema, sample_weight=sample_weight)
        return evaluator.evaluate(dataset, batch_size, metrics, self.communicator)

    @checks_arguments
    def open_for_evaluation(
        self, source: Source, *, target: str | None = None, ema: bool = False, sample_weight: Any = None
    ) -> tuple[Evaluator, Dataset]:
        """Open data in any form; return the evaluator and the dataset.

        Targets may be of another kind than those that the model is trained on: labels where it learns from
        distributions over classes.

        Raises:
            DataError: It cannot be read or does not fit.
        """
        if self.objective.targets is None:
            return self._evaluator(None, ema), self.open(source, target=target, sample_weight=sample_weight)
        source, weights = with_weights(source, sample_weight, self._inputs)
        dataset, forms = open_with_targets(
            self.objective,
            source,
            inputs=self._named_inputs,
            target=target,
            adapted=self._adapted_for_evaluation,
            weights=weights if isinstance(weights, str) else None,
        )
        evaluator = self._evaluator(forms, ema, weighted=weights is not None or dataset.weighted)
        dataset = evaluator.objective.expected(dataset)
        if weights is not None:
            dataset = evaluator.objective.weighted(dataset, weights)
        evaluator.objective.validate(dataset, labels=True)
        return evaluator, dataset

    def _adapted(self, dataset: Dataset, targets: Targets, name: str | None = None) -> Dataset:
        """Convert targets to the form of the loss; text labels become class indices where there is one loss."""
        if name is not None:
            return dataset.adapting(targets.adapt, name)
        found = dataset.targets
        if found is not None and self.labels is None and targets.take_labels:
            if kind_of(found.dtype) != "string":
                self._numbered = True
            elif self._numbered:
                raise DataError(
                    "the targets are texts, but those of earlier data were the numbers of classes, so that nothing "
                    "tells which text is which class; give texts, or numbers, for all data."
                )
            elif self.expected_labels is not None:
                self.labels = self.expected_labels
            else:
                self.labels = learn_labels(found, targets.classes, dataset.declared_labels)
                self._labels_are_new = True
        labels = self.labels
        return dataset.adapting(lambda array: targets.adapt(array, labels))

    def _adapted_for_evaluation(self, dataset: Dataset, targets: Targets, name: str | None = None) -> Dataset:
        """Like :meth:`_adapted`, but without learning labels from data that may lack classes."""
        before = self.labels
        result = self._adapted(dataset, targets, name)
        learned, classes = self.labels, targets.classes
        if before is None and learned is not None and classes is not None and len(learned) < classes:
            self.labels = None
            raise DataError(no_labels(learned, classes))
        return result

    def _check_label_count(self) -> None:
        """Warn where a model has more classes than the data have labels.

        Warns:
            TrainingHint: It has.
        """
        targets, labels = self.objective.targets, self.labels
        if targets is None or labels is None or not self._labels_are_new:
            return
        self._labels_are_new = False
        if targets.classes is not None and len(labels) < targets.classes:
            text = fewer_labels(labels, targets.classes)
            self._hints.append(Hint(text, surprising=True))
            warn_of(self._hints[-1:])

    @checks_arguments
    def predict(
        self,
        data: Source,
        *,
        target: str | None = None,
        batch_size: int = 256,
        ema: bool = False,
        labels: bool = False,
    ) -> np.ndarray | dict[str, np.ndarray]:
        """Return the model's outputs for inputs, or the labels of the predicted classes.

        Args:
            data: Inputs in any form that ``fit`` takes; targets are not needed.
            target: A column of a table that is not one of the inputs.
            batch_size: Examples per batch.
            ema: Whether to predict with the moving average of the parameters.
            labels: Return the most probable class of every example: the text of its label where targets were texts,
                else its number, and -1 for scores that are NaN. Yes-or-no questions have 1 and 0. By output where
                several have losses.

        Returns:
            One array per tensor output by name, or the array itself where the model has one output.

        Raises:
            OptionError: `labels` is given, and predictions are neither scores over classes nor binary logits.
        """
        if labels:
            from onnxtrain.training.inference.answers import answers

            return self._by_head(data, target, batch_size, ema, "predict(labels=True)", answers)
        arrays = self._evaluator(self.objective.form, ema).predict(
            self.open(data, target=target, need_target=False), batch_size
        )
        return next(iter(arrays.values())) if len(arrays) == 1 else arrays

    @checks_arguments
    def predict_proba(
        self, data: Source, *, target: str | None = None, batch_size: int = 256, ema: bool = False
    ) -> np.ndarray | dict[str, np.ndarray]:
        """Return class probabilities for inputs, from logits or from a final Softmax or Sigmoid.

        Args:
            data: Inputs in any form that ``fit`` takes; targets are not needed.
            target: A column of a table that is not one of the inputs.
            batch_size: Examples per batch.
            ema: Whether to predict with the moving average of the parameters.

        Returns:
            Probabilities [N, C, ...] over classes, or [N, K] of yes for K questions; one question has those of no and
            yes [N, 2], as in scikit-learn. By output where several have losses.

        Raises:
            OptionError: Predictions are neither scores over classes nor binary logits.
        """
        from onnxtrain.training.inference.answers import probabilities

        def found(metric_input: MetricInput, scores: np.ndarray, labels: Sequence[str] | None) -> np.ndarray:
            return probabilities(metric_input, scores)

        return self._by_head(data, target, batch_size, ema, "predict_proba", found)

    def _by_head(
        self,
        data: Source,
        target: str | None,
        batch_size: int,
        ema: bool,
        what: str,
        found: Callable[[MetricInput, np.ndarray, Sequence[str] | None], np.ndarray],
    ) -> np.ndarray | dict[str, np.ndarray]:
        """Apply a function to the predictions of each output that has a loss; by output where there are several."""
        from onnxtrain.training.inference.answers import check_answers

        evaluator = self._evaluator(self.objective.form, ema)
        heads = evaluator.objective.heads
        if not heads:
            raise OptionError(
                f"{what} needs a loss on targets, which says what predictions are, but the loss is an output."
            )
        for head in heads:
            check_answers(head.targets.metric_input, what)
        dataset = self.open(data, target=target, need_target=False)
        arrays = evaluator.predict(dataset, batch_size, [head.prediction for head in heads])
        labels = self.labels if len(heads) == 1 else None
        by_head = {
            head.name: found(head.targets.metric_input, arrays[str(head.prediction.name)], labels) for head in heads
        }
        return next(iter(by_head.values())) if len(heads) == 1 else by_head

    def _evaluator(self, form: Forms | None, ema: bool, weighted: bool = False) -> Evaluator:
        self._check_averages(ema)
        key = form, ema, weighted
        if key not in self._evaluators:
            from onnxtrain.training.inference.evaluation import Evaluator  # a step has no use for it

            objective = self.objective
            if self._in_inference is None:
                self._in_inference = objective
                if objective.modes.training or (self.specification.lora is not None and self.specification.lora.drops):
                    specification, copies, table = self.specification, objective.copies, objective.table
                    self._in_inference = prepare(specification, modes=Modes(), copies=copies, table=table)
            self._evaluators[key] = Evaluator(
                self._in_inference.with_form(form).weighting(weighted),
                self.states,
                self.options,
                self._averages if ema else None,
            )
        return self._evaluators[key]

    @checks_arguments
    def check_finite(self, loss: float, step: int, hint: str = "") -> None:
        """Raise an error where the loss is NaN.

        Raises:
            NumericalError: It is NaN or infinite.
        """
        if not math.isfinite(loss):
            raise NumericalError(
                f"The loss became {loss} at step {step} (learning rate {self.learning_rate:g}); "
                f"lower the learning rate or clip gradients (clip_norm=1.0). "
                f"{' '.join(filter(None, (self._steps.origin, hint)))}".strip()
            )
