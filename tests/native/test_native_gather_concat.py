"""Rows of a table are copied beside the columns of a matrix: the values of a Gather and a Concat."""

import numpy as np
import pytest
from gradient_reference import gather_concat
from kernel_case import Case
from kernel_session import run
from onnxruntime.capi.onnxruntime_pybind11_state import Fail, InvalidArgument, RuntimeException

from onnxtrain.runtime.native import custom_ops_library

PATH = str(custom_ops_library())
REFUSED = (Fail, InvalidArgument, RuntimeException)


def drawn(rows, width, count, each, own, dtype=np.float32):
    rng = np.random.default_rng((rows, width, count))
    data, x = rng.standard_normal((rows, width)).astype(dtype), rng.standard_normal((count, own)).astype(dtype)
    return {"data": data, "indices": rng.integers(-rows, rows, (count, each)), "x": x}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize(
    "sizes",
    [(2000, 16, 300, 26, 13), (9, 5, 7, 3, 2), (70, 130, 40, 1, 3), (5, 3, 4, 2, 0), (5, 3, 4, 0, 2), (5, 0, 4, 2, 2)],
)
def test_rows_are_copied_beside_a_matrix(library_path, sizes, before, dtype):
    feeds = drawn(*sizes, dtype)
    for threads in (1, 3):
        (found,) = run(Case("GatherConcat", feeds, {"before": before}), library_path, threads)
        np.testing.assert_array_equal(found, gather_concat(*feeds.values(), before))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"indices": np.array([[0, 9]] * 7)}, "an index is 9, and must be from -9 to 8"),
        ({"indices": np.zeros(7, np.int64)}, r"\(indices\) has shape \[7\], and must have two axes"),
        ({"data": np.zeros((9, 5, 2), np.float32)}, r"\(data\) has shape \[9, 5, 2\], and must have two axes"),
        ({"x": np.zeros((6, 2), np.float32)}, r"\(x\) has shape \[6, 2\], and must have shape \[7, 2\]"),
    ],
    ids=["index", "list", "table", "rows"],
)
def test_refusals(change, message):
    with pytest.raises(REFUSED, match=f"GatherConcat: .*{message}"):
        run(Case("GatherConcat", drawn(9, 5, 7, 3, 2) | change, {}), PATH, 1)
