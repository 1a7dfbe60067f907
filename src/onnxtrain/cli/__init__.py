"""The command line: arguments in, tables and files out; the library does the work."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from onnxtrain.cli.process import (
    INTERRUPTED,
    end_process,
    interrupted,
    listening,
    occupy_standard_descriptors,
    report_interruption,
)

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command."""
    # Importing the command takes most of its start-up time; inside `listening` Ctrl-C is caught meanwhile.
    with listening(whole_process=arguments is None):
        code = _run(arguments)
    if arguments is None and code == INTERRUPTED:
        end_process(code)
    return code


def _run(arguments: Sequence[str] | None) -> int:
    try:
        occupy_standard_descriptors()
        from onnxtrain.cli.app import run

        return run(list(sys.argv[1:] if arguments is None else arguments))
    except BaseException as error:
        if not interrupted(error):
            raise
        return report_interruption(error)
