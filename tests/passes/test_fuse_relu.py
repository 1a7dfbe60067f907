"""Linear layers with Relu are one node forward and one backward, with the same bits as separate nodes."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import helper, numpy_helper, parser

import onnxtrain
from onnxtrain.autodiff.options import GradientOptions
from onnxtrain.graph.shapes import infer_shapes
from onnxtrain.lowering import pipeline
from onnxtrain.lowering.pipeline import lower_graph
from onnxtrain.lowering.rewrite import Rewrite
from onnxtrain.lowering.rules.linear import LAYER, fuse_linear, fuse_relu
from onnxtrain.runtime.native import custom_ops_library
from onnxtrain.runtime.testing import check_gradient

WIDTH, ROWS = 6, 5
WITHOUT_RELU = Rewrite(*(dataclasses.replace(rule, pattern=LAYER) for rule in fuse_linear.rules))
TRAINING = "ai.onnx.preview.training"
LAYERS = "a = Gemm(x, u, b) h = Relu(a) c = Gemm<transB=1>(h, v, b) k = Relu(c) p = MatMul(k, w) y = Tanh(p)"
WEIGHTS = {"u": (WIDTH, WIDTH), "v": (WIDTH, WIDTH), "w": (WIDTH, WIDTH), "b": (WIDTH,)}


def model(nodes: str = LAYERS, kind: str = "float", outputs: str = "") -> onnx.ModelProto:
    proto = parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 18]> f ({kind}[n, {WIDTH}] x) => '
        f"({kind}[n, {WIDTH}] y{outputs}) {{ {nodes} }}"
    )
    rng = np.random.default_rng(0)
    dtype = np.float32 if kind == "float" else np.float64
    for name, shape in WEIGHTS.items():
        proto.graph.initializer.append(numpy_helper.from_array(rng.normal(0, 0.7, shape).astype(dtype), name))
    for node in proto.graph.node:
        node.name = node.output[0]
    return proto


def with_gradient(given: onnx.ModelProto, xs: str) -> onnx.ModelProto:
    """Add the gradient of the sum of y by the named values."""
    proto = onnx.ModelProto()
    proto.CopyFrom(given)
    names = xs.split()
    results = [f"d_{name}" for name in names]
    proto.graph.node.append(helper.make_node("ReduceSum", ["y"], ["s"], name="sum", keepdims=0))
    proto.graph.node.append(helper.make_node("Gradient", names, results, domain=TRAINING, xs=names, y="s"))
    proto.opset_import.append(helper.make_opsetid(TRAINING, 1))
    kind = proto.graph.output[0].type.tensor_type.elem_type
    proto.graph.output.extend(helper.make_tensor_value_info(name, kind, None) for name in results)
    return proto


def lowered(proto: onnx.ModelProto, xs: str = "u v w b", **options: Any) -> ir.Model:
    """Return the graph for a session with that gradient."""
    working = infer_shapes(ir.from_proto(with_gradient(proto, xs)))
    working.metadata_props.update(GradientOptions(**options).entries())
    return lower_graph(working, kernels=True)


def operators(working: ir.Model) -> list[str]:
    """Return the operators of this project, with their activations."""
    return [
        node.op_type + (" Relu" if "activation" in node.attributes else "")
        for node in working.graph
        if (node.domain == "onnxtrain" and node.op_type not in ("Elementwise", "ReduceSum")) or node.op_type == "Relu"
    ]


def run(working: ir.Model, **feeds: np.ndarray) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(str(custom_ops_library()))
    session = onnxruntime.InferenceSession(ir.to_proto(working).SerializeToString(), options)
    return session.run(None, feeds)


def assert_same_bits(monkeypatch: pytest.MonkeyPatch, proto: onnx.ModelProto, xs: str, **options) -> ir.Model:
    """Compare one fused node forward and one backward with five nodes; return the fused results."""
    kind = helper.tensor_dtype_to_np_dtype(proto.graph.input[0].type.tensor_type.elem_type)
    x = np.random.default_rng(1).normal(size=(ROWS, proto.graph.input[0].type.tensor_type.shape.dim[1].dim_value))
    working = lowered(proto, xs, **options)
    found = run(working, x=x.astype(kind))
    monkeypatch.setattr(pipeline, "fuse_linear", WITHOUT_RELU)
    monkeypatch.setattr("onnxtrain.autodiff.rules.fused_linear._is_relu", lambda _: False)
    apart = lowered(proto, xs, **options)
    assert "LinearGradient Relu" not in operators(apart)
    for one, other in zip(found, run(apart, x=x.astype(kind)), strict=True):
        np.testing.assert_array_equal(one, other)
    return working


@pytest.mark.parametrize("kind", ["float", "double"])
def test_a_layer_is_two_nodes(monkeypatch, kind):
    working = assert_same_bits(monkeypatch, model(kind=kind), "u v w b")
    backwards = ["LinearGradient Relu", "LinearGradient Relu", "LinearWeightGradient"]
    assert operators(working) == ["Linear Relu", "Linear Relu", "Linear", *backwards]


def test_the_input_of_the_first_layer(monkeypatch):
    """Use two nodes for the gradient by an input without Relu and the gradient by the weight."""
    working = assert_same_bits(monkeypatch, model(), "x u v w b")
    backwards = ["LinearGradient Relu", "LinearGradient Relu", "Linear", "LinearWeightGradient"]
    assert sorted(operators(working)[3:]) == sorted(backwards)


@pytest.mark.parametrize(
    ("xs", "backwards"),
    [
        ("u", ["Linear", "ReluGradient", "Linear", "ReluGradient", "LinearWeightGradient"]),
        ("x", ["Linear", "ReluGradient", "Linear", "ReluGradient", "Linear"]),
        ("v", ["Linear", "ReluGradient", "LinearWeightGradient"]),
        ("w", ["LinearWeightGradient"]),
        ("v w", ["LinearGradient Relu", "LinearWeightGradient"]),
        ("b", ["Linear", "ReluGradient", "Linear", "ReluGradient"]),
    ],
)
def test_nothing_is_computed_for_frozen_weights(monkeypatch, xs, backwards):
    """Check that no node reads an x for a frozen weight's gradient."""
    assert operators(assert_same_bits(monkeypatch, model(), xs))[-len(backwards) :] == backwards


