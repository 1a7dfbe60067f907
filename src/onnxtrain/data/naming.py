"""Match arrays, batches and columns of tables to a model's inputs and its target, by name or by position."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from onnxtrain.data.conversion import Array, TensorSpec, are_truth_values, kind_of, to_numpy, to_truth_values
from onnxtrain.errors import DataError
from onnxtrain.errors.formatting import listed

TargetNames = str | Sequence[str] | Mapping[str, str | Sequence[str]]
"""Names of targets: one, several columns ("a,b" or a list), or those of each output."""


def columns_of_targets(target: TargetNames | None, outputs: Sequence[str]) -> dict[str, list[str]]:
    """Return the columns of each output's targets where several are named; {} for one name, or none."""
    if isinstance(target, str) and "," in target:
        target = [name.strip() for name in target.split(",")]
    if target is None or isinstance(target, str):
        return {}
    if not isinstance(target, Mapping):
        if len(outputs) > 1:
            raise DataError(
                f"target={target!r} names columns, but {len(outputs)} outputs have losses; give a mapping with "
                f"{', '.join(outputs)}, or name the columns like the outputs."
            )
        target = {outputs[0] if outputs else "": target}
    if wrong := [name for name in target if outputs and name not in outputs]:
        raise DataError(f"target has the output {wrong[0]!r}, but outputs with losses are {', '.join(outputs)}.")
    found = {name: [own] if isinstance(own, str) else [*own] for name, own in target.items()}
    return {**{name: [name] for name in outputs}, **found}


def _stacked(parts: list[Array], columns: Sequence[str], subject: str) -> Array:
    """Put the columns of a target together, [N, columns]: numbers and truth values, or texts."""
    texts = [kind_of(part.dtype) == "string" for part in parts]
    if any(texts):
        parts = [
            to_truth_values(part) if is_text and are_truth_values(part) else part
            for part, is_text in zip(parts, texts, strict=True)
        ]
        texts = [kind_of(part.dtype) == "string" for part in parts]
    if any(texts) and not all(texts):
        raise DataError(
            f"the target columns {_names(columns)} of {subject} hold texts in '{columns[texts.index(True)]}' and "
            f"numbers in '{columns[texts.index(False)]}'; give one kind for all."
        )
    return np.stack(parts, axis=-1)


class NoSuchArrayError(DataError):
    """A named array beside the inputs is missing."""


def check_beside(names: Iterable[str], there: Iterable[str], subject: str) -> None:
    """Check that arrays besides the inputs exist."""
    held = list(there)
    for name in names:
        if name not in held:
            more = " ..." if len(held) > 8 else ""
            raise NoSuchArrayError(f"{subject} '{name}': it has {_names(held[:8])}{more}.").about(name, got=held)


def check_caches(arrays: Mapping[str, object], specs: Sequence[TensorSpec], subject: str) -> tuple[str, ...]:
    """Refuse a KV cache with rows, which a model without its KV-cache inputs would ignore."""
    caches = specs[0].kv_caches if specs else ()
    for name in caches:
        shape = _cache_shape(arrays[name]) if name in arrays else None
        if shape is not None:
            raise DataError(
                f"{subject} has a KV cache of shape {shape} in '{name}', but training, evaluation and prediction start "
                f"with an empty one: give whole sequences, and KV-cache inputs without rows, or none."
            ).about(name, got=shape)
    return caches


def _cache_shape(value: Any) -> tuple[int, ...] | None:
    """Return the shape of a cache; None where it has no rows, or is the false flag of a merged decoder."""
    try:
        shape = tuple(np.shape(value))
    except ValueError:  # lists of different lengths
        return (len(value),)
    is_false = len(shape) < 3 and np.asarray(value).dtype.kind == "b" and not np.any(value)
    return None if 0 in shape or is_false else shape


Matched = tuple[dict[str, object], object | None]
"""Inputs, and arrays beside them, by name; and the only targets or None."""


