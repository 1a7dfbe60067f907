"""Write out the default parameters of activation functions of recurrent layers."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.autodiff.rules.recurrent_activations import numbers_with_defaults
from onnxtrain.graph.clone import all_nodes

_RECURRENT = ("GRU", "LSTM", "RNN")
_KINDS = ("activation_alpha", "activation_beta")


def write_activation_defaults(model: ir.Model) -> None:
    """Write ``activation_alpha`` and ``activation_beta`` of LSTM, GRU and RNN out in full, in place.

    ONNX Runtime uses 0 for an omitted parameter of Affine, ScaledTanh or ThresholdedRelu; the standard has other
    defaults (workarounds: defaults of recurrent activations).

    Requires: nothing. Ensures: a value for every parameter of these functions; nodes without them are unchanged.
    """
    for node in all_nodes(model.graph):
        if node.domain or node.op_type not in _RECURRENT or "activations" not in node.attributes:
            continue
        given = [list(node.attributes[kind].as_floats()) if kind in node.attributes else [] for kind in _KINDS]
        found = numbers_with_defaults(node.attributes["activations"].as_strings(), *given)
        for kind, before, values in zip(_KINDS, given, found or given, strict=True):
            if len(values) > len(before):
                node.attributes[kind] = ir.AttrFloat32s(kind, values)
