"""Run the cases of a subject in worker processes, and keep the files that reproduce a failure."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reliability.outcome import Outcome
from reliability.plain import compare_with_plain, environment

COMPUTING_LIMIT = 30.0
"""Seconds of processor time that one operation may take."""

WAITING_LIMIT = 180.0
"""Seconds that one operation may take by the clock: machines of tests are busy, and who waits computes nothing."""

STARTING_LIMIT = 120.0

CASES_PER_WORKER = 5000
"""Then a fresh process goes on."""

_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Report:
    """Outcomes of many cases."""

    counts: Counter[str] = field(default_factory=Counter)
    failures: dict[str, list[tuple[int, Outcome]]] = field(default_factory=dict)
    seconds: float = 0.0

    def text(self) -> str:
        """Format the failures by cause: their number, a case, and the end of the traceback."""
        parts = []
        for cause, found in sorted(self.failures.items(), key=lambda item: -len(item[1])):
            tail = "\n".join(found[0][1].detail.strip().splitlines()[-6:])
            cases = ", ".join(str(index) for index, _ in found[:5])
            parts.append(f"{len(found)} x {cause}\n  cases {cases}\n{tail}")
        return "\n\n".join(parts)


def run_cases(
    subject: str,
    indices: Iterable[int],
    *,
    seed: int = 0,
    workers: int = 1,
    until: float | None = None,
    failures: Path | None = None,
    computing_limit: float = COMPUTING_LIMIT,
    stop: threading.Event | None = None,
) -> Report:
    """Run cases of a subject.

    Args:
        subject: Its name, see ``subjects``.
        indices: The numbers of the cases: a case is (seed, number).
        seed: Seeds all of them.
        workers: Processes at once.
        until: The moment (`time.monotonic`) after which no case begins.
        failures: A folder for the files of failed cases, three of each cause.
        computing_limit: CPU seconds that one operation may take.
        stop: Once it is set no case begins.
    """
    report, lock = Report(), threading.Lock()
    cases = iter(indices)
    began = time.monotonic()

    def take() -> int | None:
        with lock:
            ended = (until is not None and time.monotonic() > until) or (stop is not None and stop.is_set())
            return None if ended else next(cases, None)

    def work() -> None:
        with (
            tempfile.TemporaryDirectory(prefix="onnxtrain-reliability-") as folder,
            _Worker(subject, seed, Path(folder), computing_limit) as worker,
        ):
            while (index := take()) is not None:
                outcome = worker.run(index)
                with lock:
                    _record(report, subject, seed, index, outcome, Path(folder) / "case", failures)

    with ThreadPoolExecutor(workers) as pool:
        for working in [pool.submit(work) for _ in range(workers)]:
            working.result()
    report.seconds = time.monotonic() - began
    return report


def _record(
    report: Report, subject: str, seed: int, index: int, outcome: Outcome, case: Path, failures: Path | None
) -> None:
    report.counts[outcome.kind] += 1
    if not outcome.failed:
        return
    cause = f"{outcome.kind} in {outcome.operation}: {outcome.signature}"
    found = report.failures.setdefault(cause, [])
    found.append((index, outcome))
    if failures is not None and len(found) <= 3:
        kept = failures / f"{subject}-{seed}-{index}"
        with contextlib.suppress(OSError):
            shutil.copytree(case, kept, dirs_exist_ok=True, symlinks=True, ignore=_only_plain)
        kept.mkdir(parents=True, exist_ok=True)
        (kept / "outcome.txt").write_text(f"{cause}\n\n{outcome.detail}\n", errors="backslashreplace")


def _only_plain(folder: str, names: list[str]) -> set[str]:
    """Return the names of pipes, which a copy must ignore, since reading them would block."""
    return {name for name in names if not (Path(folder, name).is_file() or Path(folder, name).is_dir())}


class _Worker:
    """One worker process, restarted when it dies."""

    def __init__(self, subject: str, seed: int, folder: Path, computing_limit: float) -> None:
        self._subject, self._seed, self._folder = subject, seed, folder
        self._computing_limit = computing_limit
        self._process: subprocess.Popen[bytes] | None = None
        self._buffer = b""
        self._done = 0

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *error: object) -> None:
        self._stop()

    def run(self, index: int) -> Outcome:
        """Run one case."""
        if self._done >= CASES_PER_WORKER:
            self._stop()
        process = self._process or self._start()
        self._done += 1
        try:
            assert process.stdin is not None
            process.stdin.write(f"{index}\n".encode())
            process.stdin.flush()
        except OSError:
            pass  # it died between two cases: its end is found below
        operation = "making the case"
        try:
            for message in self._messages(process, WAITING_LIMIT):
                if "outcome" in message:
                    found = Outcome(**message["outcome"])
                    return compare_with_plain(found, self._folder / "case") if found.kind == "memory" else found
                operation = message["operation"]
        except TimeoutError:
            process.send_signal(signal.SIGABRT)  # faulthandler prints where it hangs
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
            self._stop()
            hang = Outcome("hang", operation, operation, self._errors())
            return compare_with_plain(hang, self._folder / "case")
        code = process.wait()
        self._stop()
        if code < 0 and operation == "comparison":  # in which plain onnxruntime runs, and nothing else
            return Outcome("runtime", operation, operation, self._errors())
        kind = "crash" if code < 0 else "defect"
        end = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        detail = self._errors()
        crash = Outcome(kind, operation, f"{end} {_innermost_frames(detail)}", detail)
        return compare_with_plain(crash, self._folder / "case") if code < 0 else crash

    def _start(self) -> subprocess.Popen[bytes]:
        (self._folder / "shared").mkdir(exist_ok=True)
        with open(self._folder / "errors", "wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "reliability.worker", self._subject, str(self._seed), str(self._folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment(),
                start_new_session=True,  # Ctrl-C is for the run, which finishes the case
            )
        self._buffer, self._done = b"", 0
        if not any("ready" in message for message in self._messages(self._process, STARTING_LIMIT, first=True)):
            raise RuntimeError(f"a worker for {self._subject} does not start: {self._errors()}")
        return self._process

    def _stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _errors(self) -> str:
        """Return the end of the worker's output: the stack of a crash."""
        with open(self._folder / "errors", "rb") as file:
            return file.read()[-6000:].decode(errors="backslashreplace")

    def _messages(
        self, process: subprocess.Popen[bytes], limit: float, *, first: bool = False
    ) -> Iterator[dict[str, Any]]:
        """Yield the worker's messages until it ends; raise TimeoutError if one operation takes too long."""
        assert process.stdout is not None
        began, computed = time.monotonic(), _computed(process.pid)
        while True:
            while b"\n" in self._buffer:
                line, self._buffer = self._buffer.split(b"\n", 1)
                began, computed = time.monotonic(), _computed(process.pid)
                yield json.loads(line)
                if first:
                    return
            ready, _, _ = select.select([process.stdout], [], [], 0.5)
            if ready:
                chunk = os.read(process.stdout.fileno(), 1 << 16)
                if not chunk:
                    return
                self._buffer += chunk
            elif time.monotonic() - began > limit or (
                not first and _computed(process.pid) - computed > self._computing_limit
            ):
                raise TimeoutError


def _computed(pid: int) -> float:
    """Return the CPU seconds of a process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _innermost_frames(stack: str) -> str:
    """Return the innermost frames of a stack that faulthandler printed."""
    lines = [
        line.split('"')[1].rsplit("/", 1)[-1] + line.rpartition(" in ")[2]
        for line in stack.splitlines()
        if line.startswith('  File "')
    ]
    return " < ".join(lines[:3])
