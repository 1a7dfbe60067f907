"""Linear layers with Relu, and their gradients: bit-identical to separate nodes."""

import re

import ml_dtypes
import numpy as np
import pytest
from kernel_case import Case
from kernel_session import run
from onnx import helper
from onnxruntime.capi.onnxruntime_pybind11_state import Fail, InvalidArgument, InvalidGraph, RuntimeException
from optimizer_sessions import element_type, session

from onnxtrain.runtime.native import custom_ops_library

PATH = str(custom_ops_library())
REFUSED = (Fail, InvalidArgument, InvalidGraph, RuntimeException)
RELU = {"activation": "Relu"}
WAYS = {
    "float": (np.float32, np.float32, {}),
    "double": (np.float64, np.float64, {}),
    "float16": (np.float32, np.float16, {}),
    "bfloat16": (np.float32, ml_dtypes.bfloat16, {}),
    "rounded": (np.float32, np.float32, {"compute": "bfloat16"}),
    "rounded, bfloat16": (np.float32, ml_dtypes.bfloat16, {"compute": "bfloat16"}),
}
"""Type of x, type of w, attributes."""

# Rows, inputs and outputs around the edges of vectors (2 to 16), tiles (6 or 8 rows, up to 64 columns), strips (192
# rows) and blocks (256 and 512 of the depth).
SIZES = [
    (1, 1, 1),
    (5, 3, 2),
    (7, 65, 129),
    (16, 40, 64),
    (65, 257, 10),
    (200, 64, 770),
    (300, 1030, 33),
    (3, 20, 2000),
    (0, 4, 5),
    (4, 0, 5),
    (4, 5, 0),
]


def draw(sizes, kind=np.float32, stored=None, *, transposed=False):
    """x, the result of a Relu, and w, b and dy."""
    rows, inputs, outputs = sizes
    rng = np.random.default_rng(sizes)
    shapes = {"x": (rows, inputs), "w": (inputs, outputs), "b": (outputs,), "dy": (rows, outputs)}
    feeds = {name: rng.standard_normal(shape).astype(kind) for name, shape in shapes.items()}
    w = feeds["w"].T if transposed else feeds["w"]
    return feeds | {"x": np.maximum(feeds["x"], 0), "w": np.ascontiguousarray(w).astype(stored or kind)}


def layer(feeds, attributes, path=PATH, threads=1, *, bias=True):
    given = {name: feeds[name] for name in ("x", "w", "b")[: 2 + bias]}
    return run(Case("Linear", given, attributes, types=(feeds["x"].dtype,)), path, threads)


def gradient(feeds, attributes, path=PATH, threads=1, outputs=3):
    given = {name: feeds[name] for name in ("dy", "w", "x")}
    return run(Case("LinearGradient", given, attributes, outputs, types=(feeds["x"].dtype,) * outputs), path, threads)


def one_after_the_other(feeds, attributes, path):
    """Return dz, dw and db by separate nodes: gradient of x, of Relu, and of weight and bias."""
    turned = attributes | {"transB": 1 - attributes.get("transB", 0)}
    kind = (feeds["x"].dtype,)
    (dx,) = run(Case("Linear", {"dy": feeds["dy"], "w": feeds["w"]}, turned, types=kind), path)
    (dz,) = run(Case("ReluGradient", {"dy": dx, "y": feeds["x"]}, {}), path)
    dw, db = run(Case("LinearWeightGradient", {"dy": feeds["dy"], "x": feeds["x"]}, attributes, 2), path)
    return [dz, dw, db]


def relu(array):
    """By ONNX Runtime."""
    kind = element_type(array)
    made = session(PATH, [helper.make_node("Relu", ["x"], ["y"])], [("x", kind, None)], [("y", kind, None)])
    return made.run(None, {"x": array})[0]


