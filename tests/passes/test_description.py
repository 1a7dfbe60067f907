"""A step graph describes its inputs and outputs, whichever tool wrote the training model."""

import json

import pytest
from onnx import StringStringEntryProto

import onnxtrain
from onnxtrain.errors import OnnxTrainError
from onnxtrain.lowering.description import STEP_KEY, Description
from sentences import raises_sentence


def description(training_model, entry=None, **options):
    step = onnxtrain.lower(training_model, entry=entry, **options)
    metadata = {item.key: item.value for item in step.metadata_props}
    names = {value.name for value in step.graph.input}
    found = Description.read(metadata)
    assert {*found.feeds, *found.states} >= names
    return found


def roles(states):
    return {role: {name for name in states if states[name] == role} for role in set(states.values())}


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("optimizer", [onnxtrain.Momentum(), onnxtrain.Adam(), onnxtrain.Adagrad(), onnxtrain.SSGD()])
def test_roles(optimizer, kernels):
    model = onnxtrain.examples.mlp((4, 8, 3))
    training = onnxtrain.training_model(model, loss="softmax_cross_entropy", optimizer=optimizer)
    found = description(training, kernels=kernels)
    assert found.version == 1
    assert found.feeds == {"input": "batch", "target": "target", "learning_rate": "learning_rate"}
    assert found.loss == "loss"
    by_role = roles(found.states)
    assert by_role["parameter"] == {tensor.name for tensor in model.graph.initializer}
    assert by_role["count"] == {"T"}
    assert all("/" in name for name in by_role.get("optimizer", ()))


def test_running_statistics_and_clipping():
    training = onnxtrain.training_model(
        onnxtrain.examples.small_resnet(),
        loss="softmax_cross_entropy",
        optimizer=onnxtrain.Momentum(),
        batch_norm="train",
        clip_norm=1.0,
    )
    by_role = roles(description(training).states)
    assert by_role["statistic"]
    assert all("running" in name or "mean" in name or "var" in name for name in by_role["statistic"])
    assert "stem.conv.weight" in by_role["parameter"]


def test_entries_of_accumulated_gradients():
    training = onnxtrain.training_model(
        onnxtrain.examples.mlp((4, 8, 3)),
        loss="softmax_cross_entropy",
        optimizer=onnxtrain.Momentum(),
        accumulate=True,
    )
    first, second = description(training, 0), description(training, 1)
    assert first.feeds == {"input": "batch", "target": "target"}
    assert first.loss == "loss"
    assert second.feeds == {"learning_rate": "learning_rate"}
    assert second.loss == "loss"
    assert {"layer1.weight/accumulated", "accumulated_loss"} <= roles(second.states)["optimizer"]


def test_the_graph_of_a_session_carries_no_description():
    trainer = onnxtrain.Trainer(onnxtrain.examples.mlp((4, 8, 3)), loss="softmax_cross_entropy")
    (step,) = trainer.executor.session._steps
    assert not step.step.model.metadata_props


def test_no_step_graph_and_a_later_version():
    with raises_sentence("not_a_step_graph", what="onnxtrain.step"):
        Description.read({})
    later = json.dumps({"version": 2, "feeds": {}, "states": {}, "loss": None})
    with raises_sentence("step_graph_version", got=2, wanted=1):
        Description.read({STEP_KEY: later})


def test_a_training_model_of_somebody_else():
    """Check a loss of another name; inputs that no optimizer reads are targets or the batch."""
    training = onnxtrain.training_model(
        onnxtrain.examples.mlp((4, 8, 3)), loss="softmax_cross_entropy", optimizer=onnxtrain.Momentum()
    )
    renamed = {"loss": "cost", "learning_rate": "rate", "target": "truth"}
    algorithm = training.training_info[0].algorithm
    for value in (*algorithm.input, *algorithm.output):
        value.name = renamed.get(value.name, value.name)
    for node in algorithm.node:
        for names in (node.input, node.output):
            names[:] = [renamed.get(name, name) for name in names]
    training.metadata_props.append(StringStringEntryProto(key="author", value="somebody"))
    found = description(training)
    assert found.feeds == {"input": "batch", "truth": "target", "rate": "learning_rate"}
    assert found.loss == "cost"


@pytest.mark.parametrize("key", ["onnxtrain.dropout_counters", "onnxtrain.recompute"])
@pytest.mark.parametrize("entry", ["{", "5", "null", '{"a": 1}', "[1]", "[" * 100_000])
def test_a_metadata_entry_that_is_not_a_list_of_names(key, entry):
    model = onnxtrain.examples.mlp((4, 8, 3))
    training = onnxtrain.training_model(model, loss="softmax_cross_entropy", optimizer="sgd")
    training.metadata_props.append(StringStringEntryProto(key=key, value=entry))
    with pytest.raises(OnnxTrainError, match=rf"metadata entry {key} is .{{1,84}}; it is a JSON list of ") as caught:
        onnxtrain.lower(training)
    assert "defect" not in str(caught.value)
