"""Names of domains occur once in the sources."""

import ast

import layers
from onnxtrain.graph import domains

NAMES = {domains.TRAINING_DOMAIN, domains.MICROSOFT_DOMAIN, domains.MACHINE_LEARNING_DOMAIN, "ai.onnx"}


def test_each_name_stands_in_one_file():
    found = {}
    for path in layers.PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and node.value in NAMES:
                found.setdefault(node.value, set()).add(path.relative_to(layers.PACKAGE).as_posix())
    # In error texts, ONNX's own domain has the longer spelling.
    texts = {"autodiff/missing.py", "graph/rule_registry.py"}
    assert found.pop("ai.onnx") - texts == {"graph/domains.py"}
    assert found == {name: {"graph/domains.py"} for name in NAMES - {"ai.onnx"}}


def test_the_default_domain_has_two_spellings():
    assert [domains.is_default_domain(name) for name in ("", "ai.onnx", "ai.onnx.ml", "onnxtrain")] == [
        True,
        True,
        False,
        False,
    ]
