"""Fixtures of all tests. ``tests`` is on the import path: ``from zoo.trained import ...`` works in every folder."""

from __future__ import annotations

import functools
import gc
import importlib.util
import os
import signal
from pathlib import Path

import onnxruntime
import pytest

import sampling

# A shell that starts a program in the background lets it ignore Ctrl-C; tests press it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests run in parallel processes; a thread pool in each would only get in the others' way. ONNX Runtime's threads spin
# for milliseconds after each step: without them a session costs a tenth. What is tested with threads asks for them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
if "PYTEST_XDIST_WORKER" in os.environ:
    _start = onnxruntime.InferenceSession.__init__

    @functools.wraps(_start)
    def _start_with_one_thread(session, model, options=None, *others, **named):
        options = named.pop("sess_options", options) or onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.intra_op_num_threads or 1
        _start(session, model, options, *others, **named)

    onnxruntime.InferenceSession.__init__ = _start_with_one_thread


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Keep the doctest collector away from helpers: tests import them, where what they need is installed."""
    helper = collection_path.suffix == ".py" and not collection_path.name.startswith("test_")
    return True if helper else None


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    sampling.mark(items)


def pytest_collection_finish() -> None:
    """Exclude collected tests from garbage collection, which would scan them for a second each time."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests marked ``torch`` where PyTorch is missing: the core suite does not need it."""
    if item.get_closest_marker("torch") is not None and importlib.util.find_spec("torch") is None:
        pytest.skip("PyTorch is not installed")
