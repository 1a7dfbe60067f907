"""Make a fixed batch size dynamic: exporters write it into shapes, and into constants for Reshape.

The batch axis is followed from the inputs through the nodes. Constants that hold the size are changed where the node
that reads them has a batch axis, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir

from onnxtrain.editing.same_examples import check_same_examples
from onnxtrain.editing.working import Model, Working
from onnxtrain.errors.spelling import checks_arguments
from onnxtrain.graph.batch_axis import BatchAxes, BatchAxis
from onnxtrain.graph.clone import subgraphs
from onnxtrain.graph.declared_shapes import forget_shapes
from onnxtrain.graph.value import constant_array
from onnxtrain.model_file.validity import refuses_invalid

_ELEMENTWISE = frozenset({"Add", "Sub", "Mul", "Div", "Pow", "Where", "Equal", "Less", "Greater"})

_STATES = {"LSTM": (5, 6), "GRU": (5,), "RNN": (5,)}
"""Input slots of the initial states of recurrent layers."""


@checks_arguments
@refuses_invalid()
def dynamic_batch(model: Model) -> onnx.ModelProto:
    """Return a model with a dynamic batch size instead of a fixed one.

    The first axis of the inputs becomes a symbol, and constants that hold the size (of Reshape, Expand, Resize, initial
    states of recurrent layers) are replaced. Then both models run for comparison: for a batch of another size, the new
    model must compute the same results for each example as the old one.

    Args:
        model: A path or a loaded model; it is not changed.

    Returns:
        The model with unchanged weights and other names; unchanged if its batch size is dynamic already.

    Raises:
        ModelError: The model cannot be read.
        OptionError: The model would compute something else with another batch size.

    Example:
        >>> fixed = onnx.parser.parse_model('''
        ... <ir_version: 8, opset_import: ["": 18]>
        ... f (float[1, 2, 2] x) => (float[1, 4] y) <int64[2] shape = {1, 4}> { y = Reshape(x, shape) }''')
        >>> dynamic = dynamic_batch(fixed)
        >>> [axis.dim_param or axis.dim_value for axis in dynamic.graph.output[0].type.tensor_type.shape.dim]
        ['batch', 4]
    """
    working = Working(model)
    if not free_batch_axis(working.model):
        return working.finish()
    freed = working.finish()
    check_same_examples(Working(model).finish(), freed)
    return freed


def free_batch_axis(model: ir.Model) -> bool:
    """Free the batch size of a model whose shapes are inferred, in place, without checking the result."""
    graph = model.graph
    inputs = [value for value in graph.inputs if value.name not in graph.initializers and _static(value)]
    sizes = [_static(value)[0] for value in inputs]
    if not sizes or None in sizes:
        return False
    size = sizes[0]
    assert size is not None
    freeing = _Freeing(model, size, BatchAxes.of_inputs(graph, size))
    for node in list(graph):
        freeing.visit(node)
    freeing.declare()
    return True


def _static(value: ir.Value) -> list[int | None]:
    return [] if value.shape is None else [axis if isinstance(axis, int) else None for axis in value.shape]


def _sizes(value: ir.Value | None, static: Sequence[int | None]) -> npt.NDArray[np.generic] | None:
    """Return the sizes that a node reads: a constant, or computed ones, where these are the sizes of its output."""
    found = constant_array(value)
    return np.array(static, np.int64) if found is None and static and None not in static else found


class _Freeing:
    """A model while its batch size is freed."""

    def __init__(self, model: ir.Model, size: int, axes: BatchAxes) -> None:
        self.graph, self.opset = model.graph, model.graph.opset_imports.get("", 1)
        self.size, self.axes = size, axes
        self._source = next(iter(axes))
        self._batch: ir.Value | None = None
        taken = {axis.value for value in self._values() for axis in value.shape or () if not isinstance(axis, int)}
        names = ("batch", "batch_size", *(f"batch_{number}" for number in range(1, 1000)))
        self.symbol = next(name for name in names if name not in taken)
        self._names = {value.name for value in self._values()} | set(self.graph.initializers)

    def visit(self, node: ir.Node) -> None:
        """Change the constants that a node reads, and find the batch axes of its outputs."""
        if not any(value in self.axes for value in node.inputs if value is not None):
            return
        self.axes.follow([node])
        found = [self.axes.get(output) for output in node.outputs]
        change = {"Reshape": self._reshape, "Expand": self._expand, "Resize": self._resize, "Concat": self._concat}
        if node.op_type in change and found and found[0] is not None:
            change[node.op_type](node, found[0].axis)
        elif node.op_type in _STATES:
            self._states(node)
        elif self.size > 1:
            self._operands(node)

    def declare(self) -> None:
        """Set the new shapes of values with a batch axis."""
        for node in self.graph:
            for body in subgraphs(node):
                forget_shapes(body)
        for value, (axis, _) in self.axes.items():
            dims = _static(value)
            if len(dims) <= axis:
                value.shape = None
                continue
            kept = list(value.shape or ())
            kept[axis] = ir.SymbolicDim(self.symbol if dims[axis] == self.size else None)
            value.shape = ir.Shape(kept)

    def _reshape(self, node: ir.Node, axis: int) -> None:
        dims = _static(node.outputs[0])
        target = _sizes(node.inputs[1], dims)
        if target is None or node.inputs[1] in self.axes:
            return
        wanted = target.reshape(-1).tolist()
        if len(dims) == len(wanted) and all(size is not None for index, size in enumerate(dims) if index != axis):
            wanted = [-1 if index == axis else size for index, size in enumerate(dims)]
        elif -1 not in wanted:
            wanted[axis] = -1
        elif wanted[axis] != -1 and axis == 0 and self.axes.get(node.inputs[0]) == BatchAxis(0):  # type: ignore[arg-type]
            wanted[axis] = 0
        if wanted != target.reshape(-1).tolist():
            node.replace_input_with(1, self._initializer(node, np.array(wanted, np.int64)))

    def _expand(self, node: ir.Node, axis: int) -> None:
        target = _sizes(node.inputs[1], _static(node.outputs[0]))
        rank = len(_static(node.outputs[0]))
        if target is None or rank == 0 or node.inputs[0] not in self.axes:
            return
        index = axis - (rank - target.size)
        if index >= 0 and target.reshape(-1)[index] == self.size:
            changed = target.reshape(-1).copy()
            changed[index] = 1  # broadcasts: as many as the input has
            node.replace_input_with(1, self._initializer(node, changed))

    def _resize(self, node: ir.Node, axis: int) -> None:
        sizes = constant_array(node.inputs[3]) if len(node.inputs) > 3 else None
        if sizes is None or "axes" in node.attributes or sizes[axis] != self.size:
            return
        parts = [self._initializer(node, part) for part in (sizes[:axis], sizes[axis + 1 :])]
        node.replace_input_with(3, self._joined(node, [parts[0], self._batch_size(), parts[1]]))

    def _concat(self, node: ir.Node, axis: int) -> None:
        """Repeat constants that are concatenated with examples, such as a class token, for each example."""
        if node.attributes["axis"].as_int() % len(_static(node.outputs[0]) or [0]) == axis:
            return
        for index, value in enumerate(node.inputs):
            if value is not None and value not in self.axes and len(_static(value)) > axis:
                node.replace_input_with(index, self._repeated(node, value, axis))

    def _states(self, node: ir.Node) -> None:
        layout = node.attributes["layout"].as_int() if "layout" in node.attributes else 0
        for index in _STATES[node.op_type]:
            value = node.inputs[index] if len(node.inputs) > index else None
            if value is not None and value not in self.axes:
                node.replace_input_with(index, self._repeated(node, value, 0 if layout else 1))

    def _operands(self, node: ir.Node) -> None:
        """Broadcast the first of the values that a constant has for every example."""
        rank = len(_static(node.outputs[0])) if node.outputs else 0
        batch = self.axes.get(node.outputs[0]) if node.outputs else None
        if batch is None or node.op_type not in _ELEMENTWISE or not rank:
            return
        for index, value in enumerate(node.inputs):
            if value is not None and value not in self.axes:
                sizes = _static(value)
                own = batch.axis - (rank - len(sizes))
                if sizes and own >= 0 and sizes[own] == self.size:
                    node.replace_input_with(index, self._first_of(node, value, own))

    def _repeated(self, node: ir.Node, value: ir.Value, axis: int) -> ir.Value:
        dims = _static(value)
        if dims[axis] != self.size:
            return value
        first = self._first_of(node, value, axis)
        ones = [self._initializer(node, np.ones(count, np.int64)) for count in (axis, len(dims) - axis - 1)]
        shape = self._joined(node, [ones[0], self._batch_size(), ones[1]])
        return self._insert(node, "Expand", [first, shape], value.dtype)

    def _first_of(self, node: ir.Node, value: ir.Value, axis: int) -> ir.Value:
        if self.size == 1:
            return value
        bounds = [self._initializer(node, np.array([number], np.int64)) for number in (0, 1, axis)]
        return self._insert(node, "Slice", [value, *bounds], value.dtype)

    def _batch_size(self) -> ir.Value:
        """Return the number of examples of the first input, [1]; computed once."""
        if self._batch is None:
            first = self.graph[0]
            shape = self._insert(first, "Shape", [self._source], ir.DataType.INT64)
            zero = self._initializer(first, np.array([0], np.int64))
            self._batch = self._insert(first, "Gather", [shape, zero], ir.DataType.INT64)
        return self._batch

    def _joined(self, node: ir.Node, parts: Sequence[ir.Value]) -> ir.Value:
        return self._insert(node, "Concat", parts, ir.DataType.INT64, ir.AttrInt64("axis", 0))

    def _insert(
        self,
        before: ir.Node,
        operator: str,
        inputs: Sequence[ir.Value],
        dtype: ir.DataType | None,
        *attributes: ir.Attr,
    ) -> ir.Value:
        made = ir.Node("", operator, inputs, attributes)
        made.outputs[0].name = self._free_name(f"{before.outputs[0].name}.{operator}")
        made.outputs[0].type = None if dtype is None else ir.TensorType(dtype)
        self.graph.insert_before(before, made)
        return made.outputs[0]

    def _initializer(self, node: ir.Node, array: np.ndarray) -> ir.Value:
        name = self._free_name(f"{node.outputs[0].name}.sizes")
        tensor = ir.tensor(array, name=name)
        value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(array.shape), const_value=tensor)
        self.graph.register_initializer(value)
        return value

    def _free_name(self, name: str) -> str:
        made, number = name, 1
        while made in self._names:
            number += 1
            made = f"{name}_{number}"
        self._names.add(made)
        return made

    def _values(self) -> list[ir.Value]:
        return [*self.graph.inputs, *(value for node in self.graph for value in node.outputs)]
