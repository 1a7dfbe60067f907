"""Leave the second bias of recurrent layers alone where tf2onnx filled it with zeros.

ONNX's recurrent layers have a bias of the input and one of the state, in one tensor. Keras's LSTM has one, and tf2onnx
writes zeros for the other. Both would be trained, and their sum would take steps of twice the size.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff.rules.no_gradient import stopped
from onnxtrain.graph import Builder
from onnxtrain.graph.value import constant_array
from onnxtrain.parameters.exporters import gives

_BIAS: Final = 3
"""The input slot of the biases, [directions, 2 rows]."""


def stop_at_filled_biases(model: ir.Model) -> None:
    """Add StopGradient to a working copy where a recurrent layer reads a second bias of zeros, in place."""
    for node in list(model.graph):
        value = node.inputs[_BIAS] if node.op_type in ("LSTM", "GRU", "RNN") and len(node.inputs) > _BIAS else None
        if value is None or node.domain or not gives("joined biases", value.name or ""):
            continue
        array = constant_array(value)
        if array is None or array.ndim != 2:
            continue
        half = array.shape[1] // 2
        if np.any(array[:, half:]) or not np.any(array):
            continue
        op = Builder(model.graph, model.graph.opset_imports[""], before=node)
        first, second = op.several("Split", op.wrap(value), op.ints(half, half), outputs=2, axis=1)
        both = op.Concat(first, stopped(op, second), axis=1).with_shape(array.shape)
        node.replace_input_with(_BIAS, both.ir)
