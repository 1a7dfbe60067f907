"""Widen float16 and bfloat16 models: their working copies compute in float32.

Small float16 gradients underflow, bfloat16 sums lose small terms, and ONNX Runtime has few CPU kernels for either.
Trained weights are held in float32 and rounded on saving; frozen weights stay in the file's type and are widened where
they are read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from onnxtrain.errors import OptionError
from onnxtrain.graph.clone import subgraphs
from onnxtrain.graph.value import HALVES
from onnxtrain.parameters.stored import Stored, WidenedTensor
from onnxtrain.parameters.trainable import Initializer

Halves = dict[str, ir.TensorProtocol]
"""Float16 and bfloat16 tensors by the names of their initializers."""

_BLOCK = 1 << 20
"""Number of values to round at once."""

_NAMES = "onnxtrain.names"
"""Key of the names of a graph's values among the notes on it, which are not saved."""

_TYPE_ATTRIBUTES = frozenset({"to", "dtype", "output_dtype"})


def widen(model: ir.Model) -> Halves:
    """Widen a working copy to float32, in place; inputs keep their types, outputs do not.

    Requires: types as declared by the file, before inference. Ensures: only inputs are in half precision.
    """
    halves: Halves = {}
    for function in model.functions.values():
        _widen_nodes(function)
    _widen_graph(model.graph, halves)
    for value in model.graph.inputs:
        if value.dtype in HALVES:
            _cast(model.graph, value, list(value.uses()))
    return halves


def keep_frozen(model: ir.Model, halves: Halves, trained: Collection[str]) -> None:
    """Restore the type of frozen initializers, in place, and widen them where they are read."""
    for name, tensor in halves.items():
        value = model.graph.initializers.get(name)
        if value is None or name in trained:
            continue
        value.const_value = tensor
        value.dtype = tensor.dtype
        gathers = _gathers(model.graph, value)
        for gather in gathers:
            _cast_behind(gather)
        wide = [
            (node, slot)
            for node, slot in value.uses()
            if node not in gathers and (node.domain, node.op_type) != ("", "Cast")
        ]
        _cast(model.graph, value, wide)


def keep_types(model: ir.Model, halves: Halves, differentiated: Collection[str]) -> None:
    """Restore the types of all initializers, in place; the gradients of some stay in float32."""
    keep_frozen(model, halves, differentiated)
    for name in differentiated:
        value = model.graph.initializers.get(name)
        if value is not None and name in halves:
            value.const_value, value.dtype = halves[name], halves[name].dtype
            _cast(model.graph, value, list(value.uses()))


def narrow_outputs(model: ir.Model, dtypes: Mapping[str, ir.DataType]) -> None:
    """Cast outputs to the file's float16 or bfloat16 types, in place."""
    graph = model.graph
    narrowed: dict[ir.Value, ir.Value] = {}
    for index, value in enumerate(graph.outputs):
        dtype = dtypes.get(value.name or "")
        if value not in narrowed and (dtype is None or value.dtype == dtype or value.producer() is None):
            continue
        if value not in narrowed:
            assert dtype is not None
            node = ir.Node("", "Cast", [value], [ir.AttrInt64("to", int(dtype))], num_outputs=1)
            made = node.outputs[0]
            made.name, value.name = value.name, _single_name(graph, value)
            made.type, made.shape = ir.TensorType(dtype), value.shape
            graph.append(node)
            narrowed[value] = made
        graph.outputs[index] = narrowed[value]


def hold_rounded(model: ir.Model, halves: Halves, trained: Collection[str]) -> dict[str, str]:
    """Hold parameters in bfloat16, in place; all their readers read one value in float32."""
    wide = {}
    for name in trained:
        if name not in halves:
            continue
        tensor, value = halves[name], model.graph.initializers[name]
        if tensor.dtype != ir.DataType.BFLOAT16:
            raise OptionError(
                f"Precision(master_weights=False) holds trained weights in bfloat16, but {name!r} is "
                f"{tensor.dtype.name.lower()}, whose range is too small; leave master_weights out."
            )
        readers = list(value.uses())
        value.const_value, value.dtype = tensor, tensor.dtype
        cast = _widening(model.graph, value, [])
        # The differentiated value has a node of its own: passes may move a cast to its reader.
        own = ir.Node("", "Identity", [cast.outputs[0]], num_outputs=1)
        single = own.outputs[0]
        single.name, single.type, single.shape = f"{name}.trained", cast.outputs[0].type, value.shape
        for reader, slot in readers:
            reader.replace_input_with(slot, single)
        model.graph.insert_before(next(iter(model.graph)), [cast, own])
        wide[name] = str(single.name)
    return wide


