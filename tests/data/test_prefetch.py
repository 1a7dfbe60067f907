"""Batches that are prepared in a thread: same bits, same errors, and no thread is left."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import onnxtrain
from child_processes import child_process
from onnxtrain import examples
from onnxtrain.data import pipeline
from onnxtrain.data.pipeline import Prefetch
from onnxtrain.errors import DataError
from onnxtrain.training.callbacks import Callback

RNG = np.random.default_rng(0)
X = RNG.normal(size=(40, 4)).astype(np.float32)
Y = X[:, :3].argmax(1)


def trainer():
    return onnxtrain.Trainer(examples.mlp((4, 8, 3)), loss="softmax_cross_entropy", seed=3)


def batches(delay=0.0, fail_at=None, reuse=False):
    """A loader that takes its time, may fail, and may write every batch into the same array."""
    where = []

    def load():
        x, y = np.empty((8, 4), np.float32), np.empty(8, np.int64)
        for index in range(5):
            where.append(threading.current_thread() is threading.main_thread())
            time.sleep(delay)
            if index == fail_at:
                raise OSError(5, "the disk is gone")
            x, y = (x, y) if reuse else (np.empty_like(x), np.empty_like(y))
            x[:], y[:] = X[8 * index : 8 * index + 8], Y[8 * index : 8 * index + 8]
            yield x, y

    return load, where


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    before = threading.enumerate()
    yield
    left = [thread.name for thread in set(threading.enumerate()) - set(before) if thread.name.startswith("onnxtrain")]
    assert left == []


@pytest.mark.parametrize("reuse", [False, True])
def test_same_bits_with_and_without(reuse):
    slow, where = batches(0.003, reuse=reuse)
    rows = [trainer().fit(slow, epochs=3, prefetch=threaded).rows for threaded in (True, False)]
    assert rows[0] == rows[1] == trainer().fit((X, Y), epochs=3, batch_size=8, shuffle=False).rows
    assert sum(where[:15]) == 4, "the first, and three slow ones"
    assert all(where[15:])


def test_arrays_in_shuffled_order(monkeypatch):
    monkeypatch.setattr(pipeline, "_IN_A_ROW", 0)
    ours, theirs = trainer(), trainer()
    assert ours.fit(X, Y, epochs=2, batch_size=7).rows == theirs.fit(X, Y, epochs=2, batch_size=7, prefetch=False).rows
    for name, value in ours.parameters.items():
        np.testing.assert_array_equal(value, theirs.parameters[name])


def test_fast_data_is_read_without_a_thread(monkeypatch):
    monkeypatch.setattr(pipeline, "WORTH", 10.0)  # a machine may be slow
    quick, where = batches()
    trainer().fit(quick, epochs=2)
    assert all(where)


@pytest.mark.parametrize("fail_at", [0, 1, 4])
@pytest.mark.parametrize("in_a_row", [0, 1])
def test_errors_are_raised_at_the_same_step(fail_at, in_a_row, monkeypatch):
    monkeypatch.setattr(pipeline, "_IN_A_ROW", in_a_row)  # 0: all is read in the thread
    steps = []
    for threaded in (True, False):
        slow, _ = batches(0.002, fail_at)
        count = Count()
        with pytest.raises(OSError, match="the disk is gone") as caught:
            trainer().fit(slow, epochs=2, callbacks=[count], prefetch=threaded)
        assert caught.traceback[-1].name == "load"
        steps.append(count.steps)
    assert steps == [fail_at, fail_at]


def test_a_batch_that_does_not_fit_is_named(monkeypatch):
    monkeypatch.setattr(pipeline, "_IN_A_ROW", 1)

    def load():
        yield from [(X[:8], Y[:8])] * 3
        time.sleep(0.002)
        yield X[:8], Y[:8]
        yield X[:8, :3], Y[:8]

    with pytest.raises(DataError, match="input 'input' of batch 4 has shape"):
        trainer().fit(load)


class Count(Callback):
    steps = 0
    stop_after = None

    def on_step_end(self, state):
        self.steps += 1
        if self.steps == self.stop_after:
            state.request_stop("enough")


def test_a_stop_ends_the_thread_and_closes_the_loader():
    closed = []

    def load():
        try:
            while True:
                time.sleep(0.002)
                yield X[:8], Y[:8]
        finally:
            closed.append(threading.current_thread().name)

    count = Count()
    count.stop_after = 8
    trainer().fit(load, callbacks=[count])
    assert closed == ["onnxtrain-prefetch"]


def test_settings_of_numpy_hold_in_the_thread():
    def load():
        for _ in range(8):
            time.sleep(0.002)
            assert np.geterr()["divide"] == "raise"
            yield X[:8], Y[:8]

    with np.errstate(divide="raise"):
        trainer().fit(load)


@pytest.mark.thorough
def test_waiting_is_measured_and_reported(capsys):
    reader = Prefetch()
    load, _ = batches(0.05)
    for _ in reader(iter_batches(load), copies=False):
        time.sleep(0.1)
    assert reader.waited >= 0.2  # four of five are read while nobody works
    before = reader.waited
    for _ in reader(iter_batches(load), copies=False):
        time.sleep(0.2)
    assert reader.waited - before < 0.2  # the others are read ahead
    before = reader.waited
    for _ in reader(iter_batches(load), copies=False):
        pass
    assert reader.waited - before > 0.2
    trainer().fit(load, progress=True)
    assert "% of the time waiting for load" in capsys.readouterr().err


def iter_batches(load):
    for x, y in load():
        yield onnxtrain.data.Batch({"input": x}, y, len(x))


PROGRAM = """
import time
import numpy as np
import onnxtrain

def load():
    print("reads", flush=True)
    for _ in range(500):
        time.sleep(0.02)
        yield np.ones((8, 4), np.float32), np.zeros(8, np.int64)

trainer = onnxtrain.Trainer(onnxtrain.examples.mlp((4, 8, 3)), loss="softmax_cross_entropy")
try:
    trainer.fit(load)
except KeyboardInterrupt as error:
    print("ends:", error, flush=True)
"""


def test_ctrl_c():
    with child_process([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "reads\n"
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=30)
    assert out.startswith("ends: Interrupted; the trainer has the weights of step ")
    assert process.returncode == 0
