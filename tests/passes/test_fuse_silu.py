"""The gradient of SiLU is one node, which reads the input only."""

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

ROWS, WIDE = 5, 37
GATED = "g = MatMul(x, v) u = MatMul(x, w) s = Sigmoid(g) h = Mul(g, s) m = Mul(h, u) y = MatMul(m, w)"
KINDS = {"float": np.float32, "double": np.float64}


@pytest.fixture(autouse=True)
def _nodes_stay_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the pass that makes one node of the chains whose nodes are counted here."""
    monkeypatch.setattr(pipeline, "fuse_elementwise", lambda graph: None)


def lowered(nodes: str = GATED, kind: str = "float", rows: str = "n", **options: str) -> ir.Model:
    """Return a step's graph with the gradients of a sum of squares by both weights."""
    square = f"{kind}[{WIDE}, {WIDE}]"
    text = (
        f'<ir_version: 8, opset_import: ["": 18, "{TRAINING_DOMAIN}": 1]> f ({kind}[{rows}, {WIDE}] x, {square} v, '
        f"{square} w) => ({kind}[] loss, {square} dv, {square} dw) {{ {nodes} q = Mul(y, y) "
        f'loss = ReduceSum<keepdims = 0>(q) dv, dw = {TRAINING_DOMAIN}.Gradient<xs = ["v", "w"], y = "loss">(v, w) }}'
    )
    proto = parser.parse_model(text)
    for node in proto.graph.node:
        node.name = node.output[0]
    working = infer_shapes(ir.from_proto(proto))
    working.metadata_props.update(GradientOptions(**options).entries())
    found = lower_graph(working, kernels=True)
    onnx.checker.check_model(ir.to_proto(infer_shapes(found)))
    return found


def operators(working: ir.Model) -> Counter[str]:
    return Counter(node.op_type for node in working.graph)


def run(working: ir.Model, kind: str = "float") -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    feeds = {"x": rng.normal(size=(ROWS, WIDE)), "v": rng.normal(size=(WIDE, WIDE)), "w": rng.normal(size=(WIDE, WIDE))}
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(str(custom_ops_library()))
    session = onnxruntime.InferenceSession(ir.to_proto(working).SerializeToString(), options)
    return session.run(None, {name: array.astype(KINDS[kind]) for name, array in feeds.items()})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("product", ["Mul(g, s)", "Mul(s, g)"])
def test_the_gradient_is_one_node_with_the_same_values(
    monkeypatch: pytest.MonkeyPatch, kind: str, product: str
) -> None:
    nodes = GATED.replace("Mul(g, s)", product)
    fused = lowered(nodes, kind)
    monkeypatch.setattr(pipeline, "fuse_silu", lambda model, backward: None)
    plain = lowered(nodes, kind)
    assert operators(fused)["GeluGradient"] == 1
    assert "Sub" in operators(plain)
    assert "Sub" not in operators(fused)
    for found, right in zip(run(fused, kind), run(plain, kind), strict=True):
        np.testing.assert_allclose(
            found, right, rtol=2e-4 if kind == "float" else 1e-9, atol=1e-6 * np.abs(right).max()
        )


def test_only_the_input_is_kept_for_the_backward_pass() -> None:
    """The node returns the product again, so that no gradient reads that of the forward pass, nor the sigmoid."""
    graph = lowered().graph
    (gradient,) = (node for node in graph if node.op_type == "GeluGradient")
    assert len(gradient.outputs) == 3  # by both factors, and the product
    (sigmoid,) = (node for node in graph if node.op_type == "Sigmoid")
    (product,) = (reader for reader, _ in sigmoid.outputs[0].uses())
    assert [reader.op_type for reader, _ in product.outputs[0].uses()] == ["Mul"]


def test_recomputed_activations_have_it_too() -> None:
    plain, again = lowered(), lowered(recompute=("*",))
    assert operators(again)["GeluGradient"] == 1
    for found, right in zip(run(again), run(plain), strict=True):
        np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-5 * np.abs(right).max())


@pytest.mark.parametrize(
    "nodes",
    [
        "g = MatMul(x, v) r = MatMul(x, w) s = Sigmoid(r) h = Mul(g, s) y = MatMul(h, w)",
        "g = MatMul(x, v) s = Sigmoid(g) h = Mul(g, s) t = Tanh(g) p = Add(h, t) y = MatMul(p, w)",
    ],
    ids=["of another value", "with another term"],
)
def test_other_gradients_stay(nodes: str) -> None:
    assert "GeluGradient" not in operators(lowered(nodes))


def test_a_float16_model_keeps_its_nodes() -> None:
    assert "GeluGradient" not in operators(lowered(kind="float16"))
