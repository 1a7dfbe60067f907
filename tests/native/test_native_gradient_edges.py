"""The fused gradient operators at the edges: empty, NaN, ties, large values; and refused calls."""

import gradient_reference as reference
import numpy as np
import pytest
from gradient_reference import assert_near, draw, run
from onnxruntime.capi.onnxruntime_pybind11_state import Fail, InvalidArgument, InvalidGraph, RuntimeException
from optimizer_sessions import OTHER_TYPES

from onnxtrain.runtime.native import custom_ops_library

PATH = str(custom_ops_library())
TYPES = [np.float32, np.float64]
REFUSED = (Fail, InvalidArgument, InvalidGraph, RuntimeException)


@pytest.mark.parametrize("approximate", ["none", "tanh", "sigmoid"])
def test_gelu_far_out_is_flat_or_straight(instruction_set, library_path, approximate):
    x = np.array([-np.inf, -1e30, -90, 0, 90, 1e30, np.inf, np.nan], np.float32)
    dx, y = run(library_path, "GeluGradient", np.full_like(x, 3), x, approximate=approximate)
    np.testing.assert_allclose(dx, [0, 0, 0, 1.5, 3, 3, 3, np.nan], atol=1e-30)
    np.testing.assert_allclose(y[1:], [0, 0, 0, 90, 1e30, np.inf, np.nan], atol=1e-12)


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
    sums = results[1:2] if operator.startswith("RMS") else results[1:3]
    for result, shape in zip(sums, [shapes[-1]] * 2 if sums else [], strict=False):
        np.testing.assert_array_equal(result, np.zeros(shape))


@pytest.mark.parametrize("shape", [(2, 0, 3), (2, 3, 0), (0, 3, 4)])
def test_resizing_nothing_gives_zeros(shape):
    rows, columns = (np.ones((size, 5), np.float32) for size in shape[1:])
    (y,) = run(PATH, "ResizeByMatrices", np.ones(shape, np.float32), rows, columns)
    np.testing.assert_array_equal(y, np.full((shape[0], 5, 5), 0.0))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_log_softmax_of_values_that_are_not_finite(instruction_set, library_path, value):
    x = np.zeros((2, 3, 20), np.float32)
    x[0, 1, 4] = value
    (y,) = run(library_path, "LogSoftmax", x, axis=1)
    assert np.isfinite(np.delete(y[0], 4, axis=1)).all()
    assert np.isfinite(y[1]).all()
    expected = [-np.log(2), -np.inf, -np.log(2)] if value == -np.inf else [np.nan] * 3
    np.testing.assert_allclose(y[0, :, 4], expected, rtol=1e-6)


@pytest.mark.parametrize("shape", [(0, 3), (2, 3, 0)])
def test_cross_entropy_of_nothing(shape):
    labels = np.zeros((shape[0], 1, *shape[2:]), np.int64)
    (dx,) = run(PATH, "SoftmaxCrossEntropyGradient", np.float32(1)[...], np.ones(shape, np.float32), labels)
    assert dx.shape == shape


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
def test_nan_stays_in_its_channel_and_row(instruction_set, library_path, value):
    dy, x, scale = draw((4, 3, 20), np.float32, 1), draw((4, 3, 20), np.float32, 2), np.ones(3, np.float32)
    x[1, 1, 19] = value
    dx, dscale, dbias = run(library_path, "BatchNormalizationGradient", dy, x, scale)
    assert np.isnan(dx[:, 1]).all()
    assert np.isfinite(dx[:, [0, 2]]).all()
    assert np.array_equal(np.isnan(dscale), [False, True, False])
    assert np.isfinite(dbias).all()
    dx, *_ = run(library_path, "LayerNormalizationGradient", dy, x, np.ones(20, np.float32))
    assert np.isnan(dx[1, 1]).all()
    assert np.isnan(dx).sum() == 20
    (dx,) = run(library_path, "SoftmaxGradient", dy, np.where(np.isfinite(x), np.float32(0.5), np.float32(np.nan)))
    assert np.isnan(dx[1, 1]).all()
    assert np.isnan(dx).sum() == 20


