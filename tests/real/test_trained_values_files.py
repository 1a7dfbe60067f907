"""Trainable tensors in files of other tools: Constants, function bodies, quantized operators, Keras cells."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnxtrain
from onnxtrain.errors import OptionError, TrainingHint
from sentences import warns_sentence

RNG = np.random.default_rng(0)


def constant(name: str, array: np.ndarray) -> onnx.NodeProto:
    return helper.make_node("Constant", [], [name], value=numpy_helper.from_array(array.astype(np.float32)))


def integers(name: str, *numbers: int) -> onnx.TensorProto:
    return numpy_helper.from_array(np.array(numbers, np.int64), name)


def model(nodes, tensors=(), *, shape=("N", 8), outputs=("y",), opset=18, functions=()) -> onnx.ModelProto:
    graph = helper.make_graph(
        list(nodes),
        "m",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        list(tensors),
    )
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=8, functions=functions)


def initializer(name: str, *shape: int) -> onnx.TensorProto:
    return numpy_helper.from_array(RNG.normal(size=shape).astype(np.float32), name)


def trained(proto: onnx.ModelProto) -> set[str]:
    return {row.name for row in onnxtrain.inspect(proto).initializers if row.trainable}


# As in silero_vad: nodes in the bodies of If reorder the gates from PyTorch's to ONNX's order.


def reordered(source: str, result: str) -> list[onnx.NodeProto]:
    """Reorder the gates i f g o to i o f g by Slice, Concat and Unsqueeze."""
    nodes = [
        helper.make_node("Slice", [source, f"at{start}", f"at{stop}", "axis"], [f"{result}.{start}"])
        for start, stop in ((0, 1), (1, 3), (3, 4))
    ]
    parts = [f"{result}.{start}" for start in (0, 3, 1)]
    nodes.append(helper.make_node("Concat", parts, [f"{result}.all"], axis=0))
    return [*nodes, helper.make_node("Unsqueeze", [f"{result}.all", "axis"], [result])]


def lstm_in_constants(prefix: str = "") -> list[onnx.NodeProto]:
    return [
        constant(f"{prefix}w", RNG.normal(size=(20, 8))),
        constant(f"{prefix}r", RNG.normal(size=(20, 5))),
        constant(f"{prefix}b", RNG.normal(size=(20,))),
        constant(f"{prefix}c", RNG.normal(size=(20,))),
        *reordered(f"{prefix}w", f"{prefix}W"),
        *reordered(f"{prefix}r", f"{prefix}R"),
        helper.make_node("Concat", [f"{prefix}b", f"{prefix}c"], [f"{prefix}bc"], axis=0),
        helper.make_node("Unsqueeze", [f"{prefix}bc", "axis"], [f"{prefix}B"]),
        helper.make_node("Unsqueeze", ["x", "one"], [f"{prefix}xs"]),
        helper.make_node("LSTM", [f"{prefix}{n}" for n in ("xs", "W", "R", "B")], [f"{prefix}h"], hidden_size=5),
    ]


BOUNDS = [integers("axis", 0), integers("one", 1), *(integers(f"at{n}", 5 * n) for n in (0, 1, 3, 4))]


@pytest.mark.parametrize("prefix", ["", "/decoder/rnn/Constant_output_"])
def test_lstm_weights_in_constants_behind_slices(prefix, tmp_path):
    nodes = [*lstm_in_constants(prefix), helper.make_node("Identity", [f"{prefix}h"], ["y"])]
    proto = model(nodes, BOUNDS)
    names = {f"{prefix}{name}" for name in "wrbc"}
    assert trained(proto) == names
    assert onnxtrain.inspect(proto).trainable_size == 20 * (8 + 5 + 2)
    onnx.save(proto, tmp_path / "m.onnx")
    trainer = onnxtrain.Trainer(tmp_path / "m.onnx", loss="mse", optimizer="adam(lr=0.1)")
    x = RNG.normal(size=(3, 8)).astype(np.float32)
    trainer.train_step(x, trainer.predict(x) + 1)
    trainer.save(tmp_path / "tuned.onnx")
    tuned = onnx.load(tmp_path / "tuned.onnx")
    changed = [node.output[0] for node, old in zip(tuned.graph.node, proto.graph.node, strict=True) if node != old]
    assert set(changed) == names


def test_lstm_weights_in_constants_of_branches():
    """They are beside other weights in initializers, with the names that TorchScript gives to literals."""
    branches = {
        f"{name}_branch": helper.make_graph(
            lstm_in_constants(f"{name}/Constant_output_"),
            name,
            [],
            [helper.make_tensor_value_info(f"{name}/Constant_output_h", TensorProto.FLOAT, None)],
        )
        for name in ("then", "else")
    }
    nodes = [
        helper.make_node("ReduceSum", ["x"], ["total"], keepdims=0),
        helper.make_node("Cast", ["total"], ["sign"], to=TensorProto.BOOL),
        helper.make_node("If", ["sign"], ["h"], **branches),
        helper.make_node("MatMul", ["h", "head"], ["y"]),
    ]
    proto = model(nodes, [*BOUNDS, initializer("head", 5, 2)])
    assert len(trained(proto)) == 9


# Paddle's layer normalization, as its arithmetic with Constants.

NORM = """x = ReduceMean -> mean; x mean = Sub -> d; d two = Pow -> s; s = ReduceMean -> v; v eps = Add -> e;
e = Sqrt -> r; d r = Div -> n; n scale = Mul -> m; m shift = Add -> y"""


def norm_in_constants(**names: str) -> onnx.ModelProto:
    nodes = [
        constant("two", np.array(2.0)),
        constant("eps", np.array(1e-5)),
        constant("scale", RNG.random(8) + 0.5),
        constant("shift", RNG.normal(size=8)),
    ]
    for line in NORM.replace("\n", "").split(";"):
        left, output = line.split("->")
        inputs, operator = left.split("=")
        options = {"axes": [-1]} if operator.strip() == "ReduceMean" else {}
        nodes.append(helper.make_node(operator.strip(), inputs.split(), [output.strip()], **options))
    nodes.insert(0, helper.make_node("MatMul", ["x_", "w"], ["x"]))
    proto = model(nodes, [initializer("w", 8, 8)], opset=17)
    proto.graph.input[0].name = "x_"
    for node in proto.graph.node:
        for values in (node.input, node.output):
            values[:] = [names.get(value, value) for value in values]
    return proto


@pytest.mark.parametrize("form", ["{}", "p2o.helper.constant.{}", "Constant_{}"])
def test_scales_of_a_decomposed_norm_in_constants(form):
    names = {name: form.format(number) for number, name in enumerate(("scale", "shift", "two", "eps"))}
    if form == "{}":
        names = {}
    assert trained(norm_in_constants(**names)) == {"w", names.get("scale", "scale"), names.get("shift", "shift")}


def test_operands_of_paddle_are_constants():
    """The scalars of a GELU and of a hard swish, called helper.constant.N."""
    numbers = {0: 1.4142135, 1: 1.0, 2: 0.5, 3: 3.0, 4: 6.0, 5: 0.1666667, 6: 2.0, 7: 1e-6}
    nodes = [
        helper.make_node("MatMul", ["x", "linear_0.w_0"], ["h"]),
        helper.make_node("Add", ["h", "linear_0.b_0"], ["z"]),
        helper.make_node("Div", ["z", "helper.constant.0"], ["a"]),
        helper.make_node("Erf", ["a"], ["b"]),
        helper.make_node("Add", ["b", "helper.constant.1"], ["c"]),
        helper.make_node("Mul", ["z", "c"], ["d"]),
        helper.make_node("Mul", ["d", "helper.constant.2"], ["e"]),
        helper.make_node("Add", ["e", "helper.constant.3"], ["f"]),
        helper.make_node("Mul", ["f", "helper.constant.5"], ["g"]),
        helper.make_node("Pow", ["g", "helper.constant.6"], ["i"]),
        helper.make_node("Add", ["i", "helper.constant.7"], ["j"]),
        helper.make_node("Sqrt", ["j"], ["y"]),
    ]
    tensors = [numpy_helper.from_array(np.float32(v), f"helper.constant.{n}") for n, v in numbers.items()]
    proto = model(nodes, [initializer("linear_0.w_0", 8, 8), initializer("linear_0.b_0", 8), *tensors])
    assert trained(proto) == {"linear_0.w_0", "linear_0.b_0"}


# Keras and tf2onnx: a recurrent cell as a loop; Expand fills its initial state, and a comparison reads the same zero.


def test_a_filled_initial_state_of_a_loop_stays(tmp_path):
    body = helper.make_graph(
        [
            helper.make_node("MatMul", ["state", "cell/ReadVariableOp:0"], ["u"]),
            helper.make_node("Add", ["u", "projected"], ["v"]),
            helper.make_node("Tanh", ["v"], ["next"]),
            helper.make_node("Identity", ["go"], ["on"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            helper.make_tensor_value_info("state", TensorProto.FLOAT, None),
        ],
        [
            helper.make_tensor_value_info("on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("next", TensorProto.FLOAT, None),
        ],
    )
    zero = "sequential/gru/zeros/Const:0"
    nodes = [
        helper.make_node("Equal", ["x", zero], ["equal"]),
        helper.make_node("Cast", ["equal"], ["padding"], to=TensorProto.FLOAT),
        helper.make_node("Sub", ["x", "padding"], ["masked"]),
        helper.make_node("MatMul", ["masked", "kernel/ReadVariableOp:0"], ["projected"]),
        helper.make_node("Shape", ["projected"], ["sizes"]),
        helper.make_node("Expand", [zero, "sizes"], ["zeros"]),
        helper.make_node("Loop", ["steps", "", "zeros"], ["y"], body=body),
    ]
    weights = [initializer("kernel/ReadVariableOp:0", 8, 4), initializer("cell/ReadVariableOp:0", 4, 4)]
    proto = model(nodes, [*weights, numpy_helper.from_array(np.float32(0), zero), integers("steps", 3)])
    proto.graph.initializer[-1].dims[:] = []
    assert trained(proto) == {"kernel/ReadVariableOp:0", "cell/ReadVariableOp:0"}
    hints = onnxtrain.inspect(proto).hints
    assert not [hint for hint in hints if "shared" in hint or "not trained" in hint]


# Quantized files.


def qoperator() -> onnx.ModelProto:
    scale = [
        numpy_helper.from_array(np.float32(value), name)
        for name, value in (("xs", 0.1), ("ws", 0.02), ("y_scale", 0.3))
    ]
    zero = numpy_helper.from_array(np.uint8(128), "z")
    weight = numpy_helper.from_array(RNG.integers(0, 255, (8, 4)).astype(np.uint8), "w")
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "xs", "z"], ["q"]),
        helper.make_node("QLinearMatMul", ["q", "xs", "z", "w", "ws", "z", "y_scale", "z"], ["p"]),
        helper.make_node("DequantizeLinear", ["p", "y_scale", "z"], ["y"]),
    ]
    return model(nodes, [*scale, zero, weight])


def test_a_model_of_quantized_operators_has_nothing_to_train():
    assert trained(qoperator()) == set()
    with pytest.raises(OptionError, match=r"no trainable parameter: .*32 elements .*qat=True trains them"):
        onnxtrain.Trainer(qoperator(), loss="mse")


def qdq() -> onnx.ModelProto:
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "xs", "z"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "xs", "z"], ["d"]),
        helper.make_node("DequantizeLinear", ["w", "ws", "zw"], ["v"]),
        helper.make_node("Gemm", ["d", "v", "bias"], ["h"]),
        helper.make_node("Mul", ["h", "gain"], ["y"]),
    ]
    tensors = [
        *(numpy_helper.from_array(np.float32(value), name) for name, value in (("xs", 0.1), ("ws", 0.02))),
        numpy_helper.from_array(np.uint8(128), "z"),
        numpy_helper.from_array(np.int8(0), "zw"),
        numpy_helper.from_array(RNG.integers(-127, 127, (8, 4)).astype(np.int8), "w"),
        initializer("bias", 4),
        initializer("gain", 4),
    ]
    return model(nodes, tensors)


def test_a_quantized_file_gets_a_hint():
    with pytest.warns(
        TrainingHint, match=r"The model is quantized \(1 QuantizeLinear node, 2 DequantizeLinear nodes\)"
    ):
        trainer = onnxtrain.Trainer(qdq(), loss="mse")
    assert set(trainer.parameters) == {"bias", "gain"}
    assert any("qat=True trains the quantized weights" in hint for hint in onnxtrain.inspect(qdq()).hints)


def test_quantization_aware_training_has_no_such_hint(recwarn):
    trainer = onnxtrain.Trainer(qdq(), loss="mse", qat=True)
    assert not [hint for hint in trainer.hints if "quantized" in hint or "untie" in hint]
    assert not [warning for warning in recwarn if warning.category is TrainingHint]


# Hints.


def undecided() -> onnx.ModelProto:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("Mul", ["h", "val_7"], ["y"]),
    ]
    return model(nodes, [initializer("w", 8, 8), initializer("val_7", 4, 8)], shape=(4, 8))


def test_undecided_tensors_get_a_hint():
    with warns_sentence("not_trained", names="val_7", advice='train=["*", "val_7"]'):
        trainer = onnxtrain.Trainer(undecided(), loss="mse")
    assert set(trainer.parameters) == {"w"}
    (hint,) = onnxtrain.inspect(undecided()).surprises
    assert hint in trainer.hints


def test_the_advice_of_the_hint_is_right(recwarn):
    assert set(onnxtrain.Trainer(undecided(), loss="mse", train=["*", "val_7"]).parameters) == {"w", "val_7"}
    assert set(onnxtrain.Trainer(undecided(), loss="mse", freeze="val_7").parameters) == {"w"}
    assert not [warning for warning in recwarn if warning.category is TrainingHint]


def test_inspect_counts_by_the_output_of_a_trainer():
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["y"]),
        helper.make_node("MatMul", ["x", "other"], ["z"]),
    ]
    proto = model(nodes, [initializer("w", 8, 2), initializer("other", 8, 3)], outputs=("y", "z"))
    assert trained(proto) == set(onnxtrain.Trainer(proto, loss="mse").parameters) == {"w"}
    rows = {row.name: row for row in onnxtrain.inspect(proto, output="z").initializers}
    assert (rows["w"].trainable, rows["other"].trainable) == (False, True)
