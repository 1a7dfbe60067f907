"""Convolution's kernels: against NumPy in float64, on all instruction sets, for any number of threads."""

import numpy as np
import pytest
from convolution_reference import OPERATORS, Convolution, run
from drawn_convolutions import convolutions
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from optimizer_sessions import OTHER_TYPES

from onnxtrain.runtime.native import custom_ops_library

PATH = str(custom_ops_library())


def plain(batch, inputs, outputs, size, kernel, stride=1, group=1, **more):
    """A convolution with padding that keeps the size of images."""
    pad = kernel // 2
    return Convolution(
        batch, group, inputs, outputs, (size, size), (kernel,) * 2, (stride,) * 2, (1, 1), (pad,) * 4, **more
    )


# Sizes around the edges of tiles (6 or 8 rows, 4 to 64 columns), blocks, strips (192 rows) and chunks.
CASES = {
    "one element": Convolution(1, 1, 1, 1, (1,), (1,), (1,), (1,), (0, 0)),
    "wide": plain(2, 5, 67, 9, 3, bias=True),
    "several panels and depths": plain(3, 130, 200, 5, 3),
    "many images": plain(33, 9, 20, 4, 3),
    "large image": plain(1, 3, 17, 150, 3, bias=True),
    "long signal": Convolution(2, 1, 4, 33, (20_000,), (5,), (1,), (2,), (4, 4)),
    "volume": Convolution(2, 1, 5, 18, (6, 7, 8), (3, 2, 3), (2, 1, 3), (1, 2, 1), (1, 0, 2, 1, 1, 0)),
    "pointwise": plain(5, 37, 70, 7, 1, bias=True),
    "pointwise, more inputs": plain(3, 70, 37, 16, 1),
    "pointwise, groups": plain(4, 3, 2, 5, 1, group=10),
    "pointwise, few groups": plain(3, 3, 5, 6, 1, group=4),
    "pointwise, stride": plain(3, 20, 24, 9, 1, stride=2),
    "stride": plain(2, 20, 30, 15, 3, stride=2),
    "stride beyond the kernel": plain(2, 20, 30, 16, 2, stride=3),
    "depthwise": plain(3, 1, 1, 13, 3, group=40, bias=True),
    "depthwise, stride": plain(3, 1, 1, 14, 3, stride=2, group=24),
    "depthwise, tiny images": plain(9, 1, 1, 2, 3, group=50),
    "depthwise, large kernel": plain(2, 1, 1, 20, 7, group=9),
    "depthwise, several outputs": plain(3, 1, 3, 8, 3, group=20, bias=True),
    "small groups": plain(2, 4, 4, 10, 3, group=8),
    "large groups": plain(2, 20, 17, 6, 3, group=3, bias=True),
    "few groups of few": plain(4, 2, 3, 9, 3, group=2),
    "asymmetric padding": Convolution(2, 1, 9, 20, (8, 9), (3, 4), (1, 2), (2, 1), (0, 3, 2, 1)),
    "no window reaches all": Convolution(2, 1, 6, 20, (9, 9), (2, 2), (4, 4), (1, 1), (0, 0, 0, 0)),
    "small images": plain(20, 75, 70, 4, 3),
    "images of one position": plain(9, 40, 20, 1, 3),
    "kernel larger than the image": Convolution(3, 1, 20, 21, (2, 3), (5, 5), (1, 1), (1, 1), (2, 2, 2, 2)),
    "windows of padding alone": Convolution(2, 1, 5, 20, (3, 3), (2, 2), (1, 1), (1, 1), (4, 4, 4, 4), bias=True),
    "dilation and padding": Convolution(2, 1, 9, 33, (7, 8), (3, 3), (1, 1), (2, 3), (2, 3, 2, 3)),
    "large kernel": Convolution(5, 1, 20, 50, (12, 12), (5, 5), (1, 1), (1, 1), (0, 0, 0, 0)),
    "large kernel, one image": Convolution(1, 1, 3, 40, (20, 19), (5, 4), (1, 1), (1, 1), (0, 1, 2, 0)),
    "large kernel, stride": Convolution(3, 1, 3, 40, (15, 16), (7, 7), (2, 3), (1, 1), (3, 3, 3, 3)),
    "large kernel, stride and dilation": Convolution(3, 2, 3, 20, (15, 21), (3, 3), (2, 2), (2, 3), (2, 0, 0, 1)),
    "large kernel, long signal": Convolution(2, 1, 3, 20, (700,), (9,), (1,), (1,), (3, 0)),
    "large kernel, volume": Convolution(2, 3, 2, 20, (5, 6, 7), (3, 2, 3), (1, 1, 2), (1, 2, 1), (1, 0, 0, 0, 1, 1)),
    "tiles": plain(30, 40, 70, 4, 3),
    "tiles, one image": plain(1, 70, 67, 34, 3),
    "tiles, odd images": plain(12, 33, 130, 7, 3, bias=True),
    "tiles, asymmetric padding": Convolution(7, 1, 40, 50, (9, 12), (3, 3), (1, 1), (1, 1), (0, 2, 1, 0)),
    "tiles, wide padding": Convolution(5, 1, 40, 50, (13, 12), (3, 3), (1, 1), (1, 1), (2, 2, 2, 2)),
    "tiles, without padding": Convolution(5, 1, 40, 50, (13, 12), (3, 3), (1, 1), (1, 1), (0, 0, 0, 0)),
    "tiles, long rows": Convolution(1, 1, 40, 40, (5, 300), (3, 3), (1, 1), (1, 1), (1, 1, 1, 1)),
    "tiles, many of few columns": plain(4, 40, 16, 26, 3),
    "tiles, columns of x": plain(3, 48, 80, 21, 3),
    "tiles, one column": plain(2, 70, 70, 2, 3),
    "few outputs": plain(2, 20, 6, 32, 3, bias=True),
    "few outputs, odd rows": plain(3, 18, 9, 19, 3, bias=True),
    "few outputs, stride": plain(2, 6, 24, 18, 3, stride=2),
    "few outputs, tiny images": plain(9, 8, 10, 3, 3),
    "few outputs, long signal": Convolution(2, 1, 20, 7, (5_003,), (5,), (1,), (1,), (2, 2), bias=True),
    "few outputs, volume": Convolution(2, 1, 8, 7, (4, 5, 18), (3, 3, 3), (1, 1, 1), (1, 1, 1), (1,) * 6),
    "few outputs, dilation": Convolution(2, 1, 12, 10, (20, 21), (3, 3), (1, 1), (2, 9), (2, 9, 2, 9)),
    "few outputs, groups": plain(2, 9, 7, 21, 3, group=3),
    "few outputs, many inputs": plain(2, 70, 12, 16, 3),
    "empty batch": plain(0, 3, 20, 5, 3),
    "no window": Convolution(2, 1, 3, 4, (2, 2), (3, 3), (1, 1), (1, 1), (0, 0, 0, 0)),
}  # fmt: skip


