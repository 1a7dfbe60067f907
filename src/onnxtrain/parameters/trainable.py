"""Sort floating tensors into trainable parameters and constants, with the reason for each constant."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir
from onnx import AttributeProto, ModelProto, NodeProto, TensorProto

from onnxtrain.autodiff.missing import reached
from onnxtrain.autodiff.path import Forward
from onnxtrain.errors import OptionError
from onnxtrain.errors.formatting import listed
from onnxtrain.graph.clone import all_nodes
from onnxtrain.graph.domains import MACHINE_LEARNING_DOMAIN, ONNXTRAIN_DOMAIN, is_default_domain
from onnxtrain.graph.patterns import Patterns, matches, no_match, pattern_list
from onnxtrain.graph.value import constant_tensor, dimensions, is_float
from onnxtrain.model_file.embedded_weights import attribute_weights
from onnxtrain.model_file.exporters import NameOrigin, origin_of
from onnxtrain.model_file.proto import all_nodes as nodes_of_proto
from onnxtrain.parameters.classify import FILL, Tensor, classify, may_be_fresh, rotary_tables
from onnxtrain.parameters.names import module_paths, node_names
from onnxtrain.parameters.readers import (
    SCALE,
    Reader,
    arrivals,
    quantized_weights,
    read_through_identity,
    role_of,
    trains_integers,
)


@dataclass(frozen=True)
class Initializer:
    """One row of the parameter table of ``inspect``."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    size: int
    trainable: bool
    reason: str
    uses: tuple[str, ...]
    sparsity: float = 0.0
    paths: tuple[str, ...] = ()
    undecided: bool = False
    doubt: str = ""


def parameter_table(
    model: ir.Model,
    loss: ir.Value | Sequence[ir.Value] | None,
    *,
    train: Patterns | None = None,
    freeze: Patterns | None = None,
    straight_through: bool = False,
    learned: Collection[str] = (),
    copies: Mapping[str, Sequence[str]] | None = None,
    elsewhere: Callable[[], Sequence[Initializer]] = tuple,
) -> list[Initializer]:
    """Sort the initializers of a model's main graph into parameters and constants."""
    graph = model.graph
    paths = {
        name: (*module_paths(value, model.functions), *(copies or {}).get(name, ()))
        for name, value in graph.initializers.items()
    }
    chosen = {
        option: None if given is None else matching(option, pattern_list(given), paths, model, elsewhere)
        for option, given in (("train", train), ("freeze", freeze))
    }
    named = {*learned, *pattern_list(train)}
    given = list(graph.initializers.items())  # expanding functions adds constants
    candidates = [value for _, value in given if is_float(value)]
    # Before functions are expanded: an operator shows the role of its inputs, its body does not.
    # Tensors that options keep are not read: those of an adapter's base may be a mapped file.
    kept = {name for name in graph.initializers if _is_kept(name, chosen["train"], chosen["freeze"])}
    tensors = {
        value: Tensor(value, model.functions)
        for name, value in given
        if is_float(value) and _is_trained(value) and name not in kept
    }
    reached = _reached(model, loss, candidates, straight_through)
    rows = []
    is_nameless = not any(origin_of(name) is NameOrigin.MODULE for name, value in given if value in reached)
    rotary = rotary_tables(tensor for value, tensor in tensors.items() if value in reached)
    for name, value in given:
        reason, undecided, doubt = _reason(name, value, reached, chosen["train"], chosen["freeze"]), False, ""
        if not reason and tensors[value].setting == SCALE and name not in learned and name in named:
            raise OptionError(
                f"train= names {name!r}, a quantization scale; qat=True trains its logarithm, which keeps its sign."
            )
        if not reason and name not in named:
            decision, doubt = classify(tensors[value], rotary)
            # Without module names, as in jax2onnx files, an untrained scale looks like an exporter's fill.
            is_fresh = is_nameless and decision == FILL and may_be_fresh(tensors[value])
            reason, undecided = decision.reason, decision.open or is_fresh
        shape = tuple(d for d in dimensions(value) or () if isinstance(d, int))
        dtype = "unknown" if value.dtype is None else value.dtype.name.lower()
        uses = tuple(dict.fromkeys(node.op_type for node in value.consumers()))
        size = math.prod(shape)
        rows.append(
            Initializer(
                name, shape, dtype, size, not reason, reason, uses, paths=paths[name], undecided=undecided, doubt=doubt
            )
        )
    return rows


