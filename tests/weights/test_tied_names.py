"""Names of copies in patterns, and names of untied copies beside an exporter's Identity nodes."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper

import onnxtrain

TABLE = np.random.default_rng(0).normal(size=(7, 4)).astype(np.float32)
MIDDLE = np.random.default_rng(1).normal(size=(4, 4)).astype(np.float32)


def _tied() -> onnx.ModelProto:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 18]> g (int64[n, s] ids) => (float[n, s, 7] y) {
            a = Gather(table, ids)  b = MatMul(a, middle)  y = MatMul(b, val_7) }"""
    )
    for name, array in (("table", TABLE), ("middle", MIDDLE), ("val_7", np.ascontiguousarray(TABLE.T))):
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


@pytest.mark.parametrize("name", ["val_7", "table", "val_*"])
def test_both_names_of_a_tied_tensor_match(name: str) -> None:
    frozen = onnxtrain.Trainer(_tied(), loss="cross_entropy", tie=True, freeze=name)
    assert list(frozen.parameters) == ["middle"]
    assert not any("one tensor" in hint for hint in frozen.hints)
    assert list(onnxtrain.Trainer(_tied(), loss="cross_entropy", tie=True, train=name).parameters) == ["table"]
    group = onnxtrain.Group(name, lr_scale=0.0)
    trainer = onnxtrain.Trainer(_tied(), loss="cross_entropy", tie=True, groups=[group], optimizer="sgd(0.1)")
    trainer.train_step({"ids": np.arange(6).reshape(2, 3)}, np.arange(6).reshape(2, 3))
    np.testing.assert_array_equal(trainer.parameters["table"], TABLE)
    assert not np.array_equal(trainer.parameters["middle"], MIDDLE)


def test_untied_biases_beside_identity_nodes_keep_their_last_word() -> None:
    nodes = [
        helper.make_node("Identity", ["one.bias"], ["two.bias"]),
        helper.make_node("MatMul", ["x", "one.weight"], ["a"]),
        helper.make_node("Add", ["a", "one.bias"], ["b"], name="/one/Add"),
        helper.make_node("MatMul", ["b", "two.weight"], ["c"]),
        helper.make_node("Add", ["c", "two.bias"], ["y"], name="/two/Add"),
    ]
    ports = [[helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["n", 4])] for name in "xy"]
    graph = helper.make_graph(nodes, "g", *ports)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    arrays = {"one.bias": np.zeros(4, np.float32), "one.weight": MIDDLE, "two.weight": MIDDLE + 1}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in arrays.items())
    trainer = onnxtrain.Trainer(model, loss="mse", untie=True, freeze="*.bias")
    assert sorted(trainer.parameters) == ["one.weight", "two.weight"]
    assert sum(row.reason == "frozen" for row in trainer.objective.table) == 2
