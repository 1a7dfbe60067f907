"""Keep ONNX Runtime from taking the padding of a convolution's weight for padding of its input."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.graph.builder import Builder
from onnxtrain.graph.clone import all_nodes


def shield_padded_weights(model: ir.Model) -> None:
    """Let every Pad that a convolution reads as its weight compute its fill value, in place.

    The optimizer PadFusion of ONNX Runtime fuses a Pad with a constant fill of zero and the convolution that reads it,
    whichever of its inputs it is (workarounds: padded weights). The second gradient of a convolution with strides has
    such a Pad.

    Requires: a sorted main graph. Ensures: equal values; the graph stays sorted.
    """
    for node in all_nodes(model.graph):
        if node.op_type != "Conv" or node.domain or len(node.inputs) < 2:
            continue
        source = node.inputs[1]
        pad = None if source is None else source.producer()
        while pad is not None and (pad.op_type, pad.domain) == ("Transpose", ""):
            source = pad.inputs[0]
            pad = None if source is None else source.producer()
        if pad is None or (pad.op_type, pad.domain) != ("Pad", "") or pad.graph is None:
            continue
        if len(pad.inputs) > 2 and pad.inputs[2] is not None:
            continue
        data = pad.inputs[0]
        assert data is not None
        assert isinstance(pad.graph, ir.Graph)
        op = Builder(pad.graph, model.graph.opset_imports.get("", 1), before=pad)
        none = op.Slice(op.Reshape(op.wrap(data), op.ints(-1)), op.ints(0), op.ints(0))
        pad.resize_inputs(max(3, len(pad.inputs)))
        pad.replace_input_with(2, op.ReduceSum(none, keepdims=0).ir)  # zero
