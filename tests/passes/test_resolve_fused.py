"""Fused operators: kept where the kernels are loaded, written in standard operators elsewhere."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import parser

import onnxtrain
from onnxtrain.autodiff.fused import fused_operators
from onnxtrain.autodiff.registry import find_registered_body
from onnxtrain.graph.domains import ONNXTRAIN_DOMAIN
from onnxtrain.graph.shapes import infer_shapes
from onnxtrain.lowering.build_gradients import Derivative
from onnxtrain.lowering.pipeline import lower_graph
from onnxtrain.runtime.native import kernels_available

RELU = """
<ir_version: 8, opset_import: ["": 18]>
f ({type}[2, 3] x) => ({type} y) {{ a = Relu(x) y = ReduceSum<keepdims = 0>(a) }}
"""

IN_A_LOOP = """
<ir_version: 8, opset_import: ["": 18]>
f (float[2, 3] x) => (float y) <int64 n = {3}, bool on = {1}> {
  last = Loop (n, on, x) <body = step (int64 i, bool go, float[2, 3] before) => (bool more, float[2, 3] after) {
    more = Identity(go)
    after = Relu(before)
  }>
  y = ReduceSum<keepdims = 0>(last)
}
"""


def operators(model: onnx.ModelProto) -> set[tuple[str, str]]:
    return {(node.domain, node.op_type) for node in ir.from_proto(model).graph.all_nodes()}


def gradient(text: str, *, kernels: bool) -> onnx.ModelProto:
    model = infer_shapes(ir.from_proto(parser.parse_model(text)))
    graph = model.graph
    return ir.to_proto(lower_graph(model, kernels=kernels, derivative=Derivative(graph.outputs[0], [graph.inputs[0]])))


def test_node_is_kept_for_kernels():
    model = gradient(RELU.format(type="float"), kernels=True)
    assert (ONNXTRAIN_DOMAIN, "ReluGradient") in operators(model)
    assert {entry.domain: entry.version for entry in model.opset_import}[ONNXTRAIN_DOMAIN] == 1


@pytest.mark.parametrize("text", [RELU.format(type="float"), IN_A_LOOP], ids=["main graph", "body"])
def test_body_takes_its_place_without_kernels(text):
    model = gradient(text, kernels=False)
    assert all(domain != ONNXTRAIN_DOMAIN for domain, _ in operators(model))
    assert ONNXTRAIN_DOMAIN not in {entry.domain for entry in model.opset_import}
    onnx.checker.check_model(model, full_check=True)


def test_node_in_a_body_is_kept_for_kernels():
    assert (ONNXTRAIN_DOMAIN, "ReluGradient") in operators(gradient(IN_A_LOOP, kernels=True))


def test_types_without_a_kernel_get_the_body():
    assert all(
        domain != ONNXTRAIN_DOMAIN for domain, _ in operators(gradient(RELU.format(type="float16"), kernels=True))
    )


def test_gradients_for_users_are_standard_operators():
    model = onnxtrain.gradient(parser.parse_model(RELU.format(type="float")), xs="x")
    assert all(domain != ONNXTRAIN_DOMAIN for domain, _ in operators(model))


def test_second_derivative_goes_through_the_body():
    first = gradient(
        """<ir_version: 8, opset_import: ["": 18]>
        f (float[3] x) => (float y) { s = Mul(x, x) r = Relu(s) y = ReduceSum<keepdims = 0>(r) }""",
        kernels=True,
    )
    assert (ONNXTRAIN_DOMAIN, "ReluGradient") in operators(first)
    model = infer_shapes(ir.from_proto(onnx.compose.add_prefix(first, "first_", rename_inputs=False)))
    lower_graph(model, derivative=Derivative(model.graph.outputs[1], [model.graph.inputs[0]]))
    assert all(domain != ONNXTRAIN_DOMAIN for domain, _ in operators(ir.to_proto(model)))


@pytest.mark.skipif(not kernels_available(), reason="the native kernels are not installed")
def test_step_is_the_same_with_kernels_and_without():
    model = onnxtrain.examples.mlp((6, 16, 4))
    x, y = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32), np.arange(8) % 4
    losses = []
    for kernels in (False, True):
        options = onnxtrain.RuntimeOptions(kernels=kernels)
        trainer = onnxtrain.Trainer(model, loss="softmax_cross_entropy", runtime=options)
        losses.append([trainer.train_step(x, y) for _ in range(5)])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)


def test_every_fused_operator_has_a_body_and_a_line_in_the_documentation():
    page = (Path(__file__).parents[2] / "docs" / "fused.md").read_text()
    listed = set(re.findall(r"^\| `(\w+)` \|", page, flags=re.MULTILINE))
    bodies = {operator.name: find_registered_body(operator.name, ONNXTRAIN_DOMAIN) for operator in fused_operators()}
    assert all(body is not None for body in bodies.values())
    # Examples in the documentation register operators, too, where they run in the same process.
    own = {name for name, body in bodies.items() if body is not None and body.__module__.startswith("onnxtrain.")}
    assert own == listed


FROZEN = """
<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]>
f (float[1, 3, 4] x, int64[1, 3] at, float[5, 2] c, float[5, 2] s) => (float[1, 3, 4] y) {{
  t = com.microsoft.RotaryEmbedding<is_packed_batching: int = {packed}>(x, at, c, s)
  y = Mul(t, gain)
}}
"""


@pytest.mark.parametrize("packed", [0, 1])
def test_a_frozen_node_beyond_its_body_stays_as_the_model_has_it(packed):
    made = parser.parse_model(FROZEN.format(packed=packed))
    made.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(4, np.float32), "gain"))
    model = infer_shapes(ir.from_proto(made))
    derivative = Derivative(model.graph.outputs[0], [model.graph.initializers["gain"]])
    left = operators(ir.to_proto(lower_graph(model, derivative=derivative)))
    assert (("com.microsoft", "RotaryEmbedding") in left) == bool(packed)
    assert (("", "Concat") in left) == (not packed), "nothing of a body that was not written is left"
