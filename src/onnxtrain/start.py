"""Ctrl-C while the command line is still being imported: a sentence and exit code 130 instead of a traceback."""

# Built-in modules only: Ctrl-C is not caught yet while others run, such as the library's ``signal``.
import _signal as signal  # type: ignore[import-not-found]  # typeshed has none
import os
import sys

_COMMANDS = ("onnxtrain", "onnxtrain.exe", "onnxtrain-script.py")


def end_early(number: int, frame: object) -> None:
    """End the process: nothing of the command has begun."""
    try:
        os.write(2, b"error: Interrupted; nothing was written.\n")
    finally:
        os._exit(130)


def catch_early_interrupt() -> None:
    """Handle Ctrl-C until the command begins, in a process that was started as ``onnxtrain``; elsewhere do nothing."""
    arguments = getattr(sys, "argv", None) or [""]
    given = getattr(sys, "orig_argv", [])
    as_module = arguments[0] == "-m" and "-m" in given and given[given.index("-m") + 1 :][:1] == ["onnxtrain"]
    if not as_module and os.path.basename(arguments[0]) not in _COMMANDS:
        return
    try:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, end_early)
    except ValueError:  # not in the main thread
        pass
