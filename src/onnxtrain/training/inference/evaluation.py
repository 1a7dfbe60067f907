"""Evaluate and predict with live training weights: the buffers of the training, the graph of the saved model."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.data import Batch, Dataset
from onnxtrain.data.conversion import Array
from onnxtrain.distributed.communicator import Communicator, Single, check_same
from onnxtrain.errors import DataError, OnnxTrainError, OptionError
from onnxtrain.graph import Builder
from onnxtrain.graph.clone import all_nodes
from onnxtrain.graph.upstream.sessions import is_foreign
from onnxtrain.losses.base import Loss
from onnxtrain.losses.cross_entropy import NextToken
from onnxtrain.losses.heads import HeadMetric, Metrics
from onnxtrain.losses.partial_batches import batch_axes, joined_axis
from onnxtrain.lowering.lower import lower_entry
from onnxtrain.lowering.training_info.recipe import COUNTERS_KEY, StepEntry
from onnxtrain.metrics.base import MeanAccumulator, MetricInput, of_present
from onnxtrain.metrics.dataset_metrics import sigmoid, softmax
from onnxtrain.runtime.options import RuntimeOptions
from onnxtrain.runtime.states import StateBuffers
from onnxtrain.runtime.step import StepSession
from onnxtrain.runtime.versions import Reading
from onnxtrain.training.objective import Objective

_LARGEST_EXPONENT = 700.0
"""Exponent below the overflow of float64."""

_ROWS = 64
"""Most rows of a batch whose outputs are looked at."""

_PACKED_AFTER = 100
"""Predictions of one version of the weights after which a session packs them: 80 to 300 more save its opening time."""

_MOST_PACKED = 1 << 26
"""Most bytes of weights that a session packs: it has a copy of them, and took 0.8 s to open with 5e7 bytes."""

_SAMPLE = "dropout/sample"
"""Input with the number of a sample and a batch, from which Dropout draws its masks."""

_QUANTIZED = frozenset({"QuantizeLinear", "DequantizeLinear"})
"""Operators that ONNX Runtime computes in integers where weights are constant, which rounds otherwise."""

_WEIGHT = "_weight"
"""Suffix of a loss's name that gives the name of its weight."""


class _Total:
    """Accumulated loss of a dataset: the mean over all terms, or the sum over batches."""

    def __init__(self, loss: Loss | None) -> None:
        self._mean, self._sum = MeanAccumulator(), 0.0
        self._sums = loss is not None and loss.reduction == "sum"

    def add(self, value: float, weight: float) -> None:
        """Add a batch."""
        if self._sums:
            self._sum += value
        else:
            self._mean.add(value, weight)

    @property
    def is_empty(self) -> bool:
        """True where no example, or no label, has counted."""
        return not self._sums and not self._mean.weight

    @property
    def value(self) -> float:
        """The loss so far."""
        return self._sum if self._sums else self._mean.value


@dataclass(frozen=True)
class _Part:
    number: int
    losses: list[tuple[float, float]]
    metrics: list[Any]


