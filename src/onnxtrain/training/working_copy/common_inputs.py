"""Find the inputs of a working copy that have one value for all examples, such as the settings of a voice."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.graph.batch_axis import BatchAxes, BatchAxis
from onnxtrain.graph.value import COMMON, dimensions


def mark_common_inputs(graph: ir.Graph) -> None:
    """Record the inputs whose first axis has a fixed size and never becomes the batch axis, which others declare."""
    sizes = {value: shape[0] for value in graph.inputs if (shape := dimensions(value))}
    fixed = {value: size for value, size in sizes.items() if isinstance(size, int) and size > 1}
    if not fixed or all(isinstance(size, int) for size in sizes.values()):
        return
    batch = BatchAxes.of_inputs(graph, None).follow(graph)
    for value, size in fixed.items():
        own = BatchAxes({value: BatchAxis(0)}, size).follow(graph)
        is_followed = all(dimensions(reached) is not None for reached in own)
        if is_followed and not any(
            axis == batch.get(value, axis) for value, axis in own.items() if value.is_graph_output()
        ):
            value.meta[COMMON] = True