@dataclass(frozen=True)
class Wanted:
    """Arrays that a training, an evaluation or a prediction reads of data, found by name or by position.

    Attributes:
        specs: Inputs of the model in their order, then arrays beside them: targets by name, weights of examples.
        target: Name of the only target, where there are several candidates.
        need_target: Raise an error where there are no targets.
        columns: Columns that are put together as targets, by output; ``None`` is the only target.
    """

    specs: Sequence[TensorSpec]
    target: str | None = None
    need_target: bool = True
    columns: Mapping[str | None, Sequence[str]] = field(default_factory=dict)

    def without_target(self, specs: Sequence[TensorSpec] | None = None) -> Wanted:
        """Return the same inputs, or others, where no targets are needed."""
        return Wanted(self.specs if specs is None else specs, need_target=False)

    def of_names(self, arrays: Mapping[str, object], subject: str) -> Matched:
        """Find inputs and targets by name."""
        specs, target = self.specs, self.target
        caches = check_caches(arrays, specs, subject)
        missing = [spec.name for spec in specs if spec.name not in arrays]
        if not any(spec.name in missing for spec in specs if not spec.beside):
            check_beside(missing, arrays, f"{subject} has no array")
        if missing:
            texts = [name for name, value in arrays.items() if _is_text(value)]
            if texts:
                raise DataError(
                    f"{subject}: {_names(texts)} {'are texts' if len(texts) > 1 else 'is a text'}, but the model needs "
                    f"{_names(spec.name for spec in specs)}; give rows of texts as a list or an iterator, with the "
                    "loss next_token or one that compares rows."
                ).about(subject, got=texts, wanted=[spec.name for spec in specs])
            raise DataError(
                f"{subject} has no array for {_plural('input', missing)} {_names(missing)}: "
                f"it holds {_names(arrays)}, "
                f"the model needs {_names(spec.name for spec in specs)}; name the arrays like the model's inputs."
            ).about(missing, got=[*arrays], wanted=[spec.name for spec in specs])
        inputs = {spec.name: arrays[spec.name] for spec in specs}
        if target is not None:
            if target not in arrays:
                raise DataError(f"{subject} has no target '{target}': it holds {_names(arrays)}.")
            return inputs, arrays[target] if self.need_target else None
        if not self.need_target:
            return inputs, None
        left = [name for name in arrays if name not in inputs and name not in caches]
        if not left:
            raise DataError(
                f"{subject} holds only the {_plural('input', inputs)} {_names(inputs)}: "
                f"add an array of targets, or name one of them as the target."
            )
        if len(left) > 1:
            raise DataError(f"{subject} has {_names(left)} besides the inputs: name the one that is the target.")
        return inputs, arrays[left[0]]

    def of_positions(self, parts: Sequence[object], subject: str) -> Matched:
        """Find inputs and targets in a tuple.

        It may be ``(inputs, targets)``, where inputs is an array, a sequence of arrays in the order of the
        model's inputs, or a mapping; or flat, all inputs in order and then the targets; or, where no targets are
        needed, only the inputs in order.
        """
        specs, count = self.specs, len(self.specs)
        parts = [np.asarray(part) if isinstance(part, int | float) else part for part in parts]
        flat = all(is_array_like(part) for part in parts)
        if flat and len(parts) == count + 1:
            return _named(parts[:-1], specs), parts[-1]
        if flat and len(parts) == count and not self.need_target:
            return _named(parts, specs), None
        if len(parts) == 2 and isinstance(parts[1], Mapping) and not self.need_target:
            return self.without_target().of_names(self.with_targets(parts[0], parts[1], subject), subject)
        if len(parts) == 2 and is_array_like(parts[1]):
            inputs, targets = parts
            if isinstance(inputs, Mapping):
                return self.without_target().of_names(inputs, f"the mapping of inputs in {subject}")[0], targets
            if isinstance(inputs, list | tuple) and not is_array_like(inputs) and len(inputs) == count:
                return _named(inputs, specs), targets
        if len(parts) == 1 and isinstance(parts[0], Mapping):
            return self.of_names(parts[0], subject)
        nested = [
            isinstance(part, list) and part and all(isinstance(row, list | tuple) for row in part) for part in parts
        ]
        if len(parts) == 2 and any(nested):
            raise DataError(
                f"The {'inputs' if nested[0] else 'targets'} in {subject} are a list of lists; give numpy.array of it, "
                "for which all rows need the same length (pad shorter ones)."
            )
        raise DataError(
            f"{subject} is a sequence of {_kinds(parts)}; it needs (inputs, targets), where inputs are "
            f"{count} {_plural('array', specs)} for {_names(spec.name for spec in specs)} in this order, "
            f"or a mapping from name to array."
        )

    def names_beside(self) -> list[str | None]:
        """Return the names of the arrays beside the inputs, once columns are put together."""
        taken = {column for own in self.columns.values() for column in own}
        return [*self.columns, *(spec.name for spec in self.specs if spec.beside and spec.name not in taken)]

    def joined(self, found: Matched, subject: str) -> Matched:
        """Put the columns of targets together: [N] for one, [N, columns] for several."""
        if not self.columns:
            return found
        taken = {column for own in self.columns.values() for column in own}
        arrays = {name: to_numpy(found[0][name], f"'{name}' of {subject}", may_miss=True) for name in taken}
        targets = {
            name: arrays[own[0]] if len(own) == 1 else _stacked([arrays[column] for column in own], own, subject)
            for name, own in self.columns.items()
        }
        only = targets.pop(None, None)
        inputs = {spec.name for spec in self.specs if not spec.beside}
        rest = {name: array for name, array in found[0].items() if name in inputs or name not in taken}
        return {**rest, **{str(name): array for name, array in targets.items()}}, only

    def with_targets(self, inputs: object, targets: Mapping[str, object], subject: str) -> dict[str, object]:
        """Combine inputs of any form and several targets by name into one mapping."""
        own = self.without_target([spec for spec in self.specs if spec.name not in targets])
        return {**own.of_batch(inputs, f"the inputs of {subject}")[0], **targets}

    def of_batch(self, item: Any, subject: str) -> Matched:
        """Find inputs and targets in one batch: a mapping, a tuple, or an array for a model with one input."""
        item = np.asarray(item) if isinstance(item, float) and self.specs[0].shape == () else item
        item = item.to_dict() if hasattr(item, "edge_index") else item  # a batch of PyTorch Geometric
        if isinstance(item, Mapping):
            return self.of_names(item, subject)
        if isinstance(item, tuple) or (isinstance(item, list) and not is_array_like(item)):
            return self.of_positions(item, subject)
        if is_array_like(item):
            if len(self.specs) == 1 and not self.need_target:
                return {self.specs[0].name: item}, None
            needed = _names([*(spec.name for spec in self.specs), *(["targets"] if self.need_target else [])])
            raise DataError(
                f"{subject} is one array, but {needed} are needed; give (inputs, targets) or a mapping."
            ).about(subject)
        raise DataError(
            f"{subject} is a {type(item).__name__}; it must be a mapping from name to array or (inputs, targets)."
        )

    def of_frame(self, frame: Any) -> Matched:
        """Find inputs and targets in a table of pandas, Polars or PyArrow; see :meth:`of_columns`."""
        keys = columns_of_table(frame, "the table")
        chosen = self.of_columns([*keys], "the table")
        label = chosen.target if self.need_target else None
        targets = None if label is None else column_of(frame, keys[label], label, may_miss=True)
        columns = {name: spec.beside for spec in self.specs for name in chosen.of(spec)}
        arrays = {name: column_of(frame, keys[name], name, may_miss=beside) for name, beside in columns.items()}
        for name in chosen.features or ():
            if kind_of(arrays[name].dtype) not in ("boolean", "integer", "float"):
                raise DataError(
                    f"the column '{name}' holds {arrays[name].dtype}, not numbers; encode it as numbers, or remove it."
                )
        chosen.check_width(self.specs[0], "the table")
        values = (np.stack([arrays[name] for name in chosen.of(spec)], axis=1) for spec in self.specs)
        return chosen.as_inputs(values, self.specs), targets

    def of_columns(self, columns: Sequence[str], subject: str) -> ColumnChoice:
        """Find inputs and target among the columns of a table."""
        target, beside = self.target, [spec.name for spec in self.specs if spec.beside]
        specs = [spec for spec in self.specs if not spec.beside]
        check_beside(beside, columns, f"{subject} has no column")
        if target is None and self.need_target:
            raise DataError(
                f"{subject} has the columns {some_names(columns)}; say which is the target: target='{columns[-1]}'."
            ).about("target", got=columns)
        if target is not None and target not in columns:
            raise DataError(f"{subject} has no column '{target}': it has {some_names(columns)}.").about(
                target, got=columns
            )
        held = set(columns)
        missing = [spec.name for spec in specs if spec.name not in held]
        if not missing:
            return ColumnChoice(None, target)
        if len(specs) > 1:
            raise DataError(
                f"{subject} has no columns for the inputs {some_names(missing)}: it has {some_names(columns)}."
            ).about(missing, got=columns)
        (spec,) = specs
        beside += spec.left_out if spec.columns is None else ()
        features = [name for name in columns if name != target and name not in beside] or beside  # an autoencoder's
        if spec.shape is not None and len(spec.shape) != 2:
            raise DataError(
                f"{subject} has no column '{spec.name}', and its columns stacked have rank 2, but the input "
                f"'{spec.name}' has rank {len(spec.shape)}: {spec.describe_shape()}."
            ).about(spec.name, wanted=spec.shape)
        return ColumnChoice(in_order(features, spec, subject), target)


