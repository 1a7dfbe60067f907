"""Shared weights: keep copies tied, give each reader of a merged initializer its own, train repeated rows as one.

An exporter repeats a token, such as that of a class, for each example of a fixed batch: equal rows are one parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.errors import OptionError
from onnxtrain.graph.batch_axis import BatchAxes, BatchAxis
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.clone import subgraphs
from onnxtrain.graph.domains import is_default_domain
from onnxtrain.graph.patterns import matches, no_match, pattern_list
from onnxtrain.graph.value import dimensions, is_float
from onnxtrain.model_file.exporters import module_of
from onnxtrain.model_file.exporters.pytorch import is_declared_parameter
from onnxtrain.model_file.file import ModelFile
from onnxtrain.parameters.fixed_values import has_one_value
from onnxtrain.parameters.names import role_in_module
from onnxtrain.parameters.readers import SHAPE_ONLY, is_statistic, role_of
from onnxtrain.parameters.stored import as_stored

_FLOATING = (
    onnx.TensorProto.FLOAT,
    onnx.TensorProto.DOUBLE,
    onnx.TensorProto.FLOAT16,
    onnx.TensorProto.BFLOAT16,
)


def untied(
    file: ModelFile, which: bool | str | Sequence[str], trained: Callable[[ModelFile], Collection[str]]
) -> ModelFile:
    """Copy shared initializers: the first reader keeps the name, the others' copies are named after their modules.

    Without a known module, a copy gets a number: ``norm_2.bias``, ``val_8_2``. Constants stay shared: a copy, with one
    reader and the name of a module, would pass for a parameter.
    """
    if which is False:
        return file
    shared = _shared(file.proto.graph)
    if which is True:
        chosen = {name for name in shared if is_mergeable(file.value(name))}
    else:
        patterns = pattern_list(which)
        chosen = {name for name in shared if any(matches(pattern, name) for pattern in patterns)}
        for pattern in patterns:
            if not matches(pattern, *shared):
                raise OptionError(no_match("untie", pattern, "initializer that several nodes share", shared))
    if chosen:
        graph = file.proto.graph
        statistics = {name for name in chosen if any(_is_statistic(graph, *reader) for reader in shared[name])}
        chosen &= statistics.union(trained(file))
    if not chosen:
        return file
    proto = file.whole()
    taken = {name for node in proto.graph.node for name in (*node.input, *node.output)}
    taken |= {item.name for item in (*proto.graph.initializer, *proto.graph.input)}
    for name in sorted(chosen):
        _copy(proto.graph, name, shared[name], taken, file.value(name))
    return file.changed(proto)


def is_mergeable(array: np.ndarray) -> bool:
    """Return whether exporters may have merged an array with equal ones: a vector, or a tensor of one value."""
    return array.ndim <= 1 or has_one_value(array)


def copy_name(name: str, node: onnx.NodeProto, position: int, number: int) -> str:
    """Name a copy of a shared initializer after the module that reads it, where that is known.

    Otherwise it gets a number before its last word, so that patterns such as ``*.bias`` still match.

    Example:
        >>> norm = onnx.helper.make_node("Add", ["x", "b"], ["y"], name="/encoder/layer.1/norm/Add")
        >>> copy_name("layer.0.norm.bias", norm, 1, 2), copy_name("layer.0.norm.bias", onnx.NodeProto(), 1, 2)
        ('encoder.layer.1.norm.bias', 'layer.0.norm_2.bias')
    """
    module = module_of(node.name, {entry.key: entry.value for entry in node.metadata_props})
    if module:
        word = name.rpartition(".")[2] if "." in name else "weight"
        return f"{module}.{role_in_module(node.op_type, position) or word}"
    return _numbered(name, number)


def _numbered(name: str, number: int) -> str:
    """Insert a number before the last word of a name, so that patterns such as ``*.bias`` still match."""
    path, _, word = name.rpartition(".")
    return f"{path}_{number}.{word}" if path else f"{name}_{number}"


def _shared(graph: onnx.GraphProto) -> dict[str, list[tuple[int, int]]]:
    """Map floating initializers with several readers to the (node, input) of each reader.

    Readers after Identity nodes count: an exporter writes ``b = Identity(a)`` for a merged initializer. Nodes that
    only read the shape do not.
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
    return {name: found for name, found in readers.items() if len({_reader_key(graph, *r) for r in found}) > 1}


def _reader_key(graph: onnx.GraphProto, index: int, position: int) -> tuple[int, str]:
    """Return the key of a reader: inputs of a normalization differ, the two operands of a matmul do not."""
    return index, role_of(graph.node[index].op_type, position)


