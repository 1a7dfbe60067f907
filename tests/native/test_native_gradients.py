"""The fused gradient operators: against float64, on every instruction set, at the edges, and what they refuse."""

import gradient_reference as reference
import numpy as np
import pytest
from gradient_reference import run, windows
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper
from onnxruntime.capi.onnxruntime_pybind11_state import Fail, InvalidArgument, RuntimeException
from optimizer_sessions import session

from onnxtrain.autodiff.fused import fused_operators
from onnxtrain.runtime.native import custom_ops_library

PATH = str(custom_ops_library())
TYPES = [np.float32, np.float64]
REFUSED = (Fail, InvalidArgument, RuntimeException)

quick = settings(max_examples=40, deadline=None)
sizes = st.integers(1, 6)
types = st.sampled_from(TYPES)


def draw(shape, dtype, seed, shift=0.0):
    return np.asarray(np.random.default_rng((seed, *shape)).standard_normal(shape) + shift, dtype)


def assert_near(found, expected, scale=1.0):
    """Within 1e-6 (float) or 1e-14 (double) of the largest value, times ``scale``."""
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape
        limit = scale * (1e-6 if a.dtype == np.float32 else 1e-14)
        np.testing.assert_allclose(a, b, rtol=0, atol=limit * max(1.0, float(np.abs(b).max(initial=0))))


def check(operator, function, inputs, path=PATH, scale=1.0, **attributes):
    assert_near(run(path, operator, *inputs, **attributes), function(*inputs, **attributes), scale)


def batch_inputs(shape, dtype, seed, given_statistics):
    dy, x, scale = draw(shape, dtype, seed), draw(shape, dtype, seed + 1, 3), draw(shape[1:2], dtype, seed + 2, 1)
    if not given_statistics:
        return dy, x, scale
    return dy, x, scale, draw(shape[1:2], dtype, seed + 3, 3), np.abs(draw(shape[1:2], dtype, seed + 4)) + dtype(0.1)


def positive_rows(shape, dtype, seed, axis):
    e = np.exp(np.random.default_rng((seed, *shape)).standard_normal(shape))
    return np.asarray(e / e.sum(axis, keepdims=True), dtype)


@quick
@given(shape=st.lists(st.integers(1, 40), min_size=2, max_size=4), dtype=types, given_statistics=st.booleans())
def test_batch_normalization_of_any_shape(shape, dtype, given_statistics):
    if not given_statistics and shape[0] * int(np.prod(shape[2:])) < 3:
        shape[0] += 3  # two elements lie symmetrically: all that is left of dx is rounding
    inputs = batch_inputs(shape, dtype, 1, given_statistics)
    # dx loses digits where the elements nearly agree; epsilon bounds how many.
    check("BatchNormalizationGradient", reference.batch_normalization, inputs, scale=4, epsilon=1 / 128)


@quick
@given(shape=st.lists(st.integers(1, 20), min_size=1, max_size=4), dtype=types, data=st.data())
def test_layer_and_rms_normalization_of_any_shape(shape, dtype, data):
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    dy, x, scale = draw(shape, dtype, 1), draw(shape, dtype, 2, 3), draw(shape[axis:], dtype, 3, 1)
    settings = {"axis": axis, "epsilon": 1 / 128}
    check("LayerNormalizationGradient", reference.layer_normalization, (dy, x, scale), scale=10, **settings)
    check("RMSNormalizationGradient", reference.rms_normalization, (dy, x, scale), scale=10, **settings)


@quick
@given(shape=st.lists(st.integers(1, 20), min_size=1, max_size=4), dtype=types, data=st.data())
def test_softmax_along_any_axis(shape, dtype, data):
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    dy, y = draw(shape, dtype, 1), positive_rows(shape, dtype, 2, axis)
    check("SoftmaxGradient", reference.softmax, (dy, y), axis=axis)
    check("LogSoftmaxGradient", reference.log_softmax, (dy, np.log(y)), axis=axis)


