"""Convert a user's data to the arrays that a step graph reads."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from onnxtrain.data import Dataset, TargetCheck, TensorSpec
from onnxtrain.data.conversion import (
    all_finite,
    check_finite,
    check_indices,
    check_right_padded,
    check_symbols,
    is_array_like,
    kind_of,
    symbol_sizes,
    to_numpy,
)
from onnxtrain.data.data_names import Columns, DataNames
from onnxtrain.data.image_form import Pixels
from onnxtrain.data.labels import is_order_known, learn_labels, no_labels
from onnxtrain.data.map_dataset import ExampleSource
from onnxtrain.data.naming import (
    NamedColumns,
    NoSuchArrayError,
    check_caches,
    column_of,
    columns_of_table,
    is_batch_list,
    is_frame,
    match_batch,
    named_array,
)
from onnxtrain.data.packing import PackedSequences
from onnxtrain.data.target_checks import check_weights
from onnxtrain.errors import DataError
from onnxtrain.errors.registries import Registry
from onnxtrain.losses.base import Forms, Loss
from onnxtrain.losses.heads import LossHead, Targets, tensor_spec
from onnxtrain.losses.partial_batches import batch_axes
from onnxtrain.training.config import TrainingConfig
from onnxtrain.training.objective import Objective

Adapting = Callable[[Dataset, Targets, str | None], Dataset]
"""Converts the targets of a dataset, or its named targets, to the form of a loss."""


class DataAdapter:
    """Convert data to the inputs and targets of an objective, using column names and labels of earlier data.

    Attributes:
        names: Names of columns and labels in the data.
        numbered: True if the targets seen so far were class indices.
        expected_labels: Labels of the checkpoint to resume from, for text targets.
        folder: Folder of the model, which may have a tokenizer; ``None`` for a model in memory.
        recorded: Labels of the classes that another tool recorded; () where none did.
        paired: Consecutive rows of texts that a loss pairs with each other, as many as a step reads; 0 for all.
    """

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
        self._last_inputs: list[tuple[int, ...]] = []  # shapes of the inputs of the last step, which fit each other
        self._last_shapes: tuple[Any, ...] = ()  # of the last step_feeds: equal shapes imply the same target form

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
        """Convert the arrays of one step.

        Returns:
            The objective for targets of this form, and arrays by input name of its step graph.

        Raises:
            DataError: Arrays do not fit the model, or hold NaN or infinity.
            OptionError: Sample weights are given, but the loss accepts none.
        """
        if objective.targets is not None and targets is None:
            inputs, targets, sample_weight = _parts_of_batch(objective, inputs, sample_weight)
        objective = objective.weighting(sample_weight is not None)
        feeds = self._input_feeds(objective, inputs)
        if objective.targets is not None:
            if objective.others:
                objective, found = self._targets_of_several(objective, targets, feeds)
                feeds |= found
            else:
                objective = self._add_target(objective, targets, feeds)
        if sample_weight is not None:
            assert objective.weights is not None
            spec = dataclasses.replace(tensor_spec(objective.weights), shape=(None,))
            feeds[spec.name] = weights = check_weights(fit_to_spec(sample_weight, spec))
            first = next(iter(targets.values())) if isinstance(targets, Mapping) else targets
            if first is not None and len(weights) != len(first):
                raise DataError(f"sample_weight has {len(weights)} values, but there are {len(first)} targets.")
        return objective, feeds

    def _input_feeds(self, objective: Objective, inputs: Any) -> dict[str, np.ndarray]:
        arrays = by_input_name(objective.inputs, inputs)
        feeds = {}
        for spec in objective.inputs:
            given = arrays[spec.name]
            if is_frame(given):
                (own,) = self.names.specs([spec])
                given, columns = named_array(given, own, repr(spec.name))
                self.learn({} if columns is None else {spec.name: columns})
            feeds[spec.name] = fit_to_spec(given, objective.for_any_rows(spec))
        if [array.shape for array in feeds.values()] != self._last_inputs:
            check_not_empty(feeds, objective)
            _check_sizes(objective.inputs, feeds)
            self._last_inputs = [array.shape for array in feeds.values()]
        check_inputs(feeds)
        return feeds

    def _add_target(self, objective: Objective, targets: Any, feeds: dict[str, np.ndarray]) -> Objective:
        """Add the target of a single loss to the feeds; return the objective for its form."""
        wanted = objective.targets
        assert wanted is not None
        if isinstance(targets, Mapping):
            (targets,) = targets_by_output(objective.heads, targets).values()
        targets = wanted.adapt(_as_array(targets, wanted.spec), self.labels)
        shapes = (targets.dtype, targets.shape, *(feeds[spec.name].shape for spec in objective.inputs))
        classes = wanted.are_classes(targets)  # valid class indices need no further check
        are_new = shapes != self._last_shapes
        if are_new or (not classes and wanted.hold_ignored(targets)):
            sizes = symbol_sizes((spec, feeds[spec.name].shape) for spec in objective.inputs)
            objective = objective.with_form(wanted.form_of(targets, sizes))
            assert objective.targets is not None
            wanted = objective.targets
            classes = wanted.are_classes(targets)
        feeds[wanted.name] = fitted = fit_to_spec(targets, objective.for_any_rows(wanted.spec))
        if are_new:
            _check_rows(targets, wanted.spec, objective.inputs, feeds)
            _check_sizes([*objective.inputs, wanted.spec], feeds)
            self._last_shapes = shapes
        if not classes:
            check_targets(fitted, wanted.check)
        return objective

    def _targets_of_several(
        self, objective: Objective, targets: Any, inputs: Mapping[str, np.ndarray]
    ) -> tuple[Objective, dict[str, np.ndarray]]:
        """Return the objective for the forms of several targets, and the targets by input name of the step graph."""
        heads = objective.heads
        given = targets_by_output(heads, targets)
        arrays = [head.targets.adapt(_as_array(given[head.name], head.targets.spec)) for head in heads]
        shapes = (*((array.dtype, array.shape) for array in arrays), *(array.shape for array in inputs.values()))
        pairs = list(zip(heads, arrays, strict=True))
        if shapes != self._last_shapes or any(head.targets.hold_ignored(array) for head, array in pairs):
            sizes = symbol_sizes((spec, inputs[spec.name].shape) for spec in objective.inputs)
            objective = objective.with_form(tuple(head.targets.form_of(array, sizes) for head, array in pairs))
            self._last_shapes = shapes
        found = {}
        for head, array in zip(objective.heads, arrays, strict=True):
            own = head.targets
            _check_rows(array, own.spec, objective.inputs, inputs)
            found[own.name] = check_targets(fit_to_spec(array, objective.for_any_rows(own.spec)), own.check)
            _check_sizes([*objective.inputs, own.spec], {**inputs, **found})
        return objective, found

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
            pairs = zip(shape, array.shape, strict=True)
            fits = all(sizes.setdefault(wanted, size) == size for wanted, size in pairs if wanted is not None)
            batch = rows if spec.common else sizes.setdefault(None, len(array))
            if (
                not fits
                or batch != (rows if spec.common else len(array))
                or not 0 < batch <= rows
                or not spec.takes_all
                or not all_finite(array)
            ):
                return None
        return None if any(type(wanted) is int and wanted != size for wanted, size in sizes.items()) else given

    def open(self, objective: Objective, source: Any, *, target: str | None = None) -> Dataset:
        """Open data for prediction; targets are optional.

        Raises:
            DataError: The data cannot be read or does not fit the model.
        """
        from onnxtrain.data.opening import open_dataset  # a single step does not need file readers

        targets = objective.targets
        dataset = open_dataset(
            Reading.of(objective, self.folder).read(source),
            self.names.specs(objective.inputs),
            target=target,
            target_spec=None if targets is None else targets.spec,
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
    ) -> tuple[Dataset, Forms | None, Any]:
        """Open data with targets and weights; :meth:`Objective.accept` checks their values.

        Args:
            objective: The loss on its inputs and targets.
            source: The data.
            target: Name of the target in a file with several arrays left.
            sample_weight: One weight per example, or the name of their array or column.
            learning: Whether to learn text labels from data that may lack some of the classes.
            config: Settings of the training.

        Returns:
            The dataset, the forms of the targets, and the weights: an array, their name in the dataset, or ``None``.

        Raises:
            DataError: The data cannot be read or does not fit the model.
        """
        inputs = self.names.specs(objective.inputs)
        reading = dataclasses.replace(Reading.of(objective, self.folder), config=config, paired=self.paired)
        source = reading.read(source)
        source, weights = with_weights(source, sample_weight, objective.inputs)
        if isinstance(weights, str) and isinstance(source, ExampleSource):
            raise DataError(
                f"sample_weight is {weights!r}, but {source.name} has no column of weights; give the weights "
                "themselves, one per row."
            )
        if objective.targets is not None:
            adapt = self._adapt if learning else self._adapt_complete
            named = weights if isinstance(weights, str) else None
            dataset, forms = open_with_targets(
                objective, source, inputs=inputs, target=target, adapted=adapt, weights=named
            )
            return dataset, forms, weights
        from onnxtrain.data.opening import open_dataset  # imported late, as in open

        return open_dataset(source, inputs, target=target, need_target=False, validate=False), None, weights

    def _adapt(self, dataset: Dataset, targets: Targets, name: str | None = None) -> Dataset:
        """Convert targets to the form of the loss; for a single loss, text labels become class indices."""
        if name is not None:
            return dataset.adapting(targets.adapt, name)
        with self._learning:
            labels = self._labels_for(dataset, targets)
        return dataset.adapting(lambda array: targets.adapt(array, labels))

    def _labels_for(self, dataset: Dataset, targets: Targets) -> tuple[str, ...] | None:
        """Return the labels that convert the targets, which the first text labels decide."""
        found = dataset.targets
        if found is not None and self.labels is None and targets.take_labels:
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
                orders = known_orders(dataset, targets, self.recorded)
                self.labels = learn_labels(found, targets.classes, orders)
                self._labels_are_new = True
                self.labels_are_assumed = not is_order_known(self.labels, orders)
        return self.labels

    def _adapt_complete(self, dataset: Dataset, targets: Targets, name: str | None = None) -> Dataset:
        """Convert targets like :meth:`_adapt`, but refuse to learn labels from data that lack some of the classes."""
        with self._learning:
            before = self.labels
            result = self._adapt(dataset, targets, name)
            learned, classes = self.labels, targets.classes
            if before is None and learned is not None and classes is not None and len(learned) < classes:
                self.labels = None
                raise DataError(no_labels(learned, classes))
            return result

    def take_new_labels(self) -> tuple[str, ...] | None:
        """Return the labels that were learned since the last call, or ``None``."""
        with self._learning:
            new, self._labels_are_new = self._labels_are_new, False
        return self.labels if new else None


def known_orders(dataset: Dataset, targets: Targets, recorded: Sequence[str]) -> list[Sequence[str]]:
    """Return orders of labels that are known before training: of all classes of the model, and of the data's numbers.

    Args:
        dataset: The data.
        targets: The targets of the loss.
        recorded: Labels that another tool recorded in the file or beside it.
    """
    of_model = [recorded] if recorded and len(recorded) == targets.classes else []
    return [*of_model, *([dataset.declared_labels] if dataset.declared_labels else [])]


def is_packed(source: Any) -> bool:
    """Return whether data are packed rows of documents."""
    return isinstance(source, PackedSequences) or getattr(source, "pack", None) is not None


@dataclass(frozen=True)
class Reading:
    """What a reader may ask to convert data: see :func:`onnxtrain.register_reader`.

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
        return cls(None if objective.targets is None else objective.targets.loss, folder)

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


