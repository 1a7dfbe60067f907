"""The command line: arguments in, tables and files out; the work is done by the library."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from onnxtrain.cli.interruption import CODE, end_process, interrupted, listening, say_interrupted

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: What follows ``onnxtrain``; by default what the process was given.

    Returns:
        The exit code: 0; 1 where a result was not reached; 2 for bad input; 130 after Ctrl-C.
    """
    # What runs a command is imported here, where Ctrl-C meanwhile is caught: it takes most of the time until a command
    # begins.
    with listening(whole_process=arguments is None):
        code = _run(arguments)
    if arguments is None and code == CODE:
        end_process(code)
    return code


def _run(arguments: Sequence[str] | None) -> int:
    try:
        from onnxtrain.cli.streams import occupy_standard_descriptors

        occupy_standard_descriptors()
        from onnxtrain.cli.app import run

        return run(list(sys.argv[1:] if arguments is None else arguments))
    except BaseException as error:
        if not interrupted(error):
            raise
        return say_interrupted(error)
