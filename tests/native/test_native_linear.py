"""Linear layers: against NumPy in float64, on all instruction sets, for any number of threads."""

import re

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_case import Case
from kernel_session import run as run_case
from onnxruntime.capi.onnxruntime_pybind11_state import Fail, InvalidArgument, InvalidGraph, RuntimeException
from optimizer_sessions import OTHER_TYPES, run_node

from onnxtrain.runtime.native import custom_ops_library

PATH = str(custom_ops_library())
TYPES = [np.float32, np.float64]
REFUSED = (Fail, InvalidArgument, InvalidGraph, RuntimeException)
INPUTS = {"Linear": ("x", "w", "b"), "LinearWeightGradient": ("dy", "x")}
OUTPUTS = {"Linear": ("y",), "LinearWeightGradient": ("dw", "db")}

# Rows, inputs and outputs around the edges of vectors (2 to 16), tiles (6 or 8 rows, up to 64 columns), strips (192
# rows), blocks (256 of the depth) and parts (384 rows that are copied, 768 columns, or sums of 3/8 of an L2 cache).
SIZES = [
    (1, 1, 1),
    (1, 300, 70),
    (5, 3, 2),
    (7, 65, 129),
    (8, 784, 512),
    (16, 40, 64),
    (17, 40, 63),
    (65, 257, 10),
    (200, 64, 770),
    (300, 400, 33),
    (520, 17, 256),
    (1025, 96, 100),
    (130, 700, 190),
    (130, 500, 600),
    (1, 1, 2000),
    (3, 2000, 1),
    (0, 4, 5),
    (4, 0, 5),
    (4, 5, 0),
]
ERROR = 8
"""In last places of the sum of the absolute values of the terms, times the root of how many a lane adds up."""


def draw(sizes, dtype, leading=None):
    rows, inputs, outputs = sizes
    leading = (rows,) if leading is None else leading
    rng = np.random.default_rng(sizes)
    shapes = {"x": (*leading, inputs), "w": (inputs, outputs), "b": (outputs,), "dy": (*leading, outputs)}
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


def expected(feeds):
    """y, dw and db in float64, and the sums of the absolute values of their terms."""
    results = []
    for change in (lambda array: array, np.abs):
        x, w, b, dy = (change(feeds[name].astype(np.float64)) for name in ("x", "w", "b", "dy"))
        flat_x, flat_dy = x.reshape(-1, x.shape[-1] or 1), dy.reshape(-1, dy.shape[-1] or 1)
        dw = np.zeros(w.shape) if w.size == 0 else flat_x.T @ flat_dy
        db = dy.sum(axis=tuple(range(dy.ndim - 1)))
        results.append({"y": x @ w + b, "dw": dw, "db": db})
    return results


def run(path, operator, feeds, transposed, threads=1, wanted=None):
    feeds = feeds | {"w": np.ascontiguousarray(feeds["w"].T)} if transposed else feeds
    given = {name: feeds[name] for name in INPUTS[operator] if name in feeds}
    attributes = {"transB": int(transposed)}
    found = run_node(path, operator, INPUTS[operator], OUTPUTS[operator], given, attributes, threads, wanted)
    return found | ({"dw": found["dw"].T} if transposed and "dw" in found else {})


def run_both(path, feeds, transposed, threads=1):
    return {k: v for operator in INPUTS for k, v in run(path, operator, feeds, transposed, threads).items()}


def check(path, feeds, transposed, threads=1):
    found = run_both(path, feeds, transposed, threads)
    values, magnitudes = expected(feeds)
    terms = {"y": feeds["x"].shape[-1], "dw": feeds["x"].size, "db": feeds["x"].size}
    for name, wanted in values.items():
        assert found[name].dtype == feeds["x"].dtype
        assert found[name].shape == wanted.shape
        bound = ERROR * np.finfo(found[name].dtype).eps * magnitudes[name] * max(1, min(terms[name], 256)) ** 0.5
        assert (np.abs(found[name] - wanted) <= bound).all(), name


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_against_float64(instruction_set, library_path, sizes, dtype, transposed):
    check(library_path, draw(sizes, dtype), transposed)


