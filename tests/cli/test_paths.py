"""No two paths of a command are the same file, under any name; only --in-place overwrites the model."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import onnx
import pytest
from mistakes import Mistake, fit, nothing

import onnxtrain
from onnxtrain.cli import paths
from onnxtrain.errors import OptionError

PRUNE = ("prune", "model.onnx", "--data", "train.npz", "--loss", "softmax_cross_entropy", "--sparsity", "0.5",
         "--epochs", "1", "--fine-tune-epochs", "0")  # fmt: skip
PREDICT = ("predict", "model.onnx", "--data", "test.npz")
EXPORT = ("export", "model.onnx", "--loss", "huber")
ITSELF = r"--output is the model itself, '{}'; say --in-place to write onto it, or give another name\.$"


def link(name: str, to: str):
    def spoil(folder: Path) -> None:
        (folder / name).symlink_to(to)

    return spoil


def hard_link(name: str, to: str):
    def spoil(folder: Path) -> None:
        (folder / name).hardlink_to(folder / to)

    return spoil


def loss_model(folder: Path) -> None:
    onnx.save(onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["": 18]> g (float[N,3] p, float[N,3] t) => (float l)
        { d = Sub(p, t) l = ReduceSumSquare<keepdims = 0>(d) }"""), folder / "loss.onnx")  # fmt: skip


def same(one: str, other: str, path: str) -> str:
    return rf"{re.escape(one)} and {re.escape(other)} are the same file, '{path}'; give each a path of its own\.$"


MISTAKES = [
    Mistake("model", ITSELF.format(r"model\.onnx"), fit("--output", "model.onnx")),
    Mistake("model by another path", ITSELF.format(r"x/\.\./model\.onnx"), fit("--output", "./x/../model.onnx"),
            spoil=lambda folder: (folder / "x").mkdir()),
    Mistake("model by a link", ITSELF.format(r"out\.onnx"), fit("--output", "out.onnx"),
            link("out.onnx", "model.onnx")),
    Mistake("model by a hard link", ITSELF.format(r"out\.onnx"), fit("--output", "out.onnx"),
            hard_link("out.onnx", "model.onnx")),
    Mistake("training data", same("--data", "--output", r"train\.npz"), fit("--output", "train.npz")),
    Mistake("history on the model", same("MODEL", "--history", r"h\.json"), fit("--history", "h.json"),
            link("h.json", "model.onnx")),
    Mistake("history on the data", same("--data", "--history", r"h\.csv"), fit("--history", "h.csv"),
            link("h.csv", "train.npz")),
    Mistake("curve on the output", same("--output", "--curve", r"c\.svg"),
            fit("--curve", "c.svg", "--output", "c.svg")),
    Mistake("validation data", same("--data", "--validation", r"train\.npz"), fit("--validation", "train.npz")),
    Mistake("checkpoints in the output", same("--checkpoint", "--output", "kept"),
            fit("--checkpoint", "kept", "--output", "kept")),
    Mistake("loss", same("--loss", "--output", r"loss\.onnx"), fit("--loss", "loss.onnx", "--output", "loss.onnx"),
            loss_model),
    Mistake("in place and elsewhere", r"--in-place writes onto the model, but --output is 'tuned\.onnx'; leave one of",
            fit("--in-place")),
    Mistake("pruned model", ITSELF.format(r"model\.onnx"), (*PRUNE, "-o", "model.onnx")),
    Mistake("pruned onto the data", same("--data", "--output", r"train\.npz"), (*PRUNE, "-o", "train.npz")),
    Mistake("report on the output", same("--output", "the file 'report.json' of --report", "r"),
            (*PRUNE, "-o", "r/report.json", "--report", "r"), lambda folder: (folder / "r").mkdir()),
    Mistake("predictions on the data", same("--data", "--output", r"test\.npz"), (*PREDICT, "-o", "test.npz")),
    Mistake("predictions on the model", same("MODEL", "--output", r"p\.npz"), (*PREDICT, "-o", "p.npz"),
            link("p.npz", "model.onnx")),
    Mistake("training model on the model", same("MODEL", "--training-model", r"model\.onnx"),
            (*EXPORT, "--training-model", "model.onnx")),
    Mistake("two exports", same("--training-model", "--step-graph", r"a\.onnx"),
            (*EXPORT, "--training-model", "a.onnx", "--step-graph", "a.onnx")),
    Mistake("states on the step graph", same("--step-graph", "--states", r"a\.onnx"),
            (*EXPORT, "--step-graph", "a.onnx", "--states", "a.onnx")),
    Mistake("model as data", same("MODEL", "--data", r"model\.onnx"),
            ("evaluate", "model.onnx", "--data", "model.onnx", "--loss", "huber")),
]  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_the_same_path_twice(mistake, files, run):
    mistake.spoil(files)
    before = {path: path.read_bytes() for path in files.rglob("*") if path.is_file()}
    result = run(*mistake.arguments)
    assert result.code == 2
    assert re.search(mistake.message, result.err.strip()), result.err
    assert {path: path.read_bytes() for path in files.rglob("*") if path.is_file()} == before


