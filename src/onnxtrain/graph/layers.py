"""Linear layers and convolutions: which weight and bias a node reads, and how they lie. One table for all.

| operator | weight, bias | axes of the weight | axis of channels of x and y |
|---|---|---|---|
| MatMul; ONNX Runtime's FusedMatMul | 1, - | [..., inputs, outputs]; with transB [..., outputs, inputs] | last |
| Gemm; ONNX Runtime's FusedGemm; our Linear | 1, 2 | [inputs, outputs]; with transB [outputs, inputs] | last |
| Conv | 1, 2 | [outputs, inputs / groups, kernel...] | 1 |
| ConvTranspose | 1, 2 | [inputs, outputs / groups, kernel...] | 1 |

A weight may be stored in another form: behind Identity, Cast, Transpose, Reshape and the like, as PyTorch's exporter
writes it without optimization.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx.helper
import onnx_ir as ir

from onnxtrain.graph.clone import subgraphs
from onnxtrain.graph.passes import RANDOM
from onnxtrain.graph.value import attributes_of, constant_tensor, dimensions, is_float, order_of

RESHAPING = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Flatten"})
"""Operators that may add and remove axes of size 1."""

_MATMULS = frozenset({"MatMul", "FusedMatMul", "Gemm", "FusedGemm", "Linear"})
_PASSING = frozenset({"Identity", "Cast", "CastLike"})

_QUANTIZING = frozenset({"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"})
"""Operators whose constants are not computed in advance: the integers are what the file stores."""

Axes = tuple[int | None, ...]
"""For each axis of a value, the axis of the initializer that it is; ``None`` for an added axis of size 1."""


@dataclass(frozen=True)
class Form:
    """The way in which an operator reads its weight and bias."""

    outputs: int
    inputs: int
    channels: int
    bias: int | None = None
    groups: int = 1


def form_of(operator: str, attributes: Mapping[str, Any]) -> Form | None:
    """Return how an operator reads the weight in its second input, or ``None`` if it is no layer.

    Example:
        >>> form_of("Gemm", {"transB": 1}).outputs, form_of("MatMul", {}).outputs, form_of("Relu", {})
        (0, -1, None)
    """
    groups = attributes.get("group", 1)
    if operator in _MATMULS:
        if any(attributes.get(name) for name in ("transA", "transBatchA", "transBatchB")):
            return None
        by_outputs, bias = bool(attributes.get("transB")), None if operator.endswith("MatMul") else 2
        if bias is None:
            return Form(-2, -1, -1) if by_outputs else Form(-1, -2, -1)
        return Form(0, 1, -1, bias) if by_outputs else Form(1, 0, -1, bias)
    if operator == "Conv":
        return Form(0, 1, 1, bias=2, groups=groups)
    if operator == "ConvTranspose":
        return Form(1, 0, 1, bias=2, groups=groups)
    return None


def form_of_node(node: ir.Node) -> Form | None:
    """Return how a node reads the weight in its second input, or ``None`` if it is no layer."""
    return form_of(node.op_type, attributes_of(node))


def reads_transposed(node: ir.Node, slot: int = 1) -> bool:
    """Return whether a matmul with such attributes (Gemm, FusedMatMul, Linear) reads an operand transposed."""
    return node.attributes.get_int(("transA", "transB")[slot], 0) != 0


def orientation(transposed: bool = True) -> dict[str, int]:
    """Return the attributes by which a Gemm or Linear reads its weight: [outputs, inputs] if transposed."""
    return {"transB": int(transposed)}


@dataclass(frozen=True)
class Layer:
    """A node that reads a stored weight.

    Attributes:
        node: The node.
        form: How it reads its weight.
        weight: The initializer that holds the weight.
        axes: The axis of the initializer for each axis of the weight that the node reads.
    """

    node: ir.Node
    form: Form
    weight: ir.Value
    axes: Axes

    @property
    def x(self) -> str:
        """Name of its input."""
        return str(self.node.inputs[0].name) if self.node.inputs[0] is not None else ""

    @property
    def summed(self) -> tuple[int, ...] | None:
        """Axes of x and y beside the channels; ``None`` where the channels are the last axis, as of a matrix."""
        return None if self.form.channels < 0 else (0, *range(2, len(self.axes)))

    @property
    def outputs(self) -> int | None:
        """Axis of the initializer that counts outputs."""
        return self.axes[self.form.outputs]

    @property
    def inputs(self) -> int | None:
        """Axis of the initializer that counts inputs, of one group."""
        return self.axes[self.form.inputs]


def layers(graph: ir.Graph) -> Iterator[Layer]:
    """Yield the layers of a graph, in their order."""
    for node in graph:
        found = None if node.domain else form_of_node(node)
        if found is None or len(node.inputs) < 2 or node.inputs[1] is None:
            continue
        source = stored(node.inputs[1])
        if source is not None and len(source[1]) >= 2:
            yield Layer(node, found, *source)


def stored(value: ir.Value) -> tuple[ir.Value, Axes] | None:
    """Return the initializer that a value is another form of, and its axis for each axis of the value."""
    path = []
    while (node := value.producer()) is not None:
        source = node.inputs[0] if node.inputs else None
        if node.domain or source is None or node.op_type not in {*_PASSING, *RESHAPING, "Transpose"}:
            return None
        path.append(node)
        value = source
    sizes = dimensions(value)
    if not value.is_initializer() or sizes is None:
        return None
    axes: Axes | None = tuple(range(len(sizes)))
    for node in reversed(path):
        axes = moved(node, node.inputs[0], axes) if axes is not None else None
    return None if axes is None else (value, axes)


def moved(node: ir.Node, value: ir.Value | None, axes: Axes) -> Axes | None:
    """Return the stored axes of the output of a node that only rearranges; ``None`` where it mixes axes."""
    if node.op_type == "Transpose":
        return tuple(axes[axis] for axis in order_of(node, len(axes)))
    if node.op_type in _PASSING:
        return axes
    before, after = dimensions(value), dimensions(node.outputs[0])
    if node.op_type not in RESHAPING or before is None or after is None:
        return None
    left = [(size, axis) for size, axis in zip(before, axes, strict=True) if size != 1]
    if [size for size, _ in left] != [size for size in after if size != 1]:
        return None
    kept = iter(left)
    return tuple(None if size == 1 else next(kept)[1] for size in after)


def constant_values(model: ir.Model) -> set[ir.Value]:
    """Return the values of the main graph that depend on initializers only, not on inputs of the model."""
    found = {value for value in model.graph.initializers.values() if value not in model.graph.inputs}
    for node in model.graph:
        if not subgraphs(node) and node.op_type not in RANDOM and follows(node, found):
            found.update(node.outputs)
    return found


def follows(node: ir.Node, known: Collection[ir.Value]) -> bool:
    """Return whether the elements of a node's outputs follow from known values; CastLike reads a type only."""
    read = node.inputs[:1] if node.op_type == "CastLike" and not node.domain else node.inputs
    return all(value is None or value in known for value in read)


