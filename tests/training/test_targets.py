"""Targets: which values a loss takes, along which axis labels name classes, and what data decide of it."""

from __future__ import annotations

import itertools

import numpy as np
import onnx
import pytest

import onnxtrain
from onnxtrain.errors import DataError, OptionError
from onnxtrain.training.data import ArrayDataset, TensorSpec, open_dataset
from onnxtrain.training.data.target_checks import BinaryCheck, DistributionCheck, check_labels
from onnxtrain.training.inference.forward import evaluate
from onnxtrain.training.losses import BinaryCrossEntropy, SoftmaxCrossEntropy
from onnxtrain.training.losses.base import label_axis
from onnxtrain.training.trainer import Trainer
from zoo.arrays import assert_same, copied

RNG = np.random.default_rng(3)
X = RNG.normal(size=(12, 4)).astype(np.float32)
BINARY = (RNG.random((12, 5)) > 0.5).astype(np.float32)
SOFT = RNG.dirichlet(np.ones(5), 12)
LABELS = RNG.integers(0, 5, 12)


def trainer(loss="binary_cross_entropy", **options) -> Trainer:
    return Trainer(onnxtrain.examples.mlp((4, 5)), loss=loss, **options)


def spoilt(targets: np.ndarray, value: float) -> np.ndarray:
    result = np.array(targets, np.float64)
    result[3, 1] = value
    return result


WAYS = {
    "step": lambda loss, y: trainer(loss).train_step(X, y),
    "fit": lambda loss, y: trainer(loss).fit((X, y)),
    "list": lambda loss, y: trainer(loss, targets="values").fit([(X, y)]),
    "loader": lambda loss, y: trainer(loss, targets="values").fit(lambda: iter([(X, y)])),
    "dataset": lambda loss, y: trainer(loss).fit(ArrayDataset({"input": X}, y)),
    "validation": lambda loss, y: trainer(loss).fit((X, y[:0:-1][[0] * 12]), validation=(X, y)),
    "evaluate": lambda loss, y: trainer(loss).evaluate((X, y)),
    "untrained": lambda loss, y: evaluate(onnxtrain.examples.mlp((4, 5)), (X, y), loss=loss),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("loss", "targets", "message"),
    [
        ("binary_cross_entropy", spoilt(BINARY, 7), "7 at example 3, but binary_cross_entropy needs numbers from 0 to"),
        ("binary_cross_entropy", spoilt(BINARY, -1), "-1 at example 3, but binary_cross_entropy needs numbers from 0"),
        ("binary_cross_entropy", spoilt(BINARY, np.nan), "the target array.* holds nan at example 3"),
        ("softmax_cross_entropy", spoilt(SOFT, np.nan), "the target array.* holds nan at example 3"),
        ("softmax_cross_entropy", spoilt(SOFT, -1), "-1 at example 3, but softmax_cross_entropy needs numbers from 0"),
        (
            "softmax_cross_entropy",
            np.where(np.arange(12)[:, None] == 3, 1.0, SOFT),
            "a distribution that sums to 5 at example 3, but softmax_cross_entropy needs .* sum to 1 along axis 1",
        ),
        ("mean_squared_error", spoilt(SOFT, np.inf), "the target array.* holds inf at example 3"),
    ],
)
def test_targets_that_a_loss_has_no_use_for(way, loss, targets, message):
    with pytest.raises(DataError, match=message):
        WAYS[way](loss, targets)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("loss", "targets"),
    [
        ("binary_cross_entropy(check_targets=false)", spoilt(BINARY, 7)),
        ("softmax_cross_entropy(check_targets=false)", SOFT * 6),
        ("binary_cross_entropy", BINARY.astype(int)),
        ("binary_cross_entropy", BINARY > 0),
        ("binary_cross_entropy", SOFT),
        ("softmax_cross_entropy", np.eye(5, dtype=np.uint8)[LABELS]),
        ("softmax_cross_entropy", np.round(SOFT, 3).astype(np.float16)),
    ],
)
def test_targets_that_are_taken(way, loss, targets):
    WAYS[way](loss, targets)


def test_the_binary_loss_of_allowed_targets_is_the_formula():
    loss, target = BinaryCrossEntropy(check_targets=False), spoilt(BINARY, 7)
    logits = trainer().predict(X)
    expected = np.mean(np.log1p(np.exp(logits)) - target * logits)
    assert trainer(loss).train_step(X, target) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("bad", [5, -1, -99])
