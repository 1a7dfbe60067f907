"""Batches of a table that is read piece by piece, never as a whole, in the order of its rows or through a buffer."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np

from onnxtrain.data.base import Batch, Dataset
from onnxtrain.data.conversion import Array, kind_of, to_numpy
from onnxtrain.data.files import GrowingArray, GrowingTexts
from onnxtrain.data.iterable_dataset import IterableDataset
from onnxtrain.data.naming import ColumnChoice, Wanted, check_unique
from onnxtrain.data.parquet_file import type_of, values_of
from onnxtrain.errors import DataError

BUFFER: Final = 2**16
"""Rows of the buffer that shuffles."""

ROWS: Final = 2**12
"""Rows that are converted at a time."""

Rows = Mapping[str | None, Array]
"""Some rows: arrays by name, and targets under None."""


@dataclass(frozen=True)
class Piece:
    """A part of a table that is read from its first row on: a row group, a file, a stream.

    Attributes:
        rows: Number of rows; None where it is unknown.
        blocks: Returns some columns of the rows, in record batches of at most some thousand.
    """

    rows: int | None
    blocks: Callable[[Sequence[str]], Iterator[Any]]


class TableStream(IterableDataset):
    """Batches of the rows of a table's pieces.

    An epoch in a random order reads the pieces in a random order, and their rows through a buffer, of which each row
    that comes replaces a random one.
    """

    borrows = False

    def __init__(
        self,
        pieces: Sequence[Piece],
        schema: Any,
        wanted: Wanted,
        *,
        name: str,
        buffer: int = BUFFER,
        content: str | None = None,
        classes: Sequence[str] = (),
        begin: Callable[[int], object] = lambda epoch: None,
    ) -> None:
        super().__init__((), dataclasses.replace(wanted, target=None))
        self.name, self.declared_labels = name, tuple(classes)
        self._content, self._rows_held, self._begin = content, buffer, begin
        self._schema, self._inputs = schema, wanted.specs
        self._choice = _chosen(schema, wanted, name)
        self._is_list = self._choice.features is not None and _is_list(schema.field(self._choice.features[0]).type)
        self._label = self._choice.target if wanted.need_target else None
        label = [] if self._label is None else [self._label]
        beside = [spec.name for spec in wanted.specs if spec.beside]
        self._columns_read = [*dict.fromkeys(itertools.chain(*map(self._choice.of, wanted.specs))), *label]
        for column in self._columns_read:
            kind = schema.field(column).type
            if not _is_list(kind) or column == self._label:
                text = self._choice.features is None or column in (self._label, *beside)
                type_of(_arrow(), kind, column, text=text)
        sizes = [piece.rows for piece in pieces]
        self.size = None if None in sizes else sum(rows or 0 for rows in sizes)
        if self.size == 0:
            raise DataError(f"{name} has columns, but no rows; it needs a row per example.").about(name)
        ends = itertools.accumulate(rows or 0 for rows in sizes)
        self._pieces = [(end - (piece.rows or 0), piece) for end, piece in zip(ends, pieces, strict=True)]
        self._taken: Array | None = None  # True for each row that is read; None for all
        self._seen: dict[str | None, Array] = {}  # targets, once they are known; shared by all copies
        self.check_cut()

    @property
    def columns(self) -> dict[str, tuple[str, ...]]:
        """Names of the columns that are side by side in the only input."""
        features = None if self._is_list else self._choice.features
        return {} if features is None else {self._inputs[0].name: tuple(features)}

    def values(self, name: str | None = None) -> Array | None:
        """Return the targets of all rows, so that every class and every missing one is known; see :meth:`_look`."""
        if name not in self._beside or (name is None and self._label is None and None not in self._wanted.columns):
            return None
        if name not in self._seen:
            self._seen[name] = self._look(name)
        found = self._seen[name]
        if self._taken is not None and len(found) == len(self._taken):
            found = found[self._taken]
        return self.adapted(found, name, "the target array")

    def _look(self, name: str | None) -> Array:
        """Return the targets of all rows; of lists and of the numbers of a stream the first, of its texts each once."""
        if name is None and self.declared_labels:
            return np.array(self.declared_labels)
        label = str(self._label if name is None else name)
        own = dataclasses.replace(self._wanted, columns={name: self._wanted.columns.get(name, (label,))})
        columns, found, axes = own.columns[name], GrowingTexts(), ()
        numbers: GrowingArray | None = None
        for block in self._blocks(columns):
            inputs, only = own.joined(({each: self._targets(block, each, 0) for each in columns}, None), self.name)
            part = np.asarray(only if name is None else inputs[name])
            axes = part.shape[1:]
            if kind_of(part.dtype) == "string":
                found.append(map(str, part.flat))
                continue
            if self.size is None or (len(columns) == 1 and axes):
                return part
            if numbers is None:
                numbers = GrowingArray(axes, part.dtype)
            elif part.dtype.kind == "f" != numbers.dtype.kind:
                numbers = GrowingArray.of(numbers.finish(), part.dtype)
            numbers.append(part)
        if numbers is not None:
            return numbers.finish()
        return found.finish().reshape(-1, *axes) if self.size is not None else np.array([*found.distinct])

    def batch_count(self, batch_size: int = 1) -> int | None:
        """Return the number of batches per epoch; None where the number of rows is unknown."""
        return Dataset.batch_count(self, batch_size)

    def take(self, indices: Array) -> Self:
        """Return the rows with these indices, in the order of the table."""
        if self.size is None:
            raise DataError(f"{self.name} does not say how many rows it has; give validation data of their own.")
        rows = indices if self._taken is None else np.flatnonzero(self._taken)[indices]
        result = copy.copy(self)
        result._taken = np.zeros(sum(piece.rows or 0 for _, piece in self._pieces), bool)
        result._taken[rows] = True
        result.size = len(rows)
        return result

    def fingerprint(self) -> str | None:
        """Return an identifier of the files and the rows that are read; None without one."""
        if self._content is None or self._taken is None:
            return self._content
        return f"{self._content} {self.size} {int(np.flatnonzero(self._taken).sum())}"

    def _read(self, batch_size: int, shuffled: tuple[int, int] | None, start: int) -> Iterator[Batch]:
        """Read all rows once, in batches."""
        pieces, rows = self._pieces, self._rows(self._pieces)
        if shuffled is not None:
            self._begin(shuffled[1])
            rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence(shuffled)))
            rows = mixed(self._rows([pieces[index] for index in rng.permutation(len(pieces))]), self._rows_held, rng)
        number = -1
        for number, found in enumerate(in_batches(rows, batch_size)):
            if number >= start:
                arrays = dict(found)
                targets = arrays.pop(None, None)
                inputs: dict[str, object] = {spec.name: arrays[spec.name][:, 0] for spec in self._inputs}
                if not self._is_list:
                    inputs = self._choice.as_inputs(arrays.values(), self._inputs)
                item = inputs if targets is None else (inputs, targets)
                yield self.batch_of(item, f"batch {number} of {self.name}")
        if number < 0:
            raise DataError(f"{self.name} has no rows; it needs a row per example.").about(self.name)

    def _blocks(self, columns: Sequence[str]) -> Iterator[Any]:
        return (block for _, piece in self._pieces for block in piece.blocks(columns) if block.num_rows)

    def _rows(self, pieces: Iterable[tuple[int, Piece]]) -> Iterator[Rows]:
        """Yield the rows of pieces that are read, as arrays [rows, columns, ...] and targets."""
        taken = self._taken
        for first, piece in pieces:
            if taken is not None and not taken[first : first + (piece.rows or 0)].any():
                continue
            for block in piece.blocks(self._columns_read):
                kept = slice(None) if taken is None else taken[first : first + block.num_rows]
                found: dict[str | None, Array] = {}
                for spec in self._inputs:
                    read = self._targets if spec.beside else _column
                    columns = [read(block, column, first) for column in self._choice.of(spec)]
                    found[spec.name] = np.stack(columns, axis=1)[kept]
                if self._label is not None:
                    found[None] = self._targets(block, self._label, first)[kept]
                yield found
                first += block.num_rows

    def _targets(self, block: Any, label: str, first: int) -> Array:
        """Return targets; missing ones are NaN, or empty texts."""
        column = _plain(block.column(label))
        if column.null_count:
            is_text = type_of(_arrow(), column.type, label, text=True).kind == "O"
            column = column.fill_null("") if is_text else column.cast("float64").fill_null(float("nan"))
        found = _numbers(column, label, first)
        if label != self._label or not self.declared_labels or found.dtype.kind not in "iu":
            return found
        unknown = found[(found < 0) | (found >= len(self.declared_labels))]
        if len(unknown):
            raise DataError(
                f"the column '{label}' holds {unknown[0]}, but it has {len(self.declared_labels)} class names; remove "
                "such examples with dataset.filter."
            ).about(label, got=unknown[0], wanted=len(self.declared_labels))
        return np.array(self.declared_labels, object)[found]


def mixed(blocks: Iterable[Rows], size: int, rng: np.random.Generator) -> Iterator[Rows]:
    """Yield rows in a random order: each row that comes takes the place of a random one of the ``size`` rows held."""
    filling: list[Rows] = []
    held: dict[str | None, Array] | None = None
    for block in blocks:
        if held is None:
            filling.append(block)
            if sum(map(_count, filling)) >= size:
                held = _joined(filling)
            continue
        for start in range(0, _count(block), size):
            part = {key: array[start : start + size] for key, array in block.items()}
            places = rng.choice(_count(held), _count(part), replace=False)
            yield {key: array[places] for key, array in held.items()}
            for key, array in held.items():
                if array.dtype.kind in "biu" and part[key].dtype.kind == "f":  # the first missing target
                    held[key] = array = array.astype(part[key].dtype)
                array[places] = part[key]
    if held is None and filling:
        held = _joined(filling)
    if held is not None:
        order = rng.permutation(_count(held))
        for start in range(0, len(order), ROWS):
            yield {key: array[order[start : start + ROWS]] for key, array in held.items()}


def in_batches(blocks: Iterable[Rows], size: int) -> Iterator[Rows]:
    """Yield rows in batches of one size; the last one may be smaller."""
    held: list[Rows] = []
    count = 0
    for block in blocks:
        held.append(block)
        count += _count(block)
        if count >= size:
            rows = _joined(held)
            end = count - count % size
            for start in range(0, end, size):
                yield {key: array[start : start + size] for key, array in rows.items()}
            held, count = [{key: array[end:] for key, array in rows.items()}], count - end
    if count:
        yield _joined(held)


def _count(rows: Rows) -> int:
    return len(next(iter(rows.values())))


def _joined(parts: Sequence[Rows]) -> dict[str | None, Array]:
    return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}


def _chosen(schema: Any, wanted: Wanted, name: str) -> ColumnChoice:
    """Return the columns of inputs and target; the only input takes the only other column where that has arrays."""
    columns = [str(column) for column in schema.names]
    check_unique(columns, name)
    target, inputs = wanted.target, [spec for spec in wanted.specs if not spec.beside]
    others = [column for column in columns if column != target]
    alone = len(wanted.specs) == len(inputs) == len(others) == 1 and _is_list(schema.field(others[0]).type)
    if alone and (target in columns or not wanted.need_target):
        return ColumnChoice(others, target)
    choice = wanted.of_columns(columns, name)
    choice.check_width(wanted.specs[0], name)
    return choice


def _is_list(kind: Any) -> bool:
    types = _arrow().types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _column(block: Any, name: str, first: int) -> Array:
    return _numbers(block.column(name), name, first)


def _numbers(column: Any, name: str, first: int) -> Array:
    """Return a column as an array: [rows], or [rows, ...] of lists of one length."""
    if not _is_list(column.type):
        return values_of(_plain(column), name, first)
    return to_numpy(column.to_pylist(), f"the column '{name}'")


def _plain(column: Any) -> Any:
    """Return a column of a table or of a record batch as one array of values."""
    if hasattr(column, "combine_chunks"):
        column = column.combine_chunks()
    return column.dictionary_decode() if hasattr(column, "dictionary_decode") else column


def _arrow() -> Any:
    import pyarrow

    return pyarrow