@quick
@given(dtype=types, data=st.data())
def test_max_pooling_with_any_windows(dtype, data):
    axes = data.draw(st.integers(1, 3))
    one_each = lambda least, most: data.draw(st.lists(st.integers(least, most), min_size=axes, max_size=axes))  # noqa: E731
    kernel, strides, dilations = one_each(1, 3), one_each(1, 3), one_each(1, 2)
    pads = [data.draw(st.integers(0, k - 1)) for k in kernel * 2]
    extent = [d * (k - 1) + 1 for k, d in zip(kernel, dilations, strict=True)]
    shape = [data.draw(st.integers(e, e + 12 // axes)) for e in extent]
    ceil = data.draw(st.booleans())
    counts = [
        windows(shape[i], kernel[i], strides[i], dilations[i], pads[i], pads[axes + i], ceil) for i in range(axes)
    ]
    # Few different numbers: ties belong to the first.
    x = np.asarray(np.round(draw([2, 2, *shape], dtype, 1) * 2), dtype)
    attributes = {"kernel_shape": kernel, "strides": strides, "dilations": dilations, "pads": pads}
    check(
        "MaxPoolGradient", reference.max_pool, (draw([2, 2, *counts], dtype, 2), x), ceil_mode=int(ceil), **attributes
    )


@quick
@given(height=st.integers(2, 9), width=st.integers(2, 40), dtype=types)
def test_max_pooling_side_by_side(height, width, dtype):
    x = np.asarray(np.round(draw([2, 3, height, width], dtype, 1) * 2), dtype)
    dy = draw([2, 3, height // 2, width // 2], dtype, 2)
    check("MaxPoolGradient", reference.max_pool, (dy, x), kernel_shape=[2, 2], strides=[2, 2])


@quick
@given(shape=st.lists(st.integers(1, 70), min_size=1, max_size=3), dtype=types, data=st.data())
def test_gathering_along_any_axis(shape, dtype, data):
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    indices_shape = data.draw(st.lists(st.integers(0, 5), max_size=2))
    rng = np.random.default_rng(data.draw(st.integers(0, 9)))
    indices = rng.integers(-shape[axis], shape[axis], indices_shape)
    at = axis % len(shape)
    dy = draw([*shape[:at], *indices_shape, *shape[at + 1 :]], dtype, 1)
    check("GatherGradient", reference.gather, (dy, np.asarray(indices), np.asarray(shape)), axis=axis)


@quick
@given(count=st.integers(1, 100), dtype=types, low=st.booleans(), high=st.booleans())
def test_clipping_with_any_bounds(count, dtype, low, high):
    bounds = (dtype(-0.5) if low else None, dtype(0.5) if high else None)
    x = np.asarray(np.round(draw([count], dtype, 1) * 4) / 4, dtype)
    inputs = (draw([count], dtype, 2), x, *(None if b is None else np.asarray(b) for b in bounds))
    (found,) = run(PATH, "ClipGradient", *inputs)
    np.testing.assert_array_equal(found, reference.clip(*inputs)[0])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_over_its_range(instruction_set, library_path, approximate, dtype):
    x = np.linspace(-16, 16, 20_001, dtype=dtype)
    inputs = np.ones_like(x), x
    assert_near(
        run(library_path, "GeluGradient", *inputs, approximate=approximate), reference.gelu(*inputs, approximate)
    )


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_far_out_is_flat_or_straight(instruction_set, library_path, approximate):
    x = np.array([-np.inf, -1e30, -50, 0, 50, 1e30, np.inf, np.nan], np.float32)
    (dx,) = run(library_path, "GeluGradient", np.full_like(x, 3), x, approximate=approximate)
    np.testing.assert_allclose(dx, [0, 0, 0, 1.5, 3, 3, 3, np.nan], atol=1e-30)


def examples(dtype):
    """(operator, inputs, attributes) of sizes with full vectors and tails, several tasks each."""
    statistics = batch_inputs((4, 33, 21, 19), dtype, 1, True)
    probabilities = positive_rows((500, 77), dtype, 2, -1)
    rows = draw((700, 83), dtype, 3)
    square = draw((2, 13, 37, 35), dtype, 4)
    pooled = [draw((2, 13, n, m), dtype, 5) for n, m in ((18, 17), (19, 18), (12, 12))]
    indices = np.random.default_rng(6).integers(-50, 50, (30, 31))
    return [
        ("BatchNormalizationGradient", statistics, {}),
        ("BatchNormalizationGradient", statistics[:3], {}),
        ("BatchNormalizationGradient", batch_inputs((50, 700), dtype, 1, False), {}),
        ("ClipGradient", (rows, rows, np.asarray(dtype(-1)), np.asarray(dtype(1))), {}),
        ("GatherGradient", (draw((30, 31, 45), dtype, 7), indices, np.array([50, 45])), {"axis": 0}),
        ("GatherGradient", (draw((3, 30, 31, 5), dtype, 7), indices, np.array([3, 50, 5])), {"axis": 1}),
        ("GeluGradient", (rows, rows), {"approximate": "none"}),
        ("GeluGradient", (rows, rows), {"approximate": "tanh"}),
        ("LayerNormalizationGradient", (rows, draw((700, 83), dtype, 8, 2), draw((83,), dtype, 9)), {}),
        ("RMSNormalizationGradient", (rows, draw((700, 83), dtype, 8, 2), draw((83,), dtype, 9)), {}),
        ("LogSoftmaxGradient", (draw((500, 77), dtype, 1), np.log(probabilities)), {}),
        ("LogSoftmaxGradient", (draw((500, 77), dtype, 1), np.log(probabilities)), {"axis": 0}),
        ("SoftmaxGradient", (draw((500, 77), dtype, 1), probabilities), {}),
        ("SoftmaxGradient", (draw((500, 77), dtype, 1), probabilities), {"axis": 0}),
        ("MaxPoolGradient", (pooled[0], square), {"kernel_shape": [2, 2], "strides": [2, 2]}),
        ("MaxPoolGradient", (pooled[1], square), {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1] * 4}),
        ("MaxPoolGradient", (pooled[2], square), {"kernel_shape": [4, 2], "strides": [3, 3], "pads": [1] * 4}),
        ("ReluGradient", (rows, rows), {}),
    ]


def names(example):
    return f"{example[0]}-{len(example[1])}-{example[2]}"


FUNCTIONS = {
    "BatchNormalizationGradient": reference.batch_normalization,
    "ClipGradient": reference.clip,
    "GatherGradient": reference.gather,
    "GeluGradient": reference.gelu,
    "LayerNormalizationGradient": reference.layer_normalization,
    "LogSoftmaxGradient": reference.log_softmax,
    "MaxPoolGradient": reference.max_pool,
    "RMSNormalizationGradient": reference.rms_normalization,
    "ReluGradient": reference.relu,
    "SoftmaxGradient": reference.softmax,
}


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("index", range(len(examples(np.float32))), ids=[names(e) for e in examples(np.float32)])
def test_every_instruction_set_and_thread_count_gives_the_same_bits(libraries, index, dtype):
    operator, inputs, attributes = examples(dtype)[index]
    paths = [str(path) for path, _ in libraries.values()]
    first = run(paths[0], operator, *inputs, **attributes)
    assert_near(first, FUNCTIONS[operator](*inputs, **attributes), scale=4)
    for path in paths:
        for threads in (1, 3):
            for a, b in zip(run(path, operator, *inputs, threads=threads, **attributes), first, strict=True):
                np.testing.assert_array_equal(a, b)


def test_every_operator_with_a_kernel_is_tested():
    convolutions = {fused.name for fused in fused_operators() if fused.name.startswith("Conv")}
    assert {fused.name for fused in fused_operators()} - convolutions == set(FUNCTIONS)


@pytest.mark.parametrize("wanted", [[0], [1], [2], [0, 2], [1, 2]])
@pytest.mark.parametrize("operator", ["BatchNormalizationGradient", "LayerNormalizationGradient"])
def test_results_that_nobody_wants_are_left_out(operator, wanted):
    dy, x, scale = draw((5, 7), np.float32, 1), draw((5, 7), np.float32, 2), draw((7,), np.float32, 3)
    every = run(PATH, operator, dy, x, scale)
    some = run(PATH, operator, dy, x, scale, wanted=wanted)
    for index, found in zip(wanted, some, strict=True):
        np.testing.assert_array_equal(found, every[index])


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("operator", sorted(set(FUNCTIONS) - {"MaxPoolGradient", "GatherGradient"}))
def test_in_place_gives_what_out_of_place_does(operator, which):
    """The gradient takes over the buffer of an intermediate value that nothing else reads."""
    _, inputs, attributes = next(e for e in examples(np.float32) if e[0] == operator)
    labels = reference.INPUTS[operator][: len(inputs)]
    used = [f"minus {label}" if index == which else label for index, label in enumerate(labels)]
    outputs = [f"output{index}" for index in range(reference.OUTPUTS.get(operator, 1))]
    nodes = [
        helper.make_node("Neg", [labels[which]], [f"minus {labels[which]}"]),
        helper.make_node(operator, used, outputs, domain="onnxtrain", **attributes),
    ]
    made = session(
        PATH,
        nodes,
        [(label, TensorProto.FLOAT, array.shape) for label, array in zip(labels, inputs, strict=True)],
        [(name, TensorProto.FLOAT, None) for name in outputs],
    )
    found = made.run(None, dict(zip(labels, inputs, strict=True)))
    moved = [-array if index == which else array for index, array in enumerate(inputs)]
    for a, b in zip(found, run(PATH, operator, *moved, **attributes), strict=True):
        np.testing.assert_array_equal(a, b)


EMPTY = [
    ("BatchNormalizationGradient", [(0, 3, 4), (0, 3, 4), (3,)], {}),
    ("BatchNormalizationGradient", [(2, 0, 4), (2, 0, 4), (0,)], {}),
    ("BatchNormalizationGradient", [(2, 3, 0), (2, 3, 0), (3,)], {}),
    ("ClipGradient", [(0,), (0,)], {}),
    ("LayerNormalizationGradient", [(0, 4), (0, 4), (4,)], {}),
    ("LayerNormalizationGradient", [(3, 0), (3, 0), (0,)], {}),
    ("RMSNormalizationGradient", [(0, 4), (0, 4), (4,)], {}),
    ("LogSoftmaxGradient", [(3, 0), (3, 0)], {}),
    ("SoftmaxGradient", [(0, 3), (0, 3)], {}),
    ("SoftmaxGradient", [(2, 0, 3), (2, 0, 3)], {"axis": 1}),
    ("MaxPoolGradient", [(0, 2, 3), (0, 2, 6)], {"kernel_shape": [2], "strides": [2]}),
    ("MaxPoolGradient", [(2, 2, 0), (2, 2, 1)], {"kernel_shape": [2]}),
    ("ReluGradient", [(0, 2), (0, 2)], {}),
]


@pytest.mark.parametrize(("operator", "shapes", "attributes"), EMPTY)
def test_of_nothing_the_sums_are_zero(operator, shapes, attributes):
    inputs = [np.ones(shape, np.float32) for shape in shapes]
    results = run(PATH, operator, *inputs, **attributes)
    assert results[0].shape == shapes[0 if operator != "MaxPoolGradient" else 1]
    for result, shape in zip(results[1:], [shapes[2]] * 2 if results[1:] else [], strict=False):
        np.testing.assert_array_equal(result, np.zeros(shape))


@pytest.mark.parametrize(("dy", "indices", "shape"), [((0, 3), (0,), (4, 3)), ((2, 0), (2,), (4, 0))])
def test_gathering_nothing(dy, indices, shape):
    inputs = np.ones(dy, np.float32), np.zeros(indices, np.int64), np.array(shape)
    np.testing.assert_array_equal(run(PATH, "GatherGradient", *inputs)[0], np.zeros(shape))


def test_a_sum_of_a_million_elements_keeps_its_digits(instruction_set, library_path):
    dy, x = np.full((1000, 2, 500), 0.1, np.float32), draw((1000, 2, 500), np.float32, 1, 1000)
    scale = np.ones(2, np.float32)
    found = run(library_path, "BatchNormalizationGradient", dy, x, scale)
    np.testing.assert_allclose(found[2], np.float64(np.float32(0.1)) * 500_000, rtol=1e-7)
    assert_near(found, reference.batch_normalization(dy, x, scale), scale=10)


def test_a_channel_of_one_number_has_variance_zero(instruction_set, library_path):
    dy, x = draw((3, 2, 40), np.float32, 1), np.full((3, 2, 40), 0.1, np.float32)
    dx, dscale, _ = run(library_path, "BatchNormalizationGradient", dy, x, np.ones(2, np.float32))
    expected = (dy - dy.mean((0, 2), keepdims=True, dtype=np.float64)) / np.sqrt(1e-5)
    np.testing.assert_allclose(dx, expected, rtol=1e-4, atol=1e-3)
    np.testing.assert_array_equal(dscale, 0)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_no_number_stays_in_its_channel_and_row(instruction_set, library_path, value):
    dy, x, scale = draw((4, 3, 20), np.float32, 1), draw((4, 3, 20), np.float32, 2), np.ones(3, np.float32)
    x[1, 1, 19] = value
    dx, dscale, dbias = run(library_path, "BatchNormalizationGradient", dy, x, scale)
    assert np.isnan(dx[:, 1]).all()
    assert np.isfinite(dx[:, [0, 2]]).all()
    assert np.array_equal(np.isnan(dscale), [False, True, False])
    assert np.isfinite(dbias).all()
    dx, _, _ = run(library_path, "LayerNormalizationGradient", dy, x, np.ones(20, np.float32))
    assert np.isnan(dx[1, 1]).all()
    assert np.isnan(dx).sum() == 20
    (dx,) = run(library_path, "SoftmaxGradient", dy, np.where(np.isfinite(x), np.float32(0.5), np.float32(np.nan)))
    assert np.isnan(dx[1, 1]).all()
    assert np.isnan(dx).sum() == 20


def test_clipping_passes_at_the_bounds_and_stops_what_is_no_number(instruction_set, library_path):
    x = np.array([-np.inf, -1, 0, 3, 6, 7, np.inf, np.nan] * 5, np.float32)
    dy = np.array([np.inf, np.nan, 1, 2, 3, np.inf, 4, 5] * 5, np.float32)
    (dx,) = run(library_path, "ClipGradient", dy, x, np.array(0, np.float32), np.array(6, np.float32))
    np.testing.assert_array_equal(dx, [0, 0, 1, 2, 3, 0, 0, 0] * 5)
    (dx,) = run(library_path, "ClipGradient", dy, x)
    np.testing.assert_array_equal(dx, [np.inf, np.nan, 1, 2, 3, np.inf, 4, 0] * 5)
    (dx,) = run(library_path, "ClipGradient", dy, x, np.array(2, np.float32), np.array(1, np.float32))
    np.testing.assert_array_equal(dx, 0)


@pytest.mark.parametrize("dtype", TYPES)
def test_rows_of_minus_infinity_have_a_first_maximum(instruction_set, library_path, dtype):
    x, dy = np.full((1, 1, 4, 20), -np.inf, dtype), np.ones((1, 1, 2, 10), dtype)
    (dx,) = run(library_path, "MaxPoolGradient", dy, x, kernel_shape=[2, 2], strides=[2, 2])
    expected = np.zeros((4, 20))
    expected[::2, ::2] = 1
    np.testing.assert_array_equal(dx[0, 0], expected)
    dy = np.ones((1, 1, 2, 10), dtype)
    (dx,) = run(library_path, "MaxPoolGradient", dy, x, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    expected = np.zeros((4, 20))
    expected[0, 0] = expected[1, 0] = 1
    expected[:2, 1:19:2] = 1
    np.testing.assert_array_equal(dx[0, 0], expected)


def test_a_window_beside_the_image_is_passed_over():
    x, dy = np.ones((1, 1, 3), np.float32), np.ones((1, 1, 2), np.float32)
    (dx,) = run(PATH, "MaxPoolGradient", dy, x, kernel_shape=[2], dilations=[5], strides=[4], pads=[1, 6])
    np.testing.assert_array_equal(dx, np.zeros((1, 1, 3)))


@pytest.mark.parametrize("mode", ["SAME_UPPER", "SAME_LOWER"])
def test_automatic_padding(mode):
    x, dy = draw((1, 2, 7, 10), np.float32, 1), draw((1, 2, 4, 5), np.float32, 2)
    pads = [1, 0, 1, 1] if mode == "SAME_UPPER" else [1, 1, 1, 0]
    given_pads = run(PATH, "MaxPoolGradient", dy, x, kernel_shape=[3, 3], strides=[2, 2], pads=pads)
    found = run(PATH, "MaxPoolGradient", dy, x, kernel_shape=[3, 3], strides=[2, 2], auto_pad=mode)
    np.testing.assert_array_equal(found, given_pads)


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


BAD = [
    ("BatchNormalizationGradient", [ones(3), ones(3), ones(1)], {}, "must have a batch and a channel axis"),
    ("BatchNormalizationGradient", [ones(2, 3), ones(2, 3), ones(2)], {}, r"\(scale\) has shape \[2\].* shape \[3\]"),
    ("BatchNormalizationGradient", [ones(2, 3), ones(2, 4), ones(3)], {}, "they must have one shape"),
    ("BatchNormalizationGradient", [ones(2, 3), ones(2, 3), ones(3, dtype=np.float64)], {}, "must have one type"),
    ("BatchNormalizationGradient", [ones(2, 3), ones(2, 3), ones(3), ones(3)], {}, "give both, or none"),
    ("ClipGradient", [ones(3), ones(3), ones(2)], {}, r"\(min\) has shape \[2\], and must have shape \[\]"),
    ("ClipGradient", [ones(3), ones(3), None, ones(dtype=np.float64)], {}, "they must have one type"),
    ("GatherGradient", [ones(2, 3), np.array([0, 4]), np.array([4, 3])], {}, "an index is 4, and must be from -4 to 3"),
    ("GatherGradient", [ones(2, 3), np.array([0]), np.array([4, 3])], {}, r"\(dy\) has shape \[2, 3\].*\[1, 3\]"),
    ("GatherGradient", [ones(2, 3), np.array([0]), np.array([[4, 3]])], {}, r"\(shape\).*must be a list"),
    ("GatherGradient", [ones(2, 3), np.array([0]), np.array([4, -3])], {}, "no size is negative"),
    ("GatherGradient", [ones(2, 3), np.array([0, 1]), np.array([4, 3])], {"axis": 2}, "must be from -2 to 1"),
    ("GeluGradient", [ones(2), ones(3)], {}, "they must have one shape"),
    ("GeluGradient", [ones(2), ones(2)], {"approximate": "erf"}, "'approximate' is 'erf': it must be 'none' or 'tanh'"),
    ("LayerNormalizationGradient", [ones(2, 3), ones(2, 3), ones(2)], {}, r"\(scale\) has shape \[2\]"),
    ("LayerNormalizationGradient", [ones(2, 3), ones(2, 3), ones(3)], {"axis": -3}, "'axis' is -3"),
    ("RMSNormalizationGradient", [ones(2, 3), ones(3, 2), ones(3)], {}, "they must have one shape"),
    ("SoftmaxGradient", [ones(2, 3), ones(2, 3)], {"axis": 2}, "'axis' is 2"),
    ("LogSoftmaxGradient", [ones(2, 3), ones(2)], {}, "they must have one shape"),
    ("SoftmaxGradient", [ones(2, 3, dtype=np.float16)] * 2, {}, "has type float16, and must be float or double"),
    ("MaxPoolGradient", [ones(1, 1, 2), ones(1, 1, 4)], {}, "'kernel_shape' has 0 numbers"),
    ("MaxPoolGradient", [ones(1, 1, 2), ones(1, 1, 4)], {"kernel_shape": [2], "strides": [2, 2]}, "must have 1"),
    ("MaxPoolGradient", [ones(1, 1, 2), ones(1, 1, 4)], {"kernel_shape": [2], "strides": [0]}, "'strides' holds 0"),
    ("MaxPoolGradient", [ones(1, 1, 2), ones(1, 1, 4)], {"kernel_shape": [2], "auto_pad": "SAME"}, "is 'SAME'"),
    ("MaxPoolGradient", [ones(1, 2, 2), ones(1, 1, 4)], {"kernel_shape": [2], "strides": [2]}, "the same batch"),
    ("MaxPoolGradient", [ones(1, 1, 4), ones(1, 1, 5)], {"kernel_shape": [2], "strides": [2]}, "make 2, or 3 with"),
    ("ReluGradient", [ones(2), ones(3)], {}, "they must have one shape"),
]


@pytest.mark.parametrize(("operator", "inputs", "attributes", "message"), BAD)
def test_what_is_refused(operator, inputs, attributes, message):
    with pytest.raises(REFUSED, match=f"{operator}: .*{message}"):
        run(PATH, operator, *inputs, **attributes)