@pytest.mark.parametrize("way", ["step", "fit", "evaluate", "untrained", "dataset"])
def test_labels_that_name_no_class(way, bad):
    labels = np.where(np.arange(12) == 3, bad, LABELS)
    message = rf"label {bad} at example 3, but labels must be 0 to 4 \(5 classes\) or -100, which is ignored"
    with pytest.raises(DataError, match=message):
        WAYS[way]("softmax_cross_entropy", labels)


def test_labels_of_an_unknown_number_of_classes_are_not_negative():
    check_labels(np.array([0, 7, -100]), None, -100)
    with pytest.raises(DataError, match="label -2 at example 1, but labels must be at least 0"):
        check_labels(np.array([0, -2]), None)


def test_labels_as_fractions_are_told_to_be_rounded():
    with pytest.raises(DataError, match=r"has type float64, but the model needs int64: round and convert it first \(a"):
        trainer("softmax_cross_entropy").fit((X, LABELS + 0.5))


def test_targets_of_a_data_set_are_checked_once(monkeypatch):
    counted = []
    monkeypatch.setattr(BinaryCheck, "__call__", lambda self, targets, what, examples: counted.append(len(targets)))
    trainer().fit((X, BINARY), validation=(X[:5], BINARY[:5]), epochs=3)
    assert counted == [12, 5]


def test_a_changed_demand_is_checked_again():
    dataset = ArrayDataset({"input": X}, SOFT * 6)
    dataset.validate()
    with pytest.raises(DataError, match="needs numbers from 0 to 1"):
        dataset.validate(check=DistributionCheck("a loss", 1))


def test_a_one_shot_iterator_says_so_for_validation_too():
    with pytest.raises(DataError, match="one-shot iterator"):
        trainer().fit((X, BINARY), validation=iter([(X, BINARY)]), epochs=2)


# --- labels that do not count


@pytest.mark.parametrize(
    "loss",
    ["softmax_cross_entropy", "softmax_cross_entropy(label_smoothing=0.1)", SoftmaxCrossEntropy(ignore_index=-100)],
)
def test_minus_100_is_ignored_by_the_loss_given_as_text(loss):
    labels = np.where(np.arange(12) < 4, -100, LABELS)
    for accumulate in (1, 3):
        whole, rest = trainer(loss, accumulate=accumulate), trainer(loss)
        assert whole.train_step(X, labels) == pytest.approx(rest.train_step(X[4:], LABELS[4:]), rel=1e-5)
        for name, array in rest.parameters.items():
            np.testing.assert_allclose(whole.parameters[name], array, rtol=1e-4, atol=1e-6)
    measured = trainer(loss).evaluate((X, labels), metrics=["accuracy", "softmax_cross_entropy"])
    kept = trainer(loss).evaluate((X[4:], LABELS[4:]), metrics=["accuracy", "softmax_cross_entropy"])
    assert measured == pytest.approx(kept, rel=1e-5)


@pytest.mark.parametrize("loss", ["softmax_cross_entropy", SoftmaxCrossEntropy((1, 2, 1, 1, 0.5), ignore_index=-100)])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_batch_without_any_label_changes_nothing(loss, accumulate):
    subject = trainer(loss, optimizer=onnxtrain.Momentum(0.1), accumulate=accumulate)
    before = copied(subject.parameters)
    assert subject.train_step(X, np.full(12, -100)) == 0
    assert_same(subject.parameters, before)


def _operators(subject: Trainer) -> set[str]:
    lowered = onnxtrain.lower(subject.training_model())
    return {node.op_type for node in lowered.graph.node}


def test_the_text_spends_no_node_on_ignored_labels_that_data_lack():
    subject = trainer("softmax_cross_entropy", optimizer=onnxtrain.Momentum(0.1))
    subject.fit((X, LABELS))
    assert not {"Equal", "Not"} & _operators(subject)
    labels = np.where(np.arange(12) < 4, -100, LABELS)
    expected = subject.evaluate((X[4:], LABELS[4:]))["loss"]
    assert subject.train_step(X, labels) == pytest.approx(expected, rel=1e-5)
    assert {"Equal", "Not"} <= _operators(subject)
    assert {"Equal", "Not"} <= _operators(trainer(SoftmaxCrossEntropy(ignore_index=-100)))


@pytest.mark.parametrize("form", ["list", "loader"])
def test_a_later_batch_may_hold_ignored_labels(form):
    batches = [(X, LABELS), (X, np.where(np.arange(12) < 4, -100, LABELS))]
    losses = []
    for loss in ("softmax_cross_entropy", SoftmaxCrossEntropy(ignore_index=-100)):
        subject = trainer(loss)
        losses.append(subject.fit(batches if form == "list" else lambda: iter(batches)).rows[0]["loss"])
    assert losses[0] == losses[1]


