"""Ctrl-C and SIGTERM: the step is finished, a checkpoint written, and the training resumes bit for bit."""

import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

import onnxtrain
from onnxtrain import examples
from onnxtrain.training.callbacks.stopping import Stopping
from sentences import raises_sentence

X = np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32)
Y = np.arange(20) % 3


class Press:
    """Send a signal to this process after some steps."""

    def __init__(self, step, number=signal.SIGINT):
        self.step, self.number = step, number

    def on_step_end(self, state):
        if state.step == self.step:
            os.kill(os.getpid(), self.number)


def trainer():
    return onnxtrain.Trainer(examples.mlp((4, 8, 3)), loss="cross_entropy")


@pytest.mark.parametrize("step", [3, 4, 5])  # within an epoch, and at its end
def test_the_step_is_finished_and_a_checkpoint_written(step, tmp_path):
    whole = trainer()
    rows = whole.fit(X, Y, epochs=3, batch_size=5, callbacks=[Press(99)]).rows
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(KeyboardInterrupt, match=rf"^Interrupted; '.*step-{step}\.json' is kept, resume=True goes on"):
        trainer().fit(X, Y, epochs=3, batch_size=5, callbacks=[Press(step)], checkpoint=tmp_path)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    again = trainer()
    found = again.fit(X, Y, epochs=3, batch_size=5, callbacks=[Press(99)], checkpoint=tmp_path, resume=True).rows
    assert found == rows
    np.testing.assert_array_equal(again.get_weights(flat=True), whole.get_weights(flat=True))


def test_without_a_folder_the_trainer_has_the_weights_so_far():
    one, other = trainer(), trainer()
    with raises_sentence("callbacks_stopped", step=2):
        one.fit(X, Y, epochs=3, batch_size=5, shuffle=False, callbacks=[Press(2)])
    other.fit(X[:10], Y[:10], batch_size=5, shuffle=False)
    np.testing.assert_array_equal(one.get_weights(flat=True), other.get_weights(flat=True))


PROGRAM = """
import os, signal, sys
import numpy as np
import onnxtrain

class Press:
    def on_step_end(self, state):
        if state.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

trainer = onnxtrain.Trainer(onnxtrain.examples.mlp((4, 8, 3)), loss="cross_entropy")
trainer.fit(np.ones((20, 4)), np.arange(20) % 3, batch_size=5, callbacks=[Press()], checkpoint=sys.argv[1])
"""


def test_sigterm_ends_the_process_with_its_status_and_a_checkpoint(tmp_path):
    result = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], check=False, capture_output=True, text=True)
    assert result.returncode == 143
    assert "step-3.json' is kept, resume=True goes on from there." in result.stderr
    assert [path.name for path in tmp_path.glob("checkpoint-*step-3.json")]


def test_a_second_signal_interrupts_at_once():
    with Stopping() as stopping:
        signal.raise_signal(signal.SIGINT)
        assert stopping.signal == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_handlers_of_the_program_and_other_threads_are_left_alone():
    own = lambda number, frame: None  # noqa: E731
    before = signal.signal(signal.SIGINT, own)
    try:
        with Stopping():
            assert signal.getsignal(signal.SIGINT) is own
    finally:
        signal.signal(signal.SIGINT, before)
    failed = []

    def run():
        try:
            trainer().fit(X, Y)
        except ValueError as error:  # raised by signal.signal outside the main thread
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert not failed