def _is_statistic(graph: onnx.GraphProto, index: int, position: int) -> bool:
    """Return whether a node reads running statistics; these come last, so that parameters keep the name."""
    return is_statistic(graph.node[index].op_type, position)


def _copy(
    graph: onnx.GraphProto, name: str, readers: list[tuple[int, int]], taken: set[str], array: np.ndarray
) -> None:
    own_names: dict[tuple[int, str], str] = {}
    for index, position in sorted(readers, key=lambda reader: _is_statistic(graph, *reader)):
        slot = _reader_key(graph, index, position)
        if slot not in own_names:
            own = name
            number = len(own_names) + 1
            if own_names:
                own = copy_name(name, graph.node[index], position, number)
                while own in taken:  # an exporter's Identity may have this name
                    own = _numbered(own, number)
                    number += 1
                taken.add(own)
                # Stored inside the file: two tensors may not share external bytes.
                graph.initializer.append(onnx.numpy_helper.from_array(array, own))
            own_names[slot] = own
        graph.node[index].input[position] = own_names[slot]


_DTYPES = (ir.DataType.FLOAT, ir.DataType.DOUBLE)

_LEAST_VALUES = 8
"""Smallest number of distinct leading values of a copy: constant tensors are equal by chance."""

_SAMPLE = 64
"""Number of diagonal elements compared first."""

_LOOKED_AT = 1 << 10

_BLOCK = 1 << 8
"""Number of rows compared at a time."""


