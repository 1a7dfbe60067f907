"""Flags of several processes that train together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from onnxtrain.cli.flags import RUNNING, SWITCH
from onnxtrain.errors import OptionError

if TYPE_CHECKING:
    from onnxtrain.distributed.communicator import Communicator


@Parameter(name="*", group=RUNNING)
@dataclass(frozen=True)
class Together:
    """Several processes on one training."""

    parallel: Annotated[
        Literal["mpi"] | None,
        Parameter(help="Train in the processes that mpiexec or srun has started, each on its part of every batch."),
    ] = None
    processes: Annotated[int | None, Parameter(help="Start that many processes here, with mpiexec.")] = None
    restarts: Annotated[
        int, Parameter(help="With --processes: go on from the last checkpoint that often, where a process is lost.")
    ] = 0
    sum_order: Annotated[
        Literal["rank", "fast"],
        Parameter(help="rank: the same bits on every network. fast: MPI's own sums."),
    ] = "rank"
    compress: Annotated[
        str | None,
        Parameter(
            metavar="HOW",
            help="Send gradients as float16 or bfloat16, or a share of the largest, 0.01; the rest is added to the "
            "next.",
        ),
    ] = None
    shard_states: Annotated[
        bool, SWITCH, Parameter(help="Keep a share of the optimizer's states in each process, instead of all in all.")
    ] = False
    shard_gradients: Annotated[
        bool, SWITCH, Parameter(help="Keep a share of the gradients, too; with --shard-states.")
    ] = False
    wait: Annotated[float, Parameter(help="Seconds to wait for another process before giving it up.")] = 600.0

    def communicator(self) -> Communicator | None:
        """The processes, where there are several.

        Raises:
            OptionError: There are none, but how they work together is said.
        """
        if self.parallel is None:
            said = {"--compress": self.compress is not None, "--sum-order": self.sum_order != "rank"}
            for flag in (flag for flag, given in said.items() if given):
                raise OptionError(f"{flag} says how processes add up gradients; give --parallel mpi, too.")
            return None
        from onnxtrain.distributed.mpi import MPI

        return MPI(self.sum_order, compress=self._compression(), timeout=self.wait)

    def _compression(self) -> Any:
        from onnxtrain.distributed.compression import TopK

        try:
            share = float(self.compress or "")
        except ValueError:  # no number
            return self.compress
        return TopK(share)

    def launch(self, checkpoint: str | None) -> int:
        """Start the processes; returns the exit code."""
        if self.parallel is None:
            raise OptionError("--processes and --restarts start several processes; give --parallel mpi, too.")
        if self.processes is None:
            raise OptionError("--restarts starts the processes again; give --processes, too.")
        from onnxtrain.cli.launching import launch

        return launch(self.processes, self.restarts, checkpoint=checkpoint)
