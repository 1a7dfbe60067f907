"""Two runs in one folder: locks, and what a run that is no more has left there."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from model_examples import external_model

from onnxtrain.errors import CheckpointError
from onnxtrain.model_file.file import ModelFile
from onnxtrain.model_file.locks import folder_lock
from onnxtrain.model_file.writing import AtomicFiles, check_writable


def write(path: Path, data: bytes = b"new") -> None:
    with AtomicFiles() as files, files.create(path) as file:
        file.write(data)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_leftovers_of_a_dead_run_go(tmp_path: Path) -> None:
    (tmp_path / ".out.0123abcd.tmp").write_bytes(b"half")
    (tmp_path / ".other.0123abcd.tmp").write_bytes(b"half of something that may not be ours")
    (tmp_path / ".onnxtrain.00000000.tmp").write_bytes(b"")
    (tmp_path / ".anything.00000000.tmp").write_bytes(b"half")
    write(tmp_path / "out")
    assert names(tmp_path) == [".other.0123abcd.tmp", "out"]


def test_what_a_live_run_is_writing_stays(tmp_path: Path) -> None:
    with AtomicFiles() as files:
        with files.create(tmp_path / "out") as file:
            file.write(b"slow")
        during = names(tmp_path)
        check_writable(tmp_path / "out")
        write(tmp_path / "out", b"fast")
        assert names(tmp_path) == sorted([*during, "out"])
    assert (tmp_path / "out").read_bytes() == b"slow"
    assert names(tmp_path) == ["out"]


def test_a_strangers_marker_removes_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "thesis.docx").write_bytes(b"mine")
    status = (tmp_path / "thesis.docx").stat()
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "mine").write_bytes(b"mine")
    stamp = f"{status.st_ino}, {status.st_mtime_ns}, {status.st_size}"
    (folder / ".onnxtrain.00000000.tmp").write_text(
        f'{{"model": "m", "files": [["../thesis.docx", {stamp}], ["mine", 1, 2, 4], ["a\\u0000", 1, 2, 3]]}}'
    )
    for number, text in enumerate(["[", "[[[", '{"model": 1, "files": 2}', "9" * 5000, '{"files": [[]]}']):
        (folder / f".onnxtrain.0000000{number + 1}.tmp").write_text(text)
    write(folder / "out")
    assert names(folder) == ["mine", "out"]
    assert (tmp_path / "thesis.docx").exists()


_HOLD = """
import sys, time
from onnxtrain.model_file.locks import folder_lock
with folder_lock(sys.argv[1]):
    print("locked", flush=True)
    sys.stdin.read()
"""


def test_a_folder_is_locked_against_other_processes(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        message = (
            r"^'.*' is in use: another run of onnxtrain writes there; wait until it has ended, or give another folder"
        )
        with pytest.raises(CheckpointError, match=message), folder_lock(tmp_path, error=CheckpointError):
            pass
        with folder_lock(tmp_path, needed=False):
            write(tmp_path / "out")  # a save goes on
        process.kill()
    with folder_lock(tmp_path), folder_lock(tmp_path):  # a process may take its own lock again
        pass
    assert names(tmp_path) == ["out"]


def test_a_folder_lock_goes_with_its_last_holder(tmp_path: Path) -> None:
    first, second = folder_lock(tmp_path), folder_lock(tmp_path)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    check = "import sys; from onnxtrain.model_file.locks import folder_lock\nwith folder_lock(sys.argv[1]): pass"
    taken = subprocess.run([sys.executable, "-c", check, str(tmp_path)], capture_output=True, check=False)
    assert b"is in use" in taken.stderr
    second.__exit__(None, None, None)
    assert subprocess.run([sys.executable, "-c", check, str(tmp_path)], check=False).returncode == 0


def test_without_locks_everything_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from onnxtrain.model_file import locks

    def refuse(*arguments: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    assert locks.fcntl is not None
    monkeypatch.setattr(locks.fcntl, "flock", refuse)
    (tmp_path / ".onnxtrain.00000000.tmp").write_bytes(b"")  # nobody can know whose
    with folder_lock(tmp_path):
        write(tmp_path / "out")
    assert names(tmp_path) == [".onnxtrain.00000000.tmp", "out"]


_SAVE = """
import sys
import numpy as np
from onnxtrain.model_file.file import ModelFile
file = ModelFile.load(sys.argv[1])
for _ in range(20):
    file.save(sys.argv[2], {n: np.full_like(file.value(n), float(sys.argv[3])) for n in ("w", "b", "scale")})
"""


def test_two_runs_save_to_one_model(tmp_path: Path) -> None:
    path = external_model(tmp_path / "a")
    (tmp_path / "b").mkdir()
    target = tmp_path / "b" / "model.onnx"
    runs = [subprocess.Popen([sys.executable, "-c", _SAVE, str(path), str(target), str(number)]) for number in (1, 2)]
    assert [run.wait(120) for run in runs] == [0, 0]
    saved = ModelFile.load(target)
    assert len({float(value) for name in saved.names() for value in np.unique(saved.value(name))}) == 1
    assert len(names(target.parent)) == 2