def _parts_of_batch(objective: Objective, batch: Any, sample_weight: Any) -> tuple[Any, Any, Any]:
    """Return inputs, targets and weights of a batch that holds the targets, in the forms that ``fit`` takes.

    Raises:
        DataError: The batch is inputs alone, or has another form.
    """
    if not isinstance(batch, Mapping | tuple):
        raise DataError("This loss needs targets; give them to train_step(inputs, targets).")
    batch, sample_weight = with_weights(batch, sample_weight, objective.inputs)
    heads = objective.heads
    if len(heads) > 1:
        inputs, targets = batch if isinstance(batch, tuple) and len(batch) == 2 else (batch, batch)
        return inputs, targets_by_output(heads, targets), sample_weight
    inputs, targets = match_batch(batch, objective.inputs, "the batch")
    return inputs, targets, sample_weight


def _as_array(targets: Any, spec: TensorSpec) -> np.ndarray:
    try:
        return np.asarray(targets)
    except ValueError as error:
        if "inhomogeneous" not in str(error):
            raise
        raise DataError(f"{spec.name!r} holds rows of different lengths; pad them to one length.{spec.hint}") from None


def _check_rows(
    targets: np.ndarray, spec: TensorSpec, inputs: Sequence[TensorSpec], arrays: Mapping[str, np.ndarray]
) -> None:
    """Refuse targets of another number of rows than inputs of the same dynamic batch size: they might broadcast."""
    rows = (spec.shape or (None,))[0]
    for each in inputs:
        if targets.ndim and not each.common and isinstance(rows, str) and (each.shape or (None,))[0] == rows:
            given = len(arrays[each.name])
            if given != len(targets):
                raise DataError(f"{spec.name!r} has {len(targets)} rows, but the input {each.name!r} has {given}.")


