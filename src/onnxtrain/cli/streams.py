"""The standard output and the standard error while a command runs: streams that take whatever is printed.

What a command does must not depend on who reads it. A stream whose reader has gone (``| head``), whose terminal hung up
or that was closed from the start (``>&-``) goes quiet. One that cannot take more for another reason, a full disk for
one, goes quiet too, and the command says so at its end. Characters that the encoding lacks are written as escapes.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar, cast

P = ParamSpec("P")
R = TypeVar("R")

_NOBODY_READS = (errno.EPIPE, errno.EIO, errno.EBADF, errno.ECONNRESET)
"""The reader went away: a pipe, a terminal, a descriptor that was closed, a socket."""


class QuietStream:
    """A text stream that remembers the first failure of the one below, and drops what is written after it.

    Args:
        below: The stream that is written to; ``None`` where the process was started without one.

    Attributes:
        failure: Why not everything was written, ``None`` as long as everything was.
    """

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
        """Write, or drop it; returns the number of characters taken, which is all."""
        if self._below is not None and self.failure is None:
            try:
                self._write(text)
            except BlockingIOError:  # a pipe that is full for the moment
                pass
            except (OSError, ValueError) as error:  # ValueError: it was closed by somebody
                self.failure = error
        return len(text)

    def _write(self, text: str) -> None:
        try:
            self._below.write(text)
        except UnicodeEncodeError:
            encoding = self.encoding
            self._below.write(text.encode(encoding, "backslashreplace").decode(encoding))

    def flush(self) -> None:
        """Hand on what was written, or drop it."""
        if self._below is not None and self.failure is None:
            try:
                self._below.flush()
            except BlockingIOError:
                pass
            except (OSError, ValueError) as error:
                self.failure = error

    def lost(self) -> str | None:
        """Why somebody who reads did not get everything; ``None`` where nobody did or nothing is missing."""
        self.flush()
        if not isinstance(self.failure, OSError) or self.failure.errno in _NOBODY_READS:
            return None
        return self.failure.strerror or str(self.failure)

    def discard(self) -> None:
        """Drop what a stream that failed still holds, so that Python does not fail to write it at exit."""
        if self.failure is None:
            return
        with contextlib.suppress(OSError, ValueError, AttributeError):
            descriptor = self._below.fileno()
            kept = _duplicate(descriptor)
            _point_at_null(descriptor)
            self._below.flush()
            if kept is not None:
                os.dup2(kept, descriptor)
                os.close(kept)


@contextlib.contextmanager
def quiet_streams() -> Iterator[QuietStream]:
    """Let ``sys.stdout`` and ``sys.stderr`` be quiet streams meanwhile; gives the first."""
    out, errors = QuietStream(sys.stdout), QuietStream(sys.stderr)
    # redirect_stdout takes what has a `write`; its types ask for a whole file.
    with contextlib.redirect_stdout(cast(Any, out)), contextlib.redirect_stderr(cast(Any, errors)):
        try:
            yield out
        finally:
            for stream in (out, errors):
                stream.flush()
                stream.discard()


@contextlib.contextmanager
def unattended() -> Iterator[None]:
    """Let a command go on when the terminal that started it is closed; also a decorator.

    A closed terminal says so by the signal SIGHUP, which ends a process that does not ignore it.
    """
    hangup = getattr(signal, "SIGHUP", None)
    before = None
    if hangup is not None:
        with contextlib.suppress(ValueError):  # not in the main thread: signals are somebody else's
            before = signal.signal(hangup, signal.SIG_IGN)
    try:
        yield
    finally:
        if hangup is not None and before is not None:
            signal.signal(hangup, before)


def quiet_on_request(command: Callable[P, R]) -> Callable[P, R]:
    """Let a command print nothing where it is called with ``quiet=True``; errors are raised through it.

    With ``json_output=True`` the standard output stays open for the JSON.
    """

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
    """Open the null device on those of the first three descriptors that are closed.

    Otherwise the next file that is opened gets such a number: a library that prints to the standard error would write
    into somebody's model.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            with contextlib.suppress(OSError):
                _point_at_null(descriptor)


def _duplicate(descriptor: int) -> int | None:
    try:
        return os.dup(descriptor)
    except OSError:
        return None


def _point_at_null(descriptor: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    if null != descriptor:
        os.dup2(null, descriptor)
        os.close(null)
