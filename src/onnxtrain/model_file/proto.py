"""Walk and rewrite ONNX messages: subgraphs, tensors, domains, node order, and skeletons without large tensors.

A skeleton is the model without its large tensors. Checks and conversions work on it, so that weights are never copied:
protocol buffers cannot hold more than 2 GiB, and ONNX's checker and converter serialize their argument.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterable, Iterator, Sequence

import onnx
from onnx import AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, TensorProto

from onnxtrain.errors import ModelError
from onnxtrain.graph.domains import MICROSOFT_DOMAIN, ONNXTRAIN_DOMAIN, is_default_domain

STAND_IN_DOMAIN = "onnxtrain.stand_in"
"""Domain of placeholder nodes, which conversions leave alone."""

RUNTIME_OPERATORS = {"SimplifiedLayerNormalization": None, "LayerNormalization": 17}
"""Operators of ONNX Runtime in the default domain, and the opset from which ONNX defines them, too."""

LARGE = 1024
"""Bytes from which tensors are omitted; smaller ones may be shapes or axes that a conversion reads."""


def is_large(tensor: TensorProto) -> bool:
    """Return whether a skeleton omits the tensor's data: above 1 KiB, or external."""
    # 4 bytes per element: only the order of magnitude matters
    return tensor.data_location == TensorProto.EXTERNAL or math.prod(tensor.dims) * 4 > LARGE


def default_opset(imports: Iterable[OperatorSetIdProto]) -> int | None:
    """Return the opset of the default domain; ``None`` without an import."""
    return max((item.version for item in imports if is_default_domain(item.domain)), default=None)


OPSET_OF_NONE = 18
"""Opset of the default domain in copies of a model that needs none: trees and linear models use ai.onnx.ml only."""


def proto_subgraphs(node: NodeProto) -> Iterator[GraphProto]:
    """Yield the graphs in a node's attributes: the branches of If, the bodies of Loop and Scan."""
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH:
            yield attribute.g
        yield from attribute.graphs


def all_tensors(proto: ModelProto) -> Iterator[TensorProto]:
    """Yield all tensors of a model: initializers first, then attributes, subgraphs, functions, training information."""
    yield from _graph_tensors(proto.graph)
    for function in proto.functions:
        yield from _node_tensors(function)
    for training in proto.training_info:
        yield from _graph_tensors(training.initialization)
        yield from _graph_tensors(training.algorithm)


def _graph_tensors(graph: GraphProto) -> Iterator[TensorProto]:
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield sparse.values
        yield sparse.indices
    yield from _node_tensors(graph)


def _node_tensors(holder: GraphProto | FunctionProto) -> Iterator[TensorProto]:
    for node in holder.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors
        for graph in proto_subgraphs(node):
            yield from _graph_tensors(graph)


def _holders(proto: ModelProto) -> Iterator[tuple[ModelProto | FunctionProto, list[NodeProto]]]:
    """Yield the model and its functions, which import opsets, with their nodes."""
    for holder in (proto, *proto.functions):
        yield holder, list(all_nodes(proto.graph if holder is proto else holder))


def unify_default_domain(proto: ModelProto) -> None:
    """Write the default domain as "" everywhere (workarounds: two spellings of a domain)."""
    for holder, nodes in _holders(proto):
        versions = {item.domain: item.version for item in holder.opset_import if not is_default_domain(item.domain)}
        versions[""] = default_opset(holder.opset_import) or (OPSET_OF_NONE if holder is proto else 0)
        del holder.opset_import[:]
        for domain, version in versions.items():
            if version:
                holder.opset_import.add(domain=domain, version=version)
        for node in nodes:
            if node.domain and is_default_domain(node.domain):
                node.domain = ""


def import_runtime_domain(proto: ModelProto) -> None:
    """Import ONNX Runtime's domain where nodes use it, in place: its transformer optimizer omits the import."""
    for holder, nodes in _holders(proto):
        is_imported = any(item.domain == MICROSOFT_DOMAIN for item in holder.opset_import)
        if not is_imported and any(node.domain == MICROSOFT_DOMAIN for node in nodes):
            holder.opset_import.add(domain=MICROSOFT_DOMAIN, version=1)


def drop_own_import(proto: ModelProto) -> None:
    """Drop the import of this project's domain where no node uses it, in place (workarounds: versions of libraries)."""
    for holder, nodes in _holders(proto):
        if not any(node.domain == ONNXTRAIN_DOMAIN for node in nodes):
            for item in [item for item in holder.opset_import if item.domain == ONNXTRAIN_DOMAIN]:
                holder.opset_import.remove(item)


_INITIALIZERS_ALONE = 4
"""IR version from which an initializer need not be an input of its graph, too."""


