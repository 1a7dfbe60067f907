"""Random initialization of parameters, for a training that does not start from the file's weights."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from onnxtrain.graph.layers import Layer, layers
from onnxtrain.parameters.masks import matmul_weights
from onnxtrain.parameters.readers import read_through_identity


def fresh_values(model: ir.Model, parameters: Mapping[str, np.ndarray], seed: int) -> dict[str, np.ndarray]:
    """Sample new initial values of parameters.

    Source: K. He, X. Zhang, S. Ren, J. Sun, "Delving Deep into Rectifiers", ICCV 2015.
    """
    generator = np.random.default_rng(seed)
    names = [name for name in parameters if name in model.graph.initializers]
    weights = set(matmul_weights(model, names))
    found = {str(layer.weight.name): layer for layer in layers(model.graph)}
    values = {}
    for name, array in parameters.items():
        readers = read_through_identity(model.graph.initializers[name]) if name in names else []
        node, index = next(iter(readers), (None, 0))
        if array.ndim >= 2 and (name in weights or sum(size > 1 for size in array.shape) > 1 or node is None):
            deviation = math.sqrt(2 / max(_fan_in(found.get(name), node, array.shape), 1))
            values[name] = (deviation * generator.standard_normal(array.shape)).astype(array.dtype)
        else:
            values[name] = np.full(array.shape, 1.0 if _scales(node, index) else 0.0, dtype=array.dtype)
    return values


def _scales(node: ir.Node | None, index: int) -> bool:
    if node is None:
        return False
    return node.op_type == "Mul" or (index == 1 and node.op_type.endswith("Normalization"))


def _fan_in(layer: Layer | None, node: ir.Node | None, shape: tuple[int, ...]) -> int:
    """Return the fan-in of a weight: the number of inputs that an output sums over."""
    if layer is not None and layer.inputs is not None:
        convolves = layer.form.channels == 1
        return math.prod(size for axis, size in enumerate(shape) if axis == layer.inputs or (convolves and axis > 1))
    return shape[-1] if node is not None and node.op_type in ("LSTM", "GRU", "RNN") else shape[-2]
