"""Ctrl-C at any moment of a command: exit code 130, and a sentence that says what was written."""

from __future__ import annotations

import _thread
import atexit
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any, NoReturn

CODE = 130
"""Exit status of a process that Ctrl-C ended, by the convention of shells."""


def interrupted(error: BaseException | None) -> bool:
    """Return whether Ctrl-C caused an error: C modules turn one during their import into an ImportError."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__cause__ or error.__context__
    return False


def sentence(error: BaseException) -> str:
    """Return the message after Ctrl-C: the error's own, else the list of files that were written."""
    if isinstance(error, KeyboardInterrupt) and str(error):
        return str(error)
    writing = sys.modules.get("onnxtrain.model_file.writing")
    found = [] if writing is None else [repr(str(path)) for path in writing.written()]
    if not found:
        return "Interrupted; nothing was written."
    return f"Interrupted; written and whole: {', '.join(found[:5])}{', ...' if len(found) > 5 else ''}."


@contextlib.contextmanager
def listening(*, whole_process: bool) -> Iterator[None]:
    """Let Ctrl-C interrupt the command, also where Python could not raise it (in a finalizer).

    Args:
        whole_process: Whether the process ends after the command: then Ctrl-C is ignored afterwards, since everything
            is done and said.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    from onnxtrain.start import end_early

    if signal.getsignal(signal.SIGINT) is end_early:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    hook = sys.unraisablehook

    def again(unraisable: Any) -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            _thread.interrupt_main()
        else:
            hook(unraisable)

    sys.unraisablehook = again
    try:
        yield
    finally:
        sys.unraisablehook = hook
        if whole_process and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_IGN)


def end_process(code: int) -> NoReturn:
    """End the process with this code.

    Where Ctrl-C came inside code that C runs, Python would end itself by the signal at its exit, whatever was caught.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # broken, closed, none
            stream.flush()
    os._exit(code)


def say_interrupted(error: BaseException) -> int:
    """Say the sentence where nothing else of the command works any more; returns the exit code."""
    text = f"error: {' '.join(sentence(error).split())}\n"
    with contextlib.suppress(OSError, ValueError, AttributeError):  # broken, closed, none
        if sys.stderr is None:
            os.write(2, text.encode(errors="backslashreplace"))
        else:
            sys.stderr.write(text)
            sys.stderr.flush()
    return CODE
