"""The command ``onnxtrain``: its commands, and one sentence for everything that goes wrong."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Sequence

from cyclopts import App, CycloptsError
from rich.text import Text

import onnxtrain
from onnxtrain.cli import wording
from onnxtrain.cli.terminal import console
from onnxtrain.errors import OnnxTrainError

COMMANDS = ("fit", "prune", "evaluate", "predict", "inspect", "export", "demo")
"""Each is a module of this package with a function ``command`` and its ``EXAMPLES``."""

_HELP = "Train, fine-tune and look into ONNX models on stock ONNX Runtime."

_EXAMPLES = """\
What a command takes: onnxtrain fit --help

    onnxtrain demo
    onnxtrain inspect model.onnx
    onnxtrain fit model.onnx --data train.npz --loss softmax_cross_entropy --epochs 5
"""

FAILURE, MISUSE, INTERRUPTED = 1, 2, 130
"""Exit codes: a result that was not reached or a defect; bad input; Ctrl-C."""


def build() -> App:
    """The application with all its commands."""
    app = App(
        name="onnxtrain",
        help=_HELP,
        version=onnxtrain.__version__,
        help_format="plaintext",
        help_epilogue=_EXAMPLES,
        result_action="return_value",
        suppress_keyboard_interrupt=False,
    )
    for name in COMMANDS:
        module = importlib.import_module(f"onnxtrain.cli.{name}")
        app.command(module.command, name=name, help_epilogue=module.EXAMPLES)
    return app


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: What follows ``onnxtrain``; by default what the process was given.

    Returns:
        The exit code: 0; 1 where a result was not reached; 2 for bad input; 130 after Ctrl-C.
    """
    tokens = list(sys.argv[1:] if arguments is None else arguments)
    try:
        result = build()(tokens, exit_on_error=False, print_error=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except BrokenPipeError:  # the reader of our output has seen enough: onnxtrain inspect ... | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (Exception, KeyboardInterrupt) as error:
        if "--debug" in tokens:
            traceback.print_exc()
        return _fail(error)


def _fail(error: BaseException) -> int:
    """Say what went wrong; returns the exit code."""
    if isinstance(error, KeyboardInterrupt):
        code, sentence = INTERRUPTED, str(error) or "Interrupted."
    elif isinstance(error, OnnxTrainError):
        code, sentence = MISUSE, wording.in_flags(str(error))
    elif isinstance(error, CycloptsError):
        code, sentence = MISUSE, wording.usage(error)
    elif isinstance(error, OSError):
        code, sentence = MISUSE, _system_error(error)
    else:
        reason = f"{type(error).__name__}: {error}"
        code = FAILURE
        sentence = f"This is a defect of onnxtrain ({reason}); --debug shows where, please report it."
    errors = console(stderr=True)
    errors.print(Text("error:", style="bold red"), " ".join(sentence.split()), soft_wrap=True)
    return code


def _system_error(error: OSError) -> str:
    reason = error.strerror or str(error)
    return f"{str(error.filename)!r}: {reason}." if error.filename else f"{reason}."
