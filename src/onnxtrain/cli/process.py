"""The process of a command: Ctrl-C, closed terminals, and standard streams that accept whatever is printed.

A command must not depend on its reader. A stream goes quiet if its reader is gone (``| head``), its terminal hung up,
or it was closed from the start (``>&-``). A stream that fails for another reason, such as a full disk, goes quiet too,
and the command reports that at its end. Characters that the encoding lacks are written as escapes.

Ctrl-C ends a command at any moment with exit code 130 and a sentence that lists the written files.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import errno
import functools
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, ParamSpec, TypeVar, cast

P = ParamSpec("P")
R = TypeVar("R")

INTERRUPTED = 130
"""Exit status of a process that Ctrl-C ended, by the convention of shells."""

_NO_READER = (errno.EPIPE, errno.EIO, errno.EBADF, errno.ECONNRESET)
"""Errors of a stream without a reader: a closed pipe, terminal, descriptor or socket."""


def interrupted(error: BaseException | None) -> bool:
    """Return whether Ctrl-C caused an error: C modules turn one during their import into an ImportError."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__cause__ or error.__context__
    return False


def interruption_sentence(error: BaseException) -> str:
    """Return the message after Ctrl-C: the error's own, else the list of written files."""
    if isinstance(error, KeyboardInterrupt) and str(error):
        return str(error)
    writing = sys.modules.get("onnxtrain.model_file.writing")
    found = [] if writing is None else writing.written()
    if not found:
        return "Interrupted; nothing was written."
    return f"Interrupted; written and whole: {', '.join(_files_and_folders(found))}."


def _files_and_folders(paths: Sequence[Path]) -> list[str]:
    """Return the names of files in order; three and more files of one folder are counted: ``6 files in 'run'``."""
    inside = Counter(path.parent for path in paths)
    counted = [folder for folder, count in inside.items() if count >= 3 and folder != Path()]
    names = [repr(str(path)) for path in paths if path.parent not in counted]
    return names + [f"{inside[folder]} files in {str(folder)!r}" for folder in counted]


@contextlib.contextmanager
def listening(*, whole_process: bool) -> Iterator[None]:
    """Let Ctrl-C interrupt the command, also where Python cannot raise it (in a finalizer)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    from onnxtrain.errors.start import end_early, interrupt

    before = signal.getsignal(signal.SIGINT)
    ours = before in (end_early, signal.default_int_handler)
    if ours:
        signal.signal(signal.SIGINT, interrupt)
    hook = sys.unraisablehook

    def interrupt_again(unraisable: Any) -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            _thread.interrupt_main()
        else:
            hook(unraisable)

    sys.unraisablehook = interrupt_again
    try:
        yield
    finally:
        sys.unraisablehook = hook
        if ours:
            signal.signal(signal.SIGINT, signal.SIG_IGN if whole_process else before)


def end_process(code: int) -> NoReturn:
    """End the process with this code.

    If Ctrl-C arrived inside C code, Python would end itself by the signal at exit, even if the exception was caught.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # broken, closed, or absent
            stream.flush()
    os._exit(code)


def report_interruption(error: BaseException) -> int:
    """Write the message after Ctrl-C without using other parts of the command line; return the exit code."""
    text = f"error: {' '.join(interruption_sentence(error).split())}\n"
    with contextlib.suppress(OSError, ValueError, AttributeError):  # broken, closed, or absent
        if sys.stderr is None:
            os.write(2, text.encode(errors="backslashreplace"))
        else:
            sys.stderr.write(text)
            sys.stderr.flush()
    return INTERRUPTED


@contextlib.contextmanager
def unattended() -> Iterator[None]:
    """Let a command survive the closing of its terminal (SIGHUP); also a decorator."""
    hangup = getattr(signal, "SIGHUP", None)
    before = None
    if hangup is not None:
        with contextlib.suppress(ValueError):  # outside the main thread, signals belong to the caller
            before = signal.signal(hangup, signal.SIG_IGN)
    try:
        yield
    finally:
        if hangup is not None and before is not None:
            signal.signal(hangup, before)


class QuietStream:
    """Text stream that remembers the first failure of the stream below and drops all later output."""

    def __init__(self, below: Any) -> None:
        self._below = below
        self.failure: OSError | ValueError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._below, name)

    @property
    def encoding(self) -> str:
        """The encoding of the stream below."""
        return getattr(self._below, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        """Return whether the output is a terminal."""
        try:
            return self._below is not None and bool(self._below.isatty())
        except (OSError, ValueError):  # closed
            return False

    def write(self, text: str) -> int:
        """Write or drop the text; returns its length."""
        self._attempt(lambda: self._write(text))
        return len(text)

    def _write(self, text: str) -> None:
        try:
            self._below.write(text)
        except UnicodeEncodeError:
            encoding = self.encoding
            self._below.write(text.encode(encoding, "backslashreplace").decode(encoding))

    def flush(self) -> None:
        """Flush the stream below."""
        self._attempt(lambda: self._below.flush())

    def _attempt(self, action: Callable[[], object]) -> None:
        """Use the stream below until it has failed."""
        if self._below is not None and self.failure is None:
            try:
                action()
            except BlockingIOError:  # a full pipe
                pass
            except (OSError, ValueError) as error:  # ValueError: closed
                self.failure = error

    def lost(self) -> str | None:
        """Return why a reader misses output; ``None`` if there is no reader or nothing is missing."""
        self.flush()
        if not isinstance(self.failure, OSError) or self.failure.errno in _NO_READER:
            return None
        return self.failure.strerror or str(self.failure)

    def discard(self) -> None:
        """Drop the buffer of a failed stream: Python would fail to write it at exit."""
        if self.failure is None:
            return
        with contextlib.suppress(OSError, ValueError, AttributeError):
            descriptor, kept = self._below.fileno(), None
            with contextlib.suppress(OSError):
                kept = os.dup(descriptor)
            _point_at_null(descriptor)
            self._below.flush()
            if kept is not None:
                os.dup2(kept, descriptor)
                os.close(kept)


@contextlib.contextmanager
def quiet_streams() -> Iterator[QuietStream]:
    """Replace ``sys.stdout`` and ``sys.stderr`` by quiet streams for a while; yields the first."""
    out, errors = QuietStream(sys.stdout), QuietStream(sys.stderr)
    # redirect_stdout needs `write` only; its types ask for a whole file.
    with contextlib.redirect_stdout(cast(Any, out)), contextlib.redirect_stderr(cast(Any, errors)):
        try:
            yield out
        finally:
            for stream in (out, errors):
                stream.flush()
                stream.discard()


def quiet_on_request(command: Callable[P, R]) -> Callable[P, R]:
    """Let a command print nothing if it is called with ``quiet=True``; errors are raised as always."""

    @functools.wraps(command)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with contextlib.ExitStack() as stack:
            if kwargs.get("quiet"):
                null = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
                stack.enter_context(contextlib.redirect_stderr(null))
                if not kwargs.get("json_output"):
                    stack.enter_context(contextlib.redirect_stdout(null))
            return command(*args, **kwargs)

    return call


def occupy_standard_descriptors() -> None:
    """Open the null device on each of the first three descriptors that is closed.

    The next opened file would get that number, and a library that prints to the standard error would write into it.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            with contextlib.suppress(OSError):
                _point_at_null(descriptor)


def _point_at_null(descriptor: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    if null != descriptor:
        os.dup2(null, descriptor)
        os.close(null)