def _check_sizes(specs: Sequence[TensorSpec], arrays: Mapping[str, np.ndarray]) -> None:
    """Refuse arrays whose sizes differ along axes of the same symbol: they might broadcast."""
    check_symbols((spec, arrays[spec.name].shape, repr(spec.name)) for spec in specs)


def open_with_targets(
    objective: Objective,
    source: Any,
    *,
    inputs: Sequence[TensorSpec],
    target: str | None,
    adapted: Adapting,
    weights: str | None = None,
) -> tuple[Dataset, Forms]:
    """Open data with targets; return the dataset and the forms of its targets. Values are not checked yet.

    Several targets are arrays named like the outputs, or the mapping in (inputs, targets).

    Args:
        objective: The loss on its inputs and targets.
        source: The data.
        inputs: Names, types and shapes of the model's inputs.
        target: Name of the target.
        adapted: Converts targets to the form of the loss.
        weights: Name of the array of sample weights in the data.

    Raises:
        DataError: The data cannot be read, or an array is missing.
    """
    from onnxtrain.data.opening import open_dataset  # a single step does not need file readers

    beside = [] if weights is None else [weights]
    if weights is not None:
        source = with_named(source, weights, inputs)
    heads = objective.heads
    axes = batch_axes(objective.model, [head.targets.prediction for head in heads])
    for head in heads:
        head.targets.check_batch_axis(axes.get(str(head.targets.prediction.name)))
    if len(heads) == 1:
        (head,) = heads
        if isinstance(source, tuple) and len(source) == 2 and isinstance(source[1], Mapping):
            source = (source[0], targets_by_output(heads, source[1])[head.name])
        dataset = open_dataset(source, inputs, target=target, validate=False, others=beside)
        dataset = adapted(dataset, head.targets, None)
        return dataset, head.targets.form_of_dataset(dataset)
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
        dataset = adapted(dataset, head.targets, head.name)
        forms.append(head.targets.form_of_dataset(dataset, head.name))
    return dataset, tuple(forms)


