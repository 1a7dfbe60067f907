"""Optimizers with kernels of the provider stay nodes; all else is standard operators."""

from collections import Counter

import numpy as np
import onnx_ir as ir
import pytest
from onnx import parser
from onnx.reference import ReferenceEvaluator

import onnxtrain
from onnxtrain.errors import OperatorError
from onnxtrain.lowering.lower import lower_entry, merge_algorithm
from onnxtrain.lowering.optimizer_bodies import keep_provider_optimizers
from onnxtrain.lowering.pipeline import lower_graph

ALL = frozenset({"Adagrad", "Adam", "SGD"})


def model(
    body, inputs="float R, int64 T, float[3] X, float[3] G, float[3] H", outputs="float[3] X_new, float[3] H_new"
):
    head = '<ir_version: 8, opset_import: ["": 18, "ai.onnx.preview.training": 1, "onnxtrain": 1]>'
    return ir.from_proto(parser.parse_model(f"{head} update ({inputs}) => ({outputs}) {{ {body} }}"))


def kinds(lowered):
    return Counter(node.op_type for node in lowered.graph)


ADAGRAD = "X_new, H_new = ai.onnx.preview.training.Adagrad (R, T, X, G, H)"


def test_it_stays():
    assert kinds(lower_graph(model(ADAGRAD), updates=ALL)) == {"Adagrad": 1}


@pytest.mark.parametrize("updates", [frozenset(), {"Adam"}])
def test_others_become_their_bodies(updates):
    lowered = lower_graph(model(ADAGRAD), updates=updates)
    assert "Adagrad" not in kinds(lowered)
    assert {node.domain for node in lowered.graph} == {""}
    assert set(lowered.graph.opset_imports) == {""}


def test_both_in_one_graph():
    body = ADAGRAD + " Y_new = onnxtrain.SGD (R, T, Y, Y)"
    given = model(body, "float R, int64 T, float[3] X, float[3] G, float[3] H, float[3] Y",
                  "float[3] X_new, float[3] H_new, float[3] Y_new")  # fmt: skip
    lowered = lower_graph(given, updates={"SGD"})
    assert kinds(lowered)["SGD"] == 1
    assert kinds(lowered)["Adagrad"] == 0
    assert set(lowered.graph.opset_imports) == {"", "onnxtrain"}


@pytest.mark.parametrize("gradient", ["float[1] G", "float G", "float[n] G"])
def test_a_gradient_of_another_shape_is_expanded(gradient):
    given = model(ADAGRAD, f"float R, int64 T, float[3] X, {gradient}, float[3] H")
    (node,) = keep_provider_optimizers(given, ALL)
    expand = node.inputs[3].producer()
    assert expand.op_type == "Expand"
    assert list(expand.outputs[0].shape) == [3]
    given.graph.outputs[:] = [expand.outputs[0]]
    given.graph.remove(node)
    (found,) = ReferenceEvaluator(ir.to_proto(given)).run(
        None, {"X": np.zeros(3, np.float32), "G": np.full((1,), 2.0, np.float32)}
    )
    np.testing.assert_array_equal(found, [2, 2, 2])


def test_a_function_of_the_same_name_is_not_the_optimizer():
    text = """
    <ir_version: 8, opset_import: ["": 18, "ai.onnx.preview.training": 1]>
    update (float R, int64 T, float[3] X, float[3] G) => (float[3] Y)
    { Y = ai.onnx.preview.training.Adagrad (X, G) }
    <domain: "ai.onnx.preview.training", opset_import: ["": 18]> Adagrad (a, b) => (c) { c = Add(a, b) }
    """
    assert keep_provider_optimizers(ir.from_proto(parser.parse_model(text)), ALL) == frozenset()


def test_a_node_that_is_wrong_is_an_error():
    with pytest.raises(OperatorError, match="Adagrad"):
        keep_provider_optimizers(model("X_new, H_new = ai.onnx.preview.training.Adagrad (R, T, X, G)"), ALL)


@pytest.mark.parametrize(
    ("options", "masked", "kept"),
    [
        ({}, (), {"Adam": 1}),
        ({"clip_norm": 0.1}, (), {"FusedAdam": 1}),
        ({}, ("layer1.weight",), {"FusedAdam": 2, "Adam": 0}),
        ({}, ("layer1.weight", "layer2.weight"), {"FusedAdam": 2}),
    ],
)
def test_clipping_and_masks_are_inside(options, masked, kept):
    trainer = onnxtrain.Trainer(
        onnxtrain.examples.mlp((4, 8, 3)), loss="softmax_cross_entropy", optimizer="adam", **options
    )
    trainer.set_masks({name: np.ones(trainer.parameters[name].shape, bool) for name in masked})
    lowered = lower_entry(merge_algorithm(trainer.training_model(), 0), kernels=False, updates={"Adam"})
    found = kinds(lowered.model)
    assert {name: found[name] for name in kept} == kept
    assert found["Where"] == 1  # of the gradient of Relu
