"""Weights and biases that nodes compute from stored ones are compiled, and stay as they were in dense layers."""

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser
from pruned_models import make_every_layer_sparse, run

import onnxtrain

HEAD = '<ir_version: 8, opset_import: ["": 18]> f (float[n, 64] x) => (float[n, {outputs}] y) {{ {nodes} }}'
RNG = np.random.default_rng(0)


def sparse(*shape):
    return (RNG.normal(size=shape) * (RNG.random(shape) < 0.1)).astype(np.float32)


FORMS = {
    "transposed": ("t = Transpose<perm = [1, 0]>(w) y = MatMul(x, t)", {"w": sparse(48, 64)}),
    "behind Identity": ("t = Identity(w) y = Gemm<transB = 1>(x, t)", {"w": sparse(48, 64)}),
    "cast": ("t = Cast<to = 1>(w) y = MatMul(x, t)", {"w": sparse(64, 48).astype(np.float16)}),
    "cast like": ("t = CastLike(w, x) y = MatMul(x, t)", {"w": sparse(64, 48).astype(np.float64)}),
    "reshaped": ("t = Reshape(w, s) y = MatMul(x, t)", {"w": sparse(64, 6, 8), "s": np.array([64, 48])}),
    "squeezed": ("a = Squeeze(w) t = Transpose(a) y = MatMul(x, t)", {"w": sparse(1, 48, 64)}),
    "joined": ("t = Concat<axis = 1>(v, w) y = MatMul(x, t)", {"v": sparse(64, 16), "w": sparse(64, 32)}),
    "split": ("a, t = Split<axis = 1>(w, s) y = MatMul(x, t)", {"w": sparse(64, 64), "s": np.array([16, 48])}),
    "scaled": ("t = Mul(w, g) y = MatMul(x, t)", {"w": sparse(64, 48), "g": np.float32(2)}),
    "a computed bias": (
        "c = CastLike(one, x) s = Shape<start = 0, end = 1>(w) b = Expand(c, s) y = Gemm<transB = 1>(x, w, b)",
        {"w": sparse(48, 64), "one": np.float32(0.5)},
    ),
    "a bias behind Identity": (
        "t = Transpose(w) a = MatMul(x, t) k = Identity(b) s = Add(a, k) y = Relu(s)",
        {"w": sparse(48, 64), "b": np.ones(48, np.float32)},
    ),
}


def model_of(nodes, weights, outputs=48):
    model = parser.parse_model(HEAD.format(nodes=nodes, outputs=outputs))
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(array), name) for name, array in weights.items())
    onnx.checker.check_model(model, full_check=True)
    return model


@pytest.mark.parametrize("name", FORMS)
def test_computed_weights_are_compiled(name, monkeypatch, tmp_path):
    make_every_layer_sparse(monkeypatch)
    model = model_of(*FORMS[name])
    result = onnxtrain.compile_sparse(model, tmp_path / "fast.onnx")
    assert [layer.compiled for layer in result.layers] == [True]
    x = {"x": RNG.normal(size=(5, 64)).astype(np.float32)}
    for kernels in (False, True):
        found = run(tmp_path / "fast.onnx", x, kernels=kernels)
        np.testing.assert_allclose(found, run(model, x), rtol=1e-5, atol=1e-5)
    fast = onnx.load(tmp_path / "fast.onnx")
    assert "w" not in {tensor.name for tensor in fast.graph.initializer}


def test_dense_layers_stay_as_they_were(monkeypatch, tmp_path):
    """An embedding that the output layer reads transposed is stored once."""
    make_every_layer_sparse(monkeypatch)
    rows = np.eye(96, 64, k=-32, dtype=np.float32)
    table = RNG.normal(size=(96, 64)).astype(np.float32)
    nodes = "t = Transpose(w) a = MatMul(x, t) r = Relu(a) h = MatMul(r, v) z = Transpose(w) y = MatMul(h, z)"
    model = model_of(nodes, {"w": table, "v": sparse(96, 64) + np.eye(96, 64, dtype=np.float32) + rows}, outputs=96)
    result = onnxtrain.compile_sparse(model, tmp_path / "fast.onnx")
    assert [layer.compiled for layer in result.layers] == [False, True, False]
    fast = onnx.load(tmp_path / "fast.onnx")
    assert [node.op_type for node in fast.graph.node].count("Transpose") == 2
    assert sum(np.array_equal(numpy_helper.to_array(t), table) for t in fast.graph.initializer) == 1
    assert not any("computed" in t.name and len(t.dims) == 2 and t.dims[0] == 96 for t in fast.graph.initializer)
