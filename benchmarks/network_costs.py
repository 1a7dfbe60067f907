"""A cost model of messages and all-reduces between networked machines, and its fit.

The model has three parameters: operations per second of a machine, latency of a message, and bytes per second of a
link. A step computes; then the ranks exchange messages as MPI's communicator does: in an exchange every machine sends a
message to every other one and waits for theirs. With N machines an exchange of b bytes takes

    trips latency + (N - 1) (overhead + b max(1 / bandwidth, copying))

A message of at most 128 bytes takes one trip; larger ones are acknowledged and take more. An all-reduce of n bytes is
one exchange of n up to 32 KiB, and otherwise exchanges of n / N, in blocks of at most 1 MiB, and one more of n / N.

Overhead and copying are measured with two processes over TCP on the loopback device. Trips, and the latency beside the
delay, are fitted to two and four machines with one delay and rate; that latency is the time to wake the switch and the
processes, which sleep meanwhile and share the CPUs of this machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

SMALL = 128
"""Largest message in bytes that is not acknowledged (MPICH 5.0 over TCP: messages of 192 bytes take twice as long as
those of 128)."""

TABLE_BYTES = 32
"""Bytes per rank of the table of weights and losses that is exchanged in a step."""

Setting = tuple[int, float, float | None]
Latencies = dict[int, float]
"""Seconds of a small message beside the network's delay, by number of machines."""

Found = dict[str, Any]
"""Output of rank 0: seconds of an exchange, of all-reduces by size, of steps by model."""


@dataclass(frozen=True)
class Network:
    """The network between the machines.

    Attributes:
        latency: One-way seconds of a small message.
        bandwidth: Bytes per second that a machine sends, and receives at the same time.
    """

    latency: float
    bandwidth: float


@dataclass(frozen=True)
class Software:
    """Costs of MPI and of the all-reduce code.

    Attributes:
        overhead: Seconds for each message.
        copying: Seconds per byte without a network limit.
        trips: Latencies per message of more than ``SMALL`` bytes.
    """

    overhead: float
    copying: float
    trips: float

    def exchange(self, size: float, machines: int, network: Network) -> float:
        """Seconds of an exchange of this many bytes between all machines."""
        trips = 1.0 if size <= SMALL else self.trips
        return trips * network.latency + (machines - 1) * (
            self.overhead + size * max(1 / network.bandwidth, self.copying)
        )

    def all_reduce(self, size: float, machines: int, network: Network) -> float:
        """Seconds of an all-reduce of this many bytes over all machines."""
        return sum(self.exchange(part, machines, network) for part in exchanges(size, machines))

    def step(
        self, computing: float, sizes: Sequence[float], machines: int, network: Network, beside: float = 0.0
    ) -> float:
        """Seconds of a step with this compute time and gradient buckets of these sizes.

        All buckets but the last may overlap with ``beside`` seconds of the computation.
        """
        sums = [self.all_reduce(size, machines, network) for size in sizes]
        together = self.exchange(TABLE_BYTES, machines, network)
        return computing + together + sums[-1] + max(0.0, sum(sums[:-1]) - beside)


def exchanges(size: float, machines: int) -> list[float]:
    """Message bytes of each exchange of an all-reduce, as in the MPI communicator."""
    from onnxtrain.distributed.mpi import _BLOCK, _SMALL_BYTES

    if size <= _SMALL_BYTES:
        return [size]
    share = size / machines
    blocks = int(share // _BLOCK)
    rest = share - blocks * _BLOCK
    return [float(_BLOCK)] * blocks + ([rest] if rest else []) + [share]


def fit(loopback: Sequence[Found]) -> Software:
    """Fit overhead and copying of two processes without a network, from messages and the largest all-reduce.

    The minimum of several measurements counts, to exclude the load of other programs.
    """
    size = max(map(int, loopback[0]["sums"]))
    parts = exchanges(size, 2)
    copied = min(found["sums"][str(size)] for found in loopback) - len(parts) * min(f["exchange"] for f in loopback)
    return Software(min(found["message"] for found in loopback), max(0.0, copied / sum(parts)), 1.0)


def fit_trips(software: Software, found: dict[Setting, Found]) -> tuple[Software, Latencies]:
    """Fit the trips of large messages by least squares of relative errors, and the latency beside the delay."""
    base = {}
    for (machines, delay, rate), values in found.items():
        network, least = Network(delay, rate or np.inf), min(values["sums"], key=int)
        small = (  # a small all-reduce is one exchange
            values["exchange"] - software.exchange(TABLE_BYTES, machines, network),
            values["sums"][least] - software.exchange(int(least), machines, network),
        )
        base[machines] = max(0.0, min(small))
    shares = []  # latencies per large message, and the remaining time
    for (machines, delay, rate), values in found.items():
        network = network_of((machines, delay, rate), base)
        for size, seconds in values["sums"].items():
            large = sum(part > SMALL for part in exchanges(int(size), machines))
            rest = seconds - replace(software, trips=0.0).all_reduce(int(size), machines, network)
            shares.append((large * network.latency / seconds, rest / seconds))
    latencies, rests = np.asarray(shares).T
    return replace(software, trips=max(1.0, float(latencies @ rests / (latencies @ latencies)))), base


def network_of(setting: Setting, base: Latencies) -> Network:
    """The network with the latency of this many machines added to the delay."""
    machines, delay, rate = setting
    counts = sorted(base)
    return Network(delay + float(np.interp(machines, counts, [base[count] for count in counts])), rate or np.inf)
