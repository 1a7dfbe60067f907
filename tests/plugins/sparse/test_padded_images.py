"""Images that stay padded between sparse convolutions: which ones, the same results, and files that do not fit."""

from __future__ import annotations

import re

import numpy as np
import onnx
import onnx.inliner
import pytest
from onnx import helper
from pruned_models import make_every_layer_sparse, model_of, pruned, run

import onnxtrain
from onnxtrain.plugins.sparse import compile as compiling
from onnxtrain.plugins.sparse.edited import attributes
from onnxtrain.plugins.sparse.operators import CONV
from sentences import raises_sentence

RNG = np.random.default_rng(3)

SAME = "kernel_shape = [3, 3], pads = [1, 1, 1, 1]"
HALF = "kernel_shape = [3, 3], strides = [2, 2], pads = [1, 1, 1, 1]"

BLOCKS = f"""
  network (float[N, 16, SIZES] x) => (float[N, 32, h, w] y) {{
    a1 = Conv<{SAME}>(x, w1)
    a = Relu(a1)
    b1 = Conv<{SAME}>(a, w2)
    b2 = Add(b1, x)
    b = Relu(b2)
    c1 = Conv<{SAME}>(b, w3)
    c = Relu(c1)
    d1 = Conv<{SAME}>(c, w4)
    d2 = Add(d1, b)
    d = Relu(d2)
    e1 = Conv<{HALF}>(d, w5)
    e = Relu(e1)
    f1 = Conv<{SAME}>(e, w6)
    g1 = Conv<kernel_shape = [1, 1], strides = [2, 2]>(d, w7)
    f2 = Add(f1, g1)
    f = Relu(f2)
    y = Conv<{SAME}>(f, w8)
  }}"""


@pytest.fixture(autouse=True)
def every_layer(monkeypatch):
    make_every_layer_sparse(monkeypatch)


def blocks(sizes="15, 19", block=4):
    channels = [(16, 16), (16, 16), (16, 16), (16, 16), (32, 16), (32, 32), (32, 16), (32, 32)]
    rng = np.random.default_rng(4)
    weights = {
        f"w{index + 1}": pruned(rng, (*shape, *((1, 1) if index == 6 else (3, 3))), 0.8, block)
        for index, shape in enumerate(channels)
    }
    return model_of(BLOCKS.replace("SIZES", sizes), **weights)


def compiled(model, path, **sizes):
    onnxtrain.compile_sparse(model, path, sizes=sizes)
    onnx.checker.check_model(path, full_check=True)
    return {node.output[0]: attributes(node) for node in onnx.load(path).graph.node if node.op_type == CONV}


@pytest.mark.parametrize("block", [1, 4, 16])
def test_the_same_results_with_padded_images(block, tmp_path):
    model, path = blocks(block=block), tmp_path / "fast.onnx"
    layers = compiled(model, path)
    assert [y for y, given in layers.items() if any(given["y_pads"])] == ["a", "b", "c", "d", "e", "g1", "f"]
    for batch in (1, 3):
        x = {"x": RNG.standard_normal((batch, 16, 15, 19), np.float32)}
        expected = run(model, x)
        np.testing.assert_allclose(run(path, x), expected, rtol=1e-3, atol=1e-4)
        found = run(path, x, kernels=True)
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)
        np.testing.assert_array_equal(run(path, x, kernels=True, threads=2), found)


