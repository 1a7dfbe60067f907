"""Early stopping, history and log files, and state across restarts."""

import csv
import json
import math

import numpy as np
import pytest

from onnxtrain.errors import OptionError
from onnxtrain.training.callbacks import (
    Callback,
    CallbackList,
    CsvLogger,
    EarlyStopping,
    History,
    TrainingState,
)
from sentences import raises_sentence


def run(callback, values, name="val_loss", first_epoch=1, weights=None):
    """Run epochs with these values of one metric; return the final state."""
    state = TrainingState(epoch=first_epoch, weights={} if weights is None else weights)
    callback.on_fit_begin(state)
    for epoch, value in enumerate(values, first_epoch):
        state.epoch, state.step, state.loss, state.learning_rate = epoch, 10 * epoch, value / 2, 0.1
        state.metrics = {name: value}
        callback.on_epoch_end(state)
        if state.stop:
            break
    callback.on_fit_end(state)
    return state


def test_stops_after_patience_epochs_without_improvement():
    stopping = EarlyStopping(patience=2)
    state = run(stopping, [3.0, 2.0, 2.5, 2.0, 1.0])
    assert state.stop
    assert state.epoch == 4
    assert state.stop_reason == "val_loss has not improved for 2 epochs (best 2 in epoch 2)"  # epochs count from 1
    assert (stopping.best, stopping.best_epoch) == (2.0, 2)


def test_an_improvement_resets_the_count():
    assert not run(EarlyStopping(patience=2), [3.0, 4.0, 2.0, 4.0, 1.0]).stop


@pytest.mark.parametrize(
    ("monitor", "mode", "values", "stops"),
    [
        ("val_accuracy", None, [0.1, 0.2, 0.3], False),
        ("val_accuracy", None, [0.3, 0.2], True),
        ("score", "max", [0.3, 0.2], True),
        ("score", "min", [0.3, 0.2], False),
        ("score", None, [0.3, 0.2], False),
    ],
)
def test_mode_decides_which_values_are_better(monitor, mode, values, stops):
    assert run(EarlyStopping(monitor, patience=1, mode=mode), values, monitor).stop is stops


def test_a_change_up_to_the_minimum_is_no_improvement():
    assert run(EarlyStopping(patience=1, min_delta=0.5), [2.0, 1.5]).stop
    assert not run(EarlyStopping(patience=1, min_delta=0.5), [2.0, 1.25]).stop


def test_nan_never_improves():
    stopping = EarlyStopping(patience=3)
    state = run(stopping, [math.nan, 5.0, math.nan, math.nan, math.nan])
    assert state.stop
    assert stopping.best == 5.0
    assert run(EarlyStopping(patience=1), [math.nan]).stop_reason.endswith("for 1 epochs")


def test_monitors_the_training_loss():
    assert run(EarlyStopping("loss", patience=1), [1.0, 2.0]).stop


@pytest.mark.parametrize("restore_best", [True, False])
def test_best_weights_are_restored(restore_best):
    weights = {"w": np.zeros(2)}
    stopping = EarlyStopping(patience=2, restore_best=restore_best)

    class Weights:  # any object with some of the methods
        def on_epoch_end(self, state):
            weights["w"] += 1

    run(CallbackList([Weights(), stopping]), [3.0, 1.0, 2.0, 2.0, 0.0], weights=weights)
    assert weights["w"].tolist() == ([2, 2] if restore_best else [4, 4])
    assert [array.tolist() for array in stopping.best_weights.values()] == ([[2, 2]] if restore_best else [])


def test_an_object_without_methods_is_refused():
    for wrong, shown in ((print, "not <built-in function print>"), (EarlyStopping, "not the class EarlyStopping")):
        with pytest.raises(OptionError, match=f"one or more of on_fit_begin, .*, {shown}"):
            CallbackList([wrong])


