"""Kill trainings at every file operation and at random moments, and check the files left.

After a kill, every output file is complete, old or new, a model together with its data files. The same command run
again ends with the same bytes as an undisturbed run, and leaves no temporary files.
"""

from __future__ import annotations

import errno
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from safetensors.numpy import save_file

import onnxtrain
from plugins.text.chats import decoder
from reliability.outcome import WrongError


@dataclass(frozen=True)
class Scenario:
    """A command line, and the files that it writes.

    Attributes:
        line: The command line.
        files: Names of its outputs; a model includes its data files.
        before: A command line that is run first, so that there are old files.
        external: True if half of the model's weights are in a data file.
    """

    line: tuple[str, ...]
    files: tuple[str, ...]
    before: tuple[str, ...] = ()
    external: bool = False


FIT = ("fit", "model.onnx", "--data", "train.npz", "--loss", "softmax_cross_entropy", "--batch-size", "10")
FIT += ("--threads", "1", "--checkpoint", "kept", "--checkpoint-every", "1", "--keep", "2", "--resume", "--epochs", "2")
OLD = ("fit", "model.onnx", "--data", "train.npz", "--loss", "softmax_cross_entropy", "--threads", "1")

SCENARIOS = {
    "new files": Scenario(
        (*FIT, "--output", "out.onnx", "--history", "rows.csv"), ("out.onnx", "rows.csv")
    ),
    "over old files": Scenario(
        (*FIT, "--output", "out.onnx", "--history", "rows.csv"),
        ("out.onnx", "rows.csv"),
        before=(*OLD, "--output", "out.onnx", "--history", "rows.csv"),
    ),
    "external data": Scenario(
        (*FIT, "--output", "sub/out.onnx"),
        ("sub/out.onnx",),
        before=(*OLD, "--output", "sub/out.onnx"),
        external=True,
    ),
    "over itself": Scenario((*FIT, "--in-place"), ("model.onnx",), external=True),
    "predict": Scenario(
        ("predict", "model.onnx", "--data", "train.npz", "--output", "out.npz"), ("out.npz",),
        before=("predict", "model.onnx", "--data", "other.npz", "--output", "out.npz"),
    ),
    "export": Scenario(
        ("export", "model.onnx", "--loss", "softmax_cross_entropy", "--step-graph", "step.onnx", "--training-model",
         "training.onnx", "--states", "states.safetensors"),
        ("step.onnx", "training.onnx", "states.safetensors"),
        before=("export", "model.onnx", "--loss", "softmax_cross_entropy", "--optimizer", "momentum", "--step-graph",
                "step.onnx", "--training-model", "training.onnx", "--states", "states.safetensors"),
    ),
    "quantize": Scenario(
        ("quantize", "model.onnx", "--data", "train.npz", "--output", "out.onnx"), ("out.onnx",), external=True
    ),
    "sparsify": Scenario(("sparsify", "model.onnx", "--output", "out.onnx"), ("out.onnx",)),
    "shrink": Scenario(("shrink", "pruned.onnx", "--output", "out.onnx"), ("out.onnx",)),
    "import states": Scenario(
        ("import-states", "model.onnx", "given.safetensors", "--output", "tuned.onnx"), ("tuned.onnx",), external=True
    ),
    "slots": Scenario(
        ("adapter", "slots", "model.onnx", "--targets", "*", "--output", "slots.onnx"), ("slots.onnx",), external=True
    ),
    "checkpoint": Scenario(
        ("checkpoint", "decoder.onnx", "--output", "out"),
        ("out/model.safetensors", "out/config.json", "out/tokenizer.json"),
        before=("checkpoint", "former.onnx", "--output", "out"),
    ),
    "prune": Scenario(
        ("prune", "model.onnx", "--data", "train.npz", "--loss", "softmax_cross_entropy", "--sparsity", "0.5",
         "--epochs", "1", "--fine-tune-epochs", "1", "--threads", "1", "--output", "out.onnx", "--storage", "sparse"),
        ("out.onnx",),
    ),
}  # fmt: skip

