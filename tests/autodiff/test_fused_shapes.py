"""Fused operators on tensors of known rank and unknown sizes."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
from onnx import parser

from autodiff.case import normal
from onnxtrain.runtime.native import custom_ops_library, kernels_available

pytestmark = pytest.mark.skipif(not kernels_available(), reason="the native kernels are not built")

MODEL = """
    <ir_version: 10, opset_import: ["" : 20, "onnxtrain" : 1]>
    unknown (SHAPE a, SHAPE b) => (int64[3] sizes)
    {
        made = onnxtrain.OPERATOR(a, b)
        sizes = Shape(made)
    }
"""


@pytest.mark.parametrize("shape", ["float[?,?,4]", "float[n,?,4]", "float[n,m,4]", "float[2,3,4]"])
@pytest.mark.parametrize("operator", ["SoftmaxGradient", "GeluGradient"])
def test_axes_that_the_runtime_does_not_know_stay_unknown(operator: str, shape: str) -> None:
    """ONNX Runtime would read the size of an unnamed axis as -1, and fold shapes with it when it loads a model."""
    model = parser.parse_model(MODEL.replace("OPERATOR", operator).replace("SHAPE", shape))
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(str(custom_ops_library()))
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    feeds = {"a": normal(2, 3, 4).astype(np.float32), "b": normal(2, 3, 4, seed=1).astype(np.float32)}
    (sizes,) = session.run(None, feeds)
    assert sizes.tolist() == [2, 3, 4]
