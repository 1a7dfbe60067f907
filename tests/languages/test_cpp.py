"""`include/onnxtrain/step.hpp`: the example, built against the library of the onnxruntime wheel, trains like Python."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper
from safetensors.numpy import load_file, save_file
from step_files import CASES, STEPS, write

import onnxtrain
from onnxtrain.runtime.native import kernels_available

ROOT = Path(__file__).parents[2]
CAPI = Path(onnxruntime.__file__).parent / "capi"
COMPILER = os.environ.get("CXX") or shutil.which("c++")

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler"),
    pytest.mark.thorough,  # it compiles
]

# The same declarations as in ONNX Runtime's headers: both can be included together.
OFFICIAL = """
#include <cstdint>
#define RUNTIME_CLASS(X) struct Ort##X; typedef struct Ort##X Ort##X
RUNTIME_CLASS(Env); RUNTIME_CLASS(Status); RUNTIME_CLASS(Value); RUNTIME_CLASS(Session); RUNTIME_CLASS(IoBinding);
RUNTIME_CLASS(SessionOptions); RUNTIME_CLASS(RunOptions); RUNTIME_CLASS(TypeInfo); RUNTIME_CLASS(ModelMetadata);
RUNTIME_CLASS(TensorTypeAndShapeInfo); RUNTIME_CLASS(MemoryInfo);
struct OrtApi; typedef struct OrtApi OrtApi;
struct OrtAllocator { uint32_t version; }; typedef struct OrtAllocator OrtAllocator;
struct OrtApiBase { const OrtApi* (*GetApi)(uint32_t) noexcept; const char* (*GetVersionString)() noexcept; };
typedef struct OrtApiBase OrtApiBase;
extern "C" { const OrtApiBase* OrtGetApiBase(void) noexcept; }
"""


def build(source: Path, program: Path) -> None:
    library = next(CAPI.glob("libonnxruntime.so.*"))
    flags = ("-std=c++17", "-O1", "-Wall", "-Wextra", "-Wpedantic", "-Werror", f"-I{ROOT / 'include'}")
    link = program.parent / "libonnxruntime.so.1"
    if not link.exists():
        link.symlink_to(library)
    command = (COMPILER, *flags, source, "-o", program, link, f"-Wl,-rpath,{program.parent}")
    subprocess.run(command, check=True, capture_output=True, text=True)


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    program = tmp_path_factory.mktemp("program") / "train"
    build(ROOT / "examples" / "train.cpp", program)

    def run(folder, *more, rate=0.01, graph="step.onnx", states="states.safetensors", steps=STEPS):
        files = (folder / graph, folder / states, folder / "batch.safetensors")
        command = (program, *files, repr(rate), steps, folder / "result.safetensors", *more)
        return subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)

    return run


def losses(done):
    assert done.returncode == 0, done.stderr
    return [float(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("name", ["mlp_ssgd", "digits_cnn", "transformer"])
def test_losses_and_states_are_those_of_python_to_the_last_bit(name, kernels, train, tmp_path):
    if kernels and not kernels_available():
        pytest.skip("there are no native kernels")
    expected = write(name, tmp_path, kernels=kernels)
    library = [onnxtrain.custom_ops_library()] if kernels else []
    found = losses(train(tmp_path, *library, rate=CASES[name].optimizer.learning_rate))
    assert found == expected
    states, wanted = load_file(tmp_path / "result.safetensors"), load_file(tmp_path / "trained.safetensors")
    assert states.keys() == wanted.keys()
    for key, array in wanted.items():
        np.testing.assert_array_equal(states[key], array, err_msg=key)


def test_it_continues_where_it_stopped(train, tmp_path):
    expected = write("mlp", tmp_path)
    first = losses(train(tmp_path, steps=7))
    (tmp_path / "result.safetensors").rename(tmp_path / "states.safetensors")
    assert first + losses(train(tmp_path, steps=STEPS - 7)) == expected


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: (f / "states.safetensors").unlink(), "states.safetensors' cannot be read"),
        (lambda f: (f / "states.safetensors").write_bytes(b"\xff" * 9), "header is longer than the file"),
        (lambda f: save_file({"T": np.array(0)}, f / "states.safetensors"), "states have no 'layer1.bias' (parameter)"),
        (
            lambda f: save_file({"input": np.ones((2, 6), np.float32)}, f / "batch.safetensors"),
            "needs the input 'target'",
        ),
        (
            lambda f: save_file({"input": np.ones((2, 6)), "target": np.arange(2)}, f / "batch.safetensors"),
            "'input' is F64[2, 6], but the graph needs F32[any, 6]",
        ),
        (
            lambda f: shutil.copy(f / "model.onnx", f / "step.onnx"),
            "is not a step graph: its metadata has no 'onnxtrain.step'",
        ),
        (lambda f: (f / "step.onnx").write_bytes(b"no model"), "ONNX Runtime: "),
    ],
)
def test_mistakes_end_in_one_sentence(spoil, message, train, tmp_path):
    write("mlp", tmp_path)
    spoil(tmp_path)
    done = train(tmp_path)
    assert done.returncode == 1
    assert done.stdout == ""
    assert message in done.stderr
    assert done.stderr.startswith("error: ")


def test_together_with_headers_of_onnxruntime(tmp_path):
    for order in (("official.h", "onnxtrain/step.hpp"), ("onnxtrain/step.hpp", "official.h")):
        (tmp_path / "official.h").write_text("#pragma once\n" + OFFICIAL)
        includes = "".join(f'#include "{name}"\n' for name in order)
        (tmp_path / "both.cpp").write_text(
            f"{includes}int main() {{ return OrtGetApiBase()->GetVersionString()[0] == '1' ? 0 : 1; }}\n"
        )
        build(tmp_path / "both.cpp", tmp_path / "both")
        subprocess.run([tmp_path / "both"], check=True)


def test_names_of_any_letters(train, tmp_path):
    """Names go through JSON twice: in the metadata and in safetensors."""
    write("mlp", tmp_path)
    odd = 'poids "é" \N{GRINNING FACE}\\'
    graph = onnx.load(tmp_path / "step.onnx")
    for value in graph.graph.input:
        value.name = value.name.replace("layer1.bias", odd)
    for node in graph.graph.node:
        for names in (node.input, node.output):
            names[:] = [name.replace("layer1.bias", odd) for name in names]
    for value in graph.graph.output:
        value.name = value.name.replace("layer1.bias", odd)
    escaped = json.dumps(odd)[1:-1]
    for entry in graph.metadata_props:
        entry.value = entry.value.replace("layer1.bias", escaped)
    onnx.save(graph, tmp_path / "step.onnx")
    states = {
        name.replace("layer1.bias", odd): array for name, array in load_file(tmp_path / "states.safetensors").items()
    }
    save_file(states, tmp_path / "states.safetensors")
    assert len(losses(train(tmp_path, steps=2))) == 2
    assert odd in load_file(tmp_path / "result.safetensors")


def test_the_program_of_the_documentation(tmp_path):
    page = (ROOT / "docs" / "step_graphs.md").read_text()
    (block,) = re.findall(r"^```cpp\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    include, body = block.split("\n", 1)
    (tmp_path / "program.cpp").write_text(
        f"{include}\n#include <cstdio>\nint main() {{\n"
        "std::vector<float> values(64 * 4, 0.5f);\nstd::vector<std::int64_t> labels(64, 1);\n"
        f'{body}\nstd::printf("%g\\n", loss);\n}}\n'
    )
    build(tmp_path / "program.cpp", tmp_path / "program")
    model = onnxtrain.examples.mlp((4, 8, 3))
    training = onnxtrain.training_model(model, loss="softmax_cross_entropy", optimizer=onnxtrain.Adam())
    onnx.save(onnxtrain.lower(training), tmp_path / "step.onnx")
    states = onnxtrain.TrainingSession(training).state
    save_file({key: np.array(value) for key, value in states.items()}, tmp_path / "states.safetensors")
    done = subprocess.run([tmp_path / "program"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert 0 < float(done.stdout) < 10
    assert load_file(tmp_path / "trained.safetensors")["T"] == states["T"] + 1


def commands(text: str) -> list[str]:
    """The commands of a comment: its lines that are indented."""
    return [line.removeprefix("//   ") for line in text.splitlines() if line.startswith("//   ")]


def shell(lines: list[str], folder: Path) -> str:
    """Run commands with this Python and this onnxtrain, and without variables that say where libraries are."""
    programs = folder / "programs"
    programs.mkdir(exist_ok=True)
    for name, arguments in (("python", ""), ("onnxtrain", "-m onnxtrain")):
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n')
        (programs / name).chmod(0o755)
    environment = {key: value for key, value in os.environ.items() if key not in ("LD_LIBRARY_PATH", "LD_PRELOAD")}
    environment["PATH"] = f"{programs}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euxc", "\n".join(lines)], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(shutil.which("g++") is None, reason="the comment's compiler, g++, is not installed")
@pytest.mark.parametrize("kernels", [False, True])
def test_the_commands_of_the_comment_run_as_they_stand(kernels, tmp_path):
    """In a checkout, with the package onnxruntime as pip installs it."""
    if kernels and not kernels_available():
        pytest.skip("there are no native kernels")
    expected = write("mlp", tmp_path, kernels=kernels)
    for name in ("include", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "step.onnx").unlink()
    (tmp_path / "states.safetensors").unlink()
    comment = (ROOT / "examples" / "train.cpp").read_text().split("#include")[0]
    *lines, where = commands(comment)
    assert [line.split()[0] for line in lines] == ["onnxtrain", "ln", "g++", "./train", "onnxtrain"]
    if kernels:
        lines[0] += " --kernels"
        lines[3] += f' "$({where})"'
    printed = shell(lines, tmp_path)
    losses = [float(line) for line in re.findall(r"^[0-9.e-]+$", printed, re.MULTILINE)]
    assert len(losses) == STEPS
    assert losses == pytest.approx(expected, abs=1e-6)
    trained = {
        tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(tmp_path / "tuned.onnx").graph.initializer
    }
    states = load_file(tmp_path / "trained.safetensors")
    for name, value in trained.items():
        np.testing.assert_array_equal(value, states[name], err_msg=name)


def installed() -> bool:
    return not Path(onnxtrain.__file__).is_relative_to(ROOT / "src")


@pytest.mark.skipif(not installed(), reason="onnxtrain is used from its sources, which have the headers in include/")
def test_the_wheel_has_the_headers():
    """As the page says: in onnxtrain/include, all of them, as they are in the sources."""
    shipped = Path(onnxtrain.__file__).parent / "include"
    found = {str(path.relative_to(shipped)): path.read_text() for path in shipped.rglob("*.hpp")}
    assert found == {
        str(path.relative_to(ROOT / "include")): path.read_text() for path in (ROOT / "include").rglob("*.hpp")
    }


@pytest.mark.skipif(not installed(), reason="onnxtrain is used from its sources, which have the headers in include/")
@pytest.mark.skipif(shutil.which("g++") is None, reason="the page's compiler, g++, is not installed")
def test_the_build_commands_of_the_page(tmp_path):
    page = (ROOT / "docs" / "step_graphs.md").read_text()
    (block,) = re.findall(r"^```sh\n((?:(?!```).)*g\+\+.*?)^```$", page, re.MULTILINE | re.DOTALL)
    shutil.copy(ROOT / "examples" / "train.cpp", tmp_path / "program.cpp")
    shell(block.splitlines(), tmp_path)
    assert "usage" in subprocess.run([tmp_path / "program"], capture_output=True, text=True, check=False).stderr
