"""Run peers side by side: one process each, alternating in rounds so that all meet the same conditions."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from peers import PEERS, Peer, Task

FOLDER = Path(__file__).resolve().parent
# Idle pool threads spin for a while after a step; the next peer waits until they sleep.
SETTLE_SECONDS = 0.05
BUSY_CORES = 0.1
# Relative tolerance of losses: before the first update they are the same sum; afterwards Adam has turned the sign of
# every gradient, rounding noise included, into a whole step. With batch normalization over few examples PyTorch in
# float32 differs from itself in float64 by 0.5 % at the third step.
FIRST_TOLERANCE = 1e-4
LATER_TOLERANCE = 2e-2
ROUNDED_TOLERANCE = 5e-2


class PeerError(Exception):
    """A peer failed to build or to run a step."""


def make_parser(
    description: str | None, quick: str, *, threads: int | None = None, models: bool = False
) -> argparse.ArgumentParser:
    """Return a parser of the options that most scripts have; ``quick`` is the help of --quick."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--output", help="also write the report to this Markdown file")
    if threads is not None:
        parser.add_argument("--threads", type=int, default=threads)
    if models:
        parser.add_argument("--folder", default="build/benchmarks/models", help="where exported models are kept")
    return parser


@dataclass(frozen=True)
class Interpreters:
    """The Python interpreter of each peer: this one, or that of the peer's own environment."""

    paths: Mapping[str, str] = field(default_factory=dict)

    def find(self, peer: str) -> str:
        """Return the path of an interpreter.

        Raises:
            PeerError: The peer's environment is missing.
        """
        name = PEERS[peer].interpreter
        if name == "own":
            return sys.executable
        path = self.paths.get(name)
        if path is None:
            raise PeerError(f"no environment: give --environment {name}=PATH_OF_ITS_PYTHON")
        return path


def environment(threads: int) -> dict[str, str]:
    """Environment variables of a worker: the thread count of every library with a pool."""
    counts = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads))
    return {**os.environ, **counts}


def prepare(tasks: Sequence[Task], interpreters: Interpreters) -> dict[str, str]:
    """Let every peer write its files; return the reasons of those that cannot take part."""
    missing: dict[str, str] = {}
    for task in tasks:
        try:
            python = interpreters.find(task.peer)
        except PeerError as error:
            missing[task.peer] = str(error)
            continue
        if PEERS[task.peer].prepare is Peer.prepare:
            continue  # nothing to write
        command = [python, str(FOLDER / "worker.py"), "prepare", task.to_json()]
        result = subprocess.run(
            command, env=environment(task.threads), capture_output=True, text=True, stdin=subprocess.DEVNULL
        )
        if result.returncode:
            missing[task.peer] = last_line(result.stderr)
    return missing


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "no message"


class Worker:
    """One peer's process."""

    def __init__(self, task: Task, interpreters: Interpreters) -> None:
        self.task = task
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by close()
        self._process = subprocess.Popen(
            [interpreters.find(task.peer), str(FOLDER / "worker.py"), "run", task.to_json()],
            env=environment(task.threads),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            bufsize=1,
        )
        self.pid = self._process.pid
        try:
            self.build_seconds: float = self._answer()["build"]
        except PeerError:
            self.close()
            raise

    def steps(self, count: int) -> dict[str, list[float]]:
        """Run steps; return ``seconds``, CPU seconds (``processor``) and ``losses`` of each."""
        return self._ask({"steps": count})

    def memory(self) -> dict[str, int]:
        """``peak`` and ``resident`` memory in bytes."""
        return self._ask({"memory": 1})

    def _ask(self, command: dict[str, int]) -> Any:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(command) + "\n")
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            self._errors.seek(0)
            raise PeerError(f"{last_line(self._errors.read())} (exit code {code})")
        return json.loads(line)

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._errors.close()


@dataclass
class Measurement:
    """Results of one peer at one task.

    Attributes:
        rounds: Median seconds per step, one for each round.
        losses: Losses of the first steps.
        build_seconds: From the start of Python to the first step.
        peak: Peak resident memory in bytes.
        problem: Why there are no results, or "".
    """

    rounds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    build_seconds: float = 0.0
    peak: int = 0
    problem: str = ""

    @property
    def seconds(self) -> float:
        """Seconds of a step: the median over rounds."""
        return statistics.median(self.rounds)

    def ratio_to(self, other: Measurement) -> float:
        """The median of the ratios of paired rounds."""
        return statistics.median(mine / theirs for mine, theirs in zip(self.rounds, other.rounds, strict=True))


