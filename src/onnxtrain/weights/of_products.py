"""Which parameters are weights of products: what is pruned and sparsified unless a pattern says otherwise."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxtrain.ir.clone import subgraphs
from onnxtrain.ir.domains import MACHINE_LEARNING_DOMAIN, MICROSOFT_DOMAIN
from onnxtrain.ir.passes import RANDOM
from onnxtrain.ir.value import dimensions
from onnxtrain.weights.readers import REARRANGING, Functions, Reader, arrivals
from onnxtrain.weights.rule import is_lookup, is_product

_STANDARD = frozenset({"", MACHINE_LEARNING_DOMAIN, MICROSOFT_DOMAIN})

_REARRANGED = REARRANGING - {"Concat"}
"""Behind a Concat with data, as of a class token, lies data."""


def product_weights(model: ir.Model, names: Sequence[str]) -> list[str]:
    """The parameters that multiply data in products, convolutions and recurrent layers, or are embeddings.

    What reads a matrix or tensor decides, not its rank: a scale of shape [1, C, 1] is none, nor is a bias of shape
    [1, C]. A weight may be rearranged, normalized, masked or quantized before it is read. Where an operator is not
    known, tensors of at least two axes with several elements count as weights.

    Args:
        model: A working copy with shapes.
        names: Initializers of its main graph.

    Returns:
        Those of the names that are weights, in their order.
    """
    constant = _constants(model)
    return [name for name in names if _is_weight(model.graph.initializers[name], model.functions, constant)]


def _is_weight(value: ir.Value, functions: Functions, constant: set[ir.Value]) -> bool:
    if value.shape is not None and len(value.shape) < 2:
        return False
    if any(_weighs(reader, value) for reader in arrivals(value, functions, _REARRANGED)):
        return True
    # Behind arithmetic with other weights, as of weight normalization, only tensors and no scales.
    return _axes(value) >= 2 and any(
        _weighs(reader, value) for reader in _behind_arithmetic(value, functions, constant)
    )


def _weighs(reader: Reader, value: ir.Value) -> bool:
    if is_product(reader) or is_lookup(reader):
        return True
    return reader[0].domain not in _STANDARD and _axes(value) >= 2


def _axes(value: ir.Value) -> int:
    """Count the axes with more than one element."""
    return sum(size != 1 for size in dimensions(value) or ())


def _behind_arithmetic(value: ir.Value, functions: Functions, constant: set[ir.Value]) -> list[Reader]:
    found: list[Reader] = []
    seen: set[ir.Value] = set()
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if value in seen:
            continue
        seen.add(value)
        for reader in arrivals(value, functions, _REARRANGED):
            computed = [output for output in reader[0].outputs if output in constant]
            waiting += computed
            if not computed:
                found.append(reader)
    return found


def _constants(model: ir.Model) -> set[ir.Value]:
    """The values of the main graph that depend on initializers only, not on the inputs of the model."""
    found = {value for value in model.graph.initializers.values() if value not in model.graph.inputs}
    for node in model.graph:
        if not subgraphs(node) and node.op_type not in RANDOM and all(v is None or v in found for v in node.inputs):
            found.update(node.outputs)
    return found