class ColumnChoice(NamedTuple):
    """Assignment of a table's columns to inputs and target; without features, each input has its own column."""

    features: list[str] | None
    target: str | None

    def of(self, spec: TensorSpec) -> list[str]:
        """Return the columns of an array."""
        return [spec.name] if self.features is None or spec.beside else self.features

    def check_width(self, spec: TensorSpec, subject: str) -> None:
        """Check that an input has as many elements as there are features."""
        features, target = self
        if features is None:
            return
        if not features:
            raise DataError(
                f"{subject} has only the target column '{target}'; it needs columns for '{spec.name}'."
            ).about(spec.name, got=target)
        wanted = None if spec.shape is None else spec.shape[1]
        if isinstance(wanted, int) and wanted != len(features):
            count = f"{len(features)} column{'s' if len(features) > 1 else ''}"
            beside = "" if target is None else f" besides the target '{target}'"
            hint = "" if target or len(features) < wanted else f", or name the target: target='{features[-1]}'"
            raise DataError(
                f"{subject} has {count}{beside} ({some_names(features)}), but the input '{spec.name}' takes "
                f"{wanted}; give {wanted} columns{hint}."
            ).about(spec.name, got=count, wanted=wanted)

    def as_inputs(self, values: Iterable[Array], specs: Sequence[TensorSpec]) -> dict[str, object]:
        """Return the columns of each array [N, columns] by its name."""
        return {
            spec.name: as_input(array[:, 0], spec)
            if self.features is None or spec.beside
            else NamedColumns(array, tuple(self.features))
            for array, spec in zip(values, specs, strict=True)
        }


