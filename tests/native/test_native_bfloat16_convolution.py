"""Convolutions of operands rounded to bfloat16: against NumPy, on all instruction sets, for any number of threads.

Sums differ from float64's by at most 8 float32 ulps of the sum of the absolute values of their terms, times the root of
their number. They are bit-identical to float32 sums in the kernel's order, the same for every instruction set but AMX.
"""

import re
from dataclasses import replace

import bfloat16_reference as reference
import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from convolution_reference import OPERATORS, Convolution, run
from drawn_convolutions import convolutions
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import helper
from onnxruntime.capi.onnxruntime_pybind11_state import Fail, InvalidArgument, InvalidGraph, RuntimeException
from optimizer_sessions import element_type

from onnxtrain.autodiff.engine import Backward
from onnxtrain.lowering.rules.kernels import resolve_fused
from onnxtrain.runtime.native import custom_ops_library

PATH = str(custom_ops_library())
REFUSED = (Fail, InvalidArgument, InvalidGraph, RuntimeException)
COMPUTE = {"compute": "bfloat16"}


def plain(batch, inputs, outputs, size, kernel, stride=1, **more):
    """A convolution with padding that keeps the size of images."""
    pads = (kernel // 2,) * 4
    return Convolution(batch, 1, inputs, outputs, (size, size), (kernel,) * 2, (stride,) * 2, (1, 1), pads, **more)


# Sizes around the edges of pairs (2), vectors (4 to 16), tiles (16, 32), panels (64), pieces of weights (16 pairs of
# channels) and blocks (1,024 of the depth, 256 and more positions).
CASES = {
    "one element": Convolution(1, 1, 1, 1, (1,), (1,), (1,), (1,), (0, 0)),
    "odd channels": plain(2, 5, 67, 9, 3, bias=True),
    "several blocks of the depth": plain(2, 130, 40, 6, 3, bias=True),
    "many small images": plain(40, 33, 20, 4, 3),
    "parts of an image": plain(1, 6, 17, 70, 3),
    "long signal": Convolution(2, 1, 4, 33, (3000,), (5,), (1,), (2,), (4, 4), bias=True),
    "volume": Convolution(2, 1, 5, 18, (6, 7, 8), (3, 2, 3), (2, 1, 3), (1, 2, 1), (1, 0, 2, 1, 1, 0)),
    "pointwise": plain(5, 37, 70, 7, 1, bias=True),
    "pointwise, parts of an image": plain(2, 70, 37, 40, 1),
    "pointwise, stride": plain(3, 20, 24, 9, 1, stride=2),
    "stride": plain(2, 34, 30, 15, 3, stride=2),
    "stride beyond the kernel": plain(2, 20, 30, 16, 2, stride=3),
    "asymmetric padding": Convolution(2, 1, 9, 20, (8, 9), (3, 4), (1, 2), (2, 1), (0, 3, 2, 1)),
    "windows of padding alone": Convolution(2, 1, 5, 20, (3, 3), (2, 2), (1, 1), (1, 1), (4, 4, 4, 4), bias=True),
    "dilation and padding": Convolution(2, 1, 9, 33, (7, 8), (3, 3), (1, 1), (2, 3), (2, 3, 2, 3)),
    "large kernel": Convolution(2, 1, 3, 20, (30, 31), (24, 25), (2, 1), (1, 1), (1, 2, 3, 4)),
    "no window": Convolution(2, 1, 3, 5, (2, 2), (3, 3), (1, 1), (1, 1), (0, 0, 0, 0), bias=True),
}


def computed(path, case, operator, arrays, threads=1):
    return run(path, operator, case.feeds(operator, *arrays), case.attributes | COMPUTE, threads)


def check(path, case, threads=1):
    arrays = case.draw(np.float32)
    *rounded, bias = [*(reference.rounded(array) for array in arrays[:3]), arrays[3]]
    terms = {
        "Conv": case.inputs * np.prod(case.kernel),
        "ConvInputGradient": case.outputs * np.prod(case.kernel),
        "ConvWeightGradient": case.batch * np.prod(case.windows),
    }
    for operator in OPERATORS:
        found = computed(path, case, operator, arrays, threads)
        expected = case.expected(operator, *rounded, bias)
        magnitude = case.expected(operator, *(np.abs(array) for array in (*rounded, bias)))
        assert found.dtype == np.float32
        assert found.shape == expected.shape
        bound = 8 * np.finfo(np.float32).eps * magnitude * max(1, terms[operator]) ** 0.5
        assert (np.abs(found - expected) <= bound).all(), operator


@pytest.mark.parametrize("name", CASES)
def test_against_float64(instruction_set, library_path, name):
    check(library_path, CASES[name])


@pytest.mark.parametrize("name", CASES)
def test_against_float64_in_tiles(tiles_path, name):
    check(tiles_path, CASES[name])


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=convolutions(40, 70, groups=False), threads=st.sampled_from([1, 2]))
def test_any_geometry(library_path, case, threads):
    check(library_path, case, threads)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=convolutions(40, 70, groups=False), threads=st.sampled_from([1, 2]))
