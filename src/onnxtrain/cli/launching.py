"""``--parallel mpi``: who speaks of several processes, and how one command starts them all."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from onnxtrain.cli.configuration import given_tokens
from onnxtrain.distributed.mpi import environment_rank, tell_ranks
from onnxtrain.errors import OptionError

LOST = 3
"""Exit code: a process of several was lost, or does not answer."""

_FINAL = (0, 1, 2, 130, 143)
"""Exit codes after which another start would end in the same way: success, a defect, bad input, Ctrl-C, SIGTERM."""

_GRACE = 3.0
"""Seconds that rank 0 has to say what is wrong before another rank ends, which makes a launcher end them all."""


def _is_silent(tokens: Sequence[str]) -> bool:
    return any(token.split("=")[0] == "--parallel" for token in tokens) and environment_rank() > 0


@contextlib.contextmanager
def one_voice(tokens: Sequence[str]) -> Iterator[None]:
    """Let only rank 0 print, where the command is one of several processes."""
    if not _is_silent(tokens):
        yield
        return
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def after_error(tokens: Sequence[str], error: BaseException) -> None:
    """Tell the other processes, where there are any, and let rank 0 speak."""
    if any(token.split("=")[0] == "--parallel" for token in tokens) and not tell_ranks(error) and _is_silent(tokens):
        time.sleep(_GRACE)  # it fails in the same way


def launch(processes: int, restarts: int, *, checkpoint: str | None) -> int:
    """Run the command in several processes, and again from the last checkpoint where some are lost.

    Args:
        processes: How many.
        restarts: How often to start them again at most.
        checkpoint: The folder of checkpoints.

    Returns:
        The exit code.

    Raises:
        OptionError: There is no ``mpiexec``, or no checkpoint to start again from.
    """
    if processes < 1 or restarts < 0:
        raise OptionError(f"--processes is {processes} and --restarts is {restarts}; they need at least 1 and 0.")
    if restarts and not checkpoint:
        raise OptionError("--restarts goes on from checkpoints; give --checkpoint a folder, too.")
    if any(name in os.environ for name in ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")):
        raise OptionError("--processes starts mpiexec itself; leave one of them out.")
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    mpiexec = shutil.which("mpiexec", path=places)
    if mpiexec is None:
        raise OptionError("--processes needs mpiexec, which is not there; install an MPI, such as pip install mpich.")
    tokens = _without(given_tokens(), "--processes", "--restarts")
    for start in range(restarts + 1):
        again = ["--resume"] if start and "--resume" not in tokens else []
        code = subprocess.run(
            [mpiexec, "-n", str(processes), sys.executable, "-m", "onnxtrain", *tokens, *again], check=False
        ).returncode
        code = 128 - code if code < 0 else code
        if code in _FINAL or start == restarts:
            break
        sys.stderr.write(f"A process was lost (exit code {code}); restart {start + 1} of {restarts}.\n")
    return code


def _without(tokens: Sequence[str], *flags: str) -> list[str]:
    """Arguments without some flags and their values."""
    left, skip = [], False
    for token in tokens:
        if skip:
            skip = False
        elif token in flags:
            skip = True
        elif token.split("=")[0] not in flags:
            left.append(token)
    return left
