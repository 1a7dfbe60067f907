"""Every output of every command goes through a link to its target, and into a device or a pipe."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading

import numpy as np
import onnx
import pytest

from onnxtrain.training import demo
from onnxtrain.training.callbacks import CsvLogger, History

FIT = ("fit", "model.onnx", "--data", "train.npz", "--loss", "softmax_cross_entropy", "-o")
PRUNE = ("prune", "model.onnx", "--data", "train.npz", "--loss", "softmax_cross_entropy", "--sparsity", "0.9",
         "--epochs", "1", "--fine-tune-epochs", "0", "-o")  # fmt: skip
EXPORT = ("export", "model.onnx", "--loss", "softmax_cross_entropy")
OUTPUTS = {
    "fit": ((*FIT,), "out.onnx"),
    "curve": ((*FIT, "tuned.onnx", "--curve"), "curve.png"),
    "history as JSON": ((*FIT, "tuned.onnx", "--history"), "rows.json"),
    "history as CSV": ((*FIT, "tuned.onnx", "--history"), "rows.csv"),
    "prune": ((*PRUNE,), "out.onnx"),
    "prune, sparse": ((*PRUNE[:-1], "--storage", "sparse", "-o"), "out.onnx"),
    "predict": (("predict", "model.onnx", "--data", "test.npz", "-o"), "out.npz"),
    "predict one": (("predict", "model.onnx", "--data", "test.npz", "-o"), "out.npy"),
    "training model": ((*EXPORT, "--training-model"), "training.onnx"),
    "step graph": ((*EXPORT, "--step-graph"), "step.onnx"),
    "states": ((*EXPORT, "--states"), "states.safetensors"),
}


@pytest.fixture(params=OUTPUTS.values(), ids=OUTPUTS)
def output(request, files, success):
    """Runs a command; returns its output, and the bytes that it writes to an ordinary file."""
    arguments, name = request.param
    success(*arguments, f"plain-{name}")
    plain = (files / f"plain-{name}").read_bytes()
    assert plain
    return lambda name: success(*arguments, name), name, plain


@pytest.mark.sampled(2)
def test_through_a_link(output, files):
    call, name, plain = output
    (files / "real").mkdir()
    (files / name).symlink_to(f"real/{name}")
    for _ in range(2):  # the first makes the target, the second replaces it
        call(name)
        assert (files / name).is_symlink()
        assert len((files / "real" / name).read_bytes()) == len(plain)
        assert [path.name for path in (files / "real").iterdir()] == [name]


@pytest.mark.sampled(2)
def test_into_a_device(output, files):
    call, name, _ = output
    try:
        os.mknod(files / name, 0o020600, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("devices can be made by root only")
    result = call(name)
    assert (files / name).is_char_device()
    assert "a device or a pipe" in result.out
    assert not list(files.glob(".*"))


@pytest.mark.sampled(2)
def test_into_a_pipe(output, files):
    call, name, plain = output
    os.mkfifo(files / name)
    found = []
    reader = threading.Thread(target=lambda: found.append((files / name).read_bytes()))
    reader.start()
    call(name)
    reader.join(10)
    assert (files / name).is_fifo()
    if name.endswith(".npz"):  # an unseekable output has the sizes behind the arrays
        (files / "piped.npz").write_bytes(found[0])
        piped, expected = np.load(files / "piped.npz"), np.load(files / f"plain-{name}")
        assert {key: piped[key].tobytes() for key in piped} == {key: expected[key].tobytes() for key in expected}
    else:
        assert len(found[0]) == len(plain)


def test_a_report_through_links(files, success):
    """Of the folder, and of a file in it."""
    (files / "real").mkdir()
    (files / "report").symlink_to("real")
    (files / "real" / "report.json").symlink_to("../json")
    success(*PRUNE, "out.onnx", "--report", "report")
    assert (files / "report").is_symlink()
    assert (files / "real" / "report.json").is_symlink()
    assert (files / "json").read_bytes()
    assert sorted(path.name for path in (files / "real").iterdir()) == [
        "config.toml",
        "report.json",
        "report.png",
        "report.txt",
    ]


def test_the_demonstration_through_links(files, run, monkeypatch):
    """The folder's files stay links."""
    pytest.importorskip("sklearn")
    monkeypatch.setattr(demo, "EPOCHS", 1)
    (files / "demo").mkdir()
    for name in ("digits.onnx", "digits-tuned.onnx", "curve.png"):
        (files / "demo" / name).symlink_to(f"../{name}")
    run("demo", "--folder", "demo")
    for name in ("digits.onnx", "digits-tuned.onnx", "curve.png"):
        assert (files / "demo" / name).is_symlink()
        assert (files / name).stat().st_size > 1000


