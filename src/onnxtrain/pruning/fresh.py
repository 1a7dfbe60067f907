"""Fresh weights: parameters drawn anew, for a training that does not start from those of the file."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from onnxtrain.weights.masks import matmul_weights
from onnxtrain.weights.readers import read_through_identity


def fresh_values(model: ir.Model, parameters: Mapping[str, np.ndarray], seed: int) -> dict[str, np.ndarray]:
    """New first values for parameters, drawn from their seed.

    Weights of products, and other tensors with several axes such as embeddings of positions, are normal with variance
    2 / fan-in (He's initialization). What scales is 1, whatever its shape, and what is added 0.

    Args:
        model: The model, which says how each parameter is used.
        parameters: The current values by name.
        seed: Of the generator.

    Returns:
        Values by name, of the types and shapes of the current ones.

    Source: K. He, X. Zhang, S. Ren, J. Sun, "Delving Deep into Rectifiers", ICCV 2015.
    """
    generator = np.random.default_rng(seed)
    names = [name for name in parameters if name in model.graph.initializers]
    weights = set(matmul_weights(model, names))
    values = {}
    for name, array in parameters.items():
        readers = read_through_identity(model.graph.initializers[name]) if name in names else []
        node, index = next(iter(readers), (None, 0))
        if array.ndim >= 2 and (name in weights or sum(size > 1 for size in array.shape) > 1 or node is None):
            deviation = math.sqrt(2 / max(_fan_in(node, array.shape), 1))
            values[name] = (deviation * generator.standard_normal(array.shape)).astype(array.dtype)
        else:
            values[name] = np.full(array.shape, 1.0 if _scales(node, index) else 0.0, dtype=array.dtype)
    return values


def _scales(node: ir.Node | None, index: int) -> bool:
    if node is None:
        return False
    return node.op_type == "Mul" or (index == 1 and node.op_type.endswith("Normalization"))


def _fan_in(node: ir.Node | None, shape: tuple[int, ...]) -> int:
    """Return the fan-in of a weight: the number of inputs that an output sums over."""
    if node is not None and node.op_type in ("Conv", "LSTM", "GRU", "RNN"):
        return math.prod(shape[1:]) if node.op_type == "Conv" else shape[-1]
    if node is not None and node.op_type == "ConvTranspose":
        return shape[0] * math.prod(shape[2:])
    if node is not None and node.op_type == "Gemm":
        transposed = node.attributes.get("transB")
        return shape[1] if transposed is not None and transposed.as_int() else shape[0]
    return shape[-2]