def with_named(source: Any, weights: str, inputs: Sequence[TensorSpec]) -> Any:
    """Make weights an array of their own: move their column out of a table of inputs.

    Raises:
        NoSuchArrayError: The data is arrays without names, or the table has no column of this name.
    """
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
    """Separate data and sample weights: the given ones, or the third item of (inputs, targets, weights).

    Raises:
        DataError: Weights are given twice.
    """
    triple = isinstance(source, tuple) and len(source) == 3
    flat = triple and len(inputs) == 2 and all(is_array_like(part) for part in source)
    if not triple or flat or is_batch_list(source) or isinstance(source[2], Mapping):
        return source, weights
    if weights is not None and not isinstance(weights, str):
        raise DataError("The data are (inputs, targets, weights), and sample_weight is given, too; leave one out.")
    return source[:2], source[2]


def targets_by_output(heads: list[LossHead], targets: Any) -> dict[str, Any]:
    """Return the targets of one step by output name.

    Raises:
        DataError: A target is missing, or several outputs have losses and the targets have no names.
    """
    names = [head.name for head in heads]
    if not isinstance(targets, Mapping):
        if len(heads) == 1:
            return {names[0]: targets}
        raise DataError(
            f"{len(heads)} outputs have losses, but the targets are a {type(targets).__name__}; give a mapping with "
            f"{', '.join(names)}."
        )
    for name in names:
        if name not in targets:
            raise DataError(f"The targets of {name!r} are missing; got {', '.join(map(str, targets)) or 'none'}.")
    return {name: targets[name] for name in names}


