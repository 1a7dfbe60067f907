"""What messages and sums cost on machines with a network between them: a model, and how it is fitted.

The model has three parts: operations per second of a machine, seconds that a message is on its way, and bytes per
second of a link. A step computes; then the processes exchange messages as `onnxtrain.distributed.MPI` does: in an
exchange every machine sends something to each other one and waits for what it gets. With N machines an exchange of b
bytes takes

    trips latency + (N - 1) (overhead + b max(1 / bandwidth, copying))

A message of at most 128 bytes makes one trip; of a larger one the sender waits to hear that it has come, so it makes
more. A sum of n bytes is one exchange of n where that is at most 32 KiB, and otherwise exchanges of n / N, in blocks of
at most 1 MiB, and one more of n / N.

Overhead and copying are those of messages and sums of two processes over TCP on this machine's loopback device. Trips
are those of two and of four machines with one delay and rate, and so is the latency beside the delay: what it takes
until the switch and the processes, which sleep meanwhile and share the processors of this machine, have been woken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

SMALL = 128
"""Bytes up to which nobody waits for the message to have come (MPICH 5.0 over TCP: messages of 192 bytes take twice
as long as those of 128)."""

TABLE_BYTES = 32
"""Bytes that each process has in the table of weights and losses that goes round in a step."""

Setting = tuple[int, float, float | None]
Latencies = dict[int, float]
"""Seconds of a small message beside the network's delay, by how many machines there are."""

Found = dict[str, Any]
"""What rank 0 of a run printed: seconds of an exchange, of sums by size, of steps by model."""


@dataclass(frozen=True)
class Network:
    """What lies between the machines.

    Attributes:
        latency: Seconds that a small message takes, one way.
        bandwidth: Bytes per second that a machine sends, and receives at the same time.
    """

    latency: float
    bandwidth: float


@dataclass(frozen=True)
class Software:
    """What MPI and the sums take of themselves.

    Attributes:
        overhead: Seconds for each message.
        copying: Seconds for each byte, where the network is no limit.
        trips: How many times the latency a message of more than ``SMALL`` bytes takes.
    """

    overhead: float
    copying: float
    trips: float

    def exchange(self, size: float, machines: int, network: Network) -> float:
        """Seconds in which every machine sends so many bytes to each other one."""
        trips = 1.0 if size <= SMALL else self.trips
        return trips * network.latency + (machines - 1) * (
            self.overhead + size * max(1 / network.bandwidth, self.copying)
        )

    def all_reduce(self, size: float, machines: int, network: Network) -> float:
        """Seconds of a sum of so many bytes over all machines."""
        return sum(self.exchange(part, machines, network) for part in exchanges(size, machines))

    def step(
        self, computing: float, sizes: Sequence[float], machines: int, network: Network, beside: float = 0.0
    ) -> float:
        """Seconds of a step that computes so long and adds up gradients in buckets of these sizes.

        All buckets but the last may be added up during ``beside`` seconds of the computation.
        """
        sums = [self.all_reduce(size, machines, network) for size in sizes]
        together = self.exchange(TABLE_BYTES, machines, network)
        return computing + together + sums[-1] + max(0.0, sum(sums[:-1]) - beside)


def exchanges(size: float, machines: int) -> list[float]:
    """The bytes of a message in each of the exchanges that make a sum, as in `onnxtrain/parallel/mpi.py`."""
    from onnxtrain.distributed.mpi import _AT_ONCE, _BLOCK

    if size <= _AT_ONCE:
        return [size]
    share = size / machines
    blocks = int(share // _BLOCK)
    rest = share - blocks * _BLOCK
    return [float(_BLOCK)] * blocks + ([rest] if rest else []) + [share]


def fit(loopback: Sequence[Found]) -> Software:
    """Overhead and copying of two processes without a network: of messages, and of the largest sum.

    Of several measurements the least counts: what other programs take is no cost of ours.
    """
    size = max(map(int, loopback[0]["sums"]))
    parts = exchanges(size, 2)
    copied = min(found["sums"][str(size)] for found in loopback) - len(parts) * min(f["exchange"] for f in loopback)
    return Software(min(found["message"] for found in loopback), max(0.0, copied / sum(parts)), 1.0)


def fit_trips(software: Software, found: dict[Setting, Found]) -> tuple[Software, Latencies]:
    """The trips of large messages, by least squares of relative errors, and the latency beside the delay."""
    base = {}
    for (machines, delay, rate), values in found.items():
        network, least = Network(delay, rate or np.inf), min(values["sums"], key=int)
        small = (  # a small sum is one exchange, too
            values["exchange"] - software.exchange(TABLE_BYTES, machines, network),
            values["sums"][least] - software.exchange(int(least), machines, network),
        )
        base[machines] = max(0.0, min(small))
    shares = []  # of the latencies of large messages in a time, and of what is not explained without them
    for (machines, delay, rate), values in found.items():
        network = network_of((machines, delay, rate), base)
        for size, seconds in values["sums"].items():
            large = sum(part > SMALL for part in exchanges(int(size), machines))
            rest = seconds - replace(software, trips=0.0).all_reduce(int(size), machines, network)
            shares.append((large * network.latency / seconds, rest / seconds))
    latencies, rests = np.asarray(shares).T
    return replace(software, trips=max(1.0, float(latencies @ rests / (latencies @ latencies)))), base


def network_of(setting: Setting, base: Latencies) -> Network:
    """A network with the latency that so many machines have beside the delay."""
    machines, delay, rate = setting
    counts = sorted(base)
    return Network(delay + float(np.interp(machines, counts, [base[count] for count in counts])), rate or np.inf)
