"""Exponential moving averages of weights: against PyTorch, in checkpoints and files, and refused options."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import onnx
import pytest

import onnxtrain
from onnxtrain import EMA, examples
from onnxtrain.errors import CheckpointError, OptionError
from sentences import raises_sentence

LOSS = "softmax_cross_entropy"
RNG = np.random.default_rng(3)
X = RNG.standard_normal((12, 4)).astype(np.float32)
Y = RNG.integers(0, 3, 12)


def trainer(ema=0.9, **options):
    options = {"optimizer": "adamw(lr=0.05)", **options}
    return onnxtrain.Trainer(examples.mlp((4, 8, 3)), loss=LOSS, ema=ema, **options)


def averages(learner):
    return {name: np.array(learner.executor.states[f"{name}/average"]) for name in learner.parameters}


@pytest.mark.torch
@pytest.mark.parametrize("kernels", [True, False])
def test_a_hundred_steps_match_pytorch(kernels):
    torch = pytest.importorskip("torch")
    learner = trainer(0.95, runtime=onnxtrain.RuntimeOptions(kernels=kernels))
    module = torch.nn.ParameterList([torch.from_numpy(np.array(array)) for array in learner.parameters.values()])
    average = torch.optim.swa_utils.AveragedModel(module, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.95))
    for _ in range(100):
        learner.train_step(X, Y)
        with torch.no_grad():
            for parameter, array in zip(module, learner.parameters.values(), strict=True):
                parameter.copy_(torch.from_numpy(np.array(array)))
        average.update_parameters(module)
    for ours, theirs in zip(averages(learner).values(), average.module.parameters(), strict=True):
        np.testing.assert_allclose(ours, theirs.detach().numpy(), rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("ema", "decay"),
    [
        (EMA(0.5), lambda n: 0.5 if n > 1 else 0.0),
        (EMA(0.5, start=3), lambda n: 0.5 if n > 3 else 0.0),
        (EMA(0.3, warmup=True), lambda n: min(0.3, (1 + n) / (10 + n)) if n > 1 else 0.0),
    ],
)
@pytest.mark.parametrize("options", [{}, {"optimizer": "sgd(lr=0.1)"}, {"accumulate": 3}])
def test_start_and_warmup(ema, decay, options):
    learner = trainer(ema, **options)
    expected = {name: np.array(array, np.float64) for name, array in learner.parameters.items()}
    for n in range(1, 9):
        learner.train_step(X, Y)
        d = decay(n)
        expected = {name: d * expected[name] + (1 - d) * array for name, array in learner.parameters.items()}
        for name, array in averages(learner).items():
            np.testing.assert_allclose(array, expected[name], rtol=1e-5, atol=1e-6)


def test_the_average_is_one_node_over_all_parameters_and_in_place():
    learner = trainer()
    learner.train_step(X, Y)
    lowered = onnxtrain.lower(learner.training_model(), kernels=True)
    assert [node.op_type for node in lowered.graph.node].count("SGD") == 1
    assert set(learner.executor.states.doubled) <= {"T"}  # one scalar


def test_averages_do_not_change_the_training():
    with_average, without = trainer(), trainer(None)
    for learner in (with_average, without):
        for _ in range(3):
            learner.train_step(X, Y)
    for name, array in without.parameters.items():
        assert with_average.parameters[name].tobytes() == array.tobytes()


def test_evaluate_predict_and_save_use_averages_on_request(tmp_path):
    learner = trainer(0.8)
    assert learner.evaluate(X, Y, ema=True) == learner.evaluate(X, Y)  # before the first step
    learner.fit(X, Y, epochs=5, batch_size=4)
    expected = averages(learner)
    learner.save(tmp_path / "average.onnx", ema=True)
    learner.save(tmp_path / "last.onnx")
    for path, weights in (("average.onnx", expected), ("last.onnx", learner.get_weights())):
        saved = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(tmp_path / path).graph.initializer}
        assert all(np.array_equal(saved[name], array) for name, array in weights.items())
    found = learner.evaluate(X, Y, metrics="accuracy", ema=True)
    assert found == pytest.approx(onnxtrain.evaluate(tmp_path / "average.onnx", (X, Y), loss=LOSS, metrics="accuracy"))
    assert found["loss"] != learner.evaluate(X, Y)["loss"]
    np.testing.assert_allclose(learner.predict(X, ema=True), onnxtrain.predict(tmp_path / "average.onnx", X), rtol=1e-6)
    np.testing.assert_allclose(onnxtrain.predict(learner.model(ema=True), X), learner.predict(X, ema=True), rtol=1e-6)
    learner.train_step(X, Y)  # the evaluation reads the live average
    assert learner.evaluate(X, Y, ema=True)["loss"] != found["loss"]


def test_checkpoints_resume_bit_for_bit(tmp_path):
    whole, first, resumed = trainer(), trainer(), trainer()
    whole.fit(X, Y, epochs=4, batch_size=4)
    first.fit(X, Y, epochs=2, batch_size=4, checkpoint=tmp_path)
    resumed.fit(X, Y, epochs=4, batch_size=4, checkpoint=tmp_path, resume=True)
    for name, array in averages(whole).items():
        assert averages(resumed)[name].tobytes() == array.tobytes()
    with pytest.raises(CheckpointError, match="ema is"):
        trainer(0.8).fit(X, Y, epochs=5, batch_size=4, checkpoint=tmp_path, resume=True)
    with pytest.raises(CheckpointError, match="ema is"):
        trainer(None).fit(X, Y, epochs=5, batch_size=4, checkpoint=tmp_path, resume=True)


def test_copies_and_pickles_continue():
    learner = trainer()
    learner.train_step(X, Y)
    others = [copy.deepcopy(learner), pickle.loads(pickle.dumps(learner))]
    for other in (learner, *others):
        other.train_step(X, Y)
    for other in others:
        for name, array in averages(learner).items():
            assert averages(other)[name].tobytes() == array.tobytes()


def test_training_models_have_averages():
    proto = onnxtrain.training_model(examples.mlp((4, 8, 3)), loss=LOSS, optimizer="adamw(lr=0.05)", ema=0.9)
    onnx.checker.check_model(proto)
    session, learner = onnxtrain.TrainingSession(proto), trainer()
    session.initialize()
    for _ in range(3):
        session.step({"input": X, "target": Y, "learning_rate": np.float32(0.05)})
        learner.train_step(X, Y)
    for name, array in averages(learner).items():
        np.testing.assert_allclose(session.state[f"{name}/average"], array, rtol=1e-6, atol=1e-7)


def test_masked_weights_stay_zero_in_the_average():
    learner = trainer()
    name = learner.objective.matmul_weights[0]
    mask = np.arange(learner.parameters[name].size).reshape(learner.parameters[name].shape) % 2 == 0
    learner.train_step(X, Y)
    learner.set_masks({name: mask})
    learner.train_step(X, Y)
    assert not averages(learner)[name][~mask].any()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: trainer(1.0), "ema: decay is 1.0, but must be a number, 0 or more and below 1"),
        (lambda: trainer("0.9"), "ema: decay is '0.9', but must be a number"),
        (lambda: EMA(start=-1), "ema: start is -1, but must be a number of updates, 0 or more"),
        (lambda: trainer(None).evaluate(X, Y, ema=True), r"this trainer keeps none; make it with Trainer\(ema=0.999\)"),
        (lambda: trainer(None).predict(X, ema=True), "asks for the moving average of the parameters"),
        (lambda: trainer(None).save("x.onnx", ema=True), "asks for the moving average of the parameters"),
        (lambda: trainer(None).fit(X, Y, ema=True), "asks for the moving average of the parameters"),
        (lambda: trainer(None).model(ema=True), "asks for the moving average of the parameters"),
    ],
)
def test_invalid_options_are_refused(make, message):
    with pytest.raises(OptionError, match=message):
        make()


class Curve(onnxtrain.callbacks.Callback):
    """Loss of the averages and of the live weights after every epoch, measured independently of fit's validation."""

    def __init__(self):
        self.averaged, self.live = [], []

    def on_epoch_end(self, state):
        for ema, losses in ((True, self.averaged), (False, self.live)):
            losses.append(state.trainer.evaluate(X, Y, ema=ema)["loss"])


