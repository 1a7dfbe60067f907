"""Operators without a gradient are listed, with a reason, and pass none on."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import defs, parser
from onnx.reference import ReferenceEvaluator

from onnxtrain.autodiff import registry
from onnxtrain.autodiff.rules.no_gradient import STEPS
from onnxtrain.runtime.testing import projected_gradient

LISTED = [entry for entry in registry.entries() if entry.function is None and not entry.domain]


def test_listed_operators_are_standard_ones_with_a_reason() -> None:
    known = {schema.name for schema in defs.get_all_schemas_with_history() if not schema.domain}
    assert {entry.operator for entry in LISTED} <= known
    assert all(len(entry.reason) > 10 for entry in LISTED)


def test_operators_that_round_are_among_them() -> None:
    assert set(STEPS) <= {entry.operator for entry in LISTED}


@pytest.mark.parametrize("operator", ["Ceil", "Floor", "Round", "Sign", "Hardmax", "RandomNormalLike"])
def test_no_gradient_flows_through(operator: str) -> None:
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 22]> agraph (double[2, 3] x) => (double[2, 3] y)'
        f"{{ step = {operator}(x) z = Mul(step, x) y = Add(z, step) }}"
    )
    model.graph.output.add().CopyFrom(model.graph.output[0])
    model.graph.output[1].name = "step"
    built = projected_gradient(model, ["x"], {"y": np.ones((2, 3))})
    x = np.array([[0.4, -1.6, 2.5], [1.2, 0.1, -0.7]])
    results = dict(
        zip((o.name for o in built.graph.output), ReferenceEvaluator(built).run(None, {"x": x}), strict=True)
    )
    np.testing.assert_array_equal(results["x_grad"], results["step"])


def test_quantized_integers_have_none_but_the_scale_has() -> None:
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> agraph (float[3] x, float s) => (float[3] y)'
        "<int8 zero = {0}> { q = QuantizeLinear(x, s, zero) y = DequantizeLinear(q, s, zero) }"
    )
    built = projected_gradient(model, ["x", "s"], {"y": np.ones(3, np.float32)})
    feeds = {"x": np.array([0.2, 0.5, -0.6], np.float32), "s": np.array(0.1, np.float32)}
    _, dx, ds = ReferenceEvaluator(built).run(None, feeds)
    np.testing.assert_array_equal(dx, 0)
    assert ds == 2 + 5 - 6