def test_callbacks_through_links(files):
    (files / "rows.csv").symlink_to("real.csv")
    logger = CsvLogger(files / "rows.csv")
    logger._history.rows.append({"epoch": 0, "loss": 1.0})
    logger.on_fit_begin(None)
    history = History()
    history.rows.append({"epoch": 0, "loss": 2.0})
    assert (files / "real.csv").read_text() == "epoch,loss\n0,1.0\n"
    history.save(files / "rows.csv")
    assert (files / "rows.csv").is_symlink()
    assert (files / "real.csv").read_text() == "epoch,loss\n0,2.0\n"


def test_external_data_of_exported_models(files, success):
    """A training model written over an older one gets data files of new names, like any model."""
    (files / "a").mkdir()
    onnx.save(onnx.load(files / "model.onnx"), files / "a" / "m.onnx", save_as_external_data=True, location="w.data",
              size_threshold=0)  # fmt: skip
    shutil.copy(files / "a" / "m.onnx", files / "training.onnx")
    (files / "w.data").write_bytes(bytes((files / "a" / "w.data").stat().st_size))
    export = ("export", "a/m.onnx", "--loss", "softmax_cross_entropy", "--train", "layer2.*", "--training-model")
    success(*export, "training.onnx")
    tensors = onnx.load(files / "training.onnx", load_external_data=False).graph.initializer
    assert "w.data" not in {entry.value for tensor in tensors for entry in tensor.external_data}
    onnx.load(files / "training.onnx")
    assert not any((files / "w.data").read_bytes())  # a file that this run did not write stays as it was


@pytest.fixture
def full_disk(files):
    """A folder on a separate disk with room for names and for 16 bytes."""
    folder = files / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8k,nr_inodes=64", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("disks can be mounted by root only")
    try:
        (folder / "rest").write_bytes(bytes(4096))
        (folder / "little").write_bytes(bytes(1))
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize(("arguments", "name"), OUTPUTS.values(), ids=OUTPUTS)
def test_on_a_full_disk(files, run, full_disk, arguments, name):
    result = run(*arguments, f"disk/{name}")
    if arguments[-1] in ("--curve", "--history"):  # the model is written
        assert result.code == 0
        assert f"'disk/{name}' cannot be written: No space left on device; save it somewhere else." in result.err
        return
    assert result.code == 2
    rescued = files / f"unsaved-{name}"
    trains = arguments[0] in ("fit", "prune") and name == "out.onnx"
    advice = f"the trained weights are in {str(rescued)!r}" if trains else "save it somewhere else"
    assert result.err == f"error: 'disk/{name}' cannot be written: No space left on device; {advice}.\n"
    assert rescued.exists() == trains
    rescued.unlink(missing_ok=True)
    assert sorted(path.name for path in full_disk.iterdir()) == ["little", "rest"]


def test_a_report_on_a_full_disk(run, full_disk):
    result = run(*PRUNE, "out.onnx", "--report", "disk")
    assert result.code == 0  # the model is written
    assert "warning: The pruning has no report: 'disk/report.txt' cannot be written: No space left" in result.err
    assert sorted(path.name for path in full_disk.iterdir()) == ["little", "rest"]
