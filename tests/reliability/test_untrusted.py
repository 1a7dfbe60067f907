"""Hostile files are refused, or use what they declare. They run no code and read no other files."""

from __future__ import annotations

import ast
import io
import zipfile
from pathlib import Path

import numpy as np
import onnx
import pytest

import onnxtrain
from reliability.subject_data import Trap
from sentences import raises_sentence

SOURCE = Path(onnxtrain.__file__).parent
FORBIDDEN_MODULES = {
    *("pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"),  # run what they read
    *("socket", "urllib", "http", "ftplib", "requests", "httpx", "ssl", "smtplib"),  # talk to others
    *("subprocess", "multiprocessing", "pty"),  # start programs
}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "system", "popen", "import_from_string"}


OF_ONE_RUN = {
    "cli/distributed.py": {"subprocess"},  # mpiexec, where the user asks for it
    "data/limited_process.py": {"subprocess"},  # a worker of ours, with limits
    "distributed/communicator.py": {"pickle"},  # messages of the processes of one training to each other
}
"""Code that reads no files of users."""


def modules(tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found


def calls(tree: ast.AST) -> list[tuple[str, ast.Call]]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            function = node.func
            name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
            owner = function.value.id if isinstance(function, ast.Attribute) and hasattr(function.value, "id") else ""
            found.append((f"{owner}.{name}" if owner else name, node))
    return found


def test_no_module_executes_data():
    for path in SOURCE.rglob("*.py"):
        name_of_file = path.relative_to(SOURCE).as_posix()
        tree = ast.parse(path.read_text(encoding="utf-8"))
        assert not modules(tree) & FORBIDDEN_MODULES - OF_ONE_RUN.get(name_of_file, set()), name_of_file
        for name, call in calls(tree):
            where = f"line {call.lineno} of {name_of_file}"
            assert name not in FORBIDDEN_CALLS, where
            assert name not in ("os.system", "os.popen", "os.execv", "os.fork"), where
            if name in ("np.load", "numpy.load", "np.save", "np.savez", "np.savez_compressed"):
                allowed = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}.get("allow_pickle")
                assert allowed == "False" or (name.endswith("load") and allowed is None), where


def with_objects(trap: Trap) -> bytes:
    array = np.empty(3, object)
    array.fill(trap)
    file = io.BytesIO()
    np.lib.format.write_array(file, array, allow_pickle=True)
    return file.getvalue()


@pytest.mark.parametrize("form", ["npy", "npz", "compressed npz", "folder", "named otherwise"])
@pytest.mark.parametrize("array", ["input", "label", "unused"])
def test_python_objects_are_refused_and_never_run(form, array, tmp_path):
    trap = tmp_path / "ran"
    content = with_objects(Trap(trap))
    path = tmp_path / "data"
    good = {"input": np.zeros((3, 4), np.float32), "label": np.zeros(3, np.int64)}
    if form == "folder":
        path.mkdir()
        for name, values in good.items():
            np.save(path / f"{name}.npy", values, allow_pickle=False)
        (path / f"{array}.npy").write_bytes(content)
    elif form in ("npy", "named otherwise"):
        path = path.with_suffix(".npy" if form == "npy" else ".npz")
        path.write_bytes(content)
    else:
        np.savez(path.with_suffix(".npz"), allow_pickle=False, **{k: v for k, v in good.items() if k != array})
        path = path.with_suffix(".npz")
        method = zipfile.ZIP_DEFLATED if form.startswith("compressed") else zipfile.ZIP_STORED
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr(f"{array}.npy", content, method)
    trainer = onnxtrain.Trainer(onnxtrain.examples.mlp((4, 5, 3)), loss="softmax_cross_entropy")
    with raises_sentence("python_objects"):
        trainer.fit(path, target="label")
    assert not trap.exists()


@pytest.mark.parametrize("location", ["/etc/hostname", "../secret.bin", "link.bin", "a/../../secret.bin"])
def test_a_model_reads_no_file_outside_its_folder(location, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "a").mkdir()
    (tmp_path / "secret.bin").write_bytes(bytes(4096))
    (folder / "link.bin").symlink_to(tmp_path / "secret.bin")
    model = onnxtrain.examples.mlp((4, 5, 3))
    onnx.external_data_helper.set_external_data(model.graph.initializer[0], location)
    model.graph.initializer[0].ClearField("raw_data")
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    for use in (onnxtrain.inspect, onnxtrain.gradient):
        with raises_sentence("model_cannot_be_used", label="model.onnx'"):
            use(path)