def split_weights(source: Any, weights: Any, inputs: int) -> tuple[Any, Any]:
    """Separate data and sample weights: the given ones, or the third item of (inputs, targets, weights)."""
    triple = isinstance(source, tuple) and len(source) == 3
    flat = triple and inputs == 2 and all(is_array_like(part) for part in source)
    if not triple or flat or is_batch_list(source) or isinstance(source[2], Mapping):
        return source, weights
    if weights is not None and not isinstance(weights, str):
        raise DataError("The data are (inputs, targets, weights), and sample_weight is given, too; leave one out.")
    return source[:2], source[2]


def take_column(source: Any, weights: str, inputs: Sequence[TensorSpec]) -> Any:
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


def are_targets(value: object) -> bool:
    """Return whether the second of a pair may be targets: one array, or several by name."""
    return isinstance(value, Mapping) or is_array_like(value)


def targets_by_name(names: Sequence[str], targets: Any) -> dict[str, Any]:
    """Return the targets of outputs by the names of these."""
    if len(names) == 1 and (isinstance(targets, np.ndarray) or not isinstance(targets, Mapping)):
        return {names[0]: targets}
    if not isinstance(targets, Mapping):
        raise DataError(
            f"{len(names)} outputs have losses, but the targets are a {type(targets).__name__}; give a mapping with "
            f"{', '.join(names)}."
        )
    for name in names:
        if name not in targets:
            raise DataError(
                f"The targets of {name!r} are missing; got {', '.join(map(str, targets)) or 'none'}."
            ).about(name, got=[*targets])
    return {name: targets[name] for name in names}


