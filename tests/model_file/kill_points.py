"""Kill a save at each of its file operations in turn, and check the files left. Run as a program: it forks."""

from __future__ import annotations

import builtins
import os
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from onnxtrain.errors import ModelError
from onnxtrain.model_file.file import ModelFile

KILLED, REFUSED = 9, 7
SIZE = 3000


def model_file(folder: Path, name: str, value: float, locations: tuple[str, ...]) -> Path:
    """Three weights of one value: one inside, the others in the data files of these locations."""
    folder.mkdir(exist_ok=True)
    weights = [numpy_helper.from_array(np.full(SIZE, value, np.float32), "inline")]
    offsets: dict[str, int] = {}
    for index, location in enumerate(locations):
        weight = numpy_helper.from_array(np.full(SIZE, value, np.float32), f"w{index}")
        data = folder / location
        data.parent.mkdir(exist_ok=True)
        offset = offsets.get(location, 0)
        with data.open("ab") as file:
            file.write(weight.raw_data)
        entries = {"location": location, "offset": offset, "length": 4 * SIZE}
        offsets[location] = offset + 4 * SIZE
        weight.ClearField("raw_data")
        weight.data_location = TensorProto.EXTERNAL
        for key, entry in entries.items():
            weight.external_data.add(key=key, value=str(entry))
        weights.append(weight)
    graph = helper.make_graph(
        [helper.make_node("Sum", ["x", *(weight.name for weight in weights)], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [SIZE])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [SIZE])],
        weights,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    (folder / name).write_bytes(model.SerializeToString())
    return folder / name