def external(folder: Path, data: str) -> None:
    """Put the weights of the model into a data file."""
    model = onnx.load(folder / "model.onnx")
    onnx.save(model, folder / "model.onnx", save_as_external_data=True, location=data, size_threshold=0)


@pytest.mark.parametrize("output", ["weights.bin", "link.bin"])
def test_the_data_file_of_the_model(files, run, output):
    external(files, "weights.bin")
    (files / "link.bin").symlink_to("weights.bin")
    before = (files / "weights.bin").read_bytes()
    result = run(*fit("--output", output))
    assert result.code == 2
    assert f"the data file 'weights.bin' of MODEL and --output are the same file, '{output}'" in result.err
    assert (files / "weights.bin").read_bytes() == before


def test_the_data_file_of_an_output(files):
    external(files, "d")
    given = {
        paths.MODEL: paths.model(files / "model.onnx"),
        "--output": paths.output(files / "new" / "tuned.onnx", is_model=True),
        "--curve": paths.output(files / "new" / "tuned.onnx.data"),
    }
    with pytest.raises(OptionError, match="of --output and --curve are the same"):
        paths.check_paths(given)


def test_a_file_of_the_data_folder(files, run):
    arrays = np.load(files / "train.npz")
    (files / "data").mkdir()
    for name in arrays.files:
        np.save(files / "data" / f"{name}.npy", arrays[name])
    result = run("predict", "model.onnx", "--data", "data", "--output", "data/label.npy")
    assert result.code == 2
    assert "the file 'label.npy' of --data and --output are the same file, 'data/label.npy'" in result.err
    assert run("predict", "model.onnx", "--data", "data", "--output", "data/logits.npy").code == 0


def test_a_checkpoint_is_not_overwritten(files, run):
    assert run(*fit("--checkpoint", "kept")).code == 0
    (checkpoint,) = (files / "kept").glob("*.json")
    result = run(*fit("--checkpoint", "kept", "--resume", "--epochs", "2", "--history", f"kept/{checkpoint.name}"))
    assert result.code == 2
    assert f"the file '{checkpoint.name}' of --checkpoint and --history are the same file" in result.err


@pytest.mark.parametrize("inside", [True, False], ids=["inline", "external"])
@pytest.mark.parametrize("command", [fit()[:-2], PRUNE], ids=["fit", "prune"])
def test_in_place(files, success, command, inside):
    if not inside:
        external(files, "weights.bin")
    before = onnx.load(files / "model.onnx")
    success(*command, "--in-place")
    after = onnx.load(files / "model.onnx")
    assert after.graph.initializer[0].raw_data != before.graph.initializer[0].raw_data
    names = sorted(path.name for path in files.iterdir())
    assert len(names) == 3 + 2 * (not inside)
    assert ("weights.bin" in names) == (not inside)  # it is not onnxtrain's to remove


def test_python_saves_onto_its_own_model(files):
    trainer = onnxtrain.Trainer(files / "model.onnx", loss="softmax_cross_entropy")
    trainer.fit(files / "train.npz")
    trainer.save(files / "model.onnx")
    again = onnxtrain.Trainer(files / "model.onnx", loss="softmax_cross_entropy")
    np.testing.assert_array_equal(again.parameters["layer1.bias"], trainer.parameters["layer1.bias"])


@pytest.mark.skipif(not hasattr(os, "mknod"), reason="needs mknod")
def test_a_device_may_be_given_twice(tmp_path):
    node = tmp_path / "null"
    try:
        os.mknod(node, 0o600 | 0o020000, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("only root makes devices")
    paths.check_paths({"--output": paths.output(node), "--curve": paths.output(node)})
    with pytest.raises(OptionError, match="--output and --curve are the same file"):
        paths.check_paths({"--output": paths.output(tmp_path / "a"), "--curve": paths.output(tmp_path / "a")})
    nothing(tmp_path)
