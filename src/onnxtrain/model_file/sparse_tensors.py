"""Sparse initializers: checked by what they say, made dense only when their values are read."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from onnx import SparseTensorProto, TensorProto, numpy_helper

from onnxtrain.errors import ModelError
from onnxtrain.model_file.external import data_bytes

_MOST_BYTES = (1 << 31) - 1
"""The most bytes of a tensor in a model; ONNX Runtime also makes sparse tensors dense."""

_INDEX_TYPES = (TensorProto.INT64, TensorProto.INT32, TensorProto.INT16, TensorProto.INT8)


def check_sparse(label: str, sparse: SparseTensorProto) -> None:
    """Check a sparse initializer, the sizes of whose parts are right, without making it dense.

    Raises:
        ModelError: Its parts do not fit each other, or it is too large.
    """
    whose = f"{label} has the sparse initializer {sparse.values.name!r}"
    dims, stored = list(sparse.dims), list(sparse.values.dims)
    if any(part.data_location == TensorProto.EXTERNAL for part in (sparse.values, sparse.indices)):
        raise ModelError(f"{whose} with its data in another file, which is not supported; save it inside.")
    dense = TensorProto(name=sparse.values.name, data_type=sparse.values.data_type, dims=dims)
    if data_bytes(dense) > _MOST_BYTES:
        raise ModelError(
            f"{whose} of shape {dims}, which takes {data_bytes(dense)} bytes dense, as ONNX Runtime makes it; a tensor "
            "has 2 GiB at most: export the model again."
        )
    if len(stored) != 1 or sparse.indices.data_type not in _INDEX_TYPES:
        raise ModelError(f"{whose}, whose values are no list or whose indices are no integers; export the model again.")
    count = stored[0]
    if list(sparse.indices.dims) not in ([count], [count, len(dims)]):
        raise ModelError(
            f"{whose} with {count} values, but indices of shape {list(sparse.indices.dims)}; it needs [{count}] or "
            f"[{count}, {len(dims)}]: export the model again."
        )
    indices = numpy_helper.to_array(sparse.indices)
    outside = (indices < 0) | (indices >= np.asarray(dims if indices.ndim == 2 else math.prod(dims)))
    if outside.any():
        raise ModelError(
            f"{whose} of shape {dims} with the index {indices[outside][0]}, which lies outside; export the model again."
        )


def dense_array(sparse: SparseTensorProto) -> npt.NDArray[np.generic]:
    """The values of a sparse initializer that was checked, with all zeros."""
    values, indices = numpy_helper.to_array(sparse.values), numpy_helper.to_array(sparse.indices)
    dense = np.zeros(list(sparse.dims), values.dtype)
    if indices.ndim == 1:
        dense.reshape(-1)[indices] = values
    else:
        dense[tuple(indices.T)] = values
    return dense


def declared(sparse: SparseTensorProto) -> TensorProto:
    """The dense initializer, without data."""
    return TensorProto(name=sparse.values.name, data_type=sparse.values.data_type, dims=sparse.dims)
