"""Run random calls of the native kernels in separate processes, and report their outcomes.

    python tests/reliability/fuzz_kernels.py [--count 2000] [--seed 0] [--sets baseline avx2 avx512]

A call may return the results of a NumPy reference, or be refused in a sentence that names the operator. If a call
crashes, exceeds its time limit, returns other results or fails in another way, the script exits with 1.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import resource
import selectors
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_HELPERS = str(ROOT / "tests" / "native")

INSTRUCTION_SETS = ("baseline", "avx2", "avx512")
OUTCOMES = ("computed", "agrees", "refused", "wrong", "failed", "hangs", "crashed")
FINE = OUTCOMES[:3]
SECONDS = 20
"""For one case."""

START = 100
"""Seconds for a worker to begin."""

MEMORY = 6 << 30
"""Address space of a worker: larger allocations fail instead of exhausting the machine."""


def cases() -> ModuleType:
    """Return the module that samples cases of a kind."""
    if _HELPERS not in sys.path:
        sys.path.insert(0, _HELPERS)
    return importlib.import_module("kernel_cases")


class Outcomes:
    """Outcomes of cases by operator, and the unexpected ones."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        self.faults: list[str] = []

    def add(self, instruction_set: str, operator: str, outcome: str, detail: str) -> None:
        self.counts[operator, outcome] += 1
        if outcome not in FINE:
            self.faults.append(f"{instruction_set}: {detail}")

    def table(self) -> str:
        operators = sorted({operator for operator, _ in self.counts})
        lines = [f"{'operator':<30}" + "".join(f"{outcome:>10}" for outcome in OUTCOMES)]
        lines += [
            f"{operator:<30}" + "".join(f"{self.counts[operator, outcome]:>10}" for outcome in OUTCOMES)
            for operator in operators
        ]
        total = (sum(self.counts[operator, outcome] for operator in operators) for outcome in OUTCOMES)
        return "\n".join([*lines, f"{'all':<30}" + "".join(f"{count:>10}" for count in total)])


def run_cases(name: str, count: int, seed: int, instruction_set: str, outcomes: Outcomes) -> None:
    """Run the first cases of a kind, ``random`` or ``sweep``; after a crash, a new process continues."""
    first = 0
    while first < count:
        started = first
        for number, operator, outcome, detail in _worker(name, first, count, seed, instruction_set):
            outcomes.add(
                instruction_set, operator, outcome, f"{name} case {number} of seed {seed}, {operator}: {detail}"
            )
            first = number + 1
        if first == started:
            raise RuntimeError(f"The worker does not start; run {' '.join(_command(name, first, count, seed))}.")


def _command(name: str, first: int, count: int, seed: int) -> list[str]:
    return [sys.executable, str(Path(__file__)), "--worker", name, str(first), str(count), str(seed)]


def _worker(name: str, first: int, count: int, seed: int, chosen: str) -> Iterator[tuple[int, str, str, str]]:
    """Yield case number, operator, outcome and detail of every case that the process ran."""
    environment = {**os.environ, "ONNXTRAIN_INSTRUCTION_SET": chosen, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        _command(name, first, count, seed),
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if "libasan" not in os.environ.get("LD_PRELOAD", "") else None,
    ) as process:
        assert process.stdout is not None
        running: tuple[int, str] | None = None
        for line in _lines(process):
            words = line.split(" ", 3)
            if line == "\n":
                process.kill()
                if running is not None:
                    yield *running, "hangs", f"nothing for {SECONDS} s"
                return
            if words[0] == "case":
                running = int(words[1]), words[2].strip()
            elif words[0] == "outcome" and running is not None:
                yield *running, words[1].strip(), " ".join(words[2:]).strip()
                running = None
        status = process.wait()
        if running is not None:
            error = (process.stderr.read().decode(errors="replace") if process.stderr else "")[-2000:]
            yield *running, "crashed", f"exit status {status} {error}"


def _lines(process: subprocess.Popen[bytes]) -> Iterator[str]:
    """Yield the lines of a process's output; an empty one if none comes within the time limit."""
    assert process.stdout is not None
    rest = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        seconds = START
        while True:
            if not selector.select(seconds):
                yield "\n"
                return
            data = os.read(process.stdout.fileno(), 65536)
            if not data:
                return
            seconds = SECONDS
            *lines, rest = (rest + data).split(b"\n")
            yield from (line.decode() for line in lines)


def work(name: str, first: int, count: int, seed: int) -> None:
    """Run cases in this worker process; write a line before and after each."""
    if "libasan" not in os.environ.get("LD_PRELOAD", ""):
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    swept = cases().sweep() if name == "sweep" else []
    for number in range(first, count):
        case = swept[number] if swept else cases().draw_case(seed, number)
        print("case", number, case.operator, flush=True)
        outcome, detail = _run(case)
        print("outcome", outcome, re.sub(r"\s+", " ", detail)[:1500], flush=True)


def _run(case: Any) -> tuple[str, str]:
    import numpy as np
    import onnxruntime
    from kernel_session import run

    given = {name: None if a is None else (a.dtype.name, a.shape) for name, a in case.feeds.items()}
    what = f"{given} {case.attributes}"
    state = onnxruntime.capi.onnxruntime_pybind11_state
    refusals = (state.Fail, state.InvalidArgument, state.InvalidGraph, state.RuntimeException, state.NotImplemented)
    try:
        found = run(case)
    except refusals as error:
        return ("refused", "") if case.operator in str(error) else ("failed", f"{what}: {error}")
    except Exception as error:
        return "failed", f"{what}: {type(error).__name__}: {error}"
    if case.expected is None:
        return "computed", ""
    with np.errstate(all="ignore"):
        wanted = case.expected()
    for index, (a, b) in enumerate(zip(found, wanted, strict=True)):
        limit = (1e-4 if a.dtype == np.float32 else 1e-11) * max(1.0, float(np.nanmax(np.abs(b), initial=0.0)))
        if a.shape != b.shape or not np.allclose(a, b, rtol=0, atol=limit, equal_nan=True):
            return "wrong", f"output {index} of {what}: {a.ravel()[:8]} instead of {b.ravel()[:8]}"
    return "agrees", ""


def available_sets() -> list[str]:
    """The instruction sets that the library and this machine have."""
    code = "from onnxtrain.runtime.native import instruction_set; print(instruction_set())"
    found = []
    for name in INSTRUCTION_SETS:
        environment = {**os.environ, "ONNXTRAIN_INSTRUCTION_SET": name}
        result = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code], env=environment, capture_output=True, check=False
        )
        if result.stdout.strip() == name.encode():
            found.append(name)
    return found


def main() -> int:
    """Parse the arguments, run, print the table and the faults."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=2000, help="random cases per instruction set")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sets", nargs="*", choices=INSTRUCTION_SETS, default=None)
    arguments = parser.parse_args()
    outcomes = Outcomes()
    for instruction_set in arguments.sets or available_sets():
        run_cases("sweep", len(cases().sweep()), 0, instruction_set, outcomes)
        run_cases("random", arguments.count, arguments.seed, instruction_set, outcomes)
    print(outcomes.table())
    print(*outcomes.faults, sep="\n")
    return 1 if outcomes.faults else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(sys.argv[2], *map(int, sys.argv[3:6]))
    else:
        sys.exit(main())
