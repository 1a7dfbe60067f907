"""Convolutions of a training step: selection for the native kernels, and results."""

from __future__ import annotations

import contextlib

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import helper, numpy_helper, parser

import onnxtrain
from onnxtrain.graph.shapes import infer_shapes
from onnxtrain.lowering.rules.kernels import use_kernels
from onnxtrain.runtime.native import custom_ops_library


def model(weight: str, attributes: str = "", x: str = "2, 8, 9, 9", bias: bool = False, dtype: str = "float"):
    outputs = weight.split(",")[0]
    b, inputs = (f", {dtype}[{outputs}] b", "x, w, b") if bias else ("", "x, w")
    rank = weight.count(",") + 1
    shape = ", ".join("ABCDEF"[:rank])
    return parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 18]> f ({dtype}[{x}] x, {dtype}[{weight}] w{b}) => ({dtype}[{shape}] y) '
        f"{{ y = Conv{attributes}({inputs}) }}"
    )


def with_kernels(proto):
    working = ir.from_proto(proto)
    with contextlib.suppress(Exception):  # attributes that cannot be
        working = infer_shapes(working)
    use_kernels(working)
    return ir.to_proto(working)


def domains(proto):
    return [node.domain for node in proto.graph.node if node.op_type == "Conv"]


def run(proto):
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(str(custom_ops_library()))
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(0)
    types = {"tensor(float)": np.float32, "tensor(double)": np.float64}
    feeds = {value.name: rng.standard_normal(value.shape).astype(types[value.type]) for value in session.get_inputs()}
    return session.run(None, feeds)[0]


@pytest.mark.parametrize(
    "given",
    [
        model("12, 8, 3, 3"),
        model("12, 8, 3, 3", "<pads = [1, 0, 2, 1], strides = [2, 1], dilations = [1, 2]>", bias=True),
        model("12, 2, 3, 3", "<group = 4, kernel_shape = [3, 3]>", bias=True),
        model("8, 1, 3, 3", "<group = 8, pads = [1, 1, 1, 1]>"),
        model("12, 8, 1, 1"),
        model("12, 8, 3, 3", '<auto_pad = "VALID">'),
        model("12, 8, 9", x="2, 8, 30"),
        model("6, 8, 2, 3, 2", x="2, 8, 4, 5, 6"),
    ],
)
def test_the_kernel_computes_the_same(given):
    found = with_kernels(given)
    assert domains(found) == ["onnxtrain"]
    np.testing.assert_allclose(run(found), run(given), atol=1e-5)


@pytest.mark.parametrize("stride", [2**31, 2**60, 2**62, 2**63 - 1])
@pytest.mark.parametrize(
    ("weight", "group"), [("6, 4, 3, 3", 2), ("8, 1, 3, 3", 8), ("6, 8, 3, 3", 1), ("6, 8, 1, 1", 1)]
)
def test_a_stride_beyond_the_image(weight, group, stride):
    given = model(weight, f"<strides = [2, {stride}], group = {group}, pads = [1, 1, 1, 1]>", bias=True)
    found = with_kernels(given)
    assert domains(found) == ["onnxtrain"]
    np.testing.assert_allclose(run(found), run(given), atol=1e-5)


def test_training_with_a_stride_beyond_the_image():
    proto = trained_model()
    for name, value in (("strides", [2, 2**60]), ("group", 2)):
        proto.graph.node[0].attribute.append(helper.make_attribute(name, value))
    weight = np.random.default_rng(1).standard_normal((12, 4, 3, 3)).astype(np.float32)
    proto.graph.initializer[0].CopyFrom(numpy_helper.from_array(weight, proto.graph.initializer[0].name))
    rng = np.random.default_rng(2)
    inputs, target = (rng.standard_normal(shape).astype(np.float32) for shape in ((2, 8, 9, 9), (2, 12, 5, 1)))
    losses = []
    for kernels in (True, False):
        options = onnxtrain.RuntimeOptions(kernels=kernels)
        trainer = onnxtrain.Trainer(proto, loss="mean_squared_error", optimizer=onnxtrain.Adam(), runtime=options)
        losses.append([trainer.train_step(inputs, target) for _ in range(3)])
    np.testing.assert_allclose(*losses, rtol=1e-5)
    assert losses[0][2] < losses[0][0]


def test_the_kernel_knows_double_too():  # ONNX Runtime does not
    found = run(with_kernels(model("12, 8, 3, 3", bias=True, dtype="double")))
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, run(model("12, 8, 3, 3", bias=True)), atol=1e-5)


