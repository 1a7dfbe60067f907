"""The learning rate set last takes precedence over the optimizer's, over a schedule, and after a resume."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from test_trainer import data, trainer, weights

import onnxtrain
from onnxtrain.training.callbacks import Callback, CsvLogger
from onnxtrain.training.schedules import Cosine, Step
from sentences import raises_sentence
from zoo.arrays import assert_same

FIT = {"epochs": 2, "batch_size": 8}  # six steps


class Rates(Callback):
    """Record the learning rate of every step, and set another after some steps, through the trainer or the state."""

    def __init__(self, subject=None, changes: dict[int, float] | None = None, stop: int = 0) -> None:
        self.subject, self.changes, self.stop = subject, changes or {}, stop
        self.rates: list[float] = []

    def on_fit_begin(self, state) -> None:
        self._change(0, state)

    def on_step_end(self, state) -> None:
        self.rates.append(state.learning_rate)
        self._change(state.step, state)
        if state.step == self.stop:
            raise KeyboardInterrupt

    def _change(self, step: int, state) -> None:
        if step in self.changes:
            (self.subject or state).learning_rate = self.changes[step]

    def record(self):
        return {"rates": self.rates}

    def resume(self, record) -> None:
        self.rates = record["rates"]


@pytest.mark.parametrize("schedule", [None, "cosine", Cosine(0.01, 6), lambda step: 0.01])
@pytest.mark.parametrize("through", ["trainer", "state"])
def test_a_rate_that_a_callback_sets_holds_from_the_next_step_on(through: str, schedule) -> None:
    plain, subject = trainer(), trainer()
    before, seen = Rates(), Rates(subject if through == "trainer" else None, {2: 0.5, 4: 0.25})
    plain.fit(data(), schedule=schedule, callbacks=[before], **FIT)
    history = subject.fit(data(), schedule=schedule, callbacks=[seen], **FIT)
    assert seen.rates == [*before.rates[:2], 0.5, 0.5, 0.25, 0.25]
    assert history.column("learning_rate") == [0.5, 0.25]
    assert subject.learning_rate == 0.25


def test_the_rate_reaches_the_update() -> None:
    """With a learning rate of 0, weights do not change."""
    subject, kept = trainer(), {}

    class Keep(Callback):
        def on_step_end(self, state) -> None:
            if state.step == 3:
                kept.update(weights(subject))
                state.learning_rate = 0

    subject.fit(data(), schedule="linear(0.5)", callbacks=[Keep()], **FIT)
    assert_same(weights(subject), kept)


def test_a_rate_set_when_the_training_begins_wins_over_its_schedule() -> None:
    seen = Rates(None, {0: 0.5})
    trainer().fit(data(), schedule="cosine", callbacks=[seen], **FIT)
    assert seen.rates == [0.5] * 6


def test_a_rate_set_before_the_training_is_what_it_starts_from() -> None:
    for schedule, expected in ((None, [0.5] * 6), ("step(2, 0.5)", [0.5, 0.5, 0.25, 0.25, 0.125, 0.125])):
        subject, seen = trainer(), Rates()
        subject.learning_rate = 0.5
        subject.fit(data(), schedule=schedule, callbacks=[seen], **FIT)
        assert seen.rates == expected


def test_a_schedule_that_names_its_rate_wins_over_one_set_before() -> None:
    subject, seen = trainer(), Rates()
    subject.learning_rate = 0.5
    subject.fit(data(), schedule=Step(0.1, every=3, factor=0.5), callbacks=[seen], **FIT)
    assert seen.rates == [0.1] * 3 + [0.05] * 3


def test_what_a_schedule_leaves_is_not_what_the_next_training_starts_from() -> None:
    subject, first, second, third = trainer(), Rates(), Rates(), Rates(None, {1: 0.5})
    subject.fit(data(), schedule="linear", callbacks=[first], **FIT)
    assert subject.learning_rate == first.rates[-1] < 0.01
    subject.fit(data(), schedule="linear", callbacks=[second], **FIT)
    assert second.rates == first.rates
    subject.fit(data(), callbacks=[third], **FIT)  # a rate set by the user is kept
    after = Rates()
    subject.fit(data(), callbacks=[after], **FIT)
    assert third.rates == [0.01] + [0.5] * 5
    assert after.rates == [0.5] * 6


def test_a_loop_of_your_own_sets_the_rate_of_every_step() -> None:
    subject, (x, y) = trainer(optimizer=onnxtrain.Momentum(0.1)), data()
    subject.train_step(x, y)
    subject.learning_rate = np.float32(0.0)
    before = weights(subject)
    subject.train_step(x, y)
    assert_same(weights(subject), before)


@pytest.mark.sampled("stop")
@pytest.mark.parametrize("through", ["trainer", "state"])
@pytest.mark.parametrize("stop", [1, 2, 3, 5])
@pytest.mark.parametrize("every", [1, 2])
def test_a_resumed_training_continues_with_the_rate_that_was_set(through: str, stop: int, every: int, tmp_path) -> None:
    def run(stop: int = 0, **options):
        subject = trainer()
        seen = Rates(subject if through == "trainer" else None, {2: 0.05}, stop)
        history = subject.fit(data(), schedule="cosine", callbacks=[seen], **FIT, **options)
        return subject, history, seen

    expected, history, seen = run()
    options = {"checkpoint": tmp_path, "checkpoint_every": every}
    with pytest.raises(KeyboardInterrupt):
        run(stop, **options)
    resumed, again, seen_again = run(resume=True, **options)
    assert_same(weights(resumed), weights(expected))
    assert again.rows == history.rows
    assert seen_again.rates == seen.rates


@pytest.mark.parametrize("value", [-1.0, float("nan"), "fast", None])
def test_an_invalid_rate_is_refused(value) -> None:
    with raises_sentence("learning_rate", what="The learning rate"):
        trainer().learning_rate = value
    with raises_sentence("learning_rate", what="The learning rate"):
        trainer().fit(data(), callbacks=[Rates(None, {1: value})], **FIT)


def test_logs_show_the_rate_of_the_last_step_not_of_the_next(tmp_path: Path) -> None:
    class Set(Callback):
        def on_epoch_end(self, state) -> None:
            state.learning_rate = 0.5

    log = CsvLogger(tmp_path / "log.csv")
    history = trainer().fit(data(), callbacks=[Set(), log], **FIT)
    assert history.column("learning_rate") == [0.01, 0.5]
    rows = (tmp_path / "log.csv").read_text().splitlines()[1:]
    assert [float(row.split(",")[3]) for row in rows] == [0.01, 0.5]
