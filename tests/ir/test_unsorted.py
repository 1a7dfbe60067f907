"""Graphs with nodes in any order, as some converters write them and ONNX Runtime runs them."""

from __future__ import annotations

import itertools

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, parser

import onnxtrain
from onnxtrain.errors import ModelError

HEADER = '<ir_version: 10, opset_import: ["" : 18, "local" : 1]>'
TEXT = f"""{HEADER}
g (float[2,3] x, bool c) => (float y) <float[3] w = {{1, 2, 3}}, float[3] b = {{0, 1, 0}}>
{{
    a = Mul(x, w)
    h = local.shifted(a, b)
    z = If(c) <then_branch = t () => (float[2,3] p) {{ q = Tanh(h) p = Mul(q, h) }},
               else_branch = e () => (float[2,3] r) {{ r = Neg(h) }}>
    s = Mul(z, z)
    y = ReduceSum<keepdims=0>(s)
}}
<domain: "local", opset_import: ["" : 18]> shifted (x, b) => (y) {{ s = Add(x, b) y = Relu(s) }}
"""
FEEDS = {"x": np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3), "c": np.array(True)}


def shuffled(holder, order):
    nodes = [onnx.NodeProto.FromString(node.SerializeToString()) for node in holder.node]
    del holder.node[:]
    holder.node.extend(nodes[place] for place in order)


def unsorted(order=(4, 2, 0, 3, 1)) -> onnx.ModelProto:
    model = parser.parse_model(TEXT)
    branch = next(attribute.g for attribute in model.graph.node[2].attribute if attribute.name == "then_branch")
    shuffled(branch, (1, 0))
    shuffled(model.functions[0], (1, 0))
    shuffled(model.graph, order)
    return model


def results(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, FEEDS), strict=True))


def test_the_gradient_is_that_of_the_sorted_graph() -> None:
    expected = results(onnxtrain.gradient(parser.parse_model(TEXT), "y", ["x", "w"]))
    found = results(onnxtrain.gradient(unsorted(), "y", ["x", "w"]))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_every_order_is_sorted(order: tuple[int, ...]) -> None:
    model = parser.parse_model(
        f"{HEADER} g (float[n] x) => (float y) {{ a = Tanh(x) b = Mul(a, x) y = ReduceSum<keepdims=0>(b) }}"
    )
    shuffled(model.graph, order)
    assert [node.op_type for node in onnxtrain.gradient(model, "y", ["x"]).graph.node][:3] == [
        "Tanh",
        "Mul",
        "ReduceSum",
    ]


def test_training_keeps_the_order_of_the_file(tmp_path) -> None:
    model = parser.parse_model(
        f"{HEADER} g (float[n,3] x) => (float[n,2] y) <float[3,2] w = {{1, 2, 3, 4, 5, 6}}, float[2] b = {{0, 0}}>"
        "{ m = MatMul(x, w) y = Add(m, b) }"
    )
    shuffled(model.graph, (1, 0))
    onnx.save(model, tmp_path / "before.onnx")
    trainer = onnxtrain.Trainer(tmp_path / "before.onnx", loss="mean_squared_error", optimizer=onnxtrain.Momentum(0.1))
    trainer.train_step(np.ones((4, 3), np.float32), np.zeros((4, 2), np.float32))
    trainer.save(tmp_path / "after.onnx")
    after = onnx.load(tmp_path / "after.onnx")
    assert [node.op_type for node in after.graph.node] == ["Add", "MatMul"]
    assert not np.array_equal(onnx.numpy_helper.to_array(after.graph.initializer[0]), np.arange(1, 7).reshape(3, 2))


def test_an_unsorted_training_model_is_lowered() -> None:
    model = parser.parse_model(
        f"{HEADER} g (float[n,3] x) => (float[n,2] y) <float[3,2] w = {{1, 2, 3, 4, 5, 6}}>"
        "{ m = MatMul(x, w) y = Tanh(m) }"
    )
    built = onnxtrain.training_model(model, loss="mean_squared_error", optimizer=onnxtrain.Momentum(0.1))
    expected = onnxtrain.lower(built)
    shuffled(built.graph, (1, 0))
    assert [n.op_type for n in onnxtrain.lower(built).graph.node] == [n.op_type for n in expected.graph.node]


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        (
            [("Add", ["x", "b"], "a"), ("Neg", ["a"], "b"), ("Neg", ["b"], "y")],
            r"2 nodes in a cycle, Add \(output 'a'\), Neg \(output 'b'\), so that no order",
        ),
        ([("Add", ["x", "y"], "y")], r"a node that reads its own result, Add \(output 'y'\), so that no order exists"),
    ],
)
def test_a_circle_is_one_sentence(nodes, message) -> None:
    graph = helper.make_graph(
        [helper.make_node(operator, inputs, [output]) for operator, inputs, output in nodes],
        "g",
        [helper.make_tensor_value_info("x", 1, [2])],
        [helper.make_tensor_value_info("y", 1, [2])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    with pytest.raises(ModelError, match=message):
        onnxtrain.gradient(model, "y", ["x"])
