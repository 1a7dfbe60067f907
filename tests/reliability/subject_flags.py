"""Command lines: flags with invalid, missing and empty values, repeated and unknown ones."""

from __future__ import annotations

import contextlib
import io
import random
import re
import signal
import unicodedata
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from plugins.text.chats import decoder
from reliability.outcome import WrongError
from reliability.worker import Operations

NUMBERS = (
    "nan", "inf", "-inf", "NaN", "1e400", "-1e400", "1e-400", "-0.0", "0", "-1", "1", "2", "0.5", "1e38", "1e-45",
    "2147483648", "-2147483649", "9223372036854775808", "18446744073709551616", "1" + "0" * 400, "1_000", "0x10", "1e3",
    "+1", " 1", "1 ", "\u0664", "1,5", "one", "True", "None", "1/3", "--1", "-",
)  # fmt: skip
WORDS = (
    "", " ", ".", "..", "/", "~", "*", "[", "[!]", "[a", "**", "?", "\\", "'", '"', "a" * 300, "\x1b[31mred",
    "\u202eabc", "\u03bb", "\udce9", "[bold]", ":x:", "%s", "{x}", "missing", "missing/deeper", "model.onnx",
    "train.npz", "folder", "model.onnx/x",
    "layer1.*", "layer*", "input", "logits", "output:logits", "output:", "accuracy", "softmax_cross_entropy", "huber",
    "cosine", "step(1, 0.1)", "step(0, 0)", "exponential(nan)", "warmup(-1)+cosine", "warmup(1e9)+", "linear(" * 50,
    "+", "()", "constant", "warmup(1)+warmup(1)+cosine", "adam", "ssgd", "train", "values", "log-sum", "out.onnx",
    "out.npz", "out.npy",
    "out.json", "out.csv", "out.png", "deep/er/out.onnx", "train.npz/out.onnx", "a\nb.onnx",
)  # fmt: skip
BASES: dict[str, tuple[str, ...]] = {
    "fit": ("model.onnx", "--data", "train.npz", "--loss", "softmax_cross_entropy", "--output", "out.onnx"),
    "prune": ("model.onnx", "--data", "train.npz", "--loss", "softmax_cross_entropy", "--sparsity", "0.5",
              "--epochs", "1", "--fine-tune-epochs", "1", "--output", "out.onnx"),
    "evaluate": ("model.onnx", "--data", "train.npz", "--loss", "softmax_cross_entropy"),
    "predict": ("model.onnx", "--data", "train.npz", "--output", "out.npz"),
    "inspect": ("model.onnx",),
    "doctor": ("model.onnx",),
    "check": ("model.onnx", "--loss", "softmax_cross_entropy", "--provider", "cpu"),
    "adapter": ("slots", "model.onnx", "--targets", "*", "--output", "out.onnx"),
    "quantize": ("model.onnx", "--data", "train.npz", "--output", "out.onnx"),
    "sparsify": ("model.onnx", "--output", "out.onnx"),
    "shrink": ("model.onnx", "--output", "out.onnx"),
    "import-states": ("model.onnx", "given.safetensors", "--output", "out.onnx"),
    "runs": ("folder",),
    "completion": ("bash",),
    "checkpoint": ("decoder.onnx", "--output", "out"),
    "demo": (),
    "export": ("model.onnx", "--loss", "softmax_cross_entropy", "--step-graph", "out.onnx"),
}  # fmt: skip
GOOD: dict[str, tuple[str, ...]] = {
    "--epochs": ("1", "2"), "--batch-size": ("1", "7", "20", "1000"), "--schedule": ("cosine", "warmup(2)+linear"),
    "--optimizer": ("adam", "momentum", "adagrad", "ssgd"), "--learning-rate": ("0.01", "1e-5"), "--seed": ("3",),
    "--train": ("layer1*", "*"), "--freeze": ("layer2*",), "--threads": ("1", "2"), "--accumulate": ("2", "30"),
    "--clip-norm": ("1.0",), "--clip-value": ("0.1",), "--validation": ("0.2", "train.npz"), "--history": ("rows.csv",),
    "--checkpoint": ("kept",), "--checkpoint-every": ("1",), "--keep": ("1",), "--early-stopping": ("1",),
    "--metrics": ("accuracy",), "--sparsity": ("0", "0.9"), "--rounds": ("2",), "--storage": ("sparse",),
    "--allocation": ("uniform", "flops"), "--block": ("4,1", "1,4"), "--n-m": ("2,4",),
    "--method": ("magnitude", "random"), "--training-model": ("t.onnx",),
    "--states": ("s.safetensors",), "--prediction": ("logits",), "--target": ("label",), "--report": ("report",),
}  # fmt: skip
"""Valid flags, alone and mostly in combination, so that the rest of the line is reached."""

SECONDS = 3.0
"""Seconds until Ctrl-C: valid flags may request endless epochs and rounds."""