class Rows(NamedTuple):
    """Equal parts of a tensor, one for each example of a fixed batch."""

    axis: int
    before: int
    examples: int

    def apart(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return a shape whose axis of examples is one of its own: behind the entries before, if these are several."""
        axis, after = self.axis, shape[self.axis] // self.before // self.examples
        split = (self.examples,) if self.before == after == 1 else (self.before, self.examples, after)
        return (*shape[:axis], *split, *shape[axis + 1 :])

    def first(self, array: np.ndarray) -> np.ndarray:
        """Return the part of the first example."""
        shape = list(array.shape)
        shape[self.axis] //= self.examples
        return np.ascontiguousarray(self._parts(array)[0]).reshape(shape)

    def are_equal(self, array: np.ndarray) -> bool:
        """Return whether all examples have the same part."""
        parts = self._parts(array)
        if not np.array_equal(parts[0].ravel()[:_LOOKED_AT], parts[1].ravel()[:_LOOKED_AT]):
            return False
        return all(np.array_equal(parts[0], part) for part in parts[1:])

    def repeated(self, part: np.ndarray) -> np.ndarray:
        """Return the tensor of which all examples have this part."""
        shape = list(part.shape)
        shape[self.axis] *= self.examples
        apart = part.reshape(*part.shape[: self.axis], self.before, 1, -1, *part.shape[self.axis + 1 :])
        return np.repeat(apart, self.examples, self.axis + 1).reshape(shape)

    def _parts(self, array: np.ndarray) -> np.ndarray:
        axis = self.axis
        apart = array.reshape(*array.shape[:axis], self.before, self.examples, -1, *array.shape[axis + 1 :])
        return np.moveaxis(apart, axis + 1, 0)


class Copy(NamedTuple):
    """An initializer that holds the values of an earlier one, or its own for each example."""

    name: str
    original: str
    transposed: bool
    rows: Rows | None = None


def find_copies(file: ModelFile, names: Iterable[str]) -> list[Copy]:
    """Find named initializers that hold the values of an earlier one, possibly transposed.

    A few diagonal elements distinguish tensors of one shape; whole tensors are read only where these are equal. Vectors
    are skipped.
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
    """Return some elements of the diagonal, which transposition keeps."""
    found = array.reshape(len(array), -1).diagonal() if array.size else array
    return found[:: max(1, len(found) // _SAMPLE)].tobytes()


def _are_equal(one: np.ndarray, other: np.ndarray) -> bool:
    return one.shape == other.shape and all(
        np.array_equal(one[start : start + _BLOCK], other[start : start + _BLOCK])
        for start in range(0, len(one), _BLOCK)
    )


def choose_copies(file: ModelFile, which: bool | str | Sequence[str]) -> list[Copy]:
    """Select the copies to keep tied."""
    if which is False:
        return []
    copies = find_copies(file, file.names())
    if which is True:
        return copies
    patterns = pattern_list(which)
    for pattern in patterns:
        if not any(matches(pattern, copy.name, copy.original) for copy in copies):
            listed = [f"{copy.name} of {copy.original}" for copy in copies]
            raise OptionError(no_match("tie", pattern, "initializer that holds the values of another", listed))
    return [copy for copy in copies if any(matches(pattern, copy.name, copy.original) for pattern in patterns)]


def with_copies(values: Mapping[str, np.ndarray], copies: Iterable[Copy]) -> dict[str, np.ndarray]:
    """Add the values of copies to those of their originals."""
    found = dict(values)
    for copy in copies:
        if copy.original in found:
            array = found[copy.original]
            if copy.rows is not None:
                array = copy.rows.repeated(array)
            found[copy.name] = np.ascontiguousarray(array.T) if copy.transposed else array
    return found


def value_reader(file: ModelFile, copies: Iterable[Copy]) -> Callable[[str], np.ndarray]:
    """Return a function that reads an initializer of a file in the form in which it is trained."""
    rows = {copy.name: copy.rows for copy in copies}

    def read(name: str) -> np.ndarray:
        own = rows.get(name)
        return file.value(name) if own is None else own.first(file.value(name))

    return read


def compute_copies(model: ir.Model, copies: Sequence[Copy]) -> None:
    """Compute copies from their originals in a working copy, in place, so that they are trained as one."""
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


def find_repeated(model: ir.Model, size: int | None) -> list[Copy]:
    """Find initializers that hold one tensor for each example: equal rows along the batch axis of their readers."""
    if size is None or size < 2:
        return []
    graph, found = model.graph, []
    axes: BatchAxes | None = None
    for name, value in graph.initializers.items():
        for rows in _candidates(value, size):
            axes = axes or BatchAxes.of_inputs(graph, size).follow(graph)
            if _counts_examples(value, BatchAxis(rows.axis, (rows.before, ())), axes):
                found.append(Copy(name, name, transposed=False, rows=rows))
                break
    return found


def declared_learned(model: ir.Model, repeated: Iterable[Copy]) -> list[str]:
    """Return the names of repeated tensors that are parameters by the exporter's record."""
    values = model.graph.initializers
    return [copy.name for copy in repeated if is_declared_parameter(values[copy.name], repeated=True)]


def _candidates(value: ir.Value, size: int) -> Iterator[Rows]:
    """Iterate over the axes along which a tensor has as many equal rows as there are examples."""
    shape, tensor = dimensions(value), value.const_value
    if tensor is None or not is_float(value) or not shape or 0 in shape:
        return
    for axis, length in enumerate(shape):
        if not isinstance(length, int) or length % size:
            continue
        for before in (number for number in range(1, length // size + 1) if length // size % number == 0):
            rows = Rows(axis, before, size)
            if rows.are_equal(as_stored(tensor)):
                yield rows


def _counts_examples(value: ir.Value, start: BatchAxis, axes: BatchAxes) -> bool:
    """Return whether an axis of a value is the batch axis wherever its readers combine it with examples."""
    own, pending, agreed = BatchAxes({value: start}, axes.size), [value], False
    while pending:
        current = pending.pop()
        if current.is_graph_output():
            return False
        for node, _ in current.uses():
            if node.op_type in SHAPE_ONLY:
                continue
            if any(subgraphs(node)):
                return False
            made = [output for output in node.outputs if output.uses() or output.is_graph_output()]
            found = dict(zip(node.outputs, own.of_outputs(node), strict=True))
            if any(found[output] is None for output in made):
                return False
            if any(other in axes for other in node.inputs if other is not None):
                if any(axes.get(output) != found[output] for output in made):
                    return False
                agreed = True
                continue
            pending += [output for output in made if output not in own]
            own.update({output: axis for output in made if (axis := found[output]) is not None})
    return agreed


def train_as_one(model: ir.Model, repeated: Iterable[Copy]) -> None:
    """Replace tensors by the one row that they repeat, expanded for their readers, in place: gradients are summed."""
    graph = model.graph
    for name, _, _, rows in repeated:
        assert rows is not None
        value = graph.initializers.pop(name)
        shape = tuple(int(size) for size in dimensions(value) or () if isinstance(size, int))
        assert value.const_value is not None
        value.name = None
        tensor = ir.tensor(rows.first(np.asarray(value.const_value.numpy())), name=name)
        one = ir.val(name, const_value=tensor, metadata_props=dict(value.metadata_props))
        graph.register_initializer(one)
        op = Builder(graph, graph.opset_imports[""], before=next(iter(graph)))
        op.scope = f"rows of {name}"
        x = op.wrap(one)
        apart = rows.apart(shape)
        if len(apart) != len(shape):
            x = op.Reshape(x, op.ints(*apart[: rows.axis + 1], 1, *apart[rows.axis + 2 :]))
        x = op.Expand(x, op.ints(*apart)).with_shape(apart)
        if len(apart) != len(shape):
            x = op.Reshape(x, op.ints(*shape))
        x.with_shape(shape)
        value.replace_all_uses_with(x.ir, replace_graph_outputs=True)
