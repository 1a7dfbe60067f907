"""Signatures and docstrings have the options, which the fields of three classes hold."""

import dataclasses
import inspect
import re

import pytest

import onnxtrain
import option_docs
from onnxtrain.cli.flags import LOSS_HELP
from onnxtrain.losses import LOSSES
from onnxtrain.plugins.pruning.options import PruneOptions
from onnxtrain.training.config import ADVANCED, TrainingConfig
from onnxtrain.training.fit_options import FitOptions


@pytest.mark.parametrize("path", option_docs.WRITTEN, ids=lambda path: path.stem)
def test_signatures_and_docstrings_are_up_to_date(path):
    assert option_docs.written(path) == path.read_text(), "run python tools/option_docs.py"


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (onnxtrain.Trainer, ("model", "loss", "optimizer", *ADVANCED)),
        (onnxtrain.Trainer.fit, FitOptions.__dataclass_fields__),
        (onnxtrain.prune, PruneOptions.__dataclass_fields__),
    ],
    ids=["Trainer", "fit", "prune"],
)
def test_help_teaches_every_option(function, names):
    text = inspect.getdoc(function)
    for name in names:
        assert re.search(rf"^    {name}: (?!None)\S.*", text, re.MULTILINE), name


@pytest.mark.parametrize(
    ("function", "options"), [(onnxtrain.Trainer.fit, FitOptions), (onnxtrain.prune, PruneOptions)]
)
def test_defaults_are_those_of_the_options(function, options):
    given = inspect.signature(function).parameters
    fields = dataclasses.fields(options)
    assert {field.name: given[field.name].default for field in fields} == {f.name: f.default for f in fields}
    assert {name for name in given if given[name].kind is inspect.Parameter.KEYWORD_ONLY} - {"loss"} == {
        field.name for field in fields
    }


@pytest.mark.parametrize("options", [TrainingConfig, FitOptions, PruneOptions])
def test_every_option_is_documented(options):
    for field in dataclasses.fields(options):
        if field.metadata:
            assert field.metadata["doc"].endswith("."), field.name
            assert field.metadata["flag"] is None or field.metadata["flag"].help.rstrip("]").strip(), field.name


@pytest.mark.parametrize("options", [FitOptions, PruneOptions])
def test_options_are_frozen(options):
    with pytest.raises(dataclasses.FrozenInstanceError):
        options().epochs = 3


def test_the_help_of_the_command_line_names_every_loss():
    assert set(re.findall(r"\w+", LOSS_HELP)) >= LOSSES.keys()
