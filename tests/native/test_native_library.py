"""Finding and loading the library, behaviour without it, and its use from plain Python."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from onnxtrain.errors import OnnxTrainError
from onnxtrain.runtime import native

ROOT = Path(__file__).parents[2]


@pytest.fixture
def unloaded():
    """Nothing remembered of earlier loads, before and after."""
    native._loaded.cache_clear()
    yield
    native._loaded.cache_clear()


def python(code, **environment):
    """Run ``code`` in a fresh interpreter that sees the same onnxtrain."""
    path = str(Path(native.__file__).parents[2])
    variables = {**os.environ, "PYTHONPATH": path, **environment}
    return subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=False)


def test_the_library_is_there():
    assert native.kernels_available()
    assert native.custom_ops_library().is_file()
    assert native.instruction_set() in ("baseline", "avx2", "avx512")


@pytest.mark.filterwarnings("ignore:onnxtrain's native kernels")
def test_a_missing_library_is_warned_about_once(unloaded, monkeypatch, tmp_path, recwarn):
    monkeypatch.setattr(native, "_LIBRARY", tmp_path / "nothing.so")
    with pytest.warns(RuntimeWarning, match=r"kernels cannot be loaded, .* standard operators: .*nothing\.so"):
        assert not native.kernels_available()
    recwarn.clear()
    assert not native.kernels_available()
    assert not recwarn.list
    with pytest.raises(OnnxTrainError, match=r"native kernels cannot be loaded \(.*nothing\.so.*\): install a wheel"):
        native.custom_ops_library()


@pytest.mark.filterwarnings("ignore:onnxtrain's native kernels")
def test_a_file_that_is_not_a_library(unloaded, monkeypatch, tmp_path):
    wrong = tmp_path / "wrong.so"
    wrong.write_text("not a library")
    monkeypatch.setattr(native, "_LIBRARY", wrong)
    with pytest.warns(RuntimeWarning, match=r"wrong\.so"):
        assert not native.kernels_available()
    with pytest.raises(OnnxTrainError, match=r"wrong\.so"):
        native.instruction_set()


@pytest.mark.parametrize("name", ["baseline", "avx2", "avx512"])
def test_the_environment_variable_forces_an_instruction_set(libraries, name):
    if name not in libraries:
        pytest.skip(f"this build or this CPU lacks {name}")
    code = "from onnxtrain.runtime.native import instruction_set; print(instruction_set())"
    assert python(code, ONNXTRAIN_INSTRUCTION_SET=name).stdout.strip() == name


def test_an_unknown_instruction_set_is_reported():
    code = "from onnxtrain.runtime.native import kernels_available; print(kernels_available())"
    result = python(code, ONNXTRAIN_INSTRUCTION_SET="sse9")
    assert result.stdout.strip() == "False"
    assert "ONNXTRAIN_INSTRUCTION_SET is 'sse9': it must be baseline, avx2, avx512 or amx, or unset." in result.stderr


def test_an_unknown_instruction_set_fails_the_registration():
    path = native.custom_ops_library()
    code = f"import onnxruntime; onnxruntime.SessionOptions().register_custom_ops_library({str(path)!r})"
    result = python(code, ONNXTRAIN_INSTRUCTION_SET="sse9")
    assert result.returncode != 0
    assert "ONNXTRAIN_INSTRUCTION_SET is 'sse9'" in result.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_library_needs_nothing_but_libc():
    code = (
        "import ctypes; before = open('/proc/self/maps').read()\n"
        f"ctypes.CDLL({str(native.custom_ops_library())!r})\n"
        "new = {line.split()[-1] for line in open('/proc/self/maps') if line.count('/')} - set(before.split())\n"
        "print(*new, sep='\\n')"
    )
    result = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True)
    names = {Path(line).name.split(".")[0].split("-")[0] for line in result.stdout.split()}
    assert names <= {"libonnxtrain_kernels", "libc", "libm", "libpthread", "ld"}


def test_the_example_runs_without_onnxtrain():
    example = ROOT / "examples" / "custom_ops_plain.py"
    if not example.is_file():
        pytest.skip("the examples are not part of the installed package")
    library = str(native.custom_ops_library())
    result = subprocess.run([sys.executable, str(example), library], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "x = " in result.stdout


NODES = """
import hashlib, sys
sys.path.insert(0, {folder!r})
import numpy as np
from kernel_case import Case
from kernel_session import run

rng = np.random.default_rng(0)
draw = lambda *shape: rng.standard_normal(shape, np.float32)
same = dict(kernel_shape=[3, 3], pads=[1, 1, 1, 1])
inputs = {{
    "Linear": (dict(x=draw(600, 300), w=draw(300, 900)), {{}}, 1),
    "LinearGradient": (dict(dy=draw(700, 800), w=draw(600, 800), x=draw(700, 600)), dict(activation="Relu"), 3),
    "LinearWeightGradient": (dict(dy=draw(700, 800), x=draw(700, 600)), {{}}, 2),
    "Attention": (dict(q=draw(1, 300, 2, 64), k=draw(1, 300, 2, 64), v=draw(1, 300, 2, 64)), dict(scale=0.1), 2),
    "Conv": (dict(x=draw(2, 32, 40, 40), w=draw(24, 32, 3, 3)), same, 1),
    "ConvWeightGradient": (dict(dy=draw(2, 24, 40, 40), x=draw(2, 32, 40, 40)), same, 1),
    "LSTM": (dict(X=draw(4, 9, 20), W=draw(1, 512, 20), R=draw(1, 512, 128)), {{}}, 5),
}}
sums = hashlib.sha256()
for operator, (feeds, attributes, outputs) in inputs.items():
    for array in run(Case(operator, feeds, attributes, outputs)):
        sums.update(array.tobytes())
pixels = dict(x=draw(2, 400, 30, 30), w=draw(32, 400, 1, 1))
sums.update(run(Case("Conv", pixels, dict(kernel_shape=[1, 1]), 1))[0].tobytes())
print(sums.hexdigest())
"""


@pytest.mark.thorough
def test_results_do_not_depend_on_the_cache_of_the_machine():
    code = NODES.format(folder=str(Path(__file__).parent))
    results = [python(code, ONNXTRAIN_SECOND_CACHE=size) for size in ("", "131072", "8388608")]
    assert [result.returncode for result in results] == [0, 0, 0], results[0].stderr
    assert len({result.stdout for result in results}) == 1
    assert len(results[0].stdout.strip()) == 64
