"""The settings of an optimizer have the same names as text, as flags and in a file."""

from __future__ import annotations

import tomllib

import pytest

from onnxtrain import SGD, Adam, AdamW, Momentum
from onnxtrain.cli.training_flags import OptimizerSettings, PruningOptimizer
from onnxtrain.errors import OptionError

EXPORT = ("export", "model.onnx", "--loss", "softmax_cross_entropy", "--training-model", "training.onnx")
WAYS = {
    "text": (("--optimizer", "adamw(lr=0.25, betas=(0.5, 0.75), eps=0.125)"), ""),
    "other names": (("--optimizer", "adamw(learning_rate=0.25, alpha=0.5, beta=0.75, epsilon=0.125)"), ""),
    "flags": (("--optimizer", "adamw", "--lr", "0.25", "--betas", "0.5,0.75", "--eps", "0.125"), ""),
    "ONNX's flags": (
        ("--optimizer", "adamw", "--learning-rate", "0.25", "--alpha", "0.5", "--beta", "0.75", "--epsilon", "0.125"),
        "",
    ),
    "text and flags": (("--optimizer", "adamw(0.25)", "--betas", "0.5,0.75", "--eps", "0.125"), ""),
    "a file": ((), 'optimizer = "adamw"\nlr = 0.25\nbetas = [0.5, 0.75]\neps = 0.125\n'),
    "text in a file": ((), 'optimizer = "adamw(lr=0.25, betas=(0.5, 0.75), eps=0.125)"\n'),
    "a file and flags": (("--betas", "0.5,0.75"), 'optimizer = "adamw(0.25)"\nepsilon = 0.125\n'),
}


def test_names_are_the_same_everywhere(files, success):
    written = []
    for flags, text in WAYS.values():
        (files / "run.toml").write_text(text)
        success(*EXPORT, *flags, *(("--config", "run.toml") if text else ()))
        written.append((files / "training.onnx").read_bytes())
    assert len({*written}) == 1


@pytest.mark.parametrize(
    ("given", "optimizer"),
    [
        ({"optimizer": "adam", "betas": (0.5, 0.25), "weight_decay": 0.1}, Adam(betas=(0.5, 0.25), weight_decay=0.1)),
        ({"optimizer": "sgd", "momentum": 0.5, "nesterov": True}, SGD(momentum=0.5, nesterov=True)),
        ({"optimizer": "momentum(nesterov=true)", "dampening": 0.25}, Momentum(mode="nesterov", beta=0.75)),
        ({"optimizer": "AdamW(3e-4)"}, AdamW(3e-4)),
    ],
)
def test_build(given, optimizer):
    settings = OptimizerSettings(**given)
    assert settings.build() == optimizer
    assert OptimizerSettings(**settings.resolved()).build() == optimizer


def test_pruning_keeps_its_defaults():
    from onnxtrain.plugins.pruning.recipe import DEFAULT_OPTIMIZER

    built = PruningOptimizer(optimizer="ssgd(momentum=0.25)").build(DEFAULT_OPTIMIZER)
    assert (built.alpha, built.max_scale, built.learning_rate) == (
        0.25,
        DEFAULT_OPTIMIZER.max_scale,
        DEFAULT_OPTIMIZER.learning_rate,
    )
    assert PruningOptimizer(optimizer="adam").build(DEFAULT_OPTIMIZER) == Adam()


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"optimizer": "adam(eps=0.1)", "eps": 0.1}, r"--eps is given twice, by the flag and in 'adam\(eps=0.1\)'"),
        ({"optimizer": "adam", "eps": 0.1, "epsilon": 0.1}, "Adam: epsilon is given twice, by eps and by epsilon"),
        ({"optimizer": "sgd", "eps": 0.1}, "--eps is 0.1, but sgd has no such setting; it has --learning-rate"),
    ],
)
def test_refusals(given, sentence):
    with pytest.raises(OptionError, match=sentence):
        OptimizerSettings(**given).build()


def test_a_pair_needs_two_numbers(files, run):
    assert "--betas: 'half' is not a pair of numbers such as 0.9,0.999" in run(*EXPORT, "--betas", "half").err
    assert "betas is (0.5,), but must be a pair of numbers" in run(*EXPORT, "--betas", "0.5").err


def test_a_run_resolves_the_text(files, success):
    training = ("--data", "train.npz", "--loss", "softmax_cross_entropy")
    success("fit", "model.onnx", *training, "--optimizer", "adam(lr=0.25, eps=0.5)", "--run", "a", "--quiet")
    settings = tomllib.loads((files / "a" / "config.toml").read_text())
    assert (settings["optimizer"], settings["learning_rate"], settings["epsilon"]) == ("adam", 0.25, 0.5)
    assert "eps" not in settings