class Subject:
    """Commands in a folder with a model and data; no flags may lead to a message about a defect."""

    def __init__(self, shared: Path) -> None:
        import matplotlib.pyplot  # noqa: F401 - Ctrl-C in the middle of an import leaves half a module in this process
        import onnx
        from safetensors.numpy import save_file

        import onnxtrain

        self._shared = shared
        onnx.save(onnxtrain.examples.mlp((4, 5, 3)), shared / "model.onnx")
        points = np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32)
        np.savez(shared / "train.npz", input=points, label=points[:, :3].argmax(1))
        save_file({"layer1.bias": np.ones(5, np.float32)}, shared / "given.safetensors")
        onnx.save(decoder(), shared / "decoder.onnx")
        (shared / "config.json").write_text('{"model_type": "llama"}')
        self._flags = {command: flags_of(command) for command in BASES}

    def run(self, seed: int, index: int, case: Path, operations: Operations) -> None:
        """Run one command line."""
        generator = random.Random(f"flags {seed} {index}")
        for name in ("model.onnx", "train.npz", "given.safetensors", "decoder.onnx", "config.json"):
            (case / name).write_bytes((self._shared / name).read_bytes())
        (case / "folder").mkdir()
        command = generator.choice([*BASES])
        line = [command, *spoil(list(BASES[command]), self._flags[command], generator)]
        (case / "line.txt").write_text(repr(line))
        operations.run(command, lambda: run_line(line, case))
        for name in ("model.onnx", "train.npz", "decoder.onnx"):
            if not overwritten(line, name) and (case / name).read_bytes() != (self._shared / name).read_bytes():
                operations.run("files", _changed)


def overwritten(line: list[str], name: str) -> bool:
    """Return whether the line names a file both as an input and as an output."""
    return sum(name in word for word in line) > 1


def _changed() -> None:
    raise WrongError("a file that nobody asked to write has changed")


def flags_of(command: str) -> dict[str, bool]:
    """Return the flags of a command, from its help, with whether they take a value."""
    from onnxtrain.cli import main

    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        assert main([command, "--help-all"]) == 0
    found = re.findall(r"(--[a-z][a-z-]+)( [A-Z]+| \[)?", text.getvalue())
    flags: dict[str, bool] = {}
    for name, value in found:
        flags[name] = flags.get(name, False) or bool(value)
    return flags


def spoil(line: list[str], flags: dict[str, bool], generator: random.Random) -> list[str]:
    """Add flags that work; change, add, repeat and drop arguments."""
    known = [flag for flag in GOOD if flag in flags and flag not in line]
    for flag in generator.sample(known, min(len(known), generator.randrange(5))):
        line += [flag, generator.choice(GOOD[flag])]
    for _ in range(generator.choice((0, 1, 1, 1, 2, 3))):
        flag = generator.choice([*flags])
        value = generator.choice(NUMBERS if generator.random() < 0.5 else WORDS)
        match generator.randrange(10):
            case 0 if line:
                del line[generator.randrange(len(line))]
            case 1 if line:
                line[generator.randrange(len(line))] = value
            case 2:
                line.insert(generator.randrange(len(line) + 1), value)
            case 3:
                line.append(
                    generator.choice((flag[:-1], flag + "x", flag.upper(), "--", "-x", "---", "--no" + flag[1:]))
                )
            case 4:
                line += [flag, value, flag, value]
            case 5:
                line.append(f"{flag}={value}")
            case _:
                line += [flag, value] if flags[flag] or generator.random() < 0.2 else [flag]
        if not line:
            break
    return line


@contextlib.contextmanager
def pressed_after(seconds: float) -> Iterator[None]:
    """Send Ctrl-C if the block takes longer."""

    def press(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, press)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def run_line(line: list[str], folder: Path) -> None:
    """Run a command line; raise if its exit code or output is wrong."""
    from onnxtrain.cli import main
    from onnxtrain.errors import OnnxTrainError

    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pressed_after(SECONDS):
            code = main(line)
    printed, errors = (stream.buffer.getvalue().decode() for stream in (out, err))  # type: ignore[attr-defined]
    lines = [text for text in errors.splitlines(keepends=True) if not text.startswith(("hint: ", "warning: "))]
    if "--debug" in line:  # the requested traceback precedes the sentence
        lines = lines[-1:]
    sentence = "".join(lines)
    if code not in (0, 2, 130):
        raise WrongError(f"{line} ended with {code}: {errors}", f"code {code}: {sentence[:70]}")
    if code == 0 and sentence:
        raise WrongError(f"{line} ended well, but printed {errors}", "an error without a code")
    if code and not re.fullmatch(r"error: [^\n]+[.?]\n", sentence):
        raise WrongError(f"{line} did not end in a sentence: {errors!r}", "no sentence")
    control = [c for c in printed + errors if unicodedata.category(c) in ("Cc", "Cf", "Cs") and c not in "\n\t"]
    if control:
        raise WrongError(f"{line} printed {control!r}", "control characters")
    left = [path.name for path in folder.rglob("*.tmp")]
    if left:
        raise WrongError(f"{line} left {left}")
    if code == 2:
        raise OnnxTrainError(sentence)
