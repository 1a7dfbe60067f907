"""States in 8 bits, which only kernels have."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.errors import OperatorError
from onnxtrain.ir.domains import ONNXTRAIN_DOMAIN
from onnxtrain.training_info.rounding import DECODE, ENCODE


def check_states(graph: ir.Graph) -> None:
    """Refuse states in 8 bits that are not inside the update of a kernel.

    Requires: a graph after the passes that may take states into updates. Ensures: it is as it was, without such states.

    Raises:
        OperatorError: There are such states.
    """
    for node in graph:
        if node.domain == ONNXTRAIN_DOMAIN and node.op_type in (DECODE, ENCODE):
            raise OperatorError(
                f"{node.op_type}: states in 8 bits are decoded and encoded by the native kernels, inside the update of "
                "their optimizer alone; take state_dtype='bfloat16', or leave it out, in graphs for any runtime and "
                "where something else reads a state."
            )
