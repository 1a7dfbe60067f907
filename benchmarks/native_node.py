"""A session of one node with a native kernel, on one thread, and the CPU time of a call."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnxruntime
from onnx import NodeProto, TensorProto, helper

import onnxtrain
from onnxtrain.graph.domains import ONNXTRAIN_DOMAIN


def session_of(
    node: NodeProto, feeds: Mapping[str, np.ndarray], weights: Sequence[TensorProto] = ()
) -> onnxruntime.InferenceSession:
    """Create a session whose inputs have the types and shapes of arrays; its results are float32."""
    given = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in feeds.items()
    ]
    results = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in node.output]
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(ONNXTRAIN_DOMAIN, 1)]
    model = helper.make_model(helper.make_graph([node], "node", given, results, weights), opset_imports=opsets)
    model.ir_version = 10
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.register_custom_ops_library(str(onnxtrain.custom_ops_library()))
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def seconds(call: Callable[[], object]) -> float:
    """CPU seconds of one call."""
    start = time.process_time()
    call()
    return max(time.process_time() - start, 1e-9)
