"""What a dependency imports and training does not need is imported when it is used, and not before."""

from __future__ import annotations

import subprocess
import sys

import pytest

TRAIN = """
import sys
import numpy as np
import onnxtrain
model = onnxtrain.examples.mlp((4, 8, 3))
trainer = onnxtrain.Trainer(model, loss="softmax_cross_entropy")
trainer.train_step(np.eye(4, dtype=np.float32)[:3], np.arange(3))
assert "sympy.core" not in sys.modules, "sympy was imported"
"""

UNUSED = """
formats = {"google.protobuf.json_format", "google.protobuf.text_format", "onnx_ir.schemas", "packaging.version"}
unused = {"safetensors", "tarfile", "argparse", "subprocess", *formats} & set(sys.modules)
assert not unused, unused
"""

OF_ONNX = """
import onnx.compose
from onnx import compose, gen_proto
model = onnx.parser.parse_model('<ir_version: 8, opset_import: ["": 18]> g (float[1] x) => (float[1] y) { y = Abs(x) }')
assert onnx.compose.add_prefix(model, "a_").graph.input[0].name == "a_x"
assert compose.add_prefix(model, "b_").graph.input[0].name == "b_x"
assert sys.modules["onnx.compose"].__file__.endswith("compose.py") and callable(gen_proto.convert)
assert '"ir_version"' in onnx.serialization.registry.get("json").serialize_proto(model).decode()
assert "ir_version: 8" in onnx.serialization.registry.get("textproto").serialize_proto(model).decode()
assert onnx.utils.Extractor(model).extract_model(["x"], ["y"]).graph.node[0].op_type == "Abs"
"""

ARITHMETIC = """
import onnx_ir
total = onnx_ir.SymbolicDim("rows") + 1
assert str(total.value) == "rows + 1", total
"""

CLEAN = """
from types import ModuleType
ours = [name for name, module in sys.modules.items() if type(module).__module__.startswith("onnxtrain")]
strange = [name for name in ours if not name.startswith("onnxtrain.")]
assert not strange, strange
assert "sympy" not in sys.modules
import onnx, onnx_ir
for package in (onnx, onnx_ir):
    assert "exec_module" not in vars(package.__loader__) and package.__spec__.loader is package.__loader__
assert not [finder for finder in sys.meta_path if type(finder).__module__.startswith("onnxtrain")]
"""

OF_OTHERS = """
from types import ModuleType
from google.protobuf import json_format, text_format
from packaging import version
for module in (json_format, text_format, version):
    assert type(module) is ModuleType and sys.modules[module.__name__] is module, module
import google.protobuf, packaging
assert not hasattr(packaging, "elsewhere") and google.protobuf.json_format is json_format
"""

ONE_SYMPY = """
import sympy
assert type(sympy) is ModuleType and sys.modules["sympy"] is sympy
before = sympy.Symbol("rows", integer=True)
import onnx_ir
total = onnx_ir.SymbolicDim("rows") + 1
assert isinstance(onnx_ir._core.sympy.Symbol("a"), sympy.Symbol)
assert onnx_ir._core.sympy.Expr is sympy.Expr and sys.modules["sympy"] is sympy
"""

BEFORE_TRAINING = """
import sys
import onnxtrain
from types import ModuleType
assert not [name for name, module in sys.modules.items() if type(module).__module__.startswith("onnxtrain")]
assert "onnx" not in sys.modules and "sympy" not in sys.modules
"""

IMPORTED_BY_ANOTHER = """
import sys
import onnxtrain
import onnx_ir, onnx  # by this program, not by onnxtrain
assert "sympy.core" in sys.modules and sys.modules["onnx.compose"].__file__.endswith("compose.py")
assert not [finder for finder in sys.meta_path if type(finder).__module__.startswith("onnxtrain")]
"""

REAL_MODULE = """
import sympy
from sympy import Symbol
import sympy.core.numbers
assert isinstance(Symbol("a"), sympy.Expr) and sys.modules["sympy"].Integer(2) + 1 == 3
"""


