"""Small models around one optimizer node, and a session that runs their lowered graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
from onnx import helper

from onnxtrain.lowering.optimizer_bodies import lower_optimizers
from onnxtrain.operators import OPTIMIZERS


def model_of(
    name: str,
    inputs: Sequence[np.ndarray | np.generic],
    attributes: Mapping[str, Any],
    *,
    outputs: int,
    shapes: str = "static",
    skip: Sequence[int] = (),
) -> onnx.ModelProto:
    """A model of one node: inputs R, T, i0, i1, ...; outputs o0, o1, ...

    Args:
        shapes: Declared shapes of the inputs: "static", "dynamic" (ranks only) or "unknown".
        skip: Outputs that get an empty name.
    """
    schema = OPTIMIZERS[name].schema
    names = ["R", "T", *(f"i{k}" for k in range(len(inputs) - 2))]
    news = ["" if k in skip else f"o{k}" for k in range(outputs)]
    infos = []
    for label, array in zip(names, inputs, strict=True):
        kind = helper.np_dtype_to_tensor_dtype(array.dtype)
        shape: Sequence[Any] | None = array.shape
        if shapes != "static" and label not in ("R", "T"):
            shape = None if shapes == "unknown" else [f"{label}_{axis}" for axis in range(array.ndim)]
        infos.append(helper.make_tensor_value_info(label, kind, shape))
    graph = helper.make_graph(
        [helper.make_node(name, names, news, domain=schema.domain, name="update", **attributes)],
        "one optimizer",
        infos,
        [helper.make_empty_tensor_value_info(new) for new in news if new],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid(schema.domain, 1)], ir_version=8)


def lowered(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with bodies instead of its optimizers; ONNX's checker and inference must accept it."""
    proto = ir.to_proto(lower_optimizers(ir.from_proto(model)))
    assert all(node.domain == "" for node in proto.graph.node)
    assert {entry.domain for entry in proto.opset_import} == {""}
    onnx.shape_inference.infer_shapes(proto, check_type=True, strict_mode=True)
    if all(value.type.tensor_type.HasField("shape") for value in proto.graph.input):
        onnx.checker.check_model(proto)  # it refuses inputs of unknown rank
    return proto


def run(model: onnx.ModelProto, inputs: Sequence[np.ndarray | np.generic]) -> list[np.ndarray]:
    """The outputs of a model on ONNX Runtime."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    feeds = zip((value.name for value in session.get_inputs()), map(np.asarray, inputs), strict=True)
    return session.run(None, dict(feeds))
