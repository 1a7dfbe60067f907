"""Let linear layers that train under a mask skip the weights that stay zero."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from onnxtrain.graph import Builder
from onnxtrain.graph.domains import ONNXTRAIN_DOMAIN
from onnxtrain.graph.value import constant_array, constant_number, dimensions
from onnxtrain.lowering.training_info.recipe import MASK

LEAST_ZEROS = 0.5
"""Fraction of zeros from which the kernels get a mask; they multiply densely where that is faster."""

_MASK_INPUT = {"Linear": 3, "LinearGradient": 3, "LinearWeightGradient": 2}


def use_mask_kernels(graph: ir.Graph) -> None:
    """Give linear layers the mask of their weight as a constant input, in place.

    For a float32 weight w of two axes with a mask of which at least half is false:

    - ``Linear`` of the domain ``onnxtrain`` and its gradient by x skip what is false. They check that w is zero there.
    - ``LinearWeightGradient`` and ``LinearGradient`` compute dw where the mask is true; the rest is zero. They get the
      mask only where nothing reads dw but ``Where(mask, dw, 0)``, directly or through sums.

    Requires: types, and the shapes of weights; gradients that are not yet part of updates. Ensures: a sorted graph.
    """
    main = Builder(graph, graph.opset_imports[""])
    values = {str(value.name): value for value in (*graph.inputs, *graph.initializers.values())}
    for name, mask in list(graph.initializers.items()):
        weight = values.get(name.removesuffix(MASK)) if name.endswith(MASK) else None
        if weight is None or not _is_sparse(weight, mask):
            continue
        for node in [where for where, _ in mask.uses() if where.op_type == "Where"]:
            for layer in _layer_gradients(node, weight):
                _give(layer, mask)
        for layer, place in list(weight.uses()):
            if place == 1 and layer.graph is graph and _is(layer, "Linear"):
                _give(layer, mask)
                if layer.inputs[2] is None:  # workarounds: optional inputs of custom operators
                    layer.replace_input_with(2, main.constant(_zeros(layer, mask), weight.dtype).ir)


def _is_sparse(weight: ir.Value, mask: ir.Value) -> bool:
    sizes = dimensions(weight)
    if weight.dtype != ir.DataType.FLOAT or sizes is None or len(sizes) != 2 or dimensions(mask) != sizes:
        return False
    if mask.dtype != ir.DataType.BOOL or mask.const_value is None:
        return False
    kept = mask.const_value.numpy()
    return bool(np.count_nonzero(kept) <= (1 - LEAST_ZEROS) * kept.size)


def _layer_gradients(where: ir.Node, weight: ir.Value) -> Iterator[ir.Node]:
    """Yield the nodes whose gradient of the weight only this Where reads, if it sets the rest to zero."""
    waiting = [where.inputs[1]] if constant_number(where.inputs[2]) == 0 else []
    while waiting:
        gradient = waiting.pop()
        node = None if gradient is None else gradient.producer()
        if gradient is None or node is None or len(gradient.uses()) != 1 or gradient.is_graph_output():
            continue
        if not node.domain and node.op_type in ("Add", "Sum", "Identity"):
            waiting += node.inputs
        elif dimensions(gradient) == dimensions(weight) and gradient.dtype == weight.dtype:
            of_weight = _is(node, "LinearWeightGradient") and gradient is node.outputs[0]
            of_both = _is(node, "LinearGradient") and gradient is node.outputs[1] and node.inputs[1] is weight
            if of_weight or of_both:
                yield node


def _zeros(layer: ir.Node, mask: ir.Value) -> np.ndarray:
    """Return a bias of zeros for a layer whose weight has a constant mask."""
    kept = constant_array(mask)
    assert kept is not None
    return np.zeros(kept.shape[0 if layer.attributes.get_int("transB", 0) else 1])


def _give(layer: ir.Node, mask: ir.Value) -> None:
    place = _MASK_INPUT[layer.op_type]
    layer.resize_inputs(place + 1)
    layer.replace_input_with(place, mask)


def _is(node: ir.Node, operator: str) -> bool:
    return node.domain == ONNXTRAIN_DOMAIN and node.op_type == operator
