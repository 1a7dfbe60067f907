"""One call of an operator of the native library on ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
from kernel_case import Case
from onnx import helper, numpy_helper
from optimizer_sessions import element_type, session

from onnxtrain.graph.upstream.sessions import fetched, in_place, is_foreign
from onnxtrain.runtime.native import custom_ops_library


def run(case: Case, path: str | None = None, threads: int = 2) -> list[np.ndarray | None]:
    """The outputs of a case, by default all of the type of its last floating input, by a library, or that in use."""
    feeds = {name: array for name, array in case.feeds.items() if array is not None}
    names = [name if array is not None else "" for name, array in case.feeds.items()]
    while names[-1] == "":
        names.pop()
    outputs = [f"output{index}" for index in range(case.outputs)]
    last = [array.dtype for array in feeds.values() if array.dtype.kind == "f"][-1]
    types = [helper.np_dtype_to_tensor_dtype(np.dtype(kind)) for kind in case.types or [last] * case.outputs]
    node = helper.make_node(case.operator, names, outputs, domain=case.domain, **case.attributes)
    made = session(
        str(custom_ops_library()) if path is None else path,
        [node],
        [(name, element_type(array), None) for name, array in feeds.items() if name not in case.constants],
        [(name, kind, None) for name, kind in zip(outputs, types, strict=True)],
        threads=threads,
        initializers=[numpy_helper.from_array(feeds[name], name) for name in case.constants],
    )
    feeds = {name: array for name, array in feeds.items() if name not in case.constants}
    given = {name: _value(np.ascontiguousarray(array).reshape(array.shape)) for name, array in feeds.items()}
    found = made.run_with_ort_values(outputs, {name: value for name, (value, _) in given.items()})
    return [_array(value, kind) for value, kind in zip(found, map(ir.DataType, types), strict=True)]


def _value(array: np.ndarray) -> tuple[Any, np.ndarray]:
    """A value of ONNX Runtime, also of ml_dtypes extension types, and the array that must live as long."""
    if array.dtype.isbuiltin == 1:
        return onnxruntime.OrtValue.ortvalue_from_numpy(array), array
    (value,) = in_place({"x": array.view(np.uint16)}, {"x": ir.DataType.from_numpy(array.dtype)})
    return value, array


def _array(value: Any, kind: ir.DataType) -> np.ndarray | None:
    if not value.has_value():  # an output that the operator leaves out
        return None
    return fetched(value._get_c_value(), kind) if is_foreign(kind) else value.numpy()