def test_any_geometry_in_tiles(tiles_path, case, threads):
    check(tiles_path, case, threads)


def in_order(case, operator, x, w, dy, b):
    """A result of the kernels to the bit: pairs of channels, of each all taps, or, for weights, pairs of positions."""
    before = case.pads[: len(case.size)]
    inner = tuple(slice(first, first + size) for first, size in zip(before, case.size, strict=True))
    padded = np.pad(x, [(0, 0), (0, 0), *case.padding()[3:]])
    taps = list(case.positions())

    def depth(channels, element):
        """Rows of a matrix in the order of sums; a last channel without a second has zeros beside it."""
        zero = np.zeros_like(element(0, *taps[0]))
        return np.array(
            [
                element(channel, *tap) if channel < channels else zero
                for pair in range(0, channels, 2)
                for tap in taps
                for channel in (pair, pair + 1)
            ]
        )

    if operator == "Conv":
        left = depth(case.inputs, lambda c, position, at: w[(slice(None), c, *position)])
        right = depth(case.inputs, lambda c, position, at: padded[(slice(None), c, *at)].ravel())
        y = reference.product_in_order(left.T, right, b[:, None] if case.bias else None)
        return np.moveaxis(y.reshape(case.outputs, case.batch, *case.windows), 0, 1)
    if operator == "ConvInputGradient":

        def scattered(o, position, at):
            dx = np.zeros((case.batch, *padded.shape[2:]), np.float32)
            dx[(slice(None), *at)] = dy[:, o]
            return dx[(slice(None), *inner)].ravel()

        left = depth(case.outputs, lambda o, position, at: w[(o, slice(None), *position)])
        dx = reference.product_in_order(left.T, depth(case.outputs, scattered))
        return np.moveaxis(dx.reshape(case.inputs, case.batch, *case.size), 0, 1)
    columns = [padded[(slice(None), c, *at)].ravel() for c in range(case.inputs) for _, at in taps]
    left = np.moveaxis(dy, 1, 0).reshape(case.outputs, -1)
    return reference.product_in_order(left, np.array(columns).T).reshape(case.w_shape)


@pytest.mark.parametrize(
    "name", ["odd channels", "several blocks of the depth", "volume", "pointwise", "pointwise, stride", "stride",
             "many small images", "asymmetric padding", "dilation and padding"]
)  # fmt: skip
@pytest.mark.parametrize("operator", OPERATORS)
def test_every_instruction_set_has_the_same_bits(instruction_set, library_path, operator, name):
    case = replace(CASES[name], outputs=min(CASES[name].outputs, 20))
    arrays = case.draw(np.float32)
    found = computed(library_path, case, operator, arrays)
    np.testing.assert_array_equal(found, in_order(case, operator, *arrays))


THREADED = {
    "large images": plain(3, 64, 70, 40, 3),
    "few positions": plain(1, 130, 200, 5, 3, bias=True),
    "stride": plain(3, 40, 72, 31, 3, stride=2),
    "pointwise": plain(4, 70, 130, 20, 1),
}


