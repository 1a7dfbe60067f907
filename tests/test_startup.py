"""Importing the package is cheap, and the first labels build nothing again."""

from __future__ import annotations

import subprocess
import sys

import numpy as np

import onnxtrain


def test_the_import_takes_little_time_and_leaves_large_packages_alone():
    program = """
import sys, time
begin = time.process_time()
import onnxtrain
print(time.process_time() - begin, *{"numpy", "onnx", "onnx_ir", "onnxruntime"} & set(sys.modules))
"""
    runs = [
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True) for _ in range(3)
    ]
    seconds, packages = zip(
        *((float(found[0]), found[1:]) for run in runs for found in [run.stdout.split()]), strict=True
    )
    assert min(seconds) < 0.15
    assert not any(packages)


def test_nothing_is_imported_before_ctrl_c_is_caught():
    """A library's module that comes first would show a traceback instead of the message."""
    program = """
import sys
seen = []
sys.meta_path.insert(0, type("Seen", (), {"find_spec": staticmethod(lambda name, *_: seen.append(name))}))
sys.argv, sys.orig_argv = ["-m"], ["python", "-m", "onnxtrain"]
import _signal
caught = _signal.signal
def note(*given):
    print(*seen)
    return caught(*given)
_signal.signal = note
import onnxtrain
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    first = run.stdout.splitlines()[0].split()
    assert first == ["onnxtrain", "onnxtrain.errors", "onnxtrain.errors.start"]


def test_labels_for_rows_of_scores_build_nothing_again():
    """The axis of the classes is known before the first labels come."""
    trainer = onnxtrain.Trainer(onnxtrain.examples.mlp((4, 8, 3)), loss="softmax_cross_entropy")
    session = trainer.executor.session
    trainer.train_step(np.eye(4, dtype=np.float32)[:3], np.arange(3))
    assert trainer.executor.session is session
    trainer.train_step(np.eye(4, dtype=np.float32)[:3], np.eye(3, dtype=np.float32))
    assert trainer.executor.session is not session  # distributions make another loss
