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
from onnxtrain.data.conversion import (
    all_finite,
    is_array_like,
    kind_of,
    symbol_sizes,
    to_numpy,
)
from onnxtrain.data.data_names import Columns, DataNames
from onnxtrain.data.image_form import Pixels
from onnxtrain.data.iterable_dataset import IterableDataset
from onnxtrain.data.labels import is_order_known, learn_labels, no_labels
from onnxtrain.data.map_dataset import ExampleSource
from onnxtrain.data.naming import (
    NamedColumns,
    NoSuchArrayError,
    column_of,
    columns_of_table,
    is_batch_list,
    is_frame,
    match_batch,
)
from onnxtrain.data.opening import open_dataset
from onnxtrain.data.packing import PackedSequences
from onnxtrain.errors import DataError
from onnxtrain.errors.registries import Registry
from onnxtrain.losses.base import Forms, Loss
from onnxtrain.losses.heads import LossHead, tensor_spec
from onnxtrain.losses.partial_batches import batch_axes
from onnxtrain.training.config import TrainingConfig
from onnxtrain.training.objective import Objective

Adapting = Callable[[Dataset, LossHead, str | None], Dataset]
"""Converts the targets of a dataset, or its named targets, to the form of a loss."""


class DataAdapter:
    """Convert data to the inputs and targets of an objective, using column names and labels of earlier data."""

    def __init__(
        self,
        names: DataNames,
        *,
        numbered: bool = False,
        folder: Path | None = None,
        recorded: tuple[str, ...] = (),
    ) -> None:
        self.names = names
        self.folder = folder
        self.recorded = recorded
        self.numbered = numbered
        self.expected_labels: tuple[str, ...] | None = None
        self.paired = 0
        self._labels_are_new = self.labels_are_assumed = False
        self._learning = threading.RLock()
        self._plan: _Plan | None = None

    def copy(self) -> DataAdapter:
        """Return an adapter with the same names."""
        return DataAdapter(self.names, numbered=self.numbered, folder=self.folder, recorded=self.recorded)

    def learn(self, columns: Columns, left_out: Iterable[str | None] = ()) -> None:
        """Record the column names of more data; known names do not change."""
        with self._learning:
            self.names = self.names.learned(columns, left_out)

    def learn_pixels(self, pixels: Pixels | None) -> None:
        """Record the normalization of the images that are trained on."""
        if pixels is not None:
            with self._learning:
                self.names = dataclasses.replace(self.names, pixels=pixels)

    @property
    def labels(self) -> tuple[str, ...] | None:
        """Text labels in the order of the classes."""
        return self.names.labels

    @labels.setter
    def labels(self, labels: Sequence[str] | None) -> None:
        with self._learning:
            self.names = dataclasses.replace(self.names, labels=None if labels is None else tuple(labels))

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
            given = targets_by_output(objective.heads, targets)
            for name, head in heads:
                array = given[head.name]
                if not isinstance(array, np.ndarray):
                    array = to_numpy(array, name or "the target array", head.spec.hint)
                found[name] = head.adapt(array, self.labels if name is None else None)
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
        if plan is None or not known or any(head.hold_ignored(found[name]) for name, head in unsure):
            plan, known = self._planned(objective, arrays, found), False
            objective = plan.objective
            unsure = [(name, head) for name, head in objective.targets if not head.are_classes(found[name])]
        beside: dict[str, Any] = {name: array for name, array in found.items() if name is not None}
        if objective.weights is not None:
            beside[str(objective.weights.name)] = sample_weight
        batch = plan.reader.convert(arrays | beside if beside else arrays, found.get(None), "the batch", known=known)
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
        forms = tuple(head.form_of(targets[name], sizes) for name, head in objective.targets)
        objective = objective.with_form(forms if objective.several else next(iter(forms), None))
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

    def open(self, objective: Objective, source: Any, *, target: str | None = None) -> Dataset:
        """Open data for prediction; targets are optional."""
        dataset = open_dataset(
            Reading.of(objective, self.folder).read(source),
            self.names.specs(objective.inputs),
            target=target,
            target_spec=objective.heads[0].spec if objective.heads else None,
            need_target=False,
            validate=False,
        )
        objective.validate(dataset, labels=False)
        return dataset

    def open_with_targets(
        self,
        objective: Objective,
        source: Any,
        *,
        target: str | None,
        sample_weight: Any,
        learning: bool,
        config: TrainingConfig,
    ) -> tuple[Dataset, Objective]:
        """Open data with targets and weights, in the types that the losses read, and check all values."""
        inputs = self.names.specs(objective.inputs)
        reading = dataclasses.replace(Reading.of(objective, self.folder), config=config, paired=self.paired)
        source = reading.read(source)
        source, weights = with_weights(source, sample_weight, objective.inputs)
        if isinstance(weights, str) and isinstance(source, ExampleSource):
            raise DataError(
                f"sample_weight is {weights!r}, but {source.name} has no column of weights; give the weights "
                "themselves, one per row."
            )
        named = weights if isinstance(weights, str) else None
        if objective.heads:
            adapt = self._adapt if learning else self._adapt_complete
            dataset, forms = open_with_targets(
                objective, source, inputs=inputs, target=target, adapted=adapt, weights=named
            )
            weighted = weights is not None or (dataset.weighted and not learning)
            objective = objective.with_form(forms).weighting(weighted)
        else:
            dataset = open_dataset(source, inputs, target=target, need_target=False, validate=False)
            objective = objective.weighting(weights is not None)
        dataset = objective.accept(dataset, weights)
        if learning:
            self.learn(dataset.columns, (target, named))
            self.learn_pixels(dataset.pixels)
        elif not objective.heads:
            self.learn(dataset.columns, (target,))
        return dataset, objective

    def _adapt(self, dataset: Dataset, head: LossHead, name: str | None = None) -> Dataset:
        """Convert targets to the form of the loss; for a single loss, text labels become class indices."""
        if name is not None:
            return dataset.adapting(head.adapt, name)
        with self._learning:
            labels = self._labels_for(dataset, head)
        return dataset.adapting(lambda array: head.adapt(array, labels))

    def _labels_for(self, dataset: Dataset, head: LossHead) -> tuple[str, ...] | None:
        """Return the labels that convert the targets, which the first text labels decide."""
        found = dataset.targets
        if found is not None and self.labels is None and head.take_labels:
            if kind_of(found.dtype) != "string":
                self.numbered = True
            elif self.numbered:
                raise DataError(
                    "the targets are text labels, but earlier data had class indices, so that the class of each label "
                    "is unknown; give labels, or class indices, for all data."
                )
            elif self.expected_labels is not None:
                self.labels = self.expected_labels
            else:
                orders = known_orders(dataset, head, self.recorded)
                self.labels = learn_labels(found, head.classes, orders)
                self._labels_are_new = True
                self.labels_are_assumed = not is_order_known(self.labels, orders)
        return self.labels

    def _adapt_complete(self, dataset: Dataset, head: LossHead, name: str | None = None) -> Dataset:
        """Convert targets like :meth:`_adapt`, but refuse to learn labels from data that lack some of the classes."""
        with self._learning:
            before = self.labels
            result = self._adapt(dataset, head, name)
            learned, classes = self.labels, head.classes
            if before is None and learned is not None and classes is not None and len(learned) < classes:
                self.labels = None
                raise DataError(no_labels(learned, classes))
            return result

    def take_new_labels(self) -> tuple[str, ...] | None:
        """Return the labels that were learned since the last call, or ``None``."""
        with self._learning:
            new, self._labels_are_new = self._labels_are_new, False
        return self.labels if new else None