def matching(
    option: str,
    patterns: Sequence[str],
    paths: Mapping[str, tuple[str, ...]],
    model: ir.Model,
    elsewhere: Callable[[], Sequence[Initializer]] = tuple,
) -> set[str]:
    """Return the initializers that patterns match, by name, by module path, or else by the nodes that read them."""
    found: set[str] = set()
    called: dict[str, set[str]] = {}
    for name, others in paths.items():
        for path in (name, *others):
            called.setdefault(path, set()).add(name)
    for pattern in patterns:
        if pattern in called and not {*"*?["} & {*pattern}:  # an exact name, even with `|` or braces
            found |= called[pattern]
            continue
        matched = {name for name, others in paths.items() if matches(pattern, name, *others)}
        if not matched:
            nodes = {name: node_names(model.graph.initializers[name], model.functions) for name in paths}
            matched = {name for name, others in nodes.items() if matches(pattern, *others)}
        if not matched:
            for row in elsewhere():
                if matches(pattern, row.name):
                    told = f"which cannot be trained: {row.reason}"
                    raise OptionError(f"{option}={pattern!r} matches {row.name!r}, {told}.")
            known = [others[0] if others else name for name, others in paths.items()]
            advice = "`onnxtrain inspect MODEL` lists them."
            raise OptionError(no_match(option, pattern, "initializer", known, advice))
        found |= matched
    return found


def _reached(
    model: ir.Model, loss: ir.Value | Sequence[ir.Value] | None, candidates: list[ir.Value], straight_through: bool
) -> set[ir.Value]:
    if not candidates:
        return set()
    forward = Forward.of(model, straight_through=straight_through)
    if loss is None:
        loss = [value for value in model.graph.outputs if is_float(value)]
    targets = [loss] if isinstance(loss, ir.Value) else loss
    return set[ir.Value]().union(*(reached(forward, y, candidates) for y in targets))


FROZEN, NOT_NAMED = "frozen", "not named by train="
"""Reasons of constants that the caller chose."""


def _reason(name: str, value: ir.Value, reached: set[ir.Value], train: set[str] | None, freeze: set[str] | None) -> str:
    if not is_float(value):
        kind = "unknown" if value.dtype is None else value.dtype.name.lower()
        return f"{kind}, not a floating tensor"
    if not _is_trained(value):
        assert value.dtype is not None
        return f"{value.dtype.name.lower()}; the optimizers take float and double"
    if value not in reached:
        return "the loss does not depend on it through a differentiable path"
    return _is_kept(name, train, freeze)


def _is_kept(name: str, train: set[str] | None, freeze: set[str] | None) -> str:
    """Return why an option keeps a tensor from being trained; "" where none does."""
    if freeze is not None and name in freeze:
        return FROZEN
    return NOT_NAMED if train is not None and name not in train else ""


def _is_trained(value: ir.Value) -> bool:
    """Return whether the optimizers support its type."""
    return value.dtype in (ir.DataType.FLOAT, ir.DataType.DOUBLE)


def shared_parameters(model: ir.Model, names: Iterable[str]) -> dict[str, str]:
    """Return parameters with several readers, and describe these: training ties all their uses.

    An embedding that is also the output projection is tied on purpose; equal untrained weights that an exporter merged
    are not. A scale of batch normalization that is also its running variance has two readers.
    """
    found = {}
    order = {node: position for position, node in enumerate(model.graph)}
    for name in names:
        readers = [reader for reader in _element_readers(model.graph.initializers[name]) if reader[0] in order]
        nodes = sorted({node for node, _ in readers}, key=order.__getitem__)
        if len(nodes) > 1 and not _are_parts(model.graph.initializers[name], nodes):
            found[name] = f"{len(nodes)} nodes ({listed([_label(node) for node in nodes], counted=False)})"
        elif len(nodes) == 1:
            slots = sorted(index for _, index in readers)
            roles = [role for index in slots if (role := role_of(nodes[0].op_type, index))]
            if len(roles) > 1:
                found[name] = f"{len(roles)} inputs of {_label(nodes[0])} ({', '.join(roles)})"
    return found


def _element_readers(value: ir.Value) -> list[Reader]:
    """Return the readers of a value through Identity, and through the nodes that stop gradients in a working copy."""
    found: list[Reader] = []
    for reader in read_through_identity(value):
        stops = reader[0].domain == ONNXTRAIN_DOMAIN
        found += _element_readers(reader[0].outputs[0]) if stops else [reader]
    return found


