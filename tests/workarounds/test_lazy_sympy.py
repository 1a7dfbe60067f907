"""sympy is imported at its first use, and the imports of other programs stay unchanged."""

from __future__ import annotations

import subprocess
import sys

import pytest

TRAIN = """
import sys
import numpy as np
import onnxtrain
trainer = onnxtrain.Trainer(onnxtrain.examples.mlp((4, 8, 3)), loss="softmax_cross_entropy")
trainer.train_step(np.eye(4, dtype=np.float32)[:3], np.arange(3))
"""

UNUSED = "assert 'sympy.core' not in sys.modules, 'sympy was imported'\n"

DIMENSIONS = """
import onnx_ir
assert str((onnx_ir.SymbolicDim("rows") + 1).value) == "rows + 1"
"""

USE = """
import sympy
import sympy.core.numbers
from sympy import Symbol
from types import ModuleType
assert type(sympy) is ModuleType and sys.modules["sympy"] is sympy
assert isinstance(Symbol("a"), sympy.Expr) and sympy.Integer(2) + 1 == 3
import onnx_ir
assert onnx_ir._core.sympy.Symbol is sympy.Symbol
assert str(onnx_ir._core._symbolic_shapes.parse_symbolic_expression("rows + 1")) == "rows + 1"
"""

SUBMODULE_FIRST = """
import sympy.core.numbers
assert sympy.core.numbers.Integer(2) + 1 == 3
"""

THREADS = """
from concurrent.futures import ThreadPoolExecutor
import sympy
with ThreadPoolExecutor(8) as threads:
    assert set(threads.map(lambda _: sympy.Integer(1) + 1, range(64))) == {2}
"""


@pytest.mark.thorough
@pytest.mark.parametrize(
    "program",
    [
        TRAIN + UNUSED,
        "import sys, onnxtrain\n" + UNUSED + DIMENSIONS + USE,
        TRAIN + UNUSED + USE + DIMENSIONS,
        TRAIN + SUBMODULE_FIRST + USE,
        TRAIN + THREADS + USE,
        "import sys, sympy\n" + TRAIN + USE,
        "import sys, onnx_ir, onnxtrain\n" + USE,
    ],
    ids=["training", "before", "after", "a submodule first", "threads", "sympy first", "onnx-ir first"],
)
def test_sympy_is_imported_when_it_is_used(program):
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_nothing_else_is_put_in_the_way_of_imports():
    program = TRAIN + (
        "ours = [name for name, module in sys.modules.items() if type(module).__module__.startswith('onnxtrain')]\n"
        "assert not [name for name in ours if not name.startswith('onnxtrain')], ours\n"
        "ours = [finder for finder in sys.meta_path if type(finder).__module__.startswith('onnxtrain')]\n"
        "names = ['numpy', 'sympy', 'callbacks', 'onnxtrain_points.callbacks', 'onnxtrain.training']\n"
        "assert all(finder.find_spec(name) is None for finder in ours for name in names)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
