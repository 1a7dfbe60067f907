"""Losses given as text: names with arguments."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from onnxtrain.errors import OptionError
from onnxtrain.losses import LOSSES, BinaryCrossEntropy, Huber, MeanSquaredError, SoftmaxCrossEntropy
from onnxtrain.losses.custom_loss import ModelLoss
from onnxtrain.losses.loss_choice import resolve_loss
from onnxtrain.operators.call_text import read_call, read_literal
from sentences import raises_sentence

pytestmark = pytest.mark.sampled(1)  # each case is cheap


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("softmax_cross_entropy", SoftmaxCrossEntropy(ignore_index=-100)),
        ("softmax_cross_entropy()", SoftmaxCrossEntropy(ignore_index=-100)),
        (
            "softmax_cross_entropy(axis=1, ignore_index=-1, label_smoothing=0.1)",
            SoftmaxCrossEntropy(axis=1, ignore_index=-1, label_smoothing=0.1),
        ),
        (
            "softmax_cross_entropy( class_weights = [1, 2.5, 0], ignore_index = none )",
            SoftmaxCrossEntropy(class_weights=(1, 2.5, 0)),
        ),
        ("softmax_cross_entropy((1, 2), 0.1)", SoftmaxCrossEntropy((1, 2), 0.1, ignore_index=-100)),
        ("softmax_cross_entropy(check_targets=False)", SoftmaxCrossEntropy(ignore_index=-100, check_targets=False)),
        ("binary_cross_entropy(positive_weight=2, check_targets=false)", BinaryCrossEntropy(2.0, check_targets=False)),
        (" huber ( 0.5 ) ", Huber(0.5)),
        ("huber(delta=1e-3)", Huber(0.001)),
        ("mean_squared_error()", MeanSquaredError()),
        ("output:huber(1)", "output:huber(1)"),
        ("folder/loss(1).onnx", ModelLoss(Path("folder/loss(1).onnx"))),
    ],
)
def test_a_text_is_a_loss(text, expected):
    assert resolve_loss(text) == (expected.removeprefix("output:") if isinstance(expected, str) else expected)


@pytest.mark.parametrize("name", LOSSES)
def test_every_argument_of_every_loss_can_be_written(name):
    loss = resolve_loss("distillation(teacher='t.onnx')" if name == "distillation" else name)
    values = {field.name: getattr(loss, field.name) for field in dataclasses.fields(loss)}
    written = ", ".join(f"{key}={str(value) if isinstance(value, Path) else value!r}" for key, value in values.items())
    assert resolve_loss(f"{name}({written})") == loss


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "softmax_cross_entropy(axs=1)",
            r"'softmax_cross_entropy\(axs=1\)' gives softmax_cross_entropy unknown arguments; it has "
            r"class_weights, label_smoothing, ignore_index, axis, check_targets, chunk, weight, reduction, "
            r"from_logits\.",
        ),
        ("mean_squared_error(2)", r"gives mean_squared_error unknown arguments; it has weight, reduction\."),
        ("huber(1, 2)", r"gives huber unknown arguments; it has delta, weight, reduction\."),
        ("huber(1, delta=2)", r"gives huber unknown arguments; it has delta, weight, reduction\."),
        (
            "softmax_cross_entropy(axis=last)",
            r"axis is 'last' in 'softmax_cross_entropy\(axis=last\)'; it needs an integer",
        ),
        ("softmax_cross_entropy(axis=1.5)", "axis is '1.5' .* it needs an integer"),
        ("softmax_cross_entropy(axis=true)", "axis is 'true' .* it needs an integer"),
        ("softmax_cross_entropy(label_smoothing=none)", "label_smoothing is 'none' .* it needs a number"),
        ("softmax_cross_entropy(class_weights=3)", r"class_weights is '3' .* it needs numbers such as \(1, 2.5\)"),
        ("binary_cross_entropy(check_targets=0)", "check_targets is '0' .* it needs true or false"),
        ("huber(-1)", r"delta is -1\.0; the Huber loss needs a finite number above 0"),
        ("huber(__import__('os'))", "delta is .* it needs a number"),
        (
            "wing(1)",
            r"There is no loss 'wing\(1\)'; use softmax_cross_entropy, .*huber, .*each with arguments as in 'hu",
        ),
        ("huber(1", r"There is no loss 'huber\(1'"),
        ("huber(delta=1, delta=2)", "There is no loss 'huber"),
        ("", "There is no loss ''"),
        ("\N{BUG}[bold]", r"There is no loss '\N{BUG}\[bold\]'"),
    ],
)
def test_invalid_text(text, message):
    with pytest.raises(OptionError, match=message):
        resolve_loss(text)


def test_a_class_instead_of_an_object_is_refused():
    with raises_sentence("loss_is_a_class", what="loss", got="Huber"):
        resolve_loss(Huber)


def test_further_arguments_replace_those_of_the_text():
    assert resolve_loss("huber(0.5)", delta=2.0) == Huber(2.0)
    assert resolve_loss(SoftmaxCrossEntropy(axis=2), axis=1).axis == 1
    with raises_sentence("loss_argument", what="axis", got=1, shown="huber"):
        resolve_loss("huber", axis=1)
    with raises_sentence("loss_argument", what="axis", got=1, wanted=[], shown="output:cost", known="none"):
        resolve_loss("output:cost", axis=1)


@pytest.mark.parametrize("text", ["", "a(", "a)", "a(1))", "a(1]", "1a", "a b", "a(x=1, 2)", "A"])
def test_text_that_is_not_a_call(text):
    assert read_call(text) is None


@pytest.mark.parametrize(
    "text", ["{[]: 1}", "{{}}", "(" * 10_000, "-" * 10_000 + "1", "9" * 5000, "'" * 3, "x", "1 +", "1" * 2**21]
)
def test_literals_of_anyone_are_values_or_value_errors(text):
    with pytest.raises(ValueError, match="literal"):
        read_literal(text)
    with pytest.raises(OptionError):
        resolve_loss(f"huber(delta={text[:9999]})")
