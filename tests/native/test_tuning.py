"""Every constant of native/tuning.h can be measured again: it has cases that run, and the tool can change it."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

import measure_tuning
from onnxtrain.errors import OptionError
from onnxtrain.runtime.native import _LIBRARY, kernels_available
from tuning_cases import CASES

HEADER = (measure_tuning.ROOT / "native" / "tuning.h").read_text()
FIGURES = re.findall(r"\b(k[A-Z]\w*)\s*[=(]", HEADER)
EVERY_CASE = {label: make for cases in CASES.values() for label, make in cases.items()}


def test_every_figure_has_cases():
    assert sorted(CASES) == sorted(FIGURES)
    assert all(CASES.values())


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_is_changed_alone(name):
    new = measure_tuning.changed(HEADER, name, 2.0)
    before, after = HEADER.split("\n"), new.split("\n")
    differ = [place for place, line in enumerate(before) if line != after[place]]
    assert len(before) == len(after)
    assert len(differ) == 1
    assert name in before[differ[0]]


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a compiler for C++20")
def test_the_changed_header_compiles_to_twice_the_figures(tmp_path):
    text = HEADER
    for name in FIGURES:
        text = measure_tuning.changed(text, name, 2.0)
    (tmp_path / "plain.h").write_text(
        HEADER.replace("namespace onnxtrain", "namespace plain").replace("#pragma once", "")
    )
    (tmp_path / "changed.h").write_text(text.replace("#pragma once", ""))
    checks = "\n".join(f"static_assert(onnxtrain::tuning::{n} == 2 * plain::tuning::{n});" for n in FIGURES)
    (tmp_path / "check.cpp").write_text(f'#include "plain.h"\n#include "changed.h"\n{checks}\n')
    command = ["c++", "-std=c++20", "-fsyntax-only", str(tmp_path / "check.cpp")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.thorough
@pytest.mark.skipif(not kernels_available(), reason="needs the native kernels")
@pytest.mark.parametrize("label", EVERY_CASE)
def test_a_case_runs(label):
    try:
        work = EVERY_CASE[label]()
    except OptionError as error:
        pytest.skip(str(error))
    measure_tuning.runner(_LIBRARY, work)()
