"""Parquet and Arrow files: columns by name, read once in blocks, which may exceed memory."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np

from onnxtrain.data.conversion import Array, TensorSpec, to_numpy
from onnxtrain.data.files import GrowingArray, GrowingTexts, Reader, check_regular
from onnxtrain.data.naming import Wanted, check_unique
from onnxtrain.errors import DataError
from onnxtrain.errors.spelling import checks_arguments

PARQUET_SUFFIXES: Final = (".parquet", ".pq", ".arrow", ".feather")

_PARQUET_MAGIC: Final = b"PAR1"
# Values that are converted at a time.
_BLOCK_VALUES: Final = 2**22
# Rows that are converted to Python values at a time.
_ROWS: Final = 1024


@checks_arguments
@dataclass(frozen=True)
class ParquetFile(Reader):
    """A Parquet file, or a file in Arrow's file format (Feather).

    Columns with the names of the model's inputs are its inputs; otherwise a model with one input of rank 2 takes all
    columns but the target. Columns hold numbers or booleans; targets and text inputs may be strings or categories. No
    value may be missing. The file is read once and its inputs are kept: in memory, or from 64 MiB on in a temporary
    file.

    Args:
        path: The file.
    """

    suffixes: ClassVar[tuple[str, ...]] = PARQUET_SUFFIXES

    def read(
        self, specs: Sequence[TensorSpec], *, target: str | None = None, need_target: bool = True
    ) -> tuple[dict[str, object], object | None]:
        """Return the inputs by name, and the targets or None.

        Raises:
            DataError: The file cannot be read or does not fit; the message names the column.
        """
        with self._errors() as arrow:
            return self._read(arrow, Wanted(specs, target, need_target))

    def rows(self, columns: Sequence[str] | None) -> Iterator[dict[str, Any]]:
        """Yield the rows as Python values of the columns that the file has among the given ones, or of all.

        Raises:
            DataError: The file cannot be read, or has none of these columns.
        """
        with self._errors() as arrow:
            file, schema, in_parquet = self._open(arrow)
            names = [str(name) for name in schema.names if columns is None or name in columns]
            if not names:
                listed = ", ".join(map(str, schema.names[:8]))
                raise DataError(f"{self.name} has the columns {listed}; it needs one of {', '.join(columns or ())}.")
            for block in _blocks(file, names, in_parquet, _ROWS):
                yield from block.select(names).to_pylist()

    @contextlib.contextmanager
    def _errors(self) -> Iterator[Any]:
        """Yield the package that reads, and turn its errors into sentences."""
        arrow = _pyarrow()
        try:
            check_regular(Path(self.path))
            yield arrow
        except FileNotFoundError as error:
            raise DataError(f"{self.name} does not exist; give a Parquet or Arrow file.").about(self.name) from error
        except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:
            reason = " ".join(str(error).split())[:150]
            raise DataError(f"{self.name} cannot be read as a Parquet or Arrow file: {reason}.").about(
                self.name, got=reason
            ) from error

    def _open(self, arrow: Any) -> tuple[Any, Any, bool]:
        """Open the file; return it with its schema, and whether it is in Parquet's format."""
        with Path(self.path).open("rb") as opened:
            in_parquet = opened.read(len(_PARQUET_MAGIC)) == _PARQUET_MAGIC
        if in_parquet:
            file = arrow.parquet.ParquetFile(self.path)
            return file, file.schema_arrow, True
        file = arrow.ipc.open_file(arrow.memory_map(str(self.path)))
        return file, file.schema, False

    def _read(self, arrow: Any, wanted: Wanted) -> tuple[dict[str, object], object | None]:
        file, schema, in_parquet = self._open(arrow)
        columns = [str(name) for name in schema.names]
        check_unique(columns, self.name)
        chosen, specs = wanted.of_columns(columns, self.name), wanted.specs
        label = chosen.target if wanted.need_target else None
        groups = [chosen.of(spec) for spec in specs]
        names = [*itertools.chain(*groups), *([label] if label else [])]
        types = {
            name: type_of(
                arrow, schema.field(name).type, name, text=name not in (chosen.features or ()) or name == label
            )
            for name in names
        }
        chosen.check_width(specs[0], self.name)
        kinds = [np.result_type(*{types[name] for name in group}) for group in groups]
        arrays = [GrowingArray((len(group),), kind) for group, kind in zip(groups, kinds, strict=True)]
        may_miss = {label, *(spec.name for spec in specs if spec.beside)}
        targets: GrowingArray | GrowingTexts | None = None
        if label is not None:
            targets = GrowingTexts() if types[label].kind == "O" else GrowingArray((), types[label])
        read = 0
        for block in _blocks(file, names, in_parquet, max(1, _BLOCK_VALUES // len(names))):
            columns_read = dict(zip(block.schema.names, block.columns, strict=True))
            values = {name: values_of(columns_read[name], name, read, name in may_miss) for name in names}
            for index, group in enumerate(groups):
                block_values = np.stack([values[name] for name in group], axis=1)
                if group[0] in may_miss:
                    arrays[index] = _for(block_values, arrays[index])
                arrays[index].append(block_values)
            if targets is not None and label is not None:
                targets = _for(values[label], targets) if isinstance(targets, GrowingArray) else targets
                targets.append(values[label])
            read += block.num_rows
        if not read:
            raise DataError(f"{self.name} has columns, but no rows; it needs a row per example.")
        inputs = chosen.as_inputs((array.finish() for array in arrays), specs)
        return inputs, None if targets is None else targets.finish()


def _blocks(file: Any, names: list[str], in_parquet: bool, rows: int) -> Iterator[Any]:
    if in_parquet:
        yield from file.iter_batches(rows, columns=names)
    else:
        yield from (file.get_batch(index) for index in range(file.num_record_batches))


def type_of(arrow: Any, kind: Any, name: str, *, text: bool) -> np.dtype[Any]:
    """Return the type of a column as an array; texts are refused unless ``text`` says otherwise."""
    types = arrow.types
    shown = kind
    if types.is_dictionary(kind):
        kind = kind.value_type
    if types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind):
        number: np.dtype[Any] = np.dtype(kind.to_pandas_dtype())
        return number
    if text and (types.is_string(kind) or types.is_large_string(kind)):
        return np.dtype(object)
    raise DataError(
        f"the column '{name}' holds {shown}, not numbers{' or strings' if text else ''}; convert it, or remove it."
    )


def _for(block: Array, found: GrowingArray) -> GrowingArray:
    """Return an array that takes NaN, where a block of integers has missing ones."""
    fits = found.dtype.kind in "fO" or block.dtype.kind != "f"
    return found if fits else GrowingArray.of(found.finish(), block.dtype)


def values_of(column: Any, name: str, before: int, may_miss: bool = False) -> Array:
    """Return a column of the rows from ``before`` on as an array; none may be missing, but of targets."""
    if column.null_count and not may_miss:
        row = before + int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
        raise DataError(f"the column '{name}' has no value at example {row}; fill it in, or remove the example.")
    if hasattr(column, "dictionary_decode"):
        column = column.dictionary_decode()
    return to_numpy(column.to_numpy(zero_copy_only=False), f"the column '{name}'", may_miss=may_miss)


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError:
        raise DataError("reading Parquet and Arrow needs pyarrow; install it: pip install pyarrow.") from None
    return pyarrow
