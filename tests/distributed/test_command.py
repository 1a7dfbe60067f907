"""``onnxtrain fit --parallel mpi``: one rank prints and writes, and restarts survive killed processes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from distributed.kills import COMMAND, disturb, ranks, started, wait_for, write_task
from distributed.processes import mpiexec, needs_mpi
from onnxtrain.cli import distributed
from onnxtrain.cli.distributed import DistributedFlags
from sentences import raises_sentence

FIT = (*COMMAND, "--threads", "1")


@pytest.fixture
def folder(tmp_path):
    write_task(tmp_path)
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
    assert repr(DistributedFlags(compress=given)._compression()) == found


@needs_mpi
def test_a_process_that_hangs_is_named_and_the_checkpoint_is_good(folder):
    arguments = ("--parallel", "mpi", "--processes", "2", "--checkpoint", "kept", "--epochs", "100000", "--wait", "5")
    with started(folder, *FIT, *arguments) as launcher:
        wait_for(lambda: (folder / "kept").exists() and len(list((folder / "kept").glob("*.json"))) > 1)
        os.kill(ranks(launcher)[1], signal.SIGSTOP)
        _, errors = launcher.communicate(timeout=60)
    assert launcher.returncode not in (0, 1, 2)
    assert errors.count("error: Rank 1 did not answer for 5 s") == 1, errors
    goes_on = mpiexec(1, *FIT, "--checkpoint", "kept", "--resume", "--change", "epochs", "--epochs", "1", cwd=folder)
    assert goes_on.returncode == 0, goes_on.stderr


@needs_mpi
@pytest.mark.skipif(not Path("/proc").exists(), reason="the processes are found in /proc")
@pytest.mark.parametrize("count", [2, pytest.param(50, marks=pytest.mark.slow)])
def test_a_training_whose_processes_are_killed_ends_as_one_whose_are_not(tmp_path, count):
    counts = disturb(tmp_path, count, random.Random(count))
    assert counts["kills"] == count
    assert counts["trainings"] > counts["others"] == 0


@needs_mpi
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--compress", "float16"), "--compress says how processes add up gradients; give --parallel mpi, too."),
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
    with started(folder, *FIT, *arguments) as process:
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert sentence in errors


def test_without_mpiexec_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(distributed.shutil, "which", lambda *_, **__: None)
    flags = DistributedFlags(parallel="mpi", processes=2)
    with raises_sentence("mpiexec_missing"):
        flags.launch(checkpoint=None)
    monkeypatch.setenv("PMI_RANK", "0")
    with raises_sentence("processes_and_mpiexec"):
        flags.launch(checkpoint=None)


@needs_mpi
def test_without_mpiexec_one_process_trains_as_ever(folder):
    for name, more in (("one.onnx", ("--parallel", "mpi", "--shard-states")), ("alone.onnx", ())):
        done = subprocess.run(
            [sys.executable, *FIT, "--output", name, *more], cwd=folder, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
    assert (folder / "one.onnx").read_bytes() == (folder / "alone.onnx").read_bytes()
