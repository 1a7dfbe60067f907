"""The table of layers: where the weight of an operator is, and how it lies."""

import onnx_ir as ir
import pytest

from onnxtrain.graph.layers import Form, form_of, form_of_node, orientation, reads_transposed


@pytest.mark.parametrize(
    ("operator", "attributes", "form"),
    [
        ("MatMul", {}, Form(-1, -2, -1)),
        ("FusedMatMul", {"transB": 1}, Form(-2, -1, -1)),
        ("FusedMatMul", {"transBatchA": 1}, None),
        ("Gemm", {}, Form(1, 0, -1, bias=2)),
        ("Gemm", {"transB": 1}, Form(0, 1, -1, bias=2)),
        ("Gemm", {"transA": 1}, None),
        ("Linear", {"transB": 1}, Form(0, 1, -1, bias=2)),
        ("Conv", {"group": 2}, Form(0, 1, 1, bias=2, groups=2)),
        ("ConvTranspose", {}, Form(1, 0, 1, bias=2)),
        ("Relu", {}, None),
    ],
)
def test_forms(operator, attributes, form):
    assert form_of(operator, attributes) == form
    node = ir.node(operator, [ir.Value(name=name) for name in "xwb"], attributes)
    assert form_of_node(node) == form


@pytest.mark.parametrize("transposed", [False, True])
def test_a_gemm_reads_its_weight_as_its_attributes_say(transposed):
    node = ir.node("Gemm", [ir.Value(name="x"), ir.Value(name="w")], orientation(transposed))
    assert reads_transposed(node) is transposed
    assert not reads_transposed(node, 0)
