"""Correct shapes that a file declares and that cannot be true."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import onnx
import onnx_ir as ir

from onnxtrain.ir.clone import captured_values, subgraphs
from onnxtrain.ir.inference import known_shape, shape_from_inputs
from onnxtrain.ir.value import Dimension, constant_tensor, dimensions

MADE_UP = "unk__"
"""Prefix of the symbols that ONNX's inference makes up."""

_ANONYMOUS = frozenset({"", "?", "-1", "None", "unknown", "*"})
"""Exporters write these for a size that they do not know: axes that share such a name need not be equal."""


def forget_anonymous_axes(graph: ir.Graph) -> None:
    """Forget sizes whose name is no symbol, in place: two axes that are called ``?`` need not be equal."""
    _forget_sizes(graph, lambda size: size in _ANONYMOUS if isinstance(size, str) else size is not None and size < 0)


def forget_undefined_types(graph: ir.Graph) -> None:
    """Forget declared types without an element type, in place: inference finds the type."""
    for node in graph:
        for output in node.outputs:
            if isinstance(output.type, ir.TensorType) and output.dtype == ir.DataType.UNDEFINED:
                output.type = output.shape = None
        for body in subgraphs(node):
            forget_undefined_types(body)


def declare_initializers(graph: ir.Graph) -> None:
    """Give initializers the types and shapes of their tensors, in place: a file may declare other ones."""
    for value in graph.initializers.values():
        if value.const_value is not None:
            value.type = ir.TensorType(value.const_value.dtype)
            value.shape = ir.Shape(value.const_value.shape.numpy())
    for node in graph:
        for body in subgraphs(node):
            declare_initializers(body)


def forget_symbols(graph: ir.Graph, symbols: Collection[str]) -> None:
    """Forget symbols that turned out to have different sizes, in place."""
    _forget_sizes(graph, lambda size: isinstance(size, str) and size in symbols)


def forget_branch_shapes(graph: ir.Graph) -> bool:
    """Forget the shapes of If outputs that contradict a branch, and the shapes that depend on them, in place.

    Exporters declare the shape of one branch for both, which is right only if the condition is constant. The outputs of
    the main graph keep their declared rank, which callers of the model rely on.

    Returns:
        True if any shape was forgotten.
    """
    return _forget_branch_shapes(graph, set(graph.outputs))


def _forget_branch_shapes(graph: ir.Graph, declared: set[ir.Value]) -> bool:
    affected: set[ir.Value] = set()
    for node in graph:
        for body in subgraphs(node):
            if _forget_branch_shapes(body, declared):
                affected.update(node.outputs)
        if node.op_type == "If" and not node.domain:
            affected.update(output for index, output in enumerate(node.outputs) if _contradicts_branch(node, index))
    if not affected:
        return False
    own = set(affected)
    for node in graph:
        if any(value in affected for value in (*node.inputs, *captured_values(node))):
            affected.update(node.outputs)
            for body in subgraphs(node):
                forget_shapes(body)
    for value in affected:
        keeps = value in declared or (value.is_graph_output() and value not in own)
        value.shape = ir.Shape([None] * len(value.shape)) if keeps and value.shape is not None else None
    return True


def _contradicts_branch(node: ir.Node, index: int) -> bool:
    """Return whether the declared shape of an If output contradicts the shape in a branch."""
    outer = dimensions(node.outputs[index])
    condition = node.inputs[0]
    if outer is None or condition is None or constant_tensor(condition) is not None:
        return False
    for body in subgraphs(node):
        inner = known_shape(body.outputs[index])
        if inner is None:
            continue
        if len(inner) != len(outer) or any(map(_differ, outer, inner)):
            return True
    return False


def correct_outputs(graph: ir.Graph) -> None:
    """Give graph outputs the shapes that follow from their nodes where the file declares other ones, in place.

    skl2onnx declares [N, 4] for a regression on 4 features whose nodes compute [N, 1].
    """
    for output in graph.outputs:
        declared, producer = dimensions(output), output.producer()
        if declared is None or producer is None or producer.graph is not graph:
            continue
        given = shape_from_inputs(output) or _inferred_alone(producer, output, graph.opset_imports)
        if given is not None and _contradict(declared, given):
            output.shape = ir.Shape(given)