_NUMBERS = re.compile(r"(?<=checkpoint)-\d+(?=-)|\.[0-9a-f]{8}(?=\.(?!tmp)|$)")
"""Checkpoints are numbered in the order in which they are written, and data files may be: a killing changes that."""

_NAMES_OF_THE_RUN = re.compile(r"\.tmp[A-Za-z0-9]{6}|[0-9a-f]{8}\.tmp")


def find_compiler() -> str | None:
    """Return a C++ compiler, if the library works on this system."""
    if not sys.platform.startswith("linux"):
        return None
    return os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


def build_faults(folder: Path) -> Path | None:
    """Build the library that fails file operations; ``None`` without a compiler."""
    library, compiler = folder / "faults.so", find_compiler()
    if compiler is None:
        return None
    if not library.exists():
        source = Path(__file__).with_name("faults.cpp")
        subprocess.run([compiler, "-std=c++17", "-O1", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    return library


class Victim:
    """Start commands in processes that are killed, or whose file operations fail."""

    def __init__(self, library: Path) -> None:
        environment = os.environ | {"LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("victim.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n", "the process to be killed does not start"

    def __enter__(self) -> Victim:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.communicate()

    def run(
        self, folder: Path, line: tuple[str, ...], *, kill_after: float | None = None, **faults: str
    ) -> tuple[int, float]:
        """Run a command line; returns the exit code, negative for a signal, and the seconds."""
        environment = {"FAULTS_FOLDER": str(folder)} | {
            f"FAULTS_{name.upper()}": value for name, value in faults.items()
        }
        request = {"folder": str(folder), "line": line, "environment": environment, "kill after": kill_after}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        return os.waitstatus_to_exitcode(answer["status"]), answer["seconds"]


def error_output(folder: Path) -> str:
    """Standard error of the last command."""
    return Path(f"{folder}.stderr").read_text(errors="backslashreplace")


@dataclass
class Undisturbed:
    """A scenario, and its results without a kill.

    Attributes:
        start: The folder before.
        old: The contents of the written files before.
        new: Their contents afterwards.
        names: The names of all files afterwards.
        operations: The lines of the log: number, operation, paths.
        seconds: Duration of the run.
    """

    scenario: Scenario
    start: Path
    old: dict[str, bytes | None] = field(default_factory=dict)
    new: dict[str, bytes | None] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    operations: list[list[str]] = field(default_factory=list)
    seconds: float = 0.0


def undisturbed(scenario: Scenario, folder: Path, victim: Victim) -> Undisturbed:
    """Prepare the folder of a scenario, and run it once."""
    start, done, log = folder / "start", folder / "done", folder / "log"
    start.mkdir(parents=True)
    _write_files(start, external=scenario.external)
    if scenario.before:
        code, _ = victim.run(start, scenario.before)
        assert code == 0, error_output(start)
    shutil.copytree(start, done)
    code, seconds = victim.run(done, scenario.line, log=str(log))
    assert code == 0, error_output(done)
    found = Undisturbed(scenario, start, seconds=seconds)
    found.old, found.new = written(start, scenario), written(done, scenario)
    assert found.old != found.new
    found.names = names(done)
    found.operations = [line.split("\t") for line in log.read_text().splitlines()]
    return found


def _write_files(folder: Path, *, external: bool) -> None:
    model = onnxtrain.examples.mlp((4, 5, 3))
    (folder / "sub").mkdir()
    if external:
        with open(folder / "weights.bin", "wb") as file:
            for tensor in model.graph.initializer[::2]:  # the others stay in the model
                data = tensor.raw_data
                onnx.external_data_helper.set_external_data(tensor, "weights.bin", file.tell(), len(data))
                tensor.ClearField("raw_data")
                file.write(data)
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    pruned = onnxtrain.examples.mlp((4, 5, 3))
    for tensor, unit in zip(pruned.graph.initializer, ((0,), (0,), (slice(None), 0)), strict=False):
        values = onnx.numpy_helper.to_array(tensor).copy()
        values[unit] = 0.0  # a hidden unit
        tensor.CopyFrom(onnx.numpy_helper.from_array(values, tensor.name))
    (folder / "pruned.onnx").write_bytes(pruned.SerializeToString())
    points = np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32)
    np.savez(folder / "train.npz", input=points, label=points[:, :3].argmax(1))
    np.savez(folder / "other.npz", input=-points)
    save_file({"layer1.bias": np.ones(5, np.float32)}, folder / "given.safetensors")
    for seed, name in enumerate(("former.onnx", "decoder.onnx")):
        onnx.save(decoder(seed), folder / name)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer.json").write_text("{}")


def written(folder: Path, scenario: Scenario) -> dict[str, bytes | None]:
    """Return the contents of the files that a scenario writes: bytes, or a model with its external data."""
    return {name: _content(folder / name) for name in scenario.files}


def _content(path: Path) -> bytes | None:
    if not path.exists():
        return None
    if path.suffix != ".onnx":
        return path.read_bytes()
    try:
        model = onnx.load(path)
    except Exception as error:  # torn, or its data files are not there
        return f"unreadable: {error}".encode()
    for tensor in model.graph.initializer:
        tensor.ClearField("external_data")  # where it was does not matter
    return bytes(model.SerializeToString(deterministic=True))


def names(folder: Path) -> set[str]:
    """Return the names of all files in a folder except rescued weights, without the numbers in the names."""
    found = (path for path in folder.rglob("*") if not path.name.startswith("unsaved-"))
    return {_NUMBERS.sub("", str(path.relative_to(folder))) for path in found}


def disturb(found: Undisturbed, generator: random.Random) -> dict[str, Any]:
    """Disturbance of a run: kill it before an operation, within a write or at a moment; or let operations fail."""
    position = generator.randrange(len(found.operations)) + 1
    match generator.randrange(8):
        case 0:
            return {"kill_after": generator.uniform(0.0, found.seconds)}
        case 1 | 2:
            writes = [index for index, operation in enumerate(found.operations, 1) if operation[1] == "write"]
            return {"at": str(generator.choice(writes)), "action": "half"}
        case 3:
            return {"at": str(position), "action": str(generator.choice((errno.ENOSPC, errno.EIO, errno.EMFILE)))}
        case _:
            return {"at": str(position), "action": "kill"}


def disturb_and_look(found: Undisturbed, folder: Path, victim: Victim, how: dict[str, Any]) -> None:
    """Disturb a run, look, run again, look again.

    Raises:
        WrongError: A property is violated.
    """
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(found.start, folder)
    code, _ = victim.run(folder, found.scenario.line, **how)
    failing = how.get("action", "").isdigit()
    if code not in ((0, 2) if failing else (0, -signal.SIGKILL)):
        raise WrongError(f"ended with {code}: {error_output(folder)}", "another end than that of the disturbance")
    if code == 2 and not re.fullmatch(r"(warning: [^\n]+\.\n)*error: [^\n]+\.\n", error_output(folder)):
        raise WrongError(f"printed {error_output(folder)!r}", "no sentence")
    if failing:
        _look_for_remains({name for name in names(folder) if _UNFINISHED.search(name)})
    left = written(folder, found.scenario)
    for name, content in left.items():
        if content not in (found.old[name], found.new[name]):
            raise WrongError(f"{name} is mixed or lost: {str(content)[:200]}", f"{name} is mixed or lost")
    code, _ = victim.run(folder, found.scenario.line)
    if code:
        raise WrongError(f"the next run ended with {code}: {error_output(folder)}", "the next run fails")
    again = written(folder, found.scenario)
    different = [name for name in again if again[name] != found.new[name]]
    if different:
        cause = f"the next run gave other bytes in {different}"
        raise WrongError(cause, cause)
    _look_for_remains(names(folder) ^ found.names)


_UNFINISHED = re.compile(r"\.tmp|\.writing")


def _look_for_remains(remains: set[str]) -> None:
    if remains:
        general = sorted(_NAMES_OF_THE_RUN.sub("*", name) for name in remains)
        raise WrongError(f"left lying about: {sorted(remains)}", f"left lying about: {general}")
