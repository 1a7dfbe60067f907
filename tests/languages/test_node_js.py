"""The package onnxtrain-web in Node: its own tests, and an example that trains like Python to the last bit."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

import numpy as np
import onnx
import pytest
from javascript import WEB, needs_packages, node
from onnx import numpy_helper
from safetensors.numpy import load_file, save_file
from step_files import CASES, STEPS, Case, write

import onnxtrain

PAGES = Path(__file__).parents[2] / "src" / "onnxtrain" / "cli" / "web_page"

pytestmark = needs_packages


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compiled")
    node("build.mjs", folder)
    return folder


def test_what_pages_get_is_what_the_sources_say(compiled):
    """``npm run build`` writes it again."""
    for name in ("onnxtrain-web.js", "worker.js"):
        assert (compiled / name).read_bytes() == (PAGES / name).read_bytes(), name


def test_size(compiled):
    assert (compiled / "onnxtrain-web.js").stat().st_size < 21_000


def test_the_package_holds_its_code_and_says_what_it_needs(tmp_path):
    command = ["npm", "pack", "--json", "--pack-destination", str(tmp_path)]
    shutil.rmtree(WEB / "dist", ignore_errors=True)
    done = subprocess.run(command, cwd=WEB, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    with tarfile.open(next(tmp_path.glob("*.tgz"))) as package:
        names = {name.removeprefix("package/") for name in package.getnames()}
    assert {"README.md", "LICENSE", "package.json", "dist/index.js", "dist/index.d.ts", "dist/worker.js"} <= names
    settings = json.loads((WEB / "package.json").read_text())
    tested = settings["devDependencies"]["onnxruntime-web"]
    assert settings["peerDependencies"]["onnxruntime-web"] == f"~{tested}", "only this range is tested"


def test_its_own_tests(compiled):
    out = node("--test", "test/files.test.mjs")
    assert re.search(r"^# fail 0$", out, re.MULTILINE)
    assert re.search(r"^# pass \d\d", out, re.MULTILINE)


def test_the_lock_file_names_no_host():
    assert "resolved" not in (WEB / "package-lock.json").read_text()


@pytest.mark.skipif(
    not list((WEB / "node_modules").glob("onnxruntime-node/bin/*/linux/*/onnxruntime_binding.node")),
    reason="the package onnxruntime-node has no program for this machine",
)
@pytest.mark.parametrize("name", ["mlp", "lenet5", "gru"])
def test_the_example(name, compiled, tmp_path):
    expected = write(name, tmp_path)
    files = (tmp_path / part for part in ("model.onnx", "step.onnx", "states.safetensors", "batch.safetensors"))
    tuned = tmp_path / "tuned.onnx"
    out = node("examples/train.mjs", *files, CASES[name].optimizer.learning_rate, STEPS, tuned)
    losses = [float(np.float32(line)) for line in out.split()]
    np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-5)
    weights = {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(tuned).graph.initializer}
    trained = load_file(tmp_path / "trained.safetensors")
    for key in weights.keys() & trained.keys():
        np.testing.assert_allclose(weights[key], trained[key], rtol=0, atol=2e-5, err_msg=key)
    onnx.checker.check_model(onnx.load(tuned))


def test_the_example_of_the_readme(compiled, tmp_path):
    """In Node, with files of the current folder."""
    write("mlp", tmp_path)
    (tmp_path / "node_modules").mkdir()
    (tmp_path / "node_modules" / "onnxtrain-web").symlink_to(WEB)
    (program,) = re.findall(r"```js\n(.*?)```", (WEB / "README.md").read_text(), re.DOTALL)
    data = load_file(tmp_path / "batch.safetensors")
    given = "".join(
        f"const {name} = {{ data: {kind}.from({data[key].ravel().tolist()}), dims: {list(data[key].shape)} }};\n"
        for name, key, kind in (("images", "input", "Float32Array"), ("labels", "target", "Int32Array"))
    )
    (tmp_path / "program.mjs").write_text(f"{given}{program}console.log(tuned.length);\n")
    run = [shutil.which("node"), "program.mjs"]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) == (tmp_path / "model.onnx").stat().st_size
    (tmp_path / "step.onnx").unlink()
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert "OnnxTrainError: step.onnx cannot be read: ENOENT" in done.stderr


@pytest.mark.skipif(
    not list((WEB / "node_modules").glob("onnxruntime-node/bin/*/linux/*/onnxruntime_binding.node")),
    reason="the package onnxruntime-node has no program for this machine",
)
def test_a_label_that_no_class_has(compiled, tmp_path):
    write("mlp", tmp_path)
    batch = load_file(tmp_path / "batch.safetensors")
    classes = onnx.load(tmp_path / "model.onnx").graph.output[0].type.tensor_type.shape.dim[1].dim_value
    batch["target"][-1] = classes
    save_file(batch, tmp_path / "batch.safetensors")
    files = (tmp_path / part for part in ("model.onnx", "step.onnx", "states.safetensors", "batch.safetensors"))
    with pytest.raises(AssertionError, match=f"'target' has the label {classes}; the model has {classes} classes"):
        node("examples/train.mjs", *files, 0.1, 1, tmp_path / "tuned.onnx")


def test_threads_need_an_isolated_page(compiled):
    assert "# pass 1" in node("--test", "test/threads.test.mjs")


def test_closed_trainings_leave_nothing_in_memory(compiled, tmp_path, monkeypatch):
    """25 cycles each; one training needs more than ONNX Runtime's initial memory."""
    model = onnxtrain.examples.mlp((256, 1024, 512, 10))
    batch = {"input": np.ones((16, 256), np.float32), "target": np.arange(16) % 10}
    monkeypatch.setitem(CASES, "large", Case(lambda: model, batch, 10, onnxtrain.Momentum(0.1)))
    write("large", tmp_path)
    monkeypatch.setenv("ONNXTRAIN_CASE", str(tmp_path))
    assert "# pass 9" in node("--test", "test/memory.test.mjs")
