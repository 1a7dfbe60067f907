"""A model whose weights change: evaluate it and predict with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from onnxtrain.data import Dataset
from onnxtrain.data.labels import assumed_order
from onnxtrain.data.naming import TargetNames
from onnxtrain.data.opening import Source
from onnxtrain.editing.working_copy.training_modes import Modes, check_samples
from onnxtrain.errors import OptionError
from onnxtrain.errors.spelling import checks_arguments
from onnxtrain.losses.base import Forms
from onnxtrain.losses.heads import Metrics
from onnxtrain.training.config import TrainingConfig
from onnxtrain.training.data_adapter import DataAdapter
from onnxtrain.training.objective import Objective
from onnxtrain.training.prepare import prepare
from onnxtrain.training.trained_values import TrainedValues

if TYPE_CHECKING:
    from onnxtrain.metrics.base import MetricInput
    from onnxtrain.training.inference.evaluation import Evaluator


class TrainedModel(TrainedValues):
    """Everything of an :class:`onnxtrain.Trainer` but the training: its values, evaluation and prediction."""

    def _start(
        self,
        config: TrainingConfig,
        objective: Objective | None = None,
        values: Mapping[str, np.ndarray] | None = None,
        data: DataAdapter | None = None,
    ) -> None:
        super()._start(config, objective, values, data)
        if any(head.assumes_logits for head in self.objective.heads):
            self.executor.look = self._look
        self._evaluators: dict[tuple[Forms, bool, bool, bool, bool], Evaluator] = {}
        self._in_inference: Objective | None = None

    @checks_arguments
    def evaluate(
        self,
        data: Source,
        y: Any = None,
        *,
        sample_weight: Any = None,
        target: TargetNames | None = None,
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
        if self._communicator.size > 1:
            self.executor.check_agreement({"call": "evaluate", "data": dataset.describe()}, {"data": dataset})
        found = evaluator.evaluate(dataset, batch_size, metrics, self._communicator)
        self._warn_once(*evaluator.doubts)
        return found

    @checks_arguments
    def open_for_evaluation(
        self, source: Source, *, target: TargetNames | None = None, ema: bool = False, sample_weight: Any = None
    ) -> tuple[Evaluator, Dataset]:
        """Open data in any form; return the evaluator and the dataset.

        The form of the targets may differ from the one that the model is trained on: labels where it learns from
        distributions over classes.

        Raises:
            DataError: It cannot be read or does not fit.
        """
        dataset, objective = self.data_adapter.open_with_targets(
            self.objective, source, target=target, sample_weight=sample_weight, config=self.config
        )
        self._warn_once(*dataset.hints)  # of rows that were cut or left out
        for name, assumed in self.data_adapter.take_new_labels().items():
            self._warn_once(*([assumed_order(self.data_adapter.labels_of(name) or ())] if assumed else []))
        weighted = objective.weights is not None
        return self._evaluator(objective.forms, ema, weighted=weighted, packed=objective.packed), dataset

    def _look(self, feeds: dict[str, np.ndarray]) -> None:
        """Warn of outputs in the first rows of the training that look like probabilities, but are taken for logits."""
        objective = self.objective
        if self._communicator.rank:
            return
        evaluator = self._evaluator(objective.forms, ema=False, packed=objective.packed)
        self._warn_once(*evaluator.find_doubts({spec.name: feeds[spec.name] for spec in objective.inputs}))

    @checks_arguments
    def predict(
        self,
        data: Source,
        *,
        target: TargetNames | None = None,
        batch_size: int = 256,
        ema: bool = False,
        labels: bool = False,
        dropout: bool = False,
        samples: int | None = None,
    ) -> np.ndarray:
        """Return the model's outputs for inputs, or the labels of the predicted classes.

        Args:
            data: Inputs in any form that ``fit`` takes; targets are not needed.
            target: A column of a table that is not one of the inputs.
            batch_size: Examples per batch.
            ema: Whether to predict with the moving average of the parameters.
            labels: Return the most probable class of every example: the text of its label where targets were texts,
                else its number, and -1 for scores that are NaN. Yes-or-no questions have 1 and 0. By output where
                several have losses; those that predict no classes keep their values.
            dropout: Let Dropout nodes drop, as in training, by masks of the trainer's seed (Monte Carlo dropout).
            samples: With ``dropout``: how often to predict each example, along a new first axis [samples, N, ...].

        Returns:
            The array of the output; where the model has several, a dictionary by name, for which type checkers want
            :meth:`predict_all`.

        Raises:
            OptionError: `labels` is given, and no output has scores over classes or binary logits; or ``dropout``, and
                no Dropout node drops.
        """
        if labels and (dropout or samples is not None):
            raise OptionError("predict(labels=True) has no samples; leave dropout and samples out, or labels.")
        if labels:
            from onnxtrain.training.inference.evaluation import answers

            return self._by_head(data, target, batch_size, ema, "predict(labels=True)", answers)
        evaluator = self._evaluator(self.objective.forms, ema, dropout=dropout)
        check_samples(evaluator.objective.model, evaluator.objective.modes, samples)
        if dropout:
            given = self.data_adapter.open(self.objective, data, target=target)
            arrays = evaluator.predict(given, batch_size, samples=samples)
        else:
            arrays = self._predicted(evaluator, data, target, batch_size)
        return _only(arrays, alone=len(arrays) == 1)

    def predict_all(self, data: Source, **options: Any) -> dict[str, np.ndarray]:
        """Return what :meth:`predict` does, by name of the output also where the model has one."""
        found: Any = self.predict(data, **options)
        if isinstance(found, dict):
            return found
        outputs = (value.name for value in self.objective.model.graph.outputs if isinstance(value.type, ir.TensorType))
        return {self.objective.output_names[0] if options.get("labels") else str(next(outputs)): found}

    @checks_arguments
    def predict_proba(
        self, data: Source, *, target: TargetNames | None = None, batch_size: int = 256, ema: bool = False
    ) -> np.ndarray:
        """Return class probabilities for inputs, from logits or from a final Softmax or Sigmoid.

        Args:
            data: Inputs in any form that ``fit`` takes; targets are not needed.
            target: A column of a table that is not one of the inputs.
            batch_size: Examples per batch.
            ema: Whether to predict with the moving average of the parameters.

        Returns:
            Probabilities [N, C, ...] over classes, or [N, K] of yes for K questions; one question has those of no and
            yes [N, 2], as in scikit-learn. By output where several have losses, without those that predict no classes.

        Raises:
            OptionError: No output has scores over classes or binary logits.
        """
        from onnxtrain.training.inference.evaluation import has_answers, probabilities

        def found(metric_input: MetricInput, scores: np.ndarray, labels: Sequence[str] | None) -> np.ndarray | None:
            return probabilities(metric_input, scores) if has_answers(metric_input) else None

        return self._by_head(data, target, batch_size, ema, "predict_proba", found)

    def _by_head(
        self,
        data: Source,
        target: TargetNames | None,
        batch_size: int,
        ema: bool,
        caller: str,
        found: Callable[[MetricInput, np.ndarray, Sequence[str] | None], np.ndarray | None],
    ) -> np.ndarray:
        """Apply a function to the predictions of each output that has a loss; by output where there are several."""
        from onnxtrain.training.inference.evaluation import check_answers

        evaluator = self._evaluator(self.objective.forms, ema)
        heads = evaluator.objective.heads
        if not heads:
            raise OptionError(
                f"{caller} needs a loss on targets, which says what predictions are, but the loss is an output."
            )
        check_answers([head.metric_input for head in heads], caller)
        arrays = self._predicted(evaluator, data, target, batch_size, [head.prediction for head in heads])
        labels = [self.data_adapter.labels_of(name) for name, _ in evaluator.objective.targets]
        results = {
            head.name: found(head.metric_input, arrays[str(head.prediction.name)], own)
            for head, own in zip(heads, labels, strict=True)
        }
        by_head = {name: result for name, result in results.items() if result is not None}
        return _only(by_head, alone=len(heads) == 1)

    def _predicted(
        self,
        evaluator: Evaluator,
        data: Source,
        target: TargetNames | None,
        batch_size: int,
        values: Sequence[ir.Value] | None = None,
    ) -> dict[str, np.ndarray]:
        objective, adapter = self.objective, self.data_adapter
        given = adapter.as_given(objective, data, batch_size) or adapter.open(objective, data, target=target)
        return evaluator.predict(given, batch_size, values)

    def _evaluator(
        self, forms: Forms, ema: bool, weighted: bool = False, packed: bool = False, dropout: bool = False
    ) -> Evaluator:
        self._state.check_averages(ema)
        packed = packed or self.config.packed
        key = forms, ema, weighted, packed, dropout
        found = self._evaluators.get(key)
        if found is None:
            with self._lock:
                found = self._evaluators.get(key)
                if found is None:
                    found = self._evaluators[key] = self._new_evaluator(*key)
        return found

    def _new_evaluator(self, forms: Forms, ema: bool, weighted: bool, packed: bool, dropout: bool) -> Evaluator:
        from onnxtrain.training.inference.evaluation import Evaluator  # a step does not need it

        config, objective = self.config, self.objective
        if self._in_inference is None:
            if objective.modes.training or (config.lora is not None and config.lora.drops):
                objective = prepare(config, modes=Modes(), copies=objective.copies, table=objective.table)
            self._in_inference = objective
        found = self._in_inference
        if dropout:
            modes = Modes(dropout=True, seed=config.seed)
            found = prepare(config, modes=modes, copies=objective.copies, table=objective.table)
        return Evaluator(
            found.packing(packed).with_forms(forms).weighting(weighted),
            self.executor.states,
            config.runtime,
            self._state.averages if ema else None,
        )


def _only(arrays: dict[str, np.ndarray], *, alone: bool) -> np.ndarray:
    """Return an only array; several stay a dictionary, whatever the type says."""
    found: Any = next(iter(arrays.values())) if alone else arrays
    return found  # type: ignore[no-any-return]
