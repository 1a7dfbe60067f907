"""Outputs through links, into pipes and devices; invalid outputs; two runs in one folder."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from model_examples import external_model, small_model

from onnxtrain.errors import ModelError
from onnxtrain.model_file.file import ModelFile
from onnxtrain.model_file.writing import AtomicFiles, check_writable
from sentences import raises_sentence


def write(path: Path, data: bytes = b"new") -> None:
    with AtomicFiles() as files, files.create(path) as file:
        file.write(data)


def device(path: Path, minor: int) -> Path:
    """A device node of our own: 3 is null, 7 is full."""
    try:
        os.mknod(path, 0o020600, os.makedev(1, minor))
    except (AttributeError, PermissionError):
        pytest.skip("devices can be made by root only")
    return path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("relative", [True, False])
def test_a_link_stays_and_its_target_is_replaced(tmp_path: Path, relative: bool) -> None:
    real = tmp_path / "real" / "file"
    real.parent.mkdir()
    real.write_bytes(b"old")
    (tmp_path / "one").symlink_to("real/file" if relative else real)
    (tmp_path / "two").symlink_to("one")
    check_writable(tmp_path / "two")
    with real.open("rb") as before:
        write(tmp_path / "two")
        assert before.read() == b"old"  # it was replaced, not written into
    assert real.read_bytes() == b"new"
    assert (tmp_path / "one").is_symlink()
    assert (tmp_path / "two").is_symlink()
    assert names(tmp_path) == ["one", "real", "two"]
    assert names(real.parent) == ["file"]


def test_a_link_to_nothing_gets_its_target(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    link = tmp_path / "link"
    link.symlink_to("real/file")
    check_writable(link)
    write(link)
    assert link.is_symlink()
    assert (tmp_path / "real" / "file").read_bytes() == b"new"
    nowhere = tmp_path / "nowhere"
    nowhere.symlink_to("missing/file")
    with raises_sentence("no_folder", what=f"'{tmp_path}/nowhere'", wanted=tmp_path / "missing"):
        check_writable(nowhere)


def test_links_in_a_circle(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    message = r"a' cannot be written: Too many levels of symbolic links; its links form a cycle, remove them\.$"
    for call in (check_writable, write):
        with pytest.raises(ModelError, match=message):
            call(tmp_path / "a")
    assert names(tmp_path) == ["a", "b"]


def test_a_hard_link_lets_go_of_the_other_name(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"old")
    (tmp_path / "b").hardlink_to(tmp_path / "a")
    write(tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == b"old"
    assert (tmp_path / "b").read_bytes() == b"new"


def test_a_device_is_written_into(tmp_path: Path) -> None:
    null = device(tmp_path / "null", 3)
    check_writable(null)
    write(null, bytes(100_000))
    ModelFile.load(small_model()).save(null, {})
    assert null.is_char_device()
    assert names(tmp_path) == ["null"]


def test_a_full_device(tmp_path: Path) -> None:
    full = device(tmp_path / "full", 7)
    with raises_sentence("cannot_be_written", target="full'", reason="No space left on device; save it"):
        write(full)
    assert full.is_char_device()


def test_a_pipe_is_written_into(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    check_writable(pipe)  # does not wait for a reader
    link = tmp_path / "link"
    link.symlink_to("pipe")
    for path in (pipe, link):
        found: list[bytes] = []
        reader = threading.Thread(target=lambda found=found: found.append(pipe.read_bytes()))
        reader.start()
        model = small_model()
        ModelFile.load(model).save(path, {})
        reader.join(10)
        assert found == [model.SerializeToString()]
    assert pipe.is_fifo()
    assert names(tmp_path) == ["link", "pipe"]


def test_a_pipe_whose_reader_goes(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: pipe.open("rb").close())
    reader.start()
    with raises_sentence("cannot_be_written", target="pipe'", reason="Broken pipe; save it somewhere else"):
        write(pipe, bytes(1 << 20))
    reader.join(10)


def test_data_files_cannot_lie_beside_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    file = ModelFile.load(external_model(tmp_path / "a"))
    for call in (file.check_writable, lambda path: file.save(path, {})):
        with raises_sentence("pipe_with_data_files", what=tmp_path / "pipe"):
            call(tmp_path / "pipe")
    assert names(tmp_path) == ["a", "pipe"]


def test_what_cannot_be_an_output(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s"))
        for call in (check_writable, write):
            with raises_sentence("target_is_socket", what=tmp_path / "s"):
                call(tmp_path / "s")
    for name in ("a\0b", "a\ud800"):
        with raises_sentence("impossible_target"):
            check_writable(tmp_path / name)
    with raises_sentence("target_is_folder", what=tmp_path):
        write(tmp_path)


def test_what_is_open_to_a_process_by_number(tmp_path: Path) -> None:
    """/dev/stdout and the like: links that lead to no name."""
    if not Path("/proc/self/fd").is_dir():
        pytest.skip("needs /proc")
    read, end = os.pipe()
    write(Path(f"/proc/self/fd/{end}"))
    os.close(end)
    with os.fdopen(read, "rb") as file:
        assert file.read() == b"new"


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOSPC])
@pytest.mark.parametrize("call", ["open", "fsync", "replace", "mkdir"])
def test_the_system_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int) -> None:
    path = external_model(tmp_path)
    file = ModelFile.load(path)
    before = {item.name: item.read_bytes() for item in tmp_path.iterdir()}
    real = getattr(os, call)

    def refuse(*arguments: object, **options: object) -> object:
        if call == "open" and not (isinstance(arguments[1], int) and arguments[1] & os.O_CREAT):
            return real(*arguments, **options)
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, refuse)
        if call == "mkdir":
            patch.setattr(Path, "mkdir", refuse)
        with pytest.raises(ModelError, match=rf"model\..*' cannot be written: {os.strerror(number)}; "):
            file.save(path, {"w": np.zeros((300, 4), np.float32)})
    assert {item.name: item.read_bytes() for item in tmp_path.iterdir()} == before
    file.save(path, {"w": np.zeros((300, 4), np.float32)})


_LIMITED = """
import resource, sys, signal
import numpy as np
from onnxtrain.errors import ModelError
from onnxtrain.model_file.file import ModelFile
file = ModelFile.load(sys.argv[1])
if sys.argv[3] == "size":
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
else:
    import os
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    held = []
    while True:
        try:
            held.append(os.open("/", os.O_RDONLY))
        except OSError:
            break
    for _ in range(int(sys.argv[3])):
        os.close(held.pop())
try:
    file.save(sys.argv[2], {"w": np.zeros((300, 4), np.float32)})
except ModelError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        ("size", "File too large; save it somewhere else."),
        *((str(n), "Too many open files; close files") for n in (0, 1)),
    ],
)
def test_limits_of_the_process(tmp_path: Path, limit: str, message: str) -> None:
    path = external_model(tmp_path)
    before = {item.name: item.read_bytes() for item in tmp_path.iterdir()}
    done = subprocess.run(
        [sys.executable, "-c", _LIMITED, str(path), str(path), limit], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "cannot be" in done.stdout
    assert message in done.stdout
    assert {item.name: item.read_bytes() for item in tmp_path.iterdir()} == before
