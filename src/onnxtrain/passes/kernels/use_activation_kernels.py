"""Compute Gelu by this project's own kernel, which takes one pass, as its gradient does; ONNX Runtime's takes three.

Only in working copies for sessions that load the native kernels.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.autodiff.fused import VERSION
from onnxtrain.ir.domains import MICROSOFT_DOMAIN, ONNXTRAIN_DOMAIN

_APPROXIMATED = {
    (MICROSOFT_DOMAIN, "Gelu"): "none",
    (MICROSOFT_DOMAIN, "FastGelu"): "tanh",
    ("", "Gelu"): None,  # an attribute
}


def use_activation_kernels(model: ir.Model) -> None:
    """Replace Gelu of float, exact or approximated by tanh, by the operator of the domain ``onnxtrain``, in place.

    Left alone are a Gelu with a bias, or behind an addition, with which ONNX Runtime fuses it.

    Requires: types. Ensures: the order of the nodes.
    """
    used = False
    for node in model.graph:
        if (node.domain, node.op_type) not in _APPROXIMATED or not _is_alone(node):
            continue
        approximate = _APPROXIMATED[node.domain, node.op_type]
        if approximate is not None:
            node.attributes["approximate"] = ir.AttrString("approximate", approximate)
        node.domain, node.op_type, node.version = ONNXTRAIN_DOMAIN, "Gelu", None
        used = True
    if used:
        model.graph.opset_imports.setdefault(ONNXTRAIN_DOMAIN, VERSION)


def _is_alone(node: ir.Node) -> bool:
    x = node.inputs[0]
    if x is None or x.dtype != ir.DataType.FLOAT or any(value is not None for value in node.inputs[1:]):
        return False
    producer = x.producer()
    return producer is None or producer.op_identifier() != ("", "Add", "")
