"""Gradients at zeros, ties, bounds, infinities and jumps, on ONNX Runtime in float32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

from onnxtrain.model_file.upgrade import upgrade_opset
from onnxtrain.runtime.testing import projected_gradient

INF, NAN = np.inf, np.nan


def _run(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return dict(zip((o.name for o in session.get_outputs()), session.run(None, feeds), strict=True))


def gradients(
    operator: str,
    *inputs: Any,
    dy: Any = None,
    wrt: Sequence[int] = (0,),
    opset: int = 18,
    outputs: Sequence[str] = ("y",),
    **attributes: Any,
) -> list[np.ndarray]:
    """dL/dx of one node for L = sum(dy y), dy of ones where it is not given; y is the first output."""
    arrays = [np.asarray(x, dtype=np.float32) if np.asarray(x).dtype.kind == "f" else np.asarray(x) for x in inputs]
    names = ["abcde"[i] for i in range(len(arrays))]
    infos = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
        for name, x in zip(names, arrays, strict=True)
    ]
    node = helper.make_node(operator, names, list(outputs), **attributes)
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph([node], "special", infos, [output])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    model = upgrade_opset(model, 18)
    feeds = dict(zip(names, arrays, strict=True))
    y = _run(model, feeds)["y"]
    projection = np.ones_like(y) if dy is None else np.asarray(dy, dtype=np.float32)
    chosen = [names[i] for i in wrt]
    results = _run(projected_gradient(model, chosen, {"y": projection}), feeds)
    return [results[f"{name}_grad"] for name in chosen]


BY_FIRST_INPUT: list[tuple[str, tuple[Any, ...], dict[str, Any], Any]] = [
    ("Abs", ([-2.0, 0.0, 3.0],), {}, [-1, 0, 1]),
    ("Sqrt", ([0.0, 4.0],), {}, [INF, 0.25]),
    ("Log", ([0.0],), {}, [INF]),
    ("Relu", ([-1.0, -0.0, 0.0, 1e-30, 1e30, INF],), {}, [0, 0, 0, 1, 1, 1]),
    ("LeakyRelu", ([-INF, 0.0, 1e-30, INF],), {"alpha": 0.25}, [0.25, 0.25, 1, 1]),
    ("LeakyRelu", ([-1.0, 0.0, 1.0],), {"alpha": -2.0}, [-2, -2, 1]),
    ("PRelu", ([-1.0, 0.0, 1.0], [0.25]), {}, [0.25, 0.25, 1]),
    ("Elu", ([-INF, 0.0, 1.0, 200.0],), {}, [0, 1, 1, 1]),
    ("Elu", ([0.0, 1.0],), {"alpha": 2.0}, [2, 1]),
    ("Celu", ([-200.0, 0.0, 200.0],), {"alpha": 2.0}, [0, 1, 1]),
    ("Selu", ([0.0, 1.0],), {"alpha": 2.0, "gamma": 3.0}, [6, 3]),
    ("HardSigmoid", ([-4.0, -2.5, 0.0, 2.5, 4.0],), {}, [0, 0, 0.2, 0, 0]),
    ("HardSwish", ([-4.0, -3.0, 0.0, 3.0, 4.0],), {}, [0, 0, 0.5, 1, 1]),
    ("ThresholdedRelu", ([0.5, 1.0, 1.5],), {}, [0, 0, 1]),
    ("Shrink", ([-1.0, -0.5, 0.0, 0.5, 1.0],), {}, [1, 0, 0, 0, 1]),
    ("Sigmoid", ([-200.0, 0.0, 200.0],), {}, [0, 0.25, 0]),
    ("Softplus", ([-200.0, 0.0, 200.0],), {}, [0, 0.5, 1]),
    ("Softsign", ([-1e30, 0.0, 1.0],), {}, [0, 1, 0.25]),
    ("Mish", ([-200.0, 0.0, 200.0, 1e30],), {}, [0, 0.6, 1, 1]),
    ("Clip", ([-1.0, 0.0, 3.0, 6.0, 7.0], 0.0, 6.0), {}, [0, 1, 1, 1, 0]),
    ("Pow", ([0.0, 0.0, 0.0, -2.0, -2.0], [0.0, 1.0, 2.0, 3.0, -1.0]), {}, [0, 1, 0, 12, -0.25]),
    ("Pow", ([0.0], [0.5]), {}, [INF]),
    ("Max", ([1.0, 2.0, 3.0], [2.0, 2.0, 2.0]), {}, [0, 0.5, 1]),
    ("Max", ([2.0], [2.0], [2.0], [1.0]), {}, [1 / 3]),
    ("Min", ([1.0, 2.0, 3.0], [2.0, 2.0, 2.0]), {}, [1, 0.5, 0]),
    ("ReduceMax", ([1.0, 3.0, 3.0],), {}, [0, 0.5, 0.5]),
    ("ReduceMin", ([1.0, 1.0, 1.0, 1.0],), {}, [0.25, 0.25, 0.25, 0.25]),
    ("ReduceProd", ([2.0, 3.0, 4.0],), {}, [12, 8, 6]),
    ("ReduceProd", ([2.0, 0.0, 4.0],), {}, [0, 8, 0]),
    ("ReduceProd", ([2.0, 0.0, 0.0],), {}, [0, 0, 0]),
    ("ReduceL1", ([-2.0, 0.0, 2.0],), {}, [-1, 0, 1]),
    ("ReduceL2", ([0.0, 0.0],), {}, [0, 0]),
    ("ReduceL2", ([3.0, 4.0],), {}, [0.6, 0.8]),
    ("ReduceLogSumExp", ([-INF, 0.0, 1000.0],), {}, [0, 0, 1]),
]


@pytest.mark.parametrize(
    ("operator", "inputs", "attributes", "expected"),
    [pytest.param(*row, id=f"{row[0]}-{i}") for i, row in enumerate(BY_FIRST_INPUT)],
)
def test_value_at_special_points(operator: str, inputs: Any, attributes: Any, expected: Any) -> None:
    (dx,) = gradients(operator, *inputs, **attributes)
    np.testing.assert_allclose(dx, np.asarray(expected, dtype=np.float32), rtol=1e-6)


@pytest.mark.parametrize(
    ("operator", "inputs", "expected"),
    [
        ("Relu", ([-1.0, 0.0, 1.0],), [0, 0, INF]),
        ("Clip", ([-1.0, 0.5, 2.0], 0.0, 1.0), [0, INF, 0]),
        ("Max", ([-1.0, 1.0], [0.0, 0.0]), [0, INF]),
        ("Min", ([-1.0, 1.0], [0.0, 0.0]), [INF, 0]),
        ("HardSigmoid", ([-4.0, 0.0, 4.0],), [0, INF, 0]),
        ("HardSwish", ([-4.0, 0.0, 4.0],), [0, INF, INF]),
        ("ThresholdedRelu", ([0.5, 1.5],), [0, INF]),
        ("Shrink", ([0.1, 1.5],), [0, INF]),
    ],
)
def test_an_infinite_gradient_is_zero_where_nothing_passes(operator: str, inputs: Any, expected: Any) -> None:
    (dx,) = gradients(operator, *inputs, dy=np.full(len(inputs[0]), INF))
    np.testing.assert_array_equal(dx, np.asarray(expected, dtype=np.float32))


@pytest.mark.parametrize(
    ("exclusive", "reverse", "expected"),
    [
        # y = 2, 0, 0, 0 and the weights are 1, 10, 100, 1000.
        (0, 0, [1, 2 * (10 + 3 * 100), 0, 0]),
        (1, 0, [10, 2 * (100 + 3 * 1000), 0, 0]),
        # From the right: y = 0, 0, 0, 0, the first zero is the last element.
        (0, 1, [0, 0, 0, 1000 + 3 * 100]),
        (1, 1, [0, 0, 0, 100 + 3 * 10]),
    ],
)
def test_cumulative_product_over_zeros(exclusive: int, reverse: int, expected: list[float]) -> None:
    x = [2.0, 0.0, 3.0, 0.0]
    (dx,) = gradients("CumProd", x, np.array(0), dy=[1, 10, 100, 1000], opset=26, exclusive=exclusive, reverse=reverse)
    np.testing.assert_allclose(dx, expected)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0.0, 6.0, [1, 1000]), (6.0, 0.0, [0, 1111]), (0.0, 0.0, [1, 1100])],
)
def test_bounds_of_clip_get_what_they_cut(low: float, high: float, expected: list[float]) -> None:
    found = gradients("Clip", [-1.0, 0.0, 3.0, 7.0], low, high, dy=[1, 10, 100, 1000], wrt=(1, 2))
    assert [g.item() for g in found] == expected
    assert [g.shape for g in found] == [(), ()]


def test_exponent_at_base_zero_and_below() -> None:
    (db,) = gradients("Pow", [0.0, 0.0, np.e, -2.0], [0.0, 2.0, 1.0, 2.0], wrt=(1,))
    np.testing.assert_allclose(db, [0, 0, np.e, NAN], rtol=1e-6)


def _parse(text: str) -> onnx.ModelProto:
    return parser.parse_model(f'<ir_version: 10, opset_import: ["" : 18]> {text}')


def _gradient(model: onnx.ModelProto, names: list[str], feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    (output,) = model.graph.output
    y = _run(model, feeds)[output.name]
    results = _run(projected_gradient(model, names, {output.name: np.ones_like(y)}), feeds)
    return [results[f"{name}_grad"] for name in names]


def test_a_trained_exponent_is_not_a_constant() -> None:
    model = _parse("agraph (float[2] x) => (float[2] y) <float[1] p = {2}> { y = Pow(x, p) }")
    built = projected_gradient(model, ["x", "p"], {"y": np.ones(2, np.float32)})
    for tensor in built.graph.initializer:
        if tensor.name == "p":
            tensor.CopyFrom(numpy_helper.from_array(np.array([3.0], np.float32), "p"))
    results = _run(built, {"x": np.array([1.0, 2.0], np.float32)})
    np.testing.assert_allclose(results["x_grad"], [3.0, 12.0])
    np.testing.assert_allclose(results["p_grad"], [8 * np.log(2)], rtol=1e-6)


def test_clip_stops_an_infinite_gradient() -> None:
    model = _parse("agraph (float[2] x) => (float[2] y) <float zero = {0}> { c = Clip(x, zero) y = Sqrt(c) }")
    (dx,) = _gradient(model, ["x"], {"x": np.array([-1.0, 4.0], np.float32)})
    np.testing.assert_allclose(dx, [0.0, 0.25])


@pytest.mark.parametrize(
    "body",
    [
        "q = Mul(x, x) s = ReduceSum<keepdims = 0>(q, axis) y = Sqrt(s)",
        "q = Pow(x, two) s = ReduceSum<keepdims = 0>(q, axis) y = Pow(s, half)",
        "s = ReduceSumSquare<keepdims = 0>(x, axis) y = Sqrt(s)",
        "a = Abs(x) q = Pow(a, three) s = ReduceSum<keepdims = 0>(q, axis) y = Pow(s, third)",
        "q = Pow(x, two) s = ReduceSum<keepdims = 0>(q, axis) y = Pow(s, nearly)",  # PyTorch's older exporter
        "q = Pow(x, two) m = ReduceMean(q, axis) s = Mul(three, m) v = Squeeze(s, axis) y = Sqrt(v)",
        # with the number of elements from the shape, as PyTorch's older exporter writes a deviation
        "q = Mul(x, x) m = ReduceMean<keepdims = 0>(q, axis) d = Shape<start = 1>(x) n = ReduceProd<keepdims = 0>(d)"
        " c = CastLike(n, x) e = Sub(c, one) t = Mul(m, c) s = Div(t, e) r = Sqrt(s) u = Sqrt(e) y = Mul(r, u)",
    ],
)
def test_norms_and_deviations_have_no_gradient_at_zero(body: str) -> None:
    """As PyTorch's norm, std and cdist; not NaN, which infinity times zero is."""
    values = {"two": 2, "half": 0.5, "three": 3, "one": 1, "third": 1 / 3, "nearly": 1 / (2 + 1e-6)}
    numbers = f"<{', '.join(f'float {name} = {{{value}}}' for name, value in values.items())}, int64[1] axis = {{1}}>"
    model = _parse(f"agraph (float[2, 3] x) => (float[2] y) {numbers} {{ {body} }}")
    (dx,) = _gradient(model, ["x"], {"x": np.array([[0, 0, 0], [2, 0, 0]], np.float32)})
    np.testing.assert_allclose(dx, [[0, 0, 0], [1, 0, 0]], rtol=1e-6)


