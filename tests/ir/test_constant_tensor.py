"""The tensors of constants."""

import numpy as np
import onnx_ir as ir
import pytest
from onnx import parser

from onnxtrain.graph.value import constant_tensor


def values(body: str) -> dict[str, ir.Value]:
    model = ir.from_proto(parser.parse_model(f'<ir_version: 10, opset_import: ["": 18]> {body}'))
    return {output.name: output for node in model.graph for output in node.outputs} | dict(
        model.graph.initializers.items()
    )


@pytest.mark.parametrize(
    "attribute", ["value = int64[2] {3, 4}", "value_ints = [3, 4]"], ids=["a tensor", "a list of numbers"]
)
def test_a_constant_holds_what_its_attribute_says(attribute):
    found = constant_tensor(values(f"f () => (int64[2] y) {{ y = Constant <{attribute}> () }}")["y"])
    np.testing.assert_array_equal(found.numpy(), [3, 4])
    assert found.name == "y"


def test_an_initializer_holds_its_tensor_and_a_computed_value_none():
    found = values("f (float[1] x) => (float[1] y) <float[1] w = {2}> { y = Mul(x, w) }")
    assert constant_tensor(found["w"]).numpy().item() == 2
    assert constant_tensor(found["y"]) is None
