"""The docstring of Trainer has the documentation of the options, which the fields of the configuration hold."""

import inspect
import re

import onnxtrain
import option_docs
from onnxtrain.cli.flags import LOSS_HELP
from onnxtrain.losses import LOSSES


def test_the_docstring_is_up_to_date():
    text = option_docs.FILE.read_text()
    assert option_docs.written(text) == text, "run python tools/option_docs.py"


def test_help_teaches_every_option():
    text = inspect.getdoc(onnxtrain.Trainer)
    for name in ("model", "loss", "optimizer", *option_docs.ADVANCED):
        assert f"    {name}: " in text
    assert "    None" not in option_docs.arguments()


def test_the_help_of_the_command_line_names_every_loss():
    assert set(re.findall(r"\w+", LOSS_HELP)) >= LOSSES.keys()
