"""Every instruction set of this machine, each in a separate copy of the library."""

from __future__ import annotations

import shutil

import pytest

from onnxtrain.errors import OnnxTrainError
from onnxtrain.runtime import native

INSTRUCTION_SETS = ("baseline", "avx2", "avx512")


@pytest.hookimpl(tryfirst=True)  # before samples are drawn
def pytest_collection_modifyitems(items):
    """Each case of a test runs on one instruction set, in turn; those on the others are thorough."""
    for item in items:
        parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        if len(parameters) > 1 and "instruction_set" in parameters:
            item.add_marker(pytest.mark.sampled("instruction_set"))


@pytest.fixture(scope="session")
def libraries(tmp_path_factory):
    """Instruction set to (path, library): a copy chooses its kernels when it is loaded, once."""
    loaded = {}
    for name in INSTRUCTION_SETS:
        path = tmp_path_factory.mktemp(name) / "libonnxtrain_kernels.so"
        shutil.copy(native.custom_ops_library(), path)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("ONNXTRAIN_INSTRUCTION_SET", name)
            try:
                loaded[name] = path, native.load(path)
            except OnnxTrainError as error:
                assert "built without" in str(error) or "CPU does not support" in str(error)  # noqa: PT017
    return loaded


@pytest.fixture(params=INSTRUCTION_SETS)
def instruction_set(request, libraries, monkeypatch):
    """Runs the test once per instruction set; `onnxtrain.kernels` then uses it."""
    if request.param not in libraries:
        pytest.skip(f"this build or this CPU lacks {request.param}")
    library = libraries[request.param][1]
    assert library.onnxtrain_instruction_set().decode() == request.param
    monkeypatch.setattr(native, "_loaded", lambda: (library, ""))
    return request.param


@pytest.fixture
def library_path(instruction_set, libraries):
    return str(libraries[instruction_set][0])


@pytest.fixture(scope="session")
def tiles_path(tmp_path_factory):
    """A copy of the library that multiplies bfloat16 in tiles of AMX."""
    path = tmp_path_factory.mktemp("amx") / "libonnxtrain_kernels.so"
    shutil.copy(native.custom_ops_library(), path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ONNXTRAIN_INSTRUCTION_SET", "amx")
        try:
            native.load(path)
        except OnnxTrainError as error:
            pytest.skip(str(error))
    return str(path)
