"""Units without effect leave a pruned model when it is compiled, and its results stay."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from pruned_models import model_of, run

import onnxtrain
from onnxtrain.plugins.sparse import compile as compiling
from onnxtrain.plugins.sparse.empty_units import without_empty_units
from onnxtrain.plugins.sparse.layers import LayerSearch

CONSTANT, UNREAD = [1, 4, 6], [0, 4, 7]
"""Units of the first of two layers, without weights and without readers; 5 of 10 have an effect."""


def outputs(model):
    """The outputs of each layer that remain."""
    return [len(layer.matrix) for layer in LayerSearch(model.graph, compiling._shapes(model)).layers()]


def two_layers(text, first, second, **others):
    """A model with units without effect; the first axis of weights is their outputs, the second their inputs."""
    rng = np.random.default_rng(0)
    w1 = rng.uniform(0.5, 1, first).astype(np.float32) * rng.choice([-1, 1], first)
    w2 = rng.uniform(0.5, 1, second).astype(np.float32) * rng.choice([-1, 1], second)
    repeats = second[1] // first[0]
    w1[CONSTANT] = 0
    for unit in UNREAD:
        w2[:, unit * repeats : (unit + 1) * repeats] = 0
    b1 = rng.uniform(0.5, 1, first[0]).astype(np.float32)
    tensors = {"w1": w1, "w2": w2, "b1": b1, "b2": rng.standard_normal(second[0]), **others}
    if "MatMul" in text:
        tensors |= {"w1": np.ascontiguousarray(w1.T), "w2": np.ascontiguousarray(w2.T)}
    used = {name: array.astype(np.float32) for name, array in tensors.items() if name in text}
    made = model_of(f"m {text}", **used)
    made.graph.output[0].type.tensor_type.elem_type = 1
    return made


IMAGE = "(float[N, 3, 9, 9] x) => (y)"
GEMM = "a = Gemm<transB = 1>(x, w1, b1)"
BATCH_NORM = dict(
    zip(("scale", "shift", "mean", "variance"), np.random.default_rng(3).uniform(1, 2, (4, 10)), strict=True)
)
CASES = {
    "Gemm": (f"(float[N, 12] x) => (y) {{ {GEMM} c = Relu(a) y = Gemm<transB = 1>(c, w2, b2) }}", (10, 12), (5, 10)),
    "Gemm without a bias": (f"(float[N, 12] x) => (y) {{ {GEMM} y = Gemm<transB = 1>(a, w2) }}", (10, 12), (5, 10)),
    "alpha and beta": (
        f"(float[N, 12] x) => (y) {{ {GEMM} y = Gemm<transB = 1, alpha = 0.5, beta = 3.0>(a, w2, b2) }}",
        (10, 12),
        (5, 10),
    ),
    "MatMul": (
        "(float[N, 7, 12] x) => (y) { p = MatMul(x, w1) a = Add(p, b1) c = Tanh(a) d = Relu(c) y = MatMul(d, w2) }",
        (10, 12),
        (5, 10),
    ),
    "limits": (
        f"(float[N, 12] x) => (y) {{ low = Constant<value = float {{0.25}}>() high = Constant<value = float {{0.75}}>()"
        f" {GEMM} s = Sigmoid(a) c = Clip(s, low, high) e = Gemm<transB = 1>(c, w2, b2) y = Sigmoid(e) }}",
        (10, 12),
        (5, 10),
    ),
    "pooling": (
        f"{IMAGE} {{ a = Conv(x, w1, b1) p = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(a)"
        " g = AveragePool<kernel_shape = [2, 2]>(p) y = Conv(g, w2, b2) }",
        (10, 3, 2, 2),
        (5, 10, 2, 2),
    ),
    "normalization": (
        f"{IMAGE} {{ a = Conv(x, w1, b1) n = BatchNormalization(a, scale, shift, mean, variance) r = Relu(n)"
        " y = Conv(r, w2, b2) }",
        (10, 3, 2, 2),
        (5, 10, 2, 2),
    ),
    "Flatten": (
        f"{IMAGE} {{ a = Conv<pads = [1, 1, 1, 1]>(x, w1, b1) p = MaxPool<kernel_shape = [2, 2], strides = [5, 5]>(a)"
        " f = Flatten(p) y = Gemm<transB = 1>(f, w2, b2) }",
        (10, 3, 2, 2),
        (5, 40),
    ),
    "two readers": (
        f"(float[N, 12] x) => (y) {{ {GEMM} c = Gemm<transB = 1>(a, w2, b2) r = Relu(a) d = Gemm<transB = 1>(r, w2, b2)"
        " y = Mul(c, d) }",
        (10, 12),
        (5, 10),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_units_without_effect_go_and_the_results_stay(name):
    made = two_layers(*CASES[name], **BATCH_NORM)
    small = without_empty_units(made, compiling._shapes(made))
    onnx.checker.check_model(small, full_check=True)
    assert outputs(made)[0] == 10
    assert outputs(small) == [5, *outputs(made)[1:]]
    sizes = [dim.dim_value or 3 for dim in made.graph.input[0].type.tensor_type.shape.dim]
    x = {"x": np.random.default_rng(1).standard_normal(sizes, np.float32)}
    expected = run(made, x)
    np.testing.assert_allclose(run(small, x), expected, rtol=1e-5, atol=1e-5)
    for tensor in made.graph.initializer:  # the constants count, or the comparison could not fail
        if tensor.name == "b1":
            bias = numpy_helper.to_array(tensor).copy()
            bias[CONSTANT] = 0
            tensor.CopyFrom(numpy_helper.from_array(bias, "b1"))
    assert np.abs(run(made, x) - expected).max() > 0.01


@pytest.mark.parametrize(
    ("text", "left"),
    [
        # The border of a padded constant is zero: only units that nothing reads go.
        ("a = Conv(x, w1, b1) y = Conv<pads = [1, 1, 1, 1]>(a, w2, b2)", [7, 5]),
        ("a = Conv(x, w1, b1) p = AveragePool<kernel_shape=[2, 2], pads=[1, 1, 1, 1]>(a) y = Conv(p, w2, b2)", [7, 5]),
        # But a constant zero is zero there, too.
        ("a = Conv(x, w1) y = Conv<pads = [1, 1, 1, 1]>(a, w2, b2)", [5, 5]),
        # What else reads them holds them: here an operator across channels, a sum, the output.
        ("a = Conv(x, w1, b1) s = Softmax<axis = 1>(a) y = Conv(s, w2, b2)", [10, 5]),
        ("a = Conv(x, w1, b1) m = Mul(a, a) y = Conv(m, w2, b2)", [10, 5]),
        ("y = Conv(x, w1, b1)", [10]),
    ],
)  # fmt: skip
def test_units_that_stay(text, left):
    made = two_layers(f"{IMAGE} {{ {text} }}", (10, 3, 2, 2), (5, 10, 2, 2))
    small = without_empty_units(made, compiling._shapes(made))
    assert outputs(small) == left
    x = {"x": np.random.default_rng(1).standard_normal((2, 3, 9, 9), np.float32)}
    np.testing.assert_allclose(run(small, x), run(made, x), rtol=1e-5, atol=1e-5)


def test_a_unit_that_only_removed_units_read_goes():
    rng = np.random.default_rng(0)
    w = [rng.standard_normal((8, 8)).astype(np.float32) for _ in range(3)]
    w[2][:, 3] = 0  # nothing reads unit 3 of the second layer,
    w[1][np.arange(8) != 3, 5] = 0  # which alone reads unit 5 of the first
    text = "m (float[N, 8] x) => (float[N, 8] y) { a = MatMul(x, w0) b = Relu(a) c = MatMul(b, w1) y = MatMul(c, w2) }"
    made = model_of(text, **{f"w{index}": np.ascontiguousarray(array.T) for index, array in enumerate(w)})
    small = without_empty_units(made, compiling._shapes(made))
    assert outputs(small) == [7, 7, 8]
    x = {"x": rng.standard_normal((4, 8), np.float32)}
    np.testing.assert_allclose(run(small, x), run(made, x), rtol=1e-5, atol=1e-5)


def test_a_layer_of_which_nothing_would_remain_stays():
    w = np.zeros((8, 8), np.float32)
    text = "m (float[N, 8] x) => (float[N, 8] y) { a = Gemm(x, w, b) y = Gemm(a, v) }"
    made = model_of(text, w=w, b=np.ones(8, np.float32), v=np.eye(8, dtype=np.float32))
    assert without_empty_units(made, compiling._shapes(made)) is made


def test_a_model_without_such_units_is_left_alone():
    rng = np.random.default_rng(0)
    made = model_of(
        "m (float[N, 8] x) => (float[N, 8] y) { a = MatMul(x, w) y = MatMul(a, w) }",
        w=rng.standard_normal((8, 8)).astype(np.float32),
    )
    assert without_empty_units(made, compiling._shapes(made)) is made


@pytest.mark.parametrize(("times", "removed"), [((2.0, 1.0), 5), ((1.0, 2.0), 0)])
def test_the_compiled_model_is_without_them_if_that_is_faster(times, removed, monkeypatch, tmp_path):
    monkeypatch.setattr(compiling, "_times", lambda *_: times)
    made, path = two_layers(*CASES["Gemm"]), tmp_path / "fast.onnx"
    result = onnxtrain.compile_sparse(made, path)
    assert result.removed_units == removed
    assert result.speedup == max(1.0, times[0] / times[1])
    assert outputs(onnx.load(path)) == [10 - removed, 5]
    x = {"x": np.random.default_rng(1).standard_normal((3, 12), np.float32)}
    np.testing.assert_allclose(run(path, x, kernels=True), run(made, x), rtol=1e-5, atol=1e-5)
