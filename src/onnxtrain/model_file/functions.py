"""Limit on the nodes of a model with its functions inlined: a small file can expand beyond any memory."""

from __future__ import annotations

from onnx import FunctionProto, GraphProto, ModelProto

from onnxtrain.errors import ModelError
from onnxtrain.model_file.skeleton import all_nodes

MOST_NODES = 1 << 14
"""Nodes that functions may always become."""

MOST_TIMES = 32
"""The factor by which inlining may multiply the nodes of the file, where that exceeds `MOST_NODES`."""

_Name = tuple[str, str, str]


def check_functions(label: str, proto: ModelProto) -> None:
    """Make sure that the calls of a model's functions do not become too many nodes, nested calls included.

    Raises:
        ModelError: They do.
    """
    if not proto.functions:
        return
    holders = {(function.domain, function.name, function.overload): function for function in proto.functions}
    calls = {name: _calls(function, holders) for name, function in holders.items()}
    own = {name: sum(1 for _ in all_nodes(function)) for name, function in holders.items()}
    called = _calls(proto.graph, holders)
    sizes: dict[_Name, int] = {}
    for name in _callees_first(called, calls):
        sizes[name] = own[name] + sum(sizes.get(inner, 0) for inner in calls[name])
    made = sum(sizes[name] for name in called)
    written = sum(1 for _ in all_nodes(proto.graph)) + sum(own.values())
    most = max(MOST_NODES, MOST_TIMES * written)
    if made > most:
        found = f"{made:,}" if made < 10**12 else f"more than {10**12:,}"
        raise ModelError(
            f"{label} has functions that call each other so often that they become {found} nodes, where {most:,} are "
            "the most for a model of its size; export it without functions."
        )


def _calls(holder: GraphProto | FunctionProto, functions: dict[_Name, FunctionProto]) -> list[_Name]:
    """The functions that the nodes of a graph or a function call, those in bodies included, as often as they do."""
    names = ((node.domain, node.op_type, node.overload) for node in all_nodes(holder))
    return [name for name in names if name in functions]


def _callees_first(called: list[_Name], calls: dict[_Name, list[_Name]]) -> list[_Name]:
    """The functions that are reached, each behind those that it calls; of a circle, in any order."""
    order: dict[_Name, None] = {}
    entered: set[_Name] = set()
    stack = [(name, False) for name in called]
    while stack:
        name, left = stack.pop()
        if left:
            order[name] = None
        elif name not in entered:
            entered.add(name)
            stack.append((name, True))
            stack += [(inner, False) for inner in set(calls[name])]
    return [*order]