def computed_constants(model: ir.Model, *, weights: bool) -> dict[ir.Value, np.ndarray]:
    """Compute the floating values that follow from constants and that other nodes read, such as transposed weights."""
    known = {v for v in constant_values(model) if (node := v.producer()) is None or not _is_kept(node)}
    nodes: list[ir.Node] = []
    for node in model.graph:
        if node.outputs[0] not in known or node.op_type == "Constant":
            continue
        if not follows(node, known) or (not weights and any(_is_weight(value) for value in node.inputs)):
            known.difference_update(node.outputs)
        else:
            nodes.append(node)
    inner = set(nodes)
    made = [output for node in nodes for output in node.outputs]
    wanted = [value for value in made if is_float(value) and any(user not in inner for user, _ in value.uses())]
    if not wanted:
        return {}
    needed: set[ir.Value | None] = set(wanted)
    for node in reversed(nodes):
        if needed.isdisjoint(node.outputs):
            inner.remove(node)
        else:
            needed.update(node.inputs)
    nodes = [node for node in nodes if node in inner]
    try:
        arrays = _evaluated(nodes, wanted, model.graph.opset_imports.get("", 1))
    except Exception:  # an operator that the reference lacks: the model computes its values
        return {}
    return dict(zip(wanted, arrays, strict=True))


def _evaluated(nodes: list[ir.Node], wanted: list[ir.Value], opset: int) -> list[np.ndarray]:
    """Compute values by ONNX's reference from nodes whose other inputs are constants."""
    from onnx.reference import ReferenceEvaluator  # takes long to import

    made = {output for node in nodes for output in node.outputs}
    protos: list[onnx.NodeProto] = []
    feeds: dict[str, np.ndarray | None] = {}
    for node in nodes:
        proto = ir.serde.serialize_node(node)
        if node.op_type == "CastLike":
            proto = onnx.helper.make_node("Cast", proto.input[:1], proto.output, to=int(node.outputs[0].dtype or 1))
        protos.append(proto)
        for value in node.inputs:
            if value is not None and value not in made and value.name in proto.input:
                tensor = constant_tensor(value)
                feeds[str(value.name)] = None if tensor is None else np.asarray(tensor.numpy())
    inputs, outputs = (
        [onnx.ValueInfoProto(name=name) for name in names] for names in (feeds, [value.name for value in wanted])
    )
    graph = onnx.helper.make_graph(protos, "constants", inputs, outputs)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)])
    return [np.asarray(array) for array in ReferenceEvaluator(model).run(None, feeds)]


def _is_kept(node: ir.Node) -> bool:
    return bool(node.domain) or node.op_type in _QUANTIZING


def _is_weight(value: ir.Value | None) -> bool:
    """Return whether an input holds stored floating numbers, not a single one to fill tensors with."""
    if value is None or value.producer() is not None or not is_float(value):
        return False
    return any(size != 1 for size in dimensions(value) or ())