def test_validation_data_may_hold_ignored_labels_that_training_data_lack():
    labels = np.where(np.arange(12) < 4, -100, LABELS)
    subject = trainer("softmax_cross_entropy", optimizer=onnxtrain.Momentum(0.0))
    row = subject.fit((X, LABELS), validation=(X, labels), metrics=["accuracy"]).rows[0]
    expected = subject.evaluate((X[4:], LABELS[4:]), metrics=["accuracy"])
    assert row["validation_accuracy"] == pytest.approx(expected["accuracy"])
    assert row["validation_loss"] == pytest.approx(expected["loss"], rel=1e-5)


def test_a_training_model_that_is_written_without_data_ignores_them():
    model = onnxtrain.examples.mlp((4, 5))
    made = onnxtrain.training_model(model, loss="softmax_cross_entropy", optimizer=onnxtrain.Momentum(0.1))
    session = onnxtrain.TrainingSession(made)
    labels = np.where(np.arange(12) < 4, -100, LABELS)
    found = session.step({"input": X, "target": labels, "learning_rate": np.float32(0)})["loss"]
    assert found == pytest.approx(trainer("softmax_cross_entropy").train_step(X[4:], LABELS[4:]), rel=1e-5)


def test_nothing_is_ignored_where_the_text_or_the_class_says_so():
    labels = np.where(np.arange(12) < 4, -100, LABELS)
    for loss in ("softmax_cross_entropy(ignore_index=none)", SoftmaxCrossEntropy()):
        with pytest.raises(DataError, match="label -100 at example 0"):
            trainer(loss).train_step(X, labels)


def test_the_number_of_labels_is_exact_in_16_bits():
    text = """<ir_version: 8, opset_import: ["": 18]> m (float16[N,2] x) => (float16[N,2] y)
        <float16[2] w = {1, 1}> { y = Mul(x, w) }"""
    x, y = np.zeros((5000, 2), np.float16), np.zeros(5000, int)
    y[:100] = -100
    found = evaluate(onnx.parser.parse_model(text), (x, y), loss="softmax_cross_entropy", batch_size=5000)
    assert found["loss"] == pytest.approx(np.log(2), rel=2e-3)


# --- the class axis


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
FORMS = {
    "step": lambda t: t.train_step(SIGNALS, SEGMENTS),
    "arrays": lambda t: t.fit((SIGNALS, SEGMENTS)).rows[0]["loss"],
    "list": lambda t: t.fit([(SIGNALS, SEGMENTS)]).rows[0]["loss"],
    "evaluate": lambda t: t.evaluate((SIGNALS, SEGMENTS))["loss"],
}


@pytest.mark.parametrize("length", [10, "L"])
@pytest.mark.parametrize("form", FORMS)
def test_the_shape_of_the_labels_tells_the_class_axis(form, length):
    found = FORMS[form](Trainer(convolution(length=length), loss="softmax_cross_entropy"))
    assert found == pytest.approx(cross_entropy(LOGITS, SEGMENTS, 1), rel=1e-5)


def test_metrics_follow_the_class_axis():
    found = evaluate(convolution(), (SIGNALS, SEGMENTS), loss="softmax_cross_entropy", metrics=["accuracy"])
    assert found["accuracy"] == pytest.approx(np.mean(LOGITS.argmax(1) == SEGMENTS))


def test_where_both_axes_fit_it_is_the_last_of_rank_3_or_the_one_found_before():
    x, y = SIGNALS[..., :6], SEGMENTS[:, :6]
    declared = Trainer(convolution(), loss="softmax_cross_entropy").train_step(x, y)
    assert declared == pytest.approx(cross_entropy(LOGITS[..., :6], y, 2), rel=1e-5)
    told = Trainer(convolution(), loss="softmax_cross_entropy", optimizer=onnxtrain.Momentum(0.0))
    told.train_step(SIGNALS, SEGMENTS)
    assert told.train_step(x, y) == pytest.approx(cross_entropy(LOGITS[..., :6], y, 1), rel=1e-5)
    assert told.evaluate((x, y))["loss"] == pytest.approx(cross_entropy(LOGITS[..., :6], y, 1), rel=1e-5)


@pytest.mark.parametrize("x", [SIGNALS, SIGNALS[..., :6]], ids=["told", "both fit"])
def test_a_final_softmax_tells_the_class_axis(x):
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
        Trainer(convolution(), loss="softmax_cross_entropy").fit((SIGNALS, SEGMENTS[:, :9]))
    with pytest.raises(DataError, match=r"batch 0 has 9 for the dimension 'L' .* but input 'x' of batch 0 has 10"):
        Trainer(convolution(), loss="softmax_cross_entropy").fit([(SIGNALS, SEGMENTS[:, :9])])
    with pytest.raises(DataError, match=r"needs shape \(batch, 6\), but got \(4, 9\).*give the loss axis="):
        Trainer(convolution(), loss="softmax_cross_entropy").train_step(SIGNALS, SEGMENTS[:, :9])