def is_array_like(value: object) -> bool:
    """Return whether a value is a single array (NumPy, a tensor, a data frame, a list of numbers or strings)."""
    if isinstance(value, list):
        return bool(value) and all(isinstance(item, int | float | str | np.number) for item in value)
    return any(hasattr(value, name) for name in ("__array__", "__dlpack__", "detach"))


def is_batch_list(source: list[object] | tuple[object, ...]) -> bool:
    """Return whether a list holds batches, not arrays."""
    found = (isinstance(item, Mapping | list | tuple) or hasattr(item, "edge_index") for item in source)
    return bool(source) and all(found) and not any(map(is_array_like, source))


def _named(arrays: Sequence[object], specs: Sequence[TensorSpec]) -> dict[str, object]:
    return {spec.name: array for spec, array in zip(specs, arrays, strict=True)}


def _is_text(value: object) -> bool:
    """Return whether a value is a text, or the messages of a chat."""
    if isinstance(value, np.ndarray):
        return kind_of(value.dtype) == "string"
    return isinstance(value, str) or (isinstance(value, list) and bool(value) and isinstance(value[0], Mapping))


def _names(names: Iterable[str]) -> str:
    listed = [f"'{name}'" for name in names]
    return " and ".join([", ".join(listed[:-1]), listed[-1]] if len(listed) > 1 else listed) or "no arrays"


def _plural(word: str, items: Iterable[object]) -> str:
    return word if len(list(items)) == 1 else word + "s"


def _kinds(parts: Sequence[object]) -> str:
    kinds = [type(part).__name__ for part in parts[:4]] + ["..."] * (len(parts) > 4)
    return f"{len(parts)} ({', '.join(kinds)})"


class NamedColumns:
    """An array with names of the elements along axis 1."""

    def __init__(self, array: Array, names: tuple[str, ...]) -> None:
        self.array, self.names = array, names
        self.dtype, self.shape, self.ndim = array.dtype, array.shape, array.ndim

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, rows: Any) -> Array:
        return np.asarray(self.array[rows])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return self.array if dtype is None else self.array.astype(dtype, copy=False)


def is_frame(value: object) -> bool:
    """Return whether a value is a table of pandas, Polars or PyArrow."""
    if isinstance(value, np.ndarray):
        return False
    if type(value).__module__.partition(".")[0] == "pyarrow":
        return hasattr(value, "column_names") and hasattr(value, "column")
    return hasattr(value, "columns") and hasattr(value, "__getitem__") and hasattr(value, "to_numpy")


def columns_of_table(frame: Any, subject: str) -> dict[str, Any]:
    """Return the keys of a table's columns by their names."""
    keys = list(frame.column_names if hasattr(frame, "column_names") else frame.columns)
    names = [str(key) for key in keys]
    check_unique(names, subject)
    return dict(zip(names, keys, strict=True))


def check_unique(names: Sequence[str], subject: str) -> None:
    """Refuse columns of the same name."""
    if len(set(names)) == len(names):
        return
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise DataError(f"{subject} has two columns '{name}'; give every column a unique name.")
        seen.add(name)


def column_of(frame: Any, key: object, name: str, *, may_miss: bool = False) -> Array:
    """Return a column of a table as an array."""
    return to_numpy(frame[key], f"the column '{name}'", may_miss=may_miss)


def named_array(value: object, spec: TensorSpec | None, subject: str) -> tuple[Array, tuple[str, ...] | None]:
    """Convert a value to NumPy, with the columns of a table in the model's order, and return their names."""
    if isinstance(value, NamedColumns):
        array, names = value.array, value.names
        if spec is None or (order := in_order(names, spec, subject)) == list(names):
            return array, names
        indices = {name: index for index, name in enumerate(names)}
        return array[:, [indices[name] for name in order]], tuple(order)
    if not is_frame(value) or spec is None or spec.beside:
        return to_numpy(value, subject, may_miss=spec is None or spec.beside), None
    keys = columns_of_table(value, subject)
    order = in_order([*keys], spec, subject)
    if order == [*keys]:
        array = np.asarray(value)
        if array.dtype.kind in "biuf" or not order:
            return array, tuple(order)
    return np.stack([column_of(value, keys[name], name) for name in order], axis=1), tuple(order)


