"""A process of its own for untrusted files that contain rules or programs, with limits of time and memory."""

from __future__ import annotations

import contextlib
import json
import os
import select
import struct
import subprocess
import sys
import time
import weakref
from pathlib import Path
from typing import Any, Final

from onnxtrain.errors import DataError

_ANSWER: Final = 64 << 20
_ANSWER_PER_CHARACTER: Final = 128
"""Bytes of the longest answer, and more for each character of the request; a token has 16."""

_WORKER: Final = Path(__file__).with_name("limited_worker.py")


class LimitedProcess:
    """A script that answers requests in a process with limited memory and with a time limit per request."""

    def __init__(self, script: Path, settings: Any, *, memory: int, seconds: float, speed: int) -> None:
        self._memory, self._limit, self._speed = memory, seconds, speed
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_WORKER), str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"MALLOC_ARENA_MAX": "4"},
            start_new_session=True,  # Ctrl-C goes to this process only, which ends the other
        )
        weakref.finalize(self, _end, self._process)
        # The settings are what is not trusted: their size gives no time.
        self.ready: Any = self.ask({"memory": memory, "settings": settings}, int(seconds * speed))[0]

    def ask(self, request: Any, size: int | None = None) -> tuple[Any, bytes]:
        """Send a request; return the answer and the bytes that follow it."""
        assert self._process.stdin is not None
        data = json.dumps(request).encode()
        size = len(data) if size is None else size
        self._seconds = self._limit + size / self._speed
        self._deadline = time.monotonic() + self._seconds
        try:
            self._process.stdin.write(struct.pack("<Q", len(data)) + data)
            self._process.stdin.flush()
        except OSError as error:
            raise DataError(self._end_of_process()) from error
        length, following = struct.unpack("<QQ", self._read(16))
        if length + following > _ANSWER + _ANSWER_PER_CHARACTER * size:
            _end(self._process)
            raise DataError(f"its answer has {(length + following) >> 20:,} MiB, too many for {size:,} characters.")
        answer = json.loads(self._read(length))
        if "error" in answer:
            raise DataError(f"{' '.join(str(answer['error']).split())[:200]}.")
        return answer["answer"], self._read(following)

    def _read(self, size: int) -> bytes:
        assert self._process.stdout is not None
        descriptor, parts = self._process.stdout.fileno(), bytearray()
        while len(parts) < size:
            left = self._deadline - time.monotonic()
            if hasattr(select, "poll") and left > 0:
                poll = select.poll()
                poll.register(descriptor, select.POLLIN | select.POLLHUP)
                ready = bool(poll.poll(left * 1000))
            else:
                ready = left > 0
            if not ready:
                _end(self._process)
                raise DataError(f"it takes longer than {self._seconds:.0f} s, the time limit for these texts.")
            chunk = os.read(descriptor, min(size - len(parts), 1 << 20))
            if not chunk:
                raise DataError(self._end_of_process())
            parts += chunk
        return bytes(parts)

    def _end_of_process(self) -> str:
        code = self._process.wait()
        end = f"signal {-code}" if code < 0 else f"exit code {code}"
        return f"its process ended ({end}): it crashed, or exceeded its memory limit of {self._memory / 2**30:.1f} GiB."


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()
