"""Gelu as exporters write it becomes one node of ONNX Runtime's, unless a value inside is needed."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from onnx import helper, parser
from ways import assert_same_results, operators, passed, recomputed, trained_both_ways

from onnxtrain.lowering.rules.activations import fuse_activations

ROOT_HALF, ROOT_TWO, ROOT_2_PI = 0.7071067811865476, 1.4142135623730951, 0.7978845608028654

EXACT = {
    "as PyTorch writes it": "s = Div(x, two) e = Erf(s) a = Add(e, one) m = Mul(x, a) y = Mul(m, half)",
    "half of x first": "s = Mul(x, root) h = Mul(half, x) e = Erf(s) a = Add(one, e) y = Mul(h, a)",
    "half of the sum first": "s = Mul(root, x) e = Erf(s) a = Add(e, one) m = Mul(half, a) y = Mul(m, x)",
    "divided by 2": "s = Div(x, two) e = Erf(s) a = Add(e, one) m = Mul(x, a) y = Div(m, number)",
}
TANH = {
    "as PyTorch writes it": "c = Pow(x, three) k = Mul(c, small) i = Add(x, k) s = Mul(i, pi) t = Tanh(s) "
    "a = Add(t, one) h = Mul(x, half) y = Mul(h, a)",
    "cube of products": "q = Mul(x, x) c = Mul(q, x) k = Mul(small, c) i = Add(k, x) s = Mul(pi, i) t = Tanh(s) "
    "a = Add(one, t) m = Mul(a, x) y = Mul(half, m)",
}
CONSTANTS = (
    f"float two = {{{ROOT_TWO}}}, float root = {{{ROOT_HALF}}}, float one = {{1}}, float half = {{0.5}}, "
    f"float number = {{2}}, float three = {{3}}, float small = {{0.044715}}, float pi = {{{ROOT_2_PI}}}"
)


def model(nodes: str, more_outputs: str = "", constants: str = CONSTANTS):
    return parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 18]> f (float[2, 5] x) => (float[2, 5] y{more_outputs}) '
        f"<{constants}> {{ {nodes} }}"
    )


@pytest.mark.parametrize(
    ("nodes", "operator"),
    [*((nodes, "Gelu") for nodes in EXACT.values()), *((nodes, "FastGelu") for nodes in TANH.values())],
    ids=[*EXACT, *(f"tanh, {name}" for name in TANH)],
)
def test_pattern_becomes_one_node(nodes, operator):
    given = model(nodes)
    found = passed(given, fuse_activations)
    assert operators(found) == [operator]
    assert_same_results(given, found, {"x": np.random.default_rng(0).normal(0, 2, (2, 5)).astype(np.float32)})


@pytest.mark.parametrize(
    ("nodes", "reason"),
    [
        ("s = Div(x, two) e = Erf(s) a = Add(e, half) m = Mul(x, a) y = Mul(m, half)", "0.5 is added"),
        ("s = Div(x, number) e = Erf(s) a = Add(e, one) m = Mul(x, a) y = Mul(m, half)", "x / 2 is its argument"),
        ("s = Div(x, two) e = Erf(s) a = Add(e, one) m = Mul(x, a) y = Mul(m, number)", "doubled"),
        ("s = Div(x, two) e = Erf(s) a = Add(e, one) m = Mul(s, a) y = Mul(m, half)", "not times x"),
        ("s = Div(two, x) e = Erf(s) a = Add(e, one) m = Mul(x, a) y = Mul(m, half)", "divided by x"),
        ("s = Div(x, two) e = Erf(s) a = Add(e, one) m = Mul(x, a) n = Mul(m, half) y = Add(n, e)", "read outside"),
    ],
)
def test_others_stay(nodes, reason):
    assert "Erf" in operators(passed(model(nodes), fuse_activations)), reason


def test_output_inside_stays():
    nodes = EXACT["as PyTorch writes it"]
    assert "Erf" in operators(passed(model(nodes, ", float[2, 5] e"), fuse_activations))


def test_constant_of_higher_rank_stays():
    constants = CONSTANTS.replace("float half = {0.5}", "float[1, 1, 1] half = {0.5}")
    given = model(EXACT["as PyTorch writes it"], constants=constants)
    given.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", 1, [1, 2, 5]))
    assert "Erf" in operators(passed(given, fuse_activations))


def test_value_that_a_gradient_names_stays():
    given = model(EXACT["as PyTorch writes it"], ", float[2, 5] de")
    given.opset_import.append(helper.make_opsetid("ai.onnx.preview.training", 1))
    given.graph.node.append(
        helper.make_node("Gradient", ["e"], ["de"], domain="ai.onnx.preview.training", xs=["e"], y="y")
    )
    working = ir.from_proto(given)
    fuse_activations(working)
    assert "Erf" in [node.op_type for node in working.graph]


WEIGHTS = ", ".join(
    f"float[{rows}, 5] {name} = {{{', '.join(str(i / 7 - 1) for i in range(5 * rows))}}}"
    for name, rows in (("w", 3), ("v", 5))
)


def net(nodes):
    return parser.parse_model(
        '<ir_version: 8, opset_import: ["": 18]> f (float[n, 3] inputs) => (float[n, 5] result) '
        f"<{CONSTANTS}, {WEIGHTS}> {{ x = MatMul(inputs, w) {nodes} result = MatMul(y, v) }}"
    )


def batch():
    rng = np.random.default_rng(1)
    return tuple(rng.normal(size=(8, size)).astype(np.float32) for size in (3, 5))


@pytest.mark.parametrize("nodes", [EXACT["as PyTorch writes it"], TANH["as PyTorch writes it"]], ids=["erf", "tanh"])
def test_training_is_the_same(nodes):
    (plain_losses, plain), (losses, trainer) = trained_both_ways(net(nodes), ["w", "v"], *batch())
    np.testing.assert_allclose(losses, plain_losses, rtol=1e-5)
    np.testing.assert_allclose(trainer.parameters["w"], plain.parameters["w"], atol=1e-5)


@pytest.mark.parametrize(
    ("nodes", "pattern", "again"),
    [
        (EXACT["as PyTorch writes it"], "y", ["Gelu"]),
        (EXACT["as PyTorch writes it"], "e", []),  # values inside are never kept
        (TANH["as PyTorch writes it"], "y", ["FastGelu"]),
        (TANH["as PyTorch writes it"], "t", []),
    ],
)
def test_fused_node_is_recomputed_where_its_result_is(nodes, pattern, again):
    found = recomputed(net(nodes), pattern, ["w", "v"], *batch())
    assert [operator for operator in found if operator in ("Gelu", "FastGelu", "Erf", "Tanh")] == again
