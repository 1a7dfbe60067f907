"""Readers of the last step of a recurrent layer read its last state instead."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxtrain.graph.shapes import infer_shapes
from onnxtrain.lowering.pipeline import lower_graph
from onnxtrain.lowering.rules.recurrent import read_last_state
from onnxtrain.runtime.native import custom_ops_library, kernels_available

TRAINING = "ai.onnx.preview.training"
STEPS, BATCH, SIZE, HIDDEN = 4, 3, 2, 5
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
needs_kernels = pytest.mark.skipif(not kernels_available(), reason="the native kernels are not installed")


def model(
    operator: str = "LSTM",
    *,
    squeezed: bool = True,
    perm: tuple[int, ...] | None = None,
    axis: int = 0,
    index: int | list[int] = -1,
    lengths: bool = False,
    outputs: tuple[str, ...] = ("y",),
    xs: tuple[str, ...] = ("w", "r"),
    results: tuple[str, ...] = (),
    **attributes: object,
) -> onnx.ModelProto:
    """Return a layer, a step of it behind Squeeze and Transpose, a loss of that, and a Gradient node."""
    directions = 2 if attributes.get("direction") == "bidirectional" else 1
    inputs = ["x", "w", "r", "", "lengths"] if lengths else ["x", "w", "r"]
    nodes = [helper.make_node(operator, inputs, list(outputs), hidden_size=HIDDEN, **attributes)]
    value, arrays = "y", {"index": np.array(index), "one": np.array([1])}
    if squeezed:
        nodes.append(helper.make_node("Squeeze", [value, "one"], ["squeezed"]))
        value = "squeezed"
    if perm is not None:
        nodes.append(helper.make_node("Transpose", [value], ["transposed"], perm=perm))
        value = "transposed"
    nodes += [
        helper.make_node("Gather", [value, "index"], ["step"], axis=axis),
        helper.make_node("Sin", ["step"], ["sine"]),
        helper.make_node("ReduceSum", ["sine"], ["loss"], keepdims=0),
        helper.make_node("Gradient", list(xs), [f"d{x}" for x in xs], domain=TRAINING, xs=xs, y="loss"),
    ]
    shapes = {
        "x": (STEPS, BATCH, SIZE),
        "w": (directions, GATES[operator] * HIDDEN, SIZE),
        "r": (directions, GATES[operator] * HIDDEN, HIDDEN),
    }
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()]
    if lengths:
        infos.append(helper.make_tensor_value_info("lengths", TensorProto.INT32, (BATCH,)))
    wanted = ["loss", "step", *(f"d{x}" for x in xs), *results]
    graph = helper.make_graph(
        nodes,
        "last",
        infos,
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in wanted],
        [numpy_helper.from_array(array, name) for name, array in arrays.items()],
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid(TRAINING, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def rewritten(proto: onnx.ModelProto) -> onnx.ModelProto:
    working = infer_shapes(ir.from_proto(proto))
    read_last_state(working)
    made = ir.to_proto(working)
    onnx.checker.check_model(
        helper.make_model(
            helper.make_graph(
                [node for node in made.graph.node if node.op_type != "Gradient"],
                "forward",
                made.graph.input,
                [value for value in made.graph.output if not value.name.startswith("d")],
                made.graph.initializer,
            ),
            opset_imports=[helper.make_opsetid("", 18)],
            ir_version=8,
        ),
        full_check=True,
    )
    return made


def is_read(proto: onnx.ModelProto) -> bool:
    return "Gather" not in {node.op_type for node in rewritten(proto).graph.node}


def run(proto: onnx.ModelProto, *, kernels: bool) -> dict[str, np.ndarray]:
    working = infer_shapes(ir.from_proto(proto))
    lower_graph(working, kernels=kernels)
    options = onnxruntime.SessionOptions()
    if kernels:
        options.register_custom_ops_library(str(custom_ops_library()))
    built = ir.to_proto(working).SerializeToString()
    session = onnxruntime.InferenceSession(built, options, providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(2)
    feeds = {v.name: rng.standard_normal(v.shape).astype(np.float32) for v in session.get_inputs()}
    return dict(zip([value.name for value in session.get_outputs()], session.run(None, feeds), strict=True))


READ = [
    {},
    {"operator": "GRU", "index": STEPS - 1},
    {"operator": "RNN", "outputs": ("y", "h")},
    {"squeezed": False},
    {"perm": (1, 0, 2), "axis": 1},
    {"perm": (1, 2, 0), "axis": -1, "outputs": ("y", "", "c")},
    {"squeezed": False, "perm": (2, 0, 1, 3), "axis": 1},
    {"perm": (2, 1, 0), "axis": 2},
    {"direction": "reverse", "index": 0},
    {"direction": "reverse", "index": -STEPS},
    {"results": ("y",)},
]


@needs_kernels
@pytest.mark.parametrize("case", READ, ids=str)
def test_a_step_that_is_the_last_state(case):
    proto = model(**case)
    assert is_read(proto)
    found, wanted = (run(proto, kernels=kernels) for kernels in (True, False))
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=3e-6, err_msg=name)


@pytest.mark.parametrize(
    "case",
    [
        {"index": 0},
        {"index": STEPS - 2},
        {"index": [-1]},
        {"direction": "reverse", "index": -1},
        {"direction": "bidirectional", "squeezed": False},
        {"lengths": True},
        {"perm": (1, 0, 2), "axis": 0},
        {"xs": ("w", "y")},
        {"xs": ("w", "squeezed")},
        {"xs": ("w", "h"), "outputs": ("y", "h"), "results": ("h",)},
    ],
    ids=str,
)
def test_what_stays(case):
    assert not is_read(model(**case))


def test_an_index_that_is_computed():
    proto = model()
    del proto.graph.initializer[0]
    proto.graph.input.append(helper.make_tensor_value_info("index", TensorProto.INT64, ()))
    assert not is_read(proto)


def test_the_gradient_of_all_steps_is_not_made():
    working = infer_shapes(ir.from_proto(model()))
    lower_graph(working, kernels=True)
    assert not {"Pad", "Gather", "Scatter"} & {node.op_type for node in working.graph}
    (gradient,) = [node for node in working.graph if node.op_type == "LSTMGradient"]
    shapes = [tuple(value.shape) for value in gradient.inputs[-3:]]
    assert shapes == [(0,), (1, BATCH, HIDDEN), (0,)]
