"""Two runs in one folder: locks, and leftovers of a dead run."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from model_examples import external_model

from child_processes import child_process
from onnxtrain.errors import CheckpointError
from onnxtrain.model_file.file import ModelFile
from onnxtrain.model_file.writing import AtomicFiles, check_writable, folder_lock


def write(path: Path, data: bytes = b"new") -> None:
    with AtomicFiles() as files, files.create(path) as file:
        file.write(data)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def left_by_a_killed_run(path: Path) -> str:
    """Kill a process that is writing a file; return the name of its leftover."""
    before = set(names(path.parent))
    code = "import os, sys; from onnxtrain.model_file.writing import AtomicFiles; from pathlib import Path\n"
    code += "with AtomicFiles() as files, files.create(Path(sys.argv[1])) as file: file.write(b'half'); os._exit(9)"
    subprocess.run([sys.executable, "-c", code, str(path)], check=False)
    (left,) = set(names(path.parent)) - before
    return left


def test_leftovers_of_a_killed_run_go(tmp_path: Path) -> None:
    (tmp_path / ".other.0123abcd.tmp").write_bytes(b"half of something that may not be ours")
    assert left_by_a_killed_run(tmp_path / "out").startswith(".out.")
    write(tmp_path / "out")
    assert names(tmp_path) == [".other.0123abcd.tmp", "out"]
    left_by_a_killed_run(tmp_path / "out")
    check_writable(tmp_path / "out")
    assert names(tmp_path) == [".other.0123abcd.tmp", "out"]


def test_a_link_in_the_way_is_left_alone(tmp_path: Path) -> None:
    """Whoever may write to the folder cannot make a run write elsewhere."""
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "thesis").write_bytes(b"mine")
    temporary = folder / left_by_a_killed_run(folder / "out")
    temporary.unlink()
    temporary.symlink_to(tmp_path / "thesis")
    write(folder / "out")
    assert (tmp_path / "thesis").read_bytes() == b"mine"
    assert (folder / "out").read_bytes() == b"new"
    assert temporary.is_symlink()


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


_HOLD = """
import sys, time
from onnxtrain.model_file.writing import folder_lock
with folder_lock(sys.argv[1]):
    print("locked", flush=True)
    sys.stdin.read()
"""


def test_a_folder_is_locked_against_other_processes(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _HOLD, str(tmp_path)]
    with child_process(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
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
    check = "import sys; from onnxtrain.model_file.writing import folder_lock\nwith folder_lock(sys.argv[1]): pass"
    taken = subprocess.run([sys.executable, "-c", check, str(tmp_path)], capture_output=True, check=False)
    assert b"is in use" in taken.stderr
    second.__exit__(None, None, None)
    assert subprocess.run([sys.executable, "-c", check, str(tmp_path)], check=False).returncode == 0


def test_everything_works_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from onnxtrain.model_file import writing

    def refuse(*arguments: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    assert writing.fcntl is not None
    monkeypatch.setattr(writing.fcntl, "flock", refuse)
    left = left_by_a_killed_run(tmp_path / "out")  # nobody can know whether it is in use
    with folder_lock(tmp_path):
        write(tmp_path / "out")
    assert names(tmp_path) == [left, "out"]


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
    assert len([name for name in names(target.parent) if name != "model.data"]) == 2
