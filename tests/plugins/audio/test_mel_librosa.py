"""Mel spectrograms are librosa's; skipped where librosa is not installed."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest

import onnxtrain

librosa = pytest.importorskip("librosa")

AUDIO = np.random.default_rng(3).uniform(-0.5, 0.5, 8000).astype(np.float32)
AUDIO += np.sin(np.arange(8000) * 0.3).astype(np.float32)


@pytest.mark.parametrize("htk", [True, False])
@pytest.mark.parametrize("norm", [None, "slaney"])
@pytest.mark.parametrize("center", [True, False])
@pytest.mark.parametrize("compression", ["log", "db", "pcen", "none"])
@pytest.mark.parametrize("power", [1, 2])
def test_librosa(htk, norm, center, compression, power):
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 18]> f (float[n, 1, m, t] mel) => (float[n, 1, m, t] y) '
        "{ y = Identity(mel) }"
    )
    settings = {"low": 40.0, "high": 7000.0, "scale": "htk" if htk else "slaney", "area_norm": norm is not None}
    audio = onnxtrain.prepend_mel(model, mels=40, power=power, center=center, compression=compression, **settings)
    session = onnxruntime.InferenceSession(audio.SerializeToString(), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"audio": AUDIO[None]})
    expected = librosa.feature.melspectrogram(
        y=AUDIO.astype(np.float64), sr=16000, n_fft=512, win_length=400, hop_length=160, center=center,
        pad_mode="constant", power=power, n_mels=40, fmin=40.0, fmax=7000.0, htk=htk, norm=norm,
    )  # fmt: skip
    if compression == "log":
        expected = np.log(np.maximum(expected, 1e-10))
    elif compression == "db":
        expected = librosa.power_to_db(expected, top_db=None)
    elif compression == "pcen":
        expected = librosa.pcen(expected, sr=16000, hop_length=160)
    np.testing.assert_allclose(found[0, 0], expected, rtol=1e-4, atol=1e-4)
