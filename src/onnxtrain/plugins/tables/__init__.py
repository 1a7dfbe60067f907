"""Tables in many files, windows of tables whose rows follow each other in time, sparse matrices, names of rows."""

import lazy_loader

from onnxtrain.errors.registries import register_flags, register_reader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def register() -> None:
    """Add the reader of shards, of streams and of windows, that of sparse matrices, and flags."""
    register_reader("tables", f"{__name__}.reading:read_tables")
    register_reader("sparse_matrices", f"{__name__}.sparse:read_sparse")
    register_flags("tables", f"{__name__}.flags:TableFlags", of="data")
