"""Checks that a model must pass before any other use; each failure is one sentence."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import onnx
from onnx import FunctionProto, GraphProto, ModelProto, TensorProto

from onnxtrain.errors import ModelError
from onnxtrain.ir.limits import DEEPEST
from onnxtrain.model_file import limits
from onnxtrain.model_file.bodies import check_bodies
from onnxtrain.model_file.external import ExternalData, data_bytes, locate
from onnxtrain.model_file.functions import check_functions
from onnxtrain.model_file.order import sort_nodes
from onnxtrain.model_file.protobuf_wire import Template
from onnxtrain.model_file.skeleton import (
    all_tensors,
    default_opset,
    hide_runtime_operators,
    import_runtime_domain,
    proto_subgraphs,
    skeleton,
    unify_default_domain,
)
from onnxtrain.model_file.sparse_tensors import check_sparse
from onnxtrain.model_file.text import first_line, is_text


def check_model(
    label: str, proto: ModelProto, template: Template, folder: Path | None, moved: Mapping[str, str]
) -> tuple[dict[str, ExternalData], list[ExternalData]]:
    """Check a model without reading its external data.

    Args:
        label: What messages call the model.
        proto: The model.
        template: Its bytes.
        folder: Where its external data is.
        moved: Where data files are now, by where the model says they are.

    Returns:
        Where the external initializers of the main graph are by name, and where all external tensors are.

    Raises:
        ModelError: The first thing that is wrong.
    """
    _check_head(label, proto)
    _check_depth(label, proto)
    _check_text(label, template)
    _check_names(label, proto)
    _check_ports(label, proto)
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
        raise ModelError(f"{label} has a graph without outputs, so that there is nothing to compute; export it again.")
    if not limits.supports_ir_version(proto.ir_version):
        raise ModelError(
            f"{label} has IR version {proto.ir_version}, but ONNX Runtime supports {limits.MINIMUM_IR_VERSION} to "
            f"{limits.newest_ir_version()}; export it for a version in that range."
        )
    opset = default_opset(proto.opset_import)
    if opset is None:
        raise ModelError(f"{label} does not import ONNX's own operators (domain ''); export it with an opset.")
    if not limits.supports_opset(opset):
        raise ModelError(
            f"{label} has opset {opset}, but opsets {limits.MINIMUM_OPSET} to {limits.newest_opset()} are supported; "
            "export it at an opset in that range."
        )


def _check_depth(label: str, proto: ModelProto) -> None:
    found = max(map(_depth, (proto.graph, *proto.functions)))
    if found > DEEPEST:
        raise ModelError(
            f"{label} nests the bodies of If, Loop and Scan {found} levels deep, but protocol buffers read {DEEPEST}; "
            "export it with fewer."
        )


def _depth(holder: GraphProto | FunctionProto) -> int:
    return max((1 + _depth(body) for node in holder.node for body in proto_subgraphs(node)), default=0)


def _check_names(label: str, proto: ModelProto) -> None:
    names = [tensor.name for tensor in proto.graph.initializer]
    names += [sparse.values.name for sparse in proto.graph.sparse_initializer]
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        raise ModelError(f"{label} has several initializers named {', '.join(map(repr, twice))}; names must be unique.")


def _check_text(label: str, template: Template) -> None:
    if not is_text(template.light()):
        raise ModelError(f"{label} is damaged: it has a name that is not UTF-8 text; copy it again.")


def _check_ports(label: str, proto: ModelProto) -> None:
    """Check the rules for inputs and outputs that ONNX Runtime enforces and ONNX's checker does not."""
    twice = sorted(name for name, count in Counter(value.name for value in proto.graph.output).items() if count > 1)
    if twice:
        raise ModelError(
            f"{label} has several outputs named {', '.join(map(repr, twice))}; each needs a name of its own: "
            "export the model again."
        )
    for what, values in (("input", proto.graph.input), ("output", proto.graph.output)):
        for value in values:
            if value.type.WhichOneof("value") == "tensor_type" and not value.type.tensor_type.elem_type:
                raise ModelError(
                    f"{label} has the {what} {value.name!r} without an element type, which ONNX Runtime needs; "
                    "export the model again."
                )


def _check_external(
    label: str, proto: ModelProto, folder: Path | None, moved: Mapping[str, str]
) -> tuple[dict[str, ExternalData], list[ExternalData]]:
    initializers, others = [], []
    for index, tensor in enumerate(all_tensors(proto)):
        if tensor.data_location == TensorProto.EXTERNAL:
            try:
                found = locate(tensor, folder, moved)
            except ModelError as error:
                raise ModelError(f"{label} cannot be used: {_lower(str(error))}") from error
            if index < len(proto.graph.initializer):  # these come first
                initializers.append((tensor.name, found))
            else:
                others.append(found)
    return dict(initializers), [*(found for _, found in initializers), *others]


def _lower(sentence: str) -> str:
    return sentence[0].lower() + sentence[1:]


def _check_size(label: str, tensor: TensorProto, storage: str, stored: int) -> None:
    if tensor.data_type == TensorProto.STRING:
        return
    needed = data_bytes(tensor)
    if storage == "raw" and stored != needed:
        raise ModelError(
            f"{label} has {stored} bytes of data for {tensor.name!r}, but its type and shape "
            f"{list(tensor.dims)} need {needed}; export it again."
        )
    if storage == "typed" and stored != _typed_elements(tensor, needed):
        raise ModelError(
            f"{label} has {stored} numbers for {tensor.name!r}, but its type and shape "
            f"{list(tensor.dims)} need {_typed_elements(tensor, needed)}; export it again."
        )


def _check_inner_sizes(label: str, proto: ModelProto) -> None:
    """The sizes of tensors in attributes and bodies, whose data is in the message."""
    outside = len(proto.graph.initializer)
    for tensor in itertools.islice(all_tensors(proto), outside, None):
        if tensor.data_location == TensorProto.EXTERNAL or not tensor.data_type:
            continue
        if tensor.HasField("raw_data"):
            _check_size(label, tensor, "raw", len(tensor.raw_data))
        else:
            stored = (tensor.float_data, tensor.double_data, tensor.int32_data, tensor.int64_data, tensor.uint64_data)
            _check_size(label, tensor, "typed", sum(map(len, stored)))


def _typed_elements(tensor: TensorProto, needed: int) -> int:
    """Return the length of a typed field: one per element, two for complex ones, one per byte where packed."""
    if tensor.data_type in (TensorProto.COMPLEX64, TensorProto.COMPLEX128):
        return 2 * _elements(tensor)
    return min(needed, _elements(tensor))


def _elements(tensor: TensorProto) -> int:
    count = 1
    for dim in tensor.dims:
        count *= dim
    return count


def _check_specification(label: str, proto: ModelProto) -> None:
    light = skeleton(proto)
    unify_default_domain(light)  # the checker knows only one spelling
    import_runtime_domain(light)
    hide_runtime_operators(light)
    sort_nodes(label, light)  # the runtime runs nodes in any order
    for value in (*light.graph.input, *light.graph.output):
        # The checker wants shapes here; the runtime does not, and exporters leave unknown ones out.
        if value.type.HasField("tensor_type") and not value.type.tensor_type.HasField("shape"):
            value.type.tensor_type.shape.SetInParent()
    try:
        onnx.checker.check_model(light)
    except onnx.checker.ValidationError as error:
        reason = first_line(error).rstrip(". ")
        raise ModelError(f"{label} is not valid ONNX: {reason}; export it again.") from error
    check_bodies(label, light)
    check_functions(label, light)
