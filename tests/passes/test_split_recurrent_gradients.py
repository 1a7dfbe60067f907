"""The matmuls over all steps of a recurrent layer's gradient become separate nodes."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto, helper

from onnxtrain.graph.shapes import infer_shapes
from onnxtrain.lowering import pipeline
from onnxtrain.runtime.native import custom_ops_library, kernels_available

TRAINING = "ai.onnx.preview.training"
STEPS, BATCH, SIZE, HIDDEN = 4, 3, 2, 5
needs_kernels = pytest.mark.skipif(not kernels_available(), reason="the native kernels are not installed")


def lowered(operators: str, xs: str, direction: str = "forward", *, batch_first: bool = False) -> ir.Model:
    """Return stacked layers, the sum of the sine of the last one's Y, and a Gradient node.

    GRU+ is one with linear_before_reset.
    """
    directions = 2 if direction == "bidirectional" else 1
    nodes, shapes, value, size = [], {"x": (STEPS, BATCH, SIZE)}, "x", SIZE
    if batch_first:
        shapes, value = {"x": (BATCH, STEPS, SIZE)}, "turned"
        nodes.append(helper.make_node("Transpose", ["x"], ["turned"], perm=[1, 0, 2]))
    for index, name in enumerate(operators.split()):
        operator, more = name.rstrip("+"), {"linear_before_reset": 1} if name == "GRU+" else {}
        gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[operator] * HIDDEN
        shapes |= {f"w{index}": (directions, gates, size), f"r{index}": (directions, gates, HIDDEN)}
        layer = [value, f"w{index}", f"r{index}"]
        nodes.append(helper.make_node(operator, layer, [f"y{index}"], hidden_size=HIDDEN, direction=direction, **more))
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
    ("operators", "xs"),
    [
        ("LSTM", "w0 r0"),
        ("LSTM RNN", "x w0 r0 w1 r1"),
        ("RNN LSTM GRU", "w0 r2"),
        ("GRU+ LSTM", "w0 r0"),
        ("GRU+", "x w0 r0"),
        ("LSTM", "x"),
    ],
)
def test_the_same_bits(operators, xs, direction, monkeypatch):
    split = lowered(operators, xs, direction)
    monkeypatch.setattr(pipeline, "split_recurrent_gradients", lambda model: None)
    whole = lowered(operators, xs, direction)
    layers = [name != "GRU" for name in operators.split()]
    gradients = sum(
        len(set(xs.split()) & {f"w{i}", f"r{i}", "x" if i == 0 else ""}) for i in range(len(layers)) if layers[i]
    )
    to_layers_below = sum(layers[1:])
    assert len(outputs(split, "RecurrentProductsGradient")) == gradients + to_layers_below
    assert not outputs(whole, "RecurrentProductsGradient")
    for a, b in zip(run(split), run(whole), strict=True):
        np.testing.assert_array_equal(a, b)


def test_results_that_move():
    model = lowered("LSTM LSTM", "w0 r1")
    assert outputs(model, "LSTMGradient") == [[True], [True]]
    # dR and dX of the second layer, dW of the first.
    assert outputs(model, "RecurrentProductsGradient") == [[False, False, True], [True], [False, True]]


def test_what_a_node_does_not_read_it_does_not_hold():
    nodes = [node for node in lowered("LSTM LSTM", "w1 r1 w0").graph if node.op_type == "RecurrentProductsGradient"]
    names = ["X", "W", "sequence_lens", "initial_h", "Y", "dgates"]
    read = [[name for name, x in zip(names, node.inputs, strict=True) if x.shape != (0,)] for node in nodes]
    assert read == [["Y", "dgates"], ["W", "dgates"], ["X", "dgates"], ["X", "dgates"]]


def test_a_gru_stays():
    model = lowered("GRU", "x w0 r0")
    assert not outputs(model, "RecurrentProductsGradient")
    assert outputs(model, "GRUGradient") == [[True, False, True, True, True]]


@needs_kernels
@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
def test_x_that_is_turned_is_turned_again(direction, monkeypatch):
    """Transpose a batch of sequences again instead of keeping X from the forward pass."""

    def turned() -> ir.Model:
        return lowered("LSTM", "w0 r0", direction, batch_first=True)

    split = turned()
    (of_w,) = [node for node in split.graph if node.op_type == "RecurrentProductsGradient" and len(node.outputs) == 2]
    assert of_w.inputs[0] is split.graph.inputs[0]
    monkeypatch.setattr(pipeline, "split_recurrent_gradients", lambda model: None)
    for a, b in zip(run(split), run(turned()), strict=True):
        np.testing.assert_array_equal(a, b)