def drop_initializer_inputs(proto: ModelProto, *, overridable: bool = False) -> None:
    """Let initializers be no inputs of the main graph, in place, as files before IR version 4 demand."""
    if proto.ir_version >= _INITIALIZERS_ALONE and not overridable:
        return
    proto.ir_version = max(proto.ir_version, _INITIALIZERS_ALONE)
    names = {tensor.name for tensor in proto.graph.initializer}
    names |= {sparse.values.name for sparse in proto.graph.sparse_initializer}
    inputs = [value for value in proto.graph.input if value.name not in names]
    del proto.graph.input[:]
    proto.graph.input.extend(inputs)


def hide_runtime_operators(proto: ModelProto) -> None:
    """Move operators that only ONNX Runtime has in the default domain to the placeholder domain, in place."""
    for holder, nodes in _holders(proto):
        opset = default_opset(holder.opset_import) or 0
        for node in nodes:
            if is_runtime_operator(node, opset):
                node.domain = STAND_IN_DOMAIN
    if all(item.domain != STAND_IN_DOMAIN for item in proto.opset_import):
        proto.opset_import.add(domain=STAND_IN_DOMAIN, version=1)


def is_runtime_operator(node: NodeProto, opset: int) -> bool:
    """Return whether ONNX Runtime, but not ONNX, defines a node's operator in the default domain."""
    if not is_default_domain(node.domain) or node.op_type not in RUNTIME_OPERATORS:
        return False
    since = RUNTIME_OPERATORS[node.op_type]
    return since is None or opset < since


def all_nodes(holder: GraphProto | FunctionProto) -> Iterator[NodeProto]:
    """Yield the nodes of a graph or a function, and those in their bodies."""
    for node in holder.node:
        yield node
        for graph in proto_subgraphs(node):
            yield from all_nodes(graph)


def without_data(proto: ModelProto) -> ModelProto:
    """Copy a model without the data of large initializers in its main graph."""
    copy = ModelProto()
    for field, value in proto.ListFields():
        if field.name != "graph":
            _copy_field(copy, field.name, value)
    for field, value in proto.graph.ListFields():
        if field.name != "initializer":
            _copy_field(copy.graph, field.name, value)
    for tensor in proto.graph.initializer:
        if is_large(tensor):
            copy.graph.initializer.add(name=tensor.name, dims=tensor.dims, data_type=tensor.data_type)
        else:
            copy.graph.initializer.append(tensor)
    return copy


def _copy_field(target: ModelProto | GraphProto, name: str, value: object) -> None:
    if isinstance(value, (int, str, bytes)):
        setattr(target, name, value)
    else:
        getattr(target, name).MergeFrom(value)


def skeleton(proto: ModelProto) -> ModelProto:
    """Copy a model with a placeholder node for each large tensor, also in subgraphs and functions.

    Ensures:
        Names, types and shapes of all values are known as before; the size does not depend on the weights'.
    """
    copy = ModelProto(ir_version=proto.ir_version)
    copy.opset_import.extend(proto.opset_import)
    copy.opset_import.add(domain=STAND_IN_DOMAIN, version=1)
    copy.metadata_props.extend(proto.metadata_props)
    copy.graph.CopyFrom(graph_skeleton(proto.graph))
    for function in proto.functions:
        made = copy.functions.add(
            name=function.name, domain=function.domain, input=function.input, output=function.output
        )
        made.attribute.extend(function.attribute)
        made.attribute_proto.extend(function.attribute_proto)
        made.overload = function.overload
        made.opset_import.extend(function.opset_import)
        made.opset_import.add(domain=STAND_IN_DOMAIN, version=1)
        made.node.extend(node_skeleton(node) for node in function.node)
    return copy


def graph_skeleton(graph: GraphProto) -> GraphProto:
    """Return the skeleton of a graph; see `skeleton`."""
    copy = GraphProto(name=graph.name)
    copy.input.extend(graph.input)
    copy.output.extend(graph.output)
    copy.value_info.extend(graph.value_info)
    given = {value.name for value in graph.input}
    typed = given | {value.name for value in (*graph.value_info, *graph.output)}
    absent = [tensor for tensor in graph.initializer if is_large(tensor)]
    sparse = [(tensor.values.name, tensor.values.data_type, tensor.dims) for tensor in graph.sparse_initializer]
    for name, element, dims in [(tensor.name, tensor.data_type, tensor.dims) for tensor in absent] + sparse:
        if name in given:
            continue  # an initializer that is an input, too, is declared by the input
        copy.node.append(stand_in("Initializer", [name]))
        if name not in typed:
            copy.value_info.append(onnx.helper.make_tensor_value_info(name, element, dims))
    copy.initializer.extend(tensor for tensor in graph.initializer if not is_large(tensor))
    for node in graph.node:
        made = node_skeleton(node)
        copy.node.append(made)
        if made.domain == STAND_IN_DOMAIN and made.output[0] not in typed:
            tensor = node.attribute[0].t
            copy.value_info.append(onnx.helper.make_tensor_value_info(made.output[0], tensor.data_type, tensor.dims))
    return copy


