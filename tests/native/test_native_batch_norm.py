"""Batch normalization in training mode with an activation, and its gradient from the statistics that it kept."""

import numpy as np
import pytest
from gradient_reference import activated, assert_near
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_case import Case
from kernel_session import run
from onnx import helper
from onnxruntime.capi.onnxruntime_pybind11_state import Fail, InvalidArgument, InvalidGraph, RuntimeException
from optimizer_sessions import session

from onnxtrain.runtime.native import custom_ops_library
from sentences import raises_sentence

PATH = str(custom_ops_library())
TYPES = [np.float32, np.float64]
REFUSED = (Fail, InvalidArgument, InvalidGraph, RuntimeException)
EPSILON = 1 / 128  # exact in single precision
ACTIVATIONS = {
    "": {},
    "Relu": {"activation": "Relu"},
    "Clip": {"activation": "Clip", "low": 0.0, "high": 1.5},
    "HardSwish": {"activation": "HardSwish"},
}

# Rows; columns of one number, short runs side by side with and without a rest, long runs with and without one.
SHORT = [(5, 3), (70, 300), (3, 700), (6, 5, 2), (9, 67, 2, 2), (4, 9, 3, 3), (3, 5, 31), (2, 70, 4, 4)]
SHAPES = [*SHORT, (2, 3, 33), (3, 4, 9, 11), (2, 3, 70, 60), (2, 2, 4, 5, 6)]


def draw(shape, kind=np.float32, seed=0):
    rng = np.random.default_rng((seed, *shape))
    arrays = {"x": rng.standard_normal(shape) * 2 + 3, "dy": rng.standard_normal(shape)}
    arrays |= {name: rng.standard_normal(shape[1]) for name in ("scale", "bias", "mean")}
    arrays |= {"variance": rng.random(shape[1]) + 0.5, "addend": rng.standard_normal(shape)}
    return {name: array.astype(kind) for name, array in arrays.items()}


def forward(feeds, activation, path=PATH, threads=1, *, addend=False):
    """y, both running statistics, and both of the batch."""
    names = ("x", "scale", "bias", "mean", "variance", "addend")[: 5 + addend]
    attributes = {"epsilon": EPSILON, "momentum": 0.75, **ACTIVATIONS[activation]}
    return run(Case("BatchNormalization", {name: feeds[name] for name in names}, attributes, 5), path, threads)


def gradient(feeds, kept, activation, path=PATH, threads=1, **other):
    """dx, dscale, dbias and y again."""
    names = ("dy", "x", "scale")
    given = {name: feeds[name] for name in names} | {"mean": kept[0], "variance": kept[1], "bias": feeds["bias"]}
    given |= other
    attributes = {"epsilon": EPSILON, "training_mode": 1, **ACTIVATIONS[activation]}
    return run(Case("BatchNormalizationGradient", given, attributes, 4), path, threads)


def expected(feeds, activation):
    """y, dx, dscale, dbias, in float64; where the slope jumps nearby, dy is set to zero in the feeds."""
    axes, column = (0, *range(2, feeds["x"].ndim)), (-1, *[1] * (feeds["x"].ndim - 2))
    x, scale, bias = (feeds[name].astype(np.float64) for name in ("x", "scale", "bias"))
    r = 1 / np.sqrt(x.var(axes, keepdims=True) + EPSILON)
    normalized = (x - x.mean(axes, keepdims=True)) * r
    n = normalized * scale.reshape(column) + bias.reshape(column)
    jumps = {"Relu": (0,), "Clip": (0, 1.5), "HardSwish": (-3, 3)}.get(activation, ())
    for jump in jumps:
        feeds["dy"][abs(n - jump) < 1e-4] = 0
    y, slope = activated(n, activation)
    g = feeds["dy"] * slope
    products = g * normalized
    mean = lambda value: value.mean(axes, keepdims=True)  # noqa: E731
    dx = scale.reshape(column) * r * (g - mean(g) - normalized * mean(products))
    return y, dx, products.sum(axes), g.sum(axes)


