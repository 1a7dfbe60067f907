"""Tensors that no step changes reach onnxruntime by address: they are not copied, and may be of any size.

The bytes of a model hold 2 GiB at most. Large tensors are therefore left out of them: in the model they are external
data of a file that nobody opens, and onnxruntime is told where in memory their values are. External data of the user's
own files goes the same way, memory-mapped: it does not matter which folder the process works in.

onnxruntime copies initializers all the same while it creates a session. Weights of products, which are the most of a
large model, are therefore inputs of the session, bound to where they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.ir.domains import MICROSOFT_DOMAIN, ONNXTRAIN_DOMAIN
from onnxtrain.model_file.external import DataFiles, locate
from onnxtrain.runtime.lifting import lift_large_constants, replace_tensors
from onnxtrain.workarounds.sessions import hand_over, in_place, packed

_LARGE = 1 << 16
"""Bytes from which on a tensor is handed over by address; smaller ones are in the model, where shapes are read."""

_BOUND = {
    "": frozenset({"MatMul", "Gemm", "Gather", "DequantizeLinear", "Cast", "Shape"}),
    MICROSOFT_DOMAIN: frozenset({"FusedMatMul", "GatherBlockQuantized"}),
}
"""Operators that compute the same, as fast, from an input as from an initializer; so do those of this project."""

_NOT_BY_ADDRESS = frozenset({ir.DataType.STRING, ir.DataType.COMPLEX64, ir.DataType.COMPLEX128})
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class FrozenTensors:
    """The memory of a graph's large initializers, for one onnxruntime session.

    onnxruntime reads this memory as long as its session lives, and does not keep it alive: who holds the session
    holds this object, too.

    Large constants of the graph and its subgraphs become initializers of the graph, and small external data is read:
    the graph computes the same.

    Args:
        model: The graph of the session.
        bind: Whether inputs of the session may be bound; else all are initializers.

    Raises:
        ModelError: External data is not where the model says.
    """

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
        """Tell the options of a session where the tensors are.

        Args:
            settings: The options.
            shared: Whether the session may read them where they are; a provider with memory of its own takes a copy.
        """
        dtypes = {name: tensor.dtype for name, tensor in self._tensors.items()}
        given = {name: array for name, array in self._arrays.items() if name not in self._bound}
        self._values = hand_over(settings, given, dtypes, shared=shared)
        bound = {name: self._arrays[name] for name in self._tensors if name in self._bound}
        self.inputs = dict(zip(bound, in_place(bound, dtypes), strict=True))

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """While this context is open, the graph's large initializers have no data, or are inputs."""
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
                initializers[name] = value  # in the order that they had


def _may_be_bound(value: ir.Value) -> bool:
    """Whether all that reads a value is as fast from an input; a Reshape is where what reads its result is."""
    return not value.is_graph_output() and all(
        node.domain == ONNXTRAIN_DOMAIN
        or node.op_type in _BOUND.get(node.domain, ())
        or ((node.domain, node.op_type) == ("", "Reshape") and _may_be_bound(node.outputs[0]))
        for node in value.consumers()
    )


def is_large(tensor: ir.TensorProtocol) -> bool:
    """Whether a tensor is handed over by address."""
    return tensor.nbytes >= _LARGE and tensor.dtype not in _NOT_BY_ADDRESS


def _elements(tensor: ir.TensorProtocol, files: DataFiles) -> np.ndarray[Any, Any]:
    """A tensor's memory as an array of its shape: unsigned numbers of the size of an element, or packed bytes."""
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
    """The bytes of an external tensor, mapped."""
    return files.raw(locate(ir.serde.serialize_tensor(tensor), Path(tensor.base_dir or ".")))


def _in_memory(tensor: ir.ExternalTensor, files: DataFiles) -> ir.TensorProtocol:
    """An external tensor with its data."""
    proto = ir.serde.serialize_tensor(tensor)
    proto.raw_data = _raw(tensor, files).tobytes()
    proto.ClearField("external_data")
    proto.ClearField("data_location")
    return ir.serde.deserialize_tensor(proto)
