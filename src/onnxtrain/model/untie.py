"""Give each reader of a shared initializer its own: exporters merge equal ones, training would tie them."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

import numpy as np
import onnx

from onnxtrain.errors import OptionError
from onnxtrain.model.file import ModelFile

_FLOATING = (
    onnx.TensorProto.FLOAT,
    onnx.TensorProto.DOUBLE,
    onnx.TensorProto.FLOAT16,
    onnx.TensorProto.BFLOAT16,
)


def untied(file: ModelFile, which: bool | str | Sequence[str]) -> ModelFile:
    """The model with shared initializers copied: the first reader keeps the name, others get ``{name}_2`` ...

    Args:
        file: The user's model.
        which: ``False`` for the model as it is, ``True`` for shared vectors (scales, biases, statistics; a
            matrix that is shared is mostly tied on purpose), or glob patterns of names.

    Returns:
        The model itself where nothing is shared.

    Raises:
        OptionError: A pattern matches no shared initializer.
    """
    if which is False:
        return file
    shared = _shared(file.proto.graph)
    if which is True:
        chosen = {name for name in shared if file.value(name).ndim <= 1}
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
    for name in sorted(chosen):
        _copy(proto.graph, name, shared[name], taken, file.value(name))
    return file.changed(proto)


def _shared(graph: onnx.GraphProto) -> dict[str, list[tuple[int, int]]]:
    """Floating initializers with more than one reader, to (node, input) of every reader.

    Readers behind Identity nodes count: an exporter writes ``b = Identity(a)`` for a merged initializer.
    """
    behind = {tensor.name: tensor.name for tensor in graph.initializer if tensor.data_type in _FLOATING}
    readers: dict[str, list[tuple[int, int]]] = {}
    for index, node in enumerate(graph.node):
        if node.op_type == "Identity" and node.input[0] in behind:
            behind[node.output[0]] = behind[node.input[0]]
            continue
        for position, name in enumerate(node.input):
            if name in behind:
                readers.setdefault(behind[name], []).append((index, position))
    return {name: found for name, found in readers.items() if len({index for index, _ in found}) > 1}


def _copy(
    graph: onnx.GraphProto, name: str, readers: list[tuple[int, int]], taken: set[str], array: np.ndarray
) -> None:
    owner: dict[int, str] = {}
    for index, position in readers:
        if index not in owner:
            own = name
            number = len(owner) + 1
            if owner:
                own = f"{name}_{number}"
                while own in taken:
                    own += "_"
                taken.add(own)
                # Inside the file, also where the original lies outside: two tensors may not share external bytes.
                graph.initializer.append(onnx.numpy_helper.from_array(array, own))
            owner[index] = own
        graph.node[index].input[position] = owner[index]