@pytest.mark.parametrize("ema", [None, True, False])
def test_validation_measures_the_averages_by_default(ema, tmp_path):
    learner, curve = trainer(0.8), Curve()
    options = {"checkpoint": tmp_path, "save_best": "val_loss", "run": tmp_path / "run"}
    history = learner.fit(X, Y, validation=(X, Y), epochs=6, batch_size=4, callbacks=[curve], ema=ema, **options)
    assert curve.averaged != curve.live
    wanted = curve.live if ema is False else curve.averaged
    assert [row["val_loss"] for row in history.rows] == pytest.approx(wanted, rel=1e-6)
    best = onnxtrain.evaluate(tmp_path / "best.onnx", (X, Y), loss=LOSS)["loss"]
    assert best == pytest.approx(min(wanted), rel=1e-5)
    assert ("the moving averages" in (tmp_path / "run/report.html").read_text()) == (ema is not False)


def test_early_stopping_restores_averages_and_weights_of_the_best_epoch():
    learner = trainer(0.5, optimizer="adamw(lr=1)")
    stopping, curve = onnxtrain.callbacks.EarlyStopping(patience=2), Curve()
    learner.fit(X, Y, validation=(X, Y), epochs=200, batch_size=4, callbacks=[stopping, curve])
    best = stopping.best_epoch - 1
    assert len(curve.live) == stopping.best_epoch + 2
    assert stopping.best == pytest.approx(min(curve.averaged), rel=1e-6)
    assert learner.evaluate(X, Y, ema=True)["loss"] == pytest.approx(curve.averaged[best], rel=1e-6)
    assert learner.evaluate(X, Y)["loss"] == pytest.approx(curve.live[best], rel=1e-6)


def test_resumes_where_the_averages_were_saved_onto_the_model(tmp_path):
    whole, model = trainer(), tmp_path / "model.onnx"
    onnx.save(examples.mlp((4, 8, 3)), model)
    options = {"optimizer": "adamw(lr=0.05)", "loss": LOSS, "ema": 0.9}
    first = onnxtrain.Trainer(model, **options)
    first.fit(X, Y, epochs=2, batch_size=4, checkpoint=tmp_path / "kept")
    first.save(model, ema=True)
    resumed = onnxtrain.Trainer(model, **options)
    resumed.fit(X, Y, epochs=4, batch_size=4, checkpoint=tmp_path / "kept", resume=True)
    whole.fit(X, Y, epochs=4, batch_size=4)
    for name, array in averages(whole).items():
        assert averages(resumed)[name].tobytes() == array.tobytes()


def test_a_resumed_training_validates_as_the_first_did(tmp_path):
    trainer().fit(X, Y, validation=(X, Y), checkpoint=tmp_path)
    with raises_sentence("another_training", differences="measures_ema"):
        trainer().fit(X, Y, validation=(X, Y), epochs=2, checkpoint=tmp_path, resume=True, ema=False)
