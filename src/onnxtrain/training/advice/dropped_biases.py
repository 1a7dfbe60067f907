"""Biases that PyTorch's newer exporter left out of a file because they were zero."""

from __future__ import annotations

import re

import onnx_ir as ir

from onnxtrain.ir.clone import all_nodes
from onnxtrain.weights.buffers import is_weight
from onnxtrain.weights.names import CALL, module_of

_CALLED = r"target=torch\.ops\.aten\.(linear|layer_norm|addmm|conv\w*)\..*%p_\w*bias\b"

_BIASES = {"Gemm": 2, "Conv": 2, "ConvTranspose": 2, "LayerNormalization": 2}
"""Operators that read a bias, and at which input."""


def dropped_biases(model: ir.Model) -> tuple[str, ...]:
    """Name the biases that the exported program gave to layers that have none in the file.

    The exporter keeps the call that nodes were made from as metadata; where another tool has removed it, layer
    normalizations without a bias among others with one are named by their nodes.
    """
    calls: dict[str, list[ir.Node]] = {}
    norms: dict[bool, list[ir.Node]] = {True: [], False: []}
    for node in all_nodes(model.graph):
        call = node.metadata_props.get(CALL)
        if call is not None and re.search(_CALLED, call):
            calls.setdefault(call, []).append(node)
        elif call is None and node.op_type == "LayerNormalization" and not node.domain:
            norms[_has_bias(node)].append(node)
    found = dict.fromkeys(
        f"{module}.bias"
        for nodes in calls.values()
        if not any(map(_has_bias, nodes)) and any(node.op_type in (*_BIASES, "MatMul") for node in nodes)
        for module in [module_of(nodes[-1].name or "", nodes[-1].metadata_props)]
        if module
    )
    if norms[True]:
        found.update(dict.fromkeys(f"the bias of {node.name or node.outputs[0].name}" for node in norms[False]))
    return tuple(found)


def _has_bias(node: ir.Node) -> bool:
    if node.op_type == "Add":
        return any(map(is_weight, node.inputs))
    place = _BIASES.get(node.op_type)
    return place is not None and len(node.inputs) > place and node.inputs[place] is not None
