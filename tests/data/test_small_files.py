"""Untrusted small files: pipes, devices, cycles of links, sizes, depth, digits, and impossible adapters."""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from safetensors.numpy import save_file

import onnxtrain
from onnxtrain.adapters.files import read_adapter
from onnxtrain.errors import ModelError, OnnxTrainError
from onnxtrain.model_file import small_files
from onnxtrain.model_file.small_files import RefusedFileError, parse_json, read_json, read_toml
from sentences import raises_sentence

ADAPTER = {"peft_type": "LORA", "r": 2, "lora_alpha": 4}


def write_adapter(folder: Path, **changes: Any) -> Path:
    """Write a PEFT folder; settings that are ``None`` in ``changes`` are omitted."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = {name: value for name, value in (ADAPTER | changes).items() if value is not None}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    write_weights(folder, np.ones((2, 4), np.float32), np.ones((16, 2), np.float32))
    return folder


def write_weights(folder: Path, a: np.ndarray, b: np.ndarray, **others: np.ndarray) -> None:
    name = "base_model.model.layer1.lora_"
    pairs = {f"{name}A.weight": a, f"{name}B.weight": b} | {name + key: array for key, array in others.items()}
    save_file(pairs, folder / "adapter_model.safetensors")


def write_run(folder: Path) -> None:
    folder.mkdir(parents=True)
    run = {"rows": [{"loss": 1.0}], "facts": {}, "finished": True, "seconds": 1.0}
    (folder / "run.json").write_text(json.dumps(run))
    (folder / "config.toml").write_text("epochs = 5\n")


def read_run(folder: Path) -> None:
    from onnxtrain.training.report.record import read_runs

    read_runs([folder / "run"])


READERS: dict[str, Callable[[Path], Any]] = {
    "adapter/adapter_config.json": lambda folder: read_adapter(folder / "adapter"),
    "adapter/adapter_model.safetensors": lambda folder: read_adapter(folder / "adapter"),
    "adapter/onnxtrain.json": lambda folder: read_adapter(folder / "adapter"),
    "tuned.onnx_adapter": lambda folder: read_adapter(folder / "tuned.onnx_adapter"),
    "tuned.onnx_adapter.json": lambda folder: read_adapter(folder / "tuned.onnx_adapter"),
    "run/run.json": read_run,
    "run/config.toml": read_run,
    "flags.toml": lambda folder: _command("fit", "--config", "flags.toml"),
    "weights.txt": lambda folder: _fit("--sample-weight", "weights.txt"),
    "weights.npy": lambda folder: _fit("--sample-weight", "weights.npy"),
    "model.labels.json": lambda folder: onnxtrain.Trainer(folder / "model.onnx", loss="softmax_cross_entropy"),
    "states.safetensors": lambda folder: _command("import-states", "model.onnx", "states.safetensors", "-o", "o.onnx"),
    "train.npz": lambda folder: _fit(),
    "train.csv": lambda folder: _command("evaluate", "model.onnx", "--data", "train.csv", *LOSS),
    "train.parquet": lambda folder: _command("evaluate", "model.onnx", "--data", "train.parquet", *LOSS),
    "train.tar": lambda folder: _command("evaluate", "model.onnx", "--data", "train.tar", *LOSS),
    "train.safetensors": lambda folder: _command("evaluate", "model.onnx", "--data", "train.safetensors", *LOSS),
    "model.onnx": lambda folder: _command("inspect", "model.onnx"),
    "tokenizer.json": lambda folder: onnxtrain.data.TextFile("t.csv", folder / "tokenizer.json").read(
        [onnxtrain.data.TensorSpec("ids", np.dtype(np.int64), ("N", None))], need_target=False
    ),
}
LOSS = ("--loss", "softmax_cross_entropy")


class _RefusedError(OnnxTrainError):
    """A command ended in a sentence."""


def _command(*words: str) -> None:
    import io

    from onnxtrain.cli import main

    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        code = main(words)
    if code:
        assert code == 2
        assert re.fullmatch(r"error: [^\n]+\.\n", said.getvalue()), said.getvalue()
        raise _RefusedError(said.getvalue())


def _fit(*words: str) -> None:
    _command("fit", "model.onnx", "--data", "train.npz", *LOSS, "-o", "out.onnx", "--quiet", *words)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    onnx.save(onnxtrain.examples.mlp((4, 16, 3)), tmp_path / "model.onnx")
    np.savez(tmp_path / "train.npz", input=np.ones((6, 4), np.float32), label=np.arange(6) % 3)
    (tmp_path / "t.csv").write_text("text\na\n")
    write_run(tmp_path / "run")
    write_adapter(tmp_path / "adapter")
    trainer = onnxtrain.Trainer(
        tmp_path / "model.onnx", loss="softmax_cross_entropy", lora=onnxtrain.Lora(rank=2, targets="*")
    )
    trainer.save(tmp_path / "tuned.onnx_adapter")
    return tmp_path


def _spoil(path: Path, how: str) -> None:
    path.unlink(missing_ok=True)
    if how == "pipe":
        os.mkfifo(path)
    elif how == "device":
        try:
            os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # zeros without end
            path.open("rb").close()
        except OSError:
            pytest.skip("this system makes no devices")
    elif how == "loop":
        path.symlink_to(path.name)
    elif how == "folder":
        path.mkdir()
    elif how == "link to a pipe":
        os.mkfifo(path.with_name("pipe"))
        path.symlink_to("pipe")


STATES = pytest.param("states.safetensors", marks=pytest.mark.plugins)


@pytest.mark.parametrize("how", ["pipe", "device", "loop", "folder", "link to a pipe"])
@pytest.mark.parametrize("name", [STATES, *(name for name in READERS if name != "states.safetensors")])
def test_only_regular_files_are_read(files: Path, name: str, how: str) -> None:
    """A sentence at once, whatever stands where a file is read: nothing waits, and nothing reads without end."""
    if name == "tokenizer.json":
        pytest.importorskip("tokenizers")
    if name == "train.parquet":
        pytest.importorskip("pyarrow")
    _spoil(files / name, how)
    began = time.monotonic()
    with pytest.raises(OnnxTrainError) as caught:
        READERS[name](files)
    assert time.monotonic() - began < 20
    assert "defect" not in str(caught.value)
    assert str(caught.value).strip().endswith(".")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100 + "]" * 100, "more than 64 levels"),
        ("[" * 10**6, "more than 64 levels"),
        ('{"a":' * 10**5, "more than 64 levels"),
        ("[" + "9" * 10**6 + "]", "more than 40 digits"),
        ("[NaN]", "not finite"),
        ("[1e999]", "not finite"),
        ('["\\ud800"]', "lone surrogate"),
        ("{", "Expecting property name"),
    ],
)
def test_limits_of_json(text: str, message: str) -> None:
    with pytest.raises(RefusedFileError, match=message):
        parse_json(text)


def test_limits_of_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "f").write_text("a = 1\n" * 200_000)
    with raises_sentence("refused_size", size="1 MiB"):
        read_toml(tmp_path / "f")
    monkeypatch.setattr(small_files, "TEXT_LIMIT", 10)
    with pytest.raises(RefusedFileError, match=r"^it has more than 10 bytes"):
        read_json(tmp_path / "f", 10)


SIZE = 100_000
TOML = {
    "a dotted key": ".".join(["a"] * (SIZE // 2)) + " = 1",
    "a dotted key in quotes": ".".join(['"a"'] * (SIZE // 4)) + " = 1",
    "a header": "[" + ".".join(["a"] * (SIZE // 2)) + "]",
    "lists in lists": "a = " + "[" * SIZE,
    "tables in tables": "a = " + "{a=" * (SIZE // 3),
    "digits": "a = " + "9" * SIZE,
    "hexadecimal digits": "a = 0x" + "f" * SIZE,
    "escapes": 'a = "' + "\\n" * (SIZE // 2) + '"',
    "keys": "\n".join(f"k{i} = 1" for i in range(SIZE // 10)),
    "headers": "\n".join(f"[k{i}]" for i in range(SIZE // 8)),
    "deep headers": "\n".join("[" + ".".join(["a"] * 30) + f".k{i}]" for i in range(SIZE // 70)),
    "a list": "a = [" + "1," * (SIZE // 2) + "]",
    "quotes": 'a = """' + '""' * (SIZE // 2),
    "a word": "a" * SIZE,
    "spaces": " " * SIZE,
}


