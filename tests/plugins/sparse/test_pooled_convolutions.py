"""Dense convolutions in front of a MaxPool in compiled models: which ones, and the same results."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.inliner
import pytest
from pruned_models import model_of, pruned, run

import onnxtrain
from onnxtrain.plugins.sparse import compile as compiling
from onnxtrain.plugins.sparse.edited import attributes
from onnxtrain.plugins.sparse.operators import CONV, POOLED

RNG = np.random.default_rng(5)

POOL = "kernel_shape = [3, 3], strides = [2, 2], pads = [1, 1, 1, 1]"
STEM = "kernel_shape = [7, 7], strides = [2, 2], pads = [3, 3, 3, 3]"
SAME = "kernel_shape = [3, 3], pads = [1, 1, 1, 1]"


@pytest.fixture(autouse=True)
def every_layer(monkeypatch):
    """Layers become sparse, pooled and padded whatever the timings say."""
    for name, value in {"_SECONDS": 0.0, "_WORTH_IT": 0.0, "_WHOLE": 0.0, "_DOUBT": 1.0, "_BETTER": 1e-9}.items():
        monkeypatch.setattr(compiling, name, value)
    monkeypatch.setattr(compiling, "_AS_FAST", float("inf"))


def network(steps, outputs=16):
    text = f"""f (float[N, 3, 33, 38] x) => (float[N, {outputs}, h, w_] y) {{
      {steps} d = Conv<{SAME}>(c, v) e = Relu(d) g = Conv<{SAME}>(e, u) s = Add(g, c) y = Relu(s)
    }}"""
    kernel = (3, 3) if f"Conv<{SAME}>(x" in steps else (7, 7)
    scale = np.float32(0.1)
    weights = {
        "w": RNG.standard_normal((outputs, 3, *kernel), np.float32) * scale,
        "bias": RNG.standard_normal(outputs, np.float32),
        "v": pruned(RNG, (outputs, outputs, 3, 3), 0.9),
        "u": pruned(RNG, (outputs, outputs, 3, 3), 0.9),
        **{name: RNG.uniform(0.5, 1.5, outputs).astype(np.float32) for name in ("scale", "shift", "mean", "variance")},
        "low": np.float32(-0.25),
        "high": np.float32(0.5),
    }
    return model_of(
        text, **{name: array for name, array in weights.items() if f" {name})" in text or f" {name}," in text}
    )


def compiled(model, path):
    onnxtrain.compile_sparse(model, path)
    onnx.checker.check_model(path, full_check=True)
    return {node.output[0]: (node.op_type, attributes(node)) for node in onnx.load(path).graph.node}


@pytest.mark.parametrize(
    "steps",
    [
        f"a = Conv<{STEM}>(x, w, bias) b = Relu(a) c = MaxPool<{POOL}>(b)",
        f"""a = Conv<{STEM}>(x, w) n = BatchNormalization(a, scale, shift, mean, variance) b = Relu(n)
            c = MaxPool<{POOL}>(b)""",
        f"a = Conv<{SAME}>(x, w) b = Relu(a) c = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(b)",
    ],
)
def test_the_same_results(steps, tmp_path):
    model, path = network(steps), tmp_path / "fast.onnx"
    nodes = compiled(model, path)
    assert {name: operator for name, (operator, _) in nodes.items()} == {"c": POOLED, "e": CONV, "y": CONV}
    assert nodes["c"][1]["y_pads"] == nodes["e"][1]["x_pads"] == nodes["y"][1]["residual_pads"] == [1, 1, 1, 1]
    for batch in (1, 3):
        x = {"x": RNG.standard_normal((batch, 3, 33, 38), np.float32)}
        expected = run(model, x)
        np.testing.assert_allclose(run(path, x), expected, rtol=1e-4, atol=1e-5)
        found = run(path, x, kernels=True)
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)
        np.testing.assert_array_equal(run(path, x, kernels=True, threads=2), found)


@pytest.mark.parametrize(
    ("steps", "outputs"),
    [
        (f"""a = Conv<{STEM}>(x, w) b = Relu(a)
             c = MaxPool<kernel_shape = [3, 3], strides = [1, 1], pads = [1, 1, 1, 1]>(b)""", 16),
        (f"a = Conv<{STEM}>(x, w) b = Relu(a) c = MaxPool<{POOL}, ceil_mode = 1>(b)", 16),
        (f"a = Conv<{STEM}>(x, w) b = Relu(a) c = MaxPool<{POOL}, dilations = [2, 2]>(b)", 16),
        (f"a = Conv<{STEM}>(x, w) b = Relu(a) c = MaxPool<kernel_shape = [4, 4], strides = [2, 2]>(b)", 16),
        (f"""a = Conv<{STEM}>(x, w) b = Relu(a)
             c = MaxPool<kernel_shape = [3, 3], strides = [2, 2], auto_pad = "SAME_UPPER">(b)""", 16),
        (f"a = Conv<{STEM}>(x, w) b = Relu(a) c = AveragePool<{POOL}>(b)", 16),
        (f"a = Conv<{STEM}>(x, w) b = Clip(a, low, high) c = MaxPool<{POOL}>(b)", 16),
        (f"a = Conv<{STEM}>(x, w) c = MaxPool<{POOL}>(a)", 16),
        (f"""a = Conv<{STEM}>(x, w) o = Relu(a) b = MaxPool<{POOL}>(o) p = Neg(o) q = MaxPool<{POOL}>(p)
             c = Sub(b, q)""", 16),
        ("""a = Conv<kernel_shape = [7, 7], pads = [3, 3, 3, 3]>(x, w) b = Relu(a)
            c = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(b)""", 16),
        (f"a = Conv<{STEM}>(x, w) b = Relu(a) c = MaxPool<{POOL}>(b)", 12),
    ],
)  # fmt: skip
def test_which_convolutions_stay(steps, outputs, tmp_path):
    model = network(steps, outputs)
    nodes = compiled(model, tmp_path / "fast.onnx")
    operators = [operator for operator, _ in nodes.values()]
    assert POOLED not in operators
    assert operators.count(CONV) == 2
    x = {"x": RNG.standard_normal((1, 3, 33, 38), np.float32)}
    np.testing.assert_allclose(run(tmp_path / "fast.onnx", x, kernels=True), run(model, x), rtol=1e-3, atol=1e-4)


def test_pooled_convolutions_are_decided_anew(monkeypatch, tmp_path):
    model = network(f"a = Conv<{STEM}>(x, w, bias) b = Relu(a) c = MaxPool<{POOL}>(b)")
    once, twice, dense = (tmp_path / f"{name}.onnx" for name in ("once", "twice", "dense"))
    first, second = compiled(model, once), compiled(once, twice)
    assert [operator for operator, _ in first.values()] == [operator for operator, _ in second.values()]
    x = {"x": RNG.standard_normal((2, 3, 33, 38), np.float32)}
    np.testing.assert_array_equal(run(twice, x, kernels=True), run(once, x, kernels=True))
    monkeypatch.setattr(compiling, "_BETTER", float("inf"))
    assert "MaxPool" in [operator for operator, _ in compiled(once, twice).values()]
    monkeypatch.setattr(compiling, "_WORTH_IT", 1e9)
    assert [operator for operator, _ in compiled(once, dense).values()][:3] == ["Conv", "Relu", "MaxPool"]
    np.testing.assert_allclose(run(dense, x), run(model, x), rtol=1e-4, atol=1e-5)


def test_a_model_without_sparse_layers_stays_as_it_is(monkeypatch, tmp_path):
    monkeypatch.setattr(compiling, "_WORTH_IT", 1e9)
    nodes = compiled(network(f"a = Conv<{STEM}>(x, w) b = Relu(a) c = MaxPool<{POOL}>(b)"), tmp_path / "fast.onnx")
    assert not {POOLED, CONV} & {operator for operator, _ in nodes.values()}