def in_file(table: Iterable[Initializer], halves: Halves) -> list[Initializer]:
    """Return the table of initializers with the file's types."""
    return [replace(row, dtype=halves[row.name].dtype.name.lower()) if row.name in halves else row for row in table]


def rounded(halves: Halves, trained: Collection[str]) -> list[Stored]:
    """Return how trained float32 weights are written: rounded to the nearest value of the file's type."""
    return [Stored(name, (name,), _Rounding(tensor.dtype)) for name, tensor in halves.items() if name in trained]


def rounded_to(array: np.ndarray, dtype: ir.DataType) -> np.ndarray:
    """Round to the nearest values of a type, clipped to its largest."""
    most, found = float(dtype.max), np.empty(array.shape, dtype.numpy())
    flat, given = found.reshape(-1), array.reshape(-1)
    for start in range(0, flat.size, _BLOCK):  # clipping copies
        part = given[start : start + _BLOCK]
        flat[start : start + _BLOCK] = np.where(np.isfinite(part), np.clip(part, -most, most), part)
    return found


@dataclass(frozen=True)
class _Rounding:
    dtype: ir.DataType

    def __call__(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        return rounded_to(arrays[0], self.dtype)


def _widen_graph(graph: ir.Graph, halves: Halves) -> None:
    for name, value in graph.initializers.items():
        tensor = value.const_value
        if tensor is not None and tensor.dtype in HALVES:
            halves[name] = tensor
            value.const_value = WidenedTensor(tensor)
            value.dtype = ir.DataType.FLOAT
    for value in graph.outputs:
        _widen_value(value)
    _widen_nodes(graph)
    for node in graph:
        for body in subgraphs(node):
            for value in body.inputs:
                _widen_value(value)
            _widen_graph(body, {})


def _widen_nodes(graph: ir.Graph | ir.Function) -> None:
    for node in graph:
        for output in node.outputs:
            _widen_value(output)
        for name, attribute in list(node.attributes.items()):
            if attribute.is_ref():
                continue
            names_type = name in _TYPE_ATTRIBUTES and attribute.type == ir.AttributeType.INT
            # Not as_tensor(): its protocol check takes 0.1 ms for every Constant.
            if attribute.type == ir.AttributeType.TENSOR and attribute.value.dtype in HALVES:
                array = attribute.value.numpy().astype(np.float32)
                node.attributes[name] = ir.AttrTensor(name, ir.tensor(array))
            elif names_type and attribute.as_int() in HALVES:
                node.attributes[name] = ir.AttrInt64(name, int(ir.DataType.FLOAT))


def _widen_value(value: ir.Value) -> None:
    if isinstance(value.type, ir.TensorType) and value.dtype in HALVES:
        value.type = ir.TensorType(ir.DataType.FLOAT)


def _gathers(graph: ir.Graph, table: ir.Value) -> list[ir.Node]:
    """Return the lookups of a table whose results can be widened instead of the table."""
    found = [node for node, slot in table.uses() if (node.domain, node.op_type, slot) == ("", "Gather", 0)]
    return [node for node in found if node.graph is graph and not node.outputs[0].is_graph_output()]


def _cast_behind(node: ir.Node) -> None:
    """Let a node compute in the type of its input, and widen its result."""
    result, given = node.outputs[0], node.inputs[0]
    assert node.graph is not None
    assert given is not None
    node.graph.insert_after(node, _widening(node.graph, result, list(result.uses())))
    result.type = ir.TensorType(given.dtype or ir.DataType.UNDEFINED)


def _cast(graph: ir.Graph, value: ir.Value, readers: Sequence[tuple[ir.Node, int]]) -> None:
    """Let some readers of a value read it in float32."""
    if readers:
        graph.insert_before(next(iter(graph)), _widening(graph, value, readers))


def _widening(graph: ir.Graph | ir.Function, value: ir.Value, readers: Sequence[tuple[ir.Node, int]]) -> ir.Node:
    """Make the Cast to float32 for some readers of a value."""
    node = ir.Node("", "Cast", [value], [ir.AttrInt64("to", int(ir.DataType.FLOAT))], num_outputs=1)
    made = node.outputs[0]
    made.name = _single_name(graph, value)
    made.type, made.shape = ir.TensorType(ir.DataType.FLOAT), value.shape
    for reader, slot in readers:
        reader.replace_input_with(slot, made)
    return node


def _single_name(graph: ir.Graph | ir.Function, value: ir.Value) -> str:
    """Return a name for the float32 form of a value; a model that was widened before has such names."""
    if _NAMES not in graph.meta:
        graph.meta[_NAMES] = {output.name for node in graph for output in node.outputs}
    taken: set[str | None] = graph.meta[_NAMES]
    name = f"{value.name}.single"
    while name in taken:
        name += "_"
    taken.add(name)
    return name