@pytest.mark.parametrize("body", ["s = ReduceSum<keepdims = 0>(x, axis)", "s = ReduceMax<keepdims = 0>(x, axis)"])
def test_other_roots_have_an_infinite_gradient_at_zero(body: str) -> None:
    model = _parse(f"agraph (float[1, 1] x) => (float[1] y) <int64[1] axis = {{1}}> {{ {body} y = Sqrt(s) }}")
    (dx,) = _gradient(model, ["x"], {"x": np.zeros((1, 1), np.float32)})
    assert np.isposinf(dx).all()


@pytest.mark.parametrize("operator", ["Softmax", "LogSoftmax"])
def test_softmax_of_masked_and_large_values(operator: str) -> None:
    x = [[-INF, 0.0, 0.0], [1000.0, 0.0, -1000.0]]
    (dx,) = gradients(operator, x, dy=[[0, 1, 0], [1, 0, 0]])
    expected = {
        "Softmax": [[0, 0.25, -0.25], [0, 0, 0]],
        "LogSoftmax": [[0, 0.5, -0.5], [0, 0, 0]],
    }
    np.testing.assert_allclose(dx, expected[operator], atol=1e-7)


@pytest.mark.parametrize("spelling", ["Where(bad, zero, p)", "Where(bad, c, p)"])
def test_softmax_of_a_row_that_is_masked_altogether(spelling: str) -> None:
    model = _parse(
        "agraph (float[2, 2] x, float[2, 2] mask) => (float[2, 2] y) <float zero = {0}> {"
        "c = Constant<value = float {0}>() s = Add(x, mask) p = Softmax(s) bad = IsNaN(p) "
        f"z = {spelling} y = Mul(z, z) }}"
    )
    feeds = {"x": np.zeros((2, 2), np.float32), "mask": np.array([[-INF, -INF], [0, 0]], np.float32)}
    feeds["x"][1] = [0, 1]
    (dx,) = _gradient(model, ["x"], feeds)
    p = np.exp([0, 1]) / np.exp([0, 1]).sum()
    expected = p * (2 * p - (2 * p * p).sum())
    np.testing.assert_allclose(dx, [[0, 0], expected], rtol=1e-5)


