"""Convert a user's data to the arrays that a step graph reads."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from onnxtrain.data import Dataset, TensorSpec
from onnxtrain.data.base import Facts
from onnxtrain.data.conversion import all_finite, are_truth_values, is_number, kind_of, symbol_sizes, to_numpy
from onnxtrain.data.data_names import Columns, DataNames, Labels
from onnxtrain.data.iterable_dataset import IterableDataset
from onnxtrain.data.labels import is_order_known, no_labels
from onnxtrain.data.map_dataset import ExampleSource
from onnxtrain.data.naming import (
    TargetNames,
    Wanted,
    are_targets,
    columns_of_targets,
    split_weights,
    take_column,
    targets_by_name,
)
from onnxtrain.data.opening import open_dataset
from onnxtrain.data.packing import PackedSequences
from onnxtrain.errors import DataError
from onnxtrain.errors.registries import Registry
from onnxtrain.losses.base import Loss
from onnxtrain.losses.heads import LossHead
from onnxtrain.training.config import TrainingConfig
from onnxtrain.training.objective import Objective


class DataAdapter:
    """Convert data to the inputs and targets of an objective, using column names and labels of earlier data."""

    def __init__(
        self,
        names: DataNames,
        numbered: Iterable[str | None] = (),
        folder: Path | None = None,
        recorded: tuple[str, ...] = (),
    ) -> None:
        self.names = names
        self.folder = folder
        self.recorded = recorded
        self._recorded_numbers = _other_numbers(recorded)
        self._numbered = {*numbered}
        self.expected_labels: Labels | None = None
        self.paired = 0
        self._new_labels: dict[str | None, bool] = {}
        self._learning = threading.RLock()
        self._plan: _Plan | None = None

    def __reduce__(self) -> tuple[type[DataAdapter], tuple[Any, ...]]:
        """A copy, here or in another process, has the same names and labels."""
        return DataAdapter, (self.names, self._numbered, self.folder, self.recorded)

    def learn(self, columns: Columns, left_out: Iterable[str | None] = ()) -> None:
        """Record the column names of more data; known names do not change."""
        with self._learning:
            self.names = self.names.learned(columns, left_out)

    def learn_facts(self, facts: Facts | DataNames) -> None:
        """Record what later data need: the normalization of images that are trained on, and settings of plugins."""
        if facts.pixels is not None or facts.kept:
            with self._learning:
                kept = {**self.names.kept, **facts.kept}
                self.names = dataclasses.replace(self.names, pixels=facts.pixels or self.names.pixels, kept=kept)

    def labels_of(self, name: str | None) -> tuple[str, ...] | None:
        """Return the text labels of the only targets, or of those of an output, in the order of the classes."""
        return _own_labels(self.names.labels, name)

    def set_labels(self, labels: Labels | None) -> None:
        """Set the labels: of the only targets, or by output."""
        with self._learning:
            self.names = dataclasses.replace(self.names, labels=labels)

    def _add_labels(self, name: str | None, labels: tuple[str, ...], *, assumed: bool = False) -> None:
        known = self.names.labels
        others = known if isinstance(known, Mapping) else {}
        self._new_labels[name] = assumed
        self.set_labels(labels if name is None else {**others, name: labels})

    def step_feeds(
        self, objective: Objective, inputs: Any, targets: Any, sample_weight: Any
    ) -> tuple[Objective, dict[str, np.ndarray]]:
        """Convert the arrays of one step."""
        if objective.heads and targets is None:
            inputs, targets, sample_weight = _parts_of_batch(objective, inputs, sample_weight)
        objective = objective.weighting(sample_weight is not None)
        arrays = _inputs_by_name(objective.inputs, inputs)
        heads, found = objective.targets, {}
        if heads:
            given = targets_by_name(objective.output_names, targets)
            for name, head in heads:
                array = given[head.name]
                if not isinstance(array, np.ndarray) or array.dtype.hasobject:
                    array = to_numpy(array, name or "the target array", head.spec.hint, may_miss=True)
                if self._recorded_numbers and name is None and self.labels_of(None) is None and head.take_labels:
                    self._decide_by_numbers(array, head)
                found[name] = head.adapt(array, self.labels_of(name))
        plan = self._plan
        forms = [
            (array.dtype, array.shape) if isinstance(array, np.ndarray) else None
            for array in (*arrays.values(), *found.values(), *(() if sample_weight is None else (sample_weight,)))
        ]
        unsure = [(name, head) for name, head in heads if not head.are_classes(found[name])]
        known = (
            plan is not None
            and plan.forms == forms
            and plan.objective is objective
            and plan.names is self.names
            and None not in forms
        )
        if (
            plan is None
            or not known
            or any(found[name].dtype.kind != "f" and head.hold_ignored(found[name]) for name, head in unsure)
        ):
            plan, known = self._planned(objective, arrays, found), False
            objective = plan.objective
            unsure = [(name, head) for name, head in objective.targets if not head.are_classes(found[name])]
        beside: dict[str, Any] = {name: array for name, array in found.items() if name is not None}
        if objective.weights is not None:
            beside[str(objective.weights.name)] = sample_weight
        try:
            batch = plan.reader.convert(
                arrays | beside if beside else arrays, found.get(None), "the batch", known=known
            )
        except DataError:
            if not any(head.hold_ignored(found[name]) for name, head in objective.targets):
                raise
            self._plan = None  # the first batch with missing targets
            objective = self._planned(objective, arrays, found).objective
            return self.step_feeds(objective, inputs, targets, sample_weight)
        for name, head in unsure:
            array = batch.target(name)
            if head.check is not None and array is not None:
                head.check(array, name or "the target array", range(len(array)) if array.ndim else [0])
        if not known:
            self._plan = plan._replace(forms=forms)
            self.learn(plan.reader.columns)
        return objective, objective.feeds(batch)

    def _planned(
        self, objective: Objective, arrays: Mapping[str, Any], targets: Mapping[str | None, np.ndarray]
    ) -> _Plan:
        """Return how to read batches like this one, whose targets decide the form of the losses."""
        sizes = symbol_sizes((spec, np.shape(arrays[spec.name])) for spec in objective.inputs)
        objective = objective.with_forms(tuple(head.form_of(targets[name], sizes) for name, head in objective.targets))
        plan = self._plan
        if plan is not None and plan.objective is objective and plan.names is self.names:
            return plan
        return _Plan([], objective, self.names, _reader(objective, self.names))

    def as_given(self, objective: Objective, source: Any, rows: int) -> dict[str, np.ndarray] | None:
        """Return arrays of at most this many rows that are valid inputs as they are; ``None`` for other data."""
        specs = objective.inputs
        given = {specs[0].name: source} if type(source) is np.ndarray and len(specs) == 1 else source
        if type(given) is not dict or len(given) != len(specs):
            return None
        sizes: dict[int | str | None, int] = {}
        for spec in specs:
            array, shape = given.get(spec.name), spec.shape
            if type(array) is not np.ndarray or array.dtype != spec.dtype or not shape or array.ndim != len(shape):
                return None
            for wanted, size in zip(shape, array.shape, strict=True):
                if wanted is not None and (wanted if type(wanted) is int else sizes.setdefault(wanted, size)) != size:
                    return None
            batch = rows if spec.common else sizes.setdefault(None, len(array))
            if (
                batch != (rows if spec.common else len(array))
                or not 0 < batch <= rows
                or not spec.takes_all
                or not all_finite(array)
            ):
                return None
        return given

    def open(self, objective: Objective, source: Any, *, target: TargetNames | None = None) -> Dataset:
        """Open data for prediction; targets are optional."""
        columns, specs = columns_of_targets(target, objective.output_names), self.names.specs(objective.inputs)
        if columns:
            others = tuple(name for own in columns.values() for name in own)
            target, specs = None, [dataclasses.replace(spec, left_out=(*spec.left_out, *others)) for spec in specs]
        assert target is None or isinstance(target, str)
        return open_dataset(
            Reading.of(objective, self.folder, kept=self.names.kept).read(source),
            specs,
            target=target,
            need_target=False,
        )

    def open_with_targets(
        self,
        objective: Objective,
        source: Any,
        *,
        target: TargetNames | None = None,
        sample_weight: Any = None,
        learning: bool = False,
        config: TrainingConfig | None = None,
    ) -> tuple[Dataset, Objective]:
        """Open data with targets and weights, in the types that the losses read, and check all values."""
        if is_packed(source):
            objective = objective.packing()
        specs, outputs, several = self.names.specs(objective.inputs), objective.output_names, objective.several
        reading = Reading.of(objective, self.folder, config=config, paired=self.paired, kept=self.names.kept)
        source, weights = split_weights(reading.read(source), sample_weight, len(specs))
        column = weights if isinstance(weights, str) else None
        if column is not None and isinstance(source, ExampleSource):
            raise DataError(
                f"sample_weight is {weights!r}, but {source.name} has no column of weights; give the weights "
                "themselves, one per row."
            )
        source = source if column is None else take_column(source, column, specs)
        objective.check_batch_axes()
        by_output = columns_of_targets(target, outputs)
        columns = {name: by_output[head.name] for name, head in objective.targets} if by_output else {}
        only = target if isinstance(target, str) and not by_output else None
        if several and only is not None:
            raise DataError(
                f"target={target!r} names one target, but {len(outputs)} outputs have losses; name the arrays of "
                f"targets like the outputs: {', '.join(outputs)}."
            )
        if outputs and isinstance(source, tuple) and len(source) == 2 and are_targets(source[1]):
            given = targets_by_name(outputs, source[1])
            source = (source[0], given if several else given[outputs[0]])
        targets = [name for own in columns.values() for name in own] or (outputs if several else [])
        beside, alone = [*dict.fromkeys(targets), *([] if column is None else [column])], len(outputs) == 1
        dataset = open_dataset(
            source,
            specs,
            target=only,
            need_target=alone and not columns,
            validate=False,
            others=beside,
            columns=columns,
        )
        with self._learning:
            labels = [self._labels_for(dataset, name, head, learning=learning) for name, head in objective.targets]
        weighted = weights is not None or (dataset.weighted and not learning)
        objective, dataset = objective.reading(dataset, labels, weights, weighted=weighted)
        if config is not None:  # an evaluation without a trainer says this itself
            objective.check_some_counted(dataset)
        if learning or not outputs:
            self.learn(dataset.columns, (only, column, *targets))
        if learning:
            kept = {name: tuple(own) for name, own in by_output.items() if len(own) > 1}
            self.names = dataclasses.replace(self.names, targets=kept)
            self.learn_facts(dataset)
        return dataset, objective

    def _labels_for(
        self, dataset: Dataset, name: str | None, head: LossHead, *, learning: bool
    ) -> tuple[str, ...] | None:
        """Return the labels that convert the targets of a loss, which the first text labels decide."""
        known, found = self.labels_of(name), dataset.values(name)
        if found is None or known is not None or not head.take_labels:
            return known
        if kind_of(found.dtype) != "string" and not (name is None and self._are_recorded(found, head)):
            self._numbered.add(name)
            return None
        if head.asks and are_truth_values(found):
            return None
        if name in self._numbered:
            raise DataError(
                "the targets are text labels, but earlier data had class indices, so that the class of each label "
                "is unknown; give labels, or class indices, for all data."
            )
        # orders that are known before training: of all classes of the model, and of the data's numbers
        complete = [self.recorded] if self.recorded and len(self.recorded) == head.classes else []
        orders = [*complete, *([dataset.declared_labels] if dataset.declared_labels else [])]
        expected = _own_labels(self.expected_labels, name)
        labels = expected or self._learned_labels(found, head, orders)
        if not learning and head.classes is not None and len(labels) < head.classes:
            raise DataError(no_labels(labels, head.classes))
        self._add_labels(name, labels, assumed=not is_order_known(labels, orders))
        if expected:
            del self._new_labels[name]
        return labels

    def _are_recorded(self, found: np.ndarray, head: LossHead) -> bool:
        """Return whether numbers are labels that the file gives its classes, other than the classes' indices."""
        numbers = () if None in self._numbered or head.asks else self._recorded_numbers
        return len(numbers) == head.classes and bool(np.isin(found, numbers).all())

    def _decide_by_numbers(self, array: np.ndarray, head: LossHead) -> None:
        """Let the first batch of numbers decide whether targets are the labels of the file or class indices."""
        if self._are_recorded(array, head):
            self._add_labels(None, self.recorded)
        elif kind_of(array.dtype) != "string":
            self._numbered.add(None)

    def _learned_labels(self, found: np.ndarray, head: LossHead, orders: Sequence[Sequence[str]]) -> tuple[str, ...]:
        return head.learn_labels(found, orders)

    def take_new_labels(self) -> dict[str | None, bool]:
        """Return the names of targets whose labels were learned since the last call, with whether they are assumed."""
        with self._learning:
            new, self._new_labels = self._new_labels, {}
        return new