def node_skeleton(node: NodeProto) -> NodeProto:
    """Return the skeleton of a node: a large Constant becomes a placeholder."""
    if node.op_type == "Constant" and any(is_large(item.t) for item in node.attribute if item.HasField("t")):
        return stand_in("Constant", node.output)
    copy = NodeProto(name=node.name, op_type=node.op_type, domain=node.domain, input=node.input, output=node.output)
    if node.overload:
        copy.overload = node.overload
    for attribute in node.attribute:
        made = copy.attribute.add()
        if attribute.type in (AttributeProto.GRAPH, AttributeProto.GRAPHS) and not attribute.ref_attr_name:
            made.name, made.type = attribute.name, attribute.type
            if attribute.HasField("g"):
                made.g.CopyFrom(graph_skeleton(attribute.g))
            made.graphs.extend(graph_skeleton(graph) for graph in attribute.graphs)
        else:
            made.CopyFrom(attribute)
    return copy


def stand_in(op_type: str, outputs: Sequence[str], inputs: Sequence[str] = ()) -> NodeProto:
    """Return a placeholder node, which ONNX's tools skip."""
    return onnx.helper.make_node(op_type, inputs, outputs, domain=STAND_IN_DOMAIN)


def sort_nodes(label: str, proto: ModelProto) -> None:
    """Sort the nodes of a model topologically, in place, also in bodies and functions; sorted nodes stay."""
    for holder in (proto.graph, *proto.functions):
        _sort(label, holder)


def _sort(label: str, holder: GraphProto | FunctionProto) -> None:
    for node in holder.node:
        for body in proto_subgraphs(node):
            _sort(label, body)
    nodes = list(holder.node)
    order = _topological_order(label, nodes)
    if order != list(range(len(nodes))):
        sorted_nodes = [NodeProto.FromString(nodes[index].SerializeToString()) for index in order]
        del holder.node[:]
        holder.node.extend(sorted_nodes)


def _topological_order(label: str, nodes: Sequence[NodeProto]) -> list[int]:
    """Return the indices of the nodes, always the first one whose inputs are computed."""
    given = [(name, index) for index, node in enumerate(nodes) for name in node.output if name]
    producer = dict(given)
    read = [[producer[name] for name in _read(node) if name in producer] for node in nodes]
    in_order = all(source < index for index, sources in enumerate(read) for source in sources)
    if in_order or len(producer) < len(given):
        return list(range(len(nodes)))  # the checker reports duplicate names
    waiting = [set(sources) for sources in read]
    readers: list[list[int]] = [[] for _ in nodes]
    for index, sources in enumerate(waiting):
        for source in sources:
            readers[source].append(index)
    ready = [index for index, sources in enumerate(waiting) if not sources]
    order = []
    while ready:
        index = heapq.heappop(ready)
        order.append(index)
        for reader in readers[index]:
            waiting[reader].discard(index)
            if not waiting[reader]:
                heapq.heappush(ready, reader)
    if len(order) < len(nodes):
        raise ModelError(f"{label} has {_cycle(nodes, waiting)}, so that no order exists; export it again.")
    return order


def _cycle(nodes: Sequence[NodeProto], waiting: Sequence[Collection[int]]) -> str:
    """Describe the nodes of a cycle."""
    index = next(index for index, sources in enumerate(waiting) if sources)
    seen: list[int] = []
    while index not in seen:
        seen.append(index)
        index = min(waiting[index])
    names = [f"{nodes[at].op_type} (output {nodes[at].output[0]!r})" for at in seen[seen.index(index) :]]
    if len(names) == 1:
        return f"a node that reads its own result, {names[0]}"
    shown = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
    return f"{len(names)} nodes in a cycle, {shown}"


def _read(node: NodeProto) -> set[str]:
    """Return the outer values that a node reads, including those read in its bodies."""
    found = set(node.input)
    if node.op_type != "Constant":
        for body in proto_subgraphs(node):
            found |= _read_outside(body)
    found.discard("")
    return found


def _read_outside(body: GraphProto) -> set[str]:
    own = {info.name for info in body.input} | {tensor.name for tensor in body.initializer}
    own |= {sparse.values.name for sparse in body.sparse_initializer}
    own |= {name for node in body.node for name in node.output}
    read = {info.name for info in body.output}.union(*(_read(node) for node in body.node))
    return read - own