@pytest.mark.sampled("kind")
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_instruction_set_and_number_of_threads_gives_the_same_bits(libraries, shape, activation, kind):
    feeds = draw(shape, kind)
    y, dx, dscale, dbias = expected(feeds, activation)
    first = None
    for path, _ in libraries.values():
        for threads in (1, 3):
            made = forward(feeds, activation, str(path), threads)
            again = gradient(feeds, made[3:], activation, str(path), threads)
            np.testing.assert_array_equal(again[3], made[0])  # y has the bits of the forward pass
            if first is None:
                first = [*made, *again]
                assert_near([made[0], *again[:3]], [y, dx, dscale, dbias], scale=10)
            for a, b in zip([*made, *again], first, strict=True):
                np.testing.assert_array_equal(a, b)


quick = settings(max_examples=25, deadline=None)


@quick
@given(
    shape=st.lists(st.integers(1, 24), min_size=2, max_size=5),
    kind=st.sampled_from(TYPES),
    activation=st.sampled_from(list(ACTIVATIONS)),
    seed=st.integers(0, 2**30),
)
def test_any_shape_agrees_with_float64(shape, kind, activation, seed):
    if shape[0] * int(np.prod(shape[2:])) < 3:
        shape[0] += 3  # two elements lie symmetrically: all that is left of dx is rounding
    feeds = draw(tuple(shape), kind, seed)
    y, *others = expected(feeds, activation)
    made = forward(feeds, activation)
    found = gradient(feeds, made[3:], activation)
    scale = 10 + feeds["x"].size ** 0.5 / 20
    assert_near([made[0], *found[:3]], [y, *others], scale)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", [(70, 300), (4, 9, 3, 3), (3, 4, 9, 11)], ids=str)
