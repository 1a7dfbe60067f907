"""Small imitations of shared model files: weights outside initializers, half precision, old opsets,
outputs that are no tensors. Each trains and is given back with nothing but its weights changed, or ends in a sentence
that says why."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

import onnxtrain
from onnxtrain.errors import DataError, OptionError
from onnxtrain.training.inference.forward import evaluate
from onnxtrain.training.inference.forward import predict_all as predict

HEAD = '<ir_version: 8, opset_import: ["": 18]>\n'
X = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
Y = np.zeros((6, 3), np.float32)
WEIGHT = "float[4, 3] w = {1, -2, 3, 0.5, 0.1, 0.2, -1, 0.7, 0.3, 0.4, -0.6, 0.9}"


def text(graph: str) -> onnx.ModelProto:
    return parser.parse_model(HEAD + graph)


def trained_and_saved(model: onnx.ModelProto, inputs, targets, folder, loss: str = "mean_squared_error", **options):
    """Run all operations on a model, and check that only the data of its trained initializers changes."""
    path, saved = folder / "model.onnx", folder / "saved.onnx"
    path.write_bytes(model.SerializeToString())
    onnxtrain.inspect(path)
    data = inputs if loss.startswith("output:") else (inputs, targets)
    first = evaluate(path, data, loss=loss)["loss"]
    assert predict(path, inputs)
    trainer = onnxtrain.Trainer(path, loss=loss, optimizer=onnxtrain.Momentum(0.01), threads=1, **options)
    floating = [value.name for value in model.graph.output if value.type.tensor_type.elem_type == TensorProto.FLOAT]
    if floating:
        onnxtrain.gradient(path, y=floating[0])
    assert trainer.train_step(inputs, targets) == pytest.approx(first, rel=1e-3, abs=1e-6)
    trainer.save(saved)
    assert saved.read_bytes() == with_values(model, trainer.initializers())
    onnxruntime.InferenceSession(saved, providers=["CPUExecutionProvider"])
    return trainer


def with_values(model: onnx.ModelProto, values) -> bytes:
    """Return the bytes of a model with new data of some initializers, in the same protobuf fields."""
    expected = onnx.ModelProto()
    expected.CopyFrom(model)
    for tensor in expected.graph.initializer:
        if tensor.name in values and tensor.HasField("raw_data"):
            tensor.raw_data = values[tensor.name].tobytes()
        elif tensor.name in values:
            tensor.float_data[:] = values[tensor.name].reshape(-1).tolist()
    data = expected.SerializeToString()
    assert data != model.SerializeToString()
    return data


# Weights that are no initializers.


def in_constants(*names: str, operator: str = "MatMul") -> onnx.ModelProto:
    """Return layers with weights in Constant nodes, as some exporters and converters write them."""
    generator = np.random.default_rng(0)
    nodes, value = [], "x"
    for index, name in enumerate(names):
        weight = numpy_helper.from_array(generator.normal(size=(4, 4)).astype(np.float32))
        nodes.append(helper.make_node("Constant", [], [name], value=weight))
        nodes.append(helper.make_node(operator, [value, name], [value := f"h{index}" if name != names[-1] else "y"]))
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 4]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "constants", infos[:1], infos[1:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


IN_A_BRANCH = """f (float[N, 4] x, bool c) => (float[N, 4] y) {
    y = If (c) <then_branch = yes () => (float[N, 4] p) { v = Constant <value_floats = [1.0, 2.0, 3.0, 4.0]> ()
        p = Mul(x, v) }, else_branch = no () => (float[N, 4] q) { q = Identity(x) }> }"""
IN_A_FUNCTION = """f (float[N, 4] x) => (float[N, 4] y) { y = own.Scale(x) }
    <domain: "own", opset_import: ["": 18]>
    Scale (a) => (b) { v = Constant <value_floats = [1.0, 2.0, 3.0, 4.0]> ()  b = Mul(a, v) }"""


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (in_constants("w", operator="Mul"), {"w"}),
        (in_constants("a", "b", "c", "d", "e", operator="Mul"), {*"abcde"}),
        (text(IN_A_BRANCH), {"v"}),
        (parser.parse_model(HEAD.replace("18]", '18, "own": 1]') + IN_A_FUNCTION), {"v"}),
    ],
    ids=["one", "many", "branch", "function"],
)
def test_weights_of_a_model_without_initializers_are_trained(model, names):
    assert {*onnxtrain.Trainer(model, loss="mean_squared_error").parameters} == names


def test_what_is_not_trained_is_named_where_nothing_is():
    model = in_constants("val_3", operator="Mul")
    model.graph.initializer.append(numpy_helper.from_array(np.arange(3), "axes"))
    with pytest.raises(OptionError, match=r"'axes': int64, not a floating tensor; 'val_3': neither its use nor"):
        onnxtrain.Trainer(model, loss="mean_squared_error")


def test_constants_beside_initializers_stay_as_they_are(tmp_path):
    model = in_constants("a", "b")
    model.graph.node[3].op_type = "Mul"
    model.graph.node[2].attribute[0].t.CopyFrom(numpy_helper.from_array(np.float32([1, 2, 3, 4])))
    constant = model.graph.node[0]
    model.graph.initializer.append(numpy_helper.from_array(numpy_helper.to_array(constant.attribute[0].t), "a"))
    del model.graph.node[0]
    zeros = np.zeros((6, 4), np.float32)
    assert [*trained_and_saved(model, X, zeros, tmp_path, freeze="b").parameters] == ["a"]


# Half precision.


def half(nodes: str, shape: tuple[int, int], weights: str = WEIGHT) -> onnx.ModelProto:
    """Return layers from x [N, 4] to y [N, 3] with a weight h of half precision."""
    model = text(f"f (float[N, 4] x) => (float[N, 3] y) <{weights}> {{ {nodes} }}")
    values = np.random.default_rng(0).normal(size=shape).astype(np.float16)
    model.graph.initializer.append(numpy_helper.from_array(values, "h"))
    return model


def test_half_precision_weights_are_trained_in_float32_and_saved_in_half_precision(tmp_path):
    model = half("a = Cast <to = 10> (x)  b = MatMul(a, h)  y = Cast <to = 1> (b)", (4, 3), "int64 unused = {0}")
    trainer = onnxtrain.Trainer(model, loss="mean_squared_error", optimizer="sgd(lr=0.01)")
    assert [(name, array.dtype) for name, array in trainer.parameters.items()] == [("h", np.float32)]
    losses = [trainer.train_step(X, Y) for _ in range(5)]
    assert losses[-1] < losses[0]
    trainer.save(tmp_path / "saved.onnx")
    rounded = trainer.parameters["h"].astype(np.float16)
    assert (tmp_path / "saved.onnx").read_bytes() == with_values(model, {"h": rounded})
    (weight,) = [row for row in onnxtrain.inspect(model).initializers if row.trainable]
    assert (weight.name, weight.dtype) == ("h", "float16")


def test_single_precision_trains_behind_frozen_half_precision(tmp_path):
    model = half("a = Cast <to = 10> (x)  b = MatMul(a, h)  c = Cast <to = 1> (b)  y = MatMul(c, w)", (4, 4))
    assert [*trained_and_saved(model, X, Y, tmp_path, freeze="h").parameters] == ["w"]


def test_single_precision_trains_before_half_precision(tmp_path):
    model = half("a = MatMul(x, w)  b = Cast <to = 10> (a)  c = MatMul(b, h)  y = Cast <to = 1> (c)", (3, 3))
    assert [*trained_and_saved(model, X, Y, tmp_path, freeze="h").parameters] == ["w"]


def test_dynamically_quantized_weights_stay_and_biases_train(tmp_path):
    model = text(
        """f (float[N, 4] x) => (float[N, 3] y)
        <uint8[4, 3] q = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}, uint8 z = {0}, float s = {0.1},
         float[3] bias = {0.1, 0.2, 0.3}> {
            a, t, zero = DynamicQuantizeLinear(x)
            m = MatMulInteger(a, q, zero, z)
            c = Cast <to = 1> (m)
            d = Mul(t, s)
            e = Mul(c, d)
            y = Add(e, bias)
        }"""
    )
    assert [*trained_and_saved(model, X, Y, tmp_path).parameters] == ["bias"]


# Old files.


@pytest.mark.parametrize("opset", range(7, 13))
def test_old_opsets(opset, tmp_path):
    model = onnxtrain.examples.mlp((4, 5, 3), opset=opset)
    trained_and_saved(model, X, np.zeros(6, np.int64), tmp_path, "softmax_cross_entropy")
    convolution = onnxtrain.examples.digits_cnn()
    del convolution.opset_import[:]
    convolution.opset_import.append(helper.make_opsetid("", opset))  # its nodes mean the same from opset 7 on
    convolution.ir_version = 4
    images = np.random.default_rng(0).normal(size=(4, 1, 8, 8)).astype(np.float32)
    trained_and_saved(convolution, images, np.zeros(4, np.int64), tmp_path, "softmax_cross_entropy")


@pytest.mark.parametrize("version", [3, 4, 6])
def test_initializers_that_are_inputs_too(version, tmp_path):
    model = onnxtrain.examples.mlp((4, 5, 3), opset=9)
    model.ir_version = version
    for tensor in model.graph.initializer:
        model.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    model.graph.input.append(model.graph.input[0])  # the weights first, as Caffe2 wrote them
    del model.graph.input[0]
    trained_and_saved(model, X, np.zeros(6, np.int64), tmp_path, "softmax_cross_entropy")


# Outputs that are no tensors of numbers.

OUTPUTS: dict[str, tuple[str, str, str]] = {
    "sequence": ("seq(float[N, 1]) other", ", int64 one = {1}", "other = SplitToSequence <axis = 1> (y, one)"),
    "text": ("string[N] other", ', string[1] t = {"a"}', "n = Shape <end = 1> (x)  other = Expand(t, n)"),
    "optional": ("optional(float[N, 3]) other", "", "other = Optional(y)"),
    "logical": ("bool[N, 3] other", ", float zero = {0}", "other = Greater(y, zero)"),
    "integers": ("int64[N] other", "", "other = ArgMax <axis = 1, keepdims = 0> (y)"),
}


@pytest.mark.parametrize("kind", OUTPUTS)
@pytest.mark.parametrize("first", [False, True], ids=["behind", "before"])
def test_other_outputs_are_kept(kind, first, tmp_path):
    declared, weights, nodes = OUTPUTS[kind]
    ports = f"{declared}, float[N, 3] y" if first else f"float[N, 3] y, {declared}"
    model = text(f"f (float[N, 4] x) => ({ports}) <{WEIGHT}{weights}> {{ y = MatMul(x, w)  {nodes} }}")
    trained_and_saved(model, X, Y, tmp_path)
    found = predict(tmp_path / "saved.onnx", X)
    assert "y" in found
    assert ("other" in found) == (kind in ("text", "logical", "integers"))


# Every model goes through all operations, and only weights change.

ZOO: dict[str, tuple[Callable[[], onnx.ModelProto], tuple[int, ...]]] = {
    "perceptron": (lambda: onnxtrain.examples.mlp((4, 5, 3), "gelu", opset=20), (4,)),
    "digits": (onnxtrain.examples.digits_cnn, (1, 8, 8)),
    "lenet5": (onnxtrain.examples.lenet5, (1, 28, 28)),
    "lenet5 of Caffe": (onnxtrain.examples.lenet5_caffe, (1, 28, 28)),
    "lenet 300 100": (onnxtrain.examples.lenet_300_100, (1, 28, 28)),
    "residual network": (onnxtrain.examples.small_resnet, (3, 16, 16)),
}


@pytest.mark.parametrize("name", ZOO)
def test_zoo(name, tmp_path):
    build, shape = ZOO[name]
    inputs = np.random.default_rng(0).normal(size=(4, *shape)).astype(np.float32)
    trained_and_saved(build(), inputs, np.arange(4) % 3, tmp_path, "softmax_cross_entropy")


def test_zoo_of_text(tmp_path):
    model = onnxtrain.examples.small_transformer(20, 16, 1, 2, 4, 8)
    tokens = np.random.default_rng(0).integers(0, 20, (3, 8))
    inputs = {"input_ids": tokens, "attention_mask": np.ones_like(tokens)}
    inputs = {value.name: inputs.get(value.name, tokens) for value in model.graph.input}
    trained_and_saved(model, inputs, np.arange(3) % 4, tmp_path, "softmax_cross_entropy")


@pytest.mark.torch
def test_zoo_of_scikit_learn(tmp_path):
    pytest.importorskip("skl2onnx")
    from zoo.sklearn_models import sklearn_models

    for name, entry in sklearn_models(18).items():
        loss = "softmax_cross_entropy" if "classifier" in name else "mean_squared_error"
        targets = entry.targets if "class" in name else entry.targets.reshape(-1, 1)
        if "logistic_regression" in name:
            continue  # its weights are attributes: tests/interop/test_sklearn_linear.py
        trained_and_saved(entry.model, entry.inputs, targets, tmp_path, loss)


def test_data_of_another_model_is_refused(tmp_path):
    with pytest.raises(DataError, match="axis 1 is 5 instead of 4"):
        trained_and_saved(onnxtrain.examples.mlp((4, 5, 3)), np.zeros((6, 5), np.float32), Y, tmp_path)
