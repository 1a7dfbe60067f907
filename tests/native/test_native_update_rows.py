"""Updates whose gradients are rows at indices: the bits of an update by the dense gradient."""

import numpy as np
import pytest
from onnx import helper
from onnxruntime.capi.onnxruntime_pybind11_state import Fail, InvalidArgument, RuntimeException
from optimizer_sessions import element_type, session

from onnxtrain.runtime.native import custom_ops_library

PATH = str(custom_ops_library())
REFUSED = (Fail, InvalidArgument, RuntimeException)
SETTINGS = {"domain": "onnxtrain", "alpha": 0.9, "beta": 0.999, "epsilon": 1e-6}


def updated(path, feeds, *, rows, masked=0, threads=1, **attributes):
    """X, V and H after one FusedAdam of the rows, or of what GatherGradient makes of them."""
    nodes = []
    gradient = ["dy", "indices"] if rows else ["dense"]
    if not rows:
        made = helper.make_node("GatherGradient", ["dy", "indices", "shape"], ["dense"], domain="onnxtrain", axis=0)
        nodes.append(made)
    inputs = ["R", "T", "factor", "X", *gradient, *(["mask"] if masked else []), "V", "H"]
    outputs = ["X_new", "V_new", "H_new"]
    flags = attributes | ({"rows": 1} if rows else {}) | {"masked": masked}
    nodes.append(helper.make_node("FusedAdam", inputs, outputs, **SETTINGS, **flags))
    read = {name for node in nodes for name in node.input}
    given = {name: array for name, array in feeds.items() if name in read}
    kinds = [(name, element_type(array), None) for name, array in given.items()]
    given = {name: np.asarray(array) for name, array in given.items()}
    made = session(path, nodes, kinds, [(name, element_type(feeds["X"]), None) for name in outputs], threads)
    return made.run(None, given)


def drawn(shape, dtype, count=(4, 25)):
    rng = np.random.default_rng(shape)
    return {
        "R": np.float32(0.1),
        "T": np.int64(3),
        "factor": np.float32(1),
        "X": rng.normal(size=shape).astype(dtype),
        "dy": rng.normal(size=(*count, *shape[1:])).astype(dtype),
        "indices": rng.integers(-shape[0], max(1, shape[0] // 2), count),
        "shape": np.array(shape),
        "mask": rng.random(shape) < 0.5,
        "V": rng.normal(size=shape).astype(dtype),
        "H": np.abs(rng.normal(size=shape)).astype(dtype),
    }


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", [(1, 1), (300,), (700, 3), (333, 16), (90, 2, 96), (20, 3000)], ids=str)
def test_rows_give_the_bits_of_the_dense_gradient(library_path, shape, dtype):
    feeds = drawn(shape, dtype)
    wanted = updated(library_path, feeds, rows=False)
    for threads in (1, 3):
        for found, expected in zip(updated(library_path, feeds, rows=True, threads=threads), wanted, strict=True):
            np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    "change", [{"masked": 1}, {"factor": np.float32(0.3)}, {"masked": 1, "factor": np.float32(0.3)}]
)
def test_rows_are_masked_and_multiplied_like_a_dense_gradient(change):
    feeds = drawn((333, 16), np.float32) | {name: value for name, value in change.items() if name == "factor"}
    masked = change.get("masked", 0)
    wanted = updated(PATH, feeds, rows=False, masked=masked)
    for found, expected in zip(updated(PATH, feeds, rows=True, masked=masked), wanted, strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"indices": np.full((4, 25), 333)}, r"I of variable 1 of 1: an index is 333, and must be from -333 to 332"),
        ({"indices": np.zeros((4, 24), np.int64)}, r"G of variable 1 of 1 has shape \[4, 25, 16\].*\[4, 24, 16\]"),
        (
            {"indices": np.zeros((4, 25), np.float32)},
            r"I of variable 1 of 1 has type float: indices must be of type int64",
        ),
        ({"dy": np.zeros((4, 25, 16))}, r"G of variable 1 of 1 has type double and X has type float"),
    ],
    ids=["index", "shape", "type of indices", "type of rows"],
)
def test_wrong_rows_are_refused(change, message):
    with pytest.raises(REFUSED, match=message):
        updated(PATH, drawn((333, 16), np.float32) | change, rows=True)
