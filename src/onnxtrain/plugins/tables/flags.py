"""Flags of tables: windows of rows in the order of time, and a column that names the rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from onnxtrain.cli.flags import READING, flag, grouped
from onnxtrain.cli.reader_flags import DataFlags
from onnxtrain.errors import OptionError

_CSV_SETTINGS: Final = ("delimiter", "encoding", "decimal")


@grouped(READING)
@dataclass(frozen=True)
class TableFlags(DataFlags):
    """Settings of tables."""

    window: int | None = flag(None, "Time series: rows of an input; needs --horizon.", metavar="ROWS")
    horizon: int | None = flag(None, "Time series: rows to predict after them.", metavar="ROWS")
    id: str | None = flag(None, "Tables: a column of names, no input.", metavar="NAME")

    def read(self, path: str, loss: str | None) -> Any:
        """Return a table in several files, windows of a table, or rows with names; ``None`` for other data."""
        from onnxtrain.plugins.tables.shards import Shards, are_shards, is_csv, is_table

        if (self.window is None) != (self.horizon is None):
            raise OptionError("--window and --horizon go together; give both, such as --window 96 --horizon 24.")
        several, windowed = are_shards(path), self.window is not None
        name = (loss or "").partition("(")[0]
        single = is_table(path) and not several
        if name != "next_token" and self.id is not None and single and not windowed and self.tokenizer is None:
            return self._identified(path, self.id)
        if (not several and not (windowed and is_table(path))) or name == "next_token":
            return None
        settings = _CSV_SETTINGS if several or is_csv(path) else ()
        self.only(*settings, "window", "horizon", kind="a table", path=path)
        found = Shards(path, **{each: getattr(self, each) for each in settings})
        if self.window is None or self.horizon is None:
            return found
        from onnxtrain.plugins.tables.windows import Windows

        return Windows(found, self.window, self.horizon)

    def _identified(self, path: str, column: str) -> Any:
        from onnxtrain.data import CsvFile, ParquetFile
        from onnxtrain.plugins.tables.identified import IdentifiedRows
        from onnxtrain.plugins.tables.shards import is_csv

        settings = _CSV_SETTINGS if is_csv(path) else ()
        self.only(*settings, "id", kind="a table", path=path)
        own = {each: getattr(self, each) for each in settings}
        return IdentifiedRows(CsvFile(path, **own) if is_csv(path) else ParquetFile(path), column)
