"""Logits are computed only where a label is compared."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import parser

from onnxtrain.autodiff.options import GradientOptions
from onnxtrain.graph.domains import TRAINING_DOMAIN
from onnxtrain.graph.shapes import infer_shapes
from onnxtrain.lowering import pipeline
from onnxtrain.lowering.pipeline import lower_graph
from onnxtrain.runtime.native import custom_ops_library

BATCH, LENGTH, WIDTH, CLASSES = 3, 5, 8, 300
LOSS = "loss = SoftmaxCrossEntropyLoss<ignore_index = -100>(z, l)"
HEAD = "y = MatMul(x, w) z = Flatten<axis = 2>(y)"
SUM = LOSS.replace("<", '<reduction = "sum", ')
BY_ROW = LOSS.replace("loss", "rows").replace("<", '<reduction = "none", ')
CASES = {
    "mean": f"{HEAD} {LOSS}",
    "sum": f"{HEAD} {SUM}",
    "by row, weighted": f"{HEAD} {BY_ROW} weighted = Mul(rows, m) loss = ReduceSum<keepdims = 0>(weighted)",
    "class weights": f"{HEAD} {LOSS.replace('(z, l)', '(z, l, c)')}",
    "an adapter": f"y0 = MatMul(x, w) s = MatMul(x, a) r = MatMul(s, b) y = Add(y0, r) z = Flatten<axis = 2>(y) {LOSS}",
    "a bias with an axis for each of the logits": f"y0 = MatMul(x, w) y = Add(d, y0) z = Flatten<axis = 2>(y) {LOSS}",
    "a bias and a cap": f"y0 = MatMul(x, w) y1 = Add(y0, c) y = Tanh(y1) z = Flatten<axis = 2>(y) {LOSS}",
}
"""Graphs from hidden states x to a loss."""
XS = ("x", "w", "a", "b", "c", "d", "m")
SHAPES = {
    "x": f"n, {LENGTH}, {WIDTH}",
    "w": f"{WIDTH}, {CLASSES}",
    "a": f"{WIDTH}, 2",
    "b": f"2, {CLASSES}",
    "c": f"{CLASSES}",
    "d": f"1, 1, {CLASSES}",
    "m": f"{BATCH * LENGTH}",
}


def lowered(nodes: str, *, also: str = "", classes: int = CLASSES) -> ir.Model:
    """Return the graph of a loss and of its gradients by all that it reads."""
    xs = [name for name in XS if f"{name})" in nodes or f"({name}," in nodes or f", {name}," in nodes]
    shapes = {name: SHAPES[name].replace(str(CLASSES), str(classes)) for name in xs}
    inputs = ", ".join(f"float[{shape}] {name}" for name, shape in shapes.items())
    outputs = "".join(f", float[{shape}] d{name}" for name, shape in shapes.items())
    names = ", ".join(f'"{name}"' for name in xs)
    text = (
        f'<ir_version: 8, opset_import: ["": 18, "{TRAINING_DOMAIN}": 1]> f ({inputs}, int64[n, {LENGTH}] t) => '
        f"(float[] loss{outputs}{also}) <int64[1] flat = {{-1}}> {{ l = Reshape(t, flat) {nodes} "
        f'{", ".join(f"d{name}" for name in xs)} = {TRAINING_DOMAIN}.Gradient<xs = [{names}], y = "loss">'
        f"({', '.join(xs)}) }}"
    )
    proto = parser.parse_model(text)
    for node in proto.graph.node:
        node.name = node.output[0]
    working = infer_shapes(ir.from_proto(proto))
    working.metadata_props.update(GradientOptions().entries())
    found = lower_graph(working, kernels=True)
    onnx.checker.check_model(ir.to_proto(infer_shapes(found)))
    return found


def run(working: ir.Model, labels: np.ndarray) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    feeds: dict[str, np.ndarray] = {"t": labels}
    for value in working.graph.inputs:
        if value.name in SHAPES:
            shape = [BATCH if size == "n" else int(size) for size in SHAPES[value.name].split(", ")]
            feeds[value.name] = np.abs(rng.normal(size=shape)).astype(np.float32)
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(str(custom_ops_library()))
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(ir.to_proto(working).SerializeToString(), options)
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(None, feeds), strict=True))


def labels(ignored: float) -> np.ndarray:
    rng = np.random.default_rng(1)
    found = rng.integers(0, CLASSES, (BATCH, LENGTH))
    found[rng.random(found.shape) < ignored] = -100
    return found


def operators(working: ir.Model) -> Counter[str]:
    return Counter(node.op_type for node in working.graph)


@pytest.mark.parametrize("nodes", CASES.values(), ids=CASES.keys())
def test_losses_and_gradients_are_those_of_all_rows(monkeypatch: pytest.MonkeyPatch, nodes: str) -> None:
    skipping = lowered(nodes)
    monkeypatch.setattr(pipeline, "skip_ignored_rows", lambda graph: None)
    plain = lowered(nodes)
    assert operators(skipping)["NonZero"] == operators(plain)["NonZero"] + 1
    for ignored in (0.0, 0.5):
        found, right = run(skipping, labels(ignored)), run(plain, labels(ignored))
        assert found.keys() == right.keys()
        for name in found:
            np.testing.assert_allclose(found[name], right[name], rtol=2e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("kind", ["sum", "by row, weighted"])
def test_a_batch_without_a_label_has_loss_0_and_no_gradient(kind: str) -> None:
    for name, value in run(lowered(CASES[kind]), labels(1.0)).items():
        assert not value.any(), name


def test_logits_are_of_the_first_row_and_of_those_that_are_compared() -> None:
    working = lowered(CASES["mean"])
    (logits,) = [node.inputs[0] for node in working.graph if node.op_type == "SoftmaxCrossEntropyLoss"]
    working.graph.outputs.append(logits)
    given = labels(0.5)
    given[0, 0] = -100
    assert run(working, given)[logits.name].shape == (1 + (given >= 0).sum(), CLASSES)


@pytest.mark.parametrize(
    ("nodes", "options"),
    [
        (CASES["mean"], {"also": f", float[n, {LENGTH}, {CLASSES}] y"}),
        (CASES["mean"].replace("ignore_index = -100", 'reduction = "mean"'), {}),
        (CASES["mean"], {"classes": 255}),
        (f"{CASES['mean'].replace('loss =', 'first =')} top = ReduceMax<keepdims = 0>(z) loss = Add(first, top)", {}),
        (CASES["mean"].replace("MatMul(x, w)", 'Einsum<equation = "nsk,kv->nsv">(x, w)'), {}),
    ],
    ids=["an output of the graph", "no label ignored", "few classes", "another reader", "another operator"],
)
def test_logits_are_computed_whole_for(nodes: str, options: dict) -> None:
    assert "NonZero" not in operators(lowered(nodes, **options))