def assert_near(found, expected, terms):
    """Within the rounding of a sum of so many terms of size about one."""
    assert found.shape == expected.shape
    unit = 2.0**-24 if found.dtype == np.float32 else 2.0**-53
    np.testing.assert_allclose(found, expected, rtol=0, atol=8 * unit * (terms + 30))


def check(path, convolution, dtype, seed=0, operators=OPERATORS, threads=1):
    x, w, dy, b = convolution.draw(dtype, seed)
    for operator in operators:
        terms = convolution.batch * np.prod(convolution.windows) if operator == "ConvWeightGradient" else w[0].size
        if operator == "ConvInputGradient":
            terms = convolution.outputs * np.prod(convolution.kernel)
        found = run(path, operator, convolution.feeds(operator, x, w, dy, b), convolution.attributes, threads)
        assert found.dtype == dtype
        assert_near(found, convolution.expected(operator, x, w, dy, b), terms)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", CASES)
def test_against_float64(instruction_set, library_path, name, dtype):
    check(library_path, CASES[name], dtype)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(convolution=convolutions(30, 80, groups=True), dtype=st.sampled_from([np.float32, np.float64]))
def test_any_geometry(library_path, convolution, dtype):
    check(library_path, convolution, dtype)


@pytest.mark.parametrize("name", ["several panels and depths", "many images", "large image", "pointwise", "stride",
                                  "depthwise", "small groups", "small images", "large kernel",
                                  "large kernel, one image", "tiles", "tiles, one image",
                                  "tiles, odd images", "tiles, many of few columns", "few outputs",
                                  "few outputs, odd rows", "few outputs, stride",
                                  "few outputs, many inputs"])  # fmt: skip
@pytest.mark.parametrize("operator", OPERATORS)
def test_threads_do_not_change_a_bit(operator, name):
    convolution = CASES[name]
    feeds = convolution.feeds(operator, *convolution.draw(np.float32))
    one, *others = (run(PATH, operator, feeds, convolution.attributes, threads) for threads in (1, 2, 3, 5))
    for other in others:
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_stays_in_its_windows(instruction_set, library_path, value):
    convolution = plain(2, 4, 20, 8, 3)
    x, w, dy, b = convolution.draw(np.float32)
    x[1, 2, 4, 4] = value
    y = run(library_path, "Conv", convolution.feeds("Conv", x, w, dy, b), convolution.attributes)
    reached = np.zeros((8, 8), bool)
    reached[3:6, 3:6] = True
    assert np.isfinite(y[0]).all()
    assert np.isfinite(y[1][:, ~reached]).all()
    assert not np.isfinite(y[1][:, reached]).any()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_nan_gradient_stays_in_its_tiles(instruction_set, library_path, value):
    convolution = plain(20, 40, 48, 8, 3)
    x, w, dy, b = convolution.draw(np.float32)
    dy[1, 2, 4, 4] = value
    operator = "ConvInputGradient"
    dx = run(library_path, operator, convolution.feeds(operator, x, w, dy, b), convolution.attributes)
    tiles, windows = np.zeros((8, 8), bool), np.zeros((8, 8), bool)
    tiles[2:6, 2:6] = True  # of 2 x 2 positions
    windows[3:6, 3:6] = True
    assert np.isfinite(dx[[0, *range(2, 20)]]).all()
    assert np.isfinite(dx[1][:, ~tiles]).all()
    assert not np.isfinite(dx[1][:, windows]).any()


