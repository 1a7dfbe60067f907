"""Pass tensors that no step changes to onnxruntime by address: no copy, no size limit.

A serialized model holds at most 2 GiB, so large tensors stay outside: the model refers to external data of a file that
is never opened, and session options give onnxruntime the address of the values. External data of the user's files takes
the same route, so that the working folder of the process does not matter.

onnxruntime still copies initializers while it creates a session. Weights of linear layers, most of a large model, are
therefore inputs of the session, bound to their memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.graph.domains import MICROSOFT_DOMAIN, ONNXTRAIN_DOMAIN
from onnxtrain.graph.upstream.sessions import in_place, packed, share_initializers
from onnxtrain.model_file.external import DataFiles, DataTensor, drop_location, locate

_LARGE = 1 << 16
"""Smallest size in bytes of a tensor passed by address; smaller ones stay in the model, for shape inference."""

_BOUND = {
    "": frozenset({"MatMul", "Gemm", "Gather", "DequantizeLinear", "Cast", "Shape"}),
    MICROSOFT_DOMAIN: frozenset({"FusedMatMul", "GatherBlockQuantized"}),
}
"""Operators that are as fast on a graph input as on an initializer; those of the domain ``onnxtrain`` are too."""

_NOT_BY_ADDRESS = frozenset({ir.DataType.STRING, ir.DataType.COMPLEX64, ir.DataType.COMPLEX128})
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class FrozenTensors:
    """Memory of a graph's large initializers; the owner of the session that reads it must hold this object, too."""

    def __init__(self, model: ir.Model, *, bind: bool = False) -> None:
        files = DataFiles()
        lift_large_constants(model, is_large)
        self._graph = model.graph
        self._tensors: dict[str, ir.TensorProtocol] = {}
        for name, value in model.graph.initializers.items():
            if value.const_value is not None and is_large(value.const_value):
                self._tensors[name] = value.const_value
        self._arrays = {name: _elements(tensor, files) for name, tensor in self._tensors.items()}
        self._values: list[Any] = []
        initializers, inputs = model.graph.initializers, {value.name for value in model.graph.inputs}
        self._bound = {
            name for name in self._tensors if bind and name not in inputs and _may_be_bound(initializers[name])
        }
        self.inputs: dict[str, Any] = {}
        large = set(map(id, self._tensors.values()))
        replace_tensors(
            model,
            lambda tensor: (
                _in_memory(tensor, files)
                if isinstance(tensor, ir.ExternalTensor) and id(tensor) not in large
                else tensor
            ),
        )

    def register(self, settings: Any, *, shared: bool = True) -> None:
        """Add the addresses of the tensors to session options."""
        dtypes = {name: tensor.dtype for name, tensor in self._tensors.items()}
        given = {name: array for name, array in self._arrays.items() if name not in self._bound}
        self._values = share_initializers(settings, given, dtypes, shared=shared)
        bound = {name: self._arrays[name] for name in self._tensors if name in self._bound}
        self.inputs = dict(zip(bound, in_place(bound, dtypes), strict=True))

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Context in which the graph's large initializers have no data or are inputs, for serialization."""
        initializers, inputs = self._graph.initializers, self._graph.inputs
        order = dict(initializers)
        try:
            for name, tensor in self._tensors.items():
                if name in self._bound:
                    value = initializers.pop(name)
                    value.const_value = None
                    inputs.append(value)
                    continue
                shape = ir.Shape(tensor.shape.numpy())
                initializers[name].const_value = ir.ExternalTensor(
                    "onnxtrain", 0, tensor.nbytes, tensor.dtype, shape=shape, name=name, base_dir=""
                )
            yield
        finally:
            for name in [name for name in self._tensors if name in self._bound and name not in initializers]:
                inputs.remove(order[name])
            for name, value in order.items():
                initializers.pop(name, None)
                value.const_value = self._tensors.get(name, value.const_value)
                initializers[name] = value  # restores the order


def _may_be_bound(value: ir.Value) -> bool:
    """Return whether all consumers of a value, seen through Reshape, are as fast on a graph input."""
    return not value.is_graph_output() and all(
        (
            node.domain == ONNXTRAIN_DOMAIN
            and not (value.dtype == ir.DataType.BOOL and node.op_type.startswith("Linear"))
        )
        or node.op_type in _BOUND.get(node.domain, ())
        or ((node.domain, node.op_type) == ("", "Reshape") and _may_be_bound(node.outputs[0]))
        for node in value.consumers()
    )


def is_large(tensor: ir.TensorProtocol) -> bool:
    """Return whether a tensor is passed to onnxruntime by address."""
    return tensor.nbytes >= _LARGE and tensor.dtype not in _NOT_BY_ADDRESS


