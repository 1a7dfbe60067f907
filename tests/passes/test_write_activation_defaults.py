"""Recurrent layers whose model omits parameters of activation functions."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from onnx import helper

from autodiff.recurrent_oracle import FUNCTIONS
from onnxtrain.lowering.lower import lower_graph
from onnxtrain.runtime.options import RuntimeOptions
from onnxtrain.runtime.step import create_session

CASES = [
    ("Affine", {}, (1.0, 0.0)),
    ("Affine", {"activation_beta": [0.5]}, (1.0, 0.5)),
    ("Affine", {"activation_alpha": [0.7]}, (0.7, 0.0)),
    ("ScaledTanh", {}, (1.0, 1.0)),
    ("ScaledTanh", {"activation_beta": [0.5]}, (1.0, 0.5)),
    ("ThresholdedRelu", {}, (1.0, 0.0)),
    ("HardSigmoid", {}, (0.2, 0.5)),
    ("LeakyRelu", {"activation_alpha": [0.3]}, (0.3, 0.0)),
]


def lowered(functions, attributes):
    node = helper.make_node("RNN", ["x", "w", "r"], ["y"], hidden_size=2, activations=functions, **attributes)
    directions = len(functions)
    shapes = {"x": [1, 5, 3], "w": [directions, 2, 3], "r": [directions, 2, 2]}
    inputs = [helper.make_tensor_value_info(name, 1, shape) for name, shape in shapes.items()]
    graph = helper.make_graph([node], "layer", inputs, [helper.make_tensor_value_info("y", 1, None)])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    return lower_graph(ir.from_proto(proto)), shapes


@pytest.mark.parametrize(("function", "attributes", "numbers"), CASES)
def test_what_is_left_out_is_the_default_of_the_standard(function, attributes, numbers):
    model, shapes = lowered([function], attributes)
    rng = np.random.default_rng(0)
    feeds = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    (found,) = create_session(model, RuntimeOptions(1)).run(None, feeds)
    expected = FUNCTIONS[function](feeds["x"][0] @ feeds["w"][0].T, *numbers)
    np.testing.assert_allclose(found[0, 0], expected, rtol=1e-5, atol=1e-6)


def test_numbers_go_to_the_functions_that_have_them_in_order():
    attributes = {"direction": "bidirectional", "activation_beta": [0.25]}
    model, _ = lowered(["Elu", "Affine"], attributes)
    (node,) = [node for node in model.graph if node.op_type == "RNN"]
    assert list(node.attributes["activation_alpha"].as_floats()) == [1.0, 1.0]
    assert list(node.attributes["activation_beta"].as_floats()) == [0.25]


def test_usual_functions_stay_as_they_are():
    model, _ = lowered(["Tanh"], {})
    (node,) = [node for node in model.graph if node.op_type == "RNN"]
    assert not {"activation_alpha", "activation_beta"} & set(node.attributes)
