"""The process that runs cases one after another: a crash ends one case, not the run.

Cases are numbers on the standard input. Operations and outcomes are lines of JSON on the original standard output;
whatever a library prints goes to the standard error.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import resource
import shutil
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from reliability.outcome import Outcome, WrongError, worst

ADDRESS_SPACE = 6 << 30
"""Bytes that a worker may map: the runtime and its libraries take about one GiB of them."""

FILE_SIZE = 1 << 30


class Operations:
    """Runs the operations of one case one by one; a refused one does not stop the next."""

    def __init__(self, say: Callable[[dict[str, Any]], None]) -> None:
        self._say = say
        self.outcomes: list[Outcome] = []

    def run(self, name: str, operation: Callable[[], Any]) -> Any:
        """Run one operation; return its result, or ``None`` if it was refused or failed."""
        from onnxtrain.errors import OnnxTrainError

        self._say({"operation": name})
        before = resetpeak_memory()
        try:
            result = operation()
        except OnnxTrainError as error:
            self._add(name, _refusal(error), error)
        except MemoryError as error:
            self._add(name, "memory", error)
        except WrongError as error:
            self._add(name, "wrong", error)
        except Exception as error:
            self._add(name, "defect", error)
        else:
            grown = peak_memory() - before
            if grown > MEMORY_LOOKED_AT:
                self.outcomes.append(Outcome("memory", name, f"{name} memory", str(grown)))
            else:
                self.outcomes.append(Outcome("ok", name))
            return result
        return None

    def _add(self, name: str, kind: str, error: BaseException) -> None:
        trace = "".join(traceback.format_exception(error)) if kind != "refused" else str(error)
        self.outcomes.append(Outcome(kind, name, signature(error), trace))


MEMORY_LOOKED_AT = 512 << 20
"""Growth from which on an operation is compared with plain onnxruntime."""


def _refusal(error: Exception) -> str:
    """Return the outcome of an error: refused, unless its message calls it a defect of onnxtrain."""
    return "refused" if str(error).strip() and "defect" not in str(error) else "defect"


def signature(error: BaseException) -> str:
    """Return the type of an exception and the last stack frames, at least one of this package."""
    if isinstance(error, WrongError) and error.cause:
        return error.cause
    frames = traceback.extract_tb(error.__traceback__)
    locations = [f"{Path(frame.filename).name}:{frame.name}" for frame in frames]
    ours = [location for frame, location in zip(frames, locations, strict=True) if "/onnxtrain/" in frame.filename]
    return " < ".join([type(error).__name__, *dict.fromkeys([*locations[-1:], *ours[:-3:-1]])])


def resetpeak_memory() -> int:
    """Reset the peak memory of this process; return the resident bytes."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak_memory() -> int:
    return _status("VmHWM")


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) << 10
    return 0


def main() -> None:
    """Work until the standard input ends: worker.py SUBJECT SEED FOLDER."""
    from reliability.subjects import find

    name, seed, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    faulthandler.enable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_SIZE, FILE_SIZE))

    def say(message: dict[str, Any]) -> None:
        channel.write(json.dumps(message) + "\n")

    subject = find(name)(folder / "shared")
    say({"ready": True})
    case = folder / "case"
    for line in sys.stdin:
        index = int(line)
        shutil.rmtree(case, ignore_errors=True)
        case.mkdir()
        os.chdir(case)
        operations = Operations(say)
        subject.run(seed, index, case, operations)
        say({"outcome": worst(operations.outcomes).as_dict()})


if __name__ == "__main__":
    main()