@pytest.mark.parametrize(
    ("nodes", "outputs"),
    [
        ("a = MatMul(x, u) h = Relu(a) c = MatMul(h, v) d = Add(c, h) y = Tanh(d)", ""),  # several readers
        ("a = MatMul(x, u) h = Relu(a) c = MatMul(h, v) d = MatMul(h, w) e = Add(c, d) y = Tanh(e)", ""),
    ],
)
def test_a_gradient_that_is_added_to_others_stays_apart(monkeypatch, nodes, outputs):
    found = operators(assert_same_bits(monkeypatch, model(nodes, outputs=outputs), "u v w b"))
    assert "Linear Relu" in found
    assert "ReluGradient" in found
    assert "LinearGradient" in found
    assert "LinearGradient Relu" not in found


def test_an_activation_that_is_an_output(monkeypatch):
    """Check an activation that is read, and whose gradient is not added to."""
    working = assert_same_bits(monkeypatch, model(outputs=f", float[n, {WIDTH}] h"), "u v w b")
    assert operators(working).count("LinearGradient Relu") == 2


def test_a_gradient_that_is_an_output_stays_apart(monkeypatch):
    """Check the gradient by the result of a Relu itself."""
    proto = model("a = MatMul(x, u) h = Relu(a) c = MatMul(h, v) y = Tanh(c)")
    working = lowered(proto, "h v")
    assert "LinearGradient Relu" not in operators(working)
    x = np.random.default_rng(1).normal(size=(ROWS, WIDTH)).astype(np.float32)
    u, v = (numpy_helper.to_array(proto.graph.initializer[place]) for place in (0, 1))
    y, dh, dv = run(working, x=x)
    np.testing.assert_allclose(dh, (1 - y * y) @ v.T, atol=1e-5)
    np.testing.assert_allclose(dv, np.maximum(x @ u, 0).T @ (1 - y * y), atol=1e-5)


def test_relu_of_something_else_is_part_of_the_gradient_behind_it(monkeypatch):
    nodes = "a = Mul(x, b) h = Relu(a) c = MatMul(h, v) y = Tanh(c)"
    found = operators(assert_same_bits(monkeypatch, model(nodes), "b v"))
    assert found == ["Relu", "Linear", "LinearGradient Relu"]


@pytest.mark.parametrize("recompute", [("h",), ("a", "h"), ("k", "h")], ids=str)
def test_recomputed_layers_give_the_same_bits(recompute):
    proto = model()
    x = np.random.default_rng(1).normal(size=(ROWS, WIDTH)).astype(np.float32)
    working = lowered(proto, recompute=recompute)
    for one, other in zip(run(working, x=x), run(lowered(proto), x=x), strict=True):
        np.testing.assert_array_equal(one, other)
    again = [node for node in working.graph if node.name.startswith("again/") and node.op_type in ("Linear", "Relu")]
    assert again
    assert operators(working).count("LinearGradient Relu") == 2


