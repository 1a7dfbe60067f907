"""No loss depends on the split of its data: every loss with every option, in batches and micro-batches."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx
import pytest

import onnxtrain
from losses.loss_rows import CLASSES, IGNORED, LOSS_ROWS, NUMBERS, OPTIONS, ROWS, SEQUENCES, WEIGHTS, WORDS_IGNORED
from onnxtrain.losses import LOSSES
from onnxtrain.losses.embedding_losses import EmbeddingLoss
from onnxtrain.losses.groups import GroupLoss
from onnxtrain.plugins.detection.losses import DetectionLoss
from onnxtrain.plugins.more_losses.survival import Cox

CUTS = (12, 7, 5, 2, 1)
"""Batch sizes; 7 and 5 leave a smaller last batch."""

ELSEWHERE = (Cox, DetectionLoss, EmbeddingLoss, GroupLoss)
"""Losses that compare the examples of a batch with each other, and those of test_group_losses.py."""

NOT_TRIED = {
    "axis": "it moves the classes, and changes no number",
    "check_targets": "it changes what is refused",
    "from_logits": "test_probability_forms tries it",
    "teacher": "it is given in every case of distillation",
    "output": "it names an output of the teacher",
    "time_axis": "with 0 the batch is not the first axis, so that nothing cuts it",
    "input_lengths": "it reads an input of the model; the sum is the same",
}


def fits(name, options, targets):
    """Return whether targets fit options: ignored labels need an ignore_index, distributions have no labels."""
    if targets.dtype.kind == "f":
        return not {"chunk", "ignore_index"} & options.keys()
    if name in ("ctc", "transducer"):
        return True
    ignores = name == "next_token" or "ignore_index" in options
    return ignores or not (targets == -100).any()


def cases():
    found = []
    for name, loss in LOSSES.items():
        if issubclass(loss, ELSEWHERE) or name not in LOSS_ROWS:
            continue
        values = {**OPTIONS, **LOSS_ROWS[name].options}
        fields = [field.name for field in dataclasses.fields(loss) if field.name in values]
        alone = [{field: value} for field in fields for value in values[field]]
        together = {field: values[field][0] for field in fields if field != "reduction"}
        for options in [{}, *alone, together, {**together, "reduction": "sum"}]:
            for index, targets in enumerate(LOSS_ROWS[name].targets):
                if fits(name, options, targets):
                    found.append(pytest.param(name, options, index, id=f"{name}-{options}-{index}".replace(" ", "")))
    return found


def made(name, options, folder):
    given = dict(options)
    if name == "distillation":
        teacher = onnxtrain.examples.mlp((3, 6, CLASSES), activation="tanh", seed=7)
        onnx.save(teacher, folder / "teacher.onnx")
        given["teacher"] = folder / "teacher.onnx"
    return LOSSES[name](**given)


def test_every_loss_and_option_is_covered():
    for name, loss in LOSSES.items():
        if not issubclass(loss, ELSEWHERE):
            assert name in LOSS_ROWS, f"the loss {name!r} needs a row in tests/losses/loss_rows.py"
            tried = OPTIONS.keys() | LOSS_ROWS[name].options.keys()
            for field in dataclasses.fields(loss):
                assert (field.name in tried) != (field.name in NOT_TRIED), f"{name}: {field.name}"


FORMULAS = [
    (name, {field: value} if field else {})
    for name, row in LOSS_ROWS.items()
    if row.formula
    for field, values in {"": [None], **row.options}.items()
    for value in values
]


@pytest.mark.parametrize(("name", "options"), FORMULAS)
def test_the_loss_is_its_formula(name, options):
    row = LOSS_ROWS[name]
    trainer = onnxtrain.Trainer(row.model(), loss=LOSSES[name](**options))
    for targets in row.targets:
        wanted = row.formula(trainer.predict(row.x), targets, **options)
        assert trainer.evaluate(row.x, targets)["loss"] == pytest.approx(wanted, rel=1e-5)


def evaluated(name, options, index, weights, folder):
    """Return the loss of the whole dataset by batch size."""
    model, x, targets, *_ = LOSS_ROWS[name]
    trainer = onnxtrain.Trainer(model(), loss=made(name, options, folder))
    return [trainer.evaluate(x, targets[index], sample_weight=weights, batch_size=size)["loss"] for size in CUTS]


@pytest.mark.parametrize(("name", "options", "index"), cases())
def test_the_whole_is_the_weighted_sum_of_its_batches(tmp_path, name, options, index):
    found = evaluated(name, options, index, WEIGHTS if len(options) > 2 else None, tmp_path)
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found, found[0], rtol=2e-5)


@pytest.mark.thorough
@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "options", "index"), cases())
def test_the_whole_is_the_weighted_sum_with_weights_of_examples(tmp_path, name, options, index):
    found = evaluated(name, options, index, WEIGHTS, tmp_path)
    np.testing.assert_allclose(found, found[0], rtol=2e-5)


def stepped(name, options, index, weights, accumulate, folder):
    model, x, targets, *_ = LOSS_ROWS[name]
    loss = made(name, options, folder)
    trainer = onnxtrain.Trainer(model(), loss=loss, optimizer="sgd(lr=0.1)", accumulate=accumulate)
    value = trainer.train_step(x, targets[index], weights)
    return value, trainer.get_weights(flat=True)


def sampled():
    """Return for each loss: defaults, class weights, mixtures, and all options together."""
    wanted = [case for case in cases() if not case.values[1] or len(case.values[1]) > 2]
    return wanted + [
        case for case in cases() if len(case.values[1]) == 1 and {"class_weights", "mix"} & {*case.values[1]}
    ]


@pytest.mark.parametrize(("name", "options", "index"), sampled())
def test_micro_batches_equal_the_step_of_the_batch(tmp_path, name, options, index):
    weights = WEIGHTS if len(options) > 2 else None
    value, whole = stepped(name, options, index, weights, 1, tmp_path)
    for accumulate in (3, ROWS):
        found = stepped(name, options, index, weights, accumulate, tmp_path)
        assert found[0] == pytest.approx(value, rel=2e-5)
        np.testing.assert_allclose(found[1], whole, rtol=2e-5, atol=1e-6)


@pytest.mark.thorough
@pytest.mark.sampled(3)
@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["", "weighted"])
@pytest.mark.parametrize(("name", "options", "index"), cases())
def test_micro_batches_of_every_option(tmp_path, name, options, index, weights):
    value, whole = stepped(name, options, index, weights, 1, tmp_path)
    for accumulate in (2, 3, 5, ROWS):
        found = stepped(name, options, index, weights, accumulate, tmp_path)
        assert found[0] == pytest.approx(value, rel=2e-5)
        np.testing.assert_allclose(found[1], whole, rtol=2e-5, atol=1e-6)


def two_outputs():
    return onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 18]>
        f (float[n, 5, 3] x) => (float[n, 5, 4] words, float[n, 4] kind)
        <float[3, 4] w = {0.5, -1, 0.3, 1, 0.2, 0.4, -0.6, 0.1, 1, -0.3, 0.2, 0.9}, int64[1] axis = {1}> {
            words = MatMul(x, w)  mean = ReduceMean<keepdims=0>(x, axis)  scores = MatMul(mean, w)  kind = Tanh(scores)
        }""")


