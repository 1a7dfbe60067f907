"""LogSoftmax of the classes of every pixel: selection for the native kernel, and results."""

import numpy as np
import onnx_ir as ir
import pytest
from onnx import parser

from onnxtrain.lowering.lower import lower_graph
from onnxtrain.lowering.rules.kernels import LEAST_INNER, use_kernels
from onnxtrain.runtime.options import RuntimeOptions
from onnxtrain.runtime.step import create_session

X = np.random.default_rng(0).standard_normal((3, 5, 6, 7)).astype(np.float32) * 4


def model(shape: str = "N, 5, 6, 7", axis: int = 1, kind: str = "float"):
    return ir.from_proto(
        parser.parse_model(
            f'<ir_version: 10, opset_import: ["": 18]> f ({kind}[{shape}] x) => ({kind}[{shape}] y) '
            f"{{ y = LogSoftmax<axis = {axis}>(x) }}"
        )
    )


def domains(working: ir.Model) -> list[str]:
    use_kernels(working)
    return [node.domain for node in working.graph]


@pytest.mark.parametrize("axis", [1, -3, 0, 2])
def test_the_kernel_computes_the_same(axis):
    lowered = lower_graph(model(axis=axis), kernels=True)
    inner = int(np.prod(X.shape[axis % 4 + 1 :]))
    assert [node.domain for node in lowered.graph] == ["onnxtrain" if inner >= LEAST_INNER else ""]
    (y,) = create_session(lowered, RuntimeOptions(1), kernels=True).run(None, {"x": X})
    exact = X.astype(np.float64)
    exact -= exact.max(axis, keepdims=True)
    np.testing.assert_allclose(y, exact - np.log(np.exp(exact).sum(axis, keepdims=True)), atol=2e-6)


@pytest.mark.parametrize(
    "arguments", [("N, 5, 6, 7", -1), ("N, 5, H, 7", 1), ("N, 5, 3, 5", 1), ("N, 5", 1), ("N, 5, 6, 7", 1, "float16")]
)
def test_others_stay_standard(arguments):
    assert domains(model(*arguments)) == [""]
