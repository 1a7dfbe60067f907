"""Losses on several outputs, with weights and reductions: against PyTorch, in every data format, in histories."""

from __future__ import annotations

import pickle

import numpy as np
import onnx
import pytest

import onnxtrain
from onnxtrain.errors import CheckpointError, DataError, OptionError
from onnxtrain.losses import Huber, MeanSquaredError, SoftmaxCrossEntropy
from onnxtrain.runtime.options import RuntimeOptions
from sentences import raises_sentence

RNG = np.random.default_rng(5)
X = RNG.standard_normal((12, 4)).astype(np.float32)
KIND = RNG.integers(0, 3, 12)
PLACE = (3 * RNG.standard_normal((12, 2))).astype(np.float32)
BOTH = {"kind": KIND, "place": PLACE}
LOSSES = {"kind": "cross_entropy", "place": Huber(weight=0.1)}


def two_outputs(batch="n"):
    rng = np.random.default_rng(0)
    arrays = {
        name: rng.standard_normal(shape).astype(np.float32)
        for name, shape in (("body", (4, 5)), ("kind_weight", (5, 3)), ("place_weight", (5, 2)))
    }
    model = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 18]>
        f (float[{batch},4] x, float[4,5] body, float[5,3] kind_weight, float[5,2] place_weight)
            => (float[{batch},3] kind, float[{batch},2] place)
        {{ h = MatMul(x, body) a = Tanh(h) kind = MatMul(a, kind_weight) place = MatMul(a, place_weight) }}""")
    for value in list(model.graph.input)[1:]:
        model.graph.initializer.append(onnx.numpy_helper.from_array(arrays[value.name], value.name))
        model.graph.input.remove(value)
    return model


def trainer(loss=None, batch="n", **options):
    options = {"optimizer": "sgd(lr=0.1)", **options}
    return onnxtrain.Trainer(two_outputs(batch), loss=loss or LOSSES, **options)


def of_torch(loss, steps=20):
    """Return weights and losses of PyTorch after some steps."""
    torch = pytest.importorskip("torch")
    tensors = {t.name: onnx.numpy_helper.to_array(t).copy() for t in two_outputs().graph.initializer}
    parameters = {name: torch.nn.Parameter(torch.from_numpy(array)) for name, array in tensors.items()}
    optimizer, losses = torch.optim.SGD(parameters.values(), lr=0.1), []
    for _ in range(steps):
        optimizer.zero_grad()
        a = torch.tanh(torch.from_numpy(X) @ parameters["body"])
        value = loss(
            torch, a @ parameters["kind_weight"], a @ parameters["place_weight"], *map(torch.from_numpy, (KIND, PLACE))
        )
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return {name: parameter.detach().numpy() for name, parameter in parameters.items()}, losses


@pytest.mark.torch
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (
            LOSSES,
            lambda torch, k, p, yk, yp: (
                torch.nn.functional.cross_entropy(k, yk) + 0.1 * torch.nn.functional.huber_loss(p, yp)
            ),
        ),
        (
            {
                "place": MeanSquaredError(weight=0.02, reduction="sum"),
                "kind": SoftmaxCrossEntropy(class_weights={1: 3.0}),
            },
            lambda torch, k, p, yk, yp: (
                0.02 * torch.nn.functional.mse_loss(p, yp, reduction="sum")
                + torch.nn.functional.cross_entropy(k, yk, weight=torch.tensor([1.0, 3.0, 1.0]))
            ),
        ),
    ],
)
def test_steps_match_pytorch(ours, theirs):
    weights, losses = of_torch(theirs)
    learner = trainer(ours)
    np.testing.assert_allclose([learner.train_step(X, BOTH) for _ in losses], losses, rtol=1e-5)
    for name, array in weights.items():
        np.testing.assert_allclose(learner.parameters[name], array, rtol=1e-4, atol=1e-5, err_msg=name)


def test_the_parts_of_a_step_are_known():
    learner = trainer()
    loss = learner.train_step(X, BOTH)
    parts = learner.loss_parts
    assert list(parts) == ["kind_loss", "place_loss"]
    assert loss == pytest.approx(parts["kind_loss"] + 0.1 * parts["place_loss"], rel=1e-6)
    alone = onnxtrain.Trainer(two_outputs(), loss=Huber(), output="place", optimizer="sgd(lr=0.1)")
    assert alone.train_step(X, PLACE) == pytest.approx(parts["place_loss"], rel=1e-6)
    assert alone.loss_parts == {}


def test_micro_batches_match_the_batch():
    for reduction in ("mean", "sum"):
        loss = {"kind": SoftmaxCrossEntropy(reduction=reduction), "place": Huber(weight=0.1, reduction=reduction)}
        one, several = (trainer(loss, accumulate=accumulate) for accumulate in (1, 4))
        for learner in (one, several):
            learner.train_step(X, BOTH)
        assert several.loss_parts == pytest.approx(one.loss_parts, rel=1e-5)
        for name, array in one.parameters.items():
            np.testing.assert_allclose(several.parameters[name], array, rtol=1e-4, atol=1e-6, err_msg=name)
    sums = [
        onnxtrain.Trainer(two_outputs(), loss="mse(reduction=sum)", output="place", accumulate=accumulate)
        for accumulate in (1, 3)
    ]
    assert sums[0].train_step(X, PLACE) == pytest.approx(sums[1].train_step(X, PLACE), rel=1e-5)


def batches():
    return [(X[:6], {"kind": KIND[:6], "place": PLACE[:6]}), (X[6:], {"kind": KIND[6:], "place": PLACE[6:]})]


@pytest.mark.parametrize(
    "data",
    [
        (X, BOTH),
        ({"x": X}, BOTH),
        {"x": X, **BOTH},
        batches(),
        [{"x": x, **y} for x, y in batches()],
        batches,
        (X, {"kind": KIND[:, None].astype(np.float32), "place": PLACE.astype(np.float64)}),
    ],
    ids=["tuple", "mappings", "mapping", "list", "list of mappings", "function", "other forms"],
)
def test_data_formats(data):
    learner, expected = trainer(), trainer()
    expected.fit(X, BOTH, epochs=2, batch_size=6, shuffle=False)
    history = learner.fit(data, epochs=2, batch_size=6, shuffle=False)
    assert list(history.rows[0]) == ["epoch", "step", "loss", "learning_rate", "kind_loss", "place_loss"]
    for name, array in expected.parameters.items():
        np.testing.assert_allclose(learner.parameters[name], array, rtol=1e-6, err_msg=name)


def test_data_in_a_file(tmp_path):
    np.savez(tmp_path / "data.npz", x=X, **BOTH)
    learner, expected = trainer(), trainer()
    learner.fit(tmp_path / "data.npz", batch_size=6)
    expected.fit(X, BOTH, batch_size=6)
    np.testing.assert_array_equal(learner.parameters["body"], expected.parameters["body"])


def test_histories_and_evaluations_have_parts_and_metrics():
    learner = trainer()
    history = learner.fit(X, BOTH, validation=0.25, metrics={"kind": "accuracy", "place": ["mae", "r2"]}, epochs=2)
    row = history.rows[-1]
    assert row["loss"] == pytest.approx(row["kind_loss"] + 0.1 * row["place_loss"], rel=1e-5)
    found = learner.evaluate(X, BOTH, metrics={"kind": "accuracy", "place": ["mae", "r2"]}, batch_size=5)
    assert {f"val_{name}" for name in found} <= set(row)
    outputs = learner.predict(X)
    assert found["kind_accuracy"] == np.mean(outputs["kind"].argmax(1) == KIND)
    assert found["place_mae"] == pytest.approx(np.abs(outputs["place"] - PLACE).mean(), rel=1e-5)
    assert found["loss"] == pytest.approx(found["kind_loss"] + 0.1 * found["place_loss"], rel=1e-6)
    for name, output, loss in (("kind_loss", "kind", "cross_entropy"), ("place_loss", "place", "huber")):
        alone = onnxtrain.evaluate(learner.model(), (X, BOTH[output]), loss=loss, output=output)
        assert found[name] == pytest.approx(alone["loss"], rel=1e-5)
    again = onnxtrain.evaluate(learner.model(), (X, BOTH), loss=LOSSES, metrics={"kind": "accuracy"})
    assert again["loss"] == pytest.approx(found["loss"], rel=1e-5)


def test_a_sum_is_the_sum_over_all_data():
    found = [
        onnxtrain.evaluate(
            two_outputs(), (X, PLACE), loss="mse(reduction=sum, weight=0.5)", output="place", batch_size=n
        )
        for n in (5, 12)
    ]
    prediction = onnxtrain.predict(two_outputs(), X)["place"]
    assert found[0]["loss"] == pytest.approx(found[1]["loss"], rel=1e-5)
    assert found[0]["loss"] == pytest.approx(0.5 * ((prediction - PLACE) ** 2).sum(), rel=1e-5)


def test_sample_weights_apply_to_all_losses():
    weights = np.where(np.arange(12) < 6, 2.0, 0.0)
    learner, half = trainer(), trainer()
    learner.train_step(X, BOTH, sample_weight=weights)
    half.train_step(X[:6], {"kind": KIND[:6], "place": PLACE[:6]})
    np.testing.assert_allclose(learner.parameters["body"], half.parameters["body"], rtol=1e-5, atol=1e-6)


def test_a_fixed_batch_is_padded():
    whole = trainer().evaluate(X, BOTH, metrics={"kind": "accuracy"})
    assert trainer(batch="5").evaluate(X, BOTH, metrics={"kind": "accuracy"}) == pytest.approx(whole, rel=1e-5)
    learner, expected = trainer(batch="8"), trainer()
    few = {name: array[:5] for name, array in BOTH.items()}
    assert learner.train_step(X[:5], few) == pytest.approx(expected.train_step(X[:5], few), rel=1e-5)
    np.testing.assert_allclose(learner.parameters["body"], expected.parameters["body"], rtol=1e-5, atol=1e-6)


def test_checkpoints_resume_within_an_epoch(tmp_path):
    def fit(learner, epochs, **options):
        return learner.fit(X, BOTH, epochs=epochs, batch_size=4, checkpoint=tmp_path, checkpoint_every=1, **options)

    class Stop:
        def on_step_end(self, state):
            if state.step == 4:
                state.request_stop("for the test")

    fit(trainer(), 3, callbacks=[Stop()])
    resumed, whole = trainer(), trainer()
    rows = fit(resumed, 3, resume=True, callbacks=[Stop()]).rows
    assert rows == whole.fit(X, BOTH, epochs=3, batch_size=4).rows
    assert resumed.parameters["body"].tobytes() == whole.parameters["body"].tobytes()
    with pytest.raises(CheckpointError, match="loss has changed"):
        fit(trainer({"kind": "cross_entropy", "place": Huber(weight=0.2)}), 4, resume=True)


def test_training_models_and_pickles_have_all_losses():
    proto = onnxtrain.training_model(two_outputs(), loss=LOSSES, optimizer="sgd")
    session = onnxtrain.TrainingSession(proto, runtime=RuntimeOptions(kernels=False))
    feeds = {"x": X, "kind_target": KIND, "place_target": PLACE, "learning_rate": np.float32(0.1)}
    found = session.step(feeds)
    learner = trainer()
    assert found["loss"] == pytest.approx(learner.train_step(X, BOTH), rel=1e-6)
    assert {name: float(found[name]) for name in ("kind_loss", "place_loss")} == pytest.approx(learner.loss_parts)
    again = pickle.loads(pickle.dumps(learner))
    assert again.train_step(X, BOTH) == learner.train_step(X, BOTH)


def test_a_step_takes_the_batches_of_fit():
    expected = trainer().train_step(X, BOTH)
    for batch in ({"x": X, **BOTH}, (X, BOTH), ({"x": X}, BOTH)):
        assert trainer().train_step(batch) == expected
    weights = np.linspace(0, 2, 12).astype(np.float32)
    assert trainer().train_step((X, BOTH, weights)) == trainer().train_step(X, BOTH, sample_weight=weights)
    with raises_sentence("head_without_targets", what="place", got=["x", "kind"]):
        trainer().train_step({"x": X, "kind": KIND})


def test_one_loss_by_output_accepts_both_forms_of_its_target():
    learner, expected = trainer({"place": "mse"}), onnxtrain.Trainer(two_outputs(), loss="mse", output="place")
    assert learner.train_step(X, {"place": PLACE}) == expected.train_step(X, PLACE)
    assert learner.evaluate(X, {"place": PLACE}, metrics={"place": "mae"}) == learner.evaluate(X, PLACE, metrics="mae")


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: trainer({"kinds": "mse", "place": "mse"}), OptionError, "'kinds', but the outputs are kind, place"),
        (lambda: trainer({"kind": "output:kind", "place": "mse"}), OptionError, "The loss of 'kind' is 'output:kind'"),
        (lambda: onnxtrain.Trainer(two_outputs(), loss={}), OptionError, "loss is an empty mapping"),
        (lambda: trainer(output="kind"), OptionError, "output and targets are for one loss"),
        (
            lambda: onnxtrain.training_model(
                two_outputs(), loss={"kind": "bce", "place": "mse(reduction=sum)"}, optimizer="sgd", accumulate=True
            ),
            OptionError,
            "one loss is a mean and another a sum",
        ),
        (lambda: trainer().train_step(X, KIND), DataError, "2 outputs have losses, but the targets are a ndarray"),
        (lambda: trainer().train_step(X, {"kind": KIND}), DataError, "The targets of 'place' are missing; got kind"),
        (lambda: trainer().fit(X, {"kind": KIND}), DataError, "The targets of 'place' are missing; got kind"),
        (lambda: trainer().fit((X, KIND)), DataError, "the targets are a ndarray; give a mapping"),
        (lambda: trainer().fit(X, BOTH, target="kind"), DataError, "target='kind' names one target, but 2 outputs"),
        (
            lambda: trainer().fit(X, {"kind": np.full(12, 5), "place": PLACE}),
            DataError,
            "target 'kind' has label 5 at example",
        ),
        (lambda: trainer().evaluate(X, BOTH, metrics="accuracy"), OptionError, "give metrics by output: .*\\{'kind'"),
        (lambda: trainer().evaluate(X, BOTH, metrics={"box": "mae"}), OptionError, "metrics has the output 'box'"),
        (
            lambda: onnxtrain.Trainer(two_outputs(), loss="mse(reduction=none)", output="place"),
            OptionError,
            "reduction is 'none', but training needs one number: give 'mean' or 'sum'",
        ),
        (lambda: MeanSquaredError(reduction="none"), OptionError, "reduction is 'none', but training needs one number"),
        (lambda: MeanSquaredError(reduction="max"), OptionError, "reduction is 'max'; it is 'mean' or 'sum'"),
        (lambda: Huber(weight=-1), OptionError, "huber: weight is -1, but must be a finite number, 0 or more"),
        (lambda: SoftmaxCrossEntropy(weight=[1, 2]), OptionError, "those of classes are class_weights"),
    ],
)
def test_mistakes_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()
