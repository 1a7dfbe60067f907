"""Folders of sounds: those that soundfile and SciPy give, of the rate and the length of the model."""

from __future__ import annotations

import csv
import json

import numpy as np
import onnx
import pytest
from onnxtrain.audio import SoundFolder

import onnxtrain
from onnxtrain import layers
from onnxtrain.data import TensorSpec
from onnxtrain.data.naming import Wanted
from onnxtrain.errors import DataError

soundfile = pytest.importorskip("soundfile")
signal = pytest.importorskip("scipy.signal")

RATES = {"a.wav": 8000, "b.flac": 11025, "c.WAV": 16000, "d.flac": 8000}
LENGTH = 800


def write(folder):
    """Write tones of two pitches, some longer than the model takes, some shorter, every second one in stereo."""
    for label, pitch in (("high", 1500), ("low", 200)):
        (folder / label).mkdir(parents=True)
        for number, (name, rate) in enumerate(RATES.items()):
            time = np.arange(int(rate * (0.03 + 0.05 * number))) / rate
            tone = 0.5 * np.sin(2 * np.pi * pitch * time + number)
            data = np.stack([tone, 0.5 * tone], axis=1) if number % 2 else tone
            soundfile.write(folder / label / name, data, rate, format=name[2:].upper())
    (folder / "low" / ".hidden.wav").touch()
    return folder


def by_hand(folder, rate, length=LENGTH):
    found = []
    for path in sorted(path for path in folder.rglob("*.*") if not path.name.startswith(".")):
        samples, own = soundfile.read(path, dtype="float32", always_2d=True)
        common = np.gcd(rate, own)
        mono = signal.resample_poly(samples.mean(axis=1), rate // common, own // common)
        found.append(np.pad(mono[:length], (0, max(0, length - len(mono)))))
    return np.array(found, np.float32)


def read(folder, shape=("N", LENGTH), need_target=True, target=None, **options):
    spec = TensorSpec("x", np.dtype(np.float32), shape)
    data = SoundFolder(folder, **options).dataset(Wanted([spec], target, need_target))
    (batch,) = data.batches(100)
    return batch.inputs["x"], data.values()


@pytest.mark.parametrize("rate", [8000, 22050, 4000])
def test_sounds_are_those_of_soundfile_and_scipy(tmp_path, rate):
    write(tmp_path)
    expected = by_hand(tmp_path, rate)
    found, labels = read(tmp_path, rate=rate)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert labels.tolist() == ["high"] * 4 + ["low"] * 4
    assert read(tmp_path, ("N", 1, LENGTH), rate=rate)[0].shape == (8, 1, LENGTH)
    longest = read(tmp_path, ("N", "samples"), rate=rate)[0]
    np.testing.assert_allclose(longest[:, :100], expected[:, :100], atol=1e-6)
    assert longest.shape[1] == round(rate * 0.18)


def model():
    flat = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 18]> f (float[N, 800] x) => (float[N, 800] y) { y = Abs(x) }'
    )
    return onnxtrain.append(flat, layers.Linear(2))


def test_the_command_line(tmp_path, monkeypatch, capsys):
    from onnxtrain.cli import main

    monkeypatch.chdir(tmp_path)
    write(tmp_path / "sounds")
    onnx.save(model(), "model.onnx")
    flags = ("--data", "sounds", "--loss", "cross_entropy", "--output", "tuned.onnx", "--quiet")
    assert main(["fit", "model.onnx", *flags]) == 2
    assert "holds sounds of several rates" in " ".join(capsys.readouterr().err.split())
    assert main(["fit", "model.onnx", *flags, "--rate", "8000", "--validation", "0.25"]) == 0
    kept = {"labels": ["high", "low"], "kept": {"sounds": {"rate": 8000}}}
    assert json.loads((tmp_path / "tuned.labels.json").read_text()) == kept
    assert main(["predict", "tuned.onnx", "--data", "sounds", "--output", "found.csv"]) == 0
    rows = [*csv.DictReader((tmp_path / "found.csv").read_text().splitlines())]
    scores = onnxtrain.predict("tuned.onnx", by_hand(tmp_path / "sounds", 8000))
    assert [row["label"] for row in rows] == [["high", "low"][place] for place in scores.argmax(1)]
    assert [row["file"] for row in rows][:2] == ["sounds/high/a.wav", "sounds/high/b.flac"]
    assert main(["predict", "tuned.onnx", "--data", "sounds/low", "--output", "p.npy"]) == 0  # without classes
    np.testing.assert_allclose(np.load("p.npy"), scores[4:], rtol=1e-5, atol=1e-6)


def test_the_rate_of_the_model(tmp_path):
    write(tmp_path / "sounds")
    onnx.save(model(), tmp_path / "model.onnx")
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"sampling_rate": 8000}))
    expected = onnxtrain.predict(tmp_path / "model.onnx", by_hand(tmp_path / "sounds", 8000))
    found = onnxtrain.predict(tmp_path / "model.onnx", tmp_path / "sounds")
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_mistakes(tmp_path):
    def check(sentence, folder, *arguments, **options):
        with pytest.raises(DataError, match=sentence):
            read(folder, *arguments, **options)

    check("holds no sounds", tmp_path)
    write(tmp_path)
    check("holds sounds of several rates: .* give the rate of the model: rate=8000", tmp_path)
    check("whose targets are the names of their folders; leave out target", tmp_path, target="y")
    check(r"the input 'x' is float32 .batch, 3, 8, 8.; it needs floats .batch, samples.", tmp_path, ("N", 3, 8, 8))
    check("holds sounds itself, such as 'a.wav'; for training", tmp_path / "high", rate=8000)
    (tmp_path / "high" / "e.wav").write_bytes(b"RIFF no sound")
    check("e.wav' cannot be read as a sound", tmp_path, rate=8000)
    with pytest.raises(DataError, match="rate is 0; it needs samples per second, such as 16000"):
        SoundFolder(tmp_path, 0)