def test_labels_that_are_not_seen_beforehand_need_the_axis():
    def batches():
        return iter([(SIGNALS, SEGMENTS)])

    with pytest.raises(DataError, match=r"batch 0 has shape \(4, 10\).*give the loss axis="):
        Trainer(convolution(), loss="softmax_cross_entropy").fit(batches)
    found = Trainer(convolution(), loss="softmax_cross_entropy(axis=1)").fit(batches).rows[0]["loss"]
    assert found == pytest.approx(cross_entropy(LOGITS, SEGMENTS, 1), rel=1e-5)


def test_distributions_along_another_axis_are_told_from_their_sums():
    soft = np.moveaxis(RNG.dirichlet(np.ones(6), (4, 10)), -1, 1)
    with pytest.raises(DataError, match="sum to 1 along axis 2; they do along axis 1: give the loss axis=1"):
        Trainer(convolution(), loss="softmax_cross_entropy").fit((SIGNALS, soft))
    Trainer(convolution(), loss="softmax_cross_entropy(axis=1)").fit((SIGNALS, soft))


def test_an_axis_that_cannot_be():
    for axis in (0, 3, -3):
        with pytest.raises(OptionError, match=rf"axis is {axis}, but the logits 'y' have rank 3: it is 1 to 2, or"):
            Trainer(convolution(), loss=SoftmaxCrossEntropy(axis=axis))


# --- inputs and outputs of unusual shapes

SCALED = onnx.parser.parse_model(
    """<ir_version: 8, opset_import: ["": 18]> m (float s, float[N,4] x) => (float[N,1] y)
    <float[4,1] w = {1, 2, -1, 0.5}> { z = MatMul(x, w)  y = Mul(z, s) }"""
)
Y = X[:, :1]


def test_a_scalar_input_is_the_same_for_every_example():
    half = np.float32(0.5)
    sources = [{"s": half, "x": X, "y": Y}, ((0.5, X), Y), [((half, X[p : p + 5]), Y[p : p + 5]) for p in (0, 5, 10)]]
    results = []
    for source, accumulate in itertools.product(sources, (1, 2)):
        subject = Trainer(SCALED, loss="mean_squared_error", accumulate=accumulate)
        subject.fit(source, batch_size=5, shuffle=False, epochs=2)
        results.append(np.array(subject.parameters["w"]))
        assert subject.evaluate(source)["loss"] == pytest.approx(
            np.mean((X @ results[-1] / 2 - Y) ** 2, dtype=np.float64), rel=1e-5
        )
    for result in results:
        np.testing.assert_allclose(result, results[0], rtol=1e-5)
    assert Trainer(SCALED, loss="mean_squared_error").predict({"s": 1, "x": X}).shape == (12, 1)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.nan, "input 's' holds nan at example 0"),
        (np.ones(12), r"input 's' has rank 1 \(shape \(12,\)\), but the model needs rank 0: \(\)"),
    ],
)
def test_a_scalar_input_that_does_not_fit(value, message):
    with pytest.raises(DataError, match=message):
        Trainer(SCALED, loss="mean_squared_error").fit({"s": value, "x": X, "y": Y})


def test_scalars_alone_are_no_examples():
    with pytest.raises(DataError, match="the data has no examples: every array of it is a scalar"):
        open_dataset({"s": 1.0}, [TensorSpec("s", np.dtype(np.float32), ())], need_target=False)


def test_an_output_with_the_time_first_trains_by_steps_and_says_so_otherwise():
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


@pytest.mark.torch
def test_iterables_of_batches_train_like_arrays():
    torch = pytest.importorskip("torch")
    batches = [(X[p : p + 4], LABELS[p : p + 4]) for p in (0, 4, 8)]
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(LABELS)), batch_size=4
    )
    sources = [(X, LABELS), batches, tuple(batches), lambda: iter(batches), loader]
    results = []
    for source in sources:
        subject = trainer("softmax_cross_entropy", accumulate=2)
        rows = subject.fit(source, batch_size=4, shuffle=False, epochs=2, validation=source, metrics=["accuracy"]).rows
        results.append([row["loss"] for row in rows] + [rows[-1]["validation_accuracy"]])
    for result in results[1:]:
        assert result == results[0]
