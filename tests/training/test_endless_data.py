"""Epochs of a number of steps, metrics of the training batches, and several validation sets."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnxtrain.callbacks import Callback, EarlyStopping

import onnxtrain
from distributed.threads import in_threads
from onnxtrain import Trainer
from onnxtrain.cli import main
from onnxtrain.training.examples import mlp, points
from sentences import raises_sentence

X, Y = points()
SIZE = 20
BATCHES = [(X[at : at + SIZE], Y[at : at + SIZE]) for at in range(0, len(X), SIZE)]
MODEL = mlp((4, 8, 3))


def trainer(**options: Any) -> Trainer:
    return Trainer(MODEL, loss="cross_entropy", optimizer="sgd(lr=0.1)", **options)


def endless() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    return itertools.cycle(BATCHES)


SOURCES: dict[str, Callable[[], Any]] = {
    "endless iterator": endless,
    "function": lambda: lambda: iter(BATCHES),
    "list": lambda: BATCHES,
    "arrays": lambda: (X, Y),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("steps", [4, 13])
def test_an_epoch_goes_on_where_the_last_one_ended(source: str, steps: int) -> None:
    own, by_hand = trainer(), trainer()
    rows = own.fit(
        SOURCES[source](), epochs=3, steps_per_epoch=steps, batch_size=SIZE, shuffle=False, progress=False
    ).rows
    losses = [by_hand.train_step(*batch) for batch in itertools.islice(endless(), 3 * steps)]
    assert [row["step"] for row in rows] == [steps, 2 * steps, 3 * steps]
    means = np.reshape(losses, (3, steps)).mean(1)
    np.testing.assert_allclose([row["loss"] for row in rows], means, rtol=1e-6)
    for name, array in by_hand.parameters.items():
        np.testing.assert_array_equal(own.parameters[name], array)


def test_schedules_know_the_steps() -> None:
    rows = trainer().fit(endless(), epochs=2, steps_per_epoch=5, schedule="linear", progress=False).rows
    assert rows[-1]["learning_rate"] == pytest.approx(0.1 / 10)


@pytest.mark.parametrize("source", SOURCES)
def test_an_endless_training_is_resumed_at_its_batch(source: str, tmp_path: Path) -> None:
    class Stop(Callback):
        def on_step_end(self, state: Any) -> None:
            if state.step == 9:
                raise KeyboardInterrupt

    options: dict[str, Any] = {"epochs": 4, "steps_per_epoch": 7, "batch_size": SIZE, "progress": False}
    whole, again = trainer(), trainer()
    whole.fit(SOURCES[source](), **options)
    saved = {**options, "checkpoint": tmp_path, "checkpoint_every": 3}
    with pytest.raises(KeyboardInterrupt):
        trainer().fit(SOURCES[source](), callbacks=[Stop()], **saved)
    with pytest.raises(onnxtrain.errors.CheckpointError, match="steps_per_epoch"):
        trainer().fit(SOURCES[source](), resume=True, **{**saved, "steps_per_epoch": 6})
    again.fit(SOURCES[source](), resume=True, **saved)
    for name, array in whole.parameters.items():
        np.testing.assert_array_equal(again.parameters[name], array)


def test_data_that_end_too_early_and_no_steps_are_refused() -> None:
    with raises_sentence("one_shot_iterator", what="data", got="generator"):
        trainer().fit((batch for batch in BATCHES), steps_per_epoch=len(BATCHES) + 1, progress=False)
    with pytest.raises(onnxtrain.errors.OptionError, match="steps_per_epoch is 0; it needs a number of at least 1"):
        trainer().fit(X, Y, steps_per_epoch=0)
    for steps in (1.5, 2.0):
        with pytest.raises(onnxtrain.errors.OptionError, match=rf"steps_per_epoch is {steps}; it needs a whole number"):
            trainer().fit(X, Y, steps_per_epoch=steps)


@pytest.mark.parametrize("source", ["endless iterator", "arrays"])
def test_metrics_without_validation_are_those_of_the_training_batches(source: str) -> None:
    own, by_hand, right = trainer(), trainer(), 0
    (row,) = own.fit(
        SOURCES[source](), steps_per_epoch=10, batch_size=SIZE, shuffle=False, metrics=["accuracy", error],
        progress=False,
    ).rows  # fmt: skip
    for x, y in BATCHES:
        right += int((by_hand.predict(x).argmax(1) == y).sum())
        by_hand.train_step(x, y)
    assert row["accuracy"] == pytest.approx(right / len(X))
    assert row["error"] == pytest.approx(1 - right / len(X))


def error(y_true: np.ndarray, y_pred: np.ndarray) -> float:
    return float((y_pred.argmax(1) != y_true).mean())


@pytest.mark.parametrize("accumulate", [1, 3])
def test_training_metrics_of_a_fixed_batch_leave_the_padding_out(accumulate: int) -> None:
    fixed = onnxtrain.examples.mlp((4, 8, 3))
    fixed.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 16
    own = Trainer(fixed, loss="cross_entropy", optimizer="sgd(lr=0.0)", accumulate=accumulate)
    (row,) = own.fit(X, Y, metrics="accuracy", progress=False).rows
    assert row["accuracy"] == pytest.approx(own.evaluate(X, Y, metrics="accuracy")["accuracy"])


SETS = {"clean": (X[:50], Y[:50]), "noisy": [(X[50:90], Y[50:90]), (X[90:], Y[90:])]}


def test_several_validation_sets_by_name(tmp_path: Path) -> None:
    own = trainer()
    row = own.fit(
        X, Y, validation=SETS, metrics="accuracy", epochs=2, progress=False, checkpoint=tmp_path / "c",
        save_best="val_accuracy", run=tmp_path / "run",
    ).rows[-1]  # fmt: skip
    for name, source in SETS.items():
        measured = own.evaluate(source, metrics="accuracy")
        assert row[f"val_{name}_loss"] == pytest.approx(measured["loss"])
        assert row[f"val_{name}_accuracy"] == pytest.approx(measured["accuracy"])
    assert "val_loss" not in row
    assert (tmp_path / "c" / "best.onnx").exists()
    assert (tmp_path / "run" / "report.html").exists()
    trainer().fit(X, Y, validation=SETS, metrics="accuracy", epochs=3, progress=False,
                  checkpoint=tmp_path / "c", resume=True, save_best="val_accuracy")  # fmt: skip
    with pytest.raises(onnxtrain.errors.CheckpointError, match="validation"):
        trainer().fit(X, Y, validation={"clean": SETS["clean"]}, epochs=3, checkpoint=tmp_path / "c", resume=True)


@pytest.mark.parametrize(("monitor", "watched"), [("val_loss", "val_clean_loss"), ("val_noisy_loss", "val_noisy_loss")])
def test_callbacks_watch_the_first_set_or_a_named_one(monitor: str, watched: str) -> None:
    stopping = EarlyStopping(monitor)
    rows = trainer().fit(X, Y, validation=SETS, epochs=3, callbacks=[stopping], progress=False).rows
    assert stopping.best == min(row[watched] for row in rows)


def test_a_mapping_of_arrays_is_one_set() -> None:
    rows = trainer().fit(X, Y, validation={"input": X, "label": Y}, progress=False).rows
    assert "val_loss" in rows[0]


def test_the_command_line_takes_steps_and_metrics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer().save(tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", input=X, label=Y)
    arguments = ["fit", tmp_path / "m.onnx", "--data", tmp_path / "d.npz", "--output", tmp_path / "o.onnx",
                 "--loss", "cross_entropy", "--steps-per-epoch", "3", "--metrics", "accuracy"]  # fmt: skip
    assert not main([str(argument) for argument in arguments])
    assert "accuracy" in "".join(capsys.readouterr())


def test_ranks_have_the_rows_of_one_process() -> None:
    options: dict[str, Any] = {"epochs": 2, "steps_per_epoch": 4, "metrics": "accuracy", "progress": False}
    options |= {"shuffle": False, "batch_size": SIZE}
    of_ranks = in_threads(2, lambda rank: trainer(distributed=rank, threads=1).fit(X, Y, **options).rows)
    alone = trainer().fit(X, Y, **options).rows
    with_sets = in_threads(
        2, lambda rank: trainer(distributed=rank, threads=1).fit(X, Y, validation=SETS, **options).rows
    )
    for rows in of_ranks:
        for row, other in zip(rows, alone, strict=True):
            assert row["accuracy"] == pytest.approx(other["accuracy"])
            assert row["loss"] == pytest.approx(other["loss"], rel=1e-5)
    assert with_sets[0][-1]["val_noisy_loss"] == with_sets[1][-1]["val_noisy_loss"] > 0
