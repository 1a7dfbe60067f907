"""Rows that stay transposed between sparse linear layers: which ones, the same results, and files decided anew."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from pruned_models import make_every_layer_sparse, model_of, pruned, run

import onnxtrain
from onnxtrain.plugins.sparse import compile as compiling
from onnxtrain.plugins.sparse.edited import attributes
from onnxtrain.plugins.sparse.operators import LINEAR, TRANSPOSE

RNG = np.random.default_rng(5)

BLOCK = """
  block (float[N, T, 64] x) => (float[N, T, 64] y) {
    q = MatMul(x, w1)
    k1 = MatMul(x, w2)
    k = Add(k1, b1)
    scores = Softmax<axis = -1>(q)
    mixed = Mul(scores, k)
    n = LayerNormalization<axis = -1>(mixed, scale, b1)
    h1 = MatMul(n, w3)
    h = Add(h1, b3)
    r = Div(h, root)
    e = Erf(r)
    s = Add(e, one)
    g = Mul(h, s)
    a = Mul(g, half)
    z1 = MatMul(a, w4)
    z = Add(z1, b1)
    y = Add(z, n)
  }"""


@pytest.fixture(autouse=True)
def every_layer(monkeypatch):
    make_every_layer_sparse(monkeypatch)


def block(size=4):
    rng = np.random.default_rng(6)
    shapes = {"w1": (64, 64), "w2": (64, 64), "w3": (192, 64), "w4": (64, 192)}
    return model_of(
        BLOCK,
        **{name: np.ascontiguousarray(pruned(rng, shape, 0.8, size).T) for name, shape in shapes.items()},
        b1=rng.standard_normal(64, np.float32),
        b3=rng.standard_normal(192, np.float32),
        scale=np.ones(64, np.float32),
        root=np.sqrt(np.float32(2)).reshape(()),
        one=np.float32(1).reshape(()),
        half=np.float32(0.5).reshape((1, 1)),
    )


def compiled(model, path, **sizes):
    """Rows of the panels that each sparse layer reads and writes, and the values that are transposed for several."""
    onnxtrain.compile_sparse(model, path, sizes=sizes)
    onnx.checker.check_model(path, full_check=True)
    nodes = onnx.load(path).graph.node
    panels = {
        node.output[0]: tuple(attributes(node).get(name, 0) for name in ("x_panel", "y_panel"))
        for node in nodes
        if node.op_type == LINEAR
    }
    return panels, {node.input[0]: attributes(node)["panel"] for node in nodes if node.op_type == TRANSPOSE}


def wanted(rows):
    return {"q": (rows, 0), "k": (rows, 0), "h": (0, rows), "y": (rows, 0)}, {"x": rows}


@pytest.mark.parametrize(("size", "rows"), [(1, 128), (4, 64), (16, 64)])
def test_the_same_results_with_transposed_rows(size, rows, monkeypatch, tmp_path):
    model = block(size)
    assert compiled(model, tmp_path / "fast.onnx", T=16) == wanted(rows)
    monkeypatch.setattr(compiling, "_AS_FAST", 0.0)
    compiled(model, tmp_path / "plain.onnx", T=16)
    for shape in ((1, 1), (1, 16), (3, 16), (1, 128), (2, 72), (5, 40), (1, 300), (4, 96)):
        x = {"x": RNG.standard_normal((*shape, 64), np.float32)}
        expected = run(model, x)
        np.testing.assert_allclose(run(tmp_path / "fast.onnx", x), expected, rtol=1e-3, atol=1e-4)
        found = run(tmp_path / "fast.onnx", x, kernels=True)
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(found, run(tmp_path / "plain.onnx", x, kernels=True), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(run(tmp_path / "fast.onnx", x, kernels=True, threads=2), found, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("text", "exchanged", "shared"),
    [
        ("a = MatMul(x, w) b = Tanh(a) y = MatMul(b, v)", {"a"}, set()),
        ("a = MatMul(x, w) b = Softmax<axis = -1>(a) y = MatMul(b, v)", set(), set()),
        ("a = MatMul(x, w) b = Clip(a, none, six) c = Neg(b) d = Sqrt(b) y = MatMul(b, v)", set(), set()),
        ("a = MatMul(x, w) b = Mul(a, row) y = MatMul(b, v)", set(), set()),
        ("a = MatMul(x, w) b = Mul(a, x) y = MatMul(b, v)", set(), set()),
        ("a = MatMul(x, w) b = Sigmoid(a) c = Mul(a, b) y = MatMul(c, v)", {"a"}, set()),
        (
            "a = MatMul(x, w) g = MatMul(x, v) s = Sigmoid(g) h = Mul(s, g) b = Mul(h, a) y = MatMul(b, u)",
            {"a", "g"},
            {"x"},
        ),
        ("a = MatMul(x, w) b = MatMul(a, v) c = MatMul(a, u) y = Add(b, c)", {"a"}, set()),
        ("a = MatMul(x, w) b = MatMul(a, v) c = Add(b, a) y = MatMul(c, u)", {"a", "c"}, set()),
        ("a = MatMul(x, w) b = MatMul(a, v) c = Add(b, x) y = MatMul(c, u)", {"a"}, set()),
        ("a = MatMul(x, w) b = MatMul(a, v) c = Mul(a, one) y = Sum(b, c)", set(), set()),
        ("a = MatMul(x, w) b = Sub(one, a) c = Pow(b, two) y = MatMul(c, v)", {"a"}, set()),
        ("a = MatMul(x, w) b = Pow(two, a) c = Elu(b) d = Max(b, c) y = MatMul(d, v)", {"a"}, set()),
    ],
)
def test_which_rows_are_transposed(text, exchanged, shared, tmp_path):
    constants = {
        **{name: pruned(RNG, (64, 64), 0.9) for name in "wvu"},
        "row": RNG.standard_normal(64, np.float32),
        "none": np.float32(0).reshape(()),
        "six": np.float32(6).reshape(()),
        "one": np.float32([1]),
        "two": np.float32(2).reshape(()),
    }
    used = {name: array for name, array in constants.items() if f"{name})" in text or f"{name}," in text}
    model = model_of(f"f (float[16, 64] x) => (float[16, 64] y) {{ {text} }}", **used)
    panels, found = compiled(model, tmp_path / "fast.onnx")
    assert {y for y, (_, rows) in panels.items() if rows} == exchanged
    assert set(found) == shared
    x = {"x": RNG.standard_normal((16, 64), np.float32)}
    np.testing.assert_allclose(run(tmp_path / "fast.onnx", x), run(model, x), rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(run(tmp_path / "fast.onnx", x, kernels=True), run(model, x), rtol=1e-3, atol=1e-4)


def test_rows_that_a_subgraph_reads_are_not_transposed(tmp_path):
    model = model_of(
        """f (float[16, 64] x, bool c) => (float[16, 64] y) {
          a = MatMul(x, w)
          b = MatMul(a, w)
          y = If (c) <then_branch = t () => (float[16, 64] p) { p = Neg(a) },
                      else_branch = e () => (float[16, 64] q) { q = Neg(b) }>
        }""",
        w=pruned(RNG, (64, 64), 0.9),
    )
    assert compiled(model, tmp_path / "fast.onnx") == ({"a": (0, 0), "b": (0, 0)}, {})


def test_rows_are_not_transposed_where_that_is_slower(monkeypatch, tmp_path):
    monkeypatch.setattr(compiling, "_AS_FAST", 0.0)
    panels, shared = compiled(block(), tmp_path / "fast.onnx", T=16)
    assert (set(panels.values()), shared) == ({(0, 0)}, {})


def test_neighbours_exchange_the_panels_of_the_largest_block(tmp_path):
    text = """a = MatMul(x, w) g = MatMul(x, v) s = Sigmoid(g) b = Mul(s, a)
              c = MatMul(b, w) d = MatMul(b, v) e = MatMul(c, w) y = Add(d, e)"""
    weights = {"w": pruned(RNG, (64, 64), 0.9), "v": np.ascontiguousarray(pruned(RNG, (64, 64), 0.9, 4).T)}
    model = model_of(f"f (float[N, 64] x) => (float[N, 64] y) {{ {text} }}", **weights)
    panels, shared = compiled(model, tmp_path / "fast.onnx")
    assert panels == {"a": (64, 64), "g": (64, 64), "c": (64, 128), "y": (64, 0), "e": (128, 0)}
    assert shared == {"x": 64}
    for rows in (1, 64, 128, 192, 256):
        x = {"x": RNG.standard_normal((rows, 64), np.float32)}
        np.testing.assert_allclose(run(tmp_path / "fast.onnx", x, kernels=True), run(model, x), rtol=1e-3, atol=1e-4)


def test_transposed_rows_are_taken_out_when_a_file_is_decided_anew(monkeypatch, tmp_path):
    model, once, twice, dense = block(), *(tmp_path / f"{name}.onnx" for name in ("once", "twice", "dense"))
    compiled(model, once, T=16)
    assert compiled(once, twice, T=16) == wanted(64)
    assert len(onnx.load(once).graph.node) == len(onnx.load(twice).graph.node)
    x = {"x": RNG.standard_normal((2, 32, 64), np.float32)}
    np.testing.assert_allclose(run(twice, x, kernels=True), run(once, x, kernels=True), rtol=1e-3, atol=1e-4)
    monkeypatch.setattr(compiling, "_WORTH_IT", 1e9)
    assert compiled(once, dense, T=16) == ({}, {})
    assert not onnx.load(dense).functions
    np.testing.assert_allclose(run(dense, x), run(model, x), rtol=1e-3, atol=1e-4)


def test_a_file_without_the_library_transposes_nothing(tmp_path):
    compiled(block(), tmp_path / "fast.onnx", T=16)
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.log_severity_level = 3
    onnxruntime.InferenceSession(str(tmp_path / "fast.onnx"), options, providers=["CPUExecutionProvider"])
    assert not {"Transpose", "Identity"} & {node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node}


@pytest.mark.parametrize(
    ("one", "other", "is_kept"),
    [
        ("2, 64", "2, 64", True),
        ("2, 64", "64", False),
        ("128", "1", False),
        ("4, 1", "1, 32", False),
        ("N", "M", False),
    ],
)
def test_rows_that_an_operator_repeats_are_not_transposed(tmp_path, one, other, is_kept):
    weights = {name: np.ascontiguousarray(pruned(RNG, (64, 64), 0.9).T) for name in ("w", "v", "u")}
    text = f"""f (float[{one}, 64] a, float[{other}, 64] b) => (float[{one}, 64] y) {{
        c = MatMul(a, w)
        d = MatMul(b, v)
        s = Add(c, d)
        e = Tanh(s)
        y = MatMul(e, u)
    }}"""
    if one == "4, 1":
        text = text.replace("float[4, 1, 64] y", "float[4, 32, 64] y")
    model = model_of(text, **weights)
    panels, _ = compiled(model, tmp_path / "fast.onnx", **({"N": 64, "M": 1} if one == "N" else {}))
    assert any(map(any, panels.values())) == is_kept

    def rows(axes):
        sizes = [{"N": 64, "M": 1}.get(size) or int(size) for size in axes.split(", ")]
        return RNG.standard_normal((*sizes, 64), np.float32)

    feeds = {"a": rows(one), "b": rows(other)}
    np.testing.assert_allclose(
        run(tmp_path / "fast.onnx", feeds, kernels=True), run(model, feeds), rtol=1e-3, atol=1e-4
    )
