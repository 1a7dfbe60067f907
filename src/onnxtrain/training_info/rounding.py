"""Optimizer states of fewer bits than their parameters: what stands between them and the update."""

from __future__ import annotations

import zlib

import onnx_ir as ir

from onnxtrain.graph import Builder, Value
from onnxtrain.graph.domains import ONNXTRAIN_DOMAIN

OPERATOR = "RoundStochastic"
"""Of the domain ``onnxtrain``: float numbers and a count to bfloat16; see :mod:`onnxtrain.lowering.round_states`."""

BFLOAT16 = ir.DataType.BFLOAT16.numpy()


def widened(op: Builder, state: Value) -> Value:
    """A state as the update reads it."""
    if state.dtype != ir.DataType.BFLOAT16:
        return state
    return op.cast(state, ir.DataType.FLOAT).with_shape(state.shape)


def rounded(op: Builder, state: Value, new: Value, count: Value, seed: int) -> Value:
    """The new value of a state as it is kept; every state draws numbers of its own, which follow from its name."""
    if state.dtype != ir.DataType.BFLOAT16:
        return new
    own = zlib.crc32(state.name.encode(), seed % (1 << 32))
    (result,) = op.several(OPERATOR, new, count, outputs=1, domain=ONNXTRAIN_DOMAIN, seed=own)
    result.ir.dtype = ir.DataType.BFLOAT16
    return result.with_shape(state.shape)
