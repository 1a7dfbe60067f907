"""Parameters in buckets, whose gradients are sent together, in the order in which the backward pass makes them."""

from __future__ import annotations

from onnxtrain.ir.clone import all_nodes
from onnxtrain.training.objective import Objective

BUCKET_BYTES = 4 << 20
"""Of gradients that few processes send together: less waits longer for the others than it takes, more comes late."""

FEW = 64
"""Processes that cut such a bucket into messages of 64 KiB. A smaller message costs more than its bytes: 15 us, and
0.37 ns for each byte, on the machine of docs/benchmarks/machines.md (`benchmarks/cost_model.py` measures it again)."""


def bucket_bytes(processes: int) -> int:
    """The bytes of gradients that so many processes send together.

    Each sends every other one its share of a bucket. So buckets grow with the number of processes above :data:`FEW`,
    and the messages of a step grow no more than that.

    >>> [bucket_bytes(processes) >> 20 for processes in (2, 64, 128, 1024)]
    [4, 4, 8, 64]
    """
    return BUCKET_BYTES * max(processes, FEW) // FEW


def buckets(objective: Objective, processes: int) -> list[list[str]]:
    """The parameters of an objective, those that the model reads last first, in groups of one type each.

    The gradient of a parameter is complete when the backward pass is through its first reader. The order follows from
    the model alone, so that all processes have the same.

    Args:
        objective: What is minimised.
        processes: How many send them.
    """
    enough = bucket_bytes(processes)
    graph = objective.model.graph
    first: dict[str, int] = {}
    for place, node in enumerate(all_nodes(graph)):
        for value in node.inputs:
            if value is not None and value.name is not None:
                first.setdefault(value.name, place)
    names = sorted(objective.parameters, key=lambda name: first.get(name, 0), reverse=True)
    found: list[list[str]] = []
    open_bytes: dict[object, tuple[list[str], int]] = {}
    for name in names:
        value = graph.initializers[name]
        assert value.const_value is not None
        bucket, size = open_bytes.get(value.dtype, ([], 0))
        if not bucket:
            found.append(bucket)
        bucket.append(name)
        size += value.const_value.nbytes
        open_bytes[value.dtype] = (bucket, size) if size < enough else ([], 0)
    return found
