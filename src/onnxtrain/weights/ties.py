"""Shared weights: keep copies tied, or give each reader of a merged initializer its own."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.errors import OptionError
from onnxtrain.ir.domains import is_default_domain
from onnxtrain.model_file.file import ModelFile
from onnxtrain.weights.names import module_of, role_in_module
from onnxtrain.weights.readers import SHAPE_ONLY, is_statistic, role_of

_FLOATING = (
    onnx.TensorProto.FLOAT,
    onnx.TensorProto.DOUBLE,
    onnx.TensorProto.FLOAT16,
    onnx.TensorProto.BFLOAT16,
)


def untied(file: ModelFile, which: bool | str | Sequence[str]) -> ModelFile:
    """The model with shared initializers copied: the first reader keeps the name, others get those of their modules.

    Where a module is not known, a copy gets a number: ``norm_2.bias``, ``val_8_2``.

    Args:
        file: The user's model.
        which: ``False`` for the model as it is, ``True`` for what exporters merge (vectors such as scales, biases,
            statistics, and tensors of one value; other matrices are tied on purpose), or glob patterns of names.

    Returns:
        The model itself where nothing is shared.

    Raises:
        OptionError: A pattern matches no shared initializer.
    """
    if which is False:
        return file
    shared = _shared(file.proto.graph)
    if which is True:
        chosen = {name for name in shared if is_mergeable(file.value(name))}
    else:
        patterns = [which] if isinstance(which, str) else list(which)
        chosen = {name for name in shared if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)}
        for pattern in patterns:
            if not any(fnmatch.fnmatchcase(name, pattern) for name in shared):
                raise OptionError(
                    f"untie={pattern!r} matches no initializer that several nodes share; "
                    f"shared are {', '.join(shared) or 'none'}."
                )
    if not chosen:
        return file
    proto = file.whole()
    taken = {name for node in proto.graph.node for name in (*node.input, *node.output)}
    taken |= {item.name for item in (*proto.graph.initializer, *proto.graph.input)}
    for name in sorted(chosen):
        _copy(proto.graph, name, shared[name], taken, file.value(name))
    return file.changed(proto)


def is_mergeable(array: np.ndarray) -> bool:
    """Whether exporters may have merged an array with equal ones: vectors, and tensors of one value."""
    return array.ndim <= 1 or has_one_value(array)


def has_one_value(array: np.ndarray) -> bool:
    """Whether all elements are equal, as of fresh scales and biases.

    Example:
        >>> has_one_value(np.ones((1, 4, 1))), has_one_value(np.eye(2))
        (True, False)
    """
    return bool(array.size and array.flat[0] == array.flat[-1] and (array == array.flat[0]).all())


def copy_name(name: str, node: onnx.NodeProto, position: int, number: int) -> str:
    """Name a copy of a shared initializer after the module that reads it, where that is known.

    Elsewhere it gets a number, before its last word, which patterns such as ``*.bias`` ask for.

    Example:
        >>> norm = onnx.helper.make_node("Add", ["x", "b"], ["y"], name="/encoder/layer.1/norm/Add")
        >>> copy_name("layer.0.norm.bias", norm, 1, 2), copy_name("layer.0.norm.bias", onnx.NodeProto(), 1, 2)
        ('encoder.layer.1.norm.bias', 'layer.0.norm_2.bias')
    """
    module = module_of(node.name, {entry.key: entry.value for entry in node.metadata_props})
    path, _, word = name.rpartition(".")
    if module:
        return f"{module}.{role_in_module(node.op_type, position) or (word if path else '') or 'weight'}"
    return _numbered(name, number)


def _numbered(name: str, number: int) -> str:
    """Put a number before the last word of a name, which patterns such as ``*.bias`` ask for."""
    path, _, word = name.rpartition(".")
    return f"{path}_{number}.{word}" if path else f"{name}_{number}"


_Place = tuple[int, str]
"""A node, and for what it reads there where that matters."""


def _shared(graph: onnx.GraphProto) -> dict[str, list[tuple[int, int]]]:
    """Floating initializers that are read in more than one place, to (node, input) of every reader.

    Readers behind Identity nodes count: an exporter writes ``b = Identity(a)`` for a merged initializer. A node that
    asks for the shape is no reader.
    """
    behind = {tensor.name: tensor.name for tensor in graph.initializer if tensor.data_type in _FLOATING}
    readers: dict[str, list[tuple[int, int]]] = {}
    for index, node in enumerate(graph.node):
        if node.op_type == "Identity" and is_default_domain(node.domain) and node.input[0] in behind:
            behind[node.output[0]] = behind[node.input[0]]
            continue
        for position, name in enumerate(node.input):
            if name in behind and node.op_type not in SHAPE_ONLY:
                readers.setdefault(behind[name], []).append((index, position))
    return {name: found for name, found in readers.items() if len({_place(graph, *reader) for reader in found}) > 1}


def _place(graph: onnx.GraphProto, index: int, position: int) -> _Place:
    """Return the key of a reader: inputs of a normalization differ, two operands of one matmul do not."""
    return index, role_of(graph.node[index].op_type, position)


def _is_statistic(graph: onnx.GraphProto, index: int, position: int) -> bool:
    """Whether a reader takes running statistics: parameters come first, so that they keep the name."""
    return is_statistic(graph.node[index].op_type, position)


def _copy(
    graph: onnx.GraphProto, name: str, readers: list[tuple[int, int]], taken: set[str], array: np.ndarray
) -> None:
    owner: dict[_Place, str] = {}
    for index, position in sorted(readers, key=lambda reader: _is_statistic(graph, *reader)):
        place = _place(graph, index, position)
        if place not in owner:
            own = name
            number = len(owner) + 1
            if owner:
                own = copy_name(name, graph.node[index], position, number)
                while own in taken:  # of an Identity that an exporter wrote for the copy
                    own = _numbered(own, number)
                    number += 1
                taken.add(own)
                # Inside the file, also where the original lies outside: two tensors may not share external bytes.
                graph.initializer.append(onnx.numpy_helper.from_array(array, own))
            owner[place] = own
        graph.node[index].input[position] = owner[place]


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
