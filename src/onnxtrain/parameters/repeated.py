"""Tokens that an exporter copied for each example of a fixed batch: equal rows, which are one parameter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import onnx_ir as ir

from onnxtrain.graph.batch_axis import BatchAxes, BatchAxis
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.clone import subgraphs
from onnxtrain.graph.value import dimensions, is_float
from onnxtrain.parameters.exporters.pytorch import is_declared_parameter
from onnxtrain.parameters.readers import SHAPE_ONLY
from onnxtrain.parameters.stored import as_stored
from onnxtrain.parameters.ties import Copy, Rows


def find_repeated(model: ir.Model, size: int | None) -> list[Copy]:
    """Find initializers that hold one tensor for each example: equal rows along the batch axis of their readers."""
    if size is None or size < 2:
        return []
    graph, found = model.graph, []
    axes: BatchAxes | None = None
    for name, value in graph.initializers.items():
        for rows in _candidates(value, size):
            axes = axes or BatchAxes.of_inputs(graph, size).follow(graph)
            if _counts_examples(value, BatchAxis(rows.axis, (rows.before, ())), axes):
                found.append(Copy(name, name, transposed=False, rows=rows))
                break
    return found


def declared_learned(model: ir.Model, repeated: Iterable[Copy]) -> list[str]:
    """Return the names of repeated tensors that are parameters by the exporter's record."""
    values = model.graph.initializers
    return [copy.name for copy in repeated if is_declared_parameter(values[copy.name], repeated=True)]


def _candidates(value: ir.Value, size: int) -> Iterator[Rows]:
    """Iterate over the axes along which a tensor has as many equal rows as there are examples."""
    shape, tensor = dimensions(value), value.const_value
    if tensor is None or not is_float(value) or not shape or 0 in shape:
        return
    for axis, length in enumerate(shape):
        if not isinstance(length, int) or length % size:
            continue
        for before in (number for number in range(1, length // size + 1) if length // size % number == 0):
            rows = Rows(axis, before, size)
            if rows.are_equal(as_stored(tensor)):
                yield rows


def _counts_examples(value: ir.Value, start: BatchAxis, axes: BatchAxes) -> bool:
    """Return whether an axis of a value is the batch axis wherever its readers combine it with examples."""
    own, pending, agreed = BatchAxes({value: start}, axes.size), [value], False
    while pending:
        current = pending.pop()
        if current.is_graph_output():
            return False
        for node, _ in current.uses():
            if node.op_type in SHAPE_ONLY:
                continue
            if any(subgraphs(node)):
                return False
            made = [output for output in node.outputs if output.uses() or output.is_graph_output()]
            found = dict(zip(node.outputs, own.of_outputs(node), strict=True))
            if any(found[output] is None for output in made):
                return False
            if any(other in axes for other in node.inputs if other is not None):
                if any(axes.get(output) != found[output] for output in made):
                    return False
                agreed = True
                continue
            pending += [output for output in made if output not in own]
            own.update({output: axis for output in made if (axis := found[output]) is not None})
    return agreed


def train_as_one(model: ir.Model, repeated: Iterable[Copy]) -> None:
    """Replace tensors by the one row that they repeat, expanded for their readers, in place: gradients are summed."""
    graph = model.graph
    for name, _, _, rows in repeated:
        assert rows is not None
        value = graph.initializers.pop(name)
        shape = tuple(int(size) for size in dimensions(value) or () if isinstance(size, int))
        assert value.const_value is not None
        value.name = None
        tensor = ir.tensor(rows.first(np.asarray(value.const_value.numpy())), name=name)
        one = ir.Value(name=name, type=value.type, shape=ir.Shape(tensor.shape.numpy()), const_value=tensor)
        one.metadata_props.update(value.metadata_props)
        graph.register_initializer(one)
        op = Builder(graph, graph.opset_imports[""], before=next(iter(graph)))
        op.scope = f"rows of {name}"
        x = op.wrap(one)
        apart = rows.apart(shape)
        if len(apart) != len(shape):
            x = op.Reshape(x, op.ints(*_with_one(apart, rows.axis + 1)))
        x = op.Expand(x, op.ints(*apart)).with_shape(apart)
        if len(apart) != len(shape):
            x = op.Reshape(x, op.ints(*shape))
        x.with_shape(shape)
        value.replace_all_uses_with(x.ir, replace_graph_outputs=True)


def _with_one(shape: Sequence[int], axis: int) -> tuple[int, ...]:
    return (*shape[:axis], 1, *shape[axis + 1 :])
