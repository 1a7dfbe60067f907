"""What a model must satisfy before anything is done with it; each failure is one sentence."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import onnx
from onnx import ModelProto, TensorProto

from onnxtrain.errors import ModelError
from onnxtrain.model.external import ExternalData, data_bytes, locate
from onnxtrain.model.skeleton import all_tensors, default_opset, hide_runtime_operators, skeleton, unify_default_domain
from onnxtrain.model.wire import Template

MINIMUM_OPSET = 7
"""Older operators broadcast by rules of their own, and ONNX Runtime does not support them."""

MAXIMUM_OPSET = 26
"""The newest opset that ONNX Runtime 1.31 runs; to be raised with the runtime."""

MINIMUM_IR_VERSION = 3
"""The first version with opset imports."""

MAXIMUM_IR_VERSION = 13
"""The newest that ONNX Runtime 1.31 reads; to be raised with the runtime."""


def check_model(label: str, proto: ModelProto, template: Template, folder: Path | None) -> dict[str, ExternalData]:
    """Check a model without reading its external data.

    Args:
        label: What messages call the model.
        proto: The model.
        template: Its bytes.
        folder: Where its external data is.

    Returns:
        Where the external tensors of the main graph are.

    Raises:
        ModelError: The first thing that is wrong.
    """
    _check_head(label, proto)
    _check_names(label, proto)
    located = _check_external(label, proto, folder)
    for index, tensor in enumerate(proto.graph.initializer):
        if tensor.name not in located:
            _check_size(label, tensor, *template.stored_elements(index))
    _check_specification(label, proto)
    return located


def _check_head(label: str, proto: ModelProto) -> None:
    if not proto.HasField("graph"):
        raise ModelError(f"{label} has no graph; export the model again.")
    if not proto.graph.output:
        raise ModelError(f"{label} has a graph without outputs, so that there is nothing to compute; export it again.")
    if not MINIMUM_IR_VERSION <= proto.ir_version <= MAXIMUM_IR_VERSION:
        raise ModelError(
            f"{label} has IR version {proto.ir_version}, but ONNX Runtime supports {MINIMUM_IR_VERSION} to "
            f"{MAXIMUM_IR_VERSION}; export it for a version in that range."
        )
    opset = default_opset(proto.opset_import)
    if opset is None:
        raise ModelError(f"{label} does not import ONNX's own operators (domain ''); export it with an opset.")
    if not MINIMUM_OPSET <= opset <= MAXIMUM_OPSET:
        raise ModelError(
            f"{label} has opset {opset}, but opsets {MINIMUM_OPSET} to {MAXIMUM_OPSET} are supported; "
            "export it at an opset in that range."
        )


def _check_names(label: str, proto: ModelProto) -> None:
    names = [tensor.name for tensor in proto.graph.initializer]
    names += [sparse.values.name for sparse in proto.graph.sparse_initializer]
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        raise ModelError(f"{label} has several initializers named {', '.join(map(repr, twice))}; names must be unique.")


def _check_external(label: str, proto: ModelProto, folder: Path | None) -> dict[str, ExternalData]:
    for tensor in all_tensors(proto):
        if tensor.data_location == TensorProto.EXTERNAL:
            try:
                locate(tensor, folder)
            except ModelError as error:
                raise ModelError(f"{label} cannot be used: {_lower(str(error))}") from error
    return {
        tensor.name: locate(tensor, folder)
        for tensor in proto.graph.initializer
        if tensor.data_location == TensorProto.EXTERNAL
    }


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


def _typed_elements(tensor: TensorProto, needed: int) -> int:
    """How many numbers a typed field has: one per element, two for complex ones, one per byte where packed."""
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
    hide_runtime_operators(light)
    for value in (*light.graph.input, *light.graph.output):
        # The checker wants shapes here; the runtime does not, and exporters leave unknown ones out.
        if value.type.HasField("tensor_type") and not value.type.tensor_type.HasField("shape"):
            value.type.tensor_type.shape.SetInParent()
    try:
        onnx.checker.check_model(light)
    except onnx.checker.ValidationError as error:
        reason = str(error).strip().splitlines()[0].rstrip(". ")
        raise ModelError(f"{label} is not valid ONNX: {reason}; export it again.") from error
