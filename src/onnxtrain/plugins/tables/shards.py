"""A table in several Parquet or CSV files, read by pyarrow row group by row group."""

from __future__ import annotations

import contextlib
import functools
import glob
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from onnxtrain.data.base import Dataset, DataSource
from onnxtrain.data.csv_file import CSV_SUFFIXES, CsvFile, separator_of
from onnxtrain.data.files import check_regular
from onnxtrain.data.hashing import Fingerprint
from onnxtrain.data.naming import Wanted, some_names
from onnxtrain.data.parquet_file import PARQUET_SUFFIXES
from onnxtrain.errors import DataError
from onnxtrain.errors.spelling import checks_arguments
from onnxtrain.plugins.tables.stream import BUFFER, ROWS, Piece, TableStream

SUFFIXES: Final = (*PARQUET_SUFFIXES, *CSV_SUFFIXES)
"""Endings of files of tables."""

_HASHED: Final = 2**16
"""Bytes at the start and at the end of a file that identify it with its size; a Parquet file ends in its footer."""


@checks_arguments
@dataclass(frozen=True)
class Shards(DataSource):
    """A table in several files, Parquet, Arrow or CSV, read row group by row group; only the targets are kept.

    Columns are those of a :class:`onnxtrain.data.ParquetFile`. The first file decides the names and the types of the
    columns; the others may have them in another order. The number of rows is read from Parquet's footers; CSV files are
    counted once. ``validation=0.2`` holds out random rows, or the last ones with ``shuffle=False``.

    An epoch reads the row groups (of CSV the files) in a random order, and shuffles their rows through a buffer: each
    row that is read takes the place of a random one in it. The order depends on the seed and the epoch only. Of several
    processes each trains its share of every batch, as with any data.

    Args:
        path: A pattern such as ``"data/*.parquet"``, a folder, a path, or a list of paths.
        buffer: Rows that shuffling holds; a table with fewer rows is shuffled uniformly.
        delimiter: CSV: separator of cells; by default the most frequent of comma, semicolon, tab and bar in the first
            line.
        encoding: CSV: by default UTF-8.
        decimal: CSV: decimal sign, by default ``"."``.

    Example:
        >>> import onnxtrain
        >>> data = onnxtrain.tables.Shards("clicks/*.parquet", buffer=100_000)
        >>> trainer.fit(data, target="bought", epochs=3)  # doctest: +SKIP
    """

    path: Any
    buffer: int = BUFFER
    delimiter: str | None = None
    encoding: str | None = None
    decimal: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.buffer, int) or isinstance(self.buffer, bool) or self.buffer < 1:
            raise DataError(f"buffer is {self.buffer!r}; it needs a number of rows of at least 1.").about(
                "buffer", got=self.buffer, wanted=1
            )
        paths = self.path if isinstance(self.path, list | tuple) else [self.path]
        wrong = next((path for path in paths if not isinstance(path, str | os.PathLike)), None)
        if wrong is not None:
            raise DataError(
                f"the table has {wrong!r} for a path; give a pattern, a folder, a path, or a list of paths."
            ).about("path", got=wrong)
        CsvFile("", self.delimiter, self.encoding, self.decimal)  # checks the settings

    @property
    def name(self) -> str:
        """Name of the table in messages."""
        if isinstance(self.path, str | os.PathLike):
            return f"'{os.fspath(self.path)}'"
        return f"'{os.fspath(self.path[0])}' and {len(self.path) - 1} more" if self.path else "the list of files"

    def files(self) -> list[Path]:
        """Return the files, those of a pattern or a folder by name.

        Raises:
            DataError: There are none, or they are of several kinds.
        """
        if not isinstance(self.path, str | os.PathLike):
            found = [Path(path) for path in self.path]
        elif Path(self.path).is_dir():
            found = sorted(files_of(Path(self.path)))
        elif os.path.exists(self.path):
            found = [Path(self.path)]
        else:
            found = [Path(path) for path in sorted(glob.glob(os.fspath(self.path), recursive=True))]
        if not found:
            raise DataError(
                f"{self.name} matches no file; give a folder of tables, a list of paths, or a pattern such as "
                "'data/*.parquet'."
            ).about(self.name)
        kinds = {is_csv(path) for path in found}
        other = next((path for path in found if not is_table(path)), None)
        if other is not None or len(kinds) > 1:
            shown = f"'{other}', which is no table" if other is not None else "CSV files beside others"
            raise DataError(f"{self.name} has {shown}; it needs Parquet files, Arrow files or CSV files alone.").about(
                self.name, got=str(other)
            )
        for path in found:
            try:
                check_regular(path)
            except OSError as error:
                raise DataError(f"'{path}' cannot be read: {error.strerror or error}.").about(str(path)) from error
        return found

    def dataset(self, wanted: Wanted) -> Dataset:
        """Return the rows in batches; see `DataSource.dataset`."""
        whole = {spec.name for spec in wanted.specs if spec.dtype.kind in "iu"}
        with readable(self.name):
            table = self.table(() if wanted.specs[0].name in whole and len(wanted.specs) == 1 else whole)
            pieces = [piece for fragment in table.get_fragments() for piece in self._pieces(fragment, table.schema)]
            return TableStream(
                pieces, table.schema, wanted, name=self.name, buffer=self.buffer, content=_content(table.files)
            )

    def table(self, whole: Collection[str] | None = None) -> Any:
        """Open the files as a ``pyarrow.dataset.Dataset``.

        Args:
            whole: Columns of CSV files that stay integers where the first file has integers; None for all.
        """
        arrow = import_arrow()
        files = self.files()
        if not is_csv(files[0]):
            return arrow.dataset.dataset(files, format="parquet" if _is_parquet(files[0]) else "ipc")
        encoding = self.encoding or "utf-8"
        with files[0].open(encoding=encoding) as file:
            separator = self.delimiter or separator_of(file.readline())
        form = arrow.dataset.CsvFileFormat(
            parse_options=arrow.csv.ParseOptions(delimiter=separator, newlines_in_values=True),
            read_options=arrow.csv.ReadOptions(encoding=encoding),
            convert_options=arrow.csv.ConvertOptions(decimal_point=self.decimal or "."),
        )
        found = arrow.dataset.dataset(files, format=form)
        fields = [
            field.with_type(arrow.float64())
            if arrow.types.is_null(field.type)
            or (arrow.types.is_integer(field.type) and whole is not None and field.name not in whole)
            else field
            for field in found.schema
        ]
        return arrow.dataset.dataset(files, format=form, schema=arrow.schema(fields))

    def _pieces(self, fragment: Any, schema: Any) -> Iterator[Piece]:
        """Yield the row groups of a file, or the file as a whole."""
        missing = [name for name in schema.names if name not in fragment.physical_schema.names]
        if missing:
            raise DataError(
                f"'{fragment.path}' lacks the columns {some_names(missing)}, which the first file of {self.name} has; "
                "give all files the same columns."
            ).about(fragment.path, got=fragment.physical_schema.names, wanted=schema.names)
        parts = fragment.split_by_row_group(schema=schema) if hasattr(fragment, "split_by_row_group") else [fragment]
        for part in parts:
            rows = part.row_groups[0].num_rows if hasattr(part, "row_groups") else part.count_rows()
            yield Piece(rows, functools.partial(_blocks, part, schema))


