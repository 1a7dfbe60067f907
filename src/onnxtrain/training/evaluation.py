"""Evaluate and predict with the weights that are being trained: same buffers, the graph as it is saved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.graph import Builder
from onnxtrain.graph.passes import clean
from onnxtrain.lowering.lower import StepGraph, drop_unused_inputs
from onnxtrain.runtime.options import RuntimeOptions
from onnxtrain.runtime.states import StateBuffers
from onnxtrain.runtime.step import StepSession
from onnxtrain.training.data import Dataset
from onnxtrain.training.metrics import MeanAccumulator
from onnxtrain.training.partial import FixedBatch, batch_axes, joined_axis, on_real_rows
from onnxtrain.training.subject import Subject
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
        self._fixed = FixedBatch.of(subject.model.graph)
        self._with_loss: StepSession | None = None
        self._partial: StepSession | None = None
        self._padded: Subject | None = None
        self._axes: dict[str, int | None] | None = None
        self._plain: StepSession | None = None
        self._outputs = [
            str(value.name) for value in subject.model.graph.outputs if isinstance(value.type, ir.TensorType)
        ]

    def check(self, dataset: Dataset) -> None:
        """Find out before any work whether a dataset can be measured.

        Raises:
            DataError: Its last batch would have to be padded, and padding cannot be left out of the loss.
        """
        if self._fixed is not None and dataset.size is not None and dataset.size % self._fixed.size:
            self._padded = self._padded or on_real_rows(self.subject, self._fixed, dataset.size % self._fixed.size)

    def evaluate(self, dataset: Dataset, batch_size: int, metrics: Sequence[Any]) -> dict[str, float]:
        """Averages of loss and metrics over a dataset.

        Raises:
            DataError: A batch would have to be padded, and padding cannot be left out of the loss.
        """
        resolved = self.subject.resolve_metrics(metrics)
        self.check(dataset)
        prediction = str(self.subject.prediction.name)
        output = prediction if self.subject.output is None else str(self.subject.output.name)
        means = {name: MeanAccumulator() for name in ("loss", *(metric.name for metric in resolved))}
        batches = dataset.batches(batch_size if self._fixed is None else self._fixed.size)
        for batch in batches if self._fixed is None else self._fixed.pieces(batches):
            feeds: dict[str, np.ndarray] = dict(batch.inputs)
            if self._fixed is not None and batch.size < self._fixed.size:
                session, feeds = self._on_real_rows(batch.size), self._fixed.filled(feeds)
            else:
                session = self._with_loss = self._with_loss or self._session(self.subject, with_loss=True)
            if batch.targets is not None:
                feeds[self._names.target] = batch.targets
            results = session.run(feeds)
            means["loss"].add(float(results[self._names.loss]), float(results[_WEIGHT]))
            for metric in resolved:
                assert batch.targets is not None
                found = results[output if metric.of_output else prediction]
                real = found[: batch.size] if session is self._partial else found
                means[metric.name].add_terms(metric.measure(batch.targets, real))
        return {name: mean.value for name, mean in means.items()}

    def predict(self, dataset: Dataset, batch_size: int) -> dict[str, np.ndarray]:
        """All tensor outputs for a dataset, by name, put together along the axis of the examples.

        Raises:
            DataError: Nothing tells which axis of an output that is, or a batch cannot be filled up.
        """
        if self._plain is None:
            self._plain = self._session(self.subject, with_loss=False)
        if self._axes is None:
            outputs = [value for value in self.subject.model.graph.outputs if value.name in self._outputs]
            self._axes = batch_axes(self.subject.model, outputs)
        fixed = self._fixed
        parts: dict[str, list[np.ndarray]] = {name: [] for name in self._outputs}
        rows: list[int] = []
        batches = dataset.batches(batch_size if fixed is None else fixed.size)
        for batch in batches if fixed is None else fixed.pieces(batches):
            results = self._plain.run(batch.inputs if fixed is None else fixed.filled(batch.inputs))
            rows.append(batch.size)
            for name in self._outputs:
                parts[name].append(np.array(results[name]))
        return {name: self._joined(name, part, rows) for name, part in parts.items()}

    def _joined(self, name: str, parts: list[np.ndarray], rows: list[int]) -> np.ndarray:
        """The results of all batches as one array, without the padding of the last."""
        if not parts[0].ndim:
            return np.stack(parts)
        assert self._axes is not None
        fixed, axis = self._fixed, self._axes[name]
        if axis == 0:
            axis = joined_axis(name, parts, rows if fixed is None else [fixed.size] * len(rows))
        if fixed is not None and axis is not None:
            parts = [part[(slice(None),) * axis + (slice(count),)] for part, count in zip(parts, rows, strict=True)]
        return np.concatenate(parts, axis=axis or 0)

    def _on_real_rows(self, rows: int) -> StepSession:
        """The session for a padded batch, with the loss on its real examples."""
        if self._partial is None:
            assert self._fixed is not None
            self._padded = self._padded or on_real_rows(self.subject, self._fixed, rows)
            self._partial = self._session(self._padded, with_loss=True)
        return self._partial

    def _session(self, subject: Subject, *, with_loss: bool) -> StepSession:
        model = subject.model.clone()
        graph = model.graph
        subject = _on_copy(subject, model)
        values = {output.name: output for node in graph for output in node.outputs}
        values |= {value.name: value for value in (*graph.inputs, *graph.initializers.values())}
        read = [value.name for value in (self.subject.prediction, self.subject.output) if value is not None]
        names = list(dict.fromkeys(map(str, read))) if with_loss else list(self._outputs)
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


def _on_copy(subject: Subject, model: ir.Model) -> Subject:
    values = {output.name: output for node in model.graph for output in node.outputs}
    values |= {value.name: value for value in (*model.graph.inputs, *model.graph.initializers.values())}
    target = subject.target
    if target is not None:
        target = ir.Value(name=target.name, type=target.type, shape=target.shape)
    prediction = values[subject.prediction.name]
    return Subject(model, subject.loss, prediction, target, [], {}, subject.from_probabilities)
