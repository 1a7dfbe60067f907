"""ml_dtypes types are recognized by their properties, not by NumPy's flags."""

from __future__ import annotations

import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import onnxtrain
from onnxtrain.graph.upstream.sessions import is_extension_type
from onnxtrain.runtime.states import StateBuffers

SPELT_OUT = [np.dtype(kind).newbyteorder("<") for kind in ("float16", "float32", "float64", "int64", "uint8", "bool")]


@pytest.mark.parametrize(
    "dtype", [*SPELT_OUT, *(np.dtype(kind) for kind in ("f2", "f4", "f8", "i4", "u2", "?", "O", "U3"))]
)
def test_types_of_numpy(dtype):
    assert not is_extension_type(dtype)


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "int4", "uint4"])
def test_types_of_ml_dtypes(name):
    assert is_extension_type(np.dtype(getattr(ml_dtypes, name)))


def test_some_of_them_are_not_builtin():
    """``isbuiltin`` does not identify extension types."""
    assert np.dtype("float32").newbyteorder("<").isbuiltin != 1


@pytest.mark.parametrize("dtype", SPELT_OUT[1:3])
def test_states_of_such_types_are_bound_as_they_are(dtype):
    states, calls = StateBuffers({"w": np.zeros((), dtype)}), []

    class Binding:
        def bind_input(self, *arguments):
            calls.append(arguments)

    states.bind_input(Binding(), "w")
    assert calls[0][3] == dtype


def test_nothing_asks_whether_a_type_is_builtin():
    package = Path(onnxtrain.__file__).parent
    found = [path.name for path in package.rglob("*.py") if re.search(r"\.isbuiltin\b(?!``)", path.read_text())]
    assert found == []
