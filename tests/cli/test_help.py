"""Help has two screens at most: the flags that most people need; the others are in groups, and all in --help-all."""

from __future__ import annotations

import functools
import re

import pytest

from onnxtrain.cli.app import COMMANDS, build
from onnxtrain.cli.flags import COMMON
from onnxtrain.cli.messages import in_flags

MOST = 80
"""Lines of a help: two screens."""

SHORT = ("fit", "prune", "export", "check", "evaluate")
"""Commands whose help leaves flags out."""

PAGES: dict[tuple[str, ...], str] = {}
"""Help by the arguments that ask for it, at the width of a pipe."""


@functools.cache
def arguments_of(command):
    """The flags and arguments of a command that help shows."""
    return [argument for argument in build()[command].assemble_argument_collection() if argument.show]


def groups_of(command):
    """The groups of the flags of a command."""
    groups = {group for argument in arguments_of(command) for group in argument.parameter.group}
    return {group.name for group in groups - {COMMON}}


@pytest.fixture
def shown(success):
    """The help that flags ask for at the width of a pipe; each is made once for all tests of this file."""

    def call(*flags):
        if flags not in PAGES:
            PAGES[flags] = success(*flags).out
        return PAGES[flags]

    return call


@pytest.mark.parametrize("width", [80, 120])
def test_the_help_of_every_command_has_two_screens_at_most(success, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    for command in COMMANDS:
        out = success(command, "--help").out
        assert len(out.splitlines()) <= MOST, command
        assert COMMANDS[command].EXAMPLES.strip() in re.sub(r" +\n", "\n", out)
        assert (f"onnxtrain {command} --help GROUP, or --help-all" in out) is (command in SHORT), command


@pytest.mark.parametrize("command", SHORT)
def test_every_flag_is_in_one_group_and_in_all(shown, command):
    everything = shown(command, "--help-all")
    short = shown(command, "--help")
    pages = [shown(command, "--help", name.lower()) for name in groups_of(command)]
    assert COMMON.name not in everything
    for argument in arguments_of(command):
        flag = re.compile(rf"│ (\*  |   )?{re.escape(argument.name)}(?![\w-])")
        assert len(flag.findall(everything)) == 1, argument.name
        assert sum(bool(flag.search(page)) for page in pages) == 1, argument.name
        assert flag.search(short) or not argument.required, argument.name
    assert getattr(COMMANDS[command], "MORE_EXAMPLES", "").strip() in re.sub(r" +\n", "\n", everything)


def test_the_short_help_has_what_most_people_need(shown):
    short = shown("fit", "--help")
    wanted = "data target output loss optimizer learning-rate epochs batch-size validation metrics new-head lora train "
    wanted += "freeze provider config seed schedule checkpoint resume run"
    for name in wanted.split():
        assert f" --{name} " in short, name
    for kind in ("Images", "table", "Text"):
        assert kind in short.partition("Examples\n")[2], kind


def test_a_group_is_shown_alone(shown):
    out = shown("fit", "--help", "memory")
    assert {"--accumulate", "--recompute", "--precision", "--chunk"} <= set(re.findall(r"--[a-z]+", out))
    assert "--epochs" not in out
    assert "Examples" not in out
    assert shown("fit", "--help", "Memory") == out


@pytest.mark.parametrize("tokens", [("--help", "fit"), ("fit", "-h"), ("fit", "m.onnx", "--help")])
def test_help_anywhere(shown, tokens):
    assert shown(*tokens) == shown("fit", "--help")


def test_an_unknown_group_is_one_sentence(run):
    result = run("fit", "--help", "memry")
    assert result.code == 2
    assert re.fullmatch(
        r"error: fit has no group of flags 'memry'; --help takes one of model, data, .*memory.*\.\n", result.err
    )


def test_messages_know_the_flags_of_every_class_of_options():
    assert in_flags("give epochs=, sparsity= and clip_norm=.") == "give --epochs, --sparsity and --clip-norm."
