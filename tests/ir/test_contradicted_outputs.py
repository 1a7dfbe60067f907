"""Values whose declared shape their nodes contradict: the nodes decide, and a hint says so."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper, parser

import onnxtrain
from onnxtrain.errors import TrainingHint
from sentences import warns_sentence

BODIES = {
    "linear": ("h = MatMul(x, w)  y = Add(h, b)", "[N, 1]"),
    "gemm": ("y = Gemm(x, w, b)", "[N, 1]"),
    "activation": ("h = MatMul(x, w)  y = Tanh(h)", "[N, 1]"),
}


def regression(declared: str, body: str = "linear") -> onnx.ModelProto:
    text = f'<ir_version: 8, opset_import: ["": 18]> g (float[n, 4] x) => (float{declared} y) {{ {BODIES[body][0]} }}'
    model = parser.parse_model(text)
    rng = np.random.default_rng(0)
    model.graph.initializer.extend(
        [
            numpy_helper.from_array(rng.normal(size=(4, 1)).astype(np.float32), "w"),
            numpy_helper.from_array(np.ones(1, np.float32), "b"),
        ]
    )
    return model


X = np.random.default_rng(1).normal(size=(6, 4)).astype(np.float32)
Y = np.random.default_rng(2).normal(size=(6, 1)).astype(np.float32)


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("declared", ["[n, 4]", "[n]", "[6, 4]"])
def test_training_goes_by_the_nodes_and_says_so(declared, body):
    with warns_sentence("declared_otherwise", value="the output 'y'", shape="[n, 1]"):
        trainer = onnxtrain.Trainer(regression(declared, body), loss="mean_squared_error", optimizer="sgd(lr=0.1)")
    right = onnxtrain.Trainer(regression("[n, 1]", body), loss="mean_squared_error", optimizer="sgd(lr=0.1)")
    assert trainer.train_step(X, Y) == right.train_step(X, Y)
    np.testing.assert_array_equal(trainer.get_weights()["w"], right.get_weights()["w"])
    assert any("but its nodes give" in hint for hint in onnxtrain.inspect(regression(declared, body)).hints)


@pytest.mark.parametrize("declared", ["[n, 1]", "[m, 1]", "[n, k]", "[6, 1]"])
def test_shapes_that_may_be_true_stay(declared, recwarn):
    onnxtrain.Trainer(regression(declared), loss="mean_squared_error", optimizer="sgd(lr=0.1)")
    assert not [warning for warning in recwarn if "declares the output" in str(warning.message)]


def test_the_gradient_says_so_too():
    model = parser.parse_model(
        '<ir_version: 8, opset_import: ["": 18]> g (float[n, 4] x) => (float[2] y) { y = ReduceSum <keepdims = 0> (x) }'
    )
    with warns_sentence("declared_otherwise", value="the output 'y'", declared="[2]", shape="[]"):
        onnxtrain.gradient(model, xs="x")


DECLARED = [
    (1, "[n, 4]"),
    (1, "[6, 4]"),
    (1, "[n]"),
    (1, "[]"),
    (1, "[n, 1, 1]"),
    (4, "[n, 1]"),
    (4, "[n, k]"),
    (1, ""),
]


@pytest.mark.parametrize("where", ["output", "value"])
@pytest.mark.parametrize("reader", ["Mul", "Add"])
@pytest.mark.parametrize(("width", "declared"), DECLARED)
def test_gradients_behind_a_wrong_declaration(width, declared, reader, where):
    inner, outer = (f", float{declared} h", "") if where == "output" else ("", f"<float{declared} h>")
    model = parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 18]> g (float[n, 4] x) => (float[] y{inner}) {outer}
        {{ h = MatMul(x, w)  z = {reader}(h, c)  y = ReduceSum <keepdims = 0> (z) }}"""
    )
    rng = np.random.default_rng(0)
    arrays = {"w": rng.normal(size=(4, width)).astype(np.float32), "c": rng.normal(size=(6, 1)).astype(np.float32)}
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in arrays.items())
    if declared not in ("[]", "[n, k]"):  # the text [] is an unknown rank, and none at all a scalar
        with pytest.warns(TrainingHint, match=rf"declares the {where} 'h' as .*give \[\w+, {width}\]"):
            made = onnxtrain.gradient(model, y="y", xs="w")
    else:
        made = onnxtrain.gradient(model, y="y", xs="w")
    (found,) = session(made).run(["w_grad"], {"x": X})
    factor = arrays["c"] if reader == "Mul" else np.ones((6, 1))
    np.testing.assert_allclose(found, X.T @ np.broadcast_to(factor, (6, width)), rtol=1e-5)


def session(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


@pytest.mark.parametrize(
    ("declared", "target"), [("", "(6,)"), ("[n, 1]", "(6,)"), ("[n]", "(6, 1)"), ("[6, 6]", "(6,)")]
)
def test_targets_have_the_shape_that_nodes_give(declared, target):
    """An output of rank 1 or 2 whose declaration has another rank."""
    body = "s = ReduceSum <keepdims = 0> (h, a)" if target == "(6,)" else "s = Identity (h)"
    model = parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 18]> g (float[n, 4] x) => (float{declared} y) <int64[1] a = {{1}}>
        {{ h = MatMul(x, w)  {body}  y = Tanh(s) }}"""
    )
    w = np.random.default_rng(0).normal(size=(4, 1)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(w, "w"))
    trainer = onnxtrain.Trainer(model, loss="mse", optimizer="sgd(lr=0.1)")
    shape = (6,) if target == "(6,)" else (6, 1)
    loss = trainer.train_step(X, Y.reshape(shape))
    np.testing.assert_allclose(loss, ((np.tanh(X @ w) - Y) ** 2).mean(), rtol=1e-5)
    assert trainer.predict(X).shape == shape


def test_a_regression_of_scikit_learn():
    pls = pytest.importorskip("sklearn.cross_decomposition")
    skl2onnx = pytest.importorskip("skl2onnx")
    model = skl2onnx.to_onnx(pls.PLSRegression(2).fit(X, Y), X[:1])
    trainer = onnxtrain.Trainer(model, loss="mean_squared_error", optimizer="sgd(lr=0.01)")
    assert np.isfinite(trainer.train_step(X, Y))
    assert any("declares the output" in hint for hint in trainer.hints)