def _own_labels(labels: Labels | None, name: str | None) -> tuple[str, ...] | None:
    """Return the labels of the only targets, or of those of an output."""
    if labels is None or isinstance(labels, tuple):
        return labels if name is None else None
    return None if name is None else labels.get(name)


def _other_numbers(labels: Sequence[str]) -> tuple[float, ...]:
    """Return labels that are numbers, unless they are the indices of their classes; () for others."""
    if not all(map(is_number, labels)) or list(labels) == [str(index) for index in range(len(labels))]:
        return ()
    return tuple(map(float, labels))


def is_packed(source: Any) -> bool:
    """Return whether data are packed rows of documents."""
    return isinstance(source, PackedSequences) or getattr(source, "pack", None) is not None


@dataclass(frozen=True)
class Reading:
    """Settings that a reader may ask for to convert data: see :func:`onnxtrain.register_reader`.

    Attributes:
        loss: The loss on targets; ``None`` where an output of the model is the loss, or where several have one.
        folder: Folder of the model, which may have a tokenizer; ``None`` for a model in memory.
        config: Settings of the training that the data are for; ``None`` for a prediction.
        paired: Consecutive examples that a step reads together, where the loss compares them; 0 for all.
        kept: Settings of plugins beside a trained model, by plugin: those of the data that it was trained on.
        head: The loss with its output and the form of its targets; ``None`` as for ``loss``.
    """

    loss: Loss | None
    folder: Path | None
    config: TrainingConfig | None = None
    paired: int = 0
    kept: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    head: LossHead | None = None

    @classmethod
    def of(cls, objective: Objective, folder: Path | None, **more: Any) -> Reading:
        """Return the settings of an objective, those of a prediction where there are no more."""
        return cls(head.loss if (head := next(iter(objective.heads), None)) else None, folder, head=head, **more)

    def read(self, source: Any) -> Any:
        """Return data of plugins' kinds as examples, and other data as they are."""
        for reader in READERS.values():
            source = reader(source, self)
        return source