def _blocks(part: Any, schema: Any, columns: Sequence[str]) -> Iterator[Any]:
    """Read columns of a part, in record batches."""
    with readable(f"'{part.path}'"):
        yield from part.to_batches(schema=schema, columns=list(columns), batch_size=ROWS)


def _content(files: Sequence[str]) -> str:
    """Return a hash that identifies files by their sizes, starts and ends."""
    content = Fingerprint()
    for path in files:
        with open(path, "rb") as file:
            content.add_bytes(file.read(_HASHED))
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _HASHED))
            content.add_bytes(file.read())
            content.add_text(str(size))
    return content.digest()


@contextlib.contextmanager
def readable(name: str) -> Iterator[None]:
    """Turn errors of pyarrow into sentences."""
    arrow = import_arrow()
    try:
        yield
    except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())[:150]
        raise DataError(f"{name} cannot be read as a table: {reason}.").about(name, got=reason) from error


def import_arrow() -> Any:
    """Return pyarrow with its readers."""
    try:
        import pyarrow
        import pyarrow.csv
        import pyarrow.dataset
    except ImportError:
        raise DataError("reading shards of tables needs pyarrow; install it: pip install pyarrow.") from None
    return pyarrow


def is_csv(path: str | os.PathLike[str]) -> bool:
    """Return whether a path has the ending of CSV files."""
    return os.fspath(path).lower().endswith(CSV_SUFFIXES)


def is_table(path: object) -> bool:
    """Return whether a value is a path with the ending of a table."""
    return isinstance(path, str | os.PathLike) and os.fspath(path).lower().endswith(SUFFIXES)


def _is_parquet(path: Path) -> bool:
    return path.suffix.lower() in (".parquet", ".pq")


def files_of(folder: Path) -> Iterator[Path]:
    """Yield the files of a folder and its subfolders, without hidden ones and those such as ``_SUCCESS``."""
    for path in folder.rglob("*"):
        if path.is_file() and not any(part.startswith((".", "_")) for part in path.relative_to(folder).parts):
            yield path


def are_shards(source: object) -> bool:
    """Return whether data are a pattern of tables that is no path, a folder of tables alone, or a list of tables."""
    if isinstance(source, list | tuple):
        return bool(source) and is_table(source[0]) and all(map(is_table, source))
    if not isinstance(source, str | os.PathLike):
        return False
    if is_table(source):
        return glob.has_magic(os.fspath(source)) and not os.path.exists(source)
    folder = Path(source)
    try:
        if not folder.is_dir():
            return False
    except (OSError, ValueError):  # a name that no file can have
        return False
    files = files_of(folder)
    first = next(files, None)
    return is_table(first) and all(map(is_table, files))