def by_input_name(specs: Sequence[TensorSpec], inputs: Any) -> dict[str, Any]:
    """Return inputs, given as one array, a sequence or a mapping, by input name of the model.

    Raises:
        DataError: An input is missing, or there are too many.
    """
    if isinstance(inputs, Mapping):
        check_caches(inputs, specs, "The batch")
        missing = [spec.name for spec in specs if spec.name not in inputs]
        if missing:
            raise DataError(f"The inputs {missing} are missing; got {', '.join(map(str, inputs)) or 'none'}.")
        return dict(inputs)
    positional = isinstance(inputs, tuple) or (isinstance(inputs, list) and len(specs) > 1)
    arrays = list(inputs) if positional else [inputs]
    if len(arrays) != len(specs):
        names = ", ".join(spec.name for spec in specs)
        raise DataError(f"The model has {len(specs)} inputs ({names}), but {len(arrays)} arrays were given.")
    return {spec.name: array for spec, array in zip(specs, arrays, strict=True)}


def fit_to_spec(value: Any, spec: TensorSpec) -> np.ndarray:
    """Convert an array to the type of an input, after a check of rank and fixed sizes."""
    array = to_numpy(value, repr(spec.name))
    if array.dtype != spec.dtype:
        found, needed = kind_of(array.dtype), kind_of(spec.dtype)
        if (found == "float" and needed in ("integer", "boolean")) or found in ("string", "other"):
            raise DataError(f"{spec.name!r} needs {spec.dtype}, but got {array.dtype}.")
        array = array.astype(spec.dtype)
    shape = spec.shape
    if shape is not None and (
        array.ndim != len(shape)
        or any(isinstance(size, int) and size != got for size, got in zip(shape, array.shape, strict=True))
    ):
        hint = spec.size_hint if array.ndim == len(shape) else spec.hint
        raise DataError(f"{spec.name!r} needs shape {spec.describe_shape()}, but got {array.shape}.{hint}")
    if spec.right_padded or spec.documents:
        check_right_padded(np.minimum(array, 1) if spec.documents else array, repr(spec.name), range(len(array)))
    if spec.table_rows is not None:
        check_indices(array, spec.table_rows, repr(spec.name), range(len(array)))
    return array


def check_not_empty(feeds: Mapping[str, np.ndarray], objective: Objective) -> None:
    """Check that a step has an example, and that examples of token ids have a token.

    Raises:
        DataError: There is none.
    """
    for spec in objective.inputs:
        shape = feeds[spec.name].shape
        if shape and not shape[0]:
            raise DataError(f"The batch is empty: {spec.name!r} has shape {shape}; a step needs at least one example.")
        if spec.table_rows is not None and 0 in shape:
            raise DataError(f"The batch has no tokens: {spec.name!r} has shape {shape}; a row needs at least one.")


def check_inputs(inputs: Mapping[str, np.ndarray]) -> None:
    """Check that the inputs of one step are finite, as ``fit`` does.

    Raises:
        DataError: An input holds NaN or infinity.
    """
    for name, array in inputs.items():
        if array.dtype.kind not in "iub":
            rows = np.atleast_1d(array)
            check_finite(rows, f"the input {name!r}", range(len(rows)))


def check_targets(targets: np.ndarray, check: TargetCheck | None) -> np.ndarray:
    """Check the targets of one step and return them.

    Raises:
        DataError: Targets hold NaN or infinity, or fail the loss's check.
    """
    examples = range(len(targets)) if targets.ndim else [0]
    if targets.dtype.kind not in "iu":
        check_finite(np.atleast_1d(targets), "the target array", examples)
    if check is not None:
        check(targets, "the target array", examples)
    return targets
