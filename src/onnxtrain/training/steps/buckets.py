"""Parameters in buckets, whose gradients are sent together, in the order in which the backward pass makes them."""

from __future__ import annotations

from onnxtrain.training.objective import Objective

BUCKET_BYTES = 4 << 20
"""Of gradients that are sent together: fewer wait longer for each other than they take, more come late."""


def buckets(objective: Objective) -> list[list[str]]:
    """The parameters of an objective, those that the model reads last first, in groups of one type each.

    The gradient of a parameter is complete when the backward pass is through its first reader. The order follows from
    the model alone, so that all processes have the same.
    """
    graph = objective.model.graph
    first: dict[str, int] = {}
    for place, node in enumerate(graph.all_nodes()):
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
        open_bytes[value.dtype] = (bucket, size) if size < BUCKET_BYTES else ([], 0)
    return found