@pytest.mark.parametrize("name", THREADED)
@pytest.mark.parametrize("operator", OPERATORS)
def test_threads_do_not_change_a_bit(operator, name):
    case = THREADED[name]
    arrays = case.draw(np.float32)
    one, *others = (computed(PATH, case, operator, arrays, threads) for threads in (1, 2, 3))
    for other in others:
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("operator", ["Conv", "ConvInputGradient"])
def test_the_rest_of_a_batch_does_not_change_a_bit(operator):
    case = plain(6, 34, 40, 9, 3)
    arrays = case.draw(np.float32)
    whole = computed(PATH, case, operator, arrays)
    x, w, dy, b = arrays
    alone = computed(PATH, replace(case, batch=1), operator, (x[4:5], w, dy[4:5], b))
    np.testing.assert_array_equal(alone, whole[4:5])


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("operator", ["Conv", "ConvInputGradient"])
@pytest.mark.parametrize("inputs", [4, 5])
def test_nan_stays_in_its_windows(operator, value, inputs):
    case = plain(2, inputs, inputs, 8, 3)
    x, w, dy, b = case.draw(np.float32)
    (x if operator == "Conv" else dy)[1, 2, 4, 4] = value
    found = computed(PATH, case, operator, (x, w, dy, b))
    reached = np.zeros((8, 8), bool)
    reached[3:6, 3:6] = True
    assert np.isfinite(found[0]).all()
    assert np.isfinite(found[1][:, ~reached]).all()
    assert not np.isfinite(found[1][:, reached]).any()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_stays_in_its_weights(value):
    case = plain(2, 5, 7, 8, 3)
    x, w, dy, b = case.draw(np.float32)
    x[1, 2, 0, 0] = value  # the first row and column are seen by no tap behind the first two
    dw = computed(PATH, case, "ConvWeightGradient", (x, w, dy, b))
    reached = np.zeros((5, 3, 3), bool)
    reached[2, :2, :2] = True
    assert np.isfinite(dw[:, ~reached]).all()
    assert not np.isfinite(dw[:, reached]).any()


def test_without_the_attribute_nothing_is_rounded():
    case = plain(2, 20, 30, 8, 3)
    arrays = case.draw(np.float32)
    for operator in OPERATORS:
        exact = case.expected(operator, *arrays)
        feeds = case.feeds(operator, *arrays)
        np.testing.assert_allclose(run(PATH, operator, feeds, case.attributes), exact, atol=1e-3)
        found = run(PATH, operator, feeds, case.attributes | {"compute": "float32"})
        np.testing.assert_allclose(found, exact, atol=1e-3)
        assert np.abs(computed(PATH, case, operator, arrays) - exact).max() > 1e-2


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize(
    ("dtype", "changed", "sentence"),
    [
        (np.float32, {"compute": "float16"}, "attribute 'compute' is 'float16': it must be float32 or bfloat16"),
        (np.float64, COMPUTE, "attribute 'compute' is 'bfloat16', and its inputs have type double: they must be float"),
        (np.float32, COMPUTE | {"group": 2}, "'bfloat16', and attribute 'group' is 2: conv"),
    ],
)  # fmt: skip
def test_invalid_types_and_attributes_are_refused(operator, dtype, changed, sentence):
    case = plain(1, 4, 6, 5, 3)
    feeds = case.feeds(operator, *case.draw(dtype))
    with pytest.raises(REFUSED, match=re.escape(operator + ": ") + ".*" + re.escape(sentence)):
        run(PATH, operator, feeds, case.attributes | changed)


@pytest.mark.parametrize("operator", OPERATORS[1:])
def test_bodies_round_alike(operator):
    """The definition in standard operators, as another runtime computes it."""
    case = plain(2, 12, 20, 9, 3, stride=2)
    x, w, *_ = arrays = case.draw(np.float32)
    feeds = case.feeds(operator, *arrays)
    node = helper.make_node(operator, list(feeds), ["out"], domain="onnxtrain", **case.attributes, **COMPUTE)
    values = [helper.make_tensor_value_info(name, element_type(array), array.shape) for name, array in feeds.items()]
    shape = x.shape if operator == "ConvInputGradient" else w.shape
    wanted = [helper.make_tensor_value_info("out", 1, shape)]
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("onnxtrain", 1)]
    working = ir.from_proto(helper.make_model(helper.make_graph([node], "g", values, wanted), opset_imports=opsets))
    resolve_fused(working, Backward(), kernels=False)
    assert {made.domain for made in working.graph} == {""}
    working.ir_version = 10
    session = onnxruntime.InferenceSession(ir.to_proto(working).SerializeToString(), providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(computed(PATH, case, operator, arrays), session.run(None, feeds)[0], atol=1e-4)
