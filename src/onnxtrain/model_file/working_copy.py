"""Working copy of a model for training: onnx-ir, upgraded, without the data of large initializers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import onnx
import onnx_ir as ir
from onnx import GraphProto, ModelProto, SparseTensorProto, TensorShapeProto, ValueInfoProto, numpy_helper

from onnxtrain.errors import ModelError
from onnxtrain.graph.clone import all_nodes
from onnxtrain.graph.declared_shapes import declare_initializers
from onnxtrain.graph.domains import MACHINE_LEARNING_DOMAIN
from onnxtrain.model_file.checks import declared, dense_array
from onnxtrain.model_file.external import set_folder
from onnxtrain.model_file.proto import (
    drop_initializer_inputs,
    drop_own_import,
    import_runtime_domain,
    is_large,
    proto_subgraphs,
    sort_nodes,
    unify_default_domain,
)
from onnxtrain.model_file.upgrade import upgrade_opset

_MADE_UP = "unk__"
"""Prefix of the symbols that ONNX's shape inference creates for unknown dimensions."""


def forget_made_up_symbols(graph: GraphProto) -> None:
    """Remove symbols that ONNX's shape inference created, in place.

    After models were merged or cut, two axes with the same such symbol need not be equal. A symbol on a single axis of
    the inputs stays there; others are inferred again.
    """
    if _MADE_UP.encode() not in graph.SerializeToString():  # visiting all shapes is slow
        return
    inputs = [axis for info in graph.input for axis in _axes(info)]
    counts = Counter(axis.dim_param for axis in inputs)
    kept = {id(axis) for axis in inputs if counts[axis.dim_param] == 1}
    for axis in [*inputs, *_axes_inside(graph)]:
        if id(axis) not in kept and axis.dim_param.startswith(_MADE_UP):
            axis.ClearField("dim_param")


def _axes_inside(graph: GraphProto) -> Iterator[TensorShapeProto.Dimension]:
    for info in (*graph.value_info, *graph.output):
        yield from _axes(info)
    for node in graph.node:
        for body in proto_subgraphs(node):
            for info in body.input:
                yield from _axes(info)
            yield from _axes_inside(body)


def _axes(info: ValueInfoProto) -> list[TensorShapeProto.Dimension]:
    """Return the dimensions of a tensor, or of the elements of a sequence or an optional."""
    kind = info.type
    while kind.WhichOneof("value") in ("sequence_type", "optional_type"):
        kind = getattr(kind, kind.WhichOneof("value")).elem_type
    return list(kind.tensor_type.shape.dim)


def maps_to_tensors(graph: onnx.GraphProto) -> None:
    """Replace every ZipMap by an Identity, in place: its output becomes the tensor of probabilities."""
    for node in graph.node:
        if node.op_type != "ZipMap" or node.domain != MACHINE_LEARNING_DOMAIN:
            continue
        node.op_type, node.domain = "Identity", ""
        del node.attribute[:]
        for info in (*graph.output, *graph.value_info):
            if info.name == node.output[0]:
                tensor = onnx.helper.make_tensor_value_info(info.name, onnx.TensorProto.FLOAT, [None, None])
                info.type.CopyFrom(tensor.type)


_TRAINING_IR_VERSION = 8
"""Minimum IR version of training models."""


@contextmanager
def understood(label: str) -> Iterator[None]:
    """Convert errors of onnx-ir about a model to a ModelError."""
    try:
        yield
    except (ir.serde.SerdeError, ValueError, TypeError, LookupError) as error:
        cause: BaseException = error
        while cause.__cause__ is not None:  # the innermost cause has the reason
            cause = cause.__cause__
        reason = next(iter(str(cause).strip().splitlines()), type(cause).__name__).rstrip(". ")
        if "got bytes" in reason or isinstance(cause, UnicodeDecodeError):
            raise ModelError(
                f"{label} is damaged: it has a name or a description that is not UTF-8 text; copy it again."
            ) from error
        raise ModelError(f"{label} cannot be understood: {reason}; export it again.").about(
            label, got=reason
        ) from error


def working_copy(
    label: str, proto: ModelProto, large: Mapping[str, ir.TensorProtocol], folder: str, minimum_opset: int
) -> ir.Model:
    """Convert a model to onnx-ir: normalized domains, sorted nodes, no initializers among inputs, a newer opset."""
    unify_default_domain(proto)
    import_runtime_domain(proto)
    drop_own_import(proto)
    sparse = _declare_sparse(proto.graph)
    maps_to_tensors(proto.graph)
    sort_nodes(label, proto)
    forget_made_up_symbols(proto.graph)
    drop_initializer_inputs(proto, overridable=True)
    proto = upgrade_opset(proto, minimum_opset)
    proto.ir_version = max(proto.ir_version, _TRAINING_IR_VERSION)
    model = ir.from_proto(proto)
    _check_text(label, model)
    set_folder(model, folder)
    for name, tensor in large.items():
        model.graph.initializers[name].const_value = tensor
    for item in sparse:
        model.graph.initializers[item.values.name].const_value = _lazily_dense(item)
    declare_initializers(model.graph)
    return model


def _check_text(label: str, model: ir.Model) -> None:
    """Refuse text that is not UTF-8: protocol buffers read it, but writing the copy would fail."""
    texts: list[object] = [model.producer_name, model.producer_version, model.domain, model.doc_string]
    texts += [text for pair in model.metadata_props.items() for text in pair]
    texts += [model.graph.doc_string, *(function.doc_string for function in model.functions.values())]
    nodes = [node for part in (model.graph, *model.functions.values()) for node in all_nodes(part)]
    for node in nodes:
        texts += [node.doc_string, *node.metadata_props, *node.metadata_props.values()]
    damaged = next((text for text in texts if isinstance(text, bytes)), None)
    if damaged is not None:
        raise ModelError(
            f"{label} is damaged: its description or metadata {damaged[:20]!r} is not UTF-8 text; copy it again."
        )


def _declare_sparse(graph: GraphProto) -> list[SparseTensorProto]:
    """Declare sparse initializers as dense ones (workarounds: dropped sparse initializers); return the large ones."""
    large = []
    for sparse in graph.sparse_initializer:
        tensor = declared(sparse)
        if is_large(tensor):
            large.append(sparse)
        else:
            tensor.CopyFrom(numpy_helper.from_array(dense_array(sparse), tensor.name))
        graph.initializer.append(tensor)
    kept = [SparseTensorProto.FromString(sparse.SerializeToString()) for sparse in large]
    del graph.sparse_initializer[:]
    return kept


def _lazily_dense(sparse: SparseTensorProto) -> ir.LazyTensor:
    name, dtype = sparse.values.name, ir.DataType(sparse.values.data_type)
    return ir.LazyTensor(
        lambda: ir.Tensor(dense_array(sparse), dtype=dtype, name=name), dtype, ir.Shape(sparse.dims), name=name
    )