sizes = st.one_of(st.integers(1, 40), st.sampled_from([63, 64, 65, 127, 128, 192, 257]))


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=sizes, inputs=sizes, outputs=sizes, transposed=st.booleans(), dtype=st.sampled_from(TYPES))
def test_any_sizes(library_path, rows, inputs, outputs, transposed, dtype):
    check(library_path, draw((rows, inputs, outputs), dtype), transposed)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("leading", [(2, 3), (2, 0, 3), (1, 2, 3, 4)])
def test_leading_axes_are_rows(instruction_set, library_path, leading, transposed):
    check(library_path, draw((int(np.prod(leading)), 20, 30), np.float32, leading), transposed)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    "sizes", [(1025, 300, 200), (2000, 784, 10), (8, 784, 512), (400, 64, 1600), (130, 500, 600)], ids=str
)
def test_threads_do_not_change_a_bit(sizes, transposed):
    feeds = draw(sizes, np.float32)
    one, *others = (run_both(PATH, feeds, transposed, threads) for threads in (1, 2, 3))
    for other in others:
        for name, array in one.items():
            np.testing.assert_array_equal(array, other[name], err_msg=name)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("sizes", [(1025, 300, 200), (40, 784, 10), (400, 64, 1600), (130, 500, 600)], ids=str)
def test_a_part_of_a_matmul_has_the_bits_of_the_whole_matmul(instruction_set, library_path, sizes, transposed):
    """For any blocking of a matmul, each element is summed in the order of the depth alone."""
    feeds = draw(sizes, np.float32)
    whole = run_both(library_path, feeds, transposed)
    some_rows = run(library_path, "Linear", feeds | {"x": feeds["x"][:11]}, transposed)
    np.testing.assert_array_equal(some_rows["y"], whole["y"][:11])
    some_columns = run(library_path, "LinearWeightGradient", feeds | {"dy": feeds["dy"][:, :7].copy()}, transposed)
    np.testing.assert_array_equal(some_columns["dw"], whole["dw"][:, :7])
    np.testing.assert_array_equal(some_columns["db"], whole["db"][:7])


@pytest.mark.parametrize("transposed", [False, True])
def test_omitted_outputs_do_not_change_others(instruction_set, library_path, transposed):
    feeds = draw((30, 20, 70), np.float32)
    both = run_both(library_path, feeds, transposed)
    for name in ("dw", "db"):
        alone = run(library_path, "LinearWeightGradient", feeds, transposed, wanted=(name,))
        np.testing.assert_array_equal(alone[name], both[name])
    no_bias = run(library_path, "Linear", {name: feeds[name] for name in ("x", "w")}, transposed)
    zero_bias = run(library_path, "Linear", feeds | {"b": np.zeros_like(feeds["b"])}, transposed)
    np.testing.assert_array_equal(no_bias["y"], zero_bias["y"])


def run_stored(path, feeds, transposed, threads=1):
    """y of a weight of any type."""
    w = np.ascontiguousarray(feeds["w"].T) if transposed else feeds["w"]
    given = {"x": feeds["x"], "w": w, "b": feeds.get("b")}
    case = Case("Linear", given, {"transB": int(transposed)}, types=(feeds["x"].dtype,))
    return run_case(case, path, threads)[0]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_weights_of_16_bits_have_the_bits_of_their_floats(instruction_set, library_path, sizes, stored, transposed):
    feeds = draw(sizes, np.float32)
    halves = feeds | {"w": feeds["w"].astype(stored)}
    whole = run_stored(library_path, feeds | {"w": halves["w"].astype(np.float32)}, transposed)
    np.testing.assert_array_equal(run_stored(library_path, halves, transposed, threads=2), whole)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16])