@pytest.mark.parametrize("mask_output", [True, False])
@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize("opset", [18, 22])
def test_dropout_in_training_scales_what_it_kept(mask_output: bool, constant: bool, opset: int) -> None:
    training = "<bool t = {1}>" if constant else ""
    extra = "" if constant else ", bool t"
    outputs = "y, m" if mask_output else "y"
    model = parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : {opset}]> '
        f"agraph (float[64, 64] x, float r{extra}) => (float[64, 64] y) {training} {{ {outputs} = Dropout(x, r, t) }}"
    )
    built = projected_gradient(model, ["x"], {"y": np.ones((64, 64), np.float32)})
    x = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    feeds = {"x": x, "r": np.array(0.25, np.float32)} | ({} if constant else {"t": np.array(True)})
    results = _run(built, feeds)
    kept = results["y"] != 0
    assert 0.7 < kept.mean() < 0.8
    np.testing.assert_allclose(results["x_grad"], kept / 0.75, rtol=1e-6)
    if not constant:
        results = _run(built, {**feeds, "t": np.array(False)})
        np.testing.assert_array_equal(results["x_grad"], 1)


def test_dropout_without_ratio_halves() -> None:
    model = _parse("agraph (float[64] x) => (float[64] y) <bool t = {1}> { y = Dropout(x, , t) }")
    built = projected_gradient(model, ["x"], {"y": np.ones(64, np.float32)})
    results = _run(built, {"x": np.ones(64, np.float32)})
    assert set(results["x_grad"]) == {0.0, 2.0}
    np.testing.assert_array_equal(results["x_grad"], results["y"])