def test_a_resumed_early_stopping_continues_counting():
    first = EarlyStopping(patience=3)
    run(first, [1.0, 2.0, 2.0])
    second = EarlyStopping(patience=3)
    second.resume(json.loads(json.dumps(first.record())))
    state = run(second, [2.0, 2.0], first_epoch=4)
    assert (state.stop, state.epoch) == (True, 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"patience": 0}, "patience of early stopping is 0; it must be at least 1 epoch"),
        ({"min_delta": -1.0}, "min_delta of early stopping is -1.0; it must be at least 0"),
        ({"min_delta": math.nan}, "min_delta of early stopping is nan"),
        ({"mode": "low"}, "mode of early stopping is 'low'; it must be 'min', 'max' or None"),
    ],
)
def test_invalid_arguments(arguments, message):
    with pytest.raises(OptionError, match=message):
        EarlyStopping(**arguments)


def test_a_value_that_is_not_measured_is_named():
    with raises_sentence("monitored_value", what="monitor", got="f1", wanted=["loss", "val_loss"]):
        run(EarlyStopping("f1"), [1.0])


def test_the_first_reason_to_stop_is_kept():
    state = TrainingState()
    state.request_stop("the first")
    state.request_stop("the second")
    assert (state.stop, state.stop_reason) == (True, "the first")


def test_callbacks_are_called_in_order():
    calls = []

    def recorder(name):
        hooks = ["on_fit_begin", "on_epoch_begin", "on_step_end", "on_epoch_end", "on_fit_end"]
        members = {hook: lambda self, state, hook=hook: calls.append((name, hook)) for hook in hooks}
        return type(name, (Callback,), members)(), hooks

    (a, hooks), (b, _) = recorder("A"), recorder("B")
    both = CallbackList([a, b])
    for hook in hooks:
        getattr(Callback(), hook)(TrainingState())
        getattr(both, hook)(TrainingState())
    assert calls == [(name, hook) for hook in hooks for name in "AB"]


def test_records_are_restored_to_their_callbacks():
    first = CallbackList([Callback(), History(), EarlyStopping()])
    run(first, [2.0, 3.0])
    record = json.loads(json.dumps(first.record()))
    second = CallbackList([Callback(), History(), EarlyStopping()])
    second.resume(record)
    assert second.record() == first.record()
    assert second.callbacks[2].waited == 1
    with raises_sentence("other_callbacks", what="callbacks", got=["0 History"]):
        CallbackList([History()]).resume(record)


def test_history_rows_and_files(tmp_path):
    history = History()
    run(history, [4.0, math.nan])
    assert history.rows[0] == {
        "epoch": 1,
        "step": 10,
        "loss": 2.0,
        "learning_rate": 0.1,
        "val_loss": 4.0,
    }
    assert history.column("loss")[0] == 2.0
    assert math.isnan(history.column("unknown")[0])
    history.save(tmp_path / "history.json")
    rows = json.loads((tmp_path / "history.json").read_text())
    assert rows[0] == history.rows[0]
    assert rows[1]["val_loss"] is None
    history.save(tmp_path / "history.csv")
    with (tmp_path / "history.csv").open() as file:
        assert next(csv.DictReader(file)) == {key: str(value) for key, value in history.rows[0].items()}
    with raises_sentence("history_ending", what="history.txt"):
        history.save("history.txt")
    with raises_sentence("history_cannot_be_written", label="history.csv'", reason="No such file"):
        history.save(tmp_path / "missing" / "history.csv")


def test_csv_log_is_complete_after_every_epoch(tmp_path):
    path = tmp_path / "log.csv"
    logger = CsvLogger(path)
    state = TrainingState(epoch=1, loss=0.5, learning_rate=0.1)
    logger.on_fit_begin(state)
    assert path.read_text() == ""
    logger.on_epoch_end(state)
    assert path.read_text() == "epoch,step,loss,learning_rate\n1,0,0.5,0.1\n"
    state.epoch, state.metrics = 2, {"accuracy": 0.9}
    logger.on_epoch_end(state)
    lines = path.read_text().splitlines()
    assert lines == ["epoch,step,loss,learning_rate,accuracy", "1,0,0.5,0.1,", "2,0,0.5,0.1,0.9"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["log.csv"]
    resumed = CsvLogger(path)
    resumed.resume(logger.record())
    resumed.on_fit_begin(state)
    assert path.read_text().splitlines() == lines


def test_csv_log_that_cannot_be_written_fails_before_the_first_step(tmp_path):
    with pytest.raises(OptionError, match=r"log\.csv' cannot be written"):
        CsvLogger(tmp_path / "missing" / "log.csv").on_fit_begin(TrainingState())
