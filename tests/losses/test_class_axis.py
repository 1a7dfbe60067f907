"""The class axis of labels: inferred from their shape, the model, or data."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import onnxtrain
from onnxtrain.errors import DataError
from onnxtrain.losses import SoftmaxCrossEntropy
from onnxtrain.losses.base import label_axis
from onnxtrain.training.inference.forward import evaluate
from onnxtrain.training.trainer import Trainer
from sentences import raises_sentence

RNG = np.random.default_rng(3)


def convolution(*, length: int | str = "L", classes: int = 6, final: str = "Identity") -> onnx.ModelProto:
    weights = ", ".join(f"{value:.2f}" for value in np.random.default_rng(0).normal(size=2 * classes))
    return onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 18]> m (float[N,2,{length}] x) => (float[N,{classes},{length}] y)
        <float[{classes},2,1] w = {{{weights}}}> {{ z = Conv(x, w)  y = {final}(z) }}"""
    )


def cross_entropy(logits: np.ndarray, labels: np.ndarray, axis: int) -> float:
    z = np.moveaxis(logits.astype(np.float64), axis, -1)
    log_probability = z - np.log(np.exp(z).sum(-1, keepdims=True))
    return -float(np.take_along_axis(log_probability, labels[..., None], -1).mean())


SIGNALS = RNG.normal(size=(4, 2, 10)).astype(np.float32)
SEGMENTS = RNG.integers(0, 6, (4, 10))
LOGITS = np.asarray(Trainer(convolution(), loss="softmax_cross_entropy").predict(SIGNALS))
UNTOLD = convolution(final="Sin")
"""A model whose last nodes do not tell the axis of its outputs."""

FORMS = {
    "step": lambda t: t.train_step(SIGNALS, SEGMENTS),
    "arrays": lambda t: t.fit((SIGNALS, SEGMENTS)).rows[0]["loss"],
    "list": lambda t: t.fit([(SIGNALS, SEGMENTS)]).rows[0]["loss"],
    "evaluate": lambda t: t.evaluate((SIGNALS, SEGMENTS))["loss"],
}


@pytest.mark.parametrize("length", [10, "L"])
@pytest.mark.parametrize("form", FORMS)
def test_the_shape_of_labels_determines_the_class_axis(form, length):
    found = FORMS[form](Trainer(convolution(length=length), loss="softmax_cross_entropy"))
    assert found == pytest.approx(cross_entropy(LOGITS, SEGMENTS, 1), rel=1e-5)


def test_metrics_follow_the_class_axis():
    found = evaluate(convolution(), (SIGNALS, SEGMENTS), loss="softmax_cross_entropy", metrics=["accuracy"])
    assert found["accuracy"] == pytest.approx(np.mean(LOGITS.argmax(1) == SEGMENTS))


