"""Main graph and algorithm become one sorted graph, whose states are inputs."""

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import onnxtrain
from onnxtrain.lowering.lower import MINIMUM_OPSET, merge_algorithm

PARAMETERS = ["layer1.weight", "layer1.bias"]
STATES = ["T", *(f"{name}/{letter}" for letter in "VH" for name in PARAMETERS), *PARAMETERS]


def training_model(**options):
    return onnxtrain.training_model(
        onnxtrain.examples.mlp((4, 3), opset=options.pop("opset", 18)),
        loss="softmax_cross_entropy",
        optimizer=onnxtrain.Adam(),
        **options,
    )


def test_states_are_inputs_and_other_tensors_initializers():
    model = training_model()
    entry = merge_algorithm(model, 0)
    graph = entry.model.graph
    assert sorted(entry.states) == sorted(STATES)
    assert entry.updates == {name: f"{name}_new" for name in STATES}
    assert entry.results == ["loss"]
    assert {value.name for value in graph.inputs} == {"input", "target", "learning_rate", *STATES}
    tensors = {tensor.name: tensor for tensor in model.training_info[0].algorithm.initializer}
    assert set(graph.initializers) == set(tensors) - set(STATES) != set()
    for name, value in graph.initializers.items():
        np.testing.assert_array_equal(value.const_value.numpy(), numpy_helper.to_array(tensors[name]))
    assert set(entry.main) == {"input", *PARAMETERS}


def test_nodes_stand_behind_what_they_read():
    model = training_model()
    nodes = list(model.training_info[0].algorithm.node)
    del model.training_info[0].algorithm.node[:]
    model.training_info[0].algorithm.node.extend(reversed(nodes))
    graph = merge_algorithm(model, 0).model.graph
    known = {*graph.inputs, *graph.initializers.values()}
    for node in graph:
        assert known.issuperset(value for value in node.inputs if value is not None), node.op_type
        known.update(node.outputs)


@pytest.mark.parametrize(("index", "results"), [(0, ["loss"]), (1, ["loss"])])
def test_each_entry_has_the_states_of_the_whole_training(index, results):
    entry = merge_algorithm(training_model(accumulate=True), index)
    own = {f"{name}/accumulated" for name in PARAMETERS} | {"accumulated_weight", "accumulated_loss"}
    assert set(entry.states) == {*STATES, *own}
    assert own <= set(entry.updates)
    assert (set(PARAMETERS) <= set(entry.updates)) == (index == 1)
    assert entry.results == results


def test_an_old_model_is_upgraded_and_options_are_kept():
    model = training_model(opset=13, straight_through=True, recompute="*")
    old = [item.version for item in model.opset_import if not item.domain]
    entry = merge_algorithm(model, 0)
    assert entry.model.graph.opset_imports[""] >= max(MINIMUM_OPSET, *old)
    assert entry.model.metadata_props["onnxtrain.straight_through"] == "true"
    assert entry.model.metadata_props["onnxtrain.recompute"] == '["*"]'


def test_the_model_is_left_as_it_was():
    model = training_model()
    before = onnx.ModelProto()
    before.CopyFrom(model)
    merge_algorithm(model, 0)
    assert model == before
