"""Files of rules are loaded for the operators that a table says they have."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from onnxtrain.autodiff import rules

REGISTERED = """
import json, sys
from onnxtrain.autodiff import registry

found = {}
write = registry._page_to_write

def noted(domain, operator):
    frame = sys._getframe(1)
    while not frame.f_globals["__name__"].startswith("onnxtrain.autodiff.rules."):
        frame = frame.f_back
    found.setdefault(frame.f_globals["__name__"].rpartition(".")[2], set()).add(operator)
    return write(domain, operator)

registry._page_to_write = noted
registry.load_all_rules()
json.dump({file: sorted(operators) for file, operators in found.items()}, sys.stdout)
"""


def run(program: str) -> str:
    """What a program prints in a process of its own, where no rule is loaded."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_table_says_what_files_register():
    """Of a file that has a row; one without is loaded in any case."""
    registered = json.loads(run(REGISTERED))
    table = {file: sorted(operators.split()) for file, operators in rules.OPERATORS.items()}
    assert table == {file: registered.get(file, []) for file in table}


def test_rows_are_of_files():
    files = {path.stem for path in Path(rules.__file__).parent.glob("*.py")} - {"__init__"}
    assert set(rules.OPERATORS) <= files


def test_one_operator_loads_its_file_and_what_that_imports():
    found = run(
        "import sys\nfrom onnxtrain.autodiff import registry\n"
        "assert registry.find('Softmax', '', 18) is not None\n"
        "print([name.rpartition('.')[2] for name in sys.modules if name.startswith('onnxtrain.autodiff.rules.')])"
    )
    assert ast.literal_eval(found) == ["softmax"]


def test_every_way_to_an_operator_loads_its_rules():
    run(
        "import onnx_ir as ir\nfrom onnxtrain.autodiff import fused, registry\n"
        "assert registry.find_registered_body('QGemm', 'com.microsoft') is not None\n"
        "assert registry.find('Floor', '', 18, straight_through=True).through_integers\n"
        "assert fused.find_fused(ir.Node('onnxtrain', 'LayerNormalizationGradient', [])) is not None\n"
        "assert fused.find_fused(ir.Node('', 'Softsign', [])) is None\n"
        "assert {'Loop', 'Einsum', 'RoiAlign'} <= {entry.operator for entry in registry.entries()}\n"
    )


@pytest.mark.parametrize("first", ["", "registry.find('Einsum', '', 18)"])
def test_a_rule_of_ones_own_is_compared_with_one_that_is_not_loaded_yet(first):
    found = run(
        f"import onnxtrain\nfrom onnxtrain.autodiff import registry\n{first}\n"
        "try:\n    onnxtrain.register_gradient('Einsum')(lambda node, dy: dy)\n"
        "except onnxtrain.errors.GradientError as error:\n    print(error)\n"
    )
    assert "A gradient of ai.onnx::Einsum is registered for versions 1 to the newest already" in found


def test_a_rule_that_is_not_loaded_yet_can_be_unregistered():
    run(
        "import onnxtrain\nfrom onnxtrain.autodiff import registry\n"
        "def own(node, dy):\n    return dy\n"
        "onnxtrain.unregister_gradient('Softsign')\nonnxtrain.register_gradient('Softsign')(own)\n"
        "assert registry.find('Softsign', '', 18).function is own\nlist(registry.entries())\n"
    )


def test_threads_that_look_up_rules_at_once_find_them():
    run(
        "from concurrent.futures import ThreadPoolExecutor\nfrom onnxtrain.autodiff import registry, rules\n"
        "names = [name for row in rules.OPERATORS.values() for name in row.split()]\n"
        "def known(name):\n"
        "    return any(registry.find(name, domain, 18) or registry.find_registered_body(name, domain)\n"
        "               for domain in ('', 'ai.onnx.ml', 'com.microsoft', 'onnxtrain'))\n"
        "with ThreadPoolExecutor(8) as threads:\n"
        "    missed = [name for name, found in zip(names, threads.map(known, names), strict=True) if not found]\n"
        "assert not missed, missed\n"
    )
