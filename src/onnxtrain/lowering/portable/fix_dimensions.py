"""Replace symbolic dimensions by sizes: a graph of static shapes is shorter and faster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import onnx

from onnxtrain.errors import OptionError


def fix_dimensions(model: onnx.ModelProto, sizes: Mapping[str, int]) -> None:
    """Replace symbolic dimensions by sizes wherever a model or its training declares them, in place.

    Args:
        model: A model, perhaps with ``training_info``.
        sizes: Sizes by the names of dimensions, such as ``{"N": 32}`` for the batch.

    Raises:
        OptionError: No input has a dimension of that name, or a size is below 1.
    """
    inputs = {dim.dim_param for info in model.graph.input for dim in info.type.tensor_type.shape.dim} - {""}
    for name, size in sizes.items():
        if name not in inputs:
            raise OptionError(
                f"There is no dimension {name!r} to give the size {size}; the model's inputs have "
                f"{', '.join(sorted(inputs)) or 'no dimension with a name'}."
            )
        if size < 1:
            raise OptionError(f"The dimension {name!r} is given the size {size}; it needs 1 or more.")
    for info in _declared(model):
        for dim in info.type.tensor_type.shape.dim:
            if dim.dim_param in sizes:
                dim.dim_value = sizes[dim.dim_param]


def _declared(model: onnx.ModelProto) -> Iterator[onnx.ValueInfoProto]:
    for graph in (model.graph, *(entry.algorithm for entry in model.training_info)):
        yield from graph.input
        yield from graph.output
        yield from graph.value_info
