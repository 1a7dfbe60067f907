"""Flags of tables: windows of rows in the order of time."""

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
    """Settings of windows."""

    window: int | None = flag(None, "Time series: rows of an input; needs --horizon.", metavar="ROWS")
    horizon: int | None = flag(None, "Time series: rows to predict after them.", metavar="ROWS")

    def read(self, path: str, loss: str | None) -> Any:
        """Return a table in several files, or windows of a table; ``None`` for other data."""
        from onnxtrain.plugins.tables.shards import Shards, are_shards, is_csv, is_table

        if (self.window is None) != (self.horizon is None):
            raise OptionError("--window and --horizon go together; give both, such as --window 96 --horizon 24.")
        several, windowed = are_shards(path), self.window is not None
        name = (loss or "").partition("(")[0]
        if (not several and not (windowed and is_table(path))) or name == "next_token":
            return None
        settings = _CSV_SETTINGS if several or is_csv(path) else ()
        self.only(*settings, "window", "horizon", kind="a table", path=path)
        found = Shards(path, **{each: getattr(self, each) for each in settings})
        if self.window is None or self.horizon is None:
            return found
        from onnxtrain.plugins.tables.windows import Windows

        return Windows(found, self.window, self.horizon)
