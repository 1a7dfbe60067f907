"""Make a fixed batch size dynamic: exporters write it into shapes, and into constants for Reshape.

The batch axis is followed from the inputs through the nodes. Constants that hold the size are changed where the node
that reads them has a batch axis, and nowhere else. Then both models run on the same random examples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import onnxruntime

from onnxtrain.editing.working import Model, Working
from onnxtrain.errors import OptionError
from onnxtrain.errors.spelling import checks_arguments
from onnxtrain.graph.batch_axis import BatchAxes, BatchAxis
from onnxtrain.graph.clone import subgraphs
from onnxtrain.graph.declared_shapes import forget_shapes
from onnxtrain.graph.value import constant_array
from onnxtrain.model_file.validity import refuses_invalid
from onnxtrain.runtime.turns import session_of_one_thread

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
    _check_same_examples(Working(model).finish(), freed)
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
        layout = node.attributes.get_int("layout", 0)
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
        value = ir.val(name, const_value=ir.tensor(array, name=name))
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


_FREE_SIZES = (8, 16, 32, 64, 224, 1)
"""Sizes for other free axes, tried in this order."""

_TOLERANCE = 1e-3


def _check_same_examples(fixed: onnx.ModelProto, free: onnx.ModelProto, *, seed: int = 0) -> None:
    """Run both models on the same random examples and compare."""
    size = next(
        dim.dim_value
        for old, new in zip(fixed.graph.input, free.graph.input, strict=True)
        for dim, other in zip(_dims(old)[:1], _dims(new)[:1], strict=True)
        if dim.dim_value != other.dim_value
    )
    batched = {
        new.name
        for old, new in zip(fixed.graph.input, free.graph.input, strict=True)
        if _dims(old) and _dims(old)[0].dim_value != _dims(new)[0].dim_value
    }
    before, after = _session(fixed), _session(free)
    examples = 2 * size if size > 1 else 3
    feeds, expected = _first_that_runs(before, free, batched, size, examples, seed)
    try:
        found = after.run(None, feeds)
    except Exception as error:
        raise _refusal(f"ONNX Runtime cannot run it on {examples} examples ({_reason(error)})") from error
    for info, parts, array in zip(free.graph.output, expected, found, strict=True):
        _compare(info.name, parts, array)


def _first_that_runs(
    session: onnxruntime.InferenceSession,
    model: onnx.ModelProto,
    batched: set[str],
    size: int,
    examples: int,
    seed: int,
) -> tuple[dict[str, np.ndarray], list[list[np.ndarray]]]:
    """Return inputs that the fixed model accepts, and its outputs for each of its batches."""
    problem: Exception | None = None
    for free in _FREE_SIZES:
        feeds = dict(_inputs(model, examples, free, batched, seed))
        try:
            runs = [
                session.run(
                    None,
                    {name: array[start : start + size] if name in batched else array for name, array in feeds.items()},
                )
                for start in range(0, examples, size)
            ]
        except Exception as error:
            problem = problem or error
            continue
        return feeds, [list(parts) for parts in zip(*runs, strict=True)]
    assert problem is not None
    raise _refusal(f"the model itself does not run on random inputs ({_reason(problem)})") from problem


def _inputs(
    model: onnx.ModelProto, examples: int, free: int, batched: set[str], seed: int
) -> Iterator[tuple[str, np.ndarray]]:
    rng = np.random.default_rng(seed)
    initialized = {tensor.name for tensor in model.graph.initializer}
    for info in model.graph.input:
        if info.name in initialized:
            continue
        shape = [dim.dim_value or free for dim in _dims(info)]
        if info.name in batched:
            shape[0] = examples
        dtype = onnx.helper.tensor_dtype_to_np_dtype(info.type.tensor_type.elem_type)
        if info.type.tensor_type.elem_type == onnx.TensorProto.STRING:
            yield info.name, np.array(["text"] * int(np.prod(shape)), object).reshape(shape)
        elif dtype.kind in "iub":
            yield info.name, rng.integers(0, 2, shape).astype(dtype)
        else:
            yield info.name, rng.normal(size=shape).astype(dtype)


def _compare(name: str, parts: list[np.ndarray], found: np.ndarray) -> None:
    for axis in range(parts[0].ndim):
        joined = np.concatenate(parts, axis)
        if joined.shape == found.shape and _are_close(joined, found):
            return
    if all(part.shape == np.shape(found) and _are_close(part, found) for part in parts):
        return  # an output without examples, such as a table
    shapes = f"{parts[0].shape} and {np.shape(found)}"
    raise _refusal(f"its output {name!r} then differs for the same examples (shapes {shapes})")


def _are_close(one: np.ndarray, other: np.ndarray) -> bool:
    if one.dtype.kind not in "fc":
        return bool(np.array_equal(one, other))
    scale = float(np.max(np.abs(one), initial=1.0, where=np.isfinite(one)))
    return bool(np.allclose(one, other, rtol=_TOLERANCE, atol=_TOLERANCE * scale, equal_nan=True))


def _dims(info: onnx.ValueInfoProto) -> list[onnx.TensorShapeProto.Dimension]:
    return list(info.type.tensor_type.shape.dim)


def _session(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    try:
        return session_of_one_thread(model.SerializeToString())
    except Exception as error:
        raise _refusal(f"ONNX Runtime cannot load it then ({_reason(error)})") from error


def _reason(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def _refusal(reason: str) -> OptionError:
    return OptionError(f"The batch size of the model cannot be freed: {reason}. Export it with a free one.").about(
        got=reason
    )