@pytest.mark.parametrize(
    "program",
    [
        BEFORE_TRAINING,
        BEFORE_TRAINING + ONE_SYMPY,
        TRAIN + CLEAN,
        TRAIN + CLEAN + ONE_SYMPY,
        TRAIN + CLEAN + OF_OTHERS,
        BEFORE_TRAINING + "import sympy\n" + TRAIN.replace('assert "sympy.core"', '"sympy.core"') + ONE_SYMPY,
        IMPORTED_BY_ANOTHER,
        IMPORTED_BY_ANOTHER + TRAIN.replace('assert "sympy.core"', '"sympy.core"'),
    ],
    ids=[
        "after import",
        "a user's sympy after import",
        "after training",
        "a user's sympy after training",
        "others' modules after training",
        "a user's sympy before training",
        "not imported by onnxtrain",
        "not imported by onnxtrain, then training",
    ],
)
def test_nobody_else_sees_what_is_put_off(program):
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "program",
    [TRAIN, TRAIN + ARITHMETIC, TRAIN + REAL_MODULE, "import sys, sympy, onnxtrain\n" + ARITHMETIC + REAL_MODULE],
    ids=["training", "symbolic sizes", "a user of sympy", "sympy first"],
)
def test_sympy_is_imported_when_it_is_used(program):
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_training_imports_no_checkpoints_archives_or_processes():
    done = subprocess.run([sys.executable, "-c", TRAIN + UNUSED], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("begin", [TRAIN, "import sys, onnx, onnxtrain\n"], ids=["deferred", "onnx first"])
def test_modules_of_onnx_are_imported_when_they_are_used(begin):
    done = subprocess.run([sys.executable, "-c", begin + OF_ONNX], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


VERSION = """
import sys
import onnxtrain
from onnxtrain.deferred import _Metadata
from onnxtrain.training.trainer import Trainer
import onnx
assert "importlib.metadata" not in sys.modules, "onnx looked its version up"
import importlib
assert "metadata" not in vars(importlib)
found = onnx.__version__
import importlib.metadata
assert type(importlib.metadata).__name__ == "module" and sys.modules["importlib.metadata"] is importlib.metadata
assert found == importlib.metadata.version("onnx"), found
"""

OTHER_VERSIONS = """
import sys
from pathlib import Path
from onnxtrain.deferred import _Metadata
home = Path(sys.argv[1])
sys.path.insert(0, str(home))
def package(name, *folders):
    (home / name).mkdir()
    (home / name / "__init__.py").write_text("")
    for folder, text in folders:
        (home / folder).mkdir()
        (home / folder / "METADATA").write_text(text)
def told(name):
    module = _Metadata("importlib.metadata")
    found = module.version(name)
    return found, "PackageNotFoundError" in vars(module)  # whether the real one was asked
package("plain", ("plain-1.2.dist-info", "Metadata-Version: 2.1\\nName: plain\\nVersion: 1.2\\n"))
package("other", ("other-1.2.dist-info", "Metadata-Version: 2.1\\nName: other\\nVersion: 1.2.post1\\n"))
package("egg", ("egg.egg-info", ""))
(home / "egg.egg-info" / "PKG-INFO").write_text("Metadata-Version: 2.1\\nName: egg\\nVersion: 3\\n")
assert told("plain") == ("1.2", False), told("plain")
assert told("other") == ("1.2.post1", True), told("other")
assert told("egg") == ("3", True), told("egg")
package("none")
from importlib.metadata import PackageNotFoundError
try:
    told("none")
except PackageNotFoundError:
    pass
else:
    raise AssertionError
"""


@pytest.mark.parametrize("program", [VERSION, OTHER_VERSIONS], ids=["of onnx", "of any package"])
def test_versions_are_those_that_the_standard_library_finds(program, tmp_path):
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
