"""``onnxtrain fit --parallel mpi``: one voice, one file, and a training that survives its processes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import pytest

import onnxtrain
from onnxtrain.cli.fit import Together
from onnxtrain.errors import OptionError
from parallel.processes import mpiexec, needs_mpi

FIT = (
    "-m",
    "onnxtrain",
    "fit",
    "model.onnx",
    "--data",
    "train.npz",
    "--loss",
    "softmax_cross_entropy",
    "--threads",
    "1",
)


@pytest.fixture
def folder(tmp_path):
    onnx.save(onnxtrain.examples.mlp((4, 8, 3)), tmp_path / "model.onnx")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(101, 4)).astype(np.float32)
    np.savez(tmp_path / "train.npz", input=x, y=np.abs(x).argmax(axis=1) % 3)
    return tmp_path


@needs_mpi
def test_the_model_is_that_of_micro_batches_and_one_process_speaks(folder):
    alone = mpiexec(1, *FIT, "--accumulate", "2", "--output", "alone.onnx", "--epochs", "2", cwd=folder)
    together = mpiexec(
        2, *FIT, "--parallel", "mpi", "--output", "both.onnx", "--epochs", "2", "--history", "h.csv", cwd=folder
    )
    assert (alone.returncode, together.returncode) == (0, 0), alone.stderr + together.stderr
    assert (folder / "alone.onnx").read_bytes() == (folder / "both.onnx").read_bytes()
    assert together.stdout.count("epoch 1/2") == together.stdout.count("both.onnx") == 1
    assert (folder / "h.csv").exists()


@needs_mpi
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--validation", "none.npz"), "'none.npz'"),
        (("--compress", "7"), "TopK has the share 7.0; it needs a number above 0 and at most 1"),
        (("--batch-size", "0"), "batch size is 0"),
        (("--optimizer", "none"), "none"),
        (("--optimizer", "sgd", "--learning-rate", "1e30"), "The loss became"),
    ],
    ids=["data", "compression", "batch size", "optimizer", "nan"],
)
def test_an_error_is_one_sentence_of_rank_0(folder, arguments, sentence):
    done = mpiexec(2, *FIT, "--parallel", "mpi", "--epochs", "9", *arguments, cwd=folder)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.count("error:") == 1, done.stderr
    assert sentence in done.stderr


@pytest.mark.parametrize(("given", "found"), [(None, "None"), ("float16", "'float16'"), ("0.01", "TopK(0.01)")])
def test_what_compresses_gradients(given, found):
    assert repr(Together(compress=given)._compression()) == found


@needs_mpi
def test_a_process_that_hangs_is_named_and_the_checkpoint_is_good(folder):
    arguments = ("--parallel", "mpi", "--processes", "2", "--checkpoint", "kept", "--epochs", "100000", "--wait", "1")
    with started(folder, *arguments) as launcher:
        wait_for(lambda: (folder / "kept").exists() and len(list((folder / "kept").glob("*.json"))) > 1)
        os.kill(ranks(launcher)[1], signal.SIGSTOP)
        _, errors = launcher.communicate(timeout=60)
    assert launcher.returncode not in (0, 1, 2)
    assert errors.count("error: Rank 1 did not answer for 1 s") == 1, errors
    goes_on = mpiexec(1, *FIT, "--checkpoint", "kept", "--resume", "--change", "epochs", "--epochs", "1", cwd=folder)
    assert goes_on.returncode == 0, goes_on.stderr


def started(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, *FIT, *arguments]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(condition, seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not come"
        time.sleep(0.02)


def ranks(launcher: subprocess.Popen[str]) -> dict[int, int]:
    """The process of every rank below a launcher."""
    found: dict[int, int] = {}
    below = {launcher.pid}
    for _ in range(4):  # launcher, mpiexec, its proxy, the ranks
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if parent not in below:
                    continue
                below.add(int(entry.name))
                for item in (entry / "environ").read_bytes().split(b"\0"):
                    if item.startswith(b"PMI_RANK="):
                        found[int(item[9:])] = int(entry.name)
            except OSError:  # it has ended
                continue
    return found


def disturbed(folder: Path, kills: int, seed: int) -> None:
    """Kill processes at random moments of a training; its end is that of one that nobody disturbed."""
    common = (
        "--parallel",
        "mpi",
        "--epochs",
        "40",
        "--batch-size",
        "8",
        "--checkpoint-every",
        "3",
        "--optimizer",
        "adam",
    )
    calm = mpiexec(2, *FIT, *common, "--output", "calm.onnx", "--checkpoint", "calm", cwd=folder)
    assert calm.returncode == 0, calm.stderr
    draw, killed = random.Random(seed), 0
    arguments = (
        *common,
        "--output",
        "hit.onnx",
        "--checkpoint",
        "hit",
        "--processes",
        "2",
        "--restarts",
        str(kills + 1),
    )
    with started(folder, *arguments) as launcher:
        while killed < kills and launcher.poll() is None:
            wait_for(lambda: len(ranks(launcher)) == 2 or launcher.poll() is not None)
            time.sleep(draw.uniform(0.0, 2.5))
            if victim := ranks(launcher).get(draw.randrange(2)):
                os.kill(victim, signal.SIGKILL)
                killed += 1
                wait_for(lambda gone=victim: gone not in ranks(launcher).values())
        _, errors = launcher.communicate(timeout=120)
    assert launcher.returncode == 0, errors
    assert killed, "it was over before anything could be killed"
    assert errors.count("A process was lost") >= 1
    assert (folder / "calm.onnx").read_bytes() == (folder / "hit.onnx").read_bytes()


@needs_mpi
@pytest.mark.skipif(not Path("/proc").exists(), reason="the processes are found in /proc")
def test_a_training_whose_processes_are_killed_ends_as_one_whose_are_not(folder):
    disturbed(folder, 2, seed=0)


@needs_mpi
@pytest.mark.slow
def test_fifty_kills_at_random_moments_change_nothing(folder):
    for seed in range(10):
        for name in ("calm", "hit"):
            for path in (folder / name).glob("*") if (folder / name).exists() else ():
                path.unlink()
        disturbed(folder, 5, seed=seed)


@needs_mpi
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--processes", "2"), "--processes and --restarts start several processes; give --parallel mpi, too."),
        (("--parallel", "mpi", "--restarts", "2"), "--restarts starts the processes again; give --processes, too."),
        (("--parallel", "mpi", "--processes", "2", "--restarts", "2"), "--restarts goes on from checkpoints"),
        (
            ("--parallel", "mpi", "--processes", "0"),
            "--processes is 0 and --restarts is 0; they need at least 1 and 0.",
        ),
    ],
)
def test_flags_that_do_not_go_together(folder, arguments, sentence):
    with started(folder, *arguments) as process:
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert sentence in errors


def test_without_mpiexec_the_error_says_what_to_install(monkeypatch):
    from onnxtrain.cli import launching

    monkeypatch.setattr(launching.shutil, "which", lambda *_, **__: None)
    with pytest.raises(OptionError, match=r"--processes needs mpiexec, .*pip install mpich"):
        launching.launch(2, 0, checkpoint=None)
    monkeypatch.setenv("PMI_RANK", "0")
    with pytest.raises(OptionError, match="--processes starts mpiexec itself; leave one of them out"):
        launching.launch(2, 0, checkpoint=None)


@needs_mpi
def test_without_mpiexec_one_process_trains_as_ever(folder):
    for name, more in (("one.onnx", ("--parallel", "mpi", "--shard-states")), ("alone.onnx", ())):
        done = subprocess.run(
            [sys.executable, *FIT, "--output", name, *more], cwd=folder, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
    assert (folder / "one.onnx").read_bytes() == (folder / "alone.onnx").read_bytes()
