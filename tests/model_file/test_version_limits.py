"""Opsets and file formats: as new as the installed ONNX Runtime and onnx, found by probing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import onnx
import onnxruntime
import pytest
from model_examples import small_model
from onnx import parser

import onnxtrain
from onnxtrain.errors import ModelError
from onnxtrain.model_file import validity
from onnxtrain.model_file.file import ModelFile


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    validity.newest_opset.cache_clear()
    validity.newest_ir_version.cache_clear()
    yield
    validity.newest_opset.cache_clear()
    validity.newest_ir_version.cache_clear()


def model(opset: int, ir_version: int = 8) -> onnx.ModelProto:
    made = small_model()
    made.opset_import[0].version, made.ir_version = opset, ir_version
    return made


def opens(opset: int, ir_version: int) -> bool:
    """Return whether a quantized model runs; ONNX Runtime 1.32 knows the operators of opset 28, but has no kernels."""
    content = parser.parse_model(f"""<ir_version: {ir_version}, opset_import: ["": {opset}]>
        g (float[n,2] x) => (float[n,2] y) <float s = {{0.5}}, int8 z = {{0}}>
        {{ q = QuantizeLinear(x, s, z)  y = DequantizeLinear(q, s, z) }}""").SerializeToString()
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        return bool(onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"]))
    except Exception:
        return False


def test_the_limits_are_those_of_the_runtime_and_of_onnx() -> None:
    opset, ir_version = validity.newest_opset(), validity.newest_ir_version()
    assert opens(opset, ir_version)
    assert opset == onnx.defs.onnx_opset_version() or not opens(opset + 1, ir_version)
    assert ir_version == onnx.IR_VERSION or not opens(opset, ir_version + 1)
    assert opset <= onnx.defs.onnx_opset_version()
    assert ir_version <= onnx.IR_VERSION
    assert ModelFile.load(model(opset, ir_version)).opset == opset


def test_a_model_of_the_newest_versions_is_trained() -> None:
    trainer = onnxtrain.Trainer(
        model(validity.newest_opset(), validity.newest_ir_version()),
        loss="mean_squared_error",
        optimizer=onnxtrain.Adam(0.1),
    )
    x, y = np.ones((4, 3), np.float32), np.zeros((4, 2), np.float32)
    losses = [trainer.train_step(x, y) for _ in range(5)]
    assert losses[-1] < losses[0]


def test_beyond_the_limits_a_model_is_refused_by_name() -> None:
    newest, format_version = validity.newest_opset(), validity.newest_ir_version()
    with pytest.raises(ModelError, match=rf"has opset {newest + 1}, but opsets 7 to {newest} are supported"):
        ModelFile.load(model(newest + 1))
    with pytest.raises(ModelError, match=rf"has IR version {format_version + 1}, but ONNX Runtime supports 3 to"):
        ModelFile.load(model(18, format_version + 1))


@pytest.mark.parametrize(("known", "newest"), [(21, 21), (24, 24), (30, 24)])
def test_an_older_runtime_or_onnx_sets_the_limit(known: int, newest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a runtime of opset 24, an older onnx lowers the limit, and a newer one does not raise it."""
    monkeypatch.setattr(validity, "_opens", lambda opset, ir_version: opset <= 24)
    monkeypatch.setattr(validity.onnx.defs, "onnx_opset_version", lambda: known)
    assert validity.newest_opset() == newest
    assert validity.supports_opset(newest)
    assert not validity.supports_opset(newest + 1)


def test_the_runtime_is_asked_only_about_new_versions() -> None:
    program = (
        "import sys; from onnxtrain.model_file import validity;"
        "assert validity.supports_opset(21) and validity.supports_ir_version(10) and not validity.supports_opset(6);"
        "assert 'onnxruntime' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
