"""The flags are the arguments of the library: same names, same defaults, and every one is explained."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import subprocess
import sys
import typing

import pytest
from cyclopts import App

import onnxtrain
from call_arguments import arguments_of
from onnxtrain.cli.app import COMMANDS, build
from onnxtrain.cli.messages import in_flags
from onnxtrain.cli.training_flags import OptimizerSettings, Training
from onnxtrain.operators import OPTIMIZERS
from onnxtrain.training.inference.forward import evaluate, predict

SAMPLED = {("predict", "dropout"), ("predict", "samples")}
"""Python only: samples of predictions are no table."""

ELSEWHERE = {
    "model": "the positional argument",
    "optimizer": "a name here, with a flag for each attribute",
    "output": "--prediction; --output is the file that is written",
    "callbacks": "Python only",
    "augment": "Python only",
    "distributed": "--parallel, with a flag for each setting",
    "runtime": "--provider and --threads; the others in Python only",
    "options": "--provider and --threads; the others in Python only",
    "prefetch": "Python only: for iterables that only one thread may read",
    "masks": "Python only: what prune makes",
    "sparsify": "Python only: what prune makes",
    "groups": "Python only: each has settings of its own",
    "self": "the trainer",
    "lora": "a rank here, with a flag for each setting",
    "y": "Python only: --data has the targets",
}


@functools.cache
def flags_of(command: str) -> dict[str, object]:
    """The flags of a command with their defaults, as cyclopts reads them."""
    app: App = build()
    found = {}
    for argument in app[command].assemble_argument_collection():
        for name in argument.names:
            default = argument.field_info.default
            found[name] = None if default is inspect.Parameter.empty else default
    return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("command", "function"),
    [
        ("fit", onnxtrain.Trainer.__init__),
        ("fit", onnxtrain.Trainer.fit),
        ("evaluate", evaluate),
        ("predict", predict),
        ("inspect", onnxtrain.inspect),
        ("export", onnxtrain.training_model),
        ("export", onnxtrain.lower),
    ],
)
def test_arguments_are_flags_with_the_same_defaults(command, function):
    flags = flags_of(command)
    for name, default in arguments_of(function).items():
        if name in ELSEWHERE or name in ("training_model", "folder") or (command, name) in SAMPLED:
            continue
        flag = f"--{name.replace('_', '-')}"
        assert flag in flags, f"{command} lacks {flag}"
        if default not in (inspect.Parameter.empty, dataclasses.MISSING, (), None):
            assert flags[flag] == default, flag


@pytest.mark.parametrize("command", COMMANDS)
def test_a_flag_that_may_be_left_out_takes_nothing(command):
    """cyclopts checks defaults in a process that has imported pydantic, such as a server."""
    for argument in build()[command].assemble_argument_collection():
        if argument.field_info.default is None:
            assert type(None) in typing.get_args(typing.get_args(argument.field_info.annotation)[0]), argument.name


def test_fit_has_the_flags_of_its_documentation():
    wanted = (
        "data validation target loss optimizer learning-rate alpha beta epsilon norm-coefficient "
        "norm-coefficient-post decay-factor mode schedule epochs batch-size train freeze output checkpoint resume "
        "seed threads debug metrics batch-norm dropout untie clip-norm clip-value accumulate early-stopping "
        "checkpoint-every keep curve history quiet"
    )
    assert {f"--{name}" for name in wanted.split()} | {"-o"} <= set(flags_of("fit"))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_is_found(name):
    settings = OPTIMIZERS[name].settings
    built = OptimizerSettings(optimizer=name.lower()).build()
    assert built == settings()
    assert OptimizerSettings(optimizer=name.lower(), learning_rate=0.5).build().learning_rate == 0.5
    flags = flags_of("fit")
    for attribute in settings.schema.attributes:
        assert f"--{attribute.name.replace('_', '-')}" in flags


def test_training_flags_are_arguments_of_the_trainer():
    assert set(Training().arguments()) <= set(arguments_of(onnxtrain.Trainer.__init__))


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help_teaches(run, command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    result = run(*([] if command is None else [command]), "--help")
    assert result.code == 0
    assert result.out.startswith("Usage: onnxtrain")
    assert max(map(len, result.out.splitlines())) <= 80
    for line in result.out.splitlines():
        assert not re.match(r"│ +\*? +--[a-z-]+( -o)?( [A-Z]+)?( --no-[a-z]+)? +│", line), f"no help: {line}"
    if command is not None:
        examples = COMMANDS[command].EXAMPLES
        assert examples.strip() in re.sub(r" +\n", "\n", result.out), "an example is wrapped"
        assert result.out.index("Examples\n") > result.out.rindex("╰")


def test_every_command_is_listed(run):
    out = run("--help").out
    for command in COMMANDS:
        assert re.search(rf"^│ {command} ", out, re.MULTILINE)


def test_version(run):
    result = run("--version")
    assert (result.code, result.out.strip()) == (0, onnxtrain.__version__)


def test_runs_as_a_module():
    found = subprocess.run([sys.executable, "-m", "onnxtrain", "--version"], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == onnxtrain.__version__
    found = subprocess.run([sys.executable, "-m", "onnxtrain", "inspect", "no.onnx"], capture_output=True, text=True)
    assert (found.returncode, found.stdout, found.stderr) == (
        2,
        "",
        "error: There is no file 'no.onnx'; check the path.\n",
    )


def test_no_command_gives_help(run):
    result = run()
    assert result.code == 0
    assert "Usage: onnxtrain COMMAND" in result.out


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("sentence", "expected"),
    [
        ("give checkpoint=.", "give --checkpoint."),
        ('batch_norm="train" trains', "--batch-norm train trains"),
        ("untie=True gives each its own", "--untie gives each its own"),
        ("train='head.*' matches nothing", "--train 'head.*' matches nothing"),
        ('train=["*", "val_9"] trains it', "--train '*' --train val_9 trains it"),
        ("clip (clip_norm=1.0)", "clip (--clip-norm 1.0)"),
        ("output='logits', but", "--prediction logits, but"),
        ("loss='output:cost', but", "--loss output:cost, but"),
        ("Use since=, until= or y=.", "Use since=, until= or y=."),
        ("1 + T * decay_factor = 0", "1 + T * decay_factor = 0"),
    ],
)
def test_messages_speak_in_flags(sentence, expected):
    assert in_flags(sentence) == expected
