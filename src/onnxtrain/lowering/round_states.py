"""Round optimizer states in bfloat16 with standard operators, where no kernel does it.

bfloat16 has 8 significant bits, float32 has 24: between two neighbours of bfloat16, u apart, lie 2^16 numbers. With an
average such as ``H_new = 0.999 H + 0.001 G^2`` the new value is almost always nearer to the old one than u / 2: rounded
to nearest, H would never fall. So rounding is stochastic, to the lower neighbour t or the upper one t + u, such that
the expected value is the number:

    RoundStochastic(x) = sign(x) (t + u)  where (|x| - t) + r 2^-16 u >= u, else sign(x) t

with r, of 16 bits, drawn from (seed, count, index of the element) as in :mod:`onnxtrain.graph.prng`. Finite values stay
finite: above the largest bfloat16 they become the largest.

Source: S. Gupta et al., "Deep Learning with Limited Numerical Precision", ICML 2015.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxtrain.errors import OperatorError
from onnxtrain.graph import Builder, Value
from onnxtrain.graph.domains import ONNXTRAIN_DOMAIN
from onnxtrain.graph.prng import draw, upper_bits
from onnxtrain.graph.replace import remove_nodes, take_over
from onnxtrain.lowering.training_info.rounding import DECODE, ENCODE, OPERATOR

_LARGEST = np.float32((2 - 2.0**-7) * 2.0**127)
_TINY = np.float32(0.6 * 2.0**-133)
_STEP = np.float32(0.6 * 2.0**-7)
"""Relative and, with ``_TINY``, absolute increment that is nearer to u than to 0 or 2 u."""


def check_states(graph: ir.Graph) -> None:
    """Refuse states in 8 bits outside the update of a kernel.

    Requires: a graph after the passes that move states into updates. Ensures: it is unchanged and has no such states.

    Raises:
        OperatorError: A node decodes or encodes them.
    """
    for node in graph:
        if node.domain == ONNXTRAIN_DOMAIN and node.op_type in (DECODE, ENCODE):
            raise OperatorError(
                f"{node.op_type}: states in 8 bits are decoded and encoded by the native kernels, inside the update of "
                "their optimizer alone; give Precision(states='bfloat16'), or leave it out, in graphs for any runtime "
                "and where something else reads a state."
            )


def round_states(graph: ir.Graph) -> None:
    """Write RoundStochastic in standard operators, in place; inside an update the kernel does it.

    Requires: a sorted graph. Ensures: the same.

    Raises:
        OperatorError: The input of a node is not float32.
    """
    for node in list(graph):
        if (node.domain, node.op_type) != (ONNXTRAIN_DOMAIN, OPERATOR):
            continue
        op = Builder(graph, graph.opset_imports[""], before=node)
        op.scope = node.name or "round"
        x, count = (op.wrap(value) for value in node.inputs if value is not None)
        if x.dtype != ir.DataType.FLOAT:
            raise OperatorError(f"{OPERATOR}: x has type {x.dtype.name}; it must be float.")
        rounded = _rounded(op, x, count, node.attributes["seed"].as_int())
        old = node.outputs[0]
        old.dtype, old.shape = ir.DataType.BFLOAT16, x.ir.shape
        take_over(graph, {old: rounded.ir})
        remove_nodes(graph, [node])


def _rounded(op: Builder, x: Value, count: Value, seed: int) -> Value:
    r = op.reshape_like(op.cast(upper_bits(op, draw(op, seed, count, x), 16), ir.DataType.FLOAT), x)
    size = op.Abs(x)
    largest = op.constant(_LARGEST)
    nearest = op.Min(_nearest(op, size), largest)
    below = _nearest(op, nearest - _less_than_two_steps(op, nearest))
    t = op.Where(op.Greater(nearest, size), below, nearest)
    above = op.Min(_nearest(op, t + _less_than_two_steps(op, t)), largest)
    u = above - t
    rounded = op.Where(op.GreaterOrEqual((size - t) + r * (u * 2.0**-16), u), above, t)
    finite = op.LessOrEqual(size, op.constant(np.finfo(np.float32).max))
    rounded = op.Where(finite, rounded, size)
    return op.cast(op.Where(op.Less(x, op.scalar(0.0, x)), op.Neg(rounded), rounded), ir.DataType.BFLOAT16)


def _nearest(op: Builder, x: Value) -> Value:
    return op.cast(op.cast(x, ir.DataType.BFLOAT16), ir.DataType.FLOAT)


def _less_than_two_steps(op: Builder, x: Value) -> Value:
    return op.Max(op.Mul(x, op.constant(_STEP)), op.constant(_TINY))