def test_clipping_passes_at_the_bounds_and_stops_nan(instruction_set, library_path):
    x = np.array([-np.inf, -1, 0, 3, 6, 7, np.inf, np.nan] * 5, np.float32)
    dy = np.array([np.inf, np.nan, 1, 2, 3, np.inf, 4, 5] * 5, np.float32)
    dx, y = run(library_path, "ClipGradient", dy, x, np.array(0, np.float32), np.array(6, np.float32))
    np.testing.assert_array_equal(dx, [0, 0, 1, 2, 3, 0, 0, 0] * 5)
    np.testing.assert_array_equal(y, [0, 0, 0, 3, 6, 6, 6, np.nan] * 5)
    dx, y = run(library_path, "ClipGradient", dy, x)
    np.testing.assert_array_equal(dx, [np.inf, np.nan, 1, 2, 3, np.inf, 4, 0] * 5)
    np.testing.assert_array_equal(y, x)
    dx, y = run(library_path, "ClipGradient", dy, x, np.array(2, np.float32), np.array(1, np.float32))
    np.testing.assert_array_equal(dx, 0)
    np.testing.assert_array_equal(y[:7], 1)


@pytest.mark.parametrize("dtype", TYPES)
def test_rows_of_minus_infinity_have_a_first_maximum(instruction_set, library_path, dtype):
    x, dy = np.full((1, 1, 4, 20), -np.inf, dtype), np.ones((1, 1, 2, 10), dtype)
    (dx,) = run(library_path, "MaxPoolGradient", dy, x, kernel_shape=[2, 2], strides=[2, 2])
    expected = np.zeros((4, 20))
    expected[::2, ::2] = 1
    np.testing.assert_array_equal(dx[0, 0], expected)
    volumes, slopes = np.full((1, 1, 4, 4, 20), -np.inf, dtype), np.ones((1, 1, 2, 2, 10), dtype)
    (of_volumes,) = run(library_path, "MaxPoolGradient", slopes, volumes, kernel_shape=[2] * 3, strides=[2] * 3)
    np.testing.assert_array_equal(of_volumes[0, 0], [expected, np.zeros_like(expected)] * 2)
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
    ("BatchNormalizationGradient", [ones(2, 3), ones(2, 3), ones(3), ones(3)], {}, "give both, or neither"),
    ("ClipGradient", [ones(3), ones(3), ones(2)], {}, r"\(min\) has shape \[2\], and must have shape \[\]"),
    ("GatherGradient", [ones(2, 3), np.array([0, 4]), np.array([4, 3])], {}, "an index is 4, and must be from -4 to 3"),
    ("GatherGradient", [ones(2, 3), np.array([0]), np.array([4, 3])], {}, r"\(dy\) has shape \[2, 3\].*\[1, 3\]"),
    ("GatherGradient", [ones(2, 3), np.array([0]), np.array([[4, 3]])], {}, r"\(shape\).*must be a list"),
    ("GatherGradient", [ones(2, 3), np.array([0]), np.array([4, -3])], {}, "no size may be negative"),
    ("GatherGradient", [ones(2, 3), np.array([0, 1]), np.array([4, 3])], {"axis": 2}, "must be from -2 to 1"),
    ("GatherGradient", [ones(2, 3), np.array([0, 1]), np.array([4, 3]), ones(4, 2)], {}, r"\(other\).*\[4, 2\]"),
    (
        "GatherGradient",
        [ones(2, 3), np.array([0, 1]), np.array([4, 3]), ones(0), np.array([0, 2])],
        {},
        r"input 4 \(taken\): an index is 2, and must be from -2 to 1",
    ),
    (
        "GatherGradient",
        [ones(2, 3), np.array([0, 1]), np.array([4, 3]), ones(0), np.array([0, 1, 1])],
        {},
        r"\(taken\) has shape \[3\]",
    ),
    (
        "GatherGradient",
        [ones(2, 2, 3), np.array([0, 1]), np.array([4, 3]), ones(0), np.array([0, 1])],
        {},
        r"\(dy\) has shape \[2, 2, 3\]",
    ),
    ("GeluGradient", [ones(2), ones(3)], {}, "they must have one shape"),
    ("GeluGradient", [ones(2), ones(2), ones(3)], {}, r"\(factor\) has shape \[3\].*they must have one shape"),
    (
        "GeluGradient",
        [ones(2), ones(2)],
        {"approximate": "erf"},
        "'approximate' is 'erf': it must be 'none', 'tanh' or 'sigmoid'",
    ),
    ("LayerNormalizationGradient", [ones(2, 3), ones(2, 3), ones(2)], {}, r"\(scale\) has shape \[2\]"),
    ("LayerNormalizationGradient", [ones(2, 3), ones(2, 3), ones(3)], {"axis": -3}, "'axis' is -3"),
    ("RMSNormalizationGradient", [ones(2, 3), ones(3, 2), ones(3)], {}, "they must have one shape"),
    ("SoftmaxCrossEntropyGradient", [ones(), ones(3), np.array([0])], {}, "must have a batch and a class axis"),
    (
        "SoftmaxCrossEntropyGradient",
        [ones(), ones(2, 3), np.array([0, 1])],
        {},
        r"\(labels\) has shape \[2\].*\[2, 1\]",
    ),
    (
        "SoftmaxCrossEntropyGradient",
        [ones(2), ones(2, 3), np.array([[0], [1]])],
        {},
        r"\(dy\) has shape \[2\].*\[2, 1\]",
    ),
    ("SoftmaxCrossEntropyGradient", [ones(), ones(1, 3), np.array([[3]])], {}, "a label is 3, and must be from 0 to 2"),
    ("SoftmaxCrossEntropyGradient", [ones(), ones(1, 3), np.array([[-1]])], {}, "a label is -1"),
    ("SoftmaxGradient", [ones(2, 3), ones(2, 3)], {"axis": 2}, "'axis' is 2"),
    ("LogSoftmaxGradient", [ones(2, 3), ones(2)], {}, "they must have one shape"),
    ("MaxPoolGradient", [ones(1, 1, 2), ones(1, 1, 4)], {}, "'kernel_shape' has 0 numbers"),
    ("MaxPoolGradient", [ones(1, 1, 2), ones(1, 1, 4)], {"kernel_shape": [2], "strides": [2, 2]}, "must have 1"),
    ("MaxPoolGradient", [ones(1, 1, 2), ones(1, 1, 4)], {"kernel_shape": [2], "strides": [0]}, "'strides' holds 0"),
    ("MaxPoolGradient", [ones(1, 1, 2), ones(1, 1, 4)], {"kernel_shape": [2], "auto_pad": "SAME"}, "is 'SAME'"),
    ("MaxPoolGradient", [ones(1, 2, 2), ones(1, 1, 4)], {"kernel_shape": [2], "strides": [2]}, "the same batch"),
    ("MaxPoolGradient", [ones(1, 1, 4), ones(1, 1, 5)], {"kernel_shape": [2], "strides": [2]}, "make 2, or 3 with"),
    ("ReluGradient", [ones(2), ones(3)], {}, "they must have one shape"),
    ("LogSoftmax", [ones(2, 3)], {"axis": 2}, "'axis' is 2"),
    ("ResizeByMatrices", [ones(3), ones(3, 4), ones(3, 4)], {}, r"has shape \[3\], and must have two axes or more"),
    ("ResizeByMatrices", [ones(3, 5), ones(2, 4), ones(5, 4)], {}, r"\(rows\) has shape \[2, 4\].* of size 3 as x"),
    ("ResizeByMatrices", [ones(3, 5), ones(4, 3), ones(5, 4)], {"transposed": 1}, r"\(columns\) .* of size 5 as x"),
]


@pytest.mark.parametrize(
    ("operator", "inputs"),
    [
        ("BatchNormalizationGradient", [ones(2, 3), ones(2, 3), ones(3, dtype=np.float64)]),
        ("ClipGradient", [ones(3), ones(3), ones(dtype=np.float64)]),
        ("SoftmaxGradient", [ones(2, 3, dtype=np.float16)] * 2),
    ],
)
def test_types_that_no_kernel_has(operator, inputs):
    with pytest.raises(REFUSED, match=OTHER_TYPES % operator):
        run(PATH, operator, *inputs)


@pytest.mark.parametrize(("operator", "inputs", "attributes", "message"), BAD)
def test_refusals(operator, inputs, attributes, message):
    with pytest.raises(REFUSED, match=f"{operator}: .*{message}"):
        run(PATH, operator, *inputs, **attributes)