class _Packed:
    """Predictions of one version of the weights: how many there were, and the session that has the weights packed."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.calls = itertools.count(1)
        self.session: StepSession | None = None


class Evaluator:
    """Run a model forward on live training weights."""

    def __init__(
        self,
        objective: Objective,
        states: StateBuffers,
        options: RuntimeOptions,
        instead: Mapping[str, str] | None = None,
    ) -> None:
        self._instead = instead or {}
        self.doubts: list[str] = []
        self.objective = objective
        self._states = states
        self._options = options
        self._fixed = objective.fixed_batch
        self._padded: Objective | None = None
        self._axes: dict[str, int | None] = {}
        self._sessions: dict[tuple[str | bool, ...], StepSession] = {}
        self._packed: dict[tuple[str, ...], _Packed] = {}
        self._opening = threading.RLock()
        initializers = objective.model.graph.initializers
        self._read = frozenset(self._instead.get(name, name) for name in initializers if name in states)
        self._outputs = [value for value in objective.model.graph.outputs if isinstance(value.type, ir.TensorType)]
        self._names = tuple(str(value.name) for value in self._outputs)

    def check(self, dataset: Dataset) -> None:
        """Check that a dataset can be evaluated, before any work."""
        if self._fixed is not None and dataset.size is not None and dataset.size % self._fixed.size:
            self._on_padded(dataset.size % self._fixed.size)

    def _on_padded(self, rows: int) -> Objective:
        with self._opening:
            self._padded = self._padded or self.objective.on_real_rows(rows)
            return self._padded

    def evaluate(
        self,
        dataset: Dataset,
        batch_size: int,
        metrics: Metrics,
        communicator: Communicator = Single(),  # noqa: B008 - it has no state
    ) -> dict[str, Any]:
        """Measure loss and metrics; losses with ``reduction="sum"`` are summed, others averaged."""
        with self._states.reading(self._read) as reading:
            return self._measured(dataset, batch_size, metrics, communicator, reading)

    def _measured(
        self, dataset: Dataset, batch_size: int, metrics: Metrics, communicator: Communicator, reading: Reading
    ) -> dict[str, Any]:
        objective = self.objective
        resolved = objective.resolve_metrics(metrics)
        self.check(dataset)
        resolved = [
            each._replace(metric=of_present(each.metric)) if own.form.missing else each
            for each in resolved
            for own in objective.heads
            if own.name == each.head.name
        ]
        losses = {name: _Total(loss) for name, loss in self._losses(objective)}
        states = [each.metric.start() for each in resolved]
        parts: list[_Part] = []
        found: list[tuple[int, int]] = []
        unsure = [head for head in objective.heads if head.assumes_logits]
        for number, batch in self._batches(dataset, batch_size, communicator, found):
            wanted = bool(resolved) or bool(unsure)  # predictions may be large
            of_losses, updated, results = self._part(batch, losses, resolved, reading, predicts=wanted)
            if unsure:
                self.doubts = [text for head in unsure for text in head.doubts(results[head.name])]
                unsure = []
            parts.append(_Part(number, of_losses, updated))
            if communicator.size == 1:
                self._add_up(parts, losses, resolved, states)
        ranks = communicator.gather_objects((parts, sum(rows for rows, _ in found), hash(tuple(found))))
        check_same("In the evaluation", [rows for _, rows, _ in ranks], [content for *_, content in ranks])
        of_all_ranks = [part for of_rank, *_ in ranks for part in of_rank]
        of_all_ranks.sort(key=lambda part: part.number)
        self._add_up(of_all_ranks, losses, resolved, states)
        if all(total.is_empty for total in losses.values()):
            raise DataError(
                f"{dataset.name} has nothing to evaluate: all labels are ignored, or all weights of examples are 0."
            ).about(dataset.name)
        measured = {name: total.value for name, total in losses.items()}
        if objective.several:
            weights = [head.loss.weight for head in objective.heads]
            combined = sum(weight * value for weight, value in zip(weights, measured.values(), strict=True))
            measured = {
                "loss": combined,
                **{f"{head.name}_loss": own for head, own in zip(objective.heads, measured.values(), strict=True)},
            }
        else:
            (combined,) = measured.values()
            measured = {"loss": combined}
            plain = dataset.of_tokens and not dataset.weighted
            if plain and isinstance(objective.loss, NextToken) and objective.loss.is_likelihood:
                measured["perplexity"] = math.exp(min(combined, _LARGEST_EXPONENT))
        return {
            **measured,
            **{each.name: each.metric.result(state) for each, state in zip(resolved, states, strict=True)},
        }

    def _part(
        self, batch: Batch, losses: Collection[str], metrics: Sequence[HeadMetric], reading: Reading, *, predicts: bool
    ) -> tuple[list[tuple[float, float]], list[Any], Mapping[str, np.ndarray]]:
        """Return losses, states of metrics and results of one batch, on request with all predictions."""
        objective, heads = self.objective, {head.name: head for head in self.objective.heads}
        feeds = objective.feeds(batch)
        padded = self._fixed is not None and batch.size < self._fixed.size
        if self._fixed is not None and padded:
            session = self._measuring("padded", self._on_padded(batch.size))
            feeds = self._fixed.filled(feeds)
        else:
            session = self._measuring("whole", objective, predictions=predicts)
        results = session.run(feeds, reading)
        updated = []
        for _, head, metric in metrics:
            own_head = heads[head.name]
            given = results[str((own_head.output if metric.of_output else own_head.prediction).name)]
            real = given[: batch.size] if padded else given
            updated.append(metric.update(metric.start(), feeds[own_head.target_name], real))
        of_losses = [(float(results[name]), float(results[f"{name}{_WEIGHT}"])) for name in losses]
        return of_losses, updated, results

    def add(self, batch: Batch, metrics: Sequence[HeadMetric], states: list[Any]) -> None:
        """Add a training batch to the states of metrics."""
        with self._states.reading(self._read) as reading:
            for piece in [batch] if self._fixed is None else self._fixed.pieces(iter([batch])):
                _, updated, _ = self._part(piece, (), metrics, reading, predicts=True)
                self._add_up([_Part(0, [], updated)], {}, metrics, states)

    def _batches(
        self, dataset: Dataset, batch_size: int, communicator: Communicator, found: list[tuple[int, int]]
    ) -> Iterator[tuple[int, Batch]]:
        """Yield the batches of this rank with their indices among all batches; list rows and checksums of all."""
        rank, size, fixed = communicator.rank, communicator.size, self._fixed
        if size > 1:
            dataset = dataset.shared(lambda number, rows: slice(0, rows if number % size == rank else 0))
        for number, batch in enumerate(dataset.batches(batch_size if fixed is None else fixed.size)):
            found.append((batch.total, batch.content))
            if batch.size or size == 1:
                yield from ((number, piece) for piece in ([batch] if fixed is None else fixed.pieces(iter([batch]))))

    @staticmethod
    def _add_up(
        parts: list[_Part], losses: Mapping[str, _Total], metrics: Sequence[HeadMetric], states: list[Any]
    ) -> None:
        for part in parts:
            for total, of_loss in zip(losses.values(), part.losses, strict=True):
                total.add(*of_loss)
            for index, of_metric in enumerate(part.metrics):
                states[index] = metrics[index].metric.merge(states[index], of_metric)
        parts.clear()

    def _losses(self, objective: Objective) -> list[tuple[str, Loss | None]]:
        losses = [head.loss for head in objective.heads]
        if objective.several:
            return list(zip(objective.part_names, losses, strict=True))
        return [(objective.names.loss, losses[0] if losses else None)]

    def predict(
        self,
        data: Dataset | Mapping[str, np.ndarray],
        batch_size: int,
        values: Sequence[ir.Value] | None = None,
        samples: int | None = None,
    ) -> dict[str, np.ndarray]:
        """Predict outputs for a dataset, by name, concatenated along the example axis, behind one of samples."""
        if values is None:
            names, values = self._names, self._outputs
        else:
            names = tuple([str(value.name) for value in values])
        session, fixed = self._session_of(names, values), self._fixed
        if not isinstance(data, Dataset):
            results, common = session.run(data), self.objective.common
            count = next(len(array) for name, array in data.items() if name not in common)
            return {name: self._joined(name, [results[name]], [count]) for name in names}
        parts: list[dict[str, list[np.ndarray]]] = [{name: [] for name in names} for _ in range(samples or 1)]
        rows: list[int] = []
        batches = data.batches(batch_size if fixed is None else fixed.size)
        with self._states.reading(self._read) as reading:
            for number, batch in enumerate(batches if fixed is None else fixed.pieces(batches)):
                rows.append(batch.size)
                inputs = batch.inputs if fixed is None else fixed.filled(batch.inputs)
                for sample, part in enumerate(parts):
                    draw = {_SAMPLE: np.asarray(sample * 1_000_003 + number)} if self.objective.modes.dropout else {}
                    results = session.run({**inputs, **draw}, reading)
                    for name in names:
                        part[name].append(results[name])
        found = [data.in_units({name: self._joined(name, own, rows) for name, own in part.items()}) for part in parts]
        return found[0] if samples is None else {name: np.stack([own[name] for own in found]) for name in names}

    def _session_of(self, names: tuple[str, ...], values: Sequence[ir.Value]) -> StepSession:
        """Return the session that computes values; after many predictions without a change, one that packs weights."""
        packed, version = self._packed.get(names), self._states.version
        if packed is None or packed.version != version:
            packed = self._packed[names] = _Packed(version)
        if packed.session is None and next(packed.calls) == _PACKED_AFTER:
            packed.session = self._pack(names, version)
        live = packed.session or self._sessions.get(names)
        return self._opened(names, lambda: self._predicting(names, values)) if live is None else live

    def _pack(self, names: tuple[str, ...], version: int) -> StepSession | None:
        """Return a session with the weights of one version; ``None`` where it would not be worth its memory."""
        states, graph = self._states, self.objective.model.graph
        size = sum(math.prod(states.kind(name)[1]) * states.kind(name)[0].itemsize for name in self._read)
        quantized = not _QUANTIZED.isdisjoint(node.op_type for node in all_nodes(graph))
        foreign = any(value.dtype is not None and is_foreign(value.dtype) for value in (*graph.inputs, *graph.outputs))
        if not 0 < size <= _MOST_PACKED or quantized or foreign or states.on_device or not states.is_settled:
            return None
        with contextlib.suppress(MemoryError, OnnxTrainError):
            with states.snapshot(self._read) as current:
                weights = {name: np.array(array) for name, array in current.items()}
            session = self._session(self.objective, with_loss=False, results=names, weights=weights)
            return session if states.version == version else None
        return None

    def _opened(self, key: tuple[str | bool, ...], make: Callable[[], StepSession]) -> StepSession:
        """Return the session of this key, made at its first use."""
        if key not in self._sessions:
            with self._opening:
                if key not in self._sessions:
                    self._sessions[key] = make()
        return self._sessions[key]

    def _predicting(self, names: tuple[str, ...], values: Sequence[ir.Value]) -> StepSession:
        self._axes |= batch_axes(self.objective.model, values)
        return self._session(self.objective, with_loss=False, results=names)

    def find_doubts(self, inputs: dict[str, np.ndarray]) -> list[str]:
        """Return hints about outputs of the first rows that may be probabilities, but are taken for logits."""
        heads = [head for head in self.objective.heads if head.assumes_logits]
        rows = inputs if self.objective.time_first is not None else self.objective.some_rows(inputs, slice(_ROWS))
        found = self.runner([head.name for head in heads])(rows if self._fixed is None else self._fixed.filled(inputs))
        return [text for head in heads for text in head.doubts(found[head.name])]

    def runner(self, results: Sequence[str]) -> Callable[[Mapping[str, np.ndarray]], Mapping[str, np.ndarray]]:
        """Return a function that computes results for inputs by name, with the current weights."""
        session = self._session(self.objective, with_loss=False, results=results)
        return lambda feeds: session.run(dict(feeds))

    def _joined(self, name: str, parts: list[np.ndarray], rows: list[int]) -> np.ndarray:
        """Concatenate the results of all batches, without the padding of the last one."""
        if not parts[0].ndim:
            return np.stack(parts)
        fixed = self._fixed
        if len(parts) == 1 and (fixed is None or fixed.size == rows[0]):
            return parts[0]
        if name in self._axes:
            axis = self._axes[name]
        else:
            axis = joined_axis(name, parts, rows if fixed is None else [fixed.size] * len(rows))
        if fixed is not None and axis is not None:  # a Reshape may have merged examples with a later axis
            ends = [part.shape[axis] // fixed.size * count for part, count in zip(parts, rows, strict=True)]
            parts = [part[(slice(None),) * axis + (slice(end),)] for part, end in zip(parts, ends, strict=True)]
        return np.concatenate(parts, axis=axis or 0)

    def _measuring(self, key: str, objective: Objective, *, predictions: bool = True) -> StepSession:
        """Return the session with the loss of an objective, and with predictions on request."""
        return self._opened(
            (key, predictions), lambda: self._session(objective, with_loss=True, predictions=predictions)
        )

    def _session(
        self,
        objective: Objective,
        *,
        with_loss: bool,
        predictions: bool = True,
        results: Sequence[str] = (),
        weights: Mapping[str, np.ndarray] | None = None,
    ) -> StepSession:
        """Create a session that reads the states, or has these weights: a step without gradient and update."""
        own = objective.copy()
        graph = own.model.graph
        own.model.metadata_props.clear()  # options of gradients
        results = list(results)
        if with_loss:
            read = [value for head in own.heads for value in (head.prediction, head.output)]
            named = dict.fromkeys(str(value.name) for value in read or (own.prediction,))
            results = list(named) if predictions else []
            op = Builder(graph, own.model.opset_imports[""])
            names = own.part_names or [own.names.loss]
            for name, terms in zip(names, own.build_losses(op), strict=True):
                for suffix, term in (("", terms.loss), (_WEIGHT, terms.weight)):
                    op.Identity(term).ir.name = f"{name}{suffix}"
                    results.append(f"{name}{suffix}")
            graph.inputs.extend(head.target for head in own.heads)
            if own.weights is not None:
                graph.inputs.append(own.weights)
        states = []
        for name in [name for name in graph.initializers if name in self._states]:
            state = self._instead.get(name, name)
            if weights is not None:
                graph.initializers[name].const_value = ir.tensor(weights[state], name=name)
                continue
            value = graph.initializers.pop(name)
            value.const_value = None
            value.name = state
            states.append(value.name)
            graph.inputs.append(value)
        if own.modes.dropout:
            graph.inputs.append(ir.Value(name=_SAMPLE, type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape(())))
            own.model.metadata_props[COUNTERS_KEY] = json.dumps([_SAMPLE])
        step = lower_entry(StepEntry(own.model, states, {}, results), kernels=False)
        return StepSession(step, self._states, self._options, kernels=False, bind=weights is None)


def has_answers(metric_input: MetricInput) -> bool:
    """Return whether predictions are scores over classes or binary logits."""
    return metric_input.predicts in ("classes", "binary")


def check_answers(heads: Sequence[MetricInput], what: str) -> None:
    """Check that the predictions of at least one head can be converted to probabilities."""
    if not any(map(has_answers, heads)):
        first = heads[0]
        kind = "are numbers" if first.predicts == "numbers" else "may be anything"
        raise OptionError(
            f"{what} needs scores over classes, or binary logits, but with the loss {first.loss} predictions "
            f"{kind}; call predict() for the outputs."
        ).about(what, got=first.loss)


def probabilities(metric_input: MetricInput, scores: Array) -> Array:
    """Convert scores to probabilities of the same shape."""
    if metric_input.predicts == "classes":
        found = scores if metric_input.probabilities else softmax(scores.astype(np.float64), metric_input.axis)
        return np.asarray(found, scores.dtype)
    yes = scores if metric_input.probabilities else np.asarray(sigmoid(scores.astype(np.float64)), scores.dtype)
    if scores.ndim > 2 or (scores.ndim == 2 and scores.shape[1] != 1):
        return yes
    column = yes.reshape(-1, 1)
    return np.concatenate([1 - column, column], axis=1)


def answers(metric_input: MetricInput, scores: Array, labels: Sequence[str] | None) -> Array:
    """Return the most probable class of every example, or 1 for yes and 0 for no: its label if there are labels."""
    if not has_answers(metric_input):
        return scores
    if metric_input.predicts == "binary":
        threshold = 0.5 if metric_input.probabilities else 0.0
        found = np.where(np.isnan(scores), -1, scores > threshold).astype(np.int64)
        found, classes = found[:, 0] if found.ndim == 2 and found.shape[1] == 1 else found, 2
    else:
        axis, classes = metric_input.axis, scores.shape[metric_input.axis]
        found = np.where(np.isnan(scores).any(axis), -1, scores.argmax(axis)).astype(np.int64)
    if labels is None:
        return found
    names = [*labels, *map(str, range(len(labels), classes)), "-1"]
    return np.asarray(names)[found]
