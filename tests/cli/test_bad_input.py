"""Every mistake ends in one sentence: which thing, what it got, what it needs; exit code 2, nothing written."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest
from command_files import examples
from onnx import TensorProto, helper, numpy_helper

import onnxtrain


def fit(*more: str) -> tuple[str, ...]:
    """A good command line, with flags added or replaced."""
    flags = {"--data": "train.npz", "--loss": "softmax_cross_entropy", "--output": "tuned.onnx"}
    added = [*more]
    for name in set(flags) & set(added):
        position = added.index(name)
        flags[name] = added[position + 1]
        del added[position : position + 2]
    return ("fit", "model.onnx", *(part for pair in flags.items() for part in pair), *added)


FIT = fit()


def nothing(folder: Path) -> None:
    """Leave the good files as they are."""


@dataclass(frozen=True)
class Mistake:
    """What is wrong, and the sentence that has to come."""

    name: str
    message: str
    arguments: tuple[str, ...] = FIT
    spoil: Callable[[Path], None] = nothing

    def __str__(self) -> str:
        return self.name


def model(**changes: object) -> Callable[[Path], None]:
    """Change fields of the model file."""

    def spoil(folder: Path) -> None:
        proto = onnx.load(folder / "model.onnx")
        for name, value in changes.items():
            setattr(proto, name, value)
        (folder / "model.onnx").write_bytes(proto.SerializeToString())

    return spoil


def content(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    """Change the bytes of the model file."""

    def spoil(folder: Path) -> None:
        path = folder / "model.onnx"
        path.write_bytes(change(path.read_bytes()))

    return spoil


def opset(version: int) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        proto = onnx.load(folder / "model.onnx")
        proto.opset_import[0].version = version
        (folder / "model.onnx").write_bytes(proto.SerializeToString())

    return spoil


def external(location: str) -> Callable[[Path], None]:
    """Let the first weight lie in a data file that is not there, or that may not be read."""

    def spoil(folder: Path) -> None:
        proto = onnx.load(folder / "model.onnx")
        tensor = proto.graph.initializer[0]
        (folder.parent / "secret.bin").write_bytes(tensor.raw_data)
        onnx.external_data_helper.set_external_data(tensor, location)
        tensor.ClearField("raw_data")
        (folder / "model.onnx").write_bytes(proto.SerializeToString())

    return spoil


def nodes(*parts: onnx.NodeProto, weights: bool = True, scalar: bool = False) -> Callable[[Path], None]:
    """Put another graph from input [N, 4] to logits [N, 3] into the model file."""

    def spoil(folder: Path) -> None:
        graph = helper.make_graph(
            list(parts),
            "bad",
            [helper.make_tensor_value_info("input", TensorProto.FLOAT, ["N", 4])],
            [helper.make_tensor_value_info("logits", TensorProto.FLOAT, [] if scalar else ["N", 3])],
            [numpy_helper.from_array(np.ones((4, 3), np.float32), "weight")] if weights else [],
        )
        imports = [helper.make_opsetid("", 18), helper.make_opsetid("my.domain", 1)]
        onnx.save(helper.make_model(graph, opset_imports=imports, ir_version=8), folder / "model.onnx")

    return spoil


def data(**changes: np.ndarray | None) -> Callable[[Path], None]:
    """Replace arrays of the data file; None takes one out."""

    def spoil(folder: Path) -> None:
        arrays = examples() | changes
        np.savez(folder / "train.npz", **{name: array for name, array in arrays.items() if array is not None})

    return spoil


def with_value(name: str, value: float) -> np.ndarray:
    """An array of the data with one value replaced, in example 7."""
    array = examples()[name].copy()
    array[7] = value
    return array


def linear(**attributes: str) -> tuple[onnx.NodeProto, ...]:
    return (
        helper.make_node("MatMul", ["input", "weight"], ["product"]),
        helper.make_node("Mystery", ["product"], ["logits"], name="riddle", domain="my.domain", **attributes),
    )


MODELS = [
    Mistake("no model file", r"no file 'missing\.onnx'; check the path", ("inspect", "missing.onnx")),
    Mistake("not ONNX", r"'model\.onnx' is not an ONNX model", spoil=content(lambda _: b"PK\3\4 a zip file")),
    Mistake("empty model", r"'model\.onnx' is empty", spoil=content(lambda _: b"")),
    Mistake("truncated", r"'model\.onnx' is cut off: it has \d+ bytes", spoil=content(lambda b: b[: len(b) // 2])),
    Mistake("missing external data", r"'model\.onnx' .*weights\.bin", spoil=external("weights.bin")),
    Mistake("escaping external data", r"'model\.onnx' .*'\.\./secret\.bin'", spoil=external("../secret.bin")),
    Mistake("unknown opset", r"opset 28, but opsets 7 to \d+ are supported", spoil=opset(28)),
    Mistake("unknown IR", r"IR version 14, but ONNX Runtime supports 3 to 13", spoil=model(ir_version=14)),
    Mistake(
        "no parameter",
        "no trainable parameter: it has no initializers",
        spoil=nodes(helper.make_node("Softmax", ["input"], ["logits"]), weights=False),
    ),
    Mistake("all frozen", "no trainable parameter: .*: frozen", fit("--freeze", "*")),
    Mistake(
        "no gradient",
        r"No gradient rule for 1 operator .*my\.domain::Mystery.*'riddle'.*register_gradient",
        spoil=nodes(*linear()),
    ),
]

DATA = [
    Mistake("no data file", r"'missing\.npz' does not exist", fit("--data", "missing.npz")),
    Mistake(
        "data is text",
        r"'train\.npz' starts with .* neither a \.npz nor a \.npy",
        spoil=lambda folder: ((folder / "train.npz").write_text("hello world"), None)[1],
    ),
    Mistake(
        "input missing",
        r"no array for input 'input': it holds 'label' and 'x'",
        spoil=data(input=None, x=np.zeros((3, 4))),
    ),
    Mistake("no target", r"holds only the input 'input': add an array of targets", spoil=data(label=None)),
    Mistake(
        "two targets",
        r"leaves 'label' and 'other'.* --target|leaves 'label' and 'other'",
        spoil=data(other=np.zeros(60)),
    ),
    Mistake("unknown target", r"no target 'labels': it holds 'input' and 'label'", fit("--target", "labels")),
    Mistake(
        "wrong size",
        r"shape \(60, 5\), but the model needs \(batch, 4\): axis 1 is 5 instead of 4",
        spoil=data(input=np.zeros((60, 5), np.float32)),
    ),
    Mistake(
        "wrong rank",
        r"rank 3 \(shape \(60, 2, 2\)\), but the model needs rank 2",
        spoil=data(input=np.zeros((60, 2, 2), np.float32)),
    ),
    Mistake(
        "wrong type", r"type complex128, but the model needs float32", spoil=data(input=np.zeros((60, 4), complex))
    ),
    Mistake(
        "lengths differ",
        r"different lengths: input 'input' has 60 examples, .* has 59",
        spoil=data(label=np.zeros(59, np.int64)),
    ),
    Mistake(
        "label too large",
        r"label 3 at example 7, but labels must be 0 to 2 \(3 classes\)",
        spoil=data(label=with_value("label", 3)),
    ),
    Mistake(
        "negative label", r"label -1 at example 7, but labels must be 0 to 2", spoil=data(label=with_value("label", -1))
    ),
    Mistake("fractional labels", r"the target array", spoil=data(label=np.linspace(0, 1, 60))),
    Mistake(
        "empty",
        r"'train\.npz' is empty: input 'input' has shape \(0, 4\)",
        spoil=data(input=np.zeros((0, 4), np.float32), label=np.zeros(0, np.int64)),
    ),
    Mistake("NaN", r"input 'input' holds nan at example 7: remove", spoil=data(input=with_value("input", np.nan))),
    Mistake("infinity", r"input 'input' holds inf at example 7", spoil=data(input=with_value("input", np.inf))),
]

OPTIONS = [
    Mistake("unknown loss", "no loss 'crossentropy'; use softmax_cross_entropy, .*", fit("--loss", "crossentropy")),
    Mistake(
        "unknown output",
        "--loss 'output:cost' ?, but .*outputs are logits|--loss output:cost, but .* are logits",
        fit("--loss", "output:cost"),
    ),
    Mistake(
        "unknown prediction",
        "--prediction probabilities, but the outputs are logits",
        fit("--prediction", "probabilities"),
    ),
    Mistake("unknown optimizer", r'"sgd" .*--optimizer.*"?adagrad.*momentum', fit("--optimizer", "sgd")),
    Mistake(
        "foreign attribute",
        r"--mode is nesterov, but adam has no such attribute; it has --learning-rate, --alpha",
        fit("--mode", "nesterov"),
    ),
    Mistake(
        "unknown mode",
        "Momentum: the attribute 'mode' is 'heavy', but must be one of 'standard', 'nesterov'",
        fit("--optimizer", "momentum", "--mode", "heavy"),
    ),
    Mistake(
        "attribute out of range",
        "Adam: alpha is 1.5, but must be a finite number, 0 or more and below 1",
        fit("--alpha", "1.5"),
    ),
    Mistake("negative rate", "Adam: learning_rate is -1.0, but must be", fit("--learning-rate", "-1")),
    Mistake(
        "train nothing", r"--train 'head\.\*' matches no initializer; the model has layer1", fit("--train", "head.*")
    ),
    Mistake("freeze nothing", r"--freeze conv matches no initializer", fit("--freeze", "conv")),
    Mistake("unknown schedule", "no schedule 'polynomial'", fit("--schedule", "polynomial")),
    Mistake("no epochs", "epochs is 0; it needs a number of at least 1", fit("--epochs", "0")),
    Mistake("no batch", "the batch size is 0; it must be a whole number of at least 1", fit("--batch-size", "0")),
    Mistake("negative seed", "seed is -1; it must be a whole number of at least 0", fit("--seed", "-1")),
    Mistake("no micro-batch", "accumulate is 0; it needs", fit("--accumulate", "0")),
    Mistake("no threads", "threads is 0; it needs a number of at least 1", fit("--threads", "0")),
    Mistake("negative norm", "clip_norm is -1.0; it needs a finite number above 0", fit("--clip-norm", "-1")),
    Mistake(
        "unknown metric",
        "no metric 'precision': use accuracy",
        fit("--validation", "test.npz", "--metrics", "precision"),
    ),
    Mistake(
        "metric without data",
        "metrics are measured on validation data; give --validation",
        fit("--metrics", "accuracy"),
    ),
    Mistake(
        "metric without targets",
        "metrics compare predictions with targets, which this loss does not take; leave them out",
        fit("--loss", "output:logits", "--validation", "test.npz", "--metrics", "accuracy"),
        spoil=nodes(helper.make_node("ReduceMean", ["weight"], ["logits"], keepdims=0), scalar=True),
    ),
    Mistake(
        "no validation file",
        r"--validation is 'tests\.npz'; it needs a \.npz file.* or a fraction",
        fit("--validation", "tests.npz"),
    ),
    Mistake(
        "validation fraction",
        "validation fraction is 1.5; it must be greater than 0 and less than 1",
        fit("--validation", "1.5"),
    ),
    Mistake(
        "stopping without validation",
        "--early-stopping watches the validation loss; give --validation",
        fit("--early-stopping", "3"),
    ),
    Mistake(
        "no patience",
        "patience of early stopping is 0; it must be at least 1",
        fit("--validation", "test.npz", "--early-stopping", "0"),
    ),
    Mistake("resume from nowhere", "resume needs the folder of the checkpoints; give --checkpoint", fit("--resume")),
    Mistake(
        "keep nothing",
        "checkpoints to keep is 0; it must be at least 1",
        fit("--checkpoint", "checkpoints", "--keep", "0"),
    ),
    Mistake(
        "diverges",
        r"loss became (nan|inf) at step \d+ .*clip gradients \(--clip-norm 1\.0\)",
        fit("--optimizer", "momentum", "--learning-rate", "1e38", "--epochs", "20"),
    ),
    Mistake("unknown batch-norm", r'"on" .*--batch-norm.*frozen.*train', fit("--batch-norm", "on")),
]

PATHS = [
    Mistake(
        "output in no folder",
        r"'missing/tuned\.onnx' cannot be written: there is no folder 'missing'",
        fit("--output", "missing/tuned.onnx"),
    ),
    Mistake("output is a folder", r"'\.' cannot be written: it is a folder", fit("--output", ".")),
    Mistake("curve in no folder", r"'missing/curve\.png' cannot be written", fit("--curve", "missing/curve.png")),
    Mistake(
        "history of no kind",
        r"--history is 'rows\.txt'; it needs a file that ends in \.json or \.csv",
        fit("--history", "rows.txt"),
    ),
    Mistake(
        "checkpoints in a file",
        r"--checkpoint is 'train\.npz', but 'train\.npz' is a file",
        fit("--checkpoint", "train.npz"),
    ),
    Mistake(
        "predictions of no kind",
        r"--output is 'p\.txt'; it needs a file that ends in \.npz or \.npy",
        ("predict", "model.onnx", "--data", "test.npz", "--output", "p.txt"),
    ),
    Mistake(
        "predictions in no folder",
        r"'missing/p\.npz' cannot be written",
        ("predict", "model.onnx", "--data", "test.npz", "--output", "missing/p.npz"),
    ),
    Mistake(
        "nothing to export",
        r"nothing to write; give --training-model, --step-graph or --states",
        ("export", "model.onnx", "--loss", "huber"),
    ),
    Mistake(
        "export without loss",
        r"'model\.onnx' is no training model yet; give it a --loss",
        ("export", "model.onnx", "--step-graph", "step.onnx"),
    ),
    Mistake(
        "export to no folder",
        r"'missing/step\.onnx' cannot be written",
        ("export", "model.onnx", "--loss", "huber", "--step-graph", "missing/step.onnx"),
    ),
    Mistake(
        "export a bad entry",
        r"no entry 3; the training model has 1",
        ("export", "model.onnx", "--loss", "huber", "--step-graph", "step.onnx", "--entry", "3"),
    ),
]

USAGE = [
    Mistake("unknown command", r'"fitt".*"fit".*[Ss]ee onnxtrain --help', ("fitt",)),
    Mistake("unknown flag", r"--epoch\b.*--epochs.*[Ss]ee onnxtrain fit --help", fit("--epoch", "3")),
    Mistake("no loss", r"--loss.*[Ss]ee onnxtrain fit --help", ("fit", "model.onnx", "--data", "train.npz")),
    Mistake("no model", r"MODEL.*[Ss]ee onnxtrain inspect --help", ("inspect",)),
    Mistake("not a number", r'--epochs.*"many".* into int.*[Ss]ee onnxtrain fit --help', fit("--epochs", "many")),
    Mistake("flag without value", r"--data.*[Ss]ee onnxtrain fit --help", ("fit", "model.onnx", "--data")),
    Mistake("evaluate unknown loss", "no loss 'l2'", ("evaluate", "model.onnx", "--data", "test.npz", "--loss", "l2")),
    Mistake(
        "inspect unknown pattern",
        "--freeze nothing matches no initializer",
        ("inspect", "model.onnx", "--freeze", "nothing"),
    ),
]


@pytest.mark.parametrize("mistake", [*MODELS, *DATA, *OPTIONS, *PATHS, *USAGE], ids=str)
def test_ends_in_one_sentence(mistake, files, run):
    mistake.spoil(files)
    before = {path: path.read_bytes() for path in files.iterdir()}
    result = run(*mistake.arguments)
    assert result.code == 2
    assert re.fullmatch(r"error: [^\n]+\.\n", result.err), result.err
    assert "Traceback" not in result.err + result.out
    assert re.search(mistake.message, result.err), result.err
    after = {path: path.read_bytes() for path in files.iterdir() if not path.is_dir()}
    assert after == before


def test_debug_shows_where(files, run):
    result = run(*fit("--loss", "crossentropy", "--debug"))
    assert result.code == 2
    assert "Traceback (most recent call last)" in result.err
    assert "error: There is no loss 'crossentropy'" in result.err


def test_debug_shows_where_arguments_are_wrong(run):
    result = run("fit", "--debug")
    assert result.code == 2
    assert "Traceback (most recent call last)" in result.err


def test_a_defect_is_called_one(files, run, monkeypatch):
    def broken(*arguments, **options):
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(onnxtrain.model.inspection, "inspect", broken)
    result = run("inspect", "model.onnx")
    assert result.code == 1
    assert result.err.startswith("error: This is a defect of onnxtrain (ZeroDivisionError: division by zero)")
    assert "Traceback" not in result.err


def test_a_full_disk_is_no_defect(files, run, monkeypatch):
    def full(*arguments, **options):
        raise OSError(28, "No space left on device", "tuned.onnx")

    monkeypatch.setattr(onnxtrain.model.file.ModelFile, "save", full)
    result = run(*FIT)
    assert result.code == 2
    assert result.err == "error: 'tuned.onnx': No space left on device.\n"


def test_interrupt_says_that_nothing_was_written(files, run, monkeypatch):
    interrupt_after(monkeypatch, 3)
    result = run(*fit("--epochs", "5"))
    assert result.code == 130
    assert result.err == "error: Interrupted; nothing was written.\n"
    assert not (files / "tuned.onnx").exists()


def test_interrupt_names_the_checkpoint(files, run, monkeypatch):
    interrupt_after(monkeypatch, 5)
    result = run(*fit("--epochs", "5", "--checkpoint", "kept"))
    assert result.code == 130
    assert re.search(r"Interrupted; 'kept/checkpoint-.*step-4\.json' is kept, --resume goes on", result.err)


def interrupt_after(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """Press Ctrl-C after some steps."""
    from onnxtrain.training.trainer import Trainer

    step_batch, done = Trainer._step_batch, []

    def step(self, batch):
        done.append(batch)
        if len(done) > steps:
            raise KeyboardInterrupt
        return step_batch(self, batch)

    monkeypatch.setattr(Trainer, "_step_batch", step)


def test_broken_pipe_is_silent(files, monkeypatch, capfd):
    from onnxtrain.cli import main

    def closed(*arguments, **options):
        raise BrokenPipeError

    monkeypatch.setattr("onnxtrain.model.inspection.inspect", closed)
    monkeypatch.setattr("os.dup2", lambda *descriptors: None)
    assert main(["inspect", str(files / "model.onnx")]) == 0
    assert capfd.readouterr().err == ""
