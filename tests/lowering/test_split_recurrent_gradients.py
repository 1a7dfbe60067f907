"""The products over all steps of a recurrent layer's gradient are a node of their own."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto, helper

from onnxtrain.graph.shapes import infer_shapes
from onnxtrain.lowering import pipeline, split_recurrent_gradients
from onnxtrain.runtime.native import custom_ops_library, kernels_available

TRAINING = "ai.onnx.preview.training"
STEPS, BATCH, SIZE, HIDDEN = 4, 3, 2, 5
needs_kernels = pytest.mark.skipif(not kernels_available(), reason="the native kernels are not installed")


def lowered(operators: str, xs: str, direction: str = "forward") -> ir.Model:
    """Layers one upon the other, the sum of the sine of the last one's Y, and a Gradient node."""
    directions = 2 if direction == "bidirectional" else 1
    nodes, shapes, value, size = [], {"x": (STEPS, BATCH, SIZE)}, "x", SIZE
    for index, operator in enumerate(operators.split()):
        gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[operator] * HIDDEN
        shapes |= {f"w{index}": (directions, gates, size), f"r{index}": (directions, gates, HIDDEN)}
        layer = [value, f"w{index}", f"r{index}"]
        nodes.append(helper.make_node(operator, layer, [f"y{index}"], hidden_size=HIDDEN, direction=direction))
        nodes.append(helper.make_node("Transpose", [f"y{index}"], [f"t{index}"], perm=[0, 2, 1, 3]))
        nodes.append(helper.make_node("Reshape", [f"t{index}", "shape"], [f"z{index}"]))
        value, size = f"z{index}", directions * HIDDEN
    nodes += [
        helper.make_node("Sin", [value], ["sine"]),
        helper.make_node("ReduceSum", ["sine"], ["loss"], keepdims=0),
        helper.make_node(
            "Gradient", xs.split(), [f"d{x}" for x in xs.split()], domain=TRAINING, xs=xs.split(), y="loss"
        ),
    ]
    graph = helper.make_graph(
        nodes,
        "layers",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()],
        [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, None)
            for name in ["loss", *(f"d{x}" for x in xs.split())]
        ],
        [helper.make_tensor("shape", TensorProto.INT64, (3,), (0, 0, -1))],
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid(TRAINING, 1)]
    working = infer_shapes(ir.from_proto(helper.make_model(graph, opset_imports=opsets, ir_version=8)))
    return pipeline.lower_graph(working, kernels=True)


def run(model: ir.Model) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(str(custom_ops_library()))
    session = onnxruntime.InferenceSession(
        ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    rng = np.random.default_rng(2)
    return session.run(None, {v.name: rng.standard_normal(v.shape).astype(np.float32) for v in session.get_inputs()})


def outputs(model: ir.Model, operator: str) -> list[list[bool]]:
    return [[bool(value.name) for value in node.outputs] for node in model.graph if node.op_type == operator]


@needs_kernels
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize(
    ("operators", "xs"), [("LSTM", "w0 r0"), ("LSTM RNN", "x w0 r0 w1 r1"), ("RNN LSTM GRU", "w0 r2"), ("LSTM", "x")]
)
def test_the_same_bits(operators, xs, direction, monkeypatch):
    split = lowered(operators, xs, direction)
    monkeypatch.setattr(split_recurrent_gradients, "split_recurrent_gradients", lambda model: None)
    whole = lowered(operators, xs, direction)
    count = sum(name != "GRU" for name in operators.split())
    assert len(outputs(split, "RecurrentProductsGradient")) == count
    assert not outputs(whole, "RecurrentProductsGradient")
    for a, b in zip(run(split), run(whole), strict=True):
        np.testing.assert_array_equal(a, b)


def test_results_that_move():
    model = lowered("LSTM LSTM", "w0 r1")
    assert outputs(model, "LSTMGradient") == [[True], [True]]
    assert outputs(model, "RecurrentProductsGradient") == [[True, False, True], [False, True]]


def test_a_gru_stays():
    model = lowered("GRU", "x w0 r0")
    assert not outputs(model, "RecurrentProductsGradient")
    assert outputs(model, "GRUGradient") == [[True, False, True, True, True]]
