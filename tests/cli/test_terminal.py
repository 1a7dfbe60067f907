"""Texts from files are printed literally: markup, emoji names, control characters, direction marks."""

from __future__ import annotations

import io
import unicodedata

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxtrain.cli.process import QuietStream
from onnxtrain.cli.terminal import console, table
from onnxtrain.errors.escaping import visible

HOSTILE = {
    "colour": ("\x1b[31mred\x1b[0m", r"\x1b[31mred\x1b[0m"),
    "title": ("\x1b]0;owned\x07", r"\x1b]0;owned\x07"),
    "one byte escape": ("\x9b2J", r"\x9b2J"),
    "carriage return": ("good\rbad", r"good\rbad"),
    "backspace": ("good\b\b\b\bbad", r"good\x08\x08\x08\x08bad"),
    "direction": ("abc\u202edcba", r"abc\u202edcba"),
    "isolate": ("\u2066abc\u2069", r"\u2066abc\u2069"),
    "invisible": ("a\u200bb\ufeffc", r"a\u200bb\ufeffc"),
    "separator": ("a\u2028b", r"a\u2028b"),
    "half a character": ("a\udce9", r"a\udce9"),
    "markup": ("[bold]x[/bold]", "[bold]x[/bold]"),
    "a lone tag": ("[/]", "[/]"),
    "emoji by name": ("root:x:0:smile:", "root:x:0:smile:"),
    "emoji": ("\U0001f469\u200d\U0001f52c", "\U0001f469\u200d\U0001f52c"),
    "other scripts": ("\u03bb \u05d0 \u4e2d", "\u03bb \u05d0 \u4e2d"),
}


@pytest.mark.parametrize(("text", "shown"), HOSTILE.values(), ids=HOSTILE)
def test_visible(text, shown):
    assert visible(text) == shown


def test_every_character_of_the_hidden_categories_is_escaped():
    everything = [chr(code) for code in range(0x110000)]
    hidden = {c for c in everything if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")} - set(
        "\n\t\u200c\u200d"
    )
    assert visible("".join(hidden)).isascii()
    others = "".join(character for character in everything if character not in hidden)
    assert visible(others) == others


@pytest.mark.parametrize(("text", "shown"), HOSTILE.values(), ids=HOSTILE)
def test_lines_and_tables_show_it(text, shown, capsys):
    written = table("name", "size")
    written.add_row(text, "1")
    console().print(text, soft_wrap=True)
    console().print(written)
    console(stderr=True).print(text, soft_wrap=True)
    out, err = capsys.readouterr()
    for line in (*out.splitlines(), *err.splitlines()):
        assert all(unicodedata.category(character) not in ("Cc", "Cf") or character == "\u200d" for character in line)
    printable = shown.encode("utf-8", "backslashreplace").decode()
    assert out.startswith(printable + "\n")
    assert sum(printable in line for line in out.splitlines()) == 2
    assert err == printable + "\n"


def hostile_model(name: str) -> onnx.ModelProto:
    """A model in which everything that may have a name has this one."""
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["input", f"weight{name}"], [f"logits{name}"], name=name)],
        name,
        [helper.make_tensor_value_info("input", TensorProto.FLOAT, [name, 4])],
        [helper.make_tensor_value_info(f"logits{name}", TensorProto.FLOAT, [name, 3])],
        [numpy_helper.from_array(np.ones((4, 3), np.float32), f"weight{name}")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


@pytest.mark.parametrize(
    "name", [HOSTILE["title"][0], HOSTILE["carriage return"][0], HOSTILE["direction"][0]], ids=repr
)
def test_no_command_lets_a_model_write_to_the_terminal(name, files, run):
    onnx.save(hostile_model(name), files / "model.onnx")
    lines = [
        ("inspect", "model.onnx"),
        ("inspect", "model.onnx", "--train", "nothing"),
        ("inspect", "model.onnx", "--train", "nothing", "--debug"),
        ("inspect", "model.onnx", "--json"),
        ("evaluate", "model.onnx", "--data", "test.npz", "--loss", "softmax_cross_entropy"),
        ("predict", "model.onnx", "--data", "test.npz", "--output", "p.npz"),
        ("export", "model.onnx", "--loss", "huber", "--step-graph", "step.onnx"),
        ("fit", "model.onnx", "--data", "train.npz", "--loss", "softmax_cross_entropy"),
        ("fit", "model.onnx", "--data", "train.npz", "--loss", f"output:logits{name}"),
    ]
    for line in lines:
        result = run(*line)
        printed = result.out + result.err
        assert printed
        assert all(unicodedata.category(character) not in ("Cc", "Cf") or character == "\n" for character in printed)


class Failing(io.StringIO):
    """A stream that fails once it is written to."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def write(self, text: str) -> int:
        raise self.error


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (BrokenPipeError(32, "Broken pipe"), None),
        (OSError(5, "Input/output error"), None),
        (OSError(9, "Bad file descriptor"), None),
        (ValueError("I/O operation on closed file"), None),
        (OSError(28, "No space left on device"), "No space left on device"),
    ],
    ids=repr,
)
def test_a_stream_that_fails_goes_quiet(error, lost):
    stream = QuietStream(Failing(error))
    assert stream.write("abc") == 3
    assert stream.failure is error
    stream.flush()
    assert stream.lost() == lost
    stream.discard()


def test_a_missing_stream_accepts_everything():
    stream = QuietStream(None)
    assert stream.write("abc") == 3
    stream.flush()
    stream.discard()
    assert not stream.isatty()
    assert stream.encoding == "utf-8"
    assert stream.lost() is None
