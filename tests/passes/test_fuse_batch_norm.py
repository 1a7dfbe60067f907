"""Batch normalization in training mode with a residual sum and the activation behind it: one node each way."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper, parser

import onnxtrain
from onnxtrain.graph.shapes import infer_shapes
from onnxtrain.lowering import pipeline
from onnxtrain.lowering.rules.batch_norm import fuse_batch_norm

NORM = "n, m2, v2 = BatchNormalization<training_mode = 1>(c, scale, bias, mean, variance)"
BOUNDS = "low = Constant<value = float {0}>() high = Constant<value = float {6}>()"

ACTIVATIONS = {
    "Relu": "a = Relu(n)",
    "Clip": f"{BOUNDS} a = Clip(n, low, high)",
    "Clip below": f"{BOUNDS} a = Clip(n, low)",
    "HardSwish": "a = HardSwish(n)",
    "residual": "t = Add(n, c) a = Relu(t)",
    "residual, turned": "t = Add(c, n) a = Relu(t)",
}


def graph(nodes: str, kind: str = "float", outputs: str = "float[2, 3, 4] y") -> onnx.ModelProto:
    vector = f"{kind}[3]"
    return parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 18, "ai.onnx.preview.training": 1]> f ({kind}[2, 3, 4] c, '
        f"{vector} scale, {vector} bias, {vector} mean, {vector} variance) "
        f"=> ({outputs.replace('float', kind)}, {vector} m2, {vector} v2) {{ {nodes} }}"
    )


def fused(proto: onnx.ModelProto, **metadata: str) -> onnx.GraphProto:
    working = infer_shapes(ir.from_proto(proto))
    working.metadata_props.update(metadata)
    fuse_batch_norm(working)
    return ir.to_proto(working).graph


@pytest.mark.parametrize("text", ACTIVATIONS.values(), ids=list(ACTIVATIONS))
def test_one_node_has_the_activation(text: str) -> None:
    found = fused(graph(f"{NORM} {text} y = Neg(a)"))
    kinds = [node.op_type for node in found.node if node.op_type != "Constant"]
    assert kinds == ["BatchNormalization", "Neg"]
    norm = next(node for node in found.node if node.op_type == "BatchNormalization")
    assert norm.domain == "onnxtrain"
    assert list(norm.output[1:3]) == ["m2", "v2"]
    assert len(norm.input) == 5 + ("Add" in text)
    attributes = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in norm.attribute}
    bounds = {"low": 0.0, "high": 6.0 if "high)" in text else np.inf} if "Clip" in text else {}
    (name,) = (name for name in ("Relu", "Clip", "HardSwish") if name in text)
    assert attributes == bounds | {"activation": name.encode()}


def test_of_two_normalizations_the_first_takes_the_sum() -> None:
    other = NORM.replace("n, m2, v2", "k")
    found = fused(graph(f"{NORM} {other} t = Add(k, n) a = Relu(t) y = Neg(a)"))
    assert [node.op_type for node in found.node] == ["BatchNormalization", "BatchNormalization", "Neg"]
    assert [len(node.input) for node in found.node] == [5, 6, 1]


GRADIENT = 'ai.onnx.preview.training.Gradient<xs = ["n"], y = "s">(n)'


@pytest.mark.parametrize(
    "text",
    [
        "y = Tanh(n)",
        "a = Relu(n) b = Exp(n) y = Add(a, b)",
        f"a = Relu(n) g = {GRADIENT} s = ReduceSum(a) y = Neg(a)",
        "s = Sigmoid(n) a = Mul(n, s) y = Neg(a)",
        "b = ReduceMax<keepdims = 0>(c) a = Clip(n, , b) y = Neg(a)",
        "b = Constant<value = float {6}>() d = Constant<value = float {7}>() a = Clip(n, d, b) y = Neg(a)",
        "b = Constant<value = float[3, 1] {1, 2, 3}>() t = Add(n, b) a = Relu(t) y = Neg(a)",
        "t = Add(n, n) a = Relu(t) y = Neg(a)",
        "t = Add(n, c) a = Relu(t) y = Add(a, t)",
        "t = Add(n, c) y = Tanh(t)",
    ],
)
def test_what_something_else_needs_stays(text: str) -> None:
    proto = graph(f"{NORM} {text}")
    found = fused(proto)
    assert [node.op_type for node in found.node] == [node.op_type for node in proto.graph.node]
    assert {node.domain for node in found.node if node.op_type == "BatchNormalization"} == {""}


def test_normalized_values_that_are_a_result_stay() -> None:
    found = fused(graph(f"{NORM} a = Relu(n) y = Neg(a)", outputs="float[2, 3, 4] y, float[2, 3, 4] n"))
    assert [node.op_type for node in found.node] == ["BatchNormalization", "Relu", "Neg"]


def test_a_running_statistic_that_is_read_before_the_activation_keeps_it_apart() -> None:
    found = fused(graph(f"{NORM} q = Neg(m2) r = ReduceSum(q) t = Add(c, r) k = Add(n, t) a = Relu(k) y = Neg(a)"))
    assert "Relu" in [node.op_type for node in found.node]


def test_a_bound_that_is_no_single_precision_number_stays() -> None:
    bound = "low = Constant<value = double {0.1}>()"
    text = f"{bound} {NORM} a = Clip(n, low) y = Neg(a)"
    assert "Clip" in [node.op_type for node in fused(graph(text, "double")).node]
    rounder = text.replace("0.1", "0.125")
    assert "Clip" not in [node.op_type for node in fused(graph(rounder, "double")).node]


def test_synchronized_statistics_and_half_precision_stay() -> None:
    text = f"{NORM} a = Relu(n) y = Neg(a)"
    for found in (fused(graph(text), **{"onnxtrain.synchronized": "true"}), fused(graph(text, "float16"))):
        assert [(node.op_type, node.domain) for node in found.node][:2] == [("BatchNormalization", ""), ("Relu", "")]


# Trainings

VECTORS = (
    "float[4] scale = {1, 2, 3, 4}, float[4] bias = {0, 1, 0, 1}, float[4] mean = {0, 0, 0, 0}, "
    "float[4] variance = {1, 1, 1, 1}"
)
SIZES = {2: (5,), 3: (3, 7), 4: (3, 6, 6), 5: (3, 3, 4, 3)}
LAYERS = {
    "Relu": "a = Relu(n)",
    "Clip": f"{BOUNDS} a = Clip(n, low, high)",
    "HardSwish": "a = HardSwish(n)",
    "residual": "t = Add(n, c) a = Relu(t)",
    "two": "k = BatchNormalization(c, scale2, bias2, mean2, variance2) t = Add(n, k) a = Relu(t)",
    "nothing": "a = Identity(n)",
}


def network(folder: Path, rank: int, activation: str) -> Path:
    """A layer, its normalization and activation, and another layer."""
    kernel = [3] * (rank - 2)
    sizes = ", ".join(map(str, ["N", *SIZES[rank]]))
    inner = f"n = BatchNormalization(c, scale, bias, mean, variance) {LAYERS[activation]}"
    ends = ", ".join(["1"] * 2 * (rank - 2))
    text = (
        f"c = MatMul(x, w) {inner} y = MatMul(a, w2)"
        if rank == 2
        else f"c = Conv<pads = [{ends}]>(x, w) {inner} d = Conv(a, w2) p = GlobalAveragePool(d) y = Flatten(p)"
    )
    proto = parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 18]> f (float[{sizes}] x) => (float[N, 4] y) <{VECTORS}, '
        + VECTORS.replace(" =", "2 =")
        + f"> {{ {text} }}"
    )
    rng = np.random.default_rng(rank)
    for name, inputs in (("w", SIZES[rank][0]), ("w2", 4)):
        shape = (inputs, 4) if rank == 2 else (4, inputs, *kernel)
        array = rng.standard_normal(shape).astype(np.float32) / 2
        proto.graph.initializer.append(numpy_helper.from_array(array, name))
    path = folder / "model.onnx"
    onnx.save(proto, path)
    return path


def trained(path: Path, rank: int, *, kernels: bool = True) -> tuple[list[float], dict[str, np.ndarray], list[ir.Node]]:
    x = np.random.default_rng(1).standard_normal((12, *SIZES[rank])).astype(np.float32)
    trainer = onnxtrain.Trainer(
        path,
        loss="softmax_cross_entropy",
        optimizer="sgd(lr=0.05)",
        batch_norm="train",
        runtime=onnxtrain.RuntimeOptions(threads=1, kernels=kernels),
    )
    losses = [trainer.train_step(x, np.arange(12) % 4) for _ in range(5)]
    nodes = list(trainer.executor.session._steps[0].step.model.graph)
    return losses, {name: np.array(array) for name, array in trainer.weights.items()}, nodes


@pytest.mark.sampled("rank")
@pytest.mark.parametrize("rank", SIZES)
@pytest.mark.parametrize("activation", LAYERS)
def test_a_training_has_the_bits_of_separate_nodes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, activation: str, rank: int
) -> None:
    path = network(tmp_path, rank, activation)
    losses, values, nodes = trained(path, rank)
    assert not {"Relu", "Clip", "ClipGradient", "HardSwish", "GeluGradient"} & {node.op_type for node in nodes}
    monkeypatch.setattr(pipeline, "fuse_batch_norm", lambda model: None)
    others, right, _ = trained(path, rank)
    assert losses == others
    for name, array in values.items():
        np.testing.assert_array_equal(array, right[name])
    plain, standard, nodes = trained(path, rank, kernels=False)
    assert {node.domain for node in nodes} == {""}
    np.testing.assert_allclose(losses, plain, rtol=1e-4)
    for name, array in values.items():
        np.testing.assert_allclose(array, standard[name], rtol=1e-3, atol=1e-4)


def test_the_next_layer_reads_what_the_gradient_computes_again(tmp_path: Path) -> None:
    """Neither the normalized values nor the activation is kept: the gradient gives the activation again."""
    _, _, nodes = trained(network(tmp_path, 4, "Relu"), 4)
    norm = next(node for node in nodes if node.op_type == "BatchNormalization")
    gradient = next(node for node in nodes if node.op_type == "BatchNormalizationGradient")
    assert {reader.op_type for reader, _ in norm.outputs[0].uses()} == {"Conv", "Shape"}
    assert [reader.op_type for reader, _ in gradient.outputs[3].uses()] == ["ConvWeightGradient"]


@pytest.mark.parametrize(("pattern", "apart"), [("bn", True), ("act", True), ("{bn,act}", False)])
def test_recompute_that_tells_both_apart_keeps_them_apart(pattern: str, apart: bool) -> None:
    proto = graph(f"{NORM} a = Relu(n) y = Neg(a)")
    for node, name in zip(proto.graph.node, ("bn", "act", ""), strict=True):
        node.name = name
    found = fused(proto, **{"onnxtrain.recompute": json.dumps([pattern])})
    assert ("Relu" in [node.op_type for node in found.node]) == apart
