"""Weights that a file holds twice: an embedding, and the output projection as a copy of its own, often transposed."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from onnxtrain.errors import OptionError
from onnxtrain.model_file.file import ModelFile

_DTYPES = (ir.DataType.FLOAT, ir.DataType.DOUBLE)

_LEAST_VALUES = 8
"""Copies have at least so many different values among the first ones: what is zero or one is alike by chance."""

_SAMPLE = 64
"""Number of diagonal elements compared before all elements are."""

_LOOKED_AT = 1 << 10

_BLOCK = 1 << 8
"""Number of rows compared at a time."""


class Copy(NamedTuple):
    """An initializer that holds the values of an earlier one.

    Attributes:
        name: Its name.
        original: The name of the first one.
        transposed: Whether it holds them transposed.
    """

    name: str
    original: str
    transposed: bool


def find_copies(file: ModelFile, names: Iterable[str]) -> list[Copy]:
    """The initializers, of those named, whose values another of them holds already, as they are or transposed.

    Tensors of one shape are told apart by a few elements of their diagonals; whole tensors are read only where these
    are the same. Vectors are not looked at.
    """
    tensors = {tensor.name: tensor for tensor in file.proto.graph.initializer}
    alike: dict[tuple[object, ...], list[str]] = {}
    for name in names:
        tensor = tensors.get(name)
        if tensor is not None and len(tensor.dims) >= 2 and tensor.data_type in _DTYPES:
            shape = tuple(tensor.dims)
            alike.setdefault((tensor.data_type, tuple(sorted(shape)) if len(shape) == 2 else shape), []).append(name)
    copies: list[Copy] = []
    for group in alike.values():
        copies += _copies_among(file, group) if len(group) > 1 else []
    return copies


def _copies_among(file: ModelFile, names: Sequence[str]) -> list[Copy]:
    samples: dict[bytes, list[str]] = {}
    for name in names:
        samples.setdefault(_diagonal(file.value(name)), []).append(name)
    copies = []
    for first, *others in samples.values():
        if not others:
            continue
        array = file.value(first)
        if len(np.unique(array.reshape(-1)[:_LOOKED_AT])) < _LEAST_VALUES:
            continue
        for name in others:
            other = file.value(name)
            if _are_equal(array, other):
                copies.append(Copy(name, first, transposed=False))
            elif array.ndim == 2 and _are_equal(array, other.T):
                copies.append(Copy(name, first, transposed=True))
    return copies


def _diagonal(array: np.ndarray) -> bytes:
    """Some elements of the diagonal, which a transposed copy has, too."""
    found = array.reshape(len(array), -1).diagonal() if array.size else array
    return found[:: max(1, len(found) // _SAMPLE)].tobytes()


def _are_equal(one: np.ndarray, other: np.ndarray) -> bool:
    return one.shape == other.shape and all(
        np.array_equal(one[start : start + _BLOCK], other[start : start + _BLOCK])
        for start in range(0, len(one), _BLOCK)
    )


def choose_copies(file: ModelFile, which: bool | str | Sequence[str]) -> list[Copy]:
    """The copies that are to stay copies.

    Args:
        file: The user's model.
        which: ``False`` for none, ``True`` for all, or glob patterns of the names of the copies or their originals.

    Raises:
        OptionError: A pattern matches no initializer that holds the values of another, or is one's original.
    """
    if which is False:
        return []
    copies = find_copies(file, file.names())
    if which is True:
        return copies
    patterns = [which] if isinstance(which, str) else list(which)
    for pattern in patterns:
        if not any(_matches(copy, pattern) for copy in copies):
            listed = ", ".join(f"{copy.name} of {copy.original}" for copy in copies[:8])
            raise OptionError(
                f"tie={pattern!r} matches no initializer that holds the values of another; copies are "
                f"{listed or 'none'}."
            )
    return [copy for copy in copies if any(_matches(copy, pattern) for pattern in patterns)]


def _matches(copy: Copy, pattern: str) -> bool:
    return fnmatch.fnmatchcase(copy.name, pattern) or fnmatch.fnmatchcase(copy.original, pattern)


def with_copies(values: Mapping[str, np.ndarray], copies: Iterable[Copy]) -> dict[str, np.ndarray]:
    """Values by name, and with those of originals the values of their copies."""
    found = dict(values)
    for copy in copies:
        if copy.original in found:
            array = found[copy.original]
            found[copy.name] = np.ascontiguousarray(array.T) if copy.transposed else array
    return found


def compute_copies(model: ir.Model, copies: Sequence[Copy]) -> None:
    """Compute copies from their originals in a working copy, in place, so that both are trained as one."""
    graph = model.graph
    nodes = []
    for copy in copies:
        value, original = graph.initializers.pop(copy.name), graph.initializers[copy.original]
        node = ir.Node("", "Transpose" if copy.transposed else "Identity", [original], num_outputs=1)
        value.name, value.const_value = None, None
        computed = node.outputs[0]
        computed.type, computed.shape = value.type, value.shape
        value.replace_all_uses_with(computed, replace_graph_outputs=True)
        computed.name = copy.name
        nodes.append(node)
    first = next(iter(graph), None)
    if first is None:
        graph.extend(nodes)
    else:
        graph.insert_before(first, nodes)
