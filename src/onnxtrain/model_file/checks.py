"""Checks that a model must pass before any other use; each failure is one sentence."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from google.protobuf import descriptor_pool, message_factory  # type: ignore[import-untyped]
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx import FunctionProto, GraphProto, ModelProto, NodeProto, SparseTensorProto, TensorProto, helper, numpy_helper

from onnxtrain.errors import ModelError
from onnxtrain.graph.domains import is_default_domain
from onnxtrain.graph.limits import DEEPEST
from onnxtrain.model_file import validity
from onnxtrain.model_file.external import ExternalData, data_bytes, locate
from onnxtrain.model_file.proto import (
    all_nodes,
    all_tensors,
    default_opset,
    hide_runtime_operators,
    import_runtime_domain,
    proto_subgraphs,
    skeleton,
    sort_nodes,
    unify_default_domain,
)
from onnxtrain.model_file.protobuf_wire import Template

_VERSION_3 = b"\x62\x06proto3"


@functools.cache
def _strict_model() -> Any:
    """Return the ModelProto class in protobuf syntax 3, which parses the same bytes and checks UTF-8."""
    pool = descriptor_pool.DescriptorPool()  # a pool of its own, where the same names are free
    pool.AddSerializedFile(ModelProto.DESCRIPTOR.file.serialized_pb + _VERSION_3)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(ModelProto.DESCRIPTOR.full_name))


def first_line(error: BaseException) -> str:
    """Return the first line of another package's error, or the error's type if the message is empty."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else f"{type(error).__name__} without a message"


_MOST_BYTES = (1 << 31) - 1
"""Maximum bytes of a tensor in a model; ONNX Runtime, too, converts sparse tensors to dense ones."""

_ALWAYS, _TIMES = 1 << 26, 1 << 14


def is_plausible(dense: int, stored: int) -> bool:
    """Return whether stored bytes may declare so many dense ones: 64 MiB, or 16,384 times as many."""
    return dense <= max(_ALWAYS, _TIMES * stored)


_INDEX_TYPES = (TensorProto.INT64, TensorProto.INT32, TensorProto.INT16, TensorProto.INT8)


def check_sparse(label: str, sparse: SparseTensorProto) -> None:
    """Check a sparse initializer without making it dense."""
    whose = f"{label} has the sparse initializer {sparse.values.name!r}"
    dims, stored = list(sparse.dims), list(sparse.values.dims)
    if any(part.data_location == TensorProto.EXTERNAL for part in (sparse.values, sparse.indices)):
        raise ModelError(f"{whose} with its data in another file, which is not supported; save it inside.")
    dense = declared(sparse)
    if len(dims) > _MOST_AXES:
        raise ModelError(f"{whose} of {len(dims)} axes, but arrays have {_MOST_AXES} at most; export the model again.")
    size = data_bytes(dense)
    if size > _MOST_BYTES:
        raise ModelError(
            f"{whose} of shape {dims}, which takes {size} bytes dense, as ONNX Runtime stores it; a "
            "tensor has at most 2 GiB: export the model again."
        )
    if len(stored) != 1 or sparse.indices.data_type not in _INDEX_TYPES:
        raise ModelError(
            f"{whose}, whose values are not a list or whose indices are not integers; export the model again."
        )
    count = stored[0]
    held = data_bytes(sparse.values) + data_bytes(sparse.indices)
    if not is_plausible(size, held):
        raise ModelError(
            f"{whose} of shape {dims}, which takes {size:,} bytes dense, but holds {held:,}; the file is "
            "damaged: export the model again."
        )
    if list(sparse.indices.dims) not in ([count], [count, len(dims)]):
        raise ModelError(
            f"{whose} with {count} values, but indices of shape {list(sparse.indices.dims)}; it needs [{count}] or "
            f"[{count}, {len(dims)}]: export the model again."
        )
    indices = numpy_helper.to_array(sparse.indices)
    outside = (indices < 0) | (indices >= np.asarray(dims if indices.ndim == 2 else math.prod(dims)))
    if outside.any():
        raise ModelError(
            f"{whose} of shape {dims} with the index {indices[outside][0]}, which is out of range; export the "
            "model again."
        )


def dense_array(sparse: SparseTensorProto) -> npt.NDArray[np.generic]:
    """Return the dense values of a checked sparse initializer."""
    values, indices = numpy_helper.to_array(sparse.values), numpy_helper.to_array(sparse.indices)
    dense = np.zeros(list(sparse.dims), values.dtype)
    if indices.ndim == 1:
        dense.reshape(-1)[indices] = values
    else:
        dense[tuple(indices.T)] = values
    return dense


