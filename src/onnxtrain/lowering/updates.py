"""Read the parameters of optimizer nodes: the tensors of each, and the nodes that computed its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import onnx_ir as ir

from onnxtrain.operators.schema import OptimizerSchema

_TYPES = (ir.DataType.FLOAT, ir.DataType.DOUBLE)


class Variable(NamedTuple):
    """One parameter of an optimizer node.

    Attributes:
        inputs: X, G, and the states; states in 8 bits have their scales before them.
        outputs: The new X, and the new states; states in 8 bits have their scales behind them.
        mask: False where the gradient is zero; ``None`` for no mask.
        seeds: Seeds of the stochastic rounding of each low-bit state; empty if states have X's type.
        blockwise: True if low-bit states are 8-bit with scales; otherwise they are bfloat16.
        parameter_seed: Seed of the rounding of an X in bfloat16.
    """

    inputs: tuple[ir.Value, ...]
    outputs: tuple[ir.Value, ...]
    mask: ir.Value | None = None
    seeds: tuple[int, ...] = ()
    blockwise: bool = False
    parameter_seed: int | None = None


def variables_of(node: ir.Node, schema: OptimizerSchema) -> list[Variable] | None:
    """Return the parameters of an optimizer node; ``None`` where the kernels cannot update them."""
    inputs = [value for value in node.inputs if value is not None]
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    groups = 2 + len(schema.used_states(schema.complete(attributes)))
    count = (len(inputs) - 2) // groups
    if len(inputs) < len(node.inputs) or len(node.outputs) != count * (groups - 1):
        return None
    if any(value.dtype not in _TYPES for value in inputs[2 : 2 + count]):
        return None
    return [Variable(tuple(inputs[2 + i :: count]), tuple(node.outputs[i::count])) for i in range(count)]


def held_in_bfloat16(x: ir.Value) -> ir.Value | None:
    """Return the bfloat16 value that a parameter is the float copy of, or ``None``."""
    cast = x.producer()
    if cast is None or (cast.domain, cast.op_type) != ("", "Cast"):
        return None
    held = cast.inputs[0]
    return held if held is not None and held.dtype == ir.DataType.BFLOAT16 else None


def without_factor(variables: Sequence[Variable]) -> tuple[ir.Value | None, list[Variable], list[ir.Node]]:
    """Return the scalar that multiplies all gradients, the gradients before it, and the nodes that multiply."""
    nodes = [made_for_update(variable.inputs[1], "Mul") for variable in variables]
    factors = {None if node is None else node.inputs[1] for node in nodes}
    factor = next(iter(factors)) if len(factors) == 1 else None
    if factor is None or factor.shape is None or len(factor.shape) != 0:
        return None, list(variables), []
    found = [node for node in nodes if node is not None]
    return factor, [with_gradient(*pair) for pair in zip(variables, found, strict=True)], found


def made_for_update(gradient: ir.Value, operator: str, domain: str = "") -> ir.Node | None:
    """Return the producer of a gradient if it is this operator and only the update reads its result."""
    node = gradient.producer()
    if node is None or node.domain != domain or node.op_type != operator or gradient.is_graph_output():
        return None
    return node if len(gradient.uses()) == 1 else None


def with_gradient(variable: Variable, node: ir.Node, *, slot: int = 0, mask: ir.Value | None = None) -> Variable:
    """Return the variable with its gradient replaced by an input of the node that computed it."""
    gradient = node.inputs[slot]
    assert gradient is not None
    inputs = (variable.inputs[0], gradient, *variable.inputs[2:])
    return variable._replace(inputs=inputs, mask=variable.mask if mask is None else mask)