@pytest.mark.parametrize(
    "given",
    [
        model("12, 3, 3, 3", x="2, 3, 9, 9"),  # few products
        model("12, 8, 3, 3", '<auto_pad = "SAME_UPPER">'),
        model("M, 8, 3, 3"),
        model("12, 8, 3, 3", dtype="float16"),
        model("2, 8, 2, 2, 2, 2", x="1, 8, 3, 3, 3, 3"),
        model("12, 8, 3, 3", f"<pads = [{2**30 + 1}, 1, 1, 1]>"),
        model("12, 8, 3, 3", f"<dilations = [1, {2**62}], pads = [1, 1, 1, {2**62}]>"),
        model("12, 8, 2, 2", f"<dilations = [1, {2**29}], pads = [1, 1, 1, {2**29}]>"),
        model("12, 8, 3, 3", "<strides = [0, 1]>"),
        model("12, 8, 3, 3", "<dilations = [-1, 1]>"),
        model("12, 8, 3, 3", "<pads = [0, -1, 0, 0]>"),
        model("12, 8, 3, 3", "<strides = [1]>"),
        model("12, 8, 3, 3", "<group = 0>"),
    ],
)
def test_others_stay_standard(given):
    found = with_kernels(given)
    assert domains(found) == [""]
    assert [opset.domain for opset in found.opset_import] == [""]


def transposed(weight: str, attributes: str = "", bias: bool = False, x: str = "N, 8, 9, 10", dtype: str = "float"):
    given = model(weight, attributes, x, bias, dtype)
    given.graph.node[0].op_type = "ConvTranspose"
    if bias:
        group = next((a.i for a in given.graph.node[0].attribute if a.name == "group"), 1)
        given.graph.input[2].type.tensor_type.shape.dim[0].dim_value = group * int(weight.split(",")[1])
    return given


@pytest.mark.parametrize(
    "given",
    [
        transposed("8, 12, 3, 3"),
        transposed("8, 12, 4, 4", "<strides = [2, 2], pads = [1, 1, 1, 1]>"),
        transposed("8, 12, 2, 2", "<strides = [2, 2]>", bias=True),
        transposed("8, 5, 3, 3", "<strides = [2, 3], pads = [1, 0, 1, 2], output_padding = [1, 2]>", bias=True),
        transposed("8, 3, 3, 2", "<group = 4, dilations = [1, 2]>", bias=True),
        transposed("8, 1, 3, 3", "<group = 8, strides = [2, 2], pads = [1, 1, 1, 1]>", x="2, 8, 9, 10"),
        transposed("8, 4, 5", x="N, 8, 30", bias=True),
        transposed("8, 3, 3, 4", "<strides = [2, 3], pads = [1, 0, 0, 2], output_padding = [0, 2]>", x="N, 8, H, W"),
    ],
)
def test_a_transposed_convolution_is_an_input_gradient(given):
    found = with_kernels(given)
    assert [node.op_type for node in found.graph.node if node.domain] == ["ConvInputGradient"]
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(str(custom_ops_library()))
    rng = np.random.default_rng(0)
    results, feeds = [], {}
    for proto in (given, found):
        session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
        for value in session.get_inputs():
            shape = [size if isinstance(size, int) else 3 for size in value.shape]
            feeds.setdefault(value.name, rng.standard_normal(shape).astype(np.float32))
        results.append(session.run(None, feeds)[0])
    np.testing.assert_allclose(results[1], results[0], atol=1e-5)


@pytest.mark.parametrize(
    "given",
    [
        transposed("8, 12, 3, 3", '<auto_pad = "SAME_UPPER">'),
        transposed("8, 12, 3, 3", "<output_shape = [11, 12]>"),
        transposed("8, 12, 3, 3", dtype="float16"),
        transposed("3, 12, 2, 2", "<strides = [2, 2]>", x="N, 3, 8, 8"),  # few channels
    ],
)
def test_other_transposed_convolutions_stay(given):
    assert [node.op_type for node in with_kernels(given).graph.node] == ["ConvTranspose"]


def trained_model():
    proto = model("12, 8, 3, 3", "<pads = [1, 1, 1, 1]>")
    rng = np.random.default_rng(1)
    weight = proto.graph.input.pop()
    proto.graph.initializer.append(
        numpy_helper.from_array(rng.standard_normal((12, 8, 3, 3)).astype(np.float32), weight.name)
    )
    return proto


def test_only_sessions_with_kernels_see_them():
    training = onnxtrain.training_model(trained_model(), loss="mean_squared_error", optimizer=onnxtrain.Adam())
    assert domains(training) == [""]
    assert set(domains(onnxtrain.lower(training))) == {""}
    assert domains(onnxtrain.lower(training, kernels=True)) == ["onnxtrain"]


def test_a_saved_model_has_the_standard_operator(tmp_path):
    trainer = onnxtrain.Trainer(
        trained_model(), loss="mean_squared_error", optimizer=onnxtrain.Adam(learning_rate=0.01)
    )
    rng = np.random.default_rng(2)
    inputs, target = (rng.standard_normal(shape).astype(np.float32) for shape in ((2, 8, 9, 9), (2, 12, 9, 9)))
    first = trainer.train_step(inputs, target)
    for _ in range(5):
        last = trainer.train_step(inputs, target)
    assert last < first
    trainer.save(tmp_path / "model.onnx")
    saved, given = onnx.load(tmp_path / "model.onnx"), trained_model()
    assert saved.graph.node == given.graph.node
    assert saved.opset_import == given.opset_import