def declared(sparse: SparseTensorProto) -> TensorProto:
    """Return the dense initializer without data."""
    return TensorProto(name=sparse.values.name, data_type=sparse.values.data_type, dims=sparse.dims)


def check_bodies(label: str, proto: ModelProto) -> None:
    """Check the bodies of If, Loop and Scan against their nodes; ONNX's checker looks at each alone."""
    for holder in (proto.graph, *proto.functions):
        for node in all_nodes(holder):
            if not is_default_domain(node.domain) or node.op_type not in _MISFITS:
                continue
            given = {attribute.name for attribute in node.attribute}
            missing = [name for name in _REQUIRED[node.op_type] if name not in given]  # the checker skips functions
            lacks = f"which has no attribute {missing[0]!r}" if missing else None
            wrong = lacks or next(_MISFITS[node.op_type](node), None)
            if wrong is not None:
                named = f"{node.op_type} node {node.name!r}" if node.name else f"{node.op_type} node"
                output = f" (output {node.output[0]!r})" if node.output else ""
                raise ModelError(f"{label} has the {named}{output}, {wrong}; export it again.")


def _body_of(node: NodeProto, name: str) -> GraphProto:
    found: GraphProto = next(attribute.g for attribute in node.attribute if attribute.name == name)
    return found


def _of_if(node: NodeProto) -> Iterator[str]:
    for name in ("then_branch", "else_branch"):
        body = _body_of(node, name)
        if len(body.output) != len(node.output):
            yield f"whose {name} has {_count(body.output, 'output')} where the node has {len(node.output)}"
        if body.input:
            yield f"whose {name} has inputs, but a branch only reads values of the outer graphs"


def _of_loop(node: NodeProto) -> Iterator[str]:
    body, states = _body_of(node, "body"), max(len(node.input) - 2, 0)
    if len(body.input) != 2 + states:
        yield (
            f"whose body has {_count(body.input, 'input')}, but iteration number, condition and {_states(states)} are "
            f"{2 + states}"
        )
    yield from _outputs(node, body, states, 1)


def _of_scan(node: NodeProto) -> Iterator[str]:
    body = _body_of(node, "body")
    number = next(item for item in node.attribute if item.name == "num_scan_inputs")
    if number.ref_attr_name:  # a reference to an attribute of the function
        return
    slices = int(helper.get_attribute_value(number))
    states = len(node.input) - slices
    if slices < 1 or states < 0:
        yield f"which scans {slices} inputs but has {len(node.input)}"
        return
    if len(body.input) != len(node.input):
        yield f"whose body has {_count(body.input, 'input')} where the node has {len(node.input)}"
    yield from _outputs(node, body, states, 0)


def _outputs(node: NodeProto, body: GraphProto, states: int, before: int) -> Iterator[str]:
    found = len(body.output) - before
    if found < states:
        yield f"whose body has {_count(body.output, 'output')}, too few for {_states(states)}"
    elif len(node.output) != found:
        yield f"whose body has {_count(body.output, 'output')} where the node has {len(node.output)}"


def _states(count: int) -> str:
    return f"{count} state variable{'' if count == 1 else 's'}"


def _count(values: object, word: str) -> str:
    number = len(values)  # type: ignore[arg-type]
    return f"{number} {word}{'' if number == 1 else 's'}"


_MISFITS: dict[str, Callable[[NodeProto], Iterator[str]]] = {"If": _of_if, "Loop": _of_loop, "Scan": _of_scan}
"""Functions that yield the mismatches of a node, each as a relative clause."""

_REQUIRED = {
    "If": ("then_branch", "else_branch"),
    "Loop": ("body",),
    "Scan": ("body", "num_scan_inputs"),
}

MOST_NODES = 1 << 14
"""Number of nodes to which functions may always expand."""

MOST_TIMES = 32
"""The factor by which inlining may multiply the nodes of the file, where that exceeds `MOST_NODES`."""

_Name = tuple[str, str, str]


