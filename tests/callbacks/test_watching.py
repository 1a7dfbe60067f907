"""Callbacks that monitor a value: the reduced learning rate against PyTorch's, the best model, resuming."""

import numpy as np
import pytest

import onnxtrain
from onnxtrain import examples
from onnxtrain.errors import OptionError
from onnxtrain.training.callbacks import ReduceOnPlateau, TrainingState
from onnxtrain.training.schedules import OneCycle, Polynomial, WarmUp, parse_schedule
from sentences import raises_sentence

RNG = np.random.default_rng(0)
X = RNG.normal(size=(20, 4)).astype(np.float32)
Y = RNG.integers(0, 3, 20)


def trainer(rate=0.05):
    return onnxtrain.Trainer(examples.mlp((4, 8, 3)), loss="cross_entropy", optimizer=onnxtrain.Adam(rate))


@pytest.mark.parametrize("delta", [0.0, 0.1])
@pytest.mark.parametrize("mode", ["min", "max"])
def test_the_rate_falls_with_pytorchs(mode, delta):
    torch = pytest.importorskip("torch")
    values = [*RNG.random(30), float("nan"), 0.5, 0.4]
    weight = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, mode=mode, factor=0.5, patience=1, threshold=delta, threshold_mode="abs", min_lr=0.01, eps=0
    )
    callback = ReduceOnPlateau("score", factor=0.5, patience=2, min_delta=delta, min_lr=0.01, mode=mode)
    state = TrainingState(learning_rate=1.0)
    for value in values:
        state.metrics = {"score": value}
        callback.on_epoch_end(state)
        scheduler.step(value)
        assert state.learning_rate == pytest.approx(optimizer.param_groups[0]["lr"])
    assert state.learning_rate < 0.1


def test_the_rate_of_a_training_falls_also_when_it_is_resumed(tmp_path):
    def run(epochs, folder=None, resume=False):
        one = trainer()
        plateau = ReduceOnPlateau("loss", factor=0.5, patience=1, min_delta=10.0)
        options = {"checkpoint": tmp_path / folder, "resume": resume} if folder else {}
        rows = one.fit(X, Y, epochs=epochs, callbacks=[plateau], **options).rows
        return rows, one.get_weights(flat=True)

    rows, weights = run(5)
    assert [row["learning_rate"] for row in rows] == [0.05, 0.05, 0.025, 0.0125, 0.00625]
    run(2, "kept")
    again, same = run(5, "kept", resume=True)
    assert again == rows
    np.testing.assert_array_equal(same, weights)


def test_the_best_model_is_kept(tmp_path):
    one = trainer(0.3)
    rows = one.fit(
        X, Y, validation=(X, Y), metrics="accuracy", epochs=6, checkpoint=tmp_path, save_best="val_accuracy"
    ).rows
    best = max(row["val_accuracy"] for row in rows)
    found = onnxtrain.evaluate(tmp_path / "best.onnx", (X, Y), loss="cross_entropy", metrics="accuracy")
    assert found["accuracy"] == best
    again = trainer(0.3)
    options = {"validation": (X, Y), "metrics": "accuracy", "checkpoint": tmp_path, "resume": True}
    again.fit(X, Y, epochs=8, save_best="val_accuracy", **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"save_best": "loss"}, "save_best needs the folder of the checkpoints"),
        ({"save_best": "f1", "checkpoint": "kept"}, "save_best monitors 'f1', but the measured values are loss;"),
        ({"callbacks": [ReduceOnPlateau()]}, "reducing on a plateau monitors 'val_loss'"),
    ],
)
def test_values_that_cannot_be_monitored(options, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OptionError, match=message):
        trainer().fit(X, Y, **options)


def test_invalid_arguments_of_a_plateau():
    for given, message in (
        ({"factor": 1.0}, "factor of reducing on a plateau is 1.0"),
        ({"patience": 0}, "patience of"),
    ):
        with pytest.raises(OptionError, match=message):
            ReduceOnPlateau(**given)


@pytest.mark.parametrize("steps", [10, 37])
def test_schedules_match_pytorch(steps):
    torch = pytest.importorskip("torch")
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.2)
    cases = [
        (
            Polynomial(0.2, steps, 2.0),
            lambda o: torch.optim.lr_scheduler.PolynomialLR(o, total_iters=steps, power=2.0),
        ),
        (
            OneCycle(0.2, steps, 0.25),
            lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.2, steps, pct_start=0.25, cycle_momentum=False),
        ),
    ]
    for schedule, make in cases:
        optimizer.param_groups[0]["lr"] = 0.2
        optimizer.param_groups[0].pop("initial_lr", None)
        theirs = make(optimizer)
        for step in range(steps):
            assert schedule(step) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-9), (schedule, step)
            optimizer.step()
            if step < steps - 1:
                theirs.step()


def test_schedules_as_text():
    assert parse_schedule("polynomial(2)", 0.1, total_steps=50) == Polynomial(0.1, 50, 2.0)
    assert parse_schedule("one_cycle", 0.1, total_steps=50) == OneCycle(0.1, 50)
    assert parse_schedule("warmup(0.1)+polynomial", 0.1, total_steps=50) == WarmUp(Polynomial(0.1, 45), 5)
    for text, message in (
        ("warmup(0.1)", "needs the number of steps"),
        ("one_cycle", "needs the number of steps"),
    ):
        with pytest.raises(OptionError, match=message):
            parse_schedule(text, 0.1)
    with raises_sentence("one_cycle_rising", what="rising", got=1.0):
        parse_schedule("one_cycle(1)", 0.1, total_steps=50)
    with pytest.raises(OptionError, match=r"power of the schedule is 0\.0"):
        parse_schedule("polynomial(0)", 0.1, total_steps=50)