def _are_parts(value: ir.Value, nodes: Sequence[ir.Node]) -> bool:
    """Return whether nodes cut a tensor into parts that share nothing, such as the gates of a recurrent layer."""
    if any(node.op_type != "Slice" or node.domain for node in nodes):
        return False
    bounds = [[None if each is None else constant_tensor(each) for each in node.inputs[1:]] for node in nodes]
    known = {tuple(tensor.tobytes() for tensor in each if tensor is not None) for each in bounds if None not in each}
    return len(known) == len(nodes) or len({node for node, _ in arrivals(value)}) == 1


def _label(node: ir.Node) -> str:
    return node.name or f"{node.op_type} ({node.outputs[0].name})"


_ELSEWHERE = "sparse, or its data is in another file; write the model with it as an initializer"


def other_tensors(proto: ModelProto) -> list[Initializer]:
    """List the floating tensors of a file that are no initializers of its working copy, with the reasons.

    Example:
        >>> import onnx
        >>> model = onnx.parser.parse_model('''
        ... <ir_version: 8, opset_import: ["": 18]>
        ... f (float[n] x) => (float[n] y) { y = own.Scale <factors = float[2] {0.5, 2.0}> (x) }''')
        >>> [(row.name, row.reason) for row in other_tensors(model)]
        [('y.factors', 'an attribute of Scale')]
    """
    found = []
    for node in (node for holder in (proto.graph, *proto.functions) for node in nodes_of_proto(holder)):
        lifted = {weight.tensor.name for weight in attribute_weights(node)}
        is_constant = node.op_type == "Constant" and is_default_domain(node.domain)
        label = node.name or next(iter(node.output), node.op_type)
        for attribute in node.attribute:
            for shape, dtype in () if attribute.name in lifted else _tensors(node, attribute, is_constant):
                if not ir.DataType(dtype).is_floating_point() or (math.prod(shape) < 2 and not is_constant):
                    continue  # one value is a setting, such as the fill of ConstantOfShape
                name = node.output[0] if is_constant else f"{label}.{attribute.name}"
                reason = _ELSEWHERE if is_constant else f"an attribute of {node.op_type}"
                kind = ir.DataType(dtype).name.lower()
                found.append(Initializer(name, shape, kind, math.prod(shape), False, reason, (node.op_type,)))
    return found


def _tensors(node: NodeProto, attribute: AttributeProto, is_constant: bool) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yield shape and type of the floating tensors of an attribute; a list of floats of ``ai.onnx.ml`` is one."""
    dense = [*([attribute.t] if attribute.HasField("t") else []), *attribute.tensors]
    for tensor in dense:
        if not is_constant or tensor.data_location == TensorProto.EXTERNAL:
            yield tuple(tensor.dims), tensor.data_type
    sparse = [*([attribute.sparse_tensor] if attribute.HasField("sparse_tensor") else []), *attribute.sparse_tensors]
    yield from ((tuple(tensor.dims), tensor.values.data_type) for tensor in sparse)
    if node.domain == MACHINE_LEARNING_DOMAIN and len(attribute.floats) > 1:
        yield (len(attribute.floats),), TensorProto.FLOAT


def untrainable(model: ir.Model, proto: ModelProto) -> str:
    """Return a sentence about values that no gradient changes, and about tensors stored elsewhere; "" without any."""
    sentences = []
    names = [repr(row.name) for row in other_tensors(proto) if row.reason == _ELSEWHERE]
    if names:
        sentences.append(f"its weights are in Constant nodes ({listed(names)}); write them as initializers")
    fitted = dict.fromkeys(node.op_type for node in all_nodes(model.graph) if _is_fitted(node))
    if fitted:
        sentences.append(
            f"it computes with {' and '.join(fitted)}, through which no gradient flows: trees, support vectors and "
            "the like are fitted by the program that made them"
        )
    if integers := quantized_weights(model.graph):
        sentences.append(
            f"it is quantized: {sum(integers.values()):,} elements ({listed(map(repr, integers))}) are "
            f"integers; qat=True trains {'them' if trains_integers(model.graph) else 'their scales'}"
        )
    return "; ".join(sentences)


def _is_fitted(node: ir.Node) -> bool:
    """Return whether a node holds fitted values that are not parameters."""
    return node.domain == MACHINE_LEARNING_DOMAIN and any(
        _is_list(attribute) or attribute.type == ir.AttributeType.TENSOR for attribute in node.attributes.values()
    )


def _is_list(attribute: ir.Attr) -> bool:
    return attribute.type == ir.AttributeType.FLOATS and not attribute.is_ref() and len(attribute.as_floats()) > 1