def check_functions(label: str, proto: ModelProto) -> None:
    """Limit the nodes of a model with its functions inlined: a small file can expand beyond any memory."""
    if not proto.functions:
        return
    holders = {(function.domain, function.name, function.overload): function for function in proto.functions}
    calls = {name: _function_calls(function, holders) for name, function in holders.items()}
    own = {name: sum(1 for _ in all_nodes(function)) for name, function in holders.items()}
    called = _function_calls(proto.graph, holders)
    sizes: dict[_Name, int] = {}
    for name in _callees_first(called, calls):
        sizes[name] = own[name] + sum(sizes.get(inner, 0) for inner in calls[name])
    made = sum(sizes[name] for name in called)
    written = sum(1 for _ in all_nodes(proto.graph)) + sum(own.values())
    most = max(MOST_NODES, MOST_TIMES * written)
    if made > most:
        found = f"{made:,}" if made < 10**12 else f"more than {10**12:,}"
        raise ModelError(
            f"{label} has functions that expand to {found} nodes, but the limit for a model of its size is {most:,}; "
            "export it without functions."
        ).about(label, got=found, wanted=most)


def _function_calls(holder: GraphProto | FunctionProto, functions: dict[_Name, FunctionProto]) -> list[_Name]:
    """Return the functions that a graph or function calls, once per call, bodies included."""
    names = ((node.domain, node.op_type, node.overload) for node in all_nodes(holder))
    return [name for name in names if name in functions]


def _callees_first(called: list[_Name], calls: dict[_Name, list[_Name]]) -> list[_Name]:
    """Return the reachable functions, callees first; in cycles in any order."""
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


def check_model(
    label: str, proto: ModelProto, template: Template, folder: Path | None, moved: Mapping[str, str]
) -> tuple[dict[str, ExternalData], list[ExternalData]]:
    """Check a model without reading its external data."""
    _check_head(label, proto)
    _check_depth(label, proto)
    _check_text(label, template)
    _check_names(label, proto)
    _check_ports(label, proto)
    _check_tensors(label, proto)
    located, everywhere = _check_external(label, proto, folder, moved)
    for index, tensor in enumerate(proto.graph.initializer):
        if tensor.name not in located:
            _check_size(label, tensor, *template.stored_elements(index))
    _check_inner_sizes(label, proto)
    for sparse in proto.graph.sparse_initializer:
        check_sparse(label, sparse)
    _check_specification(label, proto)
    return located, everywhere


def _check_head(label: str, proto: ModelProto) -> None:
    if not proto.HasField("graph"):
        raise ModelError(f"{label} has no graph; export the model again.")
    if not proto.graph.output:
        raise ModelError(f"{label} has a graph without outputs; export it again.")
    if not validity.supports_ir_version(proto.ir_version):
        raise ModelError(
            f"{label} has IR version {proto.ir_version}, but ONNX Runtime supports {validity.MINIMUM_IR_VERSION} to "
            f"{validity.newest_ir_version()}; export it for a version in that range."
        )
    opset = default_opset(proto.opset_import)
    if opset is None and any(is_default_domain(node.domain) for node in all_nodes(proto.graph)):
        raise ModelError(f"{label} does not import ONNX's own operators (domain ''); export it with an opset.")
    if opset is not None and not validity.supports_opset(opset):
        raise ModelError(
            f"{label} has opset {opset}, but opsets {validity.MINIMUM_OPSET} to {validity.newest_opset()} are "
            "supported; export it at an opset in that range."
        )


def _check_depth(label: str, proto: ModelProto) -> None:
    found = max(map(_depth, (proto.graph, *proto.functions)))
    if found > DEEPEST:
        raise ModelError(
            f"{label} nests the bodies of If, Loop and Scan {found} levels deep, but protocol buffers read {DEEPEST}; "
            "export it with fewer levels."
        )


def _depth(holder: GraphProto | FunctionProto) -> int:
    return max((1 + _depth(body) for node in holder.node for body in proto_subgraphs(node)), default=0)


def _check_names(label: str, proto: ModelProto) -> None:
    names = [tensor.name for tensor in proto.graph.initializer]
    names += [sparse.values.name for sparse in proto.graph.sparse_initializer]
    if twice := _repeated(names):
        raise ModelError(f"{label} has several initializers named {twice}; names must be unique.")


def _repeated(names: Iterable[str]) -> str:
    """Return the names that come several times, for a sentence."""
    return ", ".join(repr(name) for name, count in sorted(Counter(names).items()) if count > 1)


def _check_text(label: str, template: Template) -> None:
    """Check that every string field is UTF-8; string attributes of nodes are bytes in protocol buffers."""
    try:
        _strict_model().FromString(template.light())
    except DecodeError as error:
        if "UTF-8" in str(error):
            raise ModelError(f"{label} is damaged: it has a name that is not UTF-8 text; copy it again.").about(
                label
            ) from error


