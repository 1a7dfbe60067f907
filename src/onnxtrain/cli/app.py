"""The application ``onnxtrain``: its commands, and one sentence for every error."""

from __future__ import annotations

import errno
import itertools
import re
import sys
import traceback
from collections.abc import Sequence

from cyclopts import App, CycloptsError
from rich.text import Text

import onnxtrain
from onnxtrain.cli.commands import COMMANDS
from onnxtrain.cli.configuration import TOKENS, with_file
from onnxtrain.cli.distributed import LOST, after_error, one_voice
from onnxtrain.cli.help import FLAGS, choose_page
from onnxtrain.cli.messages import in_flags, notices, usage
from onnxtrain.cli.process import INTERRUPTED, interrupted, interruption_sentence, quiet_streams
from onnxtrain.cli.terminal import console
from onnxtrain.errors import OnnxTrainError, OptionError, ParallelError
from onnxtrain.errors.escaping import visible
from onnxtrain.model_file.writing import forget_written

_HELP = "Train, fine-tune, prune and inspect ONNX models on stock ONNX Runtime."

_EXAMPLES = """\
The flags of a command: onnxtrain fit --help

    onnxtrain demo
    onnxtrain inspect model.onnx
    onnxtrain fit model.onnx --data train.npz --loss softmax_cross_entropy --epochs 5
"""

FAILURE, MISUSE = 1, 2
"""Exit codes: a result that was not reached, or a defect; bad input."""


def build(tokens: Sequence[str] = ()) -> App:
    """Return the application with all its commands; the tokens choose the page of help."""
    app = App(
        name="onnxtrain",
        help=_HELP,
        version=onnxtrain.__version__,
        help_format="plaintext",
        help_epilogue=_EXAMPLES,
        result_action="return_value",
        suppress_keyboard_interrupt=False,
    )
    for name, module in COMMANDS.items():
        app.command(module.command, name=name, help=module.HELP, help_flags=FLAGS)
    command = next((token for token in tokens if token in COMMANDS), None)
    if command is not None and not {*FLAGS}.isdisjoint(tokens):
        choose_page(app[command], command, COMMANDS[command], tokens)
    return app


def run(tokens: Sequence[str]) -> int:
    """Run a command and return the exit code."""
    with one_voice(tokens), quiet_streams() as output:
        with notices(everything="--debug" in tokens):
            code = _attempt(tokens)
        lost = output.lost()
        if lost is not None and code == 0:
            _say(f"What was printed is incomplete, since the standard output could not be written: {lost}.")
            return MISUSE
    return code


def _attempt(tokens: Sequence[str]) -> int:
    try:
        forget_written()
        _check_not_empty(tokens)
        TOKENS.set(tokens)
        app, tokens = with_file(build(tokens), tokens)
        result = app(tokens, exit_on_error=False, print_error=False)
        return result if isinstance(result, int) else 0
    except (Exception, KeyboardInterrupt) as error:
        if "--debug" in tokens:
            sys.stderr.write(visible(traceback.format_exc()))
        code = _fail(error)
        after_error(tokens, error)
        return code


def _check_not_empty(tokens: Sequence[str]) -> None:
    """Raise OptionError for an empty argument: as a path it would be the current folder."""
    for before, token in itertools.pairwise(["onnxtrain", *tokens]):
        flag, _, value = token.partition("=")
        if not value and flag != token and flag.startswith("--"):
            what = flag
        elif not token:
            what = before if before.startswith("-") else f"The argument after {before!r}"
        else:
            continue
        raise OptionError(f"{what} is empty; give it a value, or leave it out.")


def _fail(error: BaseException) -> int:
    """Print the sentence of an error; returns the exit code."""
    if interrupted(error):
        code, sentence = INTERRUPTED, interruption_sentence(error)
    elif isinstance(error, ParallelError) and error.lost:
        code, sentence = LOST, in_flags(str(error))
    elif isinstance(error, OnnxTrainError):
        code, sentence = MISUSE, in_flags(str(error))
    elif isinstance(error, CycloptsError):
        code, sentence = MISUSE, usage(error)
    elif isinstance(error, OSError):
        code, sentence = MISUSE, _system_error(error)
    elif isinstance(error, MemoryError) or (isinstance(error, ImportError) and _NO_MEMORY.search(str(error))):
        code, sentence = MISUSE, _MEMORY
    elif isinstance(error, ImportError) and _UNLOADABLE.search(str(error)):
        code, sentence = MISUSE, f"A library cannot be loaded ({error}); install it again."
    else:
        reason = f"{type(error).__name__}: {error}"
        code = FAILURE
        sentence = f"This is a defect of onnxtrain ({reason}); --debug shows where, please report it."
    _say(sentence)
    return code


def _say(sentence: str) -> None:
    console(stderr=True).print(Text("error:", style="bold red"), " ".join(sentence.split()), soft_wrap=True)


_NO_MEMORY = re.compile("allocate memory|map segment|out of memory", re.IGNORECASE)
_UNLOADABLE = re.compile(r"\.so\b|\.dylib|DLL load")
"""Messages about a library that the system does not load."""

_MEMORY = (
    "There is not enough memory for this; take smaller batches (--batch-size), train fewer weights (--train), or raise "
    "the limit of the process (ulimit -v)."
)

_ADVICE = {
    errno.ENOSPC: "make room on the disk",
    errno.EDQUOT: "make room on the disk, or ask for more",
    errno.EFBIG: "raise the limit for the size of a file (ulimit -f)",
    errno.EMFILE: "raise the limit for open files (ulimit -n)",
    errno.ENFILE: "close other programs, or raise the system's limit for open files",
    errno.ENOMEM: "take smaller batches (--batch-size), or raise the limit of the process (ulimit -v)",
    errno.EAGAIN: "raise the limit for threads and processes (ulimit -u), or give --threads",
}


def _system_error(error: OSError) -> str:
    reason = error.strerror or str(error) or type(error).__name__
    if error.filename:
        return f"{str(error.filename)!r}: {reason}."
    advice = _ADVICE.get(error.errno or 0)
    return f"The system refused to read or write: {reason}; {advice + ', ' if advice else ''}--debug shows where."
