"""The parts of the package import one another in one direction."""

import re

import pytest

import layers


@pytest.fixture(scope="module")
def imports():
    return list(layers.imports())


def test_no_import_goes_up(imports):
    found = layers.upward(layers.ORDER, imports)
    assert [f"{item.source} -> {item.target}" for item in found] == []


def test_no_cycles(imports):
    assert layers.cycles(imports) == []


def test_one_cycle_for_type_checkers(imports):
    # A value has the operators of Python, which are the builder's nodes, and a builder gives values.
    ((*files,),) = layers.cycles(imports, typed=True)
    assert set(files) == {"graph/builder.py", "graph/operands.py"}
    assert {layers.part(file, layers.ORDER) for file in files} == {"graph/"}


def test_every_part_has_a_position():
    files = [path.relative_to(layers.PACKAGE).as_posix() for path in layers.PACKAGE.rglob("*.py")]
    assert {layers.part(file, layers.ORDER) for file in files} == set(layers.ORDER)


def test_the_page_lists_the_parts_in_their_order():
    table = (layers.ROOT / "docs" / "architecture.md").read_text().partition("| part |")[2].partition("\n\n")[0]
    listed = [name for row in table.splitlines() for name in re.findall(r"`(\w+/)`", row.split("|")[1])]
    assert listed == list(dict.fromkeys(part.partition("/")[0] + "/" for part in layers.ORDER if "/" in part))


@pytest.fixture
def package(tmp_path):
    for name, text in {
        "__init__.py": "",
        "low.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from package.high import x\n",
        "high.py": "def f():\n    from package import low, other\n",
        "other.py": "from package.high import f\n",
    }.items():
        (tmp_path / "package").mkdir(exist_ok=True)
        (tmp_path / "package" / name).write_text(text)
    return tmp_path / "package"


def test_what_breaks_the_order_is_found(package):
    found = list(layers.imports(package))
    assert [(i.source, i.target, i.typed) for i in layers.upward(["low.py", "other.py", "high.py"], found)] == [
        ("low.py", "high.py", True),
        ("other.py", "high.py", False),
    ]
    assert layers.cycles(found) == [["high.py", "other.py"]]
    assert layers.cycles(found, typed=True) == [["high.py", "low.py", "other.py"]]
