"""The gradient of a gated unit is one node, with the bits of the nodes that it replaces."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import parser

from onnxtrain.autodiff.engine import Backward
from onnxtrain.graph.domains import ONNXTRAIN_DOMAIN
from onnxtrain.lowering.rules.activations import fuse_gates
from onnxtrain.lowering.rules.kernels import resolve_fused
from onnxtrain.runtime.native import custom_ops_library

ROWS, WIDE = 5, 37
KINDS = {"float": np.float32, "double": np.float64}
GATE = 't = Mul(d, f) a, y = onnxtrain.GeluGradient<approximate = "{}">(t, x) b = Mul(y, f) c = Mul(d, y)'


def model(nodes: str = GATE.format("sigmoid"), kind: str = "float", factor: str = f"n, {WIDE}") -> ir.Model:
    sizes = f"{kind}[n, {WIDE}]"
    text = (
        f'<ir_version: 10, opset_import: ["": 18, "{ONNXTRAIN_DOMAIN}": 1]> '
        f"g ({sizes} d, {kind}[{factor}] f, {sizes} x) => ({sizes} a, {sizes} b, {sizes} c) "
        f"<{sizes} t, {sizes} y, {sizes} p, {sizes} q, {sizes} r> {{ {nodes} }}"
    )
    return ir.from_proto(parser.parse_model(text.replace("onnxtrain.", f"{ONNXTRAIN_DOMAIN}.")))


def fused(working: ir.Model) -> ir.Model:
    fuse_gates(working)
    onnx.checker.check_model(ir.to_proto(working))
    return working


def operators(working: ir.Model) -> list[str]:
    return [node.op_type for node in working.graph]


def run(working: ir.Model, kind: str = "float") -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    feeds = {name: rng.normal(scale=3, size=(ROWS, WIDE)).astype(KINDS[kind]) for name in ("d", "f", "x")}
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(str(custom_ops_library()))
    session = onnxruntime.InferenceSession(ir.to_proto(working).SerializeToString(), options)
    return session.run(None, feeds)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("approximate", ["none", "tanh", "sigmoid"])
def test_one_node_has_the_bits_of_four(approximate: str, kind: str) -> None:
    nodes = GATE.format(approximate)
    one = fused(model(nodes, kind))
    assert operators(one) == ["GeluGradient"]
    for found, right in zip(run(one, kind), run(model(nodes, kind), kind), strict=True):
        np.testing.assert_array_equal(found, right)


@pytest.mark.parametrize("approximate", ["none", "tanh", "sigmoid"])
def test_standard_operators_give_its_values(approximate: str) -> None:
    inner = 't = Mul(d, f) p, y = onnxtrain.GeluGradient<approximate = "{}">(t, x) q = Mul(y, f) r = Mul(d, y)'
    one = fused(model(inner.format(approximate) + " a = Identity(p) b = Identity(q) c = Identity(r)"))
    assert operators(one)[0] == "GeluGradient"
    right = run(one)
    resolve_fused(one, Backward(), kernels=False, portable=None)
    assert "GeluGradient" not in operators(one)
    for found, expected in zip(run(one), right, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("order", ["b = Mul(f, y) c = Mul(y, d)", "c = Mul(y, d) b = Mul(f, y)"])
def test_the_order_of_factors_and_nodes_is_free(order: str) -> None:
    nodes = GATE.format("sigmoid").split(" b = ")[0].replace("Mul(d, f)", "Mul(f, d)")
    one = fused(model(f"{nodes} {order}"))
    assert operators(one) == ["GeluGradient"]
    for found, right in zip(run(one), run(model()), strict=True):
        np.testing.assert_array_equal(found, right)


@pytest.mark.parametrize(
    ("nodes", "factor"),
    [
        (GATE.format("sigmoid").replace("c = Mul(d, y)", "c = Add(d, y)"), f"n, {WIDE}"),
        (GATE.format("sigmoid").replace("c = Mul(d, y)", "c = Mul(t, y)"), f"n, {WIDE}"),
        (GATE.format("sigmoid").replace("c = Mul(d, y)", "c = Mul(x, y)"), f"n, {WIDE}"),
        (GATE.format("sigmoid").replace("Mul(d, f)", "Mul(d, d)"), f"n, {WIDE}"),
        (GATE.format("sigmoid"), f"{WIDE}"),
    ],
    ids=["a sum", "dy is read", "another factor", "a square", "a factor of another shape"],
)
def test_others_stay(nodes: str, factor: str) -> None:
    assert len(operators(fused(model(nodes, factor=factor)))) == 4