def wide(stored: type) -> onnx.ModelProto:
    """Return two layers of 64 units, the least that is rounded, with 16-bit weights cast to float."""
    proto = parser.parse_model(
        '<ir_version: 8, opset_import: ["": 18]> f (float[n, 64] x) => (float[n, 64] y) { fu = Cast<to=1>(u) '
        "fv = Cast<to=1>(v) a = MatMul(x, fu) h = Relu(a) c = MatMul(h, fv) k = Relu(c) p = MatMul(k, w) y = Tanh(p) }"
    )
    rng = np.random.default_rng(0)
    for name, kind in (("u", stored), ("v", stored), ("w", np.float32)):
        array = (rng.normal(size=(64, 64)) / 8).astype(kind)
        element = helper.np_dtype_to_tensor_dtype(array.dtype)
        proto.graph.initializer.append(helper.make_tensor(name, element, array.shape, array.tobytes(), raw=True))
    return proto


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_weights_of_16_bits_are_read_and_factors_rounded(monkeypatch, stored, compute):
    working = assert_same_bits(monkeypatch, wide(stored), "fu fv w", compute=compute)
    layers = [node for node in working.graph if node.op_type in ("Linear", "LinearGradient")]
    assert operators(working)[3:5] == ["LinearGradient Relu"] * 2
    u, v = ("fu", "fv") if stored is np.float32 else ("u", "v")
    assert [node.inputs[1].name for node in layers] == [u, v, "w", "w", v]
    for node in working.graph:
        if node.op_type.startswith("Linear"):
            assert ("compute" in node.attributes) == (compute == "bfloat16")


def test_second_derivative():
    """Differentiate the nodes of a first derivative through their bodies."""
    proto = model("a = Gemm(x, u, b) h = Relu(a) c = MatMul(h, v) y = Sin(c)", "double")
    first = lowered(proto, "u v")
    assert "LinearGradient Relu" in operators(first)
    made = ir.to_proto(first)
    del made.graph.output[0]
    feeds = {"x": np.random.default_rng(3).normal(size=(ROWS, WIDTH))}
    for value in list(made.graph.initializer):  # trained weights become inputs
        if value.name in "uv":
            feeds[value.name] = numpy_helper.to_array(value)
            made.graph.input.append(helper.make_tensor_value_info(value.name, value.data_type, value.dims))
            made.graph.initializer.remove(value)
    check_gradient(made, feeds, wrt=["x", "u", "v"])


def test_training_is_the_same_to_the_bit(monkeypatch):
    rng = np.random.default_rng(0)
    x, labels = rng.normal(size=(50, 32, 20)).astype(np.float32), rng.integers(0, 10, (50, 32))
    ways = []
    for fuses in (True, False):
        if not fuses:
            monkeypatch.setattr(pipeline, "fuse_linear", WITHOUT_RELU)
            monkeypatch.setattr(pipeline, "fuse_relu", lambda graph: None)
        trainer = onnxtrain.Trainer(onnxtrain.examples.mlp((20, 30, 70, 10)), loss="softmax_cross_entropy", threads=2)
        losses = [trainer.train_step(*batch) for batch in zip(x, labels, strict=True)]
        found = operators(ir.Model(trainer.executor.session._steps[0].step.model.graph, ir_version=8))
        ways.append((losses, {name: np.array(value) for name, value in trainer.parameters.items()}, found))
    assert ways[0][2].count("LinearGradient Relu") == 2
    assert len(ways[1][2]) == len(ways[0][2]) + 4  # two Relus, and the gradient of each
    assert ways[0][0] == ways[1][0]
    for name, value in ways[0][1].items():
        np.testing.assert_array_equal(value, ways[1][1][name])


def chain(*, other_x: bool = False, uses: int = 1, output: bool = False, activation: bool = False) -> ir.Graph:
    """Return a gradient of a linear layer, and a gradient of Relu that reads it."""
    dy, w, x, z = (ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT)) for name in ("dy", "w", "x", "z"))
    attributes = [ir.AttrString("activation", "Relu")] if activation else []
    product = ir.Node("onnxtrain", "LinearGradient", [dy, w, x], attributes, num_outputs=2)
    relus = [
        ir.Node("onnxtrain", "ReluGradient", [product.outputs[0], z if other_x else x], num_outputs=1)
        for _ in range(uses)
    ]
    results = [product.outputs[1], *(relu.outputs[0] for relu in relus), *product.outputs[:output]]
    for place, value in enumerate(results):
        value.name = f"result{place}"
    if not output:
        product.outputs[0].name = "dx"
    return ir.Graph([dy, w, x, z], results, nodes=[product, *relus], opset_imports={"": 18, "onnxtrain": 1})


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({}, ["LinearGradient"]),
        ({"other_x": True}, ["LinearGradient", "ReluGradient"]),
        ({"uses": 2}, ["LinearGradient", "ReluGradient", "ReluGradient"]),
        ({"output": True}, ["LinearGradient", "ReluGradient"]),
        ({"activation": True}, ["LinearGradient", "ReluGradient"]),
    ],
    ids=str,
)
def test_only_one_that_alone_reads_the_gradient_by_its_result(options, left):
    graph = chain(**options)
    fuse_relu(ir.Model(graph, ir_version=10))
    assert [node.op_type for node in graph] == left
    assert [value.name for value in graph.outputs] == [f"result{place}" for place in range(len(graph.outputs))]