def test_dropout_of_everything_scales_by_zero() -> None:
    # ONNX Runtime refuses this ratio, ONNX does not: 1 / (1 - ratio) must not be written into the graph.
    model = _parse("agraph (float[4] x) => (float[4] y) <bool t = {1}, float r = {1}> { y = Dropout(x, r, t) }")
    built = projected_gradient(model, ["x"], {"y": np.ones(4, np.float32)})
    numbers = [numpy_helper.to_array(tensor) for tensor in built.graph.initializer]
    assert any(number.dtype.kind == "f" and not number.any() for number in numbers)
    assert all(np.isfinite(number).all() for number in numbers if number.dtype.kind == "f")


@pytest.mark.parametrize("read", [True, False])
def test_cross_entropy_of_large_logits(read: bool) -> None:
    outputs = "y, log_p" if read else "y"
    model = _parse(
        "agraph (float[2, 3] x, int64[2] t) => (float y) "
        f'{{ {outputs} = SoftmaxCrossEntropyLoss<reduction = "sum">(x, t) }}'
    )
    feeds = {"x": np.array([[1000, 0, -1000], [0, 0, 0]], np.float32), "t": np.array([1, 2])}
    (dx,) = _gradient(model, ["x"], feeds)
    np.testing.assert_allclose(dx, [[1, -1, 0], [1 / 3, 1 / 3, -2 / 3]], rtol=1e-6)


