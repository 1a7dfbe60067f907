"""Tables in many files, read row group by row group; windows of tables whose rows follow each other in time."""

import lazy_loader

from onnxtrain.errors.registries import register_flags, register_reader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def register() -> None:
    """Add the reader of shards, of streams and of windows, and its flags."""
    register_reader("tables", f"{__name__}.reading:read_tables")
    register_flags("tables", f"{__name__}.flags:TableFlags", of="data")
