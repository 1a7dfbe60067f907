"""Sparse storage: mostly-zero initializers become ``sparse_initializer``, which stores the non-zero values only.

ONNX Runtime densifies sparse initializers when it loads a model: they save bytes on disk and on the wire, not memory or
time. ONNX's shape inference (``check_model(full_check=True)``) does not resolve them as inputs of operators; ONNX
Runtime and ``check_model`` without shape inference do.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping

import numpy as np
import onnx
from google.protobuf.message import EncodeError  # type: ignore[import-untyped]
from onnx import TensorProto, helper, numpy_helper

from onnxtrain.errors import ModelError
from onnxtrain.errors.spelling import checks_arguments
from onnxtrain.model_file.file import ModelFile
from onnxtrain.model_file.writing import check_writable

_INDEX_BYTES = 8
_DTYPES = (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16)


@checks_arguments
def save_sparse(
    model: str | os.PathLike[str] | onnx.ModelProto | ModelFile,
    path: str | os.PathLike[str],
    values: Mapping[str, np.ndarray] | None = None,
    *,
    names: Collection[str] | None = None,
) -> list[str]:
    """Write a model with initializers stored sparse where that takes fewer bytes.

    A sparse initializer holds its non-zero values and their int64 indices into the flattened tensor: 12 bytes for each
    non-zero float32 weight instead of 4 for each weight, so that it pays above two thirds of zeros. Everything else
    stays the same, names and order included; external data moves into the file.

    Args:
        model: The model.
        path: The new file.
        values: New values of initializers, cast to the model's types.
        names: The initializers that may become sparse; by default all floating-point ones of rank 2 or more.

    Returns:
        The names of the initializers that became sparse.

    Raises:
        ModelError: A value does not fit, or the file cannot be written or would exceed 2 GiB.

    Example:
        >>> import tempfile
        >>> import onnxtrain
        >>> model = onnxtrain.examples.mlp((4, 8, 3))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_sparse(model, f"{folder}/model.onnx", {"layer1.weight": np.zeros((8, 4), np.float32)})
        ['layer1.weight']
    """
    file = model if isinstance(model, ModelFile) else ModelFile.load(model)
    check_writable(path)
    dense = file.dense()
    given = {name: _fitting(array, dense.declared(name)) for name, array in (values or {}).items()}
    proto = dense.inlined(without=given)
    graph = proto.graph
    sparse, kept = [], []
    for tensor in graph.initializer:
        array = given.get(tensor.name)
        if array is None:
            array = numpy_helper.to_array(tensor) if tensor.data_type in _DTYPES else None
        allowed = len(tensor.dims) >= 2 if names is None else tensor.name in names
        if allowed and array is not None and tensor.data_type in _DTYPES and pays(array):
            graph.sparse_initializer.append(_sparse(array, tensor))
            sparse.append(tensor.name)
            continue
        if tensor.name in given:
            new = numpy_helper.from_array(np.ascontiguousarray(given[tensor.name]), tensor.name)
            new.doc_string = tensor.doc_string
            tensor.CopyFrom(new)
        kept.append(tensor)
    del graph.initializer[:]
    graph.initializer.extend(kept)
    try:
        data = proto.SerializeToString()
    except (EncodeError, ValueError) as error:
        raise ModelError(
            f"{str(path)!r} would be larger than 2 GiB, which an ONNX file cannot be; store the weights dense."
        ) from error
    file.replace_by(path, data)
    return sparse


def _fitting(array: np.ndarray, tensor: TensorProto) -> np.ndarray:
    """Cast a new value to its initializer's type."""
    if array.shape != tuple(tensor.dims):
        raise ModelError(
            f"The initializer {tensor.name!r} has shape {tuple(tensor.dims)}, but its new value {array.shape}."
        ).about(tensor.name, got=array.shape, wanted=tuple(tensor.dims))
    dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
    if not np.can_cast(array.dtype, dtype, "same_kind"):
        raise ModelError(
            f"The initializer {tensor.name!r} is {dtype}, but its new value {array.dtype}; convert it."
        ).about(tensor.name, got=array.dtype, wanted=dtype)
    return array.astype(dtype, copy=False)


def pays(array: np.ndarray) -> bool:
    """Return whether an array takes fewer bytes sparse than dense.

    Example:
        >>> pays(np.array([0, 0, 0, 1], np.float32)), pays(np.array([0, 0, 1], np.float32))
        (True, False)
    """
    return int(np.count_nonzero(array)) * (_INDEX_BYTES + array.itemsize) < array.size * array.itemsize


def _sparse(array: np.ndarray, tensor: TensorProto) -> onnx.SparseTensorProto:
    flat = array.reshape(-1)
    indices = np.flatnonzero(flat).astype(np.int64)
    values = numpy_helper.from_array(flat[indices], tensor.name)
    values.doc_string = tensor.doc_string
    return onnx.SparseTensorProto(values=values, indices=numpy_helper.from_array(indices), dims=list(tensor.dims))
