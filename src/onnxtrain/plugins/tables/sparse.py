"""Sparse matrices of SciPy, such as those of a TfidfVectorizer: rows become dense when a batch reads them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from onnxtrain.data.conversion import Array, LazyRows


class SparseRows(LazyRows):
    """A sparse matrix [N, F] as an array, of which only the rows that are read are dense."""

    def __init__(self, matrix: Any) -> None:
        self._matrix = matrix.tocsr()
        self.dtype, self.shape, self.ndim = matrix.dtype, matrix.shape, 2

    def __getitem__(self, rows: Any) -> Array:
        return np.asarray(self._matrix[rows].toarray())


def read_sparse(source: Any, reading: Any) -> Any:
    """Return data with rows in place of sparse matrices: of one, of a tuple, or of a mapping from name to array."""
    if _is_sparse(source):
        return SparseRows(source)
    if type(source) is tuple and any(map(_holds_sparse, source)):
        return tuple(read_sparse(part, reading) for part in source)
    if isinstance(source, Mapping) and any(map(_is_sparse, source.values())):
        return {name: read_sparse(value, reading) for name, value in source.items()}
    return source


def _holds_sparse(source: Any) -> bool:
    return _is_sparse(source) or (isinstance(source, Mapping) and any(map(_is_sparse, source.values())))


def _is_sparse(value: Any) -> bool:
    """Return whether a value is a sparse matrix or array of SciPy with two axes."""
    return type(value).__module__.startswith("scipy.sparse") and getattr(value, "ndim", 0) == 2
