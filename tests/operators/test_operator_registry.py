"""Every optimizer is found, tested, documented, and agrees with ONNX's own schema where there is one."""

from __future__ import annotations

import doctest
import importlib
import re
import subprocess
import sys
from dataclasses import fields
from types import ModuleType

import numpy as np
import onnx
import operator_pages
import pytest
from operator_cases import ATTRIBUTES

import onnxtrain
from onnxtrain import operators
from onnxtrain.graph.domains import TRAINING_DOMAIN
from onnxtrain.operators import OPTIMIZERS, Optimizer
from onnxtrain.operators.registry import find, optimizers_in
from optimizer_pages import FOLDER, example, pages

pytestmark = pytest.mark.sampled(1)  # each case is cheap

INDEPENDENT = ("Adagrad", "Adam", "AdamW", "LAMB", "Lion", "Momentum", "RMSprop", "SGD", "SSGD")
"""The optimizers with an implementation of their own in ``operator_pages``."""


def test_all_are_there_and_in_the_test_tables():
    assert set(ATTRIBUTES) == set(OPTIMIZERS) >= set(INDEPENDENT)
    assert all(hasattr(operator_pages, name.lower()) for name in INDEPENDENT)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_example_states_the_numbers_of_a_step(name):
    """The formula without an independent implementation is held by numbers that its author worked out."""
    steps = example(OPTIMIZERS[name])
    assert re.search(rf">>> {name.lower()}\(.*\n\(array", steps), f"the docstring of {name} lacks a step with numbers"


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_public_names(name):
    entry = OPTIMIZERS[name]
    assert getattr(operators, name.lower()) is entry.reference
    assert getattr(operators, name) is entry.settings is getattr(onnxtrain, name)
    assert {name, name.lower()} <= set(operators.__all__)
    assert issubclass(entry.settings, Optimizer)
    assert find(entry.schema.domain, name) is entry.schema
    assert find("another.domain", name) is None


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_settings_have_the_attributes_of_the_operator(name):
    entry = OPTIMIZERS[name]
    names = [f.name for f in fields(entry.settings) if f.name != "sparsity"]  # a modifier, no attribute
    settings = [entry.settings.field_of(a).partition("[")[0] for a in entry.schema.attributes]
    assert names == ["learning_rate", *dict.fromkeys(settings)]
    given = {a.name: 0.25 for a in entry.schema.attributes if a.kind is float}
    made = entry.settings(learning_rate=0.5, **given)
    assert made.learning_rate == 0.5
    assert made.node_attributes().items() >= given.items()


@pytest.mark.parametrize("name", [n for n, entry in OPTIMIZERS.items() if entry.schema.domain == TRAINING_DOMAIN])
def test_schema_agrees_with_onnx(name):
    schema = OPTIMIZERS[name].schema
    standard = onnx.defs.get_schema(name, schema.version, schema.domain)
    assert {a.name for a in schema.attributes} == set(standard.attributes)
    for attribute in schema.attributes:
        theirs = standard.attributes[attribute.name]
        assert theirs.required == (attribute.default is None)
        if attribute.default is not None:
            assert np.float32(attribute.default) == np.float32(theirs.default_value.f)


@pytest.mark.parametrize("file", [*pages(), None])
def test_reference_pages_are_up_to_date(file):
    if file is None:
        assert {path.name for path in FOLDER.glob("*.md")} == set(pages())
        return
    text = (FOLDER / file).read_text(encoding="utf-8")
    assert text == pages()[file], "run: python tools/optimizer_pages.py"


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_docstring_examples(name):
    """pytest collects doctests by module; these names are also attributes of the package."""
    module = importlib.import_module(OPTIMIZERS[name].settings.__module__)
    assert doctest.testmod(module).attempted >= 2


def test_one_more_file_is_one_more_optimizer(tmp_path, monkeypatch):
    (tmp_path / "halving.py").write_text(
        """
from dataclasses import dataclass
from onnxtrain.operators.optimizer import Optimizer, optimizer

@optimizer("Halves.", lambda R, T, X, G: (X - R * 0.5 * G,), domain="mine")
@dataclass(frozen=True)
class Halving(Optimizer):
    learning_rate: float = 1.0
"""
    )
    package = ModuleType("more_optimizers")
    package.__path__ = [str(tmp_path)]
    monkeypatch.setitem(sys.modules, "more_optimizers", package)
    try:
        optimizers = optimizers_in("more_optimizers")
        assert list(optimizers) == ["Halving"]
        entry = optimizers["Halving"]
        np.testing.assert_array_equal(entry.reference(1.0, 0, [3.0], [2.0])[0], [2.0])
        assert entry.settings(lr=0.5).learning_rate == 0.5
        assert entry.settings().node_attributes() == {}
    finally:
        sys.modules.pop("more_optimizers.halving", None)


def test_a_name_is_the_operator_and_not_its_module():
    program = """
import onnxtrain.operators.rules.lamb
from onnxtrain import operators
from onnxtrain.operators import ssgd
assert type(operators).__name__ == "module"
assert operators.lamb is operators.OPTIMIZERS["LAMB"].reference and operators.LAMB(lr=0.1).learning_rate == 0.1
assert ssgd is operators.OPTIMIZERS["SSGD"].reference
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