def in_order(found: Sequence[str], spec: TensorSpec, subject: str) -> list[str]:
    """Return the names of columns in the order of an input; names that only number the columns keep theirs."""
    known = spec.columns
    if known is None or tuple(found) == known:
        return list(found)
    there, wanted = set(found), set(known)
    missing = [name for name in known if name not in there]
    extra = [name for name in found if name not in wanted and name not in spec.left_out]
    if not missing and not extra:
        return list(known)
    if list(found) == [str(index) for index in range(len(found))]:
        return list(found)
    lacks = f"lacks {some_names(missing)}" if missing else ""
    has = f"has {some_names(extra)} besides" if extra else ""
    raise DataError(
        f"{subject} has other columns than the training data of the input '{spec.name}': it "
        f"{' and '.join(filter(None, (lacks, has)))}; give the columns {some_names(known)}, in any order, or an array "
        "without column names."
    ).about(spec.name, wanted=known)


def some_names(names: Iterable[str]) -> str:
    """Format names for a message."""
    return listed((f"'{name}'" for name in names), 8, counted=False)


def as_input(column: Array, spec: TensorSpec) -> Array:
    """Reshape a column to [N, 1] for an input of rank 2."""
    return column[:, None] if spec.shape is not None and len(spec.shape) == 2 and column.ndim == 1 else column


def rows_to_inputs(rows: Any, inputs: Sequence[TensorSpec]) -> dict[str, Any]:
    """Split the columns of a table among the inputs of a model, in order; a sparse one stays so for one input [N, F].

    An input takes as many columns as its shape has elements without the batch axis; an input of unknown size takes one,
    or all where it is the only input.

    Example:
        >>> image = TensorSpec("image", np.dtype(np.float32), ("N", 1, 2, 2))
        >>> rows_to_inputs(np.zeros((3, 4)), [image])["image"].shape
        (3, 1, 2, 2)
    """
    shapes = {spec.name: _example_shape(spec) for spec in inputs}
    if hasattr(rows, "toarray"):
        if len(inputs) == len(shapes[inputs[0].name]) == 1:
            return {inputs[0].name: rows}
        rows = rows.toarray()
    if len(inputs) == 1 and None in shapes[inputs[0].name]:
        return {inputs[0].name: _of_kind(rows, inputs[0])}
    sizes = {name: tuple(1 if size is None else size for size in shape) for name, shape in shapes.items()}
    wanted = [math.prod(sizes[spec.name]) for spec in inputs]
    if sum(wanted) != rows.shape[1]:
        listed = ", ".join(f"{count} for {spec.name!r}" for count, spec in zip(wanted, inputs, strict=True))
        raise DataError(f"X has {rows.shape[1]} columns, but the model's inputs take {sum(wanted)} ({listed}).").about(
            "X", got=rows.shape[1], wanted=sum(wanted)
        )
    parts = np.split(rows, np.cumsum(wanted)[:-1], axis=1)
    return {
        spec.name: _of_kind(part, spec).reshape(len(rows), *sizes[spec.name])
        for spec, part in zip(inputs, parts, strict=True)
    }


def _example_shape(spec: TensorSpec) -> tuple[int | None, ...]:
    """Return the shape of one example; ``None`` for unknown sizes."""
    shape = (None, None) if spec.shape is None else spec.shape
    return tuple(size if isinstance(size, int) else None for size in shape[1:])


def _of_kind(part: np.ndarray, spec: TensorSpec) -> np.ndarray:
    if kind_of(part.dtype) == kind_of(spec.dtype):
        return part  # the dataset converts to the exact type
    whole = part.astype(spec.dtype)
    if kind_of(spec.dtype) != "float" and (whole != part).any():
        wrong = part[whole != part][0]
        raise DataError(f"X holds {wrong:g} in a column of the input {spec.name!r}, which takes {spec.dtype}.").about(
            spec.name, got=wrong, wanted=spec.dtype
        )
    return whole
