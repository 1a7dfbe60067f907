"""Sums over slices are computed with their gradient."""

import numpy as np
import onnxruntime
import pytest
from onnx import numpy_helper, parser

import onnxtrain
from onnxtrain.lowering import pipeline

X = np.random.default_rng(0).normal(size=(5, 3, 4)).astype(np.float32)
W = np.random.default_rng(1).normal(size=(4, 6)).astype(np.float32)

ADDED = "t = ReduceSum <keepdims = 0> (q)  n = Add(s, t)"


def model(step=ADDED, initial=0.0, direction=0):
    """Return y = sum over the slices of X of exp(tanh(slice W))."""
    made = parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 18]> f (float[5, 3, 4] x) => (float y)
        {{ y = Scan <num_scan_inputs = 1, scan_input_directions = [{direction}], body = step
            (float s, float[3, 4] a) => (float n) {{
                p = MatMul(a, w)  h = Tanh(p)  q = Exp(h)  {step} }}> (begin, x) }}"""
    )
    made.graph.initializer.append(numpy_helper.from_array(W, "w"))
    made.graph.initializer.append(numpy_helper.from_array(np.float32(initial), "begin"))
    return made


def gradient(given, monkeypatch, joined):
    """Return the model with its gradient, with the pass or without, and its results."""
    with monkeypatch.context() as patch:
        if not joined:
            patch.setattr(pipeline, "join_scans", lambda graph: None)
        built = onnxtrain.gradient(given, xs=["w", "x"])
    session = onnxruntime.InferenceSession(built.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    return built, dict(zip(names, session.run(None, {"x": X}), strict=True))


def scans(built):
    return [node for node in built.graph.node if node.op_type == "Scan"]


@pytest.mark.parametrize("direction", [0, 1])
def test_one_scan_does_both(direction, monkeypatch):
    given = model(direction=direction)
    both, expected = gradient(given, monkeypatch, joined=False)
    built, found = gradient(given, monkeypatch, joined=True)
    assert (len(scans(both)), len(scans(built))) == (2, 1)
    body = next(attribute.g for attribute in scans(built)[0].attribute if attribute.name == "body")
    assert [node.op_type for node in body.node].count("Tanh") == 1
    assert [node.op_type for node in body.node].count("Exp") == 1
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-5)
    np.testing.assert_allclose(found["y"], np.exp(np.tanh(X.astype(np.float64) @ W)).sum(), rtol=1e-5)


@pytest.mark.parametrize(
    "given",
    [
        model(initial=1.0),
        model("t = ReduceSum <keepdims = 0> (q)  u = Mul(s, t)  n = Add(u, t)"),
        model("t = ReduceSum <keepdims = 0> (q)  n = Mul(s, t)", initial=1.0),
    ],
    ids=["begins with another number", "state is read", "a product"],
)
def test_other_operators_than_sums_are_unchanged(given, monkeypatch):
    _, expected = gradient(given, monkeypatch, joined=False)
    built, found = gradient(given, monkeypatch, joined=True)
    assert len(scans(built)) == 2
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)


def test_a_gradient_that_needs_the_sum_waits_for_it(monkeypatch):
    given = model()
    given.graph.node[0].output[0] = "sum"
    given.graph.node.extend(parser.parse_graph("g (float sum) => (float y) { y = Mul(sum, sum) }").node)
    built, found = gradient(given, monkeypatch, joined=True)
    assert len(scans(built)) == 2
    np.testing.assert_allclose(found["y"], np.exp(np.tanh(X.astype(np.float64) @ W)).sum() ** 2, rtol=1e-5)