def test_cross_entropy_reuses_the_logarithm_of_the_probabilities() -> None:
    model = _parse("agraph (float[N, 3] x, int64[N] t) => (float y) { y = SoftmaxCrossEntropyLoss(x, t) }")
    built = projected_gradient(model, ["x"], {"y": np.ones((), np.float32)})
    operators = [node.op_type for node in built.graph.node]
    assert "Softmax" not in operators
    assert operators.count("Exp") == 1


@pytest.mark.torch
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_equals_pytorch(approximate: str) -> None:
    torch = pytest.importorskip("torch")
    x = np.concatenate([np.linspace(-8, 8, 161), [-1e30, 1e30]]).astype(np.float32)
    (dx,) = gradients("Gelu", x, opset=20, approximate=approximate)
    leaf = torch.tensor(x[:-2], dtype=torch.float64, requires_grad=True)
    torch.nn.functional.gelu(leaf, approximate=approximate).sum().backward()
    np.testing.assert_allclose(dx[:-2], leaf.grad.numpy(), atol=5e-6)
    if approximate == "none":
        np.testing.assert_array_equal(dx[-2:], [0, 1])


@pytest.mark.torch
def test_erf_equals_pytorch() -> None:
    torch = pytest.importorskip("torch")
    x = np.linspace(-6, 6, 121).astype(np.float32)
    (dx,) = gradients("Erf", x)
    leaf = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    torch.erf(leaf).sum().backward()
    np.testing.assert_allclose(dx, leaf.grad.numpy(), atol=1e-6)


@pytest.mark.torch
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy_equals_pytorch_where_labels_are_ignored(weighted: bool, reduction: str) -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(6, 4, 3)).astype(np.float32)
    t = rng.integers(0, 4, (6, 3))
    t[::2, 1] = -1
    weights = np.array([0.5, 1, 2, 3], np.float32)
    inputs = (x, t, weights) if weighted else (x, t)
    dy = rng.normal(size=(6, 3)) if reduction == "none" else np.array(1.5)
    (dx,) = gradients("SoftmaxCrossEntropyLoss", *inputs, dy=dy, ignore_index=-1, reduction=reduction)
    leaf = torch.tensor(x, requires_grad=True)
    loss = torch.nn.functional.cross_entropy(
        leaf,
        torch.tensor(t),
        torch.tensor(weights) if weighted else None,
        ignore_index=-1,
        reduction=reduction,
    )
    loss.backward(torch.tensor(dy, dtype=torch.float32))
    np.testing.assert_allclose(dx, leaf.grad.numpy(), atol=1e-6)


@pytest.mark.parametrize("operator", ["Relu", "LeakyRelu", "Elu", "HardSigmoid", "HardSwish", "Mish", "Gelu"])
def test_half_precision_agrees_with_single(operator: str) -> None:
    x = np.array([-60000, -8, -2, -0.5, 0, 0.5, 2, 8], np.float16)
    results = []
    for dtype in (np.float16, np.float32):
        kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        graph = helper.make_graph(
            [helper.make_node(operator, ["x"], ["y"])],
            "half",
            [helper.make_tensor_value_info("x", kind, x.shape)],
            [helper.make_tensor_value_info("y", kind, x.shape)],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)], ir_version=10)
        built = projected_gradient(model, ["x"], {"y": np.ones(x.shape, dtype)})
        results.append(_run(built, {"x": x.astype(dtype)})["x_grad"])
    assert results[0].dtype == np.float16
    np.testing.assert_allclose(results[0], results[1], atol=4e-3)


def test_an_axis_without_dimensions_is_removed_again() -> None:
    model = parser.parse_model("""<ir_version: 10, opset_import: ["" : 18]>
        g (float[1, 2] a) => (float[1, 1, 2] y) <int64 axis = {1}> { y = Unsqueeze(a, axis) }""")
    projected = projected_gradient(model, ["a"], {"y": np.array([[[3.0, 4.0]]], dtype=np.float32)})
    np.testing.assert_array_equal(_run(projected, {"a": np.ones((1, 2), dtype=np.float32)})["a_grad"], [[3.0, 4.0]])


def test_a_signal_may_lack_the_last_axis_of_stft() -> None:
    signal, rest = np.arange(8.0)[None], (np.array(2), np.ones(4, dtype=np.float32))
    (dx,) = gradients("STFT", signal, *rest, onesided=1)
    (expected,) = gradients("STFT", signal[..., None], *rest, onesided=1)
    np.testing.assert_allclose(dx, expected[..., 0])
