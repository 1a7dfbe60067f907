"""Values that are compared and shown by their fields have what ``@dataclass(frozen=True)`` would have written."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

import pytest

import onnxtrain
from onnxtrain.by_fields import ByFields


@dataclass(frozen=True)
class Written:
    name: str
    size: int = 0
    note: str = field(default="", compare=False)
    secret: str = field(default="", repr=False)
    parts: Any = ()


@dataclass(frozen=True, eq=False, repr=False)
class Shared(ByFields):
    name: str
    size: int = 0
    note: str = field(default="", compare=False)
    secret: str = field(default="", repr=False)
    parts: Any = ()


@dataclass(frozen=True, eq=False, repr=False)
class Derived(Shared):
    more: int = 0


CASES = [
    {"name": "a"},
    {"name": "b"},
    {"name": "a", "size": 1},
    {"name": "a", "note": "not compared"},
    {"name": "a", "secret": "not shown"},
    {"name": "a", "parts": (1, (2, 3))},
]


@pytest.mark.parametrize("first", CASES)
@pytest.mark.parametrize("second", CASES)
def test_equality_and_hash_are_those_of_a_dataclass(first, second):
    equal = Written(**first) == Written(**second)
    assert (Shared(**first) == Shared(**second)) is equal
    assert (hash(Shared(**first)) == hash(Shared(**second))) is (hash(Written(**first)) == hash(Written(**second)))


@pytest.mark.parametrize("case", CASES)
def test_the_text_is_that_of_a_dataclass(case):
    assert repr(Shared(**case)) == repr(Written(**case)).replace("Written", "Shared")


def test_objects_of_another_class_differ():
    assert Shared("a") != Derived("a")
    assert Derived("a", more=1) != Derived("a", more=2)
    assert repr(Derived("a", more=1)).endswith("parts=(), more=1)")
    assert Shared("a") != "a"


def test_a_field_without_a_hash_leaves_the_object_without_one():
    with pytest.raises(TypeError, match="unhashable type: 'list'"):
        hash(Shared("a", parts=[]))


def test_an_object_that_holds_itself_is_shown():
    parts: list[Any] = []
    holder = Shared("a", parts=parts)
    parts.append(holder)
    assert "parts=[...]" in repr(holder)


def test_a_dataclass_of_a_user_may_derive_from_one():
    @dataclass(frozen=True)
    class Own(onnxtrain.Adam):
        more: int = 0

    assert Own(1e-3, more=1) == Own(1e-3, more=1) != Own(1e-3, more=2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Own(1e-3).more = 2  # type: ignore[misc]


def test_all_values_before_the_first_step_share_them():
    program = """
import sys
import numpy as np
import onnxtrain
trainer = onnxtrain.Trainer(onnxtrain.examples.mlp((4, 8, 3)), loss="softmax_cross_entropy", optimizer=onnxtrain.Adam())
trainer.train_step(np.eye(4, dtype=np.float32)[:3], np.arange(3))
for name, module in list(sys.modules.items()):
    for found in vars(module).values() if name.startswith("onnxtrain") else ():
        if isinstance(found, type) and found.__module__ == name and "__dataclass_params__" in vars(found):
            if found.__dataclass_params__.eq or found.__dataclass_params__.repr:
                print(f"{name}.{found.__name__}")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    written = done.stdout.split()
    assert not written, f"compiled at every start, and may derive from ByFields: {written}"