@pytest.mark.parametrize("name", TOML)
def test_toml_of_100_kb_takes_no_time(tmp_path: Path, name: str) -> None:
    (tmp_path / "f.toml").write_text(TOML[name])
    began = time.process_time()
    with contextlib.suppress(RefusedFileError):
        read_toml(tmp_path / "f.toml")
    assert time.process_time() - began < 2


NAN = float("nan")
SETTINGS: dict[str, dict[str, Any]] = {
    "no rank": {"r": 0},
    "a negative rank": {"r": -2},
    "a rank as text": {"r": "2"},
    "a rank as a fraction": {"r": 2.5},
    "a rank as true": {"r": True},
    "a huge rank": {"r": 10**30},
    "another rank": {"r": 3},
    "a huge alpha": {"lora_alpha": 10**35},
    "an alpha beyond floats": {"lora_alpha": 10**39},
    "an alpha of 0": {"lora_alpha": 0},
    "an alpha as text": {"lora_alpha": "4"},
    "an alpha in a list": {"lora_alpha": [4]},
    "a rank in a pattern as text": {"rank_pattern": {"layer1": "2"}},
    "a negative rank in a pattern": {"rank_pattern": {"layer1": -2}},
    "a pattern as a list": {"rank_pattern": [1]},
    "alphas as text": {"alpha_pattern": "4"},
    "a dropout of 2": {"lora_dropout": 2},
    "a negative dropout": {"lora_dropout": -0.5},
    "a dropout as text": {"lora_dropout": "a"},
    "rslora as text": {"use_rslora": "yes"},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_that_no_adapter_has(files: Path, name: str) -> None:
    """None is merged in silence."""
    folder = write_adapter(files / "adapter", **SETTINGS[name])
    with pytest.raises(ModelError, match=r"'[^']*adapter.*\.$") as caught:
        onnxtrain.adapters.merge_adapter(files / "model.onnx", folder, files / "merged.onnx")
    assert "defect" not in str(caught.value)
    assert not (files / "merged.onnx").exists()


F = np.float32
WEIGHTS: dict[str, tuple[np.ndarray, np.ndarray]] = {
    "NaN in A": (np.full((2, 4), NAN, F), np.ones((16, 2), F)),
    "infinity in B": (np.ones((2, 4), F), np.full((16, 2), np.inf, F)),
    "no rank": (np.ones((0, 4), F), np.ones((16, 0), F)),
    "two ranks": (np.ones((2, 4), F), np.ones((16, 3), F)),
    "values whose product overflows": (np.full((2, 4), 1e30, F), np.full((16, 2), 1e30, F)),
    "vectors": (np.ones(4, F), np.ones(16, F)),
    "scalars": (np.ones((), F), np.ones((), F)),
    "integers": (np.ones((2, 4), np.int64), np.ones((16, 2), np.int64)),
    "one matrix, one kernel": (np.ones((2, 4), F), np.ones((16, 2, 1, 1), F)),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_that_no_adapter_has(files: Path, name: str) -> None:
    folder = write_adapter(files / "adapter")
    write_weights(folder, *WEIGHTS[name])
    with pytest.raises(ModelError, match=r"\.$"):
        onnxtrain.adapters.merge_adapter(files / "model.onnx", folder, files / "merged.onnx")
    assert not (files / "merged.onnx").exists()


def _safetensors(path: Path, header: dict[str, Any], data: bytes) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.mark.parametrize("kind", ["F8_E4M3", "F8_E5M2", "F4", "I8", "BOOL", "shape", "nothing"])
@pytest.mark.parametrize("reader", ["adapter/adapter_model.safetensors", STATES, "train.safetensors"])
def test_safetensors_that_numpy_has_no_type_for(files: Path, kind: str, reader: str) -> None:
    name = "base_model.model.layer1.lora_A.weight"
    shape, dtype, size = ([2**62, 0], "F32", 0) if kind == "shape" else ([2, 4], kind, 4 if kind == "F4" else 8)
    header = {} if kind == "nothing" else {name: {"dtype": dtype, "shape": shape, "data_offsets": [0, size]}}
    _safetensors(files / reader, header, bytes(size))
    with pytest.raises(OnnxTrainError) as caught:
        READERS[reader](files)
    assert "defect" not in str(caught.value)


MANIFESTS: dict[str, Any] = {
    "a rank of 0": {"rank": 0},
    "a negative rank": {"rank": -1},
    "a rank as text": {"rank": "8"},
    "NaN": {"alpha": NAN},
    "scales as a list": {"scales": [1]},
    "a scale as text": {"scales": {"layer1": "1"}},
    "a scale of 0": {"scales": {"layer1": 0}},
    "a tiny scale": {"scales": {"layer1": 1e-300, "layer2": 1e-300}},
    "aliases as text": {"aliases": "a"},
    "embeddings as a number": {"embeddings": 3},
    "a base as a list": {"base": [1]},
    "a list": [],
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_manifests_that_no_adapter_has(files: Path, name: str) -> None:
    manifest = files / "tuned.onnx_adapter.json"
    found = MANIFESTS[name]
    known = json.loads(manifest.read_text())
    names = iter(known["scales"])
    if isinstance(found, dict) and isinstance(found.get("scales"), dict):
        found = {"scales": {next(names): value for value in found["scales"].values()}}
    manifest.write_text(json.dumps({**known, **found} if isinstance(found, dict) else found))
    with np.errstate(all="ignore"), pytest.raises(ModelError, match=r"\.$"):
        onnxtrain.adapters.merge_adapter(files / "model.onnx", files / "tuned.onnx_adapter", files / "merged.onnx")


def test_no_small_file_is_read_another_way() -> None:
    """Parsers of files are called in the one reader only."""
    root = Path(onnxtrain.__file__).parent
    found = subprocess.run(
        ["grep", "-rnE", r"json\.load\(|tomllib\.load|\.read_text\(|np\.load\(|numpy\.load\(|from_file\(", root],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.splitlines()
    places = {Path(line.partition(":")[0]).relative_to(root).as_posix() for line in found if ".pyc" not in line}
    assert places <= {"model_file/small_files.py"}, found
    assert sys.version_info >= (3, 11)