def assert_same_bits(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_a_product_that_ends_with_relu(instruction_set, library_path, way, transposed):
    kind, stored, attributes = WAYS[way]
    attributes = attributes | {"transB": int(transposed)}
    for sizes in SIZES:
        feeds = draw(sizes, kind, stored, transposed=transposed)
        for bias in (True, False):
            expected = [relu(*layer(feeds, attributes, library_path, bias=bias))]
            assert_same_bits(layer(feeds, attributes | RELU, library_path, bias=bias), expected)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_a_gradient_that_ends_with_that_of_relu(instruction_set, library_path, way, transposed):
    kind, stored, attributes = WAYS[way]
    attributes = attributes | {"transB": int(transposed)}
    for sizes in SIZES:
        feeds = draw(sizes, kind, stored, transposed=transposed)
        expected = one_after_the_other(feeds, attributes, library_path)
        assert_same_bits(gradient(feeds, attributes | RELU, library_path), expected)


@pytest.mark.parametrize("way", WAYS)
def test_without_an_activation_nothing_is_cut(way):
    kind, stored, attributes = WAYS[way]
    feeds = draw((30, 20, 70), kind, stored)
    (dx,) = run(Case("Linear", {"dy": feeds["dy"], "w": feeds["w"]}, attributes | {"transB": 1}, types=(kind,)))
    for activation in ({}, {"activation": ""}):
        found, *_ = gradient(feeds, attributes | activation)
        assert_same_bits([found], [dx])
        y, cut = (layer(feeds, attributes | more)[0] for more in (activation, RELU))
        assert (y < 0).any()
        assert not (cut < 0).any()


SPECIAL = [np.nan, -np.nan, 0.0, -0.0, np.inf, -np.inf, 1e-45, -1e-45, 1.0, -1.0]


@pytest.mark.parametrize("kind", [np.float32, np.float64])
@pytest.mark.parametrize("columns", [1, 7, 16, 70])
def test_nan_and_zeros_are_as_with_relu(instruction_set, library_path, columns, kind):
    sums = np.resize(np.asarray(SPECIAL, kind), columns + len(SPECIAL))[len(SPECIAL) :]
    for start in range(len(SPECIAL)):
        b = np.roll(sums, start)
        feeds = {"x": np.full((3, 1), -0.0, kind), "w": np.ones((1, columns), kind), "b": b}
        given = np.tile(b, (3, 1))
        assert_same_bits(layer(feeds, {}, library_path), [given])
        assert_same_bits(layer(feeds, RELU, library_path), [relu(given)])


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_nan_and_zeros_are_as_with_the_gradient_of_relu(instruction_set, library_path, kind):
    special = np.asarray(SPECIAL, kind)
    for x in (special, np.tile(special, 7)):
        feeds = {"dy": special[:, None], "w": np.ones((len(x), 1), kind), "x": np.tile(x, (len(special), 1))}
        attributes = {"transB": 0}
        assert_same_bits(
            gradient(feeds, RELU, library_path, outputs=1), one_after_the_other(feeds, attributes, library_path)[:1]
        )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("sizes", [(1025, 300, 200), (8, 784, 512), (400, 64, 1600)], ids=str)
def test_threads_do_not_change_a_bit(sizes, way):
    kind, stored, attributes = WAYS[way]
    feeds, attributes = draw(sizes, kind, stored), attributes | RELU
    one, *others = (
        layer(feeds, attributes, threads=threads) + gradient(feeds, attributes, threads=threads)
        for threads in (1, 2, 3)
    )
    for other in others:
        assert_same_bits(other, one)


def test_leading_axes_are_rows():
    flat = draw((6, 20, 30))
    deep = flat | {name: flat[name].reshape(2, 3, -1) for name in ("x", "dy")}
    for function in (layer, gradient):
        whole = function(flat, RELU)
        found = function(deep, RELU)
        assert found[0].shape[:2] == (2, 3)
        for one, other in zip(found, whole, strict=True):
            np.testing.assert_array_equal(one.reshape(other.shape), other)


@pytest.mark.parametrize("wanted", [[0], [1], [2], [0, 1], [1, 2], [0, 2]])
def test_omitted_outputs_do_not_change_others(wanted):
    feeds = draw((30, 20, 70))
    every = gradient(feeds, RELU)
    names = ["dz", "dw", "db"]
    produced = [name if index in wanted else "" for index, name in enumerate(names)][: wanted[-1] + 1]
    node = helper.make_node("LinearGradient", ["dy", "w", "x"], produced, domain="onnxtrain", **RELU)
    inputs = [(name, element_type(feeds[name]), None) for name in ("dy", "w", "x")]
    outputs = [(names[index], element_type(feeds["x"]), None) for index in wanted]
    found = session(PATH, [node], inputs, outputs).run(None, {name: feeds[name] for name, _, _ in inputs})
    assert_same_bits(found, [every[index] for index in wanted])


def ones(*shape):
    return np.ones(shape, np.float32)


@pytest.mark.parametrize(
    ("transposed", "feeds", "sentence"),
    [
        (0, {"dy": ones(4), "w": ones(3, 4), "x": ones(3)}, "0 (dy) has shape [4], and must have at least two axes"),
        (0, {"dy": ones(2, 4), "w": ones(4, 3), "x": ones(2, 3)}, "1 (w) has shape [4, 3], and must be [inputs, 4]"),
        (1, {"dy": ones(2, 4), "w": ones(3, 4), "x": ones(2, 3)}, "1 (w) has shape [3, 4], and must be [4, inputs]"),
        (0, {"dy": ones(2, 4), "w": ones(3, 4, 1), "x": ones(2, 3)}, "1 (w) has shape [3, 4, 1]"),
        (0, {"dy": ones(2, 4), "w": ones(3, 4), "x": ones(2, 5)}, "2 (x) has shape [2, 5], and must have shape [2, 3]"),
        (0, {"dy": ones(2, 4), "w": ones(3, 4), "x": ones(6)}, "2 (x) has shape [6], and must have"),
    ],
)  # fmt: skip
def test_inputs_that_do_not_fit_are_refused(transposed, feeds, sentence):
    with pytest.raises(REFUSED, match=re.escape(f"LinearGradient: input {sentence}")):
        gradient(feeds, {"transB": transposed, **RELU})


@pytest.mark.parametrize("function", [layer, gradient])
@pytest.mark.parametrize("activation", ["relu", "Gelu"])
def test_other_activations_are_refused(function, activation):
    sentence = f"attribute 'activation' is '{activation}': it must be Relu, or be left out."
    with pytest.raises(REFUSED, match=re.escape(sentence)):
        function(draw((2, 3, 4)), {"activation": activation})


def test_double_is_not_rounded():
    with pytest.raises(REFUSED, match="LinearGradient: attribute 'compute' is 'bfloat16', and its inputs have"):
        gradient(draw((2, 3, 4), np.float64), RELU | {"compute": "bfloat16"})