def test_every_number_of_16_bits_is_widened_exactly(instruction_set, library_path, stored, transposed):
    words = np.arange(1 << 16, dtype=np.uint16).view(stored)
    finite = words[np.isfinite(words.astype(np.float32))]
    feeds = {"x": np.ones((1, 1), np.float32), "w": finite[None]}
    np.testing.assert_array_equal(run_stored(library_path, feeds, transposed)[0], finite.astype(np.float32))
    for word in words[~np.isfinite(words.astype(np.float32))][::97]:
        found = run_stored(library_path, feeds | {"w": word.reshape(1, 1)}, transposed)
        np.testing.assert_array_equal(found, word.astype(np.float32).reshape(1, 1))


@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16])
def test_weights_of_16_bits_beside_double_are_refused(stored):
    with pytest.raises(REFUSED, match="Linear"):
        run_stored(PATH, {"x": np.ones((2, 3)), "w": np.ones((3, 4), stored)}, False)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("transposed", [False, True])
def test_nan_stays_in_its_rows(instruction_set, library_path, transposed, value):
    feeds = draw((30, 20, 70), np.float32)
    feeds["x"][13, 5] = value
    found = run_both(library_path, feeds, transposed)
    assert (np.isfinite(found["y"]).all(1) == (np.arange(30) != 13)).all()
    assert (np.isfinite(found["dw"]).all(1) == (np.arange(20) != 5)).all()
    assert np.isfinite(found["db"]).all()


def ones(*shape):
    return np.ones(shape, np.float32)


@pytest.mark.parametrize(
    ("operator", "transposed", "feeds", "sentence"),
    [
        ("Linear", 0, {"x": ones(3), "w": ones(3, 4)}, "0 (x) has shape [3], and must have at least two axes"),
        ("Linear", 0, {"x": ones(2, 3), "w": ones(4, 3)}, "1 (w) has shape [4, 3], and must be [3, outputs]: the last"),
        ("Linear", 1, {"x": ones(2, 3), "w": ones(3, 4)}, "1 (w) has shape [3, 4], and must be [outputs, 3]"),
        ("Linear", 0, {"x": ones(2, 3), "w": ones(3, 4, 1)}, "1 (w) has shape [3, 4, 1]"),
        ("Linear", 0, {"x": ones(2, 3), "w": ones(3, 4), "b": ones(3)}, "2 (b) has shape [3], and must have shape [4]"),
        ("LinearWeightGradient", 0, {"dy": ones(2, 3), "x": ones(3, 4)}, "1 (x) has shape [3, 4], and must have shape"),
        ("LinearWeightGradient", 0, {"dy": ones(3), "x": ones(3)}, "0 (dy) has shape [3]"),
    ],
)  # fmt: skip
def test_inputs_that_do_not_fit_are_refused(operator, transposed, feeds, sentence):
    with pytest.raises(REFUSED, match=re.escape(f"{operator}: input {sentence}")):
        run_node(PATH, operator, INPUTS[operator], OUTPUTS[operator], feeds, {"transB": transposed})


@pytest.mark.parametrize(
    ("operator", "feeds"),
    [
        ("Linear", {"x": ones(2, 3), "w": np.ones((3, 4))}),
        ("Linear", {"x": ones(2, 3), "w": ones(3, 4), "b": np.ones(4)}),
        ("LinearWeightGradient", {"dy": ones(2, 3), "x": np.ones((2, 4))}),
        ("Linear", {"x": np.ones((2, 3), np.float16), "w": np.ones((3, 4), np.float16)}),
    ],
)
def test_types_that_no_kernel_has(operator, feeds):
    with pytest.raises(REFUSED, match=OTHER_TYPES % operator):
        run_node(PATH, operator, INPUTS[operator], OUTPUTS[operator], feeds, {})