READERS: Final[Registry[Callable[[Any, Reading], Any]]] = Registry(
    "reader", callable, "a function of (source, reading)"
)
"""Readers of plugins."""


class _Plan(NamedTuple):
    """Plan of the last step's batch, which serves those of the same form."""

    forms: list[Any]
    objective: Objective
    names: DataNames
    reader: IterableDataset


def _reader(objective: Objective, names: DataNames) -> IterableDataset:
    """Return the dataset that converts the batches of single steps."""
    specs = [objective.for_any_rows(spec) for spec in names.specs(objective.inputs)]
    weights = objective.weights_spec
    if weights is not None and objective.batched:  # the last batch may be short
        weights = dataclasses.replace(weights, shape=(None,))
    beside = [*(objective.output_names if objective.several else ()), *([] if weights is None else [weights.name])]
    specs += [TensorSpec(name, np.dtype(np.float32), beside=True) for name in beside]
    reader = IterableDataset((), Wanted(specs), whole=True)
    reader.validate()
    for name, head in objective.targets:
        reader = reader.expecting(objective.for_any_rows(head.spec), name)
    return reader if weights is None else reader.with_weights(weights.name, weights)


def _inputs_by_name(specs: Sequence[TensorSpec], inputs: Any) -> dict[str, Any]:
    """Return the inputs of one step by their names: an array, a sequence in the order of the model, or a mapping."""
    if type(inputs) is np.ndarray and len(specs) == 1:
        return {specs[0].name: inputs}
    if type(inputs) is dict and inputs.keys() == {spec.name for spec in specs}:
        return inputs
    if isinstance(inputs, list | tuple) and len(specs) > 1:
        inputs = tuple(to_numpy(part, "an input") if isinstance(part, list) else part for part in inputs)
    elif isinstance(inputs, list):
        inputs = to_numpy(inputs, "the input")
    found, targets = Wanted(specs, need_target=False).of_batch(inputs, "the batch")
    if targets is not None:
        raise DataError(f"The batch has {len(inputs)} arrays, but the model has {len(specs)} inputs.")
    return found


def _parts_of_batch(objective: Objective, batch: Any, sample_weight: Any) -> tuple[Any, Any, Any]:
    """Return inputs, targets and weights of a batch that holds the targets, in the forms that ``fit`` takes."""
    if not isinstance(batch, Mapping | tuple):
        raise DataError("This loss needs targets; give them to train_step(inputs, targets).")
    batch, sample_weight = split_weights(batch, sample_weight, len(objective.inputs))
    if objective.several:
        inputs, targets = batch if isinstance(batch, tuple) and len(batch) == 2 else (batch, batch)
        return inputs, targets_by_name(objective.output_names, targets), sample_weight
    return *Wanted(objective.inputs).of_batch(batch, "the batch"), sample_weight