def _check_ports(label: str, proto: ModelProto) -> None:
    """Check rules for inputs and outputs that ONNX Runtime enforces and ONNX's checker does not."""
    if twice := _repeated(value.name for value in proto.graph.output):
        raise ModelError(
            f"{label} has several outputs named {twice}; names must be unique: export the model again."
        ).about(label, got=twice)
    for kind, values in (("input", proto.graph.input), ("output", proto.graph.output)):
        for value in values:
            if value.type.WhichOneof("value") == "tensor_type" and not value.type.tensor_type.elem_type:
                raise ModelError(
                    f"{label} has the {kind} {value.name!r} without an element type, which ONNX Runtime needs; "
                    "export the model again."
                )


_MOST_AXES = 64
"""Axes of an array, in NumPy 2."""


def _check_tensors(label: str, proto: ModelProto) -> None:
    """Check what tensors declare, wherever they are."""
    for tensor in all_tensors(proto):
        whose = f"{label} has the tensor {tensor.name!r}"
        if tensor.HasField("segment"):
            raise ModelError(f"{whose} in segments, which no runtime reads; export the model again.")
        if len(tensor.dims) > _MOST_AXES:
            raise ModelError(
                f"{whose} of {len(tensor.dims)} axes, but arrays have {_MOST_AXES} at most; export the model again."
            )
        if tensor.data_type not in _ELEMENT_TYPES:
            raise ModelError(f"{whose} of the unknown element type {tensor.data_type}; export the model again.")


_ELEMENT_TYPES = frozenset(TensorProto.DataType.values())


def _check_external(
    label: str, proto: ModelProto, folder: Path | None, moved: Mapping[str, str]
) -> tuple[dict[str, ExternalData], list[ExternalData]]:
    initializers, others = [], []
    for index, tensor in enumerate(all_tensors(proto)):
        if tensor.data_location == TensorProto.EXTERNAL:
            try:
                found = locate(tensor, folder, moved)
            except ModelError as error:
                sentence = str(error)
                raise ModelError(f"{label} cannot be used: {sentence[0].lower()}{sentence[1:]}") from error
            if index < len(proto.graph.initializer):  # these come first
                initializers.append((tensor.name, found))
            else:
                others.append(found)
    return dict(initializers), [*(found for _, found in initializers), *others]


def _check_size(label: str, tensor: TensorProto, storage: str, stored: int) -> None:
    if tensor.data_type == TensorProto.STRING:
        return
    needed, unit = data_bytes(tensor), "bytes of data"
    if storage == "typed":  # a field has one value per element, two per complex one, one per byte of packed ones
        count, unit = math.prod(tensor.dims), "values"
        is_complex = tensor.data_type in (TensorProto.COMPLEX64, TensorProto.COMPLEX128)
        needed = 2 * count if is_complex else min(needed, count)
    if stored != needed:
        raise ModelError(
            f"{label} has {stored} {unit} for {tensor.name!r}, but its type and shape {list(tensor.dims)} need "
            f"{needed}; export it again."
        )


def _check_inner_sizes(label: str, proto: ModelProto) -> None:
    """Check the sizes of inline tensors in attributes and bodies."""
    outside = len(proto.graph.initializer)
    for tensor in itertools.islice(all_tensors(proto), outside, None):
        if tensor.data_location == TensorProto.EXTERNAL or not tensor.data_type:
            continue
        if tensor.HasField("raw_data"):
            _check_size(label, tensor, "raw", len(tensor.raw_data))
        else:
            stored = (tensor.float_data, tensor.double_data, tensor.int32_data, tensor.int64_data, tensor.uint64_data)
            _check_size(label, tensor, "typed", sum(map(len, stored)))


def _check_specification(label: str, proto: ModelProto) -> None:
    light = skeleton(proto)
    unify_default_domain(light)  # the checker knows one spelling only
    import_runtime_domain(light)
    hide_runtime_operators(light)
    sort_nodes(label, light)  # ONNX Runtime accepts any order
    for value in (*light.graph.input, *light.graph.output):
        # The checker requires shapes here; ONNX Runtime does not, and exporters omit unknown ones.
        if value.type.HasField("tensor_type") and not value.type.tensor_type.HasField("shape"):
            value.type.tensor_type.shape.SetInParent()
    try:
        onnx.checker.check_model(light)
    except onnx.checker.ValidationError as error:
        reason = first_line(error).rstrip(". ")
        raise ModelError(f"{label} is not valid ONNX: {reason}; export it again.") from error
    check_bodies(label, light)
    check_functions(label, light)
