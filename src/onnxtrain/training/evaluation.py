"""Evaluate and predict with the weights that are being trained: same buffers, the graph as it is saved."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.errors import DataError
from onnxtrain.graph import Builder
from onnxtrain.graph.passes import clean
from onnxtrain.runtime.options import RuntimeOptions
from onnxtrain.runtime.states import StateBuffers
from onnxtrain.runtime.step import StepSession
from onnxtrain.training.data import Batch, Dataset
from onnxtrain.training.metrics import MeanAccumulator
from onnxtrain.training.subject import Subject
from onnxtrain.training_info.lower import StepGraph, drop_unused_inputs
from onnxtrain.training_info.recipe import Names

_WEIGHT = "loss_weight"


class Evaluator:
    """Runs a model forward on the live weights.

    Args:
        subject: The model without training modes, and its loss.
        states: Buffers of the training; initializers named in it are read from there.
        options: Threads and providers.
        names: What target and loss are called.
    """

    def __init__(self, subject: Subject, states: StateBuffers, options: RuntimeOptions, names: Names) -> None:
        self.subject = subject
        self.target_spec = subject.target_spec
        self._states = states
        self._options = options
        self._names = names
        self._with_loss: StepSession | None = None
        self._plain: StepSession | None = None
        self._outputs = [
            str(value.name) for value in subject.model.graph.outputs if isinstance(value.type, ir.TensorType)
        ]

    def evaluate(self, dataset: Dataset, batch_size: int, metrics: Sequence[Any]) -> dict[str, float]:
        """Averages of loss and metrics over a dataset."""
        if self._with_loss is None:
            self._with_loss = self._session(with_loss=True)
        resolved = self.subject.resolve_metrics(metrics)
        prediction = str(self.subject.prediction.name)
        means = {name: MeanAccumulator() for name in ("loss", *(metric.name for metric in resolved))}
        for batch in self._batches(dataset, batch_size):
            feeds: dict[str, np.ndarray] = dict(batch.inputs)
            if batch.targets is not None:
                feeds[self._names.target] = batch.targets
            results = self._with_loss.run(feeds)
            means["loss"].add(float(results[self._names.loss]), float(results[_WEIGHT]))
            for metric in resolved:
                assert batch.targets is not None
                means[metric.name].add_terms(metric.measure(batch.targets, results[prediction]))
        return {name: mean.value for name, mean in means.items()}

    def predict(self, dataset: Dataset, batch_size: int) -> dict[str, np.ndarray]:
        """All tensor outputs for a dataset, by name."""
        if self._plain is None:
            self._plain = self._session(with_loss=False)
        fixed = fixed_batch_size(self.subject.model.graph)
        parts: dict[str, list[np.ndarray]] = {name: [] for name in self._outputs}
        for batch in dataset.batches(fixed or batch_size):
            results = self._plain.run(batch.inputs if fixed is None else _filled(batch, fixed))
            for name in self._outputs:
                found = np.array(results[name])
                parts[name].append(found[: batch.size] if fixed is not None and found.ndim else found)
        return {name: np.concatenate(part) if part[0].ndim else np.stack(part) for name, part in parts.items()}

    def _batches(self, dataset: Dataset, batch_size: int) -> Iterator[Batch]:
        """Batches in order; a model with a fixed batch size gets whole batches only.

        Raises:
            DataError: There is no whole batch.
        """
        fixed, whole = fixed_batch_size(self.subject.model.graph), 0
        for batch in dataset.batches(fixed or batch_size):
            if fixed is None or batch.size == fixed:
                whole += 1
                yield batch
        if not whole:
            raise DataError(
                f"The model takes batches of exactly {fixed} examples, but the data has fewer; "
                "give more data or export the model with a dynamic batch axis."
            )

    def _session(self, *, with_loss: bool) -> StepSession:
        model = self.subject.model.clone()
        graph = model.graph
        subject = _on_copy(self.subject, model)
        values = {output.name: output for node in graph for output in node.outputs}
        values |= {value.name: value for value in graph.inputs}
        names = [str(subject.prediction.name)] if with_loss else list(self._outputs)
        outputs = [values[name] for name in names]
        if with_loss:
            op = Builder(graph, model.opset_imports[""])
            terms = subject.build_loss(op)
            for name, term in ((self._names.loss, terms.loss), (_WEIGHT, terms.weight)):
                identity = op.Identity(term)
                identity.ir.name = name
                outputs.append(identity.ir)
                names.append(name)
            if subject.target is not None:
                graph.inputs.append(subject.target)
        graph.outputs.clear()
        graph.outputs.extend(outputs)
        clean(model)
        states: dict[str, str | None] = {}
        for name in list(graph.initializers):
            if name in self._states:
                value = graph.initializers.pop(name)
                value.const_value = None
                graph.inputs.append(value)
                states[name] = None
        drop_unused_inputs(graph)
        kept = {value.name for value in graph.inputs}
        states = {name: None for name in states if name in kept}
        feeds = tuple(str(value.name) for value in graph.inputs if value.name not in states)
        step = StepGraph(model, states, feeds, tuple(names))
        return StepSession(step, self._states, self._options, kernels=False)


def fixed_batch_size(graph: ir.Graph) -> int | None:
    """The batch size that a model was exported with, or ``None`` where it takes any."""
    for value in graph.inputs:
        if value.shape is not None and len(value.shape) and isinstance(value.shape[0], int):
            return int(value.shape[0])
    return None


def _filled(batch: Batch, size: int) -> dict[str, np.ndarray]:
    """The inputs of a batch, its last example repeated up to the size that the model takes."""
    missing = size - batch.size
    if not missing:
        return batch.inputs
    return {name: np.concatenate([array, np.repeat(array[-1:], missing, 0)]) for name, array in batch.inputs.items()}


def _on_copy(subject: Subject, model: ir.Model) -> Subject:
    values = {output.name: output for node in model.graph for output in node.outputs}
    values |= {value.name: value for value in model.graph.inputs}
    target = subject.target
    if target is not None:
        target = ir.Value(name=target.name, type=target.type, shape=target.shape)
    prediction = values[subject.prediction.name]
    return Subject(model, subject.loss, prediction, target, [], {}, subject.from_probabilities)
