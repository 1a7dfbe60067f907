"""LSTM, GRU and RNN become nodes with native kernels where a gradient flows through them."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from ways import trained_both_ways

from onnxtrain.graph.shapes import infer_shapes
from onnxtrain.lowering.pipeline import lower_graph
from onnxtrain.lowering.rules.recurrent import fuse_recurrent
from onnxtrain.runtime.native import custom_ops_library, kernels_available

TRAINING = "ai.onnx.preview.training"
STEPS, BATCH, SIZE, HIDDEN = 4, 3, 2, 5
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
NAMES = ("x", "w", "r", "b", "lengths", "h0", "c0", "p")
LENGTHS = np.array([4, 1, 3], np.int32)
needs_kernels = pytest.mark.skipif(not kernels_available(), reason="the native kernels are not installed")


def arrays(operator: str, given: str, directions: int = 1) -> dict[str, np.ndarray]:
    """Return inputs of a node: x, w and r, and the optional ones whose first letter is given."""
    rng = np.random.default_rng(3)
    gates = GATES[operator] * HIDDEN
    state = (directions, BATCH, HIDDEN)
    shapes = {
        "x": (STEPS, BATCH, SIZE),
        "w": (directions, gates, SIZE),
        "r": (directions, gates, HIDDEN),
        "b": (directions, 2 * gates),
        "lengths": None,
        "h0": state,
        "c0": state,
        "p": (directions, 3 * HIDDEN),
    }
    made = {
        name: LENGTHS if shape is None else (rng.standard_normal(shape) * 0.5).astype(np.float32)
        for name, shape in shapes.items()
    }
    return {name: array for name, array in made.items() if name in ("x", "w", "r") or name[0] in given}


def model(
    operator: str,
    feeds: dict[str, np.ndarray],
    xs: str = "x w r",
    outputs: str = "y h",
    second: bool = False,
    **attributes: object,
) -> onnx.ModelProto:
    """Return a recurrent node, the sum of its weighted results, and a Gradient node by some xs.

    With ``second`` also the gradient of the sum of the squares of these gradients.
    """
    last = 6 if operator != "LSTM" else 8
    names = [name if name in feeds else "" for name in NAMES[:last]]
    while not names[-1]:
        names.pop()
    produced = [name if name != "none" else "" for name in outputs.split()]
    attributes = {"hidden_size": HIDDEN} | attributes
    nodes = [helper.make_node(operator, names, produced, name="layer", **attributes)]
    terms = []
    for index, name in enumerate(filter(None, produced)):
        nodes.append(helper.make_node("Sin", [name], [f"s{index}"]))
        nodes.append(helper.make_node("ReduceSum", [f"s{index}"], [f"t{index}"], keepdims=0))
        terms.append(f"t{index}")
    nodes.append(helper.make_node("Sum", terms, ["loss"]))
    wanted = xs.split()
    nodes.append(gradient_node(wanted, "d", "loss"))
    results = ["loss", *(f"d{x}" for x in wanted), *filter(None, produced)]
    if second:
        nodes += [helper.make_node("ReduceSumSquare", [f"d{x}"], [f"q{x}"], keepdims=0) for x in wanted]
        nodes.append(helper.make_node("Sum", [f"q{x}" for x in wanted], ["penalty"]))
        nodes.append(gradient_node(wanted, "dd", "penalty"))
        results += [f"dd{x}" for x in wanted]
    infos = [
        helper.make_tensor_value_info(name, TensorProto.INT32 if name == "lengths" else TensorProto.FLOAT, array.shape)
        for name, array in feeds.items()
    ]
    given = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in results]
    graph = helper.make_graph(nodes, "recurrent", infos, given)
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid(TRAINING, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def gradient_node(xs: list[str], prefix: str, y: str) -> onnx.NodeProto:
    return helper.make_node("Gradient", xs, [f"{prefix}{x}" for x in xs], domain=TRAINING, xs=xs, y=y)


def lowered(proto: onnx.ModelProto, *, kernels: bool) -> onnx.ModelProto:
    working = infer_shapes(ir.from_proto(proto))
    lower_graph(working, kernels=kernels)
    return ir.to_proto(working)


def run(proto: onnx.ModelProto, feeds: dict[str, np.ndarray], *, kernels: bool) -> dict[str, np.ndarray]:
    options = onnxruntime.SessionOptions()
    if kernels:
        options.register_custom_ops_library(str(custom_ops_library()))
    built = lowered(proto, kernels=kernels).SerializeToString()
    session = onnxruntime.InferenceSession(built, options, providers=["CPUExecutionProvider"])
    return dict(zip([value.name for value in session.get_outputs()], session.run(None, feeds), strict=True))


def fused(proto: onnx.ModelProto) -> list[str]:
    working = infer_shapes(ir.from_proto(proto))
    fuse_recurrent(working)
    return [node.op_type for node in working.graph if node.domain == "onnxtrain"]


def agree(proto: onnx.ModelProto, feeds: dict[str, np.ndarray], limit: float = 3e-6) -> None:
    found, wanted = (run(proto, feeds, kernels=kernels) for kernels in (True, False))
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=limit * max(1, np.abs(value).max()), err_msg=name)


FORMS = [
    ("LSTM", "", {}),
    ("LSTM", "bhcp", {"direction": "bidirectional"}),
    ("LSTM", "blp", {"direction": "reverse", "clip": 0.4}),
    ("GRU", "bl", {"direction": "bidirectional"}),
    ("GRU", "bh", {"linear_before_reset": 1}),
    ("GRU", "l", {"linear_before_reset": 1, "activations": ["Sigmoid", "LeakyRelu"], "activation_alpha": [0.3]}),
    ("RNN", "bhl", {"direction": "reverse"}),
    ("RNN", "b", {"activations": ["Affine"], "activation_alpha": [0.8], "activation_beta": [0.2]}),
]


@needs_kernels
@pytest.mark.parametrize(("operator", "given", "attributes"), FORMS)
def test_the_same_with_kernels_and_in_standard_operators(operator, given, attributes):
    feeds = arrays(operator, given, 2 if attributes.get("direction") == "bidirectional" else 1)
    xs = " ".join(name for name in feeds if name != "lengths")
    outputs = "y h c" if operator == "LSTM" else "y h"
    proto = model(operator, feeds, xs, outputs, **attributes)
    own = [node.op_type for node in lowered(proto, kernels=True).graph.node if node.domain == "onnxtrain"]
    nodes = [name for name in own if name != "Elementwise"]  # of the objective
    apart = operator != "GRU" or bool(attributes.get("linear_before_reset"))
    products = ["RecurrentProductsGradient"] * 3  # dR; dX; dW and dB
    assert nodes == [operator, f"{operator}Gradient", *(products if apart else [])]
    agree(proto, feeds)


@needs_kernels
@pytest.mark.parametrize("outputs", ["y", "none h", "none none c"])
def test_results_that_the_model_leaves_out(outputs):
    feeds = arrays("LSTM", "b")
    agree(model("LSTM", feeds, outputs=outputs), feeds)


@needs_kernels
@pytest.mark.parametrize("operator", ["LSTM", "GRU", "RNN"])
def test_second_derivatives(operator):
    """Differentiate a penalty on gradients by the inputs, as in a critic."""
    feeds = arrays(operator, "bh")
    proto = model(operator, feeds, "x w r b h0", second=True)
    assert any(node.op_type == "Scan" for node in lowered(proto, kernels=True).graph.node)
    agree(proto, feeds, 1e-5)


def test_gradients_that_nobody_asks_for_are_left_out():
    nodes = lowered(model("LSTM", arrays("LSTM", "bh"), "w r b"), kernels=True).graph.node
    (gradient,) = [node for node in nodes if node.op_type == "LSTMGradient"]
    of_r, of_w = [node for node in nodes if node.op_type == "RecurrentProductsGradient"]
    assert [bool(name) for name in gradient.output] == [True]  # dgates
    assert [bool(name) for name in of_r.output] == [False, False, True]  # dX, dW, dR, dB
    assert [bool(name) for name in of_w.output] == [False, True, False, True]
    nothing = [name for name in (*gradient.input, *of_r.input, *of_w.input) if name == ""]
    assert not nothing  # older runtimes end the process where an input is left out between others


def test_node_and_results_keep_their_names():
    working = infer_shapes(ir.from_proto(model("GRU", arrays("GRU", "b"))))
    fuse_recurrent(working)
    (node,) = [node for node in working.graph if node.op_type == "GRU"]
    assert (node.domain, node.name) == ("onnxtrain", "layer")
    assert [output.name for output in node.outputs[:2]] == ["y", "h"]
    assert [value.name for value in working.graph.outputs][-2:] == ["y", "h"]


def test_sizes_that_are_not_known():
    proto = model("LSTM", arrays("LSTM", ""))
    for info in proto.graph.input:
        if info.name == "x":
            for axis, name in zip(info.type.tensor_type.shape.dim, ("t", "n", ""), strict=True):
                if name:
                    axis.dim_param = name
    assert fused(proto) == ["LSTM"]
    shapes = {v.name: v.type for v in onnx.shape_inference.infer_shapes(lowered(proto, kernels=True)).graph.output}
    assert "dw" in shapes


def without_attribute(proto: onnx.ModelProto) -> onnx.ModelProto:
    del proto.graph.node[0].attribute[:]
    return proto


def test_nodes_that_stay():
    feeds = arrays("LSTM", "b")
    assert fused(model("LSTM", feeds)) == ["LSTM"]
    assert fused(without_attribute(model("LSTM", feeds))) == ["LSTM"]  # the shape of r gives the size
    assert not fused(model("LSTM", feeds, layout=1))
    no_gradient = model("LSTM", feeds)
    no_gradient.graph.node.pop()
    for _ in range(3):
        no_gradient.graph.output.pop(1)
    assert not fused(no_gradient)
    half = model("LSTM", feeds)
    for info in half.graph.input:
        info.type.tensor_type.elem_type = TensorProto.FLOAT16
    assert not fused(half)
    unknown = without_attribute(model("LSTM", feeds))
    for info in unknown.graph.input:
        info.type.tensor_type.ClearField("shape")
    assert not fused(unknown)


@needs_kernels
@pytest.mark.parametrize("operator", ["LSTM", "GRU", "RNN"])
def test_training_is_the_same(operator):
    """Train two layers, the second over the results of the first."""
    gates = GATES[operator] * HIDDEN
    rng = np.random.default_rng(0)
    shapes = {"w1": (1, gates, SIZE), "r1": (1, gates, HIDDEN), "w2": (1, gates, HIDDEN), "r2": (1, gates, HIDDEN)}
    shapes |= {"b1": (1, 2 * gates), "b2": (1, 2 * gates)}
    constants = [
        numpy_helper.from_array((rng.standard_normal(shape) * 0.4).astype(np.float32), name)
        for name, shape in shapes.items()
    ]
    constants.append(numpy_helper.from_array(np.array([1]), "axis"))
    nodes = [
        helper.make_node("Transpose", ["x"], ["steps"], perm=[1, 0, 2]),
        helper.make_node(operator, ["steps", "w1", "r1", "b1"], ["first"], hidden_size=HIDDEN),
        helper.make_node("Squeeze", ["first", "axis"], ["between"]),
        helper.make_node(operator, ["between", "w2", "r2", "b2"], ["", "last"], hidden_size=HIDDEN),
        helper.make_node("Transpose", ["last"], ["turned"], perm=[1, 0, 2]),
        helper.make_node("Flatten", ["turned"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "two",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", STEPS, SIZE])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", HIDDEN])],
        constants,
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    inputs = rng.standard_normal((7, STEPS, SIZE)).astype(np.float32)
    targets = rng.standard_normal((7, HIDDEN)).astype(np.float32)
    (plain, _), (kernels, trainer) = trained_both_ways(proto, sorted(shapes), inputs, targets)
    np.testing.assert_allclose(kernels, plain, rtol=1e-5)
    assert kernels[-1] < kernels[0]
    assert trainer.predict(inputs).shape == (7, HIDDEN)


@needs_kernels
@pytest.mark.parametrize("made", ["initializer", "ConstantOfShape"])
@pytest.mark.parametrize("operator", ["LSTM", "GRU", "RNN"])
def test_first_states_of_zeros_are_left_out(operator, made):
    proto = with_first_states(operator, made, 0)
    assert left_out(proto) == {"h0", "c0"} if operator == "LSTM" else {"h0"}
    agree(proto, arrays(operator, "b"))


@pytest.mark.parametrize("made", ["initializer", "ConstantOfShape"])
def test_other_first_states_stay(made):
    assert left_out(with_first_states("LSTM", made, 0.5)) == set()
    trained = model("LSTM", arrays("LSTM", "bhc"), "w r h0")
    assert left_out(trained) == set()
    name = "h0"
    trained.graph.initializer.append(numpy_helper.from_array(np.zeros((1, BATCH, HIDDEN), np.float32), name))
    assert left_out(trained) == set()


def test_first_states_of_another_size_stay_for_the_kernel_to_refuse():
    proto = with_first_states("LSTM", "initializer", 0)
    (cells,) = [tensor for tensor in proto.graph.initializer if tensor.name == "c0"]
    cells.CopyFrom(numpy_helper.from_array(np.zeros((1, BATCH, HIDDEN + 3), np.float32), "c0"))
    assert left_out(proto) == {"h0"}


def with_first_states(operator: str, made: str, number: float) -> onnx.ModelProto:
    """Return a model whose first states are constants of one number."""
    feeds = arrays(operator, "bhc" if operator == "LSTM" else "bh")
    proto = model(operator, feeds)
    for name in ("h0", "c0") if operator == "LSTM" else ("h0",):
        proto.graph.input.remove(next(value for value in proto.graph.input if value.name == name))
        fill = np.full((1,), number, np.float32)
        if made == "initializer":
            proto.graph.initializer.append(numpy_helper.from_array(np.full(feeds[name].shape, *fill), name))
            continue
        shape = numpy_helper.from_array(np.array(feeds[name].shape), f"{name} shape")
        proto.graph.initializer.append(shape)
        value = numpy_helper.from_array(fill)
        proto.graph.node.insert(0, helper.make_node("ConstantOfShape", [shape.name], [name], value=value))
    return proto


def left_out(proto: onnx.ModelProto) -> set[str]:
    """Return the first states that the fused node lacks."""
    working = infer_shapes(ir.from_proto(proto))
    fuse_recurrent(working)
    (node,) = [node for node in working.graph if node.domain == "onnxtrain"]
    return {
        name
        for name, value in zip(("h0", "c0"), node.inputs[5:7], strict=False)
        if value is not None and tuple(value.shape or ()) == (0,)
    }
