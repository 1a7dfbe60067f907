"""A copy of a model that is changed, and what is read of nodes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper


class Edited:
    """A copy of a model to change: its graph, and the names in it."""

    def __init__(self, proto: onnx.ModelProto) -> None:
        self.proto = onnx.ModelProto()
        self.proto.CopyFrom(proto)
        self.graph = graph = self.proto.graph
        self._names = {name for node in graph.node for name in (*node.input, *node.output)}
        self._names |= {value.name for value in (*graph.input, *graph.initializer)}

    def unused(self, name: str) -> str:
        """Return a name that nothing has yet."""
        while name in self._names:
            name += "_"
        self._names.add(name)
        return name

    def constant(self, name: str, array: np.ndarray) -> str:
        """Add an initializer; return its name, which nothing had."""
        name = self.unused(name)
        self.graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(array), name))
        return name

    def read(self) -> set[str]:
        """Return the names of values that nodes read, those in subgraphs too, or that are outputs."""
        found = {name for node in self.graph.node for name in (*node.input, *names_in_subgraphs(node))}
        return found | {value.name for value in self.graph.output}

    def remove_unread(self, candidates: set[str]) -> None:
        """Remove constants, and declarations of values, that nothing reads any more."""
        graph, gone = self.graph, candidates - self.read()
        assign(graph.initializer, (tensor for tensor in graph.initializer if tensor.name not in gone))
        assign(graph.node, (node for node in graph.node if node.op_type != "Constant" or node.output[0] not in gone))
        computed = {name for node in graph.node for name in node.output}
        assign(graph.value_info, (value for value in graph.value_info if value.name in computed))


def assign(field: Any, items: Iterable[Any]) -> None:
    """Replace all items of a repeated field."""
    kept = list(items)
    del field[:]
    field.extend(kept)


def attributes(node: onnx.NodeProto) -> dict[str, Any]:
    """Return the attributes of a node by name."""
    return {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}


def names_in_subgraphs(node: onnx.NodeProto) -> Iterator[str]:
    """Yield the names that the subgraphs of a node read, their own included."""
    for attribute in node.attribute:
        for graph in (attribute.g, *attribute.graphs):
            for inner in graph.node:
                yield from inner.input
                yield from names_in_subgraphs(inner)
            yield from (value.name for value in graph.output)
