"""Python without assertions and docstrings (-OO) gives the same weights, metrics and files."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

import onnxtrain

pytestmark = pytest.mark.thorough  # it takes seconds

PROGRAM = """
import sys
import warnings
import numpy as np
import onnxtrain

warnings.simplefilter("ignore", onnxtrain.errors.TrainingHint)
assert False, "assertions are on"
if onnxtrain.Trainer.__doc__ is not None and sys.flags.optimize == 2:
    sys.exit("docstrings are there")
x, y = np.random.default_rng(0).standard_normal((8, 6)).astype(np.float32), np.arange(8) % 3
model = onnxtrain.examples.mlp((6, 8, 3))
found = []
for optimizer in (onnxtrain.Adam(0.05), onnxtrain.SSGD(0.05), onnxtrain.Momentum(0.05), onnxtrain.Adagrad(0.05)):
    for kernels in (None, False):
        for accumulate in (1, 2):
            options = onnxtrain.RuntimeOptions(kernels=kernels, threads=1)
            trainer = onnxtrain.Trainer(
                model, loss="softmax_cross_entropy", optimizer=optimizer, accumulate=accumulate, runtime=options
            )
            found += [trainer.train_step(x, y) for _ in range(3)]
trainer.fit((x, y), epochs=2, batch_size=4, progress=False)
found += trainer.evaluate((x, y), metrics=["accuracy"]).values()
found.append(float(trainer.predict(x).sum()))
trainer.save(sys.argv[1])
found.append(float(trainer.predict(x).sum()))
recompute = onnxtrain.examples.small_transformer()
onnxtrain.lower(onnxtrain.training_model(recompute, loss="softmax_cross_entropy", optimizer=onnxtrain.Adam()))
onnxtrain.gradient(onnxtrain.examples.lenet5(), xs=["conv1.weight"])
onnxtrain.Trainer(onnxtrain.examples.small_resnet(), loss="softmax_cross_entropy", batch_norm="train", dropout=True)
try:
    onnxtrain.Trainer(model, loss="nonsense")
except onnxtrain.errors.OptionError as error:
    print("There is no loss" in str(error))
print(found)
"""


def run(tmp_path, *flags: str, program: str = PROGRAM) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *flags, "-c", program, str(tmp_path / "trained.onnx")]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.thorough
def test_training_does_the_same_without_assertions_and_docstrings(tmp_path) -> None:
    plain = run(tmp_path, program=PROGRAM.replace('assert False, "assertions are on"', ""))
    assert plain.returncode == 0, plain.stderr
    for flag in ("-O", "-OO"):
        optimized = run(tmp_path, flag)
        assert optimized.returncode == 0, optimized.stderr
        assert optimized.stdout == plain.stdout
        assert optimized.stderr == plain.stderr == ""


def test_pages_of_operators_need_docstrings() -> None:
    command = [sys.executable, "-OO", str(Path(__file__).parents[2] / "tools" / "optimizer_pages.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "The pages are made of docstrings, which python -OO leaves out: run it without -OO.\n"


@pytest.mark.parametrize("kernels", [None, False])
@pytest.mark.parametrize("options", [{}, {"clip_norm": 1.0}], ids=str)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("model", ["digits_cnn", "small_transformer"])
def test_building_a_training_says_nothing(
    model: str, accumulate: int, options: dict[str, float], kernels: bool | None, caplog: pytest.LogCaptureFixture
) -> None:
    """onnx-ir logs a warning, which Python prints, for a value with a shape but no type."""
    settings = onnxtrain.RuntimeOptions(kernels=kernels)
    with caplog.at_level(logging.WARNING):
        for optimizer in (onnxtrain.Adam(), onnxtrain.SSGD()):
            trainer = onnxtrain.Trainer(
                getattr(onnxtrain.examples, model)(),
                loss="softmax_cross_entropy",
                optimizer=optimizer,
                accumulate=accumulate,
                runtime=settings,
                **options,
            )
            for entry in range(min(accumulate, 2)):
                onnxtrain.lower(trainer.training_model(), entry=entry)
    assert caplog.messages == []