def _inferred_alone(node: ir.Node, output: ir.Value, opsets: Mapping[str, int]) -> tuple[Dimension, ...] | None:
    """Return the shape that ONNX infers for an output from the node's inputs; ``None`` where it finds none."""
    inputs = [value for value in dict.fromkeys(node.inputs) if value is not None]
    plain = all(isinstance(value.type, ir.TensorType) and value.name for value in inputs)
    if node.domain or node.op_type in _WITH_BODIES or not plain:
        return None
    small = [value for value in inputs if value.const_value is not None and value.const_value.nbytes <= _SMALL]
    proto = onnx.helper.make_graph(
        [ir.serde.serialize_node(node)],
        "node",
        [ir.serde.serialize_value(value) for value in inputs if value not in small],
        [onnx.ValueInfoProto(name=output.name)],
        [ir.serde.serialize_tensor(value.const_value) for value in small if value.const_value is not None],
    )
    imports = [onnx.helper.make_opsetid("", opsets.get("", 18))]
    try:
        inferred = onnx.shape_inference.infer_shapes(onnx.helper.make_model(proto, opset_imports=imports))
    except (onnx.shape_inference.InferenceError, ValueError):
        return None
    (found,) = inferred.graph.output
    if not found.type.tensor_type.HasField("shape"):
        return None
    return dimensions(ir.serde.deserialize_value_info_proto(found, None))


_WITH_BODIES = frozenset({"If", "Loop", "Scan", "SequenceMap"})

_SMALL = 1024
"""Bytes up to which the values of constants take part in inference (shapes, axes, repeats)."""


def has_untrue_shapes(graph: ir.Graph) -> bool:
    """Return whether the declared shape of a value in the main graph contradicts the shapes of its node's inputs.

    jax2onnx declares [B, 2, 4] for a Gemm, which gives [B, 8], where a layer has several axes of features.
    """
    for node in graph:
        for output in node.outputs[:1]:
            declared = None if output.is_graph_output() else dimensions(output)
            given = None if declared is None else shape_from_inputs(output)
            if declared is not None and given is not None and _contradict(declared, given):
                return True
    return False


def declared_otherwise(declared: onnx.GraphProto, graph: ir.Graph) -> list[str]:
    """Return a sentence for each output whose declared shape contradicts the one that its nodes give."""
    sentences = []
    shapes = {
        value.name: dimensions(ir.serde.deserialize_value_info_proto(value, None))
        for value in declared.output
        if value.type.HasField("tensor_type")
    }
    for output in dict.fromkeys(graph.outputs):
        before, after = shapes.get(output.name or ""), dimensions(output)
        if before is not None and after is not None and _contradict(before, after):
            sentences.append(
                f"the file declares the output {output.name!r} as {_shown(before)}, but its nodes give {_shown(after)}"
                "; the nodes decide"
            )
    return sentences


def _contradict(declared: Sequence[Dimension], given: Sequence[Dimension]) -> bool:
    """Return whether ranks, or sizes that both state as numbers, differ."""
    sizes = zip(declared, given, strict=False)
    return len(declared) != len(given) or any(isinstance(a, int) and isinstance(b, int) and a != b for a, b in sizes)


def _shown(shape: Sequence[Dimension]) -> str:
    """Return a shape as text, with N for a size that has no name or a made-up one."""
    sizes = ["N" if size is None or str(size).startswith(MADE_UP) else str(size) for size in shape]
    return f"[{', '.join(sizes)}]"


def _differ(outer: Dimension, inner: Dimension) -> bool:
    return None not in (outer, inner) and outer != inner and not str(inner).startswith(MADE_UP)


def _forget_sizes(graph: ir.Graph, is_unknown: Callable[[Dimension], bool]) -> None:
    for value in all_values(graph):
        sizes = dimensions(value) or ()
        if any(is_unknown(size) for size in sizes):
            value.shape = ir.Shape([None if is_unknown(size) else size for size in sizes])


def all_values(graph: ir.Graph) -> Iterator[ir.Value]:
    """Iterate over the inputs of a graph and the outputs of its nodes, those in bodies included."""
    yield from graph.inputs
    for node in graph:
        yield from node.outputs
        for body in subgraphs(node):
            yield from all_values(body)


def contradictions(graph: ir.Graph) -> int:
    """Count the outputs of standard operators that have no type after inference, though all inputs have one.

    ONNX's inference stops at a node whose inputs have incompatible shapes. TorchScript's exporter declares such
    shapes in branches of an If that are never taken.
    """
    count = 0
    for node in graph:
        if node.domain == "" and all(value is None or value.type is not None for value in node.inputs):
            count += sum(bool(output.name) and output.type is None for output in node.outputs)
    return count


def forget_shapes(graph: ir.Graph) -> dict[ir.Value, ir.Shape]:
    """Remove the shapes of all node outputs, those in bodies included; the graph's outputs keep their rank.

    Returns:
        The removed shapes.
    """
    removed: dict[ir.Value, ir.Shape] = {}
    _forget(graph, removed)
    for output in graph.outputs:
        if output in removed:
            output.shape = ir.Shape([None] * len(removed[output]))
    return removed


def _forget(graph: ir.Graph, removed: dict[ir.Value, ir.Shape]) -> None:
    for node in graph:
        for output in node.outputs:
            if output.shape is not None:
                removed[output] = output.shape
                output.shape = None
        for inner in subgraphs(node):
            _forget(inner, removed)