def test_an_addend_is_added_before_the_activation(shape, activation):
    feeds = draw(shape)
    n, *_ = expected(feeds, "")
    found = forward(feeds, activation, addend=True)
    alone = forward(feeds, activation)
    assert_near(found[:1], [activated(n + feeds["addend"], activation)[0]], scale=10)
    for a, b in zip(found[1:], alone[1:], strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("more", [0, 5])
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("shape", [(70, 300), (4, 9, 3, 3), (3, 4, 9, 11)], ids=str)
def test_the_first_channels_of_another_term_are_added_to_dx(shape, kind, more):
    feeds = draw(shape, kind)
    other = draw((shape[0], shape[1] + more, *shape[2:]), kind)["x"]
    kept = forward(feeds, "Relu")[3:]
    alone = gradient(feeds, kept, "Relu")
    for threads in (1, 3):
        found = gradient(feeds, kept, "Relu", threads=threads, other=other)
        for a, b in zip(found, [alone[0] + other[:, : shape[1]], *alone[1:]], strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("shape", [(64, 40), (8, 3, 20, 20), (9, 67, 2, 2)], ids=str)
def test_a_mean_far_from_zero_costs_no_digits(shape):
    feeds = draw(shape)
    feeds["x"] = feeds["x"] + np.float32(10_000)
    y, *others = expected(feeds, "HardSwish")
    made = forward(feeds, "HardSwish")
    found = gradient(feeds, made[3:], "HardSwish")
    for a, b in zip([made[0], *found[:3]], [y, *others], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * max(1, abs(b).max()))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", [(70, 300), (4, 9, 3, 3), (3, 4, 9, 11)], ids=str)
@pytest.mark.parametrize("over", ["dy", "x"])
def test_dx_may_be_where_an_input_was(shape, activation, over):
    """Of a node whose dy, or whose x, nothing else reads; the other one is a result of the model."""
    feeds = draw(shape)
    made = forward(feeds, activation)
    apart = gradient(feeds, made[3:], activation)
    given = {name: feeds[name] for name in ("dy", "x", "scale", "bias")} | {"mean": made[3], "variance": made[4]}
    names = [f"{name}2" if name in ("dy", "x") else name for name in ("dy", "x", "scale", "mean", "variance", "bias")]
    kept = "x2" if over == "dy" else "dy2"
    nodes = [helper.make_node("Neg", [name], [f"{name}2"]) for name in ("dy", "x")]
    attributes = {"epsilon": EPSILON, "training_mode": 1, **ACTIVATIONS[activation]}
    outputs = ["dx", "dscale", "dbias", "y"]
    nodes.append(helper.make_node("BatchNormalizationGradient", names, outputs, domain="onnxtrain", **attributes))
    values = [(name, 1, list(array.shape)) for name, array in given.items()]
    results = [(name, 1, None) for name in (*outputs, kept)]
    found = session(PATH, nodes, values, results).run(None, given | {"dy": -feeds["dy"], "x": -feeds["x"]})
    for a, b in zip(found[:4], apart, strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(found[4], feeds[kept[:-1]])


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_nan_stays_in_its_channel(activation, value):
    for shape in ((40, 70), (4, 9, 3, 3), (3, 4, 9, 11)):
        feeds = draw(shape)
        feeds["x"][1, 1] = value
        made = forward(feeds, activation)
        found = gradient(feeds, made[3:], activation)
        for array in (made[0], found[0], found[3]):
            assert np.isfinite(np.delete(array, 1, axis=1)).all()
        assert np.isnan(found[0][:, 1]).all() or activation == "Clip"  # no slope at NaN
        assert not np.isfinite(made[3][0, 1])


def inputs(**changed):
    ones = {name: np.ones(3, np.float32) for name in ("scale", "bias")}
    rows = {"dy": np.ones((2, 3), np.float32), "x": np.ones((2, 3), np.float32)}
    kept = {name: np.ones((2, 3), np.float32) for name in ("mean", "variance")}
    names = ("dy", "x", "scale", "mean", "variance", "bias", *(["other"] if "other" in changed else []))
    return {name: (rows | ones | kept | changed)[name] for name in names}


@pytest.mark.parametrize(
    ("feeds", "attributes", "message"),
    [
        (inputs(), {"activation": "Tanh"}, "'activation' is 'Tanh': it must be Relu, Clip or HardSwish"),
        (inputs(mean=np.ones(3, np.float32)), {}, r"\(mean\) has shape \[3\], and must have shape \[2, 3\]"),
        (inputs(bias=np.ones(2, np.float32)), {}, r"\(bias\) has shape \[2\], and must have shape \[3\]"),
        (inputs(other=np.ones((2, 2), np.float32)), {}, r"\(other\) has shape \[2, 2\], and must have shape \[2, 3\]"),
        (inputs(other=np.ones(3, np.float32)), {}, r"\(other\) has shape \[3\], and must have shape \[2, 3\]"),
        (
            inputs(bias=None),
            {"activation": "Relu"},
            "needs the statistics of the batch and the bias",
        ),
    ],
)
def test_refusals(feeds, attributes, message):
    with pytest.raises(REFUSED, match=f"BatchNormalizationGradient: .*{message}"):
        run(Case("BatchNormalizationGradient", feeds, {"training_mode": 1, **attributes}, 4), PATH, 1)


def test_an_activation_needs_the_statistics_of_the_batch():
    feeds = inputs(mean=np.ones(3, np.float32), variance=np.ones(3, np.float32))
    with raises_sentence("activation_needs_statistics"):
        run(Case("BatchNormalizationGradient", feeds, {"activation": "Relu"}, 4), PATH, 1)


def test_an_addend_has_the_shape_of_x():
    feeds = draw((4, 3)) | {"addend": np.ones((4, 1), np.float32)}
    with raises_sentence("addend_shape", got="[4, 1]"):
        forward(feeds, "Relu", addend=True)
