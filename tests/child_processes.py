"""Child processes that do not outlive a test that fails."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def child_process(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """Start a process; on an error, kill it with its descendants instead of waiting for its end."""
    with subprocess.Popen(command, **options) as process:
        try:
            yield process
        except BaseException:
            for pid in [process.pid, *descendants(process.pid)]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            raise


def descendants(pid: int) -> list[int]:
    """Return the processes below a process, parents first; none where there is no ``/proc``."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            parents[int(entry.parent.name)] = int(entry.read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for parent in found:
        found += [child for child, above in parents.items() if above == parent]
    return found[1:]
