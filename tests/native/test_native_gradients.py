"""The fused gradient operators: against float64, on every instruction set, with any number of threads, in place."""

import gradient_reference as reference
import numpy as np
import onnxruntime
import pytest
from gradient_reference import assert_near, draw, positive_rows, run, windows
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper
from optimizer_sessions import element_type, session

from onnxtrain.autodiff.fused import fused_operators
from onnxtrain.runtime.native import all_reducing, custom_ops_library

PATH = str(custom_ops_library())
TYPES = [np.float32, np.float64]

# onnxruntime 1.20 ends with a crash where an input of an operator of ours has an empty name.
NEWER = tuple(map(int, onnxruntime.__version__.split(".")[:2])) > (1, 20)

quick = settings(max_examples=40, deadline=None)
types = st.sampled_from(TYPES)
given_bounds = st.booleans() if NEWER else st.just(True)


def check(operator, function, inputs, path=PATH, scale=1.0, **attributes):
    scale += max(map(np.size, inputs)) ** 0.5 / 20  # as the rounding of sums over all elements grows
    assert_near(run(path, operator, *inputs, **attributes), function(*inputs, **attributes), scale)


def batch_inputs(shape, dtype, seed, given_statistics):
    dy, x, scale = draw(shape, dtype, seed), draw(shape, dtype, seed + 1, 3), draw(shape[1:2], dtype, seed + 2, 1)
    if not given_statistics:
        return dy, x, scale
    return dy, x, scale, draw(shape[1:2], dtype, seed + 3, 3), np.abs(draw(shape[1:2], dtype, seed + 4)) + dtype(0.1)


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
    for inputs in ((dy, x, scale), (dy, x, scale, draw(shape[axis:], dtype, 4))):
        check("LayerNormalizationGradient", reference.layer_normalization, inputs, scale=10, **settings)
    check("RMSNormalizationGradient", reference.rms_normalization, (dy, x, scale), scale=10, **settings)


@quick
@given(shape=st.lists(st.integers(1, 20), min_size=1, max_size=4), dtype=types, data=st.data())
def test_softmax_along_any_axis(shape, dtype, data):
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    dy, y = draw(shape, dtype, 1), positive_rows(shape, dtype, 2, axis)
    check("SoftmaxGradient", reference.softmax, (dy, y), axis=axis)
    check("LogSoftmaxGradient", reference.log_softmax, (dy, np.log(y)), axis=axis)
    check("LogSoftmax", reference.log_softmax_forward, (5 * dy,), axis=axis, scale=8)