def known_orders(dataset: Dataset, head: LossHead, recorded: Sequence[str]) -> list[Sequence[str]]:
    """Return orders of labels that are known before training: of all classes of the model and of the data's numbers."""
    of_model = [recorded] if recorded and len(recorded) == head.classes else []
    return [*of_model, *([dataset.declared_labels] if dataset.declared_labels else [])]


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
    """

    loss: Loss | None
    folder: Path | None
    config: TrainingConfig | None = None
    paired: int = 0

    @classmethod
    def of(cls, objective: Objective, folder: Path | None) -> Reading:
        """Return the settings of a prediction."""
        return cls(objective.heads[0].loss if objective.heads else None, folder)

    def read(self, source: Any) -> Any:
        """Return data of plugins' kinds as examples, and other data as they are.

        Raises:
            DataError: The data cannot be read, or do not fit the loss.
        """
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
    weights = None if objective.weights is None else tensor_spec(objective.weights)
    if weights is not None and objective.batched:  # the last batch may be short
        weights = dataclasses.replace(weights, shape=(None,))
    beside = [name for name, _ in objective.targets if name is not None] + ([] if weights is None else [weights.name])
    reader = IterableDataset((), specs, others=beside, whole=True)
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
    found, targets = match_batch(inputs, specs, "the batch", need_target=False)
    if targets is not None:
        raise DataError(f"The batch has {len(inputs)} arrays, but the model has {len(specs)} inputs.")
    return found


def _parts_of_batch(objective: Objective, batch: Any, sample_weight: Any) -> tuple[Any, Any, Any]:
    """Return inputs, targets and weights of a batch that holds the targets, in the forms that ``fit`` takes."""
    if not isinstance(batch, Mapping | tuple):
        raise DataError("This loss needs targets; give them to train_step(inputs, targets).")
    batch, sample_weight = with_weights(batch, sample_weight, objective.inputs)
    heads = objective.heads
    if len(heads) > 1:
        inputs, targets = batch if isinstance(batch, tuple) and len(batch) == 2 else (batch, batch)
        return inputs, targets_by_output(heads, targets), sample_weight
    inputs, targets = match_batch(batch, objective.inputs, "the batch")
    return inputs, targets, sample_weight


def open_with_targets(
    objective: Objective,
    source: Any,
    *,
    inputs: Sequence[TensorSpec],
    target: str | None,
    adapted: Adapting,
    weights: str | None = None,
) -> tuple[Dataset, Forms]:
    """Open data with targets; return the dataset and the forms of its targets. Values are not checked yet."""
    beside = [] if weights is None else [weights]
    if weights is not None:
        source = with_named(source, weights, inputs)
    heads = objective.heads
    axes = batch_axes(objective.model, [head.prediction for head in heads])
    for head in heads:
        head.check_batch_axis(axes.get(str(head.prediction.name)))
    if len(heads) == 1:
        (head,) = heads
        if isinstance(source, tuple) and len(source) == 2 and isinstance(source[1], Mapping):
            source = (source[0], targets_by_output(heads, source[1])[head.name])
        dataset = open_dataset(source, inputs, target=target, validate=False, others=beside)
        dataset = adapted(dataset, head, None)
        return dataset, head.form_of_dataset(dataset)
    if target is not None:
        raise DataError(
            f"target={target!r} names one target, but {len(heads)} outputs have losses; name the arrays of targets "
            f"like the outputs: {', '.join(head.name for head in heads)}."
        )
    if isinstance(source, tuple) and len(source) == 2 and (isinstance(source[1], Mapping) or is_array_like(source[1])):
        source = (source[0], targets_by_output(heads, source[1]))
    names = [head.name for head in heads]
    dataset = open_dataset(source, inputs, need_target=False, validate=False, others=[*names, *beside])
    forms = []
    for head in heads:
        dataset = adapted(dataset, head, head.name)
        forms.append(head.form_of_dataset(dataset, head.name))
    return dataset, tuple(forms)


def with_named(source: Any, weights: str, inputs: Sequence[TensorSpec]) -> Any:
    """Make weights an array of their own: move their column out of a table of inputs."""
    if not isinstance(source, tuple) or len(source) != 2 or isinstance(source[0], Mapping):
        return source
    table, targets = source
    if is_frame(table) and len(inputs) == 1:
        keys = columns_of_table(table, "the table")
        if weights in keys:
            rest = {name: column_of(table, key, name) for name, key in keys.items() if name != weights}
            features = NamedColumns(np.stack(list(rest.values()), axis=1), tuple(rest))
            return {inputs[0].name: features, weights: column_of(table, keys[weights], weights)}, targets
    raise NoSuchArrayError(
        f"sample_weight is {weights!r}, but the inputs have no column of this name; give the weights themselves, or a "
        "table with them."
    )


def with_weights(source: Any, weights: Any, inputs: Sequence[TensorSpec]) -> tuple[Any, Any]:
    """Separate data and sample weights: the given ones, or the third item of (inputs, targets, weights)."""
    triple = isinstance(source, tuple) and len(source) == 3
    flat = triple and len(inputs) == 2 and all(is_array_like(part) for part in source)
    if not triple or flat or is_batch_list(source) or isinstance(source[2], Mapping):
        return source, weights
    if weights is not None and not isinstance(weights, str):
        raise DataError("The data are (inputs, targets, weights), and sample_weight is given, too; leave one out.")
    return source[:2], source[2]


def targets_by_output(heads: Sequence[LossHead], targets: Any) -> dict[str, Any]:
    """Return the targets of one step by output name."""
    if len(heads) == 1 and (isinstance(targets, np.ndarray) or not isinstance(targets, Mapping)):
        return {heads[0].name: targets}
    names = [head.name for head in heads]
    if not isinstance(targets, Mapping):
        raise DataError(
            f"{len(heads)} outputs have losses, but the targets are a {type(targets).__name__}; give a mapping with "
            f"{', '.join(names)}."
        )
    for name in names:
        if name not in targets:
            raise DataError(
                f"The targets of {name!r} are missing; got {', '.join(map(str, targets)) or 'none'}."
            ).about(name, got=[*targets])
    return {name: targets[name] for name in names}