JOINT = {
    "labels-ignored": ("next_token", onnxtrain.losses.SoftmaxCrossEntropy(ignore_index=-100, weight=0.5)),
    "class-weights": (
        onnxtrain.losses.SoftmaxCrossEntropy(axis=2, ignore_index=-100, class_weights=(1.0, 0.0, 0.5, 3.0)),
        onnxtrain.losses.Focal(ignore_index=-100, class_weights=(1.0, 2.0, 0.5, 3.0)),
    ),
    "sum-beside-mean": (
        onnxtrain.losses.SoftmaxCrossEntropy(axis=2, ignore_index=-100, reduction="sum", weight=0.1),
        onnxtrain.losses.SoftmaxCrossEntropy(ignore_index=-100, class_weights={2: 4.0}),
    ),
    "sums": (
        onnxtrain.losses.NextToken(reduction="sum", weight=0.1),
        onnxtrain.losses.SoftmaxCrossEntropy(ignore_index=-100, reduction="sum"),
    ),
    "mean-beside-labels": ("next_token", "mse"),
}


@pytest.mark.parametrize("kind", JOINT)
@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["", "weighted"])
def test_micro_batches_of_several_outputs_equal_the_step_of_the_batch(kind, weights):
    words, kinds = JOINT[kind]
    targets = {"words": WORDS_IGNORED, "kind": NUMBERS if kinds == "mse" else IGNORED}

    def stepped(accumulate):
        trainer = onnxtrain.Trainer(
            two_outputs(), loss={"words": words, "kind": kinds}, optimizer="sgd(lr=0.1)", accumulate=accumulate
        )
        value = trainer.train_step({"x": SEQUENCES}, targets, weights)
        history = trainer.fit({"x": SEQUENCES}, targets, batch_size=ROWS, sample_weight=weights, progress=False)
        return [value, *(history.rows[0][name] for name in ("loss", "words_loss", "kind_loss"))], trainer.get_weights(
            flat=True
        )

    value, whole = stepped(1)
    for accumulate in (2, 3, 5, ROWS):
        found = stepped(accumulate)
        np.testing.assert_allclose(found[0], value, rtol=2e-5)
        np.testing.assert_allclose(found[1], whole, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("name", LOSS_ROWS)
def test_a_head_of_zeros_has_the_gradient_of_finite_differences(name, tmp_path):
    """Predictions of a new head are all zero: where a formula has its kinks, such as |z| and max(z, 0)."""
    model, inputs, targets, *_ = LOSS_ROWS[name]
    trainer = onnxtrain.Trainer(model(), loss=made(name, {}, tmp_path), optimizer="sgd(lr=1)")
    values = targets[0]
    step = 1e-2
    trainer.parameters["w"][...] = 0.0
    differences = np.zeros_like(trainer.parameters["w"])
    for place in np.ndindex(differences.shape):
        losses = []
        for sign in (1, -1):
            trainer.parameters["w"][...] = 0.0
            trainer.parameters["w"][place] = sign * step
            losses.append(trainer.evaluate(inputs, values, batch_size=ROWS)["loss"])
        differences[place] = (losses[0] - losses[1]) / (2 * step)
    trainer.parameters["w"][...] = 0.0
    trainer.train_step(inputs, values)
    np.testing.assert_allclose(-trainer.parameters["w"], differences, rtol=5e-2, atol=3e-3)