@quick
@given(
    planes=st.lists(st.integers(1, 5), max_size=2),
    sizes=st.lists(st.integers(1, 40), min_size=4, max_size=4),
    taps=st.lists(st.integers(0, 5), min_size=2, max_size=2),
    dtype=types,
    transposed=st.booleans(),
)
def test_resizing_planes_of_any_size(planes, sizes, taps, dtype, transposed):
    rows, columns = (reference.band(*sizes[at : at + 2], taps[at // 2], dtype, at) for at in (0, 2))
    x = draw([*planes, rows.shape[transposed], columns.shape[transposed]], dtype, 1)
    check("ResizeByMatrices", reference.resize_by_matrices, (x, rows, columns), transposed=int(transposed), scale=8)


@quick
@given(shape=st.lists(st.integers(1, 20), min_size=2, max_size=4), dtype=types, one=st.booleans())
def test_cross_entropy_of_any_shape(shape, dtype, one):
    by_label = [shape[0], 1, *shape[2:]]
    labels = np.random.default_rng(1).integers(0, shape[1], by_label)
    dy = draw([] if one else by_label, dtype, 2)
    inputs = dy, np.log(positive_rows(shape, dtype, 3, 1)), labels
    check("SoftmaxCrossEntropyGradient", reference.softmax_cross_entropy, inputs)


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
@given(depth=st.integers(2, 5), height=st.integers(2, 5), width=st.integers(2, 40), dtype=types)
def test_max_pooling_side_by_side_in_volumes(depth, height, width, dtype):
    x = np.asarray(np.round(draw([2, 2, depth, height, width], dtype, 1) * 2), dtype)
    dy = draw([2, 2, depth // 2, height // 2, width // 2], dtype, 2)
    check("MaxPoolGradient", reference.max_pool, (dy, x), kernel_shape=[2, 2, 2], strides=[2, 2, 2])


@quick
@given(shape=st.lists(st.integers(1, 70), min_size=1, max_size=3), dtype=types, data=st.data())
def test_gathering_along_any_axis(shape, dtype, data):
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    indices_shape = data.draw(st.lists(st.integers(0, 5), max_size=2))
    rng = np.random.default_rng(data.draw(st.integers(0, 9)))
    indices = rng.integers(-shape[axis], shape[axis], indices_shape)
    at = axis % len(shape)
    dy = draw([*shape[:at], *indices_shape, *shape[at + 1 :]], dtype, 1)
    other = [draw(shape, dtype, 2)] if data.draw(st.booleans()) else []
    check("GatherGradient", reference.gather, (dy, np.asarray(indices), np.asarray(shape), *other), axis=axis)
    fewer, taken = draw([*shape[:at], 3, *shape[at + 1 :]], dtype, 1), rng.integers(-3, 3, indices_shape)
    inputs = fewer, np.asarray(indices), np.asarray(shape), *(other or [np.zeros(0, dtype)]), np.asarray(taken)
    check("GatherGradient", reference.gather, inputs, axis=axis)


@quick
@given(count=st.integers(1, 100), dtype=types, low=given_bounds, high=given_bounds)
def test_clipping_with_any_bounds(count, dtype, low, high):
    bounds = (dtype(-0.5) if low else None, dtype(0.5) if high else None)
    x = np.asarray(np.round(draw([count], dtype, 1) * 4) / 4, dtype)
    inputs = (draw([count], dtype, 2), x, *(None if b is None else np.asarray(b) for b in bounds))
    for found, expected in zip(run(PATH, "ClipGradient", *inputs), reference.clip(*inputs), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("approximate", ["none", "tanh", "sigmoid"])
def test_gelu_over_its_range(instruction_set, library_path, approximate, dtype):
    x = np.linspace(-16, 16, 20_001, dtype=dtype)
    inputs = np.ones_like(x), x
    assert_near(
        run(library_path, "GeluGradient", *inputs, approximate=approximate), reference.gelu(*inputs, approximate)
    )


SILU = "Sigmoid x1;Sub x2 s0;Mul x1 s1;Add s2 x2;Mul s0 s3;Mul x0 s4"
OTHERS = "Abs x0;Less s0 x2;Neg x1;Relu s2;Greater x1 x0;Cast s4;Where s1 s3 s5;Div s6 x2"
FUNCTIONS_OF_ONE = "Sin x0;Cos x1;Mul s0 s1;Tan x2;Add s2 s3;Sinh x0;Cosh x1;Sub s5 s6;Mul s4 s7"
FUNCTIONS_OF_TWO = "Abs x0;Add s0 x2;Pow s1 x1;Log s1;Min s3 x2;Relu s4;Mod x1 s1;Sub s2 s6;Sub s7 s5"


def examples(dtype):
    """(operator, inputs, attributes) of sizes with full vectors and tails, several tasks each."""
    statistics = batch_inputs((4, 33, 21, 19), dtype, 1, True)
    probabilities = positive_rows((500, 77), dtype, 2, -1)
    rows = draw((700, 83), dtype, 3)
    square = draw((2, 13, 37, 35), dtype, 4)
    pooled = [draw((2, 13, n, m), dtype, 5) for n, m in ((18, 17), (19, 18), (12, 12))]
    indices = np.random.default_rng(6).integers(-50, 50, (30, 31))
    labels = np.random.default_rng(7).integers(0, 77, (500, 1))
    resized = reference.band(21, 40, 2, dtype), reference.band(35, 70, 3, dtype)
    grid, back = draw((3, 11, 10, 2), dtype, 3) * dtype(0.6), {"inverse": 1, "divided": 1}
    return [
        ("BatchNormalizationGradient", statistics, {}),
        ("BatchNormalizationGradient", statistics[:3], {}),
        ("BatchNormalizationGradient", batch_inputs((50, 700), dtype, 1, False), {}),
        ("ClipGradient", (rows, rows, np.asarray(dtype(-1)), np.asarray(dtype(1))), {}),
        ("CountedDropout", (rows, np.asarray(dtype(0.25)), np.asarray(2**40 + 3)), {"seed": 2**61 + 5}),
        ("Elementwise", (rows, draw((700, 83), dtype, 4), np.asarray(dtype(1))), {"program": SILU}),
        ("Elementwise", (rows, draw((700, 83), dtype, 4), np.asarray(dtype(0.5))), {"program": OTHERS}),
        ("Elementwise", (rows, draw((700, 83), dtype, 4), np.asarray(dtype(0.5))), {"program": FUNCTIONS_OF_ONE}),
        ("Elementwise", (rows, draw((700, 83), dtype, 4), np.asarray(dtype(0.5))), {"program": FUNCTIONS_OF_TWO}),
        ("GatherGradient", (draw((30, 31, 45), dtype, 7), indices, np.array([50, 45])), {"axis": 0}),
        (
            "GatherGradient",
            (draw((30, 31, 45), dtype, 7), indices, np.array([50, 45]), draw((50, 45), dtype, 8)),
            {"axis": 0},
        ),
        ("GatherGradient", (draw((3, 30, 31, 5), dtype, 7), indices, np.array([3, 50, 5])), {"axis": 1}),
        (
            "GatherGradient",
            (draw((70, 45), dtype, 7), indices, np.array([50, 45]), np.zeros(0, dtype), indices // 2),
            {"axis": 0},
        ),
        ("GatherGradient", (draw((3000, 17), dtype, 7), np.arange(3000) * 7 % 5000, np.array([5000, 17])), {"axis": 0}),
        ("GeluGradient", (rows, rows), {"approximate": "none"}),
        ("GeluGradient", (rows, rows), {"approximate": "tanh"}),
        ("GeluGradient", (rows, rows), {"approximate": "sigmoid"}),
        ("GeluGradient", (rows, rows), {"approximate": "sigmoid", "alpha": 1.7}),
        ("LayerNormalizationGradient", (rows, draw((700, 83), dtype, 8, 2), draw((83,), dtype, 9)), {}),
        ("RMSNormalizationGradient", (rows, draw((700, 83), dtype, 8, 2), draw((83,), dtype, 9)), {}),
        ("LogSoftmaxGradient", (draw((500, 77), dtype, 1), np.log(probabilities)), {}),
        ("LogSoftmaxGradient", (draw((500, 77), dtype, 1), np.log(probabilities)), {"axis": 0}),
        ("SoftmaxCrossEntropyGradient", (draw((500, 1), dtype, 1), np.log(probabilities), labels), {}),
        ("SoftmaxCrossEntropyGradient", (np.asarray(dtype(0.5)), np.log(probabilities), labels), {}),
        ("SoftmaxGradient", (draw((500, 77), dtype, 1), probabilities), {}),
        ("SoftmaxGradient", (draw((500, 77), dtype, 1), probabilities), {"axis": 0}),
        ("MaxPoolGradient", (pooled[0], square), {"kernel_shape": [2, 2], "strides": [2, 2]}),
        ("MaxPoolGradient", (pooled[1], square), {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1] * 4}),
        ("MaxPoolGradient", (pooled[2], square), {"kernel_shape": [4, 2], "strides": [3, 3], "pads": [1] * 4}),
        ("ReluGradient", (rows, rows), {}),
        ("ResizeByMatrices", (draw((3, 20, 21, 35), dtype, 1), *resized), {}),
        ("ResizeByMatrices", (draw((3, 20, 40, 70), dtype, 2), *resized), {"transposed": 1}),
        ("LogSoftmax", (draw((7, 19, 501), dtype, 1, 4),), {"axis": 1}),
        ("DetGradient", (draw((60,), dtype, 1), draw((60, 7, 7), dtype, 2)), {}),
        ("Fourier", (draw((77, 60, 1), dtype, 1),), {"axis": 1, "length": 64, "bins": 33, "parts": 2}),
        ("Fourier", (draw((5, 77, 3, 2), dtype, 1),), {"axis": 1, "length": 77, "bins": 70, "parts": 1, **back}),
        *(
            (operator, (*given, draw((3, 19, 9, 8), dtype, 2), grid), {"padding_mode": mode, "align_corners": corners})
            for operator, given in (("GridSample", ()), ("GridSampleGradient", (draw((3, 19, 11, 10), dtype, 1),)))
            for mode, corners in (("zeros", 0), ("border", 0), ("reflection", 0), ("reflection", 1))
        ),
    ]


def names(example):
    return f"{example[0]}-{len(example[1])}-{example[2]}"


FUNCTIONS = {
    "BatchNormalizationGradient": reference.batch_normalization,
    "ClipGradient": reference.clip,
    "CountedDropout": reference.counted_dropout,
    "DetGradient": reference.determinant,
    "Elementwise": reference.elementwise,
    "Fourier": reference.fourier,
    "GatherGradient": reference.gather,
    "GeluGradient": reference.gelu,
    "GridSample": reference.grid_sample,
    "GridSampleGradient": reference.grid_sample_gradient,
    "LayerNormalizationGradient": reference.layer_normalization,
    "LogSoftmax": reference.log_softmax_forward,
    "LogSoftmaxGradient": reference.log_softmax,
    "MaxPoolGradient": reference.max_pool,
    "RMSNormalizationGradient": reference.rms_normalization,
    "ReluGradient": reference.relu,
    "ResizeByMatrices": reference.resize_by_matrices,
    "SoftmaxCrossEntropyGradient": reference.softmax_cross_entropy,
    "SoftmaxGradient": reference.softmax,
}


@pytest.mark.sampled("dtype")
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
    elsewhere = {
        fused.name
        for fused in fused_operators()
        if fused.name.startswith(
            ("Attention", "Conv", "GRU", "LSTM", "Linear", "MatMulNBits", "PackedAttention", "RNN")
        )
    }
    elsewhere.add("BatchNormalization")
    assert {fused.name for fused in fused_operators()} - elsewhere == set(FUNCTIONS) - {"LogSoftmax", "GridSample"}


@pytest.mark.parametrize("wanted", [[0], [1], [2], [0, 2], [1, 2]])
@pytest.mark.parametrize("operator", ["BatchNormalizationGradient", "LayerNormalizationGradient"])
def test_unrequested_results_are_left_out(operator, wanted):
    dy, x, scale = draw((5, 7), np.float32, 1), draw((5, 7), np.float32, 2), draw((7,), np.float32, 3)
    every = run(PATH, operator, dy, x, scale)
    some = run(PATH, operator, dy, x, scale, wanted=wanted)
    for index, found in zip(wanted, some, strict=True):
        np.testing.assert_array_equal(found, every[index])


@pytest.mark.parametrize(
    "operator", ["ClipGradient", "GeluGradient", "LayerNormalizationGradient", "RMSNormalizationGradient"]
)
def test_the_forward_result_is_given_where_it_is_wanted(operator):
    _, inputs, attributes = next(e for e in examples(np.float32) if e[0] == operator)
    dx, *_, y = run(PATH, operator, *inputs, **attributes)
    for wanted, expected in (([0], dx), ([reference.OUTPUTS[operator] - 1], y)):
        (found,) = run(PATH, operator, *inputs, wanted=wanted, **attributes)
        np.testing.assert_array_equal(found, expected)


SHARED = {
    "BatchNormalizationGradient": {0: 0, 1: 0},
    "ClipGradient": {0: 0, 1: 0},
    "CountedDropout": {0: 0},
    "Elementwise": {0: 0},
    "GeluGradient": {0: 0, 1: 0},
    "LayerNormalizationGradient": {0: 0, 1: 0},
    "LogSoftmax": {0: 0},
    "LogSoftmaxGradient": {0: 0, 1: 0},
    "RMSNormalizationGradient": {0: 0, 1: 0},
    "ReluGradient": {0: 0},
    "SoftmaxCrossEntropyGradient": {1: 0},
    "SoftmaxGradient": {0: 0, 1: 0},
}
"""Per operator: the output that is written over an input, if that is given."""


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("index", range(len(examples(np.float32))), ids=[names(e) for e in examples(np.float32)])
def test_in_place_gives_what_out_of_place_does(index, dtype):
    """The gradient takes over the buffer of an intermediate value that nothing else reads.

    ``AllReduce`` works in place and tells where its values lie.
    """
    operator, inputs, attributes = examples(dtype)[index]
    labels = reference.INPUTS[operator][: len(inputs)]
    count = reference.OUTPUTS.get(operator, 1)
    produced = [f"output{index}" for index in range(count)]
    for which, place in SHARED.get(operator, {}).items():
        if which >= len(labels):
            continue
        used = [f"minus {label}" if index == which else label for index, label in enumerate(labels)]
        nodes = [
            helper.make_node("AllReduce", [labels[which]], [f"minus {labels[which]}"], domain="onnxtrain"),
            helper.make_node(operator, used, produced, domain="onnxtrain", **attributes),
            helper.make_node("AllReduce", [produced[place]], ["same"], domain="onnxtrain"),
            helper.make_node("Neg", ["same"], ["minus output"]),
        ]
        moved = [-array if index == which else array for index, array in enumerate(inputs)]
        expected = run(PATH, operator, *moved, **attributes)
        expected[place] = -expected[place]
        results = ["minus output" if index == place else name for index, name in enumerate(produced)]
        for threads in (1, 3):
            made = session(
                PATH,
                nodes,
                [(label, element_type(array), array.shape) for label, array in zip(labels, inputs, strict=True)],
                [(name, element_type(inputs[0]), None) for name in results],
                threads=threads,
            )
            addresses = []

            def negate_first(array, addresses=addresses):
                addresses.append(array.ctypes.data)
                if len(addresses) == 1:
                    np.negative(array, out=array)

            with all_reducing(negate_first):
                found = made.run(None, dict(zip(labels, inputs, strict=True)))
            assert addresses[0] == addresses[1]
            for a, b in zip(found, expected, strict=True):
                np.testing.assert_array_equal(a, b)