def _elements(tensor: ir.TensorProtocol, files: DataFiles) -> np.ndarray[Any, Any]:
    """Return a tensor's memory as an array of its shape: unsigned integers of the element size, or packed bytes."""
    shape = tuple(int(size) for size in tensor.shape.numpy())
    is_packed = tensor.dtype.bitwidth < 8
    if isinstance(tensor, ir.ExternalTensor):
        raw = _raw(tensor, files)
    elif is_packed:
        raw = np.frombuffer(tensor.tobytes(), np.uint8)
    else:
        raw = np.ascontiguousarray(tensor.numpy()).reshape(-1).view(np.uint8)
    if is_packed:
        return packed(raw, shape)
    elements = raw.view(_UNSIGNED[tensor.dtype.bitwidth // 8]).reshape(shape)
    return np.require(elements, requirements=["ALIGNED"])


def _raw(tensor: ir.ExternalTensor, files: DataFiles) -> np.ndarray[Any, Any]:
    if isinstance(tensor, DataTensor):
        return np.frombuffer(tensor.raw_bytes(), np.uint8)
    return np.frombuffer(files.bytes(locate(ir.serde.serialize_tensor(tensor), tensor.base_dir or ".")), np.uint8)


def _in_memory(tensor: ir.ExternalTensor, files: DataFiles) -> ir.TensorProtocol:
    proto = ir.serde.serialize_tensor(tensor)
    proto.raw_data = _raw(tensor, files).tobytes()
    drop_location(proto)
    return ir.serde.deserialize_tensor(proto)


_GRAPHS = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)


def lift_large_constants(model: ir.Model, is_large: Callable[[ir.TensorProtocol], bool]) -> None:
    """Make large constants, and large initializers of subgraphs, initializers of the main graph, in place."""
    lifted = [
        (value, tensor)
        for value, tensor in _constants(model.graph)
        if is_large(tensor) and not value.is_graph_output() and not value.is_graph_input()
    ]
    names = _names(model.graph) if lifted else set()
    for value, tensor in lifted:
        name = str(value.name)
        while name in names:
            name += "_"
        names.add(name)
        new = ir.val(name, const_value=tensor)
        ir.convenience.replace_all_uses_with(value, new)
        node = value.producer()
        if node is not None and node.graph is not None:
            node.graph.remove(node, safe=True)
        elif value.graph is not None:
            value.graph.initializers.pop(str(value.name))
        model.graph.register_initializer(new)


def replace_tensors(model: ir.Model, replace: Callable[[ir.TensorProtocol], ir.TensorProtocol]) -> None:
    """Replace tensors in initializers and attributes of all graphs and functions, in place."""
    for graph in (model.graph, *(function.graph for function in model.functions.values())):
        _replace_initializers(graph, replace)
        for node in ir.traversal.RecursiveGraphIterator(graph):
            for name, attribute in list(node.attributes.items()):
                if attribute.is_ref():
                    continue
                if attribute.type == ir.AttributeType.TENSOR:
                    if (new := replace(attribute.as_tensor())) is not attribute.value:
                        node.attributes[name] = ir.AttrTensor(name, new)
                elif attribute.type == ir.AttributeType.TENSORS:
                    node.attributes[name] = ir.AttrTensors(name, [replace(tensor) for tensor in attribute.as_tensors()])
                for subgraph in _subgraphs(attribute):
                    _replace_initializers(subgraph, replace)


def _replace_initializers(graph: ir.Graph, replace: Callable[[ir.TensorProtocol], ir.TensorProtocol]) -> None:
    for value in graph.initializers.values():
        if value.const_value is not None:
            value.const_value = replace(value.const_value)


def _constants(graph: ir.Graph) -> Iterator[tuple[ir.Value, ir.TensorProtocol]]:
    """Yield outputs of Constant nodes and initializers of subgraphs, with their tensors."""
    for node in ir.traversal.RecursiveGraphIterator(graph):
        attribute = node.attributes.get("value") if (node.domain, node.op_type) == ("", "Constant") else None
        if attribute is not None and not attribute.is_ref():
            yield node.outputs[0], attribute.as_tensor()
        for subgraph in (graph for attribute in node.attributes.values() for graph in _subgraphs(attribute)):
            for value in subgraph.initializers.values():
                if value.const_value is not None:
                    yield value, value.const_value


def _subgraphs(attribute: ir.Attr) -> Iterator[ir.Graph]:
    if attribute.is_ref() or attribute.type not in _GRAPHS:
        return
    yield from attribute.as_graphs() if attribute.type == ir.AttributeType.GRAPHS else [attribute.as_graph()]


def _names(graph: ir.Graph) -> set[str]:
    values = [*graph.inputs, *graph.initializers.values()]
    for node in ir.traversal.RecursiveGraphIterator(graph):
        values += node.outputs
        for subgraph in (graph for attribute in node.attributes.values() for graph in _subgraphs(attribute)):
            values += [*subgraph.inputs, *subgraph.initializers.values()]
    return {str(value.name) for value in values}
