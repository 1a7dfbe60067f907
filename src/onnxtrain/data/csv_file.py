"""CSV files: columns by name, read once in blocks, which may exceed memory."""

from __future__ import annotations

import codecs
import csv
import itertools
import logging
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, ClassVar, Final, NamedTuple, TypeVar

import numpy as np

from onnxtrain.data.conversion import Array, TensorSpec, convert_cells, is_number, is_truth_word, kind_of, truth_digit
from onnxtrain.data.files import GrowingArray, GrowingTexts, Reader, check_regular
from onnxtrain.data.naming import Wanted, check_unique
from onnxtrain.errors import DataError
from onnxtrain.errors.spelling import checks_arguments

_logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")

CSV_SUFFIXES: Final = (".csv", ".tsv")

_SEPARATORS: Final = (",", ";", "\t", "|")
_BOMS: Final = {  # UTF-32 first: its mark begins with that of UTF-16
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
# Bytes that are inspected to determine the encoding.
_START_BYTES: Final = 4096
_LINE_BREAK: Final = re.compile(r"\r\n|\r|\n")
# A missing target among numbers.
_NAN: Final = "nan"
# Cells that are converted at a time.
_BLOCK_CELLS: Final = 2**17


@checks_arguments
@dataclass(frozen=True)
class CsvFile(Reader):
    """A CSV file with column names in its first line.

    Columns with the names of the model's inputs are its inputs; otherwise a model with one input of rank 2 takes all
    columns but the target. If the first cell of the target is not a number, the column holds class labels. Every other
    cell needs a finite number, or the words true and false, which are read as 1 and 0. The file is read once and kept
    as numbers: in memory, or from 64 MiB on in a temporary file.

    Args:
        path: The file.
        delimiter: Separator of cells; by default the most frequent of comma, semicolon, tab and bar in the first line.
        encoding: By default that of the byte-order mark, else UTF-8, or Latin-1 if the bytes are not UTF-8.
        decimal: Decimal sign; by default ``"."``, or ``","`` if the delimiter is a semicolon and numbers have commas.
            With ``","``, points group thousands.
    """

    suffixes: ClassVar[tuple[str, ...]] = CSV_SUFFIXES

    delimiter: str | None = None
    encoding: str | None = None
    decimal: str | None = None

    def __post_init__(self) -> None:
        if self.delimiter is not None and (len(self.delimiter) != 1 or self.delimiter in '"\r\n'):
            raise DataError(f"delimiter is {self.delimiter!r}; it must be one character, such as ';'.")
        if self.decimal not in (None, ".", ","):
            raise DataError(f"decimal is {self.decimal!r}; it must be '.' or ','.")
        if self.encoding is not None:
            try:
                "".encode(self.encoding)
            except (LookupError, UnicodeError):
                raise DataError(
                    f"encoding is {self.encoding!r}, which is not a text encoding of Python; try 'utf-8'."
                ).about("encoding", got=self.encoding) from None

    def read(
        self, specs: Sequence[TensorSpec], *, target: str | None = None, need_target: bool = True
    ) -> tuple[dict[str, object], object | None]:
        """Return the inputs by name, and the targets or None.

        Raises:
            DataError: The file cannot be read or does not fit; the message names the line and the column.
        """
        return self._with_file(lambda file: self._read_open(file, Wanted(specs, target, need_target)))

    def column_names(self) -> list[str]:
        """Return the names in the first line.

        Raises:
            DataError: The file cannot be read, or has no names.
        """
        return self._with_file(lambda file: self._start(file)[2])

    def _with_file(self, read: Callable[[IO[str]], _Result]) -> _Result:
        """Read the file in the first encoding that fits."""
        path = Path(self.path)
        encodings = self._encodings(path)
        for encoding in encodings:
            try:
                with path.open(encoding=encoding, newline="") as file:
                    return read(file)
            except UnicodeError as error:  # some codecs raise it without a position
                if encoding == encodings[-1]:
                    where = f"{error.reason} at byte {error.start}" if isinstance(error, UnicodeDecodeError) else error
                    raise DataError(
                        f"{self.name} is not in the encoding {encoding} ({where}); name its encoding: "
                        "onnxtrain.data.CsvFile(path, encoding='latin-1')."
                    ) from error
                _logger.warning("%s is not in UTF-8; it is read as Latin-1.", self.name)
            except OSError as error:
                raise DataError(f"{self.name} cannot be read: {error.strerror or error}.") from error
            except csv.Error as error:
                raise DataError(f"{self.name} is not a valid CSV file: {error}; look for an unclosed quote.") from error
        raise AssertionError("the last encoding returns or raises")

    def _encodings(self, path: Path) -> list[str]:
        try:
            check_regular(path)
            with path.open("rb") as file:
                start = file.read(_START_BYTES)
        except FileNotFoundError as error:
            raise DataError(
                f"{self.name} does not exist; give a CSV file with column names in the first line."
            ) from error
        except OSError as error:
            raise DataError(f"{self.name} cannot be read: {error.strerror or error}.") from error
        if self.encoding is not None:
            return [self.encoding]
        marked = next((encoding for mark, encoding in _BOMS.items() if start.startswith(mark)), None)
        if marked is None and b"\0" in start:
            raise DataError(
                f"{self.name} holds zero bytes, so it is not UTF-8 text; if it has another encoding, name it: "
                "onnxtrain.data.CsvFile(path, encoding='utf-16-le')."
            ).about(self.name)
        return [marked] if marked else ["utf-8", "latin-1"]

    def _start(self, file: IO[str]) -> tuple[str, Any, list[str]]:
        """Return the separator, the lines after the header, and the names of the columns."""
        first = next((line for line in file if line.strip()), None)
        if first is None:
            raise DataError(f"{self.name} is empty; it needs a line of column names, and a line per example.")
        delimiter = self.delimiter or separator_of(first)
        file.seek(0)
        rows = csv.reader(file, delimiter=delimiter, skipinitialspace=True)
        return delimiter, rows, self._header(next(row for row in rows if row))

    def _read_open(self, file: IO[str], wanted: Wanted) -> tuple[dict[str, object], object | None]:
        """Return the inputs by name, and the targets if they are needed, of an open file."""
        delimiter, rows, columns = self._start(file)
        chosen, specs = wanted.of_columns(columns, self.name), wanted.specs
        chosen.check_width(specs[0], self.name)
        sign = _DecimalSign(self.name, self.decimal, delimiter)
        indices = {name: index for index, name in enumerate(columns)}
        parts = [
            _Part([indices[name] for name in chosen.of(spec)], _number_type(spec), sign)
            for spec in specs
            if not spec.beside
        ]
        label = None if chosen.target is None or not wanted.need_target else _Target(indices[chosen.target], sign)
        beside = {spec.name: _Target(indices[spec.name], sign) for spec in specs if spec.beside}
        table = _Table(self.name, columns, rows)
        arrays = [GrowingArray((len(part.indices),), part.dtype) for part in parts]
        empty = True
        for block in table.blocks():
            empty = False
            for part, array in zip(parts, arrays, strict=True):
                array.append(part.values(block, table))
            for column in (*beside.values(), *([] if label is None else [label])):
                column.append(block, table)
        if empty:
            raise DataError(f"{self.name} has column names, but no line of data; it needs a line per example.")
        inputs = chosen.as_inputs((array.finish() for array in arrays), specs[: len(arrays)])
        columns_beside = {name: column.finish() for name, column in beside.items()}
        return {**inputs, **columns_beside}, None if label is None else label.finish()

    def _header(self, row: list[str]) -> list[str]:
        columns = [name.strip() for name in row]
        for index, name in enumerate(columns):
            if not name:
                raise DataError(
                    f"{self.name} has no name for column {index + 1} in its first line; name it or remove it (pandas "
                    "writes no index with to_csv(index=False))."
                )
        check_unique(columns, self.name)
        if all(is_number(name) for name in columns) and columns != [str(index) for index in range(len(columns))]:
            raise DataError(
                f"{self.name} has only numbers in its first line ({', '.join(columns[:4])} ...); the first line must "
                "have the column names."
            )
        return columns


class _Block(NamedTuple):
    rows: list[list[str]]
    read: list[list[str]]
    before: int

    def line(self, row: int) -> int:
        """Return the number of the line in which a row ends, counted from 1."""
        ends = itertools.accumulate(1 + sum(len(_LINE_BREAK.findall(cell)) for cell in cells) for cells in self.read)
        filled = (end for end, cells in zip(ends, self.read, strict=True) if cells)
        return self.before + next(itertools.islice(filled, row, None))


@dataclass(frozen=True)
class _Table:
    name: str
    columns: list[str]
    reader: Any  # csv.reader's type is not public

    def blocks(self) -> Iterator[_Block]:
        """Yield all lines except blank ones."""
        width = len(self.columns)
        before = self.reader.line_num
        while read := list(itertools.islice(self.reader, max(1, _BLOCK_CELLS // width))):
            block = _Block([row for row in read if row], read, before)
            wrong = next((index for index, row in enumerate(block.rows) if len(row) != width), None)
            if wrong is not None:
                raise DataError(
                    f"line {block.line(wrong)} of {self.name} has {len(block.rows[wrong])} cells, but there are "
                    f"{width} columns; correct the line, or quote cells that contain the separator."
                )
            if block.rows:
                yield block
            before = self.reader.line_num

    def error(self, block: _Block, row: int, column: int, needed: str) -> DataError:
        """Return an error that describes one cell."""
        cell = block.rows[row][column]
        where = f"line {block.line(row)} of {self.name}"
        if _is_missing(cell):
            shown = f" ({cell.strip()!r})" if cell.strip() else ""
            return DataError(
                f"{where} has no value{shown} in the column '{self.columns[column]}'; fill in {needed}, or remove "
                "the line."
            )
        return DataError(f"{where} has {cell!r} in the column '{self.columns[column]}', which needs {needed}.").about(
            self.columns[column], got=cell, wanted=needed
        )


def _is_missing(cell: str) -> bool:
    return cell.strip().lower() in ("", "nan", "na", "n/a", "null", "none")


@dataclass(frozen=True)
class _Part:
    """Columns converted to numbers of one type, or one column of strings."""

    indices: list[int]
    dtype: np.dtype[Any]
    sign: _DecimalSign
    may_miss: bool = False
    _words: list[list[int]] = field(default_factory=list)

    def values(self, block: _Block, table: _Table) -> Array:
        """Convert a block to [lines, columns]."""
        cells = self._cells(block.rows)
        if self.dtype.kind == "T":
            return np.array(cells, self.dtype)
        missing = self.may_miss and self.dtype.kind == "f"
        if missing:
            cells = [[_NAN if _is_missing(cell) else cell for cell in row] for row in cells]
        decimal = self.sign.of(itertools.chain.from_iterable(cells))
        if self.dtype.kind != "b":
            cells = self._with_truth_values(cells, block, table)
        try:
            array = convert_cells(cells, decimal, self.dtype)
        except (ValueError, OverflowError, KeyError):
            array = None
        if array is not None and (np.isfinite(array) | (np.isnan(array) & missing)).all():
            return array
        for row, found in enumerate(cells):
            for index, cell in zip(self.indices, found, strict=True):
                if not is_number(cell, decimal, self.dtype) and not (missing and cell == _NAN):
                    needed = {"f": "a number", "b": "true or false"}.get(self.dtype.kind, "an integer")
                    range_ = (
                        f" that {self.dtype} can hold" if is_number(cell, decimal) and self.dtype.kind != "b" else ""
                    )
                    raise table.error(block, row, index, needed + range_)
        raise AssertionError("a block does not convert, but every cell of it does")

    def _with_truth_values(
        self, cells: Sequence[Sequence[str]], block: _Block, table: _Table
    ) -> Sequence[Sequence[str]]:
        """Replace true by 1 and false by 0, in columns whose first cell is one of these words."""
        if not self._words:
            self._words.append([index for index, cell in enumerate(cells[0]) if is_truth_word(cell)])
        if not self._words[0]:
            return cells
        changed = [list(row) for row in cells]
        for column in self._words[0]:
            for number, row in enumerate(changed):
                if not is_truth_word(row[column]):
                    raise table.error(block, number, self.indices[column], "true or false, as the cells above it")
                row[column] = truth_digit(row[column])
        return changed

    def _cells(self, rows: list[list[str]]) -> Sequence[Sequence[str]]:
        first, last = self.indices[0], self.indices[-1]
        if last - first == len(self.indices) - 1:  # adjacent, unless the target is between them
            return [row[first : last + 1] for row in rows]
        return list(map(operator.itemgetter(*self.indices), rows))


@dataclass
class _DecimalSign:
    """The decimal sign of a file's numbers: by default a comma where semicolons separate cells and no point groups."""

    name: str
    given: str | None
    delimiter: str
    _seen: dict[str, str] = field(default_factory=dict)

    def of(self, cells: Iterable[str]) -> str:
        """Return the sign, given more cells of numbers."""
        if self.given is not None:
            return self.given
        if self.delimiter != ";":
            return "."
        for cell in cells:
            for sign in (".", ","):
                if sign in cell and sign not in self._seen and (is_number(cell) or is_number(cell, ",")):
                    self._seen[sign] = cell.strip()
        if len(self._seen) > 1:
            raise DataError(
                f"{self.name} has numbers with a point ({self._seen['.']!r}) and numbers with a comma "
                f"({self._seen[',']!r}), so that one of them may group thousands; give the decimal sign: "
                "onnxtrain.data.CsvFile(path, decimal=',')."
            )
        return "," if "," in self._seen else "."


class _Target:
    """A target column: integers, numbers or labels, depending on its first cell; missing ones are NaN, or empty."""

    def __init__(self, index: int, sign: _DecimalSign) -> None:
        self._index, self._sign = index, sign
        self._found: GrowingArray | GrowingTexts | None = None
        self._undecided = False

    def append(self, block: _Block, table: _Table) -> None:
        """Add a block; an error names a cell that is not a number though the first one is."""
        first = block.rows[0][self._index]
        if self._found is None:
            number = is_number(first, self._sign.of([first]), finite=False) and not _is_missing(first)
            self._found = GrowingArray((), np.dtype(np.int64)) if number else GrowingTexts()
            self._undecided = _is_missing(first)
        if isinstance(self._found, GrowingTexts):
            self._found.append([row[self._index].strip() for row in block.rows])
            return
        if self._found.dtype == np.int64:
            try:
                self._found.append(self._values(block, table, self._found.dtype))
                return
            except DataError:
                self._found = GrowingArray.of(self._found.finish(), np.dtype(np.float64))
        self._found.append(self._values(block, table, self._found.dtype))

    def _values(self, block: _Block, table: _Table, dtype: np.dtype[Any]) -> Array:
        return _Part([self._index], dtype, self._sign, may_miss=True).values(block, table)[:, 0]

    def finish(self) -> Array:
        """Return all targets."""
        found = self._found
        assert found is not None
        if isinstance(found, GrowingArray) or not self._undecided:
            return found.finish()
        sign = self._sign.of(text for text in found.distinct if not _is_missing(text))
        if not all(_is_missing(text) or is_number(text, sign) for text in found.distinct):
            return found.finish()
        values = {text: _NAN if _is_missing(text) else text for text in found.distinct}
        return GrowingArray.of(
            found.finish(),
            np.dtype(np.float64),
            lambda block: convert_cells([[values[str(text)] for text in block]], sign, np.dtype(np.float64))[0],
        ).finish()


def _number_type(spec: TensorSpec) -> np.dtype[Any]:
    if spec.dtype.kind in "iuf":
        return spec.dtype
    kinds: dict[str, np.dtype[Any]] = {"string": np.dtypes.StringDType(), "boolean": np.dtype(bool)}
    return kinds.get(kind_of(spec.dtype), np.dtype(np.float32))  # float32 holds every bfloat16


def separator_of(line: str) -> str:
    """Return the separator that gives the most cells of a line; a comma if none occurs."""
    return max(_SEPARATORS, key=lambda mark: _cells_of(line, mark))


def _cells_of(line: str, separator: str) -> int:
    try:
        return len(next(csv.reader([line], delimiter=separator), []))
    except csv.Error:  # without this separator, the whole line may be too long for one cell
        return 0