class Killer:
    """Ends the process at its n-th file operation: opening for writing, writing (half is written), fsync, rename ..."""

    def __init__(self, at: int) -> None:
        self.left = at

    def tick(self) -> bool:
        self.left -= 1
        return self.left == 0

    def install(self) -> None:
        open_file = builtins.open

        def spy_open(*args: Any, **options: Any) -> Any:
            file = open_file(*args, **options)
            mode = args[1] if len(args) > 1 else options.get("mode", "r")
            return _Writes(file, self) if set(mode) & set("wax+") else file

        builtins.open = spy_open  # type: ignore[assignment]
        for name in ("fsync", "replace", "rename", "unlink", "remove", "mkdir", "chmod", "link"):
            setattr(os, name, self._spied(getattr(os, name)))
        system_open = os.open

        def open_descriptor(path: Any, flags: int, *args: Any, **options: Any) -> int:
            if flags & os.O_CREAT and self.tick():
                os._exit(KILLED)
            return system_open(path, flags, *args, **options)

        os.open = open_descriptor

    def _spied(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def spy(*args: Any, **options: Any) -> Any:
            if self.tick():
                os._exit(KILLED)
            return call(*args, **options)

        return spy


class _Writes:
    def __init__(self, file: Any, killer: Killer) -> None:
        self._file, self._killer = file, killer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _Writes:
        self._file.__enter__()
        return self

    def __exit__(self, *details: Any) -> Any:
        return self._file.__exit__(*details)

    def write(self, data: Any) -> int:
        if self._killer.tick():
            self._file.write(memoryview(data)[: len(data) // 2])
            self._file.flush()
            os._exit(KILLED)
        return int(self._file.write(data))


def value_of(path: Path) -> float:
    """The one value that all weights have, as two readers see it; an error where there are two of them."""
    values: set[float] = set()
    file = ModelFile.load(path)
    for name in file.names():
        values.update(np.unique(file.value(name)).tolist())
    for tensor in onnx.load(path).graph.initializer:
        values.update(np.unique(numpy_helper.to_array(tensor)).tolist())
    assert len(values) == 1, f"a mix of {values}"
    return values.pop()


def kinds(folder: Path) -> list[str]:
    """The names of all files below a folder, without numbers."""
    names = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir())
    return sorted(re.sub(r"\.[0-9a-f]{8}\b", "", name) for name in names)


EXTERNAL = ("model.data", "model.data")
TWO_FILES = ("model.data", "parts/b.bin")

CASES: dict[str, Callable[[Path], tuple[Path, Path]]] = {}
"""By name: makes files in an empty folder; returns the model to load and the path to save to."""


def case(make: Callable[[Path], tuple[Path, Path]]) -> Callable[[Path], tuple[Path, Path]]:
    CASES[make.__name__] = make
    return make


@case
def inline_over_itself(folder: Path) -> tuple[Path, Path]:
    path = model_file(folder, "model.onnx", 1, ())
    return path, path


@case
def inline_over_another(folder: Path) -> tuple[Path, Path]:
    return model_file(folder / "a", "model.onnx", 1, ()), model_file(folder, "other.onnx", 3, EXTERNAL)


@case
def external_over_itself(folder: Path) -> tuple[Path, Path]:
    path = model_file(folder, "model.onnx", 1, EXTERNAL)
    return path, path


@case
def external_over_itself_again(folder: Path) -> tuple[Path, Path]:
    path = model_file(folder, "model.onnx", 0, TWO_FILES)
    ModelFile.load(path).save(path, {name: np.full(SIZE, 1, np.float32) for name in ("inline", "w0", "w1")})
    return path, path


@case
def two_data_files_over_themselves(folder: Path) -> tuple[Path, Path]:
    path = model_file(folder, "model.onnx", 1, TWO_FILES)
    return path, path


@case
def external_over_another(folder: Path) -> tuple[Path, Path]:
    return model_file(folder / "a", "model.onnx", 1, TWO_FILES), model_file(folder, "other.onnx", 3, EXTERNAL)


@case
def external_over_another_beside_a_third(folder: Path) -> tuple[Path, Path]:
    third = model_file(folder, "third.onnx", 3, EXTERNAL)
    shutil.copy(third, folder / "other.onnx")
    return model_file(folder / "a", "model.onnx", 1, EXTERNAL), folder / "other.onnx"


@case
def external_to_a_new_file(folder: Path) -> tuple[Path, Path]:
    (folder / "b").mkdir()
    return model_file(folder / "a", "model.onnx", 1, TWO_FILES), folder / "b" / "model.onnx"


@case
def inline_through_a_link(folder: Path) -> tuple[Path, Path]:
    path = model_file(folder / "a", "model.onnx", 1, ())
    (folder / "link.onnx").symlink_to(path)
    return folder / "link.onnx", folder / "link.onnx"


@case
def external_through_a_link(folder: Path) -> tuple[Path, Path]:
    path = model_file(folder, "model.onnx", 1, TWO_FILES)
    (folder / "link.onnx").symlink_to(path.name)
    return folder / "link.onnx", folder / "link.onnx"


@case
def inline_through_a_dangling_link(folder: Path) -> tuple[Path, Path]:
    path = model_file(folder / "a", "model.onnx", 1, ())
    (folder / "link.onnx").symlink_to("a/new.onnx")
    return path, folder / "link.onnx"


def save(source: Path, target: Path) -> None:
    file = ModelFile.load(source)
    file.save(target, {name: np.full(SIZE, 2, np.float32) for name in file.names()})


def killed_at(point: int, source: Path, target: Path) -> bool:
    """Save in another process, which is killed at a point; whether it came to that."""
    child = os.fork()
    if not child:
        try:
            Killer(point).install()
            save(source, target)
        except ModelError as error:
            print(error, file=sys.stderr)
            os._exit(REFUSED)
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, KILLED), f"the save ended with {code}"
    return code == KILLED


def run(name: str) -> int:
    """All points of a case; returns how many there are."""
    point, clean = 0, None
    while True:
        point += 1
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            source, target = CASES[name](folder)
            existed = target.exists()
            before = value_of(target) if existed else None
            third = folder / "third.onnx"
            killed = killed_at(point, source, target)
            where = f"{name}, killed at operation {point}"
            after = value_of(target) if target.exists() else None
            assert after in (before, 2.0), f"{where}: {after}"
            assert value_of(source) in (1.0, 2.0), where
            assert not third.exists() or value_of(third) == 3.0, where
            save(source, target)
            assert value_of(target) == 2.0, where
            assert not third.exists() or value_of(third) == 3.0, where
            found = kinds(folder)
            clean = clean or found
            # A kill between two renames may leave a complete data file under its new name.
            unused = Counter(found) - Counter(clean)
            assert not Counter(clean) - Counter(found), f"{where}: {found} instead of {clean}"
            assert all(name.endswith((".data", ".bin")) for name in unused), f"{where}: {found} instead of {clean}"
            if not killed:
                return point


if __name__ == "__main__":
    os.fsync = lambda descriptor: None  # power does not fail here, and a disk takes its time
    print(sum(run(name) for name in (sys.argv[1:] or CASES)))
