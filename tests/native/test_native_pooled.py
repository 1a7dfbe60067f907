"""Convolutions with their MaxPool in one node: against ONNX Runtime's Conv and MaxPool, and calls that are refused."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
from kernel_case import Case
from kernel_session import run
from onnx import helper, numpy_helper

RNG = np.random.default_rng(0)
CONSTANTS = ("w",)

CASES = [
    # images, outputs, channels, kernel, strides, pads, size, pool, pool_pads
    (1, 64, 3, (7, 7), (2, 2), (3, 3, 3, 3), (224, 224), (3, 3), (1, 1, 1, 1)),  # in several parts
    (2, 8, 3, (7, 7), (2, 2), (3, 3, 3, 3), (30, 31), (3, 3), (1, 1, 1, 1)),
    (1, 16, 2, (3, 3), (1, 1), (1, 1, 1, 1), (28, 45), (2, 2), (0, 0, 0, 0)),
    (3, 8, 1, (5, 4), (1, 1), (0, 0, 0, 0), (9, 9), (3, 2), (0, 1, 1, 0)),
    (1, 8, 5, (2, 8), (4, 2), (1, 7, 0, 2), (23, 70), (2, 3), (1, 0, 0, 1)),
    (2, 24, 4, (1, 1), (1, 1), (0, 0, 0, 0), (5, 67), (3, 3), (0, 0, 0, 0)),
    (1, 8, 2, (3, 11), (2, 4), (2, 2, 2, 2), (41, 43), (2, 2), (1, 1, 1, 1)),
    (1, 8, 1, (1, 2), (1, 4), (0, 0, 0, 0), (2, 14), (2, 2), (0, 1, 0, 1)),  # a group behind the last tile
    (1, 8, 2, (3, 3), (1, 1), (0, 0, 0, 0), (3, 3), (2, 2), (1, 1, 0, 0)),  # a single window
    (1, 8, 2, (3, 3), (1, 1), (0, 0, 0, 0), (3, 4), (3, 3), (0, 0, 0, 0)),  # no group
    (0, 8, 2, (3, 3), (1, 1), (0, 0, 0, 0), (8, 8), (2, 2), (0, 0, 0, 0)),
]


def drawn(case):
    images, outputs, channels, kernel, strides, pads, size, pool, pool_pads = case
    feeds = {
        "x": RNG.standard_normal((images, channels, *size), np.float32),
        "w": RNG.standard_normal((outputs, channels, *kernel), np.float32) / np.float32(np.sqrt(channels * 9)),
        "bias": RNG.standard_normal(outputs, np.float32),
    }
    attributes = {"kernel_shape": kernel, "strides": strides, "pads": pads, "pool_shape": pool, "pool_pads": pool_pads}
    return feeds, attributes


def by_standard_operators(feeds, given):
    windows = {name: given[name] for name in ("kernel_shape", "strides", "pads")}
    pool = {"kernel_shape": given["pool_shape"], "strides": [2, 2], "pads": given["pool_pads"]}
    graph = helper.make_graph(
        [
            helper.make_node("Conv", ["x", "w", "bias"], ["sum"], **windows),
            helper.make_node("Relu", ["sum"], ["above"]),
            helper.make_node("MaxPool", ["above"], ["y"], **pool),
        ],
        "pooled",
        [helper.make_tensor_value_info("x", 1, feeds["x"].shape)],
        [helper.make_tensor_value_info("y", 1, None)],
        [numpy_helper.from_array(array, name) for name, array in feeds.items() if name != "x"],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": feeds["x"]})[0]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_result_of_conv_and_max_pool(library_path, case):
    feeds, attributes = drawn(case)
    called = Case("ConvReluMaxPool", feeds, attributes, constants=CONSTANTS)
    found = run(called, library_path)[0]
    if feeds["x"].size and case[6] != (3, 4):
        expected = by_standard_operators(feeds, attributes)
        np.testing.assert_allclose(found, expected, rtol=0, atol=3e-6 * max(1, expected.max()))
    else:
        assert found.size == 0
    np.testing.assert_array_equal(found, run(called, library_path, 3)[0])  # the same bits with any number of threads


def test_what_is_not_a_number_stays_near(library_path):
    feeds, attributes = drawn((1, 8, 3, (7, 7), (2, 2), (3, 3, 3, 3), (80, 120), (3, 3), (1, 1, 1, 1)))
    called = Case("ConvReluMaxPool", feeds, attributes, constants=CONSTANTS)
    plain = run(called, library_path)[0]
    feeds["x"][0, 1, 40, 60] = np.nan
    found = run(called, library_path)[0]
    # Rows of windows that read it, and groups of these; columns of its tiles of four windows, and groups of these.
    near = np.zeros(plain.shape, bool)
    near[:, :, 9:12, 12:19] = True
    np.testing.assert_array_equal(found[~near], plain[~near])
    assert not np.array_equal(found[near], plain[near], equal_nan=True)


@pytest.mark.parametrize("border", [(1, 1, 1, 1), (0, 2, 3, 0)])
@pytest.mark.parametrize("case", CASES[1:5], ids=str)
def test_zeros_around_the_result(library_path, case, border):
    feeds, attributes = drawn(case)
    plain = run(Case("ConvReluMaxPool", feeds, attributes, constants=CONSTANTS), library_path)[0]
    found = run(Case("ConvReluMaxPool", feeds, attributes | {"y_pads": border}, constants=CONSTANTS), library_path)[0]
    around = [(0, 0), (0, 0), (border[0], border[2]), (border[1], border[3])]
    np.testing.assert_array_equal(found, np.pad(plain, around))


def test_an_image_has_the_same_bits_in_any_batch(library_path):
    feeds, attributes = drawn((5, 64, 3, (7, 7), (2, 2), (3, 3, 3, 3), (97, 90), (3, 3), (1, 1, 1, 1)))
    batch = run(Case("ConvReluMaxPool", feeds, attributes, constants=CONSTANTS), library_path)[0]
    alone = Case("ConvReluMaxPool", feeds | {"x": feeds["x"][3:4]}, attributes, constants=CONSTANTS)
    np.testing.assert_array_equal(batch[3:4], run(alone, library_path)[0])


GOOD = {"x": np.ones((1, 2, 9, 9), np.float32), "w": np.ones((8, 2, 3, 3), np.float32),
        "bias": np.zeros(8, np.float32)}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "attributes", "message"),
    [
        ({"w": np.ones((4, 2, 3, 3), np.float32)}, {}, r"input 1 \(w\) .* \[4, 2, 3, 3\]: .* a multiple of 8 outputs"),
        ({"w": np.ones((8, 2, 3, 2), np.float32)}, {}, r"must be float with shape \[outputs, channels, 3, 3\]"),
        ({"x": np.ones((1, 3, 9, 9), np.float32)}, {}, r"input 0 \(x\) .*\[1, 3, 9, 9\]: .* 4 axes and 2 channels"),
        ({"x": np.ones((1, 2, 2, 9), np.float32)}, {}, r"with its pads it is smaller than the kernel, \[3, 3\]"),
        ({"bias": np.zeros(7, np.float32)}, {}, r"input 2 \(bias\) has shape \[7\], and must have shape \[8\]"),
        ({}, {"kernel_shape": [3]}, r"'kernel_shape' is \[3\], and 'strides' is \[1\]: there must be two sizes"),
        ({"w": np.ones((8, 2, 3, 5), np.float32)}, {"kernel_shape": [3, 5]}, r"at most 4 columns for each step of a"),
        ({}, {"strides": [5, 1]}, r"attribute 'strides' is \[5, 1\]: each must be 1, 2 or 4"),
        ({}, {"dilations": [2, 1]}, r"attribute 'dilations' is \[2, 1\]: it must be \[1, 1\]"),
        ({}, {"pool_shape": [2, 4]}, r"attribute 'pool_shape' is \[2, 4\]: it must have 2 numbers from 2 to 3"),
        ({}, {"pool_pads": [0, 0, 0, 2]}, r"'pool_pads' is \[0, 0, 0, 2\]: it must have 4 numbers from 0 to 1"),
        ({}, {"y_pads": [0, 0, 0, -1]}, r"attribute 'y_pads' is .*: it must have 4 sizes that are not negative"),
    ],
)  # fmt: skip
def test_what_the_kernel_does_not_compute_is_refused(changed, attributes, message):
    given = {"kernel_shape": [3, 3], "pool_shape": [2, 2], **attributes}
    with pytest.raises(Exception, match=rf"ConvReluMaxPool: .*{message}"):
        run(Case("ConvReluMaxPool", GOOD | changed, given, constants=CONSTANTS))


def test_computed_weights_are_refused():
    with pytest.raises(Exception, match=r"ConvReluMaxPool: input 1 \(w\) is computed: it must be an initializer"):
        run(Case("ConvReluMaxPool", GOOD, {"kernel_shape": [3, 3], "pool_shape": [2, 2]}))
