"""A completed training is never lost: the model is saved first, and whatever fails beside it is a warning."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

import onnxtrain
from onnxtrain.model_file import writing
from onnxtrain.training.executors.executor import Executor

FIT = ("fit", "model.onnx", "--data", "train.npz", "--loss", "softmax_cross_entropy", "--epochs", 3, "-o", "out/t.onnx")
PRUNE = ("prune", "model.onnx", "--data", "train.npz", "--loss", "softmax_cross_entropy", "--sparsity", 0.5)
PRUNE = (*PRUNE, "--epochs", 2, "--fine-tune-epochs", 1, "-o", "out/t.onnx")


def into_folder(name: str) -> Callable[[], None]:
    """Return what makes a folder of a file."""

    def harm() -> None:
        Path(name).unlink(missing_ok=True)
        Path(name).mkdir(parents=True)

    return harm


def full(*folders: str) -> Callable[[], None]:
    """Return what fills the disk of some folders."""

    def harm() -> None:
        create = writing._create_temporary

        def refuse(file: Path) -> object:
            if any(folder in file.parts for folder in folders):
                raise OSError(28, "No space left on device", str(file))
            return create(file)

        pytest.MonkeyPatch().setattr(writing, "_create_temporary", refuse)

    return harm


def gone() -> None:
    shutil.rmtree(Path.cwd())


@pytest.fixture
def harmed(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """Let something happen after the second step."""
    monkeypatch.setattr(writing, "_create_temporary", writing._create_temporary)  # is restored at the end

    def harmed_by(harm: Callable[[], object]) -> None:
        step_batch, steps = Executor.step_batch, []

        def step(self, batch, rate):
            steps.append(step_batch(self, batch, rate))
            if len(steps) == 2:
                harm()
            return steps[-1]

        monkeypatch.setattr(Executor, "step_batch", step)

    return harmed_by


@pytest.mark.parametrize(
    ("command", "flags", "harm", "said"),
    [
        (FIT, ("--run", "run"), into_folder("run/report.html"), "The run has no report: "),
        (FIT, ("--run", "run"), into_folder("run/run.json"), "The run is not marked as finished: "),
        (FIT, ("--run", "run"), into_folder("run/metrics.csv"), "The run folder lacks this epoch: "),
        (FIT, ("--run", "run"), full("run"), "The run has no curves: "),
        (FIT, ("--run", "run"), lambda: shutil.rmtree("run"), ""),
        (FIT, ("--history", "h.csv"), into_folder("h.csv"), "There is no history: "),
        (FIT, ("--curve", "c.png"), into_folder("c.png"), "There is no curve: "),
        (FIT, ("--checkpoint", "kept"), lambda: shutil.rmtree("kept"), ""),
        (FIT, ("--checkpoint", "kept"), lambda: (shutil.rmtree("kept"), Path("kept").touch()), "holds none."),
        (FIT, (), lambda: shutil.rmtree("out"), ""),
        (FIT, (), lambda: Path("model.onnx").write_bytes(b""), ""),
        (FIT, (), gone, ""),
        (PRUNE, ("--report", "report"), into_folder("report/report.txt"), "The pruning has no report: "),
        (PRUNE, ("--report", "report"), into_folder("report/config.toml"), "lacks the flags of the command: "),
        (PRUNE, (), lambda: shutil.rmtree("out"), ""),
    ],
)
def test_the_model_is_written(command, flags, harm, said, files, run, harmed):
    (files / "out").mkdir()
    assert run(*command).code == 0
    expected = (files / "out" / "t.onnx").read_bytes()
    (files / "out" / "t.onnx").unlink()
    harmed(harm)
    result = run(*command, *flags)
    assert result.code == 0, result.err
    assert (files / "out" / "t.onnx").read_bytes() == expected
    assert said in result.err
    assert bool(said) == bool(result.err)


@pytest.mark.parametrize("command", [FIT, PRUNE, (*FIT[:-1], "out/t.onnx_adapter", "--lora", 2, "--lora-targets", "*")])
def test_a_model_that_cannot_be_written_is_rescued_and_the_rest_is_written(command, files, run, harmed):
    (files / "out").mkdir()
    report = ("--report", "report") if command is PRUNE else ("--run", "run", "--history", "h.csv")
    harmed(full("out"))
    result = run(*command, *report)
    assert result.code == 2
    (rescued,) = (path for path in files.glob("unsaved-*") if path.suffix != ".json")
    assert f"the trained weights are in '{rescued}'" in result.err
    assert rescued.stat().st_size > 100
    written = ["report/report.txt"] if command is PRUNE else ["run/report.html", "h.csv"]
    assert all((files / name).is_file() for name in written)


def test_checkpoints_are_tried_again(files, run, harmed):
    """After an hour without room there may be some again."""
    harmed(lambda: (shutil.rmtree("kept"), Path("kept").touch()))
    flags = ("--checkpoint", "kept", "--checkpoint-every", 1, "--keep", 9)
    tried = []
    save = onnxtrain.training.checkpoints.CheckpointStore.save

    def saved(self, step, tensors, metadata):
        tried.append(step)
        if step == 4:
            shutil.rmtree("kept") if Path("kept").is_dir() else Path("kept").unlink()
        return save(self, step, tensors, metadata)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("onnxtrain.training.checkpoints.CheckpointStore.save", saved)
        (files / "out").mkdir()
        result = run(*FIT, *flags)
    assert result.code == 0
    assert sorted(set(tried)) == [1, 2, 3, 4, 5, 6]
    assert "The training goes on" in result.err
    assert "2 checkpoints could not be written; 'kept' holds those of the steps 4, 5, 6." in result.err


def test_in_python_fit_returns_and_save_writes(files, monkeypatch, caplog, harmed):
    monkeypatch.chdir(files)
    arrays = np.load("train.npz")
    x, y = (arrays[name] for name in arrays.files)
    trainer = onnxtrain.Trainer("model.onnx", loss="softmax_cross_entropy")
    harmed(into_folder("run/report.html"))
    history = trainer.fit((x, y) if x.ndim == 2 else (y, x), epochs=2, run="run", checkpoint="kept", save_best="loss")
    assert len(history.rows) == 2
    assert "The run has no report" in caplog.text
    Path("tuned.labels.json").mkdir()
    trainer.labels = ["a", "b", "c"]
    trainer.save("tuned.onnx")
    assert "Names are not saved" in caplog.text
    onnx.load("tuned.onnx")


def test_the_best_model_that_cannot_be_written_is_a_warning(files, monkeypatch, caplog, harmed):
    monkeypatch.chdir(files)
    arrays = np.load("train.npz")
    inputs = dict(arrays)
    trainer = onnxtrain.Trainer("model.onnx", loss="softmax_cross_entropy")
    harmed(full("kept"))
    trainer.fit(inputs, epochs=2, checkpoint="kept", save_best="loss")
    assert "The model of epoch 1, the best so far, is not saved" in caplog.text