def test_sizes_may_be_dynamic(tmp_path):
    text = f"f (float[N, 16, H, W] x) => (float[N, 16, h, w] y) {{ a = Conv<{SAME}>(x, w) y = Conv<{SAME}>(a, v) }}"
    model = model_of(text, w=pruned(RNG, (16, 16, 3, 3), 0.8), v=pruned(RNG, (16, 16, 3, 3), 0.8))
    layers = compiled(model, tmp_path / "fast.onnx", H=12, W=12)
    assert layers["a"]["y_pads"] == [1, 1, 1, 1]
    assert layers["y"]["x_pads"] == layers["y"]["pads"] == [1, 1, 1, 1]
    for size in (1, 2, 5, 40):
        x = {"x": RNG.standard_normal((2, 16, size, size + 1), np.float32)}
        expected = run(model, x)
        np.testing.assert_allclose(run(tmp_path / "fast.onnx", x), expected, rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(run(tmp_path / "fast.onnx", x, kernels=True), expected, rtol=1e-3, atol=1e-4)


def test_one_axis(tmp_path):
    same = "kernel_shape = [3], pads = [1, 1]"
    text = f"""f (float[N, 16, 50] x) => (float[N, 16, n] y) {{
      a = Conv<{same}>(x, w) b1 = Conv<kernel_shape = [5], pads = [2, 2]>(a, u) b = Add(b1, a) y = Conv<{same}>(b, v)
    }}"""
    model = model_of(
        text, w=pruned(RNG, (16, 16, 3), 0.8), u=pruned(RNG, (16, 16, 5), 0.8), v=pruned(RNG, (16, 16, 3), 0.8)
    )
    layers = compiled(model, tmp_path / "fast.onnx")
    assert (layers["a"]["y_pads"], layers["b"]["y_pads"]) == ([2, 2], [1, 1])
    assert (layers["b"]["residual_pads"], layers["y"]["residual_pads"]) == ([2, 2], [0, 0])
    x = {"x": RNG.standard_normal((2, 16, 50), np.float32)}
    np.testing.assert_allclose(run(tmp_path / "fast.onnx", x), run(model, x), rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(run(tmp_path / "fast.onnx", x, kernels=True), run(model, x), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("text", "pads", "x_pads"),
    [
        (f"a = Conv<{SAME}>(x, w) y = Conv<{SAME}>(a, v)", [1, 1, 1, 1], [1, 1, 1, 1]),
        (f"a = Conv<{SAME}>(x, w) b = Neg(a) c = Conv<{SAME}>(a, v) y = Sum(b, c)", [0] * 4, [0] * 4),
        (f"a = Conv<{SAME}>(x, w) y = Conv<{HALF}>(a, v)", [0] * 4, [0] * 4),
        ("a = Conv<kernel_shape = [1, 1]>(x, u) y = Conv<kernel_shape = [1, 1]>(a, u)", [0] * 4, [0] * 4),
        (
            f"a = Conv<{SAME}>(x, w) y = Conv<kernel_shape = [3, 3], pads = [0, 1, 2, 0]>(a, v)",
            [0, 1, 2, 0],
            [0, 1, 2, 0],
        ),
        (
            f"a = Conv<{SAME}>(x, w) b = Conv<{SAME}>(a, v) c = Conv<kernel_shape = [1, 1]>(a, u) y = Sum(b, c)",
            [1, 1, 1, 1],
            [1, 1, 1, 1],
        ),
        (
            f"""a = Conv<{SAME}>(x, w) b = Conv<{SAME}>(a, v)
                c = Conv<kernel_shape = [3, 3], pads = [2, 2, 2, 2], dilations = [2, 2]>(a, v) y = Sum(b, c)""",
            [1, 1, 1, 1],
            [1, 1, 1, 1],
        ),
    ],
)  # fmt: skip
def test_which_images_are_padded(text, pads, x_pads, tmp_path):
    weights = {name: pruned(RNG, (16, 16, 3, 3), 0.8) for name in "wv"} | {"u": pruned(RNG, (16, 16, 1, 1), 0.8)}
    used = {name: array for name, array in weights.items() if f", {name})" in text}
    model = model_of(f"f (float[2, 16, 9, 11] x) => (float[2, 16, h, w_] y) {{ {text} }}", **used)
    layers = compiled(model, tmp_path / "fast.onnx")
    assert layers["a"].get("y_pads", [0] * 4) == pads
    assert max(given.get("x_pads", [0] * 4) for given in layers.values()) == x_pads
    x = {"x": RNG.standard_normal((2, 16, 9, 11), np.float32)}
    np.testing.assert_allclose(run(tmp_path / "fast.onnx", x), run(model, x), rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(run(tmp_path / "fast.onnx", x, kernels=True), run(model, x), rtol=1e-3, atol=1e-4)


def test_images_are_not_padded_where_that_is_slower(monkeypatch, tmp_path):
    monkeypatch.setattr(compiling, "_AS_FAST", 0.0)
    assert not any("y_pads" in given for given in compiled(blocks(), tmp_path / "fast.onnx").values())


def test_padding_is_taken_out_when_a_file_is_decided_anew(monkeypatch, tmp_path):
    model, once, twice, dense = blocks(), *(tmp_path / f"{name}.onnx" for name in ("once", "twice", "dense"))
    first, second = compiled(model, once), compiled(once, twice)
    assert sum(any(given["y_pads"]) for given in second.values()) == 7 < len(first) == len(second)
    x = {"x": RNG.standard_normal((2, 16, 15, 19), np.float32)}
    np.testing.assert_allclose(run(twice, x, kernels=True), run(once, x, kernels=True), rtol=1e-3, atol=1e-4)
    monkeypatch.setattr(compiling, "_WORTH_IT", 1e9)
    assert not compiled(once, dense)
    assert not {"Pad", "Slice"} & {node.op_type for node in onnx.load(dense).graph.node}
    np.testing.assert_allclose(run(dense, x), run(model, x), rtol=1e-3, atol=1e-4)


def test_a_file_without_the_library_neither_pads_nor_slices(tmp_path):
    compiled(blocks(), tmp_path / "fast.onnx")
    inlined = onnx.inliner.inline_local_functions(onnx.load(tmp_path / "fast.onnx"))
    # Slices are of the shapes of weights, which are constants.
    sliced = {node.input[0] for node in inlined.graph.node if node.op_type == "Slice"}
    assert all("blocks_shape" in name for name in sliced)
    assert "Pad" not in {node.op_type for node in inlined.graph.node}


def changed(path, y, name, value):
    made = onnx.load(path)
    node = next(node for node in made.graph.node if node.output[0] == y)
    kept = [attribute for attribute in node.attribute if attribute.name != name]
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute(name, value)])
    return made


@pytest.mark.parametrize(
    ("y", "name", "value", "message"),
    [
        ("a", "x_pads", [2, 2, 2, 2], r"x_pads of the node of 'a' are not the padding of 'x'"),
        ("b", "y_pads", [0, 0, 0, 0], r"x_pads of the node of 'c' are not the padding of 'b'"),
        ("d", "residual_pads", [0, 0, 0, 0], r"residual_pads of the node of 'd' are not the padding of 'b'"),
        ("y", "y_pads", [1, 1, 1, 1], r"a node other than a sparse convolution reads 'y', which is padded"),
        ("c", "y_pads", [1, 1], r"x_pads of the node of 'd1?' are not the padding of 'c'"),
    ],
)
def test_padding_that_does_not_fit_is_refused(y, name, value, message, tmp_path):
    compiled(blocks(), tmp_path / "fast.onnx")
    with raises_sentence("sparse_padding_differs") as caught:
        onnxtrain.compile_sparse(changed(tmp_path / "fast.onnx", y, name, value), tmp_path / "again.onnx")
    assert re.fullmatch(message, caught.value.got)
