"""A session failure is attributed to the model if ONNX Runtime rejects it; other failures are raised unchanged."""

from __future__ import annotations

import inspect

import numpy as np
import onnx
import pytest
from onnx import parser

import onnxtrain
from onnxtrain.errors import OptionError, TrainingHint
from onnxtrain.model_file.validity import refuses_invalid, why_not_taken
from onnxtrain.training.inference.forward import evaluate, predict
from sentences import raises_sentence

GOOD = """<ir_version: 8, opset_import: ["": 18]>
f (float[N, 4] x) => (float[N, 3] y) <float[4, 3] w = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}> { y = MatMul(x, w) }"""
BAD = GOOD.replace("MatMul(x, w)", "MatMul(s, w)  s = ReduceSum <keepdims = 0> (x)")  # a scalar has no columns


@pytest.fixture
def models(tmp_path):
    found = {name: parser.parse_model(text) for name, text in (("good", GOOD), ("bad", BAD))}
    onnx.save(found["bad"], tmp_path / "bad.onnx")
    return found | {"bad file": tmp_path / "bad.onnx"}


X, Y = np.ones((2, 4), np.float32), np.ones((2, 3), np.float32)
USES = {
    "inspect": lambda model: onnxtrain.inspect(model),
    "gradient": lambda model: onnxtrain.gradient(model),
    "evaluate": lambda model: evaluate(model, (X, Y), loss="mean_squared_error"),
    "predict": lambda model: predict(model, X),
    "training_model": lambda model: onnxtrain.training_model(
        model, loss="mean_squared_error", optimizer=onnxtrain.Adam()
    ),
    "Trainer": lambda model: onnxtrain.Trainer(model, loss="mean_squared_error").train_step(X, Y),
    "lower": lambda model: onnxtrain.lower(model),
}


def break_everything(monkeypatch) -> None:
    """Make the first step of every use fail like a rule that meets a rank of zero."""

    def fail(*arguments, **options):
        raise IndexError("tuple index out of range")

    monkeypatch.setattr("onnxtrain.model_file.file.ModelFile.load", fail)
    monkeypatch.setattr("onnxtrain.lowering.lower.read_training_model", fail)


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("name", ["bad", "bad file"])
def test_a_failure_on_an_invalid_model_is_the_models(use, name, models, monkeypatch):
    break_everything(monkeypatch)
    label = "The model" if name == "bad" else f"'{models[name]}'"
    with raises_sentence("rejected_by_runtime", what=label) as caught:
        USES[use](models[name])
    assert "MatMul" in caught.value.got
    assert isinstance(caught.value.__cause__, IndexError)


@pytest.mark.parametrize("use", USES)
def test_a_failure_on_a_valid_model_is_raised_unchanged(use, models, monkeypatch):
    break_everything(monkeypatch)
    with pytest.raises(IndexError, match="tuple index out of range"):
        USES[use](models["good"])


@pytest.mark.parametrize("use", ["gradient", "evaluate", "predict", "Trainer"])
def test_what_only_rules_would_find_is_refused(use, models):
    with pytest.raises(onnxtrain.errors.OnnxTrainError):
        USES[use](models["bad"])


def test_a_step_that_cannot_be_built_is_the_models_fault(models, monkeypatch):
    trainer = onnxtrain.Trainer(models["bad"], loss="mean_squared_error")

    def fail(*arguments, **options):
        raise IndexError("tuple index out of range")

    monkeypatch.setattr("onnxtrain.lowering.lower.lower_graph", fail)
    with raises_sentence("rejected_by_runtime", what="The model"):
        trainer.train_step(X, Y)


@pytest.mark.parametrize(
    "error", [OptionError("no"), OSError(28, "full"), MemoryError(), KeyboardInterrupt()], ids=repr
)
def test_errors_that_say_enough_pass(error, models):
    @refuses_invalid()
    def fail(model):
        raise error

    with pytest.raises(type(error)) as caught:
        fail(models["bad"])
    assert caught.value is error


def test_operators_of_other_tools_are_not_a_fault():
    model = parser.parse_model(
        GOOD.replace('["": 18]', '["": 18, "own": 1]').replace("MatMul(x, w)", "own.Mystery(x, w)")
    )
    assert why_not_taken(model) is None
    assert "MatMul" in (why_not_taken(parser.parse_model(BAD)) or "")
    assert why_not_taken(parser.parse_model(GOOD)) is None


def test_signatures_are_those_of_the_functions():
    assert [*inspect.signature(onnxtrain.gradient).parameters][:3] == ["model", "y", "xs"]
    assert [*inspect.signature(onnxtrain.Trainer).parameters][:2] == ["model", "loss"]


def test_hints_are_warnings_of_the_callers_line(models):
    for use in ("Trainer", "training_model"):
        options = {} if use == "Trainer" else {"optimizer": onnxtrain.Adam()}
        with pytest.warns(TrainingHint) as seen:
            getattr(onnxtrain, use)(models["good"], loss="mean_squared_error", dropout=True, **options)
        assert seen[0].filename == __file__