GOOD = plain(2, 4, 6, 8, 3, group=2)


@pytest.mark.parametrize(
    ("attributes", "sentence"),
    [
        ({"kernel_shape": []}, "attribute 'kernel_shape' has 0 numbers: this kernel works on 1 to 3 spatial axes."),
        ({"kernel_shape": [1, 1, 1, 1]}, "attribute 'kernel_shape' has 4 numbers"),
        ({"strides": [1]}, "attribute 'strides' has 1 numbers, and must have 2 for this kernel_shape."),
        ({"pads": [1, 1]}, "attribute 'pads' has 2 numbers, and must have 4"),
        ({"dilations": [0, 1]}, r"attribute 'dilations' is \[0, 1\]: every number must be at least 1."),
        ({"pads": [0, 0, 0, -1]}, r"attribute 'pads' is \[0, 0, 0, -1\]: every number must be at least 0."),
        ({"group": 0}, "attribute 'group' is 0: it must be at least 1."),
    ],
)
@pytest.mark.parametrize("operator", OPERATORS)
def test_wrong_attributes_are_refused(operator, attributes, sentence):
    given = {**GOOD.attributes, **attributes}
    given = {name: value for name, value in given.items() if value != []}
    with pytest.raises(Exception, match=f"{operator}: .*{sentence}"):
        run(PATH, operator, GOOD.feeds(operator, *GOOD.draw(np.float32)), given)


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


@pytest.mark.parametrize(
    ("operator", "feeds", "sentence"),
    [
        ("Conv", {"w": zeros(12, 3, 3, 3)},
         r"input 1 \(w\) has shape \[12, 3, 3, 3\], and must have shape \[12, 4, 3, 3\]"),
        ("Conv", {"w": zeros(12, 4, 3)}, r"x has shape .* and w has shape \[12, 4, 3\]: both must have 4 axes"),
        ("Conv", {"x": zeros(2, 7, 8, 8)}, "numbers of channels must be multiples of attribute 'group', 2."),
        ("Conv", {"b": zeros(3)}, r"input 2 \(b\) has shape \[3\], and must have shape \[12\]"),
        ("ConvInputGradient", {"x_shape": np.array([3, 8, 8, 8])}, "both must have the same batch size."),
        ("ConvInputGradient", {"x_shape": np.array([2, 8, 8, 9])}, "axis 3 of y must have size 9"),
        ("ConvInputGradient", {"x_shape": np.array([2, 8, 8])}, "both must have 4 axes, as attribute"),
        ("ConvInputGradient", {"x_shape": np.array([2, 8, -1, 8])}, r"input 2 \(x_shape\) is .*: no size may be"),
        ("ConvInputGradient", {"w": zeros(12, 4, 1, 1)}, r"input 1 \(w\) has shape .*, and must have shape"),
        ("ConvWeightGradient", {"dy": zeros(2, 12, 7, 8)}, "axis 2 of y must have size 8"),
        ("ConvWeightGradient", {"dy": zeros(2, 13, 8, 8)}, "multiples of attribute 'group'"),
    ],
)  # fmt: skip
def test_wrong_inputs_are_refused(operator, feeds, sentence):
    right = plain(2, 4, 6, 8, 3, group=2, bias=True)
    given = {**right.feeds(operator, *right.draw(np.float32)), **feeds}
    with pytest.raises(Exception, match=f"{operator}: .*{sentence}"):
        run(PATH, operator, given, right.attributes)


@pytest.mark.parametrize(
    ("operator", "feeds"),
    [
        ("Conv", {"w": zeros(12, 4, 3, 3, dtype=np.float64)}),
        ("ConvWeightGradient", {"dy": zeros(2, 12, 8, 8, dtype=np.int64), "x": zeros(2, 8, 8, 8, dtype=np.int64)}),
    ],
)
def test_types_that_no_kernel_has(operator, feeds):
    right = plain(2, 4, 6, 8, 3, group=2, bias=True)
    given = {**right.feeds(operator, *right.draw(np.float32)), **feeds}
    with pytest.raises(Exception, match=OTHER_TYPES % operator):
        run(PATH, operator, given, right.attributes)
