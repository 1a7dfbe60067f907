"""Optimizers without a native kernel become their bodies; the others stay nodes."""

import onnx_ir as ir
import pytest
from onnx import parser

from onnxtrain.lowering.optimizer_bodies import lower_without_kernel
from onnxtrain.operators.nodes import has_kernel

GRAPH = """<ir_version: 10, opset_import: ["": 21, "onnxtrain": 1, "ai.onnx.preview.training": 1]>
    g (float R, int64 T, float[3] x, float[3] d, float[3] v, float[3] h) => (float[3] y, float[3] z)
    { y = onnxtrain.SSGD <measure = "log-sum"> (R, T, x, d)
      z, v2, h2 = ai.onnx.preview.training.Adam (R, T, x, d, v, h) }"""


@pytest.mark.parametrize("lacking", [(), ("SSGD",), ("SSGD", "Adam")])
def test_those_without_a_kernel_are_written(lacking, monkeypatch):
    monkeypatch.setattr(
        "onnxtrain.lowering.optimizer_bodies.has_kernel",
        lambda node: node.op_type not in lacking and has_kernel(node),
    )
    model = ir.from_proto(parser.parse_model(GRAPH))
    lower_without_kernel(model)
    left = [node.op_type for node in model.graph if node.domain]
    assert left == [name for name in ("SSGD", "Adam") if name not in lacking]
    assert len(model.graph) > 2 if lacking else len(model.graph) == 2