def measure(
    tasks: Sequence[Task],
    interpreters: Interpreters,
    *,
    rounds: int,
    round_seconds: float,
    first_steps: int = 3,
    clock: str = "seconds",
) -> dict[str, Measurement]:
    """Measure peers at one task in turns; a failed peer has a ``problem`` instead of figures.

    ``clock`` is ``"seconds"``, or ``"processor"`` for processor time: a fair one only with one thread.
    """
    results = {task.peer: Measurement() for task in tasks}
    with contextlib.ExitStack() as stack:
        workers: dict[str, Worker] = {}
        counts: dict[str, int] = {}
        for task in tasks:
            result = results[task.peer]
            try:
                worker = Worker(task, interpreters)
                stack.callback(worker.close)
                result.build_seconds = worker.build_seconds
                result.losses = worker.steps(first_steps)["losses"]
                seconds = statistics.median(worker.steps(3)["seconds"])
                counts[task.peer] = max(1, min(1000, round(round_seconds / seconds)))
                workers[task.peer] = worker
            except PeerError as error:
                result.problem = str(error)
        order = list(workers)
        for _ in range(rounds):
            for peer in order:
                time.sleep(SETTLE_SECONDS)
                results[peer].rounds.append(statistics.median(workers[peer].steps(counts[peer])[clock]))
            order.reverse()  # vary the order
        for peer, worker in workers.items():
            results[peer].peak = worker.memory()["peak"]
    return results


def losses_differ(found: Measurement, reference: Measurement, *, rounded: bool = False) -> str:
    """Return a sentence if the first losses of two peers disagree, else "".

    Args:
        found: One of them.
        reference: The other.
        rounded: Whether one rounds operands to bfloat16.
    """
    for step, (mine, theirs) in enumerate(zip(found.losses, reference.losses, strict=True)):
        tolerance = ROUNDED_TOLERANCE if rounded else LATER_TOLERANCE if step else FIRST_TOLERANCE
        if not abs(mine - theirs) <= tolerance * abs(theirs):
            return f"the loss of step {step} is {mine:.6g}, the reference's {theirs:.6g}"
    return ""


class ForeignLoad:
    """Cores used by other programs: all CPU time except that of this process and its children."""

    def __enter__(self) -> ForeignLoad:
        self._begin = self._now()
        self.cores = 0.0
        return self

    def __exit__(self, *_: object) -> None:
        busy, own, clock = (end - begin for begin, end in zip(self._begin, self._now(), strict=True))
        self.cores = max(0.0, (busy - own) / clock) if clock > 0 else 0.0

    @staticmethod
    def _now() -> tuple[float, float, float]:
        times = os.times()
        own = times.user + times.system + times.children_user + times.children_system
        try:
            fields = [int(number) for number in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        except OSError:  # unknown outside Linux
            return own, own, time.monotonic()
        idle = fields[3] + fields[4]
        return (sum(fields) - idle) / os.sysconf("SC_CLK_TCK"), own, time.monotonic()


def load_line(foreign: ForeignLoad) -> str:
    """A report line: the load of other programs."""
    one, five, _ = os.getloadavg()
    line = (
        f"Load average at the end {one:.2f} (1 minute), {five:.2f} (5 minutes); other programs used "
        f"{foreign.cores:.2f} cores meanwhile."
    )
    if foreign.cores > BUSY_CORES:
        line += " **The machine was not quiet: take these figures as rough.**"
    return line


def warn_when_busy() -> None:
    """Warn about other running programs: one competing process slows OpenMP many times."""
    with ForeignLoad() as foreign:
        time.sleep(0.5)
    if foreign.cores > BUSY_CORES:
        print(
            f"warning: other programs use {foreign.cores:.1f} cores; only a quiet machine gives numbers.",
            file=sys.stderr,
        )


def machine_line() -> str:
    """A report line: CPU, system, versions."""
    processor = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), processor)
    versions = []
    for package in ("numpy", "onnx", "onnxruntime", "torch"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions.append(f"{package} {metadata.version(package)}")
    return (
        f"{processor}, {os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}, "
        f"{', '.join(versions)}; {time.strftime('%Y-%m-%d')}."
    )


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first column is text, the others are numbers."""
    cells = [list(header), *(list(row) for row in rows)]
    widths = [max(3, *(len(row[column]) for row in cells)) for column in range(len(header))]
    lines = []
    for row in cells:
        texts = [
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(f"| {' | '.join(texts)} |")
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    lines.insert(1, f"| {' | '.join(rule)} |")
    return "\n".join(lines)


def milliseconds(seconds: float) -> str:
    return significant(1e3 * seconds)


def significant(value: float) -> str:
    """Format with three significant digits: a short time is small, never zero."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def megabytes(size: float) -> str:
    return f"{size / 1e6:.0f}"


def write_report(text: str, output: str | None) -> None:
    """Print a report and optionally write it to a file."""
    print(text)
    if output is not None:
        path = Path(output)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
