"""``--parallel mpi``: flags of data-parallel training, output of rank 0 only, and the start of all processes."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from onnxtrain.cli.configuration import TOKENS
from onnxtrain.cli.flags import DISTRIBUTED, flag, grouped
from onnxtrain.distributed.mpi import environment_rank, tell_ranks
from onnxtrain.errors import OptionError

if TYPE_CHECKING:
    from onnxtrain.distributed.communicator import Communicator

LOST = 3
"""Exit code: a process was lost, or does not answer."""

_FINAL = (0, 1, 2, 130, 143)
"""Exit codes after which a restart would end the same way: success, a defect, bad input, Ctrl-C, SIGTERM."""

_GRACE = 3.0
"""Seconds that rank 0 has to report an error before another rank ends, which makes the launcher end all of them."""


@grouped(DISTRIBUTED)
@dataclass(frozen=True)
class DistributedFlags:
    """Data-parallel training in several processes."""

    parallel: Literal["mpi"] | None = flag(
        None, "Train in the processes that mpiexec or srun has started, each on its part of every batch."
    )
    processes: int | None = flag(None, "Start this many processes here, with mpiexec.")
    restarts: int = flag(0, "With --processes: restarts from the last checkpoint after a process was lost, at most.")
    sum_order: Literal["rank", "fast"] = flag("rank", "rank: the same bits on every network. fast: MPI's own sums.")
    compress: str | None = flag(
        None,
        "Send gradients as float16 or bfloat16, or the largest share of them, 0.01, with error feedback.",
        metavar="HOW",
    )
    shard_states: bool = flag(False, "Keep a share of the optimizer's states in each process, not all of them.")
    shard_gradients: bool = flag(False, "Keep a share of the gradients, too; with --shard-states.")
    wait: float = flag(600.0, "Seconds to wait for another process before giving it up.")

    def communicator(self) -> Communicator | None:
        """Return the communicator of several processes, if any."""
        if self.parallel is None:
            needing = {"--compress": self.compress is not None, "--sum-order": self.sum_order != "rank"}
            for flag in (flag for flag, given in needing.items() if given):
                raise OptionError(f"{flag} says how processes add up gradients; give --parallel mpi, too.")
            return None
        from onnxtrain.distributed.mpi import MPI

        return MPI(self.sum_order, compress=self._compression(), timeout=self.wait)

    def _compression(self) -> Any:
        from onnxtrain.distributed.compression import TopK

        try:
            share = float(self.compress or "")
        except ValueError:
            return self.compress
        return TopK(share)

    def launch(self, checkpoint: str | None) -> int:
        """Run the command in several processes, and restart it from the last checkpoint if some are lost."""
        if self.parallel is None:
            raise OptionError("--processes and --restarts start several processes; give --parallel mpi, too.")
        if self.processes is None:
            raise OptionError("--restarts starts the processes again; give --processes, too.")
        if self.processes < 1 or self.restarts < 0:
            raise OptionError(
                f"--processes is {self.processes} and --restarts is {self.restarts}; they need at least 1 and 0."
            )
        if self.restarts and not checkpoint:
            raise OptionError("--restarts goes on from checkpoints; give --checkpoint a folder, too.")
        if any(name in os.environ for name in ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")):
            raise OptionError("--processes starts mpiexec itself; leave one of them out.")
        folders = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        mpiexec = shutil.which("mpiexec", path=folders)
        if mpiexec is None:
            raise OptionError(
                "--processes needs mpiexec, which is not there; install an MPI, such as pip install mpich."
            )
        command = [mpiexec, "-n", str(self.processes), sys.executable, "-m", "onnxtrain"]
        command += _without(TOKENS.get(), "--processes", "--restarts")
        for start in range(self.restarts + 1):
            resume = ["--resume"] if start and "--resume" not in command else []
            code = subprocess.run([*command, *resume], check=False).returncode
            code = 128 - code if code < 0 else code
            if code in _FINAL or start == self.restarts:
                break
            sys.stderr.write(f"A process was lost (exit code {code}); restart {start + 1} of {self.restarts}.\n")
        return code


@contextlib.contextmanager
def one_voice(tokens: Sequence[str]) -> Iterator[None]:
    """Let only rank 0 print."""
    if not _is_silent(tokens):
        yield
        return
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def after_error(tokens: Sequence[str], error: BaseException) -> None:
    """Report an error to the other ranks, and let rank 0 print its own first."""
    if _is_parallel(tokens) and not tell_ranks(error) and _is_silent(tokens):
        time.sleep(_GRACE)  # rank 0 fails in the same way


def _is_parallel(tokens: Sequence[str]) -> bool:
    return any(token.split("=")[0] == "--parallel" for token in tokens)


def _is_silent(tokens: Sequence[str]) -> bool:
    return _is_parallel(tokens) and environment_rank() > 0


def _without(tokens: Sequence[str], *flags: str) -> list[str]:
    """Return arguments without some flags and their values."""
    left, skip = [], False
    for token in tokens:
        if skip:
            skip = False
        elif token in flags:
            skip = True
        elif token.split("=")[0] not in flags:
            left.append(token)
    return left