def test_where_both_axes_fit_it_is_that_of_the_last_layers_outputs_or_the_one_found_before():
    x, y = SIGNALS[..., :6], SEGMENTS[:, :6]
    for length in (6, "L"):
        for found in (
            Trainer(convolution(length=length), loss="softmax_cross_entropy").train_step(x, y),
            Trainer(convolution(length=length), loss="softmax_cross_entropy").fit((x, y)).rows[0]["loss"],
            evaluate(convolution(length=length), (x, y), loss="softmax_cross_entropy")["loss"],
        ):
            assert found == pytest.approx(cross_entropy(LOGITS[..., :6], y, 1), rel=1e-5)
    linear = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 18]> m (float[N,2,2] x) => (float[N,2,2] y)
        <float[2,2] w = {1, 2, -1, 0.5}> { y = MatMul(x, w) }"""
    )
    x2, y2 = SIGNALS[..., :2], SEGMENTS[:, :2] % 2
    subject = Trainer(linear, loss="softmax_cross_entropy")
    expected = cross_entropy(x2 @ np.array(subject.parameters["w"]), y2, 2)
    assert subject.train_step(x2, y2) == pytest.approx(expected, rel=1e-5)
    trainer = Trainer(convolution(), loss="softmax_cross_entropy", optimizer=onnxtrain.Momentum(0.0))
    trainer.train_step(SIGNALS, SEGMENTS)
    assert trainer.train_step(x, y) == pytest.approx(cross_entropy(LOGITS[..., :6], y, 1), rel=1e-5)
    assert trainer.evaluate((x, y))["loss"] == pytest.approx(cross_entropy(LOGITS[..., :6], y, 1), rel=1e-5)


@pytest.mark.parametrize("x", [SIGNALS, SIGNALS[..., :6]], ids=["one axis fits", "both fit"])
def test_a_final_softmax_determines_the_class_axis(x):
    y = SEGMENTS[:, : x.shape[2]]
    found = evaluate(convolution(final="Softmax<axis = 1>"), (x, y), loss="softmax_cross_entropy")
    assert found["loss"] == pytest.approx(cross_entropy(LOGITS[..., : x.shape[2]], y, 1), rel=1e-5)


@pytest.mark.parametrize(("final", "axis"), [("Softmax<axis = 2>", 1), ("Softmax<axis = 1>", 2)])
def test_a_softmax_along_another_axis_than_given_is_part_of_the_model(final, axis):
    model = convolution(final=final)
    y = RNG.integers(0, 6, (4, 10)) if axis == 1 else RNG.integers(0, 10, (4, 6))
    output = np.asarray(Trainer(model, loss=SoftmaxCrossEntropy(axis=axis)).predict(SIGNALS))
    found = Trainer(model, loss=SoftmaxCrossEntropy(axis=axis)).train_step(SIGNALS, y)
    assert found == pytest.approx(cross_entropy(output, y, axis), rel=1e-5)


def test_images_with_the_classes_last():
    text = """<ir_version: 8, opset_import: ["": 18]> m (float[N,H,W,2] x) => (float[N,H,W,3] y)
        <float[2,3] w = {0.5, -1, 2, 1, 0.3, -0.2}> { y = MatMul(x, w) }"""
    x, y = RNG.normal(size=(2, 4, 5, 2)).astype(np.float32), RNG.integers(0, 3, (2, 4, 5))
    subject = Trainer(onnx.parser.parse_model(text), loss="softmax_cross_entropy")
    expected = cross_entropy(np.asarray(subject.predict(x)), y, 3)
    assert subject.train_step(x, y) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("shape", "labels", "sizes", "expected"),
    [
        (("N", "T", 50), (8, 16), {}, 2),
        (("N", 6, "L"), (4, 10), {}, 1),
        (("N", "C", "L"), (4, 10), {}, 2),
        (("N", "C", "L"), (4, 10), {"C": 6, "L": 10}, 1),
        (("N", None, None), (4, 10), {}, 2),
        (("N", 6, 6), (4, 6), {}, 2),
        (("N", 6, 7), (4, 9), {}, 2),
        (("N", "S", "S", 3), (4, 9, 9), {}, 3),
        (("N", 3, "S", "S"), (4, 9, 9), {}, 1),
        (("N", 5), (4,), {}, 1),
    ],
)
def test_the_rule_of_the_class_axis(shape, labels, sizes, expected):
    preferred = 2 if len(shape) == 3 else 1
    assert label_axis(shape, labels, sizes, preferred) == expected


def test_labels_that_fit_no_axis():
    message = r"shape \(4, 9\), but .* \(batch, 6\).*shape of the logits, \(N, 6, L\), .* here 2; .* the loss axis="
    with pytest.raises(DataError, match=message):
        Trainer(UNTOLD, loss="softmax_cross_entropy").fit((SIGNALS, SEGMENTS[:, :9]))
    with raises_sentence(
        "dimension_differs",
        what="the target array of batch 0",
        got=9,
        wanted=10,
        symbol="L",
        first="input 'x' of batch 0",
    ):
        Trainer(UNTOLD, loss="softmax_cross_entropy").fit([(SIGNALS, SEGMENTS[:, :9])])
    with raises_sentence(
        "array_shape",
        what="the target array of the batch",
        got=(4, 9),
        wanted=("N", 6),
        needed="(batch, 6)",
        hint="give the loss axis=",
    ):
        Trainer(UNTOLD, loss="softmax_cross_entropy").train_step(SIGNALS, SEGMENTS[:, :9])


def test_labels_of_a_stream_need_the_axis_that_no_layer_tells():
    def batches():
        return iter([(SIGNALS, SEGMENTS)])

    with raises_sentence("array_shape", what="the target array of batch 0", got=(4, 10), hint="give the loss axis="):
        Trainer(UNTOLD, loss="softmax_cross_entropy").fit(batches)
    for loss in ("softmax_cross_entropy(axis=1)", "softmax_cross_entropy"):
        found = Trainer(convolution(), loss=loss).fit(batches).rows[0]["loss"]
        assert found == pytest.approx(cross_entropy(LOGITS, SEGMENTS, 1), rel=1e-5)


def test_the_axis_of_distributions_follows_from_their_sums():
    soft = np.moveaxis(RNG.dirichlet(np.ones(6), (4, 10)), -1, 1)
    with raises_sentence("distribution_sum", axis=2, hint="axis 1 has this sum: give the loss"):
        Trainer(UNTOLD, loss="softmax_cross_entropy").fit((SIGNALS, soft))
    Trainer(UNTOLD, loss="softmax_cross_entropy(axis=1)").fit((SIGNALS, soft))
    Trainer(convolution(), loss="softmax_cross_entropy").fit((SIGNALS, soft))


def test_invalid_axes():
    for axis in (0, 3, -3):
        with raises_sentence("loss_axis", what="y", got=axis, wanted=3):
            Trainer(convolution(), loss=SoftmaxCrossEntropy(axis=axis))


def test_an_output_with_time_first_trains_by_steps_only():
    text = """<ir_version: 8, opset_import: ["": 18]> m (float[N,T,2] x) => (float[T,N,3] y)
        <float[2,3] w = {1, 2, 3, -1, 0.5, 0}> { z = MatMul(x, w)  y = Transpose<perm = [1, 0, 2]>(z) }"""
    x, y = RNG.normal(size=(8, 5, 2)).astype(np.float32), RNG.integers(0, 3, (5, 8))
    subject = Trainer(onnx.parser.parse_model(text), loss="softmax_cross_entropy")
    expected = cross_entropy(np.moveaxis(x @ subject.parameters["w"], 1, 0), y, 2)
    assert subject.train_step(x, y) == pytest.approx(expected, rel=1e-5)
    message = "The output 'y' has the batch on axis 1, .* transpose the output in the model, or give .* train_step"
    for source in ((x, y), (x, y.T), [(x, y)]):
        with pytest.raises(DataError, match=message):
            subject.fit(source)
        with pytest.raises(DataError, match=message):
            subject.evaluate(source)
