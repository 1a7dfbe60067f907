"""Comparison of a step on a provider with the CPU: differences are located down to the operator."""

from __future__ import annotations

import math

import numpy as np
import pytest

import onnxtrain
from faulty_provider import add_faulty_provider
from onnxtrain.errors import OptionError
from onnxtrain.plugins.provider_check import provider_check
from onnxtrain.plugins.provider_check.provider_check import check_provider, difference
from onnxtrain.runtime.options import RuntimeOptions
from onnxtrain.training.examples import digits_cnn, mlp, small_transformer
from sentences import raises_sentence

HERE = RuntimeOptions(threads=1, kernels=False)


def _trainer(model, **options):
    return onnxtrain.Trainer(model, **{"loss": "softmax_cross_entropy", "runtime": HERE, **options})


@pytest.fixture
def faulty(monkeypatch):
    return add_faulty_provider(monkeypatch)


@pytest.mark.parametrize("optimizer", ["adam", "momentum", "lion"])
def test_a_provider_that_agrees(faulty, optimizer):
    report = check_provider(_trainer(mlp((4, 8, 3)), optimizer=optimizer), "faulty")
    assert report.agrees
    assert report.largest == 0.0
    assert report.provider == "FaultyExecutionProvider"
    assert (report.outputs, report.nodes) == ([], [])
    assert report.compared == 6 + 4 * {"adam": 2, "momentum": 1, "lion": 1}[optimizer]


def test_the_operator_that_differs_is_named(faulty):
    faulty[0]["Relu"] = "Softplus"
    report = check_provider(_trainer(mlp((4, 8, 3))), "faulty")
    assert not report.agrees
    assert "loss" in [each.name for each in report.outputs]
    assert {each.operator for each in report.nodes} == {"Relu"}
    assert 0.01 < report.largest < math.inf


def test_the_operator_that_is_refused_is_named(faulty):
    faulty[1].add("Relu")
    report = check_provider(_trainer(mlp((4, 8, 3))), "faulty")
    assert report.failure == "no kernel for Relu"
    assert report.largest == math.inf
    assert [(each.operator, each.reason) for each in report.nodes] == [("Relu", "no kernel for Relu")]


@pytest.mark.parametrize(
    ("model", "data"),
    [
        (digits_cnn, (np.ones((5, 1, 8, 8), np.float32), np.arange(5))),
        (
            small_transformer,
            ({"input_ids": np.ones((5, 4), int), "attention_mask": np.ones((5, 4), int)}, np.zeros(5, int)),
        ),
    ],
)
def test_data_and_random_numbers(model, data):
    trainer = _trainer(model())
    before = trainer.get_weights()
    for given in (None, data):
        report = check_provider(trainer, "cpu", given)
        assert report.agrees
        assert report.largest == 0.0
    assert all(np.array_equal(before[name], value) for name, value in trainer.get_weights().items())


def test_static_shapes(monkeypatch):
    shapes = []
    create = provider_check.create_session

    def watched(model, options):
        shapes.append([str(size) for size in model.graph.inputs[0].shape])
        return create(model, options)

    monkeypatch.setattr(provider_check, "create_session", watched)
    check_provider(_trainer(mlp((4, 3))), "cpu", batch_size=6, sizes={"N": 6})
    assert shapes == [["6", "4"]] * 2
    with pytest.raises(OptionError, match="There is no dimension 'M'"):
        check_provider(_trainer(mlp((4, 3))), "cpu", sizes={"M": 6})


def test_a_provider_that_is_not_there():
    with raises_sentence("unknown_provider", what="providers", got="nowhere"):
        check_provider(_trainer(mlp((4, 3))), "nowhere")


def test_inputs_that_cannot_be_made_up():
    model = mlp((4, 3))
    model.graph.input[0].type.tensor_type.ClearField("shape")
    with raises_sentence("shape_unknown", what="input"):
        check_provider(_trainer(model), "cpu")


@pytest.mark.parametrize(
    ("found", "expected", "size"),
    [
        ([1.0, 2.0], [1.0, 2.5], 0.2),
        ([1.0, math.nan], [1.0, 2.0], math.inf),
        ([1.0, math.nan], [1.0, math.nan], 0.0),
        ([math.inf, 1.0], [math.inf, 1.0], 0.0),
        ([-math.inf, 1.0], [math.inf, 1.0], math.inf),
        ([1.0], [1.0, 2.0], math.inf),
        ([0.0], [0.0], 0.0),
        ([], [], 0.0),
    ],
)
def test_the_size_of_a_difference(found, expected, size):
    assert difference(np.array(found, np.float32), np.array(expected, np.float32)) == pytest.approx(size)
    assert difference(np.array([1], np.int64), np.array([1.0], np.float32)) == math.inf
